"""What the collector measures: of a block in one call, of a whole step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, final

from spillway.units import Bytes, Seconds

InputSize: TypeAlias = tuple[int, ...]
"""What the size of an input is, one number per dimension that varies: a length, the lengths of encoder and decoder,
height and width. With `Options.batched` the first is the number of samples, by which all bytes are multiplied."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSample:
    """One call of one block, measured in a step."""

    block: int
    """The call's number in forward order, from 0."""
    size: InputSize
    """Of the step's input."""
    nbytes: Bytes
    """What autograd saves inside the block and recomputing it frees. What it hands on is not among it."""
    seconds: Seconds
    """Of its forward, once."""
    working: Bytes = 0
    """Needed on top of what is saved while it is recomputed and goes backward, at most: temporaries, gradients of
    activations. What is left at 0 counts as part of the rest of the step, which is less exact and never too low."""
    gradients: Bytes = 0
    """Parameter gradients that its backward creates; 0 where the step begins with them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """Forward and backward of one step, measured. All bytes are above what was there when the forward began."""

    size: InputSize
    """Of its input."""
    recomputed: frozenset[int]
    """The blocks that were."""
    peak: Bytes
    """Most bytes at once."""
    forward_peak: Bytes | None = None
    """Most bytes until the backward reaches the last block, if that was looked at."""
    backward_peak: Bytes | None = None
    """Most bytes from there on, if that was looked at."""
