"""DELTA: evict or offload, tensor by tensor, and bring back early.

Tang et al., "DELTA: Dynamically Optimizing GPU Memory beyond Tensor Recomputation", arXiv:2203.15980. The Filter
(section 4.1, equations 1 to 3, algorithm 2) says which storage is released next, the Director (equations 4 to 6,
algorithm 3) whether it is recomputed or copied back later, the Prefetcher (algorithm 4) which copies start early, and
algorithm 1 what happens when an op wants what is absent.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Mapping
from math import inf
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, Self, final, get_args

from spillway.errors import UsageError
from spillway.methods.base import AbstractPolicy, Candidate, Copy, Drop, Fetch, MemoryView, Move, Proposal, Recall
from spillway.units import Bytes, Seconds

Score = Callable[[Bytes, int, Seconds], float]
"""How soon a storage is released, by its bytes m, its staleness s in ops and the cheaper of its two costs c: the
higher, the sooner."""

FILTERS: Final[Mapping[str, Score]] = MappingProxyType(
    {
        "base": lambda m, s, c: m * s,
        "lru": lambda m, s, c: float(s),
        "greedy": lambda m, s, c: float(m),
        "cost": lambda m, s, c: m * s / (c + HANDLING),
    }
)
"""The three heuristics of the Filter, of which the paper takes the smallest of 1/(m s), 1/s and 1/m, and DTR's with
the cheaper of the Director's costs: c/(m s)."""

HANDLING: Final[Seconds] = 200e-6
"""What it takes to let a storage go and to bring it back, however small it is: decisions, checks and accounts, between
ops that leave little of them in the processor's caches."""

RANKED_FOR: Final = 128
"""Ops for which a ranking by the cost filter is used; what is younger than that is not in it."""

JUDGED_FOR: Final = 64
"""Ops for which the two costs of a storage are taken as known, unless it is used or copied meanwhile."""

Recomputes = Literal["always", "cheaper", "never"]
"""When what was offloaded is recomputed and not reloaded, where both are possible."""


class Judged(NamedTuple):
    """What the Director found out about a storage."""

    recompute: Seconds
    transfer: Seconds
    at: int
    """The op before which it did."""


@final
class Delta(AbstractPolicy):
    """DELTA with the choices that serve best here; `as_published` has those of the paper.

    Every choice that differs between the two is an argument:

    - `filter`: "cost", the smallest of c/(m s) first, c being the cheaper of the Director's two costs. The paper's
      filters ignore costs: they release what is dear to bring back while something cheaper is as stale. "base" is
      equation 1, "lru" equation 2, "greedy" equation 3. A step aside in favour of time: the ranking is made anew
      every 128 ops, not for each release.
    - `both_ways`: what offloading costs is the copy out, unless one is there already, and the copy in. The paper
      defines it so (section 3), and equation 6 has m/b, one way.
    - `unhidden`: of a transfer's seconds the share counts for which ops waited in the last steps, and of the rest
      this share, because a copy that is hidden takes bandwidth from ops all the same. 1 in the paper: all counts.
    - `pessimism`: recomputing costs the chain as it is now and this share of what it costs more at worst, when all
      that it reads has left too. 0 in the paper.
    - `releases_in_backward`: room is also made in the backward. The paper releases before the loss alone
      (assumption 2); what is short in the backward is then left to the controller, which moves the stalest.
    - `releases_early`: at `early` of the budget copies out start, for as much as may be needed next (`spare`), and the
      bytes stay until room is short. The paper releases down to that mark, needed or not (algorithm 1).
    - `looks_after`: ops between two looks for what to copy out or in ahead, because each takes time; a look may begin
      the more copies (`most_copies_out`, `most_copies_in`). The paper looks whenever a tensor is used (algorithm 1); so
      does `as_published`, with two and two.
    - `in_order_of_use`: the Prefetcher follows the order in which the last step of the same signature wanted things,
      from the backward to the end of the step. The paper's queue is first in, first out (algorithm 4): the order of
      the forward.
    - `enough`: share of the budget up to which the Prefetcher finds "memory enough"; in the paper the early mark.
    - `only_beside`: nothing starts early where copies have neither a processor nor a link of their own; in the paper
      they always have.
    - `recomputes`: when an op wants what was offloaded, "always" recomputes it where that is possible, as the paper
      does (algorithm 1, line 5; section 5.5), "never" reloads it; "cheaper" compares the two costs at that moment.

    In both:

    - Costs are measured and synchronised: an op on the CPU has run when it returns. The paper's Table V says 4 to
      69 us for what moves hundreds of MB, which is the time to launch; with such costs its Director always evicts.
      The cost of recomputing is that of the whole chain, everything absent included, and chains cost more than ops.
    - Bandwidth is measured by a few copies before the first step and by all copies since; the paper takes 35 % of what
      the link promises.
    - Staleness is counted in ops, and in the paper in time (section 3): it does not depend on how busy the machine is.
    - Offloading early is a copy beside the ops, and the bytes stay until it is done. Assumption 2 has it synchronous,
      section 4.2 asynchronous on a stream of its own; an early start that ops waited for would gain nothing. What has
      to leave because room is short is copied at once.
    - A look ahead begins at most `most_copies_out` copies, in `as_published` too, where algorithm 1 goes on until its
      mark is reached: bytes count here while their copy is under way, so that it would copy all that there is.
    - The loop of algorithm 1 ends when nothing is left to release; what has no staleness is released last;
      algorithm 4 fetches while memory is enough *and* fewer than n are under way, as its text says and not its listing.

    Arguments:
        filter: One of `FILTERS`.
        early: Share of the budget from which copies out begin; the paper's 3/4.
        spare: Share of the budget for which copies are there, or need not be, before room is short.
        most_copies_out: Copies out that a look ahead may begin.
        most_copies_in: The paper's n, which it does not tell: reloads that are under way at a time.
    """

    name = "delta"
    foresees = True

    def __init__(
        self, *, filter: str = "cost", early: float = 0.75, enough: float = 0.9, spare: float = 0.35,
        most_copies_out: int = 6, most_copies_in: int = 4, looks_after: int = 4,
        both_ways: bool = True, releases_in_backward: bool = True,
        releases_early: bool = False, in_order_of_use: bool = True, recomputes: Recomputes = "cheaper",
        only_beside: bool = True,
        unhidden: float = 0.5, pessimism: float = 0.25,
    ) -> None:  # fmt: skip
        if filter not in FILTERS:
            raise UsageError(f"DELTA has no filter {filter!r}; choose one of {', '.join(FILTERS)}.")
        if recomputes not in get_args(Recomputes):
            raise UsageError(
                f"DELTA recomputes what was offloaded {', '.join(get_args(Recomputes))}; got recomputes={recomputes!r}."
            )
        counts = min(spare, most_copies_out, most_copies_in) >= 0 and looks_after >= 1
        if not (0 < early <= 1 and 0 < enough <= 1 and counts):
            raise UsageError(
                f"DELTA needs `early` and `enough` above 0 and up to 1, `spare` and numbers of copies of 0 or more, "
                f"and `looks_after` of 1 or more; got {early}, {enough}, {spare}, {most_copies_out}, {most_copies_in} "
                f"and {looks_after}."
            )
        if not (0 <= unhidden <= 1 and 0 <= pessimism < inf):
            raise UsageError(
                f"DELTA needs `unhidden` from 0 to 1 and a finite `pessimism` of 0 or more; "
                f"got {unhidden} and {pessimism}."
            )
        self.filter = filter
        self.early = early
        self.enough = enough
        self.spare = spare
        self.most_copies_out = most_copies_out
        self.looks_after = looks_after
        self.most_copies_in = most_copies_in
        self.both_ways = both_ways
        self.releases_in_backward = releases_in_backward
        self.releases_early = releases_early
        self.in_order_of_use = in_order_of_use
        self.only_beside = only_beside
        self.recomputes = recomputes
        self.recalls = recomputes != "never"
        self.unhidden = unhidden
        self.pessimism = pessimism
        self._ranking: list[tuple[float, int, Candidate]] = []
        self._judged: dict[int, Judged] = {}
        self._view: MemoryView | None = None
        self._ranked_at = -RANKED_FOR
        self._ahead = 0  # until this op nobody looks: what is next to leave has its copies, and nothing has left since

    @classmethod
    def as_published(cls) -> Self:
        """The paper's choices."""
        policy = cls(
            filter="base", enough=0.75, most_copies_out=2, most_copies_in=2, looks_after=1, both_ways=False,
            releases_in_backward=False, releases_early=True, in_order_of_use=False, recomputes="always",
            only_beside=False, unhidden=1.0, pessimism=0.0,
        )  # fmt: skip
        policy.name = "delta-published"
        return policy

    # ------------------------------------------------------------------ Filter and Director

    def relieve(self, view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        """Release by the Filter's score until there is room (algorithm 1, lines 11 to 19)."""
        if view.in_backward and not self.releases_in_backward:
            return
        self._meet(view)
        self._ahead = 0
        for storage in self._by_score(view):
            if not self._evicts(view, storage) or not (yield Drop(storage)):
                yield Move(storage)

    def _meet(self, view: MemoryView) -> None:
        """What is remembered is about storages that one view shows."""
        if view is not self._view:
            self._view = view
            self._ranking, self._judged, self._ahead = [], {}, 0
            self._ranked_at = view.clock - RANKED_FOR

    def _by_score(self, view: MemoryView) -> Generator[Candidate, None, None]:
        if self.filter == "lru":  # the view's own order
            yield from view.candidates()
        elif self.filter == "cost":
            yield from self._by_cost(view)
        else:
            score, clock = FILTERS[self.filter], view.clock
            # What the last op used has no staleness and a score of 0: it goes last.
            heap = [(-score(s.nbytes, clock - s.touched, 0.0), s.number, s) for s in view.candidates()]
            heapq.heapify(heap)
            while heap:
                yield heapq.heappop(heap)[2]

    def _by_cost(self, view: MemoryView) -> Generator[Candidate, None, None]:
        """By a ranking that is at most so many ops old, then by a new one for what came later.

        What recomputing costs is dear to ask. A storage first ranks with the seconds of its own op, which is the least
        that it can cost, and again with the real cost when it comes to the front.
        """
        for again in (True,) if view.clock - self._ranked_at >= RANKED_FOR else (False, True):
            if again:
                self._ranked_at = view.clock
                self._judged.clear()
                self._ranking = [
                    (-self._score(view, s, min(view.own_seconds(s), self._transfer_seconds(view, s))), s.number, s)
                    for s in view.candidates()
                ]
                heapq.heapify(self._ranking)
            ranking, known, passed = self._ranking, set[int](), list[tuple[float, int, Candidate]]()
            try:
                while ranking:
                    entry = heapq.heappop(ranking)
                    _, number, storage = entry
                    if not view.available(storage):
                        continue
                    if number not in known:
                        known.add(number)
                        judged = self._judge(view, storage)
                        entry = -self._score(view, storage, min(judged.recompute, judged.transfer)), number, storage
                        if ranking and entry > ranking[0]:
                            heapq.heappush(ranking, entry)
                            continue
                    passed.append(entry)
                    yield storage
            finally:
                for entry in passed:  # who asked may have left some where they were
                    if view.available(entry[2]):
                        heapq.heappush(ranking, entry)

    def _score(self, view: MemoryView, storage: Candidate, cost: Seconds) -> float:
        return FILTERS["cost"](storage.nbytes, view.clock - storage.touched, cost)

    def _evicts(self, view: MemoryView, storage: Candidate) -> bool:
        """The Director: F = c_r / c_s of equation 4 is at most 1. What cannot be recomputed costs infinitely much."""
        judged = self._judge(view, storage)
        return judged.recompute < inf and judged.recompute <= judged.transfer

    def _judge(self, view: MemoryView, storage: Candidate) -> Judged:
        judged = self._judged.get(storage.number)
        if judged is None or view.clock - judged.at >= JUDGED_FOR or storage.touched >= judged.at:
            transfer = self._transfer_seconds(view, storage)
            # The least that it can cost is asked first, because it is cheap to ask.
            cheap = view.own_seconds(storage) <= transfer
            recompute = self._recompute_seconds(view, storage) if cheap else inf
            judged = self._judged[storage.number] = Judged(recompute, transfer, view.clock)
        return judged

    def _recompute_seconds(self, view: MemoryView, storage: Candidate) -> Seconds:
        now = view.recompute_seconds(storage)
        if not self.pessimism or now == inf:
            return now
        return now + self.pessimism * (view.recompute_seconds_at_worst(storage) - now)

    def _transfer_seconds(self, view: MemoryView, storage: Candidate) -> Seconds:
        """Of the copies that are still to be made, what ops will have to wait for."""
        seconds = view.transfer_seconds(storage)
        seconds = seconds if self.both_ways or view.copied(storage) else seconds / 2
        return seconds * (view.exposed + self.unhidden * (1 - view.exposed))

    # ------------------------------------------------------------------ an op wants what was offloaded

    def bring_back(self, view: MemoryView, storage: Candidate) -> Recall:
        """Recompute what is not uncomputable (algorithm 1, lines 4 to 9), or where that is the cheaper way."""
        if self.recomputes == "never":
            return Recall.RELOAD
        most = inf if self.recomputes == "always" else view.transfer_seconds(storage)
        if view.own_seconds(storage) > most:  # the least that it can cost, and cheap to ask
            return Recall.RELOAD
        seconds = view.recompute_seconds(storage)
        return Recall.RECOMPUTE if seconds < inf and seconds <= most else Recall.RELOAD

    # ------------------------------------------------------------------ early start and Prefetcher

    def looks(self, view: MemoryView) -> bool:
        if self.only_beside and not view.overlaps:
            return False
        self._meet(view)
        return self._looks_out(view) or self._looks_in(view)

    def _looks_out(self, view: MemoryView) -> bool:
        return (
            view.clock >= self._ahead
            and view.resident > self.early * view.allowed
            and (self.releases_in_backward or not view.in_backward)
        )

    def _looks_in(self, view: MemoryView) -> bool:
        return (
            view.arriving < self.most_copies_in
            and (view.turned or not self.in_order_of_use)
            and view.resident < self.enough * view.allowed
            and view.anything_moved
        )

    def foresee(self, view: MemoryView) -> Generator[Proposal, bool, None]:
        """Begin copies out above the early mark (algorithm 1, line 11), and copies in below it (algorithm 4)."""
        self._meet(view)
        if self._looks_out(view):
            if self.releases_early:
                yield from self._release_down_to(view, self.early * view.allowed)
            else:
                yield from self._copy_ahead(view)
        if self._looks_in(view):
            yield from self._prefetch(view, self.enough * view.allowed)

    def _release_down_to(self, view: MemoryView, mark: float) -> Generator[Proposal, bool, None]:
        """What is offloaded leaves when its copy is there; until then its bytes stay and it is not asked for again."""
        begun = 0
        for storage in self._by_score(view):
            if begun >= self.most_copies_out or view.resident <= mark:
                return
            if self._evicts(view, storage):
                yield Drop(storage)
            elif view.copied(storage):
                yield Move(storage)
            else:
                begun += yield Copy(storage)
                self._judged.pop(storage.number, None)

    def _copy_ahead(self, view: MemoryView) -> Generator[Proposal, bool, None]:
        begun, ahead, asked = 0, 0, False
        for storage in self._by_score(view):
            if begun >= self.most_copies_out or ahead >= self.spare * view.allowed:
                break
            ahead += storage.nbytes
            if not (view.copied(storage) or self._evicts(view, storage)):
                asked = True
                begun += yield Copy(storage)
                self._judged.pop(storage.number, None)
        if ahead >= self.spare * view.allowed and not asked:
            self._ahead = view.clock + RANKED_FOR

    def _prefetch(self, view: MemoryView, enough: float) -> Generator[Proposal, bool, None]:
        """While memory is enough and fewer than n are under way."""
        under_way = view.arriving
        for storage in view.due() if self.in_order_of_use else view.moved():
            if under_way >= self.most_copies_in or view.resident + storage.nbytes > enough:
                return
            under_way += yield Fetch(storage)
