"""The paper's Figure 6 in small: a loss curve under DELTA beside the plain one, every loss compared bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from benchmarks import columns, workloads
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell
from benchmarks.training import account, longest_batch
from spillway.report.figures import highest_peak
from spillway.runs import launch
from spillway.runs.comparison import first_difference
from spillway.runs.launch import Listener
from spillway.runs.records import RunRequest, RunResult, StepDone
from spillway.units import Bytes, format_bytes
from spillway.workloads import get

METHODS: Final = ("delta", "delta-published")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
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
    workload = get(_path(size.workload))
    peak = account(workload, longest_batch(workload, size.steps), 2).peak
    budget = peak * size.percent // 100
    plain = _train(size, None, None, tell)
    runs = {method: _train(size, method, budget, tell) for method in METHODS}
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


def _path(workload: str) -> str:
    return f"{Path(workloads.__file__)}:{workload}"


def _train(size: Size, method: str | None, budget: Bytes | None, tell: Tell) -> RunResult:
    done: list[StepDone] = []

    def hear(step: StepDone) -> None:
        done.append(step)
        if len(done) % 50 == 0:
            tell(f"{method or 'plain'}: step {len(done)} of {size.steps}")

    request = RunRequest(workload=_path(size.workload), seed=0, steps=size.steps, method=method, budget_bytes=budget)
    return launch.run(request, Listener(step=hear, output=tell))


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
    different = sum(one != other for one, other in zip(found.losses, plain.losses, strict=True))
    difference = first_difference(found, plain)
    over = sum(report.peak_bytes > budget for report in found.reports)
    moved = highest_peak(found.reports) > 0 and any(report.moves + report.drops for report in found.reports)
    return [
        Check(what=f"{method}: losses that differ from plain, of {len(plain.losses)}", measured=different, at_most=0),
        Check(what=f"{method}: {difference or 'differences at the end'}", measured=difference is not None, at_most=0),
        Check(what=f"{method}: steps over budget", measured=over, at_most=0),
        Check(what=f"{method}: runs in which nothing had to leave", measured=not moved, at_most=0),
    ]


BENCHMARK: Final = Benchmark(
    name="convergence",
    run=run,
    full=Size(workload="small_resnet", steps=500, percent=50, marks=10),
    quick=Size(workload="tiny_lm", steps=6, percent=50, marks=2),
)
