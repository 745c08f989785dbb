"""The disk tier: one unlinked file of page-aligned slots, mapped so that absent storages can still be read."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, final

import numpy as np
import xxhash

from spillway.errors import SpillBusyError, SpillCorruptedError, SpillError, SpillFullError
from spillway.ir import Lane
from spillway.memory.lanes import CopySpan, TransferLog
from spillway.tiers.forks import ForkedReaders
from spillway.tiers.spill_file import PAGE, SpillFile, SpillIO, forget_pages, memory_at, written_in_place
from spillway.units import Bytes, Seconds, format_bytes

_WINDOW: Final = 256 << 20
"""The file is mapped in windows of this size: a mapping per slot would run into the system's limit on mappings."""
WORKERS: Final = 2
"""Threads that copy while ops run: one may read while the other writes."""
T = TypeVar("T")

MOST_JOBS: Final = 64
"""Copies that may wait for the workers at a time."""
MOST_QUEUED: Final[Bytes] = 1 << 30
"""Bytes of these together; one copy may be larger."""


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """Where one value's bytes lie in the file, or will when they are written."""

    offset: Bytes
    nbytes: Bytes
    capacity: Bytes
    generation: int
    """The step in which it was last known to hold what is to come back: between steps the user may write through the
    mapping, unseen."""
    checksum: int = 0
    writing: Future[None] | None = None
    """A write that nobody has waited for yet."""
    storage: int = -1
    """Number of the storage that the bytes are of; whoever reserves the slot says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """Bytes of a slot as anybody reads them: `buffer` from `start`."""

    buffer: ctypes.Array[ctypes.c_char]
    start: Bytes


_tiers: Final[weakref.WeakSet[DiskTier]] = weakref.WeakSet()


@final
class DiskTier:
    """Slots in one file without a name, mode 0600, in a directory of the user's choice.

    The mapping is private: what is written through it stays in memory, and the file keeps what `write` put there.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, io: SpillIO = "buffered") -> None:
        self.directory = Path(directory) if directory is not None else Path(tempfile.gettempdir())
        self._spill = SpillFile(self.directory, io)
        self._end: Bytes = 0
        self._free: dict[Bytes, list[Bytes]] = defaultdict(list)
        self._windows: list[tuple[ctypes.Array[ctypes.c_char], Bytes]] = []
        """Each window's mapping, and where that begins in the file."""
        self._in_use: dict[Bytes, Bytes] = {}
        """Capacities of the slots in use, by where they begin."""
        self._kept: list[Slot] = []
        """Given back, and not to be written while a forked process may read them."""
        self._readers = ForkedReaders()
        self.generation = 0
        self._bytes_moved: Bytes = 0
        self._seconds_moving: Seconds = 0.0
        self._jobs = 0
        self._queued: Bytes = 0
        self._lock = threading.Lock()  # of the four above
        self.log = TransferLog()
        self.workers = WORKERS
        """How many threads copy, once they have started."""
        self._workers: ThreadPoolExecutor | None = None
        _tiers.add(self)

    @property
    def used(self) -> Bytes:
        return sum(self._in_use.values())

    @property
    def closed(self) -> bool:
        """Whether the file was given back to the system."""
        return self._spill.descriptor < 0

    @property
    def io(self) -> SpillIO:
        """How bytes go to the file: past the page cache only where that was asked for and the file system can."""
        return self._spill.io

    @property
    def io_note(self) -> str:
        """Why that is not what was asked for; empty if it is."""
        return self._spill.note

    def write(self, address: int, nbytes: Bytes) -> Slot:
        """Copy `nbytes` at `address` into a slot. Raises SpillFullError if the file system has no room; nothing has
        changed."""
        slot = self._reserve(nbytes)
        try:
            self._fill(slot, address)
        except BaseException:
            self.free(slot)
            raise
        return slot

    def start_write(self, address: int, nbytes: Bytes) -> Slot:
        """The slot that a worker copies `nbytes` at `address` into; they have to stay there until it is `written`.
        Raises SpillFullError if the file cannot be made longer, SpillBusyError if the workers have enough to do, and
        SpillError if the system gives no thread."""
        self._check_queue(nbytes)
        slot = self._reserve(nbytes)
        try:
            slot.writing = self._submit(self._fill, slot, address)
        except BaseException:
            self.free(slot)
            raise
        return slot

    def written(self, slot: Slot) -> bool:
        """Whether `finish_write` would not wait."""
        return slot.writing is None or slot.writing.done()

    def finish_write(self, slot: Slot) -> None:
        """Wait for the worker. Raises SpillFullError if the file system had no room for the bytes; the slot is good for
        nothing."""
        if slot.writing is not None:
            slot.writing.result()
            slot.writing = None  # only now: who asks again after a failure must not be told that all is well

    def read(self, slot: Slot, address: int) -> bool:
        """Copy a slot to `address`; whether the slot still holds the same content as what was read. Raises
        SpillCorruptedError if the file's bytes are not those that were written."""
        began, mapped = time.perf_counter(), self.mapped(slot)
        unchanged = slot.generation == self.generation or not written_in_place(mapped.buffer, mapped.start, slot.nbytes)
        if unchanged:
            self._read_file(slot, address)
            on_disk = time.perf_counter()
            self._check(slot, address)
            slot.generation = self.generation
        else:
            ctypes.memmove(address, ctypes.addressof(mapped.buffer) + mapped.start, slot.nbytes)
            if checksum(address, slot.nbytes) != slot.checksum:  # written through the mapping, or damaged
                original = np.empty(slot.nbytes, np.uint8)
                self._read_file(slot, original.ctypes.data)
                self._check(slot, original.ctypes.data)
            on_disk = time.perf_counter()
        self._note(Lane.COPY_IN, slot, began, on_disk)
        return unchanged

    def start_read(self, slot: Slot, address: int) -> Future[bool]:
        """Let a worker do what `read` does. Raises SpillBusyError if the workers have enough to do, and SpillError if
        the system gives no thread."""
        self._check_queue(slot.nbytes)
        return self._submit(self.read, slot, address)

    def mapped(self, slot: Slot) -> Mapped:
        """The slot's bytes, readable (and privately writable) in place."""
        buffer, begin = self._windows[slot.offset // _WINDOW]
        return Mapped(buffer=buffer, start=slot.offset - begin)

    def free(self, slot: Slot) -> None:
        if self.closed:
            return
        writing, slot.writing = slot.writing, None
        if writing is not None and not writing.cancel():
            self.log.wait([writing])  # it must not write into what the slot holds next
        mapped = self.mapped(slot)  # private copies of its pages must not show through when it is used again
        forget_pages(mapped.buffer, mapped.start, slot.capacity)
        del self._in_use[slot.offset]
        if self._readers.may_read(slot.offset):
            self._kept.append(slot)
        else:
            self._free[slot.capacity].append(slot.offset)

    def seconds_for(self, nbytes: Bytes) -> Seconds:
        """Seconds to move `nbytes` one way, by what was measured so far (1 GB/s before the first copy)."""
        if self._bytes_moved < 1 << 20:
            return nbytes / 1e9
        return nbytes * self._seconds_moving / self._bytes_moved

    def before_fork(self) -> None:
        """A forked process will read what is away where it is now."""
        if not self.closed:
            self._readers.before_fork(self._in_use)
            self._spill.before_fork()

    def after_fork(self, *, in_child: bool) -> None:
        """The workers are not forked, and one of them may have held the lock."""
        if in_child:
            self._lock = threading.Lock()
            self._readers.in_child()
        else:
            self._readers.after_fork()

    def close(self) -> None:
        """Give the file back to the system. Bytes that are still mapped stay readable until their storages die."""
        if not self.closed:
            if self._workers is not None:
                self._workers.shutdown(wait=True, cancel_futures=True)
            self._spill.close()
            self._readers.close()
            self._windows.clear()
            self._free.clear()

    def start_workers(self) -> None:
        """Start the threads now and not with the first copy: Python waits for ever for a thread that starts when there
        is no memory left. Raises SpillError if the system gives no thread."""
        self._pool()

    def _pool(self) -> ThreadPoolExecutor:
        """All threads start before there is work: a pool that gets no thread for a job raises, and keeps the job."""
        if self._workers is None:
            workers = ThreadPoolExecutor(max_workers=self.workers, thread_name_prefix="spillway-disk")
            together = threading.Barrier(self.workers)
            try:
                for _ in range(self.workers):
                    workers.submit(together.wait)
            except RuntimeError as error:
                together.abort()
                workers.shutdown(wait=True, cancel_futures=True)
                raise SpillError(f"The system gives no thread for copies beside the ops: {error}.") from error
            self._workers = workers
        return self._workers

    def _check_queue(self, nbytes: Bytes) -> None:
        """What waits behind other copies could as well leave when room is short; it has to be kept until then."""
        with self._lock:
            jobs, queued = self._jobs, self._queued
        if jobs >= MOST_JOBS or (jobs and queued + nbytes > MOST_QUEUED):
            raise SpillBusyError(
                f"The workers have {jobs} copies of {format_bytes(queued)} before them; {format_bytes(nbytes)} more "
                f"have to wait."
            )

    def _submit(self, job: Callable[[Slot, int], T], slot: Slot, address: int) -> Future[T]:
        future = self._pool().submit(job, slot, address)
        with self._lock:
            self._jobs += 1
            self._queued += slot.nbytes
        future.add_done_callback(lambda _: self._off_the_queue(slot.nbytes))
        return future

    def _off_the_queue(self, nbytes: Bytes) -> None:
        with self._lock:
            self._jobs -= 1
            self._queued -= nbytes

    def _reserve(self, nbytes: Bytes) -> Slot:
        capacity = slot_capacity(nbytes)
        with self._told(nbytes):
            offset = self._take(capacity)
        self._in_use[offset] = capacity
        return Slot(offset=offset, nbytes=nbytes, capacity=capacity, generation=self.generation)

    def _fill(self, slot: Slot, address: int) -> None:
        began = time.perf_counter()
        with self._told(slot.nbytes):
            self._spill.write(slot.offset, address, slot.nbytes)
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
                    f"space there or choose another with SpillOptions(directory=...) or --spill-directory."
                ) from error
            if error.errno == errno.ENOMEM:
                raise SpillFullError(
                    f"The system maps no room for {format_bytes(nbytes)} more of the spill file into memory; raise "
                    f"`ulimit -v` or the setting vm.max_map_count."
                ) from error
            raise SpillError(f"Writing {format_bytes(nbytes)} to the spill file failed: {error.strerror}.") from error

    def _note(self, lane: Lane, slot: Slot, began: Seconds, on_disk: Seconds) -> None:
        ended = time.perf_counter()
        self.log.transfers.append(CopySpan(lane, slot, began, on_disk, ended))
        with self._lock:
            self._bytes_moved += slot.nbytes
            self._seconds_moving += ended - began

    def _take(self, capacity: Bytes) -> Bytes:
        if self._kept and not self._free[capacity]:
            kept, self._kept = self._kept, []
            for slot in kept:
                if self._readers.may_read(slot.offset):
                    self._kept.append(slot)
                else:
                    self._free[slot.capacity].append(slot.offset)
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
            self._spill.lengthen(windows * _WINDOW)
            mapping = self._spill.map(first * _WINDOW, (windows - first) * _WINDOW)
            self._windows.extend([(mapping, first * _WINDOW)] * (windows - first))
        self._end = end

    def _read_file(self, slot: Slot, address: int) -> None:
        try:
            self._spill.read(slot.offset, address, slot.nbytes)
        except OSError as error:
            raise SpillError(
                f"Reading {format_bytes(slot.nbytes)} back from the spill file failed: {error.strerror}; check the "
                f"disk under {self.directory}."
            ) from error

    def _check(self, slot: Slot, address: int) -> None:
        if checksum(address, slot.nbytes) != slot.checksum:
            raise SpillCorruptedError(
                f"{format_bytes(slot.nbytes)} in the spill file at offset {slot.offset} changed since they were "
                f"written; check the disk under {self.directory}."
            )


def slot_capacity(nbytes: Bytes) -> Bytes:
    """Room for `nbytes`: whole pages, in at most eight sizes per power of two, so that slots are found again."""
    step = max(PAGE, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-nbytes // step) * step


def checksum(address: int, nbytes: Bytes) -> int:
    """64 bits of the content (XXH3), near memory speed; other threads run Python meanwhile."""
    return xxhash.xxh3_64_intdigest(memory_at(address, nbytes))


def _before_fork() -> None:
    for tier in tuple(_tiers):
        tier.before_fork()


def _after_fork(*, in_child: bool) -> None:
    for tier in tuple(_tiers):
        tier.after_fork(in_child=in_child)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=lambda: _after_fork(in_child=False),
        after_in_child=lambda: _after_fork(in_child=True),
    )
