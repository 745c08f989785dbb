"""What was resident when: the one record that real and simulated runs both write.

A timeline lists the storages of one step and the events that changed which of them had their bytes in device memory.
Events stand in the order in which they happened; those of op `k` happened between the end of op `k - 1` and the end of
op `k`, or were deaths right after it. Events numbered `ops` happened after the last op.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Annotated, Any, Final, final

from spillway.ir.reading import read_fields
from spillway.ir.spans import Span, Transfers, transfers_of
from spillway.units import Bytes, Seconds, Within


@final
class Change(StrEnum):
    """How a storage's bytes came into device memory or left it."""

    CREATE = "create"
    DIE = "die"
    DROP = "drop"
    MOVE = "move"
    RECOMPUTE = "recompute"
    PAGE_IN = "page-in"


MOST_OPS: Final = 1_000_000
"""Ops of a timeline that is read from a file: its picture takes room for each of them, whatever happened there."""

ARRIVALS = frozenset({Change.CREATE, Change.RECOMPUTE, Change.PAGE_IN})
"""The changes that add a storage's bytes to what is resident; the others take them away."""


@final
class Kind(StrEnum):
    """What a storage is for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    INPUT = "input"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StorageLine:
    """A storage, as far as a timeline has to know it."""

    storage: int
    """Its number; each storage of a timeline has its own."""
    kind: Kind
    nbytes: Bytes
    """Its bytes while it is present."""
    present_at_start: bool
    """Whether its bytes are in device memory when the step begins."""

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise ValueError(f"storage {self.storage} has {self.nbytes} bytes")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One storage's bytes came or went."""

    op: int
    """The op before, during or right after which it happened; the number of ops for what happened after the last."""
    storage: int
    change: Change
    """What happened. A storage may die while it is absent, which changes nothing that is resident."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a storage comes from, as far as anybody knows; what is not known is empty."""

    storage: int
    name: str
    """What the model calls it, of parameters, buffers and what belongs to them."""
    op: str
    """The operator that created it in this step, `aten.mm.default`."""
    module: str
    """Qualified name of the module whose forward, or the backward of that, asked for it."""
    line: str
    """The innermost line that is neither torch's nor Spillway's, `train.py:42`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WindowAt:
    """What a window that slides over a step did in front of one op and behind it."""

    until: Annotated[int, Within(0, MOST_OPS)]
    """The first op that does not lie in it whole."""
    swapped_in: Bytes
    """Bytes that it brought in."""
    cancelled: Bytes
    """Bytes that had left it, and came into it again before anybody waited for their copy."""
    waited: Bytes
    """Bytes whose copy out was waited for."""
    precleared: Bytes
    """Bytes that went without being read again."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Which storages were resident during one step.

    Raises ValueError when built if an event contradicts those before it: bytes that come but are there, bytes that
    leave but are not there, an unknown storage, an op out of order.
    """

    step: int
    """Number of the step within its run."""
    allowed: Bytes
    ops: Annotated[int, Within(0, MOST_OPS)]
    storages: tuple[StorageLine, ...]
    """Every storage that was resident at any moment."""
    events: tuple[Event, ...]
    """What happened, in order."""
    spans: tuple[Span, ...] = ()
    """What the lanes did, by when it began; empty if nobody looked at the clock."""
    window: tuple[WindowAt, ...] = ()
    """For every op what the window did that planned the step; empty if none did."""
    origins: tuple[Origin, ...] = ()
    """Where storages come from; of those of which anything is known."""

    def __post_init__(self) -> None:
        if len({line.storage for line in self.storages}) < len(self.storages):
            raise ValueError("two storages of a timeline have the same number")
        _check_order(self.events, self.ops)
        _check_spans(self.spans, self.ops)
        if self.window and len(self.window) != self.ops:
            raise ValueError(f"a window over {len(self.window)} ops in a timeline of {self.ops} ops")
        if furthest := next((at.until for at in self.window if at.until > self.ops), None):
            raise ValueError(f"a window that reaches to op {furthest} in a timeline of {self.ops} ops")
        for _ in self._changes():
            pass  # Walking through them is the check.

    def peak(self) -> Bytes:
        """The most bytes resident at any moment of the step."""
        return max(nbytes for _, nbytes in self.resident())

    def plain_peak(self) -> Bytes:
        """What the peak would have been had nothing left: the most bytes of storages at once, absent ones included."""
        first = dict[int, Change]()
        for event in self.events:
            first.setdefault(event.storage, event.change)
        nbytes = {line.storage: line.nbytes for line in self.storages}
        level = peak = sum(size for storage, size in nbytes.items() if first.get(storage) is not Change.CREATE)
        for event in self.events:
            level += {Change.CREATE: 1, Change.DIE: -1}.get(event.change, 0) * nbytes[event.storage]
            peak = max(peak, level)
        return peak

    def present_at(self, ops: Iterable[int]) -> dict[int, tuple[StorageLine, ...]]:
        """The storages that are resident at the moments of these ops that `resident` tells of."""
        wanted, totals = set(ops), [nbytes for _, nbytes in self.resident()]
        lines = {line.storage: line for line in self.storages}
        present = {line.storage for line in self.storages if line.present_at_start}
        level, reached = sum(lines[storage].nbytes for storage in present), 0
        found = dict[int, tuple[StorageLine, ...]]()

        def look(ops: Iterable[int]) -> None:
            for op in ops:
                if op in wanted and op not in found and level == totals[op]:
                    found[op] = tuple(lines[storage] for storage in sorted(present))

        for event in self.events:
            look(range(reached, event.op + 1))
            reached = event.op + 1
            level += _apply(event, lines[event.storage].nbytes, present)
            look((event.op,))
        look(range(reached, self.ops + 1))
        return found

    def seconds(self) -> Seconds:
        """When the last span ended; 0.0 without spans."""
        return max((span.ended for span in self.spans), default=0.0)

    def transfers(self) -> Transfers:
        """The step's copies, and what of them was hidden behind compute."""
        return transfers_of(self.spans)

    def resident(self) -> list[tuple[int, Bytes]]:
        """For every op the most bytes resident at any moment from the end of the op before it to its own end.

        The last pair is numbered `ops`: the moments after the last op.
        """
        return [(op, sum(by_kind.values())) for op, by_kind in enumerate(self._fullest_moments())]

    def by_kind(self) -> dict[Kind, list[tuple[int, Bytes]]]:
        """For every kind that occurs its bytes at the moments that `resident` tells of, so that kinds add up to it."""
        moments = self._fullest_moments()
        kinds = {line.kind for line in self.storages}
        return {kind: [(op, moment[kind]) for op, moment in enumerate(moments)] for kind in Kind if kind in kinds}

    def to_json(self) -> dict[str, Any]:
        """The timeline as JSON can hold it: a row `[storage, kind, bytes, present at start]` per storage,
        `[op, storage, change]` per event, and per span
        `[lane, work, began, ended, op, name, storage, bytes, stalled]`, times in seconds; and a row
        `[until, bytes swapped in, cancelled, waited for, precleared]` per op, if a window planned the step; and
        `[storage, name, op, module, line]` for every storage whose origin is known."""
        said = {"storages": self.storages, "events": self.events, "spans": self.spans}
        told = {"window": self.window, "origins": self.origins}
        rows = said | {name: records for name, records in told.items() if records}
        listed = {name: [_row(record) for record in records] for name, records in rows.items()}
        return {"step": self.step, "allowed": self.allowed, "ops": self.ops, **listed}

    @classmethod
    def from_json(cls, data: object) -> Timeline:
        """Read what `to_json` gave. Raises ValueError for anything else."""
        return read_fields(cls, data, "timeline")  # version 1 has no spans

    def _changes(self) -> Iterator[tuple[int, Kind, Bytes]]:
        """Yield op, kind and signed bytes of every event."""
        lines = {line.storage: line for line in self.storages}
        present = {line.storage for line in self.storages if line.present_at_start}
        for event in self.events:
            line = lines.get(event.storage)
            if line is None:
                raise ValueError(f"op {event.op}: {event.change} of storage {event.storage}, which is not listed")
            yield event.op, line.kind, _apply(event, line.nbytes, present)

    def _fullest_moments(self) -> list[dict[Kind, Bytes]]:
        """Bytes by kind, for every op at its fullest moment.

        An op begins with what the one before it left, so that level counts as a moment of both.
        """
        level = dict.fromkeys(Kind, 0)
        for line in self.storages:
            level[line.kind] += line.nbytes if line.present_at_start else 0
        moments: list[dict[Kind, Bytes]] = []
        for op, kind, nbytes in self._changes():
            moments.extend(dict(level) for _ in range(len(moments), op + 1))
            level[kind] += nbytes
            if sum(level.values()) > sum(moments[op].values()):
                moments[op] = dict(level)
        moments.extend(dict(level) for _ in range(len(moments), self.ops + 1))
        return moments


def _check_order(events: tuple[Event, ...], ops: int) -> None:
    previous = 0
    for event in events:
        if not previous <= event.op <= ops:
            raise ValueError(f"an event of op {event.op} stands after op {previous} in a timeline of {ops} ops")
        previous = event.op


def _check_spans(spans: tuple[Span, ...], ops: int) -> None:
    previous = 0.0
    for span in spans:
        if not previous <= span.began:
            raise ValueError(f"a span that began at {span.began} stands after one of {previous}")
        if not 0 <= span.op <= ops:
            raise ValueError(f"a span of op {span.op} in a timeline of {ops} ops")
        previous = span.began


def _apply(event: Event, nbytes: Bytes, present: set[int]) -> Bytes:
    """Note in `present` what the event did; return the bytes that it added."""
    was_present = event.storage in present
    if event.change in ARRIVALS:
        if was_present:
            raise ValueError(f"op {event.op}: {event.change} of storage {event.storage}, which is present")
        present.add(event.storage)
        return nbytes
    if not was_present and event.change is not Change.DIE:
        raise ValueError(f"op {event.op}: {event.change} of storage {event.storage}, which is absent")
    present.discard(event.storage)
    return -nbytes if was_present else 0


def _row(record: Any) -> list[Any]:
    """Its fields in order, those of an enumeration as text."""
    return [str(one) if isinstance(one, StrEnum) else one for one in attrgetter(*record.__slots__)(record)]
