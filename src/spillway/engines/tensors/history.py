"""The timeline of one real step, from the controller's events and what was seen of the clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch

from spillway.engines.tensors.abstract import AbstractTensorEngine, Known
from spillway.internals.dispatch_key import Handler
from spillway.ir.timeline import Kind, Timeline
from spillway.memory.chronicle import Chronicle, Ran
from spillway.memory.records import Storage


@final
class StepHistory:
    """Begins to record when made, at the start of a step. `named` gives the tensors that are known by name."""

    def __init__(self, engine: AbstractTensorEngine, named: Callable[[], Iterable[tuple[Kind, torch.Tensor]]]) -> None:
        self._engine = engine
        self._named = named
        self._in_backward = False
        self._chronicle = Chronicle(engine.controller, engine.table.values())

    def note_kind(self, storage: Storage) -> None:
        """Guess what a storage is for from when it is created; `timeline` corrects it where names are known."""
        backward = torch._C._current_graph_task_id() != -1
        if self._in_backward and not backward:
            self._engine.label(self._named())  # gradients have their name now, and may lose it before the step ends
        self._in_backward = backward
        forward = torch.is_grad_enabled() and not backward
        storage.kind = Kind.ACTIVATION if forward else Kind.TEMPORARY

    def timed(self, known: Known) -> Handler:
        """The op's handler, between two looks at the clock of whoever computes. Views are over before that would tell
        anything.
        """
        handler, info = known.handler, self._engine.infos[id(known.func)]
        if info.view:
            return handler
        name, note, controller = info.name, self._chronicle.ran.append, self._engine.controller
        moment = self._engine.backend.moment

        def handle(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            began = moment()
            try:
                return handler(mode, func, types, args, kwargs)
            finally:
                note(Ran(began, moment(), controller.clock, name))

        return handle

    def stop(self, step: int | None) -> Timeline | None:
        """Stop recording; the timeline if the step has a number."""
        events = self._chronicle.stop()
        if step is None:
            return None
        self._engine.label(self._named())
        when, ran = self._engine.backend.when, self._chronicle.ran
        ran[:] = [op._replace(began=when(op.began), ended=when(op.ended)) for op in ran]
        reserved = self._engine.controller.budget.reserved
        return self._chronicle.timeline(step, events, self._engine.log, self._engine.began, reserved=reserved)
