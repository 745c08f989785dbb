"""What the system does to a step: signals, forks, limits, a directory that goes away."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

import spillway
from spillway.errors import BudgetInfeasible, SessionError
from spillway.ir import files
from spillway.ir.files import read_run
from spillway.methods import Copy, Fetch, Move
from spillway.session.abstract_session import Session
from tests.cpu.another_process import run_python
from tests.cpu.families import difference, state_of
from tests.cpu.forks import held_elsewhere, true_in_a_child
from tests.cpu.pressure import ORDERS, PLENTY, is_moved, put_away
from tests.cpu.test_copies import Gate, begin
from tests.cpu.test_interruptions import (
    Fault,
    after_each_op,
    fresh,
    ops_of_a_step,
    step_of,
    stopped_plainly,
)
from tests.shared import FULL_AUDIT, HANGS, notes_of

TIGHT = "280 KiB"
"""Under half of what the step asks for."""

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


# ---------------------------------------------------------------------- Ctrl-C at every op


class PressesBefore(TorchDispatchMode):
    """Ctrl-C before the op with a number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)
        self.left -= 1
        return func(*args, **(kwargs or {}))


@functools.cache
def state_before_each_op() -> list[int]:
    return [hash(tuple(state_of(*stopped_plainly(number)).items())) for number in range(ops_of_a_step())]


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS)
def test_ctrl_c_at_every_op(order: str) -> None:
    """At every op under two of the orders, every second one under each; in the full audit all under all."""
    states, first = state_before_each_op(), list(ORDERS).index(order) % 2
    for number in range(ops_of_a_step()) if FULL_AUDIT else range(first, ops_of_a_step(), 2):
        model, optimizer = fresh()
        with spillway.manage(model, optimizer, budget=TIGHT, method=ORDERS[order]()) as memory:
            with pytest.raises(KeyboardInterrupt), memory.step(), PressesBefore(number):
                step_of(model, optimizer, 1)
            assert memory._engine.controller.arriving == {}
            assert not memory._engine.controller.dropped
        assert hash(tuple(state_of(model, optimizer).items())) == states[number], f"op {number}"


# ---------------------------------------------------------------------- handlers of other signals that raise


@contextmanager
def signal_at_line(number: int, line: int) -> Iterator[None]:
    """The signal when so many lines of the session and its engine have run."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if not str(frame.f_globals.get("__name__", "")).startswith("spillway."):
            return None
        if event == "line":
            count += 1
            if count == line:
                signal.raise_signal(number)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGCHLD, signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1])
def test_a_handler_that_raises_waits_until_the_books_are_closed(number: int) -> None:
    def raises(number: int, frame: FrameType | None) -> None:
        raise Fault

    numbers = after_each_op()
    before = signal.signal(number, raises)
    try:
        for line in range(300, 12_000, 397):
            model, optimizer = fresh()
            with spillway.manage(model, optimizer, budget=TIGHT) as memory:
                with pytest.raises(Fault), signal_at_line(number, line), memory.step():
                    step_of(model, optimizer, 1)
                assert hash(tuple(state_of(model, optimizer).items())) in numbers, f"line {line}"
                with memory.step():
                    step_of(model, optimizer, 2)
        assert signal.getsignal(number) is raises
    finally:
        signal.signal(number, before)


def test_ctrl_c_while_a_session_closes_leaves_it_closed() -> None:
    for line in range(5, 400, 23):
        model, optimizer = fresh()
        memory = spillway.manage(model, optimizer, budget=TIGHT, method="lru")
        with memory.step():
            step_of(model, optimizer, 1)
        away = [p for p in model.parameters() if p.nbytes >= 4096 and put_away(memory, p, Move)]
        expected = state_of(model, optimizer)
        assert away
        with pytest.raises(KeyboardInterrupt), signal_at_line(signal.SIGINT, line):
            memory.close()
        memory.close()  # the first call may not have begun
        assert memory._engine.backend.tier.closed, f"line {line}"
        assert all(p.untyped_storage().resizable() for p in away), f"line {line}"
        assert difference(state_of(model, optimizer), expected) is None


# ---------------------------------------------------------------------- forks


class Rows(Dataset[Tensor]):
    """A data set that lies in one tensor."""

    def __init__(self, rows: Tensor, dies: int = -1) -> None:
        self.rows = rows
        self.dies = dies

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Tensor:
        if number == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.rows[number]


def test_workers_read_a_data_set_that_had_been_moved_whatever_its_place_is_used_for_later() -> None:
    others_there = children()
    rows = torch.arange(64 * 4096.0).reshape(64, 4096)
    expected, others = rows.clone(), []
    with spillway.manage(torch.nn.Linear(2, 2), budget=PLENTY, method="lru") as memory, memory.step():
        put_away(memory, rows, Move)
        assert is_moved(memory, rows)
        loader = iter(DataLoader(Rows(rows), batch_size=1, num_workers=1, prefetch_factor=1))
        slot = memory._engine.table[torch._C._storage_address(rows)].value.home.offset  # type: ignore[union-attr]
        rows += 1  # it comes back, and its place is free
        for number in range(4):
            others.append(torch.full((64, 4096), -1.0 - number))
            put_away(memory, others[-1], Move)
        places = {storage.value.home.offset for storage in memory._engine.table.values() if storage.value.home}
        assert slot not in places
        assert torch.equal(torch.cat(list(loader)), expected)
        del loader
        wait_for_children(but=others_there)
        others.append(torch.full((64, 4096), -9.0))
        put_away(memory, others[-1], Move)
        assert memory._engine.table[torch._C._storage_address(others[-1])].value.home.offset == slot  # type: ignore[union-attr]


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def wait_for_children(but: set[str]) -> None:
    """A worker that was told to end does so by and by."""
    for _ in range(100 * HANGS):
        if children() <= but:
            return
        time.sleep(0.01)
    raise AssertionError("children live on")


@pytest.mark.long(but=1)
@pytest.mark.parametrize("order", ORDERS)
def test_a_loader_that_is_started_in_a_step_changes_nothing(order: str) -> None:
    def play(memory: spillway.Session | None) -> Any:
        seen = []
        for number in range(3):
            if memory is None:
                seen += list(DataLoader(Rows(torch.arange(40_000.0).reshape(8, 5000)), num_workers=2))
                step_of(model, optimizer, number)
                continue
            with memory.step():
                hidden = torch.arange(40_000.0).reshape(8, 5000) + 0
                put_away(memory, hidden, Move)
                seen += list(DataLoader(Rows(hidden), num_workers=2))
                step_of(model, optimizer, number)
        return [row.tolist() for row in seen]

    model, optimizer = fresh()
    plain, state = play(None), state_of(model, optimizer)
    model, optimizer = fresh()
    with spillway.manage(model, optimizer, budget="480 KiB", method=ORDERS[order]()) as memory:
        assert play(memory) == plain
        assert difference(state, state_of(model, optimizer)) is None
        assert memory.history[-1].moves > 0


@pytest.mark.parametrize("kind", [Copy, Fetch])
def test_a_loader_is_started_while_a_worker_copies(kind: type[Copy | Fetch], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange(64 * 4096.0).reshape(64, 4096)
    expected = rows.clone()
    with spillway.manage(torch.nn.Linear(2, 2), budget=PLENTY, method=ORDERS["copy beside"]()) as memory, memory.step():
        if kind is Fetch:
            put_away(memory, rows, Move)
        gate = Gate(monkeypatch, "_fill" if kind is Copy else "read")
        assert begin(memory, rows, kind)
        with gate.opened_when_waited_for():
            loader = iter(DataLoader(Rows(rows), batch_size=64, num_workers=1))
        assert torch.equal(next(loader), expected)
        assert torch.equal(rows, expected)


@pytest.mark.long
def test_a_worker_of_a_loader_that_is_killed_ends_the_step_with_a_clear_error() -> None:
    model, optimizer = fresh()
    numbers = after_each_op()
    with spillway.manage(model, optimizer, budget=TIGHT, method=ORDERS["copy beside"]()) as memory:
        with (
            pytest.raises(RuntimeError, match=r"DataLoader worker .* (killed by signal|exited unexpectedly)"),
            memory.step(),
        ):
            loader = iter(DataLoader(Rows(torch.ones(4, 4), dies=0), num_workers=1))
            while True:
                model(torch.randn(96, 64, generator=torch.Generator().manual_seed(1)))
                next(loader)
        assert memory._engine.controller.arriving == {}
        del loader
    model, optimizer = fresh()
    with spillway.manage(model, optimizer, budget=TIGHT) as memory, memory.step():
        step_of(model, optimizer, 1)
    assert hash(tuple(state_of(model, optimizer).items())) in numbers


def test_a_fork_while_another_thread_holds_the_books_does_not_hang_the_child() -> None:
    with spillway.manage(torch.nn.Linear(2, 2), budget=PLENTY, method="lru") as memory, memory.step():
        tensor = torch.arange(5000)
        put_away(memory, tensor, Move)
        with held_elsewhere(memory._engine.controller.lock):
            assert true_in_a_child(lambda: int(tensor.numpy()[-1]) == 4999)


# ---------------------------------------------------------------------- reports that cannot be written


BATCH = torch.ones(8, 32)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.line(x))


def blocks() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(*(Layer() for _ in range(4)))
    return model, torch.optim.SGD(model.parameters(), 0.1)


def step_of_blocks(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(BATCH).sum().backward()
    optimizer.step()


@contextmanager
def full_disk(memory: Session) -> Iterator[None]:
    """Nothing more can be written to its run file."""
    assert memory._writer is not None
    written = memory._writer._file.fileno()
    kept, full = os.dup(written), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, written)
    try:
        yield
    finally:
        if not memory._writer._file.closed:
            os.dup2(kept, written)
        os.close(kept)
        os.close(full)


FULL = r"^The run file '.*' cannot be written \(No space left on device\)"


@pytest.mark.parametrize("method", ["lru", "checkpoint"])
def test_a_report_that_finds_a_full_disk_is_one_sentence_and_is_written_later(method: str, tmp_path: Path) -> None:
    model, optimizer = blocks()
    with spillway.manage(
        model, optimizer, budget=PLENTY, method=method, report=spillway.ReportOptions(run_file=tmp_path / "run")
    ) as memory:
        with full_disk(memory), pytest.raises(OSError, match=FULL), memory.step(BATCH):
            step_of_blocks(model, optimizer)
        with full_disk(memory), pytest.raises(KeyError) as raised, memory.step(BATCH):
            raise KeyError
        assert not hasattr(raised.value, "__notes__")
        with memory.step(BATCH):
            step_of_blocks(model, optimizer)
    assert [report.step for report in memory.history] == [0, 1]
    assert [report.step for report in read_run(tmp_path / "run").steps] == [0, 1]


@pytest.mark.parametrize("method", ["lru", "checkpoint"])
def test_where_no_report_can_be_written_a_session_that_closes_with_its_step_closes(method: str, tmp_path: Path) -> None:
    model, optimizer = blocks()
    memory = spillway.manage(
        model, optimizer, budget=PLENTY, method=method, report=spillway.ReportOptions(run_file=tmp_path / "run")
    )
    refusals: list[SessionError] = []

    def close() -> None:
        try:
            memory.close()
        except SessionError as refusal:
            refusals.append(refusal)

    with full_disk(memory), pytest.raises(OSError, match=FULL) as raised, memory.step(BATCH):
        thread = threading.Thread(target=close)
        thread.start()
        thread.join()
    assert len(refusals) == 1
    assert memory._given_up
    assert raised.value.__notes__[0].startswith("Closing the session failed as well: OSError: The run file")
    with spillway.manage(model, optimizer, budget=PLENTY, method=method) as other, other.step(BATCH):
        step_of_blocks(model, optimizer)


@pytest.mark.parametrize("method", ["lru", "checkpoint"])
def test_where_no_report_can_be_written_a_signal_that_waited_is_raised(method: str, tmp_path: Path) -> None:
    model, optimizer = blocks()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with spillway.manage(
        model, optimizer, budget=PLENTY, method=method, report=spillway.ReportOptions(run_file=tmp_path / "run")
    ) as memory:
        with full_disk(memory), pytest.raises(KeyboardInterrupt) as raised, memory.step(BATCH):
            step_of_blocks(model, optimizer)
            memory._pending.append(interrupt)
        assert raised.value.__notes__[0].startswith("Ending the step failed as well: OSError: The run file")


def test_a_timeline_that_could_not_be_read_is_left_out_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = blocks()
    monkeypatch.setattr(files, "MOST_OPS", 5)
    memory = spillway.manage(
        model,
        optimizer,
        budget=PLENTY,
        method="lru",
        report=spillway.ReportOptions(run_file=tmp_path / "run", timeline=True),
    )
    with memory.step(BATCH):
        step_of_blocks(model, optimizer)
    with pytest.warns(UserWarning, match="leaves out what could not be read again: a timeline of"):
        memory.close()
    assert [report.step for report in read_run(tmp_path / "run").steps] == [0]


def test_a_refusal_is_seen_although_telling_what_is_enough_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> BudgetInfeasible:
        raise ValueError("nothing can be told")

    monkeypatch.setattr("spillway.session.tensor_session.smallest_budget", fail)
    model, optimizer = fresh()
    with (
        pytest.raises(BudgetInfeasible) as raised,
        spillway.manage(model, optimizer, budget="5KiB", method="lru") as memory,
        memory.step(),
    ):
        model(torch.ones(64, model[0].in_features)).sum().backward()
    assert "ValueError" in notes_of(raised.value)[0]


# ---------------------------------------------------------------------- the spill directory, limits


@pytest.mark.parametrize("order", ORDERS)
def test_a_spill_directory_that_is_removed_is_not_missed(order: str, tmp_path: Path) -> None:
    plain, plain_optimizer = fresh()
    step_of(plain, plain_optimizer, 1)
    for when in ("before the first spill", "later"):
        directory = tmp_path / when
        directory.mkdir()
        model, optimizer = fresh()
        with spillway.manage(
            model, optimizer, budget=TIGHT, method=ORDERS[order](), spill=spillway.SpillOptions(directory=directory)
        ) as memory:
            if when == "later":
                put_away(memory, model[0].weight, Move)
            shutil.rmtree(directory)
            with memory.step():
                step_of(model, optimizer, 1)
            assert memory.history[-1].bytes_out > 0
        assert difference(state_of(plain, plain_optimizer), state_of(model, optimizer)) is None


LIMITS = """
    import contextlib, json, mmap, resource, sys, traceback
    import torch, spillway
    from spillway.internals.process_memory import found_no_memory
    from spillway.errors import SpillwayError
    from tests.cpu.families import difference, state_of
    from tests.cpu.pressure import ORDERS
    from tests.cpu.test_interruptions import after_each_op, fresh, ops_of_a_step, step_of, stopped_plainly

    {limit}

    def is_clear(error):
        if isinstance(error, SpillwayError):
            return {word!r} in str(error) and str(error).endswith(".")
        last = traceback.extract_tb(error.__traceback__)[-1]
        # What an op of the user's raises is torch's own, of which less is heard where there is no memory for it.
        of_torch = "spillway/" not in last.filename or last.name in ("complete", "handle", "counted")
        return isinstance(error, MemoryError) or (of_torch and found_no_memory(error)) or isinstance(error, OSError)

    def play(order, amount):
        model, optimizer = fresh()
        error, unclear = None, []
        with spillway.manage(model, optimizer, budget="280 KiB", method=ORDERS[order]()) as memory:
            with memory.step(), limited(amount) as lift:
                try:
                    step_of(model, optimizer, 1)
                except Exception as caught:
                    lift()
                    error = f"{{type(caught).__name__}}: {{caught}}"
                    if not is_clear(caught):
                        unclear = [error, *traceback.format_tb(caught.__traceback__)]
                    caught.__traceback__ = None
                lift()
            done = after.get(hash(tuple(state_of(model, optimizer).items())))
            with memory.step():
                step_of(model, optimizer, 2)
        plain, plain_optimizer = stopped_plainly(done or 0)
        step_of(plain, plain_optimizer, 2)
        differs = done is None or difference(state_of(plain, plain_optimizer), state_of(model, optimizer))
        return {{"error": error, "whole": done == ops_of_a_step(), "differs": differs, "unclear": unclear}}

    torch.set_num_threads(1)
    after = after_each_op()
    print(json.dumps([play(order, amount) for order in ORDERS for amount in {amounts}]))
"""

MEMORY = """
    @contextlib.contextmanager
    def limited(kibibytes):
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + kibibytes * 1024, resource.RLIM_INFINITY))
        def lift():
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        yield lift
        lift()
"""

DESCRIPTORS = """
    @contextlib.contextmanager
    def limited(free):
        import os
        most = max(map(int, os.listdir("/proc/self/fd"))) + 1 + free
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        def lift():
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        yield lift
        lift()
"""

MAPPINGS = """
    @contextlib.contextmanager
    def limited(free):
        taken = []
        try:
            while True:  # neighbours that differ are not merged into one
                taken.append(mmap.mmap(-1, 4096, prot=mmap.PROT_READ | (mmap.PROT_WRITE if len(taken) % 2 else 0)))
        except OSError:
            del taken[:free]
        yield taken.clear
        taken.clear()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("limit", "amounts", "word"),
    [(MEMORY, (0, 60, 120, 240, 1000, 300_000), "memory"), (DESCRIPTORS, (0,), ""), (MAPPINGS, (0, 3), "")],
    ids=["memory", "descriptors", "mappings"],
)
def test_a_limit_of_the_system_ends_a_step_with_a_clear_error_or_not_at_all(
    limit: str, amounts: tuple[int, ...], word: str
) -> None:
    code = LIMITS.format(limit=limit, amounts=amounts, word=word)
    done = run_python(code, MALLOC_MMAP_THRESHOLD_="16384", MALLOC_TOP_PAD_="0", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    runs: list[dict[str, Any]] = json.loads(done.stdout)
    assert [run for run in runs if run["differs"]] == []
    assert [run["unclear"] for run in runs if run["unclear"]] == []
    assert [run for run in runs if run["whole"] != (run["error"] is None)] == []
    assert any(run["error"] for run in runs) or not word


@pytest.mark.parametrize("order", ORDERS)
def test_a_session_computes_the_same_past_the_page_cache(order: str) -> None:
    plain, plain_optimizer = fresh()
    for number in range(1, 4):
        step_of(plain, plain_optimizer, number)
    expected = state_of(plain, plain_optimizer)
    model, optimizer = fresh()
    with spillway.manage(
        model,
        optimizer,
        budget=TIGHT,
        method=ORDERS[order](),
        spill=spillway.SpillOptions(directory=Path.cwd(), io="direct"),
    ) as memory:
        if memory._engine.backend.tier.io != "direct":
            pytest.skip(memory._engine.backend.tier.io_note)
        for number in range(1, 4):
            with memory.step():
                step_of(model, optimizer, number)
            for parameter in model.parameters():
                put_away(memory, parameter, Move)
        assert memory.history[-1].bytes_in > 0
        assert difference(state_of(model, optimizer), expected) is None
    assert difference(state_of(model, optimizer), expected) is None
