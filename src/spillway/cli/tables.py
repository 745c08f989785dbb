"""Rows of runs as a table, and what is said about them besides."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from spillway.report.figures import format_share
from spillway.runs.comparison import FINAL_STATE, RefusedRow, Row
from spillway.units import format_bytes, format_seconds

WIDTH_OF_FILES = 160
"""Columns of a table that does not go to a terminal."""

COLUMNS = (
    "budget",
    "peak, our account",
    "peak RSS above start",
    "time per step",
    "times plain",
    "to disk",
    "recomputed",
    "compared with plain",
)


def print_rows(workload: str, method: str, rows: Sequence[Row | RefusedRow]) -> None:
    """Print the table of one method under several budgets to standard output."""
    _print(_table(f"{workload}, {_steps(rows)}, method {method}, one thread"), rows, [[] for _ in rows])


def print_methods(workload: str, rows: Sequence[Row | RefusedRow]) -> None:
    """Print the table of several methods under one budget to standard output; the plain run comes first."""
    table = _table(f"{workload}, {_steps(rows)}, methods side by side; ops recomputed, or blocks", "method")
    _print(table, rows, [[row.method or "plain"] for row in rows])


def _steps(rows: Sequence[Row | RefusedRow]) -> str:
    steps = max((row.steps for row in rows if isinstance(row, Row)), default=0)
    return f"{steps} {'step' if steps == 1 else 'steps'}"


def _table(title: str, *first: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="")
    for name in first:
        table.add_column(name)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == COLUMNS[-1] else "right")
    return table


def _print(table: Table, rows: Sequence[Row | RefusedRow], first: Sequence[Sequence[str]]) -> None:
    for row, cells in zip(rows, first, strict=True):
        table.add_row(*cells, *(_refused(row) if isinstance(row, RefusedRow) else _cells(row)))
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


def _cells(row: Row) -> list[str]:
    return [
        _budget(row),
        "" if row.peak_bytes is None else format_bytes(row.peak_bytes),
        format_bytes(row.peak_rss_bytes),
        format_seconds(row.seconds_per_step),
        "" if row.ratio is None else f"{row.ratio:.2f}",
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
