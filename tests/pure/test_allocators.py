"""Models of device allocators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.errors import DeviceFullError, UsageError
from spillway.simulation.allocators import (
    ALLOCATORS,
    CHUNK,
    LARGE_SEGMENT,
    SMALL_SEGMENT,
    AbstractAllocator,
    Block,
    CachingAllocator,
    ChunkAllocator,
    ExactAllocator,
    allocator_named,
)
from spillway.units import Bytes, KiB, MiB

SIZES = st.one_of(st.integers(0, 5000), st.integers(0, 3 * MiB), st.integers(MiB, 40 * MiB))
REQUESTS = st.lists(st.one_of(SIZES, st.integers(-40, -1)), max_size=60)
"""Sizes to allocate; a negative number frees one of what is in use."""


def blocks_in_use(tokens: Iterable[Any]) -> list[tuple[int, Bytes]]:
    """From where to where, in order, of what is in use and shares segments."""
    return sorted((token.address, token.address + token.nbytes) for token in tokens if isinstance(token, Block))


def play(allocator: AbstractAllocator, requests: list[int]) -> list[tuple[Any, Bytes]]:
    """Allocate and free, and check what holds for every allocator at every moment; what is in use at the end."""
    living: list[tuple[Any, Bytes]] = []
    for request in requests:
        if request >= 0:
            before = (allocator.allocated, len(living))
            try:
                living.append((allocator.allocate(request), request))
            except DeviceFullError:
                assert before == (allocator.allocated, len(living))
        elif living:
            allocator.free(living.pop(request % len(living))[0])
        asked = sum(nbytes for _, nbytes in living)
        assert allocator.allocated == asked <= allocator.reserved <= allocator.peak_reserved
        if allocator.limit is not None:
            assert allocator.reserved <= allocator.limit
        edges = [edge for block in blocks_in_use(token for token, _ in living) for edge in block]
        assert edges == sorted(edges), "two blocks overlap"
    return living


@pytest.mark.parametrize("name", ALLOCATORS)
@given(requests=REQUESTS, limit=st.one_of(st.none(), st.integers(0, 200 * MiB)))
def test_blocks_do_not_overlap_and_everything_in_use_is_reserved(
    name: str, requests: list[int], limit: Bytes | None
) -> None:
    allocator = allocator_named(name, limit)
    for token, _ in play(allocator, requests):
        allocator.free(token)
    assert allocator.allocated == 0


@given(requests=REQUESTS)
def test_when_everything_is_freed_every_segment_is_one_block_again(requests: list[int]) -> None:
    allocator = CachingAllocator()
    for token, _ in play(allocator, requests):
        allocator.free(token)
    whole = [block for pool in (allocator._small, allocator._large) for block in pool.whole_segments()]
    assert sum(block.nbytes for block in whole) == allocator.reserved
    chunks = ChunkAllocator()
    for token, _ in play(chunks, requests):
        chunks.free(token)
    assert chunks.reserved == 0


@given(requests=REQUESTS)
def test_no_model_needs_less_than_exact_bytes(requests: list[int]) -> None:
    exact, others = ExactAllocator(), (CachingAllocator(), ChunkAllocator())
    play(exact, requests)
    for other in others:
        play(other, requests)
        assert other.peak_reserved >= exact.peak_reserved


@pytest.mark.parametrize(
    ("requests", "reserved"),
    [
        ([1], SMALL_SEGMENT),
        ([0], 0),
        ([MiB, MiB], SMALL_SEGMENT),
        ([MiB + 1], LARGE_SEGMENT),
        ([MiB, MiB + 512], SMALL_SEGMENT + LARGE_SEGMENT),
        ([9 * MiB, 9 * MiB], LARGE_SEGMENT),
        ([9 * MiB, 9 * MiB, 3 * MiB], 2 * LARGE_SEGMENT),  # 2 MiB are left of the first
        ([9 * MiB, 9 * MiB, 2 * MiB], LARGE_SEGMENT),
        ([10 * MiB], 10 * MiB),
        ([10 * MiB + 1], 12 * MiB),
        ([33 * MiB], 34 * MiB),
    ],
)
def test_segments_of_the_caching_allocator(requests: list[Bytes], reserved: Bytes) -> None:
    allocator = CachingAllocator()
    play(allocator, requests)
    assert allocator.reserved == reserved


def test_a_block_is_split_only_if_more_than_a_mebibyte_is_left() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MiB))
    whole = allocator.allocate(11 * MiB)
    assert whole is not None
    assert whole.nbytes == 12 * MiB
    allocator.free(whole)
    split = allocator.allocate(11 * MiB - 512)
    assert split is not None
    assert split.nbytes == 11 * MiB - 512


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(30 * MiB), allocator.allocate(12 * MiB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(11 * MiB) is small


def test_freed_pieces_that_do_not_lie_together_do_not_fit_what_is_larger() -> None:
    allocator = CachingAllocator(limit=LARGE_SEGMENT)
    pieces = [allocator.allocate(4 * MiB) for _ in range(5)]
    for piece in pieces[::2]:
        allocator.free(piece)
    with pytest.raises(DeviceFullError, match=r"5\.00 MiB does not fit in the 20\.00 MiB of the device.*12\.00 MiB of"):
        allocator.allocate(5 * MiB)
    allocator.free(pieces[1])
    assert allocator.allocate(5 * MiB) is not None


def test_idle_segments_are_given_back_when_the_device_is_full() -> None:
    allocator = CachingAllocator(limit=40 * MiB)
    allocator.free(allocator.allocate(30 * MiB))
    assert allocator.reserved == 30 * MiB
    allocator.allocate(32 * MiB)
    assert (allocator.reserved, allocator.peak_reserved) == (32 * MiB, 32 * MiB)


def test_chunks_lose_only_the_rest_of_the_last_one() -> None:
    allocator = ChunkAllocator()
    pieces = [allocator.allocate(4 * MiB) for _ in range(5)]
    for piece in pieces[::2]:
        allocator.free(piece)
    allocator.allocate(11 * MiB)
    assert allocator.reserved == 20 * MiB
    assert ChunkAllocator().allocate(MiB + 1) == MiB + 1


def test_small_storages_share_a_chunk() -> None:
    allocator = ChunkAllocator()
    play(allocator, [512 * KiB] * 4)
    assert allocator.reserved == CHUNK


def test_the_peak_is_looked_for_anew() -> None:
    allocator = ExactAllocator()
    allocator.free(allocator.allocate(9))
    allocator.reset_peak()
    allocator.allocate(4)
    assert allocator.peak_reserved == 4


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(UsageError, match="no allocator model 'buddy'; choose one of exact, caching, chunks"):
        allocator_named("buddy", None)
