"""Storages of blocks that wait in fewer bytes, in memory or elsewhere: the lossy home.

NOTE [When bytes are quantized]. A block's saved tensors are quantized when it has ended, so nothing that its forward
reads is (safety rule 8): its results are handed on as they were, and only its own backward, or its second run, gets
what was made of them. What is quantized, and what is not:

 1. Storages of float16, bfloat16, float32 and float64 that hold a differentiable tensor, as a whole: views of one come
    back as views of one.
 2. Storages of other floating tensors and of bool, if they hold two values only: exactly, one bit an element. Masks of
    dropout are such; statistics of normalizations are not, and stay.
 3. Parameters, buffers, integers, and storages below one group never. What a forward computes from parameters, such as
    the copies that autocast casts, is no parameter: it is quantized like anything else.
 4. Arguments and results of a block as well. Somebody else holds them now, but the caller's variable moves on, and
    then the block that made a tensor and the block that read it are its only holders: they share one quantized copy.
    Where somebody holds it all the same (a block that keeps, a connection past many blocks, the user), that copy is
    what is lost: an eighth of the tensor in 4 bits.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, NamedTuple, cast, final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from spillway.engines.blocks.arithmetic import EAGER, compiled
from spillway.engines.blocks.quantize import AbstractPacking, pack
from spillway.internals.private import bytes_over
from spillway.internals.private import storage_address as address
from spillway.methods.actions import ActionOptions
from spillway.tiers.transfer import SpilledStorage, Storage, Store
from spillway.units import Bytes

SEED: Final = 0
"""Of the chance by which elements are rounded, a stream of its own."""
FEW: Final = 64


@final
class CompressedStorage:
    """A storage in fewer bytes, for as long as somebody refers to this."""

    __slots__ = ("__weakref__", "_away", "_data", "_packing", "nbytes")

    def __init__(self, data: Tensor, packing: AbstractPacking) -> None:
        self._data: Tensor | None = data
        self._packing = packing
        self._away: SpilledStorage | None = None
        self.nbytes: Bytes = data.numel()
        """Of the compressed form."""

    @property
    def exact(self) -> bool:
        """Whether the same bits come back."""
        return self._packing.exact

    @property
    def sent(self) -> bool:
        """Whether the compressed form was sent away, wherever it is now."""
        return self._away is not None

    @property
    def absent(self) -> bool:
        """Whether not even the compressed form is in memory, or on its way there."""
        return self._away is not None and self._away.absent

    @property
    def leaving(self) -> bool:
        """Whether the compressed form is still in memory, since its copy out is not done."""
        return self._away is not None and self._away.leaving

    @property
    def ahead(self) -> bool:
        """Whether it came, or is coming, before anybody asked for it."""
        return self._away is not None and self._away.ahead

    def send(self, store: Store) -> None:
        """Let the compressed form wait elsewhere."""
        if self._data is not None:
            self._away, self._data = store.send(self._data.untyped_storage()), None

    def come_back(self) -> None:
        """Hold the compressed form again."""
        self._data, self._away = self._compressed(), None

    def load(self) -> Storage:
        """What became of the storage. The same bits every time."""
        return self._packing.unpack(self._compressed()).untyped_storage()

    def start_in(self) -> None:
        """Let the compressed form come beside the ops."""
        if self._away is not None:
            self._away.start_in()

    def drop_arrival(self) -> None:
        """What came before anybody asked for it is not wanted any more."""
        if self._away is not None:
            self._away.drop_arrival()

    def forget_arrival(self) -> None:
        """The same, for its memory, which is free afterwards."""
        if self._away is not None:
            self._away.forget_arrival()

    def _compressed(self) -> Tensor:
        if self._away is None:
            return cast(Tensor, self._data)
        return bytes_over(self._away.load())


class _Known(NamedTuple):
    storage: Any
    """A `StorageWeakRef`."""
    version: int
    dtype: torch.dtype
    bits: int
    """An element, unless it comes back exactly."""
    source: weakref.ref[CompressedStorage]


@final
class Compressor:
    """Compresses storages, each once. As many steps of the same model are the same again."""

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}
        self._known: dict[int, _Known] = {}
        """By the address of the storage, which is nobody else's as long as the weak reference is there."""
        self._full = FEW
        """So many are known before those are forgotten that are gone."""

    def compress(self, tensor: Tensor, options: ActionOptions | None) -> tuple[CompressedStorage, Bytes] | None:
        """The whole storage behind a plain strided tensor in fewer bytes, and what that takes in addition.

        Args:
            options: How it is quantized; None if its bits may not change.

        Returns:
            None if the storage is to stay as it is.
        """
        if len(self._known) >= self._full:
            for number, one in list(self._known.items()):  # other threads may compress as well
                if one.source() is None or one.storage.expired():
                    self._known.pop(number, None)
            self._full = 2 * len(self._known) + FEW
        key, as_now = address(tensor), (tensor._version, tensor.dtype)
        known, bits = self._known.get(key), options.bits if options is not None else None
        if known is not None and not known.storage.expired() and (known.version, known.dtype) == as_now:
            source = known.source()
            if source is not None and (source.exact or (bits is not None and bits <= known.bits)):
                return source, 0
        storage = tensor.untyped_storage()
        if tensor.is_meta or storage.nbytes() % tensor.element_size():
            return None
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(cast(Any, storage))
        arithmetic = compiled(tensor.device) if options is not None and options.compiled else EAGER
        packed = pack(flat, bits, self._generator(tensor.device), arithmetic)
        if packed is None:
            return None
        source = CompressedStorage(*packed)
        weak: Any = StorageWeakRef
        self._known[key] = _Known(weak(storage), *as_now, bits or 0, weakref.ref(source))
        return source, source.nbytes

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(SEED)
        return self._generators[device]
