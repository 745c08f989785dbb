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
        ways = [(self._parents, self._children), (self._children, self._parents)]
        self._ways = ways if descendants else ways[:1]

    def appeared(self, storage: int) -> None:
        self._absent[storage] = 1

    def grew(self, storage: int, nanoseconds: int) -> None:
        super().grew(storage, nanoseconds)
        self.least[storage] += nanoseconds

    def joined(self, parent: int, child: int) -> None:
        self._parents[child].append(parent)
        self._children[parent].append(child)

    def evicted(self, storage: int) -> None:
        self._absent[storage] = 1
        for _, back in self._ways:
            _, around = self._reached(storage, back)
            self.least[around] += self.own[storage]
            self.unsure[around] = True

    def came(self, storages: Iterable[int]) -> None:
        for storage in storages:
            self._absent[storage] = 0
        for storage in storages:
            for _, back in self._ways:
                smaller = [storage, *self._reached(storage, back)[1]]
                self.least[smaller] = self.own[smaller]
                self.unsure[smaller] = True

    def find_out(self, storages: NDArray[np.intp]) -> None:
        for storage in storages.tolist():
            around = [near for towards, _ in self._ways for near in self._reached(storage, towards)[0]]
            self.least[storage] = self.own[storage] + self.own[around].sum()
        self.unsure[storages] = False

    def _reached(self, storage: int, edges: list[list[int]]) -> tuple[list[int], list[int]]:
        """What is absent and reached from `storage` through nothing but what is absent, and what is present behind."""
        known, absent, present, stack = {storage}, list[int](), list[int](), [storage]
        while stack:
            for near in edges[stack.pop()]:
                if near not in known:
                    known.add(near)
                    (absent if self._absent[near] else present).append(near)
                    if self._absent[near]:
                        stack.append(near)
        return absent, present


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
