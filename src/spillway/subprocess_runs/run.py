"""A run in a process of its own: what goes to it, what comes back, and who listens.

The process tells a `StepDone` after every step, then a `RunResult` or the error that kept it from its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal, final

from spillway.errors import SpillwayError
from spillway.ir import StepReport
from spillway.processes import how_it_ended, talking
from spillway.units import Bytes, Seconds

STATIC: Final = "static"
"""The method that makes one plan, for the largest of a run's inputs: the Sublinear of the Mimose paper's Fig. 13."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """One run."""

    workload: str
    """A name of `spillway.workloads`, or `file.py:function`."""
    seed: int
    """For the model, the data and everything else that is drawn."""
    steps: int
    """How many; the run is shorter if the workload has fewer batches."""
    method: str | None
    """The method's name, or `STATIC`; None trains plainly, without a session."""
    budget_bytes: Bytes | None
    """None only keeps account."""
    spill_directory: str | None = None
    """Where the spill file goes; None for the default of `spillway.manage`."""
    spill_io: Literal["buffered", "direct"] = "buffered"
    """Through the page cache or past it, as for `spillway.manage`."""
    return_freed: bool = True
    """Whether freed memory goes back to the system, as for `spillway.manage`."""
    run_file: str | None = None
    """Where the figures of every step go, if a session keeps them."""
    timeline: bool = False
    """Whether the run file gets the timeline of the step in which most bytes left and came back."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """Told by the process after every step."""

    seconds: Seconds
    """Wall-clock time of the step, with what the session does around it."""
    loss: float
    report: StepReport | None
    """What the session measured; None in a plain run."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run leaves behind when all its steps are done."""

    peak_rss_bytes: Bytes
    """The highest resident set above that of the process before it built the model; 0 where the system does not say."""
    state: str
    """SHA-256 of parameters, buffers, gradients, optimizer state and random streams at the end."""
    steps: tuple[StepDone, ...] = ()
    """What the process told after every step."""

    @property
    def reports(self) -> list[StepReport]:
        """What the session measured; empty for a plain run."""
        return [step.report for step in self.steps if step.report is not None]

    @property
    def losses(self) -> list[str]:
        """The loss of every step, exactly, as `float.hex` writes it; one that is no number equals another one so."""
        return [step.loss.hex() for step in self.steps]

    @property
    def seconds(self) -> list[Seconds]:
        return [step.seconds for step in self.steps]


def run(request: RunRequest, *, step: Callable[[StepDone], None], output: Callable[[str], None]) -> RunResult:
    """Run what is asked for in a fresh process with one thread. `step` hears of every step when it is done; `output`,
    in another thread, of every line that the process prints.

    Raises BudgetInfeasible if a step cannot run under the budget, and SpillwayError for whatever else kept the run from
    its end, in one sentence.
    """
    steps: list[StepDone] = []
    with talking("spillway.subprocess_runs.child:main", request, output) as talk:
        while True:
            try:
                message = talk.hear()
            except EOFError:
                told = f"The process of the run ended after {len(steps)} step{'s' * (len(steps) != 1)}"
                raise how_it_ended(told, talk.process.wait()) from None
            match message:
                case StepDone():
                    steps.append(message)
                    step(message)
                case RunResult():
                    return replace(message, steps=tuple(steps))
                case SpillwayError():
                    raise message
