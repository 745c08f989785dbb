"""A run as one HTML file that needs nothing else: no network, no other file, no script to be readable."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final
from urllib.parse import quote

from spillway.ir import BlocksAtPeak, StepReport, Timeline
from spillway.report import charts, holders
from spillway.report.drawing import template
from spillway.report.figures import NO_BUDGET, hidden_share, highest_peak, recomputed_share, seconds_per_step
from spillway.units import Bytes, format_bytes

SEVERAL: Final = 4
"""Budgets of one run of which the heading names every one."""
ROWS: Final = 400
"""Longest table of steps; of more steps the first and the last are shown, and the link beside it has every one."""

_NOT_SHOWN: Final = {
    "format", "version", "budget_bytes", "workload", "start_rss_bytes", "plain_peak_bytes", "rss_above_start_bytes",
}  # fmt: skip
"""Parts of a header that stand elsewhere on the page, or say nothing to a reader."""


def render(
    header: Mapping[str, Any], steps: Sequence[StepReport], timelines: Sequence[Timeline],
    foresight: Mapping[str, Any] | None = None, blocks: BlocksAtPeak | None = None,
) -> str:  # fmt: skip
    """The page about a run.

    Arguments:
        header: As in a run file: `budget_bytes`, `method`, versions, machine. Where they are known also
            `start_rss_bytes`, the resident set without what the budget counts; `rss_above_start_bytes`, the highest
            one above that; and `plain_peak_bytes`, the peak of the same steps without a budget.
        timelines: Of some steps, or none: those are drawn.
        foresight: What a referee of pilots tells (`Referee.told`).
        blocks: What blocks held in the step with the highest peak, of a session of the block engine.
    """
    left_out = max(len(steps) - ROWS, 0)
    # Those of the steps, each once in their order, since `Session.budget` may have been set; `NO_BUDGET` and more is
    # none. The header's where the steps name none, or there are none.
    named = list(dict.fromkeys(min(step.allowed, NO_BUDGET) for step in steps if step.allowed > 0))
    budgets = named or [_known(header, "budget_bytes") or NO_BUDGET]
    budget = budgets[0] if len(budgets) == 1 and budgets[0] < NO_BUDGET else None
    figures, plain = _figures(steps), _known(header, "plain_peak_bytes")
    start = _known(header, "start_rss_bytes")
    above_start = _known(header, "rss_above_start_bytes") or (max(figures["peak_rss"] - start, 0) if start else 0)
    start = figures["peak_rss"] - above_start if above_start else 0
    reckoned = 0 if plain else max((timeline.plain_peak() for timeline in timelines), default=0)
    return template("page.html.jinja").render(
        workload=header.get("workload", "A run"),
        how="simulated" if "simulated" in header else "measured",
        facts={name: _fact(value) for name, value in header.items() if name not in _NOT_SHOWN},
        budget=budget, budgets=budgets, under=_under(budgets), figures=figures | {"above_start": above_start},
        plain=plain or reckoned, plain_known=bool(plain),
        sizes=charts.draw_sizes(steps, budget, plain), over_steps=charts.draw_steps(steps, budgets, plain, start),
        pictures=[_picture(timeline) for timeline in timelines],
        steps=[*steps[: ROWS // 2], *steps[-ROWS // 2 :]] if left_out else list(steps), left_out=left_out,
        every_step=_as_csv(steps), signatures=list(dict.fromkeys(step.signature for step in steps)),
        logged=sorted({name for step in steps for name in step.logged}),
        chart={"width": charts.WIDTH, "height": charts.HEIGHT, "bars_height": charts.BARS_HEIGHT},
        lanes_height=charts.LANES_HEIGHT, window_height=charts.WINDOW_HEIGHT, row=charts.ROW, radius=charts.RADIUS,
        names_of_work=charts.NAMES, foresight=foresight, blocks=blocks, holder_rows=holders.ROWS,
        no_budget=NO_BUDGET, recomputed_share=recomputed_share,
    )  # fmt: skip


def _under(budgets: Sequence[Bytes]) -> str:
    """In words."""
    told = ["no budget" if one >= NO_BUDGET else format_bytes(one) for one in budgets]
    if len(told) > SEVERAL:
        told[1:-1] = ["others"]
    return ("a budget of " if budgets[0] < NO_BUDGET else "") + ", then ".join(told)


def _known(header: Mapping[str, Any], name: str) -> Bytes:
    """A number of the header; 0 if it has none. Anybody may have written the file that it comes from."""
    found = header.get(name)
    return found if type(found) is int and 0 < found < NO_BUDGET else 0


def _fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    return "none" if value is None else str(value)


def _picture(timeline: Timeline) -> dict[str, Any]:
    plain = timeline.plain_peak()
    drawn, lanes = charts.draw(timeline, plain), charts.draw_lanes(timeline)
    return {
        "timeline": timeline, "drawn": drawn, "lanes": lanes, "slides": charts.draw_window(timeline), "plain": plain,
        "at_peak": holders.at_peak(timeline), "told": _told(timeline, drawn, lanes),
    }  # fmt: skip


def _as_csv(steps: Sequence[StepReport]) -> str:
    """Every figure of every step, as the address of a file that spreadsheets read; without what is always nothing."""
    names = [field.name for field in fields(StepReport) if field.name not in ("logged", "refusals")]
    names = [name for name in names if name == "step" or any(getattr(step, name) for step in steps)]
    logged = list(dict.fromkeys(name for step in steps for name in step.logged))
    refused = any(step.refusals for step in steps)
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow([*names, *["refusals"] * refused, *(f"logged {name}" for name in logged)])
    for step in steps:
        row = [getattr(step, name) for name in names] + [_fact(step.refusals)] * refused
        table.writerow([*row, *(step.logged.get(name, "") for name in logged)])
    return f"data:text/csv;charset=utf-8,{quote(text.getvalue())}"


def _figures(steps: Sequence[StepReport]) -> dict[str, Any]:
    measured = [step for step in steps if step.peak_measured]
    summed = (
        "stall_seconds", "room_seconds", "recomputed_ops", "recomputed_blocks", "bytes_out", "bytes_in",
        "transfer_seconds", "dropped_bytes",
    )  # fmt: skip
    return {
        **{name: sum(getattr(step, name) for step in steps) for name in summed},
        "peak": highest_peak(measured or steps), "peak_measured": bool(measured),
        "peak_rss": max((step.peak_rss_bytes for step in steps), default=0),
        "seconds": seconds_per_step([step.seconds for step in steps]), "hidden_share": hidden_share(steps),
        "recomputed_share": recomputed_share(steps), "expected_steps": len(steps) - len(measured),
    }  # fmt: skip


def _told(timeline: Timeline, drawn: charts.Chart, lanes: charts.Lanes | None) -> list[list[str]]:
    """For every column what a reader is told who points at it, or reads it as text, line by line."""
    told, largest = [], holders.largest_at(timeline, {column.fullest for column in drawn.columns})
    for number, column in enumerate(drawn.columns):
        ops = f"op {column.first}" if column.first == column.last else f"ops {column.first} to {column.last}"
        parts = [*reversed(column.by_kind.items()), *column.changed.items()]
        lines = [f"{what}: {format_bytes(nbytes)}" for what, nbytes in parts if nbytes]
        below = [] if lanes is None else lanes.told[number]
        held = [f"most: {line}" for line in largest.get(column.fullest, ())]
        told.append([f"{ops}: {format_bytes(column.resident)} resident", *lines, *below, *held])
    return told
