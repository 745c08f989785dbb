"""The functions that the dispatch mode makes for ops: where they stand, and what they leave out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spillway.engines.controller import UNLIMITED
from spillway.engines.tensors import mode
from spillway.engines.tensors.engine import TensorEngine
from spillway.engines.tensors.private import rules_of, storage_address
from spillway.methods import LRU, KeepAll
from spillway.methods.base import AbstractPolicy

BUDGET = 1 << 30


def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Ops of every kind: views, one and several results, writes with and without history, a lazy bit, a random op."""
    a = torch.addcmul(x.view(-1, 4) @ y.t(), x, y, value=0.5)
    a.mul_(2.0).add_(x)
    x.lerp_(y, 0.25)
    top, _ = a.topk(2)
    a = a + torch.dropout(a, 0.5, True) + top.sum()
    c = torch.view_as_complex(torch.stack([a, a], -1)).conj() * 2
    return a.sum() + (c.imag + c.real).sum() + x.sqrt().sum()


def account(policy: AbstractPolicy, allowed: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    x, y = torch.rand(4, 4), torch.rand(4, 4)
    engine = TensorEngine(policy, allowed)
    try:
        engine.begin_step([("x", x)])
        results = [program(x, y).item() for _ in range(2)]
        engine.end_step()
        controller = engine.controller
        return results, engine.ops, controller.created, controller.peak, controller.resident, engine.unmanaged
    finally:
        engine.close()


@pytest.mark.parametrize("policy", [KeepAll, LRU])
@pytest.mark.parametrize("allowed", [UNLIMITED, BUDGET])
def test_the_account_is_the_same_where_torch_does_not_look_for_functions(
    policy: Callable[[], AbstractPolicy], allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = account(policy(), allowed)
    monkeypatch.setattr(mode, "rules_of", lambda func: {})
    assert account(policy(), allowed) == found


def test_functions_stand_where_torch_looks_only_while_a_step_is_watched() -> None:
    rules = rules_of(torch.ops.aten.mul.Tensor)
    before = dict(rules)
    engine = TensorEngine(KeepAll(), UNLIMITED)
    for _ in range(2):
        engine.begin_step([])
        torch.rand(3) * torch.rand(3)
        assert len(rules) == len(before) + 1
        engine.end_step()
        assert rules == before
    engine.close()


def test_a_write_begins_another_version_if_and_only_if_a_recipe_reads_the_present_one() -> None:
    read, unread = torch.rand(8), torch.rand(8)
    engine = TensorEngine(LRU(), BUDGET)
    engine.begin_step([("read", read), ("unread", unread)])
    values = [engine.table[storage_address(tensor)].value for tensor in (read, unread)]
    kept = read.exp()
    for tensor in (read, unread):
        tensor.mul_(2.0)
    now = [engine.table[storage_address(tensor)].value for tensor in (read, unread)]
    recipe = engine.current(engine.table[storage_address(kept)]).recipe
    assert recipe is not None
    assert recipe.reads == [values[0]]
    assert now[0] is not values[0]
    assert now[1] is values[1]
    again = now[0]
    read.mul_(2.0)  # no recipe reads this version
    assert engine.table[storage_address(read)].value is again
    engine.end_step()
    engine.close()


def test_what_read_a_value_before_it_was_written_is_never_recomputed_from_the_new_content() -> None:
    source = torch.rand(1024)
    engine = TensorEngine(LRU(), BUDGET)
    engine.begin_step([("source", source)])
    kept = source.exp()
    before = kept.clone()
    storage = engine.table[storage_address(kept)]
    assert not isinstance(engine.controller.way_back(storage), str)
    source.mul_(2.0)
    assert isinstance(engine.controller.way_back(storage), str)
    engine.end_step()
    assert torch.equal(kept, before)
    engine.close()
