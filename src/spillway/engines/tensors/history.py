"""The timeline of one real step, from the controller's events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, final

import torch

from spillway.engines.records import HERE, Storage
from spillway.ir.timeline import Change, Event, Kind, StorageLine, Timeline

if TYPE_CHECKING:
    from spillway.engines.tensors.engine import TensorEngine


@final
class StepHistory:
    """Begins to record when made, at the start of a step. `named` gives the tensors that are known by name."""

    def __init__(self, engine: TensorEngine, named: Callable[[], Iterable[tuple[Kind, torch.Tensor]]]) -> None:
        self._engine = engine
        self._named = named
        self._first_op = engine.controller.clock
        self._start = [s for s in engine.table.values() if s.value is not None and s.value.absent == HERE]
        self._away = [s for s in engine.table.values() if s.value is not None and s.value.absent]
        self._in_backward = False
        engine.controller.events = []

    def note_kind(self, storage: Storage) -> None:
        """Guess what a storage is for from when it is created; `timeline` corrects it where names are known."""
        backward = torch._C._current_graph_task_id() != -1
        if self._in_backward and not backward:
            self._engine.label(self._named())  # gradients have their name now, and may lose it before the step ends
        self._in_backward = backward
        forward = torch.is_grad_enabled() and not backward
        storage.kind = Kind.ACTIVATION if forward else Kind.TEMPORARY

    def timeline(self, step: int) -> Timeline:
        """Stop recording; the step's timeline."""
        engine, controller = self._engine, self._engine.controller
        engine.label(self._named())
        events, controller.events = controller.events or [], None
        ops = controller.clock - self._first_op
        present = {storage.number for storage in self._start}
        lines: dict[int, Storage] = {storage.number: storage for storage in (*self._start, *self._away)}
        kept: list[Event] = []
        for clock, storage, change in events:
            if change is Change.DIE and storage.number not in lines:
                continue
            lines[storage.number] = storage
            kept.append(Event(op=min(max(clock - self._first_op - 1, 0), ops), storage=storage.number, change=change))
        return Timeline(
            step=step, allowed=controller.allowed, ops=ops, events=tuple(kept),
            storages=tuple(
                StorageLine(
                    storage=number, kind=Kind(storage.kind or Kind.TEMPORARY), nbytes=storage.nbytes,
                    present_at_start=number in present,
                )
                for number, storage in lines.items()
            ),
        )  # fmt: skip
