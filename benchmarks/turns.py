"""Competitors that take turns, some of which may be refused: a budget can be too small for a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from benchmarks.record import Tell
from benchmarks.workers import Job, all_started, started
from spillway.errors import BudgetInfeasible
from spillway.units import Bytes

Answers: TypeAlias = Sequence[dict[str, Any]]
"""What a competitor told, a step each."""


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


def answered(jobs: Mapping[str, Job], rounds: int, tell: Tell) -> dict[str, list[dict[str, Any]]]:
    """The same of competitors none of which may be refused. Raises the refusal of one that is."""
    found = take_turns(jobs, rounds, tell)
    for answers in found.values():
        if isinstance(answers, BudgetInfeasible):
            raise answers
    return {name: list(answers) for name, answers in found.items() if not isinstance(answers, BudgetInfeasible)}


def account(job: Job, steps: int) -> Bytes:
    """The highest peak of so many steps of a competitor whose session only keeps account."""
    with started(job) as worker:
        return max(worker.ask()["report"]["peak_bytes"] for _ in range(steps))
