"""`auto` on recorded steps: plans hold, are no slower than those of other block methods, and say what they are."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spillway
from spillway.advisor.offload_rule import offload_rules
from spillway.calibration.named_device import device_of
from spillway.costs import Device
from spillway.errors import BudgetInfeasible
from spillway.ir import Host, Kind, Phase, Plan, Recompute, Step, verify
from spillway.ir.account import account
from spillway.ir.block_calls import block_calls
from spillway.ir.lives import lives_of
from spillway.methods import METHODS, Problem
from spillway.methods.actions import Action
from spillway.methods.auto.on_paper import AutoPlanner, Choices
from spillway.methods.auto.recorded_blocks import Blocks, problems
from spillway.methods.checkpoint import CheckpointPlanner
from spillway.methods.mimose.planner import MimosePlanner
from spillway.methods.plan_clock import PlanClock
from spillway.methods.window import Window
from spillway.simulation.simulated_engine import simulate
from tests.pure.block_steps import BACKWARD, FORWARD, UNIT, Named, blocks_step
from tests.pure.linear_graphs import linear_step

DEVICE = replace(device_of("a100"), copy_seconds=0.0)


BY_WINDOW = "planned value by value, by window, as a session does where lru proves slower"


def linked(seconds: float) -> Device:
    """A device that takes so long to copy a MiB, either way."""
    return replace(DEVICE, out_per_second=UNIT / seconds, in_per_second=UNIT / seconds)


def problem(step: Step, allowed: int, device: Device = DEVICE) -> Problem:
    return Problem(step=step, allowed=allowed, device=device)


def planned(step: Step, allowed: int, device: Device = DEVICE) -> Plan:
    return AutoPlanner().plan(problem(step, allowed, device))


def chosen(step: Step, allowed: int, device: Device) -> tuple[Action, ...]:
    found = Choices(problem(step, allowed, device)).fastest()
    assert found is not None
    return found


UNEVEN = st.lists(st.integers(1, 5), min_size=2, max_size=5)
LINKS = st.sampled_from((1e-5, 1e-3, 1e-2))


@settings(max_examples=20, deadline=None)
@given(units=UNEVEN, share=st.floats(0, 1), batches=st.integers(1, 2), link=LINKS, fallback=st.booleans())
def test_a_plan_verifies_within_its_budget_or_is_refused_with_one_that_works(
    units: list[int], share: float, batches: int, link: float, fallback: bool
) -> None:
    step = blocks_step(len(units), units=units, batches=batches)
    planner = AutoPlanner((Window(),) if fallback else ())
    given_ = problem(step, int(share * step.plain_peak()), linked(link))
    try:
        plan = planner.plan(given_)
    except BudgetInfeasible as refused:
        assert refused.smallest_budget > given_.allowed
        given_ = replace(given_, allowed=refused.smallest_budget)
        plan = planner.plan(given_)
    verify(plan, step, given_.allowed)
    assert plan == planner.plan(given_)


@settings(max_examples=15, deadline=None)
@given(units=UNEVEN, share=st.floats(0.3, 1), link=LINKS)
def test_it_is_never_slower_than_the_other_planners_of_blocks(units: list[int], share: float, link: float) -> None:
    step, device = blocks_step(len(units), units=units), linked(link)
    given_ = problem(step, int(share * step.plain_peak()), device)
    clock = PlanClock(step, lives_of(step), device)
    for other in (MimosePlanner(), CheckpointPlanner()):
        try:
            least = clock.seconds(other.plan(given_).gaps)
        except BudgetInfeasible:
            continue
        assert clock.seconds(AutoPlanner().plan(given_).gaps) <= least * (1 + 1e-6)


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("link", [1e-5, 1e-3, 5e-3])
@pytest.mark.parametrize("overlaps", [True, False])
def test_the_clock_that_it_decides_by_is_the_simulated_engine(share: float, link: float, overlaps: bool) -> None:
    step, device = blocks_step(6, units=[2] * 6), replace(linked(link), overlaps=overlaps, duplex=overlaps)
    budget = int(share * step.plain_peak())
    plan = planned(step, budget, device)
    ran = simulate(step, allowed=budget, method=AutoPlanner(), device=device)
    assert (ran.status, ran.remark) == ("ok", plan.remark)
    assert ran.peak_bytes <= budget
    assert PlanClock(step, lives_of(step), device).seconds(plan.gaps) == pytest.approx(ran.seconds, rel=0.02)


def test_what_fits_is_left_alone() -> None:
    step = blocks_step(4)
    assert planned(step, step.plain_peak()).gaps == ()


def test_a_fast_link_moves_for_nothing_and_a_slow_one_recomputes() -> None:
    step = blocks_step(6, units=[3] * 6)
    budget, plain = int(0.7 * step.plain_peak()), sum(op.seconds or 0.0 for op in step.ops)
    fast, slow = linked(1e-6), linked(1.0)
    assert PlanClock(step, lives_of(step), fast).seconds(planned(step, budget, fast).gaps) == pytest.approx(plain)
    assert set(chosen(step, budget, fast)) <= {Action.KEEP, Action.OFFLOAD}
    assert set(chosen(step, budget, slow)) == {Action.KEEP, Action.RECOMPUTE}
    assert all(isinstance(gap.home, Recompute) for gap in planned(step, budget, slow).gaps)


def test_gaps_are_from_the_last_use_to_the_next() -> None:
    """The embedding is op 0, the first block ops 1 to 5, and its backward ops 15 to 17."""
    blocks = Blocks(blocks_step(2))
    gaps = blocks.gaps((Action.OFFLOAD, Action.KEEP))
    expected = {1: (6, 15), 3: (5, 16), 4: (5, 16), 5: (6, 15)}
    assert {gap.value: (gap.start, gap.end) for gap in gaps} == expected
    assert {gap.home for gap in gaps} == {Host()}
    assert blocks.ways[0][Action.OFFLOAD].gone == blocks.nbytes(expected) == 4 * UNIT


def test_the_account_of_a_choice_is_the_problems_peak() -> None:
    """With room for nothing else, what the problem says that a choice needs is what the step needs."""
    step = blocks_step(5, units=[2] * 5)
    blocks = Blocks(step)
    ((asked, calls),) = problems(blocks, step.plain_peak(), DEVICE)
    start = step.plain_peak() - asked.available
    for action in (Action.KEEP, Action.RECOMPUTE, Action.RECOMPUTE_OFFLOADED, Action.OFFLOAD):
        options = [
            next((one for one in block.options if one.action is action), block.options[0]) for block in asked.blocks
        ]
        held, most, gradients = 0, 0, sum(block.gradients for block in asked.blocks)
        for block, option in zip(asked.blocks, options, strict=True):
            most = max(most, held + option.forward_peak, held + gradients + option.backward_peak)
            held, gradients = held + option.resident, gradients - block.gradients
        counted = account(step, blocks.gaps(blocks.everywhere(action)), blocks.lives)
        assert start + most == counted.peak
    assert [call for call in calls if call is not None] == list(range(5))


def test_blocks_of_equal_numbers_are_of_one_kind() -> None:
    ((asked, calls),) = problems(Blocks(blocks_step(6)), 10**9, DEVICE)
    kinds = [block.kind for block, call in zip(asked.blocks, calls, strict=True) if call is not None]
    assert len(set(kinds[1:-1])) == 1


def test_every_micro_batch_is_a_problem_of_its_own() -> None:
    step = blocks_step(3, batches=2)
    found = problems(Blocks(step), step.plain_peak(), DEVICE)
    assert [[call for call in calls if call is not None] for _, calls in found] == [[0, 1, 2], [3, 4, 5]]
    assert found[1][0].available < found[0][0].available  # gradients of the first are there


# ---------------------------------------------------------------------- selective


def products(depth: int) -> Step:
    """Blocks of a product of matrices, what is made of it elementwise, and another product."""
    recorder = Named()
    weights = recorder.source(UNIT, Kind.PARAMETER)
    (x,) = recorder.run("embedding", FORWARD, [weights], [UNIT])
    kept = []
    for number in range(depth):
        name = f"layers.{number}"
        (product,) = recorder.run(f"{name}.a.mm", FORWARD, [x, weights], [4 * UNIT], seconds=8e-3)
        (bent,) = recorder.run(f"{name}.a.gelu", FORWARD, [product], [4 * UNIT], seconds=1e-4)
        (back,) = recorder.run(f"{name}.b.mm", FORWARD, [bent, weights], [UNIT], seconds=8e-3)
        kept.append((name, x, product, bent))
        (x,) = recorder.run(name, FORWARD, [back, x], [UNIT], seconds=1e-4)
    (gradient,) = recorder.run("", FORWARD, [x], [64])
    gradients = []
    for name, before, product, bent in reversed(kept):
        (inner,) = recorder.run(f"{name}.b.mm", BACKWARD, [gradient, bent], [4 * UNIT], kind=Kind.TEMPORARY)
        (bend,) = recorder.run(f"{name}.a.gelu", BACKWARD, [inner, product], [4 * UNIT], kind=Kind.TEMPORARY)
        gradients += recorder.run(name, BACKWARD, [bend, before], [UNIT // 4], kind=Kind.GRADIENT)
        (gradient,) = recorder.run(f"{name}.a.mm", BACKWARD, [bend], [UNIT], kind=Kind.TEMPORARY)
    recorder.modules.append("")
    recorder.op("adam_", Phase.OPTIMIZER, [weights, *gradients], [], writes=(weights,))
    return recorder.finished()


def test_a_selective_block_keeps_what_took_an_expensive_op_and_makes_the_rest_again() -> None:
    blocks = Blocks(products(3))
    way = blocks.ways[1][Action.SELECTIVE]
    (gap,) = way.again
    assert isinstance(gap.home, Recompute)
    assert [blocks.step.ops[op].name for op in gap.home.ops] == ["aten.gelu.default"]
    assert (way.gone, way.seconds) == (4 * UNIT, pytest.approx(1e-4))
    offloaded = blocks.ways[1][Action.SELECTIVE_OFFLOADED]
    assert (offloaded.gone, offloaded.away) == (9 * UNIT, 5 * UNIT)
    assert set(chosen(blocks.step, int(0.8 * blocks.step.plain_peak()), linked(1.0))) == {
        Action.KEEP, Action.SELECTIVE
    }  # fmt: skip


# ---------------------------------------------------------------------- what a block is called with


def upcast(depth: int) -> Step:
    """Blocks that save a copy of what they are called with, and not that itself, as RMSNorm in fp32 does."""
    recorder = Named()
    weights = recorder.source(UNIT, Kind.PARAMETER)
    (x,) = recorder.run("embedding", FORWARD, [weights], [UNIT])
    kept = []
    for number in range(depth):
        name = f"layers.{number}"
        (copy,) = recorder.run(f"{name}.norm.cast", FORWARD, [x], [2 * UNIT])
        (inner,) = recorder.run(f"{name}.mlp.up", FORWARD, [copy], [4 * UNIT])
        (added,) = recorder.run(name, FORWARD, [inner, x], [UNIT])
        kept.append((name, copy, inner))
        x = added
    (gradient,) = recorder.run("", FORWARD, [x], [64])
    for name, copy, inner in reversed(kept):
        (gradient,) = recorder.run(name, BACKWARD, [gradient, copy, inner], [UNIT], kind=Kind.TEMPORARY)
    return recorder.finished()


def test_a_block_is_recomputed_from_its_input_which_is_held_and_not_from_earlier_blocks() -> None:
    step = upcast(4)
    calls = block_calls(step)
    for call in calls[1:]:
        homes = {gap.home for gap in call.gaps}
        (home,) = homes
        assert isinstance(home, Recompute)
        assert set(home.ops) <= set(call.ops)
        assert [step.values[value].storage for value in home.held]
    plan = CheckpointPlanner().plan(problem(step, step.plain_peak()))
    verify(plan, step, step.plain_peak())
    assert all(before.ops < after.ops for before, after in pairwise(calls))


# ---------------------------------------------------------------------- what is left to others


def test_a_step_without_blocks_is_planned_by_others_who_are_named() -> None:
    step = linear_step(8, nbytes=64 * UNIT)
    budget = int(0.6 * step.plain_peak())
    plan = AutoPlanner((Window(),)).plan(problem(step, budget))
    verify(plan, step, budget)
    assert plan.remark == f"No modules repeat, so there are no blocks: {BY_WINDOW}."
    with pytest.raises(BudgetInfeasible) as refused:
        planned(step, budget)
    assert (refused.value.smallest_budget, refused.value.exact) == (step.plain_peak(), False)


def test_a_budget_below_every_choice_of_blocks_is_left_to_others_too() -> None:
    step = blocks_step(4)
    least = Choices(problem(step, step.plain_peak())).least().peak
    with pytest.raises(BudgetInfeasible) as refused:
        planned(step, least - UNIT)
    assert refused.value.smallest_budget == least
    verify(planned(step, least), step, least)
    plan = AutoPlanner((Window(),)).plan(problem(step, least - UNIT))
    verify(plan, step, least - UNIT)
    assert plan.remark == f"No choice of blocks fits: {BY_WINDOW}."


def test_it_has_its_name_and_says_what_becomes_of_blocks() -> None:
    step = blocks_step(6, units=[2] * 6)
    plan = spillway.plan(step, budget=0.8, method="auto")
    assert plan.remark.startswith("Of 6 blocks, ")
    assert METHODS["auto"].plans
    assert spillway.simulate(step, 0.8, "auto").remark == plan.remark


# ---------------------------------------------------------------------- offload or recompute


@pytest.mark.parametrize(
    ("link", "said"),
    [
        (1e-4, "offload everything, which hides behind compute, and recompute nothing"),
        (2.5e-3, "offloading all still takes less than recomputing all, and a mixture less than either"),
        (1e-1, "recomputing all takes less than offloading all, and a mixture less than either"),
    ],
)
def test_the_rule_follows_the_link(link: float, said: str) -> None:
    (rule, *_) = offload_rules(products(4), linked(link))
    phi = rule.phi[Action.OFFLOAD]
    assert phi == pytest.approx(rule.seconds / (link * rule.moved[Action.OFFLOAD] / UNIT))
    assert said in rule.sentence()
    assert rule.to_json()["phi"]["offload"] == phi


def test_there_is_no_rule_without_blocks() -> None:
    assert offload_rules(linear_step(8, nbytes=UNIT), DEVICE) == []
