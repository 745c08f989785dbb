"""Every op of torch's own op database, and a few that training uses and the database leaves out, on small samples."""

from __future__ import annotations

import functools
import itertools
import sys
import types
import unittest
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

LARGEST_SAMPLE = 1 << 17
"""Samples with more elements than this are left out: the audit looks at bits, not at speed."""

MOST_SAMPLES = 128
"""So many of an op are made, and the largest of them taken."""

DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool, torch.bfloat16, torch.float16)
"""Tried in this order; ops with none of them get any dtype that they have."""


class Case(NamedTuple):
    """One way to call one op; a list that the call returns must be the same with and without the engine."""

    name: str
    call: Callable[[], object]


@functools.cache
def database() -> tuple[Any, ...]:
    """All entries of torch's op database, its foreach ops included."""
    if "expecttest" not in sys.modules:
        # Torch's helpers want it for the base class of tests that are not run here.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    with unittest.mock.patch.object(torch.backends, "disable_global_flags"):  # for the rest of the process
        from torch.testing._internal import common_methods_invocations as invocations

    lists = ["op_db"] + [f"foreach_{kind}_op_db" for kind in ("unary", "binary", "pointwise", "reduce", "other")]
    return tuple(op for name in lists for op in getattr(invocations, name))


def cases(op: Any, *, dtypes: int, samples: int) -> Iterator[Case]:
    """The op, its gradient, its in-place form and its form with `out=`: as many dtypes and samples as asked for."""
    supported = op.supported_dtypes("cpu")
    usual = [dtype for dtype in DTYPES if dtype in supported]
    for dtype in (usual or sorted(supported, key=str))[:dtypes]:
        name = ".".join(filter(None, (op.name, op.variant_test_name))) + f"[{str(dtype)[6:]}]"
        for sample in _largest(op, dtype, samples):
            yield Case(name, functools.partial(_forward_and_backward, op, sample))
            inplace = op.get_inplace() if hasattr(op, "get_inplace") else None
            if inplace is not None:
                yield Case(f"{name} in place", functools.partial(_in_place, inplace, sample))
            if getattr(op, "supports_out", False) and not op.name.startswith("_foreach"):
                yield Case(f"{name} out=", functools.partial(_with_out, op, sample))


def _largest(op: Any, dtype: torch.dtype, count: int) -> list[Any]:
    """The samples with most elements: the first are often empty."""
    differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    # Not `op.sample_inputs`, which looks at the whole stack for each sample.
    first = itertools.islice(op.sample_inputs_func(op, "cpu", dtype, differentiable), MOST_SAMPLES)
    return sorted(filter(fitting, first), key=elements, reverse=True)[:count]


def fitting(sample: Any) -> bool:
    """Whether it is not too large."""
    return elements(sample) <= LARGEST_SAMPLE


def elements(sample: Any) -> int:
    """Of all tensors of a sample."""
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor over a storage that an op created, so that in-place ops on it have something to replay from."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return tensor
    whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return torch.as_strided(whole.clone(), tensor.shape, tensor.stride(), tensor.storage_offset())


def _operands(sample: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    operands: tuple[Any, list[Any], dict[str, Any]] = tree_map_only(
        torch.Tensor, _fresh, (sample.input, list(sample.args), dict(sample.kwargs))
    )
    return operands


def _forward_and_backward(op: Any, sample: Any) -> None:
    first, args, kwargs = _operands(sample)
    _backward(op.op(first, *args, **kwargs))


def _backward(result: Any) -> None:
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    outputs = [tensor for tensor in tensors if tensor.requires_grad and tensor.layout is torch.strided]
    if outputs:
        torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])


def _in_place(inplace: Any, sample: Any) -> list[int]:
    """How often each operand was written, by autograd's count."""
    with torch.no_grad():
        first, args, kwargs = _operands(sample)
        inplace(first, *args, **kwargs)
    return [leaf._version for leaf in tree_leaves((first, args, kwargs)) if isinstance(leaf, torch.Tensor)]


def _with_out(op: Any, sample: Any) -> None:
    """Into tensors of the right size, and into empty ones that the op has to make larger."""
    with torch.no_grad():
        first, args, kwargs = _operands(sample)
        expected = op.op(first, *args, **kwargs)
        for prepare in (lambda t: _fresh(torch.zeros_like(t)), lambda t: torch.empty(0, dtype=t.dtype)):
            op.op(first, *args, **kwargs, out=tree_map_only(torch.Tensor, prepare, expected))


# ---------------------------------------------------------------------- what the database leaves out


def _optimized(kind: type[torch.optim.Optimizer], **options: Any) -> None:
    parameters = [nn.Parameter(torch.randn(4 + number, 3).clone()) for number in range(3)]
    optimizer = kind(parameters, lr=1e-2, **options)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()


def _scaled() -> None:
    parameter = nn.Parameter(torch.randn(6, 3).clone())
    optimizer, scaler = torch.optim.SGD([parameter], lr=1e-2), torch.amp.GradScaler("cpu")
    scaler.scale(parameter.square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def _recurrent(kind: str) -> None:
    network = getattr(nn, kind)(8, 16, num_layers=2, dropout=0.2)
    _backward(network(torch.randn(5, 3, 8, requires_grad=True)))


def _folded() -> None:
    columns = torch.randn(2, 36, 64, requires_grad=True)
    _backward(nn.functional.fold(columns * 1, (8, 8), 3, padding=1))
    _backward(nn.functional.unfold(torch.randn(2, 4, 8, 8, requires_grad=True) * 1, 3, padding=1))


def _views_in_one_list() -> None:
    halves = torch.randn(4, 6).clone().chunk(2)
    torch._foreach_add_(halves, 1.0)
    torch._foreach_mul_(halves, halves)


MORE = (
    *(
        Case(f"{kind.__name__} {options}", functools.partial(_optimized, kind, **options))
        for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD)
        for options in ({"fused": True}, {"foreach": True}, {"foreach": False})
    ),
    Case("SGD with momentum", lambda: _optimized(torch.optim.SGD, momentum=0.9, nesterov=True, fused=True)),
    Case("GradScaler", _scaled),
    Case("LSTM", lambda: _recurrent("LSTM")),
    Case("GRU", lambda: _recurrent("GRU")),
    Case("RNN", lambda: _recurrent("RNN")),
    Case("fold", _folded),
    Case("views in one list", _views_in_one_list),
    Case("unsafe_split", lambda: torch.unsafe_split(torch.randn(6, 4).clone(), 2)),
    Case("rrelu", lambda: _backward(nn.functional.rrelu(torch.randn(8, 8, requires_grad=True), training=True))),
    Case("repeat_interleave", lambda: torch.repeat_interleave(torch.arange(9))),
)
"""Ops of training that the database does not have."""
