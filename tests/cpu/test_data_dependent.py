"""Steps of one signature that need more or less, by what is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway.engines.tensors.tensor_engine import TensorEngine
from tests.cpu.benchmarks_quick import quick
from tests.cpu.families import difference, state_of

WIDTH = 64


def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no arena (test_unwatched_steps.py)."""
    monkeypatch.setattr(TensorEngine, "needs_no_watch", False)


def _train(turns: list[int], budget: int | None, method: str = "lru") -> tuple[Any, list[spillway.StepReport]]:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(WIDTH, WIDTH)
    with spillway.manage(model, optimizer, budget=budget, method=method) as memory:
        for count in turns:
            with memory.step(batch):
                rows: Tensor = batch
                for _ in range(count):
                    rows = torch.tanh(model(rows))
                rows.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return state_of(model, optimizer), memory.history


@pytest.mark.parametrize("method", ["lru", "delta", "dtr", "keep-all"])
def test_a_loop_with_more_turns_than_ever_stays_within_the_budget(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched(monkeypatch)
    turns = [4, 4, 4, 40, 4, 4, 4]
    expected, free = _train(turns, None)
    budget = free[1].peak_bytes + (32 << 10)
    found, reports = _train(turns, budget, method)
    assert difference(expected, found) is None
    assert [report.managed for report in reports[1:4]] == [False, False, True]
    assert all(report.peak_bytes <= budget for report in reports)
    assert reports[3].moves > 0
    # What nothing left is measured to the byte, known to fit or not.
    assert [report.peak_bytes for report in reports[:3]] == [report.peak_bytes for report in free[:3]]
    assert free[3].peak_bytes > 3 * budget


def test_what_came_before_room_was_short_is_moved_and_what_comes_after_may_be_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched(monkeypatch)
    turns = [4, 4, 4, 40]
    _, free = _train(turns, None)
    _, reports = _train(turns, free[1].peak_bytes + (32 << 10), "dtr")
    assert (reports[3].moves > 0, reports[3].drops > 0) == (True, True)


@pytest.mark.long
def test_reports_of_what_varies_are_those_of_a_witness() -> None:
    for row in quick("data_dependent").rows:
        assert (row["over"], row["unlike"], row["less"], row["more"], row["verdict"]) == (0, 0, 0, 0, "identical")
        assert min(row["known"], row["counted"], row["looked"]) > 0


def test_what_torch_tensor_makes_is_in_the_account_before_it_is_used() -> None:
    with spillway.manage(nn.Linear(2, 2), budget=None) as memory, memory.step():
        made = torch.tensor([0.0] * 1000)
        peak = memory._engine.controller.budget.peak  # type: ignore[attr-defined]
        assert peak >= made.nbytes
