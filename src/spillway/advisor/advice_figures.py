"""The figures of PAPAYA's paper, of any network that was tried: memory, throughput, fits, scores, gains.

Every figure says in words what it shows, for who cannot see it. A figure that would be empty is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

from markupsafe import Markup

from spillway.advisor.gains import Sweep, SweepPoint, best_crossover, gains
from spillway.advisor.measurements import Samples
from spillway.advisor.verdict import Fitted, Row, plain_row, ratios
from spillway.report.charts import round_bytes, short_bytes, short_seconds
from spillway.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAPER,
    PINK,
    SOFT,
    VIOLET,
    YELLOW,
    Colour,
    End,
    frameless,
    spread,
    svg_of,
)
from spillway.units import Bytes, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kinds: TypeAlias = Mapping[tuple[str, int], Mapping[str, Bytes]]
"""Bytes of a step at its peak by what they are, by method and batch size."""


class Style(NamedTuple):
    """How a method is drawn."""

    colour: str
    """On light paper."""
    mark: str


_PLAIN, _CHECKPOINT, _SWAP, _COMPRESS, _CHECKPOINT_SWAP, _COMPRESS_SWAP, _CHECKPOINT_COMPRESS = (
    Style(colour.light, mark)
    for colour, mark in (
        (GREY, "o"), (GREEN, "s"), (ORANGE, "^"), (PINK, "D"), (BLUE, "P"), (YELLOW, "X"), (VIOLET, "v"),
    )
)  # fmt: skip
STYLES: Final[Mapping[str, Style]] = {
    **dict.fromkeys(("plain", "exact", "keep-all"), _PLAIN),
    **dict.fromkeys(("checkpoint", "ckpt"), _CHECKPOINT),
    **dict.fromkeys(("swap", "cpu-off"), _SWAP),
    **dict.fromkeys(("compress", "L1"), _COMPRESS),
    **dict.fromkeys(("checkpoint-swap", "swap_ckpt"), _CHECKPOINT_SWAP),
    **dict.fromkeys(("compress-swap", "L4bit-swap"), _COMPRESS_SWAP),
    **dict.fromkeys(("checkpoint-compress", "L1_ckpt"), _CHECKPOINT_COMPRESS),
    "swap-prefetch": Style(ORANGE.light, "<"),
    "selective": Style(GREEN.light, "p"),
    "selective-swap": Style(BLUE.light, "p"),
}
"""Ours, and what PAPAYA's measurements call the same."""
METHODS: Final = (VIOLET, YELLOW, BLUE, PINK, ORANGE, GREEN, GREY)
"""Colours of methods."""
OTHER_MARKS: Final = "*hd>8"
"""Of methods that have no style above, each with every colour in turn."""

PARTS: Final[Mapping[str, Colour]] = {
    "parameters": Colour("#33628f", "#5b95cc"),
    "gradients": Colour("#d98c1f", "#e0a145"),
    "optimizer state": Colour("#7f69b3", "#9c86d1"),
    "activations": Colour("#3fa08f", "#45ac9a"),
    "input": Colour("#9c7a4d", "#b3925f"),
    "other": Colour("#8d97a0", "#78828b"),
    "fixed": Colour("#33628f", "#5b95cc"),
    "with the batch": Colour("#3fa08f", "#45ac9a"),
}
"""What bytes are; the last two where the line alone is known."""
UNNAMED: Final = Colour("#d4739a", "#dc83a7")
"""Of any other kind."""
COLOURS: Final = (*dict.fromkeys((*METHODS, *PARTS.values(), UNNAMED)),)
"""Everything that a page has to name."""

BARS: Final = 40
"""The most bars of a figure; of more batch sizes a method keeps its smallest and its largest."""
BEYOND: Final = 3.0
"""Times the largest batch that ran: curves are drawn no further."""
STEPS: Final = 60
"""Points of a curve."""
FAR: Final = 4.0
"""A score of so many times the point is drawn at the edge."""
LABELS: Final = 0.055
"""What a label needs of the height of the axes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure for a page."""

    title: str
    svg: Markup
    told: str
    """What it shows, in sentences."""
    key: tuple[tuple[str, str], ...] = ()
    """Names of colours of the page, and what they stand for."""


def styles_of(methods: Iterable[str]) -> dict[str, Style]:
    """A style for each method; the same on every page for those that have a name here, and the others apart."""
    methods = list(dict.fromkeys(methods))
    others = [method for method in methods if method not in STYLES]
    count = len(METHODS)
    new = {
        method: Style(METHODS[place % count].light, OTHER_MARKS[place // count % len(OTHER_MARKS)])
        for place, method in enumerate(others)
    }
    return {method: STYLES.get(method) or new[method] for method in methods}


# ---------------------------------------------------------------------- memory by kind


def memory(rows: Sequence[Row], kinds: Kinds, name: str) -> Picture | None:
    """Bytes at the peak by what they are, a bar for each method and batch size (Fig. 1 of the paper).

    Without `kinds` the line says what is fixed and what comes with the batch, at the batches that are predicted.
    """
    bars = _fewer(kinds) if kinds else _by_line(rows)
    if not bars:
        return None
    parts = list(dict.fromkeys(part for by_kind in bars.values() for part, nbytes in by_kind.items() if nbytes > 0))
    limit = rows[0].limit
    said = [
        f"{method} at batch {size} {format_bytes(sum(by_kind.values()))}" for (method, size), by_kind in bars.items()
    ]
    how = "Bytes at the peak by what they are" if kinds else "Peaks by the fitted line, what is fixed and the rest"
    return Picture(
        title="Memory by kind", svg=_svg(lambda: _draw_memory(bars, parts, limit), f"{name}memory", "Bars of memory."),
        told=f"{how}: {'; '.join(said)}. A dashed line is what steps may take.",
        key=tuple((PARTS.get(part, UNNAMED).variable, part) for part in parts),
    )  # fmt: skip


def _by_line(rows: Sequence[Row]) -> Kinds:
    plain, bars = plain_row(rows), {}
    for row in rows:
        bests = [one.predicted for one in (plain, row) if one is not None and one.predicted is not None]
        for size in sorted({best.size for best in bests}):
            if row.fitted is not None:
                cost = row.fitted.cost
                bars[row.method, size] = {"fixed": round(cost.beta), "with the batch": round(cost.alpha * size)}
    return bars


def _fewer(kinds: Kinds) -> Kinds:
    """By method, batch sizes ascending; the smallest and the largest of each where all would be too many."""
    order = list(dict.fromkeys(method for method, _ in kinds))
    sizes = {method: sorted(size for name, size in kinds if name == method) for method in order}
    if len(kinds) > BARS:
        sizes = {method: sorted({found[0], found[-1]}) for method, found in sizes.items()}
    return {(method, size): kinds[method, size] for method in order for size in sizes[method]}


def _draw_memory(bars: Kinds, parts: Sequence[str], limit: float) -> Figure:
    figure = _figure(1.0 + 0.24 * len(bars))
    height = figure.get_size_inches()[1]
    axes = _axes(figure, (0.27, 0.55 / height, 0.7, 1 - 0.75 / height), "bytes at the peak", "")
    starts = [0.0] * len(bars)
    for part in parts:
        widths = [float(by_kind.get(part, 0)) for by_kind in bars.values()]
        colour = PARTS.get(part, UNNAMED).light
        axes.barh(range(len(bars)), widths, left=starts, color=colour, height=0.72, edgecolor=PAPER, linewidth=0.4)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_yticks(range(len(bars)), [f"{_short(method)}, batch {size}" for method, size in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    right = max(starts)
    if isfinite(limit) and limit <= 2 * right:
        right = max(right, limit)
        axes.axvline(limit, color=INK, linewidth=1, linestyle=(0, (4, 2)))
    axes.set_xlim(0, 1.04 * right)
    _byte_ticks(axes.xaxis.set_ticks, 1.04 * right)
    return figure


# ---------------------------------------------------------------------- against the batch


def throughput(rows: Sequence[Row], styles: Mapping[str, Style], name: str) -> Picture | None:
    """Samples per second against the batch: points as seen, curves by the fits up to the limit (Fig. 4, 5)."""
    drawn = [row for row in rows if _samples(row).seconds]
    if not drawn:
        return None
    said = []
    for row in drawn:
        bests = ((row.predicted, "predicted"), (row.measured, row.experiment.seen))
        told = [
            f"{best.throughput:.4g} samples/s {how} at batch {best.size}" for best, how in bests if best is not None
        ]
        said.append(f"{row.method} {' and '.join(told)}")
    return Picture(
        title="Throughput against batch",
        svg=_svg(lambda: _draw_throughput(drawn, styles), f"{name}throughput", "Throughput against batch."),
        told=f"Points are {rows[0].experiment.seen}, curves are by the fits and end at the largest batch that fits: "
        f"{'; '.join(said)}.",
    )  # fmt: skip


def _draw_throughput(rows: Sequence[Row], styles: Mapping[str, Style]) -> Figure:
    figure = _figure(4.4)
    axes = _axes(figure, (0.08, 0.12, 0.7, 0.85), "batch", "samples per second")
    right, ends = _right(rows), []
    for row in rows:
        colour = styles[row.method].colour
        speeds = {size: size / took for size, took in sorted(_samples(row).seconds.items())}
        _points(axes, speeds, styles[row.method])
        end = float(max(speeds)), speeds[max(speeds)]
        if row.fitted is not None and (last := min(row.fitted.largest, right)) >= 1:
            cost = row.fitted.cost
            sizes = [1 + (last - 1) * step / STEPS for step in range(STEPS + 1)]
            axes.plot(sizes, [cost.throughput(size) for size in sizes], color=colour, linewidth=1.4, zorder=3)
            end = last, cost.throughput(last)
            if row.fitted.largest <= right:
                axes.plot(*end, color=colour, marker="|", markersize=13, markeredgewidth=2, zorder=4)
        ends.append(End(row.method, colour, *end))
    axes.set_xlim(0, 1.03 * right)
    axes.set_ylim(bottom=0)
    _label(axes, ends)
    return figure


def fits(rows: Sequence[Row], styles: Mapping[str, Style], name: str) -> Picture | None:
    """Both lines with their points, and R (Figs. 7 and 8)."""
    fitted = [(row, row.fitted) for row in rows if row.fitted is not None]
    if not fitted:
        return None
    said = [f"{row.method} {_r(both.memory.r)} and {_r(both.law_of_time.r)}" for row, both in fitted]
    return Picture(
        title="Fits", svg=_svg(lambda: _draw_fits(fitted, styles), f"{name}fits", "Fits of memory and time."),
        told=f"Memory at the left and seconds of a step at the right against the batch, with the fitted lines; "
        f"R of memory and time: {'; '.join(said)}. A dashed line is what steps may take.",
    )  # fmt: skip


def _draw_fits(fitted: Sequence[tuple[Row, Fitted]], styles: Mapping[str, Style]) -> Figure:
    figure = _figure(4.4)
    memories = _axes(figure, (0.09, 0.12, 0.28, 0.82), "batch", "")
    times = _axes(figure, (0.6, 0.12, 0.25, 0.82), "batch", "")
    right, ends, later, top = _right([row for row, _ in fitted]), [], [], 0.0
    for row, both in fitted:
        style, last = styles[row.method], min(max(both.largest, both.most), right)
        _points(memories, _samples(row).peaks, style)
        _points(times, _samples(row).seconds, style)
        knee = min(both.cost.knee, last)
        memories.plot([0, last], [both.cost.nbytes(0), both.cost.nbytes(last)], color=style.colour, linewidth=1.2)
        bent = [0, knee, last] if knee else [0, last]
        times.plot(bent, [both.cost.seconds(size) for size in bent], color=style.colour, linewidth=1.2)
        ends.append(End(f"{_short(row.method)} {_r(both.memory.r)}", style.colour, last, both.cost.nbytes(last)))
        later.append(End(f"{_short(row.method)} {_r(both.law_of_time.r)}", style.colour, last, both.cost.seconds(last)))
        top = max(top, both.cost.nbytes(last), *_samples(row).peaks.values())
    limit = fitted[0][0].limit
    if isfinite(limit) and limit <= 2 * top:
        memories.axhline(limit, color=INK, linewidth=1, linestyle=(0, (4, 2)))
        top = max(top, limit)
    memories.set_title("memory", color=SOFT, fontsize=10)
    times.set_title("time of a step", color=SOFT, fontsize=10)
    for axes in (memories, times):
        axes.set_xlim(0, 1.03 * right)
    memories.set_ylim(0, 1.05 * top)
    times.set_ylim(bottom=0)
    _byte_ticks(memories.yaxis.set_ticks, 1.05 * top)
    times.yaxis.set_major_formatter(lambda seconds, _: short_seconds(max(seconds, 0.0)))
    _label(memories, ends)
    _label(times, later)
    return figure


# ---------------------------------------------------------------------- scores


def scores(rows: Sequence[Row], styles: Mapping[str, Style], name: str) -> Picture | None:
    """Throughput over plain against score over point: right of 1 a method is said to pay, above 1 it does (Fig. 10)."""
    placed = [(row, row.times_point, *_gains(row, rows)) for row in rows if row.times_point is not None]
    placed = [one for one in placed if one[2] is not None or one[3] is not None]
    if not placed:
        return None
    said = [
        f"{row.method} has {at:.3g} times the point and {_both(predicted, measured, row.experiment.seen)}"
        for row, at, predicted, measured in placed
    ]  # fmt: skip
    return Picture(
        title="Score against point",
        svg=_svg(lambda: _draw_scores(placed, styles), f"{name}scores", "Score against point."),
        told=f"Throughput as a multiple of the plain one against the score as a multiple of the point; filled where "
        f"{rows[0].experiment.seen}, hollow where predicted: {'; '.join(said)}.",
    )  # fmt: skip


Placed: TypeAlias = tuple[Row, float, float | None, float | None]


def _draw_scores(placed: Sequence[Placed], styles: Mapping[str, Style]) -> Figure:
    figure = _figure(3.6)
    axes = _axes(figure, (0.08, 0.15, 0.7, 0.82), "score, times the point", "times plain's throughput")
    ends = []
    for row, at, predicted, measured in placed:
        (colour, mark), at = styles[row.method], min(max(at, -0.2), FAR)
        for gain, filled in ((predicted, False), (measured, True)):
            if gain is not None:
                axes.plot(
                    at, gain, color=colour, marker=mark, markersize=7, linestyle="none", zorder=4,
                    markerfacecolor=colour if filled else PAPER, clip_on=False,
                )  # fmt: skip
        if predicted is not None and measured is not None:
            axes.plot([at, at], [predicted, measured], color=colour, linewidth=0.8, zorder=3)
        ends.append(End(row.method, colour, at, measured if measured is not None else predicted or 0.0))
    axes.axvline(1, color=INK, linewidth=1, linestyle=(0, (4, 2)))
    axes.axhline(1, color=INK, linewidth=1, linestyle=(0, (1, 2)))
    axes.set_xlim(-0.25, max(1.6, 1.05 * max(min(at, FAR) for _, at, _, _ in placed)))
    axes.set_ylim(0, max(1.1, axes.get_ylim()[1]))
    _label(axes, ends)
    return figure


def _gains(row: Row, rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """Predicted and measured; None where that is not known or not finite."""
    plain = plain_row(rows)
    fastest = None if plain is None or plain.measured is None else plain.measured.throughput
    measured = None if not fastest or row.measured is None else row.measured.throughput / fastest
    return ratios(rows).get(row.method), measured


# ---------------------------------------------------------------------- gains


def gain(sweep: Sweep, styles: Mapping[str, Style], name: str) -> Picture | None:
    """Highest throughput as a multiple of the plain one against depth, width or devices (Figs. 9 and 11)."""
    lines = {
        method: tuple(
            [one for one in gains(sweep, method, of) if isfinite(one[1])]
            for of in (SweepPoint.predicted, SweepPoint.measured)
        )
        for method in sweep.methods
    }
    lines = {method: both for method, both in lines.items() if any(both)}
    if not lines:
        return None
    return Picture(
        title=f"Gain by {'number of devices' if sweep.over == 'devices' else sweep.over}",
        svg=_svg(lambda: _draw_gain(sweep, lines, styles), f"{name}gain", f"Gain by {sweep.over}."),
        told="The highest throughput of each method as a multiple of the plain one; lines are predicted, marks "
        f"{sweep.seen}. A dotted line is where the best method begins to pay.",
    )  # fmt: skip


Pairs: TypeAlias = list[tuple[float, float]]


def _draw_gain(sweep: Sweep, lines: Mapping[str, Sequence[Pairs]], styles: Mapping[str, Style]) -> Figure:
    figure = _figure(3.8)
    devices = sweep.over == "devices"
    axes = _axes(figure, (0.08, 0.14, 0.7, 0.83), sweep.unit, "times plain's throughput")
    if devices:
        axes.set_xscale("log", base=2)
    ends = []
    for method, (predicted, measured) in lines.items():
        colour, mark = styles[method]
        if predicted:
            axes.plot(*zip(*predicted, strict=True), color=colour, linewidth=1.5, zorder=3)
        if measured:
            axes.plot(
                *zip(*measured, strict=True), color=colour, marker=mark, markersize=5, markeredgecolor=PAPER,
                markeredgewidth=0.5, linewidth=0 if predicted else 1, zorder=4,
            )  # fmt: skip
        ends.append(End(method, colour, *(predicted or measured)[-1]))
    axes.axhline(1, color=INK, linewidth=1, linestyle=(0, (4, 2)))
    found = best_crossover(sweep)
    if found is not None and found.below is not None:
        at = found.first if devices or found.at is None else found.at
        axes.axvline(at, color=INK, linewidth=1, linestyle=(0, (1, 2)))
    if devices:
        values = [point.value for point in sweep.points]
        axes.xaxis.set_ticks(values, [f"{value:g}" for value in values])
        axes.xaxis.set_ticks([], minor=True)
    axes.set_ylim(bottom=0)
    _label(axes, ends)
    return figure


# ---------------------------------------------------------------------- common


def _svg(draw: Callable[[], Figure], name: str, told: str) -> Markup:
    return svg_of(draw, COLOURS, name=name, told=told)


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(10, height), facecolor=PAPER)


def _axes(figure: Figure, place: tuple[float, float, float, float], below: str, beside: str) -> Axes:
    axes = figure.add_axes(place, facecolor="none")
    axes.set_xlabel(below, color=SOFT)
    axes.set_ylabel(beside, color=SOFT)
    frameless(axes)
    axes.set_axisbelow(True)
    return axes


def _points(axes: Axes, points: Mapping[int, float], style: Style) -> None:
    sizes = sorted(points)
    axes.plot(
        sizes, [points[size] for size in sizes], color=style.colour, marker=style.mark, markersize=4.5,
        markeredgecolor=PAPER, markeredgewidth=0.5, linestyle="none", zorder=4,
    )  # fmt: skip


def _byte_ticks(set_ticks: Callable[[Sequence[float], Sequence[str]], object], top: float) -> None:
    marks = round_bytes(top, 4)
    set_ticks(marks, [short_bytes(mark) for mark in marks])


def _label(axes: Axes, ends: Sequence[End]) -> None:
    """Write beside the axes what each line is, as near to its height as the others let it."""
    heights = spread([min(max(end.place_in(axes)[1], 0.0), 1.0) for end in ends], LABELS)
    for end, height in zip(ends, heights, strict=True):
        end._replace(text=_short(end.text)).write(axes, (1.03, height), before=True, zorder=5)


def _short(name: str) -> str:
    """A name as one line of a picture."""
    name = " ".join("".join(character if character.isprintable() else " " for character in name).split())
    return name if len(name) <= 30 else f"{name[:29]}…"


def _samples(row: Row) -> Samples:
    return row.experiment.methods[row.method]


def _right(rows: Sequence[Row]) -> float:
    """How far the batch goes: to the largest that fits, but not far beyond what ran."""
    most = max(max(_samples(row).ran) for row in rows)
    fitting = [row.fitted.largest for row in rows if row.fitted is not None]
    return max(min(max(fitting, default=0.0), BEYOND * most), float(most))


def _r(r: float | None) -> str:
    return "no R" if r is None else f"R {r:.4f}"


def _both(predicted: float | None, measured: float | None, seen: str) -> str:
    parts = [
        f"{gain:.3f} times plain's throughput {how}"
        for gain, how in ((predicted, "predicted"), (measured, seen)) if gain is not None
    ]  # fmt: skip
    return " and ".join(parts)
