"""How much memory is taken at this moment, asked for at the seams between blocks."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, cast, final

import torch

from spillway.internals.process_memory import ResidentSet
from spillway.native import arena
from spillway.units import Bytes

_PROBE: Final[Bytes] = 1 << 20
_PROBES: Final = 10


class AbstractMeter(ABC):
    """Reads what an allocator has handed out. Differences of two readings are what was taken in between."""

    @abstractmethod
    def read(self) -> Bytes:
        """Bytes that are taken now."""

    def begin(self, named: Bytes) -> Bytes:
        """Read when a step begins, at whose storages with names `most` counts from."""
        return self.read()

    def most(self) -> Bytes | None:
        """What the step can have taken at most, those storages included, seen in another way; None where there is none.

        Asked when the reading is above the budget: it may take milliseconds.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """It is not read any more."""


class _Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@final
class HeapMeter(AbstractMeter):
    """What the C library's allocator and the arena have handed out to the whole process (about 6 us).

    It knows tensors to within a few hundred KiB: what else the process takes from the same allocator is in it. Most of
    that is small, but oneDNN's code for a product of matrices is not: on some processors it reserves megabytes for
    every shape that is new to it. Next to nothing of them is ever touched, so that pages tell them from tensors.
    """

    def __init__(self) -> None:
        self._memory = ResidentSet()
        self._others: Bytes | None = None
        """Resident at the beginning of the step besides what had a name, or less."""
        self._rest: Bytes = 0
        """Handed out then besides what had a name."""

    def read(self) -> Bytes:
        assert _mallinfo2 is not None
        info = _mallinfo2()
        return int(info.uordblks) + int(info.hblkhd) + arena.counts().live

    def begin(self, named: Bytes) -> Bytes:
        """The first time, what was freed before goes back to the system."""
        if self._others is None:
            self._memory.trim()
            arena.trim()
            self._others = self._memory.read() - named
            self._rest = self.read() - named
        taken = self.read()
        # What others gave up since may have left the resident set.
        self._others -= max(self._rest - (taken - named), 0)
        self._rest = taken - named
        return taken

    def most(self) -> Bytes | None:
        """By the resident set, after what was freed has gone back to the system; None where that is not told."""
        if self._others is None:
            return None
        self._memory.trim()
        arena.trim()
        resident = self._memory.read()
        return resident - self._others if resident else None

    def close(self) -> None:
        self._memory.close()


@final
class ResidentMeter(AbstractMeter):
    """The resident set, where the C library does not tell: what was freed and not returned counts as well."""

    def __init__(self) -> None:
        self._resident_set = ResidentSet()

    def read(self) -> Bytes:
        return self._resident_set.read()

    def close(self) -> None:
        self._resident_set.close()


@final
class CudaMeter(AbstractMeter):
    """What the caching allocator has handed out, exactly."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> Bytes:
        return torch.cuda.memory_allocated(self._device)

    def close(self) -> None:
        """Nothing to do."""


def meter_for(device: torch.device) -> AbstractMeter:
    """The best that there is for this device."""
    if device.type == "cuda":
        return CudaMeter(device)
    return HeapMeter() if _mallinfo2 is not None and _is_ours(HeapMeter()) else ResidentMeter()


def _is_ours(meter: AbstractMeter) -> bool:
    """Whether the C library's allocator is the one that tensors come from: another may have been loaded before it.

    A worker of an earlier session that frees memory at this moment can hide one allocation, and hardly several.
    """
    for _ in range(_PROBES):
        before = meter.read()
        held = torch.empty(_PROBE, dtype=torch.uint8)
        after = meter.read()
        del held
        if after - before >= _PROBE:
            return True
    return False


def _find_mallinfo2() -> Callable[[], _Heap] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2  # glibc from 2.33 on
    except (OSError, AttributeError):
        return None
    function.restype = _Heap
    return cast("Callable[[], _Heap]", function)


_mallinfo2: Final = _find_mallinfo2()
