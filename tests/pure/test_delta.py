"""DELTA, part by part, as its paper describes them, and what differs by default."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from spillway.errors import UsageError
from spillway.methods import Copy, Delta, Drop, Fetch, Move, Proposal
from tests.pure.shelves import Shelf, Shelves, answered, proposals

OLD_AND_SMALL = Shelf(number=1, nbytes=100, touched=0)
LARGE = Shelf(number=2, nbytes=900, touched=8)
BETWEEN = Shelf(number=3, nbytes=400, touched=5)
THREE = (OLD_AND_SMALL, BETWEEN, LARGE)
"""Least recently used first. At clock 10: m s is 1000, 2000 and 1800; s is 10, 5, 2; m is 100, 400, 900."""

CHEAP = Shelf(number=5, chain=2, recompute=0.9)
DEAR = Shelf(number=6, chain=2, recompute=1.1)


@pytest.mark.parametrize(
    ("filter", "order"),
    [
        ("base", [BETWEEN, LARGE, OLD_AND_SMALL]),
        ("lru", [OLD_AND_SMALL, BETWEEN, LARGE]),
        ("greedy", [LARGE, BETWEEN, OLD_AND_SMALL]),
    ],
)
def test_the_filter_releases_the_smallest_score_first(filter: str, order: list[Shelf]) -> None:
    assert proposals(Delta(filter=filter), *THREE) == [Move(shelf) for shelf in order]


def test_what_was_used_by_the_last_op_is_released_last_by_the_base_filter() -> None:
    just_used = Shelf(number=7, nbytes=10**9, touched=10)
    assert proposals(Delta(filter="base"), just_used, OLD_AND_SMALL)[-1] == Move(just_used)


def test_the_director_evicts_what_is_recomputed_sooner_than_moved_and_offloads_the_rest() -> None:
    assert proposals(Delta(), CHEAP, DEAR, OLD_AND_SMALL) == [Drop(CHEAP), Move(DEAR), Move(OLD_AND_SMALL)]


def test_the_director_evicts_at_equal_cost() -> None:
    equal = Shelf(number=8, chain=1, recompute=1.0)
    assert proposals(Delta(), equal) == [Drop(equal)]


def test_what_may_not_be_evicted_after_all_is_offloaded() -> None:
    assert proposals(Delta(), CHEAP, refused=(Drop(CHEAP),)) == [Drop(CHEAP), Move(CHEAP)]


def test_the_published_director_counts_the_transfer_one_way() -> None:
    assert proposals(Delta.as_published(), CHEAP) == [Move(CHEAP)]
    half = Shelf(number=9, chain=1, recompute=0.5)
    assert proposals(Delta.as_published(), half) == [Drop(half)]


def test_as_published_nothing_is_released_in_the_backward() -> None:
    assert proposals(Delta.as_published(), *THREE, backward=True) == []
    assert proposals(Delta(), *THREE, backward=True) != []


# ---------------------------------------------------------------------- before room is short


def foreseen(policy: Delta, *present: Shelf, resident: int, refused: tuple[Proposal, ...] = (), **view: Any) -> Any:
    return answered(policy.foresee(Shelves(present, allowed=1000, resident=resident, **view)), refused)


def test_copies_out_begin_above_three_quarters_of_the_budget_the_stalest_first() -> None:
    assert foreseen(Delta(), *THREE, resident=750) == []
    assert foreseen(Delta(spare=1), *THREE, resident=751) == [Copy(OLD_AND_SMALL), Copy(BETWEEN)]


def test_a_copy_that_was_refused_is_not_one_of_those_that_began() -> None:
    made = foreseen(Delta(spare=1), *THREE, resident=800, refused=(Copy(OLD_AND_SMALL),))
    assert made == [Copy(OLD_AND_SMALL), Copy(BETWEEN), Copy(LARGE)]


def test_what_has_a_copy_or_is_to_be_evicted_is_not_copied() -> None:
    there = Shelf(number=4, copied=True)
    assert foreseen(Delta(spare=9), there, CHEAP, OLD_AND_SMALL, resident=800) == [Copy(OLD_AND_SMALL)]


def test_copies_go_only_so_far_ahead_of_need() -> None:
    there, cheap = Shelf(number=4, nbytes=100, copied=True), Shelf(number=5, nbytes=100, chain=1, recompute=0.1)
    assert foreseen(Delta(spare=0.2), there, cheap, BETWEEN, resident=800) == []
    assert foreseen(Delta(spare=0.3), there, cheap, BETWEEN, LARGE, resident=800) == [Copy(BETWEEN)]


def test_as_published_release_begins_at_the_mark_whether_room_is_short_or_not() -> None:
    there, cheap = Shelf(number=4, copied=True), Shelf(number=5, chain=1, recompute=0.1, touched=9)
    policy = Delta.as_published()
    assert foreseen(policy, there, cheap, resident=800) == [Move(there), Drop(cheap)]
    assert foreseen(policy, there, cheap, resident=800, in_backward=True) == []
    assert foreseen(policy, there, cheap, resident=750) == []


FIRST, SECOND, THIRD = (Shelf(number=number, nbytes=100) for number in (11, 12, 13))


def test_the_prefetcher_follows_the_order_of_use_in_the_backward_and_keeps_to_its_number() -> None:
    away = (FIRST, SECOND, THIRD)
    assert foreseen(Delta(), resident=100, away=away, in_backward=True) == [Fetch(THIRD), Fetch(SECOND)]
    assert foreseen(Delta(), resident=100, away=away, in_backward=True, arriving=1) == [Fetch(THIRD)]
    assert foreseen(Delta(), resident=100, away=away, in_backward=True, arriving=2) == []
    assert foreseen(Delta(), resident=100, away=away) == [], "in the forward nothing is wanted back soon"


def test_the_published_prefetcher_is_first_in_first_out() -> None:
    away = (FIRST, SECOND, THIRD)
    assert foreseen(Delta.as_published(), resident=100, away=away) == [Fetch(FIRST), Fetch(SECOND)]


@pytest.mark.parametrize(("policy", "most"), [(Delta(), 800), (Delta.as_published(), 650)])
def test_nothing_is_fetched_when_memory_is_not_enough(policy: Delta, most: int) -> None:
    assert foreseen(policy, resident=most, away=(FIRST,), in_backward=True) == [Fetch(FIRST)]
    fetched = foreseen(policy, resident=most + 1, away=(FIRST,), in_backward=True)
    assert [proposal for proposal in fetched if isinstance(proposal, Fetch)] == []


def test_without_copies_in_or_out_nothing_is_foreseen() -> None:
    policy = Delta(most_copies_in=0, most_copies_out=0)
    assert foreseen(policy, *THREE, resident=1000, away=(FIRST,), in_backward=True) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"early": 0.0},
        {"early": 1.1},
        {"enough": -inf},
        {"spare": -0.1},
        {"most_copies_in": -1},
        {"most_copies_out": -1},
    ],
)
def test_delta_refuses_shares_and_numbers_that_make_no_sense(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"^DELTA needs `early` and `enough` above 0 and up to 1, .*; got .*\.$"):
        Delta(**arguments)


def test_delta_refuses_a_filter_that_it_does_not_have() -> None:
    with pytest.raises(UsageError, match=r"^DELTA has no filter 'fifo'; choose one of base, lru, greedy\.$"):
        Delta(filter="fifo")
