"""What may be done with a call of a block."""

from __future__ import annotations

import enum


class Action(enum.Enum):
    """What becomes of what autograd saves inside a block, once the block has run."""

    KEEP = "keep"
    """It stays. It can still be given up later (`BlockEngine.revoke`)."""
    RECOMPUTE = "recompute"
    """It goes; the block runs again when the backward reaches it."""
    RECOMPUTE_OFFLOADED = "recompute, input offloaded"
    """The same, and what the block was called with waits in the spill file."""
    OFFLOAD = "offload"
    """It waits in the spill file."""
    SELECTIVE = "selective"
    """It goes, but for the results of expensive ops; the block runs again without these ops."""
    SELECTIVE_OFFLOADED = "selective, results offloaded"
    """The same, and the results wait in the spill file."""

    @property
    def recomputes(self) -> bool:
        """Whether the block runs twice."""
        return self not in (Action.KEEP, Action.OFFLOAD)

    @property
    def selects(self) -> bool:
        """Whether the second run is given results of the first."""
        return self in (Action.SELECTIVE, Action.SELECTIVE_OFFLOADED)
