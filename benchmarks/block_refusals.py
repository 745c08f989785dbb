"""Is the budget that a refusal of the block engine names the smallest that works?

Random trainings are refused at random budgets; what is named is tried at once, and compared with the smallest budget
under which all steps run, found by bisection. `SPILLWAY_TRAININGS=3,1004` tries those alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from spillway.errors import BudgetInfeasible
from tests.cpu.block_refusal_cases import LARGE, METHODS, OTHER, TOO_MUCH, smallest_of, trained
from tests.cpu.refusal_cases import asked_for


@frozen
class Size:
    """How much is measured."""

    trainings: int
    """Each is refused at two budgets under every method."""
    large: int
    """As many have blocks that read something large."""
    unusual: int
    """As many have unusual weights, optimizers or gradients."""
    among: int = 60
    """The smallest budget is found to one part in so many."""


def run(size: Size, tell: Tell) -> Result:
    """Refuse every training twice under every method."""
    rows: list[Row] = []
    seeds = asked_for([*range(size.trainings), *range(LARGE, LARGE + size.large), *range(OTHER, OTHER + size.unusual)])
    for number, seed in enumerate(seeds):
        draw = random.Random(f"budgets of {seed}")
        for method in METHODS:
            smallest = smallest_of(seed, method, size.among)
            for share in (draw.uniform(0.2, 0.7), draw.uniform(0.7, 0.97)):
                refusal = trained(seed, method, int(share * smallest))
                if isinstance(refusal, BudgetInfeasible):
                    named = refusal.smallest_budget
                    answer = trained(seed, method, named)
                    works = not isinstance(answer, BudgetInfeasible) and answer <= named
                    rows.append({"method": method, "seed": seed, "works": works, "ratio": named / smallest})
        if number % 5 == 4:
            tell(f"{number + 1} of {len(seeds)} trainings")
    wrong = [row for row in rows if not row["works"] or row["ratio"] > TOO_MUCH]
    return Result(
        title=f"{len(rows)} refusals of the block engine, of {len(seeds)} trainings",
        columns=(
            *columns.text(method="method", refusals="refusals", works="what is named works"),
            *columns.text(more="is more than a tenth too much"),
            *columns.shares(least="named, of the smallest: least", most="most"),
        ),
        rows=[_summary(method, [row for row in rows if row["method"] == method]) for method in METHODS],
        notes=tuple(f"Training {row['seed']} under {row['method']}: {row['ratio']:.3f}." for row in wrong[:8]),
    )


def _checks(result: Result) -> Iterator[Check]:
    failed = sum(row["refusals"] - row["works"] for row in result.rows)
    yield Check(what="named budgets that do not work", measured=failed)
    yield Check(what="named more than a tenth too much", measured=sum(row["more"] for row in result.rows))


def _summary(method: str, rows: Sequence[Row]) -> Row:
    ratios = [row["ratio"] for row in rows]
    return {
        "method": method, "refusals": len(rows), "works": sum(row["works"] for row in rows),
        "more": sum(ratio > TOO_MUCH for ratio in ratios), "least": min(ratios, default=0.0),
        "most": max(ratios, default=0.0),
    }  # fmt: skip


BENCHMARK: Final = Benchmark(
    name="block_refusals",
    run=run,
    judge=_checks,
    full=Size(trainings=45, large=12, unusual=18),
    quick=Size(trainings=1, large=1, unusual=0, among=8),
)
