"""Tensors of blocks that wait elsewhere: what is sent away, and how it comes back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from spillway.engines.blocks.containers import FrozenTensor, address
from spillway.engines.blocks.stores import Home, Storage, Store
from spillway.units import Bytes

if TYPE_CHECKING:
    from spillway.engines.blocks.holders import Holder

SMALLEST: Final[Bytes] = 4096
"""Smaller storages stay: a slot is no smaller."""


class Away(NamedTuple):
    """A tensor whose storage waits elsewhere."""

    home: Home
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def over(self, storage: Storage) -> Tensor:
        """The tensor, over the storage that came back."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def fetch(self) -> Tensor:
        """The tensor."""
        return self.over(self.home.load())


def send_saved(holders: Iterable[Holder], shared: set[int], store: Store) -> None:
    """Move what holders hold away, each storage once, but for storages that others hold alive as well."""
    homes: dict[int, Home] = {}
    for holder in holders:
        tensor, key = holder.value, holder.address()
        if holder.pinned or key is None or key in shared or not _movable(tensor, store):
            continue
        if key not in homes:
            homes[key] = store.send(tensor.untyped_storage())
        holder.home = away(homes[key], tensor)
    for holder in holders:
        if holder.home is not None:
            holder.let_go()


def bring_saved(holders: Iterable[Holder]) -> None:
    """Bring everything back that these holders sent away, views over one storage again."""
    loaded: dict[Home, Storage] = {}
    for holder in holders:
        if holder.home is not None and holder.value is None:
            home = holder.home.home
            if home not in loaded:
                loaded[home] = home.load()
            holder.give_back(holder.home.over(loaded[home]))


def send_frozen(every: Iterable[FrozenTensor], shared: set[int], store: Store) -> None:
    """Move frozen tensors away, but for those whose storages others hold alive as well."""
    homes: dict[int, Home] = {}
    for frozen in every:
        tensor = frozen.alias
        if tensor is None or not _movable(tensor, store) or address(tensor) in shared:
            continue
        if address(tensor) not in homes:
            homes[address(tensor)] = store.send(tensor.untyped_storage())
        frozen.send_away(away(homes[address(tensor)], tensor))


def away(home: Home, tensor: Tensor) -> Away:
    """The tensor, in a storage that waits there."""
    return Away(home, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())


def _movable(tensor: Tensor, store: Store) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and store.takes(tensor)
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().nbytes() >= SMALLEST
    )
