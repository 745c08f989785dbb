"""A published run of Mimose that passed its budget, step by step, and what the default would have done.

The trace has the peak of every step of a RetinaNet with a ResNet-101 on pictures of many sizes, batch 6, its first 30
steps sheltered. Its planner was given 13 GB less a buffer of 6, and the run ended out of memory after the last line.
What blocks save is not in the trace; what the step needs with every block recomputed is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from papers import SHARED, table
from spillway.methods.by_block import BlockSample, InputSize, StepSample
from spillway.methods.mimose import Options
from spillway.methods.mimose.planning import SimulatedPlanning
from spillway.units import Bytes, GiB, MiB, format_bytes

DATA: Final = SHARED / "data" / "mimose" / "detection_r101_run1.csv"
"""`../shared/data/mimose`, seen from the root of the project."""

BUDGET: Final[Bytes] = 7 * GiB
"""What it planned with."""
SHELTERED: Final = 30
ALL_RECOMPUTED_FROM: Final = 786_432
"""Pixels from which on its peaks are those of steps with every block recomputed."""
SPARE: Final[Bytes] = 60 * MiB
"""A size is one that can hold if its floor is below the budget by more than this."""


@frozen
class Size:
    """How much is looked at."""

    data: Path = DATA
    steps: int | None = None
    """So many of the trace; all if None."""


@final
@dataclass(slots=True)
class Group:
    """Steps of one kind."""

    peaks: list[tuple[InputSize, Bytes]] = field(default_factory=list)
    """Of the published run."""
    expected: list[Bytes] = field(default_factory=list)
    """What the default expects of a step of that size with every block recomputed."""
    told: int = 0
    """Steps before which the default says that no plan holds."""
    passed: int | None = None
    """Steps at which the default would have passed the budget; None where it does at those that it tells of."""


RECOMPUTED: Final = "planned, every block recomputed"
FITS: Final = "planned, blocks kept, the floor fits"


def run(size: Size, tell: Tell) -> Result:
    """Split the trace into kinds of steps, and have the default plan each of them."""
    read = table(size.data)[: size.steps]
    trace = [((int(row["H"]) * int(row["W"]),), round(float(row["peak_MiB"]) * MiB)) for row in read]
    tell(f"{len(trace)} steps")
    planning = learned(trace)
    planned = trace[SHELTERED:]
    sheltered = _group(planning, trace[1:SHELTERED])
    recomputed = _group(planning, [step for step in planned if step[0][0] >= ALL_RECOMPUTED_FROM])
    kept = _group(planning, [step for step in planned if step[0][0] < ALL_RECOMPUTED_FROM])
    can_hold = [step for step in kept.peaks if floor(planning, step[0]) < BUDGET - SPARE]
    cannot = [step for step in kept.peaks if step not in can_hold]
    groups = {
        "sheltered": sheltered,
        RECOMPUTED: recomputed,
        FITS: _group(planning, can_hold, passed=_passed(learned(trace), can_hold)),
        "planned, blocks kept, the floor does not fit": _group(planning, cannot),
    }
    rows = [_row(kind, group) for kind, group in groups.items() if group.peaks]
    return Result(title=TITLE, columns=COLUMNS, rows=rows, notes=NOTES)


def learned(trace: Sequence[tuple[InputSize, Bytes]]) -> SimulatedPlanning:
    """What the sheltered steps show, one block standing for all: it saves 0, so that plans are of the floor alone."""
    planning = SimulatedPlanning(Options())
    for step, (size, peak) in enumerate(trace[:SHELTERED]):
        block = BlockSample(block=0, size=size, nbytes=0, seconds=1.0)
        planning.observe(StepSample(size=size, recomputed=frozenset({0}), peak=peak), [block], whole=step > 0)
    return planning


def floor(planning: SimulatedPlanning, size: InputSize) -> Bytes:
    """What a step is expected to need with every block recomputed."""
    return planning.plan(size, 0).projected


def _group(planning: SimulatedPlanning, steps: Sequence[tuple[InputSize, Bytes]], passed: int | None = None) -> Group:
    return Group(
        peaks=list(steps), expected=[floor(planning, size) for size, _ in steps],
        told=sum(not planning.plan(size, BUDGET).holds for size, _ in steps), passed=passed,
    )  # fmt: skip


def _passed(planning: SimulatedPlanning, steps: Sequence[tuple[InputSize, Bytes]]) -> int:
    """Steps over the budget if the default had believed of the blocks what the published planner believed.

    One block stands for what was kept, and is believed to fit, to the last MiB. If it is kept the peak is the trace's,
    and if it is recomputed the floor.
    """
    floors = {size: floor(planning, size) for size, _ in steps}
    for size, nbytes in floors.items():
        believed = BlockSample(block=0, size=size, nbytes=BUDGET - nbytes - MiB, seconds=1.0)
        planning.observe(StepSample(size=size, recomputed=frozenset({0}), peak=nbytes), [believed], whole=False)
    over = 0
    for size, peak in steps:
        recomputed = planning.plan(size, BUDGET).given_up
        measured = floors[size] if recomputed else peak
        over += measured > BUDGET
        planning.observe(StepSample(size=size, recomputed=recomputed, peak=measured), [], whole=True)
    return over


def _row(kind: str, group: Group) -> Row:
    peaks = [peak for _, peak in group.peaks]
    over = [peak - BUDGET for peak in peaks if peak > BUDGET]
    shares = [expected / peak - 1 for (_, peak), expected in zip(group.peaks, group.expected, strict=True)]
    return {
        "kind": kind, "steps": len(peaks), "over": len(over), "over_by": [min(over), max(over)] if over else None,
        "peaks": [min(peaks), max(peaks)], "floors": [min(group.expected), max(group.expected)],
        "apart": [min(shares), max(shares)], "told": group.told,
        "passed": group.told if group.passed is None else group.passed,
    }  # fmt: skip


def _checks(result: Result) -> Iterator[Check]:
    for row in result.rows:
        if row["kind"] == RECOMPUTED:
            what = "steps without a plan that holds before which the default is silent"
            yield Check(what=what, measured=row["steps"] - row["told"])
            what = "share by which what the default expects there is too low, at worst"
            yield Check(what=what, measured=round(max(-min(row["apart"]), 0.0), 4), at_most=0.005)
        if row["kind"] == FITS:
            what = "steps that could hold at which the default passes the budget"
            yield Check(what=what, measured=row["passed"], at_most=1)


def _between(show: Callable[[Any], str]) -> Callable[[Sequence[Any]], str]:
    return lambda ends: " to ".join(dict.fromkeys(map(show, ends)))


TITLE: Final = "a published run of Mimose that passed its budget of 7 GiB, and what the default would have done"

COLUMNS: Final = (
    *columns.text(kind="steps", steps="", over="over budget"),
    *columns.shown(_between(format_bytes), over_by="by", peaks="peaks", floors="expected if all recomputed"),
    *columns.shown(_between("{:+.1%}".format), apart="of the peak"),
    *columns.text(told="no plan holds, it says", passed="it passes the budget"),
)

NOTES: Final = (
    "Sizes are height times width; the first step is left out. Where the floor fits, with the published run's wrong "
    "belief about what was kept; the first overrun corrects the estimates of all sizes. Why that run passed its budget "
    "stands in papers/mimose/README.md.",
)

BENCHMARK: Final = Benchmark(name="mimose_detection", run=run, judge=_checks, full=Size(), quick=Size(steps=120))
