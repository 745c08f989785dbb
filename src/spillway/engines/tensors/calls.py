"""A call of an op in enough detail to make it again: arguments, geometry, environment, random state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast, final

import torch

from spillway.engines.environment import InEnvironment, OpEnvironment
from spillway.engines.tensors.ops import OpInfo
from spillway.internals.private import is_wrapper
from spillway.internals.process_memory import memory_for

Place = int | str | tuple[int | str, int]
"""Where a tensor stands in a call: a position, a keyword, or either with an index into a list."""

Geometry = tuple[Any, ...]
"""How a tensor lies over its storage: shape, strides, storage offset, dtype."""

Operand = tuple[Place, Geometry]

OPERAND: Final = object()
"""Stands in the place of a tensor among the arguments that a handler wrote down."""


class Call(NamedTuple):
    """The payload of a recipe. `args` and `kwargs` have a hole for each tensor; `operands` say what belongs there.

    The operands stand in the order of the recipe's reads; `scratch` are those that a replay fills with zeros.
    `random` pairs a generator with its state before the call. `outputs` are the positions, among the tensors that the
    op returns, of those with a storage of their own.
    """

    func: Any
    args: list[Any]
    kwargs: dict[str, Any] | None
    operands: Sequence[Operand]
    environment: OpEnvironment
    outputs: tuple[int, ...] = (0,)
    scratch: Sequence[Operand] = ()
    random: tuple[torch.Generator, torch.Tensor] | None = None

    @staticmethod
    def unpacked(payload: Any) -> Call | NativeCall:
        """The call that a recipe's payload stands for: itself, what the native hook wrote down, or a list of what the
        shortest way in Python did.

        That is the op, its arguments, keywords and environment, and then the geometry of each operand. Of the arguments
        there is a tuple of those behind the operands where operands come first, else a list with `OPERAND` in each of
        their places. An op with several results is paired with the positions of those with a storage of their own.
        """
        if isinstance(payload, Call):
            return payload
        if not isinstance(payload, list):
            return NativeCall(payload)
        return Call.listed(payload)

    @staticmethod
    def listed(payload: list[Any]) -> Call:
        """The same of such a list."""
        func, args, kwargs, environment, *geometries = payload
        func, outputs = func if isinstance(func, tuple) else (func, (0,))
        holes: list[Any] = [OPERAND] * len(geometries) + list(args) if isinstance(args, tuple) else args
        places = [place for place, given in enumerate(holes) if given is OPERAND]
        return Call(func, holes, kwargs, list(zip(places, geometries, strict=True)), environment, outputs)

    def again(self, storages: Sequence[torch.UntypedStorage]) -> Any:
        """Make the call on tensors over `storages`; the random state and the settings end as they were."""
        args: list[Any] = [list(a) if isinstance(a, list) else a for a in self.args]
        kwargs: dict[str, Any] = {k: list(v) if isinstance(v, list) else v for k, v in (self.kwargs or {}).items()}
        with InEnvironment(self.environment):
            for (place, geometry), storage in zip(self.operands, storages, strict=True):
                fill(args, kwargs, place, tensor_over(storage, geometry))
            for place, geometry in self.scratch:
                fill(args, kwargs, place, torch.zeros(geometry[0], dtype=geometry[3], device=storages[0].device))
            if self.random is None:
                return self.func(*args, **kwargs)
            generator, state = self.random
            present = generator.get_state()
            generator.set_state(state)
            try:
                return self.func(*args, **kwargs)
            finally:
                generator.set_state(present)


@final
class NativeCall:
    """A call that the native hook wrote down."""

    __slots__ = ("_payload", "outputs")

    def __init__(self, payload: Any) -> None:
        self._payload = payload
        self.outputs: tuple[int, ...] = payload.outputs

    def again(self, storages: Sequence[torch.UntypedStorage]) -> Any:
        with InEnvironment(self._payload.environment):
            return self._payload.again(storages)


def random_state(kwargs: Mapping[str, Any] | None, usual: torch.Generator) -> tuple[torch.Generator, torch.Tensor]:
    """The generator that a call draws from, which is the `usual` one if it is given none, and its state now."""
    generator = (kwargs or {}).get("generator") or usual
    with memory_for("the state of a random stream, which a replay draws from"):
        return generator, generator.get_state()


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """What `tensor_over` needs."""
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a sparse tensor or a wrapper subclass consists of; none for a tensor with bytes of its own."""
    if is_wrapper(tensor):
        attributes = [getattr(tensor, name) for name in cast(Any, tensor).__tensor_flatten__()[0]]
        inner = [attribute for attribute in attributes if isinstance(attribute, torch.Tensor)]
    else:
        inner = [getattr(tensor, name)() for name in _PARTS.get(tensor.layout, ())]
    for part in inner:
        yield part
        yield from inner_tensors(part)


_PARTS: Final[Mapping[torch.layout, tuple[str, ...]]] = MappingProxyType(
    {
        torch.sparse_coo: ("_indices", "_values"),
        torch.sparse_csr: ("crow_indices", "col_indices", "values"),
        torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
        torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
        torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    }
)


def tensor_over(storage: torch.UntypedStorage, geometry: Geometry) -> torch.Tensor:
    """A tensor of the recorded shape, strides, offset and dtype over `storage`."""
    shape, strides, offset, dtype = geometry
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, offset, shape, strides)


def fill(args: list[Any], kwargs: dict[str, Any], place: Place, value: Any) -> None:
    """Put `value` where `place` says."""
    outer, inner = place if isinstance(place, tuple) else (place, None)
    holder: Any = kwargs if isinstance(outer, str) else args
    if inner is None:
        holder[outer] = value
    else:
        holder[outer][inner] = value


def operands(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Place, Any, str]]:
    """Every tensor of a call: its place, the tensor, and the name of its argument."""
    arguments = info.func._schema.arguments
    positional = [argument.name for argument in arguments if not argument.kwarg_only]
    named: list[tuple[int | str, str, Any]] = [(p, positional[p], value) for p, value in enumerate(args)]
    named += [(name, name, value) for name, value in kwargs.items()]
    for outer, name, value in named:
        if isinstance(value, torch.Tensor):
            yield outer, value, name
        elif isinstance(value, list | tuple):
            for inner, element in enumerate(value):
                if isinstance(element, torch.Tensor):
                    yield (outer, inner), element, name


def with_holes(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Copies of the arguments in which every tensor is None."""
    return [_hole(value) for value in args], {name: _hole(value) for name, value in kwargs.items()}


def _hole(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, list | tuple) and any(isinstance(element, torch.Tensor) for element in value):
        return [None if isinstance(element, torch.Tensor) else element for element in value]
    return value
