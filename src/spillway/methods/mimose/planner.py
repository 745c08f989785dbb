"""Mimose on a recorded step: what it would have measured there, and the plan that it makes of that.

A recorded step has one size, and Mimose decides by samples of many. `measured` reads off a step what the collector
would have found in it, every block recomputed: `Mimose.end` takes that, of this step or of steps of other sizes.
`MimosePlanner` gives it those of the very step that it plans, so that nothing has to be estimated, and lets Mimose
choose blocks. The chosen blocks become gaps by `ir/block_calls.py`.

As published, Algorithm 1 has the last word, and a plan whose peak passes the budget is refused with `BudgetInfeasible`.
By default what was chosen is looked at in the account of the whole step, the optimizer's part included, and blocks are
recomputed besides until it fits: the engine does that while the step runs, by giving up what it kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self, final

from spillway.errors import BudgetInfeasible
from spillway.ir import Gap, Kind, Plan, Step
from spillway.ir.account import Account, account
from spillway.ir.block_calls import BlockCall, MicroBatch, block_calls, micro_batches
from spillway.ir.lives import Life, lives_of
from spillway.methods.base import AbstractPlanner, Problem
from spillway.methods.by_block import BlockSample, InputSize, StepSample
from spillway.methods.mimose import Mimose
from spillway.methods.mimose.choices import Options
from spillway.units import Bytes

SIZE: InputSize = (1,)
"""The size of a step whose size nobody named: it is the only one."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the collector finds in a forward and backward whose blocks are all recomputed."""

    start: Bytes
    """Bytes that are there when the forward begins."""
    step: StepSample
    """Of the forward and backward."""
    blocks: tuple[BlockSample, ...]


def measured(
    step: Step, size: InputSize = SIZE, *, lives: Sequence[Life] | None = None,
    calls: Sequence[BlockCall] | None = None,
) -> list[Measured]:  # fmt: skip
    """What the collector finds in a recorded step: one for every micro-batch that calls blocks, in their order."""
    lives = lives_of(step) if lives is None else lives
    calls = block_calls(step, lives) if calls is None else calls
    levels = account(step, [gap for call in calls for gap in call.gaps], lives).levels
    return [_measured(step, part, levels, size) for part in micro_batches(step, calls)]


def _measured(step: Step, part: MicroBatch, levels: Sequence[Bytes], size: InputSize) -> Measured:
    """The blocks of one micro-batch, as `peaks.Forecast` has them.

    The backward of a block are the ops from the one before which it is recomputed to the one before which the next is,
    at least that one op.
    What is used there beside its own bytes and the gradients so far, less the least of that in any block, is what the
    block works with, or what it needs more while it runs forward and is kept; the rest is the step's. The turn is
    looked at where no block runs: while one does, its own bytes are there.
    """
    start = part.start(step)
    order = sorted(range(len(part.calls)), key=lambda block: part.calls[block].returns)
    returns = [part.calls[block].returns for block in order]
    beside: dict[int, Bytes] = {}
    gradients: dict[int, Bytes] = {}
    so_far: dict[int, Bytes] = {}
    for block, begin, end in zip(order, returns, [*returns[1:], part.end], strict=True):
        gradients[block] = sum(
            storage.nbytes
            for storage in step.storages
            if storage.kind is Kind.GRADIENT and begin <= storage.alive_from < end
        )
        so_far[block] = sum(gradients.values())
        beside[block] = max(levels[begin : max(end, begin + 1)]) - start - so_far[block] - part.calls[block].nbytes
    rest = max(min(beside.values()), 0)
    blocks = tuple(
        BlockSample(
            block=block, size=size, nbytes=call.nbytes, seconds=call.seconds, gradients=gradients[block],
            working=max(beside[block] - rest, _in_forward(step, call, levels) - start - call.nbytes - rest, 0),
        )
        for block, call in enumerate(part.calls)
    )  # fmt: skip
    running = {op for call in part.calls for op in call.ops}
    turn = max((levels[op] for op in range(part.begin, returns[0]) if op not in running), default=start) - start
    return Measured(
        start=start,
        step=StepSample(
            size=size, recomputed=frozenset(range(len(blocks))), peak=max(levels[part.begin : part.end]) - start,
            turn_peak=turn,
            backward_peak=max(rest + so_far[one.block] + one.nbytes + one.working for one in blocks),
        ),
        blocks=blocks,
    )  # fmt: skip


def _in_forward(step: Step, call: BlockCall, levels: Sequence[Bytes]) -> Bytes:
    """The most bytes while the call runs forward, if it alone is kept."""

    def kept(op: int) -> Bytes:
        gone = {step.values[gap.value].storage for gap in call.gaps if gap.start <= op < gap.end}
        return sum(step.storages[storage].nbytes for storage in gone)

    return max(levels[op] + kept(op) for op in call.ops)


def gaps_of(calls: Sequence[BlockCall], recomputed: Collection[int]) -> tuple[Gap, ...]:
    """The gaps of the calls with these numbers."""
    return tuple(gap for number, call in enumerate(calls) if number in recomputed for gap in call.gaps)


def revoked(
    step: Step, lives: Sequence[Life], calls: Sequence[BlockCall], recomputed: Collection[int], allowed: Bytes
) -> frozenset[int]:
    """These calls, and as many more as it takes for the step to stay within `allowed`; all that help if it cannot.

    Whenever it is over, of the kept ones that would be gone at the fullest op the one with the fewest seconds per byte
    is recomputed as well, the earliest of equal ones.
    """
    chosen = set(recomputed)
    while True:
        counted = account(step, gaps_of(calls, chosen), lives)
        if counted.peak <= allowed:
            return frozenset(chosen)
        helpful = [
            number
            for number, call in enumerate(calls)
            if number not in chosen and any(gap.start <= counted.fullest < gap.end for gap in call.gaps)
        ]
        if not helpful:
            return frozenset(chosen)
        chosen.add(min(helpful, key=lambda number: (calls[number].seconds / calls[number].nbytes, number)))


@final
class MimosePlanner(AbstractPlanner):
    """Mimose's plan for one recorded step, its samples taken from that step. Recomputes whole blocks and moves nothing.

    Differs from Mimose while training in: there is no other size, so neither estimates nor the plan cache matter.

    Arguments:
        options: `Options()`, Spillway's choices, if not given.
    """

    name = "mimose"

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()

    @classmethod
    def as_published(cls, options: Options | None = None) -> Self:
        """With the paper's choices: `Options.as_published()` unless they are given."""
        made = cls(options or Options.as_published())
        made.name = "mimose-published"
        return made

    def plan(self, problem: Problem) -> Plan:
        """Raises BudgetInfeasible if the step needs more than is allowed under this plan; the budget that it names is
        the smallest one whose plan holds."""
        step, lives = problem.step, lives_of(problem.step)
        calls = block_calls(step, lives)
        found = measured(step, lives=lives, calls=calls)
        allowed = problem.allowed
        gaps, counted = self._chosen(step, lives, calls, found, allowed)
        if counted.peak > allowed:
            fullest, needed, smallest = counted.fullest, counted.peak, counted.peak
            while True:
                # Less is recomputed under a larger budget, so the first that holds from below is the smallest.
                _, counted = self._chosen(step, lives, calls, found, smallest)
                if counted.peak <= smallest:
                    break
                smallest = counted.peak
            raise BudgetInfeasible(
                needed=needed, allowed=allowed, op=step.ops[fullest].name, op_index=fullest % len(step.ops),
                smallest_budget=smallest, exact=True,
            )  # fmt: skip
        return Plan(step=step.digest(), allowed=allowed, projected=counted.peak, gaps=gaps)

    def _chosen(
        self, step: Step, lives: Sequence[Life], calls: Sequence[BlockCall], found: Sequence[Measured], allowed: Bytes
    ) -> tuple[tuple[Gap, ...], Account]:
        """The gaps under a budget, and the account of the step with them."""
        checks = self.options.checks_peak
        recomputed: frozenset[int] = frozenset()
        if not checks or step.plain_peak() > allowed:
            first = 0
            for part in found:
                chosen = self._decide(part, allowed - part.start)
                recomputed |= {first + block for block in chosen}
                first += len(part.blocks)
        if checks:
            recomputed = revoked(step, lives, calls, recomputed, allowed)
        gaps = gaps_of(calls, recomputed)
        return gaps, account(step, gaps, lives)

    def _decide(self, part: Measured, available: Bytes) -> frozenset[int]:
        mimose = Mimose(self.options)
        for _ in range(2):  # the first step does not count for the whole model
            mimose.end(part.step, part.blocks)
        return mimose.plan(part.step.size, available).given_up
