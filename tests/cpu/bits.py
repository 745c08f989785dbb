"""The bytes behind tensors, read without asking the dispatcher and without asking the engine."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

storage_of = torch._C.TensorBase.untyped_storage
address_of = torch._C._storage_address

UNWRITTEN = 0xAB
"""What bytes hold that no op has written, where the tests can see to it."""


def strided(value: Any) -> bool:
    """Whether it is a CPU tensor with bytes of its own."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and torch._C._has_storage(value)
        and not value._is_zerotensor()
    )


def bytes_of(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def storage_with(content: bytes) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(len(content))
    overwrite(storage, content)
    return storage


def overwrite(storage: torch.UntypedStorage, content: bytes) -> None:
    if content:
        ctypes.memmove(storage.data_ptr(), content, len(content))


def fill(storage: torch.UntypedStorage, pattern: int) -> None:
    if storage.nbytes():
        ctypes.memset(storage.data_ptr(), pattern, storage.nbytes())


def dirty_the_heap(nbytes: int, pattern: int) -> None:
    """Leave freed memory of this size full of `pattern`, so that bytes which nobody wrote differ from run to run."""
    for block in [torch.UntypedStorage(max(nbytes, 1)) for _ in range(8)]:
        fill(block, pattern)


def reached(nbytes: int, tensors: Iterable[torch.Tensor]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which bytes of a storage belong to an element of one of these tensors over it."""
    mask = np.zeros(nbytes, np.bool_)
    for tensor in tensors:
        size = tensor.element_size()
        starts = np.lib.stride_tricks.as_strided(
            np.arange(nbytes)[tensor.storage_offset() * size :],
            tuple(tensor.shape) if tensor.numel() else (0,),
            tuple(stride * size * 8 for stride in tensor.stride()) if tensor.numel() else (8,),
        )
        for byte in range(size):
            mask[starts.ravel() + byte] = True
    return mask


def same(left: bytes, right: bytes, mask: np.ndarray[Any, np.dtype[np.bool_]], *, unwritten_allowed: bool) -> bool:
    """Whether two contents agree where the mask says, except for bytes that nobody wrote."""
    if len(left) != len(right):
        return False
    one, other = np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8)
    differs = (one != other) & mask
    return not bool((differs & (one != UNWRITTEN) if unwritten_allowed else differs).any())
