"""What autograd saves in each block of a recorded step, and which ops of the backward read it there."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Final, final

from spillway.errors import UsageError
from spillway.ir.block_calls import block_calls
from spillway.ir.lives import Life, forwards_of, lives_of
from spillway.ir.step import Op, Phase, Saving, Step, StorageId, ValueId
from spillway.ir.timeline import Kind

_DRAWS: Final = ("bernoulli", "native_dropout", "_fused_dropout")
"""Ops that make masks, by the part of their name before the overload."""


@final
@dataclass(frozen=True, slots=True)
class Call:
    """One call of a block."""

    number: int
    """In the order of the forward."""
    name: str
    """Of its module; empty for the whole forward."""
    ops: tuple[int, ...]

    @property
    def end(self) -> int:
        """The op before which it has ended."""
        return self.ops[-1] + 1

    def covers(self, op: int) -> bool:
        """Whether the op runs between its first and its last."""
        return self.ops[0] <= op < self.end

    def is_around(self, module: str) -> bool:
        """Whether the module is this block, or inside it."""
        return not self.name or module == self.name or module.startswith(f"{self.name}.")


@final
class SavedInBlocks:
    """A step, with what its blocks save. `whole` takes the whole forward as one block where none is found. Raises
    UsageError if nobody wrote down how autograd saved."""

    def __init__(self, step: Step, *, whole: bool) -> None:
        if step.saved and not step.savings:
            raise UsageError(
                "Nobody wrote down how autograd saved what this step saved, as spillway.record does: record it again."
            )
        self.step = step
        self.lives: list[Life] = lives_of(step)
        found = [(call.name, call.ops) for call in block_calls(step, self.lives)]
        stretches = [("", ops) for ops in forwards_of(step)] if whole and not found else []
        self.calls = [Call(number, name, ops) for number, (name, ops) in enumerate(found or stretches)]
        self._savings: dict[StorageId, list[tuple[Saving, Call | None]]] = {}
        for saving in step.savings:
            storage = step.values[saving.value].storage
            self._savings.setdefault(storage, []).append((saving, self._owner(saving)))
        self._values: dict[StorageId, list[ValueId]] = defaultdict(list)
        for value in step.values:
            self._values[value.storage].append(value.id)
        self._backward_ends = max((op.number + 1 for op in step.ops if op.phase is Phase.BACKWARD), default=0)

    @cached_property
    def storages(self) -> tuple[StorageId, ...]:
        """Those saved in blocks with which something may be done, in the order of saving."""
        return tuple(storage for storage in self._savings if self.is_ours(storage) and self.owners(storage))

    def is_ours(self, storage: StorageId) -> bool:
        """Whether it is an activation that nobody holds beyond the backward."""
        info = self.step.storages[storage]
        around = info.present_at_start or info.present_at_end
        return info.kind in (Kind.ACTIVATION, Kind.TEMPORARY) and not around and info.alive_until <= self._backward_ends

    def owners(self, storage: StorageId) -> list[Call]:
        """The calls that saved it, in their order."""
        found = {call.number: call for _, call in self._of(storage) if call is not None}
        return [found[number] for number in sorted(found)]

    def is_saved_outside(self, storage: StorageId) -> bool:
        """Whether a node outside of blocks has it too, in full."""
        return any(call is None for _, call in self._of(storage))

    def dtype(self, storage: StorageId) -> str | None:
        """Of the tensors that were saved, or of its first one; None if they are of several, or nobody knows."""
        dtypes = {saving.dtype for saving, _ in self._of(storage)} or {self.step.storages[storage].dtype}
        return (dtypes.pop() or None) if len(dtypes) == 1 else None

    def is_differentiable(self, storage: StorageId) -> bool:
        """Whether a gradient flows to any of the tensors that were saved, or it is computed from parameters."""
        if savings := self._of(storage):
            return any(saving.differentiable for saving, _ in savings)
        return not self._of_parameters.isdisjoint(self._values[storage])

    @cached_property
    def _of_parameters(self) -> frozenset[ValueId]:
        """Values of the forward that come of parameters."""
        kinds = (self.step.storages[value.storage].kind for value in self.step.values)
        found = {number for number, kind in enumerate(kinds) if kind is Kind.PARAMETER}
        for op in self.step.ops:
            if op.phase is Phase.FORWARD and not found.isdisjoint(op.reads):
                found.update(op.creates)
        return frozenset(found)

    def saved_by(self, call: Call) -> list[ValueId]:
        """Values that it saved, each once, in order; of storages that are ours."""
        found = {
            saving.value: None for storage in self.storages for saving, owner in self._savings[storage] if owner is call
        }
        return list(found)

    def saved_in_full(self) -> list[ValueId]:
        """Values that stay among those saved: of parameters and the like, and what is saved outside of blocks."""
        blocks = {storage for storage in self.storages if not self.is_saved_outside(storage)}
        return [value for value in self.step.saved if self.step.values[value].storage not in blocks]

    def settled(self, storage: StorageId, moment: int) -> ValueId | None:
        """Its value before an op, if nothing is written to it from then on."""
        last = self._values[storage][-1]
        return last if self.lives[last].created < moment else None

    def is_drawn(self, storage: StorageId) -> bool:
        """Whether chance decided between two values for its elements, and only numbers were applied since."""
        makers = [self.step.ops[self.lives[value].created] for value in self._values[storage]]
        draws = [place for place, op in enumerate(makers) if _base(op) in _DRAWS]
        if not draws:
            return False
        results = [self.step.values[value].storage for value in makers[-1].creates]
        if _base(makers[draws[-1]]) not in _DRAWS[:1] and results.index(storage) != 1:
            return False
        return all(op.name.endswith(".Scalar") for op in makers[draws[-1] + 1 :])

    def values_of(self, storage: StorageId) -> list[ValueId]:
        """All versions of a storage."""
        return self._values[storage]

    def reads(self, value: ValueId, call: Call) -> list[int]:
        """Ops after the forward that read it for a call."""
        return [op for op in self.late_reads(value) if self._reader(value, self.step.ops[op]) is call]

    def late_reads(self, value: ValueId) -> list[int]:
        """Ops after the forward that read it."""
        return [op for op in self.lives[value].reads if not self._is_forward(op)]

    def named_in_forward(self, storage: StorageId) -> list[int]:
        """Ops of the forward that make, write or read it."""
        uses = (op for value in self._values[storage] for op in self.lives[value].uses)
        return [op for op in uses if op >= 0 and self._is_forward(op)]

    def dies_after(self, storage: StorageId) -> int:
        return self.step.storages[storage].alive_until - 1

    def _reader(self, value: ValueId, op: Op) -> Call | None:
        storage = self.step.values[value].storage
        calls = self.owners(storage)
        around = [call for call in calls if call.is_around(op.module)]
        if around:
            return around[-1]
        return calls[0] if len(calls) == 1 and not self.is_saved_outside(storage) else None

    def _of(self, storage: StorageId) -> list[tuple[Saving, Call | None]]:
        return self._savings.get(storage, [])

    def _owner(self, saving: Saving) -> Call | None:
        around = [
            call for call in self.calls if call.is_around(saving.module) and call.ops[0] <= saving.after <= call.end
        ]
        return around[-1] if around else None

    def _is_forward(self, op: int) -> bool:
        return self.step.ops[op].phase is Phase.FORWARD


def _base(op: Op) -> str:
    return op.name.removeprefix("aten.").partition(".")[0].removesuffix("_")
