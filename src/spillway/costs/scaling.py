"""A step of a size that nobody recorded, from steps of a few other sizes.

What an op creates is a product of lengths, and so a polynomial of the size of the input; `exact_laws` finds it where it
can. Which ops run must not depend on the size: `fit_scaling` refuses steps that differ in more than numbers.

Sizes are padded and halved on their way through a model, so that what grows smoothly may be not the size but how many
whole windows of it there are. `exact_laws` therefore looks for a polynomial of the size, then of ceil(size / quantum)
and floor(size / quantum), small quanta first, each also times a power of the size itself: that is how attention between
a sequence and a shorter one grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import islice, product
from math import ceil, gcd
from operator import attrgetter
from typing import Any, Final, TypeAlias, final

import numpy
from numpy.typing import NDArray

from spillway.ir.step import Op, Step, StorageId, StorageInfo
from spillway.units import Bytes

DEGREE: Final = 4
"""The highest degree that is looked for: scores of attention between all places of a picture grow with the fourth
power of its side."""
QUANTA: Final = (*range(2, 33), 40, 48, 56, 64, 96, 112, 128, 192, 224, 256, 384, 448, 512)
"""What sizes are divided by: strides of convolutions, windows of 7 and 8 of patches of 4, blocks of kernels."""
_ALL: Final = (1, *QUANTA)
_SHAPES: Final = tuple(product((True, False), (0, 1, 2)))
"""Whether the division rounds up, and the power of the size beside it."""
_FITTED_DEGREE: Final = 2


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

    def at(self, size: int) -> int:
        """The integer at this size: rounded up where the polynomial is none there, and never below 0."""
        place = argument(size, self.quantum, up=self.up)
        value: Fraction = sum((number * place**power for power, number in enumerate(self.coefficients)), Fraction(0))
        return max(ceil(value * Fraction(size) ** self.power), 0)


def argument(size: int, quantum: int, *, up: bool) -> int:
    """The size divided by the quantum, rounded."""
    return -(-size // quantum) if up else size // quantum


def law_of(sizes: Sequence[int], numbers: Sequence[int], quanta: Sequence[int] = _ALL) -> Law:
    """The first of `exact_laws`.

    For lack of one a polynomial of the size itself through as many points as it has terms, which proves nothing; or
    where that is of a higher degree than 2, the nearest of degree 2.
    """
    law = next(exact_laws(sizes, numbers, quanta), None)
    if law is not None:
        return law
    coefficients = _polynomial(sizes, numbers)
    return Law(coefficients=coefficients) if len(coefficients) <= _FITTED_DEGREE + 1 else _fitted(sizes, numbers)


def exact_laws(sizes: Sequence[int], numbers: Sequence[int], quanta: Sequence[int] = _ALL) -> Iterator[Law]:
    """Every law that passes all points, more than it has terms: by one, or by two where a quantum was chosen as well.

    Args:
        sizes: Of the recorded inputs, increasing.
        numbers: What was counted there.
        quanta: Those to look among, in this order.
    """
    # At a size of 0, as of an empty batch, nothing is left beside a power of the size.
    shapes = _SHAPES if all(sizes) else [shape for shape in _SHAPES if not shape[1]]
    for quantum in quanta:
        for up, power in shapes if quantum > 1 else _SHAPES[:1]:
            law = _law(sizes, numbers, Law(coefficients=(), quantum=quantum, up=up, power=power))
            if law is not None:
                yield law


def _law(sizes: Sequence[int], numbers: Sequence[int], shape: Law) -> Law | None:
    """The polynomial of this shape, if it passes every point and enough of them speak for it."""
    places = [argument(size, shape.quantum, up=shape.up) for size in sizes]
    # Terms that are zero were not chosen to be. One point more than terms speaks for a polynomial of the size; but of
    # many quanta one fits by chance.
    spare = 1 if shape.quantum == 1 else 2
    remainders = [number * pow(size, -shape.power, _PRIME) for size, number in zip(sizes, numbers, strict=True)]
    if _terms(places, remainders) > len(set(places)) - spare:
        return None
    divided = [Fraction(number, size**shape.power) for size, number in zip(sizes, numbers, strict=True)]
    points = dict(zip(places, divided, strict=True))
    if [points[place] for place in places] != divided:
        return None
    coefficients = _polynomial([*points], [*points.values()])
    if len(coefficients) + shape.power > DEGREE + 1 or sum(map(bool, coefficients)) > len(points) - spare:
        return None
    return replace(shape, coefficients=coefficients)


_PRIME: Final = 2**61 - 1


def _terms(places: Sequence[int], numbers: Sequence[int]) -> int:
    """How many terms the one polynomial of the lowest degree through all points has in remainders of `_PRIME`: no more
    than it has in fractions, and a twentieth of the work. More than there are points where there is none."""
    remainders = [number % _PRIME for number in numbers]
    points = dict(zip(places, remainders, strict=True))
    if [points[place] for place in places] != remainders:
        return len(places) + 1
    places, column = [*points], [*points.values()]
    newton = column[:1]
    for order in range(1, len(places)):
        column = [
            (after - before) * pow(last - first, -1, _PRIME) % _PRIME
            for before, after, first, last in zip(column, column[1:], places, places[order:], strict=False)
        ]
        newton.append(column[0])
    coefficients: list[int] = []
    for place, difference in zip(reversed(places), reversed(newton), strict=True):
        coefficients = [(a - place * b) % _PRIME for a, b in zip([0, *coefficients], [*coefficients, 0], strict=True)]
        coefficients[0] = (coefficients[0] + difference) % _PRIME
    return sum(map(bool, coefficients))


def rivals(sizes: Sequence[int], numbers: Sequence[int]) -> Iterator[Law]:
    """Exact laws between which these sizes cannot decide: what nobody recorded, nobody knows.

    They are those of the quantum of the first one, and of quanta that divide every distance between two sizes. Other
    quanta fit by chance alone.
    """
    first = next(exact_laws(sizes, numbers), None)
    if first is not None:
        grid = gcd(*(size - sizes[0] for size in sizes))
        yield from exact_laws(sizes, numbers, [first.quantum, *(q for q in QUANTA if grid % q == 0)])


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


def _fitted(sizes: Sequence[int], numbers: Sequence[int]) -> Law:
    """The nearest polynomial; distances count relative to the numbers."""
    places = numpy.array(sizes, dtype=float) / max(sizes)  # near 1, so that their powers do not drown each other
    counted = numpy.array(numbers, dtype=float)
    weights = 1 / numpy.maximum(counted, 1)
    powers = numpy.vander(places, _FITTED_DEGREE + 1, increasing=True)
    found = numpy.linalg.lstsq(powers * weights[:, None], counted * weights, rcond=None)[0]
    return Law(coefficients=tuple(Fraction(float(number)) / max(sizes) ** power for power, number in enumerate(found)))


_FEWEST: Final = 3
"""Sizes: what a polynomial of degree 2 takes, as Mimose fits them."""
_HIGHEST: Final = 2
"""Degree of what is fitted to seconds."""
_Floats: TypeAlias = NDArray[numpy.float64]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """How every number of a step grows with the size of its input. Built by `fit_scaling`."""

    sizes: tuple[int, ...]
    """Of the recorded inputs, increasing."""
    steps: tuple[Step, ...]
    """What was recorded at these sizes."""
    nbytes: tuple[Law, ...]
    """Of every storage, by its id."""
    flops: tuple[Law, ...]
    """Of every op, by its number."""
    traffic: tuple[Law, ...]
    """Of every op, by its number."""
    shapes: tuple[tuple[Law, ...], ...]
    """Of every op, of each length of its shape."""
    seconds: tuple[tuple[float, ...] | None, ...]
    """Of every op, coefficients from the zeroth power up; None for an op that was not timed at every size."""

    def doubtful(self, size: int) -> tuple[StorageId, ...]:
        """Storages without an exact law, and those with several that do not agree on this size.

        That is what happens at odd sizes if only even ones were recorded: padding would have left no trace.
        """

        @cache
        def certain(numbers: tuple[Bytes, ...]) -> bool:
            return len({law.at(size) for law in rivals(self.sizes, numbers)}) == 1

        counted = zip(*map(_nbytes, self.steps), strict=True)
        return tuple(number for number, numbers in enumerate(counted) if not certain(_simplified(numbers)[0]))

    def step_at(self, size: int) -> Step:
        """The step of this size, seconds of ops included where they were measured.

        A recorded size gives the bytes that were recorded, exactly where the storage has an exact law.

        Raises ValueError if the size is not a number above 0.
        """
        if size < 1:
            raise ValueError(f"An input has a size above 0, not {size}.")

        @cache
        def at(law: Law) -> int:
            return law.at(size)

        def storage(there: StorageInfo) -> StorageInfo:
            return replace(there, nbytes=at(self.nbytes[there.id]))

        def op(there: Op) -> Op:
            flops, traffic = at(self.flops[there.number]), at(self.traffic[there.number])
            shape = tuple(map(at, self.shapes[there.number]))
            seconds, curve = None, self.seconds[there.number]
            if curve is not None:  # a falling one may end between small sizes
                seconds = max(sum(factor * size**power for power, factor in enumerate(curve)), 0.0)
            return replace(there, flops=flops, traffic=traffic, shape=shape, seconds=seconds)

        first = self.steps[0]
        return replace(first, storages=tuple(map(storage, first.storages)), ops=tuple(map(op, first.ops)))


def fit_scaling(steps: Mapping[int, Step]) -> Scaling:
    """Find the laws of a step from what was recorded at several sizes of the input.

    A law of degree n is only certain with n + 2 sizes: six for what may grow with the fourth power, four where nothing
    grows faster than with the square. Sizes without a common divisor show what is padded.

    Args:
        steps: A step for every size, all of the same ops in the same order.

    Raises ValueError if there are fewer than three sizes, a size is not above 0, or the steps are not of the same ops;
    the sentence says where they part.
    """
    if len(steps) < _FEWEST or min(steps) < 1:
        raise ValueError(f"Scaling is fitted to {_FEWEST} sizes above 0 or more, not to {sorted(steps)}.")
    sizes = tuple(sorted(steps))
    ordered = tuple(steps[size] for size in sizes)
    for size, step in zip(sizes[1:], ordered[1:], strict=True):
        if (difference := _difference(ordered[0], step)) is not None:
            raise ValueError(f"The steps of sizes {sizes[0]} and {size} are not the same ops: {difference}.")

    nbytes = _laws(sizes, ordered, _nbytes)
    # What ops compute and move is made of the same lengths: other quanta need not be tried.
    quanta = sorted({1, *(law.quantum for law in nbytes)})
    lengths = iter(_laws(sizes, ordered, lambda step: (length for op in step.ops for length in op.shape), quanta))
    return Scaling(
        sizes=sizes, steps=ordered, nbytes=nbytes, seconds=_curves(sizes, ordered),
        flops=_laws(sizes, ordered, lambda step: (op.flops for op in step.ops), quanta),
        traffic=_laws(sizes, ordered, lambda step: (op.traffic for op in step.ops), quanta),
        shapes=tuple(tuple(islice(lengths, len(op.shape))) for op in ordered[0].ops),
    )  # fmt: skip


def _nbytes(step: Step) -> Iterator[Bytes]:
    return (storage.nbytes for storage in step.storages)


def _laws(
    sizes: Sequence[int], steps: Sequence[Step], of: Callable[[Step], Iterator[int]], *quanta: Sequence[int]
) -> tuple[Law, ...]:
    """A law for each of a step's numbers. Series of numbers that are multiples of each other are looked at once."""

    @cache
    def law(numbers: tuple[int, ...]) -> Law:
        return law_of(sizes, numbers, *quanta)

    @cache
    def scaled(numbers: tuple[int, ...]) -> Law:
        simple, factor = _simplified(numbers)
        found = law(simple)
        return replace(found, coefficients=tuple(factor * number for number in found.coefficients))

    return tuple(scaled(numbers) for numbers in zip(*map(of, steps), strict=True))


def _simplified(numbers: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The numbers without their greatest common divisor, and that."""
    factor = gcd(*numbers) or 1
    return tuple(number // factor for number in numbers), factor


def _of_op(op: Op) -> tuple[Any, ...]:
    return op.name, op.phase, op.reads, op.creates, op.seeded, op.replayable, len(op.shape)


_of_storage: Final = attrgetter("kind", "alive_from", "alive_until", "present_at_start", "present_at_end")


def _difference(one: Step, other: Step) -> str | None:
    """Where two steps part, as a clause; None if they differ in numbers and names alone."""
    for here, there in zip(one.ops, other.ops, strict=False):
        if here.name != there.name:
            return f"op {here.number} is {here.name} in one and {there.name} in the other"
        if _of_op(here) != _of_op(there):
            return f"{here.label} reads, creates or does something else"
    if len(one.ops) != len(other.ops):
        return f"one has {len(one.ops)} ops and the other {len(other.ops)}"
    for mine, yours in zip(one.storages, other.storages, strict=False):
        if _of_storage(mine) != _of_storage(yours):
            return f"storage {mine.id} is another: {mine} and {yours}"
    if (len(one.storages), one.values, one.saved) != (len(other.storages), other.values, other.saved):
        return "their values are others, or autograd saves others"
    return None


def _curves(sizes: Sequence[int], steps: Sequence[Step]) -> tuple[tuple[float, ...] | None, ...]:
    """For every op the polynomial that best foretells each of its times from the others."""
    timed = [
        number for number in range(len(steps[0].ops)) if all(step.ops[number].seconds is not None for step in steps)
    ]
    curves: list[tuple[float, ...] | None] = [None] * len(steps[0].ops)
    if not timed:
        return tuple(curves)
    seconds = numpy.array([[step.ops[number].seconds for number in timed] for step in steps], dtype=float)
    tried = [_seconds_fitted(sizes, seconds, degree) for degree in range(min(_HIGHEST, len(sizes) - 2) + 1)]
    best = numpy.argmin([misses for _, misses in tried], axis=0)
    for place, number in enumerate(timed):
        curves[number] = tuple(float(factor) for factor in tried[best[place]][0][:, place])
    return tuple(curves)


def _seconds_fitted(sizes: Sequence[int], seconds: _Floats, degree: int) -> tuple[_Floats, _Floats]:
    """Coefficients [degree + 1, ops], and for every op how badly each time is foretold by the fit to the others."""
    scale = float(max(sizes))
    powers = numpy.vander(numpy.array(sizes, dtype=float) / scale, degree + 1, increasing=True)
    inverse = numpy.linalg.pinv(powers)
    found = inverse @ seconds
    own = numpy.diag(powers @ inverse)  # how much a fit leans on the point itself
    misses = (((seconds - powers @ found) / (1 - own)[:, None]) ** 2).sum(axis=0)
    return found / scale ** numpy.arange(degree + 1)[:, None], misses
