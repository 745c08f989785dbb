"""Bytes of blocks that wait in the spill file. On the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, cast, final

import torch
from torch import Tensor

from spillway.engines.blocks.containers import FrozenTensor, address
from spillway.engines.blocks.holders import Holder
from spillway.engines.tiers.disk import DiskTier
from spillway.units import Bytes

SMALLEST: Final[Bytes] = 4096
"""Smaller storages stay: a slot is no smaller."""


@final
class Home:
    """One storage's bytes in the spill file, for as long as somebody refers to this."""

    __slots__ = ("__weakref__", "_nbytes", "_slot", "_tier")

    def __init__(self, storage: torch.UntypedStorage, tier: DiskTier) -> None:
        self._nbytes = storage.nbytes()
        self._tier = tier
        self._slot = tier.write(storage.data_ptr(), self._nbytes)
        weakref.finalize(self, tier.free, self._slot).atexit = False

    def load(self) -> torch.UntypedStorage:
        """The bytes, in a storage of their own."""
        storage: torch.UntypedStorage = cast(Any, torch.UntypedStorage)(self._nbytes)
        self._tier.read(self._slot, storage.data_ptr())
        return storage


class Away(NamedTuple):
    """A tensor whose storage waits in the spill file."""

    home: Home
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor, over the storage that came back."""
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.size, self.stride)


def send_saved(holders: Iterable[Holder], shared: set[int], tier: DiskTier) -> None:
    """Move what holders hold to the file, each storage once, but for storages that others hold alive as well."""
    homes: dict[int, Home] = {}
    for holder in holders:
        tensor, key = holder.value, holder.address()
        if holder.pinned or key is None or key in shared or not _movable(tensor):
            continue
        if key not in homes:
            homes[key] = Home(tensor.untyped_storage(), tier)
        holder.home = _away(homes[key], tensor)
    for holder in holders:
        if holder.home is not None:
            holder.let_go()


def bring_saved(holders: Iterable[Holder]) -> None:
    """Bring everything back that these holders sent away, views over one storage again."""
    loaded: dict[Home, torch.UntypedStorage] = {}
    for holder in holders:
        if holder.home is not None and holder.value is None:
            home = holder.home.home
            if home not in loaded:
                loaded[home] = home.load()
            holder.give_back(holder.home.over(loaded[home]))


def send_arguments(arguments: Iterable[FrozenTensor], fixed: set[int], tier: DiskTier) -> None:
    """Move what a block was called with and what needs a gradient; a mask that all blocks share stays."""
    for frozen in arguments:
        tensor = frozen.alias
        if tensor is None or not frozen.needs_grad or address(tensor) in fixed or not _movable(tensor):
            continue
        frozen.send_away(_fetcher(_away(Home(tensor.untyped_storage(), tier), tensor)))


def _fetcher(away: Away) -> Callable[[], Tensor]:
    return lambda: away.over(away.home.load())


def _away(home: Home, tensor: Tensor) -> Away:
    return Away(home, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())


def _movable(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().nbytes() >= SMALLEST
    )
