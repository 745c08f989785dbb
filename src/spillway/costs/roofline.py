"""Seconds of an op from what it computes and what it moves: a share of the roofline (Williams et al. 2009) per kind.

    seconds = max(flops / (compute share * fill * device's rate), traffic / (memory share * its bandwidth)) + launch

The fill is how far the op's shape lets the device work (`Efficiency`). What `PUBLISHED` has is fitted to published
measurements (`papers/costs`); `spillway calibrate` finds it for a machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias, final

import numpy
from numpy.typing import NDArray

from spillway.costs.device import Device
from spillway.costs.efficiency import Efficiency, OpKind, Share
from spillway.errors import UsageError
from spillway.ir.step import Op, Phase, Step
from spillway.units import Bytes, Seconds

Floats: TypeAlias = NDArray[numpy.float64]
_LEAST: Final = 1e-9
IN_LOOPS: Final = 0.15
"""Of the host's seconds for an op, what an optimizer's takes, with no module and no autograd around it. Assumed."""

PUBLISHED: Final = Efficiency(
    shares={
        OpKind.MATMUL: Share(compute=1.05, memory=0.70, half=0.57),
        OpKind.BATCHED: Share(compute=0.49, memory=0.62),
        OpKind.ATTENTION: Share(compute=0.50, memory=0.60),
        OpKind.CONVOLUTION: Share(compute=1.04, memory=0.70, half=0.57),
        OpKind.CONVOLUTION_BACKWARD: Share(compute=0.82, memory=0.57, half=0.57),
        OpKind.WINOGRAD: Share(compute=1.97, memory=0.70),
        OpKind.WINOGRAD_BACKWARD: Share(compute=1.55, memory=0.70),
        OpKind.STRIDED: Share(compute=0.87, memory=0.70, half=0.57),
        OpKind.STRIDED_BACKWARD: Share(compute=0.58, memory=0.70),
        OpKind.DEPTHWISE: Share(compute=0.10, memory=0.50),
        OpKind.DEPTHWISE_BACKWARD: Share(compute=0.05, memory=0.30),
        OpKind.NORM: Share(compute=0.50, memory=0.59),
        OpKind.NORM_BACKWARD: Share(compute=0.50, memory=0.57),
        OpKind.LAYER_NORM_BACKWARD: Share(compute=0.50, memory=0.41),
        OpKind.SOFTMAX: Share(compute=0.50, memory=0.79),
        OpKind.SOFTMAX_BACKWARD: Share(compute=0.50, memory=0.65),
        OpKind.RANDOM: Share(compute=0.50, memory=0.87),
        OpKind.POOL: Share(compute=0.50, memory=0.46),
        OpKind.POOL_BACKWARD: Share(compute=0.50, memory=0.46),
        OpKind.INDEX: Share(compute=0.50, memory=0.50),
        OpKind.REDUCE: Share(compute=0.50, memory=0.75),
        OpKind.COPY: Share(compute=0.50, memory=0.75),
        OpKind.OPTIMIZER: Share(compute=0.50, memory=0.80),
        OpKind.TRANSCENDENTAL: Share(compute=0.50, memory=0.85),
        OpKind.ELEMENTWISE: Share(compute=0.50, memory=0.90),
        OpKind.NOTHING: Share(compute=1.00, memory=1.00, launch=0.0),
    },
    columns=23.0, inner=19.0, waves=0.60, winograd_columns=23.0, winograd_inner=20.0, channels=17.0,
    step_spread=(0.77, 1.30), extra_spread=(0.33, 3.04),
    source="single ops of DTR's logs on a Titan V, plain steps of PAPAYA's models on a V100",
)  # fmt: skip
"""Of GPUs in general, as `python -m papers costs_ops costs_plain` finds it. Assumed, because nobody measured them:
attention, depthwise convolutions, indices, lists of an optimizer, exponentials, and what norms and the like compute."""


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


_BACKWARDS: Final = MappingProxyType(
    {
        OpKind.SOFTMAX: OpKind.SOFTMAX_BACKWARD, OpKind.POOL: OpKind.POOL_BACKWARD,
        OpKind.NORM: OpKind.NORM_BACKWARD, OpKind.CONVOLUTION: OpKind.CONVOLUTION_BACKWARD,
        OpKind.WINOGRAD: OpKind.WINOGRAD_BACKWARD, OpKind.STRIDED: OpKind.STRIDED_BACKWARD,
        OpKind.DEPTHWISE: OpKind.DEPTHWISE_BACKWARD,
    }
)  # fmt: skip
"""Kinds whose backward is a kernel of its own."""
_BATCHED: Final = ("bmm", "baddbmm", "addbmm")
_LAYER_NORMS: Final = ("native_layer_norm_backward", "layer_norm_backward")
_HALVES: Final = ("float16", "bfloat16")
_ROWS: Final = 128
_COLUMNS: Final = 64
"""Of a block of a product that a multiprocessor works on."""


def kind_of(op: Op) -> OpKind:
    """What kind of op it is, by its name, `aten.mm.default` or `mm` alone as others write it, and by its shape."""
    if not op.flops and not op.traffic and not op.creates:
        return OpKind.NOTHING
    _, dot, rest = op.name.partition(".")
    name = (rest if dot else op.name).partition(".")[0].removesuffix("_")
    fitting = [
        (len(beginning), kind) for kind, beginnings in _BEGINNINGS for beginning in beginnings if _fits(name, beginning)
    ]
    kind = max(fitting)[1] if fitting else OpKind.ELEMENTWISE
    if name in _BATCHED:
        kind = OpKind.BATCHED
    if kind is OpKind.CONVOLUTION and len(op.shape) == len(Convolution._fields):
        there = Convolution(*op.shape)
        if there.groups > 1 and there.groups == there.channels:
            kind = OpKind.DEPTHWISE
        elif there.stride > 1:
            kind = OpKind.STRIDED
        elif (there.height, there.width, there.groups) == (3, 3, 1):
            kind = OpKind.WINOGRAD
    if name in _LAYER_NORMS:
        return OpKind.LAYER_NORM_BACKWARD
    return _BACKWARDS.get(kind, kind) if "backward" in name else kind


def _fits(name: str, beginning: str) -> bool:
    """Whether the name begins so, and a word of it ends there."""
    rest = name[len(beginning) :]
    return name.startswith(beginning) and (not rest or beginning.endswith("_") or not rest[0].isalpha())


@final
class Convolution(NamedTuple):
    """The shape of a convolution, see `Op.shape`."""

    samples: int
    channels: int
    results: int
    places: int
    height: int
    width: int
    stride: int
    groups: int


@final
class Work(NamedTuple):
    """What an op does. As a product of matrices, for what is one: `products` of [rows, inner] and [inner, columns]."""

    kind: OpKind
    flops: int
    traffic: Bytes
    half: bool = False
    products: int = 0
    rows: int = 0
    columns: int = 0
    inner: int = 0
    window: int = 1
    """Of `inner`, what the window of a convolution has of it."""
    channels: int = 0
    """Of a batch norm."""


def work_of(step: Step, op: Op) -> Work:
    """Operations and bytes of traffic as recorded, or where nobody counted bytes, those of all storages it touches."""
    kind, traffic = kind_of(op), op.traffic
    if not traffic and op.creates:
        storages = [step.values[number].storage for number in (*op.reads, *op.creates)]
        traffic = sum(step.storages[number].nbytes for number in storages)
    half = bool(op.flops) and any(
        step.storages[step.values[number].storage].dtype in _HALVES for number in (*op.creates, *op.reads)[:1]
    )
    work = Work(kind, op.flops, traffic, half)
    match op.shape:
        case (channels,):
            return work._replace(channels=channels)
        case (products, rows, columns, inner):
            return work._replace(products=products, rows=rows, columns=columns, inner=inner)
        case (_, _, _, _, _, _, _, _) as shape if kind not in (OpKind.DEPTHWISE, OpKind.DEPTHWISE_BACKWARD):
            there = Convolution(*shape)
            window, groups = there.height * there.width, max(there.groups, 1)
            return work._replace(
                products=groups, rows=there.samples * there.places, columns=there.results // groups,
                inner=there.channels // groups * window, window=window,
            )  # fmt: skip
    return work


def seconds_of(works: Sequence[Work], device: Device) -> Floats:
    """[works] Seconds of ops on the device, nothing else running."""
    return Reckoned(works, device).seconds(device.efficiency or PUBLISHED)


@final
class Reckoned:
    """Works as columns, so that many efficiencies can be tried on them."""

    def __init__(self, works: Sequence[Work], device: Device) -> None:
        self._device, self.kinds = device, sorted({work.kind for work in works})
        places = {kind: place for place, kind in enumerate(self.kinds)}
        self._places = numpy.array([places[work.kind] for work in works], dtype=int)
        self._numbers = (
            numpy.array([work[1:] for work in works], dtype=float).reshape(len(works), len(Work._fields) - 1).T
        )
        _, _, half, products, rows, columns, *_ = self._numbers
        self._half = half > 0
        blocks = products * numpy.ceil(rows / _ROWS) * numpy.ceil(columns / _COLUMNS)
        self._waves = blocks / (device.multiprocessors or 1)
        self._winograd = numpy.array([kind in _DIRECTLY for kind in self.kinds], dtype=bool)[self._places]

    def seconds(self, by: Efficiency) -> Floats:
        """[works] Seconds, launches included."""
        flops, traffic, _, _, _, columns, inner, window, channels = self._numbers
        device = self._device
        shares = [by.shares[kind] for kind in self.kinds]
        given = {name: self._of(shares, name) for name in ("compute", "memory", "half", "launch")}
        rates = given["compute"] * device.flops_per_second
        if device.half_flops_per_second is not None:
            rates = numpy.where(self._half, given["half"] * device.half_flops_per_second, rates)
        full = _filled(self._waves, by.waves if device.multiprocessors else 0.0)
        direct = _filled(columns, by.columns) * _filled(inner, by.inner) * full
        computing = flops / (rates * numpy.where(columns > 0, direct, 1.0))
        if self._winograd.any():
            direct_rate = device.flops_per_second * self._of(
                [by.shares[_DIRECTLY.get(kind, kind)] for kind in self.kinds], "compute"
            )
            slow = flops / (direct_rate * direct)
            fast = _filled(columns, by.winograd_columns) * _filled(inner / window, by.winograd_inner) * full
            usual = numpy.where(self._half, computing, numpy.minimum(flops / (rates * fast), slow))
            computing = numpy.where(self._winograd & (columns > 0), usual, computing)
        moving = traffic / (given["memory"] * device.bytes_per_second * _filled(channels, by.channels))
        return numpy.maximum(computing, moving) + given["launch"] * device.op_seconds

    def _of(self, shares: Sequence[Share], name: str) -> Floats:
        of_ops: Floats = numpy.array([getattr(share, name) for share in shares], dtype=float)[self._places]
        return of_ops


_DIRECTLY: Final = MappingProxyType(
    {OpKind.WINOGRAD: OpKind.CONVOLUTION, OpKind.WINOGRAD_BACKWARD: OpKind.CONVOLUTION_BACKWARD}
)


def _filled(lengths: Floats, at_half: float) -> Floats:
    """Share of the rate that is reached at these lengths; all of it where there is no length."""
    return numpy.where(lengths > 0, numpy.maximum(lengths, _LEAST) / (numpy.maximum(lengths, _LEAST) + at_half), 1.0)


def timed(step: Step, device: Device, *, keep_measured: bool = False) -> Step:
    """The same step with the seconds that each op would take on the device.

    Where the host launches slower than the device works, an op's seconds have the device's waiting for its launch in
    them. So the sum of all is what a step takes that ends when the device has done. With `keep_measured` ops that have
    seconds keep them, as when the step was measured on this device.
    """
    works = [work_of(step, op) for op in step.ops]
    kept = [op.seconds if keep_measured else None for op in step.ops]
    modelled = seconds_of(works, device).tolist()
    found = numpy.array([mine if one is None else one for mine, one in zip(modelled, kept, strict=True)])
    launches = launches_of(step, works) * numpy.array([one is None for one in kept])
    waited = paced(found, launches * device.host_seconds).tolist()
    seconds = (mine if one is None else one for mine, one in zip(waited, kept, strict=True))
    return replace(step, ops=tuple(replace(op, seconds=took) for op, took in zip(step.ops, seconds, strict=True)))


def launches_of(step: Step, works: Sequence[Work]) -> Floats:
    """[ops] How often the host takes `Device.host_seconds` for each op."""
    usual = [IN_LOOPS if op.phase is Phase.OPTIMIZER else 1.0 for op in step.ops]
    return numpy.array([0.0 if work.kind is OpKind.NOTHING else one for work, one in zip(works, usual, strict=True)])


def paced(seconds: Floats, launching: Floats) -> Floats:
    """[ops] Seconds with the device's waiting for launches, of which the host takes `launching` [ops] for each, one
    after the other: an op begins when it is launched and the one before ended."""
    if not launching.any():
        return seconds
    done = seconds.cumsum()
    began = numpy.maximum.accumulate(launching.cumsum() - (done - seconds))
    return numpy.diff(done + numpy.maximum(began, 0.0), prepend=0.0)


def step_seconds(step: Step) -> Seconds:
    """Seconds of all ops in a row: the compute of a step from which nothing is missing.

    Raises UsageError if an op has no seconds.
    """
    for op in step.ops:
        if op.seconds is None:
            raise UsageError(f"{op.label} has no seconds: measure the step, or model it with costs.timed.")
    return math.fsum(op.seconds or 0.0 for op in step.ops)
