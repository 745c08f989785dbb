"""How fast a spill directory is: what the tier makes of it, and what the disk sustains behind the page cache."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from spillway.errors import SpillError, SpillFullError
from spillway.tiers.disk import DiskTier
from spillway.tiers.spill_file import PAGE, SpillFile, write_all
from spillway.units import Bytes, MiB, Seconds, format_bytes

SAMPLE: Final[Bytes] = 128 * MiB
"""Bytes that are written and read by a measurement of the tier, and once more by one of the disk."""
PIECE: Final[Bytes] = 8 * MiB
PATIENCE: Final[Seconds] = 4.0
"""A slow disk is measured with what it takes in so many seconds."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Bytes per second, both ways."""

    out: float
    back: float


def tier_speed(directory: Path, nbytes: Bytes = SAMPLE) -> Speed:
    """Copies out and in as a session makes them, one after the other, checksums included.

    Raises SpillError where the tier does: SpillFullError if there is no room for `nbytes`.
    """
    tier = DiskTier(directory)
    try:
        memory = mmap.mmap(-1, PIECE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        memory[:] = os.urandom(PAGE) * (PIECE // PAGE)  # there before the clock runs, and no hole in the file
        began = time.perf_counter()
        slots = [tier.write(address, PIECE) for _ in _pieces(nbytes, began)]
        written = time.perf_counter()
        for slot in slots:
            tier.read(slot, address)
        read = time.perf_counter()
    finally:
        tier.close()
    moved = len(slots) * PIECE
    return Speed(out=moved / (written - began), back=moved / (read - written))


def disk_speed(directory: Path, nbytes: Bytes = SAMPLE) -> Speed:
    """What the disk sustains: writing until everything is on it, reading what the page cache has forgotten. Raises
    SpillFullError if there is no room for `nbytes`, and SpillError if the system refuses for another reason."""
    piece = memoryview(os.urandom(PAGE) * (PIECE // PAGE))
    with _told(directory, nbytes), tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        began, moved = time.perf_counter(), 0
        for _ in _pieces(nbytes, began):
            write_all(file.fileno(), moved, piece)
            moved += len(piece)
            os.fdatasync(file.fileno())
        written = time.perf_counter()
        with contextlib.suppress(AttributeError, OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        into, again = bytearray(PIECE), 0
        reading = time.perf_counter()
        while again < moved and time.perf_counter() - reading < PATIENCE and (count := file.readinto(into)):
            again += count
        read = time.perf_counter()
    return Speed(out=moved / (written - began), back=again / (read - reading))


def has_direct_io(directory: Path) -> bool:
    """Whether a spill file there goes past the page cache if it is to. Raises SpillError if there can be none."""
    file = SpillFile(directory, "direct")
    file.close()
    return file.io == "direct"


def _pieces(nbytes: Bytes, began: float) -> Iterator[int]:
    """A number for every piece, until the time is up; at least one."""
    for piece in range(max(nbytes // PIECE, 1)):
        if piece and time.perf_counter() - began > PATIENCE:
            return
        yield piece


@contextmanager
def _told(directory: Path, nbytes: Bytes) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise SpillFullError(f"{directory} has no room for {format_bytes(nbytes)}.") from error
        raise SpillError(f"{directory} cannot be used: {error.strerror or error}.") from error
