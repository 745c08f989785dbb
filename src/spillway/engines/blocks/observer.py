"""Who is told when a step passes the seams between blocks."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Told at every seam, in the thread that runs the step. Blocks are numbered in the order in which their calls
    begin in a forward of the model, from 0."""

    def forward_begins(self) -> None:
        """The model's forward begins, under gradients."""

    def block_begins(self, number: int) -> None:
        """A call of a block begins; its action is known already."""

    def block_ended(self, number: int) -> None:
        """It ended, and what is not kept of it is gone."""

    def backward_reaches(self, number: int) -> None:
        """The backward asks for the first time for something that was saved in it."""
