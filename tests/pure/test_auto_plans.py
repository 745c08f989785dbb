"""Which plans `auto` remembers, and what makes it plan again: a training of which every figure is known."""

from __future__ import annotations

from itertools import pairwise
from math import log
from random import Random
from unittest.mock import patch

import pytest

from spillway.methods import auto
from spillway.methods.actions import Action
from spillway.methods.auto import POLISHED, SERVED, Auto
from spillway.methods.auto.choosing import Planned
from spillway.methods.auto.choosing import plan as planned
from spillway.methods.auto.menus import WINDOW
from spillway.methods.by_block import BlockPlan, BlockSample, StepSample
from spillway.units import format_seconds

CALLS = range(4)
AVAILABLE = 40_000


class Training:
    """Four blocks that save a hundred bytes a token, and hand on two."""

    def __init__(self) -> None:
        self.method = Auto()
        self.made = 0

    def step(
        self, tokens: int, rate: float = 1e6, above: float = 0.0, seconds: float = 0.0, taken: int = 0
    ) -> BlockPlan:
        """Of so many tokens, whose copies are so fast, and which takes so much more than its plan says, as a share, or
        so many bytes, and so long."""
        size = (tokens,)
        with patch("spillway.methods.auto.plan", self._planned):
            did = self.method.begin(size, AVAILABLE).plan
        actions = did.actions or tuple(did.otherwise for _ in CALLS)
        moves = any(action.moves for action in actions)
        peak = sum(100 * tokens for action in actions if action is Action.KEEP) + 210 * tokens
        self.method.end(
            StepSample(
                size=size, recomputed=frozenset(call for call in CALLS if actions[call].recomputes),
                peak=taken or (int(did.projected * (1 + above)) if above else min(peak, did.projected or peak)),
                projected=did.projected, available=did.available, out_rate=rate * moves, in_rate=rate * moves,
                seconds=seconds,
            ),
            [
                BlockSample(
                    block=call, size=size, nbytes=100 * tokens, seconds=1e-4 * tokens, backward=2e-4 * tokens,
                    again=1e-4 * tokens * actions[call].recomputes, action=actions[call], leaving=98 * tokens,
                    inputs=2 * tokens, kept=60 * tokens * actions[call].selects,
                )
                for call in CALLS
            ],
        )  # fmt: skip
        return did

    def _planned(self, *args: object, **options: object) -> Planned:
        self.made += 1
        return planned(*args, **options)  # type: ignore[arg-type]


def learned(tokens: int = 100, rate: float = 1e6) -> Training:
    training = Training()
    for _ in range(12):
        training.step(tokens, rate)
    assert training.method._menus.rates == (rate, rate)
    return training


@pytest.mark.parametrize("few", [auto.FEW, 0])
def test_a_size_is_planned_once_and_once_more_when_it_has_been_met_often(few: int) -> None:
    """Where blocks are few, with all effort at once."""
    training = learned()
    training.made = 0
    with patch.object(auto, "FEW", few):
        for _ in range(3 * POLISHED):
            training.step(110)
    assert training.made == (1 if few else 2)


def test_copies_are_tried_where_there_is_never_room_to_select_and_twice_since_the_first_are_slow() -> None:
    training = Training()
    told = [training.step(180, rate=1e6 if min(training.method._menus.rates) else 1e5) for _ in range(6)]
    assert [did.otherwise.moves and not did.actions for did in told] == [False, True, True, False, False, False]
    problem = training.method.problem((180,), AVAILABLE)
    assert (problem.out_rate, problem.in_rate) == (1e6, 1e6)
    assert Action.OFFLOAD in {option.action for option in problem.blocks[0].options}


def test_many_sizes_are_planned_once_a_bucket_and_few_for_what_was_seen() -> None:
    training, draw = learned(), Random(0)
    assert [training.step(tokens).size for tokens in (120, 121)] == [(120,), (121,)]
    for tokens in range(60, 80):
        training.step(tokens)
    training.made = 0
    drawn = [draw.randrange(80, 180) for _ in range(1000)]
    did = {tokens: training.step(tokens).size[0] for tokens in drawn}
    assert all(tokens <= largest <= tokens * (1 + auto.BUCKET) for tokens, largest in did.items())
    assert training.made <= log(180 / 80) / log(1 + auto.BUCKET) + 2


def test_a_plan_that_would_not_fit_at_the_edge_of_its_bucket_is_made_for_what_was_seen() -> None:
    training = learned()
    for tokens in range(20, 110, 10):
        training.step(tokens)
    at = next(tokens for tokens in range(120, 1000) if not training.step(tokens).holds) - 1
    edge = auto._last(at)
    assert edge > at, "otherwise this says nothing"
    training.method.forget_plans()
    training.method._largest.clear()
    for tokens in range(20, 110, 10):
        training.step(tokens)
    did = training.step(at)
    assert did.holds
    assert did.size == (at,)
    sizes = [tokens for tokens in range(at - 3, at + 1) if auto._last(tokens) == edge]
    assert len(sizes) > 1
    training.made = 0
    for tokens in sizes * 5:
        assert training.step(tokens).size == (tokens,)
    assert training.made < len(sizes), "each has a plan of its own"


def test_what_a_forward_took_is_held_against_its_own_plan_where_another_began_from_elsewhere() -> None:
    """As micro-batches of one size do: the second finds gradients."""
    method = learned(110).method
    for _ in range(20):
        plans = [method.begin((110,), available).plan for available in (AVAILABLE, AVAILABLE * 3 // 4)]
        for did in plans:
            method.end(
                StepSample(
                    size=(110,),
                    recomputed=frozenset(),
                    peak=did.projected,
                    projected=did.projected,
                    seconds=1.0,
                    available=did.available,
                )
            )
    assert (method._over, method._late) == (0, 0)


def test_rates_that_differ_from_step_to_step_are_no_reason_to_plan_again() -> None:
    training, draw = learned(), Random(0)
    for tokens in [*range(70, 112)] * 2:
        training.step(tokens)
    training.made = 0
    for _ in range(400):
        training.step(draw.randrange(70, 112), rate=1e6 * draw.uniform(0.5, 1.5))
    assert training.made <= 400 // SERVED, "none before it was used so often"


def test_a_link_that_has_become_another_one_is_planned_for_where_sizes_are_met_often() -> None:
    training = learned(110)
    training.made = 0
    for _ in range(WINDOW + 2 * SERVED):
        did = training.step(110, rate=1e3)
    assert training.method._menus.rates == (1e3, 1e3)
    assert 1 <= training.made <= 3
    assert not any(action.moves for action in did.actions), "a thousand bytes a second are not worth it"


@pytest.mark.parametrize(("before", "after", "uses"), [(3e5, 1e6, SERVED), (1e6, 1e5, POLISHED), (1e5, 1e3, 0)])
def test_a_plan_serves_until_another_one_is_worth_what_planning_takes(before: float, after: float, uses: int) -> None:
    """Where copies are so much slower, that is soon; where they were too slow for anything to be moved, never."""
    training = learned(110, before)
    training.step(110, before)  # by a plan
    training.made, training.method._latest.uses = 0, 0
    made = []
    for _ in range(2 * SERVED):
        used = training.method._latest.uses
        training.step(110, after)
        if training.made and not made:
            made.append(used)
    assert made == ([uses] if uses else [])


@pytest.mark.parametrize(("rate", "share"), [(1e7, 1.25), (1e7, 0.75), (3e5, 0.8)])
def test_a_link_that_is_a_little_other_changes_what_is_expected_and_not_the_plan(rate: float, share: float) -> None:
    """Copies hide behind compute; of the slowest, nearly all that are begun do."""
    training = learned(110, rate=rate)
    for _ in range(POLISHED):
        before = training.step(110, rate=rate)
    assert any(action.moves for action in before.actions)
    training.made = 0
    for _ in range(2 * WINDOW):
        did = training.step(110, rate=rate * share)
    assert training.method._menus.rates == (rate * share, rate * share)
    assert (did.actions, training.made) == (before.actions, 0)
    known = training.method._latest
    assert known is not None
    assert (known.problem.out_rate, known.problem.in_rate) == training.method._menus.rates


def test_links_that_were_slow_at_first_are_tried_again_ever_more_rarely() -> None:
    training = Training()
    did = [training.step(110, rate=1e3) for _ in range(140)]
    tried = [number for number, one in enumerate(did) if any(action.moves for action in one.actions)]
    assert 5 <= len(tried) <= 9, "two in the beginning, then one after 8, 16, 32, ... steps"
    assert all(later - number > 1 for number, later in pairwise(tried[1:]))
    did = [training.step(110) for _ in range(140)]
    assert training.method._menus.rates == (1e6, 1e6)
    assert all(any(action.moves for action in one.actions) for one in did[-10:])


def test_copies_that_are_late_change_what_is_promised_and_not_the_plan() -> None:
    training = learned(110)
    before = training.step(110, above=0.05)
    assert any(action.moves for action in before.actions)
    training.made = 0
    after = training.step(110)
    assert (after.actions, after.available, training.made) == (before.actions, before.available, 0)
    assert before.projected * 1.05 <= after.projected <= after.available


def test_what_a_plan_took_at_most_is_promised_where_it_took_less_than_it_says() -> None:
    """Of its own size: what shares it may take as much as it says."""
    training = learned(117)
    for tokens in (116, 116, 117):
        training.step(tokens)
    known = training.method._latest
    assert known is not None
    assert known.moves
    known.taken, training.made, said = 0, 0, known.plan.projected
    least, most = int(0.8 * said), int(0.9 * said)
    assert [training.step(117, taken=taken).projected for taken in (least, most, least, least)] == [
        said, least, most, most,
    ]  # fmt: skip
    assert training.step(116, taken=least).projected == said
    assert (training.step(117).projected, training.method._over, training.made) == (most, 0, 0)


@pytest.mark.parametrize("tokens", [50, 110])
def test_what_every_step_takes_beyond_its_plan_is_not_forgotten(tokens: int) -> None:
    """With nothing moved, and with copies."""
    training = learned(110)
    for _ in range(12):
        training.step(tokens)
    did = training.step(tokens)
    assert any(action.moves for action in did.actions) == (tokens == 110)
    taken = int(did.projected * 1.05)
    assert sum(training.step(tokens, taken=taken).projected < taken for _ in range(40)) <= 2


def test_a_plan_that_was_missed_with_nothing_moved_is_made_again_for_less() -> None:
    training = learned()
    for tokens in (40, 50):
        training.step(tokens)
    kept = training.step(50, above=0.05)
    assert not kept.given_up
    training.made = 0
    assert training.step(50).projected >= kept.projected * 1.05
    assert training.made == 1


def test_seconds_are_promised_by_how_long_steps_take_and_not_by_their_best_times() -> None:
    training = learned(110)
    expected = training.step(110).step_seconds
    for _ in range(4):
        training.step(110, seconds=1.25 * expected)
    assert training.step(110).step_seconds == pytest.approx(1.25 * expected)
    assert f"expected to take {format_seconds(1.25 * expected)}, " in training.method.explained(["block"] * 5)[-1]


def test_steps_of_several_sizes_at_once_are_each_held_against_their_own_plan() -> None:
    """As micro-batches are: all are planned before the first of them ends."""
    training = learned(110)
    for _ in range(3):
        training.step(55)
    method, sizes = training.method, ((110,), (55,))
    plans = [method.begin(size, AVAILABLE).plan for size in sizes]
    for size, did in zip(sizes, plans, strict=True):
        method.end(
            StepSample(
                size=size,
                recomputed=frozenset(),
                peak=did.projected,
                projected=did.projected,
                seconds=did.step_seconds,
                available=did.available,
            )
        )
    assert [method.begin(size, AVAILABLE).plan.step_seconds for size in sizes] == [did.step_seconds for did in plans]
