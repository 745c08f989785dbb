"""What ops make of fake tensors, remembered by what they are given.

Which shape a result has, and whose storage it shows, is told by torch in half a millisecond of Python, every time
anew; blocks, the parameters of an optimizer and steps of one size ask for the same again and again.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple, TypeAlias, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from spillway.internals.private import storage_address, storage_of

Described: TypeAlias = list[Any]
"""Of what an op is given: types and values, and of tensors their metadata."""

_FRESH: Final = -1
_MOST: Final = 1 << 13
"""Calls that are remembered."""
_VALUES: Final = frozenset(
    {bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_BY_CONTENT: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""Marks of ops whose results depend on more than is described, or that change what is described of an operand."""


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """For models and optimizers of the user's, which may hold tensors that are not fake. By its module it is known for
    a mode of ours, in which blocks are recomputed as in none. What torch remembers in its own way takes longer, and
    holds on to storages."""

    def __init__(self) -> None:
        cast(Any, super()).__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False


class _Made(NamedTuple):
    """A result: one of the operands itself, a view of one, or one with a storage of its own."""

    of: int
    """Which operand, counting tensors alone; _FRESH for none."""
    itself: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    conjugated: bool
    negated: bool


_outcomes: Final[dict[tuple[Any, ...], tuple[type | None, tuple[_Made | None, ...]] | None]] = {}
"""By what was called with what: whether results are a list, and each; None for what has to be told anew."""


def remembered(func: Any, args: Any, kwargs: Any) -> Any:
    """The same as `func(*args, **kwargs)`, for a mode that stands above that of fake tensors."""
    operands: list[FakeTensor] = []
    key = _key(func, args, kwargs, operands) if _depends_on_shapes(func) else None
    if key is None:
        return func(*args, **kwargs)
    if (outcome := _outcomes.get(key)) is not None:
        kind, results = outcome
        tensors = [None if made is None else _made_again(made, operands) for made in results]
        return tensors[0] if kind is None else kind(tensors)
    out = func(*args, **kwargs)
    if key not in _outcomes:
        if len(_outcomes) >= _MOST:
            _outcomes.clear()
        _outcomes[key] = _outcome(out, operands) if key == _key(func, args, kwargs, []) else None
    return out


@functools.cache
def _depends_on_shapes(func: Any) -> bool:
    schema = func._schema
    resized = any(argument.is_out for argument in schema.arguments) or schema.name.startswith(
        ("aten::resize", "aten::set_", "aten::lift", "aten::_resize")
    )
    return func.namespace == "aten" and not resized and not any(tag in func.tags for tag in _BY_CONTENT)


def _key(func: Any, args: Any, kwargs: Any, operands: list[FakeTensor]) -> tuple[Any, ...] | None:
    """None where what it is called with is not all described."""
    described = [
        func, torch.get_default_dtype(), torch.is_inference_mode_enabled(), torch._C._get_mkldnn_enabled(),
        torch._C._get_cudnn_enabled(), torch.are_deterministic_algorithms_enabled(),
    ]  # fmt: skip
    if not _describe(args, described, operands) or not _describe(tuple(kwargs.items()), described, operands):
        return None
    if not operands or any(one.fake_mode is not operands[0].fake_mode for one in operands):
        return None
    addresses = [storage_address(one) for one in operands]
    described += map(addresses.index, addresses)
    return tuple(described)


def _describe(value: Any, described: Described, operands: list[FakeTensor]) -> bool:
    """Whether all of it can be described."""
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or not _is_usual(value):
            return False
        operands.append(value)
        described += (
            kind, value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device, value.is_conj(),
            value.is_neg(), value.is_inference(), storage_of(value).nbytes(),
        )  # fmt: skip
        return True
    if kind is list or kind is tuple:
        described += (kind, len(value))
        return all(_describe(one, described, operands) for one in value)
    described += (kind, value)
    return kind in _VALUES


def _outcome(out: Any, operands: list[FakeTensor]) -> tuple[type | None, tuple[_Made | None, ...]] | None:
    kind = type(out) if isinstance(out, list | tuple) else None
    results = list(out) if kind is not None else [out]
    addresses = [storage_address(one) for one in operands]
    found: list[_Made | None] = []
    for one in results:
        made = None if one is None else _described(one, operands, addresses)
        if one is not None and made is None:
            return None
        found.append(made)
    own = [storage_address(one) for one, made in zip(results, found, strict=True) if made and made.of == _FRESH]
    return (kind, tuple(found)) if len({*own}) == len(own) and kind in (None, list, tuple) else None


def _described(result: Any, operands: list[FakeTensor], addresses: list[int]) -> _Made | None:
    """None for what is more than its shape."""
    if type(result) is not FakeTensor:
        return None
    itself = next((place for place, one in enumerate(operands) if one is result), None)
    address = storage_address(result)
    of = itself if itself is not None else addresses.index(address) if address in addresses else _FRESH
    made = _Made(
        of, itself is not None, tuple(result.shape), result.stride(), int(result.storage_offset()), result.dtype,
        result.fake_device, result.is_conj(), result.is_neg(),
    )  # fmt: skip
    if made.itself:
        return made
    if result.constant is not None or result.requires_grad or not _is_usual(result):
        return None
    if result.is_inference() != torch.is_inference_mode_enabled():  # a view is what it is of
        return None
    with torch._C._DisableTorchDispatch():
        like = torch.empty_strided(made.shape, made.strides, dtype=made.dtype, device="meta")
    usual, there = storage_of(like).nbytes(), storage_of(result).nbytes()
    if of == _FRESH:
        return made if not made.offset and there == usual else None
    return made if there >= usual + made.offset * made.dtype.itemsize else None  # of one that was made smaller


def _is_usual(tensor: FakeTensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor._is_zerotensor()


def _made_again(made: _Made, operands: list[FakeTensor]) -> FakeTensor:
    if made.itself:
        return operands[made.of]
    with torch._C._DisableTorchDispatch():
        plain = torch.empty_strided(made.shape, made.strides, dtype=made.dtype, device="meta")
        if made.of != _FRESH:
            plain.set_(storage_of(operands[made.of]), made.offset, made.shape, made.strides)
        if made.conjugated:
            torch._C._set_conj(plain, True)
        if made.negated:
            torch._C._set_neg(plain, True)
        return FakeTensor(operands[0].fake_mode, plain, made.device)
