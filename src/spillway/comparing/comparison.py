"""The comparison: what is compared, and the rows as they come."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

from spillway.comparing.cells import Bound, Cell, Failure, Row, Setting, searches, work_out
from spillway.comparing.pool import Unanswered, answers, cores
from spillway.costs.device import HERE, Device
from spillway.costs.roofline import step_seconds, timed
from spillway.errors import UnknownMethodError, UsageError
from spillway.ir import Recorded, Step
from spillway.methods import METHODS
from spillway.subject import counted
from spillway.units import Bytes, Seconds

ALL = "all"
"""Every method there is."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A step whose ops have seconds, on a device."""

    step: Step
    """The step."""
    workload: str
    """What it is the step of."""
    device: Device
    """How fast copies are, and ops unless they were measured."""
    costs: str
    """Where the ops' seconds are from, in a sentence."""

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
class Comparison:
    """Everything that was found out, complete or not."""

    subject: Subject
    """What was compared."""
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
        cls, subject: Subject, methods: Sequence[str], budgets: Sequence[Bytes],
        found: Sequence[Row | Bound | Failure],
    ) -> Comparison:  # fmt: skip
        """What was found, in whatever order, put into its own."""
        rows = [row for row in found if isinstance(row, Row)]
        bounds = [bound for bound in found if isinstance(bound, Bound)]
        return cls(
            subject=subject, methods=tuple(methods), budgets=tuple(budgets),
            rows=sorted(rows, key=lambda row: (methods.index(row.method), row.budget_bytes)),
            bounds=sorted(bounds, key=lambda bound: bound.budget_bytes),
            failures=[failure for failure in found if isinstance(failure, Failure)],
        )  # fmt: skip


def subject_of(recorded: Recorded, device: Device) -> Subject:
    """Put seconds on the ops of a recorded step.

    Measured seconds stay if nobody counted what the ops do, as in a log of DTR, whatever the device; and if the device
    is this machine. All others are modelled for the device.
    """
    step = recorded.step
    kept = not counted(step) or device.name == HERE
    measured = sum(op.seconds is not None for op in step.ops) if kept else 0
    costs = f"modelled for {device.name} by roofline"
    if measured:
        rest = f"; of {len(step.ops) - measured} ops without, {costs}" if measured < len(step.ops) else ""
        costs = f"those measured when it was recorded{rest}"
    return Subject(
        step=timed(step, device, keep_measured=kept), workload=recorded.workload, device=device,
        costs=f"Seconds of ops are {costs}; copies take what {device.name} takes.",
    )  # fmt: skip


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
    subject: Subject, methods: Sequence[str], budgets: Sequence[Bytes], *,
    plan_seconds: Seconds = 30.0, bound_seconds: Seconds = 10.0, processes: int | None = None,
) -> Generator[Row | Bound | Failure, None, None]:  # fmt: skip
    """Yield a row for every method under every budget, and a bound for every budget, as they come.

    The rows do not depend on the number of processes, but for those of a method that searches until its time is up.
    Those come last, after the bounds.

    Arguments:
        methods: Names of `METHODS`.
        plan_seconds: How long a method that searches, as Checkmate does, may take for one plan.
        bound_seconds: How long the bound of one budget may take; 0 for no bounds.
        processes: As many as there are processors if None; with 1, this one.

    Raises:
        UsageError: An argument makes no sense.
    """
    if not (plan_seconds > 0 and bound_seconds >= 0) or (processes is not None and processes < 1):
        raise UsageError(
            f"A comparison takes plan_seconds above 0, bound_seconds of 0 or more and processes of 1 or more; got "
            f"{plan_seconds}, {bound_seconds} and {processes}."
        )
    setting = Setting(step=subject.step, device=subject.device, plan_seconds=plan_seconds, bound_seconds=bound_seconds)
    cells = cells_of(methods, budgets, bounds=bound_seconds > 0)
    for found in answers(partial(work_out, setting), cells, cores() if processes is None else processes):
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
