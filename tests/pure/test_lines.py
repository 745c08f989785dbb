"""Lines of the decision pilot: what they make of one step, of what ran lately, and of what drifts."""

from __future__ import annotations

import numpy as np
import pytest

from spillway.pilots.decisions import DecisionPilot
from spillway.pilots.lines import AHEAD, WIDEST, Follower
from spillway.pilots.paths import Floats
from spillway.pilots.program import Program
from tests.pure.gated_network import GatedNetwork


def followed(scores: Floats, given: Floats, *, rate: float) -> tuple[float, Follower]:
    """The share of the last half of scores [steps, decisions] that a follower foresees with a threshold that a
    controller moves by `rate`, and the follower."""
    follower, threshold, right = Follower(), np.zeros(scores.shape[1]), []
    follower.widen(given.shape[1], 0, scores.shape[1])
    undecided = np.zeros(scores.shape[1], np.float32)
    for score, numbers in zip(scores, given, strict=True):
        bits = (score > threshold).astype(np.float32)
        follower.expect(numbers)
        right.append((follower.conclude(undecided) > 0) == (bits > 0))
        follower.learn(bits)
        threshold += rate * (bits - 0.5)
    return float(np.mean(right[len(right) // 2 :])), follower


def test_weights_that_turn_are_followed() -> None:
    random, steps = np.random.default_rng(0), 1600
    given = random.normal(size=(steps, 8)).astype(np.float32)
    angles = np.arange(steps) / 300
    turning = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    found, _ = followed((given[:, :2] * turning).sum(axis=1, keepdims=True), given, rate=0.0)
    assert found > 0.85


def test_a_threshold_that_holds_a_rate_is_foreseen_from_what_ran_lately() -> None:
    random = np.random.default_rng(0)
    nothing = np.zeros((2000, 1), np.float32)  # which says nothing of the score
    scores = 0.5 * random.normal(size=(2000, 3)).astype(np.float32)
    held, _ = followed(scores, nothing, rate=0.5)
    free, _ = followed(scores, nothing, rate=0.0)
    assert free < 0.55 < 0.62 < held


def test_what_many_numbers_say_is_kept_as_decisions_grow() -> None:
    random = np.random.default_rng(0)
    given = random.normal(size=(60, 3 * WIDEST)).astype(np.float32)
    _, follower = followed(given[:, :2], given, rate=0.0)
    before = follower.expect(given[0])
    follower.widen(3 * WIDEST, 0, 5)
    after = follower.expect(given[0])
    np.testing.assert_allclose(after[:2], before, rtol=1e-5)
    assert (after[2:] == 0).all()


def test_the_next_decision_is_foreseen_by_the_state_that_decided_the_last() -> None:
    network = GatedNetwork(6, seed=3)
    samples = network.samples(400)
    program = Program(network.architecture)
    pilot, right, alone = DecisionPilot(program, width=4), [], []
    order = np.argsort(program.first_rank[1:])
    for sample in samples:
        bits = program.bits(sample.path) > 0.5
        for asked in range(6):
            likely = pilot.foresee(sample, asked).probabilities
            if pilot.mlp is not None:
                right.append((likely[order[asked]] > 0.5) == bits[order[asked]])
                alone.append((pilot.mlp.one(pilot._row)[order[asked]] > 0) == bits[order[asked]])
        pilot.learn(sample)
    assert np.mean(right[-600:]) > np.mean(alone[-600:]) + 0.05


def test_no_certainty_and_no_constant_makes_lines_lose_their_numbers() -> None:
    given, always = np.zeros((3000, 4), np.float32), np.ones((3000, 2), np.float32)
    found, follower = followed(always, given, rate=0.0)
    assert found == 1
    for one in follower.arrays("lines").values():
        assert np.isfinite(one).all()
        assert np.abs(one).max(initial=0) < 100


def test_a_network_that_hands_numbers_to_the_host_later_is_learned_on() -> None:
    follower = Follower()
    follower.widen(4, 0, 2)
    follower.widen(4, 8, 3)
    assert follower.ahead.weights.shape[:2] == (AHEAD, 3)
    follower.expect(np.ones(4, np.float32))
    follower.conclude(np.zeros(3, np.float32))
    known, order = np.array([1, 0, 0], np.float32), np.arange(3)
    follower.redirect(np.zeros(3, np.float32), np.ones(8, np.float32), known, order)
    follower.learn(np.array([1, 1, 0], np.float32))
    found = follower.redirect(np.zeros(3, np.float32), np.ones(8, np.float32), known, order)
    assert found[1] > 0 > found[2]


def test_files_of_before_have_no_lines_or_less_of_them_and_others_are_refused() -> None:
    network = GatedNetwork(3, seed=1)
    pilot = DecisionPilot(Program(network.architecture), width=4)
    samples = network.samples(40)
    pilot.program.follow()
    pilot.fit(samples, epochs=1)
    arrays, settings = pilot.arrays(), pilot.settings()
    before = {name: one for name, one in arrays.items() if not name.startswith("lines")}
    before_often = {name: one for name, one in arrays.items() if not name.endswith("often")}
    assert before.keys() < before_often.keys() < arrays.keys()
    for those in (before, before_often):
        made = DecisionPilot.of_arrays(pilot.program, those, settings)
        made.foresee(samples[0])
        made.learn(samples[0])
    with pytest.raises(ValueError, match="are not lines of 3 decisions"):
        DecisionPilot.of_arrays(pilot.program, arrays | {"lines.usual": np.zeros(9, np.float32)}, settings)
