from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.errors import SpillError, SpillFullError
from spillway.tiers.host import ALIGNMENT, Block, Extents, HostPool

SLAB = 64 << 10


@dataclass
class System:
    """Gives pinned memory that is none, up to a limit."""

    limit: int = 1 << 40
    given: list[Memory] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def pin(self, nbytes: int) -> Memory | None:
        self.asked.append(nbytes)
        if nbytes > self.limit - self.pinned:
            return None
        self.given.append(Memory(self, (len(self.given) + 1) << 32, nbytes))
        return self.given[-1]

    @property
    def pinned(self) -> int:
        return sum(memory.nbytes for memory in self.given if not memory.gone)


@dataclass
class Memory:
    system: System
    address: int
    nbytes: int
    device_address: int = 7 << 40
    gone: bool = False

    def release(self) -> None:
        assert not self.gone
        self.gone = True


def test_a_block_is_whole_lines_of_a_slab_and_says_where_host_and_device_find_it() -> None:
    system = System()
    pool = HostPool(system.pin, 1 << 20, slab=SLAB)
    first, second = pool.take(1), pool.take(ALIGNMENT + 1)
    assert (first.capacity, second.capacity) == (ALIGNMENT, 2 * ALIGNMENT)
    assert second.address == system.given[0].address + ALIGNMENT
    assert second.device_address == (7 << 40) + ALIGNMENT
    assert (pool.used, pool.pinned, system.asked) == (3 * ALIGNMENT, SLAB, [SLAB])


def test_memory_that_the_device_cannot_read_has_no_address_there() -> None:
    system = System()
    pool = HostPool(system.pin, 1 << 20, slab=SLAB)
    pool.take(1)
    assert pool.readable
    system.given[0].device_address = 0
    assert not pool.readable
    assert pool.take(1).device_address == 0


def test_sizes_are_never_rounded_to_powers_of_two() -> None:
    system = System()
    pool = HostPool(system.pin, 10 * SLAB, slab=SLAB)
    pool.take(SLAB + ALIGNMENT)
    assert system.asked == [SLAB + ALIGNMENT]


def test_the_budget_bounds_what_is_pinned_and_the_last_slab_is_what_is_left() -> None:
    system = System()
    pool = HostPool(system.pin, SLAB + 3 * ALIGNMENT, slab=SLAB)
    pool.take(SLAB)
    pool.take(2 * ALIGNMENT)
    assert system.asked == [SLAB, 3 * ALIGNMENT]
    with pytest.raises(SpillFullError, match=r"The host budget of 65\.50 KiB has no room for 1\.00 KiB more .*raise "):
        pool.take(2 * ALIGNMENT)
    assert pool.take(ALIGNMENT).nbytes == ALIGNMENT


def test_a_system_that_pins_no_more_is_told_from_a_budget_that_is_used_up_and_not_asked_again() -> None:
    system = System(limit=SLAB)
    pool = HostPool(system.pin, 10 * SLAB, slab=SLAB)
    pool.take(SLAB)
    for _ in range(2):
        with pytest.raises(
            SpillFullError, match=r"The system pins no 1\.00 KiB more of host memory .*free host memory"
        ):
            pool.take(2 * ALIGNMENT)
    assert system.asked == [SLAB, SLAB, 2 * ALIGNMENT]


def test_what_the_device_is_done_with_is_used_before_more_is_pinned_and_the_host_waits_last_of_all() -> None:
    system, done, busy, waited = System(), list[Block](), list[Block](), list[bool]()

    def make_free(*, wait: bool) -> None:
        waited.append(wait)
        for blocks in (done, busy) if wait else (done,):
            while blocks:
                pool.free(blocks.pop())

    pool = HostPool(system.pin, 2 * SLAB, slab=SLAB, make_free=make_free)
    done.append(pool.take(SLAB))
    busy.append(pool.take(SLAB))
    assert system.asked == [SLAB], "one block was done with"
    pool.take(SLAB)
    assert system.asked == [SLAB, SLAB], "more is pinned before anybody waits"
    with pytest.raises(SpillFullError):
        pool.take(SLAB, wait=False)
    assert waited == [False] * 4
    assert pool.take(SLAB).address == system.given[0].address
    assert waited == [False] * 5 + [True]


def test_empty_slabs_go_back_when_none_of_them_is_large_enough() -> None:
    system = System()
    pool = HostPool(system.pin, 4 * SLAB, slab=SLAB)
    kept = pool.take(SLAB)
    for block in [pool.take(SLAB) for _ in range(3)]:
        pool.free(block)
    large = pool.take(2 * SLAB)
    assert (large.nbytes, pool.pinned) == (2 * SLAB, 4 * SLAB)
    assert [memory.gone for memory in system.given] == [False, True, True, False, False]
    with pytest.raises(SpillFullError, match="The host budget"):
        pool.take(3 * SLAB)
    assert pool.pinned == 4 * SLAB, "nothing goes back for what does not fit all the same"
    assert kept.slab is not large.slab


def test_a_system_that_pinned_no_more_is_asked_again_when_something_went_back() -> None:
    system = System(limit=2 * SLAB)
    pool = HostPool(system.pin, 10 * SLAB, slab=SLAB)
    first, second = pool.take(SLAB), pool.take(SLAB)
    with pytest.raises(SpillFullError, match="The system pins no"):
        pool.take(SLAB)
    pool.free(first)
    pool.free(second)
    assert pool.take(2 * SLAB).nbytes == 2 * SLAB
    assert pool.pinned == system.pinned == 2 * SLAB


def test_closing_gives_slabs_back_and_those_in_use_when_their_last_block_is_freed() -> None:
    system = System()
    pool = HostPool(system.pin, 10 * SLAB, slab=SLAB)
    kept, other = pool.take(SLAB), pool.take(SLAB)
    pool.free(other)
    pool.close()
    assert [memory.gone for memory in system.given] == [False, True]
    pool.free(kept)
    assert system.pinned == 0
    with pytest.raises(SpillError, match="closed"):
        pool.take(1)


def test_memory_goes_back_when_the_pool_its_blocks_and_who_points_at_them_are_gone() -> None:
    class Owner:
        pass

    system, first, second = System(), Owner(), Owner()
    pool = HostPool(system.pin, 10 * SLAB, slab=SLAB)
    kept, other = pool.take(SLAB), pool.take(SLAB)
    kept.keep_for(first)
    let_go = other.keep_for(second)
    pool.close()
    del pool, kept, other
    assert [memory.gone for memory in system.given] == [False, False]
    let_go()
    assert [memory.gone for memory in system.given] == [False, True]
    del first
    assert system.pinned == 0


def test_the_smallest_hole_that_fits_is_taken() -> None:
    extents = Extents(10 * ALIGNMENT)
    for _ in range(10):
        extents.take(extents.best(ALIGNMENT), ALIGNMENT)  # type: ignore[arg-type]
    for line in (0, 1, 2, 5, 8, 9):
        extents.free(line * ALIGNMENT, ALIGNMENT)
    assert [(hole.offset, hole.end) for hole in extents.holes] == [
        (0, 3 * ALIGNMENT), (5 * ALIGNMENT, 6 * ALIGNMENT), (8 * ALIGNMENT, 10 * ALIGNMENT),
    ]  # fmt: skip
    hole = extents.best(2 * ALIGNMENT)
    assert hole is not None
    assert extents.take(hole, 2 * ALIGNMENT) == 8 * ALIGNMENT
    assert extents.best(4 * ALIGNMENT) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40 * ALIGNMENT)), max_size=60))
def test_blocks_never_overlap_and_everything_can_be_had_again(steps: list[tuple[int, int]]) -> None:
    system = System()
    pool = HostPool(system.pin, 4 * SLAB, slab=SLAB)
    living: list[Block] = []
    for choice, nbytes in steps:
        if choice < 4 and living:
            pool.free(living.pop(nbytes % len(living)))
        else:
            try:
                living.append(pool.take(nbytes))
            except SpillFullError:
                assert pool.pinned + -(-nbytes // ALIGNMENT) * ALIGNMENT > pool.budget
        ranges = sorted((block.address, block.address + block.capacity) for block in living)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
        assert all(block.address % ALIGNMENT == 0 and block.capacity >= block.nbytes for block in living)
        memories = [(memory.address, memory.address + memory.nbytes) for memory in system.given]
        assert all(any(low <= begin and end <= high for low, high in memories) for begin, end in ranges)
        assert pool.used == sum(block.capacity for block in living)
        assert pool.pinned == system.pinned <= pool.budget
        for slab in {id(block.slab): block.slab for block in living}.values():
            holes = slab.extents.holes
            assert all(one.end < other.offset for one, other in pairwise(holes)), "holes touch"
            free = sum(hole.nbytes for hole in holes)
            assert free + sum(b.capacity for b in living if b.slab is slab) == slab.extents.nbytes
    for block in living:
        pool.free(block)
    assert pool.used == 0
    pool.close()
    assert system.pinned == 0
