"""Tensors that a block needs later: what autograd saved in it, what it was called with, and where either waits."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, Protocol, Self, TypeAlias, cast, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from spillway.engines.blocks.compress import CompressedStorage, Compressor
from spillway.engines.blocks.homes import Home, Homes, empty_witness
from spillway.internals.private import bytes_over, counted_storage, grad_mode, owners
from spillway.internals.private import storage_address as address
from spillway.methods.actions import ActionOptions
from spillway.tiers.transfer import SpilledStorage, Storage, Store
from spillway.units import Bytes

PLAIN: Final = (Tensor, FakeTensor)
"""Of no other class are the bytes all that there is to a tensor."""
SMALLEST: Final[Bytes] = 4096
"""Smaller storages stay: a slot is no smaller."""


Spilled: TypeAlias = SpilledStorage | CompressedStorage


class SpilledTensor(NamedTuple):
    """A tensor whose storage waits elsewhere, or in fewer bytes."""

    source: Spilled
    dtype: torch.dtype
    device: torch.device
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, source: Spilled, tensor: Tensor) -> Self:
        """The tensor, in a storage that waits there."""
        return cls(source, tensor.dtype, tensor.device, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def over(self, storage: Storage) -> Tensor:
        """The tensor, over the storage that came back."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def fetch(self) -> Tensor:
        return self.over(self.source.load())


@final
class FrozenTensor:
    """An argument as it was when the block was called.

    It shares bytes and version counter with the argument, unless the block, or somebody after it, is known to write to
    the argument, or nothing is known about that yet: then it holds a copy of the bytes.
    """

    __slots__ = (
        "alias", "attributes", "copied", "home", "key", "mark", "nbytes", "needs_grad", "origin", "spilled",
        "version", "witness", "written",
    )  # fmt: skip

    def __init__(
        self, tensor: Tensor, copies: dict[int, torch.UntypedStorage] | None, homes: Homes | None = None
    ) -> None:
        self.needs_grad = tensor.requires_grad
        whole = torch._C._has_storage(tensor)
        self.key = address(tensor) if whole else None
        """Tells the storage of the argument from others while the block runs."""
        self.nbytes = counted_storage(tensor).nbytes() if whole else 0
        alias = tensor.detach()
        self.copied = copies is not None
        self.witness = empty_witness(alias) if copies is not None else alias
        """Shares the version counter of the argument itself."""
        self.alias: Tensor | None = alias if copies is None else _same_layout(alias, copies)
        self.home: Home | None = None
        """Of one that was copied, or is an argument of a call."""
        if whole and _is_plain(tensor) and (self.copied or homes is not None):
            storage = counted_storage(tensor)
            self.home = homes.of(storage) if homes is not None else Home(storage)
        self.mark = self.home.watch() if self.home is not None else 0
        self.attributes: dict[str, Any] = {}
        """What Python code has attached to it, frozen."""
        self.version = alias._version
        self.written = False
        """Whether the block wrote to the argument before it ended."""
        self.spilled: SpilledTensor | None = None
        """Where the bytes wait, if they do."""
        self.origin: Any = None
        """A weak reference to the storage that was sent to a store: others may hold it still."""

    @property
    def moved_on(self) -> bool:
        """Whether the argument was written to since."""
        unseen = self.home is not None and self.home.writes() != self.mark
        return unseen or bool(self.witness._version != self.version)

    @property
    def overwritten(self) -> bool:
        """Whether the argument holds other bytes than when it was copied, whatever its version says."""
        there = self.home.get() if self.home is not None and self.copied else None
        if there is None or self.alias is None:
            return False
        return not torch.equal(bytes_over(there), bytes_over(counted_storage(self.alias)))

    @property
    def gone(self) -> bool:
        """Whether nobody has the bytes any more."""
        return self.alias is None and self.spilled is None

    def send_away(self, spilled: SpilledTensor) -> None:
        """Hold no bytes: they wait there."""
        self.let_go()
        self.spilled = spilled

    def let_go(self) -> None:
        """Hold no bytes, and go on watching the argument."""
        if self.alias is not None and self.witness is self.alias:
            self.witness = empty_witness(self.alias)
        self.alias = None

    def come_back(self) -> None:
        """Hold the bytes again."""
        if self.spilled is not None:
            self.alias, self.spilled = self.spilled.fetch(), None

    def held_elsewhere(self) -> Storage | None:
        """Of one that was sent to a store, where it lies if somebody else has it still, as it was."""
        sent = self.spilled is not None and isinstance(self.spilled.source, SpilledStorage)
        return self.home.get() if sent and self.home is not None and not self.copied and not self.moved_on else None

    def thaw(self) -> Tensor:
        """The argument, for another call: a leaf, or a copy of one where the block writes to it."""
        if self.alias is not None:
            tensor = self.alias.detach()
        else:
            assert self.spilled is not None
            there = self.held_elsewhere()
            tensor = self.spilled.over(there) if there is not None else self.spilled.fetch()
        if self.needs_grad:
            tensor.requires_grad_()
        if not self.written:
            return tensor
        with grad_mode(enabled=True):  # a backward has it off
            return tensor.clone()


def is_ragged(tensor: Tensor) -> bool:
    """Whether it is a nested tensor of the jagged layout: values, offsets, and a shape with a symbol in it."""
    return tensor.is_nested and tensor.layout is torch.jagged


def detached(tensor: Tensor) -> Tensor:
    """Without its graph, which a node that saves its own result would hold for ever."""
    return tensor.detach() if tensor.requires_grad and not tensor.is_leaf else tensor


def is_sizeless(tensor: Tensor) -> bool:
    """Whether it is a nested tensor of the strided layout, which has no shape."""
    return tensor.is_nested and tensor.layout is torch.strided


def _same_layout(tensor: Tensor, copies: dict[int, torch.UntypedStorage]) -> Tensor:
    """A copy with the same strides over the same whole storage, so that kernels take the same path."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
        return tensor.clone()
    key = address(tensor)
    if key not in copies:
        copies[key] = bytes_over(tensor.untyped_storage()).clone().untyped_storage()
    copy = over(copies[key], tensor)
    copy = torch.conj(copy) if tensor.is_conj() else copy
    return torch._neg_view(copy) if tensor.is_neg() else copy


def over(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """A tensor of the dtype and geometry of `like` over another storage."""
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())


class Owner(Protocol):
    """The call of a block that autograd saved a tensor in."""

    calm: bool
    """Whether its tensors may be handed out without asking it."""

    @property
    def name(self) -> str:
        """For messages."""

    def unpack(self, saved: SavedTensor) -> Tensor:
        """The tensor, for autograd."""


@final
class SavedTensor:
    """One saved tensor: its bytes, or the way back to them. It dies with the node of the graph that saved it."""

    __slots__ = (
        "__weakref__",
        "differentiable",
        "dtype",
        "last_bits",
        "origin",
        "owner",
        "pinned",
        "recomputed",
        "shape",
        "spilled",
        "value",
        "version",
        "witness",
    )

    def __init__(self, owner: Owner, tensor: Tensor, value: Any, pinned: bool, watched: bool) -> None:
        self.owner = owner
        self.shape = tensor.shape if not is_sizeless(tensor) else torch.Size()
        self.dtype, self.differentiable = tensor.dtype, tensor.requires_grad
        self.value = value
        """None while it is away. Where the user has hooks of his own, what they made of the tensor."""
        self.pinned = pinned
        """A parameter, a buffer, or a view of one: not ours to give up."""
        self.recomputed = False
        """The value was brought back, and can be brought back again."""
        self.spilled: SpilledTensor | None = None
        self.witness: Any = value if watched else None
        """Tells of writes, as autograd does where there are no hooks but ours. None where there are others."""
        self.version: int = value._version if watched else 0
        self.origin: tuple[Home, int, tuple[int, ...]] | None = None
        """Where it lies, if that is known, or lay when it was let go: storage, offset and strides."""
        self.last_bits: list[int] | None = None
        """Of the value when it was given up, as far as values are compared."""

    @property
    def unwritten(self) -> bool:
        """Whether it is ours to give up, and nobody has written to it since it was saved, or its block ended."""
        if self.pinned or self.witness is None or self.witness._version != self.version:
            return False
        return self.origin is None or not self.origin[0].written

    @property
    def written(self) -> bool:
        """Whether somebody is known to have written to it since it was saved: nobody may read it any more."""
        return self.witness is not None and bool(self.witness._version != self.version)

    @property
    def lost(self) -> bool:
        """Whether nobody knows where it lies, of one that is ours to give up."""
        value = self.value
        ours = self.origin is None and not self.pinned and value is not None and self.witness is value
        return ours and _is_plain(value)

    def let_go(self) -> None:
        """Give the bytes up; the version counter stays, so that a write to the tensor is still noticed."""
        if self.value is None or self.pinned:
            return
        if self.witness is not None and self.witness is self.value:
            self.witness = empty_witness(self.value)
        self.value = None

    def go_home(self) -> None:
        """Lie again over the storage that it was saved in, if that is there: who wrote to it in a way that no version
        shows, through NumPy or `tensor.data`, wrote to what autograd had saved."""
        if self.value is None or not self.recomputed or self.origin is None:
            return
        storage = self.origin[0].get()
        if storage is not None:
            empty = torch.empty(0, dtype=self.dtype, device=storage.device)
            self.value = empty.set_(storage, self.origin[1], self.shape, self.origin[2])

    def as_first(self, tensor: Tensor) -> Tensor:
        """A nested tensor over the offsets of the first run, if these are equal: every tensor of offsets stands for a
        ragged size of its own. All others as they are."""
        if self.witness is None or tensor.shape == self.shape or not (tensor.is_nested and is_ragged(self.witness)):
            return tensor
        made: Any = tensor
        names, context = made.__tensor_flatten__()
        parts = {name: getattr(made, name) for name in names}
        for name in parts.keys() & {"_offsets", "_lengths"}:
            first = getattr(self.witness, name)
            if first is None or not torch.equal(first, parts[name]):
                return tensor
            parts[name] = first
        return cast(Tensor, type(made).__tensor_unflatten__(parts, context, None, None))

    def give_back(self, value: Any) -> None:
        """Hold bytes again."""
        self.value, self.recomputed = value, True

    def differs(self, tensor: Tensor) -> str:
        """In what a tensor is not like the one that was saved, a clause."""
        return f"{str(tensor.dtype)[6:]} of shape {tuple(tensor.shape)} where it was {self.looks} before"

    @property
    def looks(self) -> str:
        """Dtype and shape, for a sentence."""
        return f"{str(self.dtype)[6:]} of shape {tuple(self.shape)}"

    def check(self) -> None:
        """As autograd does for what it saves itself. Raises RuntimeError if the tensor was written to in place after it
        had been saved."""
        if not self.written:
            return
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {list(self.shape)}, saved in {self.owner.name}, is at version "
            f"{self.witness._version}; expected version {self.version} instead."
        )

    def address(self) -> int | None:
        """The storage that it holds alive; None if it holds none, or one that nobody can tell apart."""
        value = self.value
        if isinstance(value, Tensor) and value.layout is torch.strided and torch._C._has_storage(value):
            return address(value) if not value.is_nested else None
        return None


SavedRef = weakref.ref[SavedTensor]


def locate(every: Iterable[SavedTensor], homes: Homes, *, ended: bool) -> None:
    """Know where these lie, so that nobody writes to them unseen; whether the block that saved them has just ended. To
    what nobody else holds nobody can write."""
    groups: dict[int, list[SavedTensor]] = {}
    for saved in every:
        if saved.lost:
            groups.setdefault(address(saved.value), []).append(saved)
    for key, group in groups.items():
        storage = counted_storage(group[0].value)
        alone = owners(storage) == 1 + len(group) and all(saved.differentiable for saved in group)
        if alone and not homes.knows(key):  # a value that is not differentiable may be somebody else's tensor
            continue
        home = homes.claim(storage, ended=ended)
        for saved in group:
            saved.origin = home, int(saved.value.storage_offset()), saved.value.stride()


def storages(every: list[SavedTensor]) -> dict[int, Bytes]:
    """Bytes of the storages that these hold alive, but for parameters and buffers, by address."""
    found: dict[int, Bytes] = {}
    for saved in every:
        key = None if saved.pinned else saved.address()
        if key is not None and key not in found:
            found[key] = counted_storage(saved.value).nbytes()
    return found


def send_saved(every: Iterable[SavedTensor], shared: set[int], store: Store) -> None:
    """Move what these hold away, each storage once, but for storages that others hold alive as well."""
    sources: dict[int, SpilledStorage] = {}
    for saved in every:
        tensor, key = saved.value, saved.address()
        if saved.pinned or key is None or key in shared or not _movable(tensor, store):
            continue
        if key not in sources:
            sources[key] = store.send(tensor.untyped_storage())
        saved.spilled = SpilledTensor.of(sources[key], tensor)
    for saved in every:
        if saved.spilled is not None:
            saved.let_go()


def compress_saved(
    every: Iterable[SavedTensor], compressor: Compressor, options: ActionOptions, store: Store | None
) -> Bytes:
    """Quantize what these hold, each storage once, and send that to a store; what it takes in addition."""
    groups: dict[int, list[SavedTensor]] = {}
    for saved in every:
        key = saved.address()
        if not saved.pinned and key is not None and _is_plain(saved.value):
            groups.setdefault(key, []).append(saved)
    taken = 0
    for group in groups.values():
        if len({saved.dtype for saved in group}) > 1:
            continue
        found = compressor.compress(group[0].value, options if any(saved.differentiable for saved in group) else None)
        if found is None:
            continue
        source, added = found
        taken += added
        if store is not None and store.takes(group[0].value) and source.nbytes >= SMALLEST:
            source.send(store)
        for saved in group:
            saved.spilled = SpilledTensor.of(source, saved.value)
    for saved in every:
        if saved.spilled is not None:
            saved.let_go()
    return taken


def compress_frozen(
    every: Iterable[FrozenTensor], fixed: set[int], compressor: Compressor, options: ActionOptions
) -> Bytes:
    """Quantize frozen tensors, but for fixed ones; what they take in addition."""
    taken = 0
    for frozen in every:
        tensor = frozen.alias
        if tensor is None or not _is_plain(tensor) or address(tensor) in fixed:
            continue
        found = compressor.compress(tensor, options)
        if found is not None:
            frozen.send_away(SpilledTensor.of(found[0], tensor))
            taken += found[1]
    return taken


def bring_saved_for(saved: SavedTensor, every: Iterable[SavedTensor]) -> None:
    """Bring back what a saved wants: from a store with all that these others sent there, what is compressed alone."""
    assert saved.spilled is not None
    source = saved.spilled.source
    if isinstance(source, CompressedStorage):
        every = [one for one in every if one.spilled is not None and one.spilled.source is source]
    bring_saved(every)


def bring_saved(every: Iterable[SavedTensor]) -> None:
    """Bring everything back that these sent away, views over one storage again.

    What was written to meanwhile stays away: it may have been written while it was copied, and whoever asks for it is
    told so (`SavedTensor.check`).
    """
    loaded: dict[Spilled, Storage] = {}
    for saved in every:
        if saved.spilled is not None and saved.value is None and not saved.written:
            source = saved.spilled.source
            if source not in loaded:
                loaded[source] = source.load()
            saved.give_back(saved.spilled.over(loaded[source]))
            if isinstance(source, SpilledStorage):
                saved.go_home()


def send_frozen(every: Iterable[FrozenTensor], shared: set[int], store: Store) -> None:
    """Move frozen tensors away, but for those whose storages others hold alive as well."""
    sources: dict[int, SpilledStorage] = {}
    for frozen in every:
        tensor = frozen.alias
        if tensor is None or not _movable(tensor, store) or address(tensor) in shared:
            continue
        if address(tensor) not in sources:
            sources[address(tensor)] = store.send(tensor.untyped_storage())
        weak: Any = StorageWeakRef
        frozen.origin = weak(tensor.untyped_storage())
        frozen.send_away(SpilledTensor.of(sources[address(tensor)], tensor))


def held_alone(every: Iterable[FrozenTensor]) -> list[FrozenTensor]:
    """Those of frozen tensors whose bytes nobody else holds, so that they are free when these are sent away."""
    groups: dict[int, list[FrozenTensor]] = {}
    for frozen in every:
        if frozen.alias is not None and _is_plain(frozen.alias):
            groups.setdefault(address(frozen.alias), []).append(frozen)
    found = []
    for group in groups.values():
        storage = cast(Tensor, group[0].alias).untyped_storage()
        if owners(storage) == 1 + len(group):
            found += group
    return found


def come_back(every: Iterable[SavedTensor], arguments: Iterable[FrozenTensor]) -> None:
    """Let nothing wait in a store any more: it is held as it was, or compressed in memory."""
    every = list(every)
    for source in waiting(every, arguments):
        if isinstance(source, CompressedStorage):
            source.come_back()
    sent = [saved for saved in every if saved.spilled is not None and isinstance(saved.spilled.source, SpilledStorage)]
    bring_saved(sent)
    for saved in sent:
        saved.spilled, saved.recomputed = None, False
    for frozen in arguments:
        if frozen.spilled is not None and isinstance(frozen.spilled.source, SpilledStorage):
            if frozen.moved_on and not frozen.copied:
                frozen.spilled = None  # nobody may call with it any more: it may have been written while it was copied
            else:
                frozen.come_back()


def waiting(every: Iterable[SavedTensor], arguments: Iterable[FrozenTensor]) -> list[Spilled]:
    """What of these waits elsewhere, was read ahead, or is compressed, but for what others have in memory."""
    places = [saved.spilled for saved in every if saved.value is None]
    places += [frozen.spilled for frozen in arguments if frozen.held_elsewhere() is None]
    return list(dict.fromkeys(place.source for place in places if place is not None))


def start_in(sources: Iterable[Spilled], most: Bytes | None) -> Bytes:
    """Let what waits elsewhere come, up to so many bytes; how many are here or on their way."""
    sources = list(sources)
    coming = sum(source.nbytes for source in sources if source.ahead)
    for source in sources:
        if source.absent and (most is None or coming + source.nbytes <= most):
            source.start_in()
            coming += source.nbytes * source.ahead
    return coming


def _movable(tensor: Tensor, store: Store) -> bool:
    return store.takes(tensor) and may_leave(tensor)


def may_leave(value: Any) -> bool:
    """Whether it is a tensor whose storage could wait elsewhere, and is worth that."""
    return type(value) in PLAIN and _is_strided(value) and counted_storage(value).nbytes() >= SMALLEST


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and _is_strided(tensor)


def _is_strided(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_nested)
