"""A run as one HTML file that needs nothing else: no network, no other file, no script to be readable."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from spillway.ir import StepReport, Timeline
from spillway.report import charts
from spillway.report.drawing import template
from spillway.report.figures import NO_BUDGET, hidden_share, highest_peak, recomputed_share, seconds_per_step
from spillway.units import format_bytes

ROWS: Final = 400
"""Longest table of steps; of more steps, the first and the last are shown, and how many are not."""

_NOT_SHOWN: Final = {"format", "version", "budget_bytes", "workload"}
"""Parts of a header that stand elsewhere on the page, or say nothing to a reader."""


def write_report(
    path: str | os.PathLike[str], header: Mapping[str, Any], steps: Sequence[StepReport],
    timelines: Sequence[Timeline], foresight: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write a page about a run. A file that stands at `path` is replaced; OSError where the system refuses.

    Arguments:
        header: As in a run file: `budget_bytes`, `method`, versions, machine.
        steps: What every step did.
        timelines: Of some steps, or none: those are drawn.
        foresight: What a referee of pilots tells (`Referee.told`).
    """
    Path(path).write_text(render(header, steps, timelines, foresight), encoding="utf-8")


def render(
    header: Mapping[str, Any], steps: Sequence[StepReport], timelines: Sequence[Timeline],
    foresight: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """The page that `write_report` writes."""
    left_out = max(len(steps) - ROWS, 0)
    # The budget that the header names, or the steps if it names none.
    budget = header.get("budget_bytes", steps[0].allowed if steps else None)
    budget = budget if isinstance(budget, int) and budget < NO_BUDGET else None
    return template("page.html.jinja").render(
        workload=header.get("workload", "A run"),
        how="simulated" if "simulated" in header else "measured",
        facts={n: "none" if value is None else str(value) for n, value in header.items() if n not in _NOT_SHOWN},
        budget=budget, figures=_figures(steps), sizes=charts.draw_sizes(steps, budget),
        pictures=[
            (timeline, charts.draw(timeline), charts.draw_lanes(timeline), charts.draw_window(timeline))
            for timeline in timelines
        ],
        steps=[*steps[: ROWS // 2], *steps[-ROWS // 2 :]] if left_out else list(steps), left_out=left_out,
        logged=sorted({name for step in steps for name in step.logged}),
        chart={"width": charts.WIDTH, "height": charts.HEIGHT, "bars_height": charts.BARS_HEIGHT},
        lanes_height=charts.LANES_HEIGHT, window_height=charts.WINDOW_HEIGHT, row=charts.ROW, radius=charts.RADIUS,
        names_of_work=charts.NAMES, foresight=foresight,
        no_budget=NO_BUDGET, recomputed_share=recomputed_share, hover=_hover,
    )  # fmt: skip


def _figures(steps: Sequence[StepReport]) -> dict[str, Any]:
    measured = [step for step in steps if step.peak_measured]
    names = (
        "stall_seconds",
        "room_seconds",
        "recomputed_ops",
        "recomputed_blocks",
        "bytes_out",
        "bytes_in",
        "transfer_seconds",
    )
    return {
        **{name: sum(getattr(step, name) for step in steps) for name in (*names, "dropped_bytes")},
        "peak": highest_peak(measured or steps), "peak_measured": bool(measured),
        "peak_rss": max((step.peak_rss_bytes for step in steps), default=0),
        "seconds": seconds_per_step([step.seconds for step in steps]), "hidden_share": hidden_share(steps),
        "recomputed_share": recomputed_share(steps), "expected_steps": len(steps) - len(measured),
    }  # fmt: skip


def _hover(drawn: charts.Chart, lanes: charts.Lanes | None) -> list[list[str]]:
    """For every column what a reader who points at it is told, line by line."""
    told = []
    for number, column in enumerate(drawn.columns):
        ops = f"op {column.first}" if column.first == column.last else f"ops {column.first} to {column.last}"
        parts = [*reversed(column.by_kind.items()), *column.changed.items()]
        lines = [f"{what}: {format_bytes(nbytes)}" for what, nbytes in parts if nbytes]
        below = [] if lanes is None else lanes.told[number]
        told.append([f"{ops}: {format_bytes(column.resident)} resident", *lines, *below])
    return told
