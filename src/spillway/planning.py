"""`spillway.plan`: a recorded step, a budget, a planner and a device make a plan that `ir.verify` accepts."""

from __future__ import annotations

from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import TypeAlias

from spillway.costs.device import Device
from spillway.costs.finding import device_of
from spillway.costs.roofline import timed
from spillway.errors import BudgetError, SpillwayError, UnknownMethodError
from spillway.ir import Plan, Step, verify
from spillway.ir.loading import load_step
from spillway.ir.step_files import Recorded
from spillway.methods import METHODS, AbstractPlanner, Problem, method_named
from spillway.units import Bytes, format_bytes, parse_budget

StepLike: TypeAlias = Step | Recorded | str | PathLike[str]
"""A step, a recorded one, or the file of one."""


def plan(
    step: StepLike, *, budget: int | float | str, method: str | AbstractPlanner, device: str | Device = "a100"
) -> Plan:
    """Decide before the step what is gone when, and where it comes back from.

    Arguments:
        step: A recorded step, or a file: of `spillway.record`, or a log of DTR.
        budget: Bytes, `"6GiB"`, a share of the step's plain peak such as 0.5 or `"0.5"`, or one of the device's memory
            such as `"80%"`.
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


def problem_of(step: StepLike, *, budget: int | float | str, device: str | Device) -> Problem:
    """What a planner is given. Raises what `plan` raises, but for what planners do."""
    found, chosen = step_of(step), device_of(device)
    return Problem(step=with_seconds(found, chosen), allowed=budget_of(budget, found, chosen), device=chosen)


def step_of(step: StepLike) -> Step:
    """The step itself. Raises FileFormatError for a file that holds none, SpillwayError where the system refuses."""
    if isinstance(step, Step):
        return step
    if isinstance(step, Recorded):
        return step.step
    try:
        return load_step(Path(step)).step
    except OSError as error:
        raise SpillwayError(f"{step}: {error.strerror or error}.") from error


def with_seconds(step: Step, device: Device) -> Step:
    """The step with seconds for the device; as it is if nobody counted its operations, as in a log of DTR."""
    counted = any(op.flops or op.traffic for op in step.ops)
    return timed(step, device, keep_measured=not counted)


def budget_of(budget: int | float | str, step: Step, device: Device) -> Bytes:
    """Bytes of a budget: a number without a unit and with a point is a share of the step's plain peak.

    Raises BudgetError if it cannot be read, is not positive, or is more than the device's memory.
    """
    share = _share(budget)
    if share is None:
        return parse_budget(budget, device.memory)  # type: ignore[arg-type]
    if share <= 0:
        raise BudgetError(f"A budget has to be more than 0 bytes, and {budget!r} of the plain peak is not.")
    allowed = int(share * step.plain_peak())
    if allowed > device.memory:
        there = f"more than the {format_bytes(device.memory)} that the device {device.name} has"
        raise BudgetError(f"{budget} of the plain peak are {format_bytes(allowed)}, {there}.")
    return allowed


def _share(budget: int | float | str) -> Fraction | None:
    if isinstance(budget, float):
        budget = repr(budget)
    if not isinstance(budget, str) or "." not in budget:
        return None
    try:
        return Fraction(budget.strip())
    except ValueError:
        return None


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
