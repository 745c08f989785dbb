"""DyNN-Offload: what a pilot foresees comes in ahead, and what is used again last leaves first.

Ren et al., "Enabling Large Dynamic Neural Network Training with Learning-based Memory Management", HPCA 2024, section
IV-E. The pilots in `pilots/` foresee a forward. `DynnOffload` moves storages of a step that runs, by what is foreseen
of its forward and by the tape of it from then on; `DynnOffloadPlanner` plans a step whose path is known, or was
recorded, in execution blocks.

The planner differs from the paper in:

- What is not needed by the next block stays where there is room for it, and what is used again last leaves first. As
  published (`as_published`) device memory is two halves, and all that neither this block nor the next touches leaves.
- Blocks fill the share of the budget that takes the least time (`SHARES`). As published they fill half of it, cut by
  dynamic programming in place of Sentinel's partition, of which the paper says that it maximizes the overlap.
- A copy out begins right after the last use, not when the next block begins. And blocks say what moves, but not when:
  a copy in begins as soon as there is room for it, however many blocks ahead (`_Earlier`). As published it begins
  during the block before.
- Storages below `SMALLEST` stay, as the engines do not move them.

The policy differs from the paper in:

- Parameters of the forward alone are foreseen. What the backward reads is what the forward left, in reverse, and the
  optimizer's order is known when it begins: nothing is predicted that is known.
- There are no two halves. Whatever is used again last leaves first, and what comes next comes in where there is room,
  or where something leaves for it that is used later.
- Where the forward is another than foreseen, what is expected is put right at that op (`pilots/course.py`); what is on
  its way comes in, and nothing else that was foreseen is fetched. The paper brings the missing block in on demand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import inf
from os import PathLike
from typing import Final, NamedTuple, Self, TypeAlias, final

import numpy as np

from spillway.costs.device import Device
from spillway.errors import BudgetInfeasible
from spillway.ir import Gap, Host, Plan, StorageId
from spillway.ir.account import account
from spillway.ir.lives import Life, lives_of, versions_of
from spillway.ir.timeline import Kind
from spillway.methods.absent_bytes import comes_in
from spillway.methods.base import (
    SMALLEST,
    AbstractPlanner,
    AbstractPolicy,
    Candidate,
    Copy,
    Fetch,
    MemoryView,
    Move,
    Problem,
    Proposal,
)
from spillway.methods.plan_clock import PlanClock
from spillway.pilots.course import Course
from spillway.pilots.decisions import DecisionPilot
from spillway.pilots.execution_blocks import SHARES, Cuts, Touches, Uses, largest_op, max_fill, search_blocks
from spillway.pilots.paths import Dynamism
from spillway.pilots.pilot import AbstractPilot
from spillway.pilots.program import Group, Program
from spillway.pilots.simple_pilots import SIMPLE
from spillway.units import Bytes, Seconds

TIGHTER: Final = 0.9
"""Of the room for two blocks, what is tried next where what stays, or is on its way, was too much."""
TRIES: Final = 24

PilotMaker: TypeAlias = Callable[[Program], AbstractPilot]
"""A pilot of a network, which has learned nothing."""
PILOTS: Final[tuple[PilotMaker, ...]] = (*SIMPLE, DecisionPilot)
"""Who is asked in a session, program order in front, which is the floor."""

ENOUGH: Final = 0.92
"""Share of the budget up to which storages come in ahead; the rest is for what ops make meanwhile."""
ARRIVING: Final = 3
"""Storages on their way in at a time."""
LOOKED_AT: Final = 12
"""Storages that are looked at, in the order of their use, each time that something may be fetched."""
LEAVING: Final = 4
"""Copies out that begin at a time for what is to leave."""
RANKED_FOR: Final = 24
"""Ops for which a ranking of what leaves is used."""
FRESH: Final = 16
"""Ops since its last use for which what a backward made, and nobody has named, is taken for a gradient on its way; what
is older waits for the optimizer."""
PASSED: Final = 8
"""Uses of groups that a backward may skip before it is seen where it is."""

FORWARD, BACKWARD, UPDATE, LATER = 0.0, 1.0, 2.0, 3.0
"""When a storage is used next: in what is left of the phase that runs, from 0 to 1, and in those after it."""


class _NextUse(NamedTuple):
    """When a storage is used next, and the storage."""

    use: float
    storage: Candidate


@final
class DynnOffload(AbstractPolicy):
    """Storages come and go by when they are used next: in the forward as a pilot foresees it, then as is known.

    A session (`session/foreseen_steps.py`) tells it how the forward goes. Where nobody does, it knows of every storage
    only when it was used last.

    Arguments:
        pilot: A file of `spillway pilot train`: a pilot that takes part from the first step on. One that cannot be
            used is named in a warning, and the session goes on without it.
        dynamism: How batches are described to pilots; found in the model if it is left out.
        pilots: Who takes part, each made for the session's network; the first acts until another does better.
    """

    name = "dynn-offload"
    uses_recipes = False
    foresees = True

    def __init__(
        self, *, pilot: str | PathLike[str] | None = None, dynamism: Dynamism | None = None,
        pilots: Sequence[PilotMaker] = PILOTS,
    ) -> None:  # fmt: skip
        self.pilot_file = pilot
        self.dynamism = dynamism
        self.pilots = tuple(pilots)
        self.course: Course | None = None
        """How the forward goes."""
        self._members: Sequence[Sequence[Candidate]] = ()
        self._group_of: dict[int, Group] = {}
        self._places: Mapping[int, int] = {}
        self._updated: Sequence[Candidate] = ()
        self._done = 0
        self._backward_at: int | None = None
        self._update_at: int | None = None
        self._ranking: list[tuple[float, int, Candidate]] = []
        self._ranked_at = -RANKED_FOR
        self._ranked_in = -1.0
        self._tape: list[tuple[int, Group]] = []
        self._taken_at = 0

    # ------------------------------------------------------------------ what a session tells

    def begin_forward(
        self, course: Course, members: Sequence[Sequence[Candidate]], updated: Sequence[Candidate]
    ) -> None:
        """A step begins. `members` [groups] are the storages of the parameters of each group; `updated` is what the
        optimizers use, in their order, as far as it is there before the step."""
        self.course, self._members = course, members
        self._group_of = {one.number: group for group, storages in enumerate(members) for one in storages}
        self._backward_at = self._update_at = None
        self._ranked_at = -RANKED_FOR
        self._expect_update(updated)

    def begin_backward(self, clock: int) -> None:
        """The forward is over: ops from that clock on are the backward's."""
        self._backward_at = self._taken_at = clock
        self._tape = list(self.course.visits) if self.course is not None else []

    def begin_update(self, clock: int, updated: Sequence[Candidate]) -> None:
        """An optimizer begins. `updated` is what it and those after it use, in their order."""
        self._update_at = clock
        self._ranked_at = -RANKED_FOR
        self._expect_update(updated)

    def end_update(self) -> None:
        """It ended; another forward may follow."""
        self._update_at = self._backward_at = None

    def _expect_update(self, updated: Sequence[Candidate]) -> None:
        self._updated, self._done = updated, 0
        self._places = {one.number: place for place, one in reversed(list(enumerate(updated)))}

    # ------------------------------------------------------------------ when a storage is used next

    def _phase(self, view: MemoryView) -> float:
        """Which phase runs; notes how far the update is."""
        if self._update_at is not None:
            while self._done < len(self._updated) and self._updated[self._done].touched >= self._update_at:
                self._done += 1
            return UPDATE
        if view.in_backward and self._backward_at is None:
            self.begin_backward(view.clock)
        return FORWARD if self._backward_at is None else BACKWARD

    def _uses(self, view: MemoryView, phase: float) -> Callable[[Candidate], float]:
        """A function that says when a storage is used next."""
        began = view.clock - view.op_index
        if phase == UPDATE:
            return self._in_update
        if phase == BACKWARD:
            return self._backward_uses(view, began)
        foreseen: dict[int, float] = {}
        ahead = self.course.ahead() if self.course is not None else ()
        for place, group in enumerate(ahead):
            for member in self._members[group]:
                foreseen.setdefault(member.number, place / len(ahead))
        length = view.clock - began + 1

        def in_forward(storage: Candidate) -> float:
            use = foreseen.get(storage.number)
            if use is not None:
                return use
            if storage.touched < began and storage.kind != Kind.INPUT.value:
                return self._after_backward(storage, began)  # the backward reads what the forward has
            return BACKWARD + (view.clock - storage.touched) / length

        return in_forward

    def _after_backward(self, storage: Candidate, began: int) -> float:
        """In the optimizer, where a parameter that the forward did not use has no part."""
        return LATER if storage.touched < began and storage.number in self._group_of else self._in_update(storage)

    def _in_update(self, storage: Candidate) -> float:
        """In the rest of the optimizer, or in the next step: parameters in the forward, optimizer state again in the
        optimizer. Gradients are made anew, but letting one go that is to die costs a copy."""
        place = self._places.get(storage.number, -1)
        if place >= self._done:
            return UPDATE + (place - self._done) / len(self._places)
        group = self._group_of.get(storage.number)
        if group is not None:
            return LATER + group / len(self._members)
        return LATER + (2 if storage.kind == Kind.OPTIMIZER_STATE.value else 1)

    def _backward_uses(self, view: MemoryView, began: int) -> Callable[[Candidate], float]:
        """In the backward: what the forward used, in reverse. A group that the forward used several times is wanted
        again until the backward has passed the first of them."""
        turn, tape = self._backward_at, self._tape
        assert turn is not None
        for place in range(len(tape) - 2, max(len(tape) - PASSED, -1), -1):
            touched = max((one.touched for one in self._members[tape[place][1]]), default=-1)
            if touched >= self._taken_at:  # the backward is in this group, and through those behind it
                self._taken_at = touched + 1
                del tape[place + 1 :]
        passed = tape[-1][0] if tape else began
        last = {group: clock for clock, group in tape}
        length = max(turn - began, 1)

        def use_of(storage: Candidate) -> float:
            group = self._group_of.get(storage.number)
            if group is not None and group in last:
                return max(passed - last[group], 0) / length
            if group is not None or (storage.touched < began and storage.kind != Kind.INPUT.value):
                return self._after_backward(storage, began)
            if storage.touched < turn:
                return max(passed - storage.touched, 0) / length
            fresh = view.clock - storage.touched <= FRESH and storage.number not in self._places
            return 0.0 if fresh else UPDATE

        return use_of

    # ------------------------------------------------------------------ leaving

    def relieve(self, view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        """What is used last of all that may leave goes first."""
        for _, storage in self._last_used(view):
            yield Move(storage)

    def _last_used(self, view: MemoryView) -> Iterator[_NextUse]:
        """From a ranking that is at most so many ops old, then from a new one."""
        phase = self._phase(view)
        stale = view.clock - self._ranked_at >= RANKED_FOR or self._ranked_in != phase
        for again in (True,) if stale else (False, True):
            if again:
                use_of = self._uses(view, phase)
                self._ranking = sorted((use_of(one), one.number, one) for one in view.candidates())
                self._ranked_at, self._ranked_in = view.clock, phase
            ranking = self._ranking
            kept = list[tuple[float, int, Candidate]]()
            try:
                while ranking:
                    entry = ranking.pop()
                    if not view.available(entry[2]) or (not again and entry[2].touched >= self._ranked_at):
                        continue
                    kept.append(entry)
                    yield _NextUse(entry[0], entry[2])
            finally:
                ranking += [entry for entry in reversed(kept) if view.available(entry[2])]

    # ------------------------------------------------------------------ coming

    def looks(self, view: MemoryView) -> bool:
        return view.overlaps and view.anything_moved and view.arriving < ARRIVING

    def foresee(self, view: MemoryView) -> Generator[Proposal, bool, None]:
        """Fetch what is used next; where there is no room for it, let go what is used later."""
        phase = self._phase(view)
        room = int(ENOUGH * view.allowed) - view.resident
        leaving = self._last_used(view)
        arriving = view.arriving
        for use, storage in self._coming(view, phase):
            if arriving >= ARRIVING:
                break
            while room < storage.nbytes:
                freed = yield from self._let_go(view, leaving, use)
                if not freed:
                    return
                room += freed
            if not (yield Fetch(storage)):
                return
            arriving += 1
            room -= storage.nbytes

    def _let_go(self, view: MemoryView, leaving: Iterator[_NextUse], use: float) -> Generator[Proposal, bool, Bytes]:
        """Free what is used after that, if it has a copy already, or begin to copy some; 0 if nothing leaves now."""
        begun = 0
        for later, storage in leaving:
            if later <= use or begun >= LEAVING:
                return 0
            if view.copied(storage):
                if (yield Move(storage)):
                    return storage.nbytes
            elif (yield Copy(storage)):  # it leaves at a later look, when the copy is done
                begun += 1
        return 0

    def _coming(self, view: MemoryView, phase: float) -> Iterator[_NextUse]:
        """What is away, in the order of its use."""
        moved = {one.number: one for one in view.moved()}
        if not moved:
            return
        if phase == UPDATE:
            for storage in self._updated[self._done : self._done + LOOKED_AT]:
                if storage.number in moved:
                    yield _NextUse(UPDATE, storage)
            return
        if phase == FORWARD:
            if self.course is None:
                return
            ahead = self.course.ahead()
            for place, group in enumerate(ahead[:LOOKED_AT]):
                for member in self._members[group]:
                    if member.number in moved:
                        yield _NextUse(place / len(ahead), member)
            return
        use_of = self._uses(view, phase)
        wanted = [_NextUse(use_of(one), one) for one in moved.values()]
        yield from sorted((one for one in wanted if one.use <= BACKWARD), key=lambda one: (one.use, one.storage.number))


@final
class DynnOffloadPlanner(AbstractPlanner):
    """Blocks in memory, the next on its way. With `double_buffer` two halves with nothing kept beside, cut by dynamic
    programming."""

    name = "dynn-offload"
    uses_recipes = False
    begin = "at op"

    def __init__(self, *, double_buffer: bool = False) -> None:
        self.double_buffer = double_buffer

    @classmethod
    def as_published(cls) -> Self:
        """Two halves, the cuts searched."""
        made = cls(double_buffer=True)
        made.name = "dynn-offload-published"
        return made

    def plan(self, problem: Problem) -> Plan:
        """Raises BudgetInfeasible if an op alone needs more than a buffer, or than the budget where halves are not
        rigid, with a budget that does: with more room blocks are others, and may need more as well."""
        try:
            return self._plan(problem)
        except BudgetInfeasible as refused:
            enough = refused.smallest_budget
            while (more := self._needed(replace(problem, allowed=enough))) > enough:
                enough = more
            raise BudgetInfeasible(
                needed=refused.needed, allowed=problem.allowed, op=refused.op, op_index=refused.op_index,
                smallest_budget=enough, exact=True,
            ) from None  # fmt: skip

    def _needed(self, problem: Problem) -> Bytes:
        """What is allowed, if that is enough, or the budget that a refusal names."""
        try:
            self._plan(problem)
        except BudgetInfeasible as refused:
            return refused.smallest_budget
        return problem.allowed

    def _plan(self, problem: Problem) -> Plan:
        step, device, lives = problem.step, problem.device, lives_of(problem.step)
        touches = Touches.of_step(step)
        if self.double_buffer:
            halves = self._gaps(problem, touches, lives, partial(_searched, touches, device))
            return problem.plan_with(halves, lives)
        clock = PlanClock(step, lives, device)
        early = _Earlier(problem, lives, clock)
        fitting, others = list[list[Gap]](), list[tuple[Bytes, list[Gap]]]()
        for share in SHARES:
            gaps = self._gaps(problem, touches, lives, partial(_filled, touches, share))
            peak = account(step, gaps, lives).peak
            if peak > problem.allowed:
                others.append((peak, gaps))
            else:
                fitting += [early.fetched(gaps), early.fetched(early.left(gaps))]
        if not fitting:
            return problem.plan_with(min(others, key=lambda one: one[0])[1], lives)
        return problem.plan_with(min(fitting, key=clock.seconds), lives)

    def _gaps(
        self, problem: Problem, touches: Touches, lives: Sequence[Life], cut: Callable[[Bytes], Cuts]
    ) -> list[Gap]:
        """What leaves and comes by these cuts of so much room, with as much room as lets it keep the budget."""
        step, room = problem.step, problem.allowed
        fixed = sum(one.nbytes for one in step.storages if one.nbytes < SMALLEST)
        gaps: list[Gap] = []
        for _ in range(TRIES):
            try:
                cuts = cut(room)
            except BudgetInfeasible as error:  # two halves of an odd number are a byte less
                raise BudgetInfeasible(
                    needed=error.needed, allowed=problem.allowed, op=error.op, op_index=error.op_index,
                    smallest_budget=error.smallest_budget, exact=True,
                ) from None  # fmt: skip
            gaps = list(_Schedule(problem, touches, cuts, room - fixed, double_buffer=self.double_buffer).gaps())
            if account(step, gaps, lives).peak <= problem.allowed:
                break
            if room * TIGHTER < (2 if self.double_buffer else 1) * largest_op(touches):
                break
            room = int(room * TIGHTER)
        return gaps


def _filled(touches: Touches, share: int, room: Bytes) -> Cuts:
    return max_fill(touches, room // share, alone=room)


def _searched(touches: Touches, device: Device, room: Bytes) -> Cuts:
    return search_blocks(touches, room // 2, device)


@final
class _Earlier:
    """Copies that begin earlier than the block before: blocks say what moves, and memory when it can."""

    def __init__(self, problem: Problem, lives: Sequence[Life], clock: PlanClock) -> None:
        self._problem, self._step, self._lives, self._begins = problem, problem.step, lives, clock.begins

    def _nbytes(self, gap: Gap) -> Bytes:
        return self._step.storages[self._step.values[gap.value].storage].nbytes

    def fetched(self, gaps: Sequence[Gap]) -> list[Gap]:
        """In the same order, each as soon as there is room for it from then on."""
        ops, found, before = len(self._step.ops), list[Gap](), 0
        levels = np.array(account(self._step, gaps, self._lives).during)
        for gap in sorted(gaps, key=lambda one: one.end):
            if comes_in(self._lives[gap.value], gap.end, ops):
                nbytes, first = self._nbytes(gap), max(gap.start + 1, before)
                full = np.flatnonzero(levels[first : gap.end] + nbytes > self._problem.allowed)
                before = min(first + int(full[-1]) + 1 if len(full) else first, gap.end)
                levels[before : gap.end] += nbytes
                gap = replace(gap, end=before)
            found.append(gap)
        return found

    def left(self, gaps: Sequence[Gap]) -> list[Gap]:
        """Each is gone as soon as its copy should be done; what host memory has, right after its last use."""
        ops, values, free = len(self._step.ops), self._step.values, 0.0
        ends = {values[gap.value].storage for gap in gaps if gap.end == ops < self._lives[gap.value].ends}
        hosted = {one.id for one in values if not one.version and one.storage in ends}
        hosted |= {gap.value for gap in gaps if not gap.start}
        found = [gap for gap in gaps if not gap.start]
        uses = [(max(self._used(gap)), gap) for gap in gaps if gap.start]
        for used, gap in sorted(uses, key=lambda one: (one[0], one[1].start)):
            start = max(used, 0) + 1
            if gap.value not in hosted:
                free = max(free, self._begins[start]) + self._problem.device.out_seconds(self._nbytes(gap))
                start = bisect_left(self._begins, free, start, gap.start)
            hosted.add(gap.value)
            found.append(replace(gap, start=start))
        return found

    def _used(self, gap: Gap) -> Iterator[int]:
        return (use for use in self._lives[gap.value].uses if use < gap.start)


@final
@dataclass(frozen=True, slots=True)
class _Away:
    """A storage that left."""

    start: int
    """The op from which on its bytes are gone."""
    used: int
    """The last op that touched it; -1 if none has in this step."""


@final
class _Schedule:
    """What leaves and comes, block by block."""

    def __init__(self, problem: Problem, touches: Touches, cuts: Cuts, room: Bytes, *, double_buffer: bool) -> None:
        self._step, self._device = problem.step, problem.device
        self._cuts, self._room = cuts, room
        self._double_buffer = double_buffer
        self._nbytes: list[Bytes] = touches.nbytes.tolist()
        self._until: list[int] = touches.until.tolist()
        self._clock = list(accumulate(touches.seconds.tolist(), initial=0.0))
        starts, storages = touches.starts, touches.storages
        self._uses = Uses(touches, cuts)
        self._touched: dict[StorageId, list[int]] = {}
        for op in range(touches.ops):
            for storage in storages[starts[op] : starts[op + 1]].tolist():
                self._touched.setdefault(storage, []).append(op)
        self._values = versions_of(problem.step)
        self._away: dict[StorageId, _Away] = {}
        self._present = set[StorageId]()

    def gaps(self) -> Iterator[Gap]:
        yield from ()
        there = {one.id for one in self._step.storages if one.present_at_start}
        self._present = set(there)
        for storage in self._leaving(set(), self._uses.following(-1), -1):
            self._away[storage] = _Away(0, -1)
            self._present.discard(storage)
        for number, block in enumerate(self._uses.blocks):
            yield from self._during(number, block, self._uses.following(number))
        for storage, away in self._away.items():
            yield from self._gap(storage, away, min(self._until[storage], len(self._step.ops)))

    def _during(self, number: int, block: set[StorageId], following: set[StorageId]) -> Iterator[Gap]:
        """Out what leaves, then in what the next block lacks, each from when the link is free."""
        begins, ends = self._cuts[number], self._cuts[number + 1]
        self._present |= block
        free = self._clock[begins]
        for storage in self._leaving(block, following, number):
            free += self._device.out_seconds(self._nbytes[storage])
            used = self._touched.get(storage, [])
            last = used[bisect_left(used, begins) - 1] if used and used[0] < begins else -1
            self._away[storage] = _Away(self._op_at(free, begins, ends), last)
            self._present.discard(storage)
        for storage in sorted(following & self._away.keys(), key=lambda one: self._touched[one][
                bisect_left(self._touched[one], ends)]):  # fmt: skip
            yield from self._gap(storage, self._away.pop(storage), self._op_at(free, begins, ends))
            free += self._device.in_seconds(self._nbytes[storage])
        self._present |= following
        self._present -= {one for one in self._present if self._until[one] <= ends}

    def _leaving(self, block: set[StorageId], following: set[StorageId], number: int) -> list[StorageId]:
        free = [one for one in self._present - block - following if self._nbytes[one] >= SMALLEST]
        wanted = self._uses.nbytes(self._present | block | following) - self._room
        return self._uses.last_used(free, number, inf if self._double_buffer else wanted)

    def _op_at(self, moment: Seconds, begins: int, ends: int) -> int:
        return bisect_left(self._clock, moment, begins, ends)

    def _gap(self, storage: StorageId, away: _Away, end: int) -> Iterator[Gap]:
        """Of the value that the storage holds then."""
        if away.start < end:
            held = self._values[storage]
            value = held[bisect_left(held, (away.used + 1, -1)) - 1][1]
            yield Gap(value=value, start=away.start, end=end, home=Host())
