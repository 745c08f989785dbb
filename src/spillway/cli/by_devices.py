"""Data parallel training in `spillway advise`: what the gain of each method becomes with several devices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any, Final, final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spillway.advisor.model import ring_seconds
from spillway.advisor.sweeps import Sweep, SweepPoint, crossover_sentence, over_devices
from spillway.advisor.verdict import Row, plain_name
from spillway.cli.common import say
from spillway.errors import UsageError
from spillway.units import (
    Bytes,
    Seconds,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_bytes_per_second,
    parse_seconds,
)

MOST: Final = 10**6
"""Devices."""

Devices = Annotated[
    str | None,
    typer.Option(help="Numbers of devices that train data parallel, as 1,2,4,8; each has a batch of its own."),
]
Gradients = Annotated[
    str | None,
    typer.Option(
        help="Bytes of gradients that devices exchange every step, as 1.3GB; the same for all networks of a file."
    ),
]
Link = Annotated[str | None, typer.Option(help="How fast devices exchange them, as 25GB/s; with --devices.")]
Latency = Annotated[
    str | None,
    typer.Option(help="Of each message of the exchange, as 20us; with --devices.", show_default="none"),
]


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

    def sweep(self, rows: Sequence[Row]) -> Sweep:
        """The rows of one experiment, with each number of devices."""
        return over_devices(rows, self.counts, self.nbytes, self.bytes_per_second, self.latency)

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.nbytes)} of gradients at {format_bytes(round(self.bytes_per_second))}/s, "
            f"{format_seconds(self.latency)} a message"
        )


def exchange_of(
    devices: str | None, gradients: str | None, link: str | None, latency: str | None, *, known: Bytes | None = None
) -> Exchange | None:
    """What the options say; None without --devices.

    Arguments:
        known: Bytes of the gradients where the model is there, and nobody says other with --gradients.

    Raises UsageError for what does not go together, BudgetError for what is no number of bytes.
    """
    if devices is None:
        given = {"--gradients": gradients, "--link": link, "--latency": latency}
        if stray := [name for name, text in given.items() if text is not None]:
            raise UsageError(f"{stray[0]} is about several devices: say how many with --devices 1,2,4,8.")
        return None
    counts = _counts(devices)
    if link is None or (gradients is None and known is None):
        missing = "--link 25GB/s" if link is None else "--gradients 1.3GB"
        raise UsageError(f"Devices exchange gradients in every step: say how long that takes, with {missing}.")
    speed = parse_bytes_per_second(link)
    if not speed:
        raise UsageError("Gradients never arrive at 0 B/s: give --link more, as 25GB/s.")
    return Exchange(
        counts=counts, nbytes=parse_bytes(gradients) if gradients is not None else known or 0, bytes_per_second=speed,
        latency=0.0 if latency is None else parse_seconds(latency),
    )  # fmt: skip


def _counts(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if any(re.fullmatch(r"[0-9]{1,7}", word) is None or not 1 <= int(word) <= MOST for word in words):
        raise UsageError(
            f"--devices takes numbers of 1 to {MOST:,} with commas between them, as 1,2,4,8; not {text!r}."
        )
    return tuple(sorted({int(word) for word in words}))


def print_devices(console: Console, sweep: Sweep, exchange: Exchange) -> None:
    """Two tables, gains and fixed times against the number of devices, and from where on each method pays."""
    say(console, f"{sweep.name}: data parallel, {exchange}")
    heads = [f"{count}" for count in exchange.counts]
    table = Table(title="x plain, by devices", title_justify="left", title_style="")
    fixed = Table(title="delta with the exchange, by devices", title_justify="left", title_style="")
    for one in (table, fixed):
        one.add_column("method")
        for head in heads:
            one.add_column(head, justify="right")
    for method in sweep.methods:
        table.add_row(escape(method), *(_gain(point.predicted(method)) for point in sweep.points))
    fixed.add_row("exchange alone", *(format_seconds(exchange.seconds(count)) for count in exchange.counts))
    for method in [row.method for row in sweep.points[0].rows]:
        fixed.add_row(escape(method), *(_delta(point, method) for point in sweep.points))
    console.print(table)
    console.print(fixed)
    for method in sweep.methods:
        say(console, f"  {crossover_sentence(sweep, method)}")
    say(console, "")


def _gain(gain: float | None) -> str:
    if gain is None:
        return ""
    return f"{gain:.3f}" if isfinite(gain) else "plain does not fit"


def _delta(point: SweepPoint, method: str) -> str:
    fitted = next(row.fitted for row in point.rows if row.method == method)
    return "" if fitted is None else format_seconds(fitted.cost.delta)


def devices_json(sweep: Sweep, exchange: Exchange, method: str) -> list[dict[str, Any]]:
    """A method with every number of devices; throughput is that of all of them together."""
    return [
        _point_json(point, count, exchange, next(row for row in point.rows if row.method == method))
        for point, count in zip(sweep.points, exchange.counts, strict=True)
    ]


def _point_json(point: SweepPoint, count: int, exchange: Exchange, row: Row) -> dict[str, Any]:
    told, is_plain = row.to_json(), row.method == plain_name(row.experiment)
    gain = None if is_plain else point.predicted(row.method)
    return {
        "devices": count, "exchange_seconds": exchange.seconds(count),
        **{name: told[name] for name in ("delta", "point", "predicted_batch", "verdict", "by_score", "by_ratio")},
        "predicted_throughput": None if row.predicted is None else count * row.predicted.throughput,
        "times_plain": gain if gain is not None and isfinite(gain) else None,
    }  # fmt: skip
