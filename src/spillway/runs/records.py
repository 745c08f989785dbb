"""What goes to the process of a run, and what comes back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from spillway.ir import StepReport
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

    def to_json(self) -> dict[str, Any]:
        """The request as JSON can hold it."""
        return dataclasses.asdict(self)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """Told by the process after every step."""

    seconds: Seconds
    """Wall-clock time of the step, with what the session does around it."""
    loss: float
    """The step's loss."""
    report: StepReport | None
    """What the session measured; None in a plain run."""

    def to_json(self) -> dict[str, Any]:
        """What happened, as JSON can hold it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepDone:
        """Read what `to_json` gave."""
        report = None if data["report"] is None else StepReport.from_json(data["report"])
        return cls(seconds=data["seconds"], loss=data["loss"], report=report)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run leaves behind when all its steps are done."""

    peak_rss_bytes: Bytes
    """The highest resident set above that of the process before it built the model; 0 where the system does not say."""
    state: str
    """SHA-256 of parameters, buffers, gradients, optimizer state and random streams at the end."""
    losses: list[str]
    """The loss of every step, exactly, as `float.hex` writes it."""
    steps: list[StepDone]
    """What the process told after every step."""

    @property
    def reports(self) -> list[StepReport]:
        """What the session measured; empty for a plain run."""
        return [step.report for step in self.steps if step.report is not None]

    @property
    def seconds(self) -> list[Seconds]:
        """Of every step."""
        return [step.seconds for step in self.steps]
