"""What `plan`, `simulate` and `compare` work on: a recorded step, seconds for a device, a budget."""

from __future__ import annotations

import re
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import Final, TypeAlias

from spillway.costs.device import Device
from spillway.costs.roofline import timed
from spillway.errors import BudgetError, SpillwayError, UsageError
from spillway.ir import Recorded, Step
from spillway.ir.loading import load_step
from spillway.units import Bytes, parse_bytes

StepLike: TypeAlias = Step | Recorded | str | PathLike[str]
"""A step, a recorded one, or the file of one: a recorded step, a log of DTR, or `logs.zip:NAME`."""

_SHARE: Final = re.compile(r"(?P<number>[0-9]{1,18}(\.[0-9]{1,18})?)\s*(?P<percent>%?)")


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


def budget_of(budget: int | float | str, step: Step) -> Bytes:
    """Bytes of a budget for a recorded step; a fraction of a byte is cut off. Raises BudgetError as `quantity` does.

    Arguments:
        budget: Bytes, 6000000 or "6GiB", or a share of the step's plain peak: 0.5, "0.5" or "50%".
    """
    return whole(
        quantity(repr(budget), step.plain_peak()) if isinstance(budget, float) else _named(budget, step), budget
    )


def _named(budget: int | str, step: Step) -> Fraction:
    return quantity(budget, step.plain_peak()) if isinstance(budget, str) else Fraction(parse_bytes(budget))


def whole(nbytes: Fraction, given: object) -> Bytes:
    """Whole bytes. Raises BudgetError for less than one."""
    if nbytes < 1:
        raise BudgetError(f"A budget has to be more than 0 bytes, and {given!r} is not.")
    return int(nbytes)


def is_share(text: str) -> bool:
    """Whether it is a share: with a percent sign, or a number alone that has a point or is at most 1."""
    share = _SHARE.fullmatch(text.strip())
    return share is not None and bool(share["percent"] or "." in share["number"] or int(share["number"]) <= 1)


def quantity(text: str, plain_peak: Bytes) -> Fraction:
    """Bytes of one budget, not yet whole. Raises BudgetError for what cannot be read, and for shares of 0 or above
    1."""
    share = _SHARE.fullmatch(text.strip())
    if share is not None and is_share(text):
        number = Fraction(share["number"]) / (100 if share["percent"] else 1)
        if not 0 < number <= 1:
            raise BudgetError(f"A share of the plain peak is more than 0 and at most 1 (100%), and {text!r} is not.")
        return number * plain_peak
    try:
        return Fraction(parse_bytes(text))
    except BudgetError:
        raise BudgetError(f"{text!r} is no budget; write for example '0.5', '80%' or '6GiB'.") from None
