"""Storages that what a block saved or was called with lies in, and what is written to them unseen.

NOTE [Unseen]. Version counters tell of writes, but for those through an alias that does not share them: what
`tensor.data`, `set_` and `tensor.data = other` make has a counter of its own, which tells as well; an array of NumPy, a
capsule of dlpack, a storage object and an address have none. Autograd reads at the backward what was written by then,
so a second run, which knows nothing of it, is not enough:

 1. Whoever is about to get an alias says so first (`torch_patches`, and here), and the home of these bytes notes it.
 2. A home that is claimed, by a saved tensor whose bytes are let go, holds its storage from the first alias on. When
    nobody else does, it lets go of it if nothing was written, which it looks for at every seam; else, and where
    somebody has asked for the address, at the backward.
 3. What a counter does not tell a digest of the bytes does: taken before the alias is, and when it is looked at.
 4. A home that nobody has claimed by then may be claimed later, of a block that is kept and then given up. So while a
    forward runs all aliases are noted, and what was written since the block has ended counts.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import sys
import weakref
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from spillway.engines.tensors.torch_patches import METHODS, NOTING, WhileOpen, take_away
from spillway.internals.private import bytes_over, counted_storage, grad_mode, owners, unheard_by_modes
from spillway.internals.private import storage_address as address
from spillway.units import Bytes

_LOOKING: Final = (
    "spillway.engines.", "spillway.internals.", "spillway.memory.", "spillway.session.", "spillway.tiers.",
    "torch._dynamo.", "torch._functorch.", "torch._subclasses.", "torch.autograd.graph", "torch.distributed.fsdp.",
    "torch.nn.modules.", "torch.serialization",
)  # fmt: skip
"""Modules that look at storages and keep nothing by which they could write unseen."""
_POINTERS: Final = ("data_ptr", "const_data_ptr")
_OF_STORAGES: Final = ("__setitem__", "fill_", "copy_", "byteswap", "data_ptr")
"""Methods of theirs that write, or tell where."""
_PART: Final[Bytes] = 1 << 14
COMPRESSED: Final = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
_of_torch: Final = cast(Any, torch._C.TensorBase)


def empty_witness(tensor: Tensor) -> Tensor:
    """A tensor without bytes that shares the version counter of `tensor`; in compressed layouts, of which torch cannot
    make one, with all of them."""
    witness = tensor.detach()
    if tensor.is_nested and tensor.layout is torch.jagged:
        cast(Any, witness)._values = cast(Any, tensor)._values.new_empty(0)
        return witness
    if tensor.layout in COMPRESSED:
        return witness
    same = type(tensor) is Tensor
    nothing = _nothing(tensor.dtype, tensor.device, tensor.layout) if same else tensor.new_empty(0)
    _of_torch.data.__set__(witness, nothing)
    return witness


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device, layout: torch.layout) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device, layout=layout)


@final
class Home:
    """A storage that others may hold, looked at and not held, but for rule 2."""

    __slots__ = (
        "__weakref__", "_address", "_aliases", "_bare", "_changes", "_digest", "_first", "_held", "_nbytes", "_unsure",
        "_watched", "_weak",
    )  # fmt: skip

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak: Any = cast(Any, StorageWeakRef)(storage)
        self._nbytes = storage.nbytes()
        self._held: torch.UntypedStorage | None = None
        self._aliases: list[Tensor] = []
        """Witnesses of their versions."""
        self._changes = 0
        self._address = False
        """Whether somebody may have nothing but that, and write there at any moment."""
        self._bare = self._unsure = self._watched = False
        """Whether there may be an alias without a version, there was one when nobody looked, and somebody does."""
        self._digest: bytes | None = None
        """As soon as somebody looks, where there may be one."""
        self._first: int | None = None
        """How much was written when it was claimed, at the earliest."""

    def get(self) -> torch.UntypedStorage | None:
        """The storage, if it is there, with all its bytes."""
        storage = self._there()
        return storage if storage is not None and storage.nbytes() == self._nbytes else None

    def _there(self) -> torch.UntypedStorage | None:
        return cast("torch.UntypedStorage | None", cast(Any, torch.UntypedStorage)._new_with_weak_ptr(self._weak.cdata))

    def watch(self) -> int:
        """Somebody looks from here on; `writes` now."""
        self._unsure |= self._bare and not self._watched
        self._watched = True
        return self.writes()

    def writes(self) -> int:
        """A number that has grown if something was written since somebody has asked, for who watches."""
        if self._bare and (now := self._digest_now()) != self._digest:
            self._changes += self._digest is not None
            self._digest = now
        return self._changes + sum([alias._version for alias in self._aliases]) if self._aliases else self._changes

    @property
    def written(self) -> bool:
        """Whether something was since it was claimed."""
        return self._first is not None and self.writes() > self._first

    def claim(self, *, ended: bool) -> None:
        """Somebody will want at the backward what is in it then: all that is written from here on counts, and what was
        since it is known if the block that saved it did not just end."""
        now = self.watch()
        since = now if ended else 0 - self._unsure
        self._first = since if self._first is None else min(since, self._first)
        self._hold()

    def note(self, alias: Tensor | None, *, by_address: bool = False) -> None:
        """There is an alias from here on; None of one without a version."""
        self._address |= by_address
        if alias is not None and not alias.is_inference():
            self._changes -= alias._version
            self._aliases.append(empty_witness(alias))
        elif not self._bare:
            self._bare = True
            self._digest = self._digest_now() if self._watched else None
        self._hold()

    def settle(self) -> bool:
        """Let go of it where nobody else has it, and nothing was written; whether that is not to be asked again."""
        if self._held is None:
            return True
        if owners(self._held) > 1 or sys.getrefcount(self._held) > 2:
            return False
        if not self.written and not self._address:
            self._changes = self.writes()
            self._held, self._bare, self._aliases = None, False, []
        return True

    @property
    def held(self) -> bool:
        """Whether it is, for who may have written to it."""
        return self._held is not None

    def _hold(self) -> None:
        if self._first is not None and (self._aliases or self._bare):
            self._held = self.get()

    def _digest_now(self) -> bytes | None:
        """By ops, since bytes of a watched step may be elsewhere."""
        storage = self._there()
        if storage is None:
            return self._digest
        if storage.nbytes() != self._nbytes:
            return b"of another size"
        found = hashlib.blake2b(digest_size=16)
        with grad_mode(enabled=False):
            whole = bytes_over(storage)
            for begin in range(0, self._nbytes, _PART):
                part = whole[begin : begin + _PART].to("cpu", copy=True)
                found.update((ctypes.c_char * part.numel()).from_address(_of_torch.data_ptr(part)))
        return found.digest()


@final
class Homes:
    """Those that the calls of one engine know."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[int, Home] = weakref.WeakValueDictionary()
        self._young: dict[int, Home] = {}
        """That nobody has asked for yet."""
        self._suspects: list[weakref.ref[Home]] = []
        self.open = False
        """Whether a forward runs, so that all aliases are noted."""
        self.notes = 0
        """How many aliases there were in it."""
        METHODS.add(self)
        ALIASES.add(self)
        self._reference = weakref.ref(self, _gone)
        NOTING.append(self._reference)

    def close(self) -> None:
        """Nothing is noted any more."""
        _gone(self._reference)
        ALIASES.remove(self)
        METHODS.remove(self)

    def of(self, storage: torch.UntypedStorage) -> Home:
        """The home that is this storage."""
        home = self._known.get(storage._cdata)
        if home is None:
            home = self._known[storage._cdata] = Home(storage)
        self._young.pop(storage._cdata, None)
        return home

    def knows(self, key: int) -> bool:
        """Whether there may be one of this address."""
        return key in cast(Any, self._known).data  # asked in a fourth of the time

    def begin(self) -> None:
        """A forward begins: what nobody has asked for since the one before nobody will."""
        self._young, self.notes = {}, 0
        self.settle()

    def goes_on(self) -> None:
        """A block is about to run in a forward."""
        self.open = True
        self.settle()

    def reached(self) -> None:
        """A backward asks for what a block saved."""
        self.open = False
        self.settle()

    def settle(self) -> None:
        """At a seam: what is held and was not written to is let go of where nobody else has it."""
        if self._suspects:
            suspects, self._suspects = self._suspects, []  # other threads add to them
            homes = ((one, one()) for one in suspects)
            self._suspects += [one for one, home in homes if home is not None and not home.settle()]

    def held(self) -> set[int]:
        """The addresses of storages that are held for who may write to them."""
        return {key for key, home in [*self._known.items()] if home.held} if self._suspects else set()

    def claim(self, storage: torch.UntypedStorage, *, ended: bool) -> Home:
        """The home of what somebody will want at the backward, see there."""
        home = self.of(storage)
        home.claim(ended=ended)
        if home.held:
            self._suspect(home)
        return home

    def noticed(self, thing: Tensor | torch.UntypedStorage, name: str = "", alias: Tensor | None = None) -> None:
        """Somebody is about to get an alias, or by a name what has no version."""
        if not (self.open or len(self._known)):
            return
        if isinstance(thing, torch.UntypedStorage):
            key = thing._cdata
        elif type(thing) in (Tensor, nn.Parameter) and torch._C._has_storage(thing) and not thing.is_nested:
            key = address(thing)
        else:
            return
        if (self.open or self.knows(key)) and not only_looks():
            self._note(thing, alias, by_address=name in _POINTERS)

    @unheard_by_modes
    def _note(self, thing: Tensor | torch.UntypedStorage, alias: Tensor | None, *, by_address: bool) -> None:
        if thing.is_cuda and by_address:
            return  # kernels of others ask for the address at every call
        storage = thing if isinstance(thing, torch.UntypedStorage) else counted_storage(thing)
        if storage.device.type == "meta":
            return
        home = self._known.get(storage._cdata)
        if home is None:
            home = self._known[storage._cdata] = self._young[storage._cdata] = Home(storage)
        self.notes += 1
        home.note(alias, by_address=by_address)
        self._suspect(home)

    def _suspect(self, home: Home) -> None:
        if home.held and not any(one() is home for one in self._suspects):
            self._suspects.append(weakref.ref(home))


def only_looks() -> bool:
    """Whether it is ours or torch's own that asks, of two calls before, and keeps nothing."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") in (__name__, METHODS.__module__):
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith(_LOOKING)


def _gone(reference: weakref.ref[Homes]) -> None:
    if reference in NOTING:
        NOTING.remove(reference)


def _tell(thing: Tensor | torch.UntypedStorage, alias: Tensor | None, name: str = "") -> None:
    for reference in tuple(NOTING):
        if (homes := reference()) is not None:
            homes.noticed(thing, name, alias)


def _install() -> None:
    """Around what stands there, which may be somebody's own."""
    tensors: Any = torch.Tensor
    data, set_ = tensors.data, tensors.set_

    def read(tensor: Tensor) -> Tensor:
        alias: Tensor = data.__get__(tensor)
        if type(tensor) is not nn.Parameter:
            _tell(tensor, alias)
        return alias

    def put(tensor: Tensor, other: Tensor) -> None:
        data.__set__(tensor, other)
        if type(other) is not nn.Parameter:
            _tell(other, tensor)

    @functools.wraps(set_)
    def put_over(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = set_(tensor, *args, **kwargs)
        source = args[0] if args else kwargs.get("source")
        source = getattr(source, "_untyped_storage", source)
        if isinstance(source, Tensor | torch.UntypedStorage):
            _tell(source, tensor)
        return result

    tensors.data = _Data(read, put, data.__delete__)
    tensors.data.__wrapped__ = data
    tensors.set_ = put_over
    for name in _OF_STORAGES:
        setattr(torch.UntypedStorage, name, _telling(getattr(torch.UntypedStorage, name)))


@final
class _Data(property):
    """With a place for what it stands around."""


def _telling(original: Any) -> Any:
    @functools.wraps(original)
    def method(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        _tell(storage, None, original.__name__)
        return original(storage, *args, **kwargs)

    return method


def _uninstall() -> None:
    take_away(torch.Tensor, ("data", "set_"))
    take_away(torch.UntypedStorage, _OF_STORAGES)


ALIASES: Final = WhileOpen(_install, _uninstall)
"""What makes tensors with versions of their own tells first."""
