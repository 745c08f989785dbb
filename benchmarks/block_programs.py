"""Random programs made of blocks under the methods of the block engine: the same bits, or rightly refused.

The programs and what is demanded of them are those of the tests, which run fewer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from spillway.errors import BudgetInfeasible, NoBlocksError, RecomputeError
from tests.cpu.block_judge import METHODS, judge, plainly, tried

RIGHTLY: Final = (BudgetInfeasible, NoBlocksError, RecomputeError)
"""Refused with a sentence: no room, every block left out by chance, or something that no second run can follow."""


@frozen
class Size:
    """How much is measured."""

    programs: int


def run(size: Size, tell: Tell) -> Result:
    """Run every program plainly and under the methods, without want of room and with a random budget."""
    ran: list[dict[str, Any]] = []
    for seed in range(size.programs):
        expected, draw = plainly(seed), random.Random(f"budget of {seed}")
        for method in METHODS:
            roomy = judge(seed, method, 1 << 30, expected)
            verdicts = [roomy]
            if roomy.refused is None:
                verdicts.append(judge(seed, method, int(roomy.peak * draw.uniform(0.5, 1.2)), expected))
                verdicts += tried(seed, method, verdicts[-1], expected)
            for verdict in verdicts:
                refused = verdict.refused is not None
                wrong = verdict.wrong or (
                    str(verdict.refused) if refused and not isinstance(verdict.refused, RIGHTLY) else ""
                )
                ran.append({"seed": seed, "method": method, "refused": refused, "wrong": wrong})
        if seed % 50 == 49:
            tell(f"{seed + 1} of {size.programs} programs")
    wrong = [row for row in ran if row["wrong"]]
    return Result(
        title=f"{size.programs} random programs of blocks, {len(ran)} runs",
        columns=(
            *columns.text(method="method", runs="runs", identical="identical", refused="refused", wrong="wrong"),
            *columns.shares(share="identical, of all"),
        ),
        rows=[_row(method, [row for row in ran if row["method"] == method]) for method in METHODS],
        notes=tuple(f"Program {row['seed']}, {row['method']}: {row['wrong'][:200]}" for row in wrong[:8]),
    )


def _checks(result: Result) -> Iterator[Check]:
    yield Check(what="runs that are wrong", measured=sum(row["wrong"] for row in result.rows))


def _row(method: str, ran: Sequence[dict[str, Any]]) -> Row:
    identical = sum(not row["wrong"] and not row["refused"] for row in ran)
    return {
        "method": method,
        "runs": len(ran),
        "identical": identical,
        "refused": sum(row["refused"] and not row["wrong"] for row in ran),
        "wrong": sum(bool(row["wrong"]) for row in ran),
        "share": identical / max(len(ran), 1),
    }


BENCHMARK: Final = Benchmark(
    name="block_programs", run=run, judge=_checks, full=Size(programs=1000), quick=Size(programs=2)
)
