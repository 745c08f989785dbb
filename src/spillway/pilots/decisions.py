"""The decision pilot: for every part of the network that does not always run, how likely it runs.

Not in the paper. What DyNN-Offload predicts are sums over blocks, whose borders move with every earlier decision; here
each decision has one output, and what is known when it is asked is an input: the sizes, the mean of the embedding, the
structure that the input itself has, the hidden state that was re-directed at the last decision (section IV-C re-directs
the embedding), and what is resolved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Self, final

import numpy as np

from spillway.errors import UsageError
from spillway.pilots.lines import Follower, nats
from spillway.pilots.mlp import Mlp, sigmoid
from spillway.pilots.paths import Floats, Sample, finite
from spillway.pilots.pilot import AbstractPilot, Foresight, other_numbers
from spillway.pilots.program import OPEN, Program

RING: Final = 256
"""Steps that are kept to learn from, and to calibrate on: while a network trains, what is older misleads."""
REPLAYED: Final = 32
"""Steps that are learned at once, the one that ran among them."""
REPEATS: Final = 2
"""How often that is done after a step."""
RATE: Final = 1e-3
"""Of Adam."""
CERTAIN: Final = 0.2
"""Cross-entropy of a decision, in nats, below which nothing is learned, as that would only forget what is older; the
rate grows from there to twice as much."""
SURPRISE: Final = 0.05
"""Share of the last step in the cross-entropy that is compared with that."""
FOLLOWING: Final = np.float32(0.2)
"""How far the bias of a decision follows what it was and was not expected to be."""
ROWS: Final = 64
"""In a batch of `fit`."""
EPOCHS: Final = 8
BATCHES: Final = 1024
"""Of `fit`, at least: of a network that hands no numbers to the host there is one row a sample, of others many."""
CALIBRATED_AFTER: Final = 64
"""Steps from one calibration to the next."""
TEMPERATURES: Final = np.geomspace(0.5, 8, 17, dtype=np.float32)


@final
class _Step(NamedTuple):
    """A sample as it is learned."""

    sample: Sample
    given: Floats
    expected: Floats
    """[decisions] By lines, before it ran, from -1 to 1."""


@final
class DecisionPilot(AbstractPilot):
    """One logit per decision, by a perceptron with two hidden layers and by lines.

    The perceptron learns from a ring of the last steps as they come (`learn`), ahead of the run (`fit`), or both. Its
    logits are divided by the temperature that would have been best for what it foresaw of the steps in the ring, before
    it had learned them: a network that trains on is foreseen less well than one that was learned. A bias for each
    decision follows thresholds that move from step to step. Lines (`lines.py`) learn faster what a network becomes: the
    perceptron is told what they expect, and they are believed more where they have been better in the last steps.

    Arguments:
        width: Of both hidden layers.
        seed: Of the weights and of what is drawn from the ring.
    """

    name = "decisions"

    def __init__(self, program: Program, *, width: int = 256, seed: int = 0) -> None:
        self.program = program
        self.width = width
        self.mlp: Mlp | None = None
        """None before the first sample."""
        self.temperature = np.float32(1)
        """What logits are divided by."""
        self.bias = np.zeros(0, np.float32)
        """[decisions] What is added to them before."""
        self.follower = Follower()
        """Lines, which know what happened lately."""
        self.ring: deque[_Step] = deque(maxlen=RING)
        """The last steps."""
        self.surprise = 2 * CERTAIN
        """Cross-entropy of a decision that was foreseen as steps began, decayed."""
        self._random = np.random.default_rng(seed)
        self._seed = seed
        self._foreseen: deque[tuple[Floats, Floats]] = deque(maxlen=RING)  # logits and what came of them
        self._begun: _Step | None = None
        self._upfront: tuple[_Step, Floats] | None = None  # and logits
        self._standardized = False
        self._row = np.zeros(0, np.float32)
        self._given = self._hidden = self._learned = 0
        self._version = -1
        self._order = np.zeros(0, np.intp)

    # ------------------------------------------------------------------ features

    def _given_of(self, sample: Sample) -> Floats:
        """What is known of a sample at all times: embedding, sizes and their logarithms, structure. Raises UsageError
        for samples with more or fewer numbers than it has learned from."""
        sizes = np.array(sample.sizes, np.float32)
        given = np.concatenate(
            [sample.embedding, sizes, np.log1p(np.abs(sizes)), np.array(sample.structure, np.float32)]
        )
        if len(given) != self._given:
            raise other_numbers("decision", self._given, len(given))
        return finite(given)

    def _fill(self, row: Floats, step: _Step, asked: int) -> Floats | None:
        """What is known of a sample then: what is given; and of a network that hands numbers to the host whether it
        has, the hidden state, and what is resolved, which is returned. What is not resolved is as lines expected it."""
        end, sample = self._given, step.sample
        row[:end] = step.given
        row[end:] = 0
        if not self._hidden:
            return None
        resolved = row[end + 1 + self._hidden :]
        resolved[: len(step.expected)] = step.expected[: len(resolved)]  # the program may have learned decisions since
        if not asked:
            return None
        row[end] = 1
        row[end + 1 : end + 1 + self._hidden] = finite(sample.hidden[asked - 1])
        known = self._known(sample, asked)
        both = min(len(known), len(resolved))
        np.copyto(resolved[:both], known[:both], where=known[:both] != OPEN)
        return known

    def _known(self, sample: Sample, asked: int) -> Floats:
        return self.program.known_after(sample.path, int(sample.asked_at[asked - 1]) + 2)

    def _prepare(self, sample: Sample) -> Mlp:
        """A perceptron that is wide enough for what the program has learned meanwhile."""
        decisions = self.program.decisions
        if self.mlp is None or (len(sample.hidden) and not self._hidden):
            self._hidden = sample.hidden.shape[1] if len(sample.hidden) else 0
            self._given = len(sample.embedding) + 2 * len(sample.sizes) + len(sample.structure)
            features = self._given + ((1 + self._hidden + decisions) if self._hidden else 0)
            self.mlp = Mlp([features, self.width, self.width, max(decisions, 1)], seed=self._seed)
            self._standardized = False
        grown = max(decisions, 1) - self.mlp.widths[-1]
        if grown > 0:
            self.mlp.widen(self.mlp.widths[0] + (grown if self._hidden else 0), max(decisions, 1))
        self.bias = np.concatenate([self.bias, np.zeros(max(decisions, 1) - len(self.bias), np.float32)])
        self.follower.widen(self._given, self._hidden, max(decisions, 1))
        self.redirects = bool(self._hidden)
        if len(self._row) != self.mlp.widths[0]:
            self._row = np.zeros(self.mlp.widths[0], np.float32)
        return self.mlp

    # ------------------------------------------------------------------ foresight

    def foresee(self, sample: Sample, asked: int = 0) -> Foresight:
        """Of what is resolved it is certain."""
        if self.mlp is None:
            return Foresight(np.full(self.program.decisions, 0.5, np.float32))
        if not asked or self._begun is None or self._begun.sample is not sample:
            self._begun = self._begin(sample)
        known = self._fill(self._row, self._begun, asked)
        logits = self.mlp.one(self._row) + self.bias
        calm = logits / self.temperature
        if not asked:
            self._upfront = self._begun, logits
            calm = self.follower.conclude(calm)
        elif known is not None:
            calm = self._redirected(sample, asked, calm, known)
        found = sigmoid(calm)
        if known is not None:
            known = known[: len(found)]
            np.copyto(found[: len(known)], known > OPEN, where=known != OPEN)
        return Foresight(found)

    def _redirected(self, sample: Sample, asked: int, logits: Floats, known: Floats) -> Floats:
        """Logits of a moment in which the perceptron says these."""
        assert self.mlp is not None
        if self._version != self.program.version:
            self._version = self.program.version
            self._order = np.argsort(self.program.first_rank[1:], kind="stable")
        if len(self._order) != len(logits) or len(known) != len(logits):
            return logits
        at = slice(self._given + 1, self._given + 1 + self._hidden)
        state = (finite(sample.hidden[asked - 1]) - self.mlp.mean[at]) * self.mlp.scale[at]
        return self.follower.redirect(logits, state, known, self._order)

    def _begin(self, sample: Sample) -> _Step:
        """A sample, and what lines expect of it."""
        assert self.mlp is not None
        given, end = self._given_of(sample), self._given
        standard = (given - self.mlp.mean[:end]) * self.mlp.scale[:end] if self._standardized else np.zeros_like(given)
        return _Step(sample, given, self.follower.expect(standard))

    # ------------------------------------------------------------------ learning

    def learn(self, sample: Sample) -> None:
        self.program.follow()
        mlp = self._prepare(sample)
        step = self._remember(sample)
        self.ring.append(step)
        if len(self.ring) >= REPLAYED and not self._standardized:
            mlp.standardize(self._rows(self.ring)[0])
            self._standardized = True
        rate = RATE * min(self.surprise / CERTAIN - 1, 1.0)
        for _ in range(REPEATS if len(self.ring) >= REPLAYED and rate > 0 else 0):
            chosen = [step, *(self.ring[one] for one in self._random.integers(0, len(self.ring), REPLAYED - 1))]
            asked = [int(self._random.integers(0, len(one.sample.hidden) + 1)) if self._hidden else 0 for one in chosen]
            features, targets, counts = self._rows(chosen, asked)
            mlp.learn(features, targets, counts, loss="logits", rule="adam", rate=rate)

    def fit(self, samples: Sequence[Sample], *, epochs: int | None = None) -> int:
        """Learn from many samples at once, the last of which fill the ring. Returns how often each was learned, which
        is `EPOCHS` or what `BATCHES` take where nobody says it."""
        if not samples:
            return 0
        self.program.follow()
        mlp = self._prepare(next((one for one in samples if len(one.hidden)), samples[0]))
        blank = np.zeros(0, np.float32)
        mlp.standardize(self._rows([_Step(one, self._given_of(one), blank) for one in samples])[0])
        self._standardized = True
        steps = [self._followed(one) for one in samples]
        features, targets, counts = self._rows(steps)
        mlp.standardize(features)
        batches = -(-len(features) // ROWS)
        epochs = epochs or max(EPOCHS, BATCHES // batches)
        for epoch in range(epochs):
            order = self._random.permutation(len(features))
            # Down to nothing along half a cosine (Loshchilov and Hutter 2017).
            rate = RATE * 0.5 * (1 + np.cos(np.pi * epoch / epochs))
            for batch in range(batches):
                chosen = order[batch * ROWS : (batch + 1) * ROWS]
                mlp.learn(features[chosen], targets[chosen], counts[chosen], loss="logits", rule="adam", rate=rate)
        self.ring.extend(steps)
        self.surprise = CERTAIN
        return epochs

    def _followed(self, sample: Sample) -> _Step:
        """A step of which the perceptron says nothing yet."""
        step = self._begin(sample)
        undecided = np.zeros_like(self.bias)
        self.follower.conclude(undecided)
        for asked in range(1, (len(sample.hidden) if self._hidden else 0) + 1):
            self._redirected(sample, asked, undecided, self._known(sample, asked))
        self.follower.learn(self._bits(sample), judged=False)
        return step

    def _bits(self, sample: Sample) -> Floats:
        """[decisions, at least 1] As many as there are outputs."""
        bits = self.program.bits(sample.path)
        return bits if len(bits) else np.zeros(1, np.float32)

    def _rows(self, samples: Sequence[_Step], asked: Sequence[int] | None = None) -> tuple[Floats, Floats, Floats]:
        """Features, bits and which bits were open: of every moment of every sample, or of one moment each."""
        assert self.mlp is not None
        if asked is None:
            pairs = [(one, at) for one in samples for at in range((len(one.sample.hidden) if self._hidden else 0) + 1)]
        else:
            pairs = list(zip(samples, asked, strict=True))
        widths = self.mlp.widths
        features = np.zeros((len(pairs), widths[0]), np.float32)
        targets = np.zeros((len(pairs), widths[-1]), np.float32)
        counts = np.zeros((len(pairs), widths[-1]), np.float32)
        for row, (step, at) in enumerate(pairs):
            known = self._fill(features[row], step, at)
            targets[row, : self.program.decisions] = self.program.bits(step.sample.path)
            counts[row, : self.program.decisions] = 1 if known is None else known == OPEN
        return features, targets, counts

    def _remember(self, sample: Sample) -> _Step:
        """What was foreseen of it, before it is learned."""
        bits = self._bits(sample)
        if self._upfront is None or self._upfront[0].sample is not sample or len(self._upfront[1]) != len(bits):
            self.foresee(sample)
        assert self._upfront is not None
        step, logits = self._upfront
        self._foreseen.append((logits, bits))
        self.surprise += SURPRISE * (float(nats(logits, bits).mean()) - self.surprise)
        self.bias += FOLLOWING * (bits - sigmoid(logits))
        self.follower.learn(bits)
        self._upfront = None
        self._learned += 1
        if len(self._foreseen) >= REPLAYED and self._learned % CALIBRATED_AFTER == 0:
            self.calibrate()
        return step

    # ------------------------------------------------------------------ files

    def settings(self) -> dict[str, int]:
        """The numbers that `of_arrays` needs beside the arrays."""
        return {"width": self.width, "hidden": self._hidden, "given": self._given}

    def arrays(self) -> dict[str, Floats]:
        """What it has learned. Raises UsageError if that is nothing."""
        if self.mlp is None:
            raise UsageError("The decision pilot has learned nothing: train it before it is written.")
        ends = {"bias": self.bias, "calibration": np.array([self.temperature, self.surprise], np.float32)}
        return {**self.mlp.arrays("mlp"), **self.follower.arrays("lines"), **ends}

    @classmethod
    def of_arrays(cls, program: Program, arrays: Mapping[str, Floats], settings: Mapping[str, int]) -> Self:
        """The pilot that `arrays` and `settings` are of. Raises ValueError if they do not fit the program."""
        made = cls(program, width=settings.get("width", 0))
        made.mlp = Mlp.of_arrays("mlp", arrays)
        made._hidden = settings.get("hidden", 0)
        besides = (1 + made._hidden + program.decisions) if made._hidden else 0
        made._given = settings.get("given", made.mlp.widths[0] - besides)  # files of before say it so
        made.redirects = bool(made._hidden)
        lacking = np.zeros(0, np.float32)
        made.bias, ends = arrays.get("bias", lacking), arrays.get("calibration", lacking)
        outputs, inner = made.mlp.widths[-1], made.mlp.widths[1:-1]
        if outputs != max(program.decisions, 1) or made.bias.shape != (outputs,) or ends.shape != (2,):
            raise ValueError(f"a pilot of {outputs} decisions cannot serve an architecture of {program.decisions}")
        if inner != (made.width, made.width):
            raise ValueError(f"the hidden layers are {inner} wide, and not {made.width}")
        if not ends[0] > 0:
            raise ValueError(f"logits cannot be divided by {ends[0]}")
        made.temperature, made.surprise = ends[0], float(ends[1])
        made._row = np.zeros(made.mlp.widths[0], np.float32)
        made._standardized = True
        made.follower.widen(made._given, made._hidden, outputs)
        made.follower.take("lines", arrays)
        return made

    def calibrate(self) -> None:
        """Take the temperature under which what was foreseen of the last steps has the least cross-entropy."""
        if not self._foreseen:
            return
        logits = np.concatenate([one for one, _ in self._foreseen])
        bits = np.concatenate([one for _, one in self._foreseen])
        losses = [nats(logits / one, bits).mean() for one in TEMPERATURES]
        self.temperature = TEMPERATURES[int(np.argmin(losses))]
