"""Plain steps of PAPAYA's five models on a V100, foretold with the model left out.

Shares and sizes of single ops come from DTR's logs, which were measured on another GPU with the same multiprocessors.
What logs in float32 cannot tell, the share of tensor cores and the host's seconds for an op, is fitted to the plain
steps of the other four models. Peaks are of the recorded steps; nothing is fitted to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Final, final

import numpy

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Skipped, Tell, frozen
from papers import SHARED
from papers.costs.log_ops import ASSUMED, LOGS, TITAN_V, Log
from papers.papaya.models import BUILDS
from papers.papaya.published import DATA
from papers.papaya.simulated import bench_of, read_published
from spillway.advisor.measurements import Experiment
from spillway.advisor.simulated import Steps
from spillway.costs import DEVICES, Device, Efficiency, OpKind
from spillway.costs.fitting import fit, least_squares, spread_of
from spillway.costs.roofline import Floats, Reckoned, launches_of, paced, work_of
from spillway.units import Bytes, Seconds

ZIP: Final = SHARED / "data" / "dtr" / "logs.zip"
V100: Final = DEVICES["v100"]
HOST: Final[Seconds] = 25e-6
"""Of an op, before anything is fitted."""
HALF: Final = 0.5
"""Of tensor cores, likewise."""
DOUBTS: Final = numpy.array([0.25, 0.25, 1.0])
"""Standard deviations of logarithms: shares of tensor cores, and the host's seconds."""
SIZES: Final = 8
"""Batch sizes of a model that are compared, from the smallest to the largest."""
PRODUCTS: Final = (OpKind.MATMUL, OpKind.CONVOLUTION, OpKind.CONVOLUTION_BACKWARD, OpKind.STRIDED)


@frozen
class Size:
    """How much is run."""

    options: Mapping[str, Mapping[str, Any]]
    """Of the models, by the paper's names."""
    logs: Sequence[str] = tuple(LOGS)
    zip: Path = ZIP
    data: Path = DATA


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A plain step of one batch size."""

    batch: int
    reckoned: Reckoned
    launches: Floats
    measured: Seconds
    peak: Bytes
    published_peak: float | None

    def seconds(self, by: Efficiency, host: Seconds) -> Seconds:
        """As foretold."""
        return float(paced(self.reckoned.seconds(by), self.launches * host).sum())


def points_of(steps: Steps, there: Experiment, device: Device) -> list[Point]:
    """Plain steps at some of the batch sizes that were measured, the largest among them."""
    plain = there.methods["exact"]
    sizes = sorted(plain.seconds)
    chosen = sorted({sizes[round(place)] for place in numpy.linspace(0, len(sizes) - 1, SIZES)})
    found = []
    for batch in chosen:
        step = steps.at(batch)
        works = [work_of(step, op) for op in step.ops]
        found.append(
            Point(
                batch=batch, reckoned=Reckoned(works, device), launches=launches_of(step, works),
                measured=plain.seconds[batch], peak=step.plain_peak(), published_peak=plain.peaks.get(batch),
            )
        )  # fmt: skip
    return found


def with_half(by: Efficiency, product: float, batched: float) -> Efficiency:
    """The same, with those shares of tensor cores."""
    half = dict.fromkeys(PRODUCTS, product) | {OpKind.BATCHED: batched, OpKind.ATTENTION: batched}
    shares = {kind: replace(share, half=half.get(kind, share.half)) for kind, share in by.shares.items()}
    return replace(by, shares=MappingProxyType(shares))


def fit_steps(models: Sequence[Sequence[Point]], by: Efficiency) -> tuple[Efficiency, Seconds]:
    """What the steps of these models, each as much as another, say of tensor cores and of the host."""
    start = numpy.log([HALF, HALF, HOST])

    def residuals(numbers: Floats) -> tuple[Floats, Floats]:
        product, batched, host = numpy.exp(numbers).tolist()
        tried = with_half(by, product, batched)
        apart = [
            math.log(point.seconds(tried, host) / point.measured) * math.sqrt(SIZES / len(points))
            for points in models for point in points
        ]  # fmt: skip
        return numpy.array(apart), (numbers - start) / DOUBTS

    product, batched, host = numpy.exp(least_squares(residuals, start)).tolist()
    return with_half(by, product, batched), host


def of_logs(zip_: Path, logs: Sequence[str]) -> Efficiency:
    """What single ops of DTR's logs say; a launch is the device's own, since the logs' includes waiting for the op."""
    found = fit([Log(zip_, name).timed() for name in logs], TITAN_V, ASSUMED)
    shares = {kind: replace(share, launch=float(share.launch > 0)) for kind, share in found.shares.items()}
    return replace(found, shares=MappingProxyType(shares))


# ------------------------------------------------------------------ rows


def run(size: Size, tell: Tell) -> Result:
    """Every model, left out."""
    for path in (size.zip, size.data):
        if not path.is_file():
            raise Skipped(f"there is no {path}")
    published = read_published(size.data)
    single = of_logs(size.zip, size.logs)
    tell("fitted to single ops")
    models = {}
    for name, options in size.options.items():
        models[name] = points_of(bench_of(name, options)[1], published[name], V100)
        tell(f"{name}: recorded")
    return result_of(models, single)


def result_of(models: Mapping[str, Sequence[Point]], single: Efficiency) -> Result:
    """Rows and checks."""
    left = {name: fit_steps([other for one, other in models.items() if one != name], single) for name in models}
    rows = [
        {
            "model": name, "batch": point.batch, "measured": point.measured,
            "foretold": point.seconds(*left[name]), "ratio": point.seconds(*left[name]) / point.measured,
            "peak": point.peak, "published_peak": point.published_peak,
            "peak_ratio": None if point.published_peak is None else point.peak / point.published_peak,
        }
        for name, points in models.items() for point in points
    ]  # fmt: skip
    by, host = fit_steps(list(models.values()), single)
    notes = [
        NOTE,
        f"Fitted to all five: products of halves get {by.shares[OpKind.MATMUL].half:.3f} of the tensor cores, batched "
        f"ones {by.shares[OpKind.BATCHED].half:.3f}; the host takes {1e6 * host:.1f} us an op.",
        *(
            f"{name} left out: {by.shares[OpKind.MATMUL].half:.3f}, {by.shares[OpKind.BATCHED].half:.3f}, "
            f"{1e6 * host:.1f} us." for name, (by, host) in left.items()
        ),
    ]  # fmt: skip
    return Result(title=TITLE, columns=COLUMNS, rows=rows, checks=list(_checks(rows)), notes=notes)


def _checks(rows: Sequence[Row]) -> Iterator[Check]:
    names = list(dict.fromkeys(row["model"] for row in rows))
    largest = {name: max(_of(rows, name), key=lambda row: row["batch"]) for name in names}
    apart = {name: abs(1 / row["ratio"] - 1) for name, row in largest.items()}
    for name, share in apart.items():
        yield Check(what=f"{name}: plain throughput, off by", measured=round(share, 4), at_most=0.25)
    yield Check(what="plain throughput, median of the models", measured=round(median(apart.values()), 4), at_most=0.15)
    for name in names:
        peaks = [abs(row["peak_ratio"] - 1) for row in _of(rows, name) if row["peak_ratio"] is not None]
        if peaks:
            yield Check(what=f"{name}: peak, off by at worst", measured=round(max(peaks), 4), at_most=0.08)
    # The interval of each model comes from the errors of the others: nothing is judged by its own.
    inside = total = 0
    for name in names:
        others = [1 / row["ratio"] for one, row in largest.items() if one != name]
        if len(others) < 2:
            return
        low, high = spread_of(others)
        inside += sum(low <= 1 / row["ratio"] <= high for row in _of(rows, name))
        total += len(_of(rows, name))
    share = inside / total
    yield Check(what=f"{total} steps: outside of the 80 % interval", measured=round(1 - share, 4), at_most=0.30)
    yield Check(what=f"{total} steps: inside of the 80 % interval", measured=round(share, 4), at_most=0.95)


def _of(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row["model"] == name]


TITLE: Final = "Plain steps of PAPAYA's five models on a V100, the model left out"

COLUMNS: Final = (
    *columns.text(model="model", batch="batch"),
    *columns.seconds(measured="published", foretold="foretold"),
    *columns.ratios(ratio="foretold / published"),
    *columns.nbytes(peak="peak", published_peak="published peak"),
    *columns.ratios(peak_ratio="peak / published"),
)  # fmt: skip

NOTE: Final = (
    "Foretold: ops as DTR's logs have them on a Titan V, with the data sheet of the V100 (SXM2); the shares of tensor "
    "cores and the host's seconds for an op fitted to the other four models. Throughput is compared at the largest "
    "published batch."
)

BENCHMARK: Final = Benchmark(
    name="costs_plain",
    run=run,
    full=Size(options={name: {} for name in BUILDS}),
    quick=Size(
        options={
            "ResNet-50": {"side": 32, "depths": (1, 1)},
            "Bert-Large": {"layers": 2, "hidden": 64, "length": 16},
            "GPT-Small": {"layers": 2, "hidden": 64, "length": 16},
        },
        logs=("unet", "resnet32"),
    ),
)
