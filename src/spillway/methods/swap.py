"""Swap everything: what the forward leaves to the backward waits in host memory meanwhile.

The baseline that papers on memory compare with, in its two forms. Synchronous: an activation is copied out when the
forward has used it last and copied in when the backward reads it first, and compute waits for both copies (PAPAYA's
`swap`; `torch.autograd.graph.save_on_cpu`). Prefetched, as in Rhu et al., "vDNN: Virtualized Deep Neural Networks for
Scalable, Memory-Efficient Neural Network Design", arXiv:1602.08124, section 3.2: copies out run beside the following
ops, and copies in begin early enough to be done when they are needed.

Differs from vDNN in: copies in begin by the time that they take, not one layer ahead; whatever autograd keeps is moved,
not the inputs of convolutions alone; and where the copies of both directions do not hide, they are not forced to: what
would be back before it has left stays.

Not implemented: vDNN's choice of convolution algorithms by workspace.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Self, final

from spillway.costs.device import Device
from spillway.errors import UsageError
from spillway.ir import Gap, Host, Plan, Step
from spillway.ir.account import account
from spillway.ir.lives import Kept, Life, kept_for_backward, lives_of
from spillway.methods.base import SMALLEST, AbstractPlanner, Problem
from spillway.units import Bytes


@final
class Swap(AbstractPlanner):
    """Every activation that autograd keeps goes out after its last forward use and is back for its first backward use.

    Arguments:
        prefetched: Whether copies run beside ops. A gap then begins where the copy out is done, later than the last
            use, and ends where the copy in has to begin, earlier than the next use: bytes in flight are resident. As
            far as the budget asks for it, copies are waited for instead, those of the largest storages first.
        smallest: Bytes below which a storage stays.
    """

    name = "swap"
    uses_recipes = False

    def __init__(self, *, prefetched: bool = False, smallest: Bytes = SMALLEST) -> None:
        if smallest < 0:
            raise UsageError(f"Swap needs a smallest size of 0 bytes or more, got {smallest}.")
        self.smallest = smallest
        self.copies_beside = prefetched
        self.name = "swap-prefetch" if prefetched else "swap"

    @classmethod
    def ahead(cls) -> Self:
        """With copies beside the ops."""
        return cls(prefetched=True)

    def plan(self, problem: Problem) -> Plan:
        """Raises BudgetInfeasible if what is left in memory needs more than is allowed."""
        step, lives = problem.step, lives_of(problem.step)
        # Where nobody wrote down what autograd keeps, it is what the backward reads.
        kept = kept_for_backward(step, lives, step.saved or None)
        moved = [one for one in kept if step.storages[step.values[one.value].storage].nbytes >= self.smallest]
        widest = {one.value: (one.last + 1, one.needed) for one in moved}
        plan = problem.plan_with(_gaps(widest), lives)
        if not self.copies_beside:
            return plan
        chosen = _within(problem.allowed, _ahead(step, moved, problem.device), widest, step, lives)
        # What is left of the budget is room for copies on their way.
        return replace(plan, projected=problem.allowed, gaps=_gaps(chosen))


def _gaps(intervals: dict[int, tuple[int, int]]) -> tuple[Gap, ...]:
    return tuple(
        Gap(value=value, start=start, end=end, home=Host()) for value, (start, end) in intervals.items() if start < end
    )


def _ahead(step: Step, moved: Sequence[Kept], device: Device) -> dict[int, tuple[int, int]]:
    """The interval in which each is gone if both lanes work in order and nobody waits for them."""
    begins = list(accumulate((op.seconds or 0.0 for op in step.ops), initial=0.0))  # of every op, and the last's end
    sizes = {one.value: step.storages[step.values[one.value].storage].nbytes for one in moved}
    start, free = {}, 0.0
    for one in sorted(moved, key=lambda one: (one.last, one.value)):
        free = max(free, begins[one.last + 1]) + device.out_seconds(sizes[one.value])
        start[one.value] = max(bisect_left(begins, free), one.last + 1)
    end, due = {}, float("inf")
    for one in sorted(moved, key=lambda one: (-one.needed, one.value)):
        due = min(due, begins[one.needed]) - device.in_seconds(sizes[one.value])
        end[one.value] = min(bisect_right(begins, max(due, 0.0)) - 1, one.needed)
    return {one.value: (start[one.value], end[one.value]) for one in moved}


def _within(
    allowed: Bytes,
    wished: dict[int, tuple[int, int]],
    widest: dict[int, tuple[int, int]],
    step: Step,
    lives: Sequence[Life],
) -> dict[int, tuple[int, int]]:
    """Widen gaps to what they are without overlap until everything fits, op by op, the largest storage first."""
    chosen = dict(wished)
    sizes = {value: step.storages[step.values[value].storage].nbytes for value in wished}
    order = sorted(widest, key=lambda value: (-sizes[value], value))
    resident = list(account(step, _gaps(chosen), lives).during)
    for op in range(len(step.ops)):
        for value in order:
            if resident[op] <= allowed:
                break
            (begin, end), (first, last) = chosen[value], widest[value]
            gone = begin <= op < end
            if gone or not first <= op < last:
                continue
            # Before its gap the copy out is waited for; after it the copy in begins later.
            wider = (op, end) if op < begin < end else (begin if begin < end else op, op + 1)
            for other in range(len(step.ops)):
                before, after = begin <= other < end, wider[0] <= other < wider[1]
                resident[other] += sizes[value] * (before - after)
            chosen[value] = wider
    return chosen
