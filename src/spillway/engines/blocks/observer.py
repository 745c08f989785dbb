"""Who is told when a step passes the seams between blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Observer(Protocol):
    """Told at every seam, in the thread that runs the step. Blocks are numbered in the order in which their calls
    begin in a forward of the model, from 0."""

    def forward_begins(self) -> None:
        """The model's forward begins, under gradients."""

    def evaluation_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward of the model begins without gradients, called with these."""

    def forward_is_over(self) -> None:
        """Another forward is about to begin: what the engine knows of the calls so far is forgotten after this."""

    def block_begins(self, number: int) -> Callable[[], None]:
        """A call of a block begins; its action is known already. What this returns is called when the backward asks for
        the first time for something that was saved in it."""

    def block_ended(self, number: int) -> None:
        """It ended, and what is not kept of it is gone."""
