"""The arena for CUDA memory, against a driver that checks every call (`fake_cuda_driver.cpp`)."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
import textwrap
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, final

import pytest
import torch

from spillway.doctor.on_torch import addressing
from spillway.engines.tensors.devices import device_of
from spillway.errors import DeviceFullError, ModelError, NativeError
from spillway.native import library
from spillway.native.device_arena import DeviceArena
from tests.cpu.forks import said_by_a_child
from tests.shared import FULL_AUDIT

KiB, MiB = 1 << 10, 1 << 20
CHUNK: Final = 64 * KiB
STREAMS: Final = (0, 8, 16)
CALLS: Final = (
    "cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate", "cuMemRelease",
    "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemcpyAsync", "cuStreamWaitEvent", "cuEventCreate", "cuEventRecord",
    "cuEventQuery", "cuEventSynchronize", "cuStreamSynchronize",
)  # fmt: skip


pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver without a device, compiled."""
    if not library.wanted():
        pytest.skip("SPILLWAY_NATIVE=0")
    found = library.compiler()
    if found is None:
        pytest.skip("there is no C++ compiler")
    made = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = Path(__file__).with_name("fake_cuda_driver.cpp")
    subprocess.run([found, "-std=c++20", "-O2", "-fPIC", "-shared", str(source), "-o", str(made)], check=True)
    return made


@final
class Fake:
    """The driver, as a program and its kernels use it."""

    def __init__(self, path: str, *, device: int = 64 * MiB, host: int = 64 * MiB, hosts: int = 2) -> None:
        self.calls = calls = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64
        calls.fake_configure.argtypes = [size, size, size, ctypes.c_int, ctypes.c_uint]
        calls.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_double]
        calls.fake_called.restype, calls.fake_wrong.restype = size, ctypes.c_char_p
        calls.fake_launch.argtypes = [pointer, ctypes.c_int, number, size, number]
        calls.fake_wait.argtypes = [pointer, pointer]
        calls.fake_there.argtypes, calls.fake_on_host.argtypes = [number, size], [number]
        calls.fake_configure(CHUNK, device, host, hosts, 1)

    def wrong(self) -> tuple[int, str]:
        """How many checks failed, and the first."""
        times = ctypes.c_size_t(0)
        first: bytes = self.calls.fake_wrong(ctypes.byref(times))
        return times.value, first.decode()

    def state(self) -> dict[str, int]:
        told = (ctypes.c_size_t * 6)()
        self.calls.fake_state(told)
        return dict(zip(("device", "host", "reserved", "mapped", "work", "injected"), told, strict=True))


@final
class Program:
    """Random work of several streams, with what every block has to hold."""

    def __init__(
        self, fake: Fake, arena: DeviceArena, seed: int, limit: int, *, packs: bool, whole: bool
    ) -> None:  # fmt: skip
        self.fake, self.arena, self.dice = fake, arena, random.Random(seed)
        self.limit, self.packs, self.whole = limit, packs, whole
        self.blocks: dict[int, tuple[int, int, int]] = {}
        """By address: bytes, value, stream."""
        self.seen: Counter[str] = Counter()

    def turn(self) -> None:
        does = self.dice.choices(
            (self.take, self.give, self.read, self.share, self.page_out, self.page_in, self.arena.trim),
            (36, 30, 6, 20, 4, 4, 0.1),
        )[0]
        self.seen[does.__name__] += 1
        does()
        if self.dice.random() < 0.15:
            self.fake.calls.fake_advance()

    def take(self) -> None:
        large = self.dice.random() < 0.6
        nbytes = 8 * self.dice.randint(1, (2 * MiB if large else 24 * KiB) // 8)
        stream = self.dice.choice(STREAMS)
        try:
            address = self.arena.take(nbytes, stream)
        except DeviceFullError:
            counts, needed = self.arena.counts(), -(-nbytes // CHUNK) * CHUNK
            if self.whole and counts.live + needed <= self.limit:
                raise AssertionError(f"{nbytes} were refused with {counts}") from None
            self.seen["full"] += 1
            return
        assert address % 512 == 0
        value = self.dice.getrandbits(40) << 20
        self.blocks[address] = (nbytes, value, stream)
        self.fake.calls.fake_launch(stream, 1, address, nbytes, value)

    def _one(self) -> int | None:
        return self.dice.choice(list(self.blocks)) if self.blocks else None

    def give(self) -> None:
        if (address := self._one()) is not None:
            self.read_at(address, self.blocks[address][2])
            del self.blocks[address]
            assert self.arena.give(address)
            assert not self.arena.give(address)

    def read(self) -> None:
        if (address := self._one()) is not None:
            self.read_at(address, self.blocks[address][2])

    def read_at(self, address: int, stream: int) -> None:
        nbytes, value, _ = self.blocks[address]
        self.fake.calls.fake_launch(stream, 0, address, nbytes, value)

    def share(self) -> None:
        """Another stream waits for the first, and reads."""
        if (address := self._one()) is not None:
            other = self.dice.choice(STREAMS)
            assert self.arena.used_by(address, other)
            self.fake.calls.fake_wait(other, self.blocks[address][2])
            self.read_at(address, other)

    def page_out(self) -> None:
        self.page(self.arena.page_out)

    def page_in(self) -> None:
        self.page(self.arena.page_in)

    def page(self, way: Any) -> None:
        if (address := self._one()) is None:
            return
        try:
            done = way(address, self.blocks[address][2])
            small = self.packs and self.blocks[address][0] <= CHUNK // 2
            assert not self.whole or done is not small or way == self.arena.page_in
            self.seen["on host"] += done and bool(self.fake.calls.fake_on_host(address))
        except (DeviceFullError, NativeError) as error:
            self.seen[type(error).__name__] += 1
            if not self.fake.calls.fake_there(address, self.blocks[address][0]):
                self.seen["lost"] += 1
                del self.blocks[address]
                self.arena.give(address)

    def end(self) -> None:
        for address in list(self.blocks):
            self.read_at(address, self.blocks[address][2])
            del self.blocks[address]
            self.arena.give(address)
        self.arena.trim()


def play(path: str, turns: int, seed: int, packs: bool = True, limit: int = 0, failing: str = "") -> None:
    """What a child of its own does, as there is one arena and one driver in a process. Prints what it saw."""
    fake = Fake(path)
    arena = DeviceArena(driver=path, packs=packs, limit=limit)
    often = failing in ("cuMemMap", "cuMemCreate", "cuMemRelease", "cuMemUnmap", "cuEventQuery")
    fake.calls.fake_fail(failing.encode(), 0.03 if often else 0.2)
    program = Program(fake, arena, seed, limit or 64 * MiB, packs=packs, whole=not failing)
    for _ in range(turns):
        program.turn()
        counts = arena.counts()
        assert counts.requested == sum(nbytes for nbytes, _, _ in program.blocks.values())
        assert counts.live + counts.on_host >= counts.requested
        assert counts.physical <= program.limit
        if not failing:
            assert counts.physical == fake.state()["device"]
            assert counts.lost == 0
            assert counts.peak_physical <= counts.peak_live
            assert counts.on_host <= fake.state()["host"]
    program.end()
    counts, state = arena.counts(), fake.state()
    print(dict(program.seen), counts, state)
    assert fake.wrong() == (0, "")
    assert counts.requested == counts.live == 0
    if failing:
        assert state["injected"] > 0
    else:
        assert counts.cached == counts.lost == 0
        assert set(state.values()) == {0}
        assert min(counts.anew, counts.exact, counts.grown, counts.grown_in_place, counts.cut) > 0
        assert min(program.seen["full"], program.seen["on host"], counts.host_waits) > 0
        assert (counts.packed > 0) is packs


@pytest.mark.long
@pytest.mark.parametrize(("packs", "limit"), [(True, 0), (False, 0), (True, 24 * MiB)])
def test_contents_stay_and_every_call_is_right(driver: Path, packs: bool, limit: int) -> None:
    said_by_a_child(lambda: play(str(driver), 34_000 if FULL_AUDIT else 5000, 1, packs, limit))


@pytest.mark.long(but=2)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_costs_memory_at_most(driver: Path, call: str) -> None:
    for seed in range(1, 9 if FULL_AUDIT else 3):
        said_by_a_child(partial(play, str(driver), 1000, seed, failing=call))


def test_what_is_allowed_is_all_that_is_taken_of_it(driver: Path) -> None:
    def says() -> None:
        path = str(driver)
        fake = Fake(path, hosts=0)
        arena = DeviceArena(chunk=CHUNK + 1, limit=5 * CHUNK, driver=path)
        block = arena.take(2 * CHUNK)
        there = fake.calls.fake_there(block, 2 * CHUNK)
        print(arena.chunk == 2 * CHUNK, arena.page_out(block), arena.page_in(block), there, arena.counts().host_waits)
        arena.take(8)
        for call in (lambda: arena.take(1 << 62), lambda: arena.take(CHUNK + 8), lambda: DeviceArena(driver=path)):
            try:
                call()
            except (DeviceFullError, NativeError) as error:
                print(error)
        print(arena.give(7), arena.used_by(7, 0))

    told = said_by_a_child(says).splitlines()
    assert told[0] == "True False True 1 1"
    assert told[1].startswith("4611686018427387904 bytes were asked for on CUDA device 0, where 262144 are in use")
    assert told[2].startswith("65544 bytes were asked for on CUDA device 0, where 262144 are in use")
    assert told[3] == "CUDA device 0 has an arena already, which was opened with other arguments."
    assert told[4] == "False False"


def test_torch_is_given_memory_as_its_allocators_are(driver: Path) -> None:
    def says() -> None:
        fake, arena = Fake(str(driver)), DeviceArena(driver=str(driver))
        calls = library.load()
        calls.spillway_device_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        calls.spillway_device_malloc.restype = ctypes.c_void_p
        calls.spillway_device_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        calls.spillway_device_record.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        made = calls.spillway_device_malloc(MiB, 0, 8)
        calls.spillway_device_record(made, 16)
        fake.calls.fake_launch(16, 1, made, MiB, 5)
        nothing = calls.spillway_device_malloc(0, 0, 8)
        live = arena.counts().live
        calls.spillway_device_free(made, MiB, 0, 8)
        calls.spillway_device_free(nothing, 0, 0, 8)
        arena.trim()
        print(nothing, live, arena.counts().physical, *fake.wrong())

    assert said_by_a_child(says) == f"None {MiB} 0 0 \n"


def test_what_is_missing_is_named(driver: Path) -> None:
    with pytest.raises(NativeError, match="CUDA device 40 has no virtual addressing: the driver's library is missing"):
        DeviceArena(40, driver="libnowhere.so.1")
    with pytest.raises(NativeError, match=r"(?m)cuInit is missing\.$"):
        DeviceArena(41, driver="libm.so.6")
    with pytest.raises(NativeError, match="neither may be negative"):
        DeviceArena(42, chunk=-1)

    def asks_for_more_than_there_are() -> None:
        with pytest.raises(NativeError, match="a device of that number is missing"):
            DeviceArena(64, driver=str(driver))

    said_by_a_child(asks_for_more_than_there_are)


def test_it_serves_before_cuda_is_used_or_says_why_not(driver: Path) -> None:
    def serves() -> None:
        Fake(str(driver))
        arena = DeviceArena(43, driver=str(driver))
        if not hasattr(torch._C, "_cuda_customAllocator"):
            with pytest.raises(NativeError, match="built without CUDA"):
                arena.serve()
        torch._C._cuda_customAllocator = None
        torch.cuda.is_initialized = lambda: True
        with pytest.raises(NativeError, match="before the first CUDA tensor"):
            arena.serve()

    said_by_a_child(serves)


@pytest.mark.parametrize(("hosts", "host", "behind"), [(2, MiB, True), (0, MiB, False), (3, MiB, True), (2, 0, None)])
def test_the_doctor_tells_what_the_device_allows(driver: Path, hosts: int, host: int, behind: bool | None) -> None:
    def says() -> None:
        Fake(str(driver), hosts=hosts, host=host)
        print(addressing(0, str(driver)), DeviceArena(driver=str(driver)).counts().physical)

    assert said_by_a_child(says) == f"{{'chunk': {CHUNK}, 'host_behind': {behind}}} 0\n"


def test_the_doctor_tells_of_a_device_without_a_driver() -> None:
    assert addressing(44, "libnowhere.so.1") == {"chunk": 0, "host_behind": None}


def test_a_session_does_not_begin_where_torch_keeps_no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda = SimpleNamespace(device=torch.device("cuda", 0))
    model: Any = SimpleNamespace(parameters=lambda: [on_cuda], buffers=list)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    assert device_of([model]) == on_cuda.device
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    with pytest.raises(ModelError, match="train without a session"):
        device_of([model])


def test_what_is_given_back_or_was_never_there_is_nobodys(driver: Path) -> None:
    code = """
        from tests.cpu.test_device_arena import *
        from spillway.doctor.on_torch import addressing
        fake, arena = Fake(sys.argv[1]), DeviceArena(chunk=2 * CHUNK, driver=sys.argv[1])
        first, second = arena.take(512), arena.take(512)
        arena.give(first)
        print(arena.used_by(first, 8), arena.used_by(second, 8), arena.page_out(second))
        try:
            arena.page_out(first)
        except NativeError as error:
            print(error)
        try:
            DeviceArena(1, driver="libm.so.6")
        except NativeError:
            print(arena.give(second), addressing(0)["chunk"] == 2 * CHUNK, arena.counts().physical)
        for turn in range(40):  # nothing runs on the device, and what was cut off serves all the same
            arena.give(arena.take(20 * 2 * CHUNK))
            arena.take(2 * CHUNK)
        counts = arena.counts()
        print(counts.peak_physical == counts.peak_live, counts.lost, *fake.wrong())
        called = fake.calls.fake_called(b"cuMemCreate")
        try:
            arena.take(1 << 40)
        except DeviceFullError:
            print(fake.calls.fake_called(b"cuMemCreate") == called, arena.counts().physical == counts.physical)
    """
    # In a process of its own, which also ends as a program does, with an arena that holds blocks.
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(driver)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "False True False", "a block of CUDA device 0 was not paged out: the driver says 1.", "True True 0",
        "True 0 0 ", "True True",
    ]  # fmt: skip
