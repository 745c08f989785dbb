"""Fingerprints of values: whether a second run of a block saved the same bytes as the first.

The bytes of a tensor are laid out as 64-bit words in groups of columns, which are summed. The number of columns is a
prime, so that rows of a tensor do not line up with them, and the number of rows in a group is odd, so that a sign that
changes everywhere shows. One pass near memory speed, and a thousandth of the bytes to keep. A changed bit shows, and
so do negation, swapped rows and elements that moved; words that swap a multiple of 127 words apart within a group do
not, nor do signs of float64 that change at an even number of places of a column.

Of what a second run saves some elements of the last tensors are compared, on which most of what a block computes has a
say: what makes it another one (a function that somebody has put in the place of another) is told and not trained on.
On the CPU alone: a device would have to be waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Final, TypeAlias

import torch
from torch import Tensor

from spillway.engines.blocks.saved import SavedRef, SavedTensor
from spillway.internals.private import bytes_over, counted_storage, grad_mode
from spillway.units import Bytes

COLUMNS: Final = 127
ROWS: Final = 1001
"""What is summed at once fits into a processor's cache."""
_TELLING: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SAMPLES: Final = 3
SAMPLED: Final = 32
"""Elements of each at most."""
_GROUP: Final = COLUMNS * ROWS
_WORD: Final = 8

Fingerprint: TypeAlias = Tensor
"""Sums of columns, and words that were too few for that: int64, one dimension, on the tensor's device."""
Seen: TypeAlias = dict[tuple[int, int, int, int], Fingerprint]
"""Fingerprints by storage, where the elements begin in it, their number, and bytes of one."""


def fingerprint(tensor: Tensor, seen: Seen) -> Fingerprint:
    """The fingerprint of a strided tensor, which nobody writes to meanwhile. Of those that are `seen`, whose tensors
    are still alive, views of the same bytes are looked at once."""
    with grad_mode(enabled=False):
        dense = _dense(tensor.detach())
        # Not by its address: where every op is watched, whoever asks for that has the storage stay for good.
        place = counted_storage(dense)._cdata
        key = (place, int(dense.storage_offset()), dense.numel(), dense.element_size())
        if place != counted_storage(tensor)._cdata:  # a copy, which is about to die
            return _sums(dense)
        if key not in seen:
            seen[key] = _sums(dense)
        return seen[key]


def print_bytes(nbytes: Bytes) -> Bytes:
    """Of the fingerprint of so many bytes, as `_sums` lays them out."""
    groups, left = divmod(nbytes // _WORD, _GROUP)
    rows = max(left // COLUMNS - 1, 0) | 1
    return _WORD * (groups * COLUMNS + left - (rows - 1) * COLUMNS + nbytes % _WORD)


def _dense(tensor: Tensor) -> Tensor:
    """The same elements, each once, without gaps between them."""
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    tensor = tensor.resolve_conj().resolve_neg()
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor if torch.ops.aten.is_non_overlapping_and_dense(tensor) else tensor.contiguous()


def _sums(dense: Tensor) -> Fingerprint:
    offset, nbytes = int(dense.storage_offset()) * dense.element_size(), dense.numel() * dense.element_size()
    count, left = divmod(nbytes, _WORD)
    storage = dense.untyped_storage()
    if offset % _WORD:
        storage, offset = bytes_over(storage, offset, nbytes).clone().untyped_storage(), 0
    words = torch.empty(0, dtype=torch.int64, device=dense.device).set_(storage, offset // _WORD, (count,), (1,))
    parts = []
    if count >= _GROUP:
        groups = count // _GROUP
        parts.append(words[: groups * _GROUP].view(groups, ROWS, COLUMNS).sum(1).view(-1))
        words = words[groups * _GROUP :]
    rows = max(words.numel() // COLUMNS - 1, 0) | 1
    if rows > 1:
        parts.append(words[: rows * COLUMNS].view(rows, COLUMNS).sum(0))
        words = words[rows * COLUMNS :]
    parts.append(words)
    if left:
        parts.append(bytes_over(storage, offset + nbytes - left, left).to(torch.int64))
    return torch.cat(parts)


def remember_some(tensors: Sequence[SavedTensor], given: Set[int | None]) -> None:
    """Of the last few saved tensors that have a gradient, some elements, before they are given up; what the block was
    given (by the addresses of storages) tells nothing."""
    left = SAMPLES
    for saved in reversed(tensors):
        value = saved.value
        told = saved.unwritten and saved.differentiable  # no masks, and nothing that an op leaves unwritten
        # One that `fully_shard` has gathered and let go of again has elements, and no bytes.
        dense = type(value) is Tensor and value.layout is torch.strided and value.dtype in _TELLING
        there = dense and value.numel() and counted_storage(value).nbytes()
        if told and there:
            assert value is not None
            key = saved.address()
            odd = value.is_nested or value.is_neg() or value.device.type != "cpu"
            if key is not None and key not in given and not odd:
                saved.last_bits = _some(value)
                left -= 1
                if not left:
                    return


def _some(tensor: Tensor) -> list[int]:
    """The bits of the last elements along the longest dimension, as numbers: no tensor is left that would count."""
    with grad_mode(enabled=False):
        offset, length, step = int(tensor.storage_offset()), 1, 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            offset += (size - 1) * stride
            if size > length:
                length, step = size, stride
        length = min(length, SAMPLED)
        some = tensor.detach().as_strided((length,), (step,), offset - (length - 1) * step)
        found: list[int] = some.view(_INTEGERS[tensor.element_size()]).tolist()  # asks, where every op is watched
        return found


def first_changed(tensors: Iterable[SavedRef]) -> int | None:
    """Number of the first that was brought back with other values than it gave up, as far as they were remembered."""
    for number, reference in enumerate(tensors):
        saved = reference()
        if saved is None or saved.last_bits is None or saved.value is None or not saved.recomputed:
            continue
        if saved.last_bits != _some(saved.value):
            return number
    return None
