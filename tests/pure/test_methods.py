"""Methods choose as their papers say, on a view written out by hand."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from spillway.errors import UnknownMethodError, UsageError
from spillway.methods import LRU, METHODS, Drop, KeepAll, Move, method_named, resolve
from tests.pure.shelves import Shelf, proposals

CHEAP = Shelf(number=1, chain=2, recompute=0.5)
LONG = Shelf(number=2, chain=5, recompute=0.5)
SLOW = Shelf(number=3, chain=2, recompute=1.5)
SOURCE = Shelf(number=4)


def test_lru_drops_what_has_a_short_and_cheap_chain_and_moves_the_rest() -> None:
    assert proposals(LRU(), CHEAP, LONG, SLOW, SOURCE) == [Drop(CHEAP), Move(LONG), Move(SLOW), Move(SOURCE)]


def test_lru_goes_from_the_stalest_to_the_freshest_whatever_it_does_with_each() -> None:
    assert proposals(LRU(), SOURCE, SLOW, CHEAP) == [Move(SOURCE), Move(SLOW), Drop(CHEAP)]


def test_lru_moves_what_it_was_not_allowed_to_drop() -> None:
    made = proposals(LRU(), CHEAP, SOURCE, refused=(Drop(CHEAP),))
    assert made == [Drop(CHEAP), Move(CHEAP), Move(SOURCE)]


def test_lru_goes_on_where_it_was_not_allowed_to_move() -> None:
    assert proposals(LRU(), SOURCE, LONG, refused=(Move(SOURCE),)) == [Move(SOURCE), Move(LONG)]


def test_lru_recomputes_a_chain_of_exactly_the_length_it_was_given_and_none_that_is_longer() -> None:
    assert proposals(LRU(short_chain=5), LONG) == [Drop(LONG)]
    assert proposals(LRU(short_chain=4), LONG) == [Move(LONG)]


def test_lru_with_no_chain_at_all_moves_everything_and_needs_no_recipes() -> None:
    assert proposals(LRU(short_chain=0), CHEAP, SOURCE) == [Move(CHEAP), Move(SOURCE)]
    assert not LRU(short_chain=0).uses_recipes
    assert LRU().uses_recipes


@pytest.mark.parametrize(("worth", "choice"), [(0.0, Move), (1.4, Move), (1.5, Drop), (inf, Drop)])
def test_lru_weighs_recomputing_against_moving_by_what_recomputing_is_worth(
    worth: float, choice: type[Drop | Move]
) -> None:
    assert proposals(LRU(worth=worth), SLOW) == [choice(SLOW)]


@pytest.mark.parametrize("arguments", [{"short_chain": -1}, {"worth": -0.1}, {"worth": nan}])
def test_lru_refuses_arguments_that_are_not_0_or_more(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"^LRU needs short_chain and worth of 0 or more, got .*\.$"):
        LRU(**arguments)


def test_keep_all_proposes_nothing_and_needs_no_recipes() -> None:
    assert proposals(KeepAll(), CHEAP, SOURCE) == []
    assert not KeepAll().uses_recipes


def test_every_method_is_found_by_the_name_that_it_says_it_has() -> None:
    assert {name: method_named(name).name for name in METHODS} == {name: name for name in METHODS}
    assert sorted(METHODS) == [
        "auto", "checkmate", "checkpoint", "delta", "delta-published", "dtr", "dtr-eqclass", "dtr-local",
        "dynn-offload", "dynn-offload-published", "keep-all", "largest", "lms", "lru", "mimose", "mimose-published",
        "msps", "sqrt-n", "swap", "swap-prefetch", "uvm", "window", "window-improved", "window-published",
        "zero-offload",
    ]  # fmt: skip


def test_every_name_gives_a_policy_of_its_own() -> None:
    assert resolve("lru") is not resolve("lru")


def test_a_policy_object_is_taken_as_it_is() -> None:
    policy = LRU(short_chain=9)
    assert resolve(policy) is policy


@pytest.mark.parametrize("method", ["LRU", "", "belady"])
def test_an_unknown_method_is_refused_with_those_there_are(method: str) -> None:
    with pytest.raises(UnknownMethodError) as caught:
        resolve(method)
    names = (
        "auto, checkmate, checkpoint, delta, delta-published, dtr, dtr-eqclass, dtr-local, dynn-offload, "
        "dynn-offload-published, keep-all, largest, lms, lru, mimose, mimose-published, msps, sqrt-n, swap, "
        "swap-prefetch, uvm, window, window-improved, window-published, zero-offload"
    )
    assert str(caught.value) == f"There is no method {method!r}; choose one of {names}."


@pytest.mark.parametrize("method", [None, 4, LRU])
def test_what_is_neither_a_name_nor_a_policy_is_an_unknown_method(method: object) -> None:
    with pytest.raises(UnknownMethodError, match="choose one of auto, checkmate, checkpoint, "):
        resolve(method)  # type: ignore[arg-type]
