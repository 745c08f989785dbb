"""The paper's Figure 6 in small: a loss curve under DELTA beside the plain one, every loss compared bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from benchmarks.training import account, longest_batch
from benchmarks.trainings import kept, path_of, trained
from spillway.report.figures import highest_peak
from spillway.subprocess_runs.run import RunResult
from spillway.units import Bytes, format_bytes
from spillway.workloads import get

METHODS: Final = ("delta", "delta-published")


@frozen
class Size:
    """How much is measured."""

    workload: str
    """A function of `benchmarks.workloads`."""
    steps: int
    percent: int
    """The budget, in percent of the plain peak."""
    marks: int
    """Rows of the table: the curve is shown so many times, and compared at every step."""


def run(size: Size, tell: Tell) -> Result:
    """Train plainly, then under DELTA."""
    workload = get(path_of(size.workload))
    peak = account(workload, longest_batch(workload, size.steps), 2).peak
    budget = peak * size.percent // 100
    plain = trained(size.workload, size.steps, None, None, tell)
    runs = {method: trained(size.workload, size.steps, method, budget, tell) for method in METHODS}
    return Result(
        title=f"{size.steps} steps of {size.workload} under {format_bytes(budget)}, {size.percent} % of the plain peak",
        columns=COLUMNS,
        rows=_rows(size, plain, runs),
        checks=[check for method, found in runs.items() for check in _checks(method, found, plain, budget)],
        notes=NOTES,
    )


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(step="step"),
    *(
        Column(key=name, head=head, show="{:.6f}".format)
        for name, head in (("plain", "plain loss"), *((method, method) for method in METHODS))
    ),
    *columns.text(equal="bit for bit so far"),
    *columns.ratios(ratio="delta's time so far x plain"),
)

NOTES: Final = (
    "The paper's runs end at 1.5947 and 1.6054, plain and under DELTA. A lossless method gives the same loss, not "
    "nearly the same: all losses are compared in all their bits, and what the runs say of the final state as well. The "
    "runs follow each other, so that the time says little on a busy machine.",
)


def _rows(size: Size, plain: RunResult, runs: dict[str, RunResult]) -> list[Row]:
    marks = [size.steps * mark // size.marks - 1 for mark in range(1, size.marks + 1)]
    delta = runs[METHODS[0]]
    return [
        {
            "step": mark + 1,
            "plain": float.fromhex(plain.losses[mark]),
            **{method: float.fromhex(found.losses[mark]) for method, found in runs.items()},
            "equal": all(found.losses[: mark + 1] == plain.losses[: mark + 1] for found in runs.values()),
            "ratio": sum(delta.seconds[: mark + 1]) / sum(plain.seconds[: mark + 1]),
        }
        for mark in marks
    ]


def _checks(method: str, found: RunResult, plain: RunResult, budget: Bytes) -> list[Check]:
    moved = highest_peak(found.reports) > 0 and any(report.moves + report.drops for report in found.reports)
    nothing = Check(what=f"{method}: runs in which nothing had to leave", measured=not moved, at_most=0)
    return [*kept(method, found, plain, budget), nothing]


BENCHMARK: Final = Benchmark(
    name="convergence",
    run=run,
    full=Size(workload="small_resnet", steps=500, percent=50, marks=10),
    quick=Size(workload="tiny_lm", steps=6, percent=50, marks=2),
)
