"""The arena: CPU tensors at addresses whose pages are kept and moved, and seldom faulted in twice."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, cast, final

import torch

from spillway.errors import NativeError
from spillway.internals.locks import renew_in_children
from spillway.native.library import load
from spillway.units import Bytes

_SPAN: Final[Bytes] = 1 << 38
"""Addresses, not memory."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What the arena has in hand: bytes, rounded up to pages; and how often it did what, since it was opened."""

    live: Bytes
    """Of tensors."""
    peak_live: Bytes
    resident: Bytes
    """Of tensors, and of pages that are kept for the next ones."""
    peak_resident: Bytes
    blocks: int
    fitted: int
    """Blocks that lie in place of freed ones."""
    collected: int
    """Blocks whose pages were collected from several freed ones."""
    moves: int
    moved: Bytes
    faulted: Bytes
    """Pages that the system was asked for."""
    mappings: int
    """At most so many mappings."""


class _Counts(ctypes.Structure):
    _fields_ = [(field.name, ctypes.c_size_t) for field in fields(Counts)]


_Ask: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)

_lock = threading.RLock()
renew_in_children(sys.modules[__name__], "_lock")
_holders: Final[set[int]] = set()
_told: Final[set[str]] = set()


@functools.cache
def _opened() -> ctypes.CDLL:
    """The library, with a range of addresses. Raises NativeError."""
    library = load()
    library.spillway_arena_reserve.argtypes = library.spillway_arena_trim.argtypes = [ctypes.c_size_t]
    library.spillway_arena_allocator.restype = ctypes.c_void_p
    for name in ("owns", "is_loaded", "make_resizable"):
        getattr(library, f"spillway_arena_{name}").argtypes = [ctypes.c_void_p]
    library.spillway_arena_trace.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    library.spillway_arena_forget.argtypes = [ctypes.c_int, ctypes.c_size_t]
    library.spillway_arena_since.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.spillway_arena_guard.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_void_p]
    library.spillway_op_memory.argtypes = [ctypes.c_char_p, _Ask]
    for name in ("", "_cells", "_small"):
        getattr(library, f"spillway_op_memory{name}").restype = ctypes.c_void_p
    for name in ("cells", "close", "end_lending", "has", "small"):
        getattr(library, f"spillway_op_memory_{name}").argtypes = [ctypes.c_void_p]
    library.spillway_op_memory_knows.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.spillway_op_memory_adopt.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    library.spillway_op_memory_adopt.restype = ctypes.c_size_t
    library.spillway_op_memory_lends.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.spillway_op_memory_here.argtypes = [ctypes.c_void_p, ctypes.c_int]
    error = library.spillway_arena_reserve(_SPAN)
    if error:
        raise NativeError(f"the system gives no {_SPAN >> 30} GiB of addresses ({os.strerror(error)}).")
    return library


def counts() -> Counts:
    """What the arena of this process has in hand now; nothing where none was opened."""
    taken = _Counts()
    if _opened.cache_info().currsize:
        _opened().spillway_arena_counts(ctypes.byref(taken))
    return Counts(**{field.name: getattr(taken, field.name) for field in fields(Counts)})


def reset_peaks() -> None:
    """Peaks are of what follows."""
    _opened().spillway_arena_reset_peaks()


def trim(keep: Bytes = 0) -> None:
    """Give pages that no tensor uses back to the system, all but so many bytes."""
    if _opened.cache_info().currsize:
        _opened().spillway_arena_trim(keep)


def _new_storage(kind: Any, *args: Any, **kwargs: Any) -> torch.UntypedStorage:
    """`torch.UntypedStorage.__new__`, which asks torch's default allocator, and not the one of tensors."""
    if len(args) == 1 and type(args[0]) is int and (not kwargs or _names_the_cpu(**kwargs)):
        kwargs = {"allocator": _opened().spillway_arena_allocator()}
    return cast(torch.UntypedStorage, torch._C.StorageBase.__new__(kind, *args, **kwargs))


def _names_the_cpu(*, device: Any = "cpu", **others: Any) -> bool:
    return not others and (device is None or torch.device(device).type == "cpu")


@final
class Arena:
    """As long as there is one of these, CPU tensors and storages are born in the arena of this process; there is only
    one."""

    def __init__(self) -> None:
        """Raises NativeError where there cannot be an arena, with the reason."""
        self._library = _opened()
        with _lock:
            _holders.add(id(self))
            self._library.spillway_arena_serve(1)
            cast(Any, torch.UntypedStorage).__new__ = _new_storage

    @staticmethod
    def for_session() -> Arena | None:
        """One, or None where there cannot be one; why not is said once."""
        try:
            return Arena()
        except NativeError as reason:
            if str(reason) not in _told:
                _told.add(str(reason))
                cost = "what leaves memory and comes back costs page faults"
                warnings.warn(f"Spillway runs without its native part, so that {cost}: {reason}", stacklevel=2)
            return None

    def owns(self, address: int) -> bool:
        """Whether memory at this address is the arena's."""
        return bool(self._library.spillway_arena_owns(address))

    def is_loaded(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is as `torch.load` makes them: it cannot be resized, although its memory is torch's own."""
        return bool(self._library.spillway_arena_is_loaded(storage._cdata))

    def make_resizable(self, storage: torch.UntypedStorage) -> None:
        """One that is loaded is like any other from here on."""
        self._library.spillway_arena_make_resizable(storage._cdata)

    def release(self) -> None:
        """After the last one, tensors are born where torch puts them, and free pages go back. Called again, it does
        what was not done."""
        with _lock:
            if id(self) in _holders:
                if len(_holders) == 1:
                    if "__new__" in vars(torch.UntypedStorage):
                        del cast(Any, torch.UntypedStorage).__new__
                    self._library.spillway_arena_serve(0)
                    self._library.spillway_arena_trim(0)
                _holders.discard(id(self))

    def __del__(self) -> None:
        if hasattr(self, "_library") and _lock is not None:  # as it is when the interpreter takes modules apart
            self.release()


def serves() -> bool:
    """Whether CPU tensors are born in the arena now."""
    return bool(_holders)


@final
class Trace:
    """What CPU tensors take above what is there now: what is born, less what of it dies, and less what is known and
    dies. Small blocks count too, and those of every thread that has no trace of its own."""

    def __init__(self, known: Mapping[int, Bytes]) -> None:
        """`known` has the bytes of storages that are there, by the address of their memory. Raises NativeError where 32
        traces are open."""
        addresses, sizes = (ctypes.c_size_t * len(known))(*known), (ctypes.c_size_t * len(known))(*known.values())
        self._told = (ctypes.c_int64 * 2)()
        self._library = _opened()
        self._trace: int = self._library.spillway_arena_trace(addresses, sizes, len(known))
        if self._trace < 0:
            raise NativeError("too many steps are traced at a time.")

    def forget(self, address: int) -> None:
        """A storage that was known is gone; told twice, it went once."""
        self._library.spillway_arena_forget(self._trace, address)

    def since(self) -> tuple[int, int]:
        """Bytes now, and the most since this was asked last, both above the beginning."""
        self._library.spillway_arena_since(self._trace, self._told)
        return self._told[0], self._told[1]

    def guard(self, most: Bytes, lender: OpMemory) -> None:
        """From now on what this thread takes lies in the lender's file, uncounted, where more than so many bytes would
        be there above the beginning; where the file has no room either, it counts."""
        self._library.spillway_arena_guard(self._trace, most, lender._memory)

    def end(self) -> None:
        """Nothing is counted any more."""
        if self._trace >= 0:
            trace, self._trace = self._trace, -1
            self._library.spillway_arena_end_trace(trace)

    def __del__(self) -> None:
        if hasattr(self, "_trace"):
            self.end()


RESIDENT, STATE, ALLOWED, LOCAL, ABOVE, MOST, PEAK, BEYOND, UNWATCHED, HELD = range(10)
"""Cells of an `OpMemory`: the session's account when the op began; what of the following it is; the budget; what the op
has now, in memory and above the budget; the most of both together; the most of the account and what ops had in memory;
the most that one op had above the budget; whether a whole step counts as one op; what unwatched steps made, and
watched ones outside of ops, of which the account has nothing, without what is small."""
OWN, IDLE, BEGINS, RUNS, WENT_BEYOND, REFUSED = range(-1, 5)
"""What `STATE` says. Python writes the first three; an op that allocated nothing stays at the third. What the engine
takes between ops, and counts by itself, is its own."""
NONE, COUNTED, OF_ENGINE = range(3)
"""What is answered where a watched step takes memory outside of any op: no room, so that it lies in the file; it is in
the account now; it is the engine that takes it."""


def _numbers(address: int, count: int) -> memoryview:
    """Of memory that is never freed."""
    return memoryview((ctypes.c_int64 * count).from_address(address)).cast("B").cast("q")


@final
class OpMemory:
    """What the ops of a session take for themselves while they run, on top of its account, in the thread of its step.
    What has no room in the budget lies in a mapped file without a name, in a directory, until it is freed. In watched
    steps `ask` is called, without a lock, for what that thread takes outside of any op: how many bytes, and one of
    `NONE`, `COUNTED` and `OF_ENGINE` back."""

    def __init__(self, directory: str | os.PathLike[str], ask: Callable[[Bytes], int] | None = None) -> None:
        """Raises NativeError where there cannot be an arena."""
        self._library = _opened()
        self._ask = _Ask() if ask is None else _Ask(ask)
        self._memory: int = self._library.spillway_op_memory(os.fsencode(directory), self._ask)
        self.address: int = self._library.spillway_op_memory_cells(self._memory)
        self.cells = _numbers(self.address, 10)
        self._small = _numbers(self._library.spillway_op_memory_small(self._memory), 1)
        """What is small of what unwatched steps made."""
        self._thread = 0
        """Whose step runs."""
        weakref.finalize(self, self._library.spillway_op_memory_close, self._memory).atexit = False

    def begin(self, allowed: Bytes) -> None:
        """A step of this thread begins; peaks are of what follows."""
        self.cells[STATE], self.cells[ALLOWED] = IDLE, allowed
        self.cells[PEAK] = self.cells[BEYOND] = 0
        self._thread = threading.get_ident()
        self._library.spillway_op_memory_here(self._memory, 0)

    @contextlib.contextmanager
    def counted_elsewhere(self) -> Iterator[None]:
        """What the thread of a watched step takes within is no op's, and not the user's. Others, whose memory is not
        counted here, leave the state alone: an op of that thread may be running."""
        if self._thread != threading.get_ident():
            yield
            return
        before, self.cells[STATE] = self.cells[STATE], OWN
        try:
            yield
        finally:
            self.cells[STATE] = before

    def begin_unwatched(self, allowed: Bytes, resident: Bytes) -> Bytes:
        """A step of this thread begins that nobody watches: what it takes counts as if it were one op, on top of what
        is resident by the account, and of what earlier ones made that the account did not take over. Returns all
        that."""
        self.cells[ALLOWED], self.cells[RESIDENT] = allowed, resident
        self._library.spillway_op_memory_here(self._memory, 1)
        return self.cells[PEAK]

    def died(self, nbytes: Bytes) -> None:
        """Of what was resident when an unwatched step began, so much is gone; with a minus, more is by now."""
        self.cells[RESIDENT] -= nbytes

    def held(self) -> Bytes:
        """What unwatched steps made, and the account did not take over."""
        return self.cells[HELD] + self._small[0]

    def counted(self, resident: Bytes) -> Bytes:
        """That, and what is resident by the account."""
        return resident + self.held()

    def knows(self, storage: int) -> bool:
        """Whether an unwatched step made the bytes of the storage at this address, which the account did not take over;
        also those that lie in the file, and do not count."""
        return bool(self._library.spillway_op_memory_knows(self._memory, storage))

    @property
    def asked(self) -> tuple[int, int]:
        """The same for native code: the address of a function, and what is to be its first argument."""
        return ctypes.cast(self._library.spillway_op_memory_knows, ctypes.c_void_p).value or 0, self._memory

    def adopt(self, storages: Sequence[int]) -> Bytes:
        """The account takes over what unwatched steps made of these storages, by their addresses: how much it was."""
        addresses = (ctypes.c_size_t * len(storages))(*storages)
        taken: int = self._library.spillway_op_memory_adopt(self._memory, addresses, len(storages))
        return taken

    def taken(self) -> tuple[Bytes, Bytes]:
        """The most that the last step had at once, and what of it lay above the budget."""
        return self.cells[PEAK], self.cells[BEYOND]

    def end(self) -> None:
        """This thread's ops count for nobody."""
        self.cells[STATE], self.cells[UNWATCHED], self._thread = IDLE, 0, 0
        self._library.spillway_op_memory_here(None, 0)

    def lent(self) -> Bytes:
        """The guarded trace of a step has ended (`Trace.guard`): the most that it was lent at once."""
        self._library.spillway_op_memory_end_lending(self._memory)
        return self.cells[BEYOND]

    def is_beyond(self, address: int) -> bool:
        """Whether memory that begins there is such a file's."""
        return bool(self._library.spillway_op_memory_has(address))

    def lends(self, address: int = 0) -> bool:
        """Whether memory that begins there, or any at all, lies in the file of this session."""
        return bool(self._library.spillway_op_memory_lends(self._memory, address))

    def inside(self) -> Bytes:
        """What the op that ended last had for itself at most, beside what it left behind."""
        return self.cells[MOST] - self.cells[LOCAL] - self.cells[ABOVE]

    def close(self) -> None:
        """The file goes with the last of its memory that is used."""
        self._library.spillway_op_memory_close(self._memory)
