"""The improved window: what the programs choose on literal steps, and any step within its budget, never slower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spillway
from spillway.costs import Device
from spillway.errors import BudgetInfeasible, PlanRejected, UsageError
from spillway.ir import Gap, Host, Kind, Phase, Plan, Recompute, Step, verify
from spillway.ir.lives import lives_of
from spillway.methods import AbstractPlanner, ImprovedWindow, Problem, Window, absent_bytes
from spillway.methods.absent_bytes import fewest_bytes, waited_late
from spillway.methods.base import Absence
from spillway.methods.plan_clock import PlanClock
from spillway.methods.window import improved
from spillway.simulation.simulated_engine import simulate
from spillway.units import Bytes
from tests.pure.linear_graphs import linear_step
from tests.pure.planned_alone import holds, problem, random_problem
from tests.pure.recorded import DEVICE
from tests.pure.training_steps import Recorder, training_step

UNIT = 1 << 20
FORWARD, BACKWARD, OPTIMIZER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER


def linked(milliseconds: float) -> Device:
    """A unit takes so long each way."""
    rate = UNIT / (milliseconds * 1e-3)
    return replace(DEVICE, out_per_second=rate, in_per_second=rate, copy_seconds=0.0, duplex=False)


def convolutions(layers: int, *, heavy: float = 8e-3, light: float = 1e-3) -> Step:
    """Each layer a heavy op and a light one, both of whose results the backward reads: the light one's by the heavy op
    of the layer above, the heavy one's by the light op."""
    recorder = Recorder()
    below = recorder.source(UNIT, Kind.INPUT)
    made = []
    for _ in range(layers):
        (heavy_one,) = recorder.op("conv", FORWARD, [below], [UNIT], seconds=heavy)
        (light_one,) = recorder.op("relu", FORWARD, [heavy_one], [UNIT], seconds=light)
        made.append((below, heavy_one, light_one))
        below = light_one
    (gradient,) = recorder.op("loss", FORWARD, [below], [UNIT], seconds=light)
    for below, heavy_one, light_one in reversed(made):
        (gradient,) = recorder.op("relu_backward", BACKWARD, [gradient, light_one, heavy_one], [UNIT], seconds=light)
        (gradient,) = recorder.op("conv_backward", BACKWARD, [gradient, below], [UNIT], seconds=heavy)
    return recorder.step()


class Fixed(AbstractPlanner):
    """Answers with a plan that is there, whose copies begin as the window's."""

    name = "fixed"
    begin = "at op"

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def plan(self, problem: Problem) -> Plan:
        return self._plan


def seconds(plan: Plan, step: Step, device: Device) -> float:
    return simulate(step, allowed=plan.allowed, method=Fixed(plan), device=device, steps=3).seconds


# ---------------------------------------------------------------------- what is recomputed


def test_a_cheap_value_runs_again_where_the_link_is_slow_and_an_expensive_one_is_swapped() -> None:
    step, device = convolutions(6), linked(20)
    given_ = Problem(step=step, allowed=7 * UNIT, device=device)
    plan = ImprovedWindow().plan(given_)
    verify(plan, step, given_.allowed)
    again = {step.ops[op].name for gap in plan.gaps if isinstance(gap.home, Recompute) for op in gap.home.ops}
    assert "relu" in again
    swapped = {gap.value for gap in plan.gaps if isinstance(gap.home, Host)}
    assert len(swapped) < len({gap.value for gap in Window().plan(given_).gaps})


def test_nothing_runs_again_where_copies_hide_behind_ops() -> None:
    step, device = convolutions(6), linked(0.01)
    given_ = Problem(step=step, allowed=7 * UNIT, device=device)
    assert all(isinstance(gap.home, Host) for gap in ImprovedWindow().plan(given_).gaps)


def test_each_option_can_be_left_out() -> None:
    step, device = convolutions(6), linked(20)
    given_ = Problem(step=step, allowed=7 * UNIT, device=device)
    plain, least, again, both = (
        seconds(method.plan(given_), step, device)
        for method in (
            ImprovedWindow(gaps="window", recompute=False), ImprovedWindow(recompute=False),
            ImprovedWindow(gaps="window"), ImprovedWindow(),
        )
    )  # fmt: skip
    assert plain == pytest.approx(seconds(Window().plan(given_), step, device))
    assert both <= min(least, again) <= max(least, again) <= plain
    assert both < plain
    homes = {type(gap.home) for gap in ImprovedWindow(recompute=False).plan(given_).gaps}
    assert homes == {Host}


def test_a_replay_that_an_op_has_no_room_for_is_left_out() -> None:
    step, device = convolutions(3), linked(50)
    needs = max(sum(step.storages[s].nbytes for s in used(step, op)) for op in range(len(step.ops)))
    plan = ImprovedWindow().plan(Problem(step=step, allowed=needs, device=device))
    verify(plan, step, needs)


def used(step: Step, op: int) -> set[int]:
    return {step.values[value].storage for value in (*step.ops[op].reads, *step.ops[op].creates)}


# ---------------------------------------------------------------------- what the program chooses


def fewest(step: Step, allowed: Bytes) -> tuple[dict[tuple[Absence, ...], float], float]:
    return fewest_bytes(step, lives_of(step), allowed, [one.nbytes for one in step.storages], 1)


def test_the_fewest_bytes_of_a_chain_are_those_over_the_budget() -> None:
    step = linear_step(4)  # a peak of six units, and three alive during every op of the backward
    for units in (3, 4, 5, 6):
        shares, nbytes = fewest(step, units * UNIT)
        assert nbytes == pytest.approx((6 - units) * UNIT)
        gone = [together[0].value for together, share in shares.items() if share > 0.5]
        assert sorted(gone) == list(range(6 - units))  # the longest intervals
    with pytest.raises(ArithmeticError):
        fewest(step, 2 * UNIT)


def test_what_a_step_begins_without_the_step_before_has_ended_without() -> None:
    recorder = Recorder()
    state = recorder.source(UNIT, Kind.OPTIMIZER_STATE)
    (made,) = recorder.op("a", FORWARD, [], [2 * UNIT])
    recorder.op("b", OPTIMIZER, [state, made], [], writes=(state,))
    recorder.op("c", OPTIMIZER, [], [2 * UNIT])
    recorder.op("d", OPTIMIZER, [], [UNIT])
    shares, nbytes = fewest(recorder.step(), 3 * UNIT)
    both = [together for together in shares if len(together) == 2]
    assert [[(one.start, one.end) for one in together] for together in both] == [[(0, 1), (2, 4)]]
    assert nbytes == pytest.approx(0.0)


def test_out_is_waited_for_when_bytes_are_wanted_the_oldest_first() -> None:
    step = linear_step(6)
    gone = [Absence(0, 1, 12), Absence(1, 2, 11), Absence(2, 3, 10)]
    sizes = [one.nbytes for one in step.storages]
    there = absent_bytes.during(step, gone, sizes)
    assert waited_late(step, gone, there, 8 * UNIT, sizes) == [(2, 9, 10), (1, 10, 11), (0, 11, 12)]
    assert waited_late(step, gone, there, 6 * UNIT, sizes) == [(0, 5, 12), (1, 6, 11), (2, 9, 10)]
    assert waited_late(step, gone, there, 0, sizes) == gone


def test_values_that_move_with_weights_are_chosen_by_what_is_read_last() -> None:
    """Where the window brings the weight of a layer in twice and out, the program does not."""
    step = training_step(7, layers=12, scale=1 << 16)
    allowed = step.plain_peak() // 2
    given_ = problem(step, allowed)
    plain, least = (method.plan(given_) for method in (Window(), ImprovedWindow(recompute=False)))
    verify(least, step, allowed)
    assert moved(least, step) <= moved(plain, step)


def moved(plan: Plan, step: Step) -> Bytes:
    lives, ops = lives_of(step), len(step.ops)
    back = (gap for gap in plan.gaps if absent_bytes.comes_in(lives[gap.value], gap.end, ops))
    return sum(step.storages[step.values[gap.value].storage].nbytes for gap in back)


# ---------------------------------------------------------------------- any step

methods = st.builds(
    ImprovedWindow,
    gaps=st.sampled_from(["window", "least"]),
    recompute=st.booleans(),
    chunk=st.sampled_from([1, 1, 4096, 1 << 16]),
    exempt=st.sampled_from([0, 0, 1 << 14]),
)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 16), trained=st.booleans(), method=methods, share=st.floats(0.2, 1.05))
def test_every_plan_verifies_and_keeps_its_budget_alone_or_is_refused_with_one_that_would_do(
    seed: int, trained: bool, method: ImprovedWindow, share: float
) -> None:
    holds(method, random_problem(seed, share, trained=trained))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 16), share=st.floats(0.3, 0.9), speed=st.sampled_from([1.0, 1e-3, 1e-5]))
def test_every_way_to_plan_keeps_the_budget_even_where_another_is_taken(seed: int, share: float, speed: float) -> None:
    """The fastest is taken, so that the others would not be judged by the test above."""
    given_ = random_problem(seed, share, trained=True)
    slow = replace(DEVICE, out_per_second=DEVICE.out_per_second * speed, in_per_second=DEVICE.in_per_second * speed)
    given_ = replace(given_, device=slow)
    step, method = given_.step, ImprovedWindow()
    try:
        method.window.plan(given_)
    except BudgetInfeasible:
        return
    for gaps in method._tried(given_, lives_of(step)):
        verify(
            Plan(step=step.digest(), allowed=given_.allowed, projected=given_.allowed, gaps=gaps), step, given_.allowed
        )


@pytest.mark.parametrize("missing", [1, 60])
def test_a_budget_that_is_missed_by_less_than_a_solver_sees_is_kept(missing: int) -> None:
    step = linear_step(2)
    allowed = step.plain_peak() - missing
    plan = ImprovedWindow().plan(problem(step, allowed))
    verify(plan, step, allowed)
    assert plan.gaps


def test_a_fault_in_the_planner_is_found_by_the_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    step, device = convolutions(6), linked(20)
    given_ = Problem(step=step, allowed=7 * UNIT, device=device)
    monkeypatch.setattr(improved, "_temporaries", lambda step, replays: dict.fromkeys(range(99), 0))
    monkeypatch.setattr(absent_bytes, "during", lambda step, gone, sizes: [0] * len(step.ops))
    monkeypatch.setattr(improved, "during", lambda step, gone, sizes: [0] * len(step.ops))
    plan = ImprovedWindow(recompute=False)._least(given_, lives_of(step))
    with pytest.raises(PlanRejected, match="over-budget"):
        verify(Plan(step=step.digest(), allowed=7 * UNIT, projected=99 * UNIT, gaps=plan), step, 7 * UNIT)


def test_its_clock_agrees_with_the_simulated_engine() -> None:
    for milliseconds in (1, 5, 20):
        step, device = convolutions(8), linked(milliseconds)
        given_ = Problem(step=step, allowed=7 * UNIT, device=device)
        method = ImprovedWindow()
        for gaps in (method.window.plan(given_).gaps, *method._tried(given_, lives_of(step))):
            plan = Plan(step=step.digest(), allowed=given_.allowed, projected=given_.allowed, gaps=gaps)
            reckoned = PlanClock(step, lives_of(step), device).seconds(gaps)
            assert reckoned == pytest.approx(seconds(plan, step, device), rel=0.02)


# ---------------------------------------------------------------------- by name, and bad input


def test_it_plans_and_is_simulated_by_its_name() -> None:
    step = linear_step(8, nbytes=64 * UNIT)
    plan = spillway.plan(step, budget=0.5, method="window-improved")
    assert plan.projected <= plan.allowed
    ran = spillway.simulate(step, 0.5, "window-improved")
    assert ran.status == "ok"
    assert ran.seconds <= spillway.simulate(step, 0.5, "window").seconds
    assert ran.peak_bytes <= plan.allowed


def test_what_fits_needs_no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(what: str) -> None:
        raise UsageError(what)

    monkeypatch.setattr(improved, "load_solver", missing)
    step = linear_step(4)
    assert ImprovedWindow().plan(problem(step, step.plain_peak())).gaps == ()
    with pytest.raises(UsageError):
        ImprovedWindow().plan(problem(step, step.plain_peak() - UNIT))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ImprovedWindow(gaps="most"),  # type: ignore[arg-type]
        lambda: ImprovedWindow(chunk=0),
        lambda: ImprovedWindow(exempt=-1),
        lambda: ImprovedWindow(smallest=-1),
    ],
)
def test_arguments_that_make_no_sense_are_refused(make: Callable[[], ImprovedWindow]) -> None:
    with pytest.raises(UsageError):
        make()


def test_a_step_with_an_op_that_needs_more_is_refused_with_the_least_that_would_do() -> None:
    step = linear_step(4)
    with pytest.raises(BudgetInfeasible) as refused:
        ImprovedWindow().plan(problem(step, 3 * UNIT - 1))
    assert refused.value.smallest_budget == 3 * UNIT
    assert isinstance(ImprovedWindow().plan(problem(step, 3 * UNIT)).gaps[0], Gap)
