"""From elements to codes and back, op by op or in one piece of compiled code; both give the same bits.

Compiled code has no branch that looks at elements: what only some groups need is computed for all of them and changes
nothing for the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor

from spillway.costs.packed_bytes import GROUP
from spillway.errors import UsageError
from spillway.internals.private import grad_mode

Encode = Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor, Tensor]]
Decode = Callable[[Tensor, Tensor, int], Tensor]


class Arithmetic(NamedTuple):
    """What elements and codes are computed with."""

    encode: Encode
    """As `encode`; the last argument may be used up."""
    decode: Decode


def encode(values: Tensor, levels: int, rounding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ranges, (groups, 2); codes, (groups, 256) of uint8; which groups have none, (groups,).

    Args:
        values: (groups, 256).
        levels: The highest code.
        rounding: (groups, 256), uniform in [0, 1). Used up.
    """
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    zeros = (low == 0).to(values.dtype)
    some_zeros = bool(zeros.any())
    if some_zeros:  # rule 2; products are several times as fast as choices
        least = (values + (1 - values.sign()) * torch.finfo(values.dtype).max).amin(1, keepdim=True)
        low = torch.where((zeros == 1) & (high > 0), least, low)
    top = levels - zeros
    step = (high - low) / top
    beyond = ~torch.isfinite(low + top * step)
    if beyond.any():  # rule 3
        low, step = low.masked_fill(beyond, 0), step.masked_fill(beyond, 0)
        values = values.masked_fill(beyond, 0)
    codes = rounding.add_((values - low).div_(step.masked_fill(step == 0, 1))).floor_()
    codes = torch.minimum(codes, top, out=codes)
    if some_zeros:
        codes.add_(zeros).mul_(torch.maximum(values.sign(), 1 - zeros))
        step = torch.where(zeros == 1, -step, step)
    return torch.cat([low, step], 1), codes.to(torch.uint8), beyond.view(-1)


def decode(ranges: Tensor, packed: Tensor, bits: int) -> Tensor:
    """(groups, 256)."""
    low, step = ranges[:, :1], ranges[:, 1:]
    codes = _split(packed, bits, ranges.dtype)
    zeros = torch.signbit(step).to(ranges.dtype)
    if not zeros.any():
        return codes.mul_(step).add_(low)
    there = torch.maximum(codes.clamp(max=1), 1 - zeros)
    return codes.sub_(zeros).mul_(step.abs()).add_(low).mul_(there)


def join(codes: Tensor, bits: int, packed: Tensor) -> None:
    """Codes of (groups, 256) to bytes: the first part of a group in the lowest bits, the last in the highest."""
    width = packed.shape[1]
    packed.copy_(codes[:, :width])
    for place in range(1, 8 // bits):
        packed |= codes[:, place * width : (place + 1) * width] << place * bits


def _split(packed: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    width = packed.shape[1]
    codes = torch.empty((len(packed), GROUP), dtype=dtype, device=packed.device)
    for place in range(8 // bits):
        codes[:, place * width : (place + 1) * width] = (packed >> place * bits) & (2**bits - 1)
    return codes


def encode_straight(values: Tensor, levels: int, rounding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`encode` without a branch."""
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    zeros = (low == 0).to(values.dtype)
    least = torch.where(values > 0, values, torch.finfo(values.dtype).max).amin(1, keepdim=True)
    low = torch.where((zeros == 1) & (high > 0), least, low)
    top = levels - zeros
    step = (high - low) / top
    beyond = ~torch.isfinite(low + top * step)
    low, step, values = low.masked_fill(beyond, 0), step.masked_fill(beyond, 0), values.masked_fill(beyond, 0)
    codes = (rounding + (values - low) / step.masked_fill(step == 0, 1)).floor()
    codes = (torch.minimum(codes, top) + zeros) * torch.maximum(values.sign(), 1 - zeros)
    return torch.cat([low, torch.where(zeros == 1, -step, step)], 1), codes.to(torch.uint8), beyond.view(-1)


def decode_straight(ranges: Tensor, packed: Tensor, bits: int) -> Tensor:
    """`decode` without a branch."""
    low, step = ranges[:, :1], ranges[:, 1:]
    codes = torch.cat([(packed >> place * bits) & (2**bits - 1) for place in range(8 // bits)], 1).to(ranges.dtype)
    zeros = torch.signbit(step).to(ranges.dtype)
    there = torch.maximum(codes.clamp(max=1), 1 - zeros)
    return ((codes - zeros) * step.abs() + low) * there


EAGER: Final = Arithmetic(encode, decode)


@functools.cache
def compiled(device: torch.device) -> Arithmetic:
    """Both by torch.compile, which takes some seconds the first time in a process.

    Raises UsageError where it does not work: on the CPU it needs a C++ compiler, on CUDA Triton.
    """
    compile_ = functools.partial(torch.compile, dynamic=True, fullgraph=True)
    made = Arithmetic(cast(Encode, compile_(encode_straight)), cast(Decode, compile_(decode_straight)))
    some = torch.zeros((2, GROUP), device=device)
    try:
        with grad_mode(enabled=False):
            ranges, codes, _ = made.encode(some, 15, some)
            packed = torch.empty((2, GROUP // 2), dtype=torch.uint8, device=device)
            join(codes, 4, packed)
            made.decode(ranges, packed, 4)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UsageError(f"torch.compile does not work here ({reason}); leave out compiled=True.") from error
    return made
