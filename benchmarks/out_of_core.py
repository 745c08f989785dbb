"""A model of which an eighth fits, trained by the out-of-core window: its step beside what computing and copying take,
beside other methods, beside the same plan on paper; and twelve families under it, to the bit."""

from __future__ import annotations

import ctypes
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import columns, models
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from benchmarks.timing import median_ratio
from benchmarks.training import Trainer, bits_of_state, trainer
from benchmarks.turns import account, answered, figures, verdict
from benchmarks.workers import Job, started
from spillway.calibration.measured import this_machine
from spillway.costs import Device
from spillway.errors import BudgetInfeasible
from spillway.ir import Step
from spillway.methods import Planned, Window
from spillway.session.tensor_session import TensorSession
from spillway.simulation.simulated_engine import simulate
from spillway.tiers.disk import DiskTier
from spillway.tiers.spill_file import PAGE, SpillIO
from spillway.units import Bytes, MiB
from spillway.workloads.recorded import record
from tests.cpu.families import difference
from tests.cpu.test_planned_sessions import TWELVE, family_trained

PLAIN: Final = "plain"
WINDOW: Final = "window"
COPIES: Final = "copies alone"
OF_FAMILIES: Final = "families"
OTHERS: Final = ("lru", "delta", "lms")

PART: Final = 8
"""Of the plain peak, one part in so many is the budget, but no less than"""
ABOVE: Final = 1.1
"""times what the op needs that needs most."""

BOUND: Final = 1.35
"""Times what computing or copying takes, whichever is more."""
SECONDS_OFF: Final = 0.15
BYTES_OFF: Final = 0.02
"""Between the plan on paper and the real step."""

PIECE: Final[Bytes] = 4 * MiB
PIECES: Final = 64
"""Copies out and in again that tell how fast the disk is; each has memory of its own, which no cache holds."""
RECORDED: Final = 2
"""Steps until one was recorded and planned."""


@frozen
class Task:
    """A model trained by all methods, with copies that go one way."""

    workload: str
    options: Mapping[str, Any]
    io: SpillIO
    rounds: int
    """Steps that every competitor makes."""
    warm: int
    """The first of them, which are not timed."""


@frozen
class Size:
    """How much is measured."""

    tasks: Sequence[Task]
    families: Sequence[str]
    percents: Sequence[int]
    """Budgets of the families, in percent of the plain peak."""
    measures_machine: bool = True
    """Whether what Python costs is measured anew."""


def run(size: Size, tell: Tell) -> Result:
    """The tasks one after the other, then the families."""
    tell("what Python costs on this machine")
    device, rows = this_machine(refresh=size.measures_machine), list[Row]()
    for task in size.tasks:
        rows += _rows(task, device, lambda text, task=task: tell(f"{task.workload}, {task.io}: {text}"))  # type: ignore[misc]
    for name in size.families:
        tell(name)
        rows.append({"task": OF_FAMILIES, "competitor": name, **family_row(name, size.percents)})
    return Result(title="out of core: a model of which an eighth fits", columns=COLUMNS, rows=rows, notes=NOTES)


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(task="task", competitor="competitor"),
    *columns.nbytes(budget_bytes="budget", peak_bytes="peak"),
    *columns.seconds(seconds="time", cpu_seconds="CPU", stall_seconds="stalled"),
    *columns.ratios(ratio="x plain", of_bound="x bound"),
    *columns.nbytes(bytes_out="out/step", bytes_in="in/step"),
    *columns.seconds(simulated_seconds="on paper"),
    *columns.nbytes(simulated_out="out on paper", simulated_in="in on paper"),
    *columns.text(losses="losses"),
)

NOTES: Final = (
    "Every competitor trains the same batch in a process of its own, a step each in turn. Times are medians; ratios "
    "are medians over rounds of the time as a multiple of the plain time of that round.",
    f"Budget: one part in {PART} of the plain peak, or {ABOVE} times what the largest op needs if that is more. Bound: "
    "the plain step of the round, or the bytes that the competitor moves at the speed of copies alone in that round, "
    "whichever takes longer. Copies alone: the spill file, one copy after the other. Task: the model, and whether "
    "copies go past the page cache (direct) or through it (buffered).",
    "`lms` keeps parameters in memory and has no plan for so little of them: its session says so, and moves what is "
    "stalest.",
    "On paper: the plan that the session made, simulated on the step that it recorded; the link as fast as copies "
    "alone, Python as calibrated on this machine, seconds scaled by plain steps to plain ops. "
    "Identical, of families: parameters, buffers, gradients, optimizer state and random streams, after eight steps on "
    "two batches under each budget. A budget that was refused is followed by the one that the refusal named.",
)


# ---------------------------------------------------------------------- a model of which an eighth fits


def _rows(task: Task, device: Device, tell: Tell) -> list[Row]:
    shared = {"workload": task.workload, "options": dict(task.options)}

    def job(method: str | None = None, budget: Bytes | None = None) -> Job:
        return Job(
            function="benchmarks.out_of_core:competitor",
            options={**shared, "method": method, "budget": budget, "io": task.io, "rounds": task.rounds},
        )

    tell("peak")
    peak = account(job("keep-all"), RECORDED)
    with started(Job(function="benchmarks.out_of_core:needs", options=shared)) as worker:
        budget = max(peak // PART, int(worker.ask()["largest"] * ABOVE))
    copies = Job(function="benchmarks.out_of_core:copier", options={"io": task.io})
    jobs = {PLAIN: job(), COPIES: copies, WINDOW: job(WINDOW, budget), **{name: job(name, budget) for name in OTHERS}}
    answers = answered(jobs, task.rounds, tell)
    alone = answers.pop(COPIES)
    rows = [
        {
            "task": f"{task.workload}, {task.io}", "competitor": name, "budget_bytes": jobs[name].options["budget"],
            **figures(found, answers[PLAIN], task.warm, peak if name == PLAIN else None),
            **_bounded(found, answers[PLAIN], alone, task.warm),
        }
        for name, found in answers.items()
    ]  # fmt: skip
    for row in rows:
        same = row.pop("identical") and answers[row["competitor"]][-1]["state"] == answers[PLAIN][-1]["state"]
        row["losses"] = verdict(same)
    followed = next(row for row in rows if row["competitor"] == WINDOW)
    followed.update(_on_paper(answers[WINDOW][-1]["followed"], device, alone, answers[PLAIN][task.warm :]))
    speeds = {
        f"{way}_per_second": PIECES * PIECE / statistics.median(one[way] for one in alone) for way in ("out", "in")
    }
    rows.append({"task": rows[0]["task"], "competitor": COPIES, "seconds": _median(alone), **speeds})
    return rows


def _median(answers: Sequence[Mapping[str, Any]]) -> float:
    return statistics.median(answer["wall"] for answer in answers)


def _bounded(found: Sequence[Any], plain: Sequence[Any], alone: Sequence[Any], warm: int) -> Row:
    """A competitor's step beside the longer of a plain one and its own copies, round by round."""
    if found[-1]["report"] is None:
        return {}
    bounds, reports = [], [answer["report"] for answer in found]
    for report, one, copies in list(zip(reports, plain, alone, strict=True))[warm:]:
        moved = report["bytes_out"] * copies["out"] + report["bytes_in"] * copies["in"]
        bounds.append(max(one["wall"], moved / (PIECES * PIECE)))
    return {
        "of_bound": median_ratio([answer["wall"] for answer in found[warm:]], bounds),
        "stall_seconds": statistics.median(report["stall_seconds"] for report in reports[warm:]),
        "walls": [answer["wall"] for answer in found[warm:]],
    }


class FollowedStep(NamedTuple):
    """What a session followed last, and the step that it recorded for it."""

    step: Step
    budget: Bytes


def _on_paper(
    followed: FollowedStep, device: Device, alone: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]
) -> Row:
    """The same plan by the same engine, on a link as fast as copies were."""
    out, back, page = (statistics.median(one[what] for one in alone) for what in ("out", "in", "page"))
    measured = replace(
        device, out_per_second=PIECES * PIECE / out, in_per_second=PIECES * PIECE / back, duplex=False,
        disk_out_per_second=PIECES * PIECE / out, disk_in_per_second=PIECES * PIECE / back,
        copy_seconds=max(device.copy_seconds, page),
    )  # fmt: skip
    ran = simulate(
        followed.step, allowed=followed.budget, method=Window(), device=measured, tier="disk", steps=RECORDED + 1
    )
    return {
        "simulated_seconds": ran.overhead * _median(plain), "simulated_out": ran.bytes_out,
        "simulated_in": ran.bytes_in, "simulated_status": ran.status,
    }  # fmt: skip


def _checks(result: Result) -> Iterator[Check]:
    rows = result.rows
    for name in dict.fromkeys(row["task"] for row in rows if row["task"] != OF_FAMILIES):
        yield from _of_task(name, rows)
    texts = [text for row in rows if row["task"] == OF_FAMILIES for text in row["losses"].split("; ")]
    wrong = sum(not text.startswith(("identical", "refused")) for text in texts)
    yield Check(what=f"runs of families, of {len(texts)}, that differ or are over the budget", measured=wrong)


def _of_task(name: str, rows: Sequence[Row]) -> Iterator[Check]:
    of = {row["competitor"]: row for row in rows if row["task"] == name}
    window = of[WINDOW]
    yield Check(what=f"{name}, window, times the bound", measured=window["of_bound"], at_most=BOUND)
    for other in OTHERS:
        ratio = median_ratio(window["walls"], of[other]["walls"])
        yield Check(what=f"{name}, window, time as a multiple of that of {other}", measured=ratio, at_most=1.0)
    differing = sum(row.get("losses") == verdict(False) for row in of.values())
    yield Check(what=f"{name}, competitors with other bits than plain", measured=differing)
    for row in of.values():
        if row.get("budget_bytes"):
            over = max(row["peak_bytes"] - row["budget_bytes"], 0)
            yield Check(what=f"{name}, {row['competitor']}, bytes over the budget", measured=over)
    off = abs(window["simulated_seconds"] / window["seconds"] - 1)
    yield Check(what=f"{name}, seconds on paper, apart from the real ones", measured=off, at_most=SECONDS_OFF)
    moved = window["bytes_out"] + window["bytes_in"]
    off = abs((window["simulated_out"] + window["simulated_in"]) / moved - 1)
    yield Check(what=f"{name}, bytes moved on paper, apart from the real ones", measured=off, at_most=BYTES_OFF)


# ---------------------------------------------------------------------- in processes of their own


def competitor(*, rounds: int, **options: Any) -> Callable[[], dict[str, Any]]:
    """Trains; the last of so many answers tells the bits of the state, and what was followed."""
    training, asked = trainer(**options), 0

    def step() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        answer = training()
        if asked == rounds:
            answer |= {"state": bits_of_state(training.workload), "followed": _followed(training, options["budget"])}
        return answer

    return step


def _followed(training: Trainer, budget: Bytes | None) -> FollowedStep | None:
    session = training.session
    plans = session._plans if isinstance(session, TensorSession) else None
    planned = None if plans is None else plans._now.planned
    if not isinstance(planned, Planned) or budget is None:
        return None
    return FollowedStep(planned.step, budget)


def needs(*, workload: str, options: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """Tells the bytes that the op of a step uses that uses most."""

    def told() -> dict[str, Any]:
        step = record(models.build(workload, options)).step
        storages = [{step.values[value].storage for value in (*op.reads, *op.creates)} for op in step.ops]
        return {"largest": max(sum(step.storages[storage].nbytes for storage in used) for used in storages)}

    return told


def copier(*, io: SpillIO) -> Callable[[], dict[str, Any]]:
    """Copies pieces out and in again, one after the other, as a session makes them; then single pages."""
    tier, memory = DiskTier(Path(tempfile.gettempdir()), io), mmap.mmap(-1, PIECES * PIECE)
    memory[:] = bytes(range(256)) * (len(memory) // 256)
    first = ctypes.c_char.from_buffer(memory)

    def moved(nbytes: Bytes) -> tuple[float, float]:
        """Seconds of all copies out, and of all copies in."""
        places = [ctypes.addressof(first) + number * PIECE for number in range(PIECES)]
        began = time.perf_counter()
        slots = [tier.write(place, nbytes) for place in places]
        written = time.perf_counter()
        for slot, place in zip(slots, places, strict=True):
            tier.read(slot, place)
        read = time.perf_counter()
        for slot in slots:
            tier.free(slot)
        return written - began, read - written

    def copied() -> dict[str, Any]:
        out, back = moved(PIECE)
        return {"wall": out + back, "out": out, "in": back, "page": sum(moved(PAGE)) / (2 * PIECES)}

    return copied


# ---------------------------------------------------------------------- families


def family_row(name: str, percents: Sequence[int]) -> dict[str, Any]:
    """What became of a family under each budget."""
    expected, counted = family_trained(name), family_trained(name, "keep-all")
    peak = max(report.peak_bytes for report in counted.reports)
    texts = []
    for percent in percents:
        budget, text = peak * percent // 100, "identical"
        try:
            found = family_trained(name, WINDOW, budget)
        except BudgetInfeasible as refusal:
            budget = refusal.smallest_budget
            text = f"refused, {budget / peak:.0%}"
            found = family_trained(name, WINDOW, budget)
        over = max(report.peak_bytes for report in found.reports) > budget
        wrong = difference(found.state, expected.state)
        texts.append("OVER BUDGET" if over else text if wrong is None else f"DIFFERS in {wrong}")
    return {"peak_bytes": peak, "losses": "; ".join(texts)}


BENCHMARK: Final = Benchmark(
    name="out_of_core",
    run=run,
    judge=_checks,
    full=Size(
        tasks=(
            Task(
                workload="stdlib-lm", options={"width": 512, "heads": 8, "longest": 192, "grouped": 1}, io="direct",
                rounds=20, warm=4,
            ),
            Task(
                workload="stdlib-lm", options={"width": 512, "heads": 8, "longest": 192, "grouped": 1}, io="buffered",
                rounds=7, warm=3,
            ),
        ),
        families=TWELVE, percents=(75, 50, 34),
    ),
    quick=Size(
        tasks=(
            Task(
                workload="stdlib-lm", options={"width": 64, "layers": 3, "longest": 48, "batch": 2, "grouped": 1},
                io="direct", rounds=4, warm=3,
            ),
        ),
        families=("lstm",), percents=(50,), measures_machine=False,
    ),
)  # fmt: skip
