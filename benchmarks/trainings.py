"""Whole trainings, each in a process of its own as `spillway demo` runs them, and what is compared of them."""

from __future__ import annotations

from benchmarks import workloads
from benchmarks.record import Tell
from spillway.subprocess_runs import run as launch
from spillway.subprocess_runs.run import RunRequest, RunResult, StepDone
from spillway.units import Bytes


def path_of(workload: str) -> str:
    """A function of `benchmarks.workloads`, as a user would name one of a file."""
    return f"{workloads.__file__}:{workload}"


def trained(workload: str, steps: int, method: str | None, budget: Bytes | None, tell: Tell) -> RunResult:
    """Train a function of `benchmarks.workloads`, always with the same seed."""
    done: list[StepDone] = []

    def hear(step: StepDone) -> None:
        done.append(step)
        if len(done) % 20 == 0:
            tell(f"{method or 'plain'}: step {len(done)} of {steps}")

    request = RunRequest(workload=path_of(workload), seed=0, steps=steps, method=method, budget_bytes=budget)
    return launch.run(request, step=hear, output=tell)


def differing(found: RunResult, plain: RunResult) -> int:
    """Losses that are not the same in all bits."""
    return sum(one != other for one, other in zip(found.losses, plain.losses, strict=True))
