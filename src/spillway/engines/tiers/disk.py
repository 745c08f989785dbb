"""The disk tier: one unlinked file of page-aligned slots, mapped so that absent storages can still be read."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import mmap
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import numpy as np

from spillway.engines.lanes import Transfer, TransferLog
from spillway.errors import SpillCorruptedError, SpillDirectoryError, SpillError, SpillFullError
from spillway.ir import Lane
from spillway.units import Bytes, Seconds, format_bytes

PAGE: Final = mmap.ALLOCATIONGRANULARITY
_WINDOW: Final = 256 << 20
"""The file is mapped in windows of this size: a mapping per slot would run into the system's limit on mappings."""
WORKERS: Final = 2
"""Threads that copy while ops run: one may read while the other writes."""
_COLUMNS: Final = 509
"""A prime: the rows of a tensor and the pages of a file do not line up with columns of so many words."""


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """Where one value's bytes lie in the file, or will when they are written."""

    offset: Bytes
    nbytes: Bytes
    capacity: Bytes
    generation: int
    """The step in which it was written: between steps the user may write through the mapping, unseen."""
    checksum: int = 0
    writing: Future[None] | None = None
    """A write that nobody has waited for yet."""
    storage: int = -1
    """Number of the storage that the bytes are of; whoever reserves the slot says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """Bytes of a slot as anybody reads them: `buffer` from `start`."""

    buffer: mmap.mmap
    start: Bytes


@final
class DiskTier:
    """Slots in one file without a name, mode 0600, in a directory of the user's choice.

    The mapping is private: what is written through it stays in memory, and the file keeps what `write` put there.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = Path(directory) if directory is not None else Path(tempfile.gettempdir())
        self._file = _open_unlinked(self.directory)
        self._end: Bytes = 0
        self._free: dict[Bytes, list[Bytes]] = defaultdict(list)
        self._windows: list[tuple[mmap.mmap, Bytes]] = []  # each window's mapping, and where that begins in the file
        self._used: Bytes = 0
        self.generation = 0
        self._bytes_moved: Bytes = 0
        self._seconds_moving: Seconds = 0.0
        self._lock = threading.Lock()  # of the two above
        self.log = TransferLog()
        self._workers: ThreadPoolExecutor | None = None

    @property
    def used(self) -> Bytes:
        """Bytes of the slots in use."""
        return self._used

    @property
    def closed(self) -> bool:
        """Whether the file was given back to the system."""
        return self._file < 0

    def write(self, address: int, nbytes: Bytes) -> Slot:
        """Copy `nbytes` at `address` into a slot.

        Raises:
            SpillFullError: The file system has no room; nothing has changed.
        """
        slot = self._reserve(nbytes)
        try:
            self._fill(slot, address)
        except BaseException:
            self.free(slot)
            raise
        return slot

    def start_write(self, address: int, nbytes: Bytes) -> Slot:
        """The slot that a worker copies `nbytes` at `address` into; they have to stay there until it is `written`.

        Raises:
            SpillFullError: The file cannot be made longer.
            SpillError: The system gives no thread.
        """
        workers = self._pool()
        slot = self._reserve(nbytes)
        slot.writing = workers.submit(self._fill, slot, address)
        return slot

    def written(self, slot: Slot) -> bool:
        """Whether `finish_write` would not wait."""
        return slot.writing is None or slot.writing.done()

    def finish_write(self, slot: Slot) -> None:
        """Wait for the worker.

        Raises:
            SpillFullError: The file system had no room for the bytes; the slot is good for nothing.
        """
        writing, slot.writing = slot.writing, None
        if writing is not None:
            writing.result()

    def read(self, slot: Slot, address: int) -> bool:
        """Copy a slot to `address`; whether the slot still holds the same content as what was read.

        Raises:
            SpillCorruptedError: The file's bytes are not those that were written.
        """
        began = time.perf_counter()
        if slot.generation == self.generation:
            self._read_file(slot, address)
            on_disk = time.perf_counter()
            self._check(slot, address)
            unchanged = True
        else:
            unchanged = self._read_mapping(slot, address)
            on_disk = time.perf_counter()
        self._note(Lane.COPY_IN, slot, began, on_disk)
        return unchanged

    def start_read(self, slot: Slot, address: int) -> Future[bool]:
        """Let a worker do what `read` does.

        Raises:
            SpillError: The system gives no thread.
        """
        return self._pool().submit(self.read, slot, address)

    def mapped(self, slot: Slot) -> Mapped:
        """The slot's bytes, readable (and privately writable) in place."""
        buffer, begin = self._windows[slot.offset // _WINDOW]
        return Mapped(buffer=buffer, start=slot.offset - begin)

    def free(self, slot: Slot) -> None:
        """Give a slot back for reuse."""
        if self.closed:
            return
        writing, slot.writing = slot.writing, None
        if writing is not None and not writing.cancel():
            self.log.wait([writing])  # it must not write into what the slot holds next
        self._forget_pages(slot)
        self._free[slot.capacity].append(slot.offset)
        self._used -= slot.capacity

    def seconds_for(self, nbytes: Bytes) -> Seconds:
        """Seconds to move `nbytes` one way, by what was measured so far (1 GB/s before the first copy)."""
        if self._bytes_moved < 1 << 20:
            return nbytes / 1e9
        return nbytes * self._seconds_moving / self._bytes_moved

    def close(self) -> None:
        """Give the file back to the system. Bytes that are still mapped stay readable until their storages die."""
        if not self.closed:
            if self._workers is not None:
                self._workers.shutdown(wait=True, cancel_futures=True)
            os.close(self._file)
            self._file = -1
            self._windows.clear()
            self._free.clear()

    def _pool(self) -> ThreadPoolExecutor:
        """All threads start before there is work: a pool that gets no thread for a job raises, and keeps the job."""
        if self._workers is None:
            workers = ThreadPoolExecutor(max_workers=WORKERS, thread_name_prefix="spillway-disk")
            together = threading.Barrier(WORKERS)
            try:
                for _ in range(WORKERS):
                    workers.submit(together.wait)
            except RuntimeError as error:
                together.abort()
                workers.shutdown(wait=True, cancel_futures=True)
                raise SpillError(f"The system gives no thread for copies beside the ops: {error}.") from error
            self._workers = workers
        return self._workers

    def _reserve(self, nbytes: Bytes) -> Slot:
        capacity = slot_capacity(nbytes)
        with self._told(nbytes):
            offset = self._take(capacity)
        self._used += capacity
        return Slot(offset=offset, nbytes=nbytes, capacity=capacity, generation=self.generation)

    def _fill(self, slot: Slot, address: int) -> None:
        began = time.perf_counter()
        source = (ctypes.c_char * slot.nbytes).from_address(address)
        with self._told(slot.nbytes):
            self._write_at(slot.offset, memoryview(source))
        on_disk = time.perf_counter()
        slot.checksum = checksum(address, slot.nbytes)
        self._note(Lane.COPY_OUT, slot, began, on_disk)

    @contextlib.contextmanager
    def _told(self, nbytes: Bytes) -> Iterator[None]:
        """The system's errors in our words."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise SpillFullError(
                    f"The spill directory {self.directory} has no room for {format_bytes(nbytes)} more; free some "
                    f"space there or choose another with spill_directory=."
                ) from error
            raise SpillError(f"Writing {format_bytes(nbytes)} to the spill file failed: {error.strerror}.") from error

    def _note(self, lane: Lane, slot: Slot, began: Seconds, on_disk: Seconds) -> None:
        ended = time.perf_counter()
        self.log.transfers.append(Transfer(lane, slot, began, on_disk, ended))
        with self._lock:
            self._bytes_moved += slot.nbytes
            self._seconds_moving += ended - began

    def _take(self, capacity: Bytes) -> Bytes:
        if self._free[capacity]:
            return self._free[capacity].pop()
        offset = self._end
        if offset // _WINDOW != (offset + capacity - 1) // _WINDOW:
            offset = -(-offset // _WINDOW) * _WINDOW
        self._grow(offset + capacity)
        return offset

    def _grow(self, end: Bytes) -> None:
        """Lengthen the file (sparsely) and map what is new; a slot larger than a window gets windows of its own."""
        windows = -(-end // _WINDOW)
        if windows > len(self._windows):
            first = len(self._windows)
            os.ftruncate(self._file, windows * _WINDOW)
            length = (windows - first) * _WINDOW
            access = mmap.PROT_READ | mmap.PROT_WRITE
            mapping = mmap.mmap(self._file, length, flags=mmap.MAP_PRIVATE, prot=access, offset=first * _WINDOW)
            self._windows.extend([(mapping, first * _WINDOW)] * (windows - first))
        self._end = end

    def _write_at(self, offset: Bytes, source: memoryview) -> None:
        done = 0
        while done < len(source):
            done += os.pwrite(self._file, source[done:], offset + done)

    def _read_file(self, slot: Slot, address: int) -> None:
        target = memoryview((ctypes.c_char * slot.nbytes).from_address(address)).cast("B")
        done = 0
        while done < slot.nbytes:
            count = os.preadv(self._file, [target[done:]], slot.offset + done)
            if count == 0:
                raise SpillCorruptedError(f"The spill file ends {format_bytes(slot.nbytes - done)} too early.")
            done += count

    def _read_mapping(self, slot: Slot, address: int) -> bool:
        mapped = self.mapped(slot)
        source = np.frombuffer(mapped.buffer, np.uint8, slot.nbytes, mapped.start)
        ctypes.memmove(address, source.ctypes.data, slot.nbytes)
        if checksum(address, slot.nbytes) != slot.checksum:  # written through the mapping, or damaged
            original = np.empty(slot.nbytes, np.uint8)
            self._read_file(slot, original.ctypes.data)
            self._check(slot, original.ctypes.data)
        return False  # what was read is right, but no sum of it proves that the file holds the same

    def _check(self, slot: Slot, address: int) -> None:
        if checksum(address, slot.nbytes) != slot.checksum:
            raise SpillCorruptedError(
                f"{format_bytes(slot.nbytes)} in the spill file at offset {slot.offset} changed since they were "
                f"written; check the disk under {self.directory}."
            )

    def _forget_pages(self, slot: Slot) -> None:
        """Private copies of the slot's pages must not show through when the slot is used again."""
        mapped = self.mapped(slot)
        with contextlib.suppress(OSError, ValueError):
            mapped.buffer.madvise(mmap.MADV_DONTNEED, mapped.start, slot.capacity)


def slot_capacity(nbytes: Bytes) -> Bytes:
    """Room for `nbytes`: whole pages, in at most eight sizes per power of two, so that slots are found again."""
    step = max(PAGE, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-nbytes // step) * step


def checksum(address: int, nbytes: Bytes) -> int:
    """64 bits of the content: 64-bit words summed in columns, and a hash of the sums and of what is left over.

    Runs near memory speed. A changed bit, a changed sign, negation, swapped neighbours, rows and pages show; words
    that swap a multiple of 509 words apart do not, so nothing but damage of the file is judged by it.
    """
    rows = max(nbytes // (8 * _COLUMNS) - 1, 0) | 1  # odd: two changes of sign in a column would cancel
    summed = rows * 8 * _COLUMNS
    if summed > nbytes:
        rows = summed = 0
    words = np.ctypeslib.as_array((ctypes.c_uint64 * (rows * _COLUMNS)).from_address(address))
    digest = hashlib.blake2b(np.add.reduce(words.reshape(rows, _COLUMNS), axis=0).data, digest_size=8)
    digest.update(ctypes.string_at(address + summed, nbytes - summed))
    return int.from_bytes(digest.digest(), "little") ^ nbytes


def _open_unlinked(directory: Path) -> int:
    """A file that nobody else can open and that is gone when this process is."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="spillway-", dir=directory)
    except OSError as error:
        raise SpillDirectoryError(
            f"The spill directory {directory} cannot be used: {error.strerror or error}; choose a writable one with "
            f"spill_directory=."
        ) from error
    os.unlink(name)
    return descriptor
