"""What one process works out at a time: one method under one budget, or the bound of one budget."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from spillway.costs.device import Device
from spillway.costs.roofline import step_seconds
from spillway.engines.simulated import Simulation, Status, simulate
from spillway.errors import BudgetInfeasible, NoPlanFound, SpillwayError
from spillway.ir import Step
from spillway.methods import METHODS, Problem
from spillway.methods.base import AbstractPlanner, AbstractPolicy
from spillway.methods.checkmate import lower_bound
from spillway.units import Bytes, Seconds, format_bytes, format_seconds

LIMITED: Final = "time_limit"
"""A method whose constructor takes this may search for as long as it is given."""

MOST_OPS: Final = 100
"""Ops of a step whose relaxation is tried over all of them: the program grows with their square."""

MORE: Final = 1 + 1e-6
"""What is not this much more than the plain step's seconds says nothing."""

FEWEST_NODES: Final = 3
"""What Checkmate takes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is the same for every cell."""

    step: Step
    """Its ops have seconds."""
    device: Device
    """How fast copies are."""
    plan_seconds: Seconds
    """How long a planner may search for one plan."""
    bound_seconds: Seconds
    """How long the bound of one budget is looked for."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a method did under a budget. Figures are of whole steps: None where no step ended."""

    method: str
    """The name on the command line."""
    budget_bytes: Bytes
    """The budget."""
    status: Status
    """`ok`; `oom` if it does not fit, or no plan was found; `thrash` if more was recomputed than is worth it."""
    overhead: float | None = None
    """Seconds over those of the plain step."""
    seconds: Seconds | None = None
    """Of the step."""
    peak_bytes: Bytes | None = None
    """Most bytes resident at once, by account."""
    bytes_out: Bytes | None = None
    """Copied to host memory."""
    bytes_in: Bytes | None = None
    """Copied back."""
    recomputed_seconds: Seconds | None = None
    """Time that ops took which ran again."""
    why: str = ""
    """A sentence on why it is not `ok`; else empty."""

    def to_json(self) -> dict[str, Any]:
        """The row as JSON can hold it."""
        return dataclasses.asdict(self)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The seconds that a step takes at least under a budget, if nothing is moved."""

    budget_bytes: Bytes
    """The budget."""
    seconds: Seconds
    """The bound."""
    kind: Literal["relaxation", "plain"]
    """Checkmate's linear relaxation over all ops, or the plain step's seconds where that says no more."""
    coarse_seconds: Seconds | None = None
    """The relaxation of the step cut into intervals of ops, which Checkmate plans then; no bound for what is finer."""
    why: str = ""
    """A sentence on why there is no relaxation over all ops; empty where there is, or where the plain step fits."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A row or a bound that could not be worked out."""

    method: str | None
    """None for a bound."""
    budget_bytes: Bytes
    """The budget."""
    why: str
    """A whole sentence."""

    def __str__(self) -> str:
        what = "The lower bound" if self.method is None else f"{self.method}"
        return f"{what} under {format_bytes(self.budget_bytes)}: {self.why}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A method under a budget, or the bound of a budget."""

    method: str | None
    """None for the bound."""
    budget_bytes: Bytes
    """The budget."""


def work_out(setting: Setting, cell: Cell) -> Row | Bound:
    """Simulate the method, or find the bound. Raises what the method does, but not that a budget is too small."""
    if cell.method is None:
        return _bound(setting, cell.budget_bytes)
    method = made(cell.method, setting.plan_seconds)
    try:
        done = simulate(setting.step, allowed=cell.budget_bytes, device=setting.device, method=method)
    except (BudgetInfeasible, NoPlanFound) as error:
        return Row(method=cell.method, budget_bytes=cell.budget_bytes, status="oom", why=str(error))
    return row_of(cell.method, cell.budget_bytes, done)


def row_of(method: str, budget: Bytes, done: Simulation) -> Row:
    """The row of a simulated step."""
    if done.status != "ok":
        return Row(method=method, budget_bytes=budget, status=done.status, why=done.why)
    return Row(
        method=method, budget_bytes=budget, status="ok", overhead=done.overhead, seconds=done.seconds,
        peak_bytes=done.peak_bytes, bytes_out=done.bytes_out, bytes_in=done.bytes_in,
        recomputed_seconds=done.recomputed_seconds,
    )  # fmt: skip


def searches(method: str) -> bool:
    """Whether the method takes as long as it is given."""
    return LIMITED in inspect.signature(METHODS[method]).parameters


def made(method: str, plan_seconds: Seconds) -> AbstractPolicy | AbstractPlanner:
    """The method by its name; one that searches does so for `plan_seconds`."""
    factory: Callable[..., AbstractPolicy | AbstractPlanner] = METHODS[method]
    return factory(**{LIMITED: plan_seconds}) if searches(method) else factory()


def _bound(setting: Setting, budget: Bytes) -> Bound:
    """The relaxation over all ops, if it is found in time and says more than the plain step's seconds."""
    step, plain, why = setting.step, step_seconds(setting.step), ""
    if budget >= step.plain_peak():
        return Bound(budget_bytes=budget, seconds=plain, kind="plain")
    problem, limit = Problem(step=step, allowed=budget, device=setting.device), setting.bound_seconds
    try:
        if len(step.ops) <= MOST_OPS:
            found = lower_bound(problem, limit, most_nodes=max(len(step.ops), FEWEST_NODES))
            if found > plain * MORE:
                return Bound(budget_bytes=budget, seconds=found, kind="relaxation")
            why = f"The relaxation says no more in {format_seconds(limit)}."
        else:
            why = f"The relaxation over {len(step.ops)} ops is too large to solve; over {MOST_OPS} it is tried."
        coarse = lower_bound(problem, limit)
    except SpillwayError as error:
        return Bound(budget_bytes=budget, seconds=plain, kind="plain", why=str(error))
    return Bound(
        budget_bytes=budget,
        seconds=plain,
        kind="plain",
        coarse_seconds=coarse if coarse > plain * MORE else None,
        why=why,
    )
