"""On-demand paging, as unified memory does it: what is touched comes in, what was touched longest ago goes out.

CUDA's unified memory (CUDA C++ Programming Guide, "Unified Memory Programming") keeps device memory in blocks of 2 MiB.
A kernel that touches a block which is not there faults; the driver brings it in, and where there is no room evicts the
block that was used longest ago. Nothing is recomputed, nothing begins before it is needed, and every fault is waited
for. Papers on tensor management take it as their baseline, on data of at most twice the device's memory.

Differs from the driver in:

- Whole storages move, because that is what the engines move. Storages smaller than a block that were made one after the
  other share one, and leave together; a block is as fresh as what was used last in it.
- The driver copies the blocks that a kernel touches, here an op touches all of its inputs.

Not implemented: the driver's density prefetcher, `cudaMemPrefetchAsync` and `cudaMemAdvise`, access counters.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import replace
from math import ceil
from typing import Final, final

from spillway.costs.device import Device
from spillway.errors import BudgetInfeasible, UsageError
from spillway.methods.base import AbstractPolicy, Candidate, MemoryView, Move, Proposal
from spillway.units import Bytes, MiB, Seconds, format_bytes

PAGE: Final[Bytes] = 2 * MiB
"""The block in which the driver keeps, moves and evicts device memory."""

FAULT_SECONDS: Final[Seconds] = 30e-6
"""What the driver takes for a fault beside the copy: Zheng et al., "Towards High Performance Paged Memory for GPUs",
HPCA 2016, measured 20 to 50 us."""

MOST: Final = 2.0
"""How many times the device's memory a step may use: beyond it, papers report failures or endless thrashing."""


@final
class UVM(AbstractPolicy):
    """Least recently used block first, moves alone.

    Arguments:
        page: Bytes of a block.
        fault_seconds: What a fault costs beside its copy; `link` adds it, a block at a time.
        most: The step is refused when what lives in it passes `most` times the budget.
    """

    name = "uvm"
    uses_recipes = False

    def __init__(self, page: Bytes = PAGE, fault_seconds: Seconds = FAULT_SECONDS, most: float = MOST) -> None:
        if not (page > 0 and fault_seconds >= 0 and most >= 1):
            raise UsageError(
                f"UVM needs blocks of 1 byte or more, faults of 0 seconds or more and `most` of at least 1; "
                f"got {page}, {fault_seconds} and {most}."
            )
        self.page = page
        self.fault_seconds = fault_seconds
        self.most = most

    def link(self, device: Device) -> Device:
        """The device as its copies are under paging: a fault for every block that comes in, none beside another."""
        slower = 1 / (1 / device.in_per_second + self.fault_seconds / self.page)
        return replace(device, in_per_second=slower, copy_seconds=max(device.copy_seconds, self.fault_seconds))

    def relieve(self, view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        """Evict block by block. Raises BudgetInfeasible beyond `most` times the budget."""
        # `needed` is what is missing when the whole budget is in use.
        living = view.allowed + needed + sum(storage.nbytes for storage in view.moved())
        if living > self.most * view.allowed:
            smallest = ceil(living / self.most)
            raise BudgetInfeasible(
                needed=smallest, allowed=view.allowed, op_index=view.op_index, smallest_budget=smallest, exact=False,
                op=f"paging {format_bytes(living)} on demand, at most {self.most:g} times the budget",
            )  # fmt: skip
        for block in sorted(self._blocks(view.candidates()), key=lambda block: max(s.touched for s in block)):
            for storage in block:
                yield Move(storage)

    def _blocks(self, candidates: Iterable[Candidate]) -> list[list[Candidate]]:
        """Storages by the block that they lie in: the small ones next to each other, in the order of their making."""
        blocks: list[list[Candidate]] = []
        small: list[Candidate] = []
        filled = 0
        for storage in sorted(candidates, key=lambda storage: storage.number):
            if storage.nbytes >= self.page:
                blocks.append([storage])
                continue
            if small and filled + storage.nbytes > self.page:
                blocks.append(small)
                small, filled = [], 0
            small.append(storage)
            filled += storage.nbytes
        return [*blocks, small] if small else blocks
