"""Ops over lists of tensors (`_foreach_*`, fused optimizers), a group of elements at a time.

They are the sums of their elements one after the other. So where not all elements fit in memory at once, the op runs
on as many at a time as the largest element alone needs, with the same bits. Fused optimizers want more tensors of an
element at once than any op of the single-tensor form: where those do not fit, what writes in place runs on copies of
parts of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import torch

from spillway.engines.tensors.ops import OpInfo
from spillway.internals.dispatch_key import unwatched
from spillway.memory.records import Storage
from spillway.units import Bytes

_PARTS: Final = 4
"""Into how many an element is cut."""

_ALIGNED: Final = 1024
"""Parts begin at multiples of so many numbers: kernels that take several numbers at once take the same ones together
as in the whole, and none but the last part has a remainder."""


def part_of(numbers: int) -> int:
    """How many of them a part has."""
    return -(-numbers // (_PARTS * _ALIGNED)) * _ALIGNED


@final
class Elements:
    """The elements of one call."""

    def __init__(
        self, find: Callable[[torch.Tensor], Storage | None], info: OpInfo, args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:  # fmt: skip
        names = [argument.name for argument in info.func._schema.arguments]
        self._find, self._args, self._kwargs, self._creates = find, args, kwargs, info.fresh
        self._sliced = {place for place, name in enumerate(names[: len(args)]) if name in info.per_element}
        self._named = info.per_element & kwargs.keys()
        flat = [value.flatten() if isinstance(value, torch.Tensor) else value for value in self._each()]
        self._given = [value for value in flat if len(value)]  # what an optimizer does without is empty
        lengths = {len(value) for value in self._given}
        self.count = lengths.pop() if len(lengths) == 1 else 0
        """How many there are; none where torch will complain of lists that do not match."""

    def _each(self) -> Iterator[Any]:
        yield from (self._args[place] for place in sorted(self._sliced))
        yield from (self._kwargs[name] for name in sorted(self._named))

    def needs(self, group: slice) -> Bytes:
        """Bytes of the tensors of these elements."""
        return sum({s: n for e in range(self.count)[group] for s, n in self._storages(e).items()}.values())

    def groups(self, most: Bytes) -> Iterator[slice]:
        """Neighbours, as many as need no more together than the largest element does alone, and than `most`. Where the
        op creates, each element is alone."""
        if self.count < 2:
            yield slice(None)
            return
        if self._creates:
            yield from (slice(element, element + 1) for element in range(self.count))
            return
        needs = [self._storages(element) for element in range(self.count)]
        limit = min(max(sum(storages.values()) for storages in needs), most)
        first, together = 0, needs[0]
        for element in range(1, self.count):
            more = together | needs[element]
            if sum(more.values()) > limit:
                yield slice(first, element)
                first, more = element, needs[element]
            together = more
        yield slice(first, self.count)

    def _storages(self, element: int) -> dict[Storage, Bytes]:
        found = [self._find(tensor) for tensor in self._tensors(element)]
        return {storage: storage.nbytes for storage in found if storage is not None}

    def _tensors(self, element: int) -> list[torch.Tensor]:
        given = [value[element] for value in self._given if isinstance(value, list | tuple)]
        return [value for value in given if isinstance(value, torch.Tensor)]

    def parts(self, element: slice) -> list[slice]:
        """Of the tensors of one element, laid out flat; none where they are not all of one shape, dense and apart."""
        if not self.count:
            return []
        (number,) = range(self.count)[element]
        shaped = [tensor for tensor in self._tensors(number) if tensor.dim()]
        apart = {(self._find(tensor), tensor.storage_offset()) for tensor in shaped}
        if len({tensor.shape for tensor in shaped}) != 1 or len(apart) != len(shaped):
            return []
        if self._named or not all(tensor.is_contiguous() for tensor in shaped):
            return []
        numbers = shaped[0].numel()
        length = part_of(numbers)
        return [slice(begin, begin + length) for begin in range(0, numbers, max(length, 1))]

    def take(self, group: slice) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call for these elements alone."""
        if group == slice(None):  # also of lists that torch will complain of
            return list(self._args), dict(self._kwargs)
        with unwatched():  # a slice of a tensor is no op of the step
            args = [value[group] if place in self._sliced else value for place, value in enumerate(self._args)]
            kwargs = {name: value[group] if name in self._named else value for name, value in self._kwargs.items()}
        return args, kwargs
