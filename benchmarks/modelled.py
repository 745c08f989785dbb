"""Seconds of steps by the roofline, its shares calibrated on this machine, beside what was measured."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import columns
from benchmarks.calibration import apart, by, calibrate
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from spillway.calibration.measured import measure
from spillway.costs import Device, Shares, step_seconds, timed
from spillway.ir import Step
from spillway.workloads import Workload, get
from spillway.workloads.recorded import record

AT_MOST: Final = 0.15
"""Target for the distance between modelled and measured step, as a share."""


@frozen
class Size:
    """How much is measured."""

    workloads: Sequence[tuple[str, Mapping[str, Any]]]
    """Names with options."""
    times: int
    """Steps whose ops are timed, of each of which the median counts."""


def run(size: Size, tell: Tell) -> Result:
    """Record every workload, calibrate on all of them and on all but one."""
    tell("measuring the machine")
    device = measure(Path(tempfile.gettempdir()))
    steps: dict[str, Step] = {}
    plain: dict[str, float] = {}
    for name, options in size.workloads:
        tell(name)
        workload = get(name, **options)
        plain[name] = _plain_seconds(workload, size.times)
        steps[name] = record(workload, timed_steps=size.times - 1).step
    everything = calibrate(list(steps.values()), device)
    rows = []
    for name, step in steps.items():
        others = calibrate([other for called, other in steps.items() if called != name], device)
        rows.append(_row(name, step, device, plain[name], everything, others))
    return Result(
        title="Modelled against measured seconds of steps on this CPU",
        columns=COLUMNS,
        rows=rows,
        notes=(*NOTES, _of_device(device)),
    )


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(workload="workload", ops="ops"),
    *columns.seconds(plain="plain step", measured="its ops, measured", modelled="modelled"),
    *columns.ratios(ratio="modelled / measured"),
    *columns.shares(op_error="ops off by"),
    *columns.ratios(unseen_ratio="without having seen it"),
    *columns.shares(unseen_op_error="ops off by"),
    *columns.ratios(usual_ratio="uncalibrated"),
)

NOTES: Final = (
    "Modelled: with the shares that were calibrated on all of these steps. Without having seen it: calibrated on the "
    "other steps alone. Uncalibrated: with the shares for GPUs. Ops off by: the sum of the distances of single ops, as "
    "a share of the sum of their seconds. A plain step takes longer than its ops: autograd, optimizer and Python.",
)


def _checks(result: Result) -> Iterator[Check]:
    # Not by shares that have seen it, whose sums are the measured ones by construction.
    worst = max(abs(row["unseen_ratio"] - 1) for row in result.rows)
    yield Check(
        what="modelled step that was not seen, distance from measured at worst", measured=worst, at_most=AT_MOST
    )


def _row(name: str, step: Step, device: Device, plain: float, shares: Shares, others: Shares) -> Row:
    measured = step_seconds(step)
    modelled = step_seconds(timed(step, by(device, shares)))
    return {
        "workload": name,
        "ops": len(step.ops),
        "plain": plain,
        "measured": measured,
        "modelled": modelled,
        "ratio": modelled / measured,
        "op_error": apart(step, device, shares),
        "unseen_ratio": step_seconds(timed(step, by(device, others))) / measured,
        "unseen_op_error": apart(step, device, others),
        "usual_ratio": step_seconds(timed(step, device)) / measured,
    }


def _plain_seconds(workload: Workload, times: int) -> float:
    batch = next(iter(workload.batches(1)))
    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        workload.train_step(batch)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def _of_device(device: Device) -> str:
    return (
        f"This machine: {device.flops_per_second / 1e9:.1f} GFLOP/s in a product of matrices, "
        f"{device.bytes_per_second / 1e9:.1f} GB/s of memory, {device.op_seconds * 1e6:.1f} us for the smallest op."
    )


BENCHMARK: Final = Benchmark(
    name="modelled",
    run=run,
    judge=_checks,
    full=Size(workloads=(("deep-narrow", {}), ("resnet", {}), ("stdlib-lm", {})), times=5),
    quick=Size(
        workloads=(("deep-narrow", {"layers": 4, "width": 16, "batch": 16}), ("resnet", {"width": 4, "batch": 2})),
        times=1,
    ),
)
