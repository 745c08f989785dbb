"""Listens to the process of a run.

It tells `{"step": ...}` after every step, then `{"result": ...}` or `{"error": ...}`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from spillway.errors import SpillwayError
from spillway.runs.processes import as_raised, how_it_ended, talking
from spillway.runs.records import RunRequest, RunResult, StepDone


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Who hears of a run while it runs."""

    step: Callable[[StepDone], None]
    """Called after every step."""
    output: Callable[[str], None]
    """Called, from another thread, with every line that the process prints."""


def run(request: RunRequest, listener: Listener) -> RunResult:
    """Run what is asked for in a fresh process with one thread.

    Raises:
        BudgetInfeasible: A step cannot run under the budget.
        SpillwayError: Whatever else kept the run from its end, in one sentence.
    """
    steps: list[StepDone] = []
    with talking("spillway.runs.child", request.to_json(), listener.output) as talk:
        for message in talk.messages:
            match message:
                case {"step": dict(step)}:
                    steps.append(StepDone.from_json(step))
                    listener.step(steps[-1])
                case {"result": dict(result)}:
                    return RunResult(**result, steps=steps)
                case {"error": dict(error)}:
                    raise as_raised(error)
        raise _ended(talk.process.wait(), len(steps))


def _ended(code: int, steps: int) -> SpillwayError:
    return how_it_ended(f"The process of the run ended after {steps} step{'s' * (steps != 1)}", code)
