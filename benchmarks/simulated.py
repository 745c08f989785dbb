"""Simulated against real: the same step, budget and method, on paper and on real tensors of this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

import spillway
from benchmarks import columns
from benchmarks.models import build
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from spillway.calibration.measured import this_machine
from spillway.costs.device import Device
from spillway.ir import Recorded
from spillway.methods import METHODS
from spillway.methods.base import AbstractPolicy
from spillway.recording import record
from spillway.simulation.simulated_engine import Simulation, simulate
from spillway.units import Bytes, MiB, Seconds
from spillway.workloads import Workload

METHODS_COMPARED: Final = ("lru", "delta")
TIME_LIMIT: Final = 0.15
"""Of the real overhead, how much the simulated one may differ."""
PEAK_SHARE: Final = 0.01
PEAK_BYTES: Final = MiB
"""The peaks may differ by either."""
WARM: Final = 2
"""Steps under a budget that do not count: policies look back, and sizes are learned."""


@frozen
class Size:
    """How much is measured."""

    workloads: Sequence[tuple[str, dict[str, Any]]]
    """Names and options."""
    shares: Sequence[float]
    """Budgets, of the plain peak."""
    steps: int
    """Steps that are timed, each beside a plain one."""
    measures_machine: bool = True
    """Whether the machine on paper is measured now, and not remembered from another day and load."""


def measured(
    workload: tuple[str, dict[str, Any]], allowed: Bytes, method: AbstractPolicy, steps: int
) -> tuple[Seconds, Seconds, spillway.StepReport]:
    """Seconds of a plain step and of a managed one, medians, and the last report. Plain steps of one copy of the
    workload and managed steps of another take turns, so that both see the same machine."""
    plain, managed = build(*workload), build(*workload)
    batch = next(iter(plain.batches(1)))
    for one in (plain, managed):
        one.train_step(batch)
    times: tuple[list[float], list[float]] = ([], [])
    spill = spillway.SpillOptions(return_freed=False)
    with spillway.manage(managed.model, managed.optimizers, budget=allowed, method=method, spill=spill) as memory:
        for number in range(WARM + steps):
            with memory.step(batch):
                managed.train_step(batch)
            beside = _seconds(plain, batch)
            if number >= WARM:
                times[0].append(beside)
                times[1].append(memory.history[-1].seconds)
        last = memory.history[-1]
    return statistics.median(times[0]), statistics.median(times[1]), last


def _seconds(workload: Workload, batch: Any) -> float:
    began = time.perf_counter()
    workload.train_step(batch)
    return time.perf_counter() - began


def run(size: Size, tell: Tell) -> Result:
    """Record every workload, then run and simulate it under every budget and method."""
    device, rows = this_machine(refresh=size.measures_machine), []
    for workload in size.workloads:
        recorded = record(build(*workload), timed_steps=size.steps)
        for share in size.shares:
            for method in METHODS_COMPARED:
                rows.append(_row(workload, recorded, share, method, device, size.steps))
                tell(f"{workload[0]}, {method} at {share:.0%}: {rows[-1]['of_real']:.3f} of the real overhead")
    return Result(
        title="a step on paper against the same step on real tensors", columns=COLUMNS, rows=rows,
        notes=NOTES,
    )  # fmt: skip


def _row(
    workload: tuple[str, dict[str, Any]], recorded: Recorded, share: float, method: str, device: Device, steps: int
) -> Row:
    allowed = int(recorded.step.plain_peak() * share)
    plain, seconds, last = measured(workload, allowed, _policy(method), steps)
    ran: Simulation = simulate(
        recorded.step, allowed=allowed, method=_policy(method), device=device, steps=WARM + steps,
    )  # fmt: skip
    overhead = seconds / plain
    return {
        "workload": workload[0], "method": method, "share": share, "allowed": allowed,
        "overhead": overhead, "simulated_overhead": ran.overhead, "of_real": ran.overhead / overhead,
        "plain_seconds": plain, "ops_seconds": ran.plain_seconds,
        "stall": last.stall_seconds, "simulated_stall": ran.stall_seconds,
        "moves": last.moves, "simulated_moves": ran.moves, "drops": last.drops, "simulated_drops": ran.drops,
        "peak": last.peak_bytes, "simulated_peak": ran.peak_bytes, "status": ran.status,
    }  # fmt: skip


def _policy(name: str) -> AbstractPolicy:
    policy = METHODS[name].on_paper()
    if not isinstance(policy, AbstractPolicy):
        raise TypeError(f"{name} is no policy.")
    return policy


def _checks(result: Result) -> list[Check]:
    return [check for row in result.rows for check in _of_row(row)]


def _of_row(row: Row) -> list[Check]:
    what = f"{row['workload']}, {row['method']} at {row['share']:.0%}"
    apart = abs(row["simulated_peak"] - row["peak"])
    within = max(PEAK_BYTES, PEAK_SHARE * row["peak"])
    return [
        Check(what=f"simulated overhead, apart from the real one, {what}", measured=abs(row["of_real"] - 1),
              at_most=TIME_LIMIT),
        Check(what=f"bytes between the peaks, {what}", measured=apart, at_most=within),
    ]  # fmt: skip


COLUMNS: Final = (
    *columns.text(workload="workload", method="method", share="budget"),
    *columns.nbytes(peak="peak", simulated_peak="simulated"),
    *columns.ratios(overhead="x plain", simulated_overhead="simulated", of_real="simulated/real"),
    *columns.seconds(plain_seconds="plain step", ops_seconds="its ops", stall="stalled", simulated_stall="simulated"),
    *columns.text(moves="moves", simulated_moves="simulated", drops="drops", simulated_drops="simulated"),
)
NOTES: Final = (
    "Overhead: seconds over those of a plain step, real ones over a real one, simulated ones over the sum of measured "
    "op seconds. Plain and managed steps take turns.",
    "Freed memory is kept: returning it to the system makes page faults, which the machine on paper does not know.",
    "The methods decide by seconds, measured there and recorded here, so that they need not decide the same.",
)

BENCHMARK: Final = Benchmark(
    name="simulated",
    run=run,
    judge=_checks,
    full=Size(
        workloads=(
            ("resnet", {"batch": 16}),
            ("stdlib-lm", {"width": 192, "layers": 4, "longest": 256}),
            ("deep-narrow", {"layers": 100}),
        ),
        shares=(0.8, 0.6, 0.5),
        steps=9,
    ),
    quick=Size(
        workloads=(("deep-narrow", {"layers": 6, "batch": 64}),), shares=(0.6,), steps=1, measures_machine=False
    ),
)
