"""Student's t distribution, for fits to few points; in closed form, because SciPy is only an extra here.

The sums are Abramowitz and Stegun's 26.7.3 and 26.7.4, exact for whole degrees of freedom.
"""

from __future__ import annotations

from functools import lru_cache
from math import atan, cos, inf, pi, sin, sqrt
from statistics import NormalDist
from typing import Final

_MANY: Final = 1000
"""Degrees of freedom from which on the normal distribution is taken: they are 3e-4 apart at most."""
_HALVINGS: Final = 200


def below(value: float, freedom: int) -> float:
    """The probability of less than `value`. Raises ValueError below one degree of freedom."""
    if freedom < 1:
        raise ValueError(f"Student's t has 1 degree of freedom or more, not {freedom}.")
    if freedom >= _MANY:
        return NormalDist().cdf(value)
    angle = atan(value / sqrt(freedom))
    return (1 + _within(angle, freedom)) / 2


@lru_cache(maxsize=1024)
def quantile(probability: float, freedom: int) -> float:
    """The value below which that share lies. Raises ValueError for shares that are not between 0 and 1."""
    if not 0 < probability < 1:
        raise ValueError(f"A quantile is of a share between 0 and 1, not of {probability}.")
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


def _within(angle: float, freedom: int) -> float:
    """The probability between -t and t, with the sign of the angle, whose tangent is t over the root of `freedom`."""
    if freedom == 1:
        return 2 * angle / pi
    odd = freedom % 2
    term = total = cos(angle) if odd else 1.0
    for number in range(3, freedom, 2):
        term *= cos(angle) ** 2 * ((number - 1) / number if odd else (number - 2) / (number - 1))
        total += term
    return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total
