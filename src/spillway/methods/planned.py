"""A plan, followed as a policy: what a planner decided before the step is proposed as the step comes to it.

NOTE [When]. A gap [start, end) begins as op `start - 1` ends, and what comes back is there before op `end`. In between:

 1. A move's copy out begins so early that it should be done by then, but not before its value exists. Compute waits
    for what is not done: the plan's bytes are kept, its time may not be.
 2. What comes back from the slower tier is fetched so early that it should be there, but not so early that the bytes on
    their way would raise the step above the plan's projected peak: what is on its way counts.
 3. What is recomputed comes back right before op `end`, leaves first, by the plan's own ops; what has the same ops
    and the same `end` by one replay.
 4. Where copies begin at ops instead (`begin="at op"`), the copy out begins right after the last use before the gap,
    and the copy in before op `end`: from there on its bytes count. The first op that uses them waits for them; if that
    is op `end` itself, nobody else copies them.
 5. A recipe that the controller refuses becomes a move, and so does that of a value that is written over without coming
    back, or one that names no ops, of a value that dies: the same bytes leave.

When the step creates other storages than the recorded one, the plan is not about it: nothing more is proposed in that
step but the stalest storage, when room is short.

`SelfPlanned` is what a session makes of a planner: it follows the plans of the steps that the session has recorded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self, final, get_args

from spillway.errors import UsageError
from spillway.ir import Gap, Plan, Recompute, Step, StorageId, StorageInfo
from spillway.ir.account import account, comes_back
from spillway.ir.lives import lives_of
from spillway.ir.timeline import Kind
from spillway.methods.base import (
    NEVER,
    AbstractPlanner,
    AbstractPolicy,
    Begin,
    Candidate,
    Copy,
    Drop,
    Fetch,
    MemoryView,
    Moments,
    Move,
    Proposal,
    Restore,
)
from spillway.units import Bytes, Seconds


@final
@dataclass(frozen=True, slots=True)
class _Sized:
    """A storage that only has a size, to ask how long copying it takes."""

    nbytes: Bytes
    number: int = -1
    touched: int = 0
    kind: str | None = None


@final
class Planned(AbstractPolicy):
    """Follows a plan, and moves the stalest storages where that is not enough.

    Arguments:
        plan: As `ir.verify` accepts it for `step`.
        step: The recorded step. Where its ops have no seconds, copies begin as early as they may.
        ahead: Copies begin so many times their own seconds before they have to be done; 0 begins none early.
        begin: "in time" as just said, or "at op"; the planner says which (`AbstractPlanner.begin`).

    Raises UsageError if the plan is for another step, `ahead` is negative, or `begin` is neither of the two.
    """

    name = "planned"
    follows = True

    def __init__(self, plan: Plan, step: Step, *, ahead: float = 1.5, begin: Begin = "in time") -> None:
        if plan.step != step.digest():
            raise UsageError(f"The plan is for step {plan.step:.12}, and this is step {step.digest():.12}.")
        if not ahead >= 0:
            raise UsageError(f"A plan is followed with `ahead` of 0 or more, got {ahead}.")
        if begin not in get_args(Begin):
            raise UsageError(f"Copies begin {' or '.join(map(repr, get_args(Begin)))}, got {begin!r}.")
        self.plan = plan
        self.step = step
        self.ahead = ahead
        self.begin = begin
        self.diverged: int | None = None
        """The op of the last step at which it was seen to be another than the recorded one; None if it was not."""
        self._gaps = _Gaps(plan, step)
        self._created = _created(step)
        self._sources = [info for info in step.storages if info.present_at_start]
        self.ops = len(step.ops)
        """How many the recorded step has."""
        self._storages: dict[StorageId, Candidate] = {}
        self._copies: dict[int, list[Gap]] = {}
        self._fetches: dict[int, list[Gap]] = {}
        self._waits: dict[int, list[Gap]] = {}
        self._moments = NEVER
        self._scheduled_for: tuple[Seconds, bool] | None = None

    @classmethod
    def as_meant(cls, plan: Plan, step: Step, planner: AbstractPlanner) -> Self:
        """With copies that begin when the planner of the plan has them begin."""
        return cls(plan, step, begin=planner.begin) if planner.copies_beside else cls(plan, step, ahead=0)

    def relieve(self, view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        """Reality needs more than the plan says: the stalest storages are moved."""
        for storage in view.candidates():
            yield Move(storage)

    def begin_step(self, view: MemoryView, present: Sequence[Candidate]) -> Generator[Proposal, bool, None]:
        """Find the storages that the step begins with; let go what is gone from the beginning, fetch what is not."""
        self._schedule(view)
        self._storages = _matched_by_kind(self._sources, present)
        self.diverged = None if len(self._storages) == len(self._sources) else 0
        if self.diverged is not None:
            return
        away = {storage.number for storage in view.moved()}
        yield from self._leave(0, away)
        gone = {self._gaps.storage_of(gap) for gap in self._gaps.starting.get(0, ())}
        back = Fetch if self._beside(view) and self.begin == "at op" else Restore
        for number, storage in self._storages.items():
            if number not in gone and storage.number in away:
                yield back(storage)
        if self.begin == "at op":
            yield from self._copy(view, 0)

    def moments(self) -> Moments:
        return self._moments

    def before_op(self, view: MemoryView, op: int) -> Generator[Proposal, bool, None]:
        """Bring back what has to be there, then begin what takes long."""
        if self.diverged is not None or op > self.ops:
            return
        for gap in self._waits.get(op, ()):
            storage = self._storage(gap)
            if storage is not None and view.away(storage):
                yield Restore(storage)
        for gap in self._fetches.get(op, ()):
            storage = self._storage(gap)
            if storage is not None and view.away(storage):
                yield Fetch(storage)
        if self.begin == "in time":
            yield from self._copy(view, op)

    def after_op(self, view: MemoryView, op: int, created: Sequence[Candidate]) -> Generator[Proposal, bool, None]:
        """Learn which storage is which, and let go."""
        if self.diverged is not None:
            return
        expected = self._created[op] if op < self.ops else []
        found = _matched(expected, created) if expected else {}
        if len(found) < len(expected) or op >= self.ops:
            self.diverged = op
            return
        self._storages.update(found)
        yield from self._leave(op + 1)
        if self.begin == "at op":  # in front of what is fetched before the next op
            yield from self._copy(view, op + 1)

    def _copy(self, view: MemoryView, op: int) -> Generator[Proposal, bool, None]:
        for gap in self._copies.get(op, ()):
            storage = self._storage(gap)
            if storage is not None and not view.away(storage) and not view.copied(storage):
                yield Copy(storage)

    def _beside(self, view: MemoryView) -> bool:
        """Whether copies run beside ops."""
        return view.overlaps and self.ahead > 0

    def _leave(self, start: int, away: Collection[int] = ()) -> Generator[Proposal, bool, None]:
        for gap in self._gaps.starting.get(start, ()):
            storage = self._storage(gap)
            if storage is None or storage.number in away:
                continue
            if isinstance(gap.home, Recompute) and self._gaps.may_drop(gap, gap.home):
                granted = yield Drop(storage, frozenset(gap.home.ops), gap.end)
                if granted:
                    continue
            yield Move(storage)

    def _storage(self, gap: Gap) -> Candidate | None:
        return self._storages.get(self._gaps.storage_of(gap))

    # ------------------------------------------------------------------ how early

    def _schedule(self, view: MemoryView) -> None:
        """Say before which op each copy begins, by the bandwidth that the view knows; anew if that changed much."""
        known, rate = self._scheduled_for, view.transfer_seconds(_Sized(1 << 26))
        beside = self._beside(view)
        if known is not None and known[1] == beside and known[0] / 2 <= rate <= known[0] * 2:
            return
        self._scheduled_for = (rate, beside)
        gaps, at_op = self._gaps, self.begin == "at op"
        self._copies, self._fetches, self._waits = defaultdict(list), defaultdict(list), gaps.ending
        if beside:
            for gap, op in gaps.copies_at_once() if at_op else gaps.copies_out(view, self.ahead):
                self._copies[op].append(gap)
            if at_op:
                self._fetches, self._waits = gaps.fetches_at_once()
            else:
                for gap, op in gaps.fetches(view, self.ahead):
                    self._fetches[op].append(gap)
        ending = [op - 1 for op in (*gaps.starting, *(self._copies if at_op else ())) if op]
        leaving = {gaps.storage_of(gap) for gap in self.plan.gaps}
        creating = (op for op, created in enumerate(self._created) if any(number in leaving for number, _ in created))
        self._moments = Moments(
            before=frozenset((*self._fetches, *self._waits, *(() if at_op else self._copies))),
            after=frozenset((*ending, *creating)),
            creates=tuple(sum(nbytes for _, nbytes in created) for created in self._created),
        )


@final
class SelfPlanned(AbstractPolicy):
    """Follows what a planner made of the step that is about to run; where nothing was made yet `otherwise` makes room.
    Without one, and in a step that is recorded or turns out to be another, the stalest storages are moved.

    Nothing is dropped while a step is recorded: a drop holds its leaves alive, and the record would tell of lives that
    are not its own.

    Arguments:
        planner: What a session shows the steps that it has recorded. Its name is the name of this.
        otherwise: What makes room in steps that are neither planned nor recorded, and lends this its name: the planner
            is asked only about steps that have come back often. None to plan as soon as may be, and to move until then.
        often: After how many steps of a kind one is recorded.
    """

    follows = True

    def __init__(self, planner: AbstractPlanner, otherwise: AbstractPolicy | None = None, *, often: int = 1) -> None:
        self.planner = planner
        self.otherwise = otherwise
        self.often = often
        decides = otherwise or planner
        self.name = decides.name
        self.uses_recipes = planner.uses_recipes or decides.uses_recipes
        self.planned: Planned | None = None
        """What the step that runs follows."""
        self.recorded = False
        """Whether the step that runs is written down."""

    @property
    def asked(self) -> bool:
        """Whether the user named the planner, and not `auto`."""
        return self.otherwise is None

    def relieve(self, view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        if self.otherwise is not None and self.planned is None and not self.recorded:
            yield from self.otherwise.relieve(view, needed)
            return
        for storage in view.candidates():
            yield Move(storage)

    def begin_step(self, view: MemoryView, present: Sequence[Candidate]) -> Generator[Proposal, bool, None]:
        if self.planned is not None:
            yield from self.planned.begin_step(view, present)

    def moments(self) -> Moments:
        return NEVER if self.planned is None else self.planned.moments()

    def before_op(self, view: MemoryView, op: int) -> Generator[Proposal, bool, None]:
        if self.planned is not None:
            yield from self.planned.before_op(view, op)

    def after_op(self, view: MemoryView, op: int, created: Sequence[Candidate]) -> Generator[Proposal, bool, None]:
        if self.planned is not None:
            yield from self.planned.after_op(view, op, created)


def _created(step: Step) -> list[list[tuple[StorageId, Bytes]]]:
    """Of every op the storages that it creates."""
    made = [[step.values[value] for value in op.creates] for op in step.ops]
    return [
        [
            (value.storage, step.storages[value.storage].nbytes)
            for value in values
            if value.version == 0 and not step.storages[value.storage].present_at_start
        ]
        for values in made
    ]


def _matched(expected: Sequence[tuple[StorageId, Bytes]], found: Sequence[Candidate]) -> dict[StorageId, Candidate]:
    """Those that were expected among those that were found, in their order and by their size; the first that is
    missing ends it."""
    matched: dict[StorageId, Candidate] = {}
    rest = iter(found)
    for number, nbytes in expected:
        storage = next((one for one in rest if one.nbytes == nbytes), None)
        if storage is None:
            break
        matched[number] = storage
    return matched


def _matched_by_kind(expected: Iterable[StorageInfo], found: Sequence[Candidate]) -> dict[StorageId, Candidate]:
    """Those that were expected among those that were found: of one kind and size, in their order. What nobody named
    came from outside."""
    alike: dict[tuple[str | None, Bytes], list[Candidate]] = defaultdict(list)
    for storage in reversed(found):
        alike[storage.kind or Kind.INPUT.value, storage.nbytes].append(storage)
    places = ((info.id, alike[info.kind.value, info.nbytes]) for info in expected)
    return {number: storages.pop() for number, storages in places if storages}


# ---------------------------------------------------------------------- the plan's gaps, and its bytes


@final
class _Gaps:
    """A plan's gaps by when they begin and end, and the bytes that the plan has at every moment."""

    def __init__(self, plan: Plan, step: Step) -> None:
        self._step, self._plan, self._lives = step, plan, lives_of(step)
        self.starting: dict[int, list[Gap]] = defaultdict(list)
        self.ending: dict[int, list[Gap]] = defaultdict(list)
        self.coming_back: set[Gap] = set()
        """Gaps at whose end the value is there again. Nobody has looked whether the others could be recomputed."""
        for gap in plan.gaps:
            self.starting[gap.start].append(gap)
            if comes_back(gap, self._lives[gap.value], len(step.ops)):
                self.ending[gap.end].append(gap)
                self.coming_back.add(gap)
        for gaps in self.ending.values():  # moved values first, then every recomputed one after what it may need
            gaps.sort(key=lambda gap: self._lives[gap.value].created if isinstance(gap.home, Recompute) else -2)

    def may_drop(self, gap: Gap, recipe: Recompute) -> bool:
        """Whether the recipe brings it back, or nothing does. What is only written over comes back all the same, and
        the plan has no temporaries for that."""
        return gap in self.coming_back or (bool(recipe.ops) and self._lives[gap.value].dies <= gap.end)

    def storage_of(self, gap: Gap) -> StorageId:
        return self._step.values[gap.value].storage

    def copies_out(self, view: MemoryView, ahead: float) -> Iterable[tuple[Gap, int]]:
        """Before which op each copy out begins."""
        clock, free = self._clock(), float("inf")
        moved = (gap for gaps in self.starting.values() for gap in gaps if not isinstance(gap.home, Recompute))
        for gap in sorted(moved, key=lambda gap: -gap.start):
            free = min(free, clock[gap.start]) - ahead * self._one_way(view, gap)
            op = max(bisect_right(clock, free) - 1, self._lives[gap.value].created + 1)
            if op < gap.start:
                yield gap, op

    def copies_at_once(self) -> Iterable[tuple[Gap, int]]:
        """Before which op each copy out begins if it begins right after the last use."""
        uses: dict[int, list[int]] = defaultdict(list)
        for op in self._step.ops:
            for value in (*op.reads, *op.creates):
                uses[value].append(op.number)
        for gaps in self.starting.values():
            for gap in gaps:
                before = bisect_left(uses[gap.value], gap.start)
                free = uses[gap.value][before - 1] + 1 if before else 0
                if free < gap.start and not isinstance(gap.home, Recompute):
                    yield gap, free

    def fetches_at_once(self) -> tuple[dict[int, list[Gap]], dict[int, list[Gap]]]:
        """Before which op each fetch begins if it begins where the gap ends, and before which op it is waited for: by
        the first that uses the storage. What that very op uses is not fetched before."""
        uses: dict[StorageId, list[int]] = defaultdict(list)
        for op in self._step.ops:
            for storage in {self._step.values[value].storage for value in (*op.reads, *op.creates)}:
                uses[storage].append(op.number)
        begins, waits = defaultdict(list), defaultdict(list)
        for end in sorted(self.ending):
            for gap in self.ending[end]:
                at = uses[self.storage_of(gap)]
                place = bisect_left(at, end)
                first = at[place] if place < len(at) else end
                waits[end if isinstance(gap.home, Recompute) else first].append(gap)
                if first > end and not isinstance(gap.home, Recompute):
                    begins[end].append(gap)
        return begins, waits

    def fetches(self, view: MemoryView, ahead: float) -> Iterable[tuple[Gap, int]]:
        """Before which op each fetch begins."""
        clock, free = self._clock(), float("inf")
        level = account(self._step, self._plan.gaps, self._lives).levels
        for end in sorted(self.ending, reverse=True):
            for gap in reversed(self.ending[end]):
                if isinstance(gap.home, Recompute):
                    continue
                free = min(free, clock[end]) - ahead * self._one_way(view, gap)
                nbytes, op = self._step.storages[self.storage_of(gap)].nbytes, end
                while op - 1 > gap.start and clock[op] > free and level[op - 1] + nbytes <= self._plan.projected:
                    op -= 1
                    level[op] += nbytes
                free = clock[op]  # what comes back before this has to be there by then
                if op < end:
                    yield gap, op

    def _one_way(self, view: MemoryView, gap: Gap) -> Seconds:
        return view.transfer_seconds(_Sized(self._step.storages[self.storage_of(gap)].nbytes)) / 2

    def _clock(self) -> list[Seconds]:
        """Before every op, and after the last, how long the ops before it take."""
        return list(accumulate((op.seconds or 0.0 for op in self._step.ops), initial=0.0))
