"""Copies that workers make while ops run: nobody reads what is not there yet, and nobody frees what is being read."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.internals.dispatch_key import unwatched
from spillway.ir.step import Phase
from spillway.memory.records import Storage
from spillway.methods import AbstractPolicy, Copy, Drop, Fetch, MemoryView, Move, Proposal
from spillway.session import Session
from spillway.tiers.disk import DiskTier, Slot
from tests.cpu.pressure import PLENTY, copying_beside, is_moved, put_away
from tests.pure.test_disk_tier import files_end_at
from tests.shared import HANGS

ITEMS = 64 << 10


class Gate:
    """Where workers wait until they are let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, first: int = 1 << 30) -> None:
        """It holds up the `first` calls."""
        self.open, self.reached = threading.Event(), threading.Event()
        plainly, numbers = getattr(DiskTier, method), itertools.count()

        def held_up(tier: DiskTier, slot: Slot, address: int) -> Any:
            self.reached.set()
            assert next(numbers) >= first or self.open.wait(timeout=HANGS)
            return plainly(tier, slot, address)

        monkeypatch.setattr(DiskTier, method, held_up)

    @contextmanager
    def opened_when_waited_for(self) -> Iterator[None]:
        """What happens inside begins while a worker waits, which is let through when this thread waits for it."""
        assert self.reached.wait(timeout=HANGS)  # a copy that has not begun is given up without waiting
        here, wait = threading.current_thread(), threading.Condition.wait

        def opening(condition: threading.Condition, timeout: float | None = None) -> bool:
            if threading.current_thread() is here:
                self.open.set()
            return wait(condition, timeout)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Condition, "wait", opening)
            yield
        assert self.open.is_set(), "it did not wait for the worker"


@pytest.fixture
def memory() -> Iterator[Session]:
    with spillway.manage(nn.Linear(2, 2), budget=PLENTY, method=copying_beside()) as memory, memory.step():
        yield memory


def begin(memory: Session, tensor: Tensor, kind: type[Copy] | type[Fetch]) -> bool:
    engine = memory._engine
    with engine.controller.lock, unwatched():
        return engine.controller.grant(kind(storage_of(memory, tensor)))


def propose(memory: Session, proposal: Proposal) -> bool:
    with memory._engine.controller.lock, unwatched():
        return memory._engine.controller.grant(proposal)


def storage_of(memory: Session, tensor: Tensor) -> Storage:
    storage = memory._engine.lookup(tensor)
    assert storage is not None
    return storage


def resident(memory: Session) -> int:
    return memory._engine.controller.budget.resident


def trained(budget: int | None) -> tuple[list[Tensor], Session]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters())
    x, made = torch.randn(512, 256, generator=torch.Generator().manual_seed(1)), []
    with spillway.manage(model, optimizer, budget=budget, method=copying_beside()) as memory:
        for _ in range(3):
            with memory.step(x):
                loss = model(x).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            made.append(loss.detach())
    return [*made, *(p.detach() for p in model.parameters())], memory


def test_a_step_under_pressure_copies_beside_its_ops_and_computes_the_same() -> None:
    expected, _ = trained(None)
    found, memory = trained(9_000_000)
    counters, report = memory._engine.controller.counters, memory.history[-1]
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert report.peak_bytes <= report.allowed
    assert 0 < counters.early_out <= report.bytes_out
    assert 0 < counters.early_in <= report.bytes_in


def test_a_storage_that_dies_while_it_is_copied_counts_until_the_copy_is_done(
    memory: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, before = Gate(monkeypatch, "_fill"), resident(memory)
    tensor = torch.ones(ITEMS)
    assert begin(memory, tensor, Copy)
    del tensor
    assert resident(memory) == before + 4 * ITEMS
    gate.open.set()
    memory._engine.await_copies()
    memory._engine.machine.reap()
    assert resident(memory) == before


@pytest.mark.parametrize("way", [Drop, Move])
def test_what_is_being_copied_leaves_when_the_copy_is_done(
    memory: Session, monkeypatch: pytest.MonkeyPatch, way: type[Drop] | type[Move]
) -> None:
    gate = Gate(monkeypatch, "_fill")
    tensor = torch.arange(ITEMS) * 3
    assert begin(memory, tensor, Copy)
    with gate.opened_when_waited_for():
        assert put_away(memory, tensor, way)
    assert torch.equal(tensor, torch.arange(ITEMS) * 3)


@pytest.mark.parametrize("how", ["op", "storage"])
def test_what_is_being_copied_is_not_resized_before_the_copy_is_done(
    memory: Session, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    gate = Gate(monkeypatch, "_fill")
    tensor = torch.arange(ITEMS)
    assert begin(memory, tensor, Copy)
    with gate.opened_when_waited_for():
        if how == "op":
            tensor.resize_(3 * ITEMS)
        else:
            tensor.untyped_storage().resize_(24 * ITEMS)
    assert torch.equal(tensor[:ITEMS], torch.arange(ITEMS))


def test_a_write_into_what_is_being_copied_is_not_lost(memory: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "_fill")
    tensor = torch.zeros(ITEMS)
    assert begin(memory, tensor, Copy)
    tensor += 1
    gate.open.set()
    assert put_away(memory, tensor, Move)
    assert torch.equal(tensor, torch.ones(ITEMS))


def test_an_older_version_that_is_still_read_is_waited_for(memory: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "_fill", first=1)
    tensor = torch.zeros(ITEMS)
    assert begin(memory, tensor, Copy)
    tensor += 1
    assert begin(memory, tensor, Copy), "the new version has no copy"
    with gate.opened_when_waited_for():
        assert put_away(memory, tensor, Move)
    assert torch.equal(tensor, torch.ones(ITEMS))


@pytest.mark.parametrize("which", [1, 2])
def test_a_system_without_threads_refuses_copies_and_nothing_else(
    memory: Session, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    start, numbers = threading.Thread.start, itertools.count(1)

    def seldom(thread: threading.Thread) -> None:
        if next(numbers) == which:
            raise RuntimeError("can't start new thread")
        start(thread)

    out, back = torch.arange(ITEMS), torch.arange(ITEMS) * 2
    put_away(memory, back, Move)
    workers, memory._engine.backend.tier._workers = memory._engine.backend.tier._workers, None
    assert workers is not None
    workers.shutdown()
    threads, before = threading.active_count(), memory._engine.backend.tier.used
    monkeypatch.setattr(threading.Thread, "start", seldom)
    assert not begin(memory, out, Copy)
    assert (threading.active_count(), memory._engine.backend.tier.used) == (threads, before)
    numbers = itertools.count(1)
    assert not begin(memory, back, Fetch)
    assert memory._engine.controller.counters.refusals == {"no worker": 2}
    assert torch.equal(back, out * 2)


def test_a_disk_that_is_full_is_found_out_when_the_storage_is_to_leave(memory: Session) -> None:
    tensor = torch.arange(ITEMS)
    tier = memory._engine.backend.tier
    tier.free(tier._reserve(8 * ITEMS))  # the file is long enough: the bytes are what does not fit
    with files_end_at(4096):
        assert begin(memory, tensor, Copy)
        memory._engine.await_copies()
        assert not put_away(memory, tensor, Move)
    assert torch.equal(tensor, torch.arange(ITEMS))
    assert memory._engine.controller.counters.refusals == {"slower tier full": 1}
    assert put_away(memory, tensor, Move), "there is room again"
    assert torch.equal(tensor, torch.arange(ITEMS))


def test_what_is_on_its_way_in_counts_and_is_waited_for(memory: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(ITEMS)
    put_away(memory, tensor, Move)
    gate, before = Gate(monkeypatch, "read"), resident(memory)
    assert begin(memory, tensor, Fetch)
    assert not begin(memory, tensor, Fetch), "it is on its way"
    assert resident(memory) == before + 8 * ITEMS
    assert is_moved(memory, tensor)
    with gate.opened_when_waited_for():
        assert int((tensor * 2)[-1]) == 2 * ITEMS - 2
    assert resident(memory) == before + 8 * ITEMS


def test_what_dies_on_its_way_in_leaves_nothing(memory: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resident(memory)
    tensor = torch.arange(ITEMS)
    put_away(memory, tensor, Move)
    gate = Gate(monkeypatch, "read")
    assert begin(memory, tensor, Fetch)
    gate.open.set()
    del tensor
    memory._engine.controller.collect_dead()
    assert (resident(memory), memory._engine.backend.tier.used) == (before, 0)


def test_a_damaged_file_is_found_out_when_the_bytes_are_wanted(memory: Session) -> None:
    tensor = torch.arange(ITEMS)
    put_away(memory, tensor, Move)
    value = storage_of(memory, tensor).value
    assert value is not None
    file, place, before = memory._engine.backend.tier._spill.descriptor, value.home.offset + 1000, resident(memory)
    right = os.pread(file, 7, place)
    os.pwrite(file, b"damaged", place)
    assert begin(memory, tensor, Fetch)
    with pytest.raises(spillway.errors.SpillCorruptedError, match="changed since they were written"):
        tensor + 1
    assert resident(memory) == before
    os.pwrite(file, right, place)
    assert torch.equal(tensor, torch.arange(ITEMS)), "nothing was given up"


@pytest.mark.parametrize("closes", [False, True])
def test_nothing_is_on_its_way_when_a_step_has_ended(closes: bool) -> None:
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    memory = spillway.manage(nn.Linear(2, 2), budget=PLENTY, method=copying_beside())
    with memory.step():
        out, back = torch.arange(ITEMS), torch.arange(ITEMS) * 2
        put_away(memory, back, Move)
        assert begin(memory, out, Copy)
        assert begin(memory, back, Fetch)
    assert memory._engine.controller.arriving == {}
    assert torch.equal(back, out * 2)
    out += 1  # between steps, seen by nobody
    if not closes:
        with memory.step():
            put_away(memory, out, Move)
            assert torch.equal(out, torch.arange(ITEMS) + 1)
    memory.close()
    assert torch.equal(out, torch.arange(ITEMS) + 1)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_is_forked_waits_for_no_worker_that_it_does_not_have(
    memory: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged, whole = torch.arange(ITEMS), torch.arange(ITEMS) * 2
    put_away(memory, damaged, Move)
    put_away(memory, whole, Move)
    value = storage_of(memory, damaged).value
    assert value is not None
    file, place = memory._engine.backend.tier._spill.descriptor, value.home.offset + 1000
    right = os.pread(file, 7, place)
    os.pwrite(file, b"damaged", place)
    gate = Gate(monkeypatch, "read")
    assert begin(memory, damaged, Fetch)
    assert begin(memory, whole, Fetch)
    with gate.opened_when_waited_for():
        child = os.fork()
    if child == 0:
        signal.alarm(HANGS)  # a child that hangs ends with another status
        os._exit(42 if whole.tolist()[-1] == 2 * ITEMS - 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    os.pwrite(file, right, place)
    with pytest.raises(spillway.errors.SpillCorruptedError):
        damaged + 1
    assert torch.equal(damaged, torch.arange(ITEMS))
    assert torch.equal(whole, torch.arange(ITEMS) * 2)


class Watcher(AbstractPolicy):
    """Notes where the step is whenever it is asked to look ahead."""

    name = "watcher"
    foresees = True

    def __init__(self, looks_after: int = 1) -> None:
        self.seen: list[tuple[bool, bool]] = []
        self.asked: list[int] = []
        self.looks_after = looks_after

    def looks(self, view: MemoryView) -> bool:
        self.asked.append(view.clock)
        if not self.seen or self.seen[-1] != (view.in_backward, view.turned):
            self.seen.append((view.in_backward, view.turned))
        return False

    def relieve(self, view: MemoryView, needed: int) -> Generator[Proposal, bool, None]:
        yield from ()


def test_a_policy_knows_where_the_step_is_with_several_micro_batches_and_in_every_step() -> None:
    model, policy = nn.Linear(512, 512), Watcher()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = TensorEngine(policy, PLENTY)
    forward, backward, update = (False, False), (True, True), (False, True)
    try:
        for _ in range(2):
            policy.seen.clear()
            engine.begin_step([("parameter", parameter) for parameter in model.parameters()])
            for _ in range(2):
                model(torch.ones(512, 512)).relu().sum().backward()
            optimizer.step()
            engine.end_step()
            assert policy.seen == [forward, backward, forward, backward, update]
    finally:
        engine.close()


@pytest.mark.parametrize("looks_after", [1, 5, 1000])
def test_a_policy_is_asked_in_every_step_but_not_more_often_than_it_wants(looks_after: int) -> None:
    model, policy = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), Watcher(looks_after)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = TensorEngine(policy, PLENTY)
    try:
        for _ in range(2):
            policy.asked.clear()
            engine.begin_step([("parameter", parameter) for parameter in model.parameters()])
            out = model(torch.ones(512, 512)).sum()
            assert engine.controller.phase is Phase.FORWARD
            out.backward()
            assert engine.controller.phase is Phase.BACKWARD, "whether somebody was asked there or not"
            optimizer.step()
            engine.end_step()
            gaps = [later - earlier for earlier, later in itertools.pairwise(policy.asked)]
            assert policy.asked
            assert min(gaps, default=looks_after) >= looks_after
            assert len(policy.asked) == 1 if looks_after == 1000 else len(policy.asked) > 5
    finally:
        engine.close()
