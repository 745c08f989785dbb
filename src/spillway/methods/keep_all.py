"""Keep everything: the plain run, with its memory accounted for."""

from __future__ import annotations

from collections.abc import Generator
from typing import final

from spillway.methods.base import AbstractPolicy, MemoryView, Proposal
from spillway.units import Bytes


@final
class KeepAll(AbstractPolicy):
    """Never proposes anything.

    Under a budget that suffices it is the plain run; under one that does not, the controller's own last resort
    (moving the least recently used storages) still keeps the budget.
    """

    name = "keep-all"
    uses_recipes = False

    def relieve(self, view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        yield from ()
