"""Optimizer state and gradients wait in host memory, whatever the budget.

Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021, arXiv:2101.06840. Section 4.1:
of the parts of mixed-precision training only the fp16 parameters and what forward and backward compute stay on the
device; fp32 parameters, momentum, variance and gradients live in host memory, and the host runs the optimizer.
Gradients are copied out one by one while the backward goes on (section 4.2).

Differs from the paper in:

- The update runs where it was recorded, on the device. A plan says which bytes are gone when; it cannot send an op
  elsewhere. State and gradients therefore come back for the ops that use them, and go again: both directions of the
  link carry the whole state once in a step, which in the paper they do not. With an optimizer that updates all
  parameters in one op (`foreach`, `fused`) the whole state is there during that op, and little is saved.
- fp32 parameters that forward and backward compute with stay. The paper's are copies that only the update uses.
- A gradient leaves once nothing in the backward writes to it any more, as in the paper; the bucket that the paper
  collects small ones in is not there.

Not implemented: the CPU Adam of section 5, the delayed update of section 5.2, partitioning over several devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, final

from spillway.ir import Gap, Host, Phase, Plan, Step
from spillway.ir.lives import Life, idle_intervals, lives_of
from spillway.ir.timeline import Kind
from spillway.methods.base import AbstractPlanner, Problem
from spillway.units import Bytes, KiB

SMALLEST: Final[Bytes] = 4 * KiB
"""Storages below this stay: Adam's step counters, for example."""


@final
class ZeroOffload(AbstractPlanner):
    """Static: what is offloaded depends on what a storage is for, not on the budget."""

    name = "zero-offload"
    uses_recipes = False

    def plan(self, problem: Problem) -> Plan:
        """Raises BudgetInfeasible if the rest needs more than is allowed."""
        step, lives = problem.step, lives_of(problem.step)
        return problem.plan_with(list(_gaps(step, lives)), lives)


def _gaps(step: Step, lives: Sequence[Life]) -> Iterator[Gap]:
    for value in step.values:
        storage, life = step.storages[value.storage], lives[value.id]
        if storage.nbytes < SMALLEST or storage.kind not in (Kind.OPTIMIZER_STATE, Kind.GRADIENT):
            continue
        for start, end in idle_intervals(life, len(step.ops)):
            if storage.kind is Kind.OPTIMIZER_STATE or _waits_for_the_update(step, life, start, end):
                yield Gap(value=value.id, start=start, end=end, home=Host())


def _waits_for_the_update(step: Step, life: Life, start: int, end: int) -> bool:
    """Whether a gradient that a backward made is next read by the optimizer."""
    made = start > 0 and step.ops[start - 1].phase is Phase.BACKWARD
    return made and end in life.reads and step.ops[end].phase is Phase.OPTIMIZER
