"""One step of the block engine: what it is told to do, who gives way when room gets short, and what was measured.

NOTE: how the budget is kept between two measurements. A plan goes by estimates. At every seam between blocks the meter
is read, and what the next block is expected to need is added. If that is too much, in this order, as far as it takes:

 1. Copies in that nobody has used yet are forgotten, those first that are wanted last, unless waiting is enough.
 2. Compute waits for copies out.
 3. Blocks that hold something are revoked, fewest seconds per byte first, among alike ones the earliest: they come back
    last, when least is held beside them.
 4. What blocks will be recomputed on leaves as well, where anything does.
 5. A block that was to keep results of its ops, which it holds on top while it runs, keeps none.

What a block needs is what was measured above the level at its seams, where that is more than the plan's figures say. A
selective block that has no room for its backward gives up what it kept. Where nothing is forecast (`Checkpoint`), no
more is held than leaves room for all other blocks to be recomputed, as told on tensors without content (`Pass.floor`).

How fast copies are decides nothing but how long a step takes: what is on its way out, and in, is held as well, and
leaves before a block begins, or anything is refused, that would have no room beside it. A step in which all fitted
tells that the next one does only if what may be on its way then fits on top (`StepWatch.on_its_way`).

Only when more is taken than is allowed all the same is the step refused, where nobody lends it memory (NOTE [Lent] in
`paging.py`); with `BlockOptions(page=True)` the next one like it runs inside the tensor engine, and so does the rest of
one of which it is known outside of blocks and backwards that it will not fit (`leave`).

A plan may say when each copy in is to begin (`BlockPlan.comes_in`). At that seam it begins if there is room for it that
is free now: beside what is taken, copies out included, and what the running block and all blocks need until its own.
What found no room is tried again at the next seam, in order; what never found any is read when it is wanted.

A forward that was not measured at this place of a step like this one is told on tensors without content first, and
refused before its first op if even the least that it needs is too much, and if what is enough can be told, which
depends on the loss. Whatever is expected of it, every step under a budget is traced: what it took all the same is known
to the byte before an optimizer begins, or when the step ends. No promise rests on a size that is known to fit.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn, Protocol, Self, TypeAlias, final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from spillway.engines.blocks.block import CallReport
from spillway.engines.blocks.block_engine import BlockEngine, HeldCall, without_bytes
from spillway.engines.blocks.meter import AbstractMeter
from spillway.engines.blocks.trace import AbstractTrace, Window
from spillway.engines.tensors.optimizers import Update
from spillway.internals.private import local_of, unheard_by_modes
from spillway.internals.process_memory import Reclaimer
from spillway.memory.budget import Budget
from spillway.methods.actions import Action
from spillway.methods.by_block import BlockSample, Decision, Forecast, InputSize, StepSample
from spillway.methods.mimose.peaks import orders
from spillway.session.inputs import gradient_of, modules_of, parameters_of
from spillway.session.needs import Call, Rise
from spillway.units import Bytes, MiB, Seconds

COARSE: Final[Bytes] = 1 * MiB
"""What the meter may be wrong by. A step is not refused by it for less: before the optimizer begins the trace knows to
the byte."""


def coarse(allowed: Bytes) -> Bytes:
    """What plans leave free: what the meter may be wrong by, at most half a percent of the budget."""
    return min(COARSE, allowed // 200)


ERRS: Final = 20
"""What is told on tensors without content may be too much by one part in so many: kernels have other temporaries."""


SAMPLES: Final = 400
"""And too little by one part in so many: the engine keeps samples of what blocks are called with, which no op makes."""


GROWS: Final = 4
"""A backward that makes a graph of itself may take so many times what the forward has left, and go back through it."""


FURTHER: Final = 3
"""Of a step of which nothing is told: blocks that have not run are reckoned to take at most so many times what it has
taken."""
HOLDING: Final = (Action.KEEP, Action.SELECTIVE)
"""What can be revoked to make room."""
RETURNING: Final = (Action.OFFLOAD, Action.SELECTIVE_OFFLOADED, Action.COMPRESS_OFFLOADED)
"""What they move are bytes that the backward reads, or what these are made of."""
UNBOUNDED: Final[Bytes] = 1 << 62
UNSEEN: Final = 0.25
"""Per byte that autograd saves, what the first call under a selective action may keep beside that: in a layer of a
transformer it is an eighth."""


class Gradient(NamedTuple):
    """One that was there when a step began, which may give it up at any moment: nobody holds it here."""

    storage: Any
    """Torch's weak reference to it."""
    address: int
    nbytes: Bytes

    @classmethod
    def of(cls, storage: torch.UntypedStorage) -> Self:
        weak: Any = StorageWeakRef
        return cls(weak(storage), storage.data_ptr(), storage.nbytes())


class Mark(NamedTuple):
    """A seam that was passed."""

    kind: str
    """"step", "forward", "evaluation", "begins", "ended", "reached", "optimizer" or "updated"."""
    number: int
    """Of the block; -1 without one."""
    of: int
    """The pass, by its number; -1 before the first."""
    at: Seconds
    """When, by `time.perf_counter`."""


@dataclass(slots=True)
class Pass:
    """One forward of the model and its backward."""

    decision: Decision
    forecast: Forecast | None
    size: InputSize
    at: int
    """The mark of its beginning."""
    resident: Bytes
    """When it began."""
    missing: set[int]
    """Parameters that had no gradient then, by id."""
    ended: dict[int, HeldCall] = field(default_factory=dict)
    holds: dict[int, Bytes] = field(default_factory=dict)
    """What each of them holds above what recomputing it would leave."""
    revocable: dict[int, HeldCall] = field(default_factory=dict)
    """Those of them that hold something (HOLDING), and that the backward has not come to."""
    revoked: set[int] = field(default_factory=set)
    calls: Sequence[CallReport] = ()
    """What each took, known when the next pass has begun or the step ended."""
    gradients: Sequence[Bytes] = ()
    """That the backward of each call has created."""
    floor: Bytes = 0
    """What is taken at most if every block is recomputed, where blocks hold something and nothing is forecast; 0
    elsewhere, where that cannot be told, and where blocks are known to have room for all that they are to hold."""
    blind: bool = False
    """Whether it cannot be told: nothing is on its way out or in where a block begins, or goes backward."""

    def knows(self, number: int) -> bool:
        """Whether it is forecast what a call needs."""
        return self.forecast is not None and number < len(self.forecast.saved)

    def held(self, before: int) -> Bytes:
        """What all calls before one hold, less what they were called with and is nowhere in memory."""
        gone: dict[Any, Bytes] = {}
        for number, call in self.ended.items():
            if number < before and call.report.moved_bytes and call.report.action not in RETURNING:
                gone |= call.inputs_gone()
        return sum([held for number, held in self.holds.items() if number < before]) - sum(gone.values())

    @property
    def moves(self) -> bool:
        """Whether the plan has anything wait outside of the device's memory."""
        return self.decision.plan.moves

    @property
    def expected(self) -> Bytes:
        """The peak that the plan expects; 0 where nothing is expected yet."""
        projected = self.decision.plan.projected
        return self.resident + projected if projected else 0


class Foresight(Protocol):
    """Tells of forwards on tensors without content."""

    def call(self, called: tuple[Any, dict[str, Any]]) -> Call:
        """A call of the model, as things are now."""

    def least(self, call: Call, level: Bytes) -> Bytes | None:
        """What it needs at least above what is there, its backward included under gradients; None where that cannot be
        told, or is known to be allowed above this level."""

    def pages(self, level: Bytes, call: Call) -> bool:
        """Whether every op of the step is watched from here on, where a forward begins that is not known to fit, and
        nobody is told of its seams any more."""

    def page_from_here(self) -> bool:
        """The same, where it is known not to fit."""

    def floor(self, call: Call, level: Bytes) -> Bytes | None:
        """What `recomputing` tells, asked once for calls like this one; 0 where blocks can hold all that they are to
        hold above this level, however slow copies are, by what steps took in which they did; None where that cannot be
        told."""

    def rise(self, seam: Seam) -> Bytes:
        """What steps on inputs like this one took at most above what was there at a seam, until the next; 0 where that
        was not measured."""

    @property
    def rebuilt(self) -> bool:
        """Whether the model consists of other modules than were known: its blocks are looked for in the next step."""

    @property
    def under_way(self) -> Bytes:
        """What may be there or not, by when collectives end."""

    @property
    def state(self) -> Bytes:
        """Of the optimizers, that is not there yet."""

    @property
    def update(self) -> Bytes:
        """What their update needs above what is there when a step begins: gradients, state and temporaries."""

    def recomputing(self, call: Call, *, loss: bool = True, action: Action = Action.RECOMPUTE) -> Rise | None:
        """What it and its backward need, if every block is recomputed, as this action has it, and the next one like it
        beside the state that optimizers have by then; None where that cannot be told. The loss needs what the usual
        ones do, or nothing."""

    @property
    def hears_all(self) -> bool:
        """Whether that is all: no mode and no hook of the user's stands around a forward."""


Seam: TypeAlias = tuple[str, int]
"""Before a call begins ("begins"), goes backward ("reached"), or does so and runs again ("again"); of which call."""
Decide = Callable[[Bytes], tuple[Decision, Forecast | None, InputSize, bool]]
"""From what is available: the decision, the forecast, the size, and whether blocks may run as if nobody watched."""


@final
class StepWatch:
    """Told at every seam (`engines.blocks.block_engine.Observer`).

    Args:
        meter: Read at every seam.
        base: What it read when the step began.
        trace: Of the whole step, begun and marked once; None if this step is not traced.
        start: Bytes of the storages that are known by name when the step begins; on CUDA what is allocated then.
        gradients: Of these, gradients: a step may begin by giving them up.
        budget: The account of the session: what is there is what the meter shows at seams, and what the next block is
            expected to need is claimed.
        known: Bytes of the storages that are known by name now.
        foresight: What is told of forwards on tensors without content.
        measured: Whether a step like this one was measured that began with these forwards, evaluations and updates,
            one letter each.
        decide: Asked when a forward begins.
        new: Whether no step like this one was measured, so that libraries may keep what they make for it.
        largest: What the largest block of earlier steps saved.
        reclaimer: Returns freed memory to the system; None to leave it.
    """

    def __init__(
        self,
        engine: BlockEngine,
        meter: AbstractMeter,
        trace: AbstractTrace | None,
        *,
        base: Bytes,
        start: Bytes,
        gradients: Sequence[Gradient],
        budget: Budget,
        known: Callable[[], Bytes],
        foresight: Foresight,
        measured: Callable[[str], bool],
        decide: Decide,
        new: bool,
        largest: Bytes,
        reclaimer: Reclaimer | None,
    ) -> None:
        self.passes: list[Pass] = []
        self.windows: list[Window] = []
        """Of the trace, from mark to mark, when it has ended."""
        self._engine = engine
        self._meter = meter
        self._trace = trace
        self._known = known
        self._foresight = foresight
        self._measured = measured
        self.path = ""
        """Of this step so far, as `measured` takes it."""
        self._start = start
        self._budget = budget
        budget.begin(start)
        self._decide = decide
        self._new = new
        self._reclaimer = reclaimer
        self.largest = largest
        """What the largest block saved so far: while nothing is forecast, the next may need as much."""
        self._marks: list[Mark] = []
        self._stopped: Seconds = 0.0
        self._gradients = [*gradients] if trace is not None else []
        if trace is not None:
            engine.when_freed.append(trace.freed)
        self._base = base
        self._overcounted: Bytes = 0
        self._begins_with: tuple[Bytes, Call] | None = None
        """The level at which the latest forward began, and how it was called."""
        self._died: Bytes = 0
        """Of the gradients that were there when the latest forward began, given up since."""
        self._left = False
        """Whether every op of the step is watched by now, and what seams tell is nobody's business."""
        self._marks.append(Mark("step", -1, -1, time.perf_counter()))

    # ------------------------------------------------------------------------------------------------- while it runs

    @unheard_by_modes
    def forward_begins(self) -> None:
        """Ask the method what to do."""
        if not self.passes and self._foresight.rebuilt and self._foresight.page_from_here():
            return
        at = len(self._marks)
        self._goes_on("f")
        self._engine.wait_out(UNBOUNDED)  # what earlier forwards sent, and may be over and done with
        self._mark("forward", of=len(self.passes))
        resident = self._taken()
        decision, forecast, size, bypassed = self._decide(self._free())
        there = parameters_of(modules_of((self._engine.model,))) if self._trace is not None else []
        missing = {id(one) for one in there if one.requires_grad and gradient_of(one) is None}
        self.passes.append(Pass(decision, forecast, size, at, resident, missing))
        self._engine.bypassed = bypassed
        self._engine.actions = lambda block, call: decision.plan.action(self._engine.begun)
        self._engine.options = decision.plan.options
        # A plan for copies goes by room alone, and makes that at every seam.
        self._engine.write_behind = UNBOUNDED if decision.plan.comes_in else None
        planned = forecast is not None and decision.plan.holds
        called = self._engine.called
        self._begins_with = None
        if called is not None and not bypassed:
            self._begins_with = self._level_here(resident), self._foresight.call(called)
            self._died = 0
            expects = planned and decision.plan.projected > 0
            if self.unmeasured and not expects and self._foresight.pages(*self._begins_with):
                return
            if self.unmeasured and not planned and decision.plan.only_recomputes:
                self._foresee(*self._begins_with)
            if forecast is None and decision.plan.otherwise in (*HOLDING, *RETURNING, Action.RECOMPUTE_OFFLOADED):
                level, call = self._begins_with
                rise = self._foresight.floor(call, level)
                self.passes[-1].floor, self.passes[-1].blind = level + rise if rise else 0, rise is None

    @unheard_by_modes
    def evaluation_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Blocks run plainly in it."""
        if in_backward():
            return  # of a model in somebody's own checkpoint, which runs again
        self._goes_on("e")
        self._engine.wait_out(UNBOUNDED)
        self._mark("evaluation")
        called = without_bytes(args, kwargs)
        if self.unmeasured and called is not None:
            self._foresee(self._least_taken(self._taken()), self._foresight.call(called))

    def _goes_on(self, letter: str) -> None:
        self.path += letter
        self._budget.claim(0)

    @property
    def unmeasured(self) -> bool:
        """Whether this step does what none did that was measured."""
        return not self._measured(self.path)

    def _foresee(self, level: Bytes, call: Call) -> None:
        least = self._foresight.least(call, level)
        if least is None or level + least - least // ERRS <= self._budget.allowed:
            return
        smallest, exact = level + least, self._foresight.hears_all
        if torch.is_grad_enabled():
            rise, state = self._foresight.recomputing(call), self._foresight.state
            if rise is None or 10 * (level + rise.now + rise.slack + state) > 11 * (smallest + state):
                return  # it depends on the loss what is enough: that is measured, and named before anything is updated
            smallest, exact = max(smallest, level + rise.most), rise.sure
        if not self._foresight.page_from_here():
            self._refuse(level + least, self._engine.begun, smallest, exact=exact)

    def graph_grows(self) -> bool:
        """A backward begins that makes a graph of itself, so that what blocks are recomputed to is held beside what it
        makes. Whether it may need more than there is, since no step like this one was measured."""
        self._goes_on("g")
        level = self._taken()
        return self.unmeasured and level + GROWS * (level - self._start) > self._budget.allowed

    def leave(self) -> bool:
        """Every op is to be watched from here on: what blocks hold is given up, to be recomputed storage by storage.

        Returns whether that may be done: not within a backward, nor after the budget was passed, nor where something
        waits elsewhere that the block engine itself would bring back, and there is no room for it now.
        """
        if self._left or in_backward() or self._engine.running:
            return self._left
        windows = self._trace.so_far() if self._trace is not None else []
        if not windows or self._start + max(window.peak for window in windows) > self._budget.allowed:
            return False
        ended = [call for one in self.passes for call in one.ended.values()]
        self._engine.settle()
        for call in ended:
            call.revoke()
        self._taken()
        if self._budget.short(sum(call.absent_bytes for call in ended)) <= 0:
            for call in ended:
                call.come_back()
        self._left = all(call.there[1] for call in ended) and not self._engine.arrived_bytes
        return self._left

    def forward_is_over(self) -> None:
        """Keep what the engine is about to forget. Calling it again does nothing."""
        if self.passes and not self.passes[-1].calls:
            self.passes[-1].calls = self._engine.reports
            self.passes[-1].gradients = self._created(self.passes[-1].missing)

    def block_begins(self, number: int) -> Callable[[], None]:
        """Make room for what it saves, and works with, kept or not."""
        self._mark("begins", number)
        if not self.passes:
            return lambda: None
        now = self.passes[-1]
        needs, beside = self._going_forward(now, number)
        fits = self._make_room(needs + beside, number, known=now.knows(number))
        if (beside and not fits) or self._on_top(now, number) > self._room_beside(now, number):
            self._engine.keep_nothing()
            now.revoked.add(number)
        return partial(self._backward_reaches, len(self.passes) - 1, number)

    def block_ended(self, number: int) -> None:
        """After the last block comes the turn, whose needs are known as a whole."""
        self._mark("ended", number)
        self.largest = max(self.largest, self._engine.reports[number].saved_bytes)
        if not self.passes:
            return
        now = self.passes[-1]
        now.ended[number] = call = self._engine.call(number)
        now.holds[number] = max(call.report.resident_bytes, 0)
        if now.moves and not now.knows(number):  # it may be the last: nobody looks again before the backward
            self._make_room(0, number)
        if now.decision.plan.action(number) in (*HOLDING, *RETURNING):
            now.revocable[number] = call
        self._revoke(-self._room_beside(now, number + 1))
        forecast = now.forecast
        if forecast is not None and number == len(forecast.saved) - 1:
            taken, leaving = self._seen()
            held = now.held(number + 1) + leaving
            if not call.report.action.recomputes and number not in now.revoked:
                held += call.report.result_bytes  # which nobody holds through the turn where the block is recomputed
            beside = taken - now.resident - held
            self._make_room(max(forecast.turn - beside, 0), number, known=True)

    def _backward_reaches(self, of: int, number: int) -> None:
        """What was recomputed comes back."""
        if self._left:
            return
        self._mark("reached", number, of=of)
        one = self.passes[of]
        plan = one.decision.plan
        if plan.comes_in:
            self._engine.read_ahead = 0
        elif plan.prefetches:  # what comes back before it is wanted must not take the room of what is
            self._engine.read_ahead = max(min(self._room_ahead(one, number), self.largest), 0)
        one.revocable.pop(number, None)
        call = one.ended[number]
        _, leaving = self._seen()
        expected, returning = self._going_back(one, number, leaving)
        again = number in one.revoked or (call.report.action.recomputes and not call.report.kept_because)
        surely = max(returning, self._foresight.rise(("again" if again else "reached", number)))
        needed = self._needs(expected, surely)
        fits = self._make_room(needed, number, known=one.knows(number), running=call)
        if not fits and call.report.action.selects and call.revoke():
            one.revoked.add(number)
            one.holds[number] = 0
        if plan.comes_in:
            call.start_in()  # what compute is about to wait for is the first of all copies
            self._read_ahead(one, number)

    def _room_ahead(self, one: Pass, number: int) -> Bytes:
        """For what comes back before the backward of a call is over that wants it, beside what is on its way out."""
        _, leaving = self._seen()
        if one.floor or one.blind:
            return 0 if one.blind else self._room_beside(one, number) - leaving
        return self._free() - max(2 * self.largest, self._foresight.rise(("again", number)))

    def _read_ahead(self, one: Pass, number: int) -> None:
        """Begin the copies in that are due at the beginning of a call's backward."""
        due = {call for call, at in enumerate(one.decision.plan.comes_in[:number]) if at >= number}
        if not due:
            return
        taken, leaving = self._seen()
        allowed = self._budget.allowed - 2 * coarse(self._budget.allowed)  # a copy that is too early ends the step
        allowed -= self._foresight.under_way
        passed, room = 0, UNBOUNDED  # bytes of calls between that are read ahead, and counted among what these save
        for call in range(number, min(due) - 1, -1):
            if call not in one.ended:
                continue  # a plan for more calls than there were
            if call in due:
                begun = one.ended[call].start_in(max(room, 0))
                room -= begun
                if not one.ended[call].there[1]:
                    return
            expected, returning = self._going_back(one, call, leaving)
            # What was measured of recomputed blocks and new gradients is without the result of a kept one, and without
            # what is added to a gradient.
            expected += one.ended[call].report.result_bytes
            if one.forecast is not None and one.knows(call) and not one.missing:
                expected += one.forecast.gradients[call]
            most = max(expected - passed, taken + returning if call == number else 0)
            room = min(room, allowed - most)
            passed += one.ended[call].there[0]

    def _going_back(self, one: Pass, number: int, leaving: Bytes) -> tuple[Bytes, Bytes]:
        """What is expected to be taken at most while a call goes backward, and what will return of it that is not there
        yet, where so much is on its way out; 0 where that is not forecast."""
        forecast = one.forecast
        if forecast is None or not one.knows(number):
            return 0, 0
        call, report = one.ended[number], one.ended[number].report
        there = call.there[0]
        own = 0 if report.kept_because else report.own_bytes
        own += 0 if number in one.revoked else report.beside_bytes
        if report.action not in RETURNING:  # then it is what the call runs on that is away, beside
            own += sum(call.inputs_gone().values())
        holds = one.holds[number]
        created = sum(forecast.gradients[number:]) if one.missing else 0
        # What a block saves goes as its backward goes on, and what was measured counts on that: not so what is leaving.
        created += call.leaving_bytes
        expected = self._beside(one, forecast, number, leaving) - there + created + forecast.working[number] + own
        return expected, max(own - holds - there, 0)

    def _beside(self, one: Pass, forecast: Forecast, number: int, leaving: Bytes) -> Bytes:
        """What is expected to be taken beside what a call saves, works with and creates: what earlier ones hold, and
        what is on its way out, or came in ahead."""
        return one.resident + forecast.rest + one.held(number) + leaving + self._engine.arrived_bytes

    def _needs(self, expected: Bytes, surely: Bytes) -> Bytes:
        """Above what is taken now; so much surely, if more is taken than was expected."""
        return max(expected - self._budget.resident, surely)

    def optimizer_begins(self, needs: Update, *, told: bool) -> Bytes | None:
        """An optimizer is about to change something: whatever is wrong is said now.

        Returns what is left for temporaries; None where every op of the update is watched.

        Args:
            needs: Of its update.
            told: Whether that is sure. Otherwise every op of the update is watched, where that can begin here.

        Raises BudgetInfeasible if what came before it took more than is allowed, or the optimizer will.
        """
        self._budget.claim(0)
        if needs.step(0, self._taken())[0] > self._budget.allowed:
            self._engine.wait_out(UNBOUNDED)
        peak, level = self._budget.peak - COARSE, self._taken() - COARSE
        self.path += "o"
        self._mark("optimizer")
        windows = self._trace.so_far() if self._trace is not None else []
        if windows:
            peak = self._start + max(window.peak for window in windows)
            level = self._start + windows[-1].level
        most, smallest = needs.step(peak, level)
        if most <= self._budget.allowed and told:
            return self._budget.allowed - level - needs.state
        if peak <= self._budget.allowed and self._foresight.page_from_here():
            return None
        if most > self._budget.allowed:
            enough = self._enough(peak) if windows and not needs.held else None
            if enough is not None:
                smallest = min(smallest, max(most, enough, needs.step(0, level)[1]))
            sure = bool(windows) and not in_backward() and (enough is not None or self.recomputes)
            self._refuse(most, self._engine.begun, smallest, exact=sure)
        return self._budget.allowed - level - needs.state

    @property
    def recomputes(self) -> bool:
        """Whether every block was to be: otherwise a step that may take more takes more."""
        plans = [one.decision.plan for one in self.passes]
        return all({*plan.actions, plan.otherwise} == {Action.RECOMPUTE} for plan in plans)

    def recomputing_again(self) -> Rise | None:
        """What another forward like the latest needs above what is there now, if every block is recomputed."""
        if self._begins_with is None:
            return None
        return self._foresight.recomputing(self._foresight.call(self._begins_with[1].called))

    def keeping_gradients(self) -> Bytes | None:
        """What the latest forward and its backward take, if every block is recomputed, where gradients are there before
        it; None where they are, and where that cannot be told."""
        if self._begins_with is None or self._begins_with[1].gradients:
            return None
        level, call = self._begins_with
        trained = {name: one for name, one in self._engine.model.named_parameters() if one.requires_grad}
        gradients = {name: local_of(one).numel() * one.element_size() for name, one in trained.items()}
        rise = self._foresight.recomputing(call._replace(gradients=gradients))
        return None if rise is None else level + sum(gradients.values()) + rise.most

    def optimizer_ended(self) -> None:
        """What an optimizer needed for itself ends here."""
        self._mark("updated")

    def _going_forward(self, one: Pass, number: int) -> tuple[Bytes, Bytes]:
        """What a call needs above what is there, and what it keeps besides under a selective action."""
        forecast = one.forecast
        if forecast is None or not one.knows(number):
            return 0, 0
        saved, selects = forecast.saved[number], one.decision.plan.action(number).selects
        beside = int(self._engine.beside_share(UNSEEN) * saved) if selects else 0
        surely = max(saved, self._foresight.rise(("begins", number)))
        _, leaving = self._seen()
        expected = self._beside(one, forecast, number, leaving) + saved + forecast.working[number]
        return self._needs(expected, surely), beside

    def _make_room(self, needed: Bytes, number: int, *, known: bool = False, running: HeldCall | None = None) -> bool:
        """Have so many bytes free, as far as anything can give way; whether they are.

        Args:
            needed: Above what is there.
            number: Of the block that needs them.
            known: Whether that is all that it needs.
            running: The call that goes backward, and keeps what it has.
        """
        if self._reclaimer is not None:
            self._reclaimer.settle(max(needed, self.largest))
        highest = self._budget.peak
        self._budget.claim(needed)
        self._taken()
        over = self._budget.short(0)
        if not known and self._must_leave(over, number, running):
            self._engine.settle()
            self._taken()
            over = self._budget.short(0)
        if over <= 0:
            return True
        self._give_way(over, running)
        self._budget.claim(0)
        taken = self._taken()
        if taken - COARSE > self._budget.allowed and self._told() is None:
            most = self._meter.most()
            if most is not None and most < taken:
                self._overcounted += taken - most
                self._budget.observe(most, peak=highest)
                taken = most
        self._refuse_above(self._least_taken(taken), number)
        return self._budget.short(needed) <= 0

    def _must_leave(self, over: Bytes, number: int, running: HeldCall | None) -> bool:
        """Whether what is on its way out leaves before a call goes on of which nobody knows what it needs: as much as
        the largest, and its gradients that again."""
        leaving, one = self._engine.leaving_bytes, self.passes[-1]
        if not leaving or one.blind or over + 2 * self.largest > 0:
            return leaving > 0
        own = running.there[0] - running.leaving_bytes if running is not None else 0
        return leaving + max(self._engine.arrived_bytes - own, 0) > self._room_beside(one, number)

    def _on_top(self, one: Pass, number: int) -> Bytes:
        """What the call that begins is reckoned to hold besides while it runs: under a selective action as much as all
        others need, where no call of such a block was seen. One whose inputs leave as it ends holds nothing."""
        action = one.decision.plan.action(number)
        if not one.floor or not action.selects:
            return max(one.holds.values(), default=0) if action is not Action.RECOMPUTE_OFFLOADED else -UNBOUNDED
        share = self._engine.beside_share(-1)
        return int(share * self.largest) if share >= 0 else one.floor - one.resident

    def _room_beside(self, one: Pass, before: int) -> Bytes:
        """What may be held besides what all calls before one hold, for every other to be recomputed beside that; where
        a forecast says so, or nobody can tell, without bounds."""
        return self._budget.allowed - one.floor - one.held(before) if one.floor else UNBOUNDED

    def _give_way(self, over: Bytes, running: HeldCall | None) -> None:
        """So many bytes are too many (see the note at the top)."""
        ended = [call for one in self.passes for call in one.ended.values() if call is not running]
        engine = self._engine
        leaving = engine.leaving_bytes
        for call in ended if over > leaving else ():
            if over > leaving:
                over -= call.forget_arrivals()
        while leaving and over > 0:  # others may hold what has left: then it made no room, and more has to leave
            engine.wait_out(over)
            leaving = engine.leaving_bytes
            self._taken()
            over = self._budget.short(0)
        over = self._revoke(over)
        sent = 0
        for call in ended:
            if over > sent:
                sent += call.send_input()
        if sent:
            engine.settle()

    def _revoke(self, over: Bytes) -> Bytes:
        """Have calls recomputed that hold something; what is still too much."""
        if over <= 0:
            return over
        stayed = self._engine.spill_full
        for one in self.passes if stayed else ():
            for number in one.revocable:
                if one.decision.plan.action(number) in RETURNING:
                    one.holds[number] = max(one.holds[number], one.revocable[number].leaving_bytes)
        found = [
            (one, number)
            for one in self.passes
            for number in one.revocable
            if one.decision.plan.action(number) in HOLDING or (one.holds[number] and (stayed or one.floor))
        ]
        holds = [one.holds[number] for one, number in found]
        seconds = [one.forecast.seconds[n] if one.forecast is not None and one.knows(n) else 0.0 for one, n in found]
        for order in sorted(orders(holds, seconds)):
            if over <= 0:
                break
            one, number = found[order % len(found)]
            call = one.revocable.pop(number)
            stays = call.leaving_bytes if stayed else 0
            freed = call.revoke()
            if stayed:  # `revoke` takes what was to leave for gone
                freed += stays - call.leaving_bytes
            if freed:
                one.revoked.add(number)
                one.holds[number] = 0
            over -= freed
        return over

    def _refuse_above(self, taken: Bytes, number: int) -> None:
        if taken > self._budget.allowed:
            level, call = self._begins_with or (0, None)
            rise = self._foresight.recomputing(call, action=self._least_action) if call is not None else None
            told = level - self._died + rise.most if rise is not None else 0
            if rise is None or told < taken:  # that has been told wrong, or cannot be told
                self._refuse(taken, number, self._reckoned(taken), exact=False)
            self._refuse(taken, number, told, exact=rise.sure)

    @property
    def _least_action(self) -> Action:
        """How blocks are recomputed where room is short: on what waits elsewhere, where the plan is to send that."""
        plan = self.passes[-1].decision.plan
        sends = {*plan.actions, plan.otherwise} == {Action.RECOMPUTE_OFFLOADED} and not self._engine.spill_full
        return Action.RECOMPUTE_OFFLOADED if sends else Action.RECOMPUTE

    def _enough(self, seen: Bytes) -> Bytes | None:
        """For a step that took so much until now, loss included, and for the next one like it, by the latest forward:
        what it took more than was told it takes again, beside the state. None where that cannot be told."""
        if self._begins_with is None:
            return None
        level, rise = self._begins_with[0] - self._died, self._foresight.recomputing(self._begins_with[1], loss=False)
        if rise is None:
            return None
        told = rise.now if len(self.passes) == 1 else rise.later  # then blocks have learned by now
        return max(seen, level + rise.later + rise.state + rise.slack + max(seen - level - told, 0))

    def _reckoned(self, taken: Bytes) -> Bytes:
        """What a step takes of which nothing is told: blocks that have not run yet as much as those that have, on
        average, all of them `FURTHER` times as much at most, as the first may be the largest by far; and the first that
        goes backward as much again as the largest saved."""
        ended = len(self.passes[-1].ended) if self.passes else 0
        if not ended:
            return taken
        grown = max(taken - self.passes[-1].resident, 0)
        first = 0 if in_backward() else max(self.largest, grown // ended)
        more = min(max(len(self._engine.blocks) - ended, 0) * grown // ended, FURTHER * grown)
        return taken + more + first + self._foresight.state

    def _told(self) -> Bytes | None:
        """What is taken now, where the allocator tells it to the byte."""
        level = self._trace.level() if self._trace is not None else None
        return None if level is None else self._start + level

    def _traced_level(self) -> Bytes | None:
        told = self._told()
        if told is not None:
            return told
        windows = self._trace.so_far() if self._trace is not None and not in_backward() else []
        return self._start + windows[-1].level if windows else None

    def _least_taken(self, taken: Bytes) -> Bytes:
        """What is taken now, or less where nobody knows it to the byte."""
        level = self._traced_level()
        return taken - COARSE if level is None else level

    def _level_here(self, taken: Bytes) -> Bytes:
        """What is taken where a forward begins: to the byte where nobody knows it from steps like this one."""
        level = self._traced_level() if self.unmeasured else None
        if level is not None:
            return level
        return self._start if len(self.passes) == 1 else taken

    def _refuse(self, needed: Bytes, number: int, smallest: Bytes, *, exact: bool) -> NoReturn:
        name = self._engine.reports[number].block if number < self._engine.begun else "the step"
        if "o" not in self.path and (torch.is_grad_enabled() or in_backward()):
            smallest = max(self._start + self._foresight.update, smallest)
        raise self._budget.refusal(needed, name, number, smallest, exact=exact)

    def _free(self) -> Bytes:
        """What plans may count on: what was there when it was last looked at, and what the meter may be wrong by, is
        not theirs."""
        return -self._budget.short(0) - coarse(self._budget.allowed)

    def _taken(self) -> Bytes:
        """Now, by the allocator if it tells; else by the meter, and where that leaves no room for what is claimed, by
        the trace as well if there is one."""
        told = self._told()
        if told is not None:
            self._budget.observe(told)
            return told
        taken = self._start + self._meter.read() - self._base - self._overcounted
        if taken < self._start and taken < (known := self._known()):
            self._base -= known - taken  # something else than the step's has gone since, and makes no room
            taken = known
        if (
            taken + self._budget.claimed > self._budget.allowed
            and self._new
            and self._trace is not None
            and not in_backward()
        ):
            taken -= self._count_again(taken)
        self._budget.observe(taken)
        return taken

    def _seen(self) -> tuple[Bytes, Bytes]:
        """What is taken now, and what of it is on its way out: workers let go of that at any moment."""
        leaving, taken = self._engine.leaving_bytes, self._taken()
        while (now := self._engine.leaving_bytes) != leaving:
            leaving, taken = now, self._taken()
        return taken, leaving

    def _count_again(self, taken: Bytes) -> Bytes:
        """What the meter has counted besides tensors, less what was known of that before.

        Libraries keep what they made for sizes that are new to them. Within a backward no trace can be read: autograd
        puts the thread's callbacks back after every node, those of a profiler included.
        """
        windows = self._trace.so_far() if self._trace is not None else []
        if not windows:
            return 0
        besides = max(taken + self._overcounted - self._start - windows[-1].level, 0)
        more = besides - self._overcounted
        self._overcounted = besides
        return more

    def _mark(self, kind: str, number: int = -1, *, of: int | None = None) -> None:
        self._budget.claim(0)  # what was expected has come, or not
        self._marks.append(Mark(kind, number, len(self.passes) - 1 if of is None else of, time.perf_counter()))
        if self._trace is not None:
            for gone in [one for one in self._gradients if one.storage.expired()]:
                self._gradients.remove(gone)
                self._died += gone.nbytes
                self._trace.died(gone.address, gone.nbytes)
            self._trace.mark()

    def _created(self, missing: set[int]) -> list[Bytes]:
        """By call: gradients of parameters that had none; those of a module that is called again by its last call."""
        found = []
        for number in reversed(range(self._engine.begun)):
            own = {id(one): one for one in self._engine.module(number).parameters() if id(one) in missing}
            missing = missing - own.keys()
            found.append(sum(local_of(one).numel() * one.element_size() for one in own.values()))
        return found[::-1]

    # ------------------------------------------------------------------------------------------------ when it is over

    def stop(self) -> None:
        """Nothing is measured from here on. Calling it again does nothing."""
        if self._trace is not None:
            if self._trace.freed in self._engine.when_freed:
                self._engine.when_freed.remove(self._trace.freed)
            self.windows = self._trace.stop()
            self._trace, self._stopped = None, time.perf_counter()
        self.forward_is_over()

    @property
    def traced(self) -> bool:
        """Whether peaks are measured."""
        return bool(self.windows)

    @property
    def peak(self) -> Bytes:
        """Of the whole step: measured if it was traced, and otherwise the most that was seen or expected."""
        if self.windows:
            return self._start + max(window.peak for window in self.windows)
        return max([self._budget.peak, *(one.expected for one in self.passes)])

    @property
    def on_its_way(self) -> Bytes:
        """What may have been on its way out or in beside what was taken, had copies been slower, or the room larger:
        what one call sends, and what is read ahead."""
        sent = [call.report.moved_bytes for one in self.passes for call in one.ended.values()]
        return max(sent, default=0) + self.largest * any(one.decision.plan.prefetches for one in self.passes)

    @property
    def passed(self) -> Bytes:
        """When it is over: what it took, if that is more than is allowed and no optimizer's doing; else 0."""
        pairs = zip(self._marks, self.windows, strict=False)  # no windows where others profiled
        peaks = [window.peak for mark, window in pairs if mark.kind != "optimizer"]
        most = self._start + max(peaks, default=0)
        return most if peaks and most > self._budget.allowed else 0

    @property
    def updates(self) -> list[Update]:
        """What each optimizer took, as far as it was measured."""
        levels = [window.level for window in self.windows]
        found = []
        for at, (mark, window) in enumerate(zip(self._marks, self.windows, strict=False)):
            if mark.kind == "optimizer":
                state = max(levels[min(at + 1, len(levels) - 1)] - window.level, 0)
                found.append(Update(state, window.peak - window.level - state))
        return found

    def _end_of(self, one: Pass) -> int:
        """The mark at which a pass was over: that of the next, or of an update after the backward. Hooks of gradients
        may update in the middle of it."""
        kinds = [mark.kind for mark in self._marks]
        end = next((at for at in range(one.at + 1, len(kinds)) if kinds[at] == "forward"), len(kinds))
        back = max((at for at in range(one.at, end) if kinds[at] == "reached"), default=one.at)
        return next((at for at in range(back, end) if kinds[at] == "optimizer"), end)

    def samples(self) -> list[tuple[Pass, StepSample, list[BlockSample], dict[Seam, Bytes]]]:
        """What a traced step has to tell of each of its passes that went backward, and of whose calls none failed; with
        what was taken at most above what was there at each seam."""
        latest = 0
        if not self.traced or "g" in self.path:  # nor of one through a graph that a backward has made
            return []
        for mark in self._marks:
            latest = max(latest, mark.of)
            if mark.kind == "reached" and mark.of < latest:
                return []  # a backward of an earlier forward beside a later one: no step that a forecast is of
        found = []
        for one in self.passes:
            end = self._end_of(one)
            over = self._marks[end].at if end < len(self._marks) else self._stopped
            rates = self._engine.lane_rates() if one.moves else (0.0, 0.0)
            measured = _Measured(one, self._marks[one.at : end], self.windows[one.at : end], over, rates)
            if measured.went_backward and measured.whole:
                found.append((one, *measured.samples(), measured.rises()))
        return found


@final
class _Measured:
    """Reads the samples of one pass out of its marks.

    Args:
        marks: From the beginning of its forward on.
        windows: Of the trace, from mark to mark.
        over: When it was over.
        rates: Bytes a second of its copies, out and in.
    """

    def __init__(
        self, one: Pass, marks: Sequence[Mark], windows: Sequence[Window], over: Seconds, rates: tuple[float, float]
    ) -> None:
        self._pass = one
        self._over, self._rates = over, rates
        self._marks = marks
        self._windows = windows
        self._base = windows[0].level
        self._reached = {mark.number: at for at, mark in enumerate(marks) if mark.kind == "reached"}

    @property
    def went_backward(self) -> bool:
        """Whether every block was reached that saved anything: otherwise the graph was not used, or not to its end."""
        calls = self._pass.calls
        return bool(self._reached) and all(n in self._reached for n, call in enumerate(calls) if call.saved_bytes)

    @property
    def whole(self) -> bool:
        """Whether every call ended that began: what the model lets fail takes another time what it did not take now."""
        begun, ended = ({mark.number for mark in self._marks if mark.kind == kind} for kind in ("begins", "ended"))
        return begun == ended

    def rises(self) -> dict[Seam, Bytes]:
        """Without those of calls that selected, which is reckoned on top."""
        found: dict[Seam, Bytes] = {}
        for mark, window in zip(self._marks, self._windows, strict=True):
            if mark.kind in ("begins", "reached") and not self._pass.decision.plan.action(mark.number).selects:
                again = mark.kind == "reached" and self._recomputes(mark.number)
                found["again" if again else mark.kind, mark.number] = window.peak - window.level
        return found

    def samples(self) -> tuple[StepSample, list[BlockSample]]:
        one = self._pass
        back = min(self._reached.values())
        turn = max(at for at, mark in enumerate(self._marks) if mark.kind == "ended")
        recomputed = frozenset(number for number in range(len(one.calls)) if self._recomputes(number))
        # What was revoked was there at first, perhaps at the peak: the plan accounts for that, not what came of it.
        step = StepSample(
            size=one.size,
            recomputed=recomputed - one.revoked,
            peak=self._most(0, len(self._marks)),
            turn_peak=self._most(turn, back),
            backward_peak=max(self._most(0, turn), self._most(back, len(self._marks))),
            projected=one.decision.plan.projected,
            available=one.decision.plan.available,
            out_rate=self._rates[0],
            in_rate=self._rates[1],
        )
        saved = [0 if call.kept_because else call.own_bytes for call in one.calls]
        held = [self._left(number, recomputed, saved) for number in range(len(saved))]
        totals, seconds = self._totals(saved, held), self._seconds_back()
        least = min(totals[number] for number in self._reached)
        named = Counter(key for call in one.calls for key, _ in call.inputs)
        blocks = [
            BlockSample(
                block=number,
                size=one.size,
                nbytes=saved[number] if call.rehearsed_bytes is None or call.kept_because else call.rehearsed_bytes,
                seconds=call.seconds,
                working=max(totals[number] - least, 0),
                gradients=one.gradients[number],
                action=one.decision.plan.action(number),
                leaving=0 if call.kept_because else call.leaving_bytes,
                inputs=sum(nbytes for key, nbytes in call.inputs if named[key] == 1),
                holds_result=call.result_bytes,
                kept=call.kept_bytes if call.skipped_ops else 0,
                beside=totals[number],
                backward=seconds.get(number, 0.0),
                again=call.recompute_seconds if call.recomputes == 1 else 0.0,
            )
            for number, call in enumerate(one.calls)
        ]
        return step, blocks

    def _left(self, number: int, recomputed: frozenset[int], saved: Sequence[Bytes]) -> Bytes:
        """What the block's forward left for its backward, of its own."""
        one = self._pass
        if number not in recomputed:
            return saved[number]
        selects = one.decision.plan.action(number) is Action.SELECTIVE and number not in one.revoked
        return one.calls[number].kept_bytes if selects else 0

    def _seconds_back(self) -> dict[int, Seconds]:
        """Of each block's backward, without its second run; none where it may have waited for copies."""
        if self._pass.moves:
            return {}
        order = sorted(self._reached, key=self._reached.__getitem__)
        began = [self._marks[self._reached[number]].at for number in order]
        calls = self._pass.calls
        return {
            number: max(end - begin - calls[number].recompute_seconds, 0.0)
            for number, begin, end in zip(order, began, [*began[1:], self._over], strict=True)
        }

    def _recomputes(self, number: int) -> bool:
        """Whether the backward found nothing of the block there."""
        one = self._pass
        if one.calls[number].kept_because:
            return False
        return number in one.revoked or not one.decision.plan.keeps(number)

    def _totals(self, saved: Sequence[Bytes], held: Sequence[Bytes]) -> list[Bytes]:
        """What each block needs beside its own saved bytes, what earlier ones hold, and the gradients that are there.

        The least of them is the rest of the step at every moment, and what a block needs above that is what it works
        with: so every moment of this step comes out as it was measured.
        """
        one = self._pass
        order = sorted(self._reached, key=self._reached.__getitem__)
        ends = [self._reached[number] for number in order[1:]]
        found = [0] * len(one.calls)
        there = 0
        for number, end in zip(order, [*ends, len(self._marks)], strict=True):
            there += one.gradients[number]
            before = sum(held[:number])
            found[number] = self._most(self._reached[number], end) - there - before - saved[number]
        begun = {mark.number: at for at, mark in enumerate(self._marks) if mark.kind == "begins"}
        ended = {mark.number: at for at, mark in enumerate(self._marks) if mark.kind == "ended"}
        for number, at in begun.items():
            before = sum(held[:number])
            forward = self._most(at, ended[number]) - before - saved[number]
            found[number] = max(found[number], forward)
        return found

    def _most(self, start: int, end: int) -> Bytes:
        return max((window.peak for window in self._windows[start:end]), default=self._base) - self._base


def in_backward() -> bool:
    """Whether this thread runs what a backward calls, such as an optimizer that a hook steps: more of it is to come."""
    return int(torch._C._current_graph_task_id()) >= 0
