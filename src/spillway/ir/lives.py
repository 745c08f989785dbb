"""When values exist and are used, for planners: what may be gone, from when to when.

`verify.py` judges plans by definitions of its own; nothing of this file is shared with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from spillway.ir.step import Phase, Step, StorageId, ValueId
from spillway.ir.timeline import Kind


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """When a value exists, and what reads it."""

    created: int
    """The op that creates it; -1 for a source."""
    overwritten: int | None
    """The op that writes the next version over it."""
    dies: int
    """First op at which its storage is dead; one more than the number of ops if it outlives the step."""
    reads: tuple[int, ...]
    """The ops that read it, in order."""

    @property
    def ends(self) -> int:
        """The op at which its content ends."""
        return self.dies if self.overwritten is None else min(self.overwritten, self.dies)

    @property
    def uses(self) -> tuple[int, ...]:
        """The op that creates it, -1 for a source, and those that read it."""
        return (self.created, *self.reads)

    def readable(self, moment: int) -> bool:
        """Whether its content exists before the op `moment`: it is alive, and nothing has been written over it."""
        stale = self.overwritten is not None and self.overwritten < moment
        return self.created < moment < self.dies and not stale


def lives_of(step: Step) -> list[Life]:
    """The life of every value, by its id."""
    created = [-1] * len(step.values)
    reads: list[list[int]] = [[] for _ in step.values]
    for op in step.ops:
        for number in op.creates:
            created[number] = op.number
        for number in op.reads:
            reads[number].append(op.number)
    following = {(value.storage, value.version - 1): created[value.id] for value in step.values if value.version}
    return [
        Life(
            created=created[value.id],
            overwritten=following.get((value.storage, value.version)),
            dies=len(step.ops) + 1 if storage.present_at_end else storage.alive_until,
            reads=tuple(reads[value.id]),
        )
        for value in step.values
        for storage in (step.storages[value.storage],)
    ]


def versions_of(step: Step) -> dict[StorageId, list[tuple[int, ValueId]]]:
    """Of every storage the ops that create its values, -1 for a source, and the values, in order."""
    created = {value: op.number for op in step.ops for value in op.creates}
    found: dict[StorageId, list[tuple[int, ValueId]]] = {}
    for value in sorted(step.values, key=lambda one: (one.storage, one.version)):
        found.setdefault(value.storage, []).append((created.get(value.id, -1), value.id))
    return found


def forwards_of(step: Step) -> list[tuple[int, ...]]:
    """The forward ops of every micro-batch: stretches that are followed by a backward op before the next one."""
    found, ops = list[tuple[int, ...]](), list[int]()
    for op in step.ops:
        if op.phase is Phase.FORWARD:
            ops.append(op.number)
        elif op.phase is Phase.BACKWARD and ops:
            found.append(tuple(ops))
            ops = []
    return found


def idle_intervals(life: Life, ops: int) -> Iterator[tuple[int, int]]:
    """The longest half-open intervals of ops that neither create nor read the value, while it exists."""
    for before, after in pairwise((*life.uses, min(life.ends, ops))):
        if before + 1 < after:
            yield before + 1, after


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A value that the forward leaves to the backward."""

    value: ValueId
    last: int
    """Its last use in the forward; its creation if nothing reads it there."""
    needed: int
    """Its first use in the backward."""


def kept_for_backward(step: Step, lives: Sequence[Life], values: Iterable[ValueId] | None = None) -> list[Kept]:
    """Activations that a forward op creates, and that a backward op reads after at least one op without them.

    Parameters, gradients, optimizer state and whatever is there before or after the step are not among them. With
    `values`, only those of them.
    """
    chosen = range(len(step.values)) if values is None else values
    found = (_kept(value, step, lives[value]) for value in chosen)
    return [kept for kept in found if kept is not None]


def _kept(value: ValueId, step: Step, life: Life) -> Kept | None:
    storage = step.storages[step.values[value].storage]
    if storage.kind not in (Kind.ACTIVATION, Kind.TEMPORARY) or storage.present_at_start or storage.present_at_end:
        return None
    if step.ops[life.created].phase is not Phase.FORWARD:
        return None
    needed = next((op for op in life.reads if step.ops[op].phase is not Phase.FORWARD), None)
    if needed is None:
        return None
    last = max(op for op in life.uses if op < needed)
    return Kept(value=value, last=last, needed=needed) if last + 1 < needed else None
