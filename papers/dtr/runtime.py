"""DTR by its own rules, on its own logs: what the paper's simulator does, for its numbers to be reproduced.

M. Kirisame et al., "Dynamic Tensor Rematerialization", arXiv:2006.09616, sections 3 and 4, appendices C and D. Beside
the controller there is no need for it but this one: the controller holds alive what a dropped value is recomputed
from, DTR recomputes that as well, as deep as it has to; and it never copies anything out. `methods.dtr` has the same
heuristics under the controller; docs/decisions has a page on both.

NOTE [DTR's rules].

 1. A storage with its views is evicted as one. A view that is wanted again is made again, by its operator.
 2. What a running operator reads is locked; constants, and what the program ends with, are pinned.
 3. A storage that nothing refers to any more is evicted at once. It can still be recomputed, and costs of the evicted
    count it.
 4. An operator that runs again makes all of its results; those that are there already are freed when it has run.
 5. When bytes are short, the storage with the smallest score is evicted, of equals the one that came into the pool
    last; the first score of 0 ends the search. Nothing left to evict: out of memory.
 6. Time is the sum of what operators took so far, the recomputed ones included. A storage is stale since an operator
    last read it, for whatever reason, or first made it.
 7. When recomputing has taken as long as `limit` times the operators of the program take, the run is given up: it
    thrashes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from types import MappingProxyType
from typing import Literal, final

from benchmarks.record import frozen
from papers.dtr.costs import AbstractCost, Classes, Neighbourhood, One, Own
from papers.dtr.program import Event, Operator, Program, TensorId
from spillway.errors import UsageError
from spillway.units import Bytes


@frozen
class Heuristic:
    """A score: the smallest is evicted first."""

    cost: Callable[[int], AbstractCost] | None
    """Above the line, for so many storages; None for the time of the last use."""
    per_byte: bool = True
    """Whether bytes stand below it."""
    per_staleness: bool = True
    """Whether staleness does."""


HEURISTICS: Mapping[str, Heuristic] = MappingProxyType(
    {
        "dtr": Heuristic(cost=Neighbourhood),
        "dtr-eqclass": Heuristic(cost=Classes),
        "dtr-local": Heuristic(cost=Own),
        "lru": Heuristic(cost=None, per_byte=False, per_staleness=False),
        "largest": Heuristic(cost=One, per_staleness=False),
        "msps": Heuristic(cost=lambda storages: Neighbourhood(storages, descendants=False), per_staleness=False),
    }
)
"""Those of the paper's figures 2 and 5, by the names of our methods: h_DTR, h_eq, h_local, h_LRU, h_size, h_MSPS."""


@frozen
class Outcome:
    """How a run ended, or where it was given up."""

    status: Literal["ok", "oom", "thrash"]
    """Whether it went through."""
    nanoseconds: int
    """What its operators took, the recomputed ones included."""
    recomputed_nanoseconds: int
    """What the recomputed ones took."""
    overhead: float
    """`nanoseconds` over those of the program."""
    peak: Bytes
    """The most bytes there were."""
    evictions: int
    """Storages that were evicted for want of room."""
    looks: int
    """Storages that a search looks at if it looks at each in turn, added up."""


def run_dtr(program: Program, heuristic: str, allowed: Bytes, limit: float = 1.0) -> Outcome:
    """Run a program within `allowed` bytes.

    Arguments:
        heuristic: One of `HEURISTICS`.
        limit: How often the program's own time recomputing may take; the paper's 1, an overhead of 2.

    Raises:
        UsageError: There is no such heuristic.
    """
    if heuristic not in HEURISTICS:
        raise UsageError(f"DTR has no heuristic {heuristic!r}; choose one of {', '.join(HEURISTICS)}.")
    return _Runtime(program, HEURISTICS[heuristic], allowed, limit).run()


class _OutOfMemory(Exception):
    """Rule 5: nothing is left to evict."""


class _Thrash(Exception):
    """Rule 7."""


@final
class _Runtime:
    """The state of one run."""

    def __init__(self, program: Program, heuristic: Heuristic, allowed: Bytes, limit: float) -> None:
        storages = len(program.storages)
        self._program = program
        self._heuristic = heuristic
        self._allowed = allowed
        self._limit = limit * program.nanoseconds
        self._operators = program.operators
        self._tensors = program.tensors
        self._sizes = program.storages
        self._storage_of = [tensor.storage for tensor in program.tensors]
        # tensors
        self._defined = bytearray(len(program.tensors))
        # storages
        self._views: list[list[TensorId]] = [[] for _ in range(storages)]
        self._makers: list[set[int]] = [set() for _ in range(storages)]
        self._present = bytearray(storages)
        self._pinned = bytearray(storages)
        self._locks = [0] * storages
        self._references = [0] * storages
        self._used = [0] * storages
        self._pool: dict[int, None] = {}
        """What may be evicted, in the order in which it came in."""
        self._costs = heuristic.cost(storages) if heuristic.cost is not None else None
        # the whole
        self._clock = 1  # as theirs; it is part of the overhead that they tell
        self._resident: Bytes = 0
        self._peak: Bytes = 0
        self._recomputed = self._evictions = self._looks = 0

    def run(self) -> Outcome:
        status: Literal["ok", "oom", "thrash"] = "ok"
        act = {Event.RUN: self._run, Event.GET: self._get, Event.RELEASE: self._release, Event.PIN: self._pin}
        try:
            for event, index in self._program.events:
                act[event](index)
        except _OutOfMemory:
            status = "oom"
        except _Thrash:
            status = "thrash"
        return Outcome(
            status=status, nanoseconds=self._clock, recomputed_nanoseconds=self._recomputed,
            overhead=self._clock / max(self._program.nanoseconds, 1), peak=self._peak, evictions=self._evictions,
            looks=self._looks,
        )  # fmt: skip

    # ------------------------------------------------------------------ the four events

    def _run(self, index: int) -> None:
        operator = self._operators[index]
        self._enter(index, operator)
        if not operator.creates:
            return
        self._materialize(operator.creates[0], again=False)
        for tensor in operator.creates:
            self._used[self._storage_of[tensor]] = self._clock

    def _enter(self, index: int, operator: Operator) -> None:
        """The results are known from here on, before they are there."""
        parents = dict.fromkeys(self._storage_of[tensor] for tensor in operator.reads)
        for tensor in operator.creates:
            storage = self._storage_of[tensor]
            if not self._views[storage] and self._costs is not None:
                self._costs.appeared(storage)
            self._views[storage].append(tensor)
            self._references[storage] += 1
            if self._costs is None:
                continue
            if index not in self._makers[storage]:
                self._makers[storage].add(index)
                self._costs.grew(storage, operator.nanoseconds)
            for parent in parents:
                if parent != storage:
                    self._costs.joined(parent, storage)

    def _get(self, tensor: TensorId) -> None:
        self._references[self._storage_of[tensor]] += 1

    def _release(self, tensor: TensorId) -> None:
        storage = self._storage_of[tensor]
        self._references[storage] -= 1
        if self._references[storage] == 0 and self._present[storage] and not self._pinned[storage]:
            self._evict(storage)  # rule 3

    def _pin(self, tensor: TensorId) -> None:
        if not self._defined[tensor]:
            self._materialize(tensor, again=True)
        storage = self._storage_of[tensor]
        if not self._pinned[storage]:
            self._pinned[storage] = True
            self._lock(storage)

    # ------------------------------------------------------------------ making tensors

    def _materialize(self, tensor: TensorId, *, again: bool) -> None:
        """Run the operator of `tensor`, and before it those of what it reads that is not there, and so on (rule 2)."""
        stack = [(tensor, self._wanted(tensor))]
        while stack:
            tensor, missing = stack[-1]
            while missing and self._defined[missing[-1]]:
                self._lock(self._storage_of[missing.pop()])
            if missing:
                stack.append((missing[-1], self._wanted(missing[-1])))
                continue
            stack.pop()
            operator = self._operators[self._tensors[tensor].operator]
            if self._resident + operator.nbytes > self._allowed:
                self._make_room(operator.nbytes)
            self._compute(tensor, operator, again=again or bool(stack))
            for read in operator.reads:
                self._unlock(self._storage_of[read])
            if self._recomputed > self._limit:
                raise _Thrash

    def _wanted(self, tensor: TensorId) -> list[TensorId]:
        """Note that what the tensor's operator reads is used, lock what is there; the rest, the last one first."""
        reads = self._operators[self._tensors[tensor].operator].reads
        for read in reads:
            self._used[self._storage_of[read]] = self._clock
        missing = [read for read in reversed(reads) if not self._defined[read]]
        for read in reads:
            if self._defined[read]:
                self._lock(self._storage_of[read])
        return missing

    def _compute(self, tensor: TensorId, operator: Operator, *, again: bool) -> None:
        self._clock += operator.nanoseconds
        self._recomputed += operator.nanoseconds if again else 0
        self._resident += operator.nbytes
        self._peak = max(self._peak, self._resident)
        came: list[int] = []
        for made in (*(result for result in operator.creates if result != tensor), tensor):
            storage = self._storage_of[made]
            if self._defined[made]:
                self._resident -= self._tensors[made].nbytes  # rule 4
                continue
            self._defined[made] = True
            if not self._present[storage]:
                self._present[storage] = True
                came.append(storage)
        for storage in came:
            self._into_pool(storage)
        if came and self._costs is not None:
            self._costs.came(came)

    # ------------------------------------------------------------------ locks and the pool

    def _lock(self, storage: int) -> None:
        self._pool.pop(storage, None)
        self._locks[storage] += 1

    def _unlock(self, storage: int) -> None:
        self._locks[storage] -= 1
        if self._locks[storage] == 0:
            self._into_pool(storage)

    def _into_pool(self, storage: int) -> None:
        self._pool.pop(storage, None)
        self._pool[storage] = None

    # ------------------------------------------------------------------ evicting

    def _make_room(self, needed: Bytes) -> None:
        while self._resident + needed > self._allowed:
            if not self._pool:
                raise _OutOfMemory
            self._evict(self._choose())
            self._evictions += 1

    def _evict(self, storage: int) -> None:
        self._present[storage] = False
        self._pool.pop(storage, None)
        self._resident -= self._sizes[storage]
        for tensor in self._views[storage]:
            self._defined[tensor] = False
        if self._costs is not None:
            self._costs.evicted(storage)

    def _choose(self) -> int:
        """Rule 5."""
        best, chosen = inf, -1
        for storage in self._pool:
            self._looks += 1
            score = self._score(storage)
            if score <= best:
                best, chosen = score, storage
            if score == 0:
                break
        return chosen

    def _score(self, storage: int) -> float:
        cost = self._used[storage] if self._costs is None else self._costs.of(storage)
        below = self._sizes[storage] if self._heuristic.per_byte else 1
        below *= self._clock - self._used[storage] if self._heuristic.per_staleness else 1
        return cost / below if below > 0 else inf
