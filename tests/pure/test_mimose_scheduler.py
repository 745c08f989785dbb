"""Algorithm 1 on paper: every point at which its listing, its text and the public code can be read in two ways."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from spillway.methods.mimose import Reading
from spillway.methods.mimose.scheduler import Excess, NothingCovers, buckets_of, select

TEXT = Reading()
LITERAL = Reading.literal()
CODE = Reading.code()

UNEVEN = (100, 40, 95, 38, 60)
"""Buckets: blocks 0 and 2 (100, 95), block 4 (60), blocks 1 and 3 (40, 38)."""

sizes = st.lists(st.integers(0, 1000), max_size=12)


def chosen(nbytes: tuple[int, ...], excess: int, reading: Reading) -> tuple[int, ...]:
    return select(nbytes, excess, reading).blocks


def in_buckets(nbytes: tuple[int, ...], reading: Reading = TEXT) -> list[list[int]]:
    return buckets_of(nbytes, sorted(range(len(nbytes)), key=nbytes.__getitem__, reverse=True), reading)


# Buckets, lines 3 to 14


def test_blocks_within_ten_percent_of_a_buckets_largest_share_it_in_order_of_the_forward() -> None:
    assert in_buckets(UNEVEN) == [[0, 2], [4], [1, 3]]
    assert in_buckets((91, 100, 95, 89)) == [[0, 1, 2], [3]]


def test_a_bucket_reaches_down_from_its_largest_and_not_from_block_to_block() -> None:
    assert in_buckets((100, 92, 84)) == [[0, 1], [2]]


def test_ninety_percent_of_the_largest_is_its_bucket_in_the_code_and_not_in_the_listing() -> None:
    assert in_buckets((100, 90)) == [[0, 1]]
    assert in_buckets((100, 90), replace(TEXT, at_least=False)) == [[0], [1]]


# Which block, lines 15 to 25


def test_nothing_is_chosen_where_nothing_is_over() -> None:
    assert select(UNEVEN, 0).blocks == ()
    assert select(UNEVEN, -5).blocks == ()


def test_of_the_buckets_that_cover_the_text_and_the_code_take_the_smallest_and_the_listing_the_largest() -> None:
    assert chosen(UNEVEN, 35, TEXT) == (1,)
    assert chosen(UNEVEN, 35, CODE) == (1,)
    assert chosen(UNEVEN, 35, LITERAL) == (0,)


def test_within_the_bucket_each_block_is_tested_where_the_listing_tests_its_largest_alone() -> None:
    later_covers = (38, 40)
    assert chosen(later_covers, 39, TEXT) == (1,)
    assert chosen(later_covers, 39, replace(TEXT, tests_each=False)) == (0, 1)  # 38 leaves 1, which 40 covers


def test_if_nothing_covers_the_earliest_of_the_largest_bucket_goes_first() -> None:
    assert chosen((95, 100, 40), 150, TEXT) == (0, 1)
    assert chosen((95, 100, 40), 150, replace(TEXT, nothing_covers="largest-block")) == (1, 0)


def test_if_nothing_covers_the_public_code_takes_the_smallest_bucket_and_that_shows_where_blocks_differ() -> None:
    assert chosen(UNEVEN, 150, CODE) == (1, 3, 0)  # 150 - 40 - 38 = 72, which 100 covers
    assert chosen(UNEVEN, 150, TEXT) == (0, 4)
    assert chosen((50,) * 5, 120, CODE) == chosen((50,) * 5, 120, TEXT) == (0, 1, 2)


def test_what_equals_the_excess_covers_it_but_in_the_listing() -> None:
    assert chosen((100, 40), 40, TEXT) == (1,)
    assert chosen((100, 40), 40, replace(TEXT, at_least=False)) == (0,)


def test_where_the_listing_loops_for_ever_every_block_is_chosen_and_the_rest_is_named() -> None:
    selection = select(UNEVEN, 400)
    assert sorted(selection.blocks) == [0, 1, 2, 3, 4]
    assert selection.uncovered == 400 - sum(UNEVEN)
    assert select((), 7).uncovered == 7


def test_a_stack_of_equal_blocks_is_recomputed_from_its_front() -> None:
    assert chosen((10,) * 12, 35, TEXT) == (0, 1, 2, 3)


def test_large_blocks_go_until_one_block_covers_the_rest() -> None:
    assert chosen((100, 100, 60, 40, 20), 250, TEXT) == (0, 1, 2)  # 250 - 100 - 100 = 50, nearest from above is 60


def test_the_readings_are_three_different_ones() -> None:
    assert (TEXT.excess, CODE.excess, LITERAL.excess) == ("whole-model", "whole-model", "sum-of-blocks")
    assert len({TEXT, CODE, LITERAL}) == 3


@given(
    sizes, st.integers(-10, 5000), st.sampled_from(["smallest", "largest"]), st.booleans(), st.booleans(),
    st.sampled_from(["largest-bucket", "largest-block", "smallest-bucket"]),
)  # fmt: skip
def test_every_reading_ends_chooses_no_block_twice_and_covers_the_excess_if_all_blocks_would(
    nbytes: list[int], excess: int, covering: str, each: bool, at_least: bool, nothing: NothingCovers
) -> None:
    reading = Reading(covering=covering, tests_each=each, at_least=at_least, nothing_covers=nothing)  # type: ignore[arg-type]
    selection = select(nbytes, excess, reading)
    assert len(set(selection.blocks)) == len(selection.blocks)
    saved = sum(nbytes[block] for block in selection.blocks)
    assert selection.uncovered == max(excess - saved, 0)
    assert (selection.uncovered == 0) == (sum(nbytes) >= excess)
    if excess > 0 and selection.blocks:
        last = nbytes[selection.blocks[-1]]
        assert saved - last < excess  # it would not have ended without the last one


def test_an_excess_is_named_as_the_listing_has_it_or_as_the_code() -> None:
    kinds: tuple[Excess, ...] = ("whole-model", "sum-of-blocks")
    assert {Reading(excess=kind).excess for kind in kinds} == set(kinds)
