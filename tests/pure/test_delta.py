"""DELTA, part by part, as its paper describes them, and what differs by default."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from spillway.errors import UsageError
from spillway.methods import Copy, Delta, Drop, Fetch, Move, Proposal, Recall
from spillway.methods.delta import HANDLING, RANKED_FOR
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
        ("cost", [BETWEEN, LARGE, OLD_AND_SMALL]),
    ],
)
def test_the_filter_releases_the_smallest_score_first(filter: str, order: list[Shelf]) -> None:
    assert proposals(Delta(filter=filter), *THREE) == [Move(shelf) for shelf in order]


def test_what_was_used_by_the_last_op_is_released_last_by_the_base_filter() -> None:
    just_used = Shelf(number=7, nbytes=10**9, touched=10)
    assert proposals(Delta(filter="base"), just_used, OLD_AND_SMALL)[-1] == Move(just_used)


def test_the_cost_filter_releases_first_what_frees_most_for_what_it_costs() -> None:
    dear = Shelf(number=1, nbytes=1000, transfer=1.0)
    cheap = Shelf(number=2, nbytes=400, chain=1, recompute=0.1)
    there = Shelf(number=3, nbytes=300, transfer=0.05, copied=True)
    assert proposals(Delta(), dear, cheap, there) == [Move(there), Drop(cheap), Move(dear)]


def test_the_cost_filter_ranks_again_by_the_whole_chain_what_its_own_op_made_look_cheap() -> None:
    long_chain = Shelf(number=1, nbytes=1000, own=0.001, chain=9, recompute=0.9)
    short_chain = Shelf(number=2, nbytes=1000, chain=1, recompute=0.5)
    assert proposals(Delta(), long_chain, short_chain) == [Drop(short_chain), Drop(long_chain)]


def test_what_is_small_is_released_last_by_the_cost_filter_because_handling_it_costs_too() -> None:
    small = Shelf(number=1, nbytes=10, transfer=HANDLING / 100)
    large = Shelf(number=2, nbytes=1000, transfer=HANDLING)
    assert proposals(Delta(), small, large) == [Move(large), Move(small)]


def test_a_ranking_is_used_for_a_while_and_without_what_left_meanwhile() -> None:
    policy = Delta()
    gone = Shelf(number=1, nbytes=900, available=False)
    view = Shelves((gone, BETWEEN), clock=20)
    assert answered(policy.relieve(view, 1)) == [Move(BETWEEN)]
    object.__setattr__(view, "storages", (gone, BETWEEN, LARGE))
    object.__setattr__(view, "clock", 20 + RANKED_FOR - 1)
    first = next(policy.relieve(view, 1))
    assert first == Move(BETWEEN), "what came after the ranking waits for the next"
    object.__setattr__(view, "clock", 20 + RANKED_FOR)
    assert {proposal.storage.number for proposal in answered(policy.relieve(view, 1))} == {2, 3}


def test_one_policy_under_two_views_never_mixes_them_up() -> None:
    policy = Delta()
    assert answered(policy.relieve(Shelves((BETWEEN,)), 1)) == [Move(BETWEEN)]
    assert answered(policy.relieve(Shelves((LARGE,)), 1)) == [Move(LARGE)]


def test_the_director_evicts_what_is_recomputed_sooner_than_moved_and_offloads_the_rest() -> None:
    assert proposals(Delta(filter="lru"), CHEAP, DEAR, OLD_AND_SMALL) == [Drop(CHEAP), Move(DEAR), Move(OLD_AND_SMALL)]


def test_the_director_evicts_at_equal_cost() -> None:
    equal = Shelf(number=8, chain=1, recompute=1.0)
    assert proposals(Delta(), equal) == [Drop(equal)]


def test_what_may_not_be_evicted_after_all_is_offloaded() -> None:
    assert proposals(Delta(filter="lru"), CHEAP, refused=(Drop(CHEAP),)) == [Drop(CHEAP), Move(CHEAP)]


def test_the_director_fears_what_a_chain_may_become_as_far_as_it_is_told() -> None:
    risky = Shelf(number=8, chain=1, recompute=0.5, worst=1.7)
    assert proposals(Delta(pessimism=0.25), risky) == [Drop(risky)]
    assert proposals(Delta(pessimism=0.5), risky) == [Move(risky)]
    assert proposals(Delta.as_published(), Shelf(number=8, chain=1, recompute=0.5, worst=9.0))[0] != Move(risky)


def test_a_transfer_that_is_hidden_costs_the_director_less() -> None:
    shelf = Shelf(number=8, chain=1, recompute=0.7)
    assert proposals(Delta(unhidden=0.5), shelf, exposed=1.0) == [Drop(shelf)]
    assert proposals(Delta(unhidden=0.5), shelf, exposed=0.0) == [Move(shelf)]
    assert proposals(Delta(unhidden=1.0), shelf, exposed=0.0) == [Drop(shelf)]


def test_the_published_director_counts_the_transfer_one_way() -> None:
    assert proposals(Delta.as_published(), CHEAP) == [Move(CHEAP)]
    assert proposals(Delta(), CHEAP) == [Drop(CHEAP)]
    half = Shelf(number=9, chain=1, recompute=0.5)
    assert proposals(Delta.as_published(), half) == [Drop(half)]


def test_as_published_nothing_is_released_in_the_backward() -> None:
    assert proposals(Delta.as_published(), *THREE, backward=True) == []
    assert proposals(Delta(), *THREE, backward=True) != []


# ---------------------------------------------------------------------- before room is short


def foreseen(policy: Delta, *present: Shelf, resident: int, refused: tuple[Proposal, ...] = (), **view: Any) -> Any:
    shelves = Shelves(present, allowed=1000, resident=resident, **view)
    return answered(policy.foresee(shelves), refused) if policy.looks(shelves) else []


def test_copies_out_begin_above_three_quarters_of_the_budget_the_stalest_first() -> None:
    assert foreseen(Delta(filter="lru"), *THREE, resident=750) == []
    policy = Delta(filter="lru", spare=1, most_copies_out=2)
    assert foreseen(policy, *THREE, resident=751) == [Copy(OLD_AND_SMALL), Copy(BETWEEN)]


def test_once_what_is_next_to_leave_is_copied_nobody_looks_until_something_left() -> None:
    copied = Shelf(number=1, nbytes=100, touched=0, copied=True)
    policy, view = Delta(filter="lru", spare=0.1), Shelves((copied,), allowed=1000, resident=800)
    assert policy.looks(view)
    assert answered(policy.foresee(view)) == []
    object.__setattr__(view, "clock", view.clock + 8)
    assert not policy.looks(view)
    next(policy.relieve(view, 1))
    assert policy.looks(view)


def test_nothing_starts_early_where_copies_have_nothing_of_their_own() -> None:
    assert foreseen(Delta(spare=1), *THREE, resident=800, overlaps=False) == []
    assert foreseen(Delta(), resident=100, away=(FIRST,), in_backward=True, overlaps=False) == []
    assert foreseen(Delta(spare=1, only_beside=False), *THREE, resident=800, overlaps=False) != []
    assert foreseen(Delta.as_published(), *THREE, resident=800, overlaps=False) != []


def test_a_copy_that_was_refused_is_not_one_of_those_that_began() -> None:
    made = foreseen(
        Delta(filter="lru", spare=1, most_copies_out=2), *THREE, resident=800, refused=(Copy(OLD_AND_SMALL),)
    )
    assert made == [Copy(OLD_AND_SMALL), Copy(BETWEEN), Copy(LARGE)]


def test_what_has_a_copy_or_is_to_be_evicted_is_not_copied() -> None:
    there = Shelf(number=4, copied=True)
    assert foreseen(Delta(spare=9), there, CHEAP, OLD_AND_SMALL, resident=800) == [Copy(OLD_AND_SMALL)]


def test_copies_go_only_so_far_ahead_of_need() -> None:
    there, cheap = Shelf(number=4, nbytes=100, copied=True), Shelf(number=5, nbytes=100, chain=1, recompute=0.1)
    assert foreseen(Delta(filter="lru", spare=0.2), there, cheap, BETWEEN, resident=800) == []
    assert foreseen(Delta(filter="lru", spare=0.3), there, cheap, BETWEEN, LARGE, resident=800) == [Copy(BETWEEN)]


def test_as_published_release_begins_at_the_mark_whether_room_is_short_or_not() -> None:
    there, cheap = Shelf(number=4, copied=True), Shelf(number=5, chain=1, recompute=0.1, touched=9)
    policy = Delta.as_published()
    assert foreseen(policy, there, cheap, resident=800) == [Move(there), Drop(cheap)]
    assert foreseen(Delta.as_published(), there, cheap, resident=800, in_backward=True) == []
    assert foreseen(Delta.as_published(), there, cheap, resident=750) == []


CHEAPLY_MADE = Shelf(number=21, chain=2, recompute=0.9, transfer=1.0)
DEARLY_MADE = Shelf(number=22, chain=2, recompute=1.1, transfer=1.0)
UNCOMPUTABLE = Shelf(number=23)


@pytest.mark.parametrize(
    ("recomputes", "recomputed"),
    [("always", [CHEAPLY_MADE, DEARLY_MADE]), ("cheaper", [CHEAPLY_MADE]), ("never", [])],
)
def test_what_was_offloaded_comes_back_by_recomputation_where_that_is_chosen_and_possible(
    recomputes: Any, recomputed: list[Shelf]
) -> None:
    policy, away = Delta(recomputes=recomputes), (CHEAPLY_MADE, DEARLY_MADE, UNCOMPUTABLE)
    view = Shelves((), away=away)
    assert [shelf for shelf in away if policy.bring_back(view, shelf) is Recall.RECOMPUTE] == recomputed
    assert policy.recalls == bool(recomputed), "else nobody asks"


def test_the_chain_of_what_was_offloaded_is_asked_for_only_where_its_own_op_is_cheaper_than_the_reload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    real = Shelves.recompute_seconds

    def recompute_seconds(self: Shelves, storage: Any) -> float:
        asked.append(storage.number)
        return real(self, storage)

    monkeypatch.setattr(Shelves, "recompute_seconds", recompute_seconds)
    long_chain = Shelf(number=24, chain=2, own=0.1, recompute=1.1, transfer=1.0)
    view = Shelves((), away=(CHEAPLY_MADE, DEARLY_MADE, long_chain))
    found = [Delta().bring_back(view, shelf) for shelf in (CHEAPLY_MADE, DEARLY_MADE, long_chain)]
    assert found == [Recall.RECOMPUTE, Recall.RELOAD, Recall.RELOAD]
    assert asked == [CHEAPLY_MADE.number, long_chain.number]


def test_as_published_what_is_not_uncomputable_is_recomputed() -> None:
    policy, view = Delta.as_published(), Shelves((), away=(DEARLY_MADE, UNCOMPUTABLE))
    assert policy.bring_back(view, DEARLY_MADE) is Recall.RECOMPUTE
    assert policy.bring_back(view, UNCOMPUTABLE) is Recall.RELOAD


FIRST, SECOND, THIRD = (Shelf(number=number, nbytes=100) for number in (11, 12, 13))


def test_the_prefetcher_follows_the_order_of_use_from_the_backward_on_and_keeps_to_its_number() -> None:
    away = (FIRST, SECOND, THIRD)
    two = Delta(most_copies_in=2)
    assert foreseen(two, resident=100, away=away, in_backward=True) == [Fetch(THIRD), Fetch(SECOND)]
    assert foreseen(two, resident=100, away=away, in_backward=True, arriving=1) == [Fetch(THIRD)]
    assert foreseen(two, resident=100, away=away, in_backward=True, arriving=2) == []
    assert foreseen(two, resident=100, away=away, after_backward=True) == [Fetch(THIRD), Fetch(SECOND)]
    assert foreseen(two, resident=100, away=away) == [], "in the forward nothing is wanted back soon"


def test_the_published_prefetcher_is_first_in_first_out() -> None:
    away = (FIRST, SECOND, THIRD)
    assert foreseen(Delta.as_published(), resident=100, away=away) == [Fetch(FIRST), Fetch(SECOND)]


@pytest.mark.parametrize(("policy", "most"), [(Delta(), 800), (Delta.as_published(), 650)])
def test_nothing_is_fetched_when_memory_is_not_enough(policy: Delta, most: int) -> None:
    assert foreseen(policy, resident=most, away=(FIRST,), in_backward=True) == [Fetch(FIRST)]
    fetched = foreseen(policy, resident=most + 1, away=(FIRST,), in_backward=True)
    assert [proposal for proposal in fetched if isinstance(proposal, Fetch)] == []


def test_as_published_every_op_is_looked_at_and_two_copies_are_begun_each_way() -> None:
    published, default = Delta.as_published(), Delta()
    assert (published.looks_after, published.most_copies_out, published.most_copies_in) == (1, 2, 2)
    assert default.looks_after > published.looks_after
    assert min(default.most_copies_out, default.most_copies_in) > 2, "what is looked at more rarely begins more at once"


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
        {"looks_after": 0},
    ],
)
def test_delta_refuses_shares_and_numbers_that_make_no_sense(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"^DELTA needs `early` and `enough` above 0 and up to 1, .*; got .*\.$"):
        Delta(**arguments)


def test_delta_refuses_a_filter_that_it_does_not_have() -> None:
    with pytest.raises(UsageError, match=r"^DELTA has no filter 'fifo'; choose one of base, lru, greedy, cost\.$"):
        Delta(filter="fifo")


@pytest.mark.parametrize("arguments", [{"unhidden": 1.1}, {"unhidden": -0.1}, {"pessimism": -1.0}, {"pessimism": inf}])
def test_delta_refuses_costs_that_make_no_sense(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"^DELTA needs `unhidden` from 0 to 1 and .*; got .*\.$"):
        Delta(**arguments)


def test_delta_refuses_a_way_back_that_it_does_not_have() -> None:
    with pytest.raises(UsageError, match=r"^DELTA recomputes .* always, cheaper, never; got recomputes='often'\.$"):
        Delta(recomputes="often")  # type: ignore[arg-type]
