"""Measuring a workload for `spillway advise`: what was asked for, how far it is, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, final

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from spillway.advisor.bench import AbstractBench, Trial
from spillway.advisor.campaign import Campaign
from spillway.advisor.choice import Accumulation, Verified, accumulation_of, plain_row, recommended
from spillway.advisor.measurements import Experiment, seen_on, write_measurements
from spillway.advisor.verdict import Row, advise, sentence
from spillway.advisor.ways import accumulated, way_of
from spillway.cli.common import naming, say
from spillway.cli.compare import INTERRUPTED
from spillway.errors import SpillwayError, UsageError
from spillway.units import Bytes, Seconds, format_bytes, format_seconds

LOSSY: Final = "lossy: gradients are other than plain PyTorch's"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a campaign is to find out."""

    methods: Sequence[str]
    """Names, plain training first."""
    limit: Bytes
    batches: Sequence[int]
    """To measure; empty to choose."""
    longest: Seconds
    """A step that takes longer is not measured."""
    layers: str
    """Of the network; empty where nobody says."""
    hidden: str
    """Its width, likewise."""
    network: str
    """The workload with its options."""
    small_batches: bool
    verify: bool
    gradient_bytes: Bytes
    """Of all parameters."""


@final
@dataclass(slots=True)
class Found:
    """What came of it."""

    campaign: Campaign
    experiment: Experiment
    rows: Sequence[Row]
    """Of the answer."""
    accumulation: Accumulation | None = None
    verified: list[Verified] = field(default_factory=list)
    verifies: bool = False
    """Whether predictions are to be measured."""
    whole: bool = True
    """Whether nobody pressed Ctrl-C."""

    def sentences(self) -> Iterator[str]:
        """The answer: the first says which method, and those behind it what to know about that."""
        yield sentence(self.rows)
        best = recommended(self.rows)
        if best is not None and way_of(best.method).lossy:
            others = recommended([row for row in self.rows if not way_of(row.method).lossy])
            instead = others and others.taken
            more = "" if others is None or instead is None else (
                f"; the fastest that changes no bit is {others.method}, with {instead.throughput:.4g} samples/s at "
                f"batch {instead.size}"
            )  # fmt: skip
            yield f"{best.method} is {LOSSY}{more}."
        if self.accumulation is not None:
            yield self.accumulation.sentence()

    def remarks(self) -> Iterator[str]:
        """What could not be measured, and how predictions came out."""
        for method, fault in self.campaign.faults.items():
            yield f"{method} was not {self.experiment.seen}: {fault}"
        for method, sizes in self.campaign.left_out.items():
            yield f"{method} was not {self.experiment.seen} at batch {', '.join(map(str, sizes))}, which would not fit."
        for method, size in self.campaign.unknown.items():
            yield (
                f"{method}: up to batch {size} its peak was not seen to grow with the batch, so that no larger one can "
                f"be told from it: allow longer trials with --seconds, or name larger ones with --batches."
            )
        for one in self.verified:
            yield one.sentence(self.campaign.limit)
        if self.verifies and not self.verified:
            yield "Nothing was verified, because nothing was predicted."

    @property
    def lossy(self) -> frozenset[str]:
        """The methods whose gradients are other than plain PyTorch's."""
        return frozenset(row.method for row in self.rows if way_of(row.method).lossy)

    def trials(self) -> Iterator[Trial]:
        """All of them, method by method."""
        for trials in self.campaign.trials.values():
            yield from (trials[size] for size in sorted(trials))

    def to_json(self) -> dict[str, Any]:
        """The one document of the verb."""
        seen = self.experiment.seen
        return {
            "figures": seen, "answer": list(self.sentences()), "limit_bytes": self.campaign.limit, "whole": self.whole,
            "rows": [row.to_json() | {"lossy": row.method in self.lossy} for row in self.rows],
            "accumulation": self.accumulation and self.accumulation.to_json(),
            "verified": [one.to_json() for one in self.verified],
            f"not_{seen}": dict(self.campaign.faults), "trials": [trial.to_json() for trial in self.trials()],
        }  # fmt: skip


def find_out(bench: AbstractBench, asked: Asked, console: Console) -> Found:
    """Measure, fit, answer. Ctrl-C ends the measuring, and what is measured is answered from.

    Raises SpillwayError if plain training cannot be measured, and Exit if nothing was before Ctrl-C.
    """
    campaign = Campaign(bench, asked.methods, asked.limit, batches=asked.batches, longest=asked.longest)
    whole = _collect(campaign, console)
    if not any(campaign.trials.values()):
        say(console, f"spillway: interrupted before anything was {seen_on(bench.hardware)}.")
        raise typer.Exit(INTERRUPTED)
    experiment = replace(campaign.experiment(layers=asked.layers, hidden=asked.hidden), network=asked.network)
    rows = advise(experiment, asked.limit, small_batches=asked.small_batches)
    offered = accumulation_of(rows, asked.gradient_bytes)
    found = Found(campaign, experiment, rows, offered, verifies=asked.verify, whole=whole)
    if whole:
        found.whole = _interruptible(lambda: _follow_up(found, asked, console))
    return found


def write_found(path: Path, every: Sequence[Found]) -> None:
    """Write what was measured, as `--from` reads it. Raises SpillwayError where the system refuses."""
    peaks = [
        {
            method: {size: trial.peak for size, trial in trials.items() if trial.peak is not None}
            for method, trials in found.campaign.trials.items()
        }
        for found in every
    ]
    with naming(path):
        write_measurements(path, [found.experiment for found in every], peaks)


def _collect(campaign: Campaign, console: Console) -> bool:
    """Whether nobody pressed Ctrl-C."""

    def measure() -> None:
        with _progress(console) as progress, closing(campaign.run()) as coming:
            task = progress.add_task("starting", total=None)
            for trial in coming:
                said = _told(trial, campaign.limit)
                if console.is_terminal:
                    progress.update(task, description=f"{said}{_left(campaign)}")
                else:
                    say(console, said)

    return _interruptible(measure)


def _follow_up(found: Found, asked: Asked, console: Console) -> None:
    """Measure what the answer names: the step that accumulates, and with `--verify` predictions."""
    best, plain = recommended(found.rows), plain_row(found.rows)
    if found.accumulation is not None:
        offered = found.accumulation
        trial = _one(found, accumulated(offered.micro), offered.size, console)
        if trial is not None and trial.seconds is not None:
            found.accumulation = replace(offered, measured=offered.size / trial.seconds)
    for one in (best, None if plain is best else plain) if asked.verify else ():
        if one is None or one.fitted is None or one.predicted is None or one.taken is None:
            continue
        for size in sorted({one.taken.size, one.predicted.size}):
            measured = _one(found, one.method, size, console, again=True)
            if measured is not None:
                found.verified.append(Verified.of(one.method, one.fitted, measured, found.experiment.seen))


def _one(found: Found, method: str, size: int, console: Console, *, again: bool = False) -> Trial | None:
    try:
        trial = found.campaign.measure(method, size, again=again)
    except SpillwayError as error:
        found.campaign.faults[method] = str(error)
        return None
    say(console, _told(trial, found.campaign.limit))
    return trial


def _interruptible(action: Callable[[], None]) -> bool:
    try:
        action()
    except KeyboardInterrupt:
        return False
    return True


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress


def _told(trial: Trial, limit: Bytes) -> str:
    at = f"{trial.method} at batch {trial.size}"
    if trial.peak is None or trial.seconds is None:
        return f"{at}: more than {format_bytes(limit)}"
    return f"{at}: {format_seconds(trial.seconds)} a step, {format_bytes(trial.peak)}"


def _left(campaign: Campaign) -> str:
    remaining = campaign.remaining
    place = 1 + campaign.methods.index(campaign.current) if campaign.current is not None else len(campaign.methods)
    left = "" if remaining is None else f", about {format_seconds(round(remaining))} left"
    return f"; method {place} of {len(campaign.methods)}{left}"


def parse_sizes(text: str, option: str) -> list[int]:
    """`2,4,8`. Raises UsageError for anything but whole numbers above 0."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"{option} takes whole numbers above 0 with commas between them, as 2,4,8; got {text!r}.")
    return sorted({int(part) for part in parts})


def given(options: Mapping[str, object]) -> list[str]:
    """Names of the options that were given, as they are written."""
    return [name for name, value in options.items() if value not in (None, False)]
