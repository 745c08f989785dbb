"""Trains a random block program plainly and managed, and says in what the two differ."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

import spillway
from spillway.errors import SpillwayError
from tests.cpu.block_programs import program_of, steps
from tests.cpu.families import State, difference, state_of

METHODS = ("checkpoint", "mimose", "mimose-published")


class After(NamedTuple):
    """A program after one of its steps."""

    loss: Tensor
    state: State
    facts: Any


class Verdict(NamedTuple):
    wrong: str
    """Empty if all is as plain PyTorch has it."""
    refused: SpillwayError | None
    peak: int


def plainly(seed: int) -> list[After]:
    """After each step."""
    program = program_of(seed)
    return [
        After(loss, state_of(program.model, program.optimizer), program.model.facts())
        for loss in steps(program, lambda _: contextlib.nullcontext())
    ]


def judge(seed: int, method: str, budget: int | None, expected: list[After]) -> Verdict:
    """Train the program of a seed under a method and a budget, and compare after each step."""
    program, peak = program_of(seed), 0
    try:
        with spillway.manage(program.model, program.optimizer, method=method, budget=budget, timeline=True) as memory:
            for number, loss in enumerate(steps(program, memory.step)):
                wrong = _different(expected[number], loss, program)
                peak = max(peak, memory.history[-1].peak_bytes)
                if not wrong and budget is not None and peak > budget:
                    wrong = f"the peak of {peak} is over the budget of {budget}"
                if wrong:
                    return Verdict(f"step {number}: {wrong}", None, peak)
    except SpillwayError as error:
        return Verdict("", error, peak)
    return Verdict("", None, peak)


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
