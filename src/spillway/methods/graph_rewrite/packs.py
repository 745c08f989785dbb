"""Storages that wait in fewer bytes: the ops that pack and unpack them, and when either form dies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from spillway.costs.packed_bytes import pack_traffic, packed_bytes, unpack_traffic
from spillway.ir.step import Phase, StorageId, ValueId
from spillway.ir.step_draft import Draft, Position, position_of
from spillway.ir.timeline import Kind
from spillway.methods.graph_rewrite.saved_values import Call, SavedInBlocks
from spillway.units import Bytes

PACK: Final = "spillway::pack"
UNPACK: Final = "spillway::unpack"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStorage:
    """A storage that waits in fewer bytes."""

    storage: StorageId
    value: ValueId
    form_storage: StorageId
    """Of the draft: where the packed form is."""
    form: ValueId
    nbytes: Bytes


@final
class Packer:
    """Adds to a draft what packs."""

    def __init__(self, blocks: SavedInBlocks, bits: int) -> None:
        self.blocks, self.draft = blocks, Draft(blocks.step)
        self.packs: dict[StorageId, PackedStorage] = {}
        """By the storage, in the order of packing."""
        self._bits = bits
        self._last: dict[int, Position] = {}
        """Of calls: where they pack what they pack last."""

    def pack(self, storage: StorageId, call: Call | None = None) -> PackedStorage | None:
        """Pack a storage when a call has ended, the first that saved it if none is given; None if it is left alone.

        What is packed already stays so.
        """
        if storage in self.packs:
            return self.packs[storage]
        blocks = self.blocks
        call = call or blocks.owners(storage)[0]
        value, dtype = blocks.settled(storage, call.end), blocks.dtype(storage)
        if value is None or dtype is None:
            return None
        nbytes = blocks.step.storages[storage].nbytes
        bits = self._bits if blocks.is_differentiable(storage) else None
        packed = packed_bytes(nbytes, dtype, bits, two_values=blocks.is_drawn(storage))
        if packed is None:
            return None
        form_storage = self.draft.storage(packed, Kind.ACTIVATION)
        form = self.draft.value(form_storage)
        # A second time it would be rounded another way, by no stream of the model's.
        self._last[call.number] = self.draft.add(
            call.end, PACK, Phase.FORWARD, [value], [form], module=call.name, traffic=pack_traffic(nbytes, packed),
            replayable=False,
        )  # fmt: skip
        self.packs[storage] = PackedStorage(
            storage=storage, value=value, form_storage=form_storage, form=form, nbytes=packed
        )
        return self.packs[storage]

    def unpack(self, found: PackedStorage, call: Call, before: int | None = None) -> ValueId | None:
        """Unpack for a call before the first op of its backward that reads it, or before `before`; what it is then.

        None if nothing reads it there.
        """
        reads = self.blocks.reads(found.value, call)
        if not reads and before is None:
            return None
        first = min(reads) if before is None else before
        nbytes = self.blocks.step.storages[found.storage].nbytes
        unpacked = self.draft.storage(nbytes, Kind.ACTIVATION)
        value = self.draft.value(unpacked)
        self.draft.add(
            first, UNPACK, Phase.BACKWARD, [found.form], [value], module=call.name,
            traffic=unpack_traffic(nbytes, found.nbytes),
        )  # fmt: skip
        self.stand_in(unpacked, value, found.value, reads)
        return value

    def stand_in(self, new: StorageId, value: ValueId, original: ValueId, reads: list[int]) -> None:
        """Let ops of the backward read a new value for one of the step, and it die with the node of the last."""
        for op in reads:
            self.draft.read_instead(op, original, value)
        if reads and max(reads) == max(self.blocks.late_reads(original)):
            storage = self.blocks.step.values[original].storage
            self.draft.outlive(new, position_of(max(self.blocks.dies_after(storage), *reads)))

    def unpack_all(self) -> None:
        """For every call that saved something that is packed. What is packed dies with the last node that has it."""
        for found in self.packs.values():
            for call in self.blocks.owners(found.storage):
                self.unpack(found, call)
            self.draft.outlive(found.form_storage, position_of(self.blocks.dies_after(found.storage)))

    def let_go(self) -> None:
        """Let what blocks saved die as soon as neither the forward nor a node or second run wants it in full."""
        for storage in self.blocks.storages:
            values = self.blocks.values_of(storage)
            wanted = any(self.draft.reads(op, value) for value in values for op in self.blocks.late_reads(value))
            if not wanted and not self.blocks.is_saved_outside(storage):
                self.draft.end(storage, self._done_with(storage))

    def _done_with(self, storage: StorageId) -> Position:
        """When the forward has named it last, and the block that did has packed all that it packs (rule 2)."""
        named = self.blocks.named_in_forward(storage)
        users = [call for call in self.blocks.calls if any(map(call.covers, named))] + self.blocks.owners(storage)
        packs = (self._last[call.number] for call in users if call.number in self._last)
        return max([position_of(max(named)), *packs])
