"""What it costs to evict a storage, in nanoseconds, by each of DTR's definitions: the upper part of its heuristics.

M. Kirisame et al., "Dynamic Tensor Rematerialization", arXiv:2006.09616, section 4.1 and appendix C.2. The paper's
simulator looks at every storage in the pool whenever one has to go. Here costs are kept as they change, in arrays, and
what is dear to find out is only known to be *at least* so much until it may matter: the choice is the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

Costs: TypeAlias = NDArray[np.int64]
"""Nanoseconds by storage."""


class AbstractCost:
    """The cost of evicting each storage, told of everything that changes it.

    A storage is absent from the moment it appears until it came, and again from when it is evicted until it came back.
    """

    least: Costs
    """What evicting each storage costs at least; exactly that where `unsure` is false."""
    unsure: NDArray[np.bool_]
    """Where it may cost more."""

    def __init__(self, storages: int) -> None:
        self.own: Costs = np.zeros(storages, np.int64)
        self.least = self.own
        self.unsure = np.zeros(storages, np.bool_)

    def appeared(self, storage: int) -> None:
        """An operator is about to create it."""

    def grew(self, storage: int, nanoseconds: int) -> None:
        """One more operator makes a tensor that looks into it."""
        self.own[storage] += nanoseconds

    def joined(self, parent: int, child: int) -> None:
        """An operator reads the one and makes the other."""

    def evicted(self, storage: int) -> None:
        """It is absent now."""

    def came(self, storages: Iterable[int]) -> None:
        """An operator made them; they are present now."""

    def find_out(self, storages: NDArray[np.intp]) -> None:
        """Make `least` exact for these."""


@final
class Own(AbstractCost):
    """The operators of the storage alone: h_local."""


@final
class One(AbstractCost):
    """The same for each."""

    def __init__(self, storages: int) -> None:
        super().__init__(storages)
        self.least = np.ones(storages, np.int64)


@final
class Neighbourhood(AbstractCost):
    """Its own operators, and those of its evicted neighbourhood e*: what is evicted and would have to be recomputed
    to recompute it (ancestors), or needs it to be recomputed (descendants), through nothing but what is evicted.

    Arguments:
        descendants: Whether those count; MSPS counts ancestors alone.
    """

    def __init__(self, storages: int, *, descendants: bool = True) -> None:
        super().__init__(storages)
        self.least = np.zeros(storages, np.int64)
        self._absent = bytearray(storages)
        self._parents: list[list[int]] = [[] for _ in range(storages)]
        self._children: list[list[int]] = [[] for _ in range(storages)]
        ways = [_Way(storages, self._parents, self._children), _Way(storages, self._children, self._parents)]
        self._ways = ways if descendants else ways[:1]
        self._circular = False

    def appeared(self, storage: int) -> None:
        self._absent[storage] = 1

    def grew(self, storage: int, nanoseconds: int) -> None:
        super().grew(storage, nanoseconds)
        self.least[storage] += nanoseconds

    def joined(self, parent: int, child: int) -> None:
        self._parents[child].append(parent)
        self._children[parent].append(child)
        self._circular |= parent > child  # a view made of more than its base: only these can close a circle

    def evicted(self, storage: int) -> None:
        self._absent[storage] = 1
        cost = self.own[storage]
        for way in self._ways:
            around = self._border(storage, way)
            way.cost[around] += cost
            way.unsure[around] = True
            self.least[around] += cost
            self.unsure[around] = True

    def came(self, storages: Iterable[int]) -> None:
        for storage in storages:
            self._absent[storage] = 0
        for storage in storages:
            for way in self._ways:
                self._forget(way, [*self._border(storage, way), storage])

    def _forget(self, way: _Way, storages: list[int]) -> None:
        """The neighbourhoods of these have become smaller, by an unknown part."""
        self.least[storages] -= way.cost[storages]
        way.cost[storages] = 0
        way.unsure[storages] = True
        self.unsure[storages] = True

    def find_out(self, storages: NDArray[np.intp]) -> None:
        for storage in storages.tolist():
            for way in self._ways:
                if way.unsure[storage]:
                    way.unsure[storage] = False
                    cost = self._sum(storage, way)
                    self.least[storage] += cost - way.cost[storage]
                    way.cost[storage] = cost
        self.unsure[storages] = False

    def _sum(self, storage: int, way: _Way) -> int:
        """Cost of what is absent and reached from `storage` through nothing but what is absent."""
        if self._circular:
            return sum(map(self.own.item, self._walk(storage, way)))
        within = 0
        for near in way.towards[storage]:
            if self._absent[near]:
                within |= way.within.get(near) or self._reach(near, way)
        bits = np.frombuffer(within.to_bytes(within.bit_length() // 8 + 1, "little"), np.uint8)
        return int(self.own[np.flatnonzero(np.unpackbits(bits, bitorder="little"))].sum())

    def _reach(self, storage: int, way: _Way) -> int:
        """The set, as the bits of a number, of the absent `storage` and what is absent and reached from it."""
        stack = [storage]
        while stack:
            reached, ready = 1 << stack[-1], True
            for near in way.towards[stack[-1]]:
                if self._absent[near]:
                    known = way.within.get(near)
                    if known is None:
                        stack.append(near)
                        ready = False
                        break
                    reached |= known
            if ready:
                way.within[stack.pop()] = reached
        return way.within[storage]

    def _walk(self, storage: int, way: _Way) -> set[int]:
        """The same where storages may need each other in a circle."""
        found, stack = {storage}, [storage]
        while stack:
            for near in way.towards[stack.pop()]:
                if self._absent[near] and near not in found:
                    found.add(near)
                    stack.append(near)
        return found - {storage}

    def _border(self, storage: int, way: _Way) -> list[int]:
        """What is present and reaches `storage` through nothing but what is absent; those in between change too."""
        absent, found, stack = self._absent, {storage}, [storage]
        border = list[int]()
        while stack:
            way.within.pop(stack[-1], None)
            for near in way.back[stack.pop()]:
                if near not in found:
                    found.add(near)
                    (stack if absent[near] else border).append(near)
        return border


@final
class _Way:
    """One of the two directions of a neighbourhood."""

    def __init__(self, storages: int, towards: list[list[int]], back: list[list[int]]) -> None:
        self.towards = towards
        self.back = back
        self.cost: Costs = np.zeros(storages, np.int64)
        self.unsure = np.zeros(storages, np.bool_)
        self.within: dict[int, int] = {}
        """What is absent and reached from an absent storage, where that is known."""


@final
class Classes(AbstractCost):
    """Its own operators, and those of the classes of evicted storages that it touches: h_eq.

    The classes are those of a union-find structure. An evicted storage joins the classes of its evicted neighbours;
    one that comes back takes its cost along and leaves what it joined as it is: classes never split.
    """

    def __init__(self, storages: int) -> None:
        super().__init__(storages)
        self.least = np.zeros(storages, np.int64)
        self._neighbours: list[list[int]] = [[] for _ in range(storages)]
        self._class: list[_Class | None] = [None] * storages

    def appeared(self, storage: int) -> None:
        self._class[storage] = _Class(storage, len(self._class))

    def grew(self, storage: int, nanoseconds: int) -> None:
        super().grew(storage, nanoseconds)
        self.least[storage] += nanoseconds

    def joined(self, parent: int, child: int) -> None:
        if child in self._neighbours[parent]:
            return
        for one, other in ((parent, child), (child, parent)):
            self._neighbours[one].append(other)
            group = self._class[other]
            if group is not None:
                if not group.touched[one]:
                    self.least[one] += group.cost
                group.touched[one] += 1

    def evicted(self, storage: int) -> None:
        around = self._neighbours[storage]
        group = self._class[storage] = _Class(storage, len(self._class))
        group.cost = int(self.own[storage])
        group.touched[around] = 1
        self.least[around] += group.cost
        for near in around:
            other = self._class[near]
            if other is not None and other is not group:
                group = self._merge(group, other)

    def _merge(self, one: _Class, other: _Class) -> _Class:
        if len(one.members) < len(other.members):
            one, other = other, one
        touched, also = one.touched > 0, other.touched > 0
        self.least[touched & ~also] += other.cost
        self.least[also & ~touched] += one.cost
        one.cost += other.cost
        one.touched += other.touched
        one.members |= other.members
        for member in other.members:
            self._class[member] = one
        return one

    def came(self, storages: Iterable[int]) -> None:
        for storage in storages:
            group = self._class[storage]
            if group is None:
                raise ValueError(f"storage {storage} is present already")
            self._class[storage] = None
            group.members.discard(storage)
            group.cost -= int(self.own[storage])
            self.least[group.touched > 0] -= self.own[storage]
            around = np.array(self._neighbours[storage], np.intp)
            group.touched[around] -= 1
            self.least[around[group.touched[around] == 0]] -= group.cost


@final
class _Class:
    """Evicted storages whose costs are added up."""

    def __init__(self, storage: int, storages: int) -> None:
        self.members = {storage}
        self.cost = 0
        self.touched = np.zeros(storages, np.int16)
        """How many of its members each storage is a neighbour of."""
