"""How much an op computes and how many bytes it reads and writes: small formulas in two registries, by op.

Floating-point operations are counted by torch's flop counter; what it lacks stands here. Bytes are by default those of
all tensors that go in and come out, a written one both ways, broadcast dimensions once. Ops that look at a part of what
they are given, or at nothing of it, have a formula of their own. Bytes are what has to be moved at least, by an op that
keeps nothing in caches and reads nothing twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch.utils import flop_counter

from spillway.engines.tensors.cpu_machine import tensors_of
from spillway.engines.tensors.ops import UNINITIALISED, OpInfo
from spillway.units import Bytes

Formula = Callable[[Sequence[Any], Mapping[str, Any], Any], int]
"""Takes the arguments of a call, its keywords and its result."""

TRAFFIC: Final[dict[str, Formula]] = {}
"""Bytes read and written, by the name of an op's schema, where that is not the sum of all tensors."""
FLOPS: Final[dict[str, Formula]] = {}
"""Floating-point operations, by the name of an op's schema, where torch's flop counter has none."""


def register(registry: dict[str, Formula], *names: str) -> Callable[[Formula], Formula]:
    """To be called with the formula of those ops. Raises ValueError for an op that has one."""

    def remember(formula: Formula) -> Formula:
        for name in names:
            if f"aten::{name}" in registry:
                raise ValueError(f"aten::{name} has a formula already")
            registry[f"aten::{name}"] = formula
        return formula

    return remember


def traffic_of(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Bytes:
    """Bytes that a call has read and written; 0 for a view."""
    if info.view or info.name in UNINITIALISED:
        return 0
    formula = TRAFFIC.get(info.name)
    if formula is not None:
        return formula(args, kwargs, out)
    given = [(argument.name, value) for argument, value in zip(info.func._schema.arguments, args, strict=False)]
    given += kwargs.items()
    scratch = {info.func._schema.arguments[place].name for place in info.scratch if info.trains(args)}
    total, inputs = 0, set()
    for name, value in given:
        written = name in info.schema_writes or name in scratch
        for tensor in tensors_of(value):
            inputs.add(id(tensor))
            total += nbytes(tensor) * (2 if written else 1)
    return total + sum(nbytes(tensor) for tensor in tensors_of(out) if id(tensor) not in inputs)


def flops_of(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Floating-point operations of a call; 0 where nobody counts them."""
    formula = FLOPS.get(info.name)
    if formula is not None:
        return formula(args, kwargs, out)
    count = flop_counter.flop_registry.get(info.func._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def shape_of(info: OpInfo, args: Sequence[Any], out: Any) -> tuple[int, ...]:
    """`Op.shape` of a call: what its speed depends on beside operations and bytes."""
    match info.name.removeprefix("aten::"):
        case "mm" | "bmm" | "addmm" | "baddbmm" as name:  # behind the two may stand the type of the result
            one, other = args[1:3] if "add" in name else args[:2]
            return (int(one.shape[:-2].numel()), int(one.shape[-2]), int(other.shape[-1]), int(one.shape[-1]))
        case "convolution":
            image, weight, made, options = args[0], args[1], out, args[3:9]
        case "convolution_backward":  # beside the bias stand its sizes, not the bias
            image, weight, made, options = args[1], args[2], args[0], args[4:10]
        case (
            "native_batch_norm" | "_native_batch_norm_legit" | "cudnn_batch_norm" | "cudnn_batch_norm_backward"
            | "miopen_batch_norm" | "miopen_batch_norm_backward"
        ):  # fmt: skip
            return (int(args[0].shape[1]),)
        case "native_batch_norm_backward":
            return (int(args[1].shape[1]),)
        case _:
            return ()
    stride, _, _, transposed, _, groups = options
    if transposed:  # the same convolution the other way round
        image, made = made, image
    *rest, width = map(int, weight.shape[2:])
    window = (math.prod(rest), width)
    places, steps = math.prod(map(int, made.shape[2:])), int(math.prod(stride[: len(rest)]))
    return (int(image.shape[0]), int(image.shape[1]), int(made.shape[1]), places, *window, steps, int(groups))


def nbytes(tensor: Any) -> Bytes:
    """Bytes that a tensor looks at in its storage: a dimension that repeats the same element counts once."""
    if not isinstance(tensor, torch.Tensor):
        return 0
    if tensor.layout is not torch.strided:
        return int(tensor.numel()) * tensor.element_size()
    elements = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= int(length) if stride or not length else 1
    return elements * tensor.element_size()


def _results(out: Any) -> Bytes:
    return sum(map(nbytes, tensors_of(out)))


register(
    TRAFFIC, "zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
    "new_full", "zero_", "fill_", "scalar_tensor", "eye", "linspace", "bernoulli_", "uniform_", "normal_",
    "random_", "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "exponential_",
    "tril_indices", "triu_indices",
)(lambda args, kwargs, out: _results(out))  # fmt: skip
register(TRAFFIC, "copy_")(lambda args, kwargs, out: nbytes(args[1]) + nbytes(args[0]))
# What is looked up: indices, and as much as they pick, read and written.
register(TRAFFIC, "embedding")(lambda args, kwargs, out: nbytes(args[1]) + 2 * nbytes(out))
register(TRAFFIC, "index_select", "gather")(lambda args, kwargs, out: nbytes(args[2]) + 2 * nbytes(out))
register(TRAFFIC, "index")(lambda args, kwargs, out: sum(map(nbytes, args[1])) + 2 * nbytes(out))
register(TRAFFIC, "nll_loss_forward", "nll_loss2d_forward")(  # of every row of scores one, by its label
    lambda args, kwargs, out: nbytes(args[1]) + int(args[1].numel() * args[0].element_size()) + _results(out)
)
register(TRAFFIC, "nll_loss_backward", "nll_loss2d_backward")(
    lambda args, kwargs, out: nbytes(args[0]) + nbytes(args[2]) + _results(out)
)
register(TRAFFIC, "_local_scalar_dense")(lambda args, kwargs, out: int(args[0].element_size()))
register(FLOPS, "_scaled_dot_product_flash_attention_for_cpu")(
    lambda args, kwargs, out: int(cast(Any, flop_counter).sdpa_flop_count(*(one.shape for one in args[:3])))
)
register(FLOPS, "_scaled_dot_product_flash_attention_for_cpu_backward")(
    lambda args, kwargs, out: int(cast(Any, flop_counter).sdpa_backward_flop_count(*(one.shape for one in args[:4])))
)
