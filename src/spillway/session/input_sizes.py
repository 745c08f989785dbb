"""The size of an input as a method plans by it: few numbers, read from the shapes of a batch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import torch

from spillway.errors import UsageError
from spillway.methods.by_block import InputSize
from spillway.session.inputs import leaves, shape_of

Shape: TypeAlias = tuple[int, ...]
SizeOf: TypeAlias = Callable[[Any], int | Sequence[int]]
"""A user's own way to read the size of a batch."""


@final
@dataclass(frozen=True, slots=True)
class Columns:
    """Which numbers of all shapes make up the size."""

    chosen: tuple[int, ...]
    """Their places; empty as long as all inputs were alike."""
    batched: bool
    """The first of them is the number of samples."""

    def size(self, dimensions: Shape) -> InputSize:
        """The size of an input with these dimensions."""
        return tuple(dimensions[place] for place in self.chosen) or (max(dimensions),)


NO_COLUMNS: Final = Columns((), batched=False)
"""Before any input was seen."""


def columns_of(seen: Sequence[Shape]) -> Columns:
    """Numbers that differ between inputs, each once where several are always the same.

    The first number of all is taken for the number of samples.

    Args:
        seen: All dimensions of every input so far, in one order.
    """
    chosen: dict[tuple[int, ...], int] = {}
    for place, column in enumerate(zip(*seen, strict=True)):
        if len(set(column)) > 1:
            chosen.setdefault(column, place)
    places = tuple(chosen.values())
    return Columns(places, batched=0 in places and len(places) > 1)


@final
class SizeReader:
    """Reads sizes, and finds out which numbers count while it sees inputs.

    Arguments:
        size_of: The user's own way; then nothing is found out.
        takes_vectors: Whether a size may be several numbers. Otherwise it is what the published runs of Mimose take:
            the last dimension of the first tensor, for pictures height times width.
    """

    def __init__(self, size_of: SizeOf | None, *, takes_vectors: bool) -> None:
        self._size_of = size_of
        self._takes_vectors = takes_vectors
        self._telling: list[Shape] = []
        """Of the inputs so far, those by which it is known which numbers count."""
        self.columns = NO_COLUMNS

    def dimensions(self, batch: Any) -> Shape:
        """What is to be kept of an input, so that its size can be read again when other numbers count. Raises
        UsageError if the batch has no tensors, or the user's own size is not a positive number or several."""
        if self._size_of is not None:
            return _checked(self._size_of(batch))
        shapes = [shape_of(leaf) for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
        if not any(shapes):
            raise UsageError(
                "A method of the block engine plans by the size of the input, and no tensor was found to tell it: "
                "enter the step with its batch, memory.step(batch), or give manage() "
                "blocks=BlockOptions(size=...), a function of the batch."
            )
        if not self._takes_vectors:
            first = next(shape for shape in shapes if shape)
            return (first[-1] * first[-2] if len(first) == 4 else first[-1],)
        return tuple(number for shape in shapes for number in shape)

    def size(self, dimensions: Shape) -> InputSize:
        """By the numbers that count now."""
        if self._size_of is not None or not self._takes_vectors:
            return dimensions
        return self.columns.size(dimensions)

    def learn(self, dimensions: Shape) -> None:
        """See an input; other numbers may count from now on."""
        if self._size_of is not None or not self._takes_vectors:
            return
        columns = columns_of([*self._telling, dimensions])
        if not self._telling or columns != self.columns:
            self._telling.append(dimensions)
            self.columns = columns


def largest_size(batches: Sequence[Any]) -> InputSize:
    """A size that no batch passes in any number. Raises UsageError if one has no size."""
    reader = SizeReader(None, takes_vectors=True)
    dimensions = [reader.dimensions(batch) for batch in batches]
    columns = columns_of(dimensions)
    return tuple(max(numbers) for numbers in zip(*(columns.size(one) for one in dimensions), strict=True))


def _checked(size: int | Sequence[int]) -> InputSize:
    given = tuple(size) if isinstance(size, Sequence) else (size,)
    try:
        numbers = tuple(operator.index(number) for number in given if not isinstance(number, bool))
    except TypeError:
        numbers = ()
    if not numbers or len(numbers) < len(given) or min(numbers) < 1:
        raise UsageError(
            f"BlockOptions(size=...) has to give a whole number above 0 for every batch, or several; got {size!r}."
        )
    return numbers
