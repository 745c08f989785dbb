"""Bytes of tensors that wait in fewer bits an element, and what making and reading them moves.

One formula for what the block engine really packs (`engines/blocks/quantize.py`, which says how) and for what is
simulated: groups of 256 elements, a smallest value and a step of each, so many bits an element; of what has two values
only one bit an element.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from spillway.units import Bytes

GROUP: Final = 256
"""Elements."""
ITEM_BYTES: Final = MappingProxyType({"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8})
"""Of what is packed; nothing else is."""


def mask_bytes(elements: int) -> Bytes:
    """Of elements that have two values: one bit each."""
    return -(-elements // 8)


def groups_of(elements: int) -> int:
    """Groups, the last of which may be less than full."""
    return -(-elements // GROUP)


def range_bytes(elements: int, *, double: bool) -> Bytes:
    """Of the smallest value and the step of every group: float32, or float64 for what is that."""
    return 2 * groups_of(elements) * (8 if double else 4)


def quantized_bytes(elements: int, bits: int, *, double: bool = False) -> Bytes:
    """Of elements in 2, 4 or 8 bits, with their groups' ranges; the last group takes what a full one does."""
    return range_bytes(elements, double=double) + groups_of(elements) * GROUP * bits // 8


def packed_bytes(nbytes: Bytes, dtype: str, bits: int | None, *, two_values: bool) -> Bytes | None:
    """Of a storage; None if it is left as it is: another dtype, less than a group, or no fewer bytes.

    Args:
        dtype: Of its elements, as torch calls it.
        bits: An element; None if only what comes back exactly is wanted.
        two_values: Whether its elements are known to have no more, as those of a mask. Those of bool never have.
    """
    item = ITEM_BYTES.get(dtype)
    if item is None or nbytes % item or nbytes // item < GROUP:
        return None
    elements = nbytes // item
    if two_values or dtype == "bool":
        return mask_bytes(elements)
    if bits is None:
        return None
    packed = quantized_bytes(elements, bits, double=dtype == "float64")
    return packed if packed < nbytes else None


def pack_traffic(nbytes: Bytes, packed: Bytes) -> Bytes:
    """Bytes that packing moves: the elements are read for the ranges of their groups, and again to be rounded."""
    return 2 * nbytes + packed


def unpack_traffic(nbytes: Bytes, packed: Bytes) -> Bytes:
    """Bytes that unpacking moves."""
    return packed + nbytes
