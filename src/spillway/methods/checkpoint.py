"""Every block is recomputed, at every size: what `torch.utils.checkpoint` around every block does. The baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, final

from spillway.methods.by_block import (
    AbstractBlockMethod,
    BlockPlan,
    BlockSample,
    Decision,
    Forecast,
    InputSize,
    Phase,
    StepSample,
)
from spillway.units import Bytes


@final
class Checkpoint(AbstractBlockMethod):
    """Recomputes every block and learns nothing."""

    name = "checkpoint"

    def fresh(self, *, batched: bool) -> Self:
        """Another one."""
        return type(self)()

    @property
    def sheltered(self) -> bool:
        """Nothing is measured."""
        return False

    def begin(self, size: InputSize, available: Bytes) -> Decision:
        """A plan that keeps nothing."""
        return Decision(Phase.SHELTERED, BlockPlan.nothing_kept(size, available), False)

    def end(self, step: StepSample, blocks: Sequence[BlockSample] = ()) -> None:
        """There is nothing to learn."""

    def forecast(self, size: InputSize) -> Forecast | None:
        """Nothing is expected."""
        return None
