"""The host tier: a pool of pinned host memory under a budget of its own.

Pinned memory is taken in slabs, which are divided here: torch rounds every pinned tensor up to a power of two, which
for large ones doubles what is pinned. A block is whole lines of `ALIGNMENT` bytes of one slab, from the smallest hole
that fits, and holes that touch become one.

A slab goes back to the system when the pool says so, or when nobody holds it any more: neither the pool, nor a block,
nor a storage that was pointed at a block (`Block.keep_for`). So a pool that nobody closed pulls no memory from under
a storage, and leaves none pinned.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias, final

from spillway.errors import SpillError, SpillFullError
from spillway.units import Bytes, format_bytes

ALIGNMENT: Final[Bytes] = 512
"""What the caching allocator aligns device memory to: a kernel finds pinned bytes aligned as it expects them."""

SLAB: Final[Bytes] = 256 << 20
"""Bytes that are pinned at a time; a larger storage gets a slab of its own."""


class Pinned(Protocol):
    """Pinned host memory, as a driver gives it."""

    @property
    def address(self) -> int:
        """Where it begins."""

    @property
    def device_address(self) -> int:
        """Where the device finds it; 0 if it cannot read it in place."""

    def release(self) -> None:
        """Give it back to the system, once the device does nothing with it. Called once, in any thread."""


Pin: TypeAlias = Callable[[Bytes], Pinned | None]
"""Takes pinned memory from the system; None if it gives no more."""


class MakeFree(Protocol):
    """Frees blocks that the device is done with; with `wait` also those for which the host has to wait."""

    def __call__(self, *, wait: bool) -> None: ...


def _nothing_to_free(*, wait: bool) -> None: ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """Free bytes of a slab, from `offset` to before `end`."""

    offset: Bytes
    end: Bytes

    @property
    def nbytes(self) -> Bytes:
        return self.end - self.offset


@final
class Extents:
    """Which bytes of one slab are free. Pure arithmetic: it touches no memory."""

    def __init__(self, nbytes: Bytes) -> None:
        self.nbytes = nbytes
        self._holes = [Hole(offset=0, end=nbytes)] if nbytes else []  # by offset; no two touch

    @property
    def holes(self) -> tuple[Hole, ...]:
        return tuple(self._holes)

    @property
    def empty(self) -> bool:
        return self._holes == [Hole(offset=0, end=self.nbytes)]

    def best(self, nbytes: Bytes) -> Hole | None:
        """The smallest hole that holds so many bytes; of equals the first."""
        return min((hole for hole in self._holes if hole.nbytes >= nbytes), key=lambda hole: hole.nbytes, default=None)

    def take(self, hole: Hole, nbytes: Bytes) -> Bytes:
        """Use the beginning of a hole; its offset."""
        place = bisect.bisect_left(self._holes, hole.offset, key=lambda other: other.offset)
        rest = Hole(offset=hole.offset + nbytes, end=hole.end)
        self._holes[place : place + 1] = [rest] if rest.nbytes else []
        return hole.offset

    def free(self, offset: Bytes, nbytes: Bytes) -> None:
        """Free what was taken; it joins the holes on both sides."""
        place = bisect.bisect_left(self._holes, offset, key=lambda other: other.offset)
        end, after = offset + nbytes, place
        if place and self._holes[place - 1].end == offset:
            place -= 1
            offset = self._holes[place].offset
        if after < len(self._holes) and self._holes[after].offset == end:
            end = self._holes[after].end
            after += 1
        self._holes[place:after] = [Hole(offset=offset, end=end)]


@final
@dataclass(slots=True, eq=False, weakref_slot=True)
class _Slab:
    memory: Pinned
    extents: Extents
    release: Callable[[], object] = field(init=False)
    """Gives the memory back, once."""

    def __post_init__(self) -> None:
        closing = weakref.finalize(self, self.memory.release)
        closing.atexit = False  # tensors may be read until the end
        self.release = closing


@final
@dataclass(slots=True, eq=False)
class Block:
    """Pinned memory for one storage."""

    address: int
    """Where it begins, for the host."""
    device_address: int
    """The same for the device; 0 if it cannot read it in place."""
    nbytes: Bytes
    """Bytes that belong to the storage."""
    capacity: Bytes
    """Bytes of the slab that it takes."""
    offset: Bytes
    """Where it begins in its slab."""
    slab: _Slab = field(repr=False)

    def keep_for(self, owner: object) -> Callable[[], object]:
        """Keep the memory for as long as `owner` lives, whatever becomes of the block and the pool. Returns what undoes
        that."""
        keeping = weakref.finalize(owner, lambda slab: None, self.slab)
        keeping.atexit = False
        return keeping.detach


@final
class HostPool:
    """Blocks of pinned memory, never more than `budget` bytes pinned.

    Arguments:
        pin: Takes slabs from the system.
        budget: The most bytes that are pinned at a time.
        make_free: Called when no hole fits, before more is pinned, and if that did not help once more, to wait: blocks
            that were given up are freed when the device is done with them.
    """

    def __init__(self, pin: Pin, budget: Bytes, *, slab: Bytes = SLAB, make_free: MakeFree = _nothing_to_free) -> None:
        self.budget = budget
        self.make_free = make_free
        self._pin = pin
        self._slab = slab
        self._slabs: list[_Slab] = []
        self._used: Bytes = 0
        self._refused: Bytes = 0
        self.closed = False

    @property
    def used(self) -> Bytes:
        return self._used

    @property
    def pinned(self) -> Bytes:
        return sum(slab.extents.nbytes for slab in self._slabs)

    @property
    def readable(self) -> bool:
        """Whether the device can read every block in place."""
        return all(slab.memory.device_address for slab in self._slabs)

    def take(self, nbytes: Bytes, *, wait: bool = True) -> Block:
        """A block of so many bytes.

        In order of what it costs: a hole, one that the device is done with, one more slab; with `wait` also a hole that
        the host waits for, and a slab in place of empty ones.

        Raises SpillFullError if the host budget does not hold them, or the system pins no more; with `wait` empty slabs
        may have gone back.
        """
        capacity = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        found = self._find(capacity)
        if found is None:
            self.make_free(wait=False)
            found = self._find(capacity) or self._grow(capacity)
        if found is None and wait:
            self.make_free(wait=True)
            found = self._find(capacity) or self._grow_in_place_of_empty(capacity)
        if found is None:
            raise SpillFullError(self._why_full(capacity, nbytes))
        slab, hole = found
        offset = slab.extents.take(hole, capacity)
        self._used += capacity
        memory = slab.memory
        return Block(
            memory.address + offset, memory.device_address and memory.device_address + offset, nbytes, capacity,
            offset, slab,
        )  # fmt: skip

    def free(self, block: Block) -> None:
        """Give a block back; nothing reads or writes it any more."""
        block.slab.extents.free(block.offset, block.capacity)
        self._used -= block.capacity
        if self.closed and block.slab.extents.empty:
            self._release(block.slab)

    def close(self) -> None:
        """Give every slab back to the system, those with blocks in use when the last of these is freed."""
        self.closed = True
        for slab in list(self._slabs):
            if slab.extents.empty:
                self._release(slab)

    def _release(self, slab: _Slab) -> None:
        self._slabs.remove(slab)
        slab.release()
        self._refused = 0  # the system has more than when it refused

    def _find(self, capacity: Bytes) -> tuple[_Slab, Hole] | None:
        fitting = ((slab, hole) for slab in self._slabs if (hole := slab.extents.best(capacity)) is not None)
        return min(fitting, key=lambda found: found[1].nbytes, default=None)

    def _left(self) -> Bytes:
        return (self.budget - self.pinned) // ALIGNMENT * ALIGNMENT

    def _grow(self, capacity: Bytes) -> tuple[_Slab, Hole] | None:
        """One more slab: a usual one, or what is left of the budget, or what the storage takes."""
        if self.closed:
            raise SpillError("The pool of pinned host memory is closed.")
        left = self._left()
        for size in dict.fromkeys((max(min(self._slab, left), capacity), capacity)):
            if size > left or (self._refused and size >= self._refused):
                continue
            memory = self._pin(size)
            if memory is not None:
                slab = _Slab(memory, Extents(size))
                self._slabs.append(slab)
                return slab, slab.extents.holes[0]
            self._refused = size  # the system is not asked again for as much
        return None

    def _grow_in_place_of_empty(self, capacity: Bytes) -> tuple[_Slab, Hole] | None:
        """One more slab, for which empty ones that are too small go back to the system, the largest first."""
        empty = sorted((s for s in self._slabs if s.extents.empty), key=lambda s: s.extents.nbytes, reverse=True)
        if sum(slab.extents.nbytes for slab in empty) + self._left() < capacity:
            return None
        for slab in empty:
            self._release(slab)
            found = self._grow(capacity)
            if found is not None:
                return found
        return None

    def _why_full(self, capacity: Bytes, nbytes: Bytes) -> str:
        used = f"{format_bytes(self._used)} of {format_bytes(self.pinned)} pinned are in use"
        if capacity <= self._left():
            return (
                f"The system pins no {format_bytes(nbytes)} more of host memory ({used}); free host memory, or let "
                f"less leave the device with a larger budget=."
            )
        return (
            f"The host budget of {format_bytes(self.budget)} has no room for {format_bytes(nbytes)} more ({used}); "
            f"raise SpillOptions(host_budget=...), or let less leave the device with a larger budget=."
        )
