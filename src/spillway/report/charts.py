"""Where things stand in the pictures of a run: the axis that they share, memory over time or input sizes, lanes.

Coordinates are an SVG's: x grows to the right, y grows downwards. The axis is time where somebody looked at the clock,
else ops. Every column of pixels shows one op or several neighbouring ones; of several, the fullest moment, so that no
peak is lost to the width of the picture. What lanes did is drawn apart if it is told apart on the screen; neighbours
closer than half a unit become one, so that a step of a hundred thousand ops is as small a picture as one of a hundred.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from math import prod
from typing import Final, TypeVar, final

from spillway.ir import Change, Kind, Lane, StepReport, Timeline, Transfers, Work
from spillway.ir.reading import WHOLE
from spillway.ir.spans import Interval, merged, outside, overlap, total, within
from spillway.report.figures import NO_BUDGET
from spillway.units import Bytes, GiB, KiB, MiB, Seconds, TiB, format_bytes, format_seconds

WIDTH: Final = 960
"""Of every picture."""
COLUMNS: Final = 480
HEIGHT: Final = 300
"""Of the areas of memory, without ticks."""
BARS_HEIGHT: Final = 130
"""Of the bars below them."""
WINDOW_HEIGHT: Final = 180
"""Of the window's reach."""
RADIUS: Final = 4
"""Of a step among input sizes."""
ROW: Final = 22
"""Height of a lane."""
PITCH: Final = 30
"""From one lane to the next."""
LANES_HEIGHT: Final = PITCH * len(Lane)
NARROWEST: Final = 0.5
"""In units of the picture's width: what is narrower is drawn as wide as this."""

T = TypeVar("T", bound=str)

LEFT: Final = (Change.DROP, Change.MOVE)
"""How bytes leave; drawn downwards."""
CAME_BACK: Final = (Change.RECOMPUTE, Change.PAGE_IN)
"""How they come back; drawn upwards."""

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
class Tick:
    """A mark on an axis."""

    at: float
    text: str
    """What stands beside it."""


def op_ranges(timeline: Timeline, most: int = COLUMNS) -> list[tuple[int, int]]:
    """The ops of every column, half-open; all columns are equally wide.

    By ops every op is in one column. By time a column holds the ops that ran in it, so a long op is in several.
    """
    if not timeline.spans:
        moments = timeline.ops + 1
        columns = min(moments, most)
        edges = [column * moments // columns for column in range(columns + 1)]
        return list(pairwise(edges))
    starts, wide = op_starts(timeline), timeline.seconds() / most
    firsts = [max(bisect_right(starts, column * wide) - 1, 0) for column in range(most)]
    ends = [bisect_left(starts, (column + 1) * wide) for column in range(most - 1)]
    return [(first, max(end, first + 1)) for first, end in zip(firsts, [*ends, len(starts)], strict=True)]


def op_starts(timeline: Timeline) -> list[Seconds]:
    """When every op began, and at last when the last one had ended; ascending.

    An op whose begin nobody saw counts from the begin of the one before it.
    """
    began, end = [0.0] * timeline.ops, 0.0
    for span in timeline.spans:
        if span.work is Work.OP:
            end = max(end, span.ended)
            if span.op < timeline.ops:
                began[span.op] = began[span.op] or span.began
    for op in range(1, timeline.ops):
        began[op] = max(began[op], began[op - 1])
    return [*began, max(end, *began[-1:])]


def ticks(timeline: Timeline) -> list[Tick]:
    """Round numbers along the axis."""
    if not timeline.spans:
        # There is one moment more than ops: what came after the last one.
        step = next(step for step in round_numbers() if timeline.ops / step <= 8)
        numbers = range(0, timeline.ops + 1, step)
        return [Tick(at=WIDTH * op / (timeline.ops + 1), text=f"op {op}" if not op else str(op)) for op in numbers]
    seconds = timeline.seconds()
    apart = 1e-9 * next(number for number in round_numbers() if seconds / (number * 1e-9) <= 8)
    times = [mark * apart for mark in range(int(seconds / apart + 1e-9) + 1)]
    return [Tick(at=WIDTH * at / (seconds or 1), text=short_seconds(at)) for at in times]


def round_numbers() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50 and so on."""
    return (factor * 10**zeros for zeros in count() for factor in (1, 2, 5))


def short_seconds(seconds: Seconds) -> str:
    """Round numbers need no decimals."""
    return format_seconds(seconds).replace(".00 ", " ").replace(".0 ", " ") if seconds else "0 s"


# ---------------------------------------------------------------------- memory


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Neighbouring ops that share a column of pixels."""

    first: int
    last: int
    """The last op; the number of ops stands for what came after the last one."""
    fullest: int
    """The op of the fullest moment."""
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
    plain_y: float | None
    """Height of the line of what the step needs where nothing leaves; None if that is the peak, or far above it."""
    bytes_ticks: list[Tick]
    """Of the areas."""
    bar_ticks: list[Tick]
    """Of the bars, above and below their middle."""
    ticks: list[Tick]
    """Of both, from left to right."""


def draw(timeline: Timeline, plain: Bytes = 0) -> Chart:
    """Lay a timeline out. `plain` is what the step needs where nothing leaves, 0 if nobody knows."""
    columns = columns_of(timeline)
    peak = max(column.resident for column in columns)
    budget_seen = timeline.allowed <= max(4 * peak, 1) and timeline.allowed < NO_BUDGET
    plain_seen = peak < plain <= 4 * peak
    top = max(peak, timeline.allowed if budget_seen else 0, plain if plain_seen else 0, 1) * 1.06
    areas, below = list[Area](), [0] * len(columns)
    for kind in columns[0].by_kind:
        above = [base + column.by_kind[kind] for base, column in zip(below, columns, strict=True)]
        outline = _outline(*([_height(level, top) for level in levels] for levels in (above, below)))
        areas.append(Area(name=kind.value, path=outline, most=max(column.by_kind[kind] for column in columns)))
        below = above
    bars, bar_ticks = _bars([column.changed for column in columns], CAME_BACK, LEFT)
    return Chart(
        columns=columns, areas=[area for area in areas if area.most], bars=bars,
        budget_y=_height(timeline.allowed, top) if budget_seen else None,
        plain_y=_height(plain, top) if plain_seen else None, bytes_ticks=_bytes_ticks(top),
        bar_ticks=bar_ticks, ticks=ticks(timeline),
    )  # fmt: skip


def columns_of(timeline: Timeline, most: int = COLUMNS) -> list[Column]:
    """The ops of a timeline, gathered into at most `most` columns. Of an op in several, what left and came back is in
    its first."""
    ranges = op_ranges(timeline, most)
    nbytes = {line.storage: line.nbytes for line in timeline.storages}
    changed = [dict.fromkeys((*CAME_BACK, *LEFT), 0) for _ in ranges]
    ends = [end for _, end in ranges]
    for event in timeline.events:
        column = changed[bisect_right(ends, event.op)]
        if event.change in column:
            column[event.change] += nbytes[event.storage]
    totals, kinds, columns = [nbytes for _, nbytes in timeline.resident()], timeline.by_kind(), []
    for (first, end), changes in zip(ranges, changed, strict=True):
        fullest = max(range(first, end), key=totals.__getitem__)
        by_kind = {kind: row[fullest][1] for kind, row in kinds.items()}
        columns.append(Column(first=first, last=end - 1, fullest=fullest, by_kind=by_kind, changed=changes))
    return columns


def round_bytes(top: float, ticks: int = 5) -> list[Bytes]:
    """About `ticks` round numbers of bytes from 0 up to `top`."""
    unit = max((unit for unit in (1, KiB, MiB, GiB, TiB) if unit <= top / 2), default=1)
    step = next(unit * step for step in round_numbers() if top / (unit * step) <= ticks + 1)
    return list(range(0, int(top) + 1, step))


def _bars(
    columns: Sequence[Mapping[T, Bytes]], upwards: Sequence[T], downwards: Sequence[T]
) -> tuple[list[Area], list[Tick]]:
    """Bars for what is drawn upwards and what downwards, one on the other, and the ticks beside them; nothing if there
    are no bytes."""
    most = max(sum(column[what] for what in side) for column in columns for side in (upwards, downwards))
    if not most:
        return [], []
    middle, scale = BARS_HEIGHT / 2, (BARS_HEIGHT / 2 - 4) / most
    areas = []
    for side, direction in ((upwards, -scale), (downwards, scale)):
        start = [middle] * len(columns)
        for what in side:
            end = [at + direction * column[what] for at, column in zip(start, columns, strict=True)]
            total = sum(column[what] for column in columns)
            areas.append(Area(name=what, path=_outline(end, start), most=total))
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


def _bytes_ticks(top: float) -> list[Tick]:
    return [Tick(at=_height(nbytes, top), text=short_bytes(nbytes)) for nbytes in round_bytes(top)]


# ---------------------------------------------------------------------- the window


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WindowChart:
    """Everything that the page's template draws of the window that planned a step."""

    reach: str
    """The ops in the window, upwards, over the step: an outline, as SVG writes one."""
    ops_ticks: list[Tick]
    """Of it, from the bottom upwards."""
    bars: list[Area]
    """What came into the window and what went; empty if nothing did."""
    bar_ticks: list[Tick]
    """Of the bars, above and below their middle."""


ENTERED: Final = ("swapped in", "cancelled")
"""What comes into the window; drawn upwards."""
WENT: Final = ("waited for", "precleared")
"""What goes; drawn downwards."""


def draw_window(timeline: Timeline) -> WindowChart | None:
    """Lay the window out, over the columns of the timeline's picture; None if no window planned the step."""
    if not timeline.window:
        return None
    last, upper, lower, columns = timeline.ops, list[float](), list[float](), list[dict[str, Bytes]]()
    moved = dict(zip((*ENTERED, *WENT), ("swapped_in", "cancelled", "waited", "precleared"), strict=True))
    reached = 0
    for first, end in op_ranges(timeline):
        ops = range(first, min(end, last))
        at = [timeline.window[op] for op in ops if op >= reached]  # an op in several columns counts in its first
        reached = max(reached, end)
        columns.append({name: sum(getattr(one, field) for one in at) for name, field in moved.items()})
        until = max((timeline.window[op].until for op in ops), default=last)
        upper.append(WINDOW_HEIGHT * (1 - until / last))
        lower.append(WINDOW_HEIGHT * (1 - min(first, last) / last))
    bars, bar_ticks = _bars(columns, ENTERED, WENT)
    apart = next(number for number in round_numbers() if last / number <= 5)
    return WindowChart(
        reach=_outline(upper, lower), bars=bars, bar_ticks=bar_ticks,
        ops_ticks=[Tick(at=WINDOW_HEIGHT * (1 - op / last), text=f"op {op}") for op in range(0, last + 1, apart)],
    )  # fmt: skip


# ---------------------------------------------------------------------- over all steps


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One number over all steps."""

    name: str
    """What it is: a class of the page's, or what the user called it."""
    path: str
    """The line, as SVG writes one; broken where there is no number."""
    budget_y: float | None = None
    """Heights of further lines; None where there is none."""
    plain_y: float | None = None
    budget: str = ""
    """The line of a budget that changed; empty if it did not."""
    resident: str = ""
    """The line of the resident set above start; empty if nobody knows it, or where it lies far above everything."""
    height: float
    ticks: list[Tick]
    """From the bottom upwards."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepsChart:
    """Everything that the page's template draws of all steps."""

    curves: list[Curve]
    """The peak, the time, and what the user logged."""
    ticks: list[Tick]
    """From left to right."""
    told: list[list[str]]
    """For every column what it shows, line by line."""


CURVES: Final = 4
"""Most numbers of the user's that are drawn."""
FURTHEST: Final = 1e300
"""From 0, of a number that is drawn: twice as far there would be none."""
CURVE_HEIGHT: Final = 90
"""Of all curves but the first."""


def draw_steps(steps: Sequence[StepReport], budgets: Sequence[Bytes], plain: Bytes, start: Bytes) -> StepsChart | None:
    """Lay a run out, step by step; None if that would be a single point.

    Several steps share a column where there are more than fit: of their peaks the highest is drawn, of their times and
    of what was logged the mean.

    Arguments:
        budgets: All that the steps had; of `NO_BUDGET` and more they had none.
        plain: What a step needs where nothing leaves; 0 if nobody knows.
        start: The resident set without what the budget counts; 0 if nobody knows.
    """
    if len(steps) < 2:
        return None
    number = min(len(steps), COLUMNS)
    groups = [steps[len(steps) * at // number : len(steps) * (at + 1) // number] for at in range(number)]
    peaks: list[float] = [max(step.peak_bytes for step in group) for group in groups]
    resident = [float(max(step.peak_rss_bytes for step in group) - start) for group in groups]
    resident = [above if start and above > 0 else math.nan for above in resident]
    highest = max([*peaks, 1.0])
    resident_seen = [above if above <= 4 * highest else math.nan for above in resident]
    highest = max([highest, *(above for above in resident_seen if above > 0)])
    known = [line for line in (*budgets, plain) if 0 < line < NO_BUDGET]
    top = 1.06 * max([highest, *(line for line in known if line <= 4 * highest)])
    seen = {line: _height(line, top) for line in known if line <= top}
    of_peak = [max(group, key=lambda step: step.peak_bytes).allowed for group in groups]
    changed = [float(one) if one in seen and len(budgets) > 1 else math.nan for one in of_peak]
    curves = [
        Curve(
            name="peak", path=_line(peaks, top, HEIGHT), height=HEIGHT, ticks=_bytes_ticks(top),
            budget_y=seen.get(budgets[0]) if len(budgets) == 1 else None, plain_y=seen.get(plain),
            budget=_steps_of(changed, top, HEIGHT),
            resident=_line(resident_seen, top, HEIGHT),
        )
    ]  # fmt: skip
    logged = [name for name in dict.fromkeys(name for step in steps for name in step.logged) if name != "time"][:CURVES]
    means = {"time": [_mean([step.seconds for step in group]) for group in groups]} | {
        name: [_mean([step.logged.get(name, math.nan) for step in group]) for group in groups] for name in logged
    }
    curves += [_curve(name, values, zero=name == "time") for name, values in means.items()]
    apart = next(number for number in round_numbers() if len(steps) / number <= 8)
    told = [
        _steps_told(group, peak, above, budget, {name: values[at] for name, values in means.items()})
        for at, (group, peak, above, budget) in enumerate(zip(groups, peaks, resident, changed, strict=True))
    ]
    return StepsChart(
        curves=curves, told=told,
        ticks=[
            Tick(at=WIDTH * (at + 0.5) / len(steps), text=f"step {steps[at].step}" if not at else str(steps[at].step))
            for at in range(0, len(steps), apart)
        ],
    )  # fmt: skip


def draw_left(steps: Sequence[StepReport]) -> tuple[list[Area], list[Tick]]:
    """What left memory in every step, a column each: bars, of what was dropped upwards and of what was moved downwards,
    and the ticks beside them. Nothing if nothing did."""
    columns = [{"recomputed": step.dropped_bytes, "offloaded": step.bytes_out} for step in steps]
    return _bars(columns, ("recomputed",), ("offloaded",))


def _steps_told(
    group: Sequence[StepReport], peak: float, resident: float, budget: float, means: Mapping[str, float]
) -> list[str]:
    first, last = group[0].step, group[-1].step
    lines = [f"step {first}" if first == last else f"steps {first} to {last}", f"peak: {format_bytes(int(peak))}"]
    if not math.isnan(resident):
        lines.append(f"resident set above start: {format_bytes(int(resident))}")
    if not math.isnan(budget):
        lines.append(f"budget: {format_bytes(int(budget))}")
    shown = {name: format_seconds(mean) if name == "time" else f"{mean:.6g}" for name, mean in means.items()}
    return [*lines, *(f"{name}: {text}" for name, text in shown.items())]


def _steps_of(values: Sequence[float], top: float, height: float) -> str:
    """As wide as its column is each value, and none where there is no number."""
    wide, parts, open_ = WIDTH / len(values), list[str](), False
    for at, value in enumerate(values):
        if math.isfinite(value):
            parts.append(f"{'L' if open_ else 'M'}{at * wide:.1f},{height * (1 - value / top):.1f}h{wide:.1f}")
        open_ = math.isfinite(value)
    return "".join(parts)


def _mean(numbers: Sequence[float]) -> float:
    """Of those that are numbers; of none it is none."""
    finite = [number for number in numbers if math.isfinite(number)]
    return sum(finite) / len(finite) if finite else math.nan


def _curve(name: str, values: Sequence[float], *, zero: bool) -> Curve:
    """Of any numbers: from 0 where that means something, else from the lowest to the highest."""
    values = [value if abs(value) <= FURTHEST else math.nan for value in values]
    finite = [value for value in values if math.isfinite(value)]
    low, high = (0.0 if zero else min(finite, default=0.0)), max(finite, default=1.0)
    reach = (high - low) or abs(high) or 1.0
    ticks = [
        Tick(at=CURVE_HEIGHT * (1 - (mark - low) / (1.06 * reach)), text=short_seconds(mark) if zero else f"{mark:.4g}")
        for mark in (low, low + reach)
    ]
    path = _line([value - low for value in values], 1.06 * reach, CURVE_HEIGHT)
    return Curve(name=name, path=path, height=CURVE_HEIGHT, ticks=ticks)


def _line(values: Sequence[float], top: float, height: float) -> str:
    """A line through the middles of columns, with a mark where a number stands alone."""
    wide, parts, open_ = WIDTH / len(values), list[str](), False
    for at, value in enumerate(values):
        if not math.isfinite(value):
            open_ = False
            continue
        point = f"{(at + 0.5) * wide:.1f},{height * (1 - value / top):.1f}"
        parts.append(f"L{point}" if open_ else f"M{point}h0.1")
        open_ = True
    return "".join(parts)


# ---------------------------------------------------------------------- by input size


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One step."""

    x: float
    y: float
    name: str
    """"collecting", every block recomputed; "planned"; or "expected" where the peak was not measured."""
    told: str
    """The step in a sentence."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SizeChart:
    """Everything that the page's template draws."""

    points: list[Point]
    budget_y: float | None
    """Height of the budget line; None if there is no budget."""
    plain_y: float | None
    """Height of the line of the plain peak; None if nobody knows it."""
    bytes_ticks: list[Tick]
    ticks: list[Tick]
    axis: str
    """What runs along the bottom."""


def draw_sizes(steps: Sequence[StepReport], budget: Bytes | None, plain: Bytes = 0) -> SizeChart | None:
    """Lay the steps out by input size, as Fig. 14 of the Mimose paper has them; None if no step has one. `plain` is the
    plain peak of the largest size, 0 if nobody knows."""
    sized = [(step, step.input_size, prod(step.input_size)) for step in steps if step.input_size]
    sized = [one for one in sized if one[2] <= WHOLE.most]  # a file may say anything
    if not sized:
        return None
    dimensions = max(len(size) for _, size, _ in sized)
    allowed = budget if budget is not None and budget < NO_BUDGET else None
    top = 1.06 * max([step.peak_bytes for step, _, _ in sized] + [allowed or 1, plain])
    right = 1.02 * max([number for _, _, number in sized] + [1])
    apart, points = next(number for number in round_numbers() if right / number <= 8), []
    for step, size, number in sized:
        every = step.recomputed_blocks == step.blocks > 0 and not step.projected_bytes
        name = ("collecting" if every else "planned") if step.peak_measured else "expected"
        told = (
            f"step {step.step}, size {' x '.join(map(str, size))}: {short_bytes(step.peak_bytes)}, "
            f"{step.recomputed_blocks} of {step.blocks} blocks recomputed"
        )
        points.append(Point(x=WIDTH * number / right, y=_height(step.peak_bytes, top), name=name, told=told))
    return SizeChart(
        points=points, budget_y=None if allowed is None else _height(allowed, top),
        plain_y=_height(plain, top) if plain else None, bytes_ticks=_bytes_ticks(top),
        ticks=[Tick(at=WIDTH * number / right, text=str(number)) for number in range(0, int(right) + 1, apart)],
        axis="input size" if dimensions == 1 else "input size, all numbers multiplied",
    )  # fmt: skip


# ---------------------------------------------------------------------- lanes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One lane."""

    lane: Lane
    y: float
    """Of its upper edge."""
    marks: dict[str, str]
    """All of its work by class, one of `NAMES`, from the lowest to the topmost: outlines, as SVG writes them."""


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
    seconds, spans = timeline.seconds(), timeline.spans
    if not seconds:
        return None
    stalled = merged((span.began, span.ended) for span in spans if span.work is Work.STALL)
    copies = {lane: [(s.began, s.ended) for s in spans if s.lane is lane] for lane in Lane if lane is not Lane.COMPUTE}
    # A lane's work by class. A copy is cut into what compute waits for and the rest.
    parts: dict[Lane, dict[str, list[Interval]]] = {
        Lane.COMPUTE: {
            work.value: [(s.began, s.ended) for s in spans if s.lane is Lane.COMPUTE and s.work is work]
            for work in Work if work != "copy"
        },
        **{
            lane: {
                "hidden": [part for copy in those for part in outside(copy, stalled)],
                "waited": [part for copy in those for part in within(copy, stalled)],
            }
            for lane, those in copies.items()
        },
    }  # fmt: skip
    rows = []
    for number, lane in enumerate(Lane):
        found = {name: parts[lane][name] for name in NAMES if parts[lane].get(name)}
        marks = {name: _boxes(work, number * PITCH, WIDTH / seconds) for name, work in found.items()}
        rows.append(Row(lane=lane, y=number * PITCH, marks=marks))
    lengths = dict.fromkeys(NAMES, 0.0)
    for lane in (Lane.COMPUTE, Lane.COPY_OUT, Lane.COPY_IN):  # the disk is busy for these
        for name, intervals in parts[lane].items():
            lengths[name] += total(intervals)
    compute = parts[Lane.COMPUTE]
    ops = merged(compute["op"])
    lengths["op"] -= sum(overlap(part, ops) for part in merged([*compute["recompute"], *compute["stall"]]))
    return Lanes(
        rows=rows, key=[(name, length) for name, length in lengths.items() if length > 0],
        transfers=timeline.transfers(), stall_seconds=total(stalled), told=_lanes_told(parts, seconds),
    )  # fmt: skip


def _boxes(intervals: Iterable[Interval], y: float, scale: float) -> str:
    boxes = []
    for began, ended in merged(intervals, NARROWEST / scale):
        x, wide = min(began * scale, WIDTH - NARROWEST), max((ended - began) * scale, NARROWEST)
        boxes.append(f"M{x:.1f},{y:g}h{wide:.1f}v{ROW}h-{wide:.1f}Z")
    return "".join(boxes)


def _lanes_told(parts: Mapping[Lane, Mapping[str, list[Interval]]], seconds: Seconds) -> list[list[str]]:
    """Busy time of what is no op, by column."""
    shown = {name: merged(parts[Lane.COMPUTE][name]) for name in ("recompute", "stall")}
    for lane in Lane:
        if lane is not Lane.COMPUTE:
            shown[lane.value] = merged(interval for intervals in parts[lane].values() for interval in intervals)
    wide, told = seconds / COLUMNS, []
    for column in range(COLUMNS):
        interval = column * wide, (column + 1) * wide
        busy = {name: overlap(interval, intervals) for name, intervals in shown.items()}
        told.append([f"{name}: {format_seconds(length)}" for name, length in busy.items() if length > 1e-7])
    return told
