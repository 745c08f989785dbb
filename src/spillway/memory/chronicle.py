"""The timeline of one step, from the controller's events and what was seen of the clock; for every machine."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, final

from spillway.ir.spans import Lane, Span, Work, overlap
from spillway.ir.timeline import Change, Event, Kind, StorageLine, Timeline
from spillway.memory.lanes import TransferLog, stalled_intervals
from spillway.memory.records import HERE, Storage
from spillway.units import Bytes, Seconds

if TYPE_CHECKING:
    from spillway.memory.controller import Controller


class Ran(NamedTuple):
    """An op, by the clock."""

    began: Seconds
    ended: Seconds
    clock: int
    """The controller's clock after it."""
    name: str


@final
class Chronicle:
    """Begins to record when made, at the start of a step, with the storages that there are."""

    __slots__ = ("_away", "_controller", "_first_op", "_start", "ran")

    def __init__(self, controller: Controller, storages: Iterable[Storage]) -> None:
        living = [storage for storage in storages if storage.value is not None]
        self._controller = controller
        self._first_op = controller.clock
        self._start = [s for s in living if s.value is not None and s.value.absent == HERE]
        self._away = [s for s in living if s.value is not None and s.value.absent]
        self.ran: list[Ran] = []
        """The ops of which anybody noted when they ran."""
        controller.events = []

    def stop(self) -> list[tuple[int, Storage, Change]]:
        """Record no further; what came and went."""
        events, self._controller.events = self._controller.events or [], None
        return events

    def timeline(
        self, step: int, events: list[tuple[int, Storage, Change]], log: TransferLog, began: Seconds,
        ops: int | None = None, reserved: Bytes = 0,
    ) -> Timeline:  # fmt: skip
        """The timeline; the step `began` at that time. `ops` is how many it has, if not all of them ran. Of the budget
        so much was reserved.
        """
        controller = self._controller
        ops = controller.clock - self._first_op if ops is None else ops
        present = {storage.number for storage in self._start}
        lines: dict[int, Storage] = {storage.number: storage for storage in (*self._start, *self._away)}
        kept: list[Event] = []
        for clock, storage, change in events:
            if change is Change.DIE and storage.number not in lines:
                continue
            lines[storage.number] = storage
            kept.append(Event(op=self._number(clock, ops), storage=storage.number, change=change))
        return Timeline(
            step=step, allowed=controller.budget.allowed + reserved, ops=ops, events=tuple(kept),
            spans=self._spans(ops, log, began),
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

    def _spans(self, ops: int, log: TransferLog, step_began: Seconds) -> tuple[Span, ...]:
        """What the lanes did. A copy belongs to the op during or after which it began."""
        counters = self._controller.counters
        began = sorted((ran.began, self._number(ran.clock, ops)) for ran in self.ran)
        stalled = stalled_intervals(counters.stalls)

        def span(
            lane: Lane, work: Work, start: Seconds, end: Seconds, *, name: str = "", storage: int | None = None,
            nbytes: Bytes = 0, waited: Seconds = 0.0, op: int | None = None,
        ) -> Span:  # fmt: skip
            begin, ended = (round(max(at - step_began, 0.0), 9) for at in (start, end))
            if op is None:
                place = bisect_right(began, (start, ops))
                op = began[place - 1][1] if place else 0
            return Span(
                lane=lane, work=work, began=begin, ended=ended, op=op, name=name, storage=storage, nbytes=nbytes,
                stalled=min(round(waited, 9), ended - begin),
            )  # fmt: skip

        spans = [
            span(Lane.COMPUTE, Work.OP, ran.began, ran.ended, name=ran.name, op=self._number(ran.clock, ops))
            for ran in self.ran
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
            storage = one.copied.storage if one.copied.storage >= 0 else None
            for lane, end in ((one.lane, one.ended), (Lane.DISK, one.on_disk)):
                waited = overlap((one.began, end), stalled)
                if end > one.began:
                    spans.append(
                        span(lane, Work.COPY, one.began, end, storage=storage, nbytes=one.copied.nbytes, waited=waited)
                    )
        return tuple(sorted(spans, key=lambda made: made.began))
