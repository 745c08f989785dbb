"""What a device gives to ops of each kind: shares of its rates, the sizes at which it gives half of them, and how far
what is reckoned so was from what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, final

from spillway.errors import UsageError


@final
class OpKind(StrEnum):
    """Ops that get a similar share of what a device could do."""

    MATMUL = "matmul"
    BATCHED = "batched matmul"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    CONVOLUTION_BACKWARD = "convolution backward"
    """Towards image and weight together, as torch has it."""
    WINOGRAD = "winograd"
    """Windows of 3 x 3 that move by one: with fewer multiplications (Lavin and Gray 2016)."""
    WINOGRAD_BACKWARD = "winograd backward"
    STRIDED = "strided convolution"
    STRIDED_BACKWARD = "strided convolution backward"
    DEPTHWISE = "depthwise convolution"
    DEPTHWISE_BACKWARD = "depthwise convolution backward"
    NORM = "norm"
    NORM_BACKWARD = "norm backward"
    LAYER_NORM_BACKWARD = "layer norm backward"
    SOFTMAX = "softmax"
    SOFTMAX_BACKWARD = "softmax backward"
    RANDOM = "random"
    POOL = "pool"
    POOL_BACKWARD = "pool backward"
    INDEX = "index"
    REDUCE = "reduce"
    COPY = "copy"
    OPTIMIZER = "optimizer"
    """Over lists of tensors, by one kernel or few."""
    TRANSCENDENTAL = "transcendental"
    """Elementwise, with exponentials and the like: on CPUs bound by arithmetic that nobody counts."""
    ELEMENTWISE = "elementwise"
    NOTHING = "nothing"
    """Views, and whatever else neither computes nor moves anything."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a kind of op gets of a device. Raises UsageError when built if a share is not above 0, or launch below 0.

    Shares above 1 are possible: caches are faster than the memory behind them, and Winograd's convolutions multiply
    less often than is counted.
    """

    compute: float
    """Of `Device.flops_per_second`."""
    memory: float
    """Of `Device.bytes_per_second`."""
    launch: float = 1.0
    """Multiples of `Device.op_seconds` that every op takes besides."""
    half: float = 0.5
    """Of `Device.half_flops_per_second`, where operands are of 16 bits."""

    def __post_init__(self) -> None:
        above = all(0 < share < math.inf for share in (self.compute, self.memory, self.half))
        if not (above and 0 <= self.launch < math.inf):
            raise UsageError(f"Shares of a device are above 0, and launches 0 or more; got {self!r}.")


Shares: TypeAlias = Mapping[OpKind, Share]
"""A share for every kind of op."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What ops get of a device. Raises UsageError when built if a kind is missing, or a number makes no sense.

    A product of matrices, and a convolution as one (implicit GEMM), gets its share times `n / (n + columns)` of its n
    columns, `k / (k + inner)` of what is summed over, and `w / (w + waves)` of its w waves: blocks of 128 rows and 64
    columns over the multiprocessors of the device. Waves are not rounded up: kernels choose their blocks by the shape,
    and rounded waves foretold DTR's logs no better. Batch norms get their share times `c / (c + channels)`.
    """

    shares: Shares
    """For every kind of op."""
    columns: float = 0.0
    """Of the result; channels out of a convolution."""
    inner: float = 0.0
    """Numbers that are summed up for one of the result; window times channels of a convolution."""
    waves: float = 0.0
    """Of blocks over the multiprocessors of the device; where their number is not known, all waves are full."""
    winograd_columns: float = 0.0
    """Channels out, of Winograd's convolutions; the slower of the two ways is not taken."""
    winograd_inner: float = 0.0
    """Channels in, of Winograd's convolutions."""
    channels: float = 0.0
    """Of a batch norm."""
    step_spread: tuple[float, ...] = (1.0, 1.0)
    """Measured seconds of steps as multiples of modelled ones: of left-out steps, 80 % lie between."""
    extra_spread: tuple[float, ...] = (1.0, 1.0)
    """The same of the seconds that a method adds to a step."""
    source: str = ""
    """Where the numbers are from."""

    def __post_init__(self) -> None:
        missing = [kind for kind in OpKind if kind not in self.shares]
        if missing:
            raise UsageError(f"Shares are needed for every kind of op; {', '.join(missing)} is missing.")
        sizes = (
            self.columns, self.inner, self.waves, self.winograd_columns, self.winograd_inner, self.channels
        )  # fmt: skip
        spreads = (self.step_spread, self.extra_spread)
        if not all(0 <= size < math.inf for size in sizes) or not all(
            len(spread) == 2 and 0 <= spread[0] <= spread[1] < math.inf for spread in spreads
        ):
            raise UsageError(f"Sizes are 0 or more, and spreads go from a number to a greater one; got {self!r}.")
