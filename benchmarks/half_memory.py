"""Seconds per step at half of the memory that plain training takes, beside the usual way to save memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
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
PUBLISHED: Final = "spillway delta-published"
NEARLY_ALL: Final = "spillway lru at 97 %"
CHECKPOINT: Final = "checkpoint"
LIMITED: Final = (DEFAULT, DELTA, PUBLISHED)
WITHOUT: Final = ", without the native part"
KEPT: Final = f"{WITHOUT}, freed memory kept"

LIMIT: Final = 1.25
"""Times the plain step, on glibc or on the arena, whichever is faster; and the better of `lru` and `delta`:"""
BETTER: Final = 1.15
FAULTS: Final = 1000
"""Pages that are faulted in, in a step after the first."""
RESIDENT: Final = 1.02
"""The most that is resident in the arena, times the budget."""


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
    return Result(
        title="time per step at half of the plain peak",
        columns=COLUMNS,
        rows=[row for task in size.tasks for row in _rows(*task, size, tell)],
        notes=NOTES,
    )


def _checks(result: Result) -> Iterator[Check]:
    for workload in dict.fromkeys(row["workload"] for row in result.rows):
        yield from _of_workload(workload, result.rows)


def _of_workload(workload: str, rows: Sequence[Row]) -> Iterator[Check]:
    of = {row["competitor"]: row for row in rows if row["workload"] == workload}
    faster = min(1.0, of[ON_ARENA]["ratio"])
    beside = of[PLAIN]["peak_rss_bytes"] - of[PLAIN]["peak_bytes"]

    def check(what: str, measured: float, at_most: float) -> Check:
        return Check(what=f"{workload}, {what}", measured=measured, at_most=at_most)

    yield check("plain on the arena, times the plain step", of[ON_ARENA]["ratio"], 1.0)
    better = min(of[name]["ratio"] for name in (DEFAULT, DELTA))
    yield check("better of lru and delta, times the faster plain step", better / faster, BETTER)
    for name in LIMITED:
        row, budget = of[name], of[name]["budget_bytes"]
        yield check(f"{name}, times the faster plain step", row["ratio"] / faster, LIMIT)
        yield check(f"{name}, page faults", row["page_faults"], FAULTS)
        yield check(f"{name}, arena, times the budget", row["arena_bytes"] / budget, RESIDENT)
        rss = row["peak_rss_bytes"] / (budget + beside)
        yield check(f"{name}, RSS, times the budget and what plain has beside its tensors", rss, 1.0)


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(workload="workload", competitor="competitor"),
    *columns.nbytes(peak_bytes="peak", peak_rss_bytes="RSS", arena_bytes="arena"),
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
    "their budget. Arena: the most that was resident in it. Freed memory kept: with "
    "`SpillOptions(return_freed=False)`, which makes no difference where tensors are born in the arena.",
    "System: what of the CPU time the kernel took; without the arena nearly all of it for page faults (touching memory "
    "that was returned before). At 97 % next to nothing has to leave.",
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
        MOVES: job("lru that moves only", budget),
        **{name: job(name.removeprefix("spillway "), budget) for name in LIMITED},
        **{name + WITHOUT: job(name.removeprefix("spillway "), budget, native=False) for name in (DEFAULT, DELTA)},
        **{
            name + KEPT: job(name.removeprefix("spillway "), budget, native=False, return_freed=False)
            for name in (DEFAULT, DELTA)
        },
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
            "arena_bytes": max(answer["arena"] for answer in found) or None,
            **figures(found, answers[PLAIN], size.warm, peaks.get(name)),
        }
        for name, found in answers.items()
    ]


BENCHMARK: Final = Benchmark(
    name="half_memory",
    run=run,
    judge=_checks,
    full=Size(tasks=[("stdlib-lm", {"grouped": 1}), ("resnet", {})], batches=4, rounds=17, warm=2),
    quick=Size(
        tasks=[("stdlib-lm", {"grouped": 1, "width": 64, "layers": 2, "longest": 96})], batches=2, rounds=3, warm=1
    ),
)
