"""A comparison as one picture, as a file of its own or within a page that needs nothing else.

One function draws. In the page the colours become the page's own, so that they change with light and dark.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from markupsafe import Markup

from spillway.report import drawing
from spillway.report.charts import round_bytes, short_bytes
from spillway.report.drawing import INK, PAPER, SOFT, End, Family
from spillway.simulation.sweep import Comparison, Row, bound_sentence, missing_sentence, spread_sentence
from spillway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAMILIES: Final = (
    Family(drawing.GREY, ("keep-all", "uvm", "zero-offload")),
    Family(drawing.YELLOW, ("lru", "auto")),
    Family(drawing.PINK, ("delta", "delta-published")),
    Family(drawing.BLUE, ("dtr", "dtr-eqclass", "dtr-local", "largest", "msps")),
    Family(drawing.GREEN, ("sqrt-n", "checkmate", "checkpoint", "mimose", "mimose-published")),
    Family(drawing.ORANGE, ("swap", "swap-prefetch", "window", "window-improved", "window-published", "lms")),
    Family(drawing.VIOLET, ("dynn-offload", "dynn-offload-published")),
)
"""The last is for whatever else."""

LABELS: Final = 0.044
"""What a label needs of the height of the axes."""

FAR: Final = 0.3
"""A line that ends further to the right than this share of the axes has its label there, and not at the left."""

_TICKS: Final = (1, 1.2, 1.5, 2, 3, 5, 7)
"""Times a power of ten."""


def write_png(path: str | os.PathLike[str], comparison: Comparison) -> None:
    """Write the picture as a PNG. OSError where the system refuses, UsageError without matplotlib."""
    draw(comparison).savefig(path, format="png", dpi=160)


def write_page(path: str | os.PathLike[str], comparison: Comparison) -> None:
    """Write the page. OSError where the system refuses, UsageError without matplotlib."""
    Path(path).write_text(render(comparison), encoding="utf-8")


def render(comparison: Comparison) -> str:
    """The page that `write_page` writes."""
    rows = defaultdict(list)
    for row in comparison.rows:
        rows[row.method].append(row)
    return drawing.template("comparison.html.jinja").render(
        comparison=comparison, problem=comparison.problem, rows=rows, picture=svg(comparison),
        colours=[(family.colour.variable, *family.colour) for family in FAMILIES],
        bounds=bound_sentence(comparison), missing=missing_sentence(comparison),
        spread=spread_sentence(comparison.problem),
    )  # fmt: skip


def draw(comparison: Comparison) -> Figure:
    """Seconds against peak, a line for every method, with the lower bound. Raises UsageError without matplotlib."""
    drawing.check_drawing()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), facecolor=PAPER)
    axes = figure.add_axes((0.19, 0.11, 0.69, 0.76), facecolor="none")
    problem = comparison.problem
    figure.text(0.02, 0.95, f"{problem.workload} on {problem.device.name}", color=INK, fontsize=13, weight="bold")
    figure.text(
        0.02, 0.91, f"simulated seconds of a step against its peak; plain: {format_seconds(problem.plain_seconds)} in "
        f"{format_bytes(problem.plain_peak)}. {missing_sentence(comparison)}", color=SOFT, fontsize=9.5,
    )  # fmt: skip
    lines = defaultdict[str, list[Row]](list)
    for row in comparison.rows:
        if row.seconds is not None:
            lines[row.method].append(row)
    ends = list[End]()
    for method, rows in lines.items():
        colour, mark = drawing.style_of(method, FAMILIES)
        peaks, seconds = [float(row.peak_bytes or 0) for row in rows], [row.seconds or 0.0 for row in rows]
        axes.plot(
            peaks, seconds, color=colour, marker=mark, linewidth=1.5, markersize=5.5, markeredgecolor=PAPER,
            markeredgewidth=0.6, zorder=3,
        )  # fmt: skip
        ends.append(End(method, colour, *min(zip(peaks, seconds, strict=True))))
    ends += _bounds(axes, comparison)
    _scales(axes, comparison)
    _label(axes, ends)
    return figure


def svg(comparison: Comparison) -> Markup:
    """The picture as an element of a page, its colours by the names that the page gives them."""
    return drawing.svg_of(lambda: draw(comparison), [family.colour for family in FAMILIES])


def _bounds(axes: Axes, comparison: Comparison) -> list[End]:
    """The plain step's seconds all along; the bound of what only recomputes where there is one."""
    plain = comparison.problem.plain_seconds
    axes.axhline(plain, color=INK, linewidth=1, linestyle=(0, (1, 2)), zorder=2)
    axes.annotate(
        "plain step: nothing takes less", xy=(1, plain), xycoords=("axes fraction", "data"), xytext=(0, -3),
        textcoords="offset points", color=INK, fontsize=9, ha="right", va="top", zorder=4,
    )  # fmt: skip
    points = [(bound.budget_bytes, bound.seconds) for bound in comparison.bounds if bound.kind == "cut"]
    if not points:
        return []
    budgets, seconds = zip(*points, (comparison.problem.plain_peak, plain), strict=True)
    axes.plot(budgets, seconds, color=INK, linewidth=1.8, linestyle=(0, (5, 2)), zorder=2)
    return [End("recompute only: lower bound", INK, float(budgets[0]), seconds[0])]


def _scales(axes: Axes, comparison: Comparison) -> None:
    """Bytes from left to right, seconds upwards, times the plain step where they spread far; ticks at round numbers."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    problem, drawn = comparison.problem, [row for row in comparison.rows if row.seconds is not None]
    plain = problem.plain_seconds
    highest = [bound.seconds for bound in comparison.bounds]
    top = max([row.seconds or 0.0 for row in drawn] + highest, default=plain)
    top = max(top, plain * 1.05)
    right = max([float(row.peak_bytes or 0) for row in drawn] + [float(problem.plain_peak)])
    left = min([float(row.peak_bytes or 0) for row in drawn], default=0.0)
    margin = max((right - left) * 0.03, right * 0.01)
    axes.set_xlim(max(left - margin, 0.0), right + margin)
    if plain > 0:
        axes.set_yscale("log")
        reach = math.log(top / plain)
        axes.set_ylim(plain * math.exp(-0.07 * reach), top * math.exp(0.05 * reach))
    marks = [nbytes for nbytes in round_bytes(right, 7) if nbytes >= left - margin]
    axes.xaxis.set_major_locator(FixedLocator(marks))
    axes.xaxis.set_major_formatter(FixedFormatter([short_bytes(mark) for mark in marks]))
    times = _multiples(top / plain) if plain > 0 else [1.0]
    axes.yaxis.set_major_locator(FixedLocator([plain * one for one in times]))
    axes.yaxis.set_major_formatter(FixedFormatter([f"{format_seconds(plain * one)} = {one:g} x" for one in times]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.tick_right()
    axes.set_xlabel("peak, by account", color=SOFT)
    drawing.frameless(axes)


def _multiples(top: float) -> list[float]:
    """Five to ten round multiples of the plain step from 1 to `top`."""
    if top <= 2:
        apart = next(one for one in (0.01, 0.02, 0.05, 0.1, 0.2) if (top - 1) / one <= 8)
        return [round(1 + apart * index, 4) for index in range(int((top - 1) / apart + 1e-9) + 1)]
    decades = range(int(math.log10(top)) + 1)
    return [one * 10**decade for decade in decades for one in _TICKS if one * 10**decade <= top]


def _label(axes: Axes, ends: Sequence[End]) -> None:
    """Write what each line is beside its end, as near to its height as the others let it: at the left where the line
    ends there, else within the picture."""
    places = [end.place_in(axes) for end in ends]
    for far in (False, True):
        group = [(end, place) for end, place in zip(ends, places, strict=True) if (place[0] > FAR) is far]
        heights = drawing.spread([place[1] for _, place in group], LABELS)
        box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1, "alpha": 0.8} if far else None
        for (end, place), height in zip(group, heights, strict=True):
            end.write(axes, (place[0] - 0.03 if far else -0.02, height), zorder=4, bbox=box)
