"""The spill file itself: no name, mapped privately, read and written through the page cache or past it.

NOTE [Coherence]. With direct I/O the bytes of a slot reach the disk past the page cache, and whoever reads the mapping
has the system fill the page cache from the disk. Both show the same content because

 1. nothing makes the page cache of this file dirty: the mapping is private, and the tier writes either all slots
    through the cache or all of them past it. So there is nothing that could be written back over a direct write;
 2. Linux throws the cached pages of a range away, and unmaps them, before and after a direct write to it. Pages that
    somebody read ahead during the write are among them;
 3. private copies of pages stay when that happens. The tier forgets them when a slot is given back.

`tests/pure/test_direct_io.py` reads mapped slots while others beside them are written.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import statistics
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any, Final, Literal, final

import numpy as np

from spillway.errors import SpillCorruptedError, SpillDirectoryError, UsageError
from spillway.units import Bytes, format_bytes

PAGE: Final = mmap.ALLOCATIONGRANULARITY
_PIECE: Final = 2 << 20
"""Of the buffer for what lies at no page boundary: a huge page. A virtual disk may fill that twice as fast as small
pages that lie all over the memory, of which it takes so many at a time."""
_LONG: Final = _PIECE // 8
_TRIED: Final = 8
"""Reads of so many bytes each way, by whose median time the way is chosen; until then shorter ones go straight."""

SpillIO = Literal["buffered", "direct"]
"""Through the page cache, or past it where the file system can."""


@final
class SpillFile:
    """A file that nobody else can open and that is gone when this process is. Any thread may read and write it.

    Attributes:
        descriptor: Negative once closed.
        io: How bytes go: past the page cache only where that was asked for and the file system can.
        note: Why that is not what was asked for; empty if it is.

    Raises SpillDirectoryError if it cannot be made there.
    """

    def __init__(self, directory: Path, io: SpillIO = "buffered") -> None:
        if io not in ("buffered", "direct"):
            raise UsageError(f'spill_io is "buffered" or "direct", not {io!r}.')
        # Descriptors of one new file: the usual one, and one past the page cache (negative if there is none).
        try:
            self.descriptor, name = tempfile.mkstemp(prefix="spillway-", dir=directory)
        except OSError as error:
            raise SpillDirectoryError(
                f"The spill directory {directory} cannot be used: {error.strerror or error}; choose a writable one "
                f"with SpillOptions(directory=...) or --spill-directory."
            ) from error
        self._direct = -1
        try:
            if io == "direct" and hasattr(os, "O_DIRECT"):
                self._direct = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            pass  # tmpfs on older systems, some network file systems
        finally:
            os.unlink(name)
        self._closing = [
            weakref.finalize(self, os.close, number) for number in (self.descriptor, self._direct) if number >= 0
        ]
        for closing in self._closing:
            closing.atexit = False  # a worker may still be busy then
        self._own = threading.local()
        self._tried: dict[bool, list[float]] = {True: [], False: []}
        """Seconds per byte of the first long reads, through the buffer and straight to where the bytes belong."""
        refusal = self._try_direct() if io == "direct" else ""
        self.io: SpillIO = "buffered" if refusal else io
        self.note = refusal and f"{directory} has no direct I/O ({refusal}): spilled bytes fill the page cache."

    def write(self, offset: Bytes, address: int, nbytes: Bytes) -> None:
        """Copy bytes into the file, up to the end of their last page with whatever if they go past the cache."""
        if self.io == "buffered":
            write_all(self.descriptor, offset, memory_at(address, nbytes))
            return
        done = nbytes // PAGE * PAGE if address % PAGE == 0 else 0
        if done:
            write_all(self._direct, offset, memory_at(address, done))
        for begin in range(done, nbytes, _PIECE):
            length = min(_PIECE, nbytes - begin)
            buffer, whole = self._buffer(), -(-length // PAGE) * PAGE
            ctypes.memmove(_address(buffer), address + begin, length)
            write_all(self._direct, offset + begin, buffer[:whole])

    def read(self, offset: Bytes, address: int, nbytes: Bytes) -> None:
        """Copy bytes out of the file. Raises SpillCorruptedError if it ends before them."""
        if self.io == "buffered":
            _read_all(self.descriptor, offset, memory_at(address, nbytes), nbytes)
            return
        began, through = time.perf_counter(), address % PAGE != 0 or self._through_buffer(nbytes)
        done = 0 if through else nbytes // PAGE * PAGE
        if done:
            _read_all(self._direct, offset, memory_at(address, done), done)
        for begin in range(done, nbytes, _PIECE):
            length = min(_PIECE, nbytes - begin)
            buffer, whole = self._buffer(), -(-length // PAGE) * PAGE
            _read_all(self._direct, offset + begin, buffer[:whole], length)
            ctypes.memmove(address + begin, _address(buffer), length)
        if nbytes >= _LONG and len(self._tried[through]) < _TRIED:
            self._tried[through].append((time.perf_counter() - began) / nbytes)

    def _through_buffer(self, nbytes: Bytes) -> bool:
        through, straight = self._tried[True], self._tried[False]
        if len(straight) < _TRIED:
            return nbytes >= _LONG and len(through) <= len(straight)
        return statistics.median(through) < statistics.median(straight)

    def lengthen(self, nbytes: Bytes) -> None:
        """Make the file so long, without a block on the disk for what is new."""
        os.ftruncate(self.descriptor, nbytes)

    def map(self, offset: Bytes, nbytes: Bytes) -> ctypes.Array[ctypes.c_char]:
        """A part of the file as anybody reads it in place; what is written there stays in this process.

        It is unmapped when nobody refers to it any more, and keeps no descriptor (as `mmap.mmap` does).
        """
        address = _system.mmap(
            None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, self.descriptor, offset
        )
        if address in (None, ctypes.c_void_p(-1).value):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        window = (ctypes.c_char * nbytes).from_address(address)
        weakref.finalize(window, _system.munmap, address, nbytes).atexit = False  # tensors may be read until the end
        return window

    def before_fork(self) -> None:
        """Buffers are others from here on: of a page that two processes have the one that writes gets a copy."""
        self._own = threading.local()

    def close(self) -> None:
        """Give the file back to the system, once nothing is mapped any more."""
        for closing in self._closing:
            closing()
        self.descriptor = self._direct = -1

    def _try_direct(self) -> str:
        """Why direct I/O does not work here, with a whole page; empty if it does."""
        if self._direct < 0:
            return "the system has no such thing"
        buffer = self._buffer()
        try:
            os.ftruncate(self.descriptor, PAGE)
            buffer[:5] = b"spill"
            write_all(self._direct, 0, buffer[:PAGE])
            buffer[:5] = bytes(5)
            _read_all(self._direct, 0, buffer[:PAGE], PAGE)
            os.ftruncate(self.descriptor, 0)
        except (OSError, SpillCorruptedError) as error:
            return str(error)
        return "" if bytes(buffer[:5]) == b"spill" else "it reads something else than it wrote"

    def _buffer(self) -> memoryview:
        """This thread's own, at the boundary of a huge page."""
        own = self._own
        if not hasattr(own, "buffer"):
            whole = mmap.mmap(-1, 2 * _PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(AttributeError, OSError):  # the system has no such pages
                whole.madvise(mmap.MADV_HUGEPAGE)
            begin = -_address(whole) % _PIECE
            own.buffer = memoryview(whole)[begin : begin + _PIECE]
        return own.buffer  # type: ignore[no-any-return]


_Anything: Final = ctypes.c_char * (1 << 46)
"""From an address on. ctypes makes a class for every length, which only the garbage collector can free: this is the
only one."""


def forget_pages(window: ctypes.Array[ctypes.c_char], start: Bytes, nbytes: Bytes) -> None:
    """Private copies of these pages are given up: what is read there comes from the file again."""
    _system.madvise(ctypes.addressof(window) + start, nbytes, mmap.MADV_DONTNEED)


def written_in_place(window: ctypes.Array[ctypes.c_char], start: Bytes, nbytes: Bytes) -> bool:
    """Whether somebody wrote to these pages of the mapping, from a page boundary on: they are copies of this process's
    own then. Also True where the system does not tell, as Linux does in /proc/self/pagemap."""
    first, count = (ctypes.addressof(window) + start) // PAGE, -(-nbytes // PAGE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:  # kept open, it would be the parent's after a fork
            told = np.frombuffer(os.pread(file.fileno(), 8 * count, 8 * first), np.uint64)
    except OSError:
        return True
    there, of_file = told >> np.uint64(62) != 0, told >> np.uint64(61) & np.uint64(1) != 0  # in RAM or swap
    return len(told) < count or bool(np.any(there & ~of_file))


def memory_at(address: int, nbytes: Bytes) -> memoryview:
    """Bytes at an address, for as long as whoever owns them keeps them there."""
    return memoryview(_Anything.from_address(address)).cast("B")[:nbytes]


def _address(buffer: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def write_all(descriptor: int, offset: Bytes, source: memoryview) -> None:
    """All of the source, from an offset of the file on."""
    done = 0
    while done < len(source):
        done += os.pwrite(descriptor, source[done:], offset + done)


def _read_all(descriptor: int, offset: Bytes, target: memoryview, needed: Bytes) -> None:
    done = 0
    while done < needed:
        count = os.preadv(descriptor, [target[done:]], offset + done)
        done += count
        if done < needed and (count == 0 or offset + done == os.fstat(descriptor).st_size):
            raise SpillCorruptedError(f"The spill file ends {format_bytes(needed - done)} too early.")


def _system_calls() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


_system: Final = _system_calls()
