"""Saved tensors that hooks of the user's pack as NumPy's arrays, which stay wherever they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import spillway
from spillway.errors import BudgetInfeasible
from tests.shared import notes_of


def pack(tensor: Tensor) -> Any:
    return tensor.detach().clone().numpy()


def trained(method: str, budget: int | None) -> int:
    """The highest peak."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    with spillway.manage(model, optimizer, budget=budget, method=method) as memory:
        for _ in range(3):
            x = torch.randn(512, 64)
            with memory.step(x):
                with saved_tensors_hooks(pack, torch.from_numpy):
                    loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return max(report.peak_bytes for report in memory.history)


@pytest.mark.parametrize("method", ["lru", "auto"])
def test_a_refusal_says_what_is_enough_where_it_cannot_know_what_stays(method: str) -> None:
    most = trained("keep-all", None)
    with pytest.raises(BudgetInfeasible) as refused:
        trained(method, most // 3)
    assert not refused.value.exact
    assert refused.value.smallest_budget <= most
    assert any("stays, as code has its address" in note for note in notes_of(refused.value))
    assert trained(method, most) <= most
