"""Tensors of blocks that wait elsewhere: what is sent away, and how it comes back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from spillway.engines.blocks.compress import CompressedHome, Compressor
from spillway.engines.blocks.containers import FrozenTensor, address
from spillway.engines.blocks.stores import Home, Storage, Store
from spillway.units import Bytes

if TYPE_CHECKING:
    from spillway.engines.blocks.holders import Holder

SMALLEST: Final[Bytes] = 4096
"""Smaller storages stay: a slot is no smaller."""

AnyHome: TypeAlias = Home | CompressedHome


class Away(NamedTuple):
    """A tensor whose storage waits elsewhere, or in fewer bytes."""

    home: AnyHome
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


def compress_saved(holders: Iterable[Holder], compressor: Compressor, store: Store | None) -> Bytes:
    """Quantize what holders hold, each storage once, and send that to a store; what it takes in addition."""
    groups: dict[int, list[Holder]] = {}
    for holder in holders:
        key = holder.address()
        if not holder.pinned and key is not None and _is_plain(holder.value):
            groups.setdefault(key, []).append(holder)
    taken = 0
    for group in groups.values():
        if len({holder.dtype for holder in group}) > 1:
            continue
        found = compressor.compress(group[0].value, lossy=any(holder.differentiable for holder in group))
        if found is None:
            continue
        home, added = found
        taken += added
        if store is not None and store.takes(group[0].value) and home.nbytes >= SMALLEST:
            home.send(store)
        for holder in group:
            holder.home = away(home, holder.value)
    for holder in holders:
        if holder.home is not None:
            holder.let_go()
    return taken


def compress_frozen(every: Iterable[FrozenTensor], fixed: set[int], compressor: Compressor) -> Bytes:
    """Quantize frozen tensors, but for fixed ones; what they take in addition."""
    taken = 0
    for frozen in every:
        tensor = frozen.alias
        if tensor is None or not _is_plain(tensor) or address(tensor) in fixed:
            continue
        found = compressor.compress(tensor, lossy=True)
        if found is not None:
            frozen.send_away(away(found[0], tensor))
            taken += found[1]
    return taken


def bring_saved_for(holder: Holder, holders: Iterable[Holder]) -> None:
    """Bring back what a holder wants: from a store with all that these others sent there, what is compressed alone."""
    assert holder.home is not None
    home = holder.home.home
    if isinstance(home, CompressedHome):
        holders = [one for one in holders if one.home is not None and one.home.home is home]
    bring_saved(holders)


def bring_saved(holders: Iterable[Holder]) -> None:
    """Bring everything back that these holders sent away, views over one storage again.

    What was written to meanwhile stays away: it may have been written while it was copied, and whoever asks for it is
    told so (`Holder.check`).
    """
    loaded: dict[AnyHome, Storage] = {}
    for holder in holders:
        if holder.home is not None and holder.value is None and not holder.written:
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


def come_home(holders: Iterable[Holder], every: Iterable[FrozenTensor]) -> None:
    """Let nothing wait in a store any more: it is held as it was, or compressed in memory."""
    holders = list(holders)
    for home in waiting(holders, every):
        if isinstance(home, CompressedHome):
            home.come_home()
    sent = [holder for holder in holders if holder.home is not None and isinstance(holder.home.home, Home)]
    bring_saved(sent)
    for holder in sent:
        holder.home, holder.recomputed = None, False
    for frozen in every:
        if frozen.away is not None and isinstance(frozen.away.home, Home):
            if frozen.moved_on and not frozen.copied:
                frozen.away = None  # nobody may call with it any more: it may have been written while it was copied
            else:
                frozen.come_home()


def waiting(holders: Iterable[Holder], every: Iterable[FrozenTensor]) -> list[AnyHome]:
    """What of these waits elsewhere, was read ahead, or is compressed."""
    places = [holder.home for holder in holders if holder.value is None]
    places += [frozen.away for frozen in every]
    return list(dict.fromkeys(place.home for place in places if place is not None))


def start_in(homes: Iterable[AnyHome], most: Bytes | None) -> Bytes:
    """Let what waits elsewhere come, up to so many bytes; how many are here or on their way."""
    coming = 0
    for home in homes:
        if home.absent and (most is None or coming + home.nbytes <= most):
            home.start_in()
        coming += home.nbytes * home.ahead
    return coming


def away(home: AnyHome, tensor: Tensor) -> Away:
    """The tensor, in a storage that waits there."""
    return Away(home, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())


def _movable(tensor: Tensor, store: Store) -> bool:
    return _is_plain(tensor) and store.takes(tensor) and tensor.untyped_storage().nbytes() >= SMALLEST


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
