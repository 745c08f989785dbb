"""Algorithm 1 on paper: what is taken at every point at which its listing, its text and the public code differ."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway.methods.mimose.scheduler import buckets_of, select

UNEVEN = (100, 40, 95, 38, 60)
"""Buckets: blocks 0 and 2 (100, 95), block 4 (60), blocks 1 and 3 (40, 38)."""

sizes = st.lists(st.integers(0, 1000), max_size=12)


def chosen(nbytes: tuple[int, ...], excess: int) -> tuple[int, ...]:
    return select(nbytes, excess).blocks


def in_buckets(nbytes: tuple[int, ...]) -> list[list[int]]:
    return buckets_of(nbytes, sorted(range(len(nbytes)), key=nbytes.__getitem__, reverse=True))


# Buckets, lines 3 to 14


def test_blocks_within_ten_percent_of_a_buckets_largest_share_it_in_order_of_the_forward() -> None:
    assert in_buckets(UNEVEN) == [[0, 2], [4], [1, 3]]
    assert in_buckets((91, 100, 95, 89)) == [[0, 1, 2], [3]]


def test_a_bucket_reaches_down_from_its_largest_and_not_from_block_to_block() -> None:
    assert in_buckets((100, 92, 84)) == [[0, 1], [2]]


def test_ninety_percent_of_the_largest_is_its_bucket_as_in_the_code() -> None:
    assert in_buckets((100, 90)) == [[0, 1]]


# Which block, lines 15 to 25


def test_nothing_is_chosen_where_nothing_is_over() -> None:
    assert select(UNEVEN, 0).blocks == ()
    assert select(UNEVEN, -5).blocks == ()


def test_of_the_buckets_that_cover_the_smallest_is_taken_as_text_and_code_have_it() -> None:
    assert chosen(UNEVEN, 35) == (1,)


def test_within_the_bucket_each_block_is_tested_and_not_its_largest_alone() -> None:
    assert chosen((38, 40), 39) == (1,)


def test_if_nothing_covers_the_earliest_of_the_largest_bucket_goes_first() -> None:
    assert chosen((95, 100, 40), 150) == (0, 1)


def test_if_nothing_covers_the_largest_bucket_is_taken_and_not_the_smallest_as_in_the_public_code() -> None:
    assert chosen(UNEVEN, 150) == (0, 4)
    assert chosen((50,) * 5, 120) == (0, 1, 2)


def test_what_equals_the_excess_covers_it() -> None:
    assert chosen((100, 40), 40) == (1,)


def test_where_the_listing_loops_for_ever_every_block_is_chosen_and_the_rest_is_named() -> None:
    selection = select(UNEVEN, 400)
    assert sorted(selection.blocks) == [0, 1, 2, 3, 4]
    assert selection.uncovered == 400 - sum(UNEVEN)
    assert select((), 7).uncovered == 7


def test_a_stack_of_equal_blocks_is_recomputed_from_its_front() -> None:
    assert chosen((10,) * 12, 35) == (0, 1, 2, 3)


def test_large_blocks_go_until_one_block_covers_the_rest() -> None:
    assert chosen((100, 100, 60, 40, 20), 250) == (0, 1, 2)  # 250 - 100 - 100 = 50, nearest from above is 60


@given(sizes, st.integers(-10, 5000))
def test_it_ends_chooses_no_block_twice_and_covers_the_excess_if_all_blocks_would(
    nbytes: list[int], excess: int
) -> None:
    selection = select(nbytes, excess)
    assert len(set(selection.blocks)) == len(selection.blocks)
    saved = sum(nbytes[block] for block in selection.blocks)
    assert selection.uncovered == max(excess - saved, 0)
    assert (selection.uncovered == 0) == (sum(nbytes) >= excess)
    if excess > 0 and selection.blocks:
        last = nbytes[selection.blocks[-1]]
        assert saved - last < excess  # it would not have ended without the last one
