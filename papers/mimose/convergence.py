"""Mimose's Figure 15: the losses of a language model with dropout under Mimose beside the plain ones, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from benchmarks import columns, workloads
from benchmarks.drawing import Line, Panel, can_draw, png
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell
from spillway.report.figures import highest_peak
from spillway.runs import launch
from spillway.runs.comparison import first_difference
from spillway.runs.launch import Listener
from spillway.runs.records import RunRequest, RunResult, StepDone
from spillway.units import Bytes, format_bytes

CHECKPOINT: Final = "checkpoint"
MIMOSE: Final = "mimose"
COLLECTED: Final = 10
"""Steps in which both do nothing but measure; they count as all others."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    workload: str
    """A function of `benchmarks.workloads`."""
    steps: int
    methods: Sequence[str]


def run(size: Size, tell: Tell) -> Result:
    """Train plainly and under every method, with the same seed."""
    floor = highest_peak(_train(size, CHECKPOINT, None, tell).reports)
    most = highest_peak(_train(size, MIMOSE, None, tell).reports)
    budget = (floor + most) // 2
    plain = _train(size, None, None, tell)
    runs = {method: _train(size, method, budget, tell) for method in size.methods}
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
    *(
        Column(key=key, head=head, show="{:.6f}".format)
        for key, head in (("first", "first loss"), ("last", "last loss"))
    ),
    *columns.text(differing="losses that differ"),
)
NOTES: Final = (
    "The model learns the standard library's source text, a function a sample, with dropout on embeddings, attention "
    "and both halves of each block. Budget: half way between the peak with every block recomputed and that with none. "
    "The paper leaves out its first 100 steps and calls its curves nearly coincident; here all bits of all losses are "
    "compared, and what the runs say of parameters, optimizer and random streams at the end.",
    "The published planner leaves half a gigabyte free, which is more than there is here, and so recomputes all.",
)


def _train(size: Size, method: str | None, budget: Bytes | None, tell: Tell) -> RunResult:
    done: list[StepDone] = []

    def hear(step: StepDone) -> None:
        done.append(step)
        if len(done) % 50 == 0:
            tell(f"{method or 'plain'}: step {len(done)} of {size.steps}")

    path = f"{workloads.__file__}:{size.workload}"
    request = RunRequest(workload=path, seed=0, steps=size.steps, method=method, budget_bytes=budget)
    return launch.run(request, Listener(step=hear, output=tell))


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
        "differing": _differing(found, plain),
    }


def _differing(found: RunResult, plain: RunResult) -> int:
    return sum(one != other for one, other in zip(found.losses, plain.losses, strict=True))


def _checks(method: str, found: RunResult, plain: RunResult, budget: Bytes) -> list[Check]:
    later = found.reports[COLLECTED:]
    difference = first_difference(found, plain)
    planned = any(0 < report.recomputed_blocks < report.blocks for report in later)
    checks = [
        Check(what=f"{method}: losses that differ from plain", measured=_differing(found, plain), at_most=0),
        Check(what=f"{method}: {difference or 'differences at the end'}", measured=difference is not None, at_most=0),
        Check(
            what=f"{method}: steps over budget", measured=sum(r.peak_bytes > budget for r in found.reports), at_most=0
        ),
    ]
    if method == MIMOSE:
        checks.append(Check(what="runs in which no plan chose among blocks", measured=not planned, at_most=0))
    return checks


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
