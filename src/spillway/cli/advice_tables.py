"""What `spillway advise` prints: the answer in a sentence, and the table of all methods."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from math import inf

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spillway.advisor.measurements import MB
from spillway.advisor.verdict import Row, as_measured, ratios, sentence
from spillway.cli.campaigns import Found
from spillway.cli.common import say
from spillway.cli.tables import WIDTH_OF_FILES
from spillway.units import format_bytes, format_seconds

HEADS = (
    "alpha",
    "beta",
    "R",
    "gamma",
    "delta",
    "R",
    "score/point",
    "batch",
    "samples/s",
    "x plain",
    "{seen}",
    "sure",
)


def print_found(found: Found) -> None:
    """The answer, the table, and what is to be said about either."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
    for line in found.sentences():
        say(console, line)
    console.print(_table(found.rows, found.lossy))
    for line in (*_warnings(found.rows), *found.remarks()):
        say(console, f"  {line}")


def print_answers(answers: Sequence[Sequence[Row]]) -> None:
    """Those that can be answered with their tables, then the others, a sentence each.

    In a table alpha and gamma are per sample, beta and delta fixed; samples/s is predicted, at the batch before it.
    """
    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
    answered = [rows for rows in answers if any(row.fitted for row in rows)]
    for rows in answered:
        say(console, sentence(rows))
        console.print(_table(rows))
        for warning in _warnings(rows):
            say(console, f"  {warning}")
        say(console, "")
    for rows in answers:
        if rows not in answered:
            say(console, sentence(rows))


def _warnings(rows: Sequence[Row]) -> Iterator[str]:
    return (f"{row.method}: {warning}" for row in rows for warning in row.warnings)


def _table(rows: Sequence[Row], lossy: Collection[str] = ()) -> Table:
    table = Table(title=f"steps may take {format_bytes(round(rows[0].limit))}", title_justify="left", title_style="")
    table.add_column("method")
    for head in HEADS:
        table.add_column(head.format(seen=rows[0].experiment.seen), justify="right")
    table.add_column("verdict", no_wrap=True)
    times = ratios(rows)
    for row in rows:
        table.add_row(escape(row.method) + " (lossy)" * (row.method in lossy), *_cells(row, times.get(row.method)))
    return table


def _cells(row: Row, times: float | None) -> list[str]:
    return [
        *_laws(row),
        _score(row),
        "" if row.predicted is None else str(row.predicted.size),
        "" if row.predicted is None else f"{row.predicted.throughput:.4g}",
        "" if times is None else f"{times:.3f}",
        as_measured(row),
        "" if row.sure is None else f"{row.sure:.0%}",
        row.verdict,
    ]


def _laws(row: Row) -> list[str]:
    if row.fitted is None:
        return [""] * 6
    memory, cost = row.fitted.memory, row.fitted.cost
    time = row.fitted.knee if cost.knee else row.fitted.time
    return [
        f"{memory.slope / MB:.2f} MB", format_bytes(round(memory.intercept)), _r(memory.r),
        format_seconds(cost.gamma), format_seconds(cost.delta), _r(time.r),
    ]  # fmt: skip


def _r(r: float | None) -> str:
    return "" if r is None else f"{r:.3f}"


def _score(row: Row) -> str:
    """The score as a multiple of the point, as the paper draws it."""
    if row.score is None or not row.point:
        return ""
    return f"{row.score / row.point:.3f}" if row.score < inf else "inf"
