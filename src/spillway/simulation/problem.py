"""What `plan`, `simulate` and `compare` work on: a recorded step, seconds for a device, a budget."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TypeAlias

from spillway.budgets import budget_of_peak
from spillway.calibration.named_device import device_of
from spillway.costs.device import Device
from spillway.costs.roofline import timed
from spillway.errors import BudgetError, SpillwayError, UsageError
from spillway.ir import Recorded, Step
from spillway.ir.loading import load_step
from spillway.methods import Problem
from spillway.units import format_bytes

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
