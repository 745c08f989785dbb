"""Refusals of block methods, however fast copies leave: at once, or not before compute waits for one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import spillway
from spillway.errors import BudgetInfeasible
from spillway.memory.budget import Budget
from spillway.methods import Checkpoint
from spillway.methods.actions import Action
from spillway.methods.by_block import Decision, Forecast, Phase
from spillway.session.watch import Pass, StepWatch
from spillway.tiers import transfer
from spillway.tiers.disk import DiskTier
from spillway.tiers.transfer import DiskLanes, Store
from spillway.units import Bytes, MiB
from tests.cpu.block_refusal_cases import TOO_MUCH
from tests.cpu.test_refusals import Adapted, Complex
from tests.shared import HANGS


@contextmanager
def copies(patches: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Copies out are made at once. From when that is asked for on, they are begun and end when somebody waits for one.
    Gives what asks."""
    gate, late = threading.Event(), threading.Event()
    fill, start_write = DiskTier._fill, DiskTier.start_write
    gate.set()

    def filling(*args: Any) -> None:
        assert gate.wait(HANGS)
        fill(*args)

    def starting(*args: Any) -> Any:
        if late.is_set():
            gate.clear()
        slot = start_write(*args)
        if not late.is_set() and slot.writing is not None:
            slot.writing.result()
        return slot

    def opening(real: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*args: Any) -> Any:
            gate.set()
            return real(*args)

        return waiting

    def ask(slow: bool) -> None:
        (late.set if slow else late.clear)()
        gate.set()

    with patches.context() as patch:
        patch.setattr(DiskTier, "_fill", filling)
        patch.setattr(DiskTier, "start_write", starting)
        for owner, name in ((DiskLanes, "finish_out"), (DiskLanes, "settle"), (DiskTier, "free"), (DiskTier, "close")):
            patch.setattr(owner, name, opening(getattr(owner, name)))
        try:
            yield ask
        finally:
            ask(False)


@final
@dataclass(frozen=True)
class Course:
    """Three steps of a training."""

    make: Callable[[], nn.Module]
    batch: Tensor
    patches: pytest.MonkeyPatch
    names: tuple[str, ...] | None = None
    evaluates: Tensor | None = None
    """Behind the update."""

    def run(
        self, budget: Bytes, action: Action = Action.OFFLOAD, slow: Callable[[int], bool] = lambda number: False
    ) -> BudgetInfeasible | Bytes:
        """What steps take at most, or are refused with; and of which the copies are slow."""
        torch.manual_seed(0)
        model = self.make()
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
        options = spillway.BlockOptions(names=self.names)
        with (
            copies(self.patches) as ask,
            spillway.manage(model, optimizer, budget=budget, method=Checkpoint(action), blocks=options) as memory,
        ):
            try:
                for number in range(3):
                    ask(slow(number))
                    with memory.step(self.batch):
                        self._step(model, optimizer)
            except BudgetInfeasible as refusal:
                return refusal
            finally:
                ask(False)
            return max(report.peak_bytes for report in memory.history)

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(self.batch).abs().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if self.evaluates is not None:
            with torch.no_grad():
                model(self.evaluates)

    def named(self, budget: Bytes) -> Bytes:
        """By the refusal under this one."""
        refusal = self.run(budget)
        assert isinstance(refusal, BudgetInfeasible)
        return refusal.smallest_budget


@pytest.mark.long
@pytest.mark.parametrize("kind", [Adapted, Complex])
@pytest.mark.parametrize("fast", [0, 1])
def test_what_a_refusal_names_works_however_slow_copies_become(
    kind: Any, fast: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That all fitted while copies were fast, or were waited for, says nothing of a step in which they are not."""
    batch = torch.randn(1024, 64, dtype=torch.cfloat if kind is Complex else torch.float32)
    course = Course(lambda: nn.Sequential(*(kind() for _ in range(4))), batch, monkeypatch)
    enough = course.run(1 << 30, Action.RECOMPUTE)
    assert isinstance(enough, int)
    named = course.named(int(0.33 * enough))
    assert named <= TOO_MUCH * enough
    for more in (1.0, 1.03, 1.08):
        peak = course.run(int(more * named), slow=lambda number: number >= fast)
        assert isinstance(peak, int)
        assert peak <= int(more * named)


class Widening(nn.Module):
    """Of what it saves one storage leaves, of its hidden width."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, hidden), nn.Linear(hidden, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


@pytest.mark.long
def test_what_is_still_leaving_and_what_is_read_ahead_have_the_same_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the largest block goes backward, the one behind it still leaves and the one before it comes in."""
    course = Course(
        lambda: nn.Sequential(Widening(512), Widening(1024), Widening(512)), torch.randn(1024, 64), monkeypatch
    )
    budget = course.named(6 * MiB) + int(1.5 * 512 * 1024 * 4)
    peak = course.run(budget, slow=lambda number: True)
    assert isinstance(peak, int)
    assert peak <= budget


@pytest.mark.long(but=1)
@pytest.mark.parametrize("evaluates", [False, True])
def test_what_is_still_leaving_makes_room_for_an_update_and_an_evaluation(
    evaluates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 64 if evaluates else 16
    course = Course(
        lambda: nn.Sequential(Widening(4096)), torch.randn(rows, 64), monkeypatch, names=("0",),
        evaluates=torch.randn(256, 64) if evaluates else None,
    )  # fmt: skip
    named = course.named(6 * MiB)
    if evaluates:  # of an evaluation nothing is known before it begins
        named = course.named(named)
    assert isinstance(course.run(named, slow=lambda number: True), int)


class Asking(Adapted):
    """Looks at what it is called with, so that nothing is told of it without content."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.detach().sum()) < 1e9 else x


def test_where_nothing_can_be_told_a_block_begins_when_what_was_sent_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    course = Course(lambda: nn.Sequential(*(Asking() for _ in range(4))), torch.randn(1024, 64), monkeypatch)
    enough = course.run(1 << 30, Action.RECOMPUTE)
    assert isinstance(enough, int)
    assert isinstance(course.run(int(1.01 * enough), slow=lambda number: True), int)


def test_what_does_not_count_as_leaving_any_more_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Asked in the middle of a worker's letting go."""
    between, asked = threading.Event(), threading.Event()
    weak: Any = StorageWeakRef
    here = threading.current_thread()

    def slowly(storage: torch.UntypedStorage) -> Any:
        if threading.current_thread() is not here:
            between.set()
            assert asked.wait(HANGS)
        return weak(storage)

    monkeypatch.setattr(transfer, "StorageWeakRef", slowly)
    freed: list[Bytes] = []
    store = Store(DiskLanes(DiskTier(tmp_path), [lambda at, address, nbytes: freed.append(nbytes)]))
    store.begin_block()
    held = [store.send(torch.randn(1 << 18).untyped_storage())]
    store.end_block()
    assert between.wait(HANGS)
    assert (store.leaving_bytes, freed) == (MiB, [])
    asked.set()
    store.settle()
    assert (store.leaving_bytes, freed) == (0, [MiB])
    held.clear()
    store.close()


@final
class Ending:
    """An engine beside a copy out of 30 bytes, which ends when a given number of readings of either kind were made."""

    read_ahead = 0
    arrived_bytes = 0

    def __init__(self, readings: int) -> None:
        self.left = readings

    def read(self) -> Bytes:
        self.left -= 1
        return 30 * (self.left >= 0)

    @property
    def leaving_bytes(self) -> Bytes:
        return self.read()


@pytest.mark.parametrize("readings", range(5))
def test_what_a_block_needs_is_the_same_whenever_a_copy_ends(readings: int) -> None:
    watch: Any = StepWatch.__new__(StepWatch)
    watch._engine, watch._budget, watch.passes = Ending(readings), Budget(1000), []
    watch._taken = lambda: (watch._budget.observe(100 + watch._engine.read()), watch._budget.resident)[1]
    watch._foresight = SimpleNamespace(rise=lambda seam: 0)
    plan: Any = SimpleNamespace(action=lambda number: Action.OFFLOAD)
    forecast = Forecast(saved=(50,), seconds=(1.0,), turn=0, rest=0, working=(20,), gradients=(0,))
    one = Pass(Decision(Phase.PLANNED, plan, False), forecast, (1,), 0, 100, set())
    assert watch._going_forward(one, 0) == (70, 0)
