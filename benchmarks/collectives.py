"""DDP and other programs of several processes, under every method of both engines: the same bits, and equal ranks.

The programs and what is demanded of them are those of the tests, which run fewer. `SPILLWAY_COLLECTIVES_JOURNAL` names
a file in which what became of each program is kept: a run that is begun again goes on where it ended.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from spillway.methods import METHODS
from tests.cpu.process_judge import group, judged, plainly
from tests.cpu.process_programs import PROGRAMS

TENSOR_METHODS: Final = tuple(name for name, one in METHODS.items() if one.runs == "tensor engine" and not one.plans)
PLANNERS: Final = tuple(name for name, one in METHODS.items() if one.runs == "tensor engine" and one.plans)
BLOCK_METHODS: Final = tuple(name for name, one in METHODS.items() if one.runs == "block engine")
SHARES: Final = (0.8, 0.65, 0.5)
"""Budgets, of the peak of a session that only keeps account."""
AMONG_THREE: Final = (
    "ddp", "ddp, views", "ddp, pressed", "ddp, unused", "ddp, fp16 in C++", "ddp, join", "all_reduce, async",
    "all_reduce, pressed", "all_reduce, in the forward", "ring", "every kind", "functional", "between steps",
)  # fmt: skip
PLANTED: Final = "all_reduce, pressed"
PLANNED: Final = ("ddp", PLANTED)
"""Programs that planning methods of the tensor engine train as well, which watch ops alike."""
GROUPS: Final = 3
"""Groups of processes that train at the same time: each waits for itself most of the time."""


@frozen
class Size:
    """How much is run."""

    programs: Mapping[int, Sequence[str]]
    """By the number of processes."""
    methods: Sequence[str]
    planners: Sequence[str]
    """Methods besides, for the programs of `PLANNED`."""
    shares: Sequence[float]


def run(size: Size, tell: Tell) -> Result:
    """Train every program plainly, and under every method and budget, in groups of each size."""
    ran: list[dict[str, Any]] = []
    cells = [(world, program) for world, programs in size.programs.items() for program in programs]
    journal = Path(os.environ.get("SPILLWAY_COLLECTIVES_JOURNAL", os.devnull))
    with ThreadPoolExecutor(GROUPS) as pool:  # its threads only wait for processes
        for number, rows in enumerate(pool.map(partial(_kept, size, journal), *zip(*cells, strict=True))):
            ran += rows
            wrong = sum(bool(one["complaints"]) for one in ran)
            tell(f"{number + 1} of {len(cells)} programs and sizes of groups, {wrong} runs wrong")
    worlds = " and ".join(f"{len(programs)} programs of {world}" for world, programs in size.programs.items())
    return Result(
        title=f"{worlds} processes, {len(ran)} runs",
        columns=columns.text(
            method="method", runs="runs", identical="identical", wrong="wrong", refused="refused first", moves="moves",
            drops="drops",
        ),
        rows=[
            _row(method, [one for one in ran if one["method"] == method])
            for method in (*size.methods, *size.planners)
        ],
        facts={"untold": _untold()},
        notes=(
            *NOTES,
            *(f"Programs of {world} processes: {'; '.join(programs)}." for world, programs in size.programs.items()),
            *_wrong(ran),
        ),
    )  # fmt: skip


def _checks(result: Result) -> Iterator[Check]:
    yield Check(what="runs that are wrong", measured=sum(row["wrong"] for row in result.rows))
    yield Check(what="planted faults that are not told", measured=result.facts["untold"])


def _kept(size: Size, journal: Path, world: int, program: str) -> list[dict[str, Any]]:
    """What became of a program, as the journal has it or as it is run now."""
    for line in journal.read_text().splitlines() if journal.exists() else ():
        rows: list[dict[str, Any]] = json.loads(line)
        if (rows[0]["world"], rows[0]["program"]) == (world, program):
            return rows
    rows = _cell(size, world, program)
    with journal.open("a") as file:
        file.write(json.dumps(rows) + "\n")  # in one piece
    return rows


def _cell(size: Size, world: int, program: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, group(world, Path(folder)) as processes:
        plain = plainly(processes, program)
        planners = size.planners if program in PLANNED else ()
        ways = [(method, share) for method in (*size.methods, *planners) for share in size.shares]
        told = {"world": world, "program": program}
        return [
            {**told, "method": method, **judged(processes, program, method, plain, share)._asdict()}
            for method, share in ways
        ]


def _untold() -> int:
    """Of two runs in which nothing that is in flight is held: those that are not told to be wrong."""
    with tempfile.TemporaryDirectory() as folder, group(2, Path(folder)) as processes:
        plain = plainly(processes, PLANTED)
        told = [judged(processes, PLANTED, method, plain, 0.5, plant=True).complaints for method in ("lru", "delta")]
    return told.count([])


NOTES: Final = (
    "Identical: losses, gradients, weights, buffers and random streams after every step, in all ranks, are those of "
    "the same processes without a session; where plain ranks are equal, so are these; and no measured peak was above "
    "the budget.",
    f"Budgets are {', '.join(map(str, SHARES))} of the peak of a session that only keeps account. Refused first: at "
    f"least one rank refused that budget, and the run that counts is that under the budget that was named.",
    f"Planted: nothing in flight is held, in {PLANTED!r} of 2 processes under lru and delta, and must be told. A run "
    "with a journal goes on where it ended: what it took is what its last piece took.",
    "Works of gloo, on the CPU. In programs with DDP and no hook, and in those that are pressed, in parts and async, "
    "ranks take turns in being late, so that what the others have begun stays in flight until they wait for it. Under "
    "methods of the block engine every step is traced. Planning methods of the tensor engine train "
    f"{' and '.join(map(repr, PLANNED))} alone.",
)


def _row(method: str, ran: Sequence[dict[str, Any]]) -> Row:
    return {
        "method": method,
        "runs": len(ran),
        "identical": sum(not one["complaints"] for one in ran),
        "wrong": sum(bool(one["complaints"]) for one in ran),
        "refused": sum(one["refusals"] > 0 for one in ran),
        "moves": sum(one["moves"] for one in ran),
        "drops": sum(one["drops"] for one in ran),
    }


def _wrong(ran: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"WRONG: {one['program']}, {one['method']}, {one['world']} processes: {'; '.join(one['complaints'])}"
        for one in ran
        if one["complaints"]
    ]


BENCHMARK: Final = Benchmark(
    name="collectives",
    run=run,
    judge=_checks,
    full=Size(
        programs={2: tuple(PROGRAMS), 3: AMONG_THREE}, methods=(*TENSOR_METHODS, *BLOCK_METHODS), planners=PLANNERS,
        shares=SHARES,
    ),
    quick=Size(programs={2: ("ddp",)}, methods=("lru", "checkpoint"), planners=(), shares=(0.65,)),
)  # fmt: skip
