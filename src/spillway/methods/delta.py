"""DELTA: evict or offload, tensor by tensor, and bring back early.

Tang et al., "DELTA: Dynamically Optimizing GPU Memory beyond Tensor Recomputation", arXiv:2203.15980. The Filter
(section 4.1, equations 1 to 3, algorithm 2) says which storage is released next, the Director (equations 4 to 6,
algorithm 3) whether it is recomputed or copied back later, the Prefetcher (algorithm 4) which copies start early.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Mapping
from math import inf
from types import MappingProxyType
from typing import Final, Self, final

from spillway.errors import UsageError
from spillway.methods.base import AbstractPolicy, Candidate, Copy, Drop, Fetch, MemoryView, Move, Proposal
from spillway.units import Bytes, Seconds

Score = Callable[[Bytes, int], float]
"""How soon a storage is released, by its bytes m and its staleness s in ops: the higher, the sooner."""

FILTERS: Final[Mapping[str, Score]] = MappingProxyType(
    {
        "base": lambda m, s: m * s,
        "lru": lambda m, s: float(s),
        "greedy": lambda m, s: float(m),
    }
)
"""The three heuristics of the Filter. The paper takes the smallest of 1/(m s), 1/s and 1/m."""


@final
class Delta(AbstractPolicy):
    """DELTA with the choices that serve best here; `as_published` has those of the paper.

    What differs from the paper, each an argument:

    - `filter`: least recently used. The paper takes 1/(m s), and finds the former better for small budgets.
    - `both_ways`: what moving costs is the copy out, unless one is there already, and the copy in. Equation 6 has m/b,
      one way.
    - `releases_in_backward`: room is also made in the backward. The paper releases before the loss alone
      (assumption 2); what is short in the backward is then left to the controller, which moves the stalest.
    - `releases_early`: at `early` of the budget copies out start, for as much as may be needed next (`spare`), and the
      bytes stay until room is short. The paper releases down to that mark, needed or not (algorithm 1).
    - `in_order_of_use`: the Prefetcher follows the order in which the last step of the same signature wanted things,
      in the backward. The paper's queue is first in, first out (algorithm 4): the order of the forward.
    - `enough`: share of the budget up to which the Prefetcher finds "memory enough"; in the paper the early mark.

    In both: the cost of recomputing is that of the chain as measured, op by op, everything absent included; with it
    synchronised, as here, the Director moves more than the paper's, whose costs are those of launching. Bandwidth is
    measured from the copies of the run and not 35 % of what a link promises. What was moved is copied back and not
    recomputed when an op wants it; the paper recomputes it where it can.

    Arguments:
        filter: One of `FILTERS`.
        early: Share of the budget from which copies out begin; the paper's 3/4.
        spare: Share of the budget for which copies are there, or need not be, before room is short.
        most_copies_out: Copies out that a look ahead may begin.
        most_copies_in: The paper's n: reloads that are under way at a time.
    """

    name = "delta"
    foresees = True

    def __init__(
        self, *, filter: str = "lru", early: float = 0.75, enough: float = 0.9, spare: float = 0.15,
        most_copies_out: int = 2, most_copies_in: int = 2, both_ways: bool = True, releases_in_backward: bool = True,
        releases_early: bool = False, in_order_of_use: bool = True,
    ) -> None:  # fmt: skip
        if filter not in FILTERS:
            raise UsageError(f"DELTA has no filter {filter!r}; choose one of {', '.join(FILTERS)}.")
        if not (0 < early <= 1 and 0 < enough <= 1 and spare >= 0 and most_copies_out >= 0 and most_copies_in >= 0):
            raise UsageError(
                f"DELTA needs `early` and `enough` above 0 and up to 1, and `spare` and numbers of copies of 0 or "
                f"more; got {early}, {enough}, {spare}, {most_copies_out} and {most_copies_in}."
            )
        self.filter = filter
        self.early = early
        self.enough = enough
        self.spare = spare
        self.most_copies_out = most_copies_out
        self.most_copies_in = most_copies_in
        self.both_ways = both_ways
        self.releases_in_backward = releases_in_backward
        self.releases_early = releases_early
        self.in_order_of_use = in_order_of_use

    @classmethod
    def as_published(cls) -> Self:
        """The paper's choices."""
        policy = cls(
            filter="base", enough=0.75, both_ways=False, releases_in_backward=False, releases_early=True,
            in_order_of_use=False,
        )  # fmt: skip
        policy.name = "delta-published"
        return policy

    # ------------------------------------------------------------------ Filter and Director

    def relieve(self, view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        """Release by the Filter's score until there is room (algorithm 1, lines 11 to 19)."""
        if view.in_backward and not self.releases_in_backward:
            return
        for storage in self._by_score(view):
            granted = False
            if self._evicts(view, storage):
                granted = yield Drop(storage)
            if not granted:
                yield Move(storage)

    def _by_score(self, view: MemoryView) -> Generator[Candidate, None, None]:
        if self.filter == "lru":  # the view's own order
            yield from view.candidates()
            return
        score, clock = FILTERS[self.filter], view.clock
        # What the last op used has no staleness and a score of 0: it goes last.
        heap = [(-score(s.nbytes, clock - s.touched), s.number, s) for s in view.candidates()]
        heapq.heapify(heap)
        while heap:
            yield heapq.heappop(heap)[2]

    def _evicts(self, view: MemoryView, storage: Candidate) -> bool:
        """The Director: F = c_r / c_s of equation 4 is at most 1. What cannot be recomputed costs infinitely much."""
        recompute = view.recompute_seconds(storage)
        return recompute < inf and recompute <= self._transfer_seconds(view, storage)

    def _transfer_seconds(self, view: MemoryView, storage: Candidate) -> Seconds:
        seconds = view.transfer_seconds(storage)
        return seconds if self.both_ways or view.copied(storage) else seconds / 2

    # ------------------------------------------------------------------ early start and Prefetcher

    def foresee(self, view: MemoryView) -> Generator[Proposal, bool, None]:
        """Begin copies out above the early mark (algorithm 1, line 11), and copies in below it (algorithm 4)."""
        mark = self.early * view.allowed
        if view.resident > mark and (self.releases_in_backward or not view.in_backward):
            yield from self._start_early(view, mark)
        if self.most_copies_in and (view.in_backward or not self.in_order_of_use):
            yield from self._prefetch(view, self.enough * view.allowed)

    def _start_early(self, view: MemoryView, mark: float) -> Generator[Proposal, bool, None]:
        begun, ahead = 0, 0
        for storage in self._by_score(view):
            if begun >= self.most_copies_out or (self.releases_early and view.resident <= mark):
                return
            if not self.releases_early and ahead >= self.spare * view.allowed:
                return
            ahead += storage.nbytes
            if view.copied(storage):
                if self.releases_early:
                    yield Move(storage)
            elif not self._evicts(view, storage):
                begun += yield Copy(storage)
            elif self.releases_early:
                yield Drop(storage)

    def _prefetch(self, view: MemoryView, enough: float) -> Generator[Proposal, bool, None]:
        """While memory is enough and fewer than n are under way."""
        under_way = view.arriving
        if under_way >= self.most_copies_in or view.resident >= enough:
            return
        for storage in view.due() if self.in_order_of_use else view.moved():
            if under_way >= self.most_copies_in or view.resident + storage.nbytes > enough:
                return
            under_way += yield Fetch(storage)
