"""A step with ops added to it: a draft that keeps positions in the old numbering until everything has its number.

A position is `(op, order)`: what is added stands before op `op` of the step, in the order of adding; the op itself
comes after all of it. So positions compare as they run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias, final

from spillway.ir.step import Op, Phase, Step, StorageId, StorageInfo, Value, ValueId
from spillway.ir.timeline import Kind
from spillway.units import Bytes

Position: TypeAlias = tuple[int, float]
"""Where an op stands in a draft."""


def position_of(op: int) -> Position:
    """Of an op of the step itself."""
    return op, inf


@final
@dataclass(slots=True)
class _New:
    nbytes: Bytes
    kind: Kind
    dtype: str = ""
    ends: Position | None = None
    versions: int = 0
    born: Position | None = None


@final
class Draft:
    """Ops, storages and values that come on top of a step's, and storages of it that die at another moment."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._added: dict[int, list[Op]] = defaultdict(list)
        self._storages: list[_New] = []
        self._values: list[Value] = []
        self._instead: dict[tuple[int, ValueId], ValueId] = {}
        self._ends: dict[StorageId, Position] = {}
        self._named: dict[StorageId, Position] = {}

    def storage(self, nbytes: Bytes, kind: Kind, dtype: str = "") -> StorageId:
        """A new storage. It is alive from the op that creates its first value to the last that names one of them."""
        self._storages.append(_New(nbytes, kind, dtype))
        return len(self._step.storages) + len(self._storages) - 1

    def value(self, storage: StorageId) -> ValueId:
        """The next version of a new storage."""
        new = self._new(storage)
        number = len(self._step.values) + len(self._values)
        self._values.append(Value(id=number, storage=storage, version=new.versions))
        new.versions += 1
        return number

    def add(
        self, before: int, name: str, phase: Phase, reads: Sequence[ValueId], creates: Sequence[ValueId], *,
        module: str = "", flops: int = 0, traffic: Bytes = 0, shape: tuple[int, ...] = (),
        seconds: float | None = None, seeded: bool = False,
        replayable: bool = True,
    ) -> Position:  # fmt: skip
        """Add an op before one of the step; where it stands."""
        position = (before, len(self._added[before]))
        self._added[before].append(
            Op(number=0, name=name, phase=phase, reads=tuple(dict.fromkeys(reads)), creates=tuple(creates),
               seconds=seconds, seeded=seeded, replayable=replayable, module=module, flops=flops, traffic=traffic,
               shape=shape)
        )  # fmt: skip
        for number in (*reads, *creates):
            self._name(number, position)
        return position

    def read_instead(self, op: int, value: ValueId, other: ValueId) -> None:
        """An op of the step reads a new value where it read one of the step's."""
        self._instead[op, value] = other
        self._name(other, position_of(op))

    def reads(self, op: int, value: ValueId) -> bool:
        """Whether an op of the step that reads one of its values still does."""
        return (op, value) not in self._instead

    def end(self, storage: StorageId, position: Position) -> None:
        """A storage of the step dies with the op at that position, or with the last added op that names it."""
        self._ends[storage] = position

    def outlive(self, storage: StorageId, position: Position) -> None:
        """A new storage is alive until the op at that position has run, if not longer."""
        new = self._new(storage)
        new.ends = max(position, new.ends or position)

    def build(self, saved: Sequence[ValueId]) -> Step:
        """The step with all of that, of which autograd keeps `saved`. How it came to keep them is not told any more.

        Raises ValueError if that is no step.
        """
        numbers: dict[Position, int] = {}
        ops: list[Op] = []
        for before in range(len(self._step.ops) + 1):
            for order, op in enumerate(self._added.get(before, ())):
                numbers[before, order] = len(ops)
                ops.append(replace(op, number=len(ops)))
            if before < len(self._step.ops):
                numbers[position_of(before)] = len(ops)
                op = self._step.ops[before]
                reads = tuple(dict.fromkeys(self._instead.get((op.number, value), value) for value in op.reads))
                ops.append(replace(op, number=len(ops), reads=reads))
        storages = [self._moved(storage, numbers, len(ops)) for storage in self._step.storages]
        storages += [self._made(new, number, numbers) for number, new in enumerate(self._storages, len(storages))]
        return Step(
            storages=tuple(storages), values=(*self._step.values, *self._values), ops=tuple(ops), saved=tuple(saved)
        )

    def _new(self, storage: StorageId) -> _New:
        return self._storages[storage - len(self._step.storages)]

    def _name(self, value: ValueId, position: Position) -> None:
        if value < len(self._step.values):
            storage = self._step.values[value].storage
            self._named[storage] = max(position, self._named.get(storage, position))
            return
        new = self._new(self._values[value - len(self._step.values)].storage)
        new.born = min(position, new.born or position)
        new.ends = max(position, new.ends or position)

    def _moved(self, storage: StorageInfo, numbers: dict[Position, int], ops: int) -> StorageInfo:
        first = 0 if storage.present_at_start else numbers.get(position_of(storage.alive_from), ops)
        if storage.present_at_end:
            last = ops
        elif storage.alive_until:
            end = self._ends.get(storage.id, position_of(storage.alive_until - 1))
            last = numbers[max(end, self._named.get(storage.id, end))] + 1
        else:
            last = 0
        return replace(storage, alive_from=first, alive_until=last)

    def _made(self, new: _New, number: StorageId, numbers: dict[Position, int]) -> StorageInfo:
        if new.born is None or new.ends is None:
            raise ValueError(f"storage {number} of a draft is created by no op")
        return StorageInfo(
            id=number, nbytes=new.nbytes, kind=new.kind, dtype=new.dtype, alive_from=numbers[new.born],
            alive_until=numbers[new.ends] + 1,
        )  # fmt: skip
