"""Rows of runs as a table, and what is said about them besides."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from spillway.report.figures import format_share
from spillway.subprocess_runs.rows import FINAL_STATE, RefusedRow, Row
from spillway.units import format_bytes, format_seconds

WIDTH_OF_FILES = 160
"""Columns of a table that does not go to a terminal."""

BEFORE_TIMES = ("budget", "peak, our account", "peak RSS above start")
TIMES = ("time per step", "times plain")
LATER_TIMES = ("time, later half", "times plain")
AFTER_TIMES = ("to disk", "recomputed", "compared with plain")


def print_rows(workload: str, method: str, rows: Sequence[Row | RefusedRow]) -> None:
    """Print the table of one method under several budgets to standard output."""
    table = _table(f"{workload}, {_steps(rows)}, method {method}, one thread", (), TIMES)
    for row in rows:
        table.add_row(*_cells(row))
    _print(table)


def print_methods(workload: str, rows: Sequence[Row | RefusedRow]) -> None:
    """Print the table of several methods under one budget to standard output; the plain run comes first."""
    what = "methods side by side, freed memory kept; recomputed: ops, or blocks"
    table = _table(f"{workload}, {_steps(rows)}, {what}", ("method",), LATER_TIMES)
    for row in rows:
        table.add_row(row.method or "plain", *_cells(row, later=True))
    _print(table)


def _steps(rows: Sequence[Row | RefusedRow]) -> str:
    steps = max((row.steps for row in rows if isinstance(row, Row)), default=0)
    return f"{steps} {'step' if steps == 1 else 'steps'}"


def _table(title: str, first: tuple[str, ...], times: tuple[str, str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="")
    for name in first:
        table.add_column(name)
    for name in (*BEFORE_TIMES, *times, *AFTER_TIMES):
        table.add_column(name, justify="left" if name == AFTER_TIMES[-1] else "right")
    return table


def _print(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES).print(table)


def page_facts(workload: str, row: Row) -> dict[str, Any]:
    """What a page says of a run besides its run file."""
    facts: dict[str, Any] = {"workload": workload}
    if row.ratio is not None:
        facts |= {"time per step, times plain": f"{row.ratio:.2f}", "compared with plain": _verdict(row)}
    return facts


def broken_promises(rows: Sequence[Row | RefusedRow]) -> Iterator[str]:
    """A sentence for every run that was not the plain one bit for bit, or that went over its budget."""
    for row in rows:
        if isinstance(row, RefusedRow):
            continue
        run = (
            f"The run under {format_bytes(row.budget_bytes)}" if row.budget_bytes else "The run that only kept account"
        )
        if row.over_budget and row.peak_bytes is not None:
            yield f"{run} had a peak of {format_bytes(row.peak_bytes)}."
        if row.identical is False:
            yield f"{run} is not the plain one: it differs {_difference(row)}."


def _cells(row: Row | RefusedRow, *, later: bool = False) -> list[str]:
    if isinstance(row, RefusedRow):
        return _refused(row)
    seconds, ratio = (row.later_seconds, row.later_ratio) if later else (row.seconds_per_step, row.ratio)
    return [
        _budget(row),
        "" if row.peak_bytes is None else format_bytes(row.peak_bytes),
        format_bytes(row.peak_rss_bytes),
        format_seconds(seconds),
        "" if ratio is None else f"{ratio:.2f}",
        format_bytes(row.bytes_to_disk),
        format_share(row.recomputed_share),
        _verdict(row),
    ]


def _refused(row: RefusedRow) -> list[str]:
    smallest = format_bytes(row.smallest_budget_bytes)
    return [format_bytes(row.budget_bytes), "", "", "", "", "", "", f"refused: needs {smallest} or more"]


def _budget(row: Row) -> str:
    if row.budget_bytes is not None:
        return format_bytes(row.budget_bytes)
    return "plain" if row.method is None else "no budget"


def _verdict(row: Row) -> str:
    if row.identical is None or row.peak_bytes is None:
        return ""  # Nothing was compared, unless with itself.
    if not row.identical:
        return f"differs {_difference(row)}"
    return "identical" if row.method else "identical with account"


def _difference(row: Row) -> str:
    where = row.first_difference
    return f"in the {where}" if where == FINAL_STATE else f"from the loss of step {where} on"
