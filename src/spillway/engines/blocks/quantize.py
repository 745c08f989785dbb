"""Floating tensors in 2, 4 or 8 bits an element, masks in one.

NOTE [Quantizing]. Elements are taken in groups of 256 in the order of memory. Of each group its smallest value and a
step are kept, and of each element how many steps it lies above that, rounded up or down by chance so that the mean over
draws is the element (stochastic rounding; ActNN, Chen et al., ICML 2021, section 3.2; GACT, Liu et al., ICML 2022). So:

 1. What comes back is off by less than one step, a 15th of the group's range in 4 bits, and right on average, up to
    the rounding of the arithmetic and of the dtype itself.
 2. A group whose smallest value is zero, as in every result of a ReLU, keeps one code for zero alone, and its other
    codes begin at its smallest positive value. So zeros come back as zeros and nothing else does: the mask that
    ReLU's backward reads is exact, at no further bit. The sign of the step tells of such groups.
 3. A group with an infinity or NaN in it, or with a range beyond its dtype, is kept as it is; if more than half of the
    groups are such, the tensor is.
 4. A tensor of two values, such as a mask or what dropout multiplies with, takes one bit an element, bit-exactly.
 5. Chance comes from a generator of its own: nobody else's stream of random numbers moves.

Value and step are float32 (float64 for float64): 8 bytes for 256 elements, a ratio of 0.1328 to float32 in 4 bits. In
bfloat16 it would be 0.1289, but the smallest value would have to be rounded down and the step up, and ReLU's smallest
positive value, which rule 2 needs exactly, could not be told.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from spillway.costs.packed_bytes import GROUP, groups_of, mask_bytes, quantized_bytes, range_bytes
from spillway.engines.blocks.arithmetic import EAGER, Arithmetic, join
from spillway.internals.private import grad_mode
from spillway.units import Bytes

FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CACHE: Final = 1 << 10
"""Groups that are worked on at once on the CPU, so that what is made on the way stays in its caches."""
_LAUNCH: Final = 1 << 12
"""The same on a device for which every op has to be launched."""


class AbstractPacking(ABC):
    """How to read packed bytes."""

    exact: bool
    """Whether the same bits come back."""

    @abstractmethod
    def unpack(self, data: Tensor) -> Tensor:
        """All elements, in one dimension."""


Packed: TypeAlias = tuple[Tensor, AbstractPacking]
"""Bytes in one uint8 tensor of one dimension, and how to read them."""


def pack(
    flat: Tensor, bits: int | None, generator: torch.Generator | None, arithmetic: Arithmetic | None = None
) -> Packed | None:
    """Elements in fewer bytes.

    Args:
        flat: Of one dimension, without gaps: a float dtype or bool.
        bits: 2, 4 or 8; None if only what comes back exactly is wanted.
        generator: On the device of `flat`. Decides which way each element is rounded.
        arithmetic: Op by op if left out; or `compiled()`, which gives the same bits.

    Returns:
        None if there are fewer elements than a group has, or no fewer bytes would do.
    """
    if flat.numel() < GROUP or flat.dtype not in (*FLOATS, torch.bool):
        return None
    with grad_mode(enabled=False):
        values = _two_values(flat)
        if values is not None:
            return Mask.of(flat, *values)
        if bits is None or flat.dtype is torch.bool:
            return None
        return Quantized.of(flat, bits, generator, EAGER if arithmetic is None else arithmetic)


# ------------------------------------------------------------------------------------------------------------- one bit


@final
class Mask(AbstractPacking):
    """One bit an element: which of two values it has."""

    __slots__ = ("_dtype", "_high", "_low", "_numel")
    exact = True

    def __init__(self, dtype: torch.dtype, numel: int, low: int, high: int) -> None:
        self._dtype, self._numel = dtype, numel
        self._low, self._high = low, high
        """The bits of the values, as integers."""

    @classmethod
    def of(cls, flat: Tensor, low: int, high: int) -> Packed:
        """Of a tensor with no other values."""
        return pack_bits(_as_integers(flat) == high), cls(flat.dtype, flat.numel(), low, high)

    def unpack(self, data: Tensor) -> Tensor:
        values = torch.full(
            (self._numel,), self._low, dtype=_INTEGERS[self._dtype.itemsize], device=data.device
        )  # fmt: skip
        return values.masked_fill_(unpack_bits(data, self._numel), self._high).view(self._dtype)


def pack_bits(mask: Tensor) -> Tensor:
    """A bool tensor of one dimension, eight elements a byte, the first in the highest bit."""
    if mask.device.type == "cpu":
        packed = torch.empty(
            mask_bytes(mask.numel()), dtype=torch.uint8
        )  # torch's own memory: NumPy's is in no account
        packed.numpy()[:] = np.packbits(mask.numpy())  # 30 times as fast
        return packed
    return pack_bits_by_ops(mask)


def unpack_bits(data: Tensor, count: int) -> Tensor:
    """The first elements of what `pack_bits` was given."""
    if data.device.type == "cpu":
        mask = torch.empty(count, dtype=torch.bool)
        mask.numpy()[:] = np.unpackbits(data.numpy(), count=count)
        return mask
    return unpack_bits_by_ops(data, count)


def pack_bits_by_ops(mask: Tensor) -> Tensor:
    """`pack_bits`, on any device."""
    bits = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    return (bits << _places(mask.device)).sum(1, dtype=torch.uint8)


def unpack_bits_by_ops(data: Tensor, count: int) -> Tensor:
    """`unpack_bits`, on any device."""
    return ((data[:, None] >> _places(data.device)) & 1).view(-1)[:count].to(torch.bool)


def _places(device: torch.device) -> Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


def _two_values(flat: Tensor) -> tuple[int, int] | None:
    """The bits of the only two values in a tensor; None if there are more."""
    integers = _as_integers(flat)
    some = integers[:: max(1, integers.numel() // GROUP)]
    if not _are(some, some.min(), some.max()):
        return None
    low, high = integers.min(), integers.max()
    chunks = torch.split(integers, _chunk(flat) * GROUP)
    return (int(low), int(high)) if all(_are(chunk, low, high) for chunk in chunks) else None


def _are(integers: Tensor, low: Tensor, high: Tensor) -> bool:
    return bool(((integers == low) | (integers == high)).all())


def _as_integers(flat: Tensor) -> Tensor:
    return flat.view(_INTEGERS[flat.dtype.itemsize])


# -------------------------------------------------------------------------------------------------------- several bits


@final
class Quantized(AbstractPacking):
    """The smallest value and step of each group, the codes of its elements, and groups that are kept as they are."""

    __slots__ = ("_arithmetic", "_bits", "_dtype", "_groups", "_numel", "_odd")
    exact = False

    def __init__(self, dtype: torch.dtype, numel: int, bits: int, odd: int, arithmetic: Arithmetic) -> None:
        self._dtype, self._numel, self._bits = dtype, numel, bits
        self._arithmetic = arithmetic
        self._groups = groups_of(numel)
        self._odd = odd
        """Groups that are kept as they are: their numbers and elements follow the codes."""

    @classmethod
    def of(cls, flat: Tensor, bits: int, generator: torch.Generator | None, arithmetic: Arithmetic) -> Packed | None:
        self = cls(flat.dtype, flat.numel(), bits, 0, arithmetic)
        data = torch.empty(self._kept_bytes, dtype=torch.uint8, device=flat.device)
        ranges, codes = self._parts(data)
        chunk = _chunk(flat)
        noise = torch.empty((min(chunk, self._groups), GROUP), dtype=ranges.dtype, device=flat.device)
        odd = []
        for start in range(0, self._groups, chunk):
            groups = _groups(flat[start * GROUP : (start + chunk) * GROUP])
            here = slice(start, start + len(groups))
            rounding = noise[: len(groups)].uniform_(generator=generator)
            ranges[here], elements, beyond = arithmetic.encode(groups.to(ranges.dtype), 2**bits - 1, rounding)
            join(elements, bits, codes[here])
            odd += [(start + number, groups[number]) for number in beyond.nonzero().view(-1).tolist()]
            if 2 * len(odd) > self._groups:
                return None
        self._odd = len(odd)
        if odd:
            numbers = torch.tensor([number for number, _ in odd], device=flat.device).view(torch.uint8)
            data = torch.cat([data, numbers, torch.cat([group for _, group in odd]).view(torch.uint8)])
        return (data, self) if data.numel() < flat.numel() * flat.element_size() else None

    def unpack(self, data: Tensor) -> Tensor:
        ranges, codes = self._parts(data)
        flat = torch.empty(self._numel, dtype=self._dtype, device=data.device)
        chunk = _chunk(flat)
        with grad_mode(enabled=False):
            for start in range(0, self._groups, chunk):
                here = slice(start, start + chunk)
                target = flat[start * GROUP : (start + chunk) * GROUP]
                elements = self._arithmetic.decode(ranges[here], codes[here], self._bits)
                target.copy_(elements.view(-1)[: target.numel()])
            if self._odd:
                after = data[self._kept_bytes :]
                numbers = after[: 8 * self._odd].clone().view(torch.int64).tolist()
                kept = after[8 * self._odd :].clone().view(self._dtype).view(-1, GROUP)
                for number, group in zip(numbers, kept, strict=True):
                    target = flat[number * GROUP : (number + 1) * GROUP]
                    target.copy_(group[: target.numel()])
        return flat

    @property
    def _range(self) -> torch.dtype:
        return torch.float64 if self._dtype is torch.float64 else torch.float32

    @property
    def _range_bytes(self) -> Bytes:
        return range_bytes(self._numel, double=self._dtype is torch.float64)

    @property
    def _kept_bytes(self) -> Bytes:
        return quantized_bytes(self._numel, self._bits, double=self._dtype is torch.float64)

    def _parts(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Views: ranges, (groups, 2), and codes, (groups, bytes of a group)."""
        ranges = data[: self._range_bytes].view(self._range).view(self._groups, 2)
        return ranges, data[self._range_bytes : self._kept_bytes].view(self._groups, GROUP * self._bits // 8)


def _groups(flat: Tensor) -> Tensor:
    """(groups, 256); what is missing to a full group is as the last element."""
    missing = -flat.numel() % GROUP
    return (torch.cat([flat, flat[-1:].expand(missing)]) if missing else flat).view(-1, GROUP)


def _chunk(flat: Tensor) -> int:
    return _CACHE if flat.device.type == "cpu" else _LAUNCH
