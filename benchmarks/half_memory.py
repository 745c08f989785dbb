"""Seconds per step at half of the memory that plain training takes, beside the usual way to save memory."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from benchmarks.turns import account, answered, figures, training, verdict
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


@frozen
class Size:
    """How much is measured."""

    tasks: Sequence[tuple[str, Mapping[str, Any]]]
    """Workloads with their options."""
    batches: int
    """Different batches, trained on in turn."""
    rounds: int
    """Steps that every competitor makes."""
    warm: int
    """The first of them, which do not count: they allocate the optimizer's state and learn what copies cost."""


def run(size: Size, tell: Tell) -> Result:
    """Measure every workload."""
    rows = [row for task in size.tasks for row in _rows(*task, size, tell)]
    return Result(
        title="time per step at half of the plain peak",
        columns=COLUMNS,
        rows=rows,
        checks=[
            Check(what=f"{r['workload']}, {r['competitor']}, times the plain step", measured=r["ratio"], at_most=LIMIT)
            for r in rows
            if r["competitor"] in LIMITED
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
    *columns.shown(verdict, identical="losses"),
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


def _rows(workload: str, options: Mapping[str, Any], size: Size, tell: Tell) -> list[Row]:
    def job(method: str | None = None, budget: Bytes | None = None, **flags: bool) -> Job:
        return training(workload, options, batches=size.batches, method=method, budget=budget, **flags)

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
    answers = answered(jobs, size.rounds, lambda text: tell(f"{workload}: {text}"))
    return [
        {
            "workload": workload,
            "competitor": name,
            "budget_bytes": jobs[name].options["budget"],
            "system_seconds": statistics.median(answer["system"] for answer in found[size.warm :]),
            "page_faults": statistics.median(answer["faults"] for answer in found[size.warm :]),
            **figures(found, answers[PLAIN], size.warm, peaks.get(name)),
        }
        for name, found in answers.items()
    ]


BENCHMARK: Final = Benchmark(
    name="half_memory",
    run=run,
    full=Size(tasks=[("stdlib-lm", {"grouped": 1}), ("resnet", {})], batches=4, rounds=17, warm=2),
    quick=Size(
        tasks=[("stdlib-lm", {"grouped": 1, "width": 64, "layers": 2, "longest": 96})], batches=2, rounds=3, warm=1
    ),
)
