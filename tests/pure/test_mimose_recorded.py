"""Mimose's plans for recorded steps, and every block recomputed: they hold, or name the budget that would do."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway.calibration.named_device import device_of
from spillway.errors import BudgetInfeasible
from spillway.ir import Kind, Plan, Step, verify
from spillway.ir.account import account
from spillway.ir.block_calls import block_calls
from spillway.ir.lives import lives_of
from spillway.methods.base import AbstractPlanner, Problem
from spillway.methods.by_block import Forecast
from spillway.methods.checkpoint import CheckpointPlanner
from spillway.methods.mimose import Mimose, Options
from spillway.methods.mimose.peaks import outside
from spillway.methods.mimose.planner import Measured, MimosePlanner, gaps_of, measured, revoked
from spillway.simulation.simulated_engine import simulate
from tests.pure.block_steps import BACKWARD, FORWARD, UNIT, Named, block, blocks_step
from tests.pure.moments import simulate as peak_of
from tests.pure.recorded import layers

DEVICE = device_of("a100")
NO_RESERVE = Options.as_published(reserve=0)
PLANNERS: dict[str, AbstractPlanner] = {
    "mimose": MimosePlanner(),
    "mimose-published": MimosePlanner.as_published(NO_RESERVE),
    "checkpoint": CheckpointPlanner(),
}


def plan(planner: AbstractPlanner, step: Step, allowed: int) -> Plan:
    return planner.plan(Problem(step=step, allowed=allowed, device=DEVICE))


def recomputed(step: Step, found: Plan) -> list[int]:
    values = {gap.value for gap in found.gaps}
    calls = block_calls(step)
    chosen = [number for number, call in enumerate(calls) if {gap.value for gap in call.gaps} <= values]
    assert len(found.gaps) == sum(len(calls[number].gaps) for number in chosen)
    return chosen


def least(step: Step) -> int:
    """The peak with every block recomputed."""
    return account(step, gaps_of(block_calls(step), range(99)), lives_of(step)).peak


UNEVEN = st.lists(st.integers(1, 5), min_size=2, max_size=5)


@pytest.mark.parametrize("name", PLANNERS)
@settings(max_examples=8, deadline=None)
@given(units=UNEVEN, share=st.floats(0, 1), batches=st.integers(1, 2))
def test_a_plan_verifies_within_its_budget_or_is_refused_with_one_that_works(
    name: str, units: list[int], share: float, batches: int
) -> None:
    step = blocks_step(len(units), units=units, batches=batches)
    allowed = int(step.plain_peak() * share)
    try:
        found = plan(PLANNERS[name], step, allowed)
    except BudgetInfeasible as refused:
        assert refused.exact
        assert refused.smallest_budget >= refused.needed > allowed
        allowed = refused.smallest_budget
        found = plan(PLANNERS[name], step, allowed)
    verify(found, step, allowed)
    assert found.projected == account(step, found.gaps, lives_of(step)).peak <= allowed
    recomputed(step, found)


@pytest.mark.parametrize("batches", [1, 2])
def test_the_default_uses_every_budget_down_to_that_of_every_block(batches: int) -> None:
    step = blocks_step(4, units=[1, 3, 2, 2], batches=batches)
    floor, plain = least(step), step.plain_peak()
    assert floor < plain
    seconds = []
    for allowed in range(plain, floor - 1, -UNIT // 2):
        found = plan(MimosePlanner(), step, allowed)
        seconds.append(sum(block_calls(step)[number].seconds for number in recomputed(step, found)))
    assert seconds[0] == 0
    with pytest.raises(BudgetInfeasible) as caught:
        plan(MimosePlanner(), step, floor - 1)
    assert caught.value.smallest_budget == floor


def test_as_much_is_recomputed_as_it_takes_and_early_blocks_first() -> None:
    step = blocks_step(6)
    plain = step.plain_peak()
    assert recomputed(step, plan(MimosePlanner(), step, plain)) == []
    assert recomputed(step, plan(MimosePlanner(), step, plain - UNIT)) == [0]
    assert recomputed(step, plan(MimosePlanner(), step, plain - 4 * UNIT)) == [0, 1]


def test_algorithm_1_keeps_its_reserve_even_where_all_would_fit_and_sees_no_peak_of_the_backward() -> None:
    step = blocks_step(6)
    plain = step.plain_peak()
    reserved = MimosePlanner.as_published(Options.as_published(reserve=4 * UNIT))
    assert recomputed(step, plan(reserved, step, plain)) != []
    # The last block's return raises the collecting step's peak, and Algorithm 1 adds its bytes on top of that.
    (found,) = measured(step)
    unaware = found.step.peak + sum(block.nbytes for block in found.blocks) + found.start
    assert unaware > plain
    assert len(recomputed(step, plan(PLANNERS["mimose-published"], step, plain))) == -(-(unaware - plain) // (3 * UNIT))


def test_a_published_plan_that_passes_the_budget_is_refused() -> None:
    # One large block at the end: recomputing it covers the excess by the listing, and lowers nothing.
    step = blocks_step(4, units=[1, 1, 1, 8])
    floor = least(step)
    with pytest.raises(BudgetInfeasible) as caught:
        plan(PLANNERS["mimose-published"], step, floor - 1)
    assert caught.value.smallest_budget >= floor


def too_low(*arguments: Any, **options: Any) -> list[Measured]:
    """What is measured, but for all that no block saves."""
    return [
        replace(
            part,
            step=replace(part.step, peak=0, turn_peak=0, backward_peak=0),
            blocks=tuple(replace(block, working=0) for block in part.blocks),
        )
        for part in measured(*arguments, **options)
    ]


def test_the_budget_that_a_refusal_names_is_the_smallest_whose_own_plan_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spillway.methods.mimose.planner.measured", too_low)
    planner, step = PLANNERS["mimose-published"], blocks_step(4, units=[2, 6, 1, 1])
    with pytest.raises(BudgetInfeasible) as caught:
        plan(planner, step, step.plain_peak() // 2)
    assert caught.value.needed < caught.value.smallest_budget <= step.plain_peak()
    verify(plan(planner, step, caught.value.smallest_budget), step, caught.value.smallest_budget)
    with pytest.raises(BudgetInfeasible):
        plan(planner, step, caught.value.smallest_budget - 1)


@pytest.mark.parametrize("name", ["mimose", "mimose-published"])
def test_blocks_that_come_back_before_the_same_op_are_planned(name: str) -> None:
    recorder, kept = Named(), []
    (x,) = recorder.run("embedding", FORWARD, [recorder.source(UNIT, Kind.PARAMETER)], [UNIT])
    for number in range(3):
        x, wanted = block(recorder, f"layers.{number}", x)
        kept.append(wanted)
    (gradient,) = recorder.run("", FORWARD, [x], [64])
    (gradient,) = recorder.run("", BACKWARD, [gradient], [UNIT], kind=Kind.TEMPORARY)
    (gradient,) = recorder.run("", BACKWARD, [gradient, *kept[2], *kept[1]], [UNIT], kind=Kind.TEMPORARY)
    recorder.run("layers.0", BACKWARD, [gradient, *kept[0]], [UNIT], kind=Kind.GRADIENT)
    step = recorder.finished()
    assert [call.returns for call in block_calls(step)] == [19, 18, 18]
    allowed = step.plain_peak() - 1
    verify(plan(PLANNERS[name], step, allowed), step, allowed)


def test_a_plan_that_was_too_hopeful_gives_up_blocks_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    step = blocks_step(5)
    allowed = step.plain_peak() - 5 * UNIT
    honest = recomputed(step, plan(MimosePlanner(), step, allowed))
    monkeypatch.setattr("spillway.methods.mimose.planner.measured", too_low)
    found = plan(MimosePlanner(), step, allowed)
    verify(found, step, allowed)
    assert recomputed(step, found) == honest == [0, 1]
    with pytest.raises(BudgetInfeasible):  # nobody looks at the published plan once more
        plan(PLANNERS["mimose-published"], step, allowed)


def test_what_is_measured_makes_a_forecast_that_is_never_below_the_account() -> None:
    step = blocks_step(4, units=[2, 1, 4, 2])
    lives, calls = lives_of(step), block_calls(step)
    (found,) = measured(step)
    saved = [block.nbytes for block in found.blocks]
    assert saved == [call.nbytes for call in calls]
    forecast = Forecast(
        saved=saved, seconds=[1.0] * 4, turn=0, rest=0, working=[block.working for block in found.blocks],
        gradients=[block.gradients for block in found.blocks],
    )  # fmt: skip
    assert found.step.turn_peak is not None
    assert found.step.backward_peak is not None
    turn, rest = outside(forecast, range(4), found.step.turn_peak, found.step.backward_peak)
    forecast = Forecast(
        saved=saved, seconds=[1.0] * 4, turn=turn, rest=rest, working=forecast.working, gradients=forecast.gradients
    )  # fmt: skip
    for count in range(5):
        for chosen in combinations(range(4), count):
            true = account(step, gaps_of(calls, chosen), lives).peak - found.start
            assert true <= peak_of(forecast, chosen).nbytes <= true + 2 * UNIT, chosen
    assert peak_of(forecast, range(4)).nbytes == found.step.peak


def test_micro_batches_are_measured_and_planned_one_by_one() -> None:
    single, double = blocks_step(4), blocks_step(4, batches=2)
    (alone,), both = measured(single), measured(double)
    assert [part.blocks for part in both] == [alone.blocks, alone.blocks]
    assert both[0].start == alone.start
    # The gradients of the first are there when the second begins.
    assert both[1].start == alone.start + 4 * (UNIT // 4)
    room = double.plain_peak() - 4 * UNIT
    chosen = recomputed(double, plan(PLANNERS["mimose-published"], double, room))
    first, second = [number for number in chosen if number < 4], [number - 4 for number in chosen if number >= 4]
    assert 0 < len(first) <= len(second) < 4
    assert set(first) <= set(second)
    room = double.plain_peak() - UNIT
    assert recomputed(double, plan(MimosePlanner(), double, room)) in ([4], [0, 4])


def test_samples_of_several_sizes_plan_a_size_that_was_not_measured() -> None:
    def at(size: int) -> tuple[Step, Measured]:
        step = blocks_step(4, units=[size] * 4)
        (found,) = measured(step, (size,))
        return step, found

    mimose = Mimose()
    for size in (2, 3, 5, 7, 8):
        found = at(size)[1]
        mimose.end(found.step, found.blocks)
    step, found = at(6)
    assert [mimose.nbytes(block, (6,)) for block in range(4)] == [block.nbytes for block in found.blocks]
    chosen = mimose.plan((6,), step.plain_peak() - UNIT - found.start).given_up
    assert account(step, gaps_of(block_calls(step), chosen), lives_of(step)).peak <= step.plain_peak() - UNIT


def test_blocks_are_given_up_until_the_step_fits() -> None:
    step = blocks_step(5)
    lives, calls = lives_of(step), block_calls(step)
    assert revoked(step, lives, calls, (), step.plain_peak()) == frozenset()
    assert revoked(step, lives, calls, {4}, step.plain_peak() - UNIT) == {0, 4}
    assert revoked(step, lives, calls, (), 0) >= {0, 1, 2, 3}


def test_every_block_recomputed_is_what_checkpointing_every_block_is() -> None:
    step = blocks_step(3)
    found = plan(CheckpointPlanner(), step, 10**9)
    assert recomputed(step, found) == [0, 1, 2]
    done = simulate(step, allowed=found.projected, method=CheckpointPlanner(), device=DEVICE)
    assert (done.recomputed_ops, done.bytes_out) == (12, 0)
    with pytest.raises(BudgetInfeasible) as caught:
        plan(CheckpointPlanner(), step, found.projected - 1)
    assert caught.value.smallest_budget == found.projected


@pytest.mark.parametrize("name", PLANNERS)
def test_a_step_without_blocks_stays_as_it_is(name: str) -> None:
    step = layers(8)
    assert plan(PLANNERS[name], step, step.plain_peak()).gaps == ()
    with pytest.raises(BudgetInfeasible) as caught:
        plan(PLANNERS[name], step, step.plain_peak() - 1)
    assert caught.value.smallest_budget == step.plain_peak()


def test_planners_have_the_names_that_they_will_be_chosen_by() -> None:
    made = [MimosePlanner(), MimosePlanner.as_published(), CheckpointPlanner()]
    assert [planner.name for planner in made] == ["mimose", "mimose-published", "checkpoint"]
