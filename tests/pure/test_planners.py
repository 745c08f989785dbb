"""Planners' plans verify and fit, or are refused with the number that would; each does what its paper does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spillway.calibration.named_device import device_of
from spillway.costs import Device
from spillway.errors import BudgetInfeasible, NoPlanFound, UsageError
from spillway.ir import Gap, Host, Kind, Phase, Plan, Recompute, Step, verify
from spillway.ir.account import account, comes_back
from spillway.ir.lives import lives_of
from spillway.ir.recipes import replayed
from spillway.methods import (
    METHODS,
    AbstractPlanner,
    Checkmate,
    Problem,
    SqrtN,
    Swap,
    ZeroOffload,
    resolve,
)
from spillway.methods.checkmate import lower_bound, seconds_of
from spillway.methods.planned import SelfPlanned
from spillway.methods.zero_offload import ON_HOST
from spillway.simulation.simulated_engine import simulate
from tests.pure.linear_graphs import linear_step
from tests.pure.training_steps import training_step

DEVICE = device_of("a100")
UNIT = 1 << 20
PLANNERS: dict[str, AbstractPlanner] = {
    "sqrt-n": SqrtN(),
    "greedy": SqrtN.greedy(),
    "swap": Swap(),
    "swap-prefetch": Swap.ahead(),
    "zero-offload": ZeroOffload(),
    "checkmate": Checkmate(time_limit=10, most_nodes=14),
}


def problem(step: Step, allowed: int, device: Device = DEVICE) -> Problem:
    return Problem(step=step, allowed=allowed, device=device)


def gap_at(plan: Plan, value: int) -> Gap:
    (found,) = [gap for gap in plan.gaps if gap.value == value]
    return found


def seconds_again(plan: Plan, step: Step) -> float:
    homes = [(gap.end, gap.value, gap.home) for gap in plan.gaps if isinstance(gap.home, Recompute)]
    return sum(step.ops[op].seconds or 0 for op in replayed(homes, step))


@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_verifies_within_its_budget_or_is_refused_with_one_that_works(name: str, seed: int) -> None:
    step = training_step(seed)
    for percent in (90, 60):
        allowed = step.plain_peak() * percent // 100
        try:
            plan = PLANNERS[name].plan(problem(step, allowed))
        except BudgetInfeasible as refused:
            assert refused.smallest_budget > allowed
            if not refused.exact:  # Checkmate knows a bound alone.
                continue
            allowed = refused.smallest_budget
            plan = PLANNERS[name].plan(problem(step, allowed))
            assert plan.projected == allowed
        except NoPlanFound:
            assert name == "checkmate"
            continue
        verify(plan, step, allowed)
        counted = account(step, plan.gaps, lives_of(step)).peak
        assert plan.projected == (allowed if name == "swap-prefetch" else counted)


@pytest.mark.parametrize("name", ["sqrt-n", "greedy", "swap", "zero-offload"])
def test_the_same_problem_has_the_same_plan(name: str) -> None:
    step = training_step(7)
    given = problem(step, 10**9)
    assert PLANNERS[name].plan(given) == PLANNERS[name].plan(given)


# sqrt(n)


def test_sqrt_n_keeps_every_fourth_of_sixteen_layers_and_the_last_segment() -> None:
    plan = SqrtN().plan(problem(linear_step(16), 10**9))
    # 15 candidates between the ops of the forward: op 0 makes value 1. k = 3: cut after ops 2, 5, 8, 11 and 14.
    assert sorted(gap.value for gap in plan.gaps) == [1, 2, 4, 5, 7, 8, 10, 11, 13, 14]
    assert {gap.end for gap in plan.gaps if gap.value in (4, 5)} == {32 - 5}
    assert gap_at(plan, 5).home == Recompute(ops=(4,))
    assert seconds_again(plan, linear_step(16)) == pytest.approx(10e-3)


def test_sqrt_n_brings_a_segment_back_as_a_whole_when_the_backward_reaches_it() -> None:
    plan = SqrtN().plan(problem(linear_step(12), 10**9))
    ends = {gap.value: gap.end for gap in plan.gaps}
    # Segments of three, and a last one that is kept.
    assert ends == {1: 22, 2: 22, 4: 19, 5: 19, 7: 16, 8: 16}


def test_the_searched_segment_budget_is_as_good_as_segments_by_count() -> None:
    step = linear_step(24)
    given = problem(step, 10**9)
    assert SqrtN.greedy().plan(given).projected < SqrtN().plan(given).projected < step.plain_peak() // 2


# Swapping


def test_swap_moves_what_the_backward_wants_from_its_last_use_to_its_next() -> None:
    plan = Swap().plan(problem(linear_step(4), 10**9))
    # Value k is read by the layer above, op k, and by its gradient, op 8 - k.
    assert {gap.value: (gap.start, gap.end, gap.home) for gap in plan.gaps} == {
        1: (2, 7, Host()),
        2: (3, 6, Host()),
        3: (4, 5, Host()),
    }


def test_swap_leaves_what_is_small() -> None:
    assert Swap(smallest=UNIT + 1).plan(problem(linear_step(4), 10**9)).gaps == ()


def test_what_autograd_says_it_keeps_is_what_is_swapped() -> None:
    step = replace(linear_step(4), saved=(2,))
    assert [gap.value for gap in Swap().plan(problem(step, 10**9)).gaps] == [2]


SLOW = replace(DEVICE, out_per_second=UNIT / 2e-3, in_per_second=UNIT / 2e-3, copy_seconds=0.0)
"""Copies take two ops of a linear step, each way."""


def test_prefetching_begins_where_the_copy_has_to_and_ends_where_it_is_done() -> None:
    plan = Swap.ahead().plan(problem(linear_step(8), 10**9, SLOW))
    # Out: value 1 after op 1 until op 4 begins, value 2 from there until op 6 begins, value 3 until op 8.
    assert [gap_at(plan, value).start for value in (1, 2, 3)] == [4, 6, 8]
    # In, backwards: value 1 is read by op 15, so its copy begins with op 13, that of value 2 two ops earlier.
    assert [gap_at(plan, value).end for value in (1, 2, 3)] == [13, 11, 9]
    # Value 4 would have to be on its way back before it has left.
    assert {gap.value for gap in plan.gaps} == {1, 2, 3}


def test_prefetching_waits_for_copies_where_the_budget_wants_it() -> None:
    step = linear_step(8)
    free = Swap.ahead().plan(problem(step, 10**9, SLOW))
    tight = Swap.ahead().plan(problem(step, Swap().plan(problem(step, 10**9)).projected, SLOW))
    verify(tight, step, tight.allowed)
    gone = {plan: sum(gap.end - gap.start for gap in plan.gaps) for plan in (free, tight)}
    assert gone[free] < gone[tight]


# Static offload


def test_zero_offload_has_state_and_gradients_away_but_for_the_update() -> None:
    step = training_step(3)
    plan = ZeroOffload().plan(problem(step, 10**9))
    kinds = {step.storages[step.values[gap.value].storage].kind for gap in plan.gaps}
    assert kinds == {Kind.OPTIMIZER_STATE, Kind.GRADIENT}
    lives = lives_of(step)
    update = next(op.number for op in step.ops if op.phase is Phase.OPTIMIZER)
    for storage in step.storages:
        if storage.kind is Kind.OPTIMIZER_STATE:
            before, after = (value.id for value in step.values if value.storage == storage.id)
            used = lives[before].reads[0]
            assert (gap_at(plan, before).start, gap_at(plan, before).end) == (0, used)
            if used + 1 < len(step.ops):
                assert gap_at(plan, after).end == len(step.ops)
    assert plan.projected < step.plain_peak()
    assert all(gap.end >= update for gap in plan.gaps)


def updated_on_the_host(seed: int, host_update: float = 1e9) -> tuple[Step, Step, int]:
    step = training_step(seed)
    return step, *ZeroOffload(host_update=host_update).as_run(step, DEVICE)


@pytest.mark.parametrize("seed", range(4))
def test_on_paper_the_host_updates_and_the_device_holds_no_state(seed: int) -> None:
    step, sent, moved = updated_on_the_host(seed)
    kinds = [{storage.kind for storage in one.storages} for one in (step, sent)]
    assert kinds[0] - kinds[1] == {Kind.OPTIMIZER_STATE}
    host = [op for op in sent.ops if op.phase is Phase.OPTIMIZER]
    assert [op.name for op in sent.ops if op not in host] == [
        op.name for op in step.ops if op.phase is not Phase.OPTIMIZER
    ]
    assert {op.name for op in host} == {ON_HOST}
    assert not any(op.reads for op in host)
    written = [sent.storages[sent.values[value].storage] for op in host for value in op.creates]
    assert {storage.kind for storage in written} == {Kind.PARAMETER}
    assert moved == sum(storage.nbytes for storage in written) > 0
    plan = ZeroOffload().plan(problem(sent, 10**9))
    verify(plan, sent, plan.allowed)
    assert {sent.storages[sent.values[gap.value].storage].kind for gap in plan.gaps} == {Kind.GRADIENT}
    assert plan.remark == ""
    assert plan.projected < step.plain_peak()


def test_the_hosts_update_runs_beside_the_copies_in_of_what_it_has_updated() -> None:
    step, slow, moved = updated_on_the_host(3, 1e6)
    _, quick, _ = updated_on_the_host(3, 1e18)
    parameters = [storage.nbytes for storage in step.storages if storage.kind is Kind.PARAMETER]
    assert sum(parameters) == moved
    seconds = [sum(op.seconds or 0 for op in sent.ops if op.name == ON_HOST) for sent in (slow, quick)]
    # A slow host hides all copies but the last; a quick one leaves the copies alone.
    (last,) = slow.ops[-1].creates
    nbytes = slow.storages[slow.values[last].storage].nbytes
    calls = len(parameters) * DEVICE.op_seconds
    assert seconds[0] == pytest.approx(calls + moved / 1e6 + DEVICE.in_seconds(nbytes))
    assert seconds[1] == pytest.approx(DEVICE.op_seconds + sum(map(DEVICE.in_seconds, parameters)))


def test_a_simulated_step_takes_as_long_as_the_host_and_counts_what_comes_in() -> None:
    step = training_step(3)
    quick, slow = (
        simulate(step, allowed=10**9, method=ZeroOffload(host_update=rate), device=DEVICE) for rate in (1e18, 1e5)
    )
    _, moved = ZeroOffload().as_run(step, DEVICE)
    assert quick.status == slow.status == "ok"
    assert slow.seconds - quick.seconds == pytest.approx(moved / 1e5, rel=0.01)
    assert quick.bytes_in == moved
    assert quick.bytes_out == sum(storage.nbytes for storage in step.storages if storage.kind is Kind.GRADIENT)
    assert quick.peak_bytes < step.plain_peak()


def test_without_an_optimizer_nothing_is_sent_and_a_plan_of_the_recorded_step_says_what_it_cannot() -> None:
    step = linear_step(4)
    assert ZeroOffload().as_run(step, DEVICE) == (step, 0)
    assert ZeroOffload().plan(problem(step, 10**9)).remark == ""
    assert ZeroOffload().plan(problem(training_step(1), 10**9)).remark.startswith("The update runs on the device")
    with pytest.raises(UsageError, match="more than 0 bytes a second"):
        ZeroOffload(host_update=0)


# Checkmate


@pytest.mark.parametrize(("layers", "units", "again"), [(4, 4, 3), (8, 7, 3), (8, 5, 7)])
def test_checkmate_recomputes_as_little_as_there_is_to_recompute(layers: int, units: int, again: int) -> None:
    step = linear_step(layers)
    given = problem(step, units * UNIT)
    plan = Checkmate(time_limit=60, most_nodes=20).plan(given)
    verify(plan, step, given.allowed)
    seconds = seconds_of(step, lives_of(step), plan.gaps)
    assert seconds == pytest.approx((2 * layers + 1 + again) * 1e-3)
    assert lower_bound(given) <= seconds * (1 + 1e-6)


def lingering(layers: int) -> Step:
    """Linear layers whose activations outlive their last reader by an op, as what autograd keeps does."""
    step = linear_step(layers)
    activations = [replace(s, alive_until=min(s.alive_until + 1, len(step.ops))) for s in step.storages]
    return replace(step, storages=tuple(activations))


def test_checkmate_lets_go_early_only_where_the_budget_needs_it() -> None:
    step = lingering(16)
    lives = lives_of(step)
    for share in (0.75, 0.5):
        allowed = int(step.plain_peak() * share)
        plan = Checkmate(time_limit=20, most_nodes=100).plan(problem(step, allowed))
        verify(plan, step, allowed)
        for early in (gap for gap in plan.gaps if not comes_back(gap, lives[gap.value], len(step.ops))):
            assert account(step, [gap for gap in plan.gaps if gap != early], lives).peak > allowed


def test_checkmate_leaves_a_step_alone_that_fits() -> None:
    step = linear_step(4)
    assert Checkmate().plan(problem(step, step.plain_peak())).gaps == ()


def test_checkmate_says_what_its_largest_node_needs() -> None:
    with pytest.raises(BudgetInfeasible) as caught:
        Checkmate().plan(problem(linear_step(4), 3 * UNIT))
    assert caught.value.smallest_budget == 4 * UNIT
    with pytest.raises(BudgetInfeasible):
        lower_bound(problem(linear_step(4), 3 * UNIT))


def test_checkmate_without_scipy_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "scipy", None)
    with pytest.raises(UsageError, match=r"Checkmate needs SciPy.*pip install 'torch-spillway\[plan\]'"):
        Checkmate().plan(problem(linear_step(4), 5 * UNIT))


# Names


@pytest.mark.parametrize(
    "name", [name for name, one in METHODS.items() if one.plans and not (one.by_block or one.in_session)]
)
def test_a_planner_by_name_or_as_it_is_follows_its_own_plans_in_a_session(name: str) -> None:
    made = METHODS[name].on_paper()
    assert made.name == name
    by_name, as_it_is = resolve(name), resolve(made)
    assert isinstance(by_name, SelfPlanned)
    assert isinstance(as_it_is, SelfPlanned)
    assert by_name.name == as_it_is.name == name
    assert as_it_is.planner is made is not by_name.planner
    assert by_name.follows
    assert by_name.uses_recipes == by_name.planner.uses_recipes


def test_planners_that_never_recompute_say_so() -> None:
    asked = {name: METHODS[name].on_paper() for name, one in METHODS.items() if one.plans}
    moving = {name for name, one in asked.items() if not one.uses_recipes}
    assert moving == {
        "dynn-offload", "dynn-offload-published", "lms", "swap", "swap-prefetch", "window", "window-published",
        "zero-offload",
    }  # fmt: skip
