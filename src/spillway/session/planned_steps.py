"""Which steps of a session are recorded, planned and followed, where its method is a planner or `auto` watches op by op
(`docs/methods.md`)."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any, Final, final

import torch

from spillway.costs.device import HERE, HIGHEST, LOWEST, Device
from spillway.engines.tensors.abstract import Around
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.errors import BudgetInfeasible, SpillwayError
from spillway.ir import Op, verify
from spillway.ir.timeline import WindowAt
from spillway.memory.lanes import CopySpan, Stall
from spillway.methods import LRU, ImprovedWindow, Planned, Problem, Window
from spillway.methods.planned import SelfPlanned
from spillway.recording.recorder import Recorder
from spillway.recording.steps import named_tensors
from spillway.units import Bytes, MiB, Seconds

MOST_RECORDINGS: Final = 3
"""Of steps that are told apart by nothing that is known before they run, unless a plan was followed by"""
SERVED: Final = 8
"""steps, so that it was worth its recording: then they are counted anew."""
OFTEN: Final = 16
"""Steps of one kind that were short of room before one is recorded under `auto`, which nobody told to plan."""
PLANS: Final = 16
"""Kinds that have a plan there at most: a plan remembers all of its step."""
REMEMBERED: Final = 4096
"""Kinds of which anything is known at most; beyond, those without a plan are forgotten."""
COMPARED: Final = 8
"""Planned steps after which it is seen whether they are faster than as many before them."""
FAILED: Final = 2
"""Steps in a row that went wrong when recorded or as planned, after which nobody plans for their kind under `auto`."""
_LARGE: Final[Bytes] = 64 * MiB
"""Of a copy whose bytes are nearly all that it takes time for."""


@final
@dataclass(slots=True)
class _Known:
    """What is known about steps of one kind."""

    seen: int = 0
    """Steps without a plan, of which one is to be made; under `auto` those that were short of room."""
    recordings: int = 0
    planned: Planned | None = None
    followed: int = 0
    """Steps that were as planned."""
    before: deque[Seconds] = field(default_factory=lambda: deque(maxlen=COMPARED))
    """What the latest steps without a plan took."""
    since: list[Seconds] = field(default_factory=list)
    """What the first ones took that were as planned."""
    failed: int = 0
    """Steps in a row that went wrong when recorded or as planned."""
    left: bool = False
    """Whether they are left to moving what is stale."""


@final
class StoppedClock:
    """A clock that stands still while something is under way, of which there is a list: copies, or stalls."""

    def __init__(self, under_way: Callable[[], Sequence[CopySpan | Stall]], counted: int = 0) -> None:
        self._under_way = under_way
        self._counted = counted
        self._stood: Seconds = 0.0

    def __call__(self) -> Seconds:
        now, spans = time.perf_counter(), self._under_way()
        new = spans[self._counted :]
        self._stood += sum(span.ended - span.began for span in new)
        self._counted = min(self._counted + len(new), len(spans))  # workers may add to them meanwhile
        return now - self._stood


def watching() -> SelfPlanned:
    """What decides under `auto` in steps that are watched op by op: `lru`, and a window's plan for those that come back
    `OFTEN`, where it proves to be faster. Without SciPy it is the paper's window."""
    return SelfPlanned(Window() if find_spec("scipy") is None else ImprovedWindow(), LRU(), often=OFTEN)


@final
class PlannedSteps:
    """Has every step recorded, planned for, or left to follow its plan."""

    def __init__(
        self,
        policy: SelfPlanned,
        engine: TensorEngine,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._policy = policy
        self._engine = engine
        self._models = models
        self._optimizers = optimizers
        self._kinds: dict[Hashable, _Known] = {}
        self._now = _Known()
        self._slower = 0
        """Plans in a row that proved slower, under `auto`."""
        self._recorder: Recorder | None = None
        self._allowed: Bytes = 0
        """In the step that is recorded, with what is reserved there."""
        self._tried = False
        """Whether a step is recorded or as planned, and has not concluded."""
        self._open = ExitStack()

    def forget(self) -> None:
        """All plans, between steps: the budget is another. Each kind of step is recorded anew; under `auto` once that
        is short of room often there too."""
        kinds = self._kinds.items() if self._policy.asked else ()
        self._kinds = {kind: _Known(seen=known.seen) for kind, known in kinds}
        self._slower = 0

    def begin(self, kind: Hashable | None, batch: Any) -> None:
        """Before the engine begins a step of that kind; of None nothing is planned."""
        self.over()
        if len(self._kinds) > REMEMBERED:
            self._kinds = {kind: known for kind, known in self._kinds.items() if known.planned is not None}
        self._now = now = _Known(left=True) if kind is None else self._kinds.setdefault(kind, _Known())
        self._policy.planned = now.planned
        self._tried = now.planned is not None
        if now.planned is None and not now.left and self._engine.budget.limited and self._wanted(now):
            self._tried = True
            named = partial(named_tensors, self._models, self._optimizers, batch)
            # What an op takes is its own, and not what is copied meanwhile.
            self._recorder = Recorder(self._models, named, StoppedClock(lambda: self._engine.log.transfers))
            self._open.callback(self._let_go)
            self._policy.recorded = True
            self._open.enter_context(self._recorder.writing_within())
            self._engine.recorded = partial(self._around, self._recorder)

    def end(self) -> None:
        """When the engine has ended it. Calling it again does nothing."""
        self._open.close()

    def conclude(self, seconds: Seconds) -> None:
        """Of a step that nothing went wrong in, and that took so long: make a plan if it was recorded, and see whether
        it was as planned."""
        now, recorder, engine, why = self._now, self._recorder, self._engine, ""
        counters, asked = engine.controller.counters, self._policy.asked
        self._recorder, self._tried, now.failed = None, False, 0
        if recorder is None and now.planned is None:
            if asked or counters.moves or counters.drops:  # else it was not short of room
                now.before.append(seconds)
                now.seen += 1
        elif recorder is not None:
            now.recordings += 1
            try:
                now.planned, now.since = self._plan(recorder), []
            except Exception as error:  # where nobody asked for a plan nothing that planning raises is the user's
                if asked and not isinstance(error, SpillwayError | ValueError):
                    raise
                why = str(error) or repr(error)
        elif now.planned is not None and now.planned.diverged is None and engine.ops == now.planned.ops:
            now.followed += 1
            if not asked and now.followed <= COMPARED:
                now.since.append(seconds)
                if now.followed == COMPARED and median(now.since) >= median(now.before):
                    now.planned, now.left, self._slower = None, True, self._slower + 1
                elif now.followed == COMPARED:
                    self._slower = 0
        elif now.planned is not None:
            if asked and now.followed >= SERVED:
                now.recordings = 0
            now.planned, now.followed = None, 0
            if now.recordings >= MOST_RECORDINGS:
                why = f"after {now.recordings} recordings, steps on inputs of this size are still others."
        if why:
            now.left = True
        if why and asked:
            warnings.warn(
                f"{self._policy.name!r} has no plan for steps such as this one, in which the stalest storages are "
                f"moved instead when room gets short: {why}",
                stacklevel=6,
            )

    def over(self) -> None:
        """Nobody asks the step anything any more. One that did not conclude leaves nothing of the user's here: neither
        its batch nor, in what it raised, its frames."""
        if self._tried and not self._policy.asked:
            now = self._now
            now.failed += 1
            if now.failed >= FAILED:
                now.planned, now.left = None, True
        self._recorder, self._tried = None, False

    @property
    def window(self) -> tuple[WindowAt, ...]:
        """What the window did that planned the step which has ended; empty if none did, or it was another step."""
        planned = self._now.planned
        if planned is None or planned.diverged is not None or self._engine.ops != planned.ops:
            return ()
        return planned.plan.window

    def _wanted(self, now: _Known) -> bool:
        """Whether there were steps enough to record one; under `auto` also whether another plan is worth its making."""
        if self._policy.asked or now.seen < self._policy.often:
            return now.seen >= self._policy.often
        return self._slower < PLANS and sum(known.planned is not None for known in self._kinds.values()) < PLANS

    def _let_go(self) -> None:
        self._engine.recorded, self._policy.recorded = None, False

    def _around(self, recorder: Recorder, inner: Around | None) -> Around:
        self._allowed = self._engine.budget.allowed
        present = [(storage, self._engine.left_over(storage)) for storage in self._engine.present()]
        return recorder.around(inner, present, self._engine.newer_than)

    def _plan(self, recorder: Recorder) -> Planned:
        """For what is left beside storages that nobody may move, of which a plan knows nothing; with them, where it
        could not do with less."""
        engine, planner = self._engine, self._policy.planner
        if recorder.failure is not None:
            raise SpillwayError(f"It could not be recorded ({recorder.failure}).")
        step, allowed = recorder.finish(), self._allowed
        problem = Problem(step=step, allowed=allowed, device=device_here(engine, step.ops))
        staying = sum(storage.nbytes for storage in engine.present() if storage.escaped)
        try:
            plan = planner.plan(replace(problem, allowed=max(allowed - staying, 0)))
        except BudgetInfeasible:
            if not staying:
                raise
            plan = planner.plan(problem)
        verify(plan, step, allowed)
        return Planned.as_meant(plan, step, planner)


def device_here(engine: TensorEngine, ops: Sequence[Op]) -> Device:
    """This machine as it showed itself: in the ops of a recorded step, and its link in the copies so far."""
    machine, seconds = engine.machine, sum(op.seconds or 0.0 for op in ops)
    with engine.controller.lock:
        machine.measure_link()
        least, large = machine.transfer_seconds(0) / 2, machine.transfer_seconds(_LARGE) / 2
    link = _rate(_LARGE, large - least)
    return Device(
        name=HERE, flops_per_second=_rate(sum(op.flops for op in ops), seconds),
        bytes_per_second=_rate(sum(op.traffic for op in ops), seconds), memory=engine.budget.allowed,
        out_per_second=link, in_per_second=link, copy_seconds=least, overlaps=machine.overlaps,
        source="measured in the recorded step",
    )  # fmt: skip


def _rate(amount: float, seconds: Seconds) -> float:
    return min(max(amount / seconds if seconds > 0 else HIGHEST, LOWEST), HIGHEST)
