"""Two hundred steps of changing length under each of three budgets: is the budget kept, and is the training the same?

Measured as `spillway demo` measures: every run in a process of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from benchmarks.training import account, longest_batch
from benchmarks.trainings import differing, path_of, trained
from spillway.errors import BudgetInfeasible
from spillway.report.figures import highest_peak, recomputed_share
from spillway.subprocess_runs.rows import first_difference
from spillway.subprocess_runs.run import RunResult
from spillway.units import Bytes, format_bytes
from spillway.workloads import get

PLAIN: Final = "plain"
RSS_LIMIT: Final = 1.15
"""Peak RSS above the start, as a multiple of the budget."""


@frozen
class Size:
    """How much is measured."""

    workload: str
    """A function of `benchmarks.workloads`."""
    steps: int
    percents: Sequence[int]
    """Budgets, in percent of the plain peak."""
    methods: Sequence[str] = ("lru", "delta", "delta-published")


def run(size: Size, tell: Tell) -> Result:
    """Train plainly, then under every budget."""
    tell("peak of the longest batch")
    workload = get(path_of(size.workload))
    peak = account(workload, longest_batch(workload, size.steps), 2).peak
    tell(f"plain, {size.steps} steps")
    plain = trained(size.workload, size.steps, None, None, tell)
    cells = [(method, percent) for method in size.methods for percent in size.percents]
    rows = [_under(size, peak, method, percent, plain, tell) for method, percent in cells]
    return Result(
        title=f"{size.steps} steps of changing length ({size.workload}), the plain peak is {format_bytes(peak)}",
        columns=COLUMNS,
        rows=[_plain_row(peak, plain), *rows],
        notes=NOTES,
    )


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(method="method", budget="budget"),
    *columns.nbytes(budget_bytes="bytes", peak_bytes="peak"),
    *columns.text(steps="steps", over="over budget"),
    *columns.nbytes(peak_rss_bytes="RSS"),
    *columns.ratios(rss_ratio="RSS/budget", ratio="time x plain"),
    *columns.nbytes(bytes_out="out", bytes_in="in"),
    *columns.shares(recomputed_share="recomputed"),
    *columns.text(verdict="beside plain"),
)

NOTES: Final = (
    "The model and the batches of the demo. The plain peak is that of the longest batch, by a session that only keeps "
    "account. The time is that of all steps together; the runs follow each other, so that it says little on a busy "
    "machine.",
    "Peak: by our account, of the worst step. RSS: the process's highest resident set above that before it built the "
    "model, without pages of files.",
)


def _plain_row(peak: Bytes, plain: RunResult) -> Row:
    figures = {"peak_bytes": peak, "steps": len(plain.steps), "peak_rss_bytes": plain.peak_rss_bytes}
    return {"method": PLAIN, "budget": "none", **figures}


def _under(size: Size, peak: Bytes, method: str, percent: int, plain: RunResult, tell: Tell) -> Row:
    budget = peak * percent // 100
    cell = {"method": method, "budget": f"{percent} %", "budget_bytes": budget}
    tell(f"{method}, {percent} %, {size.steps} steps")
    try:
        found = trained(size.workload, size.steps, method, budget, tell)
    except BudgetInfeasible as refusal:
        return {**cell, "verdict": f"refused: {refusal}"}
    reports, difference = found.reports, first_difference(found, plain)
    return {
        **cell,
        "peak_bytes": highest_peak(reports),
        "steps": len(reports),
        "over": sum(report.peak_bytes > budget for report in reports),
        "peak_rss_bytes": found.peak_rss_bytes,
        "rss_ratio": found.peak_rss_bytes / budget,
        "ratio": sum(found.seconds) / sum(plain.seconds),
        "bytes_out": sum(report.bytes_out for report in reports),
        "bytes_in": sum(report.bytes_in for report in reports),
        "recomputed_share": recomputed_share(reports),
        "differing_losses": differing(found, plain),
        "first_difference": difference,
        "verdict": "identical" if difference is None else f"differs: {difference}",
    }


def _checks(result: Result) -> list[Check]:
    return [check for row in result.rows if row["method"] != PLAIN for check in _of_row(row)]


def _of_row(row: Row) -> list[Check]:
    run = f"{row['method']}, {row['budget']}"
    if "over" not in row:
        return [Check(what=f"{run}: runs refused", measured=1)]
    return [
        Check(what=f"{run}: steps over budget, of {row['steps']}", measured=row["over"]),
        Check(what=f"{run}: losses that differ from plain", measured=row["differing_losses"]),
        Check(what=f"{run}: peak RSS above start / budget", measured=row["rss_ratio"], at_most=RSS_LIMIT),
    ]


BENCHMARK: Final = Benchmark(
    name="budget",
    run=run,
    judge=_checks,
    full=Size(workload="demo_lm", steps=200, percents=(70, 50, 35)),
    quick=Size(workload="tiny_lm", steps=6, percents=(50,)),
)
