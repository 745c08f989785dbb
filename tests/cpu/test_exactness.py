"""Every family of models, far below the memory that it asks for, against the plain run: the same bits everywhere."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import NamedTuple

import pytest
from torch.optim import Optimizer

import spillway
from spillway.methods import AbstractPolicy, Drop, Move
from tests.cpu.families import FAMILIES, Built, State, difference, state_of
from tests.cpu.pressure import ENDS, ORDERS, PLENTY, InputsLeave, Way
from tests.shared import in_turn

SHARES = (70, 50, 35)
"""Budgets in percent of the plain peak."""

A_FEW = ("resnet", "gpt2", "lstm", "mixture-of-experts")


class Trained(NamedTuple):
    """What five steps left behind."""

    states: list[State]
    """Before every call of an optimizer (gradients as backward left them) and after every step."""
    losses: list[tuple[str, bytes]]
    reports: list[spillway.StepReport]
    refused: spillway.BudgetInfeasible | None = None


def different(expected: Trained, found: Trained) -> str | None:
    """The first thing in which two runs of a family are not identical; None if all is."""
    if found.losses != expected.losses:
        return "LOSSES DIFFER"
    if len(found.states) != len(expected.states):
        return f"{len(found.states)} STATES INSTEAD OF {len(expected.states)}"
    texts = map(difference, expected.states, found.states)
    text = next((text for text in texts if text is not None), None)
    return None if text is None else f"DIFFERS: {text}"


def train(built: Built, memory: spillway.Session | None, steps: int = 5, ways: tuple[Way, ...] = ()) -> Trained:
    """Run the family's steps, plainly without a session; with `ways`, the inputs of every op leave before it."""
    trained = Trained([], [], [] if memory is None else memory.history)
    _watch_gradients(built, trained.states)
    for batch in built.batches[:steps]:
        step: AbstractContextManager[object] = nullcontext() if memory is None else memory.step(batch)
        absence = InputsLeave(memory, *ways) if memory is not None and ways else nullcontext()
        try:
            with step, absence:
                loss = built.step(built.model, built.optimizers, batch)
        except spillway.BudgetInfeasible as refusal:
            return trained._replace(refused=refusal)
        trained.losses.append((str(loss.dtype), loss.numpy().tobytes()))
        trained.states.append(state_of(built.model, built.optimizers))
    return trained


def _watch_gradients(built: Built, states: list[State]) -> None:
    def before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
        states.append(state_of(built.model, []))

    for optimizer in built.optimizers:
        optimizer.register_step_pre_hook(before_step)


def managed(name: str, budget: int | None, method: AbstractPolicy | str) -> Trained:
    built = FAMILIES[name](0)
    with spillway.manage(built.model, built.optimizers, budget=budget, method=method) as memory:
        return train(built, memory)


@functools.cache
def plain(name: str, steps: int = 5) -> Trained:
    return train(FAMILIES[name](0), None, steps)


@functools.cache
def plain_peak(name: str) -> int:
    tracked = managed(name, None, "keep-all")
    assert_the_same(plain(name), tracked)
    return max(report.peak_bytes for report in tracked.reports)


def assert_the_same(expected: Trained, found: Trained) -> None:
    assert found.refused is None
    assert found.losses == expected.losses
    assert len(found.states) == len(expected.states)
    for number, (one, other) in enumerate(zip(expected.states, found.states, strict=True)):
        assert difference(one, other) is None, f"state {number} of {len(expected.states)}"


def assert_kept(reports: list[spillway.StepReport], budget: int) -> None:
    assert [report.peak_bytes for report in reports if report.peak_bytes > budget] == []
    assert [report.allowed for report in reports] == [budget] * 5


@pytest.mark.long(but=2)
@pytest.mark.parametrize(
    ("name", "order", "share"), [*in_turn(FAMILIES, ENDS, SHARES), *product(A_FEW, ["copy beside"], [35])]
)
def test_a_family_trains_to_the_same_bits_or_is_refused_with_a_budget_that_works(
    name: str, share: int, order: str
) -> None:
    budget = plain_peak(name) * share // 100
    run = managed(name, budget, ORDERS[order]())
    if run.refused is not None:
        assert run.refused.allowed == budget
        assert budget < run.refused.smallest_budget <= plain_peak(name)
        budget = run.refused.smallest_budget
        run = managed(name, budget, ORDERS[order]())
    assert_the_same(plain(name), run)
    assert_kept(run.reports, budget)
    assert sum(report.drops + report.moves for report in run.reports) > 0


@pytest.mark.long(but=2)
@pytest.mark.parametrize("method", ["lru", "delta", "delta-published", "keep-all"])
@pytest.mark.parametrize("name", A_FEW)
def test_the_methods_as_they_are_named_train_to_the_same_bits_at_half_the_memory(name: str, method: str) -> None:
    budget = plain_peak(name) // 2
    run = managed(name, budget, method)
    if run.refused is not None:
        budget = run.refused.smallest_budget
        run = managed(name, budget, method)
    assert_the_same(plain(name), run)
    assert_kept(run.reports, budget)


@pytest.mark.long(but=2)
@pytest.mark.parametrize(
    ("name", "ways"), in_turn(sorted(set(FAMILIES) - {"gru"}), [(Drop, Move), (Move,)])
)  # its thousands of ops read storages too small to move
def test_a_family_trains_to_the_same_bits_when_the_inputs_of_every_op_have_just_left(
    name: str, ways: tuple[Way, ...]
) -> None:
    built = FAMILIES[name](0)
    method = ORDERS["recompute first"]()
    with spillway.manage(built.model, built.optimizers, budget=PLENTY, method=method) as memory:
        run = train(built, memory, 2, ways)
    assert_the_same(plain(name, 2), run)
    assert sum(report.moves for report in run.reports) > 100
    assert (sum(report.drops for report in run.reports) > 20) == (Drop in ways)
