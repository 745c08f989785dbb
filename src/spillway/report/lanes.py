"""Where things stand in the picture of the lanes: a row for each, over the time of a step.

What is told apart on the screen is drawn apart. Neighbours closer than half a unit of the picture's width become one,
so that a step of a hundred thousand ops is as small a picture as one of a hundred.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, final

from spillway.ir import Lane, Span, Timeline, Transfers, Work
from spillway.ir.lanes import Interval, merged, outside, overlap, total, within
from spillway.report.axis import COLUMNS, WIDTH
from spillway.units import Seconds, format_seconds

ROW: Final = 22
"""Height of a lane."""
PITCH: Final = 30
"""From one lane to the next."""
LANES_HEIGHT: Final = PITCH * len(Lane)
NARROWEST: Final = 0.5
"""In units of the picture's width: what is narrower is drawn as wide as this."""

NAMES: Final = {
    "op": "ops",
    "recompute": "ops run again",
    "stall": "stall: compute waits for copies",
    "hidden": "copies hidden behind compute",
    "waited": "copies that compute waits for",
}
"""What the key says of every class of marks, in the order in which they are painted."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """All of a lane's work of one class."""

    name: str
    """The class: one of `NAMES`."""
    path: str
    """Their outlines, as SVG writes them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One lane."""

    lane: Lane
    y: float
    """Of its upper edge."""
    marks: list[Marks]
    """From the lowest to the topmost."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Everything that the page's template draws of the lanes of one step."""

    rows: list[Row]
    key: list[tuple[str, Seconds]]
    """Classes that occur, with their seconds. Of two copies at a time both count; of ops what was done for them, stalls
    and recomputing, does not."""
    transfers: Transfers
    stall_seconds: Seconds
    told: list[list[str]]
    """For every column of the pictures above what the lanes did in it."""


def draw_lanes(timeline: Timeline) -> Lanes | None:
    """Lay the lanes out; None if nobody looked at the clock."""
    seconds = timeline.seconds()
    if not seconds:
        return None
    spans = timeline.spans
    parts = {lane: _parts(lane, [span for span in spans if span.lane is lane], _stalled(spans)) for lane in Lane}
    rows = [
        Row(lane=lane, y=number * PITCH, marks=_marks(parts[lane], number * PITCH, WIDTH / seconds))
        for number, lane in enumerate(Lane)
    ]
    lengths = dict.fromkeys(NAMES, 0.0)
    for lane in (Lane.COMPUTE, Lane.COPY_OUT, Lane.COPY_IN):  # the disk is busy for these
        for name, intervals in parts[lane].items():
            lengths[name] += total(intervals)
    lengths["op"] -= _inside(parts[Lane.COMPUTE])
    return Lanes(
        rows=rows,
        key=[(name, length) for name, length in lengths.items() if length > 0],
        transfers=timeline.transfers(),
        stall_seconds=total(_stalled(spans)),
        told=_told(parts, seconds),
    )


def _stalled(spans: Iterable[Span]) -> list[Interval]:
    return merged((span.began, span.ended) for span in spans if span.work is Work.STALL)


def _parts(lane: Lane, spans: Sequence[Span], stalled: Sequence[Interval]) -> dict[str, list[Interval]]:
    """A lane's work by class. A copy is cut into what compute waits for and the rest."""
    if lane is Lane.COMPUTE:
        return {work.value: [(s.began, s.ended) for s in spans if s.work is work] for work in Work if work != "copy"}
    copies = [(span.began, span.ended) for span in spans]
    return {
        "hidden": [part for copy in copies for part in outside(copy, stalled)],
        "waited": [part for copy in copies for part in within(copy, stalled)],
    }


def _inside(compute: dict[str, list[Interval]]) -> Seconds:
    """Seconds of stalls and recomputing that lie within ops."""
    ops = merged(compute["op"])
    return sum(overlap(part, ops) for part in merged([*compute["recompute"], *compute["stall"]]))


def _marks(parts: dict[str, list[Interval]], y: float, scale: float) -> list[Marks]:
    return [Marks(name=name, path=_path(parts[name], y, scale)) for name in NAMES if parts.get(name)]


def _path(intervals: Iterable[Interval], y: float, scale: float) -> str:
    boxes = []
    for began, ended in merged(intervals, NARROWEST / scale):
        x, wide = min(began * scale, WIDTH - NARROWEST), max((ended - began) * scale, NARROWEST)
        boxes.append(f"M{x:.1f},{y:g}h{wide:.1f}v{ROW}h-{wide:.1f}Z")
    return "".join(boxes)


def _told(parts: dict[Lane, dict[str, list[Interval]]], seconds: Seconds) -> list[list[str]]:
    """Busy time of what is no op, by column."""
    wide = seconds / COLUMNS
    shown = {
        "recompute": merged(parts[Lane.COMPUTE]["recompute"]),
        "stall": merged(parts[Lane.COMPUTE]["stall"]),
        **{lane.value: _all(parts[lane]) for lane in Lane if lane is not Lane.COMPUTE},
    }
    told = []
    for column in range(COLUMNS):
        interval = column * wide, (column + 1) * wide
        busy = {name: overlap(interval, intervals) for name, intervals in shown.items()}
        told.append([f"{name}: {format_seconds(length)}" for name, length in busy.items() if length > 1e-7])
    return told


def _all(parts: dict[str, list[Interval]]) -> list[Interval]:
    return merged(interval for intervals in parts.values() for interval in intervals)
