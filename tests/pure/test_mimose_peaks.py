"""A step's peak, block by block, and plans that hold in all of its moments."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.methods.by_block import Forecast
from spillway.methods.mimose.peaks import highest, holding, limits, outside, seconds_of
from tests.pure.moments import Peak, simulate


def forecast(
    saved: list[int],
    *,
    turn: int = 0,
    rest: int = 0,
    seconds: list[float] | None = None,
    working: list[int] | None = None,
    gradients: list[int] | None = None,
) -> Forecast:
    zeros = [0] * len(saved)
    return Forecast(
        saved=saved, turn=turn, rest=rest, seconds=seconds or [1.0] * len(saved), working=working or zeros,
        gradients=gradients or zeros,
    )  # fmt: skip


@st.composite
def forecasts(draw: st.DrawFn, most: int = 8) -> Forecast:
    blocks = draw(st.integers(0, most))

    def each(strategy: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(strategy, min_size=blocks, max_size=blocks))

    return forecast(
        each(st.integers(0, 100)),
        turn=draw(st.integers(0, 150)),
        rest=draw(st.integers(0, 150)),
        seconds=[float(number) for number in each(st.integers(0, 20))],
        working=each(st.integers(0, 40)),
        gradients=each(st.integers(0, 30)),
    )


def plan(step: Forecast, available: int) -> frozenset[int]:
    return holding(step, available, limits(step))


# The simulation, by hand


def test_a_plain_step_peaks_at_the_turn_or_when_the_backward_begins() -> None:
    assert simulate(forecast([10, 20, 30], turn=7, rest=5), ()) == Peak(67, "turn", 2)
    assert simulate(forecast([10, 20, 30], turn=5, rest=7), ()) == Peak(67, "forward", 2)
    assert simulate(forecast([10, 20, 30], turn=5, rest=7, gradients=[0, 0, 1]), ()) == Peak(68, "backward", 2)


def test_recomputing_the_last_block_alone_lowers_nothing_and_the_first_most() -> None:
    """Fig. 11: twelve encoders of equal bytes, one of them recomputed."""
    step = forecast([10] * 12, rest=3)
    peaks = [simulate(step, {block}).nbytes for block in range(12)]
    assert peaks == [113] * 11 + [123]


def test_gradients_that_the_backward_creates_are_there_when_it_reaches_the_first_block() -> None:
    step = forecast([10, 10], gradients=[4, 5], working=[3, 0])
    assert simulate(step, {0, 1}) == Peak(5 + 4 + 10 + 3, "backward", 0)


def test_a_step_without_blocks_peaks_at_its_turn() -> None:
    assert simulate(forecast([], turn=9, rest=4), ()) == Peak(9, "turn", 0)
    assert highest(forecast([], turn=9), (), limits(forecast([], turn=9))) == 9


@given(forecasts(), st.sets(st.integers(0, 7)))
def test_the_quick_peak_is_the_simulated_one(step: Forecast, recomputed: set[int]) -> None:
    recomputed &= step.everything
    assert highest(step, recomputed, limits(step)) == simulate(step, recomputed).nbytes


@given(forecasts(), st.sets(st.integers(0, 7)), st.integers(0, 7))
def test_recomputing_one_more_block_never_raises_the_peak(step: Forecast, recomputed: set[int], one: int) -> None:
    assert simulate(step, {*recomputed, one}).nbytes <= simulate(step, recomputed).nbytes


# Plans


@given(forecasts(), st.integers(0, 700))
def test_a_plan_holds_by_its_own_simulation_wherever_any_plan_does(step: Forecast, available: int) -> None:
    chosen = plan(step, available)
    floor = simulate(step, step.everything).nbytes
    if floor <= available:
        assert simulate(step, chosen).nbytes <= available
    else:
        assert chosen == step.everything


@given(forecasts(), st.integers(0, 700))
def test_no_block_of_a_plan_could_be_kept_as_well(step: Forecast, available: int) -> None:
    chosen = plan(step, available)
    if simulate(step, chosen).nbytes <= available:
        assert [block for block in chosen if simulate(step, chosen - {block}).nbytes <= available] == []


@given(
    st.integers(1, 8), st.integers(1, 50), st.integers(0, 150), st.integers(0, 150), st.integers(0, 600),
    st.integers(0, 600),
)  # fmt: skip
def test_of_equal_blocks_no_plan_recomputes_fewer_and_more_bytes_recompute_no_more(
    blocks: int, nbytes: int, turn: int, rest: int, available: int, more: int
) -> None:
    step = forecast([nbytes] * blocks, turn=turn, rest=rest)
    chosen = plan(step, available)
    assert len(plan(step, available + more)) <= len(chosen)
    if simulate(step, chosen).nbytes <= available:
        for fewer in combinations(range(blocks), max(len(chosen) - 1, 0)):
            assert not chosen or simulate(step, fewer).nbytes > available


@given(forecasts(), st.integers(0, 700))
def test_a_step_that_fits_as_it_is_recomputes_nothing(step: Forecast, available: int) -> None:
    if simulate(step, ()).nbytes <= available:
        assert plan(step, available) == frozenset()


@pytest.mark.parametrize(("available", "recomputed"), [(245, {4}), (230, {0}), (200, {0, 6}), (110, {0, 2, 3, 6, 7})])
def test_a_plan_and_the_cheapest_of_all_subsets(available: int, recomputed: set[int]) -> None:
    saved = [40, 10, 25, 30, 15, 35, 20, 50, 25]
    step = forecast(saved, turn=10, seconds=[4.0, 3.0, 2.5, 5.0, 1.0, 6.0, 2.0, 4.5, 3.5])
    subsets = [set(some) for count in range(10) for some in combinations(range(9), count)]
    cheapest = min(seconds_of(step, some) for some in subsets if simulate(step, some).nbytes <= available)
    assert plan(step, available) == recomputed
    assert seconds_of(step, plan(step, available)) <= 1.4 * cheapest


def test_the_cheapest_seconds_per_byte_are_recomputed_and_the_earliest_of_alike() -> None:
    step = forecast([10, 10, 10, 10], seconds=[3.0, 1.0, 1.05, 9.0])
    assert plan(step, 30) == {1}
    assert plan(step, 20) == {1, 2}
    assert plan(replace(step, seconds=[1.0, 1.05, 1.0, 1.0]), 30) == {0}


def test_the_dearest_block_that_fits_after_all_is_kept() -> None:
    """Per byte 10 is cheapest, then 12, and both are not enough; once 30 goes too, the dearer of them can stay."""
    step = forecast([10, 12, 30, 1], seconds=[1.0, 1.3, 6.0, 9.0], turn=30)
    assert plan(step, 43) == {0, 2}


def test_the_dearest_block_is_exchanged_for_one_that_is_a_tenth_cheaper_and_does_as_well() -> None:
    """Per byte block 1 is cheapest and so the first to go; block 0 saves enough as well."""
    saved = [40, 60, 10]
    assert plan(forecast(saved, turn=70, seconds=[5.0, 6.0, 9.0]), 145) == {0}
    assert plan(forecast(saved, turn=70, seconds=[5.6, 6.0, 9.0]), 145) == {1}


# What is outside of blocks


@given(forecasts(), st.sets(st.integers(0, 7)))
def test_what_is_found_beside_blocks_is_never_less_than_what_is_there(step: Forecast, recomputed: set[int]) -> None:
    recomputed &= step.everything
    peak = simulate(step, recomputed).nbytes
    turn, rest = outside(step, recomputed, peak, peak)
    assert turn >= step.turn
    assert rest >= step.rest or not step.saved
    assert simulate(replace(step, turn=turn, rest=rest), recomputed).nbytes == peak or not step.saved


@pytest.mark.parametrize("recomputed", [set(), {0}, {0, 1, 2}])
def test_peaks_known_by_part_give_what_is_there(recomputed: set[int]) -> None:
    step = forecast([10, 20, 30], turn=9, rest=4, gradients=[1, 1, 1], working=[2, 2, 2])
    kept = [0 if block in recomputed else saved for block, saved in enumerate(step.saved)]
    comes_back = [4 + (3 - block) + sum(kept[:block]) + step.saved[block] + 2 for block in range(3)]
    assert outside(step, recomputed, step.turn + sum(kept), max(comes_back)) == (step.turn, step.rest)


@given(forecasts(), st.integers(0, 700))
def test_a_plan_made_from_one_recomputed_step_holds_in_the_real_one(step: Forecast, available: int) -> None:
    """Only the peak of the collecting step is known; what plans make of it errs upwards."""
    peak = simulate(step, step.everything).nbytes
    turn, rest = outside(step, step.everything, peak, peak)
    expected = replace(step, turn=turn, rest=rest)
    chosen = plan(expected, available)
    if simulate(expected, chosen).nbytes <= available and step.saved:
        assert simulate(step, chosen).nbytes <= available
