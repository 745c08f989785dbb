"""Seconds of an op from what it computes and what it moves: a share of the roofline (Williams et al. 2009) per kind.

    seconds = max(flops / (compute share * device's rate), traffic / (memory share * its bandwidth)) + launch

The shares of `SHARES` are for eager fp32 kernels on the GPUs of `DEVICES`. `benchmarks.calibration` finds those of a
machine from steps that were measured on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeAlias, final

from spillway.costs.device import Device
from spillway.errors import UsageError
from spillway.ir.step import Op, Step
from spillway.units import Bytes, Seconds


@final
class OpKind(StrEnum):
    """Ops that get a similar share of what a device could do."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    NORM = "norm"
    SOFTMAX = "softmax"
    RANDOM = "random"
    POOL = "pool"
    INDEX = "index"
    REDUCE = "reduce"
    COPY = "copy"
    OPTIMIZER = "optimizer"
    TRANSCENDENTAL = "transcendental"
    """Elementwise, with exponentials and the like: on CPUs bound by arithmetic that nobody counts."""
    ELEMENTWISE = "elementwise"
    NOTHING = "nothing"
    """Views, and whatever else neither computes nor moves anything."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a kind of op gets of a device. Raises UsageError when built if a share is not above 0, or launch below 0.

    Shares above 1 are possible: caches are faster than the memory behind them.
    """

    compute: float
    """Of `Device.flops_per_second`."""
    memory: float
    """Of `Device.bytes_per_second`."""
    launch: float = 1.0
    """Multiples of `Device.op_seconds` that every op takes besides."""

    def __post_init__(self) -> None:
        if not (0 < self.compute < math.inf and 0 < self.memory < math.inf and 0 <= self.launch < math.inf):
            raise UsageError(f"Shares of a device are above 0, and launches 0 or more; got {self!r}.")


Shares: TypeAlias = Mapping[OpKind, Share]
"""A share for every kind of op."""

SHARES: Final[Shares] = MappingProxyType(
    {
        OpKind.MATMUL: Share(compute=0.75, memory=0.70),
        OpKind.ATTENTION: Share(compute=0.50, memory=0.60),
        OpKind.CONVOLUTION: Share(compute=0.55, memory=0.60),
        OpKind.NORM: Share(compute=0.50, memory=0.40),
        OpKind.SOFTMAX: Share(compute=0.50, memory=0.50),
        OpKind.RANDOM: Share(compute=0.50, memory=0.55),
        OpKind.POOL: Share(compute=0.50, memory=0.30),
        OpKind.INDEX: Share(compute=0.50, memory=0.30),
        OpKind.REDUCE: Share(compute=0.50, memory=0.50),
        OpKind.COPY: Share(compute=0.50, memory=0.70),
        OpKind.OPTIMIZER: Share(compute=0.50, memory=0.70),
        OpKind.TRANSCENDENTAL: Share(compute=0.50, memory=0.55),
        OpKind.ELEMENTWISE: Share(compute=0.50, memory=0.55),
        OpKind.NOTHING: Share(compute=1.00, memory=1.00, launch=0.0),
    }
)
"""Of memory: chosen among what single ops of DTR's published logs reach of a Titan V's 653 GB/s (DenseNet-121,
Inception v4, U-Net and a transformer; storages of 8 MB and more). They spread widely within a kind, softmax from 0.31
to 0.87, so that some of these are judgment. Of compute, and for attention, index, copy and optimizer: assumed. Views
take no time of the device."""

_BEGINNINGS: Final[tuple[tuple[OpKind, tuple[str, ...]], ...]] = (
    (OpKind.ATTENTION, ("_scaled_dot_product", "scaled_dot_product", "_flash_attention", "_efficient_attention")),
    (OpKind.MATMUL, ("mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul", "linear", "mv", "addmv", "dot", "vdot",
                     "_addmm", "_scaled_mm", "mkldnn_linear", "mkldnn_rnn", "_cudnn_rnn")),
    (OpKind.CONVOLUTION, ("convolution", "cudnn_convolution", "mkldnn_convolution", "_convolution", "conv1d", "conv2d",
                          "conv3d", "conv_", "_slow_conv", "slow_conv", "thnn_conv", "_conv_depthwise",
                          "miopen_convolution")),
    (OpKind.NORM, ("native_batch_norm", "_native_batch_norm", "batch_norm", "cudnn_batch_norm", "native_layer_norm",
                   "layer_norm", "native_group_norm", "group_norm", "_batch_norm", "_fused_rms_norm", "rms_norm",
                   "miopen_batch_norm")),
    (OpKind.SOFTMAX, ("_softmax", "softmax", "_log_softmax", "log_softmax", "logsumexp", "_safe_softmax")),
    (OpKind.RANDOM, ("native_dropout", "_fused_dropout", "_fused_droupout", "_masked_scale", "bernoulli", "rand",
                     "randn", "randint", "randperm", "normal", "uniform", "exponential", "multinomial")),
    (OpKind.POOL, ("max_pool", "avg_pool", "adaptive_", "_adaptive_", "upsample", "_upsample", "mean_pool")),
    (OpKind.INDEX, ("embedding", "_embedding", "index", "_index", "_unsafe_index", "gather", "scatter", "take", "topk",
                    "sort", "nll_loss", "unique", "nonzero", "masked_select")),
    (OpKind.REDUCE, ("sum", "mean", "var", "std", "norm", "linalg_vector_norm", "amax", "amin", "argmax", "argmin",
                     "max", "min", "prod", "any", "all", "cumsum", "mse_loss", "_foreach_norm")),
    (OpKind.COPY, ("clone", "copy", "_to_copy", "cat", "_cat", "stack", "constant_pad", "fill", "zero", "zeros", "ones",
                   "full", "arange", "empty", "new_", "roll", "flip", "repeat", "lift_fresh", "contiguous",
                   "_reshape_copy", "select_backward", "slice_backward", "im2col", "col2im", "unfold_backward")),
    (OpKind.TRANSCENDENTAL, ("gelu", "tanh", "sigmoid", "silu", "exp", "expm1", "erf", "log", "log1p", "pow",
                             "softplus", "mish", "elu", "sin", "cos", "log_sigmoid", "logit")),
    (OpKind.OPTIMIZER, ("_foreach_", "_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")),
)  # fmt: skip
"""How the names of a kind begin; the longest beginning that fits decides. What begins like none is elementwise."""


def kind_of(op: Op) -> OpKind:
    """What kind of op it is, by its name: `aten.mm.default`, or `mm` alone as other recorders write it."""
    if not op.flops and not op.traffic and not op.creates:
        return OpKind.NOTHING
    _, dot, rest = op.name.partition(".")
    name = (rest if dot else op.name).partition(".")[0].removesuffix("_")
    fitting = [
        (len(beginning), kind) for kind, beginnings in _BEGINNINGS for beginning in beginnings if _fits(name, beginning)
    ]
    return max(fitting)[1] if fitting else OpKind.ELEMENTWISE


def _fits(name: str, beginning: str) -> bool:
    """Whether the name begins so, and a word of it ends there."""
    rest = name[len(beginning) :]
    return name.startswith(beginning) and (not rest or beginning.endswith("_") or not rest[0].isalpha())


def work_of(step: Step, op: Op) -> tuple[int, Bytes]:
    """Operations and bytes of traffic: as recorded, or where nobody counted bytes, those of all storages it touches."""
    if op.traffic or not op.creates:
        return op.flops, op.traffic
    storages = [step.values[number].storage for number in (*op.reads, *op.creates)]
    return op.flops, sum(step.storages[number].nbytes for number in storages)


def modelled(step: Step, op: Op, device: Device, shares: Shares = SHARES) -> Seconds:
    """Seconds of one op of the step on the device, nothing else running."""
    flops, traffic = work_of(step, op)
    return work_seconds(shares[kind_of(op)], flops, traffic, device)


def work_seconds(share: Share, flops: int, traffic: Bytes, device: Device) -> Seconds:
    """Seconds of an op that gets that share of the device."""
    computing = flops / (share.compute * device.flops_per_second)
    moving = traffic / (share.memory * device.bytes_per_second)
    return max(computing, moving) + share.launch * device.op_seconds


def timed(step: Step, device: Device, *, shares: Shares = SHARES, keep_measured: bool = False) -> Step:
    """The same step with the seconds that each op would take on the device.

    Args:
        shares: What each kind of op gets of the device.
        keep_measured: Leave the seconds of ops that have some, as when the step was measured on this device.

    Raises:
        UsageError: `shares` lacks a kind.
    """
    missing = [kind for kind in OpKind if kind not in shares]
    if missing:
        raise UsageError(f"Shares are needed for every kind of op; {', '.join(missing)} is missing.")

    def seconds(op: Op) -> Seconds:
        kept = op.seconds if keep_measured else None
        return modelled(step, op, device, shares) if kept is None else kept

    return replace(step, ops=tuple(replace(op, seconds=seconds(op)) for op in step.ops))


def step_seconds(step: Step) -> Seconds:
    """Seconds of all ops in a row: the compute of a step from which nothing is missing.

    Raises UsageError if an op has no seconds.
    """
    for op in step.ops:
        if op.seconds is None:
            raise UsageError(f"{op.label} has no seconds: measure the step, or model it with costs.timed.")
    return math.fsum(op.seconds or 0.0 for op in step.ops)
