"""A step of a size that nobody recorded, from steps of a few other sizes.

What an op creates is a product of lengths, and so a polynomial of the size of the input; `laws` finds it, exactly where
it can. Which ops run must not depend on the size: `fit_growth` refuses steps that differ in more than numbers, and
`alike` tells which of them do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import Any, Final, TypeAlias, final

import numpy
from numpy.typing import NDArray

from spillway.costs.laws import Law, law_of, rivals
from spillway.ir.step import Op, Step, StorageId, StorageInfo
from spillway.units import Bytes, Seconds

_FEWEST: Final = 3
"""Sizes: what a polynomial of degree 2 takes, as Mimose fits them."""
_HIGHEST: Final = 2
"""Degree of what is fitted to seconds."""
_Floats: TypeAlias = NDArray[numpy.float64]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How every number of a step grows with the size of its input. Built by `fit_growth`."""

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
    seconds: tuple[tuple[float, ...] | None, ...]
    """Of every op, coefficients from the zeroth power up; None for an op that was not timed at every size."""

    @property
    def inexact(self) -> tuple[StorageId, ...]:
        """Storages whose bytes follow no exact law: what `step_at` says of them is only near."""
        return tuple(number for number, law in enumerate(self.nbytes) if not law.exact)

    @property
    def unchecked(self) -> tuple[StorageId, ...]:
        """Storages with too few different sizes to tell whether their law is one, those without a law included."""
        return tuple(number for number, law in enumerate(self.nbytes) if not law.checked)

    def doubtful(self, size: int) -> tuple[StorageId, ...]:
        """Storages without a checked law, and those with several that do not agree on this size.

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

        Raises:
            ValueError: The size is not a number above 0.
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
            return replace(there, flops=flops, traffic=traffic, seconds=_at(self.seconds[there.number], size))

        first = self.steps[0]
        return replace(first, storages=tuple(map(storage, first.storages)), ops=tuple(map(op, first.ops)))


def fit_growth(steps: Mapping[int, Step]) -> Growth:
    """Find the laws of a step from what was recorded at several sizes of the input.

    A law of degree n is only certain with n + 2 sizes: six for what may grow with the fourth power, four where nothing
    grows faster than with the square. Sizes without a common divisor show what is padded.

    Args:
        steps: A step for every size, all of the same ops in the same order.

    Raises:
        ValueError: There are fewer than three sizes, a size is not above 0, or the steps are not of the same ops; the
            sentence says where they part.
    """
    if len(steps) < _FEWEST or min(steps) < 1:
        raise ValueError(f"Growth is fitted to {_FEWEST} sizes above 0 or more, not to {sorted(steps)}.")
    sizes = tuple(sorted(steps))
    ordered = tuple(steps[size] for size in sizes)
    for size, step in zip(sizes[1:], ordered[1:], strict=True):
        if (difference := _difference(ordered[0], step)) is not None:
            raise ValueError(f"The steps of sizes {sizes[0]} and {size} are not the same ops: {difference}.")

    nbytes = _laws(sizes, ordered, _nbytes)
    # What ops compute and move is made of the same lengths: other quanta need not be tried.
    quanta = sorted({1, *(law.quantum for law in nbytes)})
    return Growth(
        sizes=sizes,
        steps=ordered,
        nbytes=nbytes,
        flops=_laws(sizes, ordered, lambda step: (op.flops for op in step.ops), quanta),
        traffic=_laws(sizes, ordered, lambda step: (op.traffic for op in step.ops), quanta),
        seconds=_curves(sizes, ordered),
    )


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


def alike(steps: Mapping[int, Step]) -> tuple[tuple[int, ...], ...]:
    """Sizes whose steps are of the same ops stand together; the largest group first, sizes increasing.

    Where padding or a loop over windows makes ops come and go with the size, each group has a growth of its own.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for size in sorted(steps):
        groups.setdefault(_structure(steps[size]), []).append(size)
    return tuple(sorted(map(tuple, groups.values()), key=lambda group: (-len(group), group)))


def _structure(step: Step) -> tuple[Any, ...]:
    """All of a step but its numbers and names."""
    return tuple(map(_of_op, step.ops)), tuple(map(_of_storage, step.storages)), step.values, step.saved


def _of_op(op: Op) -> tuple[Any, ...]:
    return op.name, op.phase, op.reads, op.creates, op.seeded, op.replayable


def _of_storage(storage: StorageInfo) -> tuple[Any, ...]:
    interval = storage.alive_from, storage.alive_until
    return storage.kind, *interval, storage.present_at_start, storage.present_at_end


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
    if _structure(one) != _structure(other):
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
    tried = [_fitted(sizes, seconds, degree) for degree in range(min(_HIGHEST, len(sizes) - 2) + 1)]
    best = numpy.argmin([misses for _, misses in tried], axis=0)
    for place, number in enumerate(timed):
        curves[number] = tuple(float(factor) for factor in tried[best[place]][0][:, place])
    return tuple(curves)


def _fitted(sizes: Sequence[int], seconds: _Floats, degree: int) -> tuple[_Floats, _Floats]:
    """Coefficients [degree + 1, ops], and for every op how badly each time is foretold by the fit to the others."""
    scale = float(max(sizes))
    powers = numpy.vander(numpy.array(sizes, dtype=float) / scale, degree + 1, increasing=True)
    inverse = numpy.linalg.pinv(powers)
    found = inverse @ seconds
    own = numpy.diag(powers @ inverse)  # how much a fit leans on the point itself
    misses = (((seconds - powers @ found) / (1 - own)[:, None]) ** 2).sum(axis=0)
    return found / scale ** numpy.arange(degree + 1)[:, None], misses


def _at(curve: Sequence[float] | None, size: int) -> Seconds | None:
    """Never below 0, where a falling curve may end between small sizes."""
    return None if curve is None else max(sum(factor * size**power for power, factor in enumerate(curve)), 0.0)
