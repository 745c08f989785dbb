"""The timeline of one real step, from the controller's events and what was seen of the clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch

from spillway.engines.tensors.abstract import AbstractTensorEngine, Known
from spillway.engines.tensors.origins import Origins
from spillway.internals.dispatch_key import Handler
from spillway.ir.timeline import Kind, Timeline
from spillway.memory.chronicle import Chronicle, Ran
from spillway.memory.records import Storage


class ByName(NamedTuple):
    """What a timeline is told of tensors and modules that have names."""

    kinds: Callable[[], Iterable[tuple[Kind, torch.Tensor]]]
    """What each tensor is for."""
    names: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    """What the model calls it."""
    modules: Callable[[], dict[int, str]]
    """Qualified names of modules, by their `id`."""


@final
class StepHistory:
    """Begins to record when made, at the start of a step."""

    def __init__(self, engine: AbstractTensorEngine, by_name: ByName) -> None:
        self._engine = engine
        self._by_name = by_name
        self._in_backward = False
        self._origins = Origins()
        self._names: dict[int, str] = {}
        self._chronicle = Chronicle(engine.controller, engine.table.values())

    def note_kind(self, storage: Storage) -> None:
        """Guess what a storage is for from when it is created; `timeline` corrects it where names are known."""
        backward = torch._C._current_graph_task_id() != -1
        if self._in_backward and not backward:
            self._label()  # gradients have their name now, and may lose it before the step ends
        self._in_backward = backward
        forward = torch.is_grad_enabled() and not backward
        storage.kind = Kind.ACTIVATION if forward else Kind.TEMPORARY
        self._origins.created(storage.number)

    def note_found(self, storage: Storage) -> None:
        """It was there before the step, and nobody knew of it."""
        self._origins.found(storage.number)

    def timed(self, known: Known) -> Handler:
        """The op's handler, between two looks at the clock of whoever computes. Views are over before that would tell
        anything; who asked for them is noted all the same, for the backward.
        """
        handler, info = known.handler, self._engine.infos[id(known.func)]
        tell = self._origins.op
        if info.view:

            def handle_view(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                tell(info.name)
                return handler(mode, func, types, args, kwargs)

            return handle_view
        name, note, controller = info.name, self._chronicle.ran.append, self._engine.controller
        moment = self._engine.backend.moment

        def handle(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tell(name)
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
        self._label()
        when, ran = self._engine.backend.when, self._chronicle.ran
        ran[:] = [op._replace(began=when(op.began), ended=when(op.ended)) for op in ran]
        reserved = self._engine.controller.budget.reserved
        timeline = self._chronicle.timeline(step, events, self._engine.log, self._engine.began, reserved=reserved)
        numbers = [line.storage for line in timeline.storages]
        return replace(timeline, origins=tuple(self._origins.told(self._names, self._by_name.modules(), numbers)))

    def _label(self) -> None:
        """Kinds and names of what has names now."""
        self._engine.label(self._by_name.kinds())
        for name, tensor in self._by_name.names():
            if (storage := self._engine.find(tensor)) is not None:
                self._names[storage.number] = name
