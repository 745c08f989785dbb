"""Estimates of all blocks asked at once, with the answers that each would give alone.

Planning asks for the bytes of every block at a size that it has not seen, and blocks have much in common: the same
samples, or laws of the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, final

import numpy
from numpy.typing import NDArray

from spillway.methods.by_block import InputSize
from spillway.methods.mimose.estimator import Estimate
from spillway.methods.mimose.exact import Answering, Parabola, Parabolas
from spillway.units import Bytes

SEVERAL: Final = 8
"""Of so many fits on, arrays of numbers are faster than one after the other."""
MANY: Final = 32
"""And of so many laws."""

_Array: TypeAlias = NDArray[Any]
_Ask: TypeAlias = Callable[[InputSize], list[Bytes]]


@final
class Together:
    """Several estimates. What they tell is that of now: they may take no more samples.

    Arguments:
        estimates: Of sizes of the same dimensions.
    """

    def __init__(self, estimates: Sequence[Estimate]) -> None:
        numbers: dict[object, int] = {}
        different: list[Estimate] = []
        places: list[int] = []
        for estimate in estimates:
            law = estimate.law()
            # A law is looked for once among the same samples, so that one law means the same samples.
            place = numbers.setdefault(tuple(estimate.measured.items()) if law is None else id(law), len(different))
            if place == len(different):
                different.append(estimate)
            places.append(place)
        groups = list(_grouped(different))
        self._asks = [ask for _, ask in groups]
        order = {place: number for number, place in enumerate(place for group, _ in groups for place in group)}
        self._answers = [order[place] for place in places]

    def at(self, size: InputSize) -> list[Bytes]:
        """Of each."""
        found: list[Bytes] = []
        for ask in self._asks:
            found += ask(size)
        return [found[number] for number in self._answers]


def _grouped(estimates: Sequence[Estimate]) -> Iterator[tuple[list[int], _Ask]]:
    """Numbers of estimates with what answers for them."""
    kinds: dict[object, list[int]] = {}
    for number, estimate in enumerate(estimates):
        kinds.setdefault(_kind(estimate), []).append(number)
    for kind, group in kinds.items():
        members = [estimates[number] for number in group]
        laws = [law for law in (one.law() for one in members) if isinstance(law, Parabola)]
        if kind is None or len(group) < (MANY if laws else SEVERAL):
            yield group, partial(_each, [_alone(one) for one in members])
        else:
            yield group, Parabolas(laws).at if laws else _Fits(members).at


def _kind(estimate: Estimate) -> object:
    """What those have in common that can be asked together; None if nothing."""
    law = estimate.law()
    if isinstance(law, Parabola):
        return Parabola
    sizes = tuple(estimate.measured)
    return sizes if law is None and len(sizes[0]) == 1 and not estimate.batched else None


def _alone(estimate: Estimate) -> Callable[[InputSize], Bytes]:
    law = estimate.law()
    return law if isinstance(law, Answering) else estimate.at  # other laws may not know; the estimate does


def _each(asks: Sequence[Callable[[InputSize], Bytes]], size: InputSize) -> list[Bytes]:
    return [ask(size) for ask in asks]


@final
class _Fits:
    """Estimates without a law, of one length, from samples of the same sizes: `Estimate.at` for all of them."""

    def __init__(self, estimates: Sequence[Estimate]) -> None:
        self._sizes = tuple(estimates[0].measured)
        self._known = {size: [one.measured[size] for one in estimates] for size in self._sizes}
        self._nbytes: _Array = numpy.array([[*one.measured.values()] for one in estimates], dtype=float).T
        self._coefficients: _Array = numpy.array([one.fit.coefficients for one in estimates]).T
        self._above: _Array = numpy.array([one.above for one in estimates])
        self._low, self._high = min(self._sizes), max(self._sizes)
        self._lengths: _Array = numpy.array([[max(size[0], 1)] for size in self._sizes], dtype=float)

    def at(self, size: InputSize) -> list[Bytes]:
        """As measured, or by the fits."""
        known = self._known.get(size)
        if known is not None:
            return known
        length, value = size[0], 0.0 * self._above
        for coefficient in self._coefficients[::-1]:
            value = value * length + coefficient
        fitted = numpy.maximum(value + self._above, 0.0)
        if not self._low <= size <= self._high:
            fitted = numpy.maximum(fitted, self._at_most(size))
        found: list[Bytes] = numpy.ceil(fitted).astype(numpy.int64).tolist()
        return found

    def _at_most(self, size: InputSize) -> _Array:
        """`estimator.at_most` for all of them."""
        growth = numpy.maximum(size[0] / self._lengths, 1.0)
        least: _Array = (self._nbytes * (growth * growth)).min(axis=0)
        low, high = self._low, self._high
        if size <= high or low == high:
            return least
        most = self._nbytes[self._sizes.index(high)]
        steepest = numpy.maximum(most - self._nbytes[self._sizes.index(low)], 0) / (high[0] ** 2 - low[0] ** 2)
        grown: _Array = numpy.minimum(least, most + steepest * (size[0] ** 2 - high[0] ** 2))
        return grown
