"""Two linear programs over what is absent when: the fewest bytes that come in, and the fewest seconds.

Both choose shares of whole idle intervals (`ir.lives.idle_intervals`) and count, op by op, the bytes that they have
absent, so that every interval stands in two rows, where it starts and where it ends. With that a program of a thousand
ops is solved in hundredths of a second.

NOTE [Fewest bytes]. Minimize the bytes of what comes back, where what is absent during every op is at least what is
over the budget there. Of intervals with as many bytes the longest are taken, by `TIE`: a copy has more time then.

NOTE [Fewest seconds]. Besides shares x of intervals that are swapped, there are shares y of values that are recomputed,
and a fluid of bytes on the link in place of single copies. For op k of n:

 1. It lasts d_k >= its seconds and those of the replays in front of it, and until then the link carries out_k and in_k:
    out_k / rate + in_k / rate <= d_k on one lane, each for itself if the link is duplex.
 2. What has gone out before op k is at most the bytes of the intervals that have started, and what has come in at
    least that of those that have ended, and at most what had gone out.
 3. What is gone and not back, and what is recomputed later, is at least what is over the budget. A replay's
    temporaries take from that, and so do its leaves where they would be gone still: their bytes times (x or y of the
    leaf + y of the value - 1), as the two together cost what neither does alone.
 4. What a step begins without, the step before ended without: both intervals have one share. What host memory has
    already, and what nobody reads again, goes without a copy.

Minimize the sum of d_k. A copy has no begin of its own here, and one op runs into the next, so that no plan is faster
that swaps whole intervals and recomputes these values by these recipes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import Final, TypeAlias, final

from spillway.costs.device import Device
from spillway.ir import Recompute, Step
from spillway.ir.lives import Life, idle_intervals
from spillway.ir.step import StorageId, ValueId
from spillway.methods.base import Absence
from spillway.methods.linear_program import LinearProgram
from spillway.units import Bytes, Seconds

UNIT: Final = 1e9
"""Programs count in GB, so that their numbers are of one size."""

TIE: Final = 1e-3
"""What a byte of the shortest interval costs more than one of an interval as long as the step."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How a value may be recomputed."""

    start: int
    """First op at which it is gone."""
    end: int
    """The op before which it is back."""
    home: Recompute
    """By which ops."""
    leaves: frozenset[ValueId]
    """What they read and do not make."""
    seconds: Seconds
    """What they take."""


Together: TypeAlias = tuple[Absence, ...]
"""One interval; or two that are gone together: what a step begins without, the step before has ended without."""


def idle(step: Step, lives: Sequence[Life], smallest: Bytes) -> list[Together]:
    """The longest intervals of every value that is large enough to leave."""
    found, ends, ops = list[Together](), dict[StorageId, Absence](), len(step.ops)
    last = {value.storage: value.id for value in step.values}
    for value in reversed(step.values):
        storage = step.storages[value.storage]
        through = storage.present_at_start and storage.present_at_end
        large = storage.nbytes >= max(smallest, 1)
        for start, end in reversed(list(idle_intervals(lives[value.id], ops))) if large else ():
            one = Absence(value.id, start, end)
            if through and start and end == ops and last[storage.id] == value.id:
                ends[storage.id] = one
            else:
                found.append((one, ends[storage.id]) if not start and storage.id in ends else (one,))
    return found  # what is used by op 0 is there when the step ends


def comes_in(life: Life, end: int, ops: int) -> bool:
    """Whether what is gone until then comes back. An engine also brings in what is written over."""
    return end in life.reads or end <= life.ends < life.dies or end < min(life.ends, ops)


def during(step: Step, intervals: Iterable[Absence], sizes: Sequence[Bytes]) -> list[Bytes]:
    """Bytes during every op with these intervals gone."""
    return step.levels(sizes, ((step.values[value].storage, start, end) for value, start, end in intervals))


def waited_late(
    step: Step, gone: Sequence[Absence], there: Sequence[Bytes], allowed: Bytes, sizes: Sequence[Bytes]
) -> list[Absence]:
    """The same intervals, each beginning where its bytes are wanted, the oldest first, and at the latest one op before
    it ends; but for what the step begins without. `there` are the bytes during every op with all of them gone."""
    starting, ending = defaultdict[int, list[Absence]](list), defaultdict[int, list[Absence]](list)
    late = [one for one in gone if not one.start]
    for one in gone:
        if one.start:
            starting[one.start].append(one)
    pending, waited = deque[Absence](), set[Absence]()
    more = 0  # bytes of what is pending
    for op, nbytes in enumerate(there):
        for one in starting.get(op, ()):
            pending.append(one)
            ending[one.end - 1].append(one)
            more += sizes[step.values[one.value].storage]
        due = deque(ending.pop(op, ()))
        while due or (nbytes + more > allowed and pending):
            one = due.popleft() if due else pending.popleft()
            if one not in waited:
                waited.add(one)
                late.append(one._replace(start=op))
                more -= sizes[step.values[one.value].storage]
    return late


def fewest_bytes(
    step: Step, lives: Sequence[Life], allowed: Bytes, sizes: Sequence[Bytes], smallest: Bytes, *, tie: float = TIE
) -> tuple[dict[Together, float], float]:
    """The share of everything idle, and the bytes that come in. Raises ArithmeticError if an op alone needs more than
    is allowed, and UsageError without SciPy."""
    ops, program = len(step.ops), LinearProgram()
    clock = list(accumulate((op.seconds or 0.0 for op in step.ops), initial=0.0))
    over = [(there - allowed) / UNIT for there in during(step, (), sizes)]
    rows = _differences(program, [program.variable(lower=max(nbytes, 0.0)) for nbytes in over])
    shares, costs = dict[Together, int](), dict[Together, float]()
    for gone in idle(step, lives, smallest):
        nbytes = sizes[step.values[gone[0].value].storage] / UNIT
        long = sum(clock[one.end] - clock[one.start] for one in gone) / (clock[-1] or 1.0)
        costs[gone] = nbytes if any(comes_in(lives[one.value], one.end, ops) for one in gone) else 0.0
        shares[gone] = share = program.variable(cost=costs[gone] + nbytes * tie * (1.0 - long), upper=1.0)
        for one in gone:
            _change(program, rows, one.start, one.end, share, nbytes)
    found = _solved(program)
    back = sum(found[share] * costs[gone] for gone, share in shares.items()) * UNIT
    return {gone: found[share] for gone, share in shares.items()}, back


def _solved(program: LinearProgram) -> list[float]:
    """The variables at the optimum. Raises ArithmeticError if there is none."""
    found = program.solve("the improved window")
    if found.x is None:
        raise ArithmeticError(f"The linear program has no optimum: {found.message}")
    return [float(number) for number in found.x]


def _differences(program: LinearProgram, sums: Sequence[int]) -> list[int]:
    """A row for every sum, which is the one before and what is added to the row."""
    before: list[int | None] = [None, *sums[:-1]]
    return [
        program.row((one, 1.0), *([] if last is None else [(last, -1.0)]), least=0.0, most=0.0)
        for one, last in zip(sums, before, strict=True)
    ]


def _change(program: LinearProgram, rows: Sequence[int], start: int, end: int, variable: int, amount: float) -> None:
    """The variable, so many times, is in the sums from `start` up to `end`."""
    program.add(rows[start], variable, -amount)
    if end < len(rows):
        program.add(rows[end], variable, amount)


# ---------------------------------------------------------------------- fewest seconds

MOMENTS: Final = 1000
"""Ops whose bytes are held against the budget; of a longer step those that are fullest among their neighbours."""


@final
class _Seconds:
    """The second program, as it is written down. A moment is an op whose bytes are held against the budget, with all
    that runs from there to the next."""

    def __init__(
        self, step: Step, lives: Sequence[Life], allowed: Bytes, sizes: Sequence[Bytes], device: Device
    ) -> None:
        self._step, self._lives, self._sizes, self._rate = step, lives, sizes, device.in_per_second
        there = during(step, (), sizes)
        self._ops, seconds = _moments(step, there)
        self.program = program = LinearProgram()
        self.lasting = [program.variable(cost=1.0, lower=least) for least in seconds]
        self.replaying = [
            program.row((one, 1.0), least=least) for one, least in zip(self.lasting, seconds, strict=True)
        ]
        going, coming = ([program.variable() for _ in self._ops] for _ in range(2))
        gone, back, may, must = ([program.variable() for _ in range(len(self._ops) + 1)] for _ in range(4))
        dropped = [program.variable(lower=-inf) for _ in self._ops]
        self._gone, self._back, self._may, self._must, self._dropped = (
            _differences(program, sums) for sums in (gone, back, may, must, dropped)
        )
        for moment, op in enumerate(self._ops):
            program.add(self._gone[moment + 1], going[moment], -1.0)
            program.add(self._back[moment + 1], coming[moment], -1.0)
            out, into = (going[moment], UNIT / device.out_per_second), (coming[moment], UNIT / device.in_per_second)
            for terms in ([out], [into]) if device.duplex else ([out, into],):
                program.row(*terms, (self.lasting[moment], -1.0), most=0.0)
            least = (there[op] - allowed) / UNIT
            program.row((gone[moment], 1.0), (back[moment], -1.0), (dropped[moment], 1.0), least=least)
        for moment in range(len(self._ops) + 1):
            program.row((may[moment], 1.0), (gone[moment], -1.0), least=0.0)
            program.row((back[moment], 1.0), (must[moment], -1.0), least=0.0)
            program.row((gone[moment], 1.0), (back[moment], -1.0), least=0.0)
        self.swapped: dict[Absence, int] = {}
        self.recomputed: dict[ValueId, int] = {}

    def _at(self, op: int) -> int:
        """The first moment from there on; one behind the last if there is none."""
        return bisect_left(self._ops, op)

    def _drop(self, start: int, end: int, share: int, nbytes: float) -> None:
        """So much is gone without a copy during these ops."""
        if self._at(start) < self._at(end):
            _change(self.program, self._dropped, self._at(start), self._at(end), share, nbytes)

    def _nbytes(self, value: ValueId) -> float:
        return self._sizes[self._step.values[value].storage] / UNIT

    def swap(self, together: Together) -> None:
        program, ops, nbytes = self.program, len(self._step.ops), self._nbytes(together[0].value)
        share = program.variable(cost=TIE * nbytes * UNIT / self._rate, upper=1.0)
        for one in together:
            self.swapped[one], life, start, end = share, self._lives[one.value], self._at(one.start), self._at(one.end)
            back = comes_in(life, one.end, ops)
            if not back and (life.overwritten is not None or life.dies <= ops):  # nobody reads it again
                self._drop(one.start, one.end, share, nbytes)
            elif start < end:
                program.add(self._may[start], share, -nbytes)
                if life.created < 0:  # host memory has it, from this step's begin or the last one's
                    program.add(self._gone[start], share, -nbytes)
                if back:
                    program.add(self._must[end], share, -nbytes)

    def recompute(self, value: ValueId) -> None:
        """A share of the value is recomputed."""
        self.recomputed[value] = self.program.variable(upper=1.0)

    def replay(self, value: ValueId, replay: Replay, of: Mapping[ValueId, Sequence[Absence]]) -> None:
        program, share, op = self.program, self.recomputed[value], self._step.ops[replay.end]
        self._drop(replay.start, replay.end, share, self._nbytes(value))
        program.add(self.replaying[min(self._at(replay.end), len(self._ops) - 1)], share, -replay.seconds)
        made = sum(self._nbytes(one) for one in op.creates if not self._step.values[one].version)
        more = max(replay.home.temporaries / UNIT - made, 0.0)
        self._drop(replay.end, replay.end + 1, share, -more)
        for one in of.get(value, ()):
            if one.start <= replay.start < one.end:
                program.row((self.swapped[one], 1.0), (share, 1.0), most=1.0)
        for leaf in sorted(replay.leaves):
            for one in of.get(leaf, ()):
                if one.start <= replay.end < one.end:
                    both = program.variable(upper=1.0)
                    also = [(self.recomputed[leaf], 1.0)] if leaf in self.recomputed else []
                    program.row((self.swapped[one], 1.0), *also, (share, 1.0), (both, -1.0), most=1.0)
                    self._drop(replay.end, one.end, both, -self._nbytes(leaf))


def _moments(step: Step, there: Sequence[Bytes]) -> tuple[list[int], list[Seconds]]:
    """The ops whose bytes are held against the budget, and how long all takes from one to the next."""
    fullest, wide = dict[int, int](), max(len(step.ops) / MOMENTS, 1.0)
    for op, nbytes in enumerate(there):
        known = fullest.setdefault(int(op / wide), op)
        if nbytes > there[known]:
            fullest[int(op / wide)] = op
    ops = list(fullest.values())
    clock = list(accumulate((op.seconds or 0.0 for op in step.ops), initial=0.0))
    edges = [0.0, *(clock[op] for op in ops[1:]), clock[-1]]
    return ops, [after - before for before, after in pairwise(edges)]


def fewest_seconds(
    step: Step, lives: Sequence[Life], allowed: Bytes, sizes: Sequence[Bytes], smallest: Bytes,
    replays: Mapping[ValueId, Replay], device: Device,
) -> tuple[dict[ValueId, float], Seconds]:  # fmt: skip
    """Of every value that may be recomputed the share that is, and the seconds of the step.

    Raises what `fewest_bytes` raises.
    """
    made, of = _Seconds(step, lives, allowed, sizes, device), defaultdict[ValueId, list[Absence]](list)
    for together in idle(step, lives, smallest):
        made.swap(together)
        for one in together:
            of[one.value].append(one)
    for value in replays:
        made.recompute(value)
    for value, replay in replays.items():
        made.replay(value, replay, of)
    found = _solved(made.program)
    shares = {value: found[share] for value, share in made.recomputed.items()}
    return shares, sum(found[one] for one in made.lasting)
