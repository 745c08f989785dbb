"""TensorFlow Large Model Support: what is read far from where it was made is copied out, and in again ahead of that.

Le, Imai, Negishi, Kawachiya, "Automatic GPU Memory Management for Large Neural Models in TensorFlow", ISMM 2019, as its
public code has it (IBM/tensorflow-large-model-support, TFLMS 2). Ops have levels, one more than the highest level of
what they wait for; the distance of two ops is that of their levels. Four parameters:

- *threshold*: an activation is copied out if an op reads it at a distance *greater* than this. (The window paper, which
  compares with it, has the sign the other way round in its section 2.) Ops that are nearer read it before it leaves.
- *ahead*: a copy in begins behind an op whose level is more than so many below that of the op which reads, at most ten
  more; where there is none, right before the op which reads.
- *groupby*: ops that read at most so many levels from one to the next share a copy in; else each has its own, and what
  came in is gone again when it was read.
- *mode*: whether compute waits for copies out where they begin (1), for copies in (2), both (3) or neither (0).

NOTE [The search]. What is not given is searched as that code does, on bytes counted op by op, under a share of the
budget:

 1. If all fits without a copy, none is made.
 2. The first mode in which all fits with threshold 1, ahead 1, groupby 0; if there is none, the step does not fit.
 3. By halving between 1 and the number of levels: a threshold that is as large as fits; then as large an ahead, unless
    copies in are waited for; then any groupby that fits, the largest there is first. What is larger moves less, or
    begins earlier. Few levels ahead and very many can fit where what is between does not: halving finds one of both.

Differs from the code in:

- Bytes are counted as the recorded step has them, and copies out that nobody waits for as there for one op more. Ops
  run in their recorded order; TensorFlow runs them as their inputs are ready.
- What was copied out goes when its bytes are wanted, the oldest first, and at the latest before it comes in again: the
  allocator of TensorFlow waits for room likewise.
- What has one dimension does not leave there; a recorded step does not tell, and storages below `smallest` stay here.
- A value that is written over, of which TensorFlow has none, leaves like any other between what reads it.

Not implemented: serialization of levels, lists of ops that are to be left alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final, final

from spillway.errors import BudgetInfeasible, UsageError
from spillway.ir import Gap, Host, Plan, Step
from spillway.ir.account import account
from spillway.ir.lives import lives_of
from spillway.ir.timeline import Kind
from spillway.methods.absent_bytes import during, waited_late
from spillway.methods.base import SMALLEST, Absence, AbstractPlanner, Problem
from spillway.units import Bytes

SHARE: Final = 0.9
"""Of memory, what the public code's search makes use of."""

FURTHER: Final = 10
"""Levels among which the op is looked for behind which a copy in begins."""

MODES: Final = (0, 1, 2, 3)
"""Neither copy is waited for where it begins; copies out; copies in; both."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What says which values leave, and when they come back."""

    threshold: int
    """What is read at a greater distance than this leaves."""
    ahead: int = 1
    """Levels between where a copy in begins and what reads it."""
    groupby: int = 0
    """Most levels between two ops that share a copy in."""
    mode: int = 0
    """One of `MODES`."""

    @property
    def waits_out(self) -> bool:
        """Whether compute waits for copies out where they begin."""
        return self.mode in (1, 3)

    @property
    def waits_in(self) -> bool:
        return self.mode in (2, 3)


@final
class LMS(AbstractPlanner):
    """Swaps activations by their distance in the graph.

    Arguments:
        threshold, ahead, groupby: As above; None for what the search finds.
        share: Of the budget, what the search makes use of; where all three are given, there is none.
        smallest: Bytes below which a storage stays.

    Raises UsageError if a parameter is below 0, or the share is not above 0 and at most 1.
    """

    name = "lms"
    uses_recipes = False
    begin = "at op"

    def __init__(
        self, *, threshold: int | None = None, ahead: int | None = None, groupby: int | None = None,
        share: float = SHARE, smallest: Bytes = SMALLEST,
    ) -> None:  # fmt: skip
        if min(threshold or 0, ahead or 0, groupby or 0, smallest) < 0 or not 0 < share <= 1:
            raise UsageError(
                f"LMS takes a threshold, levels ahead, levels to group by and bytes of 0 or more, and a share of the "
                f"budget above 0 and at most 1; got {threshold}, {ahead}, {groupby}, {smallest} and {share}."
            )
        self.threshold = threshold
        self.ahead = ahead
        self.groupby = groupby
        self.share = share
        self.smallest = smallest

    def plan(self, problem: Problem) -> Plan:
        """Raises BudgetInfeasible if no parameters make the step fit."""
        step, graph = problem.step, _Graph(problem.step, self.smallest)
        gaps = tuple(graph.gaps(self.parameters(problem), problem.allowed))
        peak = account(step, gaps, lives_of(step)).peak
        return Plan(step=step.digest(), allowed=problem.allowed, projected=peak, gaps=gaps)

    def parameters(self, problem: Problem) -> Parameters:
        """What was given, and of the rest what the search finds. Raises BudgetInfeasible if nothing fits."""
        graph = _Graph(problem.step, self.smallest)
        top = graph.levels_count
        missing = [self.threshold, self.ahead, self.groupby].count(None)
        share = self.share if missing else 1.0

        def fits(tried: Parameters) -> bool:
            return graph.peak(tried)[0] <= int(problem.allowed * share)

        nothing = Parameters(threshold=top)
        if missing == 3 and fits(nothing):
            return nothing
        first = Parameters(
            threshold=1 if self.threshold is None else self.threshold,
            ahead=1 if self.ahead is None else self.ahead,
            groupby=self.groupby or 0,
        )
        found = next((mode for mode in MODES if fits(replace(first, mode=mode))), None)
        if found is None:
            peak, op = graph.peak(replace(first, mode=MODES[-1]))
            smallest = ceil(peak / share)
            smallest += int(smallest * share) < peak  # what rounding took
            raise BudgetInfeasible(
                needed=smallest, allowed=problem.allowed, op=problem.step.ops[op].name, op_index=op,
                smallest_budget=smallest, exact=False,
            )  # fmt: skip
        chosen = replace(first, mode=found)
        if self.threshold is None:
            chosen = _halved(chosen, lambda n: replace(chosen, threshold=n), fits, top)
        if self.ahead is None and not chosen.waits_in:
            chosen = _halved(chosen, lambda n: replace(chosen, ahead=n), fits, top)
        if self.groupby is None and not chosen.waits_in:
            most = replace(chosen, groupby=top)
            chosen = most if fits(most) else _halved(chosen, lambda n: replace(chosen, groupby=n), fits, top, any_=True)
        return chosen


def _halved(
    known: Parameters, made: Callable[[int], Parameters], fits: Callable[[Parameters], bool], most: int, *,
    any_: bool = False,
) -> Parameters:  # fmt: skip
    """What fits with the largest number that halving finds, or with any that it comes upon; else what is known to."""
    low, high = 1, most
    while low <= high:
        middle = (low + high) // 2
        tried = made(middle)
        if fits(tried):
            known, low = tried, middle + 1
            if any_:
                break
        else:
            high = middle - 1
    return known


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Flow:
    """A value that may leave."""

    value: int
    created: int
    """The op that makes it."""
    reads: tuple[int, ...]
    """The ops that read it, in order."""


@final
class _Graph:
    """The ops of a step by their levels, and what flows between them."""

    def __init__(self, step: Step, smallest: Bytes) -> None:
        self._step = step
        self._level = _levels(step)
        self.levels_count = max(self._level, default=0) + 1
        self._of_level: list[list[int]] = [[] for _ in range(self.levels_count)]
        for op, level in enumerate(self._level):
            self._of_level[level].append(op)
        self._flows = list(_flows(step, smallest))
        self._sizes = [storage.nbytes for storage in step.storages]

    def peak(self, parameters: Parameters) -> tuple[Bytes, int]:
        """The most bytes with all copies out done as early as they may be, and the op at which that is so."""
        there = during(self._step, self._intervals(parameters), self._sizes)
        most = max(there, default=0)
        return most, there.index(most) if there else 0

    def gaps(self, parameters: Parameters, allowed: Bytes) -> Iterator[Gap]:
        """What is gone when; copies out that nobody waits for are waited for when room is short."""
        gone = sorted(self._intervals(parameters), key=lambda one: (one.start, one.value))
        if not parameters.waits_out:
            there = during(self._step, gone, self._sizes)
            gone = waited_late(self._step, gone, there, allowed, self._sizes)
        for one in gone:
            yield Gap(value=one.value, start=one.start, end=one.end, home=Host())

    def _intervals(self, parameters: Parameters) -> list[Absence]:
        level, gone = self._level, list[Absence]()
        delay = 1 if parameters.waits_out else 2
        for flow in self._flows:
            nearest = level[flow.created] + parameters.threshold
            far = [op for op in flow.reads if level[op] > nearest]
            if not far:
                continue
            there = max((op for op in flow.reads if level[op] <= nearest), default=flow.created) + delay
            for first, latest in sorted(self._groups(flow, far, parameters)):
                if there < first:
                    gone.append(Absence(flow.value, there, first))
                there = max(there, latest + 1)
        return gone

    def _groups(self, flow: _Flow, far: Sequence[int], parameters: Parameters) -> Iterator[tuple[int, int]]:
        """Of every copy in the op before which it begins, and the last that reads it."""
        level = self._level
        group: list[int] = []
        for op in sorted(far, key=lambda op: (level[op], op)):
            if group and level[op] - level[group[-1]] > parameters.groupby:
                yield self._begins(flow, min(group), parameters), max(group)
                group = []
            group.append(op)
        yield self._begins(flow, min(group), parameters), max(group)

    def _begins(self, flow: _Flow, reader: int, parameters: Parameters) -> int:
        """Right behind the last op of a level that is far enough below the one that reads; else right before it."""
        if parameters.waits_in:
            return reader
        nearest, lowest = self._level[reader] - parameters.ahead - 1, self._level[flow.created]
        for lower in range(nearest, max(nearest - FURTHER, lowest), -1):
            ops = self._of_level[lower]
            place = bisect_left(ops, reader) - 1
            if place >= 0 and ops[place] > flow.created:
                return ops[place] + 1
        return reader


def _levels(step: Step) -> list[int]:
    """Of every op one more than the highest of those that it waits for: what makes a value it reads, and of what it
    writes over, what made that and what read it."""
    made = [-1] * len(step.values)
    read = [-1] * len(step.values)  # the highest level that read it
    current = {value.storage: value.id for value in step.values if value.version == 0}
    levels = []
    for op in step.ops:
        over = [current[step.values[value].storage] for value in op.creates if step.values[value].version]
        before = [made[value] for value in op.reads] + [max(made[value], read[value]) for value in over]
        level = max(before, default=-1) + 1
        levels.append(level)
        for value in op.reads:
            read[value] = max(read[value], level)
        for value in op.creates:
            made[value] = level
            current[step.values[value].storage] = value
    return levels


def _flows(step: Step, smallest: Bytes) -> Iterator[_Flow]:
    """Activations and gradients that ops of the step make and read."""
    for life, value in zip(lives_of(step), step.values, strict=True):
        storage = step.storages[value.storage]
        kept = storage.present_at_start or storage.kind in (Kind.PARAMETER, Kind.BUFFER, Kind.OPTIMIZER_STATE)
        reads = tuple(op for op in life.reads if op > life.created)
        if reads and not kept and storage.nbytes >= max(smallest, 1):
            yield _Flow(value=value.id, created=life.created, reads=reads)
