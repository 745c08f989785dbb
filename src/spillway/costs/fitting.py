"""What ops get of a device, found from ops that were timed one by one: least squares of the logarithms of seconds.

Every op counts alike and long ones more, outliers less (soft L1), sums of seconds besides. Published shares count as
measurements with a doubt, so that they decide what the ops leave open: kinds that were not timed keep them.

Student's t is in closed form, because SciPy is only an extra here: the sums are Abramowitz and Stegun's 26.7.3 and
26.7.4, exact for whole degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import atan, cos, inf, pi, sin, sqrt
from statistics import NormalDist
from typing import Final, final

import numpy

from spillway.costs.device import Device
from spillway.costs.efficiency import Efficiency, OpKind, Share
from spillway.costs.roofline import PUBLISHED, Floats, Reckoned, Work
from spillway.units import Seconds

SHARE_DOUBT: Final = 0.25
SIZE_DOUBT: Final = 0.5
LAUNCH_DOUBT: Final = 0.75
LIKE_CONVOLUTIONS: Final = 0.1
"""Standard deviations of logarithms: of a published share, of a size, of launches; and of the share of products over
that of convolutions, which are products too."""
OUTLIER: Final = 0.5
"""Of a logarithm: where the square becomes a line."""
OF_SUM: Final = 6.0
"""Weight of the sum of a group's seconds, where an op's is about 1."""
LONG: Final = 0.5
"""Of an op's weight, what goes by its share of the seconds."""
ROUNDS: Final = 30
_STEP: Final = 1e-4
_TOLERANCE: Final = 1e-5
_SIZES: Final = ("columns", "inner", "waves", "winograd_columns", "winograd_inner", "channels")
_RATES: Final = ("compute", "memory", "half")
_MANY: Final = 1000
"""Degrees of freedom from which on the normal distribution is taken: they are 3e-4 apart at most."""
_HALVINGS: Final = 200


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Ops that were timed together, as those of one step."""

    name: str
    works: Sequence[Work]
    seconds: Sequence[Seconds]
    """What each took, above 0."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """How ops are foretold by a fit to the other groups."""

    name: str
    by: Efficiency
    """Fitted to the others."""
    seconds: Seconds
    """All its ops, measured."""
    foretold: Seconds
    error: float
    """Of single ops, the median of the distance, as a share of what was measured."""
    ratios: tuple[float, ...]
    """Of every op, measured over foretold."""


def fit(groups: Sequence[Timed], device: Device, usual: Efficiency = PUBLISHED) -> Efficiency:
    """What ops get of the device's rates, so that they take what was measured. Launches are alike for all kinds."""
    reckoned = [Reckoned(group.works, device) for group in groups]
    measured = [numpy.array(group.seconds) for group in groups]
    every = numpy.concatenate(measured)
    weights = numpy.sqrt(LONG * every / every.mean() + 1 - LONG)
    logs = numpy.log(every)
    vector = _Vector(groups, usual)

    def residuals(numbers: Floats) -> tuple[Floats, Floats]:
        by = vector.efficiency(numbers)
        found = [one.seconds(by) for one in reckoned]
        sums = [math.log(mine.sum() / theirs.sum()) for mine, theirs in zip(found, measured, strict=True)]
        data = weights * (numpy.log(numpy.concatenate(found)) - logs)
        return numpy.append(data, OF_SUM * numpy.array(sums)), vector.doubts(numbers)

    return vector.efficiency(least_squares(residuals, vector.start))


def leave_one_out(groups: Sequence[Timed], device: Device, usual: Efficiency = PUBLISHED) -> list[LeftOut]:
    """Each group as foretold by a fit to all others."""
    found = []
    for group in groups:
        by = fit([other for other in groups if other is not group], device, usual)
        mine, theirs = Reckoned(group.works, device).seconds(by), numpy.array(group.seconds)
        found.append(
            LeftOut(
                name=group.name, by=by, seconds=float(theirs.sum()), foretold=float(mine.sum()),
                error=float(numpy.median(numpy.abs(mine / theirs - 1))), ratios=tuple((theirs / mine).tolist()),
            )
        )  # fmt: skip
    return found


def spread_of(ratios: Sequence[float]) -> tuple[float, float]:
    """Between which multiples of what was foretold 80 % of further cases lie, by what was measured of left-out ones.

    Logarithms are taken for normal around no error at all, so that their mean is part of the error: one more of them,
    over the root of the mean square of n, is distributed as Student's t of n degrees.
    """
    logs = [math.log(ratio) for ratio in ratios]
    deviation = math.sqrt(math.fsum(log**2 for log in logs) / len(logs))
    wide = math.exp(quantile(0.9, len(logs)) * deviation)
    return 1 / wide, wide


def below(value: float, freedom: int) -> float:
    """The probability that Student's t of so many degrees, 1 or more, is less than `value`."""
    if freedom >= _MANY:
        return NormalDist().cdf(value)
    angle = atan(value / sqrt(freedom))
    if freedom == 1:
        return (1 + 2 * angle / pi) / 2
    odd = freedom % 2
    term = total = cos(angle) if odd else 1.0
    for number in range(3, freedom, 2):
        term *= cos(angle) ** 2 * ((number - 1) / number if odd else (number - 2) / (number - 1))
        total += term
    return (1 + (2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total)) / 2


@lru_cache(maxsize=1024)
def quantile(probability: float, freedom: int) -> float:
    """The value below which that share of Student's t lies, between 0 and 1."""
    if probability < 0.5:
        return -quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while below(high, freedom) < probability:
        low, high = high, 2 * high
        if high == inf:
            return inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if below(middle, freedom) < probability else (low, middle)
    return high


@final
class _Vector:
    """An efficiency as logarithms of what is fitted of it."""

    def __init__(self, groups: Sequence[Timed], usual: Efficiency) -> None:
        self._usual = usual
        works = [work for group in groups for work in group.works]
        seen = {
            "memory": {work.kind for work in works},
            "compute": {work.kind for work in works if work.flops and not work.half},
            "half": {work.kind for work in works if work.half},
        }
        self._shares = [(name, kind) for name in _RATES for kind in OpKind if kind in seen[name] - {OpKind.NOTHING}]
        self._sizes = [name for name in _SIZES if getattr(usual, name) > 0]
        usually = [getattr(usual.shares[kind], name) for name, kind in self._shares]
        self.start: Floats = numpy.log([*usually, *(getattr(usual, name) for name in self._sizes), 1.0])
        doubts = [SHARE_DOUBT] * len(self._shares) + [SIZE_DOUBT] * len(self._sizes) + [LAUNCH_DOUBT]
        self._doubts = numpy.array(doubts)

    def efficiency(self, numbers: Floats) -> Efficiency:
        values = numpy.exp(numbers).tolist()
        launch = values[-1]
        given = dict(zip(self._shares, values, strict=False))

        def share(kind: OpKind, there: Share) -> Share:
            rates = {name: given.get((name, kind), getattr(there, name)) for name in _RATES}
            return Share(**rates, launch=launch if there.launch else 0.0)

        sizes = dict(zip(self._sizes, values[len(self._shares) :], strict=False))
        shares = {kind: share(kind, there) for kind, there in self._usual.shares.items()}
        return replace(self._usual, shares=shares, **sizes)

    def doubts(self, numbers: Floats) -> Floats:
        places = {one: place for place, one in enumerate(self._shares)}
        both = [places.get(("compute", kind)) for kind in (OpKind.MATMUL, OpKind.CONVOLUTION)]
        alike = [] if None in both else [(numbers[both[0]] - numbers[both[1]]) / LIKE_CONVOLUTIONS]
        return numpy.append((numbers - self.start) / self._doubts, alike)


def least_squares(residuals: Callable[[Floats], tuple[Floats, Floats]], start: Floats) -> Floats:
    """Levenberg and Marquardt's method, with differences for derivatives. Residuals of the numbers are those of data,
    large ones of which count less, and those that count as they are."""

    def whole(numbers: Floats) -> tuple[Floats, float]:
        data, firm = residuals(numbers)
        ratio = (data / OUTLIER) ** 2
        cost = float((2 * OUTLIER**2 * (numpy.sqrt(1 + ratio) - 1)).sum() + (firm**2).sum())
        return numpy.concatenate([data, firm]), cost

    numbers, damping = start, 1e-3
    found, cost = whole(numbers)
    counted = len(residuals(numbers)[0])
    for _ in range(ROUNDS):
        slopes = numpy.array([(whole(numbers + step)[0] - found) / _STEP for step in numpy.eye(len(numbers)) * _STEP]).T
        weights = numpy.ones(len(found))
        weights[:counted] = 1 / numpy.sqrt(1 + (found[:counted] / OUTLIER) ** 2)
        normal, right = (slopes.T * weights) @ slopes, (slopes.T * weights) @ found
        while damping < 1e9:
            tried = numbers - numpy.linalg.solve(normal + damping * numpy.diag(numpy.diag(normal) + 1e-12), right)
            there, less = whole(tried)
            if less < cost:
                break
            damping *= 4
        else:
            return numbers
        gained = cost - less
        numbers, found, cost, damping = tried, there, less, max(damping / 8, 1e-9)
        if gained < _TOLERANCE * cost:
            break
    return numbers
