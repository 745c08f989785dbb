"""Mimose's Figure 15: the losses of a language model with dropout under Mimose beside the plain ones, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks import columns
from benchmarks.drawing import Line, Panel, can_draw, png
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from benchmarks.trainings import differing, kept, trained
from spillway.report.figures import highest_peak
from spillway.subprocess_runs.run import RunResult
from spillway.units import Bytes, format_bytes

CHECKPOINT: Final = "checkpoint"
MIMOSE: Final = "mimose"
COLLECTED: Final = 10
"""Steps in which both do nothing but measure; they count as all others."""


@frozen
class Size:
    """How much is measured."""

    workload: str
    """A function of `benchmarks.workloads`."""
    steps: int
    methods: Sequence[str]


def run(size: Size, tell: Tell) -> Result:
    """Train plainly and under every method, with the same seed."""

    def train(method: str | None, budget: Bytes | None = None) -> RunResult:
        return trained(size.workload, size.steps, method, budget, tell)

    floor, most = (highest_peak(train(method).reports) for method in (CHECKPOINT, MIMOSE))
    budget = (floor + most) // 2
    plain = train(None)
    runs = {method: train(method, budget) for method in size.methods}
    return Result(
        title=f"{size.steps} steps of {size.workload} with dropout under {format_bytes(budget)} (Mimose's Fig. 15)",
        columns=COLUMNS,
        rows=[_row(method, found, plain) for method, found in runs.items()],
        checks=[check for method, found in runs.items() for check in _checks(method, found, plain, budget)],
        notes=(*NOTES, *([] if can_draw() else ["Not drawn: matplotlib, the extra `pictures`, is not installed."])),
        pictures={"mimose_convergence.png": png([_drawn(plain, runs)])} if can_draw() else {},
    )


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(method="method", steps="steps"),
    *columns.nbytes(peak_bytes="highest peak"),
    *columns.shares(recomputed_share="blocks recomputed"),
    *columns.text(revoked="revoked"),
    *columns.shown("{:.6f}".format, first="first loss", last="last loss"),
    *columns.text(differing="losses that differ"),
)
NOTES: Final = (
    "The model learns the standard library's source text, a function a sample, with dropout on embeddings, attention "
    "and both halves of each block. Budget: half way between the peak with every block recomputed and that with none. "
    "The paper leaves out its first 100 steps and calls its curves nearly coincident; here all bits of all losses are "
    "compared, and what the runs say of parameters, optimizer and random streams at the end.",
    "The published planner leaves half a gigabyte free, which is more than there is here, and so recomputes all.",
)


def _row(method: str, found: RunResult, plain: RunResult) -> Row:
    reports = found.reports
    return {
        "method": method,
        "steps": len(reports),
        "peak_bytes": highest_peak(reports),
        "recomputed_share": sum(r.recomputed_blocks for r in reports) / max(sum(r.blocks for r in reports), 1),
        "revoked": sum(report.revoked_blocks for report in reports),
        "first": float.fromhex(found.losses[0]),
        "last": float.fromhex(found.losses[-1]),
        "differing": differing(found, plain),
    }


def _checks(method: str, found: RunResult, plain: RunResult, budget: Bytes) -> list[Check]:
    planned = any(0 < report.recomputed_blocks < report.blocks for report in found.reports[COLLECTED:])
    chose = Check(what="runs in which no plan chose among blocks", measured=not planned, at_most=0)
    return [*kept(method, found, plain, budget), *([chose] if method == MIMOSE else [])]


def _drawn(plain: RunResult, runs: Mapping[str, RunResult]) -> Panel:
    curves = {"plain": plain, **runs}
    styles = ("-", "--", ":")
    return Panel(
        title="losses, bit-identical",
        x=range(1, len(plain.losses) + 1),
        across="step",
        up="loss",
        lines=[
            Line(label=name, y=[float.fromhex(loss) for loss in curve.losses], colour=number, style=styles[number])
            for number, (name, curve) in enumerate(curves.items())
        ],
    )


BENCHMARK: Final = Benchmark(
    name="mimose_convergence",
    run=run,
    full=Size(workload="small_lm", steps=300, methods=(MIMOSE, "mimose-published")),
    quick=Size(workload="tiny_lm", steps=14, methods=(MIMOSE,)),
)
