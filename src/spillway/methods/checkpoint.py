"""Every block recomputed: what `torch.utils.checkpoint` around each block of a model does, on a recorded step.

The baseline at block level, and the least memory that block-level plans have: the left star of Mimose's Fig. 13, and
what its sheltered phase does. Chen et al., arXiv:1604.06174, with every block a segment.

Differs from `torch.utils.checkpoint` in: what a block's second run brings back is what the backward reads; ops of the
block from which nothing of that comes do not run again. A value of a block that some op reads outside of it, such as
its result, stays.
"""

from __future__ import annotations

from typing import final

from spillway.errors import BudgetInfeasible
from spillway.ir import Plan
from spillway.ir.account import account
from spillway.ir.blocks import block_calls
from spillway.ir.lives import lives_of
from spillway.methods.base import AbstractPlanner, Problem


@final
class Checkpoint(AbstractPlanner):
    """Recomputes every block, whatever the budget; a step without blocks stays as it is."""

    name = "checkpoint"

    def plan(self, problem: Problem) -> Plan:
        """Raises BudgetInfeasible if the step needs more than is allowed all the same."""
        step, lives = problem.step, lives_of(problem.step)
        gaps = tuple(gap for call in block_calls(step, lives) for gap in call.gaps)
        counted = account(step, gaps, lives)
        if counted.peak > problem.allowed:
            raise BudgetInfeasible(
                needed=counted.peak, allowed=problem.allowed, op=step.ops[counted.fullest].name,
                op_index=counted.fullest % len(step.ops), smallest_budget=counted.peak, exact=True,
            )  # fmt: skip
        return Plan(step=step.digest(), allowed=problem.allowed, projected=counted.peak, gaps=gaps)
