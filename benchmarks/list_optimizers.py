"""Optimizers that update all parameters in one op (`fused`, `foreach`): how small a budget they run under.

The same training with the single-tensor form, which needs one parameter's tensors at a time, is what they are held to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, final

import torch
from torch import nn

import spillway
from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from spillway.units import Bytes
from tests.cpu.families import State, difference, state_of
from tests.cpu.refusal_cases import FUSED, OPTIMIZERS, smallest_that_works

SINGLE: Final = "single"
ALLOWED: Final = 1.10
"""The floor of a form, as a multiple of that of the single-tensor form."""

LAYERS: Final = 12


@frozen
class Size:
    """How much is measured."""

    optimizers: Sequence[str]
    methods: Sequence[Sequence[str]]
    """Those of either engine; with the first of each, floors are found."""
    width: int
    steps: int
    among: int
    """A floor is found to one part in so many."""


def run(size: Size, tell: Tell) -> Result:
    """Find the floor of every form, and train at the single-tensor form's floor and a tenth."""
    rows: list[Row] = []
    for optimizer in size.optimizers:
        for methods in size.methods:
            single: Bytes | None = None
            for form in (SINGLE, "foreach", "fused") if optimizer in FUSED else (SINGLE, "foreach"):
                tell(f"{optimizer}, {form}, {methods[0]}")
                rows.append(row := _row(Training(optimizer, form, size), methods, size.among, single))
                single = row["smallest_bytes"] if single is None else single
    return Result(
        title=f"{LAYERS} layers of width {size.width}, {size.steps} steps",
        columns=(
            *columns.text(optimizer="optimizer", form="form", method="method"),
            *columns.nbytes(peak_bytes="plain peak", smallest_bytes="floor"),
            *columns.ratios(ratio="of the single-tensor form's"),
            *columns.text(verdict="at its floor + 10 %, beside plain"),
        ),
        rows=rows,
        notes=NOTES,
    )


NOTES: Final = (
    "Floor: the smallest budget under which all steps run, by bisection, with this method. Beside plain: with this one "
    "and others, at a tenth above the floor of the single-tensor form: parameters, gradients, optimizer state and "
    "losses in bytes. Beside lru: delta, dtr, largest and auto. Beside checkpoint, which recomputes blocks and holds "
    "parameters, gradients and state: mimose.",
)


@final
class Training:
    """One optimizer in one form."""

    def __init__(self, optimizer: str, form: str, size: Size) -> None:
        self.optimizer, self.form, self._size = optimizer, form, size

    def under(self, budget: Bytes | None, method: str) -> tuple[State, Bytes]:
        """What it ends in, and the highest peak."""
        model, optimizer, batches = self._made()
        with spillway.manage(model, optimizer, budget=budget, method=method) as memory:
            for batch in batches:
                with memory.step(batch):
                    _train(model, optimizer, batch)
            peak = max(report.peak_bytes for report in memory.history)
        return state_of(model, optimizer), peak

    def plainly(self) -> State:
        """The same without a session."""
        model, optimizer, batches = self._made()
        for batch in batches:
            _train(model, optimizer, batch)
        return state_of(model, optimizer)

    def _made(self) -> tuple[nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
        torch.manual_seed(0)
        width = self._size.width
        layers = [(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS)]
        model = nn.Sequential(*(module for layer in layers for module in layer))
        kind, options = OPTIMIZERS[self.optimizer]
        flags: dict[str, Any] = {"fused": True} if self.form == "fused" else {"foreach": self.form == "foreach"}
        optimizer = kind(model.parameters(), **options, **flags)
        return model, optimizer, [torch.randn(8, width) for _ in range(self._size.steps)]

    def smallest(self, peak: Bytes, among: int, method: str) -> Bytes:
        """The smallest budget that works, by bisection; the peak is known to work."""
        return smallest_that_works(lambda budget: self._works(budget, method), peak, among)

    def _works(self, budget: Bytes, method: str) -> bool:
        try:
            self.under(budget, method)
        except spillway.BudgetInfeasible:
            return False
        return True


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def _row(training: Training, methods: Sequence[str], among: int, single: Bytes | None) -> Row:
    plain = training.plainly()
    state, peak = training.under(None, methods[0])
    smallest = training.smallest(peak, among, methods[0])
    budget = int((single or smallest) * ALLOWED)
    verdicts = {f"budget=None: {told}" for told in [difference(plain, state)] if told}
    for method in methods:
        try:
            found, highest = training.under(budget, method)
        except spillway.BudgetInfeasible as refusal:
            verdicts.add(f"{method}: refused, {refusal}")
            continue
        told = difference(plain, found) or ("over budget" if highest > budget else None)
        verdicts |= {f"{method}: {told}"} if told else set()
    return {
        "optimizer": training.optimizer,
        "form": training.form,
        "method": methods[0],
        "peak_bytes": peak,
        "smallest_bytes": smallest,
        "ratio": smallest / (single or smallest),
        "verdict": "; ".join(sorted(verdicts)) or "identical",
    }


def _checks(result: Result) -> Iterator[Check]:
    for row in result.rows:
        if row["form"] != SINGLE:
            what = f"{row['optimizer']}, {row['form']}, {row['method']}: floor / single"
            yield Check(what=what, measured=row["ratio"], at_most=ALLOWED)
    failed = sum(row["verdict"] != "identical" for row in result.rows)
    yield Check(what="trainings that differ or are refused", measured=failed)


BENCHMARK: Final = Benchmark(
    name="list_optimizers",
    run=run,
    judge=_checks,
    full=Size(
        optimizers=tuple(OPTIMIZERS),
        methods=(("lru", "delta", "dtr", "largest", "auto"), ("checkpoint", "mimose")), width=256, steps=3, among=100,
    ),
    quick=Size(
        optimizers=("AdamW", "SGD, momentum"), methods=(("lru",), ("checkpoint",)), width=64, steps=2, among=50,
    ),
)  # fmt: skip
