"""Thousands of random small programs under random budgets: the same bits, or rightly refused.

The programs and what is demanded of them are those of the tests, which run fewer. `SPILLWAY_PROGRAMS_JOURNAL` names a
file in which what became of each program is kept: a run that is begun again goes on where it ended, and what
`python -m tests.cpu.program_judge FIRST COUNT POLICIES >> JOURNAL` has run elsewhere counts as run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from tests.cpu.program_judge import POLICIES, WATCHED, many

SUMMED: Final = ("drops", "moves", "replays", "bytes_out", "dropped_bytes")


@frozen
class Size:
    """How much is measured."""

    programs: int
    policies: int
    """Under so many of them each program runs; which ones differs from program to program."""


def run(size: Size, tell: Tell) -> Result:
    """Run every program plainly and under the policies, each with a random budget of its own."""
    ran: list[dict[str, Any]] = []
    for number, program in enumerate(_programs(size)):
        ran += [{"seed": program["seed"], **row} for row in program["rows"]]
        if number % 50 == 49:
            tell(f"{number + 1} of {size.programs} programs")
    return Result(
        title=f"{size.programs} random programs, {len(ran)} runs under a budget",
        columns=(
            *columns.text(
                policy="policy", runs="runs", identical="identical", refused="rightly refused", wrong="wrong"
            ),
            *columns.text(drops="drops", moves="moves", replays="replayed ops"),
            *columns.nbytes(dropped_bytes="bytes dropped", bytes_out="bytes moved out"),
            *columns.shares(share="mean budget, of the plain peak"),
        ),
        rows=[_row(policy, [row for row in ran if row["policy"] == policy]) for policy in (WATCHED, *POLICIES)],
        notes=(*NOTES, *_wrong(ran)),
    )


def _checks(result: Result) -> Iterator[Check]:
    yield Check(what="runs that are wrong", measured=sum(row["wrong"] for row in result.rows))


def _programs(size: Size) -> Iterator[dict[str, Any]]:
    """What became of every program, as the journal has it or as it is run now."""
    journal = Path(os.environ.get("SPILLWAY_PROGRAMS_JOURNAL", os.devnull))
    lines = journal.read_text().splitlines() if journal.exists() else []
    known = {program["seed"]: program for program in map(json.loads, lines)}
    with journal.open("a") as file:
        seed = 0
        while seed < size.programs:
            if seed in known:
                yield known[seed]
                seed += 1
                continue
            end = next((later for later in range(seed, size.programs) if later in known), size.programs)
            for program in many(seed, end - seed, size.policies):
                print(json.dumps(program), file=file, flush=True)
                yield program
            seed = end


NOTES: Final = (
    "Identical: all tensors alive at the end, losses, gradients, optimizer state, buffers, random streams and what "
    "Python code saw on the way, in bytes, dtypes, strides and aliases; and no step's peak was above the budget. "
    "Rightly refused: the budget was below what the program needs (the largest op, and what never leaves), everything "
    "was as plain PyTorch leaves it when that op raises, and the budget that was named led to one that works.",
    "No budget: watched, and nothing leaves. Shaken: storages also leave at random moments, whether room is short or "
    "not.",
)


def _row(policy: str, ran: Sequence[dict[str, Any]]) -> Row:
    right = [row for row in ran if not row["complaints"]]
    return {
        "policy": policy,
        "runs": len(ran),
        "identical": sum(not row["refused"] for row in right),
        "refused": sum(row["refused"] for row in right),
        "wrong": len(ran) - len(right),
        "share": sum(min(row["allowed"] / row["plain_peak"], 1) for row in ran) / max(len(ran), 1),
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
    judge=_checks,
    full=Size(programs=10_000, policies=4),
    quick=Size(programs=12, policies=4),
)
