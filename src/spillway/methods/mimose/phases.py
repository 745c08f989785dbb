"""The two phases (section 4.1, "sheltered" and "responsive execution"), and which measurements count (Fig. 12)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from spillway.methods.by_block import InputSize, Phase


@final
class Collection:
    """The collecting phase: how long it lasts, and what it measures.

    Arguments:
        iterations: Its steps.
        collects_known_sizes: Whether a size is measured more than once.
    """

    def __init__(self, iterations: int, *, collects_known_sizes: bool) -> None:
        self.iterations = iterations
        self.collects_known_sizes = collects_known_sizes
        self.steps = 0
        """Steps that have ended."""
        self.sizes: set[InputSize] = set()
        """What was measured."""
        self._over = False

    @property
    def phase(self) -> Phase:
        """Of the step that comes next."""
        return Phase.PLANNED if self._over or self.steps >= self.iterations else Phase.COLLECTING

    def collects(self, size: InputSize) -> bool:
        """Whether blocks are measured in the coming step, if that has this size."""
        return self.phase is Phase.COLLECTING and (self.collects_known_sizes or size not in self.sizes)

    @property
    def counts_for_whole_model(self) -> bool:
        """Whether the step that runs is a sample of the whole model: the first is not, because optimizer state and
        libraries come into being in it."""
        return self.steps > 0

    def end_step(self, size: InputSize, *, measured: bool) -> None:
        """A step of this size is over."""
        self.steps += 1
        if measured:
            self.sizes.add(size)

    def end(self) -> None:
        """There is nothing left to measure."""
        self._over = True


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One call of a module while blocks are measured."""

    name: str
    """Of the module."""
    inside: int | None
    """The call that made it, by its place in the record; None at the top."""
    checkpointed: bool
    """Whether it ran under a checkpoint, so that it saved nothing."""


def valid_calls(record: Sequence[ModuleCall]) -> list[bool]:
    """The data filter of Fig. 12: for each call whether its bytes say what the module saves.

    They do not (1) if the call was checkpointed, (2) if one that it was made in, or one made in it, was; they do
    otherwise (3). The public code finds the same by counting checkpoints around each call.

    Args:
        record: Calls in the order in which they began, so that each stands behind the one it was made in.

    Raises:
        ValueError: A call stands before the one that it was made in.
    """
    caller = [call.checkpointed for call in record]
    callee = [call.checkpointed for call in record]
    for place, call in enumerate(record):
        if call.inside is None:
            continue
        if not 0 <= call.inside < place:
            raise ValueError(f"Call {place} ({call.name}) is made in call {call.inside}, which is not before it.")
        caller[place] |= caller[call.inside]
    for place in range(len(record) - 1, -1, -1):
        inside = record[place].inside
        if inside is not None:
            callee[inside] |= callee[place]
    return [not (above or below) for above, below in zip(caller, callee, strict=True)]
