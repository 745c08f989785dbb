"""Plans of both windows and of LMS: made for random steps, judged, and followed with nothing that helps."""

from __future__ import annotations

from collections.abc import Generator

from hypothesis import event

from spillway.errors import BudgetInfeasible
from spillway.ir import Plan, Step, verify
from spillway.ir.account import account
from spillway.ir.lives import lives_of
from spillway.methods import AbstractPlanner, MemoryView, Planned, Problem, Proposal
from spillway.simulation.simulated_engine import Simulation, simulate
from spillway.units import Bytes
from tests.pure.recorded import DEVICE
from tests.pure.training_steps import any_step, training_step


def problem(step: Step, allowed: Bytes) -> Problem:
    return Problem(step=step, allowed=allowed, device=DEVICE)


def random_problem(seed: int, share: float, *, trained: bool) -> Problem:
    """A training step or any step, under a share of its plain peak."""
    step = training_step(seed, layers=1 + seed % 12) if trained else any_step(seed)
    return problem(step, max(int(step.plain_peak() * share), 1))


def planned_alone(plan: Plan, step: Step) -> Planned:
    """What fails if the plan alone does not keep the budget."""

    def relieve(view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        raise AssertionError(f"{needed} bytes are needed beyond the plan")
        yield

    planned = Planned(plan, step, begin="at op")
    planned.relieve = relieve  # type: ignore[method-assign]
    return planned


def ran_alone(plan: Plan, step: Step, steps: int = 2) -> Simulation:
    return simulate(step, allowed=plan.allowed, method=planned_alone(plan, step), device=DEVICE, steps=steps)


def holds(method: AbstractPlanner, given: Problem) -> Problem:
    """The method's plan verifies, projects what it needs and keeps the budget alone, or it is refused with a budget
    that would do: then that is the problem that holds."""
    step = given.step
    try:
        plan = method.plan(given)
    except BudgetInfeasible as refused:
        event("refused")
        assert refused.smallest_budget > given.allowed
        given = problem(step, refused.smallest_budget)
        plan = method.plan(given)
    assert plan == method.plan(given)
    verify(plan, step, given.allowed)
    assert plan.projected == account(step, plan.gaps, lives_of(step)).peak <= given.allowed
    # What dies before the first op was in memory when the step began, whatever the plan.
    if any(one.present_at_start and not one.alive_until for one in step.storages):
        return given
    gone = {step.values[gap.value].storage for gap in plan.gaps if not gap.start}
    there = sum(one.nbytes for one in step.storages if one.present_at_start and one.id not in gone)
    if there <= given.allowed:
        ran = ran_alone(plan, step)
        assert ran.status == "ok"
        assert ran.peak_bytes <= plan.projected
    return given
