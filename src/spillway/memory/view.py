"""What a policy sees of the controller: `methods.base.MemoryView` over the real records."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from typing import final

from spillway.ir.step import Phase
from spillway.memory.ancestry import Ancestry, ancestry
from spillway.memory.copies import Copies
from spillway.memory.ledger import AbstractLedger
from spillway.memory.records import AWAY, DROPPED, EXACT, GONE, HERE, NEVER, Storage, Value
from spillway.methods.base import Candidate, Evicted
from spillway.units import Bytes, Seconds


@final
class View:
    """Read-only to policies. Keeps the order of last use in a heap that is put right lazily, only when room is
    short."""

    __slots__ = ("_copies", "_heap", "_ledger", "_neighbours", "_walked")

    def __init__(self, ledger: AbstractLedger, copies: Copies) -> None:
        self._ledger = ledger
        self._copies = copies
        self._neighbours = Neighbours(ledger)
        self._heap: list[tuple[int, int, Storage]] = []
        self._walked: list[tuple[int, int, Storage]] = []

    @property
    def allowed(self) -> Bytes:
        return self._ledger.budget.allowed

    @property
    def resident(self) -> Bytes:
        return self._ledger.budget.resident

    @property
    def clock(self) -> int:
        return self._ledger.clock

    @property
    def op_index(self) -> int:
        return max(self._ledger.clock - self._ledger.first_op - 1, 0)

    def candidates(self) -> Iterator[Storage]:
        heap = self._heap
        self._put_back()  # what a walk took that was left unfinished
        young, self._ledger.young = self._ledger.young, []
        for storage in young:
            heapq.heappush(heap, (storage.touched, storage.number, storage))
        last: Storage | None = None
        try:
            while heap:
                touched, number, storage = heapq.heappop(heap)
                value = storage.value
                if value is None or value.absent or storage is last:
                    continue  # it comes back through `young`
                if storage.touched != touched:
                    heapq.heappush(heap, (storage.touched, number, storage))
                    continue
                self._walked.append((touched, number, storage))
                last = storage
                if self._ledger.may_leave(storage):
                    yield storage
        finally:
            self._put_back()

    def _put_back(self) -> None:
        while self._walked:
            heapq.heappush(self._heap, self._walked.pop())

    def available(self, storage: Candidate) -> bool:
        value = _value(storage)
        return value is not None and value.absent == HERE and self._ledger.may_leave(value.storage)

    def away(self, storage: Candidate) -> bool:
        value = _value(storage)
        return value is not None and value.absent in (AWAY, DROPPED)

    def chain(self, storage: Candidate) -> int | None:
        found = self._ancestry(storage)
        return None if found is None else found.chain

    def own_seconds(self, storage: Candidate) -> Seconds:
        self._ledger.counters.questions += 1
        value = _value(storage)
        recipe = None if value is None else value.recipe
        if recipe is None or recipe.exactness != EXACT:
            return inf
        return self._ledger.machine.seconds_of(recipe)

    def recompute_seconds(self, storage: Candidate) -> Seconds:
        found = self._ancestry(storage)
        return inf if found is None else self._seconds(found)

    def _seconds(self, found: Ancestry) -> Seconds:
        own = sum(map(self._ledger.machine.seconds_of, found.recipes.values()))
        below = (ancestry(leaf, self._ledger.chain_cap) for leaf in found.leaves if leaf.absent == DROPPED)
        away = sum(leaf.storage.nbytes for leaf in found.leaves if leaf.absent == AWAY)
        copied_in = self._ledger.machine.transfer_seconds(away) / 2 if away else 0.0
        return own + copied_in + sum(self._seconds(deeper) for deeper in below if deeper is not None)

    def recompute_seconds_at_worst(self, storage: Candidate) -> Seconds:
        found = self._ancestry(storage)
        if found is None:
            return inf
        present = (leaf.storage for leaf in found.leaves if leaf.absent == HERE)
        link = self._ledger.machine.transfer_seconds
        return self._seconds(found) + sum(min(self.own_seconds(leaf), link(leaf.nbytes) / 2) for leaf in present)

    def transfer_seconds(self, storage: Candidate) -> Seconds:
        self._ledger.counters.questions += 1
        out_and_in = self._ledger.machine.transfer_seconds(storage.nbytes)
        return out_and_in / 2 if self.copied(storage) else out_and_in

    @property
    def exposed(self) -> float:
        return self._copies.exposed

    @property
    def overlaps(self) -> bool:
        return self._copies.overlaps

    def copied(self, storage: Candidate) -> bool:
        value = _value(storage)
        return value is not None and value.home is not None

    @property
    def anything_moved(self) -> bool:
        return self._ledger.away > len(self._ledger.arriving)

    def moved(self) -> Iterator[Storage]:
        return self._copies.in_order_of_leaving()

    def due(self) -> Iterator[Storage]:
        return self._copies.in_order_of_use()

    @property
    def arriving(self) -> int:
        return len(self._ledger.arriving)

    @property
    def in_backward(self) -> bool:
        return self._ledger.phase is Phase.BACKWARD

    @property
    def turned(self) -> bool:
        return self._ledger.phase is not Phase.FORWARD

    def stale_seconds(self, storage: Candidate) -> Seconds:
        self._ledger.counters.questions += 1
        value = _value(storage)
        return 0.0 if value is None else self._neighbours.seconds_since(value)

    def as_evicted(self, storage: Candidate) -> Evicted | None:
        value = _value(storage)
        return None if value is None or value.recipe is None else Evicted(value.storage.number, value.recipe.number)

    def evicted(self) -> Mapping[Evicted, Seconds]:
        return self._neighbours.evicted()

    def evicted_neighbours(self, of: Candidate | Evicted) -> Mapping[Evicted, Seconds]:
        self._ledger.counters.questions += 1
        return self._neighbours.around(of if isinstance(of, Evicted) else _value(of))

    def evicted_ancestors(self, storage: Candidate) -> Mapping[Evicted, Seconds]:
        self._ledger.counters.questions += 1
        return self._neighbours.ancestors(_value(storage))

    def evicted_descendants(self, storage: Candidate) -> Mapping[Evicted, Seconds]:
        self._ledger.counters.questions += 1
        return self._neighbours.descendants(_value(storage))

    def forget_recipes(self) -> None:
        """The controller forgets them: so does what was made of them."""
        self._neighbours.forget()

    def _ancestry(self, storage: Candidate) -> Ancestry | None:
        self._ledger.counters.questions += 1
        if not isinstance(storage, Storage):
            return None
        found = self._ledger.way_back(storage)
        return found if isinstance(found, Ancestry) else None


def _value(storage: Candidate) -> Value | None:
    """The content of a storage that policies know as a candidate."""
    return storage.value if isinstance(storage, Storage) else None


def _evicted(value: Value) -> bool:
    gone = value.absent == DROPPED or value.absent == GONE
    return gone and value.recipe is not None and value.recipe.exactness != NEVER


@final
class Neighbours:
    """The graph of one step's values, as far as it has been looked at."""

    __slots__ = ("_clock", "_ledger", "_numbers", "_readers", "_values")

    def __init__(self, ledger: AbstractLedger) -> None:
        self._ledger = ledger
        self._values: dict[Evicted, Value] = {}
        self._readers: dict[Value, list[Value]] = {}
        self._numbers: list[int] = []
        self._clock: list[Seconds] = [0.0]

    def forget(self) -> None:
        self._values.clear()
        self._readers.clear()
        self._numbers.clear()
        del self._clock[1:]

    def _catch_up(self) -> None:
        recipes, seconds_of = self._ledger.recipes, self._ledger.machine.seconds_of
        for recipe in recipes[len(self._numbers) :]:
            made = [*recipe.creates, *(value for _, value in recipe.writes)]
            for read in recipe.reads:
                self._readers.setdefault(read, []).extend(made)
            for value in made:
                self._values[Evicted(value.storage.number, recipe.number)] = value
            self._numbers.append(recipe.number)
            self._clock.append(self._clock[-1] + seconds_of(recipe))

    def evicted(self) -> dict[Evicted, Seconds]:
        """All that is evicted, in the order in which it was made."""
        self._catch_up()
        return self._told(value for value in self._values.values() if _evicted(value))

    def around(self, of: Value | Evicted | None) -> dict[Evicted, Seconds]:
        """What is evicted and was read to make it, or made by reading it."""
        self._catch_up()
        value = self._values.get(of) if isinstance(of, Evicted) else of
        if value is None:
            return {}
        return self._told(near for near in (*_parents(value), *self._readers.get(value, ())) if _evicted(near))

    def ancestors(self, value: Value | None) -> dict[Evicted, Seconds]:
        """What is evicted and has to be made again to make `value` again."""
        return self._reached(value, _parents)

    def descendants(self, value: Value | None) -> dict[Evicted, Seconds]:
        """What is evicted and made from it, through nothing but what is evicted."""
        self._catch_up()
        return self._reached(value, lambda near: self._readers.get(near, ()))

    def _reached(self, value: Value | None, ways: Callable[[Value], Iterable[Value]]) -> dict[Evicted, Seconds]:
        if value is None:
            return {}
        found, stack = {value: None}, [value]
        while stack:
            for near in ways(stack.pop()):
                if near not in found and _evicted(near):
                    found[near] = None
                    stack.append(near)
        del found[value]
        return self._told(found)

    def seconds_since(self, value: Value) -> Seconds:
        """What ops took since one last began to read it, or had made it."""
        self._catch_up()
        touched, recipe = value.storage.touched, value.recipe
        made_last = recipe is not None and recipe.number == touched
        return self._clock[-1] - self._clock[(bisect_right if made_last else bisect_left)(self._numbers, touched)]

    def _told(self, values: Iterable[Value]) -> dict[Evicted, Seconds]:
        seconds_of = self._ledger.machine.seconds_of
        named = ((value.storage.number, value.recipe) for value in values)
        return {Evicted(number, recipe.number): seconds_of(recipe) for number, recipe in named if recipe is not None}


def _parents(value: Value) -> Iterable[Value]:
    return () if value.recipe is None else value.recipe.reads
