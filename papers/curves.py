"""Loss curves of papers in small: a training under methods beside the plain one, every loss compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from benchmarks import columns
from benchmarks.record import Check, Column, Result, Row, Tell, frozen
from benchmarks.trainings import differing, trained
from spillway.report.figures import highest_peak
from spillway.subprocess_runs.rows import first_difference
from spillway.subprocess_runs.run import RunResult
from spillway.units import Bytes, format_bytes

PLAIN: Final = "plain"


@frozen
class Size:
    """How much is trained."""

    workload: str
    """A function of `benchmarks.workloads`."""
    steps: int
    methods: Sequence[str]
    idle: Sequence[str] = ()
    """Those of them that have nothing to choose under such a budget."""


def compared(
    figure: str, budget: Callable[[Size, Tell], Bytes], notes: Sequence[str], size: Size, tell: Tell
) -> Result:
    """Train plainly and under every method with the same seed and that budget."""
    allowed = budget(size, tell)
    plain = trained(size.workload, size.steps, None, None, tell)
    runs = {method: trained(size.workload, size.steps, method, allowed, tell) for method in size.methods}
    return Result(
        title=f"{size.steps} steps of {size.workload} under {format_bytes(allowed)} ({figure})",
        columns=COLUMNS,
        rows=[
            _row(PLAIN, plain, plain),
            *(
                _row(method, found, plain) | _beside(method, found, plain, allowed, size)
                for method, found in runs.items()
            ),
        ],
        notes=(*NOTES, *notes),
    )


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(method="method", steps="steps"),
    *columns.nbytes(peak_bytes="highest peak"),
    *columns.text(moves="moved", drops="dropped", recomputed_blocks="blocks recomputed", revoked="revoked"),
    *columns.shown("{:.6f}".format, first="first loss", last="last loss"),
    *columns.text(differing="losses that differ"),
)
NOTES: Final = (
    "A lossless method gives the same loss, not nearly the same: all losses are compared in all their bits, and what "
    "the runs say of parameters, optimizer and random streams at the end.",
)


def _row(method: str, found: RunResult, plain: RunResult) -> Row:
    reports = found.reports
    return {
        "method": method,
        "steps": len(found.losses),
        "peak_bytes": highest_peak(reports) if reports else None,
        "moves": sum(report.moves for report in reports),
        "drops": sum(report.drops for report in reports),
        "recomputed_blocks": sum(report.recomputed_blocks for report in reports),
        "revoked": sum(report.revoked_blocks for report in reports),
        "first": float.fromhex(found.losses[0]),
        "last": float.fromhex(found.losses[-1]),
        "differing": differing(found, plain),
    }


def _beside(method: str, found: RunResult, plain: RunResult, budget: Bytes, size: Size) -> dict[str, Any]:
    """What is demanded of a run under a method."""
    reports = found.reports
    return {
        "difference": first_difference(found, plain),
        "over": sum(report.peak_bytes > budget for report in reports),
        "chose": method in size.idle or any(r.moves or r.drops or 0 < r.recomputed_blocks < r.blocks for r in reports),
    }


def checks(result: Result) -> Iterator[Check]:
    """Of every run under a method: the same losses and the same end as plain, within the budget, by a choice."""
    for row in result.rows:
        if row["method"] == PLAIN:
            continue
        counted = {
            f"losses that differ from plain, of {row['steps']}": row["differing"],
            "differences at the end": row["difference"] is not None,
            "steps over budget": row["over"],
            "runs in which nothing was chosen to leave": not row["chose"],
        }
        for what, count in counted.items():
            yield Check(what=f"{row['method']}: {what}", measured=count)
