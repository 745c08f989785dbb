"""Plans of `auto`: they fit, no simpler choice is faster, and nothing beats the bound that they are measured by."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings

from benchmarks.auto_instances import MACHINES, model, scaled
from benchmarks.auto_instances import problem as instance
from benchmarks.auto_planner import BENCHMARK, alike, exhausted, mimose, random_problems
from spillway.methods.actions import Action
from spillway.methods.auto.block_problem import BlockProblem
from spillway.methods.auto.choosing import Effort, floor, plan
from spillway.methods.auto.fill import Filler
from spillway.methods.auto.menus import Menus
from spillway.methods.auto.rules import rules, sentences
from spillway.methods.auto.search import improve
from spillway.methods.auto.simulate import Clock, simulate
from spillway.methods.by_block import BlockSample, Forecast, StepSample
from tests.pure.auto_machine import OFFLOAD, problems, uniform

BERT = instance(*model("bert"), MACHINES["H200"], 0.2)


def every(problem: BlockProblem) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(block.options)) for block in problem.blocks)))


def test_everything_is_kept_where_that_fits() -> None:
    assert plan(uniform(3, available=300)).choice == (0, 0, 0, 0)


def test_a_step_without_blocks_takes_nothing() -> None:
    nothing = BlockProblem(blocks=(), available=0, out_rate=1.0, in_rate=1.0)
    assert plan(nothing).choice == ()
    assert plan(nothing).outcome.fits
    assert floor(nothing) == 0


def test_the_first_block_leaves_where_one_has_to_and_its_copies_have_time() -> None:
    planned = plan(uniform(6, available=520))
    assert planned.choice == (OFFLOAD, 0, 0, 0, 0, 0, 0)
    assert planned.outcome.seconds == uniform(6, available=520).plain


@settings(max_examples=120, deadline=None)
@given(problem=problems(most_blocks=4))
def test_a_plan_fits_where_anything_does_and_is_faster_than_what_is_simple(problem: BlockProblem) -> None:
    planned = plan(problem)
    fitting = [choice for choice in every(problem) if simulate(problem, choice).fits]
    assert planned.outcome == simulate(problem, planned.choice)
    assert planned.outcome.fits == bool(fitting)
    if fitting:
        simple = [simulate(problem, alike(problem, action)).seconds for action in Action]
        assert planned.outcome.seconds <= min(simple)


@settings(max_examples=120, deadline=None)
@given(problem=problems(most_blocks=4))
def test_the_floor_is_the_least_that_anything_fits_into(problem: BlockProblem) -> None:
    roomy = replace(problem, available=10**6)
    clock = Clock(roomy)
    needed = [clock.needed(clock.picked(choice)) for choice in every(roomy) if simulate(roomy, choice).fits]
    assert floor(problem) == min(needed)
    assert plan(replace(problem, available=min(needed))).outcome.fits
    assert not plan(replace(problem, available=min(needed) - 1)).outcome.fits


def test_a_refusal_names_the_floor() -> None:
    refused = replace(BERT, available=10**9)
    planned = plan(refused)
    assert not planned.outcome.fits
    assert planned.outcome.peak == floor(refused)
    (sentence,) = sentences(refused, planned)
    assert sentence.startswith("No choice of what becomes of the 25 blocks fits into 953.67 MiB: ")


@pytest.mark.parametrize("number", [87, 643, 2417])
def test_near_the_floor_a_plan_takes_no_longer_for_inputs_that_are_a_little_smaller(number: int) -> None:
    """Here copies met others that came in earlier than for the size that was planned."""
    problem = next(itertools.islice(random_problems(BENCHMARK.full), number, None))
    planned = plan(problem)
    smaller = [
        simulate(scaled(problem, 1 - part / 400, times), planned.choice).seconds
        for part in range(1, 17) for times in (1.0, 1 - part / 400)
    ]  # fmt: skip
    assert max(smaller) <= planned.outcome.seconds + 0.005 * problem.plain


def test_no_plan_is_slower_than_algorithm_1() -> None:
    """Its overshoot was the smaller one here."""
    problem = next(itertools.islice(random_problems(BENCHMARK.full), 4148, None))
    assert mimose(problem) < simulate(problem, alike(problem, Action.RECOMPUTE)).seconds
    assert plan(problem).outcome.seconds <= mimose(problem)


def test_what_the_host_has_no_room_for_is_recomputed() -> None:
    moved = sum(block.options[number].moved for block, number in zip(BERT.blocks, plan(BERT).choice, strict=True))
    assert moved > 0
    for share in (0.5, 0.0):
        short = replace(BERT, host=int(share * moved))
        planned = plan(short)
        assert planned.outcome.fits
        assert (
            sum(block.options[n].moved for block, n in zip(short.blocks, planned.choice, strict=True)) <= share * moved
        )


def test_more_effort_is_no_slower() -> None:
    first = plan(BERT)
    polished = plan(BERT, effort=Effort.POLISH)
    assert polished.outcome.seconds <= first.outcome.seconds
    assert plan(BERT, effort=Effort.POLISH) == polished


def test_the_same_problem_has_the_same_plan_in_every_process() -> None:
    program = (
        "from benchmarks.auto_instances import *\n"
        "from spillway.methods.auto.choosing import plan\n"
        "print(plan(problem(*model('bert'), MACHINES['H200'], 0.2)).choice)"
    )
    said = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                       env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONHASHSEED": seed}).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert said == {str(plan(BERT).choice)}


def test_work_is_counted() -> None:
    clock = Clock(BERT)
    choice = Filler(clock).fill(0.15, inf)
    assert choice is not None
    before = clock.runs
    seconds = clock.seconds(clock.picked(choice))
    reached, better = improve(clock, (seconds, choice), 30)
    assert reached <= seconds
    assert clock.runs <= before + 1 + 30
    assert simulate(BERT, better).seconds == reached


def test_mimose_and_single_actions_are_slower_on_a_model() -> None:
    taken = plan(BERT).outcome.seconds
    assert taken < 0.9 * mimose(BERT)
    assert all(taken < simulate(BERT, alike(BERT, action)).seconds for action in Action)


# ---------------------------------------------------------------------- the bound


@settings(max_examples=60, deadline=None)
@given(problem=problems(most_blocks=4))
def test_no_choice_beats_the_bound(problem: BlockProblem) -> None:
    pytest.importorskip("scipy", reason="The bound is found by SciPy.")
    from benchmarks.auto_bound import Program

    best = exhausted(problem)
    for whole in (False, True):
        bound = Program(problem, whole=whole).bound(10.0)
        assert bound <= best + 1e-3 * problem.plain
    if best == inf:
        assert not plan(problem).outcome.fits


def test_a_bound_of_a_slower_link_is_beaten() -> None:
    pytest.importorskip("scipy", reason="The bound is found by SciPy.")
    from benchmarks.auto_bound import Program

    problem = instance(*model("encoder-decoder", blocks=4), MACHINES["V100"], 0.2)
    slower = replace(problem, out_rate=problem.out_rate / 4, in_rate=problem.in_rate / 4)
    assert Program(problem, whole=True).bound(10.0) <= exhausted(problem) * (1 + 1e-4)
    assert Program(slower, whole=True).bound(10.0) > exhausted(problem)


# ---------------------------------------------------------------------- the rule


def test_phi_is_what_the_link_carries_in_a_forward_over_what_is_moved() -> None:
    block = uniform(1, available=1).blocks[0]
    (rule,) = rules(block, 50.0)
    assert (rule.action, rule.moved, rule.phi) == (Action.OFFLOAD, 100, 0.5)
    assert rule.sentence == "Offload has phi 0.50 at 100 B a block: copies hide for 50% of the blocks."


def test_sentences_say_what_became_of_each_kind_and_why() -> None:
    problem = uniform(6, available=520)
    planned = plan(problem)
    assert sentences(problem, planned, {0: "Layer"}) == (
        "6 x Layer: 1 offload, 5 keep; 100 B fewer in memory, 100 B moved, 0.0 us of compute more. Offload has phi "
        "1.00 at 100 B a block: every block's copies hide behind compute.",
        "1 x kind 1: kept.",
        "The step is expected to take 21.00 s, 0.0% more than with everything kept, 0.0 us of it waiting for copies, "
        "and 500 B of 520 B at its peak.",
    )
    *_, whole = sentences(replace(problem, rest=4.0), planned)
    assert whole.startswith("The step is expected to take 25.00 s, ")


def test_what_steps_take_beside_their_blocks_is_learned_from_whole_steps() -> None:
    menus = Menus(batched=False)
    forecast = Forecast(
        saved=(100, 100), seconds=(2.0, 2.0), turn=0, rest=0, working=(0, 0), gradients=(0, 0)
    )  # fmt: skip
    for seconds in (25.0, 17.0, 19.0, 0.0):
        step = StepSample(size=(8,), recomputed=frozenset((0, 1)), peak=300, seconds=seconds)
        blocks = [BlockSample(block=n, size=(8,), nbytes=100, seconds=2.0, backward=3.0, again=1.0) for n in (0, 1)]
        menus.take(step, blocks, forecast)
    found = menus.problem(forecast, 1000, (8,), moves=False)
    assert (found.plain, found.rest) == (10.0, 5.0)


@pytest.mark.parametrize("tokens", [70, 90])
def test_what_is_too_small_to_leave_is_not_promised_to_leave_at_a_new_size(tokens: int) -> None:
    def stays(tokens: int) -> int:
        return 8 * tokens if tokens < 125 else 0

    menus = Menus(batched=False)
    for size in (60, 80, 100, 140, 160, 200):
        step = StepSample(size=(size,), recomputed=frozenset((0,)), peak=1, out_rate=1.0, in_rate=1.0)
        leaving = 100 * size - stays(size)
        block = BlockSample(block=0, size=(size,), nbytes=100 * size, seconds=2.0, leaving=leaving)
        menus.take(step, [block], None)
    saved = (100 * tokens,)
    forecast = Forecast(saved=saved, seconds=(2.0,), turn=0, rest=0, working=(0,), gradients=(0,))
    first, _ = menus.problem(forecast, 10**6, (tokens,), moves=True).blocks
    (offloaded,) = (option for option in first.options if option.action is Action.OFFLOAD)
    assert offloaded.moved + offloaded.resident == saved[0]
    assert offloaded.resident >= stays(tokens)
