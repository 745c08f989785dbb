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

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any, Final, NamedTuple, final

from spillway.costs.device import Device
from spillway.errors import UsageError
from spillway.ir import Recompute, Step
from spillway.ir.lives import Life, idle_intervals
from spillway.ir.step import ValueId
from spillway.units import Bytes, Seconds

UNIT: Final = 1e9
"""Programs count in GB, so that their numbers are of one size."""

TIE: Final = 1e-3
"""What a byte of the shortest interval costs more than one of an interval as long as the step."""


class Interval(NamedTuple):
    """Ops, half-open, during which nothing creates or reads a value."""

    value: ValueId
    start: int
    end: int


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


def idle(step: Step, lives: Sequence[Life], smallest: Bytes) -> list[Interval]:
    """The longest intervals of every value that is large enough to leave."""
    return [
        Interval(value.id, start, end)
        for life, value in zip(lives, step.values, strict=True)
        if step.storages[value.storage].nbytes >= max(smallest, 1)
        for start, end in idle_intervals(life, len(step.ops))
    ]


def read_again(life: Life, end: int, ops: int) -> bool:
    """Whether what is gone until then comes back."""
    return end in life.reads or end < min(life.ends, ops)


def during(step: Step, intervals: Iterable[Interval], sizes: Sequence[Bytes]) -> list[Bytes]:
    """Bytes during every op with these intervals gone."""
    changes = [0] * (len(step.ops) + 1)
    for storage in step.storages:
        changes[storage.alive_from] += sizes[storage.id]
        changes[storage.alive_until] -= sizes[storage.id]
    for one in intervals:
        changes[one.start] -= sizes[step.values[one.value].storage]
        changes[one.end] += sizes[step.values[one.value].storage]
    return list(accumulate(changes[:-1]))


def waited_late(
    step: Step, gone: Sequence[Interval], there: Sequence[Bytes], allowed: Bytes, sizes: Sequence[Bytes]
) -> list[Interval]:
    """The same intervals, each beginning where its bytes are wanted, the oldest first, and at the latest one op before
    it ends. `there` are the bytes during every op with all of them gone."""
    starting, ending = defaultdict[int, list[Interval]](list), defaultdict[int, list[Interval]](list)
    for one in gone:
        starting[one.start].append(one)
    pending, waited, late = deque[Interval](), set[Interval](), list[Interval]()
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
    step: Step, lives: Sequence[Life], allowed: Bytes, intervals: Sequence[Interval], sizes: Sequence[Bytes], *,
    tie: float = TIE,
) -> tuple[dict[Interval, float], float]:  # fmt: skip
    """The share of every interval, and the bytes that come in.

    Raises:
        ArithmeticError: An op alone needs more than is allowed.
        UsageError: SciPy is not there.
    """
    ops, program = len(step.ops), _Program()
    clock = list(accumulate((op.seconds or 0.0 for op in step.ops), initial=0.0))
    over = [(there - allowed) / UNIT for there in during(step, (), sizes)]
    absent = [program.variable(lower=max(nbytes, 0.0)) for nbytes in over]
    rows = _differences(program, absent)
    shares = {}
    for one in intervals:
        nbytes = sizes[step.values[one.value].storage] / UNIT
        short = 1.0 - (clock[one.end] - clock[one.start]) / (clock[-1] or 1.0)
        cost = nbytes * (1.0 + tie * short) if read_again(lives[one.value], one.end, ops) else nbytes * tie
        shares[one] = share = program.variable(cost=cost, upper=1.0)
        _change(program, rows, one.start, one.end, share, nbytes)
    found = program.solved()
    back = sum(
        found[share] * sizes[step.values[one.value].storage]
        for one, share in shares.items()
        if read_again(lives[one.value], one.end, ops)
    )
    return {one: found[share] for one, share in shares.items()}, back


@final
class _Program:
    """A linear program as it is written down, by variables and rows."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._factors: list[float] = []
        self._least: list[float] = []
        self._most: list[float] = []

    def variable(self, *, cost: float = 0.0, lower: float = 0.0, upper: float = inf) -> int:
        """A new one, by its number."""
        self._cost.append(cost)
        self._lower.append(lower)
        self._upper.append(upper)
        return len(self._cost) - 1

    def row(self, *terms: tuple[int, float], least: float = -inf, most: float = inf) -> int:
        """A new one, by its number."""
        self._least.append(least)
        self._most.append(most)
        for variable, factor in terms:
            self.add(len(self._least) - 1, variable, factor)
        return len(self._least) - 1

    def add(self, row: int, variable: int, factor: float) -> None:
        """One more term of a row."""
        self._rows.append(row)
        self._columns.append(variable)
        self._factors.append(factor)

    def solved(self) -> list[float]:
        """The variables at the optimum. Raises ArithmeticError if there is none."""
        optimize, sparse = load_solver("the improved window")
        shape = (len(self._least), len(self._cost))
        matrix = sparse.csr_matrix((self._factors, (self._rows, self._columns)), shape=shape)
        found = optimize.milp(
            self._cost, bounds=optimize.Bounds(self._lower, self._upper),
            constraints=optimize.LinearConstraint(matrix, self._least, self._most),
        )  # fmt: skip
        if found.x is None:
            raise ArithmeticError(f"The linear program has no optimum: {found.message}")
        return [float(number) for number in found.x]


def load_solver(what: str) -> tuple[Any, Any]:
    """SciPy's optimizers and sparse matrices. Raises UsageError with the command that installs them."""
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise UsageError(
            f"{what[:1].upper()}{what[1:]} needs SciPy, which is not installed: pip install 'torch-spillway[plan]' "
            "adds it."
        ) from error
    return optimize, sparse


def _differences(program: _Program, sums: Sequence[int]) -> list[int]:
    """A row for every sum, which is the one before and what is added to the row."""
    before: list[int | None] = [None, *sums[:-1]]
    return [
        program.row((one, 1.0), *([] if last is None else [(last, -1.0)]), least=0.0, most=0.0)
        for one, last in zip(sums, before, strict=True)
    ]


def _change(program: _Program, rows: Sequence[int], start: int, end: int, variable: int, amount: float) -> None:
    """The variable, so many times, is in the sums from `start` up to `end`."""
    program.add(rows[start], variable, -amount)
    if end < len(rows):
        program.add(rows[end], variable, amount)


# ---------------------------------------------------------------------- fewest seconds


@final
class _Seconds:
    """The second program, as it is written down."""

    def __init__(
        self, step: Step, lives: Sequence[Life], allowed: Bytes, sizes: Sequence[Bytes], device: Device
    ) -> None:
        self._step, self._lives, self._sizes = step, lives, sizes
        self.program = program = _Program()
        ops, moments = len(step.ops), len(step.ops) + 1
        self.lasting = [program.variable(cost=1.0, lower=op.seconds or 0.0) for op in step.ops]
        self._going, self._coming = ([program.variable() for _ in range(ops)] for _ in range(2))
        gone, back, may, must = ([program.variable() for _ in range(moments)] for _ in range(4))
        self._dropped = [program.variable(lower=-inf) for _ in range(ops)]
        self._gone_rows, self._back_rows, self._may_rows, self._must_rows, self._dropped_rows = (
            _differences(program, sums) for sums in (gone, back, may, must, self._dropped)
        )
        for op, there in enumerate(during(step, (), sizes)):
            program.add(self._gone_rows[op + 1], self._going[op], -1.0)
            program.add(self._back_rows[op + 1], self._coming[op], -1.0)
            self._link(op, device)
            program.row((gone[op], 1.0), (back[op], -1.0), (self._dropped[op], 1.0), least=(there - allowed) / UNIT)
        for moment in range(moments):
            program.row((may[moment], 1.0), (gone[moment], -1.0), least=0.0)
            program.row((back[moment], 1.0), (must[moment], -1.0), least=0.0)
            program.row((gone[moment], 1.0), (back[moment], -1.0), least=0.0)
        self.swapped: dict[Interval, int] = {}
        self.recomputed: dict[ValueId, int] = {}
        self._rate = device.in_per_second

    def _link(self, op: int, device: Device) -> None:
        out = (self._going[op], UNIT / device.out_per_second)
        into = (self._coming[op], UNIT / device.in_per_second)
        for terms in ([out], [into]) if device.duplex else ([out, into],):
            self.program.row(*terms, (self.lasting[op], -1.0), most=0.0)

    def _nbytes(self, value: ValueId) -> float:
        return self._sizes[self._step.values[value].storage] / UNIT

    def swap(self, one: Interval, wrapped: int | None) -> None:
        """A share of the interval is swapped; `wrapped` is that of the interval with which the step ends."""
        program, ops, life, nbytes = self.program, len(self._step.ops), self._lives[one.value], self._nbytes(one.value)
        share = program.variable(cost=TIE * nbytes * UNIT / self._rate, upper=1.0) if wrapped is None else wrapped
        self.swapped[one] = share
        back = read_again(life, one.end, ops)
        if not back and (life.overwritten is not None or life.dies <= ops):  # nobody reads it again
            _change(program, self._dropped_rows, one.start, one.end, share, nbytes)
            return
        program.add(self._may_rows[one.start], share, -nbytes)
        if life.created < 0:  # host memory has it, from this step's begin or the last one's
            program.add(self._gone_rows[one.start], share, -nbytes)
        if back:
            program.add(self._must_rows[one.end], share, -nbytes)

    def recompute(self, value: ValueId) -> None:
        """A share of the value is recomputed."""
        self.recomputed[value] = self.program.variable(upper=1.0)

    def replay(self, value: ValueId, replay: Replay, of: Mapping[ValueId, Sequence[Interval]], row: int) -> None:
        """What that takes. Its seconds are in the row of its op."""
        program, share = self.program, self.recomputed[value]
        _change(program, self._dropped_rows, replay.start, replay.end, share, self._nbytes(value))
        program.add(row, share, -replay.seconds)
        made = sum(
            self._nbytes(one) for one in self._step.ops[replay.end].creates if not self._step.values[one].version
        )
        more = max(replay.home.temporaries / UNIT - made, 0.0)
        _change(program, self._dropped_rows, replay.end, replay.end + 1, share, -more)
        for one in of.get(value, ()):
            if one.start <= replay.start < one.end:
                program.row((self.swapped[one], 1.0), (share, 1.0), most=1.0)
        for leaf in replay.leaves:
            for one in of.get(leaf, ()):
                if one.start <= replay.end < one.end:
                    both = program.variable(upper=1.0)
                    also = [(self.recomputed[leaf], 1.0)] if leaf in self.recomputed else []
                    program.row((self.swapped[one], 1.0), *also, (share, 1.0), (both, -1.0), most=1.0)
                    _change(program, self._dropped_rows, replay.end, one.end, both, -self._nbytes(leaf))


def fewest_seconds(
    step: Step, lives: Sequence[Life], allowed: Bytes, intervals: Iterable[Interval], sizes: Sequence[Bytes],
    replays: Mapping[ValueId, Replay], device: Device,
) -> tuple[dict[ValueId, float], Seconds]:  # fmt: skip
    """Of every value that may be recomputed the share that is, and the seconds of the step.

    Raises what `fewest_bytes` raises.
    """
    made, of = _Seconds(step, lives, allowed, sizes, device), dict[ValueId, list[Interval]]()
    ends, last = dict[int, int](), {value.storage: value.id for value in step.values}
    for one in sorted(intervals, key=lambda one: -one.end):
        storage = step.storages[step.values[one.value].storage]
        wraps = not one.start and storage.present_at_end
        made.swap(one, ends.get(storage.id) if wraps else None)
        if one.end == len(step.ops) and storage.present_at_start and last[storage.id] == one.value:
            ends[storage.id] = made.swapped[one]
        of.setdefault(one.value, []).append(one)
    rows: dict[int, int] = {}
    for value, replay in replays.items():
        made.recompute(value)
        if replay.end not in rows:
            least = step.ops[replay.end].seconds or 0.0
            rows[replay.end] = made.program.row((made.lasting[replay.end], 1.0), least=least)
    for value, replay in replays.items():
        made.replay(value, replay, of, rows[replay.end])
    found = made.program.solved()
    shares = {value: found[share] for value, share in made.recomputed.items()}
    return shares, sum(found[one] for one in made.lasting)
