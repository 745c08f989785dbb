"""Models of device allocators, from which the peak of a simulated step can be read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, final

from spillway.errors import DeviceFullError, EngineError, UsageError
from spillway.units import Bytes, MiB, format_bytes


class AbstractAllocator(ABC):
    """Hands out device memory of which there are `limit` bytes, or no end of it."""

    def __init__(self, limit: Bytes | None = None) -> None:
        self.limit = limit
        self.allocated: Bytes = 0
        """Bytes that were asked for and are in use."""
        self.reserved: Bytes = 0
        """Bytes taken from the device for them."""
        self.peak_reserved: Bytes = 0
        """The most there were of these, since `reset_peak`."""

    @abstractmethod
    def allocate(self, nbytes: Bytes) -> Any:
        """A token for so many bytes, never None. Raises DeviceFullError if they do not fit; what is in use stays so."""

    @abstractmethod
    def free(self, token: Any) -> None:
        """Take the bytes back."""

    def reset_peak(self) -> None:
        """Begin to look for the peak anew."""
        self.peak_reserved = self.reserved

    def _reserve(self, nbytes: Bytes, asked: Bytes) -> None:
        """Take so many bytes from the device, for those that were asked for. Raises DeviceFullError likewise."""
        if self.limit is not None and self.reserved + nbytes > self.limit:
            raise self._full(asked)
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _given(self, block: Block | None, nbytes: Bytes) -> Block:
        """The block is in use, for so many bytes that were asked for."""
        if block is None:
            raise EngineError(f"A new piece of memory has no room for {nbytes} bytes.")
        block.asked = nbytes
        self.allocated += nbytes
        return block

    def _full(self, nbytes: Bytes) -> DeviceFullError:
        """What to raise when `nbytes` do not fit."""
        idle = self.reserved - self.allocated
        odd = f", {format_bytes(idle)} of it in pieces that do not fit" if idle else ""
        return DeviceFullError(
            f"An allocation of {format_bytes(nbytes)} does not fit in the {format_bytes(self.limit or 0)} of the "
            f"device: {format_bytes(self.reserved)} are reserved{odd}."
        )


@final
class ExactAllocator(AbstractAllocator):
    """Takes exactly the bytes that are in use: no rounding, no fragmentation."""

    def allocate(self, nbytes: Bytes) -> Bytes:
        """The token is the size."""
        self._reserve(nbytes, nbytes)
        self.allocated = self.reserved
        return nbytes

    def free(self, token: Bytes) -> None:
        self.allocated -= token
        self.reserved = self.allocated


# ---------------------------------------------------------------------- blocks of segments


@final
@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, in use or free. Free neighbours do not exist: they are one block."""

    pool: BestFit
    address: int
    nbytes: Bytes
    asked: Bytes = 0
    """What was asked for, while it is in use."""
    free: bool = True
    before: Block | None = None
    after: Block | None = None

    @property
    def whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.before is None and self.after is None


@final
class BestFit:
    """Free blocks of one pool: the smallest that fits is taken, the lowest address of those, and split."""

    def __init__(self, least_rest: Bytes) -> None:
        self._least_rest = least_rest
        self._free: list[tuple[Bytes, int, Block]] = []  # in order; addresses are distinct, so no blocks are compared

    def take(self, nbytes: Bytes, least_rest: Bytes | None = None) -> Block | None:
        """A block of so many bytes or a little more; None if no free one is large enough. It is split if at least so
        many bytes are left over, or as many as blocks of this pool are split for."""
        place = bisect_left(self._free, (nbytes, 0))
        if place == len(self._free):
            return None
        block = self._free.pop(place)[2]
        block.free = False
        if block.nbytes - nbytes >= (self._least_rest if least_rest is None else least_rest):
            rest = Block(self, block.address + nbytes, block.nbytes - nbytes, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.nbytes = rest, nbytes
            self._insert(rest)
        return block

    def free(self, block: Block) -> Block:
        """Take a block back; what it is part of now that free neighbours have become one."""
        block.free = True
        if block.before is not None and block.before.free:
            block = self._join(self._remove(block.before), block)
        if block.after is not None and block.after.free:
            block = self._join(block, self._remove(block.after))
        self._insert(block)
        return block

    def add(self, address: int, nbytes: Bytes) -> None:
        """A new segment."""
        self._insert(Block(self, address, nbytes))

    def remove_whole(self, block: Block) -> Bytes:
        """Forget a free block that is a whole segment; its bytes."""
        return self._remove(block).nbytes

    def whole_segments(self) -> list[Block]:
        """The segments in which nothing is in use."""
        return [block for _, _, block in self._free if block.whole]

    def _insert(self, block: Block) -> None:
        insort(self._free, (block.nbytes, block.address, block))

    def _remove(self, block: Block) -> Block:
        del self._free[bisect_left(self._free, (block.nbytes, block.address))]
        return block

    @staticmethod
    def _join(block: Block, after: Block) -> Block:
        block.nbytes += after.nbytes
        block.after = after.after
        if after.after is not None:
            after.after.before = block
        return block


class AbstractPools(AbstractAllocator):
    """Two pools of blocks, for small and for large requests. What fits in no free block of its pool has a new segment;
    where the device has no room for one, segments in which nothing is in use are given back first."""

    def __init__(self, limit: Bytes | None, *, small: BestFit, large: BestFit) -> None:
        super().__init__(limit)
        self._small, self._large = small, large
        self._top = 0

    @abstractmethod
    def _place_of(self, nbytes: Bytes) -> tuple[BestFit, Bytes, Bytes]:
        """A request's pool, its bytes rounded up, and those of the segment that is new if nothing else has room."""

    def allocate(self, nbytes: Bytes) -> Block | Bytes:
        """The token is a block; 0 for no bytes, which take none."""
        if not nbytes:
            return 0
        pool, rounded, segment = self._place_of(nbytes)
        block = pool.take(rounded)
        if block is None:
            if self.limit is not None and self.reserved + segment > self.limit:
                for one in (self._small, self._large):
                    self.reserved -= sum(map(one.remove_whole, one.whole_segments()))
            self._reserve(segment, nbytes)
            pool.add(self._top, segment)
            self._top += segment
            block = pool.take(rounded)
        return self._given(block, nbytes)

    def free(self, token: Block | Bytes) -> None:
        """The block stays reserved."""
        if isinstance(token, Block):
            self.allocated -= token.asked
            token.pool.free(token)


# ---------------------------------------------------------------------- PyTorch's

ROUNDING: Final[Bytes] = 512
"""Every request is rounded up to a multiple of it."""
SMALL: Final[Bytes] = MiB
"""Requests up to here share segments of `SMALL_SEGMENT`; larger ones have a pool of their own."""
SMALL_SEGMENT: Final[Bytes] = 2 * MiB
LARGE_SEGMENT: Final[Bytes] = 20 * MiB
"""A segment for requests of more than `SMALL` and less than `OWN_SEGMENT`."""
OWN_SEGMENT: Final[Bytes] = 10 * MiB
"""Requests from here get a segment of their size, rounded up to a multiple of `SEGMENT_ROUNDING`."""
SEGMENT_ROUNDING: Final[Bytes] = 2 * MiB


@final
class CachingAllocator(AbstractPools):
    """PyTorch's caching allocator for CUDA, with its default settings and one stream.

    As its notes on memory management and the comments of `CUDACachingAllocator` have it: requests are rounded to 512
    bytes; the best fit among the free blocks of the pool is taken and split, if more than 1 MiB would be left over (512
    bytes in the small pool); a new segment is taken from the device if there is none; freed blocks join free
    neighbours and stay reserved. If the device has no room, segments in which nothing is in use are given back, and
    the request is tried once more.

    Not modelled: several streams, `expandable_segments`, `max_split_size_mb`, `roundup_power2_divisions`, garbage
    collection by a threshold, and where the driver puts segments (each new one lies above those before it).
    """

    def __init__(self, limit: Bytes | None = None) -> None:
        super().__init__(limit, small=BestFit(least_rest=ROUNDING), large=BestFit(least_rest=SMALL + 1))

    def _place_of(self, nbytes: Bytes) -> tuple[BestFit, Bytes, Bytes]:
        rounded = rounded_up(nbytes, ROUNDING)
        if rounded <= SMALL:
            return self._small, rounded, SMALL_SEGMENT
        return self._large, rounded, LARGE_SEGMENT if rounded < OWN_SEGMENT else rounded_up(rounded, SEGMENT_ROUNDING)


# ---------------------------------------------------------------------- chunks

CHUNK: Final[Bytes] = 2 * MiB
"""Physical memory comes in pieces of this size; it is the granularity of CUDA's virtual memory management."""


@final
class ChunkAllocator(AbstractAllocator):
    """Chunks of physical memory, each mapped wherever a virtual address needs it.

    A storage of more than half a chunk has whole chunks of its own, which need not lie beside each other: nothing is
    lost but the rest of its last one. Smaller ones share chunks, best fit, in pieces of 512 bytes. A chunk in which
    nothing is in use is free for anybody.

    Arguments:
        chunk: Bytes of one.
        shared: Bytes of the largest storage that shares a chunk, if not half of one.
    """

    def __init__(self, limit: Bytes | None = None, chunk: Bytes = CHUNK, shared: Bytes | None = None) -> None:
        super().__init__(limit)
        self._chunk = chunk
        self._most_shared = chunk // 2 if shared is None else shared
        self._shared = BestFit(least_rest=ROUNDING)
        self._top = 0

    def allocate(self, nbytes: Bytes) -> Block | Bytes:
        """The token is a block of a shared chunk, or the size of what has its own."""
        if nbytes > self._most_shared or not nbytes:
            self._reserve(rounded_up(nbytes, self._chunk), nbytes)
            self.allocated += nbytes
            return nbytes
        rounded = rounded_up(nbytes, ROUNDING)
        block = self._shared.take(rounded)
        if block is None:
            self._reserve(self._chunk, nbytes)
            self._shared.add(self._top, self._chunk)
            self._top += self._chunk
            block = self._shared.take(rounded)
        return self._given(block, nbytes)

    def free(self, token: Block | Bytes) -> None:
        """Chunks in which nothing is in use any more are not reserved."""
        if not isinstance(token, Block):
            self.allocated -= token
            self.reserved -= rounded_up(token, self._chunk)
            return
        self.allocated -= token.asked
        block = self._shared.free(token)
        if block.whole:
            self.reserved -= self._shared.remove_whole(block)


def rounded_up(nbytes: Bytes, to: Bytes) -> Bytes:
    """The next multiple of `to` that is no less."""
    return -(-nbytes // to) * to


ALLOCATORS: Mapping[str, Callable[[Bytes | None], AbstractAllocator]] = MappingProxyType(
    {"exact": ExactAllocator, "caching": CachingAllocator, "chunks": ChunkAllocator}
)
"""The models by name."""


def allocator_named(name: str, limit: Bytes | None) -> AbstractAllocator:
    """One of `ALLOCATORS`. Raises UsageError for any other name."""
    if name in ALLOCATORS:
        return ALLOCATORS[name](limit)
    raise UsageError(f"There is no allocator model {name!r}; choose one of {', '.join(ALLOCATORS)}.")
