"""Thousands of random small programs under random budgets: the same bits, or rightly refused.

The programs and what is demanded of them are those of the tests, which run fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from benchmarks.record import Benchmark, Check, Result, Row, Tell, byte_columns, share_columns, text_columns
from tests.cpu.program_judge import POLICIES, many

SUMMED: Final = ("drops", "moves", "replays", "bytes_out", "dropped_bytes")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    programs: int


def run(size: Size, tell: Tell) -> Result:
    """Run every program plainly and under the policies, each with a random budget of its own."""
    ran: list[dict[str, Any]] = []
    for number, program in enumerate(many(0, size.programs)):
        ran += [{"seed": program["seed"], **row} for row in program["rows"]]
        if number % 50 == 49:
            tell(f"{number + 1} of {size.programs} programs")
    return Result(
        title=f"{size.programs} random programs, {len(ran)} runs under a budget",
        columns=(
            *text_columns(
                policy="policy", runs="runs", identical="identical", refused="rightly refused", wrong="wrong"
            ),
            *text_columns(drops="drops", moves="moves", replays="replayed ops"),
            *byte_columns(dropped_bytes="bytes dropped", bytes_out="bytes moved out"),
            *share_columns(share="mean budget, of the plain peak"),
        ),
        rows=[_row(policy, [row for row in ran if row["policy"] == policy]) for policy in POLICIES],
        checks=[Check(what="runs that are wrong", measured=sum(bool(row["complaints"]) for row in ran), at_most=0)],
        notes=(*NOTES, *_wrong(ran)),
    )


NOTES: Final = (
    "Identical: all tensors alive at the end, losses, gradients, optimizer state, buffers, random streams and what "
    "Python code saw on the way, in bytes, dtypes, strides and aliases; and no step's peak was above the budget. "
    "Rightly refused: the budget was below what the program needs (the largest op, and what never leaves), everything "
    "was as plain PyTorch leaves it when that op raises, and the budget that was named led to one that works.",
    "Shaken: storages also leave at random moments, whether room is short or not (every third program).",
)


def _row(policy: str, ran: Sequence[dict[str, Any]]) -> Row:
    right = [row for row in ran if not row["complaints"]]
    return {
        "policy": policy,
        "runs": len(ran),
        "identical": sum(not row["refused"] for row in right),
        "refused": sum(row["refused"] for row in right),
        "wrong": len(ran) - len(right),
        "share": sum(row["allowed"] / row["plain_peak"] for row in ran) / max(len(ran), 1),
        **{name: sum(row[name] for row in ran) for name in SUMMED},
    }


def _wrong(ran: Sequence[dict[str, Any]]) -> list[str]:
    wrong = [row for row in ran if row["complaints"]]
    return [
        f"Program {row['seed']}, {row['policy'] or 'no policy'}: {row['complaints'][0][-200:]}" for row in wrong[:5]
    ]


BENCHMARK: Final = Benchmark(
    name="random_programs",
    run=run,
    full=Size(programs=2000),
    quick=Size(programs=12),
)
