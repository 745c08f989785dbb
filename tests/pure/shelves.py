"""A view written out by hand, for tests of methods."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from math import inf

from spillway.methods import AbstractPolicy, Candidate, Proposal
from spillway.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """One storage, and what the view tells about it."""

    number: int
    nbytes: Bytes = 1000
    touched: int = 0
    chain: int | None = None
    recompute: Seconds = inf
    own: Seconds | None = None
    """Of its op alone; that of the chain if it is not told."""
    worst: Seconds | None = None
    transfer: Seconds = 1.0
    copied: bool = False
    available: bool = True


@dataclass(frozen=True, slots=True)
class Shelves:
    """A view of literal storages, least recently used first."""

    storages: tuple[Shelf, ...]
    allowed: Bytes = 0
    resident: Bytes = 0
    clock: int = 10
    op_index: int = 9
    away: tuple[Shelf, ...] = ()
    """The ones that were moved, in the order in which they left; `due` has them the other way round."""
    arriving: int = 0
    in_backward: bool = False
    after_backward: bool = False
    exposed: float = 1.0
    overlaps: bool = True

    @property
    def turned(self) -> bool:
        return self.in_backward or self.after_backward

    def candidates(self) -> Iterator[Shelf]:
        return iter(self.storages)

    def available(self, storage: Candidate) -> bool:
        return self._shelf(storage).available

    def chain(self, storage: Candidate) -> int | None:
        return self._shelf(storage).chain

    def recompute_seconds(self, storage: Candidate) -> Seconds:
        return self._shelf(storage).recompute

    def own_seconds(self, storage: Candidate) -> Seconds:
        shelf = self._shelf(storage)
        return shelf.recompute if shelf.own is None else shelf.own

    def recompute_seconds_at_worst(self, storage: Candidate) -> Seconds:
        shelf = self._shelf(storage)
        return shelf.recompute if shelf.worst is None else shelf.worst

    def transfer_seconds(self, storage: Candidate) -> Seconds:
        return self._shelf(storage).transfer

    def copied(self, storage: Candidate) -> bool:
        return self._shelf(storage).copied

    @property
    def anything_moved(self) -> bool:
        return bool(self.away)

    def moved(self) -> Iterator[Shelf]:
        return iter(self.away)

    def due(self) -> Iterator[Shelf]:
        return reversed(self.away)

    def _shelf(self, storage: Candidate) -> Shelf:
        return next(shelf for shelf in (*self.storages, *self.away) if shelf.number == storage.number)


def proposals(
    policy: AbstractPolicy,
    *storages: Shelf,
    refused: tuple[Proposal, ...] = (),
    backward: bool = False,
    exposed: float = 1.0,
) -> list[Proposal]:
    """Everything that the policy proposes when all but `refused` is granted and it is never enough."""
    return answered(policy.relieve(Shelves(storages, in_backward=backward, exposed=exposed), 1), refused)


def answered(asked: Generator[Proposal, bool, None], refused: tuple[Proposal, ...] = ()) -> list[Proposal]:
    """All proposals, when all but `refused` are granted."""
    made: list[Proposal] = []
    answer: bool | None = None
    while True:
        try:
            proposal = next(asked) if answer is None else asked.send(answer)
        except StopIteration:
            return made
        made.append(proposal)
        answer = proposal not in refused
