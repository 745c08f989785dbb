"""What recomputes, beside the least that recomputing can take: methods on recorded steps, under budgets, on paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, Final

from benchmarks import columns
from benchmarks.models import build
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from spillway.calibration.named_device import device_of
from spillway.errors import BudgetInfeasible
from spillway.ir import Step
from spillway.methods import Problem
from spillway.methods.checkmate import Checkmate, lower_bound
from spillway.simulation.sweep import Row as Cell
from spillway.simulation.sweep import SweepProblem, compare, sweep_problem_of
from spillway.workloads.recorded import record

HEURISTICS: Final = ("dtr", "dtr-eqclass", "msps", "sqrt-n", "checkpoint", "mimose")
"""Those that only recompute, as long as that suffices; a row in which one moved something does not count."""
DEVICE: Final = "a100"
SHORT: Final = 1_000
"""Ops up to which the gap to the bound is to be small."""
SHORT_GAP: Final = 0.1
LONG_GAP: Final = 0.2
EQUAL: Final = 1e-6
"""Share by which two plans may differ and count as equally good."""


@frozen
class Size:
    """How much is compared."""

    workloads: Sequence[tuple[str, Mapping[str, Any]]]
    """Names and options."""
    shares: Sequence[float]
    """Budgets, of the plain peak."""
    fake: bool = True
    """Whether steps are recorded on tensors without content."""


def run(size: Size, tell: Tell) -> Result:
    """Record every workload and ask everybody."""
    rows = []
    for name, options in size.workloads:
        problem = sweep_problem_of(record(partial(build, name, options), fake=size.fake), device_of(DEVICE))
        for share in size.shares:
            rows.append(row_of(problem, name, share))
            tell(f"{name} at {share:.0%}: {_told(rows[-1])}")
    return Result(
        title=f"what recomputes beside the least that it can take, simulated on {DEVICE}", columns=COLUMNS, rows=rows,
        notes=NOTES,
    )  # fmt: skip


def row_of(problem: SweepProblem, name: str, share: float) -> Row:
    """One budget: the bound, Checkmate, and the best of the others."""
    step, plain = problem.step, problem.plain_seconds
    allowed = int(problem.plain_peak * share)
    try:
        bound = _bound(step, allowed) / plain
    except BudgetInfeasible:
        bound = inf
    cells = compare(problem, [*HEURISTICS, Checkmate.name], [allowed], bounds=False, processes=1)
    overheads = {
        cell.method: cell.overhead
        for cell in cells
        if isinstance(cell, Cell) and cell.overhead is not None and not cell.bytes_out
    }
    ours = overheads.pop(Checkmate.name, None)
    best = min(overheads, key=lambda method: overheads[method], default=None)
    return {
        "workload": name, "ops": len(step.ops), "share": share, "allowed": allowed, "infeasible": bound == inf,
        "bound": None if bound == inf else bound, "checkmate": ours, "heuristic": best,
        "best": None if best is None else overheads[best], "overheads": overheads,
        "gap": None if ours is None else ours / bound - 1,
    }  # fmt: skip


def _bound(step: Step, allowed: int) -> float:
    return lower_bound(Problem(step=step, allowed=allowed, device=device_of(DEVICE)))


def _told(row: Row) -> str:
    bound, ours, best = (row[key] or inf for key in ("bound", "checkmate", "best"))
    return f"bound {bound:.4f}, checkmate {ours:.4f}, {row['heuristic']} {best:.4f}"


def _checks(result: Result) -> list[Check]:
    """What no row may have, and how far Checkmate may be from the bound."""
    rows = result.rows
    feasible = [row for row in rows if not row["infeasible"]]

    def fastest(row: Row, *keys: str) -> float:
        return min(row[key] or inf for key in keys)

    found = [
        Check(
            what="cells in which another method that only recomputes is faster than Checkmate",
            measured=sum(fastest(row, "checkmate") > fastest(row, "best") * (1 + EQUAL) for row in rows),
        ),
        Check(
            what="cells in which any method is faster than the bound",
            measured=sum(fastest(row, "checkmate", "best") < fastest(row, "bound") * (1 - EQUAL) for row in rows),
        ),
    ]
    for what, least, most, at_most in (
        (f"up to {SHORT} ops", 0, SHORT, SHORT_GAP), (f"more than {SHORT} ops", SHORT + 1, inf, LONG_GAP),
    ):  # fmt: skip
        gaps = [row["gap"] for row in feasible if least <= row["ops"] <= most and row["gap"] is not None]
        if gaps:
            found.append(
                Check(what=f"Checkmate's gap to the bound at worst, {what}", measured=max(gaps), at_most=at_most)
            )
    return found


COLUMNS: Final = (
    *columns.text(workload="workload", ops="ops"),
    *columns.shares(share="budget"),
    *columns.ratios(bound="bound", checkmate="checkmate"),
    *columns.shares(gap="gap"),
    *columns.text(heuristic="best of the others"),
    *columns.ratios(best="takes"),
    *columns.shown(lambda yes: "nothing fits" if yes else "", infeasible=""),
)
NOTES: Final = (
    "Times the plain step's seconds, copies excluded: cells in which a method moved anything are left out.",
    "Bound: what has to run again behind one op, the best of 24 ops (methods/checkmate/cut.py). Nothing fits: no "
    "schedule that only recomputes stays within the budget, as the same program proves.",
    f"The others: {', '.join(HEURISTICS)}.",
)

BENCHMARK: Final = Benchmark(
    name="optimum",
    run=run,
    judge=_checks,
    full=Size(
        workloads=(
            ("resnet", {}), ("resnet50", {}), ("bert-base", {"batch": 16, "length": 512}),
            ("deep-narrow", {"layers": 100}), ("gpt-small", {}), ("bert-small", {}), ("stdlib-lm", {}),
        ),
        shares=(0.8, 0.65, 0.5, 0.35),
    ),
    quick=Size(workloads=(("deep-narrow", {"layers": 6, "batch": 64}),), shares=(0.95, 0.1), fake=False),
)  # fmt: skip
