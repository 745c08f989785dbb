"""PAPAYA's five models on hardware that nothing was fitted to: a T4, a K80, and 2, 4 and 8 V100s.

Rates are those of data sheets, efficiencies those of one Titan V and one V100. The largest plain batch and that of
checkpoints within 80 % of memory, and what they train a second, with the interval that left-out steps had. Several
V100s train data parallel: a ring all-reduce of all gradients, which no compute hides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from papers.papaya.models import BUILDS
from papers.papaya.simulated import bench_of, largest_batch
from spillway.advisor.model import ring_seconds
from spillway.advisor.simulated import SimulatedBench, Steps
from spillway.costs import PUBLISHED, device_named

METHODS: Final = ("plain", "checkpoint")
SHARE: Final = 0.8
"""Of memory, what steps may take: PAPAYA's."""
NVLINK: Final = 25e9
"""Bytes per second of one link of NVLink 2.0 in one direction, by its data sheet: a ring over one link each."""


@frozen
class Size:
    """How much is run."""

    options: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {name: {} for name in BUILDS})
    hardware: Sequence[tuple[str, int]] = (("t4", 1), ("k80", 1), ("v100", 1), ("v100", 2), ("v100", 4), ("v100", 8))
    """Devices by their names, and how many."""


def run(size: Size, tell: Tell) -> Result:
    """Every model on everything."""
    rows: list[Row] = []
    for name, options in size.options.items():
        steps = bench_of(name, options)[1]
        for device in dict.fromkeys(device for device, _ in size.hardware):
            counts = [count for one, count in size.hardware if one == device]
            rows += _rows(name, steps, device, counts)
        tell(f"{name}: simulated")
    return Result(title=TITLE, columns=COLUMNS, rows=rows, notes=(NOTE,))


def _rows(name: str, steps: Steps, called: str, counts: Sequence[int]) -> Iterator[Row]:
    device = device_named(called)
    bench, limit = SimulatedBench(name, steps, device), int(SHARE * device.memory)
    gradients, guess = bench.gradient_bytes(), 16
    least, most = PUBLISHED.step_spread
    for method in METHODS:
        batch = guess = largest_batch(bench, method, limit, guess) or 0
        seconds = bench.measure(method, batch).seconds if batch else None
        for count in counts:
            told: dict[str, Any] = {"throughput": None, "low": None, "high": None}
            if seconds is not None:
                exchanged = ring_seconds(gradients, count, bytes_per_second=NVLINK, latency=0.0) if count > 1 else 0.0
                told = {
                    "throughput": count * batch / (seconds + exchanged),
                    "low": count * batch / (most * seconds + exchanged),
                    "high": count * batch / (least * seconds + exchanged),
                }
            yield {"model": name, "device": called, "count": count, "method": method, "batch": batch, **told}
        guess = batch or 16


def judge(result: Result) -> Iterator[Check]:
    """Memory is what checkpoints save, on any device."""
    batches = {(row["model"], row["device"], row["method"]): row["batch"] for row in result.rows}
    smaller = [key for key, batch in batches.items() if batch < batches[*key[:2], "plain"]]
    yield Check(what=f"of {len(batches)} cases: checkpoints with a smaller batch than plain", measured=len(smaller))


TITLE: Final = "PAPAYA's five models on hardware that nothing was fitted to"

COLUMNS: Final = (
    *columns.text(model="model", device="device", count="devices", method="method", batch="batch of each"),
    *columns.shown("{:.1f}".format, throughput="samples/s", low="80 % from", high="to"),
)  # fmt: skip

NOTE: Final = (
    "Written before any measurement of these devices was looked up, and not changed since. Devices exchange all "
    "gradients at 25 GB/s after every backward."
)

BENCHMARK: Final = Benchmark(
    name="costs_hardware",
    run=run, judge=judge,
    full=Size(),
    quick=Size(
        options={"ResNet-50": {"side": 32, "depths": (1, 1)}}, hardware=(("t4", 1), ("v100", 2)),
    ),
)  # fmt: skip
