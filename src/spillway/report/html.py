"""A run as one HTML file that needs nothing else: no network, no other file, no script to be readable."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from spillway.ir import StepReport, Timeline
from spillway.report import chart
from spillway.report.axis import WIDTH
from spillway.report.by_size import RADIUS, draw_sizes
from spillway.report.figures import (
    NO_BUDGET,
    format_share,
    hidden_share,
    highest_peak,
    recomputed_share,
    seconds_per_step,
)
from spillway.report.lanes import LANES_HEIGHT, NAMES, ROW, Lanes, draw_lanes
from spillway.units import Bytes, format_bytes, format_seconds

ROWS: Final = 400
"""Longest table of steps; of more steps, the first and the last are shown, and how many are not."""

_NOT_SHOWN: Final = {"format", "version", "budget_bytes", "workload"}
"""Parts of a header that stand elsewhere on the page, or say nothing to a reader."""


def write_report(
    path: str | os.PathLike[str],
    header: Mapping[str, Any],
    steps: Sequence[StepReport],
    timelines: Sequence[Timeline],
) -> None:
    """Write a page about a run. A file that stands at `path` is replaced; OSError where the system refuses.

    Arguments:
        header: As in a run file: `budget_bytes`, `method`, versions, machine.
        steps: What every step did.
        timelines: Of some steps, or none: those are drawn.
    """
    Path(path).write_text(render(header, steps, timelines), encoding="utf-8")


def render(header: Mapping[str, Any], steps: Sequence[StepReport], timelines: Sequence[Timeline]) -> str:
    """The page that `write_report` writes."""
    shown, left_out = _shown(steps)
    return _template().render(
        workload=header.get("workload", "A run"),
        how="simulated" if "simulated" in header else "measured",
        facts={name: _fact(value) for name, value in header.items() if name not in _NOT_SHOWN},
        budget=_budget(header, steps),
        figures=_figures(steps),
        sizes=draw_sizes(steps, _budget(header, steps)),
        pictures=[(timeline, chart.draw(timeline), draw_lanes(timeline)) for timeline in timelines],
        steps=shown,
        left_out=left_out,
        logged=sorted({name for step in steps for name in step.logged}),
    )


def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("spillway.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"nbytes": format_bytes, "duration": format_seconds, "share": format_share}
    environment.globals |= {
        "chart": {"width": WIDTH, "height": chart.HEIGHT, "bars_height": chart.BARS_HEIGHT},
        "lanes_height": LANES_HEIGHT,
        "row": ROW,
        "radius": RADIUS,
        "names_of_work": NAMES,
        "no_budget": NO_BUDGET,
        "recomputed_share": recomputed_share,
        "hover": _hover,
    }
    return environment.get_template("page.html.jinja")


def _fact(value: Any) -> str:
    return "none" if value is None else str(value)


def _budget(header: Mapping[str, Any], steps: Sequence[StepReport]) -> Bytes | None:
    """The budget that the header names, or the steps if it names none."""
    budget = header.get("budget_bytes", steps[0].allowed if steps else None)
    return budget if isinstance(budget, int) and budget < NO_BUDGET else None


def _figures(steps: Sequence[StepReport]) -> dict[str, Any]:
    measured = [step for step in steps if step.peak_measured]
    return {
        "peak": highest_peak(measured or steps),
        "peak_measured": bool(measured),
        "peak_rss": max((step.peak_rss_bytes for step in steps), default=0),
        "seconds": seconds_per_step([step.seconds for step in steps]),
        "stall_seconds": sum(step.stall_seconds for step in steps),
        "recomputed_share": recomputed_share(steps),
        "recomputed_ops": sum(step.recomputed_ops for step in steps),
        "recomputed_blocks": sum(step.recomputed_blocks for step in steps),
        "expected_steps": sum(not step.peak_measured for step in steps),
        "bytes_out": sum(step.bytes_out for step in steps),
        "bytes_in": sum(step.bytes_in for step in steps),
        "transfer_seconds": sum(step.transfer_seconds for step in steps),
        "hidden_share": hidden_share(steps),
        "dropped_bytes": sum(step.dropped_bytes for step in steps),
    }


def _shown(steps: Sequence[StepReport]) -> tuple[list[StepReport], int]:
    """The steps of the table, and how many between its two halves are left out."""
    if len(steps) <= ROWS:
        return list(steps), 0
    return [*steps[: ROWS // 2], *steps[-ROWS // 2 :]], len(steps) - ROWS


def _hover(drawn: chart.Chart, lanes: Lanes | None) -> list[list[str]]:
    """For every column what a reader who points at it is told, line by line."""
    told = [_told(column) for column in drawn.columns]
    return told if lanes is None else [[*above, *below] for above, below in zip(told, lanes.told, strict=True)]


def _told(column: chart.Column) -> list[str]:
    ops = f"op {column.first}" if column.first == column.last else f"ops {column.first} to {column.last}"
    kinds = [f"{kind}: {format_bytes(nbytes)}" for kind, nbytes in reversed(column.by_kind.items()) if nbytes]
    changes = [f"{change}: {format_bytes(nbytes)}" for change, nbytes in column.changed.items() if nbytes]
    return [f"{ops}: {format_bytes(column.resident)} resident", *kinds, *changes]
