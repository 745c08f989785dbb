"""`spillway compare`: every method under every budget on one recorded step, simulated for a device."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from spillway.budgets import parse_budgets
from spillway.calibration.named_device import device_of
from spillway.cli.common import (
    INTERRUPTED,
    Json,
    check_writable,
    naming,
    print_json,
    read_recorded,
    say,
    tell_shares,
    to_print,
    to_terminal,
)
from spillway.errors import SpillwayError
from spillway.methods import METHODS
from spillway.report.comparison import write_page, write_png
from spillway.report.drawing import check_drawing
from spillway.simulation.sweep import (
    Bound,
    Comparison,
    Failure,
    Row,
    bound_sentence,
    cells_of,
    compare,
    missing_sentence,
    parse_methods,
    spread_sentence,
    sweep_problem_of,
)
from spillway.units import format_bytes, format_seconds

Found = Row | Bound | Failure


def compare_(
    *,
    step: Annotated[str, typer.Argument(help="A recorded step, a log of DTR, or logs.zip:NAME.")],
    budgets: Annotated[
        str, typer.Option(help="Shares of the plain peak, of the device, or bytes: 0.3..1.0, 0.3x..1x:5, 50%,6GiB.")
    ] = "0.3..1.0",
    methods: Annotated[str, typer.Option(help=f"Separated by commas, or all: {', '.join(METHODS)}.")] = "all",
    device: Annotated[str, typer.Option(help='A device by name, "here" for this machine, or its .json file.')] = "a100",
    plan_seconds: Annotated[
        float, typer.Option(min=0.1, help="How long a planner that searches, as checkmate does, may take for a plan.")
    ] = 30.0,
    bounds: Annotated[bool, typer.Option(help="A lower bound of what only recomputes, under each budget.")] = True,
    processes: Annotated[
        int | None, typer.Option(min=1, help="How many work at a time.", show_default="as many as processors")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write a page.")] = None,
    png: Annotated[Path | None, typer.Option(help="Where to write the picture alone.")] = None,
    json: Json = False,
) -> None:
    """Say what each method would do to a step, under each budget, on a device.

    Ctrl-C keeps what is done: table, page, picture and JSON have what is there, and the exit code is 130. Ends with
    exit code 1 if a row could not be worked out.
    """
    names = parse_methods(methods)
    check_writable(output, png, read=[step, device])
    if output is not None or png is not None:
        check_drawing()
    recorded = read_recorded(step)
    problem = sweep_problem_of(recorded, device_of(device))
    wanted = parse_budgets(budgets, problem.plain_peak, problem.device.memory)
    tell_shares(budgets, problem.device.name, problem.device.memory)
    if json and output is None and png is None:
        bounds = False  # nobody would see them
    total = len(cells_of(names, wanted, bounds=bounds))
    coming = compare(problem, names, wanted, plan_seconds=plan_seconds, bounds=bounds, processes=processes)
    found, whole = _collect(coming, total)
    comparison = Comparison.of(problem, names, wanted, found)
    for path, write_to in ((output, write_page), (png, write_png)):
        if path is not None:
            with naming(path):
                write_to(path, comparison)
    if json:
        print_json([row.to_json() for row in comparison.rows])
    else:
        _print(comparison, [path for path in (output, png) if path is not None])
    if not whole:
        say(to_terminal(), f"spillway: interrupted. {missing_sentence(comparison)} What was done is kept.")
        raise typer.Exit(INTERRUPTED)
    if comparison.failures:
        more = len(comparison.failures) - 1
        raise SpillwayError(f"{comparison.failures[0]}{f' {more} more could not be worked out.' if more else ''}")


def _collect(coming: Generator[Found, None, None], total: int) -> tuple[list[Found], bool]:
    """What is found as it comes, shown as far as it is, and whether nobody pressed Ctrl-C."""
    console, found = to_terminal(), list[Found]()
    columns = BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress, closing(coming):
            task = progress.add_task("starting", total=total)
            for one in coming:
                found.append(one)
                progress.update(task, advance=1, description=_told(one))
                if isinstance(one, Failure):
                    say(console, str(one))
                elif not console.is_terminal:
                    say(console, f"{len(found)} of {total}: {_told(one)}")
    except KeyboardInterrupt:
        return found, False
    return found, True


def _told(found: Found) -> str:
    under = f"under {format_bytes(found.budget_bytes)}"
    if isinstance(found, Row):
        return f"{found.method} {under}: {times_plain(found)}"
    if isinstance(found, Bound):
        return f"lower bound {under}: {format_seconds(found.seconds)}"
    return f"{found.method or 'lower bound'} {under}: failed"


def _print(comparison: Comparison, written: Sequence[Path]) -> None:
    """The table on standard output: times the plain step, a line for each method, a column for each budget."""
    problem, console, table = comparison.problem, to_print(), Table("method")
    for budget in comparison.budgets:
        share = 100 * budget / (problem.plain_peak or 1)
        table.add_column(f"{share:.3g} %\n{format_bytes(budget)}", justify="right")
    cells = {(row.method, row.budget_bytes): _cell(row) for row in comparison.rows}
    for method in comparison.methods:
        table.add_row(method, *(cells.get((method, budget), "") for budget in comparison.budgets))
    if comparison.bounds:
        table.add_section()
        plain = problem.plain_seconds
        least = {
            bound.budget_bytes: f"{bound.seconds / plain if plain else 1.0:.3f}" if bound.kind == "cut" else "plain"
            for bound in comparison.bounds
        }
        table.add_row("lower bound", *(least.get(budget, "") for budget in comparison.budgets))
    say(
        console,
        f"{problem.workload} on {problem.device.name}, simulated: seconds as a multiple of the plain step's "
        f"{format_seconds(problem.plain_seconds)} in {format_bytes(problem.plain_peak)}",
    )
    console.print(table)
    for row in comparison.rows:
        if row.remark:
            say(console, f"{row.method} under {format_bytes(row.budget_bytes)}: {row.remark}")
    bounds = bound_sentence(comparison) if comparison.bounds else ""
    for line in (problem.costs, spread_sentence(problem), bounds, missing_sentence(comparison)):
        if line:
            say(console, line)
    for path in written:
        print(path)


def times_plain(row: Row) -> str:
    """A cell of the table: times the plain step, or how it ended otherwise."""
    return row.status if row.overhead is None else f"{row.overhead:.3f}"


def _cell(row: Row) -> str:
    """The same, and below it between what 80 % lie, where that says more."""
    ends = row.overhead_range
    told = "" if ends is None else f"{ends[0]:.2f}-{ends[1]:.2f}"
    return times_plain(row) + (f"\n{told}" if ends is not None and f"{ends[0]:.2f}" != f"{ends[1]:.2f}" else "")
