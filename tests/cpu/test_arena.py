"""The arena: contents stay, pages are kept and moved, and nothing that torch does with memory notices."""

from __future__ import annotations

import copy
import errno
import functools
import gc
import json
import os
import platform
import random
import re
import resource
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import spillway
from spillway.cli import main
from spillway.doctor import on_torch
from spillway.engines.blocks.trace import AllocationTrace, ArenaTrace
from spillway.errors import NativeError
from spillway.internals.private import fresh_storage
from spillway.native import arena, library
from spillway.native.arena import Arena

KiB, MiB = 1 << 10, 1 << 20
RUNS = textwrap.dedent(
    """
    import torch, warnings
    import spillway
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with spillway.manage(model, optimizer, budget="5MiB", method="lru") as memory:
        for _ in range(2):
            with memory.step(torch.ones(512, 256)):
                model(torch.ones(512, 256)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    print("peak", memory.history[-1].peak_bytes <= 5 << 20)
    """
)


@pytest.fixture
def served() -> Iterator[Arena]:
    if not library.wanted():
        pytest.skip("SPILLWAY_NATIVE=0")
    gc.collect()
    one = Arena()
    arena.trim()
    arena.reset_peaks()
    yield one
    one.release()


def filled(nbytes: int, value: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8).fill_(value)


def jumble(turns: int, seed: int) -> int:
    """Allocate, fill, check and free at random; how many had another content than they were given."""
    pick, wrong = random.Random(seed), 0
    held: list[tuple[torch.Tensor, int]] = []
    for _ in range(turns):
        while held and sum(len(tensor) for tensor, _ in held) > pick.uniform(16, 48) * MiB:
            tensor, value = held.pop(pick.randrange(len(held)))
            wrong += not bool((tensor == value).all())
        value = pick.randrange(256)
        held.append((filled(int(4 * KiB * 2 ** pick.uniform(0, 11)), value), value))
    return wrong + sum(not bool((tensor == value).all()) for tensor, value in held)


@pytest.mark.long
def test_contents_stay_and_no_more_is_resident_than_was_used_at_once(served: Arena) -> None:
    before = arena.counts()
    assert jumble(3000, 0) == 0
    after = arena.counts()
    assert after.collected > before.collected
    assert after.peak_resident <= after.peak_live
    assert after.moved > before.moved
    twice = after.faulted - before.faulted - after.peak_resident
    assert twice <= (after.moved - before.moved) / 16  # where pages lay in many short mappings (rule 3)


@pytest.mark.long
def test_pages_in_short_mappings_are_faulted_in_anew_and_not_moved_one_by_one() -> None:
    """In a process of its own, whose addresses nobody has used before."""
    if not library.wanted():
        pytest.skip("SPILLWAY_NATIVE=0")
    script = """
        from tests.cpu.test_arena import *
        one = Arena()
        kept = [filled(40 * KiB, 1) for _ in range(512)]
        del kept[::2]
        begun = arena.counts()
        large = filled(10 * MiB, 2)
        behind = filled(64 * KiB, 3)  # so that it cannot be made longer
        scattered = arena.counts()
        print(scattered.moves - begun.moves, scattered.collected - begun.collected)
        del large
        larger = filled(12 * MiB, 4)
        after = arena.counts()
        print(after.moves - scattered.moves, (after.faulted - scattered.faulted) // MiB)
        print(after.resident <= scattered.resident + 2 * MiB)
        print(all(bool((one == value).all()) for one, value in [(larger, 4), (behind, 3), *((one, 1) for one in kept)]))
        del larger
        again = filled(13 * MiB, 5)
        print(arena.counts().moves - after.moves, bool((again == 5).all()))  # it is one mapping now
    """
    assert ran(script).split() == ["256", "1", "0", "12", "True", "True", "0", "True"]


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of `mremap` is that of x86-64")
@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOMEM])
def test_where_pages_cannot_be_moved_they_are_given_back(error: int) -> None:
    script = """
        import ctypes, struct, sys
        from tests.cpu.test_arena import *
        one = Arena()
        wrong = jumble(300, 1)
        moved = arena.counts().moves
        # A filter of the system's calls: mremap (25) fails with this error, everything else is allowed.
        rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 25), (0x06, 0, 0, 0x50000 | int(sys.argv[1])), (0x06, 0, 0, 0x7FFF0000)]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
        program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0
        wrong += jumble(300, 2)
        counts = arena.counts()
        print(wrong, moved > 0, counts.moves == moved, counts.peak_resident <= counts.peak_live)
    """
    assert ran(script, str(error)).split() == ["0", "True", "True", "True"]


@pytest.mark.long
def test_what_a_failed_move_leaves_unmapped_is_nobodys_until_somebody_else_maps_it() -> None:
    if not library.wanted():
        pytest.skip("SPILLWAY_NATIVE=0")
    script = """
        import ctypes
        from tests.cpu.test_arena import *
        one = Arena()
        tensors = [filled(MiB, value) for value in range(9)]
        begin = tensors[0].data_ptr()
        del tensors[1::2]
        limit = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, limit[1]))  # below what is mapped: the move fails half-way
        refused = refusal(lambda: torch.empty(2 * MiB, dtype=torch.uint8))
        resource.setrlimit(resource.RLIMIT_AS, limit)
        maps = sorted(tuple(int(end, 16) for end in line.split()[0].split("-")) for line in open("/proc/self/maps"))
        ends = [end for (_, end), (later, _) in zip(maps, maps[1:]) if begin <= end < later < begin + 16 * MiB]
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        there = libc.mmap(ctypes.c_void_p(ends[0]), ctypes.c_size_t(MiB), 3, 0x100022, -1, ctypes.c_long(0))  # theirs
        ctypes.memset(there, 77, MiB)
        more = [filled(MiB, value) for value in range(40)]
        whole = all(bool((tensor == 2 * value).all()) for value, tensor in enumerate(tensors))
        whole = whole and all(bool((tensor == value).all()) for value, tensor in enumerate(more))
        print("memory" in refused, there == ends[0], one.owns(there), whole, set(ctypes.string_at(there, MiB)))
    """
    assert ran(script).split() == ["True", "True", "False", "True", "{77}"]


def ran(script: str, *arguments: str, **environment: str) -> str:
    """What a process prints that runs this."""
    done = started(script, *arguments, **environment)
    said, wrong = done.communicate(timeout=300)
    assert done.returncode == 0, wrong
    return said


def started(script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments], env=os.environ | environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.long
def test_threads_share_it(served: Arena) -> None:
    wrong: list[int] = []
    threads = [threading.Thread(target=lambda seed=seed: wrong.append(jumble(300, seed))) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0, 0, 0]


def test_a_forked_child_has_pages_of_its_own(served: Arena) -> None:
    kept = filled(MiB, 7)
    freed = filled(MiB, 8)
    del freed
    child = os.fork()
    if child == 0:
        fine = bool((kept == 7).all()) and jumble(50, 3) == 0
        kept.fill_(9)
        os._exit(0 if fine else 1)
    assert jumble(50, 4) == 0
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bool((kept == 7).all())


def test_what_torch_and_others_do_with_memory_works(served: Arena, tmp_path: Path) -> None:
    tensor = filled(MiB, 1)
    assert served.owns(tensor.data_ptr())
    seen = tensor.numpy()
    del tensor
    gc.collect()
    jumble(50, 5)
    assert bool((seen == 1).all())
    grown = filled(64 * KiB, 2)
    grown.resize_(MiB)[64 * KiB :] = 3
    assert grown.untyped_storage().nbytes() == MiB
    assert int(grown.sum()) == 2 * 64 * KiB + 3 * (MiB - 64 * KiB)
    shared = filled(MiB, 4).share_memory_()
    assert not served.owns(shared.data_ptr())
    torch.save(grown, tmp_path / "saved.pt")
    assert torch.equal(torch.load(tmp_path / "saved.pt"), grown)
    given = torch.from_dlpack(numpy.full(MiB, 5, dtype=numpy.uint8))
    assert bool((given.clone() == 5).all())
    assert served.owns(fresh_storage(MiB).data_ptr())


def test_what_is_small_and_what_is_larger_than_the_range_is_torchs_own(served: Arena) -> None:
    assert not served.owns(torch.empty(KiB).data_ptr())
    with pytest.raises(RuntimeError, match=r"can't allocate memory|not enough memory"):
        torch.empty(1 << 50, dtype=torch.uint8)


def test_tensors_outlive_the_last_holder_and_the_free_pages_go_back(served: Arena) -> None:
    other = Arena()
    kept, freed = filled(MiB, 1), filled(8 * MiB, 2)
    served.release()
    del freed
    assert served.owns(filled(MiB, 3).data_ptr())
    other.release()
    counts = arena.counts()
    assert counts.resident == counts.live
    assert not served.owns(filled(MiB, 3).data_ptr())
    assert bool((kept == 1).all())


@pytest.mark.long
def test_tensors_outlive_the_interpreter() -> None:
    script = """
        import builtins, torch
        from spillway.native.arena import Arena
        builtins.held = (Arena(), torch.ones(1 << 20), torch.ones(1 << 20).numpy())
        print("done")
    """
    assert ran(script) == "done\n"


def test_the_profiler_hears_of_every_block_as_without(served: Arena) -> None:
    def heard() -> list[int]:
        with torch.profiler.profile(profile_memory=True) as profile:
            tensor = torch.ones(256, 1024)
            (tensor @ tensor.T).relu().sum()
            del tensor
        return sorted(event.cpu_memory_usage for event in profile.events() if event.cpu_memory_usage)

    with_it = heard()
    served.release()
    assert with_it == heard()
    assert with_it


def test_the_profiler_takes_no_block_for_one_that_lay_there_before(served: Arena) -> None:
    def heard(act: Callable[[], object]) -> int:
        with torch.profiler.profile(profile_memory=True) as profile:
            act()
        return sum(event.cpu_memory_usage for event in profile.events())

    held: list[torch.Tensor] = []
    assert heard(lambda: held.append(torch.empty(MiB, dtype=torch.uint8))) == MiB
    address = held.pop().data_ptr()
    held.append(torch.empty(MiB, dtype=torch.uint8))
    assert held[0].data_ptr() == address
    assert heard(held.clear) == 0


@pytest.mark.long
def test_a_session_takes_no_page_twice(served: Arena) -> None:
    others = arena.counts().live
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(16)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    faults: list[int] = []
    with spillway.manage(model, optimizer, budget="24MiB", method="lru") as memory:
        for _ in range(8):
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            with memory.step(torch.ones(1024, 512)):
                model(torch.ones(1024, 512)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    assert memory.history[-1].bytes_out > 8 * MiB
    assert max(faults[4:]) < 1000, faults
    # What one op takes inside, a copy of the expanded gradient of the sum, for a product, is within the budget.
    assert arena.counts().peak_resident <= others + 24 * MiB + 128 * KiB


@pytest.mark.long
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"SPILLWAY_NATIVE": "0"}, "SPILLWAY_NATIVE=0 says so."),
        ({"CXX": "/nowhere/c++"}, "there is no C++ compiler"),
        ({"CXX": "false"}, "false ended with 1"),
        ({"XDG_CACHE_HOME": "/proc"}, "cannot be written"),
    ],
)
def test_without_the_native_part_sessions_run_and_say_so_once(
    environment: dict[str, str], said: str, tmp_path: Path
) -> None:
    done = started(RUNS + RUNS, **{"XDG_CACHE_HOME": str(tmp_path), **environment})
    printed, warned = done.communicate(timeout=300)
    assert printed == "peak True\n" * 2, warned
    assert warned.count("without its native part") == 1
    assert said in warned


@pytest.mark.long
def test_a_library_that_does_not_load_is_named(tmp_path: Path) -> None:
    where = ran(
        "from spillway.native import library; print(library.library_path())", XDG_CACHE_HOME=str(tmp_path)
    ).strip()
    Path(where).parent.mkdir(parents=True)
    Path(where).write_bytes(b"no library")
    done = started(RUNS, XDG_CACHE_HOME=str(tmp_path), SPILLWAY_NATIVE="arena")
    printed, warned = done.communicate(timeout=300)
    assert printed == "peak True\n"
    assert "does not load" in warned
    assert "Remove it" in warned


COMPILES = """
#!{python} -IS
import shutil, sys, time
from pathlib import Path

arguments, folder = sys.argv[1:], Path({folder!r})
part = "hook" if any(one.endswith("hook.cpp") for one in arguments) else "arena"

def told(what):
    file = folder / f"{{what}}-{{part}}"
    return len(file.read_text()) if file.exists() else 0

(folder / f"began-{{part}}").open("a").write("x")
while told("came") < 2 and told("began") < 2:  # for as long as the other process is not there
    time.sleep(0.05)
shutil.copy({libraries!r}[part], arguments[arguments.index("-o") + 1])
""".lstrip()
"""A compiler that has everything ready, and takes until both processes want it."""

COMES_TO_THE_LOCK = """
import fcntl, os
from pathlib import Path

def flock(file, how, flock=fcntl.flock):
    part = "hook" if Path(file.name).name.startswith("hook") else "arena"
    with open(os.path.join(os.environ["CAME"], f"came-{part}"), "a") as came:
        came.write("x")
    return flock(file, how)

fcntl.flock = flock
"""


@pytest.mark.long
def test_two_processes_compile_once(tmp_path: Path) -> None:
    if not library.wanted(library.HOOK):
        pytest.skip(f"SPILLWAY_NATIVE={os.environ['SPILLWAY_NATIVE']}")
    libraries = {part.name: str(library.build(part)) for part in library.PARTS}
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILES.format(python=sys.executable, folder=str(tmp_path), libraries=libraries))
    compiler.chmod(0o700)
    environment = {"XDG_CACHE_HOME": str(tmp_path), "CXX": str(compiler), "CAME": str(tmp_path)}
    both = [started(COMES_TO_THE_LOCK + RUNS, **environment) for _ in range(2)]
    said = [one.communicate(timeout=600) for one in both]
    assert [printed for printed, _ in said] == ["peak True\n"] * 2
    for part in library.PARTS:
        assert sum(warned.count(f"compiling the native {part.name}") for _, warned in said) == 1
        assert (tmp_path / f"came-{part.name}").read_text() == "xx"
    assert len(list((tmp_path / "spillway" / "native").glob("*.so"))) == len(library.PARTS)


@pytest.mark.long
def test_build_says_where_the_library_lies_and_why_there_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "PARTS", (library.ARENA,))  # the other takes a while
    with pytest.raises(SystemExit, match="0"):
        main(["build", "--json"])
    assert all(Path(made).is_file() for made in json.loads(capsys.readouterr().out).values())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(SystemExit, match="1"):
        main(["build"])
    said = r"spillway: \S*false ended with 1: it said nothing\.\n"
    assert re.fullmatch(said, capsys.readouterr().err.splitlines(True)[-2])
    monkeypatch.setenv("CXX", "nowhere++")
    with pytest.raises(SystemExit, match="1"):
        main(["build"])
    assert "CXX names nowhere++, which is not there." in capsys.readouterr().err


def test_the_doctor_says_why_there_is_no_native_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_opened", functools.cache(lambda: library.load.__wrapped__()))
    monkeypatch.setenv("SPILLWAY_NATIVE", "0")
    (problem,) = on_torch.native().problems
    assert "SPILLWAY_NATIVE=0" in problem.what
    assert not problem.fatal


def test_its_traces_tell_what_the_profiler_tells(served: Arena) -> None:
    model = torch.nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters())
    before, foreign = filled(MiB, 1), torch.from_numpy(numpy.ones(MiB, dtype=numpy.uint8))
    known = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in (before, foreign)}
    traces = [ArenaTrace(known), AllocationTrace(known)]
    held = []

    def mark() -> None:
        for trace in traces:
            trace.mark()

    mark()
    for number in range(3):
        loss = model(torch.ones(8, 32 + number, 64)).square().sum()
        mark()
        loss.backward()
        optimizer.step()
        mark()
        held.append(
            [copy.deepcopy(loss.detach()), torch.UntypedStorage(100 << 10), torch.UntypedStorage(8, device="cpu")]
        )
        if number == 0:
            for trace in traces:
                trace.died(foreign.data_ptr(), MiB)
        if number == 1:
            (gone,) = [tensor.data_ptr() for tensor in [before]]
            del before
            traces[1].died(gone, MiB)  # which the allocator hears by itself
            held.pop(0)
    counted, heard = (trace.stop() for trace in traces)
    assert counted == heard
    assert [window.level for window in counted][-1] < 0
    assert traces[0].stop() == counted


def test_a_trace_is_told_its_level_within_a_backward(served: Arena) -> None:
    leaf, levels = torch.ones(MiB, requires_grad=True), []
    trace = ArenaTrace({})
    trace.mark()
    middle = leaf.exp()
    middle.register_hook(lambda _: levels.append(trace.level()))
    middle.sum().backward()
    levels.append(trace.level())
    assert levels == [4 * MiB + 8, 8 * MiB]  # two numbers; the gradient of the leaf
    assert trace.stop()[0].peak >= levels[1]


def test_a_thread_in_a_step_of_its_own_counts_for_that_alone(served: Arena) -> None:
    trace, others = ArenaTrace({}), []

    def another(own: bool) -> None:
        mine = ArenaTrace({}) if own else None
        others.append((filled(MiB, 1), filled(100, 1), mine and mine.level()))

    for own in (True, False):
        thread = threading.Thread(target=another, args=(own,))
        thread.start()
        thread.join()
        others.append((trace.level(),))
    assert [told[-1] for told in others] == [MiB + 100, 0, None, MiB + 100]
    others.clear()
    assert trace.level() == 0


def test_a_thread_in_a_step_that_is_watched_op_by_op_counts_for_no_trace(served: Arena, tmp_path: Path) -> None:
    trace, memory, others = ArenaTrace({}), arena.OpMemory(tmp_path), []

    def another() -> None:
        memory.begin(10 * MiB)
        others.append(filled(MiB, 1))
        memory.end()
        others.append(filled(100, 1))

    thread = threading.Thread(target=another)
    thread.start()
    thread.join()
    assert trace.level() == 100
    others.clear()
    assert trace.level() == 0
    memory.close()


def test_traces_are_found_again_when_they_die(served: Arena) -> None:
    traces = [arena.Trace({}) for _ in range(32)]
    with pytest.raises(NativeError, match="too many"):
        arena.Trace({})
    del traces[3]
    trace = arena.Trace({})
    held = torch.ones(3)
    assert trace.since() == (12, 12)
    del held
    assert trace.since() == (0, 12)
    assert trace.since() == (0, 0)


def refusal(make: Callable[[], Any]) -> str:
    with pytest.raises((TypeError, RuntimeError)) as caught:
        make()
    return str(caught.value)


def test_storages_are_born_in_it_and_as_torch_makes_them_when_it_is_over(served: Arena) -> None:
    for made in (torch.UntypedStorage(MiB), torch.UntypedStorage(MiB, device="cpu"), torch.UntypedStorage([1, 2])):
        assert served.owns(made.data_ptr()) == (made.nbytes() == MiB)
        assert copy.deepcopy(made).nbytes() == made.nbytes()
    assert torch.UntypedStorage(8, device="meta").device.type == "meta"
    wrong: list[Callable[[], Any]] = [
        lambda: torch.UntypedStorage(8, divice="cpu"), lambda: torch.UntypedStorage(-1),
        lambda: torch.UntypedStorage(1 << 60), lambda: torch.UntypedStorage(8, device="nowhere"),
    ]  # fmt: skip
    said = [*map(refusal, wrong)]
    served.release()
    assert said == [*map(refusal, wrong)]
    assert "__new__" not in vars(torch.UntypedStorage)
    assert not served.owns(torch.UntypedStorage(MiB).data_ptr())
