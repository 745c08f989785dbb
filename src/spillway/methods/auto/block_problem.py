"""What `auto` decides: which option of its menu each block takes, under one budget and two lanes.

NOTE [Problem]. Blocks run forward in their order, and backward in the reverse of it. What an option leaves `resident`
stays from the end of the block's forward until its backward has ended; what it has `moved` goes out on one lane from
the end of the forward on, and comes in on another before the backward begins. With R_i the resident bytes of the blocks
before i, G_i the gradients that the backward has created when it ends i (those of i and of every later block), q what
is still going out and a what has come in, or is coming, for blocks that the backward has not reached yet:

    while i runs forward     R_i + q + forward_peak_i           <= available
    while i runs backward    R_i + q + a + G_i + backward_peak_i <= available

Lack of room is a stall, never an overrun: compute waits until enough is out. It also waits for its own copy in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from spillway.errors import UsageError
from spillway.methods.actions import Action
from spillway.units import Bytes, Seconds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What may become of one block, and what that takes. Bytes are those of the device."""

    action: Action
    """For whoever carries it out: plans look at the numbers alone."""
    resident: Bytes
    """From the end of its forward until its backward has ended, its input included where that stays."""
    moved: Bytes = 0
    """Out after the forward and in before the backward, in host memory or on disk meanwhile."""
    forward: Seconds = 0.0
    """Added to the block's forward, as by packing."""
    backward: Seconds = 0.0
    """Added to the block's backward, as by a second run."""
    forward_peak: Bytes
    """While its forward runs, beside what earlier blocks left: everything that it has made and works with."""
    backward_peak: Bytes
    """While its backward runs, beside what earlier blocks left and beside gradients of parameters: everything that it
    saved, which is there again, its result's gradient, and what it works with."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One call of a block, and its menu."""

    kind: int
    """Blocks of one kind have menus of equal numbers."""
    forward: Seconds
    """Of the forward, everything kept."""
    backward: Seconds
    """Of the backward, everything kept."""
    gradients: Bytes
    """Of parameters, that its backward creates."""
    options: tuple[Option, ...]
    """The first keeps everything. What can only be kept, such as a head and its loss, has no other."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProblem:
    """One step of one input size.

    Raises UsageError if a block has no option, or a lane is not faster than 0 where something may be moved.
    """

    blocks: Sequence[Block]
    """In the order of the forward."""
    available: Bytes
    """The budget less what is there when the forward begins and stays."""
    out_rate: float
    """Bytes a second on the way out, while compute runs and the other lane is busy."""
    in_rate: float
    """The same, on the way in."""
    host: Bytes | None = None
    """How many bytes may be moved altogether; None for any number."""
    rest: Seconds = 0.0
    """What the step takes outside of its blocks, whatever becomes of them."""

    def __post_init__(self) -> None:
        for number, block in enumerate(self.blocks):
            if not block.options:
                raise UsageError(f"Block {number} of {len(self.blocks)} has no option; the first one keeps it.")
            if min(self.out_rate, self.in_rate) <= 0 and any(option.moved for option in block.options):
                raise UsageError(
                    f"Block {number} may be moved, at {self.out_rate:g} bytes a second out and {self.in_rate:g} in; "
                    f"both have to be above 0, or its menu has to leave out what moves."
                )

    @property
    def plain(self) -> Seconds:
        """What the step takes if everything is kept, whatever that needs."""
        return sum(block.forward + block.backward for block in self.blocks)
