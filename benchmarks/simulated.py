"""Simulated against real: the same step, budget and method, on paper and on real tensors of this machine.

Both decide by seconds. So that one clock is behind both, the machine on paper has copies that take what the session's
took, by a line through their bytes and seconds: a session's copies run beside its ops, and are slower than those that
were measured alone. How paper decides by the latter is shown beside it.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np

import spillway
from benchmarks import columns
from benchmarks.models import build
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from spillway.calibration.measured import this_machine
from spillway.costs.device import Device
from spillway.ir import Change, Recorded, Timeline
from spillway.ir.spans import Lane, Span
from spillway.methods import METHODS
from spillway.methods.base import AbstractPolicy
from spillway.session.tensor_session import TensorSession
from spillway.simulation.simulated_engine import Simulation, simulate
from spillway.units import Bytes, MiB, Seconds
from spillway.workloads import Workload
from spillway.workloads.recorded import record

METHODS_COMPARED: Final = ("lru", "delta")
EXTRA_LIMIT: Final = 0.2
"""Of the real seconds beside the plain step's, how much the simulated ones may differ."""
COUNT_LIMIT: Final = 0.1
"""Of the real drops, moves and returns, how much the simulated ones may differ."""
PEAK_SHARE: Final = 0.01
PEAK_BYTES: Final = MiB
"""The peaks may differ by either."""
WARM: Final = 2
"""Steps under a budget that do not count: policies look back, and sizes are learned."""
COUNTED: Final = ("drops", "moves", "returns")
LEAST_EXTRA: Final[Seconds] = 1e-9
"""Of a real step beside the plain one: where it was no slower nothing was measured, and no simulation is right."""
RETURNS: Final = (Change.RECOMPUTE, Change.PAGE_IN)
SLOWER: Final = 1.5
"""Times the seconds of copies alone from which those of a session count as slower."""


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


@frozen
class Measured:
    """A session beside plain steps."""

    plain: Seconds
    """Of a plain step, the median."""
    seconds: Seconds
    """Of a managed one."""
    extra: Seconds
    """Of a managed one beside the plain one that followed it, the median."""
    stall: Seconds
    moves: int
    drops: int
    returns: int
    """Medians of all steps: seconds decide, and they differ from step to step."""
    peak: Bytes
    """The highest."""
    timeline: Timeline
    """Of the last step."""
    copies: Sequence[Span]
    """Of all steps."""


def measured(workload: tuple[str, dict[str, Any]], allowed: Bytes, method: str, steps: int) -> Measured:
    """Plain steps of one copy of the workload and managed steps of another take turns, so that both see the same
    machine. What is decided is told by steps that keep a timeline, which takes seconds that are not the method's."""
    plain, managed = build(*workload), build(*workload)
    batch = next(iter(plain.batches(1)))
    for one in (plain, managed):
        one.train_step(batch)
    times: tuple[list[float], list[float]] = ([], [])
    with _session(managed, allowed, method, timeline=False) as memory:
        for number in range(WARM + steps):
            with memory.step(batch):
                managed.train_step(batch)
            beside = _seconds(plain, batch)
            if number >= WARM:
                times[0].append(beside)
                times[1].append(memory.history[-1].seconds)
    timelines: list[Timeline] = []
    with _session(managed, allowed, method, timeline=True) as memory:
        for _ in range(WARM + steps):
            memory._most_pressure = (False, -1, 0)  # so that this step's timeline is kept
            with memory.step(batch):
                managed.train_step(batch)
            timelines.append(_kept(memory))
        counted = memory.history[-steps:]
    return Measured(
        plain=statistics.median(times[0]), seconds=statistics.median(times[1]),
        extra=statistics.median(managed - plain for plain, managed in zip(*times, strict=True)),
        stall=statistics.median(step.stall_seconds for step in counted),
        moves=statistics.median_low(step.moves for step in counted),
        drops=statistics.median_low(step.drops for step in counted),
        returns=statistics.median_low(map(returns, timelines[-steps:])),
        peak=max(step.peak_bytes for step in counted), timeline=timelines[-1],
        copies=[span for one in timelines for span in one.spans if span.lane in (Lane.COPY_OUT, Lane.COPY_IN)],
    )  # fmt: skip


@contextmanager
def _session(managed: Workload, allowed: Bytes, method: str, *, timeline: bool) -> Iterator[TensorSession]:
    spill, report = spillway.SpillOptions(return_freed=False), spillway.ReportOptions(timeline=timeline)
    with spillway.manage(
        managed.model, managed.optimizers, budget=allowed, method=_policy(method), spill=spill, report=report
    ) as memory:
        assert isinstance(memory, TensorSession)
        yield memory


def _kept(memory: spillway.Session) -> Timeline:
    if memory.timeline is None:
        raise TypeError("The session keeps no timelines.")
    return memory.timeline


def link_of(copies: Sequence[Span], device: Device) -> Device:
    """The device with copies as these were: the same begin for both ways and a rate for each, by least squares. Compute
    waits for a copy no shorter than the device says: that it is woken up is no part of the copy."""
    terms = np.array([[1.0, out * span.nbytes, (1 - out) * span.nbytes]
                      for span in copies for out in (float(span.lane is Lane.COPY_OUT),)])  # fmt: skip
    seconds = np.array([span.seconds for span in copies])
    if len(copies) < 3:
        return device
    begin, out, back = np.linalg.lstsq(terms, seconds, rcond=None)[0]
    if begin < 0 or min(out, back) <= 0:  # no line: all bytes alike
        rates = []
        for lane in (Lane.COPY_OUT, Lane.COPY_IN):
            some = [span for span in copies if span.lane is lane] or list(copies)
            rates.append(sum(span.seconds for span in some) / sum(span.nbytes for span in some))
        begin, (out, back) = 0.0, rates
    return replace(
        device,
        copy_seconds=max(float(begin), device.copy_seconds),
        out_per_second=1 / float(out),
        in_per_second=1 / float(back),
    )


def decisions(timeline: Timeline) -> Counter[tuple[str, int]]:
    """What left and came back, and how. A storage of the step is told by its place among those that it creates."""
    created = [event.storage for event in timeline.events if event.change is Change.CREATE]
    first = min(created, default=0)
    return Counter(
        (event.change.value, max(event.storage - first + 1, 0))
        for event in timeline.events
        if event.change not in (Change.CREATE, Change.DIE)
    )


def returns(timeline: Timeline) -> int:
    """How often something came back."""
    return sum(event.change in RETURNS for event in timeline.events)


def cause(row: Row) -> str:
    """Why counts are apart, by what was measured; empty where they are not."""
    missed = [name for name in COUNTED if _apart(row, name) > COUNT_LIMIT]
    if not missed:
        return ""
    what = f"{', '.join(missed)} apart"
    if row["same"] >= 1 - COUNT_LIMIT:
        return f"{what}: few there are, {row['same']:.0%} of the decisions are the same"
    if row["link"] > SLOWER:
        return f"{what}: copies took {row['link']:.1f} times as long beside the ops, not evenly"
    if abs(row["plain_seconds"] / row["ops_seconds"] - 1) > COUNT_LIMIT:
        return f"{what}: steps took {row['plain_seconds'] / row['ops_seconds']:.2f} times the recorded ops, not evenly"
    return f"{what}: not by the seconds of copies or ops"


def _apart(row: Row, name: str) -> float:
    ours, theirs = int(row[f"simulated_{name}"]), int(row[name])
    return abs(ours - theirs) / max(theirs, 1)


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
                tell(f"{workload[0]}, {method} at {share:.0%}: {rows[-1]['of_extra']:.3f} of the real extra seconds")
    return Result(
        title="a step on paper against the same step on real tensors", columns=COLUMNS, rows=rows,
        notes=NOTES,
    )  # fmt: skip


def _row(
    workload: tuple[str, dict[str, Any]], recorded: Recorded, share: float, method: str, device: Device, steps: int
) -> Row:
    allowed = int(recorded.step.plain_peak() * share)
    real = measured(workload, allowed, method, steps)

    def on_paper(machine: Device) -> Simulation:
        return simulate(recorded.step, allowed=allowed, method=_policy(method), device=machine, steps=WARM + steps)

    session, alone = link_of(real.copies, device), on_paper(device)
    ran = on_paper(session)
    overhead, extra = real.seconds / real.plain, real.extra
    ours, theirs = decisions(ran.timeline), decisions(real.timeline)
    bytes_moved = sum(span.nbytes for span in real.copies)
    lone = sum(
        device.out_seconds(span.nbytes) if span.lane is Lane.COPY_OUT else device.in_seconds(span.nbytes)
        for span in real.copies
    )
    row = {
        "workload": workload[0], "method": method, "share": share, "allowed": allowed,
        "overhead": overhead, "simulated_overhead": ran.overhead,
        "extra": extra, "simulated_extra": ran.seconds - ran.plain_seconds,
        "of_extra": (ran.seconds - ran.plain_seconds) / max(extra, LEAST_EXTRA),
        "plain_seconds": real.plain, "ops_seconds": ran.plain_seconds,
        "stall": real.stall, "simulated_stall": ran.stall_seconds,
        "moves": real.moves, "simulated_moves": ran.moves, "alone_moves": alone.moves,
        "drops": real.drops, "simulated_drops": ran.drops, "alone_drops": alone.drops,
        "returns": real.returns, "simulated_returns": returns(ran.timeline),
        "same": 2 * (ours & theirs).total() / ((ours.total() + theirs.total()) or 1),
        "link": sum(span.seconds for span in real.copies) / lone if lone else 1.0, "bytes_moved": bytes_moved,
        "peak": real.peak, "simulated_peak": ran.peak_bytes, "status": ran.status,
    }  # fmt: skip
    return {**row, "cause": cause(row)}


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
        Check(what=f"simulated extra seconds, apart from the real ones, {what}", measured=abs(row["of_extra"] - 1),
              at_most=EXTRA_LIMIT),
        *(Check(what=f"simulated {name}, apart from the real ones, {what}", measured=_apart(row, name),
                at_most=COUNT_LIMIT) for name in COUNTED),
        Check(what=f"bytes between the peaks, {what}", measured=apart, at_most=within),
    ]  # fmt: skip


COLUMNS: Final = (
    *columns.text(workload="workload", method="method", share="budget"),
    *columns.nbytes(peak="peak", simulated_peak="simulated"),
    *columns.ratios(overhead="x plain", simulated_overhead="simulated", of_extra="extra, simulated/real"),
    *columns.seconds(plain_seconds="plain step", ops_seconds="its ops", stall="stalled", simulated_stall="simulated"),
    *columns.text(moves="moves", simulated_moves="simulated", alone_moves="by copies alone"),
    *columns.text(drops="drops", simulated_drops="simulated", alone_drops="by copies alone"),
    *columns.text(returns="returns", simulated_returns="simulated"),
    *columns.shares(same="same decisions"),
    *columns.ratios(link="copies / copies alone"),
    *columns.text(cause="why counts differ"),
)
NOTES: Final = (
    "Overhead: seconds over those of a plain step, real ones over a real one, simulated ones over the sum of measured "
    "op seconds. Extra: what is above the plain step. Plain and managed steps take turns.",
    "Freed memory is kept: returning it to the system makes page faults, which the machine on paper does not know.",
    "Simulated: by copies that take what the session's took. By copies alone: as the machine was measured, idle. Ops "
    "take what they were recorded to take, each the median of some steps.",
    "Moves, drops and returns: medians of all steps. Same decisions: of what left and came back in the last step, the "
    "share that both have, by storage and way.",
    "Seconds and counts are of different steps of one training: a timeline takes seconds that are not the method's.",
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
        steps=25,
    ),
    quick=Size(
        workloads=(("deep-narrow", {"layers": 6, "batch": 64}),), shares=(0.6,), steps=1, measures_machine=False
    ),
)
