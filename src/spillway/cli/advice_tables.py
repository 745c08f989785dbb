"""What `spillway advise` prints: the answer in a sentence, the table of all methods, and those by devices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final, final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spillway.advisor.gains import Sweep, crossover_sentence, over_devices
from spillway.advisor.model import ring_seconds
from spillway.advisor.verdict import Row, cells, ratios, sentence
from spillway.budgets import parse_bytes, parse_bytes_per_second, parse_seconds
from spillway.cli.common import numbers, say, to_print
from spillway.errors import UsageError
from spillway.units import Bytes, Seconds, format_bytes, format_seconds

HEADS: Final = ("alpha", "beta", "R", "gamma", "delta", "R", "score/point", "batch", "samples/s", "x plain")
MOST: Final = 10**6
"""Devices."""


def print_answers(answers: Sequence[Sequence[Row]]) -> None:
    """Those that can be answered with their tables, then the others, a sentence each.

    In a table alpha and gamma are per sample, beta and delta fixed; samples/s is predicted, at the batch before it.
    """
    console = to_print()
    answered = [rows for rows in answers if any(row.fitted for row in rows)]
    for rows in answered:
        say(console, sentence(rows))
        print_table(console, rows)
        say(console, "")
    for rows in answers:
        if rows not in answered:
            say(console, sentence(rows))


def print_table(console: Console, rows: Sequence[Row], lossy: Collection[str] = ()) -> None:
    """With what is odd about its rows."""
    table = Table(title=f"steps may take {format_bytes(round(rows[0].limit))}", title_justify="left", title_style="")
    table.add_column("method")
    for head in (*HEADS, rows[0].experiment.seen, "sure"):
        table.add_column(head, justify="right")
    table.add_column("verdict", no_wrap=True)
    times = ratios(rows)
    for row in rows:
        told = cells(row, times.get(row.method))
        table.add_row(escape(row.method) + " (lossy)" * (row.method in lossy), *told.values())
    console.print(table)
    for row in rows:
        for warning in row.warnings:
            say(console, f"  {row.method}: {warning}")


# ---------------------------------------------------------------------- several devices


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What devices exchange in every step, by a ring all-reduce that no compute hides."""

    counts: tuple[int, ...]
    """Of devices, ascending."""
    nbytes: Bytes
    """Gradients."""
    bytes_per_second: float
    latency: Seconds

    def seconds(self, count: int) -> Seconds:
        """With so many devices."""
        return ring_seconds(self.nbytes, count, bytes_per_second=self.bytes_per_second, latency=self.latency)

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.nbytes)} of gradients at {format_bytes(round(self.bytes_per_second))}/s, "
            f"{format_seconds(self.latency)} a message"
        )


def exchange_of(
    devices: str | None, gradients: str | None, link: str | None, latency: str | None, *, known: Bytes | None = None
) -> Exchange | None:
    """What the options say; None without --devices. `known` are the bytes of the gradients where the model is there,
    and nobody says other with --gradients. Raises UsageError for what does not go together, BudgetError for what is no
    number of bytes."""
    if devices is None:
        given = {"--gradients": gradients, "--link": link, "--latency": latency}
        if stray := [name for name, text in given.items() if text is not None]:
            raise UsageError(f"{stray[0]} is about several devices: say how many with --devices 1,2,4,8.")
        return None
    counts = numbers(devices, "--devices", "1,2,4,8", most=MOST)
    if link is None or (gradients is None and known is None):
        missing = "--link 25GB/s" if link is None else "--gradients 1.3GB"
        raise UsageError(f"Devices exchange gradients in every step: say how long that takes, with {missing}.")
    speed = parse_bytes_per_second(link)
    if not speed:
        raise UsageError("Gradients never arrive at 0 B/s: give --link more, as 25GB/s.")
    return Exchange(
        counts=tuple(counts), bytes_per_second=speed, latency=0.0 if latency is None else parse_seconds(latency),
        nbytes=parse_bytes(gradients) if gradients is not None else known or 0,
    )  # fmt: skip


def sweeps_over(exchange: Exchange | None, answers: Sequence[Sequence[Row]]) -> list[Sweep]:
    """A sweep over devices of each experiment that was fitted; none without an exchange."""
    return [] if exchange is None else [
        over_devices(rows, exchange.counts, exchange.nbytes, exchange.bytes_per_second, exchange.latency)
        for rows in answers if any(row.fitted for row in rows)
    ]  # fmt: skip


def print_sweeps(exchange: Exchange | None, swept: Sequence[Sweep]) -> None:
    """Of each two tables, gains and fixed times against the number of devices, and from where on a method pays."""
    if exchange is None:
        return
    console = to_print()
    for sweep in swept:
        say(console, f"{sweep.name}: data parallel, {exchange}")
        gains, fixed = (
            Table("method", title=f"{what}, by devices", title_justify="left", title_style="")
            for what in ("x plain", "delta with the exchange")
        )
        for count in exchange.counts:
            gains.add_column(f"{count}", justify="right")
            fixed.add_column(f"{count}", justify="right")
        for method in sweep.methods:
            found = [point.predicted(method) for point in sweep.points]
            told = ["" if gain is None else f"{gain:.3f}" if isfinite(gain) else "plain does not fit" for gain in found]
            gains.add_row(escape(method), *told)
        fixed.add_row("exchange alone", *(format_seconds(exchange.seconds(count)) for count in exchange.counts))
        for row in sweep.points[0].rows:
            each = [_row_of(row.method, point.rows).fitted for point in sweep.points]
            fixed.add_row(escape(row.method), *("" if one is None else format_seconds(one.cost.delta) for one in each))
        console.print(gains)
        console.print(fixed)
        for method in sweep.methods:
            say(console, f"  {crossover_sentence(sweep, method)}")
        say(console, "")


def _row_of(method: str, rows: Sequence[Row]) -> Row:
    return next(row for row in rows if row.method == method)


def answers_json(
    answers: Sequence[Sequence[Row]], exchange: Exchange | None, swept: Sequence[Sweep]
) -> list[dict[str, Any]]:
    """A row for each method of each experiment; with the number of devices where that was asked for."""
    documents = []
    for rows in answers:
        sweep = next((one for one in swept if one.points[0].rows[0].experiment is rows[0].experiment), None)
        for row in rows:
            more = {} if exchange is None else {"by_devices": sweep and _by_devices(sweep, exchange, row.method)}
            documents.append(row.to_json() | more)
    return documents


def _by_devices(sweep: Sweep, exchange: Exchange, method: str) -> list[dict[str, Any]]:
    """A method with every number of devices; throughput is that of all of them together."""
    found = []
    for point, count in zip(sweep.points, exchange.counts, strict=True):
        row = _row_of(method, point.rows)
        told, gain = row.to_json(), None if row.is_plain else point.predicted(method)
        found.append({
            "devices": count, "exchange_seconds": exchange.seconds(count),
            **{name: told[name] for name in ("delta", "point", "predicted_batch", "verdict", "by_score", "by_ratio")},
            "predicted_throughput": None if row.predicted is None else count * row.predicted.throughput,
            "times_plain": gain if gain is not None and isfinite(gain) else None,
        })  # fmt: skip
    return found
