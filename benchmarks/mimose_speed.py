"""Mimose's mean step over inputs of natural lengths, beside every block recomputed and beside one static plan.

The demo's model and batches. The budget lies half way between the peaks with every block recomputed and with none.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final, final

import spillway
from benchmarks import columns
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell
from benchmarks.timing import Clock
from benchmarks.training import warm_up
from benchmarks.trainings import path_of
from benchmarks.turns import account, answered
from benchmarks.workers import Job
from spillway.internals.process_memory import PeakMemory
from spillway.methods import Mimose
from spillway.session.input_sizes import largest_size
from spillway.units import Bytes, format_bytes
from spillway.workloads import get

PLAIN: Final = "plain"
MIMOSE: Final = "mimose"
STATIC: Final = "static"
CHECKPOINT: Final = "checkpoint"
LIMITS: Final = {CHECKPOINT: 0.85, STATIC: 0.95}
"""Mimose's mean step, as a multiple of theirs."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    workload: str
    """A function of `benchmarks.workloads`."""
    steps: int
    """Different batches, each a step of every competitor."""
    warm: int
    """The first of them, in which Mimose measures and which do not count."""


@final
class Competitor:
    """Every call is a step on the next batch."""

    def __init__(
        self, *, workload: str, steps: int, method: str | None, budget: Bytes | str | None, traced: bool
    ) -> None:
        warm_up()
        batches = list(get(path_of(workload)).batches(steps))
        self._memory = PeakMemory()
        self._workload = get(path_of(workload))
        self._batches = cycle(batches)
        self._session: spillway.Session | None = None
        if method is not None:
            chosen: Any = Mimose.static(largest_size(batches)) if method == STATIC else method
            self._session = spillway.manage(
                self._workload.model, self._workload.optimizers, budget=budget, method=chosen,
                report=spillway.ReportOptions(timeline=traced), spill=spillway.SpillOptions(return_freed=False),
            )  # fmt: skip

    def __call__(self) -> dict[str, Any]:
        batch, clock = next(self._batches), Clock()
        with clock.running():
            if self._session is None:
                loss = float(self._workload.train_step(batch))
            else:
                with self._session.step(batch):
                    loss = float(self._workload.train_step(batch))
        report = None if self._session is None else self._session.history[-1].to_json()
        rss = self._memory.above_start()
        return {"wall": clock.wall[0], "cpu": clock.cpu[0], "loss": loss.hex(), "rss": rss, "report": report}


def competitor(**options: Any) -> Competitor:
    """One by its options, in its own process."""
    return Competitor(**options)


def run(size: Size, tell: Tell) -> Result:
    """Measure all competitors, a step each in turn."""

    def job(method: str | None, budget: Bytes | str | None = None, *, traced: bool = False) -> Job:
        options = {"workload": size.workload, "steps": size.steps, "method": method, "budget": budget}
        return Job(function="benchmarks.mimose_speed:competitor", options={**options, "traced": traced})

    peaks = {}
    for name, method, budget in ((CHECKPOINT, CHECKPOINT, "90%"), (PLAIN, MIMOSE, None)):
        tell(f"peak of {name}")
        peaks[name] = account(job(method, budget, traced=True), size.steps)
    budget = sum(peaks.values()) // 2
    jobs = {PLAIN: job(None), **{name: job(name, budget) for name in (MIMOSE, STATIC, CHECKPOINT)}}
    answers = answered(jobs, size.steps, tell)
    rows = [_row(name, peaks, budget, found, answers[PLAIN], size) for name, found in answers.items()]
    return Result(
        title=f"mean step over natural lengths ({size.workload}), budget {format_bytes(budget)}",
        columns=COLUMNS,
        rows=rows,
        checks=[*_checks(rows), *_promises(rows, budget)],
        notes=NOTES,
    )


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(competitor="competitor"),
    *columns.nbytes(peak_bytes="peak", peak_rss_bytes="RSS"),
    *columns.seconds(seconds="mean step", cpu_seconds="CPU"),
    *columns.ratios(ratio="x plain", to_checkpoint="x checkpoint", to_static="x static"),
    *columns.shares(recomputed_share="blocks recomputed"),
    *columns.seconds(planning_seconds="planning, median"),
    *columns.shown(lambda same: "as plain" if same else "DIFFER", identical="losses"),
)
NOTES: Final = (
    "Every competitor trains the same batches, one function of the standard library a sample, in a process of its "
    "own, a step each in turn; the mean leaves out the first steps, in which Mimose recomputes every block and "
    "measures. Half way: between the peak with every block recomputed and that with none, both measured.",
    "Freed memory is left to the allocator. Peak: measured where a step was traced, and otherwise what was seen "
    "between blocks or expected; of the plain run it is that of a session which only measures.",
)


def _row(
    name: str, peaks: dict[str, Bytes], budget: Bytes, found: list[Any], plain: list[Any], size: Size
) -> dict[str, Any]:
    counted, beside = found[size.warm :], plain[size.warm :]
    reports = [answer["report"] for answer in counted if answer["report"] is not None]
    mean = statistics.fmean(answer["wall"] for answer in counted)
    blocks = sum(report["blocks"] for report in reports)
    return {
        "competitor": name,
        "budget_bytes": budget if reports else None,
        "peak_bytes": max((report["peak_bytes"] for report in reports), default=peaks[PLAIN]),
        "peak_rss_bytes": max(answer["rss"] for answer in found),
        "seconds": mean,
        "cpu_seconds": statistics.fmean(answer["cpu"] for answer in counted),
        "ratio": mean / statistics.fmean(answer["wall"] for answer in beside),
        "recomputed_share": sum(r["recomputed_blocks"] for r in reports) / (blocks or 1) if reports else None,
        "planning_seconds": statistics.median(r["planning_seconds"] for r in reports) if reports else None,
        "identical": [answer["loss"] for answer in found] == [answer["loss"] for answer in plain],
    }


def _checks(rows: list[dict[str, Any]]) -> list[Check]:
    seconds = {row["competitor"]: row["seconds"] for row in rows}
    for row in rows:
        row["to_checkpoint"] = row["seconds"] / seconds[CHECKPOINT]
        row["to_static"] = row["seconds"] / seconds[STATIC]
    return [
        Check(what=f"mimose's mean step, times {name}'s", measured=seconds[MIMOSE] / seconds[name], at_most=limit)
        for name, limit in LIMITS.items()
    ]


def _promises(rows: Sequence[Row], budget: Bytes) -> list[Check]:
    return [
        Check(what="losses that differ from plain", measured=sum(not row["identical"] for row in rows), at_most=0),
        Check(
            what="competitors over the budget",
            measured=sum(row["peak_bytes"] > budget for row in rows if row["competitor"] != PLAIN),
            at_most=0,
        ),
    ]


BENCHMARK: Final = Benchmark(
    name="mimose_speed",
    run=run,
    full=Size(workload="demo_lm", steps=44, warm=4),
    quick=Size(workload="tiny_lm", steps=6, warm=4),
)
