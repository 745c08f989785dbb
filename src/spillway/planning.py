"""`spillway.plan`: a recorded step, a budget, a planner and a device make a plan that `ir.verify` accepts."""

from __future__ import annotations

from spillway.costs.device import Device
from spillway.errors import UnknownMethodError
from spillway.ir import Plan, verify
from spillway.methods import METHODS, AbstractPlanner, method_named
from spillway.problem import StepLike, problem_of


def plan(
    step: StepLike, *, budget: int | float | str, method: str | AbstractPlanner, device: str | Device = "a100"
) -> Plan:
    """Decide before the step what is gone when, and where it comes back from.

    Arguments:
        step: A recorded step, or a file: of `spillway.record`, or a log of DTR.
        budget: Bytes, `"6GiB"`, or a share of the step's plain peak: 0.5, `"0.5"` or `"50%"`.
        method: A planner, or the name of one.
        device: Whose seconds the planner counts with: the name of a preset, or a device.

    Returns:
        A plan that was verified against the step.

    Raises:
        BudgetInfeasible: This method needs more; it says how much.
        UnknownMethodError: No planner has that name.
        NoPlanFound: The planner's time was up before it had a plan.
        FileFormatError: The file is no recorded step.
    """
    problem = problem_of(step, budget=budget, device=device)
    found = planner_named(method).plan(problem)
    verify(found, problem.step, problem.allowed)
    return found


def planner_named(method: str | AbstractPlanner) -> AbstractPlanner:
    """The planner behind a name; a planner is taken as it is. Raises UnknownMethodError for policies too."""
    if isinstance(method, AbstractPlanner):
        return method
    found = method_named(method)
    if isinstance(found, AbstractPlanner):
        return found
    planners = sorted(name for name, make in METHODS.items() if isinstance(make(), AbstractPlanner))
    raise UnknownMethodError(
        f"{method!r} decides while the step runs and makes no plan; choose one of {', '.join(planners)}."
    )
