"""Where things stand in the pictures of a timeline: columns, outlines of areas, bars, ticks.

Coordinates are an SVG's: x grows to the right, y grows downwards. Every column of pixels shows one op or several
neighbouring ones, by the axis (`axis`); of several, the fullest moment, so that no peak is lost to the width of the
picture.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

from spillway.ir import Change, Kind, Timeline
from spillway.report.axis import COLUMNS, WIDTH, Tick, op_ranges, round_numbers, ticks
from spillway.report.figures import NO_BUDGET
from spillway.units import Bytes, GiB, KiB, MiB, TiB, format_bytes

HEIGHT: Final = 300
"""Of the areas, without ticks."""
BARS_HEIGHT: Final = 130
"""Of the bars below them."""

LEFT: Final = (Change.DROP, Change.MOVE)
"""How bytes leave; drawn downwards."""
CAME_BACK: Final = (Change.RECOMPUTE, Change.PAGE_IN)
"""How they come back; drawn upwards."""

_UNITS: Final = (1, KiB, MiB, GiB, TiB)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Neighbouring ops that share a column of pixels."""

    first: int
    """The first op."""
    last: int
    """The last op; the number of ops stands for what came after the last one."""
    by_kind: dict[Kind, Bytes]
    """Bytes resident at the fullest moment."""
    changed: dict[Change, Bytes]
    """Bytes that left and came back, over all of the column's ops."""

    @property
    def resident(self) -> Bytes:
        """Bytes resident at the fullest moment, of every kind."""
        return sum(self.by_kind.values())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """A coloured piece of a picture with everything that its key needs."""

    name: str
    """What it shows: a kind of storage or a change."""
    path: str
    """Its outline, as SVG writes one."""
    most: Bytes
    """Areas: the most bytes at any op. Bars: bytes of the whole step."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Everything that the page's template draws of one timeline."""

    columns: list[Column]
    """From left to right; all are equally wide."""
    areas: list[Area]
    """Resident bytes by kind of storage, from the bottom upwards."""
    bars: list[Area]
    """What came back and what left; empty if nothing did."""
    budget_y: float | None
    """Height of the budget line; None if there is no budget, or if it lies far above everything."""
    bytes_ticks: list[Tick]
    """Of the areas."""
    bar_ticks: list[Tick]
    """Of the bars, above and below their middle."""
    ticks: list[Tick]
    """Of both, from left to right."""


def draw(timeline: Timeline) -> Chart:
    """Lay a timeline out."""
    columns = columns_of(timeline)
    peak = max(column.resident for column in columns)
    budget_seen = timeline.allowed <= max(4 * peak, 1) and timeline.allowed < NO_BUDGET
    top = max(peak, timeline.allowed if budget_seen else 0, 1) * 1.06
    bars, bar_ticks = _bars(columns)
    return Chart(
        columns=columns,
        areas=_areas(columns, top),
        bars=bars,
        budget_y=_height(timeline.allowed, top) if budget_seen else None,
        bytes_ticks=[Tick(at=_height(nbytes, top), text=short_bytes(nbytes)) for nbytes in round_bytes(top)],
        bar_ticks=bar_ticks,
        ticks=ticks(timeline),
    )


def columns_of(timeline: Timeline, most: int = COLUMNS) -> list[Column]:
    """The ops of a timeline, gathered into at most `most` columns."""
    totals = [nbytes for _, nbytes in timeline.resident()]
    kinds = timeline.by_kind()
    ranges = op_ranges(timeline, most)
    columns = []
    for (first, end), changes in zip(ranges, _changed(timeline, ranges), strict=True):
        fullest = max(range(first, end), key=totals.__getitem__)
        by_kind = {kind: row[fullest][1] for kind, row in kinds.items()}
        columns.append(Column(first=first, last=end - 1, by_kind=by_kind, changed=changes))
    return columns


def _changed(timeline: Timeline, ranges: Sequence[tuple[int, int]]) -> list[dict[Change, Bytes]]:
    """For every column the bytes that left and came back; of an op in several columns, in its first."""
    nbytes = {line.storage: line.nbytes for line in timeline.storages}
    changed = [dict.fromkeys((*CAME_BACK, *LEFT), 0) for _ in ranges]
    ends = [end for _, end in ranges]
    for event in timeline.events:
        column = changed[bisect_right(ends, event.op)]
        if event.change in column:
            column[event.change] += nbytes[event.storage]
    return changed


def round_bytes(top: float, ticks: int = 5) -> list[Bytes]:
    """About `ticks` round numbers of bytes from 0 up to `top`."""
    unit = max((unit for unit in _UNITS if unit <= top / 2), default=1)
    step = next(unit * step for step in round_numbers() if top / (unit * step) <= ticks + 1)
    return list(range(0, int(top) + 1, step))


def _areas(columns: Sequence[Column], top: float) -> list[Area]:
    below = [0] * len(columns)
    areas = []
    for kind in columns[0].by_kind:
        above = [base + column.by_kind[kind] for base, column in zip(below, columns, strict=True)]
        most = max(column.by_kind[kind] for column in columns)
        outline = _outline([_height(level, top) for level in above], [_height(level, top) for level in below])
        areas.append(Area(name=kind.value, path=outline, most=most))
        below = above
    return [area for area in areas if area.most]


def _bars(columns: Sequence[Column]) -> tuple[list[Area], list[Tick]]:
    """Bars for each of the four changes, and the ticks beside them; nothing if nothing left and nothing came back."""
    most = max(sum(column.changed[change] for change in side) for column in columns for side in (CAME_BACK, LEFT))
    if not most:
        return [], []
    middle, scale = BARS_HEIGHT / 2, (BARS_HEIGHT / 2 - 4) / most
    areas = []
    for side, direction in ((CAME_BACK, -scale), (LEFT, scale)):
        start = [middle] * len(columns)
        for change in side:
            end = [at + direction * column.changed[change] for at, column in zip(start, columns, strict=True)]
            total = sum(column.changed[change] for column in columns)
            areas.append(Area(name=change.value, path=_outline(end, start), most=total))
            start = end
    step = round_bytes(most, ticks=2)[-1] or most
    ticks = [Tick(at=middle + sign * step * scale, text=short_bytes(step)) for sign in (-1, 1)]
    return [area for area in areas if area.most], [ticks[0], Tick(at=middle, text="0"), ticks[1]]


def _outline(upper: Sequence[float], lower: Sequence[float]) -> str:
    """The outline of an area between two staircases, one stair per column."""
    wide = WIDTH / len(upper)
    there = _stairs((index * wide, (index + 1) * wide, y) for index, y in enumerate(upper))
    back = _stairs(((index + 1) * wide, index * wide, y) for index, y in reversed(list(enumerate(lower))))
    return f"M{there}L{back}Z"


def _stairs(stairs: Iterator[tuple[float, float, float]]) -> str:
    """Points along a staircase; stairs of one height become one."""
    points: list[str] = []
    reached, height = "", None
    for start, end, y in stairs:
        if height is not None and y != height:
            points.append(reached)
        if y != height:
            points.append(f"{start:.1f},{y:.1f}")
        reached, height = f"{end:.1f},{y:.1f}", y
    return " ".join([*points, reached])


def _height(nbytes: Bytes, top: float) -> float:
    return HEIGHT * (1 - nbytes / top)


def short_bytes(nbytes: Bytes) -> str:
    """Round numbers need no decimals."""
    return format_bytes(nbytes).replace(".00", "")
