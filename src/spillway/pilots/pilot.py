"""What every pilot answers: which sites of the forward will run, and how likely that is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self, final

import numpy as np

from spillway.errors import UsageError
from spillway.pilots.paths import Floats, ResolvedPath, Sample
from spillway.pilots.program import Program, Uses


@final
@dataclass(frozen=True, slots=True, eq=False)
class Foresight:
    """What a pilot expects of a forward."""

    probabilities: Floats
    """[decisions] How likely each part runs, by the parts that the program had when it was asked."""
    path: ResolvedPath | None = None
    """The known path that it expects as a whole; None where it expects parts."""

    @classmethod
    def of(cls, program: Program, path: ResolvedPath | None) -> Self:
        """Certain of that path; of nothing if there is none."""
        return cls(np.zeros(program.decisions, np.float32) if path is None else program.bits(path), path)

    def uses(self, program: Program) -> Uses:
        """The groups of parameters that will be used, in the order of their use."""
        return program.uses_where(self.probabilities) if self.path is None else program.uses_of(self.path)


def other_numbers(pilot: str, learned: int, given: int) -> UsageError:
    """What a pilot says of a sample that has more or fewer numbers than those that it has learned."""
    return UsageError(
        f"The {pilot} pilot has learned from {learned} numbers a sample, and this one has {given}: describe batches as "
        f"it knows them (Dynamism), or train another pilot."
    )


class AbstractPilot(ABC):
    """Foresees the forward of a sample. What the sample's path, signatures and loss say is known afterwards alone, and
    read by `learn` alone; of `hidden` and of the path `foresee` may read what `asked` says."""

    name: str
    """How reports call it."""

    redirects: bool = False
    """Whether it has more to say each time that the forward hands a number to the host."""

    @abstractmethod
    def foresee(self, sample: Sample, asked: int = 0) -> Foresight:
        """What it expects of the forward.

        Arguments:
            sample: About to run, or running.
            asked: How many numbers the forward has handed to the host so far, and branched on. With any, the hidden
                state that was re-directed with the last, `sample.hidden[asked - 1]`, and the path up to the op behind
                it are known.
        """

    @abstractmethod
    def learn(self, sample: Sample) -> None:
        """Take in what a step did, once it is done."""
