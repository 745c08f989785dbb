"""Large Model Support: what is far leaves, and the search finds what IBM's does; any step within its budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spillway
from spillway.errors import BudgetInfeasible, PlanRejected, UsageError
from spillway.ir import Host, Kind, Phase, Step, verify
from spillway.methods import LMS, lms
from spillway.methods.lms import Parameters
from tests.pure.counted_lines import grows_no_faster_than_n_log_n, lines_run
from tests.pure.linear_graphs import linear_step
from tests.pure.planned_alone import holds, problem, random_problem
from tests.pure.training_steps import Recorder, training_step

UNIT = 1 << 20


def gaps(step: Step, units: int, method: LMS) -> list[tuple[int, int, int]]:
    plan = method.plan(problem(step, units * UNIT))
    assert {gap.home for gap in plan.gaps} <= {Host()}
    return sorted((gap.value, gap.start, gap.end) for gap in plan.gaps)


# ---------------------------------------------------------------------- parameters


def test_what_is_read_at_a_greater_distance_than_the_threshold_leaves() -> None:
    # A chain: the level of an op is its number. Value k is made by op k - 1, read by op k and by op 12 - k.
    step = linear_step(6)
    distances = {value: 12 - value - (value - 1) for value in range(1, 6)}
    assert distances == {1: 11, 2: 9, 3: 7, 4: 5, 5: 3}
    for threshold in range(2, 12):
        moved = {value for value, _, _ in gaps(step, 8, LMS(threshold=threshold, ahead=1, groupby=0))}
        # Value 5 has no op between its uses in which it could be gone.
        assert moved == {value for value in (1, 2, 3, 4) if distances[value] > threshold}


def test_a_copy_in_begins_behind_the_op_that_is_far_enough_below_the_one_that_reads() -> None:
    step = linear_step(6)
    # Value 1 is read by op 11. Ahead 1: behind op 9, that is before op 10. It leaves when room is short, at the latest
    # one op before it comes in.
    assert gaps(step, 8, LMS(threshold=9, ahead=0, groupby=0)) == [(1, 10, 11)]
    assert gaps(step, 8, LMS(threshold=9, ahead=1, groupby=0)) == [(1, 9, 10)]
    assert gaps(step, 8, LMS(threshold=9, ahead=4, groupby=0)) == [(1, 6, 7)]
    # No op is so far below, and made after the value: it comes in right before it is read.
    assert gaps(step, 8, LMS(threshold=9, ahead=11, groupby=0)) == [(1, 10, 11)]


def test_what_leaves_is_waited_for_when_room_is_short_the_oldest_first() -> None:
    step = linear_step(6)
    assert step.plain_peak() == 8 * UNIT
    far = LMS(threshold=5, ahead=1, groupby=0, share=1.0)
    assert gaps(step, 8, far) == [(1, 9, 10), (2, 8, 9), (3, 7, 8)]
    assert gaps(step, 7, far) == [(1, 6, 10), (2, 8, 9), (3, 7, 8)]
    assert gaps(step, 6, far) == [(1, 5, 10), (2, 6, 9), (3, 7, 8)]


def read_three_times() -> Step:
    """Storage 1 is made by op 0 and read by ops 4, 6 and 9, of levels 4, 6 and 9."""
    recorder = Recorder()
    source = recorder.source(UNIT, Kind.INPUT)
    (far,) = recorder.op("far", Phase.FORWARD, [source], [UNIT])
    above = far
    for op in range(1, 10):
        read = [above, far] if op in (4, 6, 9) else [above] if op > 1 else [source, far]
        (above,) = recorder.op("next", Phase.FORWARD, read, [UNIT])
    return recorder.step()


def test_readers_that_are_near_each_other_share_a_copy_in() -> None:
    step = read_three_times()
    value = next(value.id for value in step.values if value.storage == 1)

    def gone(groupby: int) -> list[tuple[int, int]]:
        found = gaps(step, 5, LMS(threshold=1, ahead=0, groupby=groupby))
        return [(start, end) for one, start, end in found if one == value]

    assert gone(0) == gone(1) == [(3, 4), (5, 6), (8, 9)]
    assert gone(2) == [(3, 4), (8, 9)]
    assert gone(3) == [(3, 4)]


def test_parameters_and_what_is_there_before_the_step_stay() -> None:
    step = training_step(5, layers=10)
    plan = LMS(threshold=1, ahead=1, groupby=0).plan(problem(step, step.plain_peak()))
    moved = {step.values[gap.value].storage for gap in plan.gaps}
    assert moved
    assert not any(step.storages[storage].present_at_start for storage in moved)


# ---------------------------------------------------------------------- the search


def test_nothing_is_moved_where_all_fits_in_the_share_of_the_budget_that_the_search_makes_use_of() -> None:
    step = linear_step(6)
    nothing = LMS().parameters(problem(step, 9 * UNIT))  # eight are needed, and 9 * 0.9 are used
    assert nothing == Parameters(threshold=13)
    assert LMS().parameters(problem(step, 8 * UNIT)).threshold < 13
    assert LMS(share=1.0).parameters(problem(step, 8 * UNIT)) == nothing


def test_the_search_takes_the_largest_threshold_then_the_largest_ahead_then_groups() -> None:
    step = linear_step(16)
    given_ = problem(step, 12 * UNIT)
    found = LMS(share=1.0).parameters(given_)

    def mode(**changes: int) -> int | None:
        tried = replace(found, **changes)
        try:
            return LMS(threshold=tried.threshold, ahead=tried.ahead, groupby=tried.groupby).parameters(given_).mode
        except BudgetInfeasible:
            return None

    assert mode() == found.mode == 0
    assert mode(threshold=found.threshold + 1, ahead=1, groupby=0) != 0  # it does not fit without waiting
    assert mode(ahead=found.ahead + 1) != 0
    assert found.groupby == 33  # one op is far from each value: all of them are one group


def test_what_a_refusal_says_is_needed_has_the_share_that_stays_free() -> None:
    step, refused = linear_step(16), 0
    for tenths in range(20, 100):
        try:
            LMS().parameters(problem(step, tenths * UNIT // 10))
        except BudgetInfeasible as refusal:
            refused += 1
            assert refusal.needed > refusal.allowed == tenths * UNIT // 10
    assert refused > 1


def test_modes_that_wait_are_taken_where_nothing_else_fits_and_beyond_them_the_step_is_refused() -> None:
    step = linear_step(16)
    modes = {}
    for units in range(3, 18):
        try:
            modes[units] = LMS(share=1.0).parameters(problem(step, units * UNIT)).mode
        except BudgetInfeasible as refused:
            assert refused.smallest_budget > units * UNIT
            modes[units] = None
    assert list(modes.values()) == sorted(modes.values(), key=lambda mode: -1 if mode is None else 3 - mode)
    assert modes[3] is None
    assert modes[17] == 0
    assert 2 in modes.values()


@pytest.mark.parametrize(
    "make", [lambda: LMS(threshold=-1), lambda: LMS(share=0.0), lambda: LMS(share=1.1), lambda: LMS(smallest=-1)]
)
def test_arguments_that_make_no_sense_are_refused(make: Callable[[], LMS]) -> None:
    with pytest.raises(UsageError):
        make()


# ---------------------------------------------------------------------- any step

methods = st.builds(
    LMS,
    threshold=st.sampled_from([None, None, 0, 1, 5]),
    ahead=st.sampled_from([None, None, 0, 1, 5]),
    groupby=st.sampled_from([None, None, 0, 3]),
    share=st.sampled_from([0.9, 1.0]),
)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 16), trained=st.booleans(), method=methods, share=st.floats(0.4, 1.05))
def test_every_plan_verifies_and_keeps_its_budget_alone_or_is_refused_with_one_that_would_do(
    seed: int, trained: bool, method: LMS, share: float
) -> None:
    holds(method, random_problem(seed, share, trained=trained))


def test_a_plan_with_a_fault_is_found_out() -> None:
    step = linear_step(6)
    plan = LMS(threshold=5, ahead=1, groupby=0, share=1.0).plan(problem(step, 6 * UNIT))
    with pytest.raises(PlanRejected, match="over-budget"):
        verify(replace(plan, gaps=plan.gaps[1:]), step, 6 * UNIT)
    late = tuple(replace(gap, end=12) if gap.value == 1 else gap for gap in plan.gaps)
    with pytest.raises(PlanRejected, match="reads the value"):
        verify(replace(plan, gaps=late), step, 6 * UNIT)


def test_planning_with_its_search_grows_no_faster_than_n_log_n() -> None:
    counts = {}
    for layers in (200, 800, 3200):
        step = linear_step(layers, nbytes=8192)
        given_ = problem(step, int(step.plain_peak() * 0.6))
        counts[len(step.ops)] = lines_run(lms, partial(LMS().plan, given_))
    assert grows_no_faster_than_n_log_n(counts)


def test_it_plans_and_is_simulated_by_its_name() -> None:
    step = linear_step(8, nbytes=64 * UNIT)
    ran = spillway.simulate(step, 0.8, "lms")
    assert ran.status == "ok"
    assert ran.peak_bytes <= spillway.plan(step, budget=0.8, method="lms").allowed
    assert ran.bytes_in == ran.bytes_out > 0
