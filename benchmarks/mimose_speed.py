"""Mimose's mean step over inputs of natural lengths, beside every block recomputed and beside one static plan.

The demo's model and batches. The budget lies half way between the peaks with every block recomputed and with none.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Final

import spillway
from benchmarks import columns
from benchmarks.record import Benchmark, Check, Column, Result, Tell, frozen
from benchmarks.training import Trainer, warm_up
from benchmarks.trainings import path_of
from benchmarks.turns import Answers, account, answered, figures, verdict
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


@frozen
class Size:
    """How much is measured."""

    workload: str
    """A function of `benchmarks.workloads`."""
    steps: int
    """Different batches, each a step of every competitor."""
    warm: int
    """The first of them, in which Mimose measures and which do not count."""


def competitor(
    *, workload: str, steps: int, method: str | None, budget: Bytes | str | None, traced: bool = False
) -> Trainer:
    """One that trains every batch in turn."""
    warm_up()
    batches, memory = list(get(path_of(workload)).batches(steps)), PeakMemory()
    built, session = get(path_of(workload)), None
    if method is not None:
        chosen: Any = Mimose.static(largest_size(batches)) if method == STATIC else method
        session = spillway.manage(
            built.model, built.optimizers, budget=budget, method=chosen,
            report=spillway.ReportOptions(timeline=traced), spill=spillway.SpillOptions(return_freed=False),
        )  # fmt: skip
    return Trainer(built, batches, session, memory)


def run(size: Size, tell: Tell) -> Result:
    """Measure all competitors, a step each in turn."""

    def job(method: str | None, budget: Bytes | str | None = None, **more: bool) -> Job:
        options = {"workload": size.workload, "steps": size.steps, "method": method, "budget": budget, **more}
        return Job(function="benchmarks.mimose_speed:competitor", options=options)

    peaks = {}
    for name, method, budget in ((CHECKPOINT, CHECKPOINT, "90%"), (PLAIN, MIMOSE, None)):
        tell(f"peak of {name}")
        peaks[name] = account(job(method, budget, traced=True), size.steps)
    budget = sum(peaks.values()) // 2
    jobs = {PLAIN: job(None), **{name: job(name, budget) for name in (MIMOSE, STATIC, CHECKPOINT)}}
    answers = answered(jobs, size.steps, tell)
    rows = [_row(name, peaks, budget, found, answers[PLAIN], size) for name, found in answers.items()]
    seconds = {row["competitor"]: row["seconds"] for row in rows}
    for row in rows:
        row |= {f"to_{other}": row["seconds"] / seconds[other] for other in (CHECKPOINT, STATIC)}
    return Result(
        title=f"mean step over natural lengths ({size.workload}), budget {format_bytes(budget)}",
        columns=COLUMNS,
        rows=rows,
        notes=NOTES,
    )


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(competitor="competitor"),
    *columns.nbytes(peak_bytes="peak", peak_rss_bytes="RSS"),
    *columns.seconds(seconds="mean step", cpu_seconds="CPU"),
    *columns.ratios(ratio="x plain", to_checkpoint="x checkpoint", to_static="x static"),
    *columns.shares(recomputed_share="blocks recomputed"),
    *columns.seconds(planning_seconds="planning, median"),
    *columns.shown(verdict, identical="losses"),
)
NOTES: Final = (
    "Every competitor trains the same batches, one function of the standard library a sample, in a process of its "
    "own, a step each in turn; the mean leaves out the first steps, in which Mimose recomputes every block and "
    "measures. Half way: between the peak with every block recomputed and that with none, both measured.",
    "Freed memory is left to the allocator. Peak: measured where a step was traced, and otherwise what was seen "
    "between blocks or expected; of the plain run it is that of a session which only measures.",
)


def _row(
    name: str, peaks: dict[str, Bytes], budget: Bytes, found: Answers, plain: Answers, size: Size
) -> dict[str, Any]:
    told, counted = figures(found, plain, size.warm, peaks[PLAIN]), found[size.warm :]
    reports = [answer["report"] for answer in counted if answer["report"] is not None]
    mean, beside = (statistics.fmean(answer["wall"] for answer in answers[size.warm :]) for answers in (found, plain))
    blocks = sum(report["blocks"] for report in reports)
    return {
        "competitor": name,
        "budget_bytes": budget if reports else None,
        **{key: told[key] for key in ("peak_bytes", "peak_rss_bytes", "identical")},
        "seconds": mean,
        "cpu_seconds": statistics.fmean(answer["cpu"] for answer in counted),
        "ratio": mean / beside,
        "recomputed_share": sum(r["recomputed_blocks"] for r in reports) / (blocks or 1) if reports else None,
        "planning_seconds": statistics.median(r["planning_seconds"] for r in reports) if reports else None,
    }


def _checks(result: Result) -> Iterator[Check]:
    seconds = {row["competitor"]: row["seconds"] for row in result.rows}
    for name, limit in LIMITS.items():
        ratio = seconds[MIMOSE] / seconds[name]
        yield Check(what=f"mimose's mean step, times {name}'s", measured=ratio, at_most=limit)
    yield Check(what="losses that differ from plain", measured=sum(not row["identical"] for row in result.rows))
    over = sum(row["peak_bytes"] > row["budget_bytes"] for row in result.rows if row["budget_bytes"] is not None)
    yield Check(what="competitors over the budget", measured=over)


BENCHMARK: Final = Benchmark(
    name="mimose_speed",
    run=run,
    judge=_checks,
    full=Size(workload="demo_lm", steps=44, warm=4),
    quick=Size(workload="tiny_lm", steps=6, warm=4),
)
