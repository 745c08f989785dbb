"""Seconds per step at half of the memory that plain training takes, beside the usual way to save memory."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell
from benchmarks.timing import median_ratio
from benchmarks.turns import account, answered
from benchmarks.workers import Job
from spillway.units import Bytes

PLAIN: Final = "plain"
ON_ARENA: Final = "plain on the arena"
DEFAULT: Final = "spillway lru"
MOVES: Final = "spillway, moves only"
DELTA: Final = "spillway delta"
DELTA_KEPT: Final = "spillway delta, freed memory kept"
PUBLISHED: Final = "spillway delta-published"
PUBLISHED_KEPT: Final = "spillway delta-published, freed memory kept"
KEPT: Final = "spillway lru, freed memory kept"
NEARLY_ALL: Final = "spillway lru at 97 %"
CHECKPOINT: Final = "checkpoint"
LIMITED: Final = (DEFAULT, KEPT, DELTA, DELTA_KEPT, PUBLISHED, PUBLISHED_KEPT)

LIMIT: Final = 1.35
"""Times the plain step, with freed memory returned to the system (the default) and with it left to the allocator."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A workload with its options."""

    workload: str
    options: Mapping[str, Any]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    tasks: Sequence[Task]
    batches: int
    """Different batches, trained on in turn."""
    rounds: int
    """Steps that every competitor makes."""
    warm: int
    """The first of them, which do not count: they allocate the optimizer's state and learn what copies cost."""


def run(size: Size, tell: Tell) -> Result:
    """Measure every workload."""
    rows = [row for task in size.tasks for row in _rows(task, size, tell)]
    limited = [row for row in rows if row["competitor"] in LIMITED]
    return Result(
        title="time per step at half of the plain peak",
        columns=COLUMNS,
        rows=rows,
        checks=[
            Check(what=f"{r['workload']}, {r['competitor']}, times the plain step", measured=r["ratio"], at_most=LIMIT)
            for r in limited
        ],
        notes=NOTES,
    )


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(workload="workload", competitor="competitor"),
    *columns.nbytes(peak_bytes="peak", peak_rss_bytes="RSS"),
    *columns.seconds(seconds="time", cpu_seconds="CPU", system_seconds="system"),
    *columns.shown("{:.0f}".format, page_faults="faults"),
    *columns.ratios(ratio="x plain", cpu_ratio="CPU x plain"),
    *columns.nbytes(bytes_out="out/step", bytes_in="in/step"),
    *columns.shares(recomputed_share="recomputed"),
    *columns.shown(lambda same: "as plain" if same else "DIFFER", identical="losses"),
)

NOTES: Final = (
    "Every competitor trains the same batches, all within a tenth of the longest, in a process of its own, a step "
    "each in turn. Times are medians; ratios are medians over rounds of the time as a multiple of the plain time of "
    "that round.",
    "Checkpoint: `torch.utils.checkpoint` (not reentrant) around every block. Peak: by our account; that of the "
    "plain and of the checkpointed run by a session that only keeps account, in another process. RSS: the process's "
    "highest resident set above its start, without pages of files. The sessions have half of the plain peak as "
    "their budget. Freed memory kept: with `SpillOptions(return_freed=False)`.",
    "System: what of the CPU time the kernel took, nearly all of it for page faults (touching memory that was returned "
    "before). At 97 % next to nothing has to leave: what that costs over plain is the price of returning freed memory, "
    "which half of the memory can only raise. That and what the session costs with freed memory kept are a bound for "
    "the default on this machine.",
)


def _rows(task: Task, size: Size, tell: Tell) -> list[Row]:
    def job(method: str | None = None, budget: Bytes | None = None, **flags: bool) -> Job:
        own = {"workload": task.workload, "options": dict(task.options), "batches": size.batches}
        options = {**own, "method": method, "budget": budget, "checkpoints": False, "return_freed": True, **flags}
        return Job(function="benchmarks.training:trainer", options=options)

    # One step more than batches: the optimizer's state is there from the second on.
    without = {PLAIN: job("keep-all"), CHECKPOINT: job("keep-all", checkpoints=True)}
    peaks = {name: account(one, size.batches + 1) for name, one in without.items()}
    budget, nearly_all = peaks[PLAIN] // 2, peaks[PLAIN] * 97 // 100
    jobs = {
        PLAIN: job(),
        ON_ARENA: job(arena=True),
        DEFAULT: job("lru", budget),
        KEPT: job("lru", budget, return_freed=False),
        MOVES: job("lru that moves only", budget),
        DELTA: job("delta", budget),
        DELTA_KEPT: job("delta", budget, return_freed=False),
        PUBLISHED: job("delta-published", budget),
        PUBLISHED_KEPT: job("delta-published", budget, return_freed=False),
        NEARLY_ALL: job("lru", nearly_all),
        CHECKPOINT: job(checkpoints=True),
    }
    answers = answered(jobs, size.rounds, lambda text: tell(f"{task.workload}: {text}"))
    budgets = {NEARLY_ALL: nearly_all}
    return [
        _row(task, name, budgets.get(name, budget), peaks.get(name), found, answers[PLAIN], size)
        for name, found in answers.items()
    ]


def _row(
    task: Task, name: str, budget: Bytes, peak: Bytes | None, answers: list[Any], plain: list[Any], size: Size
) -> Row:
    reports = [answer["report"] for answer in answers if answer["report"] is not None]
    clocks = ("wall", "cpu", "system", "faults")
    counted = {clock: [answer[clock] for answer in answers[size.warm :]] for clock in clocks}
    beside = {clock: [answer[clock] for answer in plain[size.warm :]] for clock in ("wall", "cpu")}
    return {
        "workload": task.workload,
        "competitor": name,
        "budget_bytes": budget if reports else None,
        "peak_bytes": max((report["peak_bytes"] for report in reports), default=peak),
        "peak_rss_bytes": max(answer["rss"] for answer in answers),
        "seconds": statistics.median(counted["wall"]),
        "cpu_seconds": statistics.median(counted["cpu"]),
        "system_seconds": statistics.median(counted["system"]),
        "page_faults": statistics.median(counted["faults"]),
        "ratio": median_ratio(counted["wall"], beside["wall"]),
        "cpu_ratio": median_ratio(counted["cpu"], beside["cpu"]),
        **moved_per_step(reports[size.warm :]),
        "identical": [answer["loss"] for answer in answers] == [answer["loss"] for answer in plain],
    }


def moved_per_step(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What left and came back in a step, on average; nothing without a session."""
    if not reports:
        return {"bytes_out": None, "bytes_in": None, "recomputed_share": None}
    share = sum(report["recomputed_ops"] for report in reports) / sum(report["ops"] for report in reports)
    return {
        "bytes_out": sum(report["bytes_out"] for report in reports) // len(reports),
        "bytes_in": sum(report["bytes_in"] for report in reports) // len(reports),
        "recomputed_share": share,
    }


BENCHMARK: Final = Benchmark(
    name="half_memory",
    run=run,
    full=Size(
        tasks=[Task(workload="stdlib-lm", options={"grouped": 1}), Task(workload="resnet", options={})],
        batches=4,
        rounds=17,
        warm=2,
    ),
    quick=Size(
        tasks=[
            Task(workload="stdlib-lm", options={"grouped": 1, "width": 64, "layers": 2, "longest": 96}),
        ],
        batches=2,
        rounds=3,
        warm=1,
    ),
)
