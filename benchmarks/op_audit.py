"""Every op of torch's own op database, run watched and under budgets: what it does plainly, and a true account.

The programs and what is demanded of them are those of the tests, which run fewer. `SPILLWAY_OPS_JOURNAL` names a file
in which what became of each op and dtype is kept: a run that is begun again goes on where it ended.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from tests.cpu.watched_ops import NUMBERS, UNWRITTEN, many, pairs

ORDERS: Final = ("forward", "and backward", "and double backward")


@frozen
class Size:
    """How much is looked at."""

    every: int
    """One op and dtype in so many."""
    samples: int
    """So many of each, the largest, run in every way."""
    others: bool
    """Whether all other samples run as well, in one way each, in turn."""


def run(size: Size, tell: Tell) -> Result:
    """Run every sample of every op plainly, watched, and under a budget in which not everything fits."""
    ran: list[dict[str, Any]] = []
    chosen = range(0, len(pairs()), size.every)
    for number, pair in enumerate(_looked_at(chosen, size)):
        ran += [{"name": pair["name"], **row} for row in pair["rows"]]
        if number % 50 == 49:
            tell(f"{number + 1} of {len(chosen)} ops and dtypes, {sum(row['wrong'] for row in ran)} programs wrong")
    ways = dict.fromkeys((_dtype(row), *row["way"]) for row in ran)
    programs = sum(row["counts"].get("programs", 0) for row in ran)
    return Result(
        title=f"{len({row['name'] for row in ran})} of {len(pairs())} ops with a dtype, {programs} programs",
        columns=columns.text(
            dtype="dtype", order="order", autocast="autocast", programs="programs", identical="identical watched",
            accounts="accounts equal", numbers="but for numbers", under="under a budget", left="something left",
            same="identical there", unwritten="unwritten memory", wrong="wrong",
        ),
        rows=[_summary(way, [row for row in ran if (_dtype(row), *row["way"]) == way]) for way in sorted(ways)],
        notes=(*NOTES, *_wrong(ran)),
    )  # fmt: skip


def _checks(result: Result) -> Iterator[Check]:
    yield Check(what="programs that are wrong", measured=sum(row["wrong"] for row in result.rows))


def _looked_at(chosen: Sequence[int], size: Size) -> Iterator[dict[str, Any]]:
    """What became of every pair of an op and a dtype, as the journal has it or as it is run now."""
    journal = Path(os.environ.get("SPILLWAY_OPS_JOURNAL", os.devnull))
    lines = journal.read_text().splitlines() if journal.exists() else []
    known = {pair["pair"]: pair for pair in map(json.loads, lines)}
    yield from (known[number] for number in chosen if number in known)
    with journal.open("a") as file:
        missing = [number for number in chosen if number not in known]
        for pair in many(missing, size.samples, others=size.others):
            print(json.dumps(pair), file=file, flush=True)
            yield pair


NOTES: Final = (
    "The largest sample of every op and dtype runs in every way (order and autocast), each other sample in one of "
    "them, in turn.",
    "Identical: all results, gradients and operands in bytes, dtypes, strides, offsets, and in which of them share a "
    "storage. Accounts equal: bytes in the account at the end are those that torch's allocator has given out by its "
    "profiler; but for numbers: and those of numbers from Python (8 or 16 bytes each) that autograd keeps as tensors, "
    "which torch makes before it calls an op and shows as numbers.",
    "Under a budget: of 45 % of what the program takes, or 75 or 95 % where it was refused. Its peak is never above.",
    f"Unwritten memory, the only exception: {', '.join(sorted(UNWRITTEN))} return bytes that nobody wrote, or use such "
    "(the pivots of `lstsq`), differ from one plain run to the next, and are compared in all else.",
)


def _dtype(row: Row) -> str:
    return str(row["name"]).rpartition("[")[2][:-1]


def _summary(way: tuple[str, int, bool], rows: Sequence[Row]) -> Row:
    counts: Counter[str] = sum((Counter(row["counts"]) for row in rows), Counter())
    dtype, order, autocast = way
    return {
        "dtype": dtype,
        "order": ORDERS[order],
        "autocast": "on" if autocast else "off",
        "programs": counts["programs"],
        "identical": counts["identical watched"],
        "accounts": counts["accounts equal"],
        "numbers": counts[NUMBERS],
        "under": counts["under a budget"],
        "left": counts["things left"],
        "same": counts["identical under a budget"],
        "unwritten": counts["unwritten memory watched"] + counts["unwritten memory under a budget"],
        "wrong": sum(row["wrong"] for row in rows),
    }


def _wrong(ran: Sequence[Row]) -> list[str]:
    wrong = [f"{kind}: {told}" for row in ran for kind, all_told in row["found"].items() for told in all_told]
    return [f"WRONG: {told}" for told in wrong[:8]]


BENCHMARK: Final = Benchmark(
    name="op_audit",
    run=run,
    judge=_checks,
    full=Size(every=1, samples=1, others=True),
    quick=Size(every=150, samples=1, others=False),
)
