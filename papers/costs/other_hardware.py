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
from papers.papaya.simulated import steps_of
from spillway.advisor.bench import AbstractBench
from spillway.advisor.model import ring_seconds
from spillway.advisor.simulated import SimulatedBench
from spillway.calibration.named_device import device_of
from spillway.costs import PUBLISHED
from spillway.units import Bytes

METHODS: Final = ("plain", "checkpoint")
SHARE: Final = 0.8
"""Of memory, what steps may take: PAPAYA's."""
TRIED: Final = (8, 24)
"""Batches that the line of a peak goes through."""
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
        steps = steps_of(name, options)
        benches = {called: SimulatedBench(name, steps, device_of(called)) for called, _ in size.hardware}
        for method in METHODS:
            batches: dict[Bytes, int] = {}  # the same on all devices of the same memory
            for called, count in size.hardware:
                limit = int(SHARE * benches[called].device.memory)
                if limit not in batches:
                    batches[limit] = largest_on_line(next(iter(benches.values())), method, limit)
                rows.append(_row(benches[called], method, batches[limit], called, count))
        tell(f"{name}: simulated")
    return Result(title=TITLE, columns=COLUMNS, rows=rows, notes=(NOTE,))


def largest_on_line(bench: AbstractBench, method: str, limit: Bytes) -> int:
    """The largest batch whose peak is within the limit, looked for where a line has it; 0 if no sample is."""

    def peak(size: int) -> Bytes:
        return bench.measure(method, size).peak or 0

    first, second = (peak(size) for size in TRIED)
    each = (second - first) / (TRIED[1] - TRIED[0])
    batch = max(int(TRIED[1] + (limit - second) / each), 1) if each > 0 else TRIED[1]
    while peak(batch + 1) <= limit:
        batch += 1
    while batch and peak(batch) > limit:
        batch -= 1
    return batch


def _row(bench: SimulatedBench, method: str, batch: int, called: str, count: int) -> Row:
    seconds = bench.measure(method, batch).seconds if batch else None
    told: dict[str, Any] = {"throughput": None, "low": None, "high": None}
    if seconds is not None:
        least, most = PUBLISHED.step_spread
        exchanged = ring_seconds(bench.gradient_bytes(), count, bytes_per_second=NVLINK) if count > 1 else 0.0
        found = (count * batch / (times * seconds + exchanged) for times in (1.0, most, least))
        told = dict(zip(told, found, strict=True))
    return {"model": bench.name, "device": called, "count": count, "method": method, "batch": batch, **told}


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
    "Written before any measurement of these devices was looked up. Devices exchange all gradients at 25 GB/s after "
    "every backward."
)

BENCHMARK: Final = Benchmark(
    name="costs_hardware",
    run=run, judge=judge,
    full=Size(),
    quick=Size(
        options={"ResNet-50": {"side": 32, "depths": (1, 1)}}, hardware=(("t4", 1), ("v100", 2)),
    ),
)  # fmt: skip
