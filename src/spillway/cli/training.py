"""What `spillway train` and `spillway demo` show: how far runs are, their rows as a table, what is said besides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from spillway.cli.common import say, to_print
from spillway.errors import SpillwayError
from spillway.report.figures import format_share, seconds_per_step
from spillway.subprocess_runs.rows import FINAL_STATE, RefusedRow, Row
from spillway.subprocess_runs.run import RunRequest, RunResult, StepDone, run
from spillway.units import Seconds, format_bytes, format_seconds

BEFORE_TIMES = ("budget", "peak, our account", "peak RSS above start")
TIMES = ("time per step", "times plain")
LATER_TIMES = ("time, later half", "times plain")
AFTER_TIMES = ("to disk", "recomputed", "compared with plain")


def print_rows(workload: str, rows: Sequence[Row | RefusedRow], method: str | None = None) -> None:
    """Print to standard output the table of one method under several budgets; without its name, that of several methods
    under one budget, the plain run first."""
    steps = max((row.steps for row in rows if isinstance(row, Row)), default=0)
    told = f"{workload}, {steps} {'step' if steps == 1 else 'steps'}"
    if method is None:
        title = f"{told}, methods side by side, freed memory kept; recomputed: ops, or blocks"
        heads: tuple[str, ...] = ("method", *BEFORE_TIMES, *LATER_TIMES, *AFTER_TIMES)
    else:
        title, heads = f"{told}, method {method}, one thread", (*BEFORE_TIMES, *TIMES, *AFTER_TIMES)
    table = Table(title=title, title_justify="left", title_style="")
    for name in heads:
        table.add_column(name, justify="left" if name in (AFTER_TIMES[-1], "method") else "right")
    for row in rows:
        first = [row.method or "plain"] if method is None else []
        table.add_row(*first, *_cells(row, later=method is None))
    to_print().print(table)


def page_facts(workload: str, row: Row, plain: Row | None = None) -> dict[str, Any]:
    """What a page says of a run besides its run file; `plain` is the row of the plain run, if anybody knows its
    peak."""
    facts: dict[str, Any] = {"workload": workload, "rss_above_start_bytes": row.peak_rss_bytes}
    if plain is not None and plain.peak_bytes is not None:
        facts["plain_peak_bytes"] = plain.peak_bytes
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


def _cells(row: Row | RefusedRow, *, later: bool) -> list[str]:
    if isinstance(row, RefusedRow):
        smallest = format_bytes(row.smallest_budget_bytes)
        return [format_bytes(row.budget_bytes), "", "", "", "", "", "", f"refused: needs {smallest} or more"]
    seconds, ratio = (row.later_seconds, row.later_ratio) if later else (row.seconds_per_step, row.ratio)
    budget = "plain" if row.method is None else "no budget"
    return [
        budget if row.budget_bytes is None else format_bytes(row.budget_bytes),
        "" if row.peak_bytes is None else format_bytes(row.peak_bytes), format_bytes(row.peak_rss_bytes),
        format_seconds(seconds), "" if ratio is None else f"{ratio:.2f}", format_bytes(row.bytes_to_disk),
        format_share(row.recomputed_share), _verdict(row),
    ]  # fmt: skip


def _verdict(row: Row) -> str:
    if row.identical is None or row.peak_bytes is None:
        return ""  # Nothing was compared, unless with itself.
    if not row.identical:
        return f"differs {_difference(row)}"
    return "identical" if row.method else "identical with account"


def _difference(row: Row) -> str:
    where = row.first_difference
    return f"in the {where}" if where == FINAL_STATE else f"from the loss of step {where} on"


def board(console: Console) -> Progress:
    """Shows how far each of several runs is; where the console is no terminal, a plain line when one is done."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TextColumn("steps  {task.fields[note]}"),
        TimeElapsedColumn(), console=console, disable=not console.is_terminal,
    )  # fmt: skip


def announce(shown: Progress, title: str, steps: int) -> TaskID:
    """Show a run that is still to come."""
    return shown.add_task(title, total=steps, start=False, note="")


def run_announced(shown: Progress, task: TaskID, request: RunRequest) -> RunResult:
    """Do what was announced, and show how far it is. Raises what `spillway.subprocess_runs.run.run` raises."""
    shown.start_task(task)
    shown.update(task, note="starting")
    seconds = list[Seconds]()

    def step(done: StepDone) -> None:
        seconds.append(done.seconds)
        shown.update(task, advance=1, note=f"{format_seconds(seconds_per_step(seconds))} a step")

    found: RunResult | SpillwayError
    try:
        found = run(request, step=step, output=partial(say, shown.console))
        note = f"{format_seconds(seconds_per_step(seconds))} a step"
    except SpillwayError as error:
        found, note = error, "ended early"
    shown.update(task, note=note)
    shown.stop_task(task)
    if not shown.console.is_terminal:
        done = shown.tasks[task]
        say(shown.console, f"{done.description}: {done.completed:.0f} of {done.total:.0f} steps, {note}")
    if isinstance(found, SpillwayError):
        raise found
    return found
