"""The window's schedule: literal steps with literal answers, and any step within its budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import spillway
from spillway.errors import BudgetInfeasible, PlanRejected, UsageError
from spillway.ir import Kind, Lane, Phase, Step, verify
from spillway.methods import Planned, Window, window
from spillway.methods.window import Issue, Schedule
from spillway.simulation.simulated_engine import simulate
from tests.pure.counted_lines import grows_no_faster_than_n_log_n, lines_run
from tests.pure.linear_graphs import linear_step
from tests.pure.planned_alone import holds, problem, ran_alone, random_problem
from tests.pure.recorded import DEVICE
from tests.pure.training_steps import Recorder, training_step

UNIT = 1 << 20
FORWARD, BACKWARD, OPTIMIZER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER
AT_OP = Window(issue="at op")
PUBLISHED = Window.as_published()


def gaps(step: Step, units: int, method: Window = AT_OP) -> list[tuple[int, int, int]]:
    return sorted((gap.value, gap.start, gap.end) for gap in method.plan(problem(step, units * UNIT)).gaps)


def living(step: Step, **until: int) -> Step:
    """The step with storages that live longer: `s3=7` for storage 3 until op 7."""
    chosen = {int(name[1:]): op for name, op in until.items()}
    return replace(
        step, storages=tuple(replace(one, alive_until=chosen.get(one.id, one.alive_until)) for one in step.storages)
    )


# ---------------------------------------------------------------------- what the window does


def moved(made: Schedule) -> tuple[int, ...]:
    """How many storages of a unit were brought in, cancelled, waited for and precleared."""
    rows = [(at.swapped_in, at.cancelled, at.waited, at.precleared) for at in made.window]
    return tuple(sum(column) // UNIT for column in zip(*rows, strict=True))


def test_what_fits_stays() -> None:
    step = linear_step(4)
    made = Window().schedule(problem(step, step.plain_peak()))
    assert (made.gaps, moved(made)[0], moved(made)[2], made.restarts) == ((), 0, 0, 0)


def test_a_chain_goes_out_behind_the_window_and_comes_in_ahead_of_it() -> None:
    # Op k of 0 to 3 reads value k and makes the next; op 4 is the loss; gradients read 3, 2, 1, 0 and the one before.
    step = linear_step(4)
    assert step.plain_peak() == 6 * UNIT
    # Under four units op 3 finds 0, 1, 2 and 3 there and makes the fifth: 0, which left first, is waited for. Op 4
    # takes 1. During op 5 there are 2, 3, 5 and 6. Before op 6, 3 and 5 are dead: 1 comes in. Before op 7, 2 is: 0.
    assert gaps(step, 4) == [(0, 3, 7), (1, 4, 6)]
    assert gaps(step, 5) == [(0, 4, 7)]
    assert gaps(step, 3) == [(0, 2, 8), (1, 3, 7), (2, 4, 6)]


def test_what_comes_into_the_window_again_before_anybody_waited_is_cancelled() -> None:
    made = AT_OP.schedule(problem(linear_step(4), 4 * UNIT))
    # Values 0 and 2; and 0 once more, with which the step begins. 0 and 1 are waited for.
    assert moved(made) == (2, 2, 2, 0)
    assert 2 not in {gap.value for gap in made.gaps}


def test_host_ahead_begins_a_copy_in_where_there_is_room_and_at_op_where_the_window_has_it() -> None:
    step = linear_step(4)
    # Before op 6 a unit of five is free; the window brings 0 in one op later.
    assert gaps(step, 5, Window()) == [(0, 4, 6)]
    assert gaps(step, 5, AT_OP) == [(0, 4, 7)]


def test_a_plan_tells_op_by_op_where_the_window_was_and_what_came_and_went() -> None:
    step = linear_step(4)
    told = AT_OP.plan(problem(step, 4 * UNIT)).window
    assert told == AT_OP.schedule(problem(step, 4 * UNIT)).window
    assert [(op, at.waited // UNIT) for op, at in enumerate(told) if at.waited] == [(3, 1), (4, 1)]  # values 0 and 1
    assert [(op, at.swapped_in // UNIT) for op, at in enumerate(told) if at.swapped_in] == [(6, 1), (7, 1)]
    assert sum(at.cancelled for at in told) == 2 * UNIT
    assert [at.until for at in told] == sorted(at.until for at in told)
    assert all(op < at.until <= len(step.ops) for op, at in enumerate(told))
    ran = simulate(step, allowed=4 * UNIT, method=AT_OP, device=DEVICE)
    assert ran.timeline.window == told


def test_what_nobody_reads_again_is_precleared_at_once_as_published_and_else_when_its_bytes_are_wanted() -> None:
    step = living(linear_step(4), s5=9)  # the loss, read by op 5 for the last time, lives to the end
    assert gaps(step, 5, PUBLISHED) == [(0, 4, 6), (5, 6, 9)]
    assert gaps(step, 5) == [(0, 4, 7)]  # there is room for both
    assert gaps(step, 4) == [(0, 3, 7), (1, 4, 6), (5, 6, 9)]
    assert [moved(AT_OP.schedule(problem(step, units * UNIT)))[3] for units in (4, 5)] == [1, 0]
    assert [moved(PUBLISHED.schedule(problem(step, units * UNIT)))[3] for units in (4, 5, 7)] == [1, 1, 1]


def written_anew() -> Step:
    """Storage 1 is read by op 1, then written by op 5 without being read."""
    recorder = Recorder()
    source = recorder.source(UNIT, Kind.INPUT)
    (written,) = recorder.op("make", FORWARD, [source], [UNIT])
    (above,) = recorder.op("read", FORWARD, [written], [UNIT])
    for _ in range(3):
        (above,) = recorder.op("mul", FORWARD, [above], [UNIT])
    recorder.op("copy_", FORWARD, [above], [], writes=(written,))
    recorder.op("read", FORWARD, [written], [UNIT])
    return recorder.step()


def test_what_is_written_before_it_is_read_needs_no_copy_in() -> None:
    made = PUBLISHED.schedule(problem(written_anew(), 2 * UNIT))
    (gone,) = [gap for gap in made.gaps if gap.value == 1]
    assert (gone.start, gone.end) == (2, 5)
    assert moved(made)[3] == 1
    assert moved(made)[0] == 1  # the input
    # An engine brings in what an op writes to, and Spillway's window counts that.
    ours = AT_OP.schedule(problem(written_anew(), 2 * UNIT))
    assert (moved(ours)[3], moved(ours)[0]) == (0, 2)


def test_a_window_that_reached_too_far_backtracks_as_published_and_a_window_of_the_budget_never_does() -> None:
    step = linear_step(4)
    for units, restarts in ((3, 3), (4, 2), (5, 0)):
        published, ours = (method.schedule(problem(step, units * UNIT)) for method in (PUBLISHED, AT_OP))
        assert (published.restarts, ours.restarts) == (restarts, 0)
    # With what was prefetched for nothing taken back, both move the same.
    assert gaps(step, 3, PUBLISHED) == gaps(step, 3)


def test_backtracking_drops_later_accesses_of_what_is_in_the_window_already() -> None:
    # `kept` is read by every op: all its accesses lie in the window. Op 1 makes two units, for which the window of
    # four and a half units has no room once it holds `kept`, `small` and `far`: `far` has to wait, and so has every
    # access behind it, those of `kept` included.
    recorder = Recorder()
    kept, small, far = (recorder.source(UNIT, Kind.PARAMETER) for _ in range(3))
    recorder.op("a", FORWARD, [kept, small], [])
    recorder.op("b", FORWARD, [kept], [2 * UNIT])
    for _ in range(3):
        recorder.op("c", FORWARD, [kept, far], [])
    step = recorder.step()
    made = PUBLISHED.schedule(problem(step, 3 * UNIT))
    assert made.restarts == 1
    assert [at.until for at in made.window] == [1, 2, 5, 5, 5], "until op 1 has run it stops before `far` in op 2"
    verify(PUBLISHED.plan(problem(step, 3 * UNIT)), step, 3 * UNIT)


def test_parameters_gradients_and_state_move_for_the_update_of_the_optimizer() -> None:
    recorder = Recorder()
    pairs = [(recorder.source(UNIT, Kind.PARAMETER), recorder.source(2 * UNIT, Kind.OPTIMIZER_STATE)) for _ in range(4)]
    made = [recorder.op("grad", BACKWARD, [weight], [UNIT], kind=Kind.GRADIENT)[0] for weight, _ in pairs]
    for (weight, state), gradient in zip(pairs, made, strict=True):
        recorder.op("adam_", OPTIMIZER, [weight, gradient, state], [], writes=(weight, state))
    step = recorder.step()
    assert step.plain_peak() == 16 * UNIT
    plan = Window().plan(problem(step, 4 * UNIT))  # what one update needs
    verify(plan, step, 4 * UNIT)
    moved = {step.storages[step.values[gap.value].storage].kind for gap in plan.gaps}
    assert moved == {Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER_STATE}


def test_what_there_is_room_for_stays_from_one_step_to_the_next_and_nothing_does_as_published() -> None:
    recorder = Recorder()
    weight = recorder.source(UNIT, Kind.PARAMETER)
    for _ in range(4):
        recorder.op("mm", FORWARD, [weight], [UNIT])
    step = recorder.step()
    assert gaps(step, 2, Window()) == gaps(step, 2, PUBLISHED) == []  # the first op and the last one use it
    recorder.op("other", FORWARD, [], [UNIT])
    recorder.op("other", FORWARD, [], [UNIT])
    assert gaps(recorder.step(), 2, PUBLISHED) == [(0, 5, 6)]
    assert gaps(recorder.step(), 2, Window()) == []


def test_small_storages_stay_and_are_taken_off_the_budget() -> None:
    step = linear_step(4)
    assert Window(smallest=UNIT + 1).schedule(problem(step, step.plain_peak())).gaps == ()
    with pytest.raises(BudgetInfeasible) as refused:
        Window(smallest=UNIT + 1).plan(problem(step, step.plain_peak() - 1))
    assert refused.value.smallest_budget == step.plain_peak()


def test_storages_count_as_whole_chunks() -> None:
    step = linear_step(4)
    # Units of 3/2 count as two each: what six units of budget hold is what three hold of whole ones.
    odd = linear_step(4, nbytes=3 * UNIT // 2)
    assert gaps(odd, 6, Window(issue="at op", chunk=2 * UNIT)) == gaps(step, 3)
    assert gaps(odd, 6, Window(issue="at op", chunk=2 * UNIT, exempt=3 * UNIT // 2 + 1)) == gaps(step, 4)


def test_a_window_smaller_than_an_op_is_refused_with_the_numbers() -> None:
    step = linear_step(4)
    with pytest.raises(BudgetInfeasible, match=r"a window of 2\.00 MiB\) needs 3\.00 MiB .* \(6\.00 MiB") as refused:
        Window(window=0.5).plan(problem(step, 4 * UNIT))
    assert (refused.value.needed, refused.value.smallest_budget) == (3 * UNIT, 6 * UNIT)
    assert Window(window=0.5).plan(problem(step, 6 * UNIT)).projected <= 6 * UNIT
    with pytest.raises(BudgetInfeasible, match=r"Op 5 \(gradient3\) needs 3\.00 MiB") as refused:
        Window().plan(problem(step, 3 * UNIT - 1))
    assert refused.value.smallest_budget == 3 * UNIT


def test_the_smallest_budget_of_a_small_window_is_known_to_the_byte() -> None:
    recorder = Recorder()
    recorder.op("whole", FORWARD, [recorder.source(14, Kind.INPUT)], [7])
    step, method = recorder.step(), Window(window=0.7, smallest=0)
    with pytest.raises(BudgetInfeasible) as refused:
        method.plan(problem(step, 29))
    assert refused.value.smallest_budget == 30  # of which 0.7 are 21, and 21 / 0.7 in floating point is more than 30
    assert method.plan(problem(step, 30)).gaps == ()


@pytest.mark.parametrize("method", [Window(), Window.as_published()])
def test_a_step_without_ops_has_a_plan_without_gaps(method: Window) -> None:
    recorder = Recorder()
    recorder.source(UNIT, Kind.PARAMETER)
    assert method.plan(problem(recorder.step(), UNIT)).gaps == ()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Window(window=0),
        lambda: Window(window=float("inf")),
        lambda: Window(chunk=0),
        lambda: Window(smallest=-1),
        lambda: Window(exempt=-1),
        lambda: Window(issue="sometime"),  # type: ignore[arg-type]
    ],
)
def test_arguments_that_make_no_sense_are_refused(make: Callable[[], Window]) -> None:
    with pytest.raises(UsageError):
        make()


# ---------------------------------------------------------------------- any step


windows = st.builds(
    Window,
    window=st.sampled_from([0.5, 1.0, 1.0, 1.5, 3.0]),
    issue=st.sampled_from(["at op", "host ahead"]),
    chunk=st.sampled_from([1, 1, 4096, 1 << 16]),
    exempt=st.sampled_from([0, 0, 1 << 14]),
    drained=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 16), trained=st.booleans(), method=windows, share=st.floats(0.2, 1.05))
def test_every_plan_verifies_and_keeps_its_budget_alone_or_is_refused_with_the_least_that_would_do(
    seed: int, trained: bool, method: Window, share: float
) -> None:
    given_ = random_problem(seed, share, trained=trained)
    held = holds(method, given_)
    if held.allowed > given_.allowed:
        with pytest.raises(BudgetInfeasible):
            method.schedule(problem(held.step, held.allowed - 1))
    made = method.schedule(held)
    event(f"restarts: {made.restarts > 0}")
    assert not made.restarts or method.window > 1


def test_a_plan_with_a_fault_is_found_out() -> None:
    """The checks of the test above can fail: each of these faults is one that a planner could make."""
    step = training_step(3, layers=8)
    allowed = step.plain_peak() // 2
    plan = Window().plan(problem(step, allowed))
    longest = max(plan.gaps, key=lambda gap: gap.end - gap.start)
    rest = tuple(gap for gap in plan.gaps if gap is not longest)
    with pytest.raises(PlanRejected, match="over-budget"):  # a copy out that nobody waits for
        verify(replace(plan, gaps=rest), step, plan.projected)
    with pytest.raises(AssertionError, match="beyond the plan"):
        ran_alone(replace(plan, gaps=rest, allowed=plan.projected), step)
    chain = linear_step(4)
    tight = AT_OP.plan(problem(chain, 3 * UNIT))  # value 2 is gone during ops 4 and 5, and read by op 6
    late = [replace(gap, end=7) if gap.value == 2 else gap for gap in tight.gaps]
    with pytest.raises(PlanRejected, match="reads the value"):
        verify(replace(tight, gaps=tuple(late)), chain, 3 * UNIT)


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        (window._Made, "_make_room", lambda *given_: True),  # nobody waits for copies out
        (window._Levels, "last_above", lambda *given_: -1),  # the host runs ahead of the room that there is
        (window._Levels, "add", lambda *given_: None),  # what was brought in early is forgotten
    ],
)
def test_a_fault_in_the_planner_is_found_by_the_verifier(
    where: type, name: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, fault)
    rejected = 0
    for seed in range(6):
        step = training_step(seed, layers=10)
        allowed = step.plain_peak() // 2
        try:
            verify(replace(Window().plan(problem(step, allowed)), projected=step.plain_peak()), step, allowed)
        except PlanRejected as refused:
            rejected += refused.rule == "over-budget"
    assert rejected


def test_copies_begin_where_the_plan_has_them() -> None:
    step = linear_step(4)
    plan = AT_OP.plan(problem(step, 5 * UNIT))
    assert [(gap.value, gap.start, gap.end) for gap in plan.gaps] == [(0, 4, 7)]
    spans = [span for span in ran_alone(plan, step, steps=1).timeline.spans if span.lane is not Lane.COMPUTE]
    # Out as op 0, the last use, has ended; in as op 7 begins, for op 8. Ops take a millisecond each.
    assert [(span.lane, span.began) for span in spans] == [
        (Lane.COPY_OUT, pytest.approx(0.001)),
        (Lane.COPY_IN, pytest.approx(0.007)),
    ]
    with pytest.raises(UsageError, match="'in time' or 'at op', got 'soon'"):
        Planned(plan, step, begin="soon")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- by name


@pytest.mark.parametrize("name", ["window", "window-published"])
def test_it_plans_and_is_simulated_by_its_name(name: str) -> None:
    step = linear_step(8, nbytes=64 * UNIT)
    plan = spillway.plan(step, budget=0.5, method=name)
    assert plan.projected <= plan.allowed
    ran = spillway.simulate(step, 0.5, name)
    assert ran.status == "ok"
    assert ran.peak_bytes <= plan.allowed
    assert ran.bytes_in == ran.bytes_in_beside > 0


# ---------------------------------------------------------------------- growth


@pytest.mark.parametrize("issue", ["at op", "host ahead"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_planning_grows_no_faster_than_n_log_n(issue: Issue, share: float) -> None:
    counts = {}
    for layers in (200, 800, 3200):
        step = linear_step(layers, nbytes=8192)
        given_ = problem(step, int(step.plain_peak() * share))
        counts[len(step.ops)] = lines_run(window, partial(Window(issue=issue).schedule, given_))
    assert grows_no_faster_than_n_log_n(counts)


def test_growth_with_the_square_would_be_found() -> None:
    assert not grows_no_faster_than_n_log_n({ops: ops * ops // 8 for ops in (401, 1601, 6401)})
    assert not grows_no_faster_than_n_log_n({ops: int(ops**1.5) for ops in (401, 1601, 6401)})
