"""Trains a random block program plainly and managed, and says in what the two differ."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import spillway
from spillway.errors import BudgetInfeasible, SpillwayError
from tests.cpu.block_programs import program_of, steps
from tests.cpu.families import State, difference, state_of

METHODS = ("checkpoint", "mimose", "mimose-published")


class After(NamedTuple):
    """A program after one of its steps."""

    loss: Tensor
    state: State
    facts: Any
    said: str
    """What it has printed until then."""


class Verdict(NamedTuple):
    wrong: str
    """Empty if all is as plain PyTorch has it."""
    refused: SpillwayError | None
    peak: int
    calls: int = 0
    """Of the model, until then."""


def plainly(seed: int) -> list[After]:
    """After each step."""
    program = program_of(seed)
    with _listening() as said:
        return [
            After(loss, state_of(program.model, program.optimizer), program.model.facts(), said.getvalue())
            for loss in steps(program, lambda _: contextlib.nullcontext())
        ]


def judge(seed: int, method: str, budget: int | None, expected: list[After], *, page: bool = False) -> Verdict:
    """Train the program of a seed under a method and a budget, and compare after each step."""
    program, peak = program_of(seed), 0
    try:
        with (
            _listening() as said,
            spillway.manage(
                program.model,
                program.optimizer,
                method=method,
                budget=budget,
                report=spillway.ReportOptions(timeline=True),
                blocks=spillway.BlockOptions(page=page),
            ) as memory,
        ):
            for number, loss in enumerate(steps(program, memory.step)):
                wrong = _different(expected[number], loss, program)
                if not wrong and said.getvalue() != expected[number].said:
                    wrong = f"it has printed {said.getvalue()!r} and not {expected[number].said!r}"
                peak = max(peak, memory.history[-1].peak_bytes)
                if not wrong and budget is not None and peak > budget:
                    wrong = f"the peak of {peak} is over the budget of {budget}"
                if wrong:
                    return Verdict(f"step {number}: {wrong}", None, peak)
    except SpillwayError as error:
        return Verdict("", error, peak, len(program.calls))
    return Verdict("", None, peak, len(program.calls))


def tried(seed: int, method: str, refused: Verdict, expected: list[After]) -> list[Verdict]:
    """What becomes of the budget that a refusal names, and of those that the refusals of these name."""
    found = [refused]
    while isinstance(error := found[-1].refused, BudgetInfeasible) and not found[-1].wrong:
        now = judge(seed, method, error.smallest_budget, expected)
        if error.exact and isinstance(again := now.refused, BudgetInfeasible) and now.calls <= found[-1].calls:
            said = f"{error.smallest_budget} bytes should work and are refused by the same call of the model"
            now = now._replace(wrong=f"{said}: {again}")
        found.append(now)
    return found[1:]


@contextlib.contextmanager
def _listening() -> Iterator[io.StringIO]:
    """To what is printed. Anomaly mode warns once a place, and again after anybody has changed filters for a while."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection")
        yield said


def _different(expected: After, loss: Tensor, program: Any) -> str:
    if not torch.equal(expected.loss, loss):
        return f"the loss is {loss} and not {expected.loss}"
    found = difference(expected.state, state_of(program.model, program.optimizer))
    if found is None and not _same(expected.facts, program.model.facts()):
        return f"Python code sees {program.model.facts()} and not {expected.facts}"
    return found or ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
