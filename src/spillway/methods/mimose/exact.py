"""Bytes that are exactly a polynomial of the input size, and how to know.

What autograd saves in a block is a sum of products of lengths, each perhaps padded to whole windows. So the bytes
are integers on a polynomial with rational coefficients, and one sample more than it has terms shows whether it is
the right one: a wrong one is off by bytes, not by noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import gcd, lcm, prod
from typing import Final, TypeAlias, final

import numpy

from spillway.costs.scaling import DEGREE as HIGHEST
from spillway.costs.scaling import QUANTA, Law, argument, exact_laws, rivals
from spillway.methods.by_block import InputSize, of_lengths
from spillway.units import Bytes

BytesAt: TypeAlias = Callable[[InputSize], Bytes | None]
"""Bytes at a size; None where the samples do not settle them."""

STRIDES: Final = (1, 2, 4, 8, 16, 32, 64)
"""What sizes are divided by where two kinds of windows are looked for: the strides of stages."""
TIMES: Final = (2, 7, 8, 12, 14, 16)
"""How many of these windows a wide one has: the stride of a block, and the windows in which pictures attend."""
NEAR: Final = 1e-7
"""A miss in floating point, of the largest number, below which it is worth solving in fractions."""

DEGREE: Final = 2
"""Of the polynomials in the paper, section 4.3."""


def monomials(size: Sequence[int], degree: int, *, batched: bool) -> tuple[int, ...]:
    """The features of a size: for lengths e and d and degree 2 these are 1, e, d, e^2, ed, d^2.

    Args:
        size: One number per dimension.
        degree: The highest, all lengths of a product together.
        batched: Whether the first number is the number of samples, by which every feature is multiplied.
    """
    factor, lengths = (size[0], size[1:]) if batched else (1, size)
    found = [factor]
    if degree >= 1:
        found += [factor * length for length in lengths]
    if degree >= 2:
        found += [factor * one * other for place, one in enumerate(lengths) for other in lengths[place:]]
    return tuple(found)


@final
@dataclass(frozen=True, slots=True)
class Parabola:
    """A law of one length of degree 2 or less, as most are: short, because plans ask for each block's."""

    square: int
    linear: int
    constant: int
    denominator: int

    def __call__(self, size: InputSize) -> Bytes:
        length = size[0]
        value = -(-((self.square * length + self.linear) * length + self.constant) // self.denominator)
        return value if value > 0 else 0


@final
@dataclass(frozen=True, slots=True)
class _Line:
    """A law of one length, in whole numbers: numerators over one denominator."""

    numerators: tuple[int, ...]
    """Of the powers of the argument, the highest first."""
    denominator: int
    quantum: int
    up: bool
    power: int

    def __call__(self, size: InputSize) -> Bytes:
        length = size[0]
        place = length if self.quantum == 1 else argument(length, self.quantum, up=self.up)
        value = 0
        for numerator in self.numerators:
            value = value * place + numerator
        factor: int = length**self.power
        return max(-(-value * factor // self.denominator), 0)


@final
@dataclass(frozen=True, slots=True)
class _Rivals:
    """Laws that the sampled sizes cannot tell apart, as all of them lie on one grid: off it the largest counts."""

    laws: tuple[_Line | Parabola, ...]
    offset: int
    grid: int

    def __call__(self, size: InputSize) -> Bytes:
        if (size[0] - self.offset) % self.grid == 0:
            return self.laws[0](size)
        return max(law(size) for law in self.laws)


@final
@dataclass(frozen=True, slots=True)
class _Windows:
    """Whole windows of two widths side by side: pictures padded for attention in windows, and blocks with a stride."""

    narrow: int
    wide: int
    up: bool
    power: int
    """2 where the one number of a size is the side of a square."""
    batched: bool

    def features(self, size: InputSize) -> tuple[int, int, int]:
        """1, narrow windows and wide ones, of all samples."""
        factor, lengths = (size[0], size[1:]) if self.batched else (1, size)
        narrow = prod(argument(length, self.narrow, up=self.up) for length in lengths)
        wide = prod(argument(length, self.wide, up=self.up) for length in lengths)
        return factor, factor * narrow**self.power, factor * wide**self.power


@final
@dataclass(frozen=True, slots=True)
class _Pairs:
    """All pairs of windows that the samples allow: the largest counts."""

    laws: tuple[tuple[tuple[int, ...], int, _Windows], ...]
    """Numerators of 1, of the product of all lengths in narrow windows, and of that in wide ones; their denominator."""

    def __call__(self, size: InputSize) -> Bytes:
        return max(0, *(-(-_dot(over, shape.features(size)) // under) for over, under, shape in self.laws))


@final
@dataclass(frozen=True, slots=True)
class _Surface:
    """A polynomial of several lengths, in whole numbers."""

    numerators: tuple[int, ...]
    denominator: int
    degree: int
    batched: bool
    quantum: int
    up: bool
    unsettled: tuple[tuple[int, ...], ...]
    """Combinations of features that were 0 at every sample: where one is not, the samples say nothing."""

    def __call__(self, size: InputSize) -> Bytes | None:
        features = _windowed(size, self.degree, self.quantum, batched=self.batched, up=self.up)
        if any(_dot(combination, features) for combination in self.unsettled):
            return None
        return max(-(-_dot(self.numerators, features) // self.denominator), 0)


def exact_polynomial(samples: Mapping[InputSize, Bytes], *, batched: bool, windows: bool = True) -> BytesAt | None:
    """The polynomial of the size, or of how many whole windows of it there are, that passes all samples to the byte.

    If there is none, a sum of the windows of two widths is looked for. None if there is none of these, or if so few
    samples prove nothing: it takes one more than terms, two more with windows.

    Args:
        samples: Bytes by size.
        batched: Whether the first number of a size is the number of samples.
        windows: Whether to look for windows.
    """
    if len(samples) < 2:
        return None
    one_length = len(next(iter(samples))) == 1 and not batched
    law = _line(samples, windows) if one_length else next(_surfaces(samples, batched, windows), None)
    return law or (_pairs(samples, batched) if windows else None)


def _pairs(samples: Mapping[InputSize, Bytes], batched: bool) -> _Pairs | None:
    """Two kinds of windows, two samples more than their three terms."""
    if len(samples) < 5:
        return None
    sizes, counted = list(samples), list(samples.values())
    lengths = len(sizes[0]) - batched
    shapes = [
        _Windows(narrow, narrow * times, up, power, batched)
        for narrow, times, up, power in product(STRIDES, TIMES, (True, False), (2, 1) if lengths == 1 else (1,))
    ]
    rows = numpy.array([[shape.features(size) for size in sizes] for shape in shapes], dtype=float)
    basis = numpy.linalg.qr(rows / numpy.maximum(rows.max(axis=1, keepdims=True), 1))[0]
    wanted = numpy.array(counted, dtype=float) / max(*counted, 1)
    misses = numpy.abs(wanted - (basis @ (basis.transpose(0, 2, 1) @ wanted)[..., None])[..., 0]).max(axis=1)
    found = []
    for shape in (shape for shape, miss in zip(shapes, misses, strict=True) if miss < NEAR):
        solved = _solved([shape.features(size) for size in sizes], counted, spare=2)
        if solved is not None and not solved[1]:
            found.append((*_whole(solved[0]), shape))
    return _Pairs(tuple(found)) if found else None


def _line(samples: Mapping[InputSize, Bytes], windows: bool) -> Parabola | _Line | _Rivals | None:
    sizes = [size[0] for size in sorted(samples)]
    counted = [samples[(size,)] for size in sizes]
    law = next(exact_laws(sizes, counted, [1, *(_likely(sizes, counted) if windows else ())]), None)
    if law is None:
        return None
    first = _in_whole_numbers(law)
    others = dict.fromkeys(map(_in_whole_numbers, rivals(sizes, counted)))
    others.pop(first, None)
    grid = gcd(*(size - sizes[0] for size in sizes))
    return _Rivals((first, *others), sizes[0], grid) if others and grid else first


def _likely(sizes: Sequence[int], counted: Sequence[Bytes]) -> list[int]:
    """Windows of which a polynomial comes near in floating point: the others need not be looked at in fractions."""
    lengths, wanted = numpy.array(sizes, dtype=float), numpy.array(counted, dtype=float)
    divided = lengths / numpy.array(QUANTA, dtype=float)[:, None]
    places = numpy.concatenate([numpy.ceil(divided), numpy.floor(divided)])
    powers = (places / numpy.maximum(places.max(axis=1, keepdims=True), 1))[..., None] ** numpy.arange(HIGHEST + 1)
    basis = numpy.linalg.qr(powers)[0]
    beside = numpy.arange(3 if lengths.all() else 1)  # powers of the size, of which 0 leaves nothing
    targets = wanted[:, None] / lengths[:, None] ** beside
    targets /= numpy.maximum(numpy.abs(targets).max(axis=0), 1e-300)
    misses = numpy.abs(targets - basis @ (basis.transpose(0, 2, 1) @ targets)).max(axis=1).min(axis=1)
    near = misses.reshape(2, len(QUANTA)).min(axis=0) < NEAR
    return [quantum for quantum, likely in zip(QUANTA, near, strict=True) if likely]


def _in_whole_numbers(law: Law) -> _Line | Parabola:
    numerators, denominator = _whole(law.coefficients)
    if law.quantum == 1 and len(numerators) <= 3:
        constant, linear, square = (*numerators, 0, 0, 0)[:3]
        return Parabola(square, linear, constant, denominator)
    return _Line(numerators[::-1], denominator, law.quantum, law.up, law.power)


def _windowed(size: InputSize, degree: int, quantum: int, *, batched: bool, up: bool) -> tuple[int, ...]:
    windows = of_lengths(size, lambda length: argument(length, quantum, up=up), batched=batched)
    return monomials(windows, degree, batched=batched)


def _surfaces(samples: Mapping[InputSize, Bytes], batched: bool, windows: bool) -> Iterator[_Surface]:
    """Lowest degree and smallest windows first."""
    sizes, counted = list(samples), list(samples.values())
    for quantum in (1, *QUANTA) if windows else (1,):
        for up in (True, False) if quantum > 1 else (True,):
            for degree in range(DEGREE + 1) if quantum == 1 else (DEGREE,):
                rows = [_windowed(size, degree, quantum, batched=batched, up=up) for size in sizes]
                if _near(rows, counted):
                    solved = _solved(rows, counted, spare=1 if quantum == 1 else 2)
                    if solved is not None:
                        (numerators, denominator), unsettled = _whole(solved[0]), (_whole(one)[0] for one in solved[1])
                        yield _Surface(numerators, denominator, degree, batched, quantum, up, tuple(unsettled))


def _near(rows: Sequence[tuple[int, ...]], counted: Sequence[Bytes]) -> bool:
    """Whether it is worth solving in fractions: floating point comes close."""
    matrix, wanted = numpy.array(rows, dtype=float), numpy.array(counted, dtype=float)
    scale = numpy.maximum(numpy.abs(matrix).max(axis=0), 1)
    found = numpy.linalg.lstsq(matrix / scale, wanted, rcond=None)[0]
    misses = numpy.abs(matrix / scale @ found - wanted)
    return bool((misses <= 1 + 1e-7 * wanted.max()).all())


def _solved(
    rows: Sequence[tuple[int, ...]], counted: Sequence[Bytes], spare: int
) -> tuple[list[Fraction], list[list[Fraction]]] | None:
    """Coefficients and the combinations that stay unsettled, by elimination; None if a row disagrees."""
    width = len(rows[0])
    table = [[Fraction(number) for number in (*row, number_)] for row, number_ in zip(rows, counted, strict=True)]
    pivots: list[int] = []
    for column in range(width):
        rank = len(pivots)
        pivot = next((row for row in range(rank, len(table)) if table[row][column]), None)
        if pivot is None:
            continue
        table[rank], table[pivot] = table[pivot], table[rank]
        leading = table[rank][column]
        table[rank] = [number / leading for number in table[rank]]
        for row, line in enumerate(table):
            if row != rank and line[column]:
                factor = line[column]
                table[row] = [mine - factor * theirs for mine, theirs in zip(line, table[rank], strict=True)]
        pivots.append(column)
    if any(line[width] for line in table[len(pivots) :]) or len(set(rows)) < len(pivots) + spare:
        return None
    coefficients = [Fraction(0)] * width
    for row, column in enumerate(pivots):
        coefficients[column] = table[row][width]
    return coefficients, [_combination(table, pivots, column) for column in range(width) if column not in pivots]


def _combination(table: Sequence[Sequence[Fraction]], pivots: Sequence[int], free: int) -> list[Fraction]:
    """The feature `free` less what the pivots make of it: 0 at every sample."""
    found = [Fraction(0)] * (len(table[0]) - 1)
    found[free] = Fraction(1)
    for row, column in enumerate(pivots):
        found[column] = -table[row][free]
    return found


def _whole(numbers: Sequence[Fraction]) -> tuple[tuple[int, ...], int]:
    denominator = lcm(*(number.denominator for number in numbers))
    return tuple(int(number * denominator) for number in numbers), denominator


def _dot(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(mine * theirs for mine, theirs in zip(one, other, strict=True))
