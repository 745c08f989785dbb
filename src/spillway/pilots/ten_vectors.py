"""The pilot as published: a vector of ten numbers for each execution block, mapped back to a path.

Ren et al., "Enabling Large Dynamic Neural Network Training with Learning-based Memory Management", HPCA 2024, sections
IV-A to IV-E. Of a block it predicts how many ops it has, and the sums of their six idioms and three dimensions; the
known path with these numbers is what it foresees.

Where the paper is silent or contradicts itself (its pilot has 3,260 parameters, and 512 neurons in every layer):

- The sample is the mean of its embedding, with its sizes beside it, since a mean does not tell how much there was. The
  architecture feature matrix (AFM) is the sums of its columns, its rows and its rows of control flow: an input of a
  fixed length, which within one network never varies.
- At most `BLOCKS` blocks, those that are missing all zeros; what is beyond counts with the last. Targets are brought to
  mean 0 and variance 1, and gradient descent has a momentum of 0.9 beside the paper's rate of 0.01.
- Known paths stand for all branches that could be enumerated, which are exponentially many: the exact match among them,
  else the nearest of those whose number of ops is closest (section IV-B takes the closest number alone).
- A path is labelled as its forward, which is all that has to be predicted; its results stay for the backward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final, Self, final

import numpy as np

from spillway.errors import UsageError
from spillway.pilots.execution_blocks import Cuts, Touches, max_fill
from spillway.pilots.idioms import nine_vectors
from spillway.pilots.mlp import Mlp
from spillway.pilots.paths import BaseType, Floats, ResolvedPath, Sample, finite
from spillway.pilots.pilot import AbstractPilot, Foresight, other_numbers
from spillway.pilots.program import Program
from spillway.units import Bytes

BLOCKS: Final = 24
"""Vectors of a label."""
TEN: Final = 10
WINDOW: Final = 16
"""Known paths that are compared with what was predicted."""
RATE: Final = 0.01
"""The paper's learning rate (section V)."""
ROWS: Final = 64
"""In a batch."""
EPOCHS: Final = 40
"""Of `fit`; the paper does not say."""
RECORDED: Final = 4096
"""Labelled paths that are compared, and mispredictions, that are kept."""


def touches_of(program: Program, sample: Sample) -> Touches:
    """What each op of a sample's forward has to have in memory: parameters, and the results of ops, which stay.

    Seconds are 1 an op: where `max_fill` cuts does not depend on them.
    """
    architecture, path = program.architecture, sample.path
    parameters = len(architecture.parameters)
    created = np.array([one.created for one in architecture.signatures], np.int64)[sample.signatures]
    used = [architecture.ops[key].parameters for key in path.keys.tolist()]
    reads, starts = path.operands.tolist(), path.starts.tolist()
    places, storages, writes = [0], list[int](), list[bool]()
    for op, (weights, nbytes) in enumerate(zip(used, created.tolist(), strict=True)):
        read = {parameters + one for one in reads[starts[op] : starts[op + 1]]}
        storages += [*weights, *read]
        writes += [False] * (len(weights) + len(read))
        if nbytes:
            storages.append(parameters + op)
            writes.append(True)
        places.append(len(storages))
    sizes = [one.nbytes for one in architecture.parameters]
    return Touches(
        starts=np.array(places), storages=np.array(storages, np.int64), writes=np.array(writes, bool),
        seconds=np.ones(len(path)), nbytes=np.concatenate([np.array(sizes, np.int64), created]),
        there=np.arange(parameters + len(path)) < parameters, until=np.full(parameters + len(path), len(path) + 1),
    )  # fmt: skip


def vectors_of(vectors: Floats, sample: Sample, cuts: Cuts) -> Floats:
    """[BLOCKS, 10] The label of a sample cut into blocks; `vectors` are the nine of every signature."""
    own = np.concatenate([np.ones((len(sample.path), 1), np.float32), vectors[sample.signatures]], axis=1)
    sums = np.add.reduceat(own, np.array(cuts[:-1], np.intp), axis=0)
    found = np.zeros((BLOCKS, TEN), np.float32)
    found[: len(sums)] = sums[:BLOCKS]
    found[-1] += sums[BLOCKS:].sum(axis=0)
    return found


@final
class PublishedPilot(AbstractPilot):
    """Three perceptrons, of which the network's base type selects one, and the known paths.

    It learns ahead of the run alone (`fit`), as published; `learn` remembers paths and mispredictions.

    Arguments:
        allowed: Device memory, of which a block may touch half.
        width: Of both hidden layers.
        seed: Of the weights.
    """

    name = "published"

    def __init__(self, program: Program, *, allowed: Bytes, width: int = 512, seed: int = 0) -> None:
        self.program = program
        self.allowed = allowed
        self.width = width
        self.cache = True
        """Whether a path that was mispredicted is what the same prediction means from then on (section IV-E)."""
        self.mlps: dict[BaseType, Mlp] = {}
        """One a base type, once it has learned."""
        self.cached = 0
        """Foresights that a misprediction of before has answered."""
        self._seed = seed
        self._mean = np.zeros(BLOCKS * TEN, np.float32)
        self._deviation = np.ones(BLOCKS * TEN, np.float32)
        self._vectors = np.zeros((0, 9), np.float32)
        self._afm = np.zeros(0, np.float32)
        self._counts: list[float] = []  # of the known labels, ascending: their ops
        self._labels = np.zeros((0, BLOCKS * TEN), np.float32)
        self._paths: list[ResolvedPath] = []
        self._exact: dict[bytes, ResolvedPath] = {}
        self._mispredicted: dict[bytes, ResolvedPath] = {}
        self._foreseen: tuple[Sample, bytes, ResolvedPath | None] | None = None

    # ------------------------------------------------------------------ labels

    def label(self, sample: Sample) -> Floats:
        """[BLOCKS * 10] The label of a sample that ran; an op beyond half the memory is a block of its own."""
        known = len(self.program.architecture.signatures)
        if len(self._vectors) < known:
            self._vectors = nine_vectors(self.program.architecture.signatures)
        touches = touches_of(self.program, sample)
        cuts = max_fill(touches, self.allowed // 2, alone=int(touches.nbytes.sum()))
        return vectors_of(self._vectors, sample, cuts).ravel()

    def know(self, label: Floats, path: ResolvedPath) -> None:
        """Add a labelled path to those that predictions are mapped to."""
        key = label.tobytes()
        is_known, self._exact[key] = key in self._exact, path
        if is_known or len(self._paths) >= RECORDED:
            return
        count = float(label[::TEN].sum())
        place = bisect_left(self._counts, count)
        self._counts.insert(place, count)
        self._paths.insert(place, path)
        self._labels = np.insert(self._labels, place, label, axis=0)

    # ------------------------------------------------------------------ foresight

    def foresee(self, sample: Sample, asked: int = 0) -> Foresight:
        """The path that the predicted vectors are mapped to; nothing before it has learned. Raises UsageError for a
        sample with more or fewer numbers than it has learned from."""
        mlp = self.mlps.get(sample.base)
        if mlp is None:
            return Foresight.of(self.program, None)
        features, own = self._features(sample), len(self._afm)
        if len(features) != mlp.widths[0]:
            raise other_numbers("published", mlp.widths[0] - own, len(features) - own)
        predicted = np.rint(mlp.one(features) * self._deviation + self._mean)
        path, key = self.mapped(predicted), predicted.tobytes()
        if self.cache and key in self._mispredicted:
            self.cached += 1
            path = self._mispredicted[key]
        self._foreseen = (sample, key, path)
        return Foresight.of(self.program, path)

    def mapped(self, predicted: Floats) -> ResolvedPath | None:
        """The known path of predicted vectors [BLOCKS * 10]; None if no path is known."""
        exact = self._exact.get(predicted.tobytes())
        if exact is not None or not self._paths:
            return exact
        place = bisect_left(self._counts, float(predicted[::TEN].sum()))
        first = max(min(place - WINDOW // 2, len(self._paths) - WINDOW), 0)
        away = (self._labels[first : first + WINDOW] - predicted) / self._deviation
        return self._paths[first + int(np.einsum("ij,ij->i", away, away).argmin())]

    def _features(self, sample: Sample) -> Floats:
        return finite(np.concatenate([sample.embedding, sample.sizes, self._afm], dtype=np.float32, casting="unsafe"))

    # ------------------------------------------------------------------ learning

    def learn(self, sample: Sample) -> None:
        """Know its path; if that was mispredicted, what was predicted means this path from now on."""
        self.program.follow()
        self.know(self.label(sample), sample.path)
        if self._foreseen is None or self._foreseen[0] is not sample:
            return
        _, key, path = self._foreseen
        self._foreseen = None
        if path is not sample.path:
            self._mispredicted[key] = sample.path
            if len(self._mispredicted) > RECORDED:
                del self._mispredicted[next(iter(self._mispredicted))]

    def fit(self, samples: Sequence[Sample], *, epochs: int | None = None) -> int:
        """Learn from samples of one base type that ran. Returns how often each was learned, which is `EPOCHS` where
        nobody says it."""
        if not samples:
            return 0
        epochs = epochs or EPOCHS
        self.program.follow()
        labels = np.stack([self.label(sample) for sample in samples])
        for label, sample in zip(labels, samples, strict=True):
            self.know(label, sample.path)
        base = samples[0].base
        # The AFM as sums, and the base type as one of three.
        architecture = self.program.architecture
        kinds = {one.name: vector for one, vector in zip(architecture.signatures, self._vectors, strict=True)}
        rows = [kinds[architecture.ops[key].name] for key in self.program.order]
        control = sum(1 for _ in architecture.rows())
        one_hot = [float(base is one) for one in BaseType]
        self._afm = np.array([*np.sum(rows, axis=0), len(rows), control, *one_hot], np.float32)
        self._mean, deviation = labels.mean(axis=0), labels.std(axis=0)
        self._deviation = np.where(deviation > 0, deviation, 1).astype(np.float32)
        targets = (labels - self._mean) / self._deviation
        features = np.stack([self._features(sample) for sample in samples])
        mlp = Mlp([features.shape[1], self.width, self.width, labels.shape[1]], seed=self._seed)
        mlp.standardize(features)
        random, counts = np.random.default_rng(self._seed), np.ones((ROWS, labels.shape[1]), np.float32)
        for _ in range(epochs):
            order = random.permutation(len(samples))
            for start in range(0, len(samples), ROWS):
                chosen = order[start : start + ROWS]
                mlp.learn(
                    features[chosen], targets[chosen], counts[: len(chosen)], loss="squares", rule="sgd", rate=RATE
                )
        self.mlps[base] = mlp
        return epochs

    # ------------------------------------------------------------------ files

    def settings(self) -> dict[str, int]:
        """The numbers that `of_arrays` needs beside the arrays."""
        return {"allowed": self.allowed, "width": self.width, "cache": int(self.cache)}

    def arrays(self) -> dict[str, Floats]:
        """What it has learned. Raises UsageError if that is nothing."""
        if not self.mlps:
            raise UsageError("The published pilot has learned nothing: train it before it is written.")
        perceptrons = [mlp.arrays(base.value) for base, mlp in self.mlps.items()]
        numbers = np.array([path.number for path in self._paths], np.float32)
        ends = {
            "mean": self._mean, "deviation": self._deviation, "afm": self._afm, "labels": self._labels,
            "paths": numbers,
        }  # fmt: skip
        return {name: array for one in (*perceptrons, ends) for name, array in one.items()}

    @classmethod
    def of_arrays(cls, program: Program, arrays: Mapping[str, Floats], settings: Mapping[str, int]) -> Self:
        """The pilot that `arrays` and `settings` are of. Raises ValueError if they do not fit the program."""
        made = cls(program, allowed=settings.get("allowed", 0), width=settings.get("width", 0))
        made.cache = bool(settings.get("cache", 1))
        made.mlps = {base: Mlp.of_arrays(base.value, arrays) for base in BaseType if f"{base.value}.layer0" in arrays}
        outputs, lacking = BLOCKS * TEN, np.zeros(0, np.float32)
        made._mean, made._deviation = arrays.get("mean", lacking), arrays.get("deviation", lacking)
        made._afm, labels = arrays.get("afm", lacking).ravel(), arrays.get("labels", lacking)
        numbers, known = arrays.get("paths", lacking).ravel(), program.architecture.paths
        shapes = {made._mean.shape, made._deviation.shape, *((mlp.widths[-1],) for mlp in made.mlps.values())}
        if shapes != {(outputs,)} or not made.mlps or labels.shape != (len(numbers), outputs):
            raise ValueError(f"labels of {outputs} numbers are needed, and these arrays have {sorted(shapes)}")
        if not all(0 <= number < len(known) for number in numbers.tolist()) or not (made._deviation > 0).all():
            raise ValueError("labels are of paths that are not listed, or do not vary as they should")
        for label, number in zip(labels, numbers.tolist(), strict=True):
            made.know(label, known[int(number)])
        return made
