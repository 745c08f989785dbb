"""The improved window: beyond the paper, what leaves is chosen by what is left to come, and cheap values run again.

Three improvements over the window, each an option of its own:

- *gaps*, "least": not the window but a linear program chooses which values are gone between which of their accesses
  (`fewest_bytes` in `absent_bytes.py`). What it has gone in part is gone, unless there is room for it after all. The
  window is as good on a chain; it moves more where the largest op takes most of the memory, or where weights move.
- *recompute*: values of the forward whose recipe takes less time than their copies, out and in, may run again in the
  backward, such as a batch norm with its ReLU from the result of a convolution. Which do is for `fewest_seconds`, value
  by value: none where copies hide behind ops anyhow.
- *exempt*: small storages share chunks, where chunks are modelled.

Then all copies are stretched over the slack: out is waited for when bytes are wanted, the oldest first, and in begins
as early as there is room, as with the window's "host ahead".

A plan of the plain window is made too, and each kind of gaps with and without recomputing. By a clock that knows ops,
copies on the lanes of the device and replays, but none of an engine's cost, the fastest is taken; of two that are as
fast, to within `SAME`, the plainer one. So it is not slower than the window, as far as that clock goes. It takes the
solver's time, which grows faster than the window's: a third of a second for a thousand ops, ten for 30,000.

NOTE [A step with replays]. A value that comes back before op e by a recipe is, for the window and the program, two
storages. The first dies with its last use in front of the gap, the second is made by op e; op e also reads the leaves
of the replay, and makes a storage for as many bytes as its temporaries need beyond its own results, as these two are
not there at once. Ops keep their numbers, so gaps of that step are gaps of the real one. What would lift an op above
the budget is not recomputed. Where a leaf comes back by a recipe of its own, that happens by op e at the latest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, final, get_args

import numpy as np

from spillway.errors import UsageError
from spillway.ir import Gap, Host, Kind, Plan, Step, StorageInfo, Value
from spillway.ir.account import account
from spillway.ir.lives import Kept, Life, kept_for_backward, lives_of
from spillway.ir.recipes import recipe
from spillway.ir.step import ValueId
from spillway.methods.absent_bytes import (
    Replay,
    Together,
    comes_in,
    during,
    fewest_bytes,
    fewest_seconds,
    waited_late,
)
from spillway.methods.base import SMALLEST, Absence, AbstractPlanner, Problem
from spillway.methods.linear_program import load_solver
from spillway.methods.plan_clock import PlanClock
from spillway.methods.window import Gone, Window, earlier
from spillway.units import Bytes

Gaps: TypeAlias = Literal["window", "least"]
"""Who chooses what is gone between which accesses."""

SAME: Final = 1e-3
"""Share of a step's seconds below which one plan is not faster than another."""

HALF: Final = 0.5
"""The share of a value from which on it is recomputed."""

NOTHING: Final = 1e-6
"""What a solver calls 0."""


@final
class ImprovedWindow(AbstractPlanner):
    """The fastest of the window's plan and of those with the improvements.

    Arguments:
        gaps: "least" for the linear program; "window" for the window's rules.
        recompute: Whether values may be recomputed.
        chunk: Every storage counts as whole chunks of so many bytes.
        exempt: Storages below so many bytes share chunks, and count as what they are.
        smallest: Bytes below which a storage stays.

    Raises UsageError if the chunk is not above 0, `exempt` or `smallest` is below 0, or `gaps` is neither of the two.
    """

    name = "window-improved"
    begin = "at op"

    def __init__(
        self, *, gaps: Gaps = "least", recompute: bool = True, chunk: Bytes = 1, exempt: Bytes = 0,
        smallest: Bytes = SMALLEST,
    ) -> None:  # fmt: skip
        if gaps not in get_args(Gaps):
            raise UsageError(f"Gaps are chosen by {' or '.join(map(repr, get_args(Gaps)))}, got {gaps!r}.")
        self.window = Window(chunk=chunk, exempt=exempt, smallest=smallest)
        self.gaps = gaps
        self.recompute = recompute
        self.uses_recipes = recompute

    def plan(self, problem: Problem) -> Plan:
        """Raises BudgetInfeasible if an op needs more than is allowed, UsageError if SciPy is not installed."""
        step, lives = problem.step, lives_of(problem.step)
        best = self.window.plan(problem)
        if best.gaps:  # else all fits
            load_solver("the improved window")
            clock = PlanClock(step, lives, problem.device)
            seconds = clock.seconds(best.gaps)
            for gaps in self._tried(problem, lives):
                took = clock.seconds(gaps)
                if took < seconds * (1 - SAME):
                    best, seconds = replace(best, gaps=gaps, window=()), took
        return replace(best, projected=account(step, best.gaps, lives).peak)

    def _tried(self, problem: Problem, lives: Sequence[Life]) -> Iterator[tuple[Gap, ...]]:
        """Plans beside the window's own."""
        if self.gaps == "least":
            yield self._least(problem, lives)
        replays = self._worth_it(problem, lives) if self.recompute else {}
        small = sum(one.nbytes for one in problem.step.storages if one.nbytes < self.window.smallest)
        room = problem.allowed - small - self.window.smallest
        again = _Again.of(problem.step, lives, replays, self.window.counted(problem.step), room)
        if again.replays:
            inner = replace(problem, step=again.step)
            yield again.gaps(self.window.plan(inner).gaps)
            if self.gaps == "least":
                yield again.gaps(self._least(inner, lives_of(again.step)))

    def _least(self, problem: Problem, lives: Sequence[Life]) -> tuple[Gap, ...]:
        """Gaps by the linear program, stretched; the window's where it has no answer that fits, as it leaves what op
        0 uses there when a step ends."""
        step, sizes = problem.step, self.window.counted(problem.step)
        try:
            shares, _ = fewest_bytes(step, lives, problem.allowed, sizes, self.window.smallest)
            chosen, there = _whole(step, shares, problem.allowed, sizes)
        except ArithmeticError:
            return self.window.plan(problem).gaps
        gone = [
            Gone(step.values[one.value].storage, one.start, one.end, comes_in(lives[one.value], one.end, len(step.ops)))
            for one in waited_late(step, chosen, there, problem.allowed, sizes)
        ]
        gone.sort(key=lambda one: (one.end, one.start, one.storage))
        gaps = list(earlier(step, sizes, gone, problem.allowed))
        # What the step before ended without is fetched while ops run, even if there is room for it from the beginning.
        left = {gap.value for gap in gaps if not gap.start}
        gaps += (
            Gap(value=one.value, start=0, end=1, home=Host())
            for one in chosen
            if not one.start and one.value not in left
        )
        return tuple(gaps)

    def _worth_it(self, problem: Problem, lives: Sequence[Life]) -> dict[ValueId, Replay]:
        """What is faster to recompute than to swap."""
        step = problem.step
        cheap = dict(_cheap(problem, lives, self.window.smallest))
        if not cheap:
            return {}
        sizes, smallest = self.window.counted(step), self.window.smallest
        try:
            shares, _ = fewest_seconds(step, lives, problem.allowed, sizes, smallest, cheap, problem.device)
        except ArithmeticError:
            return {}
        return {value: cheap[value] for value, share in shares.items() if share > HALF}


def _cheap(problem: Problem, lives: Sequence[Life], smallest: Bytes) -> Iterator[tuple[ValueId, Replay]]:
    """Values whose recipe ends in what is alive by then, and takes less than their copies."""
    step, device = problem.step, problem.device
    last = {value.storage: value.id for value in step.values}
    for kept in kept_for_backward(step, list(lives)):
        storage = step.storages[step.values[kept.value].storage]
        if storage.nbytes < max(smallest, 1) or last[storage.id] != kept.value:
            continue
        replay = _replay(step, lives, kept)
        copies = device.out_seconds(storage.nbytes) + device.in_seconds(storage.nbytes)
        if replay is not None and replay.seconds < copies:
            yield kept.value, replay


def _replay(step: Step, lives: Sequence[Life], kept: Kept) -> Replay | None:
    home = recipe(kept.value, kept.last + 1, kept.needed, step=step, lives=lives, present=lambda leaf: True)
    if home is None or home.held:
        return None
    made = {value for op in home.ops for value in step.ops[op].creates}
    return Replay(
        start=kept.last + 1, end=kept.needed, home=home, seconds=sum(step.ops[op].seconds or 0.0 for op in home.ops),
        leaves=frozenset(value for op in home.ops for value in step.ops[op].reads) - made,
    )  # fmt: skip


# ---------------------------------------------------------------------- a step with replays


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Again:
    """A step with replays, as the NOTE above has it."""

    step: Step
    replays: Mapping[ValueId, Replay]
    """By the values that they bring back."""
    values: Mapping[ValueId, ValueId]
    """Of values that it has more than the real step, which they are there."""

    @classmethod
    def of(
        cls, step: Step, lives: Sequence[Life], wanted: Mapping[ValueId, Replay], sizes: Sequence[Bytes], room: Bytes
    ) -> _Again:
        """With those of the wanted replays for which an op has so much room."""
        replays = _with_room(step, lives, wanted, sizes, room)
        storages, values = list(step.storages), list(step.values)
        creates: dict[int, list[ValueId]] = defaultdict(list)
        reads: dict[int, set[ValueId]] = defaultdict(set)

        def made(storage: StorageInfo, op: int) -> ValueId:
            storages.append(replace(storage, id=len(storages)))
            values.append(Value(id=len(values), storage=len(storages) - 1, version=0))
            creates[op].append(len(values) - 1)
            return len(values) - 1

        second = dict[ValueId, ValueId]()
        for value, replay in replays.items():
            first = storages[step.values[value].storage]
            second[value] = made(replace(first, alive_from=replay.end), replay.end)
            storages[first.id] = replace(first, alive_until=replay.start)
            reads[replay.end] |= replay.leaves
        for at, more in _temporaries(step, replays).items():
            if more:
                made(StorageInfo(id=0, nbytes=more, kind=Kind.TEMPORARY, alive_from=at, alive_until=at + 1), at)

        def now(value: ValueId, op: int) -> ValueId:
            return second[value] if value in second and op >= replays[value].end else value

        ops = []
        for op in step.ops:
            own, more_reads = creates.get(op.number, []), sorted(reads.get(op.number, ()))
            read = dict.fromkeys(now(value, op.number) for value in (*op.reads, *more_reads))
            ops.append(
                replace(op, reads=tuple(one for one in read if one not in own), creates=(*op.creates, *own))
                if own or read.keys() != set(op.reads) else op
            )  # fmt: skip
        built = Step(storages=tuple(storages), values=tuple(values), ops=tuple(ops))
        return cls(step=built, replays=replays, values={new: value for value, new in second.items()})

    def gaps(self, gaps: Iterable[Gap]) -> tuple[Gap, ...]:
        """Gaps of that step as gaps of the real one, and those of the replays."""
        moved = (replace(gap, value=self.values.get(gap.value, gap.value)) for gap in gaps)
        dropped = (Gap(value=v, start=one.start, end=one.end, home=one.home) for v, one in self.replays.items())
        return (*moved, *dropped)


def _with_room(
    step: Step, lives: Sequence[Life], wanted: Mapping[ValueId, Replay], sizes: Sequence[Bytes], room: Bytes
) -> dict[ValueId, Replay]:
    """What later values are made from is back when they are."""
    found = dict[ValueId, Replay]()
    ends = {value: replay.end for value, replay in wanted.items()}
    for value in sorted(wanted, key=lambda value: -lives[value].created):
        kept = Kept(value=value, last=wanted[value].start - 1, needed=ends[value])
        replay = wanted[value] if ends[value] == wanted[value].end else _replay(step, lives, kept)
        if replay is None or _needed(step, {**found, value: replay}, replay.end, sizes) > room:
            continue
        found[value] = replay
        for leaf in replay.leaves & wanted.keys():
            if wanted[leaf].start <= replay.end:
                ends[leaf] = min(ends[leaf], replay.end)
    return found


def _needed(step: Step, replays: Mapping[ValueId, Replay], op: int, sizes: Sequence[Bytes]) -> Bytes:
    """Bytes that the op uses, with the replays in front of it."""
    here = {value: replay for value, replay in replays.items() if replay.end == op}
    used = {*step.ops[op].reads, *step.ops[op].creates, *here, *(leaf for one in here.values() for leaf in one.leaves)}
    storages = {step.values[value].storage for value in used}
    return sum(sizes[storage] for storage in storages) + _temporaries(step, here)[op]


def _temporaries(step: Step, replays: Mapping[ValueId, Replay]) -> dict[int, Bytes]:
    """By op what its largest replay needs beyond what the op makes itself."""
    most: dict[int, Bytes] = {}
    for replay in replays.values():
        most[replay.end] = max(most.get(replay.end, 0), replay.home.temporaries)
    made = {
        op: sum(
            step.storages[step.values[v].storage].nbytes for v in step.ops[op].creates if not step.values[v].version
        )
        for op in most
    }
    return {op: max(nbytes - made[op], 0) for op, nbytes in most.items()}


# ---------------------------------------------------------------------- whole gaps, stretched


def _whole(
    step: Step, shares: Mapping[Together, float], allowed: Bytes, sizes: Sequence[Bytes]
) -> tuple[list[Absence], list[Bytes]]:
    """What has any share of it gone, without that for which there is room, and the bytes during every op. Raises
    ArithmeticError where these are over the budget, by the few bytes that a solver may leave."""
    chosen = [gone for gone, share in shares.items() if share > NOTHING]
    there = np.array(during(step, (one for gone in chosen for one in gone), sizes), dtype=np.int64)
    if (there > allowed).any():
        raise ArithmeticError("The solver left bytes that are over the budget.")
    left = list[Absence]()
    for gone in sorted(chosen, key=lambda gone: (shares[gone], -sizes[step.values[gone[0].value].storage], gone)):
        nbytes = sizes[step.values[gone[0].value].storage]
        if all(there[one.start : one.end].max() + nbytes <= allowed for one in gone):
            for one in gone:
                there[one.start : one.end] += nbytes
        else:
            left += gone
    return sorted(left, key=lambda one: (one.start, one.value)), there.tolist()
