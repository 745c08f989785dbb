"""Straight lines that follow what drifts: one logit a decision, learned from every step once.

Not in the paper. A network that trains on is another one some fifty steps later, and a perceptron that is taught by
descent has then not yet learned what it was. Lines have so few weights that all that a step says of them can be taken
in at once, and what is older is forgotten at the pace at which weights are taken to wander: an extended Kalman filter
of logistic regressions (West, Harrison and Migon 1985).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from spillway.pilots.mlp import sigmoid
from spillway.pilots.paths import Floats
from spillway.pilots.program import OPEN

Places: TypeAlias = NDArray[np.intp]
"""Numbers of decisions."""

SPANS: Final = np.array([8, 32, 128], np.float32)
"""Steps over which it is summed up how much more often than usual a part ran: a controller that holds a rate moves its
threshold by just that."""
_BY_CHANCE: Final = np.array(2 / np.sqrt(SPANS), np.float32)
USUAL: Final = 512
"""Steps of which the usual rate is the mean."""
UNSURE: Final = np.float32(0.2)
"""Variance of a weight of which nothing is known."""
WANDERS: Final = np.float32(3e-4)
"""Variance by which a weight is another one step later; it pulls towards `UNSURE`, which it never passes."""
OWN_UNSURE: Final = np.float32(0.3)
OWN_WANDERS: Final = np.float32(1e-3)
"""The same of the weights of sums over `SPANS`."""
CURVED: Final = np.float32(0.02)
"""The least curvature of a decision's cross-entropy, so that what is certain is not certain for good."""
SATURATED: Final = np.float32(3)
"""Logits beyond that, and inputs beyond twice that, say no more as inputs."""
FADING: Final = np.float32(0.98)
"""What is left of an advantage after a step."""
EAGER: Final = np.float32(0.3)
"""What a nat of advantage adds to the logit of a weight."""
DOUBTED: Final = np.float32(1)
"""What is taken from the logit of the weight of how often a part runs, which knows nothing of the sample."""
RARELY: Final = np.float32(5e-3)
"""No part is held to run less often, or more often than all but so many times."""
WIDEST: Final = 64
"""Of what is given that many numbers are inputs; more are projected on so many at random."""
AHEAD: Final = 6
"""Decisions that are foreseen by a line from the state that decided the last one."""
_DISTANCES: Final = np.arange(AHEAD)


@final
class Lines:
    """Logits of decisions [decisions], linear in inputs that they share [inputs] and in some that are each one's own
    [decisions, own]. How sure weights are is kept once for the shared inputs, of all decisions together."""

    def __init__(self, own: int) -> None:
        self.weights = np.zeros((1, 0), np.float32)
        """[inputs + 1, decisions] The last row meets a 1."""
        self.own = np.zeros((0, own), np.float32)
        """[decisions, own]"""
        self._covariance = np.eye(1, dtype=np.float32) * UNSURE
        self._own_covariance = np.zeros((0, own, own), np.float32)
        self._offsets = np.zeros(0, np.float32)

    def widen(self, inputs: int, decisions: int) -> None:
        """Take more inputs and decisions, behind those that are there; of their weights nothing is known."""
        had, known = len(self.weights) - 1, len(self.own)
        if (had, known) == (inputs, decisions):
            return
        weights = np.zeros((inputs + 1, decisions), np.float32)
        weights[:had, :known], weights[-1, :known] = self.weights[:-1], self.weights[-1]
        covariance = np.eye(inputs + 1, dtype=np.float32) * UNSURE
        places = np.array([*range(had), inputs])
        covariance[np.ix_(places, places)] = self._covariance
        width = self.own.shape[1]
        own = np.tile(np.eye(width, dtype=np.float32) * OWN_UNSURE, (decisions, 1, 1))
        own[:known] = self._own_covariance
        self._covariance, self._own_covariance, self.weights = covariance, own, weights
        self.own = np.concatenate([self.own, np.zeros((decisions - known, width), np.float32)])

    def settle(self, own: Floats) -> None:
        """What is each one's own is known before there is a sample."""
        self._offsets = self.weights[-1] + (self.own * own).sum(axis=1)

    def logits(self, inputs: Floats) -> Floats:
        """Of all decisions, for one sample."""
        found: Floats = inputs @ self.weights[:-1] + self._offsets
        return found

    def learn(self, inputs: Floats, own: Floats, bits: Floats) -> None:
        likely = sigmoid(self.logits(inputs))
        curved = np.maximum(likely * (1 - likely), CURVED)
        mean = curved.mean()
        whole = np.append(inputs, np.float32(1))
        shared, private = self._covariance, self._own_covariance
        shared *= 1 - WANDERS / UNSURE
        shared.flat[:: len(shared) + 1] += WANDERS
        private *= 1 - OWN_WANDERS / OWN_UNSURE
        private += np.eye(private.shape[1], dtype=np.float32) * OWN_WANDERS
        along, own_along = shared @ whole, np.einsum("dij,dj->di", private, own)
        spread, own_spread = whole @ along, np.einsum("do,do->d", own, own_along)
        step = (bits - likely) / (1 + curved * (spread + own_spread))
        self.weights += np.outer(along, step)
        self.own += own_along * step[:, None]
        shared -= np.outer(along, along * (mean / (1 + mean * spread)))
        gain = curved / (1 + curved * own_spread)
        private -= own_along[:, :, None] * (own_along * gain[:, None])[:, None, :]


@final
class LinesAhead:
    """Logits of the next decisions, linear in the state that decided the last one: of every decision one line for each
    distance from which it was foreseen, up to `AHEAD`. Nothing is shared: states are others at each."""

    def __init__(self) -> None:
        self.weights = np.zeros((AHEAD, 0, 0), np.float32)
        """[ahead, decisions, inputs + 1] The last one is its own, and meets a 1."""
        self._covariance = np.zeros((AHEAD, 0, 0, 0), np.float32)

    def widen(self, inputs: int, decisions: int) -> None:
        """Take more decisions; with other inputs nothing is known of any."""
        known, width = self.weights.shape[1:]
        if width != inputs + 1:  # a network that had handed nothing to the host has now
            self.weights, known = np.zeros((AHEAD, 0, inputs + 1), np.float32), 0
            self._covariance = np.zeros((AHEAD, 0, inputs + 1, inputs + 1), np.float32)
        more = decisions - known
        if not more:
            return
        self.weights = np.concatenate([self.weights, np.zeros((AHEAD, more, inputs + 1), np.float32)], axis=1)
        fresh = np.tile(np.eye(inputs + 1, dtype=np.float32) * UNSURE, (AHEAD, more, 1, 1))
        self._covariance = np.concatenate([self._covariance, fresh], axis=1)

    def logits(self, chosen: Places, inputs: Floats) -> Floats:
        """[chosen] Of the decisions that come next, `inputs` [chosen, inputs + 1]."""
        found: Floats = (self.weights[_DISTANCES[: len(chosen)], chosen] * inputs).sum(axis=1)
        return found

    def learn(self, chosen: Places, inputs: Floats, bits: Floats) -> None:
        places = _DISTANCES[: len(chosen)], chosen
        weights, covariance = self.weights[places], self._covariance[places]
        covariance *= 1 - WANDERS / UNSURE
        covariance += np.eye(inputs.shape[1], dtype=np.float32) * WANDERS
        likely = sigmoid((weights * inputs).sum(axis=1))
        curved = np.maximum(likely * (1 - likely), CURVED)
        along = np.einsum("dij,dj->di", covariance, inputs)
        gain = 1 / (1 + curved * np.einsum("di,di->d", along, inputs))
        self.weights[places] = weights + along * (gain * (bits - likely))[:, None]
        covariance -= along[:, :, None] * (along * (gain * curved)[:, None])[:, None, :]
        self._covariance[places] = covariance


@final
class Follower:
    """Lines before and behind another learner, which is slower and less simple.

    The first lines have what is given of a sample, and how often each part ran lately. What they expect is an input of
    the other learner. The second lines have in addition what both expect of all decisions, as later ones hang on
    earlier ones. Lines ahead have the state with which the host was asked last. All are mixed with the other learner,
    and believed more where they did better in the last steps; so is how often each part runs, which is the best that
    can be known of one that next to always does.
    """

    def __init__(self) -> None:
        self.first, self.second, self.ahead = Lines(len(SPANS)), Lines(len(SPANS)), LinesAhead()
        self.advantage = np.zeros(0, np.float32)
        """[decisions] Nats by which the second lines were better than the other learner, decayed."""
        self.often_advantage = np.zeros(0, np.float32)
        """[decisions] Nats by which how often each ran was better than both together."""
        self.lately = np.zeros((0, len(SPANS)), np.float32)
        """[decisions, spans] How many more times than usual each part ran, decayed."""
        self.usual = np.zeros(0, np.float32)
        """[decisions] How often each ran."""
        self.steps = 0
        self.ahead_advantage = np.zeros((AHEAD, 0), np.float32)
        """[ahead, decisions] The same of lines ahead."""
        self._projections: dict[int, Floats] = {}
        self._moments: list[tuple[Places, Floats, Floats, Floats]] = []
        self._inputs = self._first = self._both = self._other = self._said = np.zeros(0, np.float32)
        self._mixed = self._often = self._inputs

    def widen(self, given: int, hidden: int, decisions: int) -> None:
        """Be ready for so many numbers of a sample, so many of a state, and so many decisions."""
        more = decisions - len(self.usual)
        inputs = min(given, WIDEST)
        self.first.widen(inputs, decisions)
        self.second.widen(inputs + 2 * decisions, decisions)
        self.ahead.widen(min(hidden, WIDEST) + len(SPANS) + 2, decisions)
        self.advantage = np.append(self.advantage, np.zeros(more, np.float32))
        self.often_advantage = np.append(self.often_advantage, np.zeros(more, np.float32))
        self.ahead_advantage = np.append(self.ahead_advantage, np.zeros((AHEAD, more), np.float32), axis=1)
        self.usual = np.append(self.usual, np.zeros(more, np.float32))
        self.lately = np.concatenate([self.lately, np.zeros((more, len(SPANS)), np.float32)])
        self._settle()

    def _narrowed(self, numbers: Floats) -> Floats:
        """At most `WIDEST`, none of them far out."""
        count = len(numbers)
        if count > WIDEST:
            if count not in self._projections:
                drawn = np.random.default_rng(0).normal(size=(count, WIDEST)) / count**0.5
                self._projections[count] = drawn.astype(np.float32)
            numbers = numbers @ self._projections[count]
        found: Floats = np.minimum(np.maximum(numbers, -2 * SATURATED), 2 * SATURATED)
        return found

    def expect(self, given: Floats) -> Floats:
        """[decisions] What the first lines expect of a sample, from -1 to 1. `given` has mean 0 and variance 1."""
        self._inputs = self._narrowed(given)
        self._first = self.first.logits(self._inputs)
        expected: Floats = np.tanh(self._first * np.float32(0.5))
        return expected

    def conclude(self, other: Floats) -> Floats:
        """[decisions] Logits of that sample, of the second lines and the other learner together, which says `other`."""
        decisions = len(self.usual)
        both = np.empty((decisions, 2), np.float32)
        both[:, 0], both[:, 1] = self._first, other
        np.minimum(np.maximum(both, -SATURATED, out=both), SATURATED, out=both)
        self._both = np.concatenate([self._inputs, both.ravel()])
        self._other = other
        self._moments.clear()
        self._said = self.second.logits(self._both)
        self._mixed = other + sigmoid(EAGER * self.advantage) * (self._said - other)
        often = np.minimum(np.maximum(self.usual, RARELY), 1 - RARELY)
        self._often = np.log(often / (1 - often))
        found: Floats = self._mixed + sigmoid(EAGER * self.often_advantage - DOUBTED) * (self._often - self._mixed)
        return found

    def redirect(self, other: Floats, state: Floats, known: Floats, order: Places) -> Floats:
        """[decisions] Logits, the next ones by lines from a state of mean 0 and variance 1; the other learner says
        `other`, and of decisions in `order` some are `known`."""
        is_open = known[order] == OPEN
        chosen = order[is_open][:AHEAD]
        if not len(chosen):
            return other
        resolved = order[~is_open]
        narrow = self._narrowed(state)
        inputs = np.ones((len(chosen), len(narrow) + len(SPANS) + 3), np.float32)
        inputs[:, : len(narrow)] = narrow
        inputs[:, len(narrow) : -3] = self._own[chosen]
        inputs[:, -3] = np.minimum(np.maximum(other[chosen], -SATURATED), SATURATED)
        inputs[:, -2] = known[resolved[-1]] if len(resolved) else 0
        said = self.ahead.logits(chosen, inputs)
        self._moments.append((chosen, inputs, said, other[chosen]))
        believed = sigmoid(EAGER * self.ahead_advantage[_DISTANCES[: len(chosen)], chosen])
        found = other.copy()
        found[chosen] += believed * (said - other[chosen])
        return found

    def learn(self, bits: Floats, *, judged: bool = True) -> None:
        """What came of the sample that was concluded last; it is not `judged` if the other learner said nothing."""
        self.first.learn(self._inputs, self._own, bits)
        self.second.learn(self._both, self._own, bits)
        if judged:
            self.advantage *= FADING
            self.advantage += nats(self._other, bits) - nats(self._said, bits)
            self.often_advantage *= FADING
            self.often_advantage += nats(self._mixed, bits) - nats(self._often, bits)
        for chosen, inputs, said, other in self._moments:
            places = _DISTANCES[: len(chosen)], chosen
            self.ahead.learn(chosen, inputs, bits[chosen])
            if judged:
                self.ahead_advantage[places] *= FADING
                self.ahead_advantage[places] += nats(other, bits[chosen]) - nats(said, bits[chosen])
        self._moments.clear()
        self.steps += 1
        self.usual += (bits - self.usual) * np.float32(1 / min(self.steps, USUAL))
        self.lately *= 1 - 1 / SPANS
        self.lately += (bits - self.usual)[:, None]
        self._settle()

    def arrays(self, name: str) -> dict[str, Floats]:
        """What it has learned but how sure it is, by names that begin with `name`."""
        first, second = self.first, self.second
        return {
            f"{name}.first": first.weights, f"{name}.first.own": first.own, f"{name}.second": second.weights,
            f"{name}.second.own": second.own, f"{name}.ahead": self.ahead.weights, f"{name}.advantage": self.advantage,
            f"{name}.advantage.ahead": self.ahead_advantage, f"{name}.advantage.often": self.often_advantage,
            f"{name}.lately": self.lately, f"{name}.usual": self.usual,
        }  # fmt: skip

    def take(self, name: str, arrays: Mapping[str, Floats]) -> None:
        """What `arrays` gave; nothing is learned yet by files of before, which have none of them. Raises ValueError for
        arrays of other shapes."""
        own = self.arrays(name)
        given = {one: arrays[one] for one in own if one in arrays}
        if given:
            given.setdefault(f"{name}.advantage.often", self.often_advantage)  # which younger files have alone
        if given and any(one not in given or given[one].shape != array.shape for one, array in own.items()):
            shapes = {one: array.shape for one, array in given.items()}
            raise ValueError(
                f"the arrays {name!r} are not lines of {len(self.usual)} decisions: their shapes are {shapes}"
            )
        for one, array in given.items():
            own[one][...] = array
        self.steps = USUAL if given else 0
        self._settle()

    def _settle(self) -> None:
        """Sums in the deviations that they had if parts ran by chance."""
        self._own: Floats = self.lately * _BY_CHANCE
        self.first.settle(self._own)
        self.second.settle(self._own)


def nats(logits: Floats, bits: Floats) -> Floats:
    """Cross-entropy of each."""
    found: Floats = np.logaddexp(np.float32(0), logits) - bits * logits
    return found
