"""What is copied or saved within steps: no walk through all objects of Python, and it leaves like the rest."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway.engines.tensors import torch_patches

BUDGET = 1_900_000
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


def trained(way: str, budget: int | None, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[float]], int, int]:
    """What is copied in each step, the highest peak, and how often all objects were looked through for it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.Tanh())))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    session = spillway.manage(model, optimizer, budget=budget, method="lru") if budget else None
    batch, found, walks, all_objects = torch.randn(256, 128), list[list[float]](), list[int](), gc.get_objects
    for number in range(STEPS):
        with session.step(batch) if session is not None else torch.enable_grad():
            model(batch).square().mean().backward()
            optimizer.step()
            with monkeypatch.context() as patched:
                patched.setattr(torch_patches.gc, "get_objects", lambda n=number: walks.append(n) or all_objects())
                copied = WAYS[way](model, optimizer)
            found.append([one.double().sum().item() for one in _tensors(copied)])
            del copied
            optimizer.zero_grad()
    if session is None:
        return found, 0, 0
    session.close()
    return found, max(report.peak_bytes for report in session.history), len(walks)


@pytest.mark.parametrize("way", WAYS)
def test_copies_within_a_step(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _, _ = trained(way, None, monkeypatch)
    found, peak, walks = trained(way, BUDGET, monkeypatch)
    assert found == plain
    assert all(len(one) == 8 + 24 for one in found)
    assert peak <= BUDGET
    assert walks == 0


def test_by_torchs_own_copies_all_objects_would_be_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_patches, "_by_an_op", lambda original: original)
    assert trained("deepcopy", 2 * BUDGET, monkeypatch)[2] >= 8


def test_a_copied_storage_has_the_bytes_and_torch_is_as_it_was_afterwards() -> None:
    before = torch.UntypedStorage.clone
    model = nn.Linear(64, 64)
    with spillway.manage(model, budget="1MiB", method="lru") as session, session.step(torch.ones(2, 64)):
        weight = model(torch.ones(64, 64)).detach()
        copied = weight.untyped_storage().clone()
        assert copied.data_ptr() != weight.untyped_storage().data_ptr()
        assert bytes(copied.tolist()) == bytes(weight.untyped_storage().tolist())
        assert torch.UntypedStorage(0).clone().nbytes() == 0
    assert torch.UntypedStorage.clone is before
    assert "clone" not in vars(torch.UntypedStorage)
