"""Shorter ways to call the ops that a step makes most often.

torch's own Python functions parse their arguments faster than an `OpOverload`, which matches them against its schema
one by one. A function is of use only where it surely arrives at the very same overload with the same arguments: every
line below is checked by `tests/cpu/test_bindings.py`. Everything else is called as it came.

Methods are taken from `TensorBase` (what `torch_patches` replaces stands on `Tensor`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

Binding = Callable[..., Any]

_FUNCTIONS: Final = (
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "mm", "bmm", "addmm", "baddbmm", "sqrt", "rsqrt", "exp",
    "log", "neg", "relu", "tanh", "sigmoid", "clone", "t", "detach", "transpose.int", "select.int", "unsqueeze",
    "squeeze.dim", "permute", "native_layer_norm", "sum.dim_IntList", "mean.dim", "native_dropout", "_softmax",
    "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "maximum", "minimum", "addcmul", "addcdiv",
)  # fmt: skip
"""Functions of `torch` with the name of their op."""

_METHODS: Final = (
    "view", "expand", "add_.Tensor", "sub_.Tensor", "mul_.Tensor", "div_.Tensor", "lerp_.Scalar", "addcmul_",
    "addcdiv_", "zero_", "sqrt_",
)  # fmt: skip
"""Methods of tensors with the name of their op."""

WITH_KEYWORDS: Final = frozenset({"aten::addcmul_", "aten::addcdiv_", "aten::clone"})
"""Overloads whose binding takes their keywords too (`value`, `memory_format`)."""


def _name(overload: str) -> str:
    return overload.partition(".")[0]


BINDINGS: Final[Mapping[str, Binding]] = MappingProxyType(
    {f"aten::{overload}": getattr(torch._C._VariableFunctions, _name(overload)) for overload in _FUNCTIONS}
    | {f"aten::{overload}": getattr(torch._C.TensorBase, _name(overload)) for overload in _METHODS}
)
"""By `OpOverload.name()`: what to call with the same positional arguments."""


def quickest_call(func: Any) -> tuple[Binding, Binding]:
    """What calls `func` most cheaply: with positional arguments alone, and with keywords."""
    name = func.name()
    binding = BINDINGS.get(name, func._op)
    return binding, (binding if name in WITH_KEYWORDS else func._op)
