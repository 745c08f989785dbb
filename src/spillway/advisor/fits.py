"""Straight lines by least squares: m(x) = alpha x + beta and t(x) = gamma x + delta of PAPAYA (arXiv, section 5).

Neither memory nor time falls with the batch, and neither is below zero without one: both coefficients are held at 0 or
above, and the line says which was held. Without that a few noisy points give a fixed time below zero, and a throughput
without bound. Beside the line stands one that is flat at first, for batches that leave the device idle (section 5.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, sqrt
from typing import Final, TypeAlias, final

import numpy
from numpy.typing import NDArray

from spillway.costs.fitting import quantile

LEVEL: Final = 0.95
"""Of confidence intervals."""
FEWEST: Final = 2
"""Batch sizes that make a line."""
_ROUNDING: Final = 1e-12
"""Share of what is fitted below which it does not vary: what is left is of how processors add up."""

Points: TypeAlias = Mapping[int, float]
"""What was measured, by batch size."""
Interval: TypeAlias = tuple[float, float]
_Floats: TypeAlias = NDArray[numpy.float64]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line through measurements, y = slope * max(x, knee) + intercept."""

    slope: float
    """Per sample, at least 0."""
    intercept: float
    """At least 0."""
    knee: float = 0.0
    """The batch size up to which it is flat; 0 for a straight line."""
    r: float | None
    """Pearson's correlation of what was measured with what the line says; None for two points or a flat line, of which
    it says nothing."""
    count: int
    """Points."""
    freedom: int
    """Points less coefficients: degrees of freedom."""
    covariance: tuple[tuple[float, float], tuple[float, float]] | None
    """Of slope and intercept; 0 where one was held; None without degrees of freedom."""
    held: str = ""
    """`slope` or `intercept` where least squares would have had it below 0; else empty."""

    def at(self, size: float) -> float:
        """What it says of a batch."""
        return self.slope * max(size, self.knee) + self.intercept

    def error_at(self, size: float) -> float:
        """Standard error of `at`; infinite without degrees of freedom."""
        if self.covariance is None:
            return inf
        (slope, both), (_, intercept) = self.covariance
        size = max(size, self.knee)
        return sqrt(max(slope * size * size + 2 * both * size + intercept, 0.0))

    @property
    def slope_interval(self) -> Interval | None:
        """That holds the slope with 95 %; None without degrees of freedom."""
        return self._interval(self.slope, 0)

    @property
    def intercept_interval(self) -> Interval | None:
        """That holds the intercept with 95 %; None without degrees of freedom."""
        return self._interval(self.intercept, 1)

    def _interval(self, value: float, place: int) -> Interval | None:
        if self.covariance is None:
            return None
        wide = quantile((1 + LEVEL) / 2, self.freedom) * sqrt(max(self.covariance[place][place], 0.0))
        return value - wide, value + wide


def fit_line(points: Points) -> Line:
    """The straight line with the least squares. Raises ValueError for fewer than two batch sizes."""
    sizes, values = _arrays(points)
    return _fitted(sizes, values, 0.0, len(sizes) - 2)


def fit_knee(points: Points) -> Line:
    """t = max(a, k x) + b with the least squares, a = slope * knee; a straight line where no flat part is better.

    Every knee at a batch size is tried, and between any two the one at which the mean of what is left of it meets the
    line through the rest (Hudson, J. Am. Stat. Assoc. 61, 1966). Raises ValueError for fewer than two batch sizes.
    """
    sizes, values = _arrays(points)
    best, freedom = _fitted(sizes, values, 0.0, len(sizes) - 2), len(sizes) - 3
    if freedom < 1:
        return best  # with as many coefficients as points any knee is as good
    least = _squares(sizes, values, best)
    knees = [float(size) for size in sizes[1:-1]]
    for place in range(1, len(sizes) - 1):  # where a flat part might end, with two batch sizes or more behind it
        slope, intercept = _solved(sizes[place:], values[place:])[:2]
        if slope > 0:
            meets = (float(values[:place].mean()) - intercept) / slope
            if sizes[place - 1] < meets < sizes[place]:
                knees.append(meets)
    for knee in knees:
        line = _fitted(sizes, values, knee, freedom)
        squares = _squares(sizes, values, line)
        if line.slope > 0 and squares < least:
            best, least = line, squares
    return best


def _arrays(points: Points) -> tuple[_Floats, _Floats]:
    if len(points) < FEWEST:
        raise ValueError(f"A line takes {FEWEST} batch sizes or more, not {len(points)}.")
    sizes = sorted(points)
    return numpy.array(sizes, dtype=float), numpy.array([points[size] for size in sizes], dtype=float)


def _fitted(sizes: _Floats, values: _Floats, knee: float, freedom: int) -> Line:
    bent = numpy.maximum(sizes, knee)
    slope, intercept, held = _solved(bent, values)
    free = freedom + bool(held)  # what is held is not fitted
    predicted = slope * bent + intercept
    flat = _ROUNDING * float(numpy.abs(values).max())
    straight = len(sizes) <= FEWEST or min(numpy.ptp(predicted), numpy.ptp(values)) <= flat
    return Line(
        slope=slope, intercept=intercept, knee=knee, count=len(sizes), freedom=free,
        r=None if straight else float(numpy.corrcoef(predicted, values)[0, 1]),
        covariance=_covariance(bent, float(((values - predicted) ** 2).sum()), free, held), held=held,
    )  # fmt: skip


def _solved(sizes: _Floats, values: _Floats) -> tuple[float, float, str]:
    """Slope and intercept with the least squares, none below 0, and which was held there."""
    middle, mean = float(sizes.mean()), float(values.mean())
    apart = sizes - middle
    slope = float(apart @ (values - mean)) / float(apart @ apart)
    if slope < 0:
        return 0.0, max(mean, 0.0), "slope"
    intercept = mean - slope * middle
    if intercept < 0:
        return max(float(sizes @ values) / float(sizes @ sizes), 0.0), 0.0, "intercept"
    return slope, intercept, ""


def _covariance(
    sizes: _Floats, squares: float, freedom: int, held: str
) -> tuple[tuple[float, float], tuple[float, float]] | None:
    if freedom < 1:
        return None
    variance, count, middle = squares / freedom, len(sizes), float(sizes.mean())
    if held == "slope":
        return (0.0, 0.0), (0.0, variance / count)
    if held == "intercept":
        return (variance / float(sizes @ sizes), 0.0), (0.0, 0.0)
    spread = float(((sizes - middle) ** 2).sum())
    both = -variance * middle / spread
    return (variance / spread, both), (both, variance / count + variance * middle**2 / spread)


def _squares(sizes: _Floats, values: _Floats, line: Line) -> float:
    predicted = line.slope * numpy.maximum(sizes, line.knee) + line.intercept
    return float(((values - predicted) ** 2).sum())
