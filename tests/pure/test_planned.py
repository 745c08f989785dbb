"""A plan that is followed: on the machine on paper it needs what it projects, whatever the plan."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import replace

import pytest
from hypothesis import given, settings

from spillway.costs.device import Device
from spillway.errors import UsageError
from spillway.ir import Change, Gap, Host, Lane, Phase, Plan, Recompute, Step, verify
from spillway.methods.base import MemoryView, Proposal
from spillway.methods.planned import Planned
from spillway.simulation.simulated_engine import simulate
from spillway.units import Bytes
from tests.pure.recorded import DEVICE, LAYER, layers
from tests.pure.test_ir_properties import PLENTY, Machine, plan_of, steps_with_plans, verdict
from tests.pure.training_steps import Recorder


def timed(step: Step) -> Step:
    return replace(step, ops=tuple(replace(op, seconds=1e-3) for op in step.ops))


def told(step: Step, *gaps: Gap, projected: Bytes | None = None) -> Plan:
    """A plan that projects what it needs."""
    plan = replace(plan_of(step, list(gaps)), projected=PLENTY)
    if projected is None:
        machine = Machine(step=step, plan=plan)
        machine.run()
        projected = machine.peak
    plan = replace(plan, projected=projected, allowed=projected)
    verify(plan, step, projected)
    return plan


def never_relieved(plan: Plan, step: Step) -> Planned:
    """What fails if the plan alone does not keep the budget."""

    def relieve(view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        raise AssertionError(f"{needed} bytes are needed beyond the plan")
        yield

    planned = Planned(plan, step)
    planned.relieve = relieve  # type: ignore[method-assign]
    return planned


def beside_others(plan: Plan) -> int:
    """What values need that come back before the same op: in another order a replay stands beside one more of them."""
    recipes = [gap for gap in plan.gaps if isinstance(gap.home, Recompute)]
    together = [gap.home for gap in recipes if sum(other.end == gap.end for other in recipes) > 1]
    return max((home.temporaries for home in together if isinstance(home, Recompute)), default=0)


@settings(max_examples=200, deadline=None)
@given(steps_with_plans())
def test_a_verified_plan_needs_no_more_than_it_projects(case: tuple[Step, Plan]) -> None:
    step, plan = timed(case[0]), case[1]
    if verdict(plan, step) is not None:
        return
    machine = Machine(step=step, plan=plan)
    machine.run()
    plan = replace(plan, projected=machine.peak + beside_others(plan))
    policy = never_relieved(plan, step)
    ran = simulate(step, allowed=plan.projected, method=policy, device=DEVICE)
    assert (ran.status, policy.diverged) == ("ok", None)
    assert ran.timeline.peak() <= ran.peak_bytes == ran.reserved_bytes <= plan.projected
    if not any(isinstance(gap.home, Recompute) for gap in plan.gaps):
        assert ran.peak_bytes == machine.peak


def test_what_is_only_written_over_comes_back_without_temporaries_of_a_replay() -> None:
    recorder = Recorder()
    written, _ = recorder.op("two", Phase.FORWARD, [], [LAYER, LAYER])
    recorder.op("nothing", Phase.FORWARD, [], [])
    recorder.op("fill_", Phase.FORWARD, [], [], writes=(written,))
    step = timed(recorder.step({written}))
    plan = told(step, Gap(value=0, start=1, end=2, home=Recompute(ops=(0,), temporaries=0)))
    policy = never_relieved(plan, step)
    ran = simulate(step, allowed=plan.projected, method=policy, device=DEVICE)
    assert (ran.status, ran.drops, ran.moves) == ("ok", 0, 1)


DEEP = layers(16)
ENDS = len(DEEP.ops)


def idle(layer: int, home: Host | Recompute) -> Gap:
    """The gap of a layer's result, from its only reader in the forward to its reader in the backward."""
    return Gap(value=layer, start=layer + 1, end=ENDS - layer, home=home)


def test_a_plan_that_moves_hides_its_copies_and_keeps_its_peak() -> None:
    plan = told(DEEP, *(idle(layer, Host()) for layer in range(1, 13)))
    ran = simulate(DEEP, allowed=plan.projected, method=plan, device=DEVICE)
    at_once = simulate(DEEP, allowed=plan.projected, method=Planned(plan, DEEP, ahead=0), device=DEVICE)
    assert ran.peak_bytes == at_once.peak_bytes == plan.projected < DEEP.plain_peak()
    assert (ran.bytes_out, ran.bytes_in) == (12 * LAYER, 12 * LAYER)
    assert at_once.hidden_seconds == 0
    assert ran.hidden_seconds > 0
    assert ran.seconds < at_once.seconds


def test_copies_in_begin_before_they_are_wanted_where_there_is_room() -> None:
    gaps = [idle(layer, Host()) for layer in range(1, 5)]
    plan = told(DEEP, *gaps)
    ran = simulate(DEEP, allowed=DEEP.plain_peak(), method=plan, device=DEVICE)
    fetched = [span for span in ran.timeline.spans if span.lane is Lane.COPY_IN]
    assert len(fetched) == 4
    assert sum(span.stalled for span in fetched) == 0
    assert ran.peak_bytes == plan.projected


def test_a_plan_that_recomputes_replays_its_own_ops() -> None:
    plan = told(DEEP, idle(5, Recompute(ops=(3, 4), temporaries=LAYER)))
    ran = simulate(DEEP, allowed=DEEP.plain_peak(), method=plan, device=DEVICE)
    assert ran.recomputed_ops == 2  # value 4 lives, and the plan makes it again all the same
    assert [event.change for event in ran.timeline.events if event.change in (Change.DROP, Change.RECOMPUTE)] == [
        Change.DROP, Change.RECOMPUTE,
    ]  # fmt: skip
    assert ran.peak_bytes <= plan.projected < DEEP.plain_peak()


def test_what_a_replay_makes_for_itself_does_not_bring_back_what_the_plan_has_away() -> None:
    # Value 4 comes back an op after value 5, whose replay makes a value 4 of its own.
    gaps = idle(4, Recompute(ops=(3,))), idle(5, Recompute(ops=(3, 4), temporaries=LAYER))
    plan = told(DEEP, *gaps)
    ran = simulate(DEEP, allowed=plan.projected, method=never_relieved(plan, DEEP), device=DEVICE)
    back = [event.op for event in ran.timeline.events if event.change is Change.RECOMPUTE]
    assert (ran.recomputed_ops, len(set(back))) == (3, 2)
    assert ran.peak_bytes <= plan.projected


def test_long_chains_of_a_plan_come_back_whatever_the_cap() -> None:
    """Every second layer of a deep chain is recomputed from the one before it, which comes back right before."""
    step = layers(300)
    first, last = 2, 290
    end = 2 * 300 - last
    gaps = [
        Gap(value=v, start=v + 1, end=end, home=Recompute(ops=(v - 1,), temporaries=0)) for v in range(first, last + 1)
    ]
    plan = told(step, *gaps)
    ran = simulate(step, allowed=plan.projected, method=never_relieved(plan, step), device=DEVICE)
    assert (ran.status, ran.recomputed_ops, ran.peak_bytes) == ("ok", last - first + 1, plan.projected)


def test_a_step_that_is_another_is_finished_by_moving_the_stalest() -> None:
    plan = told(DEEP, *(idle(layer, Host()) for layer in range(1, 13)))
    other = replace(DEEP, storages=tuple(
        replace(info, nbytes=info.nbytes + 512 * (info.id > 8)) for info in DEEP.storages
    ))  # fmt: skip
    policy = Planned(plan, DEEP)
    ran = simulate(other, allowed=plan.projected + LAYER, method=policy, device=DEVICE, steps=1)
    assert (ran.status, policy.diverged) == ("ok", 8)
    assert ran.peak_bytes <= plan.projected + LAYER


def test_a_value_that_is_gone_when_the_step_begins_stays_gone_from_step_to_step() -> None:
    unused = replace(
        DEEP,
        ops=tuple(replace(op, reads=tuple(value for value in op.reads if value or op.number == 9)) for op in DEEP.ops),
    )
    gaps = [Gap(value=0, start=0, end=9, home=Host()), Gap(value=0, start=10, end=ENDS, home=Host())]
    plan = told(unused, *gaps)
    for steps in (1, 2, 3):
        ran = simulate(unused, allowed=plan.projected, method=never_relieved(plan, unused), device=DEVICE, steps=steps)
        weight = [(event.op, event.change) for event in ran.timeline.events if event.storage == 1]
        assert weight == [(8, Change.PAGE_IN), (9, Change.MOVE)]  # it came back after op 8, and left as op 9 ended


def test_a_value_that_an_earlier_step_left_away_is_fetched_if_the_plan_has_it_there() -> None:
    plan = told(DEEP, Gap(value=0, start=17, end=ENDS, home=Host()))
    ran = simulate(DEEP, allowed=plan.projected, method=plan, device=DEVICE, steps=3)
    assert ran.peak_bytes == plan.projected
    assert ran.timeline.storages[0].present_at_start


def test_a_plan_for_another_step_is_refused() -> None:
    other = layers(3)
    said = f"The plan is for step {other.digest():.12}, and this is step {DEEP.digest():.12}."
    with pytest.raises(UsageError, match=re.escape(said)):
        Planned(plan_of(other), DEEP)
    with pytest.raises(UsageError, match="`ahead` of 0 or more"):
        Planned(plan_of(DEEP), DEEP, ahead=-1)


def test_slow_links_make_copies_begin_earlier() -> None:
    plan = told(DEEP, *(idle(layer, Host()) for layer in range(1, 3)))
    slow = replace(DEVICE, out_per_second=2e8, in_per_second=2e8)

    def waited(device: Device) -> float:
        return simulate(DEEP, allowed=DEEP.plain_peak(), method=plan, device=device).stall_seconds

    assert waited(DEVICE) <= waited(slow) < 2 * 2 * LAYER / 2e8
