"""The timeline of one real step, from the controller's events and what was seen of the clock."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, final

import torch

from spillway.engines.lanes import stalled_intervals
from spillway.engines.records import HERE, Storage
from spillway.ir.lanes import Lane, Span, Work, overlap
from spillway.ir.timeline import Change, Event, Kind, StorageLine, Timeline
from spillway.units import Bytes, Seconds

if TYPE_CHECKING:
    from spillway.engines.tensors.engine import TensorEngine
    from spillway.engines.tensors.handlers import Handler
    from spillway.engines.tensors.mode import Known

_now = time.perf_counter


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
        self._clock = engine.controller
        self._ops: list[tuple[Seconds, Seconds, int, str]] = []  # from, until, the clock after the op, its name
        engine.controller.events = []

    def note_kind(self, storage: Storage) -> None:
        """Guess what a storage is for from when it is created; `timeline` corrects it where names are known."""
        backward = torch._C._current_graph_task_id() != -1
        if self._in_backward and not backward:
            self._engine.label(self._named())  # gradients have their name now, and may lose it before the step ends
        self._in_backward = backward
        forward = torch.is_grad_enabled() and not backward
        storage.kind = Kind.ACTIVATION if forward else Kind.TEMPORARY

    def timed(self, known: Known) -> Handler:
        """The op's handler, between two looks at the clock. Views are over before that would tell anything."""
        handler, info = known.handler, self._engine.infos[id(known.func)]
        if info.view:
            return handler
        name, note, controller = info.name, self._ops.append, self._clock

        def handle(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            began = _now()
            try:
                return handler(mode, func, types, args, kwargs)
            finally:
                note((began, _now(), controller.clock, name))

        return handle

    def stop(self, step: int | None) -> Timeline | None:
        """Stop recording; the timeline if the step has a number."""
        events, self._clock.events = self._clock.events or [], None
        return None if step is None else self._timeline(step, events)

    def _timeline(self, step: int, events: list[tuple[int, Storage, Change]]) -> Timeline:
        engine, controller = self._engine, self._clock
        engine.label(self._named())
        ops = controller.clock - self._first_op
        present = {storage.number for storage in self._start}
        lines: dict[int, Storage] = {storage.number: storage for storage in (*self._start, *self._away)}
        kept: list[Event] = []
        for clock, storage, change in events:
            if change is Change.DIE and storage.number not in lines:
                continue
            lines[storage.number] = storage
            kept.append(Event(op=self._number(clock, ops), storage=storage.number, change=change))
        return Timeline(
            step=step, allowed=controller.allowed, ops=ops, events=tuple(kept), spans=self._spans(ops),
            storages=tuple(
                StorageLine(
                    storage=number, kind=Kind(storage.kind or Kind.TEMPORARY), nbytes=storage.nbytes,
                    present_at_start=number in present,
                )
                for number, storage in lines.items()
            ),
        )  # fmt: skip

    def _number(self, clock: int, ops: int) -> int:
        return min(max(clock - self._first_op - 1, 0), ops)

    def _spans(self, ops: int) -> tuple[Span, ...]:
        """What the lanes did. A copy belongs to the op during or after which it began."""
        counters, log = self._clock.counters, self._engine.log
        began = sorted((began, self._number(clock, ops)) for began, _, clock, _ in self._ops)
        stalled = stalled_intervals(counters.stalls)

        def span(
            lane: Lane, work: Work, start: Seconds, end: Seconds, *, name: str = "", storage: int | None = None,
            nbytes: Bytes = 0, waited: Seconds = 0.0, op: int | None = None,
        ) -> Span:  # fmt: skip
            begin, ended = (round(max(at - self._engine.began, 0.0), 9) for at in (start, end))
            if op is None:
                place = bisect_right(began, (start, ops))
                op = began[place - 1][1] if place else 0
            return Span(
                lane=lane, work=work, began=begin, ended=ended, op=op, name=name, storage=storage, nbytes=nbytes,
                stalled=min(round(waited, 9), ended - begin),
            )  # fmt: skip

        spans = [
            span(Lane.COMPUTE, Work.OP, start, end, name=name, op=self._number(clock, ops))
            for start, end, clock, name in self._ops
        ]
        spans += (
            span(Lane.COMPUTE, Work.RECOMPUTE, one.began, one.ended, name=one.name, nbytes=one.nbytes)
            for one in counters.replays
        )
        spans += (
            span(Lane.COMPUTE, Work.STALL, one.began, one.ended, storage=one.storage, nbytes=one.nbytes)
            for one in counters.stalls
        )
        for one in log.transfers:
            storage = one.place.storage if one.place.storage >= 0 else None
            for lane, end in ((one.lane, one.ended), (Lane.DISK, one.on_disk)):
                waited = overlap((one.began, end), stalled)
                if end > one.began:
                    spans.append(
                        span(lane, Work.COPY, one.began, end, storage=storage, nbytes=one.place.nbytes, waited=waited)
                    )
        return tuple(sorted(spans, key=lambda made: made.began))
