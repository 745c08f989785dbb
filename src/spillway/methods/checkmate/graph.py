"""The step as Checkmate sees it: nodes that are computed, and data that they make and read.

A node is an interval of ops that run together. A datum is what one node makes and later ones read: storages with the
same maker and the same readers, which are kept or freed together. Storages that are there before or after the step, or
that several nodes write to, or that an op makes which cannot be replayed, are not Checkmate's to free; their bytes are
a given. When a node runs again, those of its ops do that lead to its data and can be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

from spillway.ir import Phase, Step
from spillway.ir.lives import Life, lives_of
from spillway.ir.step import StorageId
from spillway.units import Bytes, Seconds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """What is kept or freed as one."""

    maker: int
    readers: tuple[int, ...]
    """The nodes after it that read it."""
    storages: tuple[StorageId, ...]
    """What it consists of."""
    nbytes: Bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Ops that run together."""

    first: int
    end: int
    """One more than the last."""
    seconds: Seconds
    seconds_again: Seconds
    """What those of them take that make its data: they alone run again."""
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    running: Bytes
    """The most bytes beside all data while it runs in its turn: temporaries of its own, and what is a given."""
    again: Bytes
    """The most bytes beside all data that running it again needs."""
    given: Bytes
    """What is a given before its first op."""
    last_again: int
    """The last node before which it can run again; itself if it never can."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The whole step."""

    step: Step
    lives: Sequence[Life]
    nodes: tuple[Node, ...]
    data: tuple[Datum, ...]


def graph_of(step: Step) -> Graph:
    """The step with as many nodes as writes in place allow.

    Ops that write to one activation are in one node with all ops between them. Only nodes of the forward run again.
    """
    lives = lives_of(step)
    return _Builder(step, lives, _units(step, lives)).graph()


def _units(step: Step, lives: Sequence[Life]) -> list[int]:
    """Ends of the smallest intervals that may be nodes: no phase changes within, no activation is written across."""
    ops = len(step.ops)
    joined = [False] * (ops + 1)
    spans: dict[StorageId, tuple[int, int]] = {}
    for value in step.values:
        created = lives[value.id].created
        first, _ = spans.get(value.storage, (created, created))
        spans[value.storage] = (first, created)
    for storage, (first, last) in spans.items():
        info = step.storages[storage]
        fleeting = not (info.present_at_start or info.present_at_end)
        same = fleeting and all(step.ops[op].phase is step.ops[first].phase for op in range(first, last + 1))
        # What is written to from far apart, as a sum of gradients may be, is not worth a node as long as that.
        if same and last - first <= 2:
            for op in range(first, last):
                joined[op + 1] = True
    changes = {op.number for op, before in zip(step.ops[1:], step.ops, strict=False) if op.phase is not before.phase}
    return [end for end in range(1, ops + 1) if end == ops or end in changes or not joined[end]]


class _Builder:
    """Builds the graph for one partition of the ops."""

    def __init__(self, step: Step, lives: Sequence[Life], ends: Sequence[int]) -> None:
        self.step, self.lives = step, lives
        self.bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        self.node_of = [node for node, (first, end) in enumerate(self.bounds) for _ in range(first, end)]
        self.makers, self.readers = self._uses()
        self.given_during, self.given_before = self._given()
        self.data = self._data()
        self.datum_of = {storage: index for index, datum in enumerate(self.data) for storage in datum.storages}
        self.inner = self._inner()

    def _uses(self) -> tuple[dict[StorageId, int | None], dict[StorageId, set[int]]]:
        """For every storage that begins and ends within the step: its only maker, or None, and its later readers."""
        makers: dict[StorageId, int | None] = {}
        readers: dict[StorageId, set[int]] = {}
        for value in self.step.values:
            info, life = self.step.storages[value.storage], self.lives[value.id]
            if info.present_at_start or info.present_at_end:
                continue
            node = self.node_of[life.created]
            again = self.step.ops[life.created].replayable and makers.setdefault(value.storage, node) == node
            makers[value.storage] = node if again else None
            readers.setdefault(value.storage, set()).update(self.node_of[op] for op in life.reads)
        for storage, maker in makers.items():
            # What somebody holds although no op reads it any more is not freed either.
            if maker is not None and self.step.storages[storage].alive_until > self.bounds[maker][1]:
                makers[storage] = maker if max(readers[storage], default=maker) > maker else None
        return makers, readers

    def _given(self) -> tuple[list[Bytes], list[Bytes]]:
        """Bytes that are a given, during every op and before it."""
        ops = len(self.step.ops)
        during, before = [0] * (ops + 2), [0] * (ops + 2)
        for info in self.step.storages:
            if self._is_given(info.id):
                during[info.alive_from] += info.nbytes
                during[info.alive_until] -= info.nbytes
                before[0 if info.present_at_start else info.alive_from + 1] += info.nbytes
                before[ops + 1 if info.present_at_end else info.alive_until] -= info.nbytes
        return list(accumulate(during)), list(accumulate(before))

    def _data(self) -> tuple[Datum, ...]:
        bundles: dict[tuple[int, tuple[int, ...]], list[StorageId]] = {}
        for storage, maker in self.makers.items():
            later = tuple(sorted(node for node in self.readers[storage] if maker is not None and node > maker))
            if maker is not None and later:
                bundles.setdefault((maker, later), []).append(storage)
        return tuple(
            Datum(
                maker=maker, readers=later, storages=tuple(storages),
                nbytes=sum(self.step.storages[storage].nbytes for storage in storages),
            )
            for (maker, later), storages in sorted(bundles.items())
        )  # fmt: skip

    def _inner(self) -> list[list[StorageId]]:
        """Storages that one node makes and no other reads."""
        inner: list[list[StorageId]] = [[] for _ in self.bounds]
        for storage, maker in self.makers.items():
            if maker is not None and storage not in self.datum_of:
                inner[maker].append(storage)
        return inner

    def graph(self) -> Graph:
        made: list[list[int]] = [[] for _ in self.bounds]
        for index, datum in enumerate(self.data):
            made[datum.maker].append(index)
        nodes = [self._node(number, made[number]) for number in range(len(self.bounds))]
        return Graph(step=self.step, lives=self.lives, nodes=tuple(nodes), data=self.data)

    def _node(self, number: int, makes: list[int]) -> Node:
        first, end = self.bounds[number]
        step = self.step
        reads = sorted({
            datum for op in range(first, end) for read in step.ops[op].reads
            if (datum := self.datum_of.get(step.values[read].storage, -1)) >= 0 and self.data[datum].maker < number
        })  # fmt: skip
        needed = self._needed(number, makes)
        running, again = self._most_bytes(number, makes, needed)
        return Node(
            first=first, end=end, reads=tuple(reads), makes=tuple(makes),
            seconds=sum(step.ops[op].seconds or 0.0 for op in range(first, end)),
            seconds_again=sum(step.ops[op].seconds or 0.0 for op in needed), running=running, again=again,
            given=self.given_before[first], last_again=self._last_again(number, needed),
        )  # fmt: skip

    def _is_given(self, storage: StorageId) -> bool:
        return self.makers.get(storage) is None

    def _needed(self, number: int, makes: list[int]) -> set[int]:
        """Ops of the node that lead to its data, as far as they can be replayed."""
        first, end = self.bounds[number]
        own = {storage for datum in makes for storage in self.data[datum].storages}
        needed: set[int] = set()
        wanted = [
            v for op in range(first, end) for v in self.step.ops[op].creates if self.step.values[v].storage in own
        ]
        while wanted:
            created = self.lives[wanted.pop()].created
            if first <= created < end and created not in needed and self.step.ops[created].replayable:
                needed.add(created)
                wanted += self.step.ops[created].reads
        return needed

    def _most_bytes(self, number: int, makes: list[int], needed: set[int]) -> tuple[Bytes, Bytes]:
        first, end = self.bounds[number]
        own = [storage for datum in makes for storage in self.data[datum].storages]
        data = sum(self.step.storages[storage].nbytes for storage in own)
        fleeting = [self.step.storages[storage] for storage in (*own, *self.inner[number])]
        running = again = 0
        for op in range(first, end):
            inside = sum(info.nbytes for info in fleeting if info.alive_from <= op < info.alive_until) - data
            created = {self.step.values[value].storage for value in self.step.ops[op].creates}
            copies = sum(self.step.storages[storage].nbytes for storage in created if self._is_given(storage))
            running = max(running, inside + self.given_during[op])
            again = max(again, inside + copies if op in needed else 0)
        return running, again

    def _last_again(self, number: int, needed: set[int]) -> int:
        """Nodes up to which everything that it reads and that is no datum has the content that it had."""
        if any(self.step.ops[op].phase is not Phase.FORWARD for op in needed):
            return number
        outside = {
            read
            for op in needed
            for read in self.step.ops[op].reads
            if self._is_given(self.step.values[read].storage) and self.lives[read].created not in needed
        }
        last = number
        for first, _ in self.bounds[last + 1 :]:
            if not all(self.lives[value].readable(first) for value in outside):
                break
            last += 1
        return last
