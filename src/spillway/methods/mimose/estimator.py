"""The estimator: bytes and seconds at a size, from samples of other sizes (section 4.3).

`Quadratic` is the paper's: least squares of degree 2, of lower degree while there are fewer sizes. `Estimate` is what
Spillway plans with: exact where the samples show an exact law, as measured where the very size was, and otherwise a fit
that errs upwards.

NOTE: how sizes are estimated that no exact law covers.

1. A size that was measured has the most that was measured there.
2. Within the range of the measured sizes it is the fit and the most that any sample lies above the fit.
3. Outside that range, and at any size of several numbers, which may lie beside the samples, it is also at least the
   most that samples allow for (`at_most`), as far as bytes are sums of products of at most two lengths. What saves more
   for smaller inputs, or grows faster, is learned when it is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final, TypeAlias, final

import numpy

from spillway.methods.by_block import InputSize
from spillway.methods.mimose.exact import DEGREE, BytesAt, exact_polynomial, monomials
from spillway.units import Bytes

LOOKED_FOR: Final = 12
"""Different sizes after which a law that was not found is not looked for again."""


@final
@dataclass(frozen=True, slots=True)
class Quadratic:
    """A polynomial by least squares: what the paper fits, of one length or of several."""

    coefficients: tuple[float, ...]
    """Of the features, in the order of `monomials`."""
    degree: int
    """Of the features."""
    batched: bool
    """Whether the first number of a size is the number of samples."""

    def at(self, size: InputSize) -> float:
        """Its value, which may be below 0 where nothing was measured."""
        if len(size) == 1 and not self.batched:
            value, length = 0.0, size[0]
            for coefficient in reversed(self.coefficients):
                value = value * length + coefficient
            return value
        features = monomials(size, self.degree, batched=self.batched)
        return sum(coefficient * feature for coefficient, feature in zip(self.coefficients, features, strict=True))


def fit_quadratic(samples: Sequence[tuple[InputSize, float]], *, batched: bool = False) -> Quadratic:
    """Least squares of degree 2 over these samples, sizes as often as they were measured.

    With fewer different sizes than a degree has features it is of the next lower one; one size gives a constant. The
    paper and the public code do not say what they do then.

    Raises ValueError if there are no samples, or their sizes have different dimensions.
    """
    dimensions = {len(size) for size, _ in samples}
    if len(dimensions) != 1:
        raise ValueError(f"A fit takes samples of one number of dimensions, not of {sorted(dimensions)}.")
    (width,) = dimensions
    different = len({size for size, _ in samples})
    degree = DEGREE
    while degree and len(monomials((1,) * width, degree, batched=batched)) > different:
        degree -= 1
    rows = numpy.array([monomials(size, degree, batched=batched) for size, _ in samples], dtype=float)
    wanted = numpy.array([number for _, number in samples], dtype=float)
    scale = numpy.maximum(numpy.abs(rows).max(axis=0), 1)  # near 1, so that features do not drown each other
    found = numpy.linalg.lstsq(rows / scale, wanted, rcond=None)[0] / scale
    return Quadratic(tuple(map(float, found)), degree, batched)


@final
class Quadratics:
    """Several of them, all of sizes of the same dimensions, evaluated at once and never below 0."""

    def __init__(self, fits: Sequence[Quadratic]) -> None:
        width = max(len(fit.coefficients) for fit in fits)
        # Features of a lower degree stand in front of the others.
        rows = [(*fit.coefficients, *(0.0,) * (width - len(fit.coefficients))) for fit in fits]
        self._coefficients = numpy.array(rows)
        self._degree = max(fit.degree for fit in fits)
        self._batched = fits[0].batched

    def at(self, size: InputSize) -> list[float]:
        features = numpy.array(monomials(size, self._degree, batched=self._batched), dtype=float)
        values: list[float] = numpy.maximum(self._coefficients @ features, 0.0).tolist()
        return values


Samples: TypeAlias = tuple[tuple[InputSize, Bytes], ...]
"""Sizes and what was measured there."""
Laws: TypeAlias = dict[tuple[bool, Samples], BytesAt | None]
"""What was found for the same samples before, with windows or without: blocks of one kind have one law, which is
looked for once."""


@final
class Estimate:
    """Bytes at any size, from samples that may still come. Errs upwards where it is not exact (the note above).

    Arguments:
        batched: Whether the first number of a size is the number of samples.
        laws: Shared by the estimates of one model.
        lawless: Whether no law is looked for.
        windows: Whether laws of whole windows are looked for, which takes milliseconds; they make sense for a block,
            not for sums of many things.
    """

    def __init__(self, *, batched: bool, laws: Laws, lawless: bool = False, windows: bool = True) -> None:
        self.batched = batched
        self.measured: dict[InputSize, Bytes] = {}
        """What is known of each size that was measured."""
        self._laws = laws
        self._law: BytesAt | None = None
        self._lawless = lawless
        self._windows = windows
        self._raised: set[InputSize] = set()
        self._stale = True
        self.fit = Quadratic((), 0, batched)
        """Least squares; what `at` goes by where there is no law. As `above`, of the samples that `law` last saw."""
        self.above = 0.0
        """The most that a sample is above the fit."""
        self._range = (0, 0)

    def observe(self, size: InputSize, nbytes: Bytes) -> bool:
        """Take a sample; the most of a size counts. Returns whether any estimate may change by it.

        Samples of one size that differ show that bytes are no function of the size: no law is looked for any more.
        """
        before = self.measured.get(size)
        if before == nbytes:
            return False
        if before is not None:
            changed, self._lawless = not self._lawless or nbytes > before, True
            self.measured[size] = max(nbytes, before)
            self._stale |= changed
            return changed
        return self._learns(size, nbytes)

    def bound(self, size: InputSize, nbytes: Bytes, *, proven: bool) -> bool:
        """Take an upper bound; the lowest of a size counts. Returns whether any estimate may change by it. Where lower
        bounds of this size are `proven` to be too low, no lower one counts from then on."""
        before = self.measured.get(size)
        if proven and before is not None:
            self._raised.add(size)
        elif before is not None and (nbytes >= before or size in self._raised):
            return False
        if before == nbytes:
            return False
        return self._learns(size, nbytes)

    def _learns(self, size: InputSize, nbytes: Bytes) -> bool:
        """Unless the law says so already."""
        self.measured[size] = nbytes
        self._stale = self._stale or self._law is None or self._law(size) != nbytes
        return self._stale

    def at(self, size: InputSize) -> Bytes:
        """Bytes at this size. Raises ValueError if nothing was measured yet."""
        law = self.law()
        nbytes = law(size) if law is not None else self.measured.get(size)
        return nbytes if nbytes is not None else self._without_law(size)

    def law(self) -> BytesAt | None:
        """The law that every sample is on, if there is one."""
        if self._stale:
            self._learn()
        return self._law

    def _learn(self) -> None:
        samples = self.measured
        self.fit = fit_quadratic(list(samples.items()), batched=self.batched)
        self._law = None if self._lawless else self._looked_up(tuple(samples.items()))
        # More samples make room for more terms only up to here; then the search is given up.
        self._lawless |= self._law is None and len(samples) >= LOOKED_FOR
        self.above = max(0.0, *(nbytes - self.fit.at(size) for size, nbytes in samples.items()))
        self._range = min(samples)[0], max(samples)[0]
        self._stale = False

    def _looked_up(self, samples: Samples) -> BytesAt | None:
        key = self._windows, samples
        if key not in self._laws:
            self._laws[key] = exact_polynomial(dict(samples), batched=self.batched, windows=self._windows)
        return self._laws[key]

    def _without_law(self, size: InputSize) -> Bytes:
        known = self.measured.get(size)
        if known is not None:
            return known
        fitted = max(self.fit.at(size) + self.above, 0.0)
        if len(size) > 1 or not self._range[0] <= size[0] <= self._range[1]:
            fitted = max(fitted, at_most(self.measured, size, batched=self.batched))
        return ceil(fitted)


def at_most(samples: Mapping[InputSize, Bytes], size: InputSize, *, batched: bool) -> float:
    """The most that bytes can be at a size, if they are sums of products of at most two lengths, given samples.

    Sums of products: no term is below 0. So smaller sizes have no more bytes than larger ones, and k times the lengths
    at most k squared times the bytes; the sample that this makes least of counts. For one length the growth between
    the smallest and the largest sample says more: at worst all of it is with the square.
    """
    if len(size) > 1 or batched:
        return min(nbytes * _scale(size, known, batched=batched) for known, nbytes in samples.items())
    length = size[0]
    least = min([nbytes * max(1.0, length / max(known[0], 1)) ** DEGREE for known, nbytes in samples.items()])
    low, high = min(samples), max(samples)
    if size <= high or low == high:
        return least
    steepest = max(samples[high] - samples[low], 0) / (high[0] ** 2 - low[0] ** 2)
    return min(least, samples[high] + steepest * (size[0] ** 2 - high[0] ** 2))


def _scale(size: InputSize, known: InputSize, *, batched: bool) -> float:
    """How many times the bytes of `known` those of `size` are at most."""
    shares = [length / max(other, 1) for length, other in zip(size, known, strict=True)]
    factor = max(shares.pop(0), 1.0) if batched else 1.0
    return factor * max(1.0, *shares) ** DEGREE if shares else factor
