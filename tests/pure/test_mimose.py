"""Mimose from step to step: phases, what is measured, plans and their cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway.errors import UsageError
from spillway.methods.actions import Action
from spillway.methods.by_block import (
    BlockPlan,
    BlockSample,
    Decision,
    Forecast,
    InputSize,
    Phase,
    StepSample,
    recomputing,
)
from spillway.methods.mimose import Mimose, Options
from spillway.methods.mimose.cache import PlanCache
from tests.pure.moments import simulate

BLOCKS = 12
LENGTHS = (60, 35, 141, 90, 118, 60, 77, 126, 48, 102)
"""Ten steps of the paper's SWAG range; one length comes twice."""


def saved(block: int, length: int) -> int:
    return 1000 * length + (12 + block % 2) * length * length


class Training:
    """A model that needs what its forecast says, and tells it to a planner as an engine would."""

    def __init__(self, mimose: Mimose, saves: Callable[[int, int], int] = saved, turn: int = 300) -> None:
        self.mimose = mimose
        self.saves = saves
        self.turn = turn
        self.peaks: list[int] = []

    def truth(self, length: int) -> Forecast:
        return Forecast(
            saved=[self.saves(block, length) for block in range(BLOCKS)],
            seconds=[1e-3 * length] * BLOCKS,
            turn=self.turn * length,
            rest=100 * length + 5000,
            working=[0] * BLOCKS,
            gradients=[0] * BLOCKS,
        )

    def step(self, length: int, available: int = 10**9) -> Decision:
        size, truth = (length,), self.truth(length)
        decision = self.mimose.begin(size, available)
        recomputed = frozenset(block for block in range(BLOCKS) if not decision.plan.keeps(block))
        peak = simulate(truth, recomputed).nbytes
        self.peaks.append(peak)
        blocks = [
            BlockSample(block=block, size=size, nbytes=truth.saved[block], seconds=truth.seconds[block])
            for block in range(BLOCKS)
            if decision.collects or block not in recomputed
        ]
        self.mimose.end(StepSample(size=size, recomputed=recomputed, peak=peak), blocks)
        return decision


def trained(mimose: Mimose, lengths: Sequence[int] = LENGTHS) -> Training:
    training = Training(mimose)
    for length in lengths:
        training.step(length)
    return training


# Phases


def test_sheltered_steps_recompute_every_block_and_the_published_ones_measure_all_of_them() -> None:
    training = Training(Mimose.as_published())
    decisions = [training.step(length) for length in LENGTHS]
    assert [decision.phase for decision in decisions] == [Phase.COLLECTING] * 10
    assert all(decision.collects for decision in decisions)
    assert not any(decision.plan.keeps(block) for decision in decisions for block in range(BLOCKS))
    after = training.step(60)
    assert (after.phase, after.collects) == (Phase.PLANNED, False)


def test_a_size_that_was_measured_is_not_measured_again() -> None:
    training = Training(Mimose(Options(ends_early=False)))
    assert [training.step(length).collects for length in LENGTHS] == [True] * 5 + [False] + [True] * 4


def test_the_sheltered_phase_ends_when_four_steps_have_shown_the_laws_of_all_blocks() -> None:
    training = Training(Mimose())
    phases = [training.step(length).phase for length in LENGTHS[:5]]
    assert phases == [Phase.COLLECTING] * 4 + [Phase.PLANNED]


def test_it_lasts_to_its_end_where_bytes_follow_no_law() -> None:
    training = Training(Mimose(), saves=lambda block, length: saved(block, length) + 7919 * length * length % 1009)
    phases = [training.step(length).phase for length in (*LENGTHS, 66)]
    assert phases == [Phase.COLLECTING] * 10 + [Phase.PLANNED]


def test_the_first_step_is_no_sample_of_the_whole_model_but_its_blocks_are_samples() -> None:
    mimose = Mimose.as_published()
    blocks = [BlockSample(block=0, size=(50,), nbytes=100, seconds=1.0)]
    mimose.end(StepSample(size=(50,), recomputed=frozenset({0}), peak=9999), blocks)
    assert mimose.nbytes(0, (50,)) == 100
    mimose.end(StepSample(size=(50,), recomputed=frozenset({0}), peak=60), blocks)
    for _ in range(8):
        mimose.end(StepSample(size=(50,), recomputed=frozenset({0}), peak=60), blocks)
    assert mimose.plan((50,), 10**9).projected == 160


# The published planner


@pytest.mark.parametrize(("over", "recomputed"), [(0, set()), (1, {0}), (225_000, {1}), (231_000, {0, 1})])
def test_the_published_plan_covers_what_the_whole_model_is_over(over: int, recomputed: set[int]) -> None:
    """At length 100 blocks save 220,000 and 230,000 bytes in turn: one bucket, of which each block is tested."""
    training = trained(Mimose(Options.as_published(reserve=1000)))
    truth = training.truth(100)
    whole = simulate(truth, truth.everything).nbytes + sum(truth.saved)
    plan = training.mimose.plan((98,), whole - over + 1000)
    assert (plan.size, plan.given_up) == ((100,), recomputed)
    assert plan.projected == pytest.approx(whole - sum(truth.saved[block] for block in recomputed), abs=2)
    assert plan.holds


def test_a_budget_that_no_plan_meets_is_reported_by_how_much() -> None:
    for options in (Options(), Options.as_published(reserve=0, interval=1)):
        training = trained(Mimose(options))
        floor = simulate(training.truth(100), frozenset(range(BLOCKS))).nbytes
        plan = training.mimose.plan((100,), floor - 5000)
        assert (len(plan.given_up), plan.holds) == (BLOCKS, False)
        assert plan.shortfall == pytest.approx(5000, abs=2)


def test_the_published_planner_passes_a_budget_that_the_simulating_one_keeps() -> None:
    """The samples are of the forward alone, and blocks work with much memory of their own in the backward."""
    nbytes, working = 1000, 600
    truth = Forecast(
        saved=[nbytes] * 4, seconds=[1.0] * 4, turn=0, rest=0, working=[working] * 4, gradients=[900] * 4
    )  # fmt: skip
    peaks = {}
    for options in (Options(), Options.as_published(reserve=0)):
        mimose = Mimose(options)
        for length in (10, 20, 30, 40, 50):
            blocks = [
                BlockSample(block=b, size=(length,), nbytes=nbytes, seconds=1.0, working=working, gradients=900)
                for b in range(4)
            ]
            # As a collector sees it that looks at the forward alone, where nothing of the backward is there yet.
            mimose.end(StepSample(size=(length,), recomputed=frozenset(range(4)), peak=0), blocks)
        plan = mimose.plan((25,), 5000)
        peaks[options.checks_peak] = simulate(truth, plan.given_up).nbytes
        assert plan.projected <= 5000 or options.checks_peak
    assert peaks[False] > 5000


# The default planner


@settings(max_examples=40)
@given(st.integers(20, 200), st.integers(0, 40_000_000))
def test_a_plan_that_should_hold_holds(length: int, available: int) -> None:
    training = trained(Mimose())
    plan = training.mimose.plan((length,), available)
    peak = simulate(training.truth(length), plan.given_up).nbytes
    assert peak <= plan.projected
    assert plan.holds == (plan.projected <= available)
    assert plan.holds or len(plan.given_up) == BLOCKS


@settings(max_examples=40)
@given(st.integers(20, 200), st.integers(2_000_000, 40_000_000), st.integers(0, 10**7))
def test_more_available_bytes_never_cost_more_recomputing_of_equal_blocks(length: int, low: int, more: int) -> None:
    training = Training(Mimose(), saves=lambda block, x: saved(0, x))
    for x in LENGTHS:
        training.step(x)
    few = training.mimose.plan((length,), low)
    assert len(training.mimose.plan((length,), low + more).given_up) <= len(few.given_up)


def test_a_micro_batch_that_adds_to_gradients_does_not_lower_what_the_first_one_needs() -> None:
    """The second creates no gradients, so that its peak is lower by theirs, and not for want of anything else."""
    mimose, everything = Mimose(), frozenset(range(3))
    for created, peak in ((40, 3 * 40 + 100 + 7), (0, 100 + 7)):
        blocks = [BlockSample(block=n, size=(50,), nbytes=100, seconds=1.0, gradients=created) for n in range(3)]
        mimose.end(StepSample(size=(50,), recomputed=everything, peak=peak, turn_peak=5, backward_peak=peak), blocks)
        forecast = mimose.forecast((50,))
        assert forecast is not None
        assert (forecast.turn, forecast.rest, forecast.gradients) == (5, 7, [40, 40, 40])


def test_a_peak_above_the_projected_one_is_not_made_twice() -> None:
    """Something of the step beside the blocks grew: the second plan of the size knows, and of other sizes too."""
    training = trained(Mimose())
    mimose = training.mimose
    available = 3 * simulate(training.truth(100), frozenset(range(BLOCKS))).nbytes
    before = mimose.begin((100,), available).plan
    measured = available + 50_000
    mimose.end(StepSample(size=(100,), recomputed=before.given_up, peak=measured))
    after = mimose.begin((100,), available).plan
    assert after.given_up != before.given_up
    assert mimose.plan((100,), measured).projected <= measured
    assert simulate(mimose.forecast((100,)), before.given_up).nbytes == measured  # type: ignore[arg-type]
    assert mimose.plan((101,), available).projected > before.projected or len(after.given_up) > len(before.given_up)


def test_the_published_planner_makes_it_twice() -> None:
    mimose = trained(Mimose(Options.as_published(reserve=0))).mimose
    before = mimose.begin((100,), 3_000_000).plan
    mimose.end(StepSample(size=(100,), recomputed=before.given_up, peak=9_000_000))
    assert mimose.begin((100,), 3_000_000).plan is before


def test_peaks_known_by_part_make_plans_less_careful_and_still_hold() -> None:
    def planned(by_part: bool) -> BlockPlan:
        training, mimose = Training(Mimose()), Mimose()
        for length in LENGTHS[:6]:
            truth = training.truth(length)
            everything = truth.everything
            backward = truth.rest + max(truth.saved)
            blocks = [BlockSample(block=b, size=(length,), nbytes=truth.saved[b], seconds=1.0) for b in range(BLOCKS)]
            mimose.end(
                StepSample(
                    size=(length,), recomputed=everything, peak=max(truth.turn, backward),
                    turn_peak=truth.turn if by_part else None, backward_peak=backward if by_part else None,
                ),
                blocks,
            )  # fmt: skip
        return mimose.plan((100,), 2_000_000)

    truth = Training(Mimose()).truth(100)
    assert len(planned(True).given_up) < len(planned(False).given_up)
    assert planned(True).projected == simulate(truth, planned(True).given_up).nbytes <= 2_000_000


def test_a_block_that_a_plan_does_not_know_is_recomputed() -> None:
    plan = trained(Mimose()).mimose.plan((100,), 10**9)
    assert plan.keeps(0)
    assert not plan.keeps(BLOCKS)


def test_the_static_plan_is_that_of_the_largest_size_whatever_the_size() -> None:
    training = trained(Mimose(Options(static_size=(141,))))
    moving, made = trained(Mimose()), training.mimose.cache.made
    static = [training.mimose.plan((length,), 3_000_000).given_up for length in (35, 90, 141)]
    assert static == [moving.mimose.plan((141,), 3_000_000).given_up] * 3
    assert len(moving.mimose.plan((35,), 3_000_000).given_up) < len(static[0])
    assert training.mimose.cache.made <= made + 1


# Options


def test_what_is_published_and_what_is_the_default_differ_in_these_fields() -> None:
    default, published = Options(), Options.as_published()
    differ = {name for name in Options.__slots__ if getattr(default, name) != getattr(published, name)}
    assert differ == {
        "ends_early", "collects_known_sizes", "first_counts", "forwards", "exact_bytes", "checks_peak", "corrects",
        "reserve", "interval", "similar",
    }  # fmt: skip


@pytest.mark.parametrize("wrong", [{"iterations": 1}, {"interval": 0}, {"reserve": -1}])
def test_options_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="Mimose needs 2 collecting steps or more"):
        Options(**wrong)  # type: ignore[arg-type]


# The cache


def a_plan(size: InputSize, *, projected: int = 50, recomputed: frozenset[int] = frozenset({0})) -> BlockPlan:
    return BlockPlan(
        size=size, actions=recomputing(recomputed, 4), otherwise=Action.RECOMPUTE, projected=projected, available=60,
        seconds=1.0, smallest=20,
    )  # fmt: skip


def test_sizes_are_rounded_up_to_the_interval_but_the_number_of_samples_is_not() -> None:
    assert [PlanCache(5).rounded((x,)) for x in (35, 36, 40)] == [(35,), (40,), (40,)]
    assert PlanCache(100).rounded((800 * 1216,)) == (972_800,)
    assert PlanCache(5, batched=True).rounded((3, 36, 11)) == (3, 40, 15)
    assert PlanCache(1).rounded((37,)) == (37,)


def test_sizes_of_one_interval_share_a_plan_and_hits_and_misses_are_counted() -> None:
    mimose = trained(Mimose(Options.as_published())).mimose
    for length in (61, 65, 62, 66, 70, 64):
        mimose.plan((length,), 10**9)
    assert (mimose.cache.hits, mimose.cache.misses, mimose.cache.made, len(mimose.cache)) == (4, 2, 2, 2)


def test_a_plan_is_made_again_when_it_no_longer_holds_or_a_block_more_might_be_kept() -> None:
    cache = PlanCache(1)
    cache.put(a_plan((7,)))
    assert [cache.find((7,), available) is not None for available in (49, 50, 79, 80)] == [False, True, True, False]
    trusting = PlanCache(1, trusting=True)
    trusting.put(a_plan((7,)))
    assert all(trusting.find((7,), available) for available in (1, 49, 500))
    trusting.doubt()
    assert trusting.find((7,), 60) is None, "what is available changes nothing, and what was measured does"


def test_a_plan_that_recomputes_nothing_or_does_not_hold_is_right_on_its_side() -> None:
    cache = PlanCache(1)
    cache.put(a_plan((1,), recomputed=frozenset()))
    cache.put(a_plan((2,), projected=90))
    assert [cache.find((1,), available) is not None for available in (49, 50, 10**12)] == [False, True, True]
    assert [cache.find((2,), available) is not None for available in (-5, 89, 90)] == [True, True, False]


def test_similar_sizes_have_the_plan_of_the_largest_of_them_that_was_seen() -> None:
    cache = PlanCache(1, share=0.02)
    assert [cache.rounded((x,)) for x in (202, 205, 203, 206)] == [(202,), (205,), (205,), (206,)]
    assert [cache.rounded((x,)) for x in (0, 1, 7, 8)] == [(0,), (1,), (7,), (8,)]
    pictures = [cache.rounded(size) for size in ((202, 303), (205, 300), (203, 299))]
    assert pictures == [(202, 303), (205, 303), (203, 299)]
    samples = PlanCache(1, share=0.02, batched=True)
    assert [samples.rounded(size) for size in ((200, 205), (201, 203), (200, 202))] == [
        (200, 205), (201, 203), (200, 205),
    ]  # fmt: skip
    cache = PlanCache(1, share=0.02)
    cache.put(a_plan(cache.rounded((203,))))
    assert cache.find(cache.rounded((202,)), 60) is not None
    assert cache.find(cache.rounded((204,)), 60) is None, "a larger one"
    cache.put(a_plan((204,)))
    assert (len(cache), cache.find(cache.rounded((202,)), 60)) == (1, a_plan((204,)))


def test_lengths_of_an_epoch_share_sixty_plans_where_each_would_have_its_own() -> None:
    kept = {}
    for similar in (Options().similar, 0.0):
        mimose = Mimose(Options(similar=similar))
        for length in range(153, 450):
            mimose.cache.put(a_plan(mimose.cache.rounded((length,))))
        kept[similar] = len(mimose.cache)
    assert kept == {0.02: 55, 0.0: 297}


def test_a_plan_in_doubt_is_looked_at_and_stays_unless_it_would_be_another() -> None:
    cache = PlanCache(1)
    needs = {"bytes": 55}

    def look(plan: BlockPlan) -> BlockPlan:
        return replace(plan, projected=needs["bytes"], available=plan.available + needs["bytes"] - plan.projected)

    cache.put(a_plan((7,)))
    cache.doubt()
    assert cache.find((7,), 60) is None, "nobody looks"
    assert cache.find((7,), 54, look) is None, "it needs more than there is"
    assert cache.find((7,), 55, look) is not None
    needs["bytes"] = 45
    assert cache.find((7,), 50, look) is None, "nothing has changed, and it needs 55"
    cache.doubt()
    assert [cache.find((7,), available, look) is not None for available in (44, 45, 74, 75)] == [
        False,
        True,
        True,
        False,
    ]
    assert cache.made == 1


def test_plans_are_looked_at_again_when_estimates_change() -> None:
    training = trained(Mimose())
    mimose = training.mimose
    training.step(90)
    before = mimose.plan((90,), 10**9)
    made = mimose.cache.made
    training.step(90)  # as expected
    assert mimose.plan((90,), 10**9) is before
    mimose.end(StepSample(size=(90,), recomputed=frozenset(), peak=10**8))
    after = mimose.plan((90,), 10**9)
    assert (after.projected, mimose.cache.made) == (10**8, made), "it took so much, and so much is there"
    assert mimose.plan((90,), 10**8 - 1).given_up, "made again"
    assert mimose.cache.made == made + 1
