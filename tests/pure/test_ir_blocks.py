"""Blocks of recorded steps are found by names, and recomputing them is one replay each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spillway.calibration.named_device import device_of
from spillway.errors import PlanRejected
from spillway.ir import Gap, Kind, Plan, Recompute, Step, verify
from spillway.ir.account import account
from spillway.ir.block_calls import BlockCall, block_calls
from spillway.ir.lives import lives_of
from spillway.ir.verify import Rule
from spillway.simulation.simulated_engine import simulate
from tests.pure.block_steps import BACKWARD, FORWARD, UNIT, Named, backward, block, block_names, blocks_step
from tests.pure.recorded import layers

DEVICE = device_of("a100")


def plan_of(step: Step, *calls: BlockCall) -> Plan:
    gaps = tuple(gap for call in calls for gap in call.gaps)
    peak = account(step, gaps, lives_of(step)).peak
    return Plan(step=step.digest(), allowed=peak, projected=peak, gaps=gaps)


# Which modules are blocks


def test_what_is_numbered_and_alike_is_a_block() -> None:
    assert block_names(blocks_step(3)) == ["layers.0", "layers.1", "layers.2"]


def test_the_first_of_a_stage_may_have_more_than_the_others() -> None:
    step = blocks_step(3, extras=["shortcut", "", ""])
    assert block_names(step) == ["layers.0", "layers.1", "layers.2"]


def test_modules_of_other_names_are_blocks_if_the_same_names_are_below_them() -> None:
    assert block_names(blocks_step(2, name=["encoder", "decoder"].__getitem__)) == ["encoder", "decoder"]


def test_stages_that_hold_little_but_blocks_are_none() -> None:
    names = [f"stages.{stage}.blocks.{number}" for stage in range(2) for number in range(2)]
    assert block_names(blocks_step(4, name=names.__getitem__)) == names


def test_one_module_that_is_called_again_is_a_block_and_its_calls_are_told_apart() -> None:
    step = blocks_step(3, name=lambda number: "shared")
    assert block_names(step) == ["shared"]
    calls = block_calls(step)
    assert [(call.name, call.call, len(call.ops)) for call in calls] == [("shared", 0, 5), ("shared", 1, 5),
                                                                         ("shared", 2, 5)]  # fmt: skip
    assert len({op for call in calls for op in call.ops}) == 15


def test_a_module_that_nothing_resembles_is_none_and_neither_is_a_step_without_modules() -> None:
    assert block_names(blocks_step(1)) == []
    assert block_names(layers(8)) == []
    assert block_calls(layers(8)) == ()


def test_what_runs_between_two_ops_of_a_call_is_part_of_it() -> None:
    recorder = Named()
    x = recorder.source(UNIT, Kind.INPUT)
    done = []
    for number in range(2):
        (own,) = recorder.run(f"layers.{number}.inner.first", FORWARD, [x], [UNIT])
        (foreign,) = recorder.run("activation", FORWARD, [own], [UNIT])
        (result,) = recorder.run(f"layers.{number}.last", FORWARD, [foreign], [UNIT])
        done.append((f"layers.{number}", [x, own, foreign, foreign]))
        x = result
    (loss,) = recorder.run("", FORWARD, [x], [64])
    backward(recorder, done, loss)
    calls = block_calls(recorder.finished())
    assert [call.ops for call in calls] == [(0, 1, 2), (3, 4, 5)]
    assert {gap.value for call in calls for gap in call.gaps} == {1, 2, 4, 5}


# What recomputing one is


def test_all_that_a_block_leaves_to_the_backward_but_its_result_is_gone_and_comes_back_in_one_replay() -> None:
    step = blocks_step(3)
    calls = block_calls(step)
    for call in calls:
        # Of its five ops the first makes what nobody keeps, and the last the result.
        assert [step.ops[op].module.removeprefix(f"{call.name}.") for op in call.ops[1:4]] == [
            "inner.second", "inner.third", "last"
        ]  # fmt: skip
        assert {gap.value for gap in call.gaps} == {step.ops[op].creates[0] for op in call.ops[1:4]}
        assert call.nbytes == 3 * UNIT
        assert call.seconds == pytest.approx(5e-3)
        assert {gap.home for gap in call.gaps} == {
            Recompute(ops=call.ops[:4], temporaries=call.gaps[0].home.temporaries)  # type: ignore[union-attr]
        }
        assert {gap.end for gap in call.gaps} == {call.returns}
    assert calls[0].returns > calls[1].returns > calls[2].returns


@pytest.mark.parametrize("steps", [1, 2])
def test_in_a_replay_no_op_runs_twice_and_its_bytes_are_as_the_plan_says(steps: int) -> None:
    step = blocks_step(3, units=[1, 3, 2])
    calls = block_calls(step)
    for chosen in (calls, calls[:1], calls[1:]):
        plan = plan_of(step, *chosen)
        verify(plan, step, plan.allowed)
        done = simulate(step, allowed=plan.allowed, method=plan, device=DEVICE, steps=steps)
        assert (done.status, done.moves, done.refusals) == ("ok", 0, {})
        assert done.recomputed_ops == 4 * len(chosen)
        assert done.recomputed_seconds == pytest.approx(4e-3 * len(chosen))
        assert done.peak_bytes <= plan.projected < step.plain_peak()


def test_what_a_replay_will_hold_counts_from_when_it_would_die() -> None:
    # The gap of what the first op makes holds, for the replay of all, what the block makes in its middle and once only.
    recorder, done = Named(), []
    (x,) = (recorder.source(UNIT, Kind.INPUT),)
    for name in ("layers.0", "layers.1"):
        (one,) = recorder.run(f"{name}.first", FORWARD, [x], [UNIT])
        (large,) = recorder.run(f"{name}.second", FORWARD, [one], [16 * UNIT])
        (small,) = recorder.run(f"{name}.third", FORWARD, [large], [64])
        (mask,) = recorder.run(f"{name}.mask", FORWARD, [], [8 * UNIT], replayable=False)
        (other,) = recorder.run(f"{name}.last", FORWARD, [x, mask], [UNIT])
        (result,) = recorder.run(name, FORWARD, [other, small], [UNIT])
        done.append((name, [x, one, other]))
        x = result
    (loss,) = recorder.run("", FORWARD, [x], [64])
    for name, kept in reversed(done):
        recorder.run(name, BACKWARD, [loss, *kept], [UNIT], kind=Kind.GRADIENT)
    step = recorder.finished()
    calls = block_calls(step)
    assert [(gap.start, gap.home.held) for gap in calls[0].gaps] == [(2, (4,)), (6, (4,))]  # type: ignore[union-attr]
    plan = plan_of(step, *calls)
    verify(plan, step, plan.allowed)


def test_gaps_of_one_recipe_that_end_apart_come_back_apart() -> None:
    step = blocks_step(2)
    first, _ = block_calls(step)
    lives = lives_of(step)
    # The last op's value of the block is read by the first of its backward, the others by the next.
    later = [gap for gap in first.gaps if min(read for read in lives[gap.value].reads if read >= gap.end) > gap.end]
    assert len(later) == 2
    gaps = tuple(replace(gap, end=gap.end + 1) if gap is later[0] else gap for gap in first.gaps)
    home = first.gaps[0].home
    assert isinstance(home, Recompute)
    roomy = replace(home, temporaries=home.temporaries + 3 * UNIT)
    gaps = tuple(replace(gap, home=roomy) for gap in gaps)
    peak = account(step, gaps, lives).peak
    plan = Plan(step=step.digest(), allowed=peak, projected=peak, gaps=gaps)
    verify(plan, step, peak)
    done = simulate(step, allowed=peak, method=plan, device=DEVICE, steps=1)
    assert done.status == "ok"
    # The second replay makes what the late one is made from again.
    assert done.recomputed_ops == 4 + 2


def test_a_replay_of_several_values_is_held_to_its_temporaries() -> None:
    step = blocks_step(2, units=[2, 2])
    call = block_calls(step)[0]
    home = call.gaps[0].home
    assert isinstance(home, Recompute)
    # While the last op of the replay runs, what nobody keeps is there beside what comes back.
    assert home.temporaries == 2 * UNIT
    plan = replace(plan_of(step, call), allowed=10**9, projected=10**9)
    verify(plan, step, 10**9)
    less = replace(home, temporaries=2 * UNIT - 1)
    with pytest.raises(PlanRejected, match="needs 2097152 B") as caught:
        verify(replace(plan, gaps=tuple(replace(gap, home=less) for gap in call.gaps)), step, 10**9)
    assert caught.value.rule is Rule.UNDERSTATED_REPLAY
    (last,) = [gap for gap in call.gaps if gap.value == step.ops[call.ops[3]].creates[0]]
    with pytest.raises(PlanRejected, match="needs 6291456 B"):  # alone, the others are its temporaries
        verify(replace(plan, gaps=(last,)), step, 10**9)


def test_a_value_that_cannot_be_recomputed_stays_and_the_others_go() -> None:
    recorder = Named()
    x = recorder.source(UNIT, Kind.INPUT)
    done = []
    for number in range(2):
        result, kept = block(recorder, f"layers.{number}", x)
        done.append((f"layers.{number}", kept))
        x = result
    (loss,) = recorder.run("", FORWARD, [x], [64])
    backward(recorder, done, loss)
    step = recorder.finished()
    second = step.ops[1]
    step = replace(
        step, ops=tuple(replace(op, replayable=op.number != second.number) for op in step.ops)
    )  # fmt: skip
    first, other = block_calls(step)
    assert second.creates[0] not in {gap.value for gap in first.gaps}
    assert (len(first.gaps), len(other.gaps)) == (2, 3)
    plan = plan_of(step, first, other)
    verify(plan, step, plan.allowed)


def test_every_set_of_calls_makes_a_plan() -> None:
    step = blocks_step(4, units=[1, 2, 3, 1], batches=2)
    calls = block_calls(step)
    assert len(calls) == 8
    assert all(isinstance(gap, Gap) for call in calls for gap in call.gaps)
    for chosen in range(0, 256, 23):
        plan = plan_of(step, *(call for number, call in enumerate(calls) if chosen >> number & 1))
        verify(plan, step, plan.allowed)
