"""Cheap upper bounds of the bytes that an op creates, from its arguments alone.

They are asked before nearly every op of a watched step, so each is a few multiplications. Near the budget a loose bound
sends the op the long way (`engine.run_short_of_room`), which takes several times as long. So where dtype and shapes
tell the size of a floating-point result the bound is that, and `_ODD_BYTES` more; elsewhere it allows for any dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Final

Bound = Callable[[Sequence[Any]], int | None]
"""Takes the positional arguments of a call; None where they are not of the usual kind."""

_Formula = Callable[[Sequence[Any]], int]
"""The same, and raises one of `_ODD_CALL` there."""

_ODD_BYTES: Final = 256
"""For what is rounded up, and for the odd scalar beside a result."""

_WIDEST: Final = 16
"""Bytes of an element of any dtype."""

_NUMBERS: Final = (int, float, bool)
_ODD_CALL: Final = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""What asking an argument of an unusual kind ends in: a nested tensor, a shape that is not given, a call that torch is
about to refuse."""


def _nothing(args: Sequence[Any]) -> int:
    return 0


# ---------------------------------------------------------------------------------------- one element for each element


def _of_any_dtype(args: Sequence[Any]) -> int:
    nbytes: int = args[0].numel() * _WIDEST + _ODD_BYTES
    return nbytes


def _like_first(args: Sequence[Any]) -> int:
    """Floating-point numbers give floating-point numbers of their kind."""
    first = args[0]
    nbytes: int = first.numel() * (first.itemsize if first.dtype.is_floating_point else _WIDEST)
    return nbytes + _ODD_BYTES


def _like_second(args: Sequence[Any]) -> int:
    """The gradient of what a backward has as its second argument."""
    nbytes: int = args[1].numel() * args[1].itemsize
    return nbytes + _ODD_BYTES


def _softmax(args: Sequence[Any]) -> int:
    """Of another dtype, where that is asked for."""
    first, widened = args[0], len(args) > 2 and bool(args[2])
    nbytes: int = first.numel() * (first.itemsize if first.dtype.is_floating_point and not widened else _WIDEST)
    return nbytes + _ODD_BYTES


def _with_mask(args: Sequence[Any]) -> int:
    """The result, and a boolean for each element."""
    first = args[0]
    nbytes: int = first.numel() * (first.itemsize + 1 if first.dtype.is_floating_point else _WIDEST)
    return nbytes + 2 * _ODD_BYTES


def _like_pair(args: Sequence[Any]) -> int:
    """Two tensors, or a tensor and a number, broadcast."""
    first, second = args[0], args[1]
    if type(second) in _NUMBERS:
        return _like_first(args)
    elements: int = first.numel() if second.shape == first.shape else _broadcast(first.shape, second.shape)
    alike = first.dtype is second.dtype and first.dtype.is_floating_point
    return elements * (first.itemsize if alike else _WIDEST) + _ODD_BYTES


def _compared(args: Sequence[Any]) -> int:
    """A boolean for each element."""
    first, second = args[0], args[1]
    if type(second) in _NUMBERS or second.shape == first.shape:
        return int(first.numel()) + _ODD_BYTES
    return _broadcast(first.shape, second.shape) + _ODD_BYTES


def _filled(args: Sequence[Any]) -> int:
    """The first tensor's kind, broadcast with a mask."""
    return _beside_mask(args) * int(args[0].itemsize) + _ODD_BYTES


def _scaled(args: Sequence[Any]) -> int:
    """The first tensor, broadcast with a mask and times a number."""
    first = args[0]
    return _beside_mask(args) * (first.itemsize if first.dtype.is_floating_point else _WIDEST) + _ODD_BYTES


def _beside_mask(args: Sequence[Any]) -> int:
    first, mask = args[0], args[1]
    return int(first.numel()) if mask.shape == first.shape else _broadcast(first.shape, mask.shape)


def _broadcast(one: Sequence[int], other: Sequence[int]) -> int:
    """Elements of two shapes broadcast; at least so many where torch refuses them."""
    pairs = zip_longest(reversed(one), reversed(other), fillvalue=1)
    return math.prod(max(left, right) for left, right in pairs)


# -------------------------------------------------------------------------------------------------------- fewer of them


def _reduced(args: Sequence[Any]) -> int:
    """Over some dimensions, or over all."""
    over = args[1] if len(args) > 1 else None
    if not over:  # none at all is all
        return _WIDEST + _ODD_BYTES
    shape = args[0].shape
    kept = (size for dim, size in enumerate(shape) if dim not in over and dim - len(shape) not in over)
    return int(math.prod(kept)) * _WIDEST + _ODD_BYTES


def _loss(args: Sequence[Any]) -> int:
    """One number for each target at most, and one more."""
    nbytes: int = args[1].numel() * args[0].itemsize
    return nbytes + 2 * _ODD_BYTES


def _layer_norm(args: Sequence[Any]) -> int:
    """The result, and the mean and deviation of every row, of at least float32."""
    first = args[0]
    rows = math.prod(first.shape[: -len(args[1])])
    nbytes: int = first.numel() * first.itemsize + rows * 2 * max(first.itemsize, 4)
    return nbytes + 3 * _ODD_BYTES


def _layer_norm_backward(args: Sequence[Any]) -> int:
    """Gradients of the input, the weight and the bias."""
    first = args[1]
    nbytes: int = first.numel() * first.itemsize + math.prod(args[2]) * 2 * 8
    return nbytes + 3 * _ODD_BYTES


def _group_norm(args: Sequence[Any]) -> int:
    """The result, and the mean and deviation of every group, of at least float32."""
    first = args[0]
    nbytes: int = first.numel() * first.itemsize + args[3] * args[6] * 2 * max(first.itemsize, 4)
    return nbytes + 3 * _ODD_BYTES


def _batch_norm(args: Sequence[Any]) -> int:
    """The result, and the mean and deviation of every channel, of at least float32."""
    first = args[0]
    nbytes: int = first.numel() * first.itemsize + first.shape[1] * 2 * 8
    return nbytes + 3 * _ODD_BYTES


def _batch_norm_backward(args: Sequence[Any]) -> int:
    """Gradients of the input, the weight and the bias."""
    return _normalised_backward(args[1], channels=args[1].shape[1])


def _group_norm_backward(args: Sequence[Any]) -> int:
    """The same; torch takes the input for so many channels, whatever its shape."""
    return _normalised_backward(args[1], channels=args[6])


def _normalised_backward(image: Any, channels: int) -> int:
    nbytes: int = image.numel() * image.itemsize + channels * 2 * 8
    return nbytes + 3 * _ODD_BYTES


# ------------------------------------------------------------------------------------------------------------- products


def _matrix_product(args: Sequence[Any]) -> int:
    (rows, _), (_, columns) = args[-2].shape, args[-1].shape  # unless the last argument is a dtype
    nbytes: int = rows * columns * args[-2].itemsize
    return nbytes + _ODD_BYTES


def _batched_product(args: Sequence[Any]) -> int:
    (batch, rows, _), (_, _, columns) = args[-2].shape, args[-1].shape
    nbytes: int = batch * rows * columns * args[-2].itemsize
    return nbytes + _ODD_BYTES


def _convolution(args: Sequence[Any]) -> int:
    image, weight, _, stride, padding, dilation, transposed, beside, groups = args[:9]
    elements = image.shape[0] * (weight.shape[1] * groups if transposed else weight.shape[0])
    for dim, size in enumerate(image.shape[2:]):
        step, around, apart = (each[dim if len(each) > 1 else 0] for each in (stride, padding, dilation))
        reach = apart * (weight.shape[dim + 2] - 1)
        if transposed:
            more = beside[dim if len(beside) > 1 else 0]
            elements *= max((size - 1) * step - 2 * around + reach + more + 1, 0)
        else:
            elements *= max((size + 2 * around - reach - 1) // step + 1, 0)
    return int(elements * image.itemsize) + _ODD_BYTES


def _convolution_backward(args: Sequence[Any]) -> int:
    """Gradients of the input, the weight and the bias."""
    gradient, image, weight = args[:3]
    elements = image.numel() + weight.numel() + gradient.shape[1]
    nbytes: int = elements * image.itemsize + 3 * _ODD_BYTES
    return nbytes


# ----------------------------------------------------------------------------------------------- pooling and looking up


def _pooled(args: Sequence[Any]) -> int:
    """The largest of every window and where it was, for windows at one place more than there may be."""
    image, kernel = args[0], args[1]
    stride = (args[2] if len(args) > 2 else None) or kernel
    padding = (args[3] if len(args) > 3 else None) or [0]
    elements = math.prod(image.shape[:-2])
    for dim, size in enumerate(image.shape[-2:]):
        step, around, window = (each[dim if len(each) > 1 else 0] for each in (stride, padding, kernel))
        elements *= max((size + 2 * around - window) // step, 0) + 2
    return int(elements * (image.itemsize + 8)) + 2 * _ODD_BYTES


def _new(args: Sequence[Any]) -> int:
    """The first argument is the shape, and the dtype may be any."""
    return int(math.prod(args[0])) * _WIDEST + _ODD_BYTES


def _of_shape(args: Sequence[Any]) -> int:
    """The second argument is its shape."""
    nbytes: int = math.prod(args[1]) * args[0].itemsize
    return nbytes + _ODD_BYTES


def _resampled(args: Sequence[Any]) -> int:
    """Every image in another size, if that is given."""
    return int(math.prod(args[0].shape[:-2]) * math.prod(args[1]) * args[0].itemsize) + _ODD_BYTES


def _resampled_backward(args: Sequence[Any]) -> int:
    """The third argument is the shape."""
    return int(math.prod(args[2]) * args[0].itemsize) + _ODD_BYTES


def _embedding(args: Sequence[Any]) -> int:
    """A row for each index."""
    table = args[0]
    nbytes: int = args[1].numel() * table.shape[-1] * table.itemsize
    return nbytes + _ODD_BYTES


def _embedding_backward(args: Sequence[Any]) -> int:
    """As many rows as the third argument says."""
    nbytes: int = args[2] * args[0].shape[-1] * args[0].itemsize
    return nbytes + _ODD_BYTES


_OF_ANY_DTYPE: Final = (
    "_to_copy", "bernoulli", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "abs",
    "logical_not", "isnan",
)  # fmt: skip
_LIKE_FIRST: Final = (
    "clone", "relu", "gelu", "tanh", "sigmoid", "silu", "exp", "log", "neg", "sqrt", "rsqrt", "reciprocal", "sin",
    "cos", "erf", "hardtanh", "leaky_relu", "_softmax_backward_data", "_log_softmax_backward_data", "tril", "triu",
)  # fmt: skip
_SOFTMAX: Final = ("_softmax", "_log_softmax", "_safe_softmax")
_LIKE_PAIR: Final = (
    "add", "sub", "mul", "div", "maximum", "minimum", "gelu_backward", "threshold_backward", "tanh_backward",
    "sigmoid_backward", "silu_backward",
)  # fmt: skip
_COMPARED: Final = ("eq", "ne", "lt", "le", "gt", "ge")
_LIKE_SECOND: Final = (
    "max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward", "nll_loss_backward",
    "nll_loss2d_backward",
)  # fmt: skip

_FORMULAS: Final[Mapping[str, _Formula]] = MappingProxyType(
    {
        f"aten::{name}": formula
        for names, formula in (
            (_OF_ANY_DTYPE, _of_any_dtype),
            (_LIKE_FIRST, _like_first),
            (_SOFTMAX, _softmax),
            (_LIKE_PAIR, _like_pair),
            (_COMPARED, _compared),
            (_LIKE_SECOND, _like_second),
            (("empty", "zeros", "ones", "full", "rand", "randn"), _new),
            (("nll_loss_forward", "nll_loss2d_forward"), _loss),
            (("native_dropout",), _with_mask),
            (("masked_fill",), _filled),
            (("native_dropout_backward",), _scaled),
            (("sum", "mean"), _reduced),
            (("native_layer_norm",), _layer_norm),
            (("native_layer_norm_backward",), _layer_norm_backward),
            (("native_batch_norm", "_native_batch_norm_legit"), _batch_norm),
            (("native_group_norm",), _group_norm),
            (("native_batch_norm_backward",), _batch_norm_backward),
            (("native_group_norm_backward",), _group_norm_backward),
            (("mm", "addmm"), _matrix_product),
            (("bmm", "baddbmm"), _batched_product),
            (("convolution",), _convolution),
            (("convolution_backward",), _convolution_backward),
            (("max_pool2d_with_indices",), _pooled),
            (("select_backward", "slice_backward"), _of_shape),
            (("upsample_nearest2d", "_adaptive_avg_pool2d"), _resampled),
            (("upsample_nearest2d_backward",), _resampled_backward),
            (("embedding",), _embedding),
            (("embedding_dense_backward",), _embedding_backward),
        )
        for name in names
    }
)

_LOOSE: Final = frozenset({_of_any_dtype, _new, _reduced})
_SAFETY: Final = 4
"""How many times the size of a float32 result their bounds are."""


def _careful(formula: _Formula) -> Bound:
    def bound(args: Sequence[Any]) -> int | None:
        try:
            return formula(args)
        except _ODD_CALL:
            return None

    return bound


BOUNDS: Final[Mapping[str, Bound]] = MappingProxyType({name: _careful(found) for name, found in _FORMULAS.items()})
"""By op. One without a bound is asked for its exact size (`Sizes`)."""


def bound_of(name: str, creates: bool) -> tuple[Bound | None, int]:
    """The bound of an op, and how many times the likely size that is."""
    if not creates:
        return _nothing, 1
    return BOUNDS.get(name), _SAFETY if _FORMULAS.get(name) in _LOOSE else 1
