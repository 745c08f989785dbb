"""`auto`: the best of all actions for every block, all of them together, for the size of the input and the budget.

No paper's: what five of them do each alone, planned jointly. `block_problem.py` says what is decided, `choosing.py`
decides, `menus.py` has what training teaches. A step of a new training measures, by what its blocks run anyway:

 1. the first recomputes every block, which needs least: bytes, and seconds of both runs;
 2. one runs, selectively, `TRIED` blocks of each kind: what that keeps and spares;
 3. one recomputes as many with their inputs away: how fast copies are while blocks run;
 4. others only measure, at most `COLLECTED` in all, while a size is new and no law covers it.

All but the first keep what surely fits by what is known of bytes, which errs upwards, and recompute the rest.

The second and third wait for a step in which not everything fits, and the second for one with room for it, which the
third does not wait for.

After these every size has its plan: sizes within `BUCKET` of each other share that of the largest that was seen, or
where sizes are many that of the largest there can be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, floor, inf, log
from statistics import median
from types import MappingProxyType
from typing import Final, Self, final

from spillway.methods.actions import Action
from spillway.methods.auto.block_problem import BlockProblem
from spillway.methods.auto.choosing import Effort, Planned, plan
from spillway.methods.auto.menus import Menus
from spillway.methods.auto.rules import sentences
from spillway.methods.auto.simulate import simulate
from spillway.methods.by_block import (
    AbstractBlockMethod,
    BlockPlan,
    BlockSample,
    Decision,
    Forecast,
    InputSize,
    Phase,
    StepSample,
    of_lengths,
)
from spillway.methods.mimose.choices import Options
from spillway.methods.mimose.planning import SimulatedPlanning
from spillway.units import Bytes, Seconds

COLLECTED: Final = 10
"""Steps that measure at most, as Mimose's evaluation has them."""
PROBES: Final = MappingProxyType({Action.SELECTIVE: 3, Action.RECOMPUTE_OFFLOADED: 2})
"""What is tried in blocks beside recomputing them, and in how many steps at most: the first until something is known of
it, copies twice, since the first of them write where nothing was yet."""
TRIED: Final = 2
"""Blocks of each kind in which something is tried."""
BUCKET: Final = 0.02
"""How far apart sizes may be that share a plan: each of their numbers, as a share of it."""
MARGIN: Final = 0.01
"""Of what is available, left free: copies take time to begin. What is kept can be given up besides."""
CAUTION: Final = 0.1
"""Of what is available, left free where something is tried whose bytes are not known yet."""
CUSHION: Final = 0.001
"""Expected besides where a plan was missed, so that the next steps are not misses by bytes."""
FORGETS: Final = 0.99
"""How much of a miss of a plan is left after every step that is as planned."""
LATELY: Final = 8
"""Steps by which it is known how much longer than their plans say they take."""
STEADY: Final = 0.01
"""What steps are told to take is not told anew where it would change by less than this share."""
SPARE: Final = 0.005
"""A plan is made again when what is available is so much more or less than what it was made for."""
FEW: Final = 12
"""Blocks for which a plan is made with more effort at once: it takes no longer than a first one for twice as many."""
POLISHED: Final = 8
"""After so many uses a plan is made with more effort, and may be made again where copies are faster or slower now."""
SERVED: Final = 64
"""After so many it is made again where its step takes `LONGER`, and sooner where it takes more; where copies are faster
nobody knows what another plan would spare, and the old one serves so many. A plan takes a hundredth of a step."""
FASTER: Final = 1.3
"""Copies that are less times as fast as a plan took them to be are no reason for another one. Over the 96 instances of
`benchmarks/auto_planner.py` such plans take .4 % of a plain step more than new ones, in the mean."""
LONGER: Final = 0.01
"""Nor are those with which its step takes no more than so much longer, as a share of the plain step."""
VARIED: Final = 2
"""Buckets after which sizes count as varied: what is new is planned for the largest numbers of its bucket, and before
for the largest that were seen, so that a training of few sizes loses no room."""
PLANS: Final = 4096
"""That are remembered; beyond, all are forgotten."""


@final
class Auto(AbstractBlockMethod):
    """Decides before each step, learns after it. One object belongs to one training.

    Arguments:
        moves: Whether anything may wait on disk, or in host memory on CUDA.
        batched: Whether the first number of a size counts samples, by which all bytes are multiplied.
    """

    name = "auto"
    needs_blocks = False

    def __init__(self, *, moves: bool = True, batched: bool = False) -> None:
        self._moves = moves
        self._options = Options(batched=batched)
        self._bytes = SimulatedPlanning(self._options)
        self._menus = Menus(batched=batched)
        self._steps = 0
        """That measured, and ended."""
        self._pending = {action: tries for action, tries in PROBES.items() if moves or not action.moves}
        """What is to be tried in blocks, and how often still."""
        self._measured: set[InputSize] = set()
        """Sizes at which every block was measured."""
        self._plans: dict[InputSize, _Remembered] = {}
        """By bucket."""
        self._largest: dict[InputSize, InputSize] = {}
        """Of each bucket, the largest numbers that were seen in it, or that there can be."""
        self._alone: set[InputSize] = set()
        """Buckets whose largest numbers have no plan that holds: each of their sizes has one of its own."""
        self._over = 0.0
        """By which share of it steps took more than their plans said, lately, where nothing was moved or no room was
        left: plans are made for less by as much."""
        self._late = 0.0
        """The same where copies went on for longer than planned and there was room for that: no plan is the worse for
        it, and less is promised."""
        self._paces: deque[float] = deque(maxlen=LATELY)
        """What steps took, over what their plans had said: the machine beside its best times."""
        self._pace = 1.0
        """The median of these."""
        self._latest: _Remembered | None = None
        self._unmoved = 0
        """Forwards in a row whose plans recompute and move nothing."""

    def in_header(self) -> dict[str, object]:
        """Nothing: what becomes of blocks is another thing in every step."""
        return {}

    def fresh(self, *, batched: bool) -> Self:
        return type(self)(moves=self._moves, batched=batched)

    @property
    def moves(self) -> bool:
        return self._moves

    @property
    def collecting(self) -> bool:
        return not self._bytes.ready

    def collects(self, size: InputSize) -> bool:
        """Whether it is new, and not covered by what is known of others."""
        if self.collecting:
            return True
        return size not in self._measured and self._steps < COLLECTED and not self._bytes.settled

    def begin(self, size: InputSize, available: Bytes) -> Decision:
        probe = self._probe(size, available)
        if probe is not None:
            return Decision(Phase.COLLECTING, probe, True)
        if not self.collects(size):
            planned = self.plan(size, available)
            # Where plans recompute and move nothing, nobody would learn that copies have become faster: they are tried
            # again, after twice as many steps each time.
            assert self._latest is not None
            self._unmoved = self._unmoved + 1 if self._latest.gives_up and not self._latest.moves else 0
            if self._moves and self._unmoved >= POLISHED and self._unmoved.bit_count() == 1:
                self._pending[Action.RECOMPUTE_OFFLOADED] = 1
                self._menus.doubt_rates()
            return Decision(Phase.PLANNED, planned, False)
        surely = self._surely(size, available) if self._bytes.ready else None
        return Decision(Phase.COLLECTING, surely or BlockPlan.nothing_kept(size, available), True)

    def holds(self, size: InputSize, available: Bytes) -> bool:
        """Whether all that is to be measured of the size was, and its plan stays within so many bytes."""
        return not self.collects(size) and self._bytes.plan(size, int(available * (1 - MARGIN))).holds

    def _surely(self, size: InputSize, available: Bytes) -> BlockPlan | None:
        """What is kept while something is still to be measured; None where it is not sure that this will fit."""
        cautious = self._bytes.plan(size, int(available * (1 - CAUTION)))
        return cautious if cautious.holds else None

    def _probe(self, size: InputSize, available: Bytes) -> BlockPlan | None:
        """What is still to be tried, where not everything fits and nearly as much room is left as that may take."""
        if not self._pending or not self._bytes.ready:
            return None
        known = self._plans.get(self._bucket(size))
        if known is not None and known.plan.holds and not known.plan.given_up and known.plan.available <= available:
            return None
        if not self._bytes.plan(size, available).given_up:
            return None
        surely = self._surely(size, available)
        for action in self._pending:
            if surely is not None:
                return self._trying(action, surely)
            if not action.selects:
                return BlockPlan.nothing_kept(size, available, action)
        return None

    def _trying(self, action: Action, surely: BlockPlan) -> BlockPlan:
        """The same, but for a few blocks of each kind: selective are those that would be kept, if there are any; inputs
        leave of those that are recomputed anyway."""
        saved = self._bytes.forecast(surely.size).saved
        of_kinds: dict[Bytes, list[int]] = {}
        for call, nbytes in enumerate(saved):
            if action.selects or (not surely.keeps(call) and self._menus.leaves(call, surely)):
                of_kinds.setdefault(nbytes, []).append(call)
        if action.selects:
            of_kinds = {
                kind: sorted(calls, key=lambda call: not surely.keeps(call)) for kind, calls in of_kinds.items()
            }
        tried = {call for calls in of_kinds.values() for call in calls[:TRIED]}
        if not tried:  # nothing that is recomputed has an input that could leave while the rest is kept
            return BlockPlan.nothing_kept(surely.size, surely.available, action)
        actions = tuple(action if call in tried else did for call, did in enumerate(surely.actions))
        return replace(surely, actions=actions, projected=0)

    def plan(self, size: InputSize, available: Bytes) -> BlockPlan:
        """The plan of the size's bucket: one that is remembered and still suits, or a new one.

        Raises ValueError before every block was measured.
        """
        bucket = self._bucket(size)
        known = self._plans.get(bucket)
        if known is None or size not in known.sizes:
            known = self._covering(size, bucket, known)
        largest = self._largest[bucket]
        if known is None or abs(available - known.plan.available) > SPARE * known.plan.available:
            if len(self._plans) >= PLANS:
                self._plans.clear()
                self._largest = {bucket: largest}
            known = self._plans[bucket] = self._planned(largest, available, Effort.FIRST)
        elif known.uses >= POLISHED and known.gives_up and known.holds and not self._suits(known):
            known = self._plans[bucket] = self._planned(largest, available, Effort.POLISH)
        if not known.holds and known.plan.size != size:
            self._alone.add(bucket)
            return self.plan(size, available)
        known.sizes.add(size)
        known.uses += 1
        self._latest = known
        projected = known.plan.projected
        if self._late and known.moves:
            projected = max(min(ceil(projected * (1 + self._late)), available), projected)
        if known.taken and known.holds and size == known.plan.size:
            projected = min(known.taken, projected)
        told = known.told
        if told is None or told.projected != projected or abs(self._pace - known.pace) > STEADY * known.pace:
            seconds = known.plan.step_seconds * self._pace
            told = known.told = replace(known.plan, projected=projected, step_seconds=seconds)
            known.pace = self._pace
        return told

    def _covering(self, size: InputSize, bucket: InputSize, known: _Remembered | None) -> _Remembered | None:
        """The bucket's plan if it is for sizes as large as this; what one is to be made for otherwise."""
        largest = self._largest.get(bucket)
        if largest is not None and all(mine <= known for mine, known in zip(size, largest, strict=True)):
            return known
        largest = tuple(map(max, size, largest or size))
        if len(self._largest) >= VARIED and len(bucket) == len(size) and self._bytes.settled:
            largest = tuple(map(max, of_lengths(size, _last, batched=self._options.batched), largest))
        self._plans.pop(bucket, None)
        self._largest[bucket] = largest
        return None

    def _bucket(self, size: InputSize) -> InputSize:
        bucket = of_lengths(size, _edge, batched=self._options.batched)
        return (*size, -1) if bucket in self._alone else bucket

    def problem(self, size: InputSize, available: Bytes) -> BlockProblem:
        return self._menus.problem(self._bytes.forecast(size), available, size, moves=self._moves)

    def _planned(self, size: InputSize, available: Bytes, effort: Effort) -> _Remembered:
        problem = self.problem(size, int(available / (1 + max(self._over, MARGIN))))
        if len(problem.blocks) <= FEW:
            effort = Effort.POLISH
        found = plan(problem, effort=effort)
        made = self._made(size, available, problem, found)
        return _Remembered(
            made, problem, found, effort, (problem.out_rate, problem.in_rate), found.outcome.seconds,
            gives_up=bool(made.given_up), moves=any(action.moves for action in made.actions), holds=made.holds,
        )  # fmt: skip

    def _made(self, size: InputSize, available: Bytes, problem: BlockProblem, found: Planned) -> BlockPlan:
        blocks = problem.blocks[:-1]
        chosen = [block.options[number] for block, number in zip(blocks, found.choice, strict=False)]
        saved = self._bytes.forecast(size).saved
        gone = [one for one, option in zip(saved, chosen, strict=True) if option.action is not Action.KEEP]
        return BlockPlan(
            size=size,
            actions=tuple(option.action for option in chosen),
            otherwise=Action.RECOMPUTE,
            projected=ceil(found.outcome.peak * (1 + self._over)),
            available=available,
            seconds=found.outcome.seconds - problem.plain,
            smallest=min(gone, default=0),
            comes_in=found.outcome.comes_in[: len(blocks)],
            step_seconds=found.outcome.seconds + problem.rest,
        )

    def _suits(self, known: _Remembered) -> bool:
        """Whether a plan was made with all effort, and more would hardly spare anything where copies are as fast as
        they are now. It is known then as what it comes to there, and when it is `due` after all."""
        rates = self._menus.rates
        if known.effort is not Effort.POLISH or rates == (known.problem.out_rate, known.problem.in_rate):
            return known.effort is Effort.POLISH and known.uses < known.due
        problem = replace(known.problem, out_rate=rates[0], in_rate=rates[1])
        outcome = simulate(problem, known.planned.choice)
        faster = any(now > FASTER * then for now, then in zip(rates, known.rates, strict=True))
        lost, little = outcome.seconds - (problem.plain if faster else known.seconds), LONGER * problem.plain
        known.due = inf if lost <= little else SERVED if faster else SERVED * little / lost
        if not outcome.fits or known.uses >= known.due:
            return False
        planned = Planned(choice=known.planned.choice, outcome=outcome)
        made = self._made(known.plan.size, known.plan.available, problem, planned)
        known.problem, known.planned, known.plan, known.told = problem, planned, made, None
        known.holds = made.holds
        return made.holds

    def end(self, step: StepSample, blocks: Sequence[BlockSample] = ()) -> None:
        """Bytes are learned where blocks were kept or recomputed and nothing else, seconds and shares everywhere."""
        collecting = self.collects(step.size)
        known = self._plans.get(self._bucket(step.size))
        if known is not None and known.plan.available != step.available:
            known = None  # another forward of this step, from where more or less was there, has had a plan since
        if not collecting and known is not None and min(step.projected, step.seconds, known.plan.step_seconds) > 0:
            self._paces.append(step.seconds / known.plan.step_seconds)
            self._pace = median(self._paces)
        whole = {sample.action for sample in blocks} <= {Action.KEEP, Action.RECOMPUTE}
        changed = whole and self._bytes.observe(step, blocks, whole=True)
        if whole and blocks:
            self._measured.add(step.size)
        forecast = self._bytes.forecast(step.size) if self._bytes.ready else None
        changed |= self._menus.take(step, blocks, forecast)
        if not collecting and step.projected > 0:
            changed |= self._learn_excess(step, known, moved=any(sample.action.moves for sample in blocks))
        if changed:
            self._plans.clear()
        elif known is not None and known.moves and step.size == known.plan.size:
            known.taken = max(known.taken, step.peak)
        self._steps += collecting
        for action in {sample.action for sample in blocks} & {*self._pending}:
            self._pending[action] -= 1
            if not self._pending[action] or (action.selects and self._menus.knows_kept):
                del self._pending[action]

    def _learn_excess(self, step: StepSample, known: _Remembered | None, *, moved: bool) -> bool:
        """What a step took beyond its plan is forgotten slowly, and never below what the latest such step took, where
        its plan is `known`. Returns whether plans have to be made again."""
        if step.peak > step.projected and not (moved and step.peak <= step.available):
            self._over = (1 + self._over) * step.peak / step.projected - 1 + CUSHION
            return True
        over = late = 0.0
        projected = step.projected
        if known is not None and known.plan.projected > 0:
            over, late = step.peak / known.planned.outcome.peak - 1, step.peak / known.plan.projected - 1
            projected = max(projected, known.plan.projected)
        if step.peak > projected:
            late = (1 + self._late) * step.peak / projected - 1 + CUSHION
        if moved:
            self._over, self._late = self._over * FORGETS, max(self._late * FORGETS, late)
        else:
            self._over, self._late = max(self._over * FORGETS, over), self._late * FORGETS
        return False

    def forget_plans(self) -> None:
        self._plans.clear()
        self._alone.clear()

    def does_without_spill(self) -> bool:
        self._moves = False
        self._pending.pop(Action.RECOMPUTE_OFFLOADED, None)
        self._plans.clear()
        return True

    def explained(self, names: Sequence[str]) -> tuple[str, ...]:
        """A sentence a kind of block, and one for the step: what was chosen, with phi, bytes and seconds."""
        if self._latest is None:
            return ()
        problem, planned = self._latest.problem, self._latest.planned
        problem = replace(problem, rest=self._latest.plan.step_seconds * self._pace - planned.outcome.seconds)
        kinds = {block.kind: name for block, name in [*zip(problem.blocks, names, strict=False)][::-1]}
        return sentences(problem, planned, {**kinds, problem.blocks[-1].kind: "what is no block"})

    def forecast(self, size: InputSize) -> Forecast | None:
        return self._bytes.forecast(size) if self._bytes.ready else None


@final
@dataclass(slots=True)
class _Remembered:
    """A plan, and what it was made of."""

    plan: BlockPlan
    problem: BlockProblem
    planned: Planned
    effort: Effort
    rates: tuple[float, float]
    """Bytes a second of copies out and in that it was made for."""
    seconds: Seconds
    """What it came to there."""
    gives_up: bool
    """Whether there is a block that it does not keep."""
    moves: bool
    """Whether it moves anything."""
    holds: bool
    """Whether it is expected to stay within what is available."""
    sizes: set[InputSize] = field(default_factory=set)
    """That have used it."""
    told: BlockPlan | None = None
    """As it was told last."""
    pace: float = 1.0
    """By which its seconds were multiplied then."""
    taken: Bytes = 0
    """The most that steps of its own size have taken. What is on its way out when a block begins is expected to be
    there at its peak, and often is gone by then."""
    uses: int = 0
    """How many steps it was used in."""
    due: float = inf
    """After how many it is made again."""


@lru_cache(maxsize=PLANS)
def _edge(number: int) -> int:
    """Which numbers within `BUCKET` of each other it belongs to; 0 is alone."""
    return floor(log(number) / log(1 + BUCKET)) if number > 0 else -1


def _last(number: int) -> int:
    """The largest number with the same edge."""
    return max(ceil((1 + BUCKET) ** (_edge(number) + 1)) - 1, number)


__all__ = ["Auto", "BlockProblem"]
