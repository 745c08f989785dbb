"""`spillway advise`: which method trains fastest, at which batch size, by PAPAYA's model of measured steps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spillway.advisor.measurements import MB, read_measurements
from spillway.advisor.sweeps import Sweep
from spillway.advisor.verdict import Best, Row, advise, default_limit, ratios, sentence
from spillway.cli.advice_page import check_page, page_facts, write_answers
from spillway.cli.by_devices import (
    Devices,
    Exchange,
    Gradients,
    Latency,
    Link,
    devices_json,
    exchange_of,
    print_devices,
)
from spillway.cli.common import Json, naming, print_json, say
from spillway.cli.tables import WIDTH_OF_FILES
from spillway.errors import BudgetError, UsageError
from spillway.units import Bytes, format_bytes, format_seconds, parse_bytes

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
    "measured",
    "sure",
)


def advise_(
    *,
    workload: Annotated[str | None, typer.Argument(help="Not there yet: give measurements with --from.")] = None,
    measurements: Annotated[
        Path | None, typer.Option("--from", help="A CSV file: what steps took, by network, method and batch size.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="What steps may take of the device, as 12.8GB; less than it has, because of fragments.",
            show_default="the largest peak of the network on the hardware",
        ),
    ] = None,
    small_batches: Annotated[
        bool,
        typer.Option(
            "--small-batches", help="Let time be flat for small batches, t = max(a, k x) + b, and not a line."
        ),
    ] = False,
    devices: Devices = None,
    gradients: Gradients = None,
    link: Link = None,
    latency: Latency = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write a page with figures.")] = None,
    json: Json = False,
) -> None:
    """Say which method that saves memory trains faster than plain training, at which batch size, and how sure that is.

    Every network and hardware of the file is answered by itself: a sentence, then a table of all methods. With
    --devices two more have what each method gains where gradients are exchanged in every step.
    """
    if measurements is None or workload is not None:
        raise UsageError(
            "Only measurements can be looked at so far, with spillway advise --from measurements.csv: measuring a "
            "workload is not there yet."
        )
    limit = None if memory is None else _limit(memory)
    exchange = exchange_of(devices, gradients, link, latency)
    check_page(output)
    with naming(measurements):
        experiments = read_measurements(measurements)
    answers = [advise(there, limit or default_limit(there), small_batches=small_batches) for there in experiments]
    swept = [exchange.sweep(rows) for rows in answers if any(row.fitted for row in rows)] if exchange else []
    if json:
        print_json(_json(answers, exchange, swept))
    else:
        _print(answers)
        _print_devices(exchange, swept)
    if output is not None:
        facts = {"measurements": str(measurements), **page_facts(answers, exchange)}
        write_answers(output, answers, title=measurements.name, facts=facts, kinds={}, devices=swept)
        if not json:
            print(output)


def _json(answers: Sequence[Sequence[Row]], exchange: Exchange | None, swept: Sequence[Sweep]) -> list[dict[str, Any]]:
    """A row for each method of each experiment; with the number of devices where that was asked for."""
    documents = []
    for rows in answers:
        sweep = next((one for one in swept if one.points[0].rows[0].experiment is rows[0].experiment), None)
        for row in rows:
            more = {} if exchange is None else {"by_devices": sweep and devices_json(sweep, exchange, row.method)}
            documents.append(row.to_json() | more)
    return documents


def _print_devices(exchange: Exchange | None, swept: Sequence[Sweep]) -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
    for sweep in swept:
        if exchange is not None:
            print_devices(console, sweep, exchange)


def _limit(text: str) -> Bytes:
    nbytes = parse_bytes(text)
    if not nbytes:
        raise BudgetError("Steps take more than 0 bytes: give --memory what the device has for them.")
    return nbytes


def _print(answers: Sequence[Sequence[Row]]) -> None:
    """Those that can be answered with their tables, then the others, a sentence each.

    In a table alpha and gamma are per sample, beta and delta fixed; samples/s is predicted, at the batch before it.
    """
    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
    answered = [rows for rows in answers if any(row.fitted for row in rows)]
    for rows in answered:
        say(console, sentence(rows))
        console.print(_table(rows))
        for row in rows:
            for warning in row.warnings:
                say(console, f"  {row.method}: {warning}")
        say(console, "")
    for rows in answers:
        if rows not in answered:
            say(console, sentence(rows))


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title=f"steps may take {format_bytes(round(rows[0].limit))}", title_justify="left", title_style="")
    table.add_column("method")
    for head in HEADS:
        table.add_column(head, justify="right")
    table.add_column("verdict", no_wrap=True)
    times = ratios(rows)
    for row in rows:
        table.add_row(escape(row.method), *_cells(row, times.get(row.method)))
    return table


def _cells(row: Row, times: float | None) -> list[str]:
    return [
        *_laws(row),
        _score(row),
        "" if row.predicted is None else str(row.predicted.size),
        "" if row.predicted is None else f"{row.predicted.throughput:.4g}",
        "" if times is None else f"{times:.3f}",
        _measured(row.measured),
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


def _measured(best: Best | None) -> str:
    return "" if best is None else f"{best.throughput:.4g} at {best.size}"
