"""A plan that only recomputes, while it is changed gap by gap, op by op and without a solver.

What a change does to the step is known at once: bytes during and before every op, as `ir.account` counts them, and the
seconds of what runs again, as `ir.recipes.replayed` does. Only replays that a change touches are made again. Changes
are taken back one by one, the last one first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from spillway.ir import Gap, Recompute, Step
from spillway.ir.account import account
from spillway.ir.lives import Life, idle_intervals
from spillway.ir.recipes import WayBack, as_one, replayed, way_back
from spillway.ir.step import StorageId, ValueId
from spillway.methods.base import Absence
from spillway.units import Bytes, Seconds

SHORTLIST: Final = 8
"""Ways to make room that are tried of those that look cheapest."""

IdleId: TypeAlias = int
"""Index of an idle interval."""


@final
@dataclass(frozen=True, slots=True)
class Idle:
    """Ops in which nothing makes or reads a value that can be recomputed."""

    value: ValueId
    start: int
    end: int
    nbytes: Bytes
    back: bool
    """Whether the value is wanted at its end."""


class _Replays(NamedTuple):
    """What runs again before one op."""

    gaps: tuple[Gap, ...]
    seconds: Seconds
    temporaries: Bytes
    touched: frozenset[ValueId]
    """What the replays read or make: where one of these comes or goes, they are others."""


NOTHING: Final = _Replays((), 0.0, -1, frozenset())


@final
class Draft:
    """Which idle intervals are gone, and until when. A byte costs `move_seconds` that leaves without coming back, where
    its way back is not there until it dies: engines move those."""

    def __init__(self, step: Step, lives: Sequence[Life], allowed: Bytes, move_seconds: Seconds = 0.0) -> None:
        self.step, self.lives, self.allowed, self._move = step, lives, allowed, move_seconds
        self.work = 0
        """Ops that were looked at to find ways back, since the beginning: what a search has cost."""
        self.seconds: Seconds = 0.0
        """What runs again, and what is moved."""
        self.idle: list[Idle] = list(_idle(step, lives))
        self.ends: dict[IdleId, int] = {}
        """Those that are gone, and the op before which each is back."""
        self.of_value: dict[ValueId, list[IdleId]] = defaultdict(list)
        for number, one in enumerate(self.idle):
            self.of_value[one.value].append(number)
        plain = account(step, (), lives)
        self._during = np.array([*plain.during, 0], dtype=np.int64)
        self._before = _before(step)
        self._temporaries = np.full(len(step.ops) + 1, -1, dtype=np.int64)
        self._starts = np.array([one.start for one in self.idle], dtype=np.int64)
        self._natural = np.array([one.end for one in self.idle], dtype=np.int64)
        self._nbytes = np.array([one.nbytes for one in self.idle], dtype=np.int64)
        self._until = self._starts.copy()
        self._own = np.array([step.ops[lives[one.value].created].seconds or 0.0 for one in self.idle])
        self._dying = [() if one.back else self._way_until_death(one) for one in self.idle]
        """Of what never comes back: ops of a recipe that holds nothing longer than it lives; empty if there is none."""
        self._ending: dict[int, set[IdleId]] = defaultdict(set)
        self._replays: dict[int, _Replays] = {}
        self._moments_of: dict[ValueId, set[int]] = defaultdict(set)
        self._holds: dict[StorageId, list[tuple[int, int]]] = defaultdict(list)
        self._undo: list[tuple[IdleId, int | None, list[tuple[int, _Replays]]]] = []

    def _way_until_death(self, one: Idle) -> tuple[int, ...]:
        found = self._way_back(one.value, one.start, one.end)
        return found.ops if found is not None and not found.held else ()

    # ------------------------------------------------------------------ what it comes to

    def excess(self) -> Bytes:
        """Bytes over the budget, summed over the ops."""
        return int(np.maximum(self._levels() - self.allowed, 0).sum())

    def _levels(self) -> NDArray[np.int64]:
        replaying = np.where(self._temporaries >= 0, self._before + self._temporaries, 0)
        return np.maximum(self._during, replaying)

    def gaps(self) -> tuple[Gap, ...]:
        found = [gap for replays in self._replays.values() for gap in replays.gaps]
        for number, end in self.ends.items():
            one = self.idle[number]
            if not self._comes_back(number, end):
                found.append(Gap(value=one.value, start=one.start, end=end, home=Recompute(ops=self._dying[number])))
        return tuple(sorted(found, key=lambda gap: (gap.start, gap.value)))

    def _comes_back(self, number: IdleId, end: int) -> bool:
        return self.idle[number].back or end < self.idle[number].end

    # ------------------------------------------------------------------ changing it

    def change(self, number: IdleId, end: int | None) -> bool:
        """Have the interval gone until op `end`, or there. False, and nothing done, where it would have no way back."""
        old = self.ends.get(number)
        one = self.idle[number]
        self._set(number, end)
        reached = sorted((one.start if old is None else old, one.start if end is None else end))
        moments = {moment for moment in self._moments_of[one.value] if reached[0] <= moment < reached[1]}
        moments |= {moment for moment in (old, end) if moment is not None}
        before: list[tuple[int, _Replays]] = []
        for moment in sorted(moments):
            found = self._made(moment)
            if found is None:
                for changed, replays in reversed(before):
                    self._put(changed, replays)
                self._set(number, old)
                return False
            before.append((moment, self._replays.get(moment, NOTHING)))
            self._put(moment, found)
        self._undo.append((number, old, before))
        return True

    def mark(self) -> int:
        """Where `back_to` comes back to."""
        return len(self._undo)

    def back_to(self, mark: int) -> None:
        """Take back every change since."""
        while len(self._undo) > mark:
            number, old, before = self._undo.pop()
            for moment, replays in reversed(before):
                self._put(moment, replays)
            self._set(number, old)

    def _set(self, number: IdleId, end: int | None) -> None:
        """Bytes of the interval itself."""
        one, old = self.idle[number], self.ends.pop(number, None)
        for until, sign in ((old, 1), (end, -1)):
            if until is None:
                continue
            back = self._comes_back(number, until)
            self._during[one.start : until] += sign * one.nbytes
            self._before[one.start : until if back else min(until + 1, self.lives[one.value].dies)] += sign * one.nbytes
            if back:
                (self._ending[until].add if sign < 0 else self._ending[until].discard)(number)
            elif not self._dying[number]:
                self.seconds -= sign * one.nbytes * self._move
        self._until[number] = one.start if end is None else end
        if end is not None:
            self.ends[number] = end

    def _put(self, moment: int, replays: _Replays) -> None:
        """Exchange what runs again before one op."""
        old = self._replays.pop(moment, NOTHING)
        self.seconds += replays.seconds - old.seconds
        self._temporaries[moment] = replays.temporaries
        for value in old.touched - replays.touched:
            self._moments_of[value].discard(moment)
        for value in replays.touched - old.touched:
            self._moments_of[value].add(moment)
        self._hold(old.gaps, -1)
        self._hold(replays.gaps, 1)
        if replays.gaps:
            self._replays[moment] = replays

    def _hold(self, gaps: Iterable[Gap], sign: int) -> None:
        for gap in gaps:
            for leaf in gap.home.held if isinstance(gap.home, Recompute) else ():
                storage = self.step.values[leaf].storage
                self._count_held(storage, -1)
                interval = (gap.start, gap.end)
                (self._holds[storage].append if sign > 0 else self._holds[storage].remove)(interval)
                self._count_held(storage, 1)

    def _count_held(self, storage: StorageId, sign: int) -> None:
        """What gaps hold of one storage beyond its death, each op once, as `ir.account` has it."""
        info = self.step.storages[storage]
        dies = len(self.step.ops) + 1 if info.present_at_end else info.alive_until
        for sums, extra in ((self._during, 0), (self._before, 1)):
            reached = dies
            for start, end in sorted(self._holds[storage]):
                first, last = max(start, reached), end + extra
                if first < last:
                    sums[first:last] += sign * info.nbytes
                reached = max(reached, last)

    # ------------------------------------------------------------------ replays

    def _made(self, moment: int) -> _Replays | None:
        """What has to run again before the op; None if something has no way back."""
        gaps: list[Gap] = []
        touched: set[ValueId] = set()
        for number in sorted(self._ending[moment]):
            one = self.idle[number]
            found = self._way_back(one.value, one.start, moment)
            if found is None:
                return None
            touched |= found.touched
            home = found.home([one.value], self.step)
            gaps.append(Gap(value=one.value, start=one.start, end=moment, home=home))
        if not gaps:
            return NOTHING
        apart = self._seconds_again(gaps)
        together = as_one(gaps, self.step) if len(gaps) > 1 else gaps
        if together is not gaps and self._seconds_again(together) < apart:
            room = self.allowed - int(self._before[moment])
            if _most(together) <= max(room, _most(gaps)):
                gaps = together
        return _Replays(tuple(gaps), self._seconds_again(gaps), _most(gaps), frozenset(touched))

    def _seconds_again(self, gaps: Sequence[Gap]) -> Seconds:
        back = [(gap.end, gap.value, gap.home) for gap in gaps if isinstance(gap.home, Recompute)]
        return sum(self.step.ops[op].seconds or 0.0 for op in replayed(back, self.step))

    def _way_back(self, value: ValueId, start: int, moment: int) -> WayBack | None:
        found = way_back(
            value, start, moment, step=self.step, lives=self.lives, present=lambda one: not self.is_gone(one, moment)
        )
        self.work += 0 if found is None else len(found.ops) + 1
        return found

    def is_gone(self, value: ValueId, moment: int) -> bool:
        """Whether some gap has the value before the op."""
        return any(self.idle[n].start <= moment < self.ends[n] for n in self.of_value.get(value, ()) if n in self.ends)

    # ------------------------------------------------------------------ searching

    def drop(self, values: Iterable[ValueId], op: int, most_work: int) -> None:
        """Have these gone while the op runs, as far as they are idle then and have a way back."""
        for value in sorted(values):
            if self.work >= most_work:
                return
            for number in self.of_value.get(value, ()):
                if self.idle[number].start <= op < self.idle[number].end:
                    self.change(number, self.idle[number].end)

    def follow(self, gaps: Iterable[Gap | Absence]) -> None:
        """Have gone what these gaps have, of another plan or as a policy left them.

        What a policy leaves to die may be absent for longer than it lives, or be given up as it dies.
        """
        for gap in sorted(gaps, key=lambda gap: (gap.start, gap.value)):
            for number in self.of_value.get(gap.value, ()):
                one = self.idle[number]
                end = min(gap.end, one.end) if one.back else one.end
                if one.start <= gap.start < one.end and gap.start < end and number not in self.ends:
                    self.change(number, end)

    def share(self) -> None:
        """What a replay makes in passing stays from then on, where there is room and it saves time."""
        moment = -1
        while later := [at for at in self._replays if at > moment]:
            moment = min(later)
            made = {v for gap in self._replays[moment].gaps if isinstance(gap.home, Recompute)
                    for op in gap.home.ops for v in self.step.ops[op].creates}  # fmt: skip
            passing = [number for value in made for number in self.of_value.get(value, ())
                       if number in self.ends and self.idle[number].start < moment < self.ends[number]]  # fmt: skip
            for number in sorted(passing, key=lambda number: (-self._own[number] / self._nbytes[number], number)):
                excess, seconds, mark = self.excess(), self.seconds, self.mark()
                if self.change(number, moment) and (self.seconds >= seconds or self.excess() > excess):
                    self.back_to(mark)

    def repair(self, most_work: int, without: IdleId | None = None, *, in_order: bool = False) -> bool:
        """Make room where there is too little, each time in the way that takes least time a byte. True if there is.
        Where the step is fullest first, or where it is first too full, as what decides while it runs."""
        while (excess := self.excess()) and self.work < most_work:
            levels = self._levels()
            best: tuple[float, IdleId, int] | None = None
            here = int((levels > self.allowed).argmax() if in_order else levels.argmax())
            for number in self._shortlist(here, without):
                mark, seconds = self.mark(), self.seconds
                if self.change(number, self.idle[number].end):
                    gained = excess - self.excess()
                    rate = (self.seconds - seconds) / gained if gained > 0 else np.inf
                    if gained > 0 and (best is None or rate < best[0]):
                        best = rate, number, self.idle[number].end
                self.back_to(mark)
            if best is None:
                return False
            self.change(best[1], best[2])
        return not excess

    def _shortlist(self, op: int, without: IdleId | None) -> list[IdleId]:
        """Intervals that hold the op and are not gone during it, those first that look cheapest a byte."""
        found = np.flatnonzero((self._starts <= op) & (op < self._natural) & (self._until <= op))
        back = np.array([self.idle[number].back for number in found], dtype=bool)
        over = float(self._levels()[op] - self.allowed)
        moved = np.array([not self._dying[number] for number in found], dtype=bool)
        cost = np.where(back, [self._looks(int(number)) for number in found], self._nbytes[found] * self._move * moved)
        order = np.argsort(cost / np.minimum(self._nbytes[found], over), kind="stable")
        return [int(found[place]) for place in order if found[place] != without][:SHORTLIST]

    def _looks(self, number: IdleId) -> Seconds:
        """Seconds of its way back, from what is there when it ends."""
        one = self.idle[number]
        found = self._way_back(one.value, one.start, one.end)
        return sum(self.step.ops[op].seconds or 0.0 for op in found.ops) if found else float("inf")

    def thin(self) -> None:
        """Have everything there for which there is room, what saves most first."""
        by_saving = sorted(self.ends, key=lambda number: (-self._own[number], number))
        for number in by_saving:
            one, end = self.idle[number], self.ends[number]
            if (self._during[one.start : end] + one.nbytes > self.allowed).any():
                continue
            seconds, mark = self.seconds, self.mark()
            if self.change(number, None) and (self.seconds > seconds or self.excess()):
                self.back_to(mark)

    def improve(self, most_work: int) -> None:
        """Have one interval there, make room in other ways, and keep that where it takes less time; again and again."""
        improved = True
        while improved and self.work < most_work:
            improved = False
            for number in sorted(self.ends, key=lambda number: (-self._own[number], number)):
                if self.work >= most_work or number not in self.ends:
                    continue
                seconds, mark = self.seconds, self.mark()
                if not self.change(number, None):
                    continue
                if self.repair(most_work, without=number) and self.seconds < seconds:
                    self.thin()
                if not self.excess() and self.seconds < seconds - 1e-12:
                    improved = True
                else:
                    self.back_to(mark)


def _most(gaps: Iterable[Gap]) -> Bytes:
    return max((gap.home.temporaries for gap in gaps if isinstance(gap.home, Recompute)), default=0)


def _idle(step: Step, lives: Sequence[Life]) -> Iterator[Idle]:
    """The idle intervals of every value that an op of the step can make again."""
    ops = len(step.ops)
    for value in step.values:
        life, storage = lives[value.id], step.storages[value.storage]
        if life.created < 0 or not step.ops[life.created].replayable or storage.present_at_start or not storage.nbytes:
            continue
        for start, end in idle_intervals(life, ops):
            back = end in life.reads or end < life.ends
            yield Idle(value.id, start, end, storage.nbytes, back)


def _before(step: Step) -> NDArray[np.int64]:
    """Bytes before every op and after the last, nothing gone."""
    changes = np.zeros(len(step.ops) + 3, dtype=np.int64)
    for storage in step.storages:
        first = 0 if storage.present_at_start else storage.alive_from + 1
        last = len(step.ops) + 1 if storage.present_at_end else storage.alive_until
        if first < last:
            changes[first] += storage.nbytes
            changes[last] -= storage.nbytes
    return np.cumsum(changes)[: len(step.ops) + 1]
