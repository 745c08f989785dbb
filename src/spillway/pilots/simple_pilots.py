"""Pilots that hardly learn: what every other one has to be better than."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final, final

import numpy as np

from spillway.pilots.paths import Floats, ResolvedPath, Sample, finite
from spillway.pilots.pilot import AbstractPilot, Foresight
from spillway.pilots.program import Program

REMEMBERED: Final = 512
"""Sizes, and samples, that are kept."""
FADING: Final = np.float32(0.99)
"""What is left of a frequency after each step."""


@final
class ProgramOrder(AbstractPilot):
    """Everything runs, in program order: what is next in the program is fetched next."""

    name = "program order"

    def __init__(self, program: Program) -> None:
        self.program = program

    def foresee(self, sample: Sample, asked: int = 0) -> Foresight:
        return Foresight(np.ones(self.program.decisions, np.float32))

    def learn(self, sample: Sample) -> None:
        self.program.follow()


@final
class Frequency(AbstractPilot):
    """A part runs as often as it did, later steps counting more."""

    name = "frequency"

    def __init__(self, program: Program) -> None:
        self.program = program
        self._sums = np.zeros(0, np.float32)
        self._steps = np.float32(0)

    def foresee(self, sample: Sample, asked: int = 0) -> Foresight:
        found = np.zeros(self.program.decisions, np.float32)
        if self._steps:
            found[: len(self._sums)] = self._sums / self._steps
        return Foresight(found)

    def learn(self, sample: Sample) -> None:
        self.program.follow()
        bits = self.program.bits(sample.path)
        sums = np.zeros(len(bits), np.float32)
        sums[: len(self._sums)] = self._sums
        self._sums = sums * FADING + bits
        self._steps = self._steps * FADING + np.float32(1)


@final
class LastOfSize(AbstractPilot):
    """The path of the last sample of the same sizes; of the last one at all if none had them."""

    name = "last of the same size"

    def __init__(self, program: Program) -> None:
        self.program = program
        self._by_size: OrderedDict[tuple[float, ...], ResolvedPath] = OrderedDict()
        self._last: ResolvedPath | None = None

    def foresee(self, sample: Sample, asked: int = 0) -> Foresight:
        """Certain of that path; nothing before the first sample."""
        return Foresight.of(self.program, self._by_size.get(sample.sizes, self._last))

    def learn(self, sample: Sample) -> None:
        self.program.follow()
        self._last = self._by_size[sample.sizes] = sample.path
        self._by_size.move_to_end(sample.sizes)
        if len(self._by_size) > REMEMBERED:
            self._by_size.popitem(last=False)


@final
class Nearest(AbstractPilot):
    """The path of the sample whose sizes and embedding are nearest, each feature in its own standard deviations."""

    name = "1-NN"

    def __init__(self, program: Program) -> None:
        self.program = program
        self._paths: deque[ResolvedPath] = deque(maxlen=REMEMBERED)
        self._features = np.zeros((0, 0), np.float32)
        self._scale = np.ones(0, np.float32)
        self._steps = 0

    def foresee(self, sample: Sample, asked: int = 0) -> Foresight:
        """Certain of that path; nothing before the first sample."""
        if not self._paths:
            return Foresight.of(self.program, None)
        away = (self._features[: len(self._paths)] - _features(sample)) * self._scale
        return Foresight.of(self.program, self._path(int(np.einsum("ij,ij->i", away, away).argmin())))

    def _path(self, row: int) -> ResolvedPath:
        """The path of a row; rows are a ring, and paths have the oldest in front."""
        oldest = self._steps % REMEMBERED if self._steps >= REMEMBERED else 0
        return self._paths[(row - oldest) % len(self._paths)]

    def learn(self, sample: Sample) -> None:
        self.program.follow()
        features = _features(sample)
        if not len(self._features):
            self._features = np.zeros((REMEMBERED, len(features)), np.float32)
            self._scale = np.ones(len(features), np.float32)
        self._features[self._steps % REMEMBERED] = features
        self._steps += 1
        self._paths.append(sample.path)
        if self._steps & (self._steps - 1) == 0 or self._steps % REMEMBERED == 0:
            deviation = self._features[: len(self._paths)].std(axis=0)
            self._scale = np.where(deviation > 0, 1 / np.maximum(deviation, 1e-9), 0).astype(np.float32)


def _features(sample: Sample) -> Floats:
    return finite(np.concatenate([np.array(sample.sizes, np.float32), sample.embedding]))


SIMPLE: Final = (ProgramOrder, LastOfSize, Frequency, Nearest)
"""All of them, the floor in front."""


def taught(
    program: Program, samples: Sequence[Sample], kinds: Sequence[Callable[[Program], AbstractPilot]] = SIMPLE
) -> list[AbstractPilot]:
    """One pilot of each kind, which has learned these samples."""
    pilots = [kind(program) for kind in kinds]
    for sample in samples:
        for one in pilots:
            one.learn(sample)
    return pilots
