"""How the gain of a method moves with the depth of a network, its width, or the number of devices (PAPAYA, section 6).

The gain is a method's highest throughput as a multiple of the plain one's, each at its own largest batch: it pays where
that is 1 or more. What is predicted comes from the fits, what is measured from the fastest step of each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite
from typing import Final, Literal, TypeAlias, final

from spillway.advisor.measurements import Seen
from spillway.advisor.model import ring_seconds
from spillway.advisor.verdict import Row, judge, plain_row
from spillway.units import Bytes, Seconds

FEWEST_POINTS: Final = 2
"""Values that make a sweep."""

Over: TypeAlias = Literal["depth", "width", "devices"]
UNITS: Final[dict[Over, str]] = {"depth": "layers", "width": "hidden size", "devices": "devices"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """What every method does at one value of what a sweep runs over."""

    value: float
    rows: Sequence[Row]
    """Of one experiment, the plain one among them if it was measured."""

    def predicted(self, method: str) -> float | None:
        """The gain by the fits: infinite where nothing fits but with the method, 0 where the method does not fit
        either; None where a fit is missing."""
        mine, plain = self._row(method), plain_row(self.rows)
        if mine is None or plain is None or mine.fitted is None or plain.fitted is None:
            return None
        return _gain(*(0.0 if row.predicted is None else row.predicted.throughput for row in (mine, plain)))

    def measured(self, method: str) -> float | None:
        """The gain of the fastest steps: infinite where the plain one found no memory, 0 where the method did not;
        None where either was not tried."""
        mine, plain = self._row(method), plain_row(self.rows)
        if mine is None or plain is None:
            return None
        return _gain(_fastest(mine), _fastest(plain))

    @property
    def methods(self) -> list[str]:
        """All but the plain one."""
        return [row.method for row in self.rows if not row.is_plain]

    def _row(self, method: str) -> Row | None:
        return next((row for row in self.rows if row.method == method), None)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The same experiment at several values of one thing, and of nothing else."""

    over: Over
    points: Sequence[SweepPoint]
    """By value, ascending."""
    name: str = ""
    """What all points have in common, for people."""

    @property
    def unit(self) -> str:
        """What values count."""
        return UNITS[self.over]

    @property
    def methods(self) -> list[str]:
        """Every method but the plain one, in the order in which they first appear."""
        return list(dict.fromkeys(method for point in self.points for method in point.methods))

    @property
    def seen(self) -> Seen:
        """Whether the figures of its points were measured or simulated."""
        return next((row.experiment.seen for point in self.points for row in point.rows), "measured")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """From where on a method pays."""

    first: float
    """The smallest value from which on it pays at every value that was looked at."""
    below: float | None
    """The value before that, where it does not pay; None if it pays at all of them."""
    at: float | None
    """Where the gain passes 1 on the straight line between the two; None if there is no `below`, or the gain at
    `first` is infinite."""


def best_crossover(sweep: Sweep) -> Crossover | None:
    """Of the best method at each point, as measured, or as predicted where it was not measured to the end."""
    measured, predicted = (gains(sweep, None, gain) for gain in (SweepPoint.measured, SweepPoint.predicted))
    there = measured and (not predicted or measured[-1][0] >= predicted[-1][0])
    return crossing(measured if there else predicted)


def crossover_sentence(sweep: Sweep, method: str | None = None) -> str:
    """From where on a method pays, predicted and measured; the best of all at each point for None."""
    said = []
    for how, gain in (("predicted", SweepPoint.predicted), (sweep.seen, SweepPoint.measured)):
        pairs = gains(sweep, method, gain)
        if len(pairs) >= FEWEST_POINTS:
            found = crossing(pairs)
            if found is None:
                told = f"does not pay at {_value(sweep, pairs[-1][0])}, the most that is known"
            elif found.below is None:
                told = f"pays from {_value(sweep, found.first)} on, the least that is known"
            else:
                known = found.at is not None and sweep.over != "devices"
                between = f" (between the two at {found.at:.4g})" if known else ""
                told = f"pays from {_value(sweep, found.first)} on, and not at {found.below:g}{between}"
            said.append(f"{how}: {told}")
    name = "the best method" if method is None else method
    return f"{name}: {'; '.join(said)}." if said else f"{name}: not known at {FEWEST_POINTS} values or more."


def _value(sweep: Sweep, value: float) -> str:
    if sweep.over == "width":
        return f"{sweep.unit} {value:g}"
    return f"{value:g} {sweep.unit.removesuffix('s') if value == 1 else sweep.unit}"


def gains(
    sweep: Sweep, method: str | None, gain: Callable[[SweepPoint, str], float | None]
) -> list[tuple[float, float]]:
    """Value and gain wherever it is known; the best of all methods for None."""
    pairs = []
    for point in sweep.points:
        known = [gain(point, name) for name in (point.methods if method is None else [method])]
        told = [one for one in known if one is not None]
        if told:
            pairs.append((point.value, max(told)))
    return pairs


def crossing(pairs: Sequence[tuple[float, float]]) -> Crossover | None:
    """Where the second number rises to 1 for good, of pairs whose first ascends."""
    if not pairs or pairs[-1][1] < 1:
        return None
    for (below, low), (first, high) in reversed(list(pairwise(pairs))):
        if low < 1:
            at = below + (1 - low) / (high - low) * (first - below) if isfinite(high) else None
            return Crossover(first=first, below=below, at=at)
    return Crossover(first=pairs[0][0], below=None, at=None)


def sweeps_of(answers: Sequence[Sequence[Row]]) -> list[Sweep]:
    """Sweeps over depth and over width that experiments make which differ in that alone; those without any gain are
    left out."""
    groups: dict[tuple[str, ...], dict[float, Sequence[Row]]] = {}
    for rows in filter(None, answers):
        there = rows[0].experiment
        alike = there.hardware, there.network, there.precision, there.source
        for kind, told, fixed in (("depth", there.layers, there.hidden), ("width", there.hidden, there.layers)):
            with contextlib.suppress(ValueError):
                value = float(told)
                if isfinite(value) and value > 0:
                    groups.setdefault((kind, fixed, *alike), {}).setdefault(value, rows)
    sweeps = []
    for (kind, fixed, hardware, network, precision, source), points in groups.items():
        over: Over = "depth" if kind == "depth" else "width"
        held = f"{fixed} layers" if over == "width" else f"hidden {fixed}"
        about = ", ".join(filter(None, (network, held if fixed else "", precision)))
        sweep = Sweep(
            over=over, name=f"{about} on {hardware}{f' ({source})' if source else ''}",
            points=tuple(SweepPoint(value=value, rows=points[value]) for value in sorted(points)),
        )  # fmt: skip
        both = (SweepPoint.predicted, SweepPoint.measured)
        if any(len(gains(sweep, method, gain)) >= FEWEST_POINTS for method in sweep.methods for gain in both):
            sweeps.append(sweep)
    return sweeps


def over_devices(
    rows: Sequence[Row], counts: Sequence[int], nbytes_of_gradients: Bytes, bytes_per_second: float,
    latency: Seconds = 0.0,
) -> Sweep:  # fmt: skip
    """Data parallel training: each device has a batch of its own, and all exchange gradients every step (section 6.2).

    The exchange is a ring all-reduce that no compute hides, so it is added to delta of every method alike. Batches and
    throughput in the rows are those of one device. What was measured is that of one device too, and is left out
    elsewhere.
    """
    points = []
    for count in sorted(set(counts)):
        seconds = ring_seconds(nbytes_of_gradients, count, bytes_per_second=bytes_per_second, latency=latency)
        fits = {row.method: row.fitted and row.fitted.with_communication(seconds) for row in rows}
        judged = judge(rows[0].experiment, fits, rows[0].limit)
        shown = judged if count == 1 else [replace(row, measured=None) for row in judged]
        points.append(SweepPoint(value=count, rows=tuple(shown)))
    return Sweep(over="devices", points=tuple(points), name=rows[0].experiment.about)


def _fastest(row: Row) -> float | None:
    if row.measured is not None:
        return row.measured.throughput
    samples = row.experiment.methods[row.method]
    return 0.0 if samples.failed and not samples.ran else None


def _gain(mine: float | None, plain: float | None) -> float | None:
    """None where either is not known, or neither runs, or both are infinite."""
    if mine is None or plain is None:
        return None
    if plain == inf:
        return 0.0 if mine < inf else None
    if plain:
        return mine / plain
    return inf if mine else None
