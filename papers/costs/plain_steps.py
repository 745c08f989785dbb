"""Plain steps of PAPAYA's five models on a V100, foretold with the model left out.

Shares and sizes of single ops come from DTR's logs, which were measured on another GPU with the same multiprocessors.
What logs in float32 cannot tell, the share of tensor cores and the host's seconds for an op, is fitted to the plain
steps of the other models, Swin's aside. Peaks are of the recorded steps; nothing is fitted to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Skipped, Tell, frozen
from papers.costs.left_out import ZIP, Point, devices_of, fit_steps, of_logs, points_of, without
from papers.costs.log_ops import LOGS
from papers.papaya.models import BUILDS
from papers.papaya.published import DATA, NAMED
from papers.papaya.simulated import read_published, steps_of
from spillway.costs import PUBLISHED, Device, Efficiency, OpKind
from spillway.costs.fitting import spread_of


@frozen
class Size:
    """How much is run."""

    options: Mapping[str, Mapping[str, Any]]
    """Of the models, by the paper's names."""
    logs: Sequence[str] = tuple(LOGS)
    zip: Path = ZIP
    data: Path = DATA


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
        models[name] = points_of(NAMED[name], steps_of(name, options), published[name], size.data)
        tell(f"{name}: recorded")
    return result_of(models, single)


def result_of(models: Mapping[str, Sequence[Point]], single: Efficiency) -> Result:
    """A row a batch size that was published."""
    devices = devices_of(models, single)
    rows = []
    for name, points in models.items():
        for point in points:
            foretold = point.seconds_on(devices[name])
            rows.append(
                {
                    "model": name, "batch": point.batch, "measured": point.measured, "foretold": foretold,
                    "ratio": foretold / point.measured, "peak": point.peak, "published_peak": point.published_peak,
                    "peak_ratio": None if point.published_peak is None else point.peak / point.published_peak,
                }
            )  # fmt: skip
    by, host = fit_steps(list(without(models).values()), single)
    notes = [
        NOTE,
        f"Fitted to all but Swin: products of halves get {by.shares[OpKind.MATMUL].half:.3f} of the tensor cores, "
        f"batched ones {by.shares[OpKind.BATCHED].half:.3f}; the host takes {1e6 * host:.1f} us an op.",
        *(_told(name, device) for name, device in devices.items()),
        *(_asking(name, points, devices[name]) for name, points in models.items() if NAMED[name].gives_back),
    ]
    return Result(title=TITLE, columns=COLUMNS, rows=rows, notes=notes)


def _told(name: str, device: Device) -> str:
    by = device.efficiency or PUBLISHED
    half = [by.shares[kind].half for kind in (OpKind.MATMUL, OpKind.BATCHED)]
    return f"{name} left out: {half[0]:.3f}, {half[1]:.3f}, {1e6 * device.host_seconds:.1f} us."


def _asking(name: str, points: Sequence[Point], device: Device) -> str:
    """How long CUDA would have to take for memory, if nothing else were missing from a step."""
    told = []
    for point in points:
        low, high = 0.0, 0.1
        for _ in range(40):
            middle = (low + high) / 2
            by = device.efficiency or PUBLISHED
            short = point.seconds(by, device.host_seconds, middle) < point.measured
            low, high = (middle, high) if short else (low, middle)
        told.append(f"{point.batch}: {numpy.sum(point.asked):.0f} times, {1e3 * low:.2f} ms")
    return f"{name} asks CUDA for memory so often, and is as slow as published if an answer takes, {', '.join(told)}."


def judge(result: Result) -> Iterator[Check]:
    """Throughput at the largest batch, peaks, and how many steps lie in the interval that the other models give."""
    rows = result.rows
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
    "cores and the host's seconds for an op fitted to the other models, without Swin, whose steps wait for CUDA's "
    "memory. Throughput is compared at the largest published batch."
)

BENCHMARK: Final = Benchmark(
    name="costs_plain",
    run=run,
    judge=judge,
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
