"""What it costs to evict a storage, in nanoseconds, by each of DTR's definitions: the upper part of its heuristics.

M. Kirisame et al., "Dynamic Tensor Rematerialization", arXiv:2006.09616, section 4.1 and appendix C.2. The paper's
simulator finds the cost of every storage in the pool whenever one has to go; here it is found again where it changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final


class AbstractCost:
    """The cost of evicting each storage, told of everything that changes it.

    A storage is absent from the moment it appears until it came, and again from when it is evicted until it came back.
    """

    def __init__(self, storages: int) -> None:
        self.own = [0] * storages
        """Nanoseconds of a storage's own operators."""

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

    def of(self, storage: int) -> int:
        """What evicting it costs."""
        return self.own[storage]


@final
class Own(AbstractCost):
    """The operators of the storage alone: h_local."""


@final
class One(AbstractCost):
    """The same for each."""

    def of(self, storage: int) -> int:
        return 1


@final
class Neighbourhood(AbstractCost):
    """Its own operators, and those of its evicted neighbourhood e*: what is evicted and would have to be recomputed
    to recompute it (ancestors), or needs it to be recomputed (descendants), through nothing but what is evicted.

    Arguments:
        descendants: Whether those count; MSPS counts ancestors alone.
    """

    def __init__(self, storages: int, *, descendants: bool = True) -> None:
        super().__init__(storages)
        self._absent = bytearray(storages)
        self._parents: list[list[int]] = [[] for _ in range(storages)]
        self._children: list[list[int]] = [[] for _ in range(storages)]
        ways = [(self._parents, self._children), (self._children, self._parents)]
        self._ways = ways if descendants else ways[:1]
        self._around: dict[int, int] = {}
        """Of the neighbourhoods that are known, by the storage in their middle."""

    def appeared(self, storage: int) -> None:
        self._absent[storage] = 1

    def joined(self, parent: int, child: int) -> None:
        self._parents[child].append(parent)
        self._children[parent].append(child)

    def evicted(self, storage: int) -> None:
        self._absent[storage] = 1
        self._changed(storage)

    def came(self, storages: Iterable[int]) -> None:
        for storage in storages:
            self._absent[storage] = 0
        for storage in storages:
            self._around.pop(storage, None)
            self._changed(storage)

    def of(self, storage: int) -> int:
        if storage not in self._around:
            absent = (near for towards, _ in self._ways for near in self._reached(storage, towards)[0])
            self._around[storage] = sum(self.own[near] for near in absent)
        return self.own[storage] + self._around[storage]

    def _changed(self, storage: int) -> None:
        for _, back in self._ways:
            for near in self._reached(storage, back)[1]:
                self._around.pop(near, None)

    def _reached(self, storage: int, edges: list[list[int]]) -> tuple[list[int], list[int]]:
        """What is absent and reached from `storage` through nothing but what is absent, and what is present behind."""
        known, absent, present, stack = {storage}, list[int](), list[int](), [storage]
        while stack:
            for near in edges[stack.pop()]:
                if near not in known:
                    known.add(near)
                    if self._absent[near]:
                        absent.append(near)
                        stack.append(near)
                    else:
                        present.append(near)
        return absent, present


@final
class Classes(AbstractCost):
    """Its own operators, and those of the classes of evicted storages that it touches: h_eq.

    The classes are those of a union-find structure. An evicted storage joins the classes of its evicted neighbours;
    one that comes back takes its cost along and leaves what it joined as it is: classes never split.
    """

    def __init__(self, storages: int) -> None:
        super().__init__(storages)
        self._neighbours: list[list[int]] = [[] for _ in range(storages)]
        self._class: list[_Class | None] = [None] * storages

    def appeared(self, storage: int) -> None:
        self._class[storage] = _Class(storage, 0)

    def joined(self, parent: int, child: int) -> None:
        if child not in self._neighbours[parent]:
            self._neighbours[parent].append(child)
            self._neighbours[child].append(parent)

    def evicted(self, storage: int) -> None:
        group = self._class[storage] = _Class(storage, self.own[storage])
        for other in self._touched(storage):
            larger, smaller = (group, other) if len(group.members) > len(other.members) else (other, group)
            larger.cost += smaller.cost
            larger.members |= smaller.members
            for member in smaller.members:
                self._class[member] = larger
            group = larger

    def came(self, storages: Iterable[int]) -> None:
        for storage in storages:
            group = self._class[storage]
            if group is None:
                raise ValueError(f"storage {storage} is present already")
            self._class[storage] = None
            group.members.discard(storage)
            group.cost -= self.own[storage]

    def of(self, storage: int) -> int:
        return self.own[storage] + sum(group.cost for group in self._touched(storage))

    def _touched(self, storage: int) -> set[_Class]:
        groups = (self._class[near] for near in self._neighbours[storage])
        return {group for group in groups if group is not None}


@final
class _Class:
    """Evicted storages whose costs are added up."""

    def __init__(self, storage: int, cost: int) -> None:
        self.members = {storage}
        self.cost = cost
