"""What is copied or saved within steps: no walk through all objects of Python, and it leaves like the rest."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway

BUDGET = 3_000_000
STEPS = 3


def _saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    written = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), written)
    written.seek(0)
    return torch.load(written)


WAYS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "deepcopy": lambda model, optimizer: copy.deepcopy((model, optimizer)),
    "pickle": lambda model, optimizer: pickle.loads(pickle.dumps((model, optimizer))),
    "save": _saved,
}


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, nn.Module | torch.optim.Optimizer):
        return _tensors(tree.state_dict())
    if isinstance(tree, dict | list | tuple):
        return [one for item in (tree.values() if isinstance(tree, dict) else tree) for one in _tensors(item)]
    return [tree] if isinstance(tree, Tensor) else []


def trained(way: str, budget: int | None, method: str = "lru") -> tuple[list[list[float]], int]:
    """What was copied in each step, read at the end of the next one; and the highest peak."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.Tanh())))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    session = spillway.manage(model, optimizer, budget=budget, method=method) if budget else None
    batch, found, copied = torch.randn(256, 128), list[list[float]](), list[Any]()
    for _ in range(STEPS):
        with session.step(batch) if session is not None else torch.enable_grad():
            model(batch).square().mean().backward()
            optimizer.step()
            copied.append(WAYS[way](model, optimizer))
            with torch.no_grad():
                for one in _tensors(copied[-1]):
                    one.add_(1)
            model(batch).square().mean().backward()
            for earlier in copied[:-1]:
                found.append([one.double().sum().item() for one in _tensors(earlier)])
            del copied[:-1]
            optimizer.zero_grad()
    if session is None:
        return found, 0
    session.close()
    return found, max(report.peak_bytes for report in session.history)


@pytest.mark.long(but=4)
@pytest.mark.parametrize("method", ["lru", "delta", "dtr", "largest"])
@pytest.mark.parametrize("way", WAYS)
def test_copies_within_a_step_stay_as_they_were(way: str, method: str) -> None:
    plain, _ = trained(way, None)
    found, peak = trained(way, BUDGET, method)
    assert found == plain
    assert [len(one) for one in found] == [8 + 24] * (STEPS - 1)
    assert peak <= BUDGET
