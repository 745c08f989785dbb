"""Least recently used: the worked example of a policy."""

from __future__ import annotations

from collections.abc import Generator
from typing import final

from spillway.errors import UsageError
from spillway.methods.base import AbstractPolicy, Candidate, Drop, MemoryView, Move, Proposal
from spillway.units import Bytes


@final
class LRU(AbstractPolicy):
    """Drop the least recently used storage if its chain is short and cheap, else move it.

    Arguments:
        short_chain: The longest chain, in ops, that is still recomputed; 0 moves everything.
        worth: A drop is proposed only while recomputing takes at most `worth` times the seconds of moving out and in
            again; infinity ignores time and looks at the chain alone.
    """

    name = "lru"

    def __init__(self, short_chain: int = 4, worth: float = 1.0) -> None:
        if not (short_chain >= 0 and worth >= 0):
            raise UsageError(f"LRU needs short_chain and worth of 0 or more, got {short_chain} and {worth}.")
        self.short_chain = short_chain
        self.worth = worth
        self.uses_recipes = short_chain > 0

    def relieve(self, view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        """Walk from the stalest storage to the freshest."""
        for storage in view.candidates():
            granted = False
            if self._cheap_to_recompute(view, storage):
                granted = yield Drop(storage)
            if not granted:
                yield Move(storage)

    def _cheap_to_recompute(self, view: MemoryView, storage: Candidate) -> bool:
        chain = view.chain(storage) if self.short_chain else None
        if chain is None or chain > self.short_chain:
            return False
        return view.recompute_seconds(storage) <= self.worth * view.transfer_seconds(storage)
