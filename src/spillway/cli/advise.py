"""`spillway advise`: which method trains fastest, at which batch size, by PAPAYA's model of measured steps."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import spillway
from spillway.advisor.measurements import MB, read_measurements
from spillway.advisor.real import AROUND, STEPS, RealBench
from spillway.advisor.remembered import RememberedBench, cache_file
from spillway.advisor.verdict import Best, Row, advise, default_limit, ratios, sentence
from spillway.advisor.ways import DEFAULT, WAYS, chosen
from spillway.cli.campaigns import Asked, Found, find_out, given, parse_sizes
from spillway.cli.common import (
    Json,
    Seed,
    check_writable,
    machine_memory,
    naming,
    print_json,
    say,
    to_terminal,
)
from spillway.cli.compare import INTERRUPTED
from spillway.cli.tables import WIDTH_OF_FILES
from spillway.doctor import on_system
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


Workload = Annotated[
    str | None, typer.Argument(help="A name that comes with Spillway, or file.py:function; it is measured.")
]
Measurements = Annotated[
    Path | None,
    typer.Option("--from", help="Instead of a workload: what steps took, by method and batch size, a CSV file."),
]
Methods = Annotated[
    str | None, typer.Option(help=f"To compare with plain: {', '.join(WAYS)}.", show_default=",".join(DEFAULT))
]
Memory = Annotated[
    str | None,
    typer.Option(
        help="What steps may take of the device, as 12.8GB; less than it has, because of fragments.",
        show_default="what is available; with --from the largest peak of the network",
    ),
]
Batches = Annotated[
    str | None, typer.Option(help="Batch sizes to measure, as 2,4,8.", show_default="chosen while measuring")
]
TrialSeconds = Annotated[
    float, typer.Option(min=0.01, help="How long a trial of one method at one batch size may take.")
]
Length = Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence.", show_default="its own")]
Layers = Annotated[int | None, typer.Option(min=1, help="Blocks of the model.", show_default="its own")]
Lossless = Annotated[bool, typer.Option("--lossless", help="Leave out methods that change what training computes.")]
Verify = Annotated[bool, typer.Option("--verify", help="Run what is recommended, and plain training, and compare.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")]
Write = Annotated[Path | None, typer.Option(help="Where to write what was measured, as a CSV file that --from reads.")]
SmallBatches = Annotated[
    bool,
    typer.Option("--small-batches", help="Let time be flat for small batches, t = max(a, k x) + b, and not a line."),
]


def advise_(
    *,
    workload: Workload = None,
    measurements: Measurements = None,
    methods: Methods = None,
    memory: Memory = None,
    batches: Batches = None,
    seconds: TrialSeconds = 6.0,
    length: Length = None,
    layers: Layers = None,
    lossless: Lossless = False,
    verify: Verify = False,
    fresh: Fresh = False,
    write: Write = None,
    small_batches: SmallBatches = False,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Say which method that saves memory trains faster than plain training, at which batch size, and how sure that is.

    A workload is measured at a few batch sizes of each method, each in a process of its own; what was measured is kept
    and not measured again. Ctrl-C answers from what is there, and the exit code is 130. Of a file every network and
    hardware is answered by itself. An answer is a sentence, then a table of all methods.
    """
    limit = None if memory is None else _limit(memory)
    if measurements is not None:
        _check_nothing_is_measured({
            "WORKLOAD": workload, "--methods": methods, "--batches": batches, "--length": length, "--layers": layers,
            "--lossless": lossless, "--verify": verify, "--fresh": fresh, "--write": write,
        })  # fmt: skip
        _from_file(measurements, limit, small_batches=small_batches, json=json)
        return
    if workload is None:
        raise UsageError("Name a workload to measure, or give measurements with --from measurements.csv.")
    check_writable(write)
    ways = chosen(DEFAULT if methods is None else _names(methods), lossless=lossless)
    sizes = [] if batches is None else parse_sizes(batches)
    options = {name: value for name, value in (("length", length), ("layers", layers)) if value is not None}
    console = to_terminal()
    with _bench(workload, options, seed, console, fresh=fresh) as bench:
        asked = Asked(
            methods=[way.name for way in ways], limit=limit or _there(bench.facts), batches=sizes,
            longest=seconds / (STEPS + AROUND), layers=layers, small_batches=small_batches, verify=verify, write=write,
            gradient_bytes=int(bench.facts["gradient_bytes"]),
        )  # fmt: skip
        found = find_out(bench, asked, console)
    _tell(found, console, json=json)


def _tell(found: Found, console: Console, *, json: bool) -> None:
    if json:
        print_json(found.to_json())
    else:
        _print_found(found)
    if not found.whole:
        say(console, "spillway: interrupted. What was measured is answered from, and kept.")
        raise typer.Exit(INTERRUPTED)


def _check_nothing_is_measured(options: Mapping[str, object]) -> None:
    if told := given(options):
        raise UsageError(f"{told[0]} is for measuring, and --from looks at what was measured: leave one out.")


@contextmanager
def _bench(
    workload: str, options: Mapping[str, object], seed: int, console: Console, *, fresh: bool
) -> Iterator[RememberedBench]:
    """Who measures."""
    with RealBench(workload, options=options, seed=seed, output=partial(say, console)) as real:
        key = real.key() | {"spillway": spillway.__version__}
        yield RememberedBench(real, lambda: real.facts, cache_file(key), key, fresh=fresh)


def _there(facts: Mapping[str, Any]) -> Bytes:
    """Bytes that steps may take if nobody says: what is free of the device, or available of the machine."""
    if facts["device_bytes"] is not None:
        return int(facts["device_bytes"])
    system = on_system.memory().facts
    limits = [system["available"], system["container_limit"]]
    return int(min((limit for limit in limits if limit), default=machine_memory()))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _from_file(path: Path, limit: Bytes | None, *, small_batches: bool, json: bool) -> None:
    with naming(path):
        experiments = read_measurements(path)
    answers = [advise(there, limit or default_limit(there), small_batches=small_batches) for there in experiments]
    if json:
        print_json([row.to_json() for rows in answers for row in rows])
    else:
        _print(answers)


def _print_found(found: Found) -> None:
    """The answer, the table, and what is to be said about either."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
    for line in found.sentences():
        say(console, line)
    console.print(_table(found.rows, found.lossy))
    for line in (*_warnings(found.rows), *found.remarks()):
        say(console, f"  {line}")


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
        table.add_column(head, justify="right")
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
