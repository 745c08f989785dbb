"""Every block is recomputed, at every size: what `torch.utils.checkpoint` around every block does. The baseline.

Or something else becomes of every block, the same of each: see `Checkpoint`.

`Checkpoint` runs on the block engine, `CheckpointPlanner` on a recorded step: the left star of Mimose's Fig. 13, and
what its collecting phase does. Chen et al., arXiv:1604.06174, with every block a segment.

The planner differs from `torch.utils.checkpoint` in: what a block's second run brings back is what the backward reads;
ops of the block from which nothing of that comes do not run again. A value of a block that some op reads outside of it,
such as its result, stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Self, final

from spillway.errors import UsageError
from spillway.ir import Plan
from spillway.ir.block_calls import block_calls
from spillway.ir.lives import lives_of
from spillway.methods.actions import USUAL, Action, ActionOptions
from spillway.methods.base import AbstractPlanner, Problem
from spillway.methods.by_block import (
    AbstractBlockMethod,
    BlockPlan,
    BlockSample,
    Decision,
    Forecast,
    InputSize,
    Phase,
    StepSample,
)
from spillway.units import Bytes


@final
class Checkpoint(AbstractBlockMethod):
    """Recomputes every block and learns nothing.

    Arguments:
        action: What becomes of every block instead: what it saves is moved or quantized, its input is, or it runs again
            without its expensive ops. Where it quantizes, a session has to be told `BlockOptions(lossy=True)`.
        bits: As in `ActionOptions`, like `compiled` and `waits`.

    Raises UsageError if `action` is none, or keeps everything; `bits` are none of these; it `waits` and nothing moves,
    or is `compiled` and nothing is quantized.
    """

    name = "checkpoint"

    def __init__(
        self, action: Action = Action.RECOMPUTE, *, bits: int = 4, compiled: bool = False, waits: bool = False
    ) -> None:
        if not isinstance(action, Action) or action is Action.KEEP:
            others = ", ".join(f"Action.{one.name}" for one in Action if one is not Action.KEEP)
            raise UsageError(f"Checkpoint does one of {others} with every block; got {action!r}.")
        if waits and not action.moves:
            raise UsageError(f"Compute can wait for copies where something moves; Action.{action.name} moves nothing.")
        if compiled and not action.lossy:
            raise UsageError(f"What quantizes can be compiled; Action.{action.name} quantizes nothing.")
        self.action = action
        self.action_options = {**USUAL, action: ActionOptions(bits=bits, compiled=compiled, waits=waits)}

    def fresh(self, *, batched: bool) -> Self:
        return type(self)(self.action, **asdict(self.action_options[self.action]))

    @property
    def collecting(self) -> bool:
        return False

    def begin(self, size: InputSize, available: Bytes) -> Decision:
        return Decision(
            Phase.COLLECTING, BlockPlan.nothing_kept(size, available, self.action, self.action_options), False
        )

    def end(self, step: StepSample, blocks: Sequence[BlockSample] = ()) -> None:
        """There is nothing to learn."""

    def forecast(self, size: InputSize) -> Forecast | None:
        return None


@final
class CheckpointPlanner(AbstractPlanner):
    """Recomputes every block, whatever the budget; a step without blocks stays as it is."""

    name = "checkpoint"

    def plan(self, problem: Problem) -> Plan:
        """Raises BudgetInfeasible if the step needs more than is allowed all the same."""
        step, lives = problem.step, lives_of(problem.step)
        return problem.plan_with([gap for call in block_calls(step, lives) for gap in call.gaps], lives)
