"""Memory against input size, with the budget: Fig. 14 of the Mimose paper, drawn of any run of the block engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, final

from spillway.ir import StepReport
from spillway.report.axis import WIDTH, Tick, round_numbers
from spillway.report.chart import HEIGHT, round_bytes, short_bytes
from spillway.report.figures import NO_BUDGET
from spillway.units import Bytes

RADIUS: Final = 4


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One step."""

    x: float
    y: float
    name: str
    """"sheltered", every block recomputed; "planned"; or "expected" where the peak was not measured."""
    told: str
    """The step in a sentence."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SizeChart:
    """Everything that the page's template draws."""

    points: list[Point]
    budget_y: float | None
    """Height of the budget line; None if there is no budget."""
    bytes_ticks: list[Tick]
    ticks: list[Tick]
    axis: str
    """What runs along the bottom."""


def draw_sizes(steps: Sequence[StepReport], budget: Bytes | None) -> SizeChart | None:
    """Lay the steps out by input size; None if no step has one."""
    sized = [(step, prod(step.input_size)) for step in steps if step.input_size]
    if not sized:
        return None
    dimensions = max(len(step.input_size or ()) for step, _ in sized)
    allowed = budget if budget is not None and budget < NO_BUDGET else None
    top = 1.06 * max([step.peak_bytes for step, _ in sized] + [allowed or 1])
    right = 1.02 * max(size for _, size in sized)
    apart = next(number for number in round_numbers() if right / number <= 8)
    return SizeChart(
        points=[_point(step, WIDTH * size / right, HEIGHT * (1 - step.peak_bytes / top)) for step, size in sized],
        budget_y=None if allowed is None else HEIGHT * (1 - allowed / top),
        bytes_ticks=[Tick(at=HEIGHT * (1 - nbytes / top), text=short_bytes(nbytes)) for nbytes in round_bytes(top)],
        ticks=[Tick(at=WIDTH * number / right, text=str(number)) for number in range(0, int(right) + 1, apart)],
        axis="input size" if dimensions == 1 else "input size, all numbers multiplied",
    )


def _point(step: StepReport, x: float, y: float) -> Point:
    every = step.recomputed_blocks == step.blocks > 0 and not step.projected_bytes
    name = ("sheltered" if every else "planned") if step.peak_measured else "expected"
    size = " x ".join(map(str, step.input_size or ()))
    told = (
        f"step {step.step}, size {size}: {short_bytes(step.peak_bytes)}, "
        f"{step.recomputed_blocks} of {step.blocks} blocks recomputed"
    )
    return Point(x=x, y=y, name=name, told=told)
