"""DTR: evict what is cheap to recompute, large and stale, tensor by tensor, and recompute it when it is read.

M. Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, arXiv:2006.09616. Its heuristic (section 4.1) is
h(s) = (c(s) + c(e*(s))) / (m(s) s(s)): seconds of the storage's own op and of its evicted neighbourhood e*, over bytes
and staleness; the smallest leaves first. The neighbourhood is what is evicted and would have to be recomputed for s, or
needs s to be recomputed, through nothing but what is evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Final, Self, final

from spillway.errors import UsageError
from spillway.methods.base import AbstractPolicy, Candidate, Drop, Evicted, MemoryView, Proposal
from spillway.units import Bytes, Seconds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Heuristic:
    """What stands in a score. The seconds of a storage's own op stand above the line, unless nothing does."""

    ancestors: bool = False
    """Above: those of its evicted ancestors."""
    descendants: bool = False
    """Above: those of its evicted descendants."""
    classes: bool = False
    """Above: those of the classes that it touches."""
    seconds: bool = True
    """Above: any at all."""
    staleness: bool = True
    """Below, beside its bytes: its staleness."""


HEURISTICS: Final[Mapping[str, Heuristic]] = MappingProxyType(
    {
        "dtr": Heuristic(ancestors=True, descendants=True),
        "dtr-eqclass": Heuristic(classes=True),
        "dtr-local": Heuristic(),
        "largest": Heuristic(seconds=False, staleness=False),
        "msps": Heuristic(ancestors=True, staleness=False),
    }
)
"""h_DTR with the exact neighbourhood (section 4.1), h_eq with union-find classes in its place (appendix C.2), h_local
without one; and, of those that the paper compares with, the largest storage (GreedyRemat's) and MSPS, the most memory
saved per second of recomputing (Capuchin's)."""


@final
class DTR(AbstractPolicy):
    """Drops by one of DTR's heuristics, and never copies anything out.

    Differs from the paper in, because the controller keeps its own rules:

    - A drop holds alive what the dropped value is recomputed from (its cut), as long as it may be wanted; DTR lets that
      go too and recomputes as deep as it has to. And chains are capped. So less can be dropped than in DTR.
    - What may not be dropped, or cannot be recomputed, is left to the controller's last resort: it is moved. DTR runs
      out of memory there, or recomputes without end.
    - A storage that was overwritten counts as evicted, and so does one that died: DTR rewrites an op in place into one
      that makes a new storage, and evicts what nobody refers to.
    - Staleness is in seconds of the ops that ran since, not counting those that ran again.
    - `touched` orders equals: of equal scores the one used last leaves, as the one that came into DTR's pool last.
    - Scores are found out only as far as the choice asks for: seconds of its own op are the least that a storage costs.

    Not implemented: the prototype's sampling of sqrt(n) storages, and its floor of 1 % of the mean size.

    Arguments:
        heuristic: One of `HEURISTICS`; also the policy's name.
    """

    name = "dtr"

    def __init__(self, heuristic: str = "dtr") -> None:
        if heuristic not in HEURISTICS:
            raise UsageError(f"DTR has no heuristic {heuristic!r}; choose one of {', '.join(HEURISTICS)}.")
        self.name = heuristic
        self._terms = HEURISTICS[heuristic]
        self._classes = Classes()
        self._view: MemoryView | None = None

    @classmethod
    def named(cls, heuristic: str) -> Callable[[], Self]:
        """A factory of the policy with that heuristic."""
        return lambda: cls(heuristic)

    def relieve(self, view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        """Drop what has the smallest score, and again, until there is room.

        An entry first stands where the seconds of its own op put it, and again where they all do when it comes to the
        front. What is dropped meanwhile only makes others dearer.
        """
        if self._terms.classes:
            self._catch_up(view)
        own = [(view.own_seconds(storage), storage) for storage in view.candidates()]
        heap = [
            (self._score(view, storage, seconds), -place, storage)
            for place, (seconds, storage) in enumerate(own)
            if seconds < inf
        ]
        heapq.heapify(heap)
        while heap:
            _, place, storage = heapq.heappop(heap)
            entry = (self._score(view, storage, self._seconds(view, storage)), place, storage)
            if heap and entry > heap[0]:
                heapq.heappush(heap, entry)
                continue
            name = view.as_evicted(storage)
            granted = yield Drop(storage)
            if granted and name is not None and self._terms.classes:
                self._classes.join(name, view.own_seconds(storage), view.evicted_neighbours(name))

    def _score(self, view: MemoryView, storage: Candidate, seconds: Seconds) -> float:
        above = seconds if self._terms.seconds else 1.0
        below = storage.nbytes * (view.stale_seconds(storage) if self._terms.staleness else 1.0)
        return above / below if below > 0 else inf

    def _seconds(self, view: MemoryView, storage: Candidate) -> Seconds:
        """Of its own op, and of what the heuristic counts beside it."""
        seconds = view.own_seconds(storage)
        if self._terms.ancestors or self._terms.descendants:
            # A view of more than its base can be both at once: it counts once.
            around = dict(view.evicted_ancestors(storage)) if self._terms.ancestors else {}
            around |= view.evicted_descendants(storage) if self._terms.descendants else {}
            return seconds + sum(around.values())
        if self._terms.classes:
            return seconds + self._classes.seconds(view.evicted_neighbours(storage))
        return seconds

    def _catch_up(self, view: MemoryView) -> None:
        """What came back or is forgotten leaves its class, what was evicted meanwhile joins those of its neighbours."""
        if view is not self._view:
            self._view, self._classes = view, Classes()
        evicted = view.evicted()
        for name in [name for name in self._classes if name not in evicted]:
            self._classes.leave(name)
        for name, seconds in evicted.items():
            if name not in self._classes:
                self._classes.join(name, seconds, view.evicted_neighbours(name))


@final
class Classes:
    """Evicted storages in a union-find structure, with the sum of the seconds of each class (appendix C.2).

    What comes back takes its seconds along, and leaves the class as it is: a class never splits, which is the error
    that h_eq makes.
    """

    def __init__(self) -> None:
        self._nodes: dict[Evicted, _Node] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._nodes

    def __iter__(self) -> Generator[Evicted, None, None]:
        yield from self._nodes

    def join(self, name: Evicted, seconds: Seconds, neighbours: Mapping[Evicted, Seconds]) -> None:
        """It was evicted: its class and those of its evicted neighbours become one."""
        root = self._nodes[name] = _Node(seconds)
        for near in neighbours:
            node = self._nodes.get(near)
            other = root if node is None else node.root()
            if other is not root:
                root.above = other
                other.total += root.total
                root = other

    def leave(self, name: Evicted) -> None:
        """It is back."""
        node = self._nodes.pop(name)
        node.root().total -= node.seconds

    def seconds(self, neighbours: Mapping[Evicted, Seconds]) -> Seconds:
        """Of the distinct classes of these."""
        roots = {node.root() for near in neighbours if (node := self._nodes.get(near)) is not None}
        return sum(root.total for root in roots)


@final
@dataclass(slots=True, eq=False)
class _Node:
    """A storage in its class; the root of a class has the total."""

    seconds: Seconds
    above: _Node | None = None
    total: Seconds = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.seconds

    def root(self) -> _Node:
        """The root, to which the way is short from here on."""
        root = self
        while root.above is not None:
            root = root.above
        node = self
        while node.above is not None:
            node.above, node = root, node.above
        return root
