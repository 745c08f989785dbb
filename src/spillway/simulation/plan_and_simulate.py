"""`spillway.plan` and `spillway.simulate`: a recorded step, a budget, a method and a device, by name or as they are."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TypeAlias

from spillway.budgets import budget_of_peak, parse_bytes
from spillway.calibration.named_device import device_of
from spillway.costs.device import Device
from spillway.costs.roofline import timed
from spillway.errors import BudgetError, SpillwayError, UnknownMethodError, UsageError
from spillway.ir import Plan, Recorded, Step, StepReport, verify
from spillway.ir.loading import load_step
from spillway.methods import METHODS, AbstractPlanner, AbstractPolicy, Problem, method_named
from spillway.simulation.paper_machine import Tier
from spillway.simulation.simulated_engine import Simulation, rehearsing
from spillway.simulation.simulated_engine import simulate as simulate_step
from spillway.units import format_bytes

Method = str | AbstractPolicy | AbstractPlanner | Plan
StepLike: TypeAlias = Step | Recorded | str | PathLike[str]
"""A step, a recorded one, or the file of one: a recorded step, a log of DTR, or `logs.zip:NAME`."""


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


def counted(step: Step) -> bool:
    """Whether anybody counted what its ops do; nobody did in a log of DTR."""
    return any(op.flops or op.traffic for op in step.ops)


def with_seconds(step: Step, device: Device, *, measured: bool = False) -> Step:
    """The step with seconds on every op: modelled for the device, or those that were recorded.

    The recorded ones are taken if they are asked for, and where nobody counted what the ops do. Raises UsageError if
    they are asked for and there are none.
    """
    if measured and any(op.seconds is None for op in step.ops):
        raise UsageError("The step was recorded on tensors without content, so nothing was measured.")
    return timed(step, device, keep_measured=measured or not counted(step))


def problem_of(step: StepLike, *, budget: int | float | str, device: str | Device) -> Problem:
    """What a planner is given. Raises what `spillway.plan` raises, but for what planners do."""
    found, chosen = step_of(step), device_of(device)
    allowed = budget_of_peak(budget, found.plain_peak(), chosen.memory)
    if allowed > chosen.memory:
        there = f"more than the {format_bytes(chosen.memory)} that the device {chosen.name} has"
        raise BudgetError(f"The budget {budget} is {format_bytes(allowed)}, {there}.")
    return Problem(step=with_seconds(found, chosen), allowed=allowed, device=chosen)


def simulate(
    step: StepLike,
    budget: int | float | str,
    method: Method = "delta",
    device: str | Device = "a100",
    *,
    allocator: str = "exact",
    limit: int | str | None = None,
    tier: Tier = "host",
    measured: bool = False,
    steps: int = 2,
) -> Simulation:
    """What a method would do to a recorded step, under a budget, on a device: without the device.

    Arguments:
        step: As recorded, or the path of a file: of a recorded step, an operator log of DTR, or `logs.zip:NAME`.
        budget: Bytes, "6GiB"; a share of the plain peak, 0.5 or "0.5x"; or one of the device's memory, "50%".
        method: A name, a policy, a planner, or a plan for this step.
        device: One of `costs.DEVICES`, "here" for this machine, a file that `costs.write_device` wrote, or a device.
        allocator: The model that `reserved_bytes` is read from: "exact", "caching" as PyTorch's, or "chunks".
        limit: Device memory; by default the device has no end, and the budget alone limits.
        tier: Where moved bytes wait, "host" or "disk".
        measured: Take the seconds that were recorded; else the ops are modelled for the device. What has no counts of
            operations and traffic, as logs of DTR, keeps its seconds in any case.
        steps: Repetitions; the figures are of the last. The first knows nothing of a step before.

    Raises:
        UsageError: An argument makes no sense.
        FileFormatError: The file is foreign or damaged.
        BudgetInfeasible: A planner has no plan for so little.
    """
    found, on = step_of(step), device_of(device)
    chosen = method if isinstance(method, AbstractPolicy | AbstractPlanner | Plan) else method_named(method)
    return simulate_step(
        with_seconds(found, on, measured=measured), method=chosen, device=on, allocator=allocator, tier=tier,
        allowed=budget_of_peak(budget, found.plain_peak(), on.memory), steps=steps,
        limit=None if limit is None else parse_bytes(limit),
    )  # fmt: skip


def report_of(ran: Simulation) -> StepReport:
    """The figures as run files have them; what only a real run has is 0."""
    timeline = ran.timeline
    at_start = sum(line.nbytes for line in timeline.storages if line.present_at_start)
    return StepReport(
        step=timeline.step, signature="simulated", managed=True, allowed=timeline.allowed, start_bytes=at_start,
        peak_bytes=ran.peak_bytes, end_bytes=ran.end_bytes, seconds=ran.seconds, stall_seconds=ran.stall_seconds,
        recomputed_ops=ran.recomputed_ops, recomputed_seconds=ran.recomputed_seconds, ops=timeline.ops,
        bytes_out=ran.bytes_out, bytes_in=ran.bytes_in, dropped_bytes=ran.dropped_bytes, drops=ran.drops,
        moves=ran.moves, refusals=ran.refusals, transfer_seconds=timeline.transfers().seconds,
        hidden_seconds=ran.hidden_seconds, bytes_out_beside=ran.bytes_out_beside, bytes_in_beside=ran.bytes_in_beside,
        device_peak_bytes=ran.reserved_bytes, escaped=0, unmanaged=0, logged={}, peak_rss_bytes=0, working_bytes=0,
    )  # fmt: skip


def plan(
    step: StepLike, *, budget: int | float | str, method: str | AbstractPlanner, device: str | Device = "a100"
) -> Plan:
    """Decide before the step what is gone when, and where it comes back from.

    Arguments:
        step: A recorded step, or a file: of `spillway.record`, or a log of DTR.
        budget: Bytes, `"6GiB"`; a share of the plain peak, 0.5 or `"0.5x"`; or one of the device's memory, `"50%"`.
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
    found = planner_named(method).plan(rehearsing(problem))
    verify(found, problem.step, problem.allowed)
    return found


def planner_named(method: str | AbstractPlanner) -> AbstractPlanner:
    """The planner behind a name; a planner is taken as it is. Raises UnknownMethodError for policies too."""
    if isinstance(method, AbstractPlanner):
        return method
    found = method_named(method)
    if isinstance(found, AbstractPlanner):
        return found
    planners = sorted(name for name, one in METHODS.items() if one.plans)
    raise UnknownMethodError(
        f"{method!r} decides while the step runs and makes no plan; choose one of {', '.join(planners)}."
    )
