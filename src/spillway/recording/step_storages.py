"""The storages and values of a step while it runs: which exist, in which version, from when to when.

A storage is known by the address of its storage object from the moment it is first seen until it dies, and a weak
reference tells of that. Whatever is alive when the recording begins and has been seen before exists at the start.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast, final

import torch

from spillway.internals.private import is_wrapper, storage_address, storage_of
from spillway.ir import Kind, StorageInfo, Value, ValueId
from spillway.memory.records import Storage
from spillway.units import Bytes


@final
class Watch(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage that knows its entry."""

    __slots__ = ("entry",)
    entry: Entry


@final
@dataclass(slots=True, eq=False)
class Entry:
    """A storage that was seen."""

    key: int
    nbytes: Bytes
    watch: Watch | None
    dtype: torch.dtype | None
    kind: Kind | None = None
    name: str = ""
    number: int = -1
    value: ValueId = -1
    version: int = -1
    born: int = 0
    died: int | None = None
    at_start: bool = False


@final
class Ledger:
    """Every storage that was seen and is alive; from `begin` on, every one of the step."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        """The storages of the step, by number."""
        self.values: list[Value] = []
        self.now = 0
        """How many ops of the step have run."""
        self.running = False
        """Whether the next op runs at this moment; what dies now dies with it."""
        self._table: dict[int, Entry] = {}
        self._recording = False

    def begin(self) -> None:
        """From here on storages and values have numbers; those that are known and alive exist at the start."""
        self._recording = True
        for entry in list(self._table.values()):
            entry.at_start = True
            self.enter(entry)

    def begin_among(self, present: Iterable[tuple[Storage, bool]]) -> None:
        """From here on likewise, in a step of an engine: what exists at the start is what the engine knows, in its
        order. Of what is left over, the second of each pair, only what the step turns out to use is a part of it."""
        self._recording = True
        for storage, left_over in present:
            entry = self.take_in(storage)
            if entry is None:
                continue
            entry.at_start = True
            if storage.kind is not None and not left_over:
                entry.kind = Kind(storage.kind)
                self.enter(entry)

    def take_in(self, storage: Storage) -> Entry | None:
        """The entry of a storage that an engine has met and nobody has seen here; None if it has been, or is gone."""
        real = storage.handle() if storage.handle is not None else None
        if real is None or storage.key in self._table:
            return None
        watch = Watch(real, self._bury)
        entry = watch.entry = self._table[storage.key] = Entry(storage.key, storage.nbytes, watch, None)
        return entry

    def see(self, tensor: torch.Tensor) -> tuple[Entry | None, bool]:
        """The entry of the tensor's storage, and whether it is a new one; None for what has no bytes of its own."""
        key = _address(tensor)
        if key == NO_ADDRESS:
            return None, False
        known = self._table.get(key)
        if known is not None:
            if known.dtype is None:
                known.dtype = tensor.dtype
            if self._recording and known.number < 0:
                self.enter(known)
                known.born, known.kind = 0, known.kind or Kind.INPUT
            return known, False
        storage = storage_of(tensor)
        watch = Watch(storage, self._bury)
        entry = watch.entry = self._table[key] = Entry(key, storage.nbytes(), watch, tensor.dtype)
        if self._recording:
            self.enter(entry)
        return entry, True

    def write(self, entry: Entry) -> ValueId:
        """The next version of a storage; its id."""
        entry.version += 1
        entry.value = len(self.values)
        self.values.append(Value(id=entry.value, storage=entry.number, version=entry.version))
        return entry.value

    def resized(self, entry: Entry) -> bool:
        """Whether a storage has another size than it had. It then ends with the present op: see it again."""
        storage = entry.watch() if entry.watch is not None else None
        if storage is None or storage.nbytes() == entry.nbytes:
            return False
        del self._table[entry.key]
        entry.died = self.now + 1
        return True

    def label(self, named: Iterable[tuple[Kind, str, torch.Tensor]]) -> None:
        """Say what storages are for; the first name of a storage counts."""
        for kind, name, tensor in named:
            entry = self._table.get(_address(tensor)) if self._recording else self.see(tensor)[0]
            if entry is not None and entry.kind in (None, kind) and not entry.name:
                entry.kind, entry.name = kind, name

    def close(self, needed: Iterable[ValueId]) -> tuple[StorageInfo, ...]:
        """The storages of the step, which is over; those of the values that are `needed` in its backward are
        activations. Nothing is heard of any storage from here on."""
        activations = {self.values[value].storage for value in needed}
        storages = tuple(self._info(entry, activations) for entry in self.entries)
        for entry in (*self._table.values(), *self.entries):
            entry.watch = None
        self._table.clear()
        self._recording = False
        return storages

    def _info(self, entry: Entry, activations: set[int]) -> StorageInfo:
        kind = Kind.ACTIVATION if entry.number in activations else Kind.TEMPORARY
        if entry.at_start:
            kind = Kind.INPUT  # it came from outside, and nobody named it
        return StorageInfo(
            id=entry.number, nbytes=entry.nbytes, kind=entry.kind or kind, alive_from=entry.born,
            alive_until=self.now if entry.died is None else entry.died, present_at_start=entry.at_start,
            present_at_end=entry.died is None, name=entry.name,
            dtype="" if entry.dtype is None else str(entry.dtype)[6:],
        )  # fmt: skip

    def enter(self, entry: Entry) -> None:
        """It is a part of the step from here on."""
        entry.number, entry.born = len(self.entries), self.now
        self.entries.append(entry)
        self.write(entry)

    def _bury(self, watch: weakref.ref[torch.UntypedStorage]) -> None:
        entry: Entry = cast(Watch, watch).entry
        if self._table.get(entry.key) is entry:
            del self._table[entry.key]
        if entry.died is None:
            entry.died = self.now + self.running


NO_ADDRESS = -1
"""In place of the address of a storage, where there is none."""


def _address(tensor: torch.Tensor) -> int:
    try:
        key = storage_address(tensor)
    except (RuntimeError, TypeError):
        return NO_ADDRESS
    # Two that have a size and no memory, as a meta tensor that is not fake has.
    hollow = is_wrapper(tensor) or tensor._is_zerotensor() or (tensor.is_meta and type(tensor) is torch.Tensor)
    return NO_ADDRESS if hollow else key
