"""The decision pilot: for every part of the network that does not always run, how likely it runs.

Not in the paper. What DyNN-Offload predicts are sums over blocks, whose borders move with every earlier decision; here
each decision has one output, and what is known when it is asked is an input: the sizes, the mean of the embedding, the
structure that the input itself has, the hidden state that was re-directed at the last decision (section IV-C re-directs
the embedding), and what is resolved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, Self, final

import numpy as np

from spillway.errors import UsageError
from spillway.pilots.mlp import Mlp, sigmoid
from spillway.pilots.paths import Floats, Sample
from spillway.pilots.pilot import AbstractPilot, Foresight
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
class DecisionPilot(AbstractPilot):
    """One logit per decision, by a perceptron with two hidden layers.

    It learns from a ring of the last steps as they come (`learn`), ahead of the run (`fit`), or both. Its logits are
    divided by the temperature that would have been best for what it foresaw of the steps in the ring, before it had
    learned them: a network that trains on is foreseen less well than one that was learned. A bias for each decision
    follows thresholds that move from step to step.

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
        self.ring: deque[Sample] = deque(maxlen=RING)
        """The last steps."""
        self.surprise = 2 * CERTAIN
        """Cross-entropy of a decision that was foreseen as steps began, decayed."""
        self._random = np.random.default_rng(seed)
        self._seed = seed
        self._foreseen: deque[tuple[Floats, Floats]] = deque(maxlen=RING)  # logits and what came of them
        self._upfront: tuple[Sample, Floats] | None = None
        self._row = np.zeros(0, np.float32)
        self._given = self._hidden = 0

    # ------------------------------------------------------------------ features

    def _fill(self, row: Floats, sample: Sample, asked: int) -> Floats | None:
        """What is known of a sample then: embedding, sizes and their logarithms, structure; and of a network that hands
        numbers to the host whether it has, the hidden state, and what is resolved, which is returned. Raises UsageError
        for samples with more or fewer numbers than it has learned from."""
        sizes = np.array(sample.sizes, np.float32)
        given = np.concatenate(
            [sample.embedding, sizes, np.log1p(np.abs(sizes)), np.array(sample.structure, np.float32)]
        )
        end = len(given)
        if end != self._given:
            raise UsageError(
                f"The decision pilot has learned from {self._given} numbers a sample, and this one has {end}: describe "
                f"batches as it knows them (Dynamism), or train another pilot."
            )
        row[:end] = given
        row[end:] = 0
        if not (asked and self._hidden):
            return None
        known = self._known(sample, asked)
        row[end] = 1
        row[end + 1 : end + 1 + self._hidden] = sample.hidden[asked - 1]
        resolved = row[end + 1 + self._hidden :]
        resolved[: len(known)] = known[: len(resolved)]  # the program may have learned decisions since
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
        grown = max(decisions, 1) - self.mlp.widths[-1]
        if grown > 0:
            self.mlp.widen(self.mlp.widths[0] + (grown if self._hidden else 0), max(decisions, 1))
        self.bias = np.concatenate([self.bias, np.zeros(max(decisions, 1) - len(self.bias), np.float32)])
        self.redirects = bool(self._hidden)
        if len(self._row) != self.mlp.widths[0]:
            self._row = np.zeros(self.mlp.widths[0], np.float32)
        return self.mlp

    # ------------------------------------------------------------------ foresight

    def foresee(self, sample: Sample, asked: int = 0) -> Foresight:
        """Of what is resolved it is certain."""
        if self.mlp is None:
            return Foresight(np.full(self.program.decisions, 0.5, np.float32))
        known = self._fill(self._row, sample, asked)
        logits = self.mlp.one(self._row) + self.bias
        if not asked:
            self._upfront = (sample, logits)
        found = sigmoid(logits / self.temperature)
        if known is not None:
            known = known[: len(found)]
            np.copyto(found[: len(known)], known > OPEN, where=known != OPEN)
        return Foresight(found)

    # ------------------------------------------------------------------ learning

    def learn(self, sample: Sample) -> None:
        """A step, with some of those in the ring."""
        self.program.follow()
        mlp = self._prepare(sample)
        self._remember(sample)
        self.ring.append(sample)
        if len(self.ring) == REPLAYED and not mlp.mean.any():
            mlp.standardize(self._rows(list(self.ring))[0])
        rate = RATE * min(self.surprise / CERTAIN - 1, 1.0)
        for _ in range(REPEATS if len(self.ring) >= REPLAYED and rate > 0 else 0):
            chosen = [sample, *(self.ring[one] for one in self._random.integers(0, len(self.ring), REPLAYED - 1))]
            asked = [int(self._random.integers(0, len(one.hidden) + 1)) if self._hidden else 0 for one in chosen]
            features, targets, counts = self._rows(chosen, asked)
            mlp.learn(features, targets, counts, loss="logits", rule="adam", rate=rate)

    def fit(self, samples: Sequence[Sample], *, epochs: int | None = None) -> int:
        """Learn from many samples at once, the last of which fill the ring. Returns how often each was learned, which
        is `EPOCHS` or what `BATCHES` take where nobody says it."""
        if not samples:
            return 0
        self.program.follow()
        mlp = self._prepare(samples[-1])
        features, targets, counts = self._rows(samples)
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
        self.ring.extend(samples)
        self.surprise = CERTAIN
        return epochs

    def _rows(self, samples: Sequence[Sample], asked: Sequence[int] | None = None) -> tuple[Floats, Floats, Floats]:
        """Features, bits and which bits were open: of every moment of every sample, or of one moment each."""
        assert self.mlp is not None
        if asked is None:
            pairs = [(one, at) for one in samples for at in range((len(one.hidden) if self._hidden else 0) + 1)]
        else:
            pairs = list(zip(samples, asked, strict=True))
        widths = self.mlp.widths
        features = np.zeros((len(pairs), widths[0]), np.float32)
        targets = np.zeros((len(pairs), widths[-1]), np.float32)
        counts = np.zeros((len(pairs), widths[-1]), np.float32)
        for row, (sample, at) in enumerate(pairs):
            self._fill(features[row], sample, at)
            targets[row, : self.program.decisions] = self.program.bits(sample.path)
            counts[row, : self.program.decisions] = self._known(sample, at) == OPEN if at else 1
        return features, targets, counts

    def _remember(self, sample: Sample) -> None:
        """What was foreseen of it, before it is learned."""
        if self._upfront is None or self._upfront[0] is not sample:
            return
        bits, logits = self.program.bits(sample.path), self._upfront[1]
        both = min(len(bits), len(logits))
        self._foreseen.append((logits[:both], bits[:both]))
        if both:
            loss = _cross_entropy(logits[:both], bits[:both])
            self.surprise += SURPRISE * (loss - self.surprise)
        self.bias[:both] += FOLLOWING * (bits[:both] - sigmoid(logits[:both]))
        self._upfront = None
        if len(self._foreseen) >= REPLAYED and len(self.ring) % CALIBRATED_AFTER == 0:
            self.calibrate()

    # ------------------------------------------------------------------ files

    def settings(self) -> dict[str, int]:
        """The numbers that `of_arrays` needs beside the arrays."""
        return {"width": self.width, "hidden": self._hidden, "given": self._given}

    def arrays(self) -> dict[str, Floats]:
        """What it has learned. Raises UsageError if that is nothing."""
        if self.mlp is None:
            raise UsageError("The decision pilot has learned nothing: train it before it is written.")
        ends = {"bias": self.bias, "calibration": np.array([self.temperature, self.surprise], np.float32)}
        return {**self.mlp.arrays("mlp"), **ends}

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
        made.temperature, made.surprise = ends[0], float(ends[1])
        made._row = np.zeros(made.mlp.widths[0], np.float32)
        return made

    def calibrate(self) -> None:
        """Take the temperature under which what was foreseen of the last steps has the least cross-entropy."""
        if not self._foreseen:
            return
        logits = np.concatenate([one for one, _ in self._foreseen])
        bits = np.concatenate([one for _, one in self._foreseen])
        losses = [_cross_entropy(logits / one, bits) for one in TEMPERATURES]
        self.temperature = TEMPERATURES[int(np.argmin(losses))]


def _cross_entropy(logits: Floats, bits: Floats) -> float:
    """Mean, in nats."""
    return float((np.logaddexp(np.float32(0), logits) - bits * logits).mean())
