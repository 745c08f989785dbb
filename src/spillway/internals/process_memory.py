"""This process's memory as the operating system counts it, and how to give freed memory back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Final, cast, final

from spillway.errors import DeviceFullError
from spillway.internals.locks import renew_in_children
from spillway.units import Bytes

_PAGE: Bytes = os.sysconf("SC_PAGE_SIZE")
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_NO_MEMORY: Final = (
    "[enforce fail at alloc_cpu.cpp", "not enough memory", "an't allocate memory", "annot allocate memory",
    "std::bad_alloc",
)  # fmt: skip
"""What torch says of the CPU in a RuntimeError."""
_CUT_SHORT: Final = 15
"""Characters of its sentence for which it needs no memory; where there is none at all no more of it is heard."""


def found_no_memory(error: BaseException) -> bool:
    """Whether an op or an allocation failed because the system gives no more memory."""
    said = str(error)
    told = any(sentence in said for sentence in _NO_MEMORY) or said == _NO_MEMORY[0][:_CUT_SHORT]
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and told)


@contextlib.contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Around what is allocated for the engine's own purposes. Raises DeviceFullError if the system gives no memory for
    it."""
    try:
        yield
    except Exception as error:
        if not found_no_memory(error):
            raise
        raise DeviceFullError(
            f"The system gives this process no memory for {what}: raise `ulimit -v` or what its control group allows, "
            f"or lower budget=."
        ) from error


@final
class ResidentSet:
    """Resident set size (RSS) of this process, cheap enough to read often (about a microsecond on Linux).

    Where there is no /proc, everything reads 0 and nothing is trimmed.
    """

    __slots__ = ("_file", "_libc", "_statm")

    def __init__(self) -> None:
        self._file: FileIO | None = None
        self._statm = -1
        with contextlib.suppress(OSError):
            self._file = FileIO("/proc/self/statm")
            self._statm = self._file.fileno()
        self._libc: ctypes.CDLL | None = None
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            if hasattr(libc, "malloc_trim"):
                self._libc = libc

    def read(self) -> Bytes:
        """Bytes of anonymous memory in RAM: what was mapped from files can be had again and does not count."""
        if self._statm < 0:
            return 0
        fields = os.pread(self._statm, 128, 0).split()
        return (int(fields[1]) - int(fields[2])) * _PAGE

    def trim(self) -> None:
        """Return what was freed to the system (glibc keeps tensors of up to a megabyte otherwise)."""
        if self._libc is not None:
            self._libc.malloc_trim(0)
            _return_end_of_heap()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor; once, also where an interruption has this called again."""
        self._statm = -1
        if self._file is not None:
            self._file.close()


_NO_LIMIT: Bytes = 1 << 62
_LEAST: Bytes = 2 << 20
_MOST: Bytes = 4 << 20
"""Bytes created between two looks at the resident set: few near its limit, more below (it also grows by what is small
and by what ops need inside)."""


@final
class Reclaimer:
    """Returns freed memory to the system before the resident set passes a limit.

    It looks when so much was created since the last look, or is about to be, that the limit may be near. Where `kept`,
    what is created lies in pages that were there, the resident set grows by other things, and it looks less often.
    """

    __slots__ = ("_arriving", "_headroom", "_least", "_most", "_resident_set", "_returned", "highest", "limit")

    def __init__(self, resident_set: ResidentSet, *, kept: bool = False) -> None:
        self._resident_set = resident_set
        self._least, self._most = (4 * _LEAST, 16 * _MOST) if kept else (_LEAST, _MOST)
        self._headroom: Bytes = 0
        self._arriving: Bytes = 0
        self._returned: Bytes = -_LEAST  # what was resident when all freed memory had been returned last
        self.limit: Bytes = _NO_LIMIT
        """Resident bytes from which freed memory is returned; without a limit the allocator keeps it, and nothing is
        read here."""
        self.highest: Bytes = 0
        """The most that was resident, or about to be, when all freed memory had been returned."""

    def expect(self, nbytes: Bytes) -> None:
        """They count when they are there: what was expected need not come."""
        if nbytes > self._headroom:
            self.settle(nbytes)

    def created(self, nbytes: Bytes) -> None:
        self._headroom -= nbytes
        if self._headroom < 0:
            self.settle()

    def arrives(self, nbytes: Bytes) -> None:
        """A worker begins to fill so many bytes: until they `arrived` nobody knows how many of them are resident."""
        self._arriving += nbytes
        self.created(nbytes)

    def arrived(self, nbytes: Bytes) -> None:
        """All of them are resident now, or given up."""
        self._arriving -= nbytes

    def settle(self, coming: Bytes = 0) -> None:
        """Look, and return what was freed if what is about to be created would not fit beside it."""
        if self.limit >= _NO_LIMIT:
            return
        resident = self._resident_set.read()
        if resident + self._arriving + coming > self.limit:
            if resident > self._returned + _LEAST:  # else returning again would gain next to nothing
                self._resident_set.trim()
                self._returned = resident = self._resident_set.read()
            self.highest = max(self.highest, resident + coming)  # some of what arrives is resident already
        resident += self._arriving
        self._headroom = max(min(self.limit - resident, self._most), self._least)


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_THRESHOLD: Bytes = 32 << 20
"""What glibc lets blocks grow to at most before each gets a mapping of its own (64-bit)."""
_HELD: Final[Bytes] = (1 << 31) - 1
_LOOKS_AT_END: Final[Bytes] = 128 << 10
"""A freed block of so many bytes has glibc look at the end of the heap (64 KiB and more, FASTBIN_CONSOLIDATION)."""

_holding = threading.RLock()
renew_in_children(sys.modules[__name__], "_holding")
_holders: Final[set[int]] = set()


@final
class HeldHeap:
    """As long as there is one of these, glibc leaves it to sessions when freed memory is returned.

    By itself it gives back the free end of the heap, and every large block, as soon as they are freed; the next op
    then pays for each page again. Where the environment says how glibc is to decide, nothing is changed.
    """

    def __init__(self) -> None:
        with _holding:
            _holders.add(id(self))
            _set_thresholds(trim=_HELD)

    def release(self) -> None:
        """After the last one, what glibc comes to by itself when blocks of the largest size were freed. Called again,
        it does what was not done."""
        with _holding:
            if id(self) in _holders:
                if len(_holders) == 1:
                    _set_thresholds(trim=2 * _LARGEST_THRESHOLD)
                _holders.discard(id(self))

    def __del__(self) -> None:
        if _holding is not None:  # as it is when the interpreter takes modules apart
            self.release()


def _set_thresholds(*, trim: Bytes) -> None:
    if _mallopt is not None and not any(name in os.environ for name in _ALLOCATOR_SETTINGS):
        _mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        _mallopt(_M_TRIM_THRESHOLD, trim)


def _return_end_of_heap() -> None:
    """What `malloc_trim` leaves out: the free end of the calling thread's own heap, up to 64 MiB.

    Threads beside the first one have heaps of their own, and so has the first one from the moment at which an
    allocation of it has failed. The C library looks at the end of such a heap when a larger block is freed. It decides
    as after a session from here on (`HeldHeap`).
    """
    if _malloc is not None and _free is not None:
        with _holding:
            try:
                _set_thresholds(trim=0)
                _free(_malloc(_LOOKS_AT_END))
            finally:
                _set_thresholds(trim=_HELD if _holders else 2 * _LARGEST_THRESHOLD)


_ALLOCATOR_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def prefer_huge_pages(address: int, nbytes: Bytes) -> None:
    """Ask for huge pages before memory is touched for the first time: a fifth of the time for large storages
    (Linux).

    Only for blocks that have a mapping of their own. In the heap the wish would outlive the block, and ops that create
    little would be given 2 MiB at a time.
    """
    # Mappings lie above the end of the heap.
    if _madvise is not None and nbytes > _LARGEST_THRESHOLD and _sbrk is not None and address >= _sbrk(0):
        _madvise(*_whole_pages(address, nbytes), _MADV_HUGEPAGE)


def give_pages_back(address: int, nbytes: Bytes) -> None:
    """Return the pages of heap memory that is about to be freed: `free` alone keeps them resident as a hole (Linux).

    Its content reads as zeros from then on. Only for memory that this process alone can see.
    """
    start, length = _whole_pages(address, nbytes)
    if _madvise is not None and length > 0:
        _madvise(start, length, _MADV_DONTNEED)


def _whole_pages(address: int, nbytes: Bytes) -> tuple[int, Bytes]:
    start = -(-address // _PAGE) * _PAGE
    return start, (address + nbytes - start) // _PAGE * _PAGE


def _of_linux(name: str, given: Sequence[Any], returned: Any = ctypes.c_int) -> Callable[..., int] | None:
    """A function of the C library; None where the system is not Linux, or its library has none of this name."""
    function: Any = getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
    if function is not None:
        function.argtypes, function.restype = given, returned
    return cast("Callable[..., int] | None", function)


_madvise = _of_linux("madvise", (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int))
_mallopt = _of_linux("mallopt", (ctypes.c_int, ctypes.c_int))
_malloc = _of_linux("malloc", (ctypes.c_size_t,), ctypes.c_void_p)
_free = _of_linux("free", (ctypes.c_void_p,), None)
_sbrk = _of_linux("sbrk", (ctypes.c_ssize_t,), ctypes.c_size_t)


def reset_peak() -> None:
    """Let the system's own peak counter start anew (Linux; elsewhere nothing happens)."""
    with contextlib.suppress(OSError):
        file = os.open("/proc/self/clear_refs", os.O_WRONLY)  # `Path` takes as long as the system, here and below
        try:
            os.write(file, b"5")
        finally:
            os.close(file)


def peak_rss() -> Bytes:
    """Highest resident set size since `reset_peak`, files mapped included; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        file = os.open("/proc/self/status", os.O_RDONLY)
        try:
            _, _, rest = os.read(file, 1 << 14).partition(b"VmHWM:")
        finally:
            os.close(file)
        return int(rest.split(maxsplit=1)[0]) * 1024 if rest else 0
    return 0


@final
class PeakMemory:
    """Resident memory of this process above what it was when this was made.

    Pages of files do not count: a process finds those of its libraries one after the other, and the system takes them
    back when it needs room.
    """

    def __init__(self) -> None:
        gc.collect()
        memory = ResidentSet()
        memory.trim()
        memory.close()
        reset_peak()
        self._peak, self._files = peak_rss(), file_pages()

    def above_start(self) -> Bytes:
        """The highest point since the start or, if a session runs, since its last step began."""
        return max(peak_rss() - self._peak - (file_pages() - self._files), 0)


def file_pages() -> Bytes:
    """Bytes of files that are mapped and in memory; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_bytes().split()[2]) * _PAGE
    return 0
