"""How often torch's caching allocator asks CUDA for memory in a step that begins with an empty cache.

By the allocator's published rules: blocks of up to 1 MiB come out of segments of 2, those below 10 MiB out of segments
of 20, larger ones have one of their own in units of 2 MiB; the smallest free block that is large enough is taken, and
what is left of it stays free, of large ones if it is more than 1 MiB; free neighbours of a segment become one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final, final

from spillway.ir.step import Step, StorageInfo
from spillway.units import Bytes, MiB

_UNIT: Final[Bytes] = 512
_SMALL: Final[Bytes] = MiB
_LARGE: Final[Bytes] = 10 * MiB


@final
@dataclass(eq=False, slots=True)
class _Block:
    segment: list[_Block]
    nbytes: Bytes
    free: bool = False


@final
@dataclass(slots=True)
class Cache:
    """What the allocator holds of CUDA."""

    segments: dict[bool, list[list[_Block]]] = field(default_factory=lambda: defaultdict(list))
    """Of small blocks, and of others."""

    def take(self, nbytes: Bytes) -> tuple[_Block, bool]:
        """A block, and whether CUDA had to be asked for it."""
        wanted = -(-nbytes // _UNIT) * _UNIT
        small = wanted <= _SMALL
        free = [one for segment in self.segments[small] for one in segment if one.free and one.nbytes >= wanted]
        block = min(free, key=lambda one: one.nbytes, default=None)
        asked = block is None
        if block is None:
            size = 2 * MiB if small else 20 * MiB if wanted < _LARGE else -(-wanted // (2 * MiB)) * 2 * MiB
            segment: list[_Block] = []
            block = _Block(segment, size)
            segment.append(block)
            self.segments[small].append(segment)
        rest = block.nbytes - wanted
        if rest >= _UNIT if small else rest > _SMALL:
            block.segment.insert(block.segment.index(block) + 1, _Block(block.segment, rest, free=True))
            block.nbytes = wanted
        block.free = False
        return block, asked

    def give_back(self, block: _Block) -> None:
        """Make it free, and one with its free neighbours."""
        block.free, place = True, block.segment.index(block)
        for other in block.segment[place + 1 : place + 2] + block.segment[max(place - 1, 0) : place]:
            if other.free:
                block.nbytes += other.nbytes
                block.segment.remove(other)


def asked_of_cuda(step: Step) -> list[int]:
    """[ops] How often CUDA is asked for memory, of a step whose cache is empty when it begins."""
    born: dict[int, list[StorageInfo]] = defaultdict(list)
    dying: dict[int, list[StorageInfo]] = defaultdict(list)
    for storage in step.storages:
        if not storage.present_at_start and storage.nbytes:
            born[storage.alive_from].append(storage)
            dying[storage.alive_until].append(storage)
    cache, counts = Cache(), []
    held: dict[int, _Block] = {}
    for number in range(len(step.ops)):
        for storage in dying[number]:
            cache.give_back(held.pop(storage.id))
        taken = [(storage, *cache.take(storage.nbytes)) for storage in born[number]]
        held |= {storage.id: block for storage, block, _ in taken}
        counts.append(sum(asked for *_, asked in taken))
    return counts
