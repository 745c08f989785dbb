"""Spans are what they say, and what was hidden behind compute is added up right."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.ir import Lane, Span, Work
from spillway.ir.spans import Interval, merged, outside, overlap, total, transfers_of, within

TICKS = 40


def span(lane: Lane, work: Work, began: float, ended: float, stalled: float = 0.0, storage: int | None = None) -> Span:
    return Span(
        lane=lane, work=work, began=began, ended=ended, op=0, name="", storage=storage, nbytes=0, stalled=stalled
    )


def ticks_of(intervals: list[Interval]) -> set[int]:
    """Every whole tick that lies within one of them."""
    return {tick for began, ended in intervals for tick in range(int(began), int(ended))}


INTERVALS = st.lists(
    st.tuples(st.integers(0, TICKS), st.integers(0, 8)).map(lambda pair: (float(pair[0]), float(sum(pair)))), max_size=8
)


@given(INTERVALS)
def test_merged_intervals_are_apart_in_order_and_the_same_time(intervals: list[Interval]) -> None:
    joined = merged(intervals)
    assert ticks_of(joined) == ticks_of(intervals)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(joined))


def test_intervals_no_further_apart_than_the_gap_become_one() -> None:
    assert merged([(0, 1), (2, 3), (4.5, 5)], gap=1) == [(0, 3), (4.5, 5)]


@given(INTERVALS, st.integers(0, TICKS), st.integers(0, 12))
def test_an_interval_is_cut_into_what_lies_within_others_and_what_does_not(
    others: list[Interval], began: int, length: int
) -> None:
    interval, disjoint = (float(began), float(began + length)), merged(others)
    inner, outer = within(interval, disjoint), outside(interval, disjoint)
    assert ticks_of(inner) == ticks_of([interval]) & ticks_of(others)
    assert ticks_of(outer) == ticks_of([interval]) - ticks_of(others)
    assert overlap(interval, disjoint) == len(ticks_of(inner))
    assert total([*inner, *outer]) == length


def test_copies_are_added_up_over_both_directions_and_the_disk_is_not() -> None:
    spans = [
        span(Lane.COPY_OUT, Work.COPY, 0, 4, stalled=1),
        span(Lane.COPY_IN, Work.COPY, 2, 4),
        span(Lane.DISK, Work.COPY, 0, 3),
        span(Lane.COMPUTE, Work.STALL, 3, 4),
    ]
    transfers = transfers_of(spans)
    assert (transfers.seconds, transfers.hidden_seconds) == (6, 5)
    assert transfers.hidden_share == pytest.approx(5 / 6)


def test_without_copies_nothing_is_hidden() -> None:
    transfers = transfers_of([span(Lane.COMPUTE, Work.OP, 0, 1)])
    assert (transfers.seconds, transfers.hidden_share) == (0, 0)


@pytest.mark.parametrize(
    ("lane", "work", "ended", "stalled", "sentence"),
    [
        (Lane.COMPUTE, Work.OP, -1.0, 0.0, "op on compute from 0.0 to -1.0"),
        (Lane.COPY_IN, Work.COPY, 1.0, 1.5, "copy on copy-in from 0.0 to 1.0 stalled for 1.5"),
        (Lane.COPY_IN, Work.COPY, 1.0, -0.5, "stalled for -0.5"),
        (Lane.COPY_IN, Work.OP, 1.0, 0.0, "op does not run on the lane copy-in"),
        (Lane.COMPUTE, Work.COPY, 1.0, 0.0, "copy does not run on the lane compute"),
    ],
)
def test_a_span_that_cannot_have_been_is_refused(
    lane: Lane, work: Work, ended: float, stalled: float, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        span(lane, work, 0.0, ended, stalled)
