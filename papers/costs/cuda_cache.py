"""How often torch's caching allocator asks CUDA for memory in a step that begins with an empty cache, by its model."""

from __future__ import annotations

from collections import defaultdict

from spillway.ir.step import Step, StorageInfo
from spillway.simulation.allocators import Block, CachingAllocator
from spillway.units import Bytes


def asked_of_cuda(step: Step) -> list[int]:
    """[ops] How often CUDA is asked for memory, of a step whose cache is empty when it begins."""
    born: dict[int, list[StorageInfo]] = defaultdict(list)
    dying: dict[int, list[StorageInfo]] = defaultdict(list)
    for storage in step.storages:
        if not storage.present_at_start and storage.nbytes:
            born[storage.alive_from].append(storage)
            dying[storage.alive_until].append(storage)
    cache, held, counts = CachingAllocator(), dict[int, Block | Bytes](), [0] * len(step.ops)
    for op in range(len(step.ops)):
        for storage in dying[op]:
            cache.free(held.pop(storage.id))
        for storage in born[op]:
            before = cache.reserved
            held[storage.id] = cache.allocate(storage.nbytes)
            counts[op] += cache.reserved > before
    return counts
