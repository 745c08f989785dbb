"""Every op of torch's own op database, called on a few small samples."""

from __future__ import annotations

import functools
import itertools
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

LARGEST_SAMPLE = 1 << 18
"""Samples with more elements than this are left out: the audit looks at bits, not at speed."""

DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
"""Tried in this order; ops with none of them get any dtype that they have."""


class Case(NamedTuple):
    """One way to call one op on one sample."""

    name: str
    call: Callable[[], Any]


@functools.cache
def database() -> tuple[Any, ...]:
    """All entries of torch's op database, its foreach ops included."""
    if "expecttest" not in sys.modules:
        # Torch's helpers want it for the base class of tests that are not run here.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal import common_methods_invocations as invocations

    lists = ["op_db"] + [f"foreach_{kind}_op_db" for kind in ("unary", "binary", "pointwise", "reduce", "other")]
    return tuple(op for name in lists for op in getattr(invocations, name))


def dtypes_of(op: Any, most: int) -> list[torch.dtype]:
    supported = op.supported_dtypes("cpu")
    usual = [dtype for dtype in DTYPES if dtype in supported]
    return (usual or sorted(supported, key=str))[:most]


def cases(op: Any, dtype: torch.dtype, samples: int) -> Iterator[Case]:
    """The op, its gradient, its in-place form and its form with `out=`, on the first few samples."""
    differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    drawn = op.sample_inputs("cpu", dtype, requires_grad=differentiable)
    for sample in itertools.islice(filter(_small, drawn), samples):
        name = f"{op.name}{'.' if op.variant_test_name else ''}{op.variant_test_name}[{str(dtype)[6:]}]"
        yield Case(name, functools.partial(_forward_and_backward, op, sample))
        inplace = op.get_inplace() if hasattr(op, "get_inplace") else None
        if inplace is not None:
            yield Case(name + " in place", functools.partial(_in_place, inplace, sample))
        if getattr(op, "supports_out", False):
            yield Case(name + " out=", functools.partial(_with_out, op, sample))


def _small(sample: Any) -> bool:
    tensors = [leaf for leaf in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() for tensor in tensors) <= LARGEST_SAMPLE


def managed_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor over a storage that an op created, so that in-place ops on it have something to replay from."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return tensor
    whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return torch.as_strided(whole.clone(), tensor.shape, tensor.stride(), tensor.storage_offset())


def _copied(sample: Any) -> tuple[Any, Any, Any]:
    copied: tuple[Any, Any, Any] = tree_map_only(
        torch.Tensor, managed_copy, (sample.input, list(sample.args), dict(sample.kwargs))
    )
    return copied


def _forward_and_backward(op: Any, sample: Any) -> None:
    first, args, kwargs = _copied(sample)
    result = op.op(first, *args, **kwargs)
    outputs = [
        leaf for leaf in tree_leaves(result)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.layout is torch.strided
    ]  # fmt: skip
    if outputs:
        torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])


def _in_place(inplace: Any, sample: Any) -> None:
    first, args, kwargs = _copied(sample)
    with torch.no_grad():
        inplace(first, *args, **kwargs)


def _with_out(op: Any, sample: Any) -> None:
    with torch.no_grad():
        first, args, kwargs = _copied(sample)
        expected = op.op(first, *args, **kwargs)
        out = tree_map_only(torch.Tensor, lambda tensor: managed_copy(torch.zeros_like(tensor)), expected)
        op.op(first, *args, **kwargs, out=out)
