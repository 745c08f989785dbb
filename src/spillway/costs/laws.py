"""How one integer grows with the size of the input: a polynomial through every recorded point, or the nearest one.

Sizes are padded and halved on their way through a model, so that what grows smoothly may be not the size but how many
whole windows of it there are. `exact_law` therefore looks for a polynomial of the size, then of ceil(size / quantum)
and floor(size / quantum), small quanta first, each also times a power of the size itself: that is how attention between
a sequence and a shorter one grows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from math import ceil, gcd
from typing import Final, final

import numpy

DEGREE: Final = 4
"""The highest degree that is looked for: scores of attention between all places of a picture grow with the fourth
power of its side."""
QUANTA: Final = (*range(2, 33), 40, 48, 56, 64, 96, 112, 128, 192, 224, 256, 384, 448, 512)
"""What sizes are divided by: strides of convolutions, windows of 7 and 8 of patches of 4, blocks of kernels."""
_ALL: Final = (1, *QUANTA)
_SHAPES: Final = tuple(product((True, False), (0, 1, 2)))
"""Whether the division rounds up, and the power of the size beside it."""
_FITTED_DEGREE: Final = 2
_NEARLY: Final = 1e-12
"""The error of a fit that passes every point once rounded: it is still no law."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """An integer as a polynomial of the input size."""

    coefficients: tuple[Fraction, ...]
    """Of the powers of the argument, from the zeroth up; none means 0."""
    quantum: int = 1
    """The argument is the size divided by this."""
    up: bool = True
    """Whether that division rounds up or down."""
    power: int = 0
    """The polynomial is multiplied by this power of the size."""
    checked: bool = True
    """Whether it passes all recorded points, and they are more than it has terms: by one, or by two where a quantum
    was chosen as well."""
    error: float = 0.0
    """How far it is from the recorded points at worst, relative to them; 0 if it passes them."""

    @property
    def degree(self) -> int:
        """Of the polynomial and the power together; 0 for what does not grow."""
        return max(len(self.coefficients) - 1, 0) + self.power

    @property
    def exact(self) -> bool:
        """Whether it passes all recorded points."""
        return not self.error

    def at(self, size: int) -> int:
        """The integer at this size: rounded up where the polynomial is none there, and never below 0."""
        value: Fraction = _value(self.coefficients, argument(size, self.quantum, up=self.up))
        return max(ceil(value * Fraction(size) ** self.power), 0)

    def __str__(self) -> str:
        inner = "x" if self.quantum == 1 else f"{'ceil' if self.up else 'floor'}(x/{self.quantum})"
        powers = ("", f"*{inner}", *(f"*{inner}^{power}" for power in range(2, len(self.coefficients))))
        terms = [f"{number}{power}" for number, power in zip(self.coefficients, powers, strict=False) if number]
        text = " + ".join(reversed(terms)) or "0"
        return f"({text})*x^{self.power}" if self.power else text


def argument(size: int, quantum: int, *, up: bool) -> int:
    """The size divided by the quantum, rounded."""
    return -(-size // quantum) if up else size // quantum


def law_of(sizes: Sequence[int], numbers: Sequence[int], quanta: Sequence[int] = _ALL) -> Law:
    """The simplest exact law, and if there is none the nearest polynomial of degree 2.

    Args:
        sizes: Of the recorded inputs, increasing.
        numbers: What was counted there.
        quanta: Those to look among, in this order.
    """
    return exact_law(sizes, numbers, quanta) or _fitted(sizes, numbers)


def exact_law(sizes: Sequence[int], numbers: Sequence[int], quanta: Sequence[int] = _ALL) -> Law | None:
    """The polynomial of the size that passes every point; else one of the smallest quantum for which there is one.

    A polynomial through as many points as it has terms proves nothing. Such a one is taken for lack of anything
    better, of the size itself alone, of degree 2 or less, and is not `checked`. None if there is no law.
    """
    checked = next(exact_laws(sizes, numbers, quanta), None)
    if checked is not None:
        return checked
    coefficients = _polynomial(sizes, numbers)
    return Law(coefficients=coefficients, checked=False) if len(coefficients) <= 3 else None


def exact_laws(sizes: Sequence[int], numbers: Sequence[int], quanta: Sequence[int] = _ALL) -> Iterator[Law]:
    """Every checked law of these quanta there is."""
    for quantum in quanta:
        for up, power in _SHAPES if quantum > 1 else _SHAPES[:1]:
            law = _law(sizes, numbers, Law(coefficients=(), quantum=quantum, up=up, power=power))
            if law is not None:
                yield law


def _law(sizes: Sequence[int], numbers: Sequence[int], shape: Law) -> Law | None:
    """The polynomial of this shape, if it passes every point and enough of them speak for it."""
    divided = [Fraction(number, size**shape.power) for size, number in zip(sizes, numbers, strict=True)]
    points = _merged([argument(size, shape.quantum, up=shape.up) for size in sizes], divided)
    if points is None:
        return None
    coefficients = _polynomial(*points)
    # Terms that are zero were not chosen to be. One point more than terms speaks for a polynomial of the size; but of
    # many quanta one fits by chance.
    terms, spare = sum(map(bool, coefficients)), 1 if shape.quantum == 1 else 2
    if len(coefficients) + shape.power > DEGREE + 1 or terms > len(points[0]) - spare:
        return None
    return replace(shape, coefficients=coefficients)


def rivals(sizes: Sequence[int], numbers: Sequence[int]) -> Iterator[Law]:
    """Checked laws between which these sizes cannot decide: what nobody recorded, nobody knows.

    They are those of the quantum of the first one, and of quanta that divide every distance between two sizes. Other
    quanta fit by chance alone.
    """
    first = next(exact_laws(sizes, numbers), None)
    if first is not None:
        grid = gcd(*(size - sizes[0] for size in sizes))
        yield from exact_laws(sizes, numbers, [first.quantum, *(q for q in QUANTA if grid % q == 0)])


def _merged(arguments: Sequence[int], numbers: Sequence[Fraction]) -> tuple[list[int], list[Fraction]] | None:
    """Each argument once with its number; None if one of them would have two."""
    points: dict[int, Fraction] = {}
    for place, number in zip(arguments, numbers, strict=True):
        if points.setdefault(place, number) != number:
            return None
    return list(points), list(points.values())


def _polynomial(places: Sequence[int], numbers: Sequence[int | Fraction]) -> tuple[Fraction, ...]:
    """Coefficients of the one polynomial of the lowest degree through all points, by Newton's divided differences."""
    column = [Fraction(number) for number in numbers]
    newton = column[:1]
    for order in range(1, len(places)):
        column = [(column[i + 1] - column[i]) / (places[i + order] - places[i]) for i in range(len(column) - 1)]
        newton.append(column[0])
    coefficients: list[Fraction] = []
    for place, difference in zip(reversed(places), reversed(newton), strict=True):
        # coefficients * (x - place) + difference
        shifted = [Fraction(0), *coefficients]
        below = [place * number for number in (*coefficients, Fraction(0))]
        coefficients = [a - b for a, b in zip(shifted, below, strict=True)]
        coefficients[0] += difference
    while coefficients and not coefficients[-1]:
        coefficients.pop()
    return tuple(coefficients)


def _value(coefficients: Sequence[Fraction], place: int) -> Fraction:
    value = Fraction(0)
    for number in reversed(coefficients):
        value = value * place + number
    return value


def _fitted(sizes: Sequence[int], numbers: Sequence[int]) -> Law:
    """The nearest polynomial; distances count relative to the numbers."""
    places = numpy.array(sizes, dtype=float) / max(sizes)  # near 1, so that their powers do not drown each other
    counted = numpy.array(numbers, dtype=float)
    weights = 1 / numpy.maximum(counted, 1)
    powers = numpy.vander(places, min(_FITTED_DEGREE, len(sizes) - 1) + 1, increasing=True)
    found = numpy.linalg.lstsq(powers * weights[:, None], counted * weights, rcond=None)[0]
    coefficients = tuple(Fraction(float(number)) / max(sizes) ** power for power, number in enumerate(found))
    near = Law(coefficients=coefficients, checked=False)
    errors = [abs(near.at(size) - number) / max(number, 1) for size, number in zip(sizes, numbers, strict=True)]
    return Law(coefficients=coefficients, checked=False, error=max(*errors, _NEARLY))
