"""Is the budget that a refusal names the smallest that works?

Trainings of every kind are refused at several budgets. What each refusal names is tried at once, and compared with the
smallest budget that works, found by bisection. `SPILLWAY_TRAININGS=22,55` tries those alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import spillway
from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from spillway.units import Bytes
from tests.cpu.refusal_cases import STEPS, TOO_MUCH, Case, asked_for, cases, smallest_that_works, trained, works

SHARES: Final = (0.15, 0.4, 0.6, 0.8, 0.95)
"""Budgets that are too small, as shares of the smallest that works."""

METHOD: Final = "lru"
"""Under which refusals of the tensor engine are looked at; those of the block engine are in `block_refusals`."""


@frozen
class Size:
    """How much is measured."""

    trainings: int
    shares: Sequence[float] = SHARES
    among: int = 150
    """The smallest budget is found to one part in so many."""


def run(size: Size, tell: Tell) -> Result:
    """Refuse every training at every share."""
    rows: list[Row] = []
    every, numbers = cases(size.trainings), asked_for(range(size.trainings))
    for number in numbers:
        rows += _refusals(every[number], size)
        if number % 10 == 9:
            tell(f"{number + 1} of {size.trainings} trainings")
    return Result(
        title=f"{len(rows)} refusals of {len(numbers)} trainings",
        columns=(
            *columns.text(network="network", refusals="refusals", exact="exact"),
            *columns.text(works="what is named works", more="is more than a tenth too much"),
            *columns.shares(least="named, of the smallest: least", most="most"),
        ),
        rows=[_summary(network, rows) for network in dict.fromkeys(row["network"] for row in rows)],
        notes=(*NOTES, *_wrong(rows)),
    )  # fmt: skip


def _checks(result: Result) -> Iterator[Check]:
    rows = result.rows
    failed = sum(row["refusals"] - row["works"] for row in rows)
    yield Check(what="named budgets that do not work", measured=failed)
    yield Check(what="named budgets more than a tenth too much", measured=sum(row["more"] for row in rows))
    below = sum(row["refusals"] - row["exact"] for row in rows)
    yield Check(what="refusals that name a bound from below", measured=below)


NOTES: Final = (
    f"Each training is {STEPS} steps, refused at {', '.join(format(share, '.0%') for share in SHARES)} of the smallest "
    "budget under which all of them run (by bisection). Exact: the refusal says that what it names should work, not "
    "only that less cannot.",
)


def _refusals(case: Case, size: Size) -> list[Row]:
    peak = trained(case, METHOD, None)
    if isinstance(peak, spillway.BudgetInfeasible):
        raise peak
    smallest = smallest_that_works(lambda budget: works(case, METHOD, budget), peak, size.among)
    tried: dict[Bytes, bool] = {}
    rows: list[dict[str, Any]] = []
    for share in size.shares:
        refusal = trained(case, METHOD, int(smallest * share))
        if not isinstance(refusal, spillway.BudgetInfeasible):
            continue
        named = refusal.smallest_budget
        tried.setdefault(named, works(case, METHOD, named))
        rows.append(
            {
                "network": case.network, "case": str(case), "share": share, "exact": refusal.exact,
                "works": tried[named], "ratio": named / smallest, "op": refusal.op,
            }
        )  # fmt: skip
    return rows


def _summary(network: str, rows: Sequence[Row]) -> Row:
    mine = [row for row in rows if row["network"] == network]
    return {
        "network": network,
        "refusals": len(mine),
        "exact": sum(row["exact"] for row in mine),
        "works": sum(row["works"] for row in mine),
        "more": sum(row["ratio"] > TOO_MUCH for row in mine),
        "least": min(row["ratio"] for row in mine),
        "most": max(row["ratio"] for row in mine),
    }


def _wrong(rows: Sequence[Row]) -> list[str]:
    wrong = [row for row in rows if not row["works"] or row["ratio"] > TOO_MUCH]
    return [f"{row['case']}, refused at {row['share']:.0%} ({row['op']}): {row['ratio']:.3f}" for row in wrong[:8]]


BENCHMARK: Final = Benchmark(
    name="refusals", run=run, judge=_checks, full=Size(trainings=108), quick=Size(trainings=3, shares=(0.5,), among=20)
)
