"""PAPAYA's model: lines, batches that fit, and whether a method pays."""

from __future__ import annotations

from math import atan, inf, isclose, pi, sqrt

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from papers.search import search_largest
from spillway.advisor.fits import fit_knee, fit_line
from spillway.advisor.model import (
    Cost,
    pays,
    pays_by_score,
    pays_with_fragments,
    point,
    ring_seconds,
    score,
    whole,
)
from spillway.costs.fitting import below, quantile

numbers = st.floats(1e-3, 1e3)
maybe = st.one_of(st.just(0.0), numbers)
sizes = st.lists(st.integers(1, 1000), min_size=3, max_size=12, unique=True)


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    return Cost(alpha=draw(maybe), beta=draw(maybe), gamma=draw(maybe), delta=draw(maybe))


limits = st.floats(1e-2, 1e6)


# Lines


@given(sizes, maybe, maybe)
def test_the_coefficients_of_a_line_are_found_again(sizes: list[int], slope: float, intercept: float) -> None:
    line = fit_line({size: slope * size + intercept for size in sizes})
    scale = max(slope, intercept, 1e-3)
    assert isclose(line.slope, slope, rel_tol=1e-6, abs_tol=1e-8 * scale)
    assert isclose(line.intercept, intercept, rel_tol=1e-6, abs_tol=1e-6 * scale * max(sizes))
    if slope > 1e-3 * intercept and slope:
        assert line.r is not None
        assert line.r > 1 - 1e-6


@given(st.integers(2, 20), st.floats(0.01, 10), st.floats(0, 10))
def test_a_flat_beginning_is_found_again(flat: int, slope: float, intercept: float) -> None:
    knee = flat + 0.5
    points = {size: slope * max(size, knee) + intercept for size in range(1, 2 * flat + 6)}
    line = fit_knee(points)
    assert isclose(line.knee, knee, rel_tol=1e-4)
    assert isclose(line.slope, slope, rel_tol=1e-4)
    assert isclose(line.intercept, intercept, rel_tol=1e-4, abs_tol=1e-4 * slope * knee)


@given(st.dictionaries(st.integers(1, 500), st.floats(0.01, 1e4), min_size=2, max_size=12))
def test_no_coefficient_is_below_zero_and_a_knee_is_no_worse_than_a_line(points: dict[int, float]) -> None:
    line, knee = fit_line(points), fit_knee(points)
    assert min(line.slope, line.intercept, knee.slope, knee.intercept, knee.knee) >= 0

    def squares(fitted: object) -> float:
        return sum((value - fitted.at(size)) ** 2 for size, value in points.items())  # type: ignore[attr-defined]

    assert squares(knee) <= squares(line)


def test_what_least_squares_would_have_below_zero_is_held_at_zero() -> None:
    falling = fit_line({1: 3.0, 2: 2.0, 3: 1.0})
    assert (falling.slope, falling.intercept, falling.held, falling.r) == (0.0, 2.0, "slope", None)
    through = fit_line({1: 1.0, 2: 4.0, 3: 6.0})
    assert (through.held, through.intercept) == ("intercept", 0.0)
    assert through.slope == pytest.approx((1 + 8 + 18) / 14)
    assert through.freedom == 2


def test_intervals_are_those_of_students_t() -> None:
    # By hand: slope 2, intercept 0.5; residuals 0.5, -1, 0.5, and 1 degree of freedom.
    line = fit_line({1: 3.0, 2: 3.5, 3: 7.0})
    assert (line.slope, line.intercept) == pytest.approx((2.0, 0.5))
    error = (1.5 / 2) ** 0.5
    assert line.slope_interval == pytest.approx((2 - 12.7062 * error, 2 + 12.7062 * error), rel=1e-5)
    assert line.error_at(2) == pytest.approx((1.5 / 3) ** 0.5)
    assert fit_line({1: 1.0, 2: 2.0}).slope_interval is None
    assert fit_line({1: 1.0, 2: 2.0}).error_at(1) == inf


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (10, 2.22814), (1000, 1.95996)]
)
def test_quantiles_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert quantile(0.975, freedom) == pytest.approx(expected, rel=1e-5)
    assert quantile(0.025, freedom) == pytest.approx(-expected, rel=1e-5)
    assert below(quantile(0.9, freedom), freedom) == pytest.approx(0.9)


@pytest.mark.parametrize("value", [-4.0, -0.3, 0.0, 1.7, 40.0])
def test_students_t_is_what_its_closed_forms_say(value: float) -> None:
    root = value / sqrt(3)
    closed = {
        1: 0.5 + atan(value) / pi,
        2: 0.5 + value / (2 * sqrt(2 + value**2)),
        3: 0.5 + (root / (1 + root**2) + atan(root)) / pi,
        4: 0.5 + value * (value**2 + 6) / (2 * (value**2 + 4) ** 1.5),
    }
    assert [below(value, freedom) for freedom in closed] == pytest.approx(list(closed.values()), abs=1e-12)


def test_one_batch_size_makes_no_line() -> None:
    with pytest.raises(ValueError, match="2 batch sizes or more, not 1"):
        fit_line({4: 1.0})


# Which batch fits, and how fast it is


@given(costs(), limits)
def test_the_largest_batch_takes_all_that_steps_may_take(cost: Cost, limit: float) -> None:
    size = cost.largest(limit)
    if size == 0:
        assert limit <= cost.beta
    elif size == inf:
        assert cost.alpha == 0
    else:
        assert isclose(cost.nbytes(size), limit, rel_tol=1e-9)
        assert cost.nbytes(whole(size)) <= limit * (1 + 1e-6)


@given(costs(), st.floats(1, 1e4), st.floats(1, 2))
def test_throughput_never_falls_with_the_batch(cost: Cost, size: float, times: float) -> None:
    assert cost.throughput(size * times) >= cost.throughput(size) * (1 - 1e-9)
    if cost.gamma:
        assert cost.throughput(size) <= 1 / cost.gamma * (1 + 1e-9)


def test_throughput_grows_as_equation_7_has_it_once_corrected() -> None:
    cost, size, step = Cost(alpha=1, beta=0, gamma=0.02, delta=0.5), 40.0, 1e-5
    slope = (cost.throughput(size + step) - cost.throughput(size - step)) / (2 * step)
    assert slope == pytest.approx(0.5 / (0.02 * 40 + 0.5) ** 2)
    assert slope != pytest.approx(0.5 / (0.02 * 40**2 + 0.5), rel=0.1)


def test_below_the_knee_time_does_not_grow() -> None:
    cost = Cost(alpha=1, beta=0, gamma=0.1, delta=1, knee=8)
    assert [cost.seconds(size) for size in (1, 8, 10)] == pytest.approx([1.8, 1.8, 2.0])
    assert cost.throughput(4) == pytest.approx(4 / 1.8)


@pytest.mark.parametrize("wrong", [-1.0, inf, float("nan")])
def test_a_cost_has_no_coefficient_below_zero(wrong: float) -> None:
    with pytest.raises(ValueError, match="gamma is a number of at least 0"):
        Cost(alpha=1, beta=1, gamma=wrong, delta=1)


# Whether a method pays


def fastest(cost: Cost, limit: float) -> float:
    return cost.throughput(cost.largest(limit))  # Eq. 9


def clear(one: float, other: float) -> bool:
    return not isclose(one, other, rel_tol=1e-9)


@given(costs(), costs(), limits, st.floats(0.3, 1))
def test_inequality_11_says_what_the_highest_throughputs_say(
    plain: Cost, method: Cost, limit: float, share: float
) -> None:
    mine, theirs = fastest(method, limit * share), fastest(plain, limit)
    assume(clear(mine, theirs))
    assert pays(plain, method, limit, limit * share) is (mine > theirs)


@given(costs(), maybe, maybe, limits)
def test_inequality_14_is_inequality_11_where_beta_and_delta_are_the_same(
    plain: Cost, alpha: float, gamma: float, limit: float
) -> None:
    method = Cost(alpha=alpha, beta=plain.beta, gamma=gamma, delta=plain.delta)
    assume(limit > plain.beta)
    assume(clear(fastest(method, limit), fastest(plain, limit)))
    assert pays_by_score(plain, method, limit) is pays(plain, method, limit)


@given(costs(), costs(), limits)
def test_the_score_reaches_the_point_where_inequality_14_holds(plain: Cost, method: Cost, limit: float) -> None:
    reached = score(plain, method)
    assume(limit > plain.beta and reached is not None)
    assert reached is not None
    threshold = point(plain, limit)
    assume(clear(reached, threshold) or reached == inf)
    if threshold == inf:  # nothing is fixed: only what is no slower pays
        assert pays_by_score(plain, method, limit) is (method.gamma <= plain.gamma)
    else:
        assert pays_by_score(plain, method, limit) is (reached >= threshold)


@given(costs(), costs(), limits, st.floats(0.3, 1), st.floats(0.3, 1))
def test_inequality_20_says_what_the_highest_throughputs_say_with_fragments(
    plain: Cost, method: Cost, limit: float, plain_share: float, method_share: float
) -> None:
    method = Cost(alpha=method.alpha, beta=plain.beta, gamma=method.gamma, delta=plain.delta)
    mine, theirs = fastest(method, limit * method_share), fastest(plain, limit * plain_share)
    assume(clear(mine, theirs))
    assume(clear(limit * min(plain_share, method_share), plain.beta))
    found = pays_with_fragments(plain, method, limit, plain_share=plain_share, method_share=method_share)
    assert found is (mine > theirs)


@given(costs(), costs(), limits, st.floats(0.3, 1))
def test_inequality_20_is_inequality_14_where_fragments_take_as_much(
    plain: Cost, method: Cost, limit: float, share: float
) -> None:
    room = limit * share - plain.beta
    saved, lost = plain.alpha - method.alpha, method.gamma - plain.gamma
    assume(room > 0 and clear(lost * room, saved * plain.delta))
    found = pays_with_fragments(plain, method, limit, plain_share=share, method_share=share)
    assert found is pays_by_score(plain, method, limit * share)


def test_a_method_whose_asymptote_is_below_the_plain_best_never_pays() -> None:
    # Inequality 11 as printed: 0.1 * 0.001 / -0.04 is below any ratio of memory, and would have it pay.
    plain = Cost(alpha=1, beta=10, gamma=0.01, delta=0.5)
    method = Cost(alpha=0.001, beta=10, gamma=0.1, delta=0.1)
    limit = 100.0
    assert (plain.gamma - method.gamma) * (limit - plain.beta) + plain.delta * plain.alpha < 0
    assert pays(plain, method, limit) is False
    assert 1 / method.gamma < fastest(plain, limit)


def test_a_method_that_saves_memory_and_is_no_slower_always_pays() -> None:
    plain = Cost(alpha=2, beta=10, gamma=0.02, delta=0.5)
    method = Cost(alpha=1, beta=10, gamma=0.01, delta=0.5)
    assert score(plain, method) == inf
    assert pays_by_score(plain, method, 11.0)
    assert pays(plain, method, 11.0)
    slower_and_larger = Cost(alpha=3, beta=10, gamma=0.02, delta=0.5)
    assert score(plain, slower_and_larger) is None
    assert not pays_by_score(plain, slower_and_larger, 11.0)


def test_where_plain_training_does_not_fit_what_fits_pays() -> None:
    plain, small = (Cost(alpha=1, beta=beta, gamma=1, delta=1) for beta in (100.0, 10.0))
    assert pays(plain, small, 50.0)
    assert not pays(small, plain, 50.0)
    assert pays_with_fragments(plain, plain, 110.0, plain_share=0.8)
    assert not pays_with_fragments(plain, plain, 110.0, method_share=0.8)


# Several devices


def test_communication_lowers_the_point_until_a_method_pays() -> None:
    plain = Cost(alpha=4, beta=10, gamma=0.01, delta=0.2)
    method = Cost(alpha=1, beta=10, gamma=0.02, delta=0.2)
    alone, together = (
        [cost.with_communication(seconds) for cost in (plain, method)]
        for seconds in (0.0, ring_seconds(10**9, 8, bytes_per_second=5e8))
    )
    assert point(together[0], 1000.0) < point(alone[0], 1000.0)
    assert score(*together) == pytest.approx(score(*alone))
    assert (pays(*alone, 1000.0), pays(*together, 1000.0)) == (False, True)


def test_gradients_go_round_the_ring_twice_less_a_share() -> None:
    assert ring_seconds(10**9, 1, bytes_per_second=1e9) == 0
    assert ring_seconds(10**9, 4, bytes_per_second=1e9, latency=0.01) == pytest.approx(2 * 3 * (0.25 + 0.01))


# The search for the largest batch


@given(st.integers(0, 600), st.integers(1, 700))
def test_the_search_finds_the_largest_batch_and_tries_none_twice(largest: int, start: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= largest

    assert search_largest(fits, start=start) == largest
    assert len(tried) == len(set(tried)) <= 22


def test_a_search_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="samples still fits"):
        search_largest(lambda size: True)
    with pytest.raises(ValueError, match="1 sample or more"):
        search_largest(lambda size: True, start=0)
