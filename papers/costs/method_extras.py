"""What PAPAYA's methods add to a plain step of the same batch, foretold and published, the model left out.

The extra is seconds of a method's step over those of the plain step, less 1. Its spread over models and methods is what
`compare` and `advise` show beside what a method takes more than plain training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Skipped, Tell, frozen
from papers.costs.left_out import ZIP, devices_of, of_logs, points_of
from papers.costs.log_ops import LOGS
from papers.papaya.models import BUILDS
from papers.papaya.published import DATA, NAMED
from papers.papaya.simulated import PUBLISHED, AsTimed, read_published, steps_of
from spillway.advisor.measurements import Experiment
from spillway.advisor.simulated import Steps
from spillway.costs import Device
from spillway.costs.fitting import spread_of


@frozen
class Size:
    """How much is run."""

    options: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {name: {} for name in BUILDS})
    methods: Sequence[str] = ("checkpoint", "compress", "swap", "compress-swap", "checkpoint-compress")
    logs: Sequence[str] = tuple(LOGS)
    zip: Path = ZIP
    data: Path = DATA


def run(size: Size, tell: Tell) -> Result:
    """Every model and method that was measured at a batch size of plain training's."""
    for path in (size.zip, size.data):
        if not path.is_file():
            raise Skipped(f"there is no {path}")
    published = read_published(size.data)
    steps = {name: steps_of(name, options) for name, options in size.options.items()}
    points = {name: points_of(NAMED[name], one, published[name], size.data) for name, one in steps.items()}
    devices = devices_of(points, of_logs(size.zip, size.logs))
    rows: list[Row] = []
    for name, one in steps.items():
        rows += _rows(name, one, devices[name], published[name], size.methods)
        tell(f"{name}: simulated")
    return Result(title=TITLE, columns=COLUMNS, rows=rows, notes=(NOTE, *_spreads(rows)))


def _rows(name: str, steps: Steps, device: Device, there: Experiment, methods: Sequence[str]) -> Iterator[Row]:
    bench, plain = AsTimed(name, steps, device), there.methods["exact"].seconds
    for method in methods:
        samples = there.methods.get(PUBLISHED[method])
        both = sorted(samples.seconds.keys() & plain.keys()) if samples is not None else []
        if samples is None or not both:
            continue
        batch = both[-1]
        mine, base = bench.measure(method, batch).seconds, bench.measure("plain", batch).seconds
        if mine is None or base is None:
            continue
        extra, paper = mine / base - 1, samples.seconds[batch] / plain[batch] - 1
        known = extra > 0 and paper > 0
        yield {
            "model": name, "method": method, "batch": batch, "published": paper, "foretold": extra,
            "ratio": paper / extra if known else None,
        }  # fmt: skip


def _spreads(rows: Sequence[Row]) -> Iterator[str]:
    for method in (None, *dict.fromkeys(row["method"] for row in rows)):
        ratios = [row["ratio"] for row in rows if row["ratio"] and method in (None, row["method"])]
        if len(ratios) >= 2:
            low, high = spread_of(ratios)
            yield f"{method or 'All'}: median {median(ratios):.2f}, 80 % of further ones {low:.2f} to {high:.2f}."


def judge(result: Result) -> Iterator[Check]:
    """Each row by the spread of the other models."""
    judged = [row for row in result.rows if row["ratio"]]
    outside = 0
    for row in judged:
        others = [one["ratio"] for one in judged if one["model"] != row["model"]]
        if len(others) < 2:
            return
        low, high = spread_of(others)
        outside += not low <= row["ratio"] <= high
    share = outside / len(judged) if judged else 1.0
    yield Check(what=f"of {len(judged)} extras: outside of the 80 % interval", measured=round(share, 4), at_most=0.30)
    yield Check(what=f"of {len(judged)} extras: inside of it", measured=round(1 - share, 4), at_most=0.95)


TITLE: Final = "What PAPAYA's methods add to a plain step, the model left out"

COLUMNS: Final = (
    *columns.text(model="model", method="method", batch="batch"),
    *columns.shares(published="published, of plain", foretold="foretold"),
    *columns.ratios(ratio="published / foretold"),
)  # fmt: skip

NOTE: Final = "Copies by the data sheet: 12 GB/s. Nothing is fitted to any method."

BENCHMARK: Final = Benchmark(
    name="costs_methods",
    run=run,
    judge=judge,
    full=Size(),
    quick=Size(
        options={
            "ResNet-50": {"side": 32, "depths": (1, 1)},
            "Bert-Large": {"layers": 2, "hidden": 64, "length": 16},
            "GPT-Small": {"layers": 2, "hidden": 64, "length": 16},
        },
        methods=("checkpoint", "compress"),
        logs=("unet", "resnet32"),
    ),
)
