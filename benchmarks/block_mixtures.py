"""Random mixtures of all lossless actions, on the block engine and in its sessions: the same bits, and the budget kept.

What is drawn, and what is demanded of it, are those of the tests, which run fewer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from tests.cpu.block_mixtures import MARGIN, Verdict, in_a_session, on_the_engine

SESSION: Final = "session"
TOLD: Final = ("moved", "came in ahead", "forgotten", "recomputed", "revoked", "input sent late")


@frozen
class Size:
    """How much is measured."""

    mixtures: int
    """On the engine alone."""
    sessions: int


def run(size: Size, tell: Tell) -> Result:
    """Train under every mixture, and compare with plain PyTorch after every step."""
    engine = _verdicts("mixtures", on_the_engine, size.mixtures, tell)
    sessions = _verdicts("sessions", in_a_session, size.sessions, tell)
    rows = [*_rows("engine", engine), *_rows(SESSION, sessions)]
    wrong = [verdict for verdict in (*engine, *sessions) if verdict.wrong]
    refused = [verdict for verdict in sessions if verdict.refused]
    return Result(
        title=f"{size.mixtures} random mixtures on the engine, {size.sessions} in sessions",
        columns=columns.text(
            where="where", model="model", runs="runs", identical="identical", refused="refused", **{n: n for n in TOLD}
        ),
        rows=rows,
        notes=(
            "An action is drawn for every call, when copies in begin, and, on the engine alone, what happens at seams, "
            "at calls of modules and at complete gradients: calls are revoked, copies in begin and are forgotten, "
            "inputs are sent late, copies out are waited for. Identical: losses, gradients, parameters, buffers and "
            "random streams after every step, in bytes.",
            f"In sessions: budgets from {MARGIN:g} times the peak with every block recomputed to nearly that with "
            f"every block kept; every step's peak is measured.",
            *(f"{verdict.name}: {(verdict.wrong or verdict.refused)[:200]}" for verdict in [*wrong, *refused][:8]),
        ),
    )


def _checks(result: Result) -> Iterator[Check]:
    rows = result.rows
    wrong = sum(row["runs"] - row["identical"] - row["refused"] for row in rows)
    yield Check(what="runs that are not exact, or are over the budget", measured=wrong)
    refused = sum(row["refused"] for row in rows if row["where"] == SESSION)
    yield Check(what="sessions refused under budgets that recomputing every block keeps", measured=refused)
    idle = sum(not any(row[what] for row in rows) for what in TOLD)
    yield Check(what="things that never happened", measured=idle)


def _verdicts(what: str, judge: Callable[[int], Verdict], count: int, tell: Tell) -> list[Verdict]:
    found = []
    for seed in range(count):
        found.append(judge(seed))
        if seed % 100 == 99:
            tell(f"{seed + 1} of {count} {what}")
    return found


def _rows(where: str, verdicts: Sequence[Verdict]) -> list[Row]:
    rows: list[Row] = []
    for name in dict.fromkeys(verdict.name for verdict in verdicts):
        mine = [verdict for verdict in verdicts if verdict.name == name]
        counts: Counter[str] = sum((verdict.counts for verdict in mine), Counter())
        rows.append(
            {
                "where": where,
                "model": name,
                "runs": len(mine),
                "identical": sum(not verdict.wrong and not verdict.refused for verdict in mine),
                "refused": sum(bool(verdict.refused) for verdict in mine),
                **{what: counts[what] for what in TOLD},
            }
        )
    return rows


BENCHMARK: Final = Benchmark(
    name="block_mixtures",
    run=run,
    judge=_checks,
    full=Size(mixtures=2000, sessions=200),
    quick=Size(mixtures=16, sessions=1),
)
