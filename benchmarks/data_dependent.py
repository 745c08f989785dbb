"""Is the budget kept where a step's need depends on what is in the batch, so that no step foretells the next?

Eleven networks, each with inputs of one signature: usually little is to be done, one step in seven needs up to several
times as much. The budget is what the usual step needs. Every peak that is reported is compared with one that somebody
else has measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Final

import spillway
from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from benchmarks.training import METHODS
from spillway.units import Bytes
from tests.cpu.families import difference
from tests.cpu.varying_models import VARYING
from tests.cpu.witness import Training


@frozen
class Size:
    """How much is measured."""

    networks: Sequence[str]
    methods: Sequence[str]
    steps: int
    width: int
    looked: int
    """In one of so many steps the witness looks where the bytes of every storage are, at every op."""


def run(size: Size, tell: Tell) -> Result:
    """Train every network plainly, then under what its usual step needs."""
    rows: list[Row] = []
    for network in size.networks:
        plain = Training(network, size.width).plainly(size.steps)
        free = [
            report.peak_bytes
            for report in Training(network, size.width).under(None, METHODS["lru"](), 100, 1000).reports
        ]
        for method in size.methods:
            tell(f"{network}, {method}")
            rows.append(_row(network, method, size, plain, free))
    return Result(
        title=f"{size.steps} steps of each network",
        columns=(
            *columns.text(network="network", method="method"),
            *columns.nbytes(usual_bytes="usual peak", most_bytes="highest, of 100", budget_bytes="budget"),
            *columns.nbytes(peak_bytes="highest under it"),
            *columns.ratios(times="needed, x budget"),
            *columns.text(steps="steps", over="over budget", known="known to fit", pressed="something left"),
            *columns.text(counted="peaks counted", unlike="unlike", unwatched="unwatched", less="too low"),
            *columns.text(looked="looked at", more="saw more"),
            *columns.text(verdict="beside plain"),
        ),
        rows=rows,
        notes=NOTES,
    )


def _checks(result: Result) -> Iterator[Check]:
    rows = result.rows
    yield Check(what="steps over budget", measured=sum(row["over"] for row in rows))
    yield Check(what="reported peaks unlike the witness's", measured=sum(row["unlike"] for row in rows))
    yield Check(what="peaks of unwatched steps below the witness's", measured=sum(row["less"] for row in rows))
    yield Check(what="steps with more in memory", measured=sum(row["more"] for row in rows))
    yield Check(what="trainings that differ", measured=sum(row["verdict"] != "identical" for row in rows))


NOTES: Final = (
    "The budget is a tenth above the median peak of 100 steps without one. Known to fit: the step began without "
    "recipes, because one of the same signature had kept everything, and ended without. Something left: the step was "
    "one that needs more, whether it began with recipes or not.",
    "Peaks counted: watched steps from which nothing left, in which nothing came back and no block ran again. Their "
    "reported peak has to "
    "be, to the byte above the step's start, that of a dispatch mode above the session, which keeps an account of its "
    "own. "
    "Unwatched: known to fit, and held to the budget by the arena, which counts what is small as malloc gives it: "
    "never less than the witness, what lay in the spill directory included. "
    "Looked at: steps in which that mode reads at every op, for every storage alive, the address of its bytes, and "
    "from the system whose memory that is. That is never more than was reported.",
)


def _row(network: str, method: str, size: Size, plain: Any, free: Sequence[Bytes]) -> Row:
    usual = int(statistics.median(free))
    budget = usual * 11 // 10
    while True:
        try:
            found = Training(network, size.width).under(budget, METHODS[method](), size.steps, size.looked)
            break
        except spillway.BudgetInfeasible as refusal:
            budget = max(refusal.smallest_budget, budget + 1)
    steps = list(zip(found.reports, found.growths, found.seen, strict=True))
    seen_by_op = [(report, growth) for report, growth, _ in steps if report.ops]
    kept = [
        (one, growth)
        for one, growth in seen_by_op
        if not (one.moves or one.drops or one.bytes_in or one.recomputed_blocks)
    ]
    unwatched = [(report, growth) for report, growth, _ in steps if not report.ops]
    known = [report for report in found.reports if not report.managed]
    return {
        "network": network,
        "method": method,
        "usual_bytes": usual,
        "most_bytes": max(free),
        "budget_bytes": budget,
        "peak_bytes": max(report.peak_bytes for report in found.reports),
        "times": max(found.peaks) / budget,
        "steps": len(found.reports),
        "over": sum(max(report.peak_bytes, seen) > budget for report, _, seen in steps),
        "known": len(known),
        "pressed": len(seen_by_op) - len(kept) + sum(report.beyond_bytes > 0 for report, _ in unwatched),
        "counted": len(kept),
        "unlike": sum(report.peak_bytes - report.start_bytes != growth for report, growth in kept),
        "unwatched": len(unwatched),
        "less": sum(one.peak_bytes - one.start_bytes + one.beyond_bytes < growth for one, growth in unwatched),
        "looked": sum(seen > 0 for seen in found.seen),
        "more": sum(seen > report.peak_bytes for report, _, seen in steps),
        "verdict": difference(plain, found.state) or "identical",
    }


BENCHMARK: Final = Benchmark(
    name="data_dependent",
    run=run,
    judge=_checks,
    full=Size(networks=tuple(VARYING), methods=("lru", "auto"), steps=1000, width=64, looked=50),
    quick=Size(networks=("Tree",), methods=("lru",), steps=30, width=32, looked=10),
)
