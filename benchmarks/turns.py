"""Competitors that take turns, some of which may be refused: a budget can be too small for a model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from benchmarks.record import Tell
from benchmarks.timing import median_ratio
from benchmarks.workers import Job, all_started, started
from spillway.errors import BudgetInfeasible
from spillway.units import Bytes

Answers: TypeAlias = Sequence[dict[str, Any]]
"""What a competitor told, a step each."""


def training(workload: str, options: Mapping[str, Any], **more: Any) -> Job:
    """A competitor that trains a workload with its options, with `more` of `benchmarks.training.trainer`."""
    return Job(function="benchmarks.training:trainer", options={"workload": workload, "options": dict(options), **more})


def take_turns(jobs: Mapping[str, Job], rounds: int, tell: Tell) -> dict[str, Answers | BudgetInfeasible]:
    """A step of each in turn, so many times; a competitor that is refused answers no more."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    refused: dict[str, BudgetInfeasible] = {}
    with all_started(jobs) as workers:
        for number in range(rounds):
            tell(f"round {number + 1} of {rounds}")
            for name in (name for name in jobs if name not in refused):
                try:
                    answers[name].append(workers[name].ask())
                except BudgetInfeasible as refusal:
                    refused[name] = refusal
    return {name: refused.get(name, answers[name]) for name in jobs}


def answered(jobs: Mapping[str, Job], rounds: int, tell: Tell) -> dict[str, Answers]:
    """The same of competitors none of which may be refused. Raises the refusal of one that is."""
    found = take_turns(jobs, rounds, tell)
    for answers in found.values():
        if isinstance(answers, BudgetInfeasible):
            raise answers
    return {name: answers for name, answers in found.items() if not isinstance(answers, BudgetInfeasible)}


def account(job: Job, steps: int) -> Bytes:
    """The highest peak of so many steps of a competitor whose session only keeps account."""
    with started(job) as worker:
        return max(worker.ask()["report"]["peak_bytes"] for _ in range(steps))


def profiled_peak(job: Job, steps: int) -> Bytes:
    """The highest of as many steps of what no session can watch, by its allocations. The first does not count: the
    optimizer has its state from the second on."""
    with started(Job(function="benchmarks.training:profiled", options=job.options)) as worker:
        return max([worker.ask()["peak"] for _ in range(steps)][1:])


def figures(found: Answers, plain: Answers, warm: int, peak: Bytes | None = None) -> dict[str, Any]:
    """What a competitor did, and how it did beside plain steps of the same rounds, the first `warm` not timed.

    Arguments:
        peak: Of a competitor whose steps tell none, for want of a session.
    """
    reports = [answer["report"] for answer in found if answer["report"] is not None]
    walls, cpus = (
        [[answer[clock] for answer in answers[warm:]] for answers in (found, plain)] for clock in ("wall", "cpu")
    )
    losses, plain_losses = ([answer["loss"] for answer in answers] for answers in (found, plain))
    return {
        "peak_bytes": max((report["peak_bytes"] for report in reports), default=peak),
        "peak_rss_bytes": max(answer["rss"] for answer in found),
        "seconds": statistics.median(walls[0]),
        "cpu_seconds": statistics.median(cpus[0]),
        "ratio": median_ratio(*walls),
        "cpu_ratio": median_ratio(*cpus),
        "identical": losses == plain_losses,
        **_moved(reports[warm:]),
    }


def verdict(identical: bool) -> str:
    """How losses are beside plain ones, for tables."""
    return "as plain" if identical else "DIFFER"


def _moved(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What left and came back in a step, on average; nothing without a session."""
    if not reports:
        return {"bytes_out": None, "bytes_in": None, "recomputed_share": None}
    total = {key: sum(report[key] for report in reports) for key in ("bytes_out", "bytes_in", "recomputed_ops", "ops")}
    return {
        "bytes_out": total["bytes_out"] // len(reports),
        "bytes_in": total["bytes_in"] // len(reports),
        "recomputed_share": total["recomputed_ops"] / total["ops"] if total["ops"] else None,
    }
