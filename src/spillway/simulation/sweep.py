"""Every method under every budget, simulated on one recorded step, by several processes: a row for each; no torch."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias, final

from spillway.costs.device import HERE, Device
from spillway.costs.efficiency import Efficiency
from spillway.costs.roofline import PUBLISHED, step_seconds, timed
from spillway.errors import BudgetInfeasible, NoPlanFound, SpillwayError, UnknownMethodError, UsageError
from spillway.ir import Recorded, Step
from spillway.methods import METHODS, Problem
from spillway.methods.base import AbstractPlanner, AbstractPolicy
from spillway.methods.checkmate import lower_bound
from spillway.processes import Unanswered, answers, cores
from spillway.simulation.plan_and_simulate import counted
from spillway.simulation.simulated_engine import Status, simulate
from spillway.units import Bytes, Seconds, format_bytes, format_seconds

ALL: Final = "all"
"""Every method there is."""

LIMITED: Final = "time_limit"
"""A method whose constructor takes this may search for as long as it is given."""

Range: TypeAlias = tuple[float, float]
"""From one number to another."""

MORE: Final = 1 + 1e-6
"""What is not this much more than the plain step's seconds says nothing."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepProblem:
    """A step whose ops have seconds, on a device."""

    step: Step
    workload: str
    device: Device
    """How fast copies are, and ops unless they were measured."""
    costs: str
    """Where the ops' seconds are from, in a sentence."""
    efficiency: Efficiency | None = None
    """By which they are modelled, and how far such seconds were from measured ones; None where they were measured."""

    @property
    def plain_peak(self) -> Bytes:
        """What the plain step needs."""
        return self.step.plain_peak()

    @property
    def plain_seconds(self) -> Seconds:
        """What its ops take."""
        return step_seconds(self.step)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a method did under a budget. Figures are of whole steps: None where no step ended."""

    method: str
    """The name on the command line."""
    budget_bytes: Bytes
    status: Status
    """`ok`; `oom` if it does not fit, or no plan was found; `thrash` if more was recomputed than is worth it."""
    overhead: float | None = None
    """Seconds over those of the plain step."""
    seconds: Seconds | None = None
    peak_bytes: Bytes | None = None
    """Most bytes resident at once, by account."""
    bytes_out: Bytes | None = None
    """Copied to host memory."""
    bytes_in: Bytes | None = None
    """Copied back."""
    recomputed_seconds: Seconds | None = None
    """Time that ops took which ran again."""
    overhead_range: Range | None = None
    """80 % of what a method adds to a plain step lie between; None where ops were measured."""
    seconds_range: Range | None = None
    """80 % of steps lie between; likewise."""
    why: str = ""
    """A sentence on why it is not `ok`; else empty."""
    remark: str = ""
    """What a planner had to say of its plan."""

    def to_json(self) -> dict[str, Any]:
        """The row as JSON can hold it."""
        return dataclasses.asdict(self)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The seconds that a step takes at least under a budget, if nothing is moved."""

    budget_bytes: Bytes
    seconds: Seconds
    kind: Literal["cut", "plain"]
    """What has to run again behind one op, or the plain step's seconds where that says no more."""
    why: str = ""
    """A sentence on why there is no more than that; empty where there is, or where the plain step fits."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A row or a bound that could not be worked out."""

    method: str | None
    """None for a bound."""
    budget_bytes: Bytes
    why: str
    """A whole sentence."""

    def __str__(self) -> str:
        return f"{self.method or 'The lower bound'} under {format_bytes(self.budget_bytes)}: {self.why}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that was found out, complete or not."""

    problem: SweepProblem
    methods: Sequence[str]
    """In the order in which they were asked for."""
    budgets: Sequence[Bytes]
    """Ascending."""
    rows: Sequence[Row]
    """By method, then by budget; those that are there."""
    bounds: Sequence[Bound]
    """By budget; those that are there."""
    failures: Sequence[Failure]
    """What could not be worked out."""

    @property
    def complete(self) -> bool:
        """Whether every method has a row under every budget."""
        return len(self.rows) == len(self.methods) * len(self.budgets)

    @classmethod
    def of(
        cls, problem: SweepProblem, methods: Sequence[str], budgets: Sequence[Bytes],
        found: Sequence[Row | Bound | Failure],
    ) -> Comparison:  # fmt: skip
        """What was found, in whatever order, put into its own."""
        rows = [row for row in found if isinstance(row, Row)]
        bounds = [bound for bound in found if isinstance(bound, Bound)]
        return cls(
            problem=problem, methods=tuple(methods), budgets=tuple(budgets),
            rows=sorted(rows, key=lambda row: (methods.index(row.method), row.budget_bytes)),
            bounds=sorted(bounds, key=lambda bound: bound.budget_bytes),
            failures=[failure for failure in found if isinstance(failure, Failure)],
        )  # fmt: skip


def sweep_problem_of(recorded: Recorded, device: Device) -> SweepProblem:
    """Put seconds on the ops of a recorded step.

    Measured seconds stay if nobody counted what the ops do, as in a log of DTR, whatever the device; and if the device
    is this machine. All others are modelled for the device.
    """
    step = recorded.step
    kept = not counted(step) or device.name == HERE
    measured = sum(op.seconds is not None for op in step.ops) if kept else 0
    costs = f"modelled for {device.name} by roofline"
    efficiency = None if kept and measured else device.efficiency or PUBLISHED
    if measured:
        rest = f"; of {len(step.ops) - measured} ops without, {costs}" if measured < len(step.ops) else ""
        costs = f"those measured when it was recorded{rest}"
    return SweepProblem(
        step=timed(step, device, keep_measured=kept), workload=recorded.workload, device=device,
        costs=f"Seconds of ops are {costs}; copies take what {device.name} takes.", efficiency=efficiency,
    )  # fmt: skip


def times(number: float, spread: Sequence[float]) -> Range:
    """The number as the ends of a spread multiply it."""
    return number * spread[0], number * spread[1]


def overhead_range(overhead: float, by: Efficiency) -> Range:
    """Multiples of the plain step between which 80 % lie: what a method adds is as uncertain as such extras were."""
    least, most = sorted(times(overhead - 1, by.extra_spread))
    return 1 + least, 1 + most


def spread_sentence(problem: SweepProblem) -> str:
    """How far the figures are to be trusted; empty where the ops' seconds were measured."""
    by, plain = problem.efficiency, problem.plain_seconds
    if by is None:
        return ""
    least, most = map(format_seconds, times(plain, by.step_spread))
    return (
        f"Of plain steps so modelled 80 % take {least} to {most} for these {format_seconds(plain)}, and of what "
        f"methods add 80 % lie between {by.extra_spread[0]:.2f} and {by.extra_spread[1]:.2f} times what is shown: by "
        f"steps that were left out of the fit ({by.source})."
    )


def parse_methods(text: str) -> list[str]:
    """Read names of methods, separated by commas, or `all`; each once, in their order.

    Raises UnknownMethodError for a name that no method has, UsageError for no name at all.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError(f"No method is named; write {ALL!r}, or some of {', '.join(METHODS)}, with commas between.")
    for name in names:
        if name != ALL and name not in METHODS:
            raise UnknownMethodError(f"There is no method {name!r}; choose {ALL!r} or some of {', '.join(METHODS)}.")
    return list(METHODS) if ALL in names else list(dict.fromkeys(names))


def compare(
    problem: SweepProblem, methods: Sequence[str], budgets: Sequence[Bytes], *,
    plan_seconds: Seconds = 30.0, bounds: bool = True, processes: int | None = None,
) -> Generator[Row | Bound | Failure, None, None]:  # fmt: skip
    """Yield a row for every method under every budget, and a bound for every budget, as they come.

    The rows do not depend on the number of processes, but for those of a method that searches until its time is up.
    Those come last, after the bounds.

    Arguments:
        methods: Names of `METHODS`.
        plan_seconds: How long a method that searches, as Checkmate does, may take for one plan.
        bounds: Whether there are any.
        processes: As many as there are processors if None; with 1, this one.
    """
    ask = partial(work_out, problem, plan_seconds)
    cells = cells_of(methods, budgets, bounds=bounds)
    for found in answers(ask, cells, cores() if processes is None else processes):
        if isinstance(found, Unanswered):
            yield Failure(method=found.task.method, budget_bytes=found.task.budget_bytes, why=found.why)
        else:
            yield found


def cells_of(methods: Sequence[str], budgets: Sequence[Bytes], *, bounds: bool) -> list[Cell]:
    """What is to be worked out: what is quick, by budget, the largest first; then the bounds; then what searches."""
    quick = [method for method in methods if not searches(method)]
    groups = (quick, [None] * bounds, [method for method in methods if searches(method)])
    falling = sorted(budgets, reverse=True)
    return [Cell(method=method, budget_bytes=budget) for group in groups for budget in falling for method in group]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A method under a budget, or the bound of a budget."""

    method: str | None
    """None for the bound."""
    budget_bytes: Bytes


def work_out(problem: SweepProblem, plan_seconds: Seconds, cell: Cell) -> Row | Bound:
    """Simulate the method, or find the bound. Raises what the method does, but not that a budget is too small."""
    method, budget = cell.method, cell.budget_bytes
    if method is None:
        return _bound(problem, budget)
    try:
        done = simulate(problem.step, allowed=budget, device=problem.device, method=made(method, plan_seconds))
    except (BudgetInfeasible, NoPlanFound) as error:
        return Row(method=method, budget_bytes=budget, status="oom", why=str(error))
    if done.status != "ok":
        return Row(method=method, budget_bytes=budget, status=done.status, why=done.why)
    by = problem.efficiency
    return Row(
        method=method, budget_bytes=budget, status="ok", overhead=done.overhead, seconds=done.seconds,
        overhead_range=None if by is None else overhead_range(done.overhead, by),
        seconds_range=None if by is None else times(done.seconds, by.step_spread),
        peak_bytes=done.peak_bytes, bytes_out=done.bytes_out, bytes_in=done.bytes_in,
        recomputed_seconds=done.recomputed_seconds, remark=done.remark,
    )  # fmt: skip


def searches(method: str) -> bool:
    """Whether the method takes as long as it is given."""
    return LIMITED in inspect.signature(METHODS[method].on_paper).parameters


def made(method: str, plan_seconds: Seconds) -> AbstractPolicy | AbstractPlanner:
    """The method by its name; one that searches does so for `plan_seconds`."""
    factory = METHODS[method].on_paper
    return factory(**{LIMITED: plan_seconds}) if searches(method) else factory()


def _bound(problem: SweepProblem, budget: Bytes) -> Bound:
    """What recomputation takes at least, if that is more than the plain step's seconds."""
    step, plain = problem.step, problem.plain_seconds
    if budget >= step.plain_peak():
        return Bound(budget_bytes=budget, seconds=plain, kind="plain")
    try:
        found = lower_bound(Problem(step=step, allowed=budget, device=problem.device))
    except BudgetInfeasible:
        return Bound(budget_bytes=budget, seconds=plain, kind="plain", why="Nothing fits that only recomputes.")
    except SpillwayError as error:
        return Bound(budget_bytes=budget, seconds=plain, kind="plain", why=str(error))
    if found > plain * MORE:
        return Bound(budget_bytes=budget, seconds=found, kind="cut")
    return Bound(budget_bytes=budget, seconds=plain, kind="plain", why="Recomputing need not take any time.")


def bound_sentence(comparison: Comparison) -> str:
    """Which lower bound is there."""
    bounds = comparison.bounds
    cut = [bound for bound in bounds if bound.kind == "cut"]
    missing = [bound for bound in bounds if bound.why]
    sentences = [
        f"Lower bound: the plain step's {format_seconds(comparison.problem.plain_seconds)}"
        + (f"; for what only recomputes, Checkmate's bound under {len(cut)} of {len(bounds)} budgets." if cut else ".")
    ]
    if missing:
        ((why, _),) = Counter(bound.why for bound in missing).most_common(1)
        sentences.append(f"Without that bound under {len(missing)} of {len(bounds)} budgets: {why}")
    return " ".join(sentences)


def missing_sentence(comparison: Comparison) -> str:
    """How much is not there; empty if everything is."""
    if comparison.complete:
        return ""
    wanted = len(comparison.methods) * len(comparison.budgets)
    return f"Incomplete: {len(comparison.rows)} of {wanted} rows were worked out."
