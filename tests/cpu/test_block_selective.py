"""Selective actions: which ops do not run a second time, what is kept for that, and that all bits stay the same."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.blocks.selective import EXPENSIVE, Selection, Supplying
from spillway.internals.private import storage_of
from spillway.methods.actions import Action
from tests.cpu.block_cases import Chain, Functional, Residual
from tests.cpu.test_block_engine import FLOATS, batch, engine_of, gradients, same, sines, used

SELECTIVE = [Action.SELECTIVE, Action.SELECTIVE_OFFLOADED]


class Counted(TorchDispatchMode):
    """Counts the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[op.overloadpacket.__name__] += 1
        return op(*args, **(kwargs or {}))


def counted(run: Callable[[], Any]) -> Counter[str]:
    with Counted() as count:
        run()
    return count.ops


def steps(build: Callable[[], nn.Module], action: Action | None, **rest: Any) -> tuple[list[Any], list[int]]:
    """Gradients and the random stream after each of three steps, and how many ops were skipped in each."""
    torch.manual_seed(0)
    model = Chain(build(), build())
    names = ["blocks.0", "blocks.1"]
    engine = None if action is None else BlockEngine(model, names, actions=lambda block, call: action, **rest)
    found: list[Any] = []
    skipped: list[int] = []
    for _ in range(3):
        loss = model(torch.randn(40, 32)).square().mean()
        found += [*gradients(model, loss), torch.get_rng_state()]
        skipped.append(sum(report.skipped_ops for report in engine.calls) if engine is not None else 0)
    if engine is not None:
        engine.close()
    return found, skipped


def skipped_and_exact(build: Callable[[], nn.Module]) -> list[int]:
    """How many ops were skipped in each of three steps, which end as plain ones do."""
    plain, _ = steps(build, None)
    skipped = []
    for action in SELECTIVE:
        found, skipped = steps(build, action)
        assert same(plain, found)
    return skipped


@pytest.mark.parametrize("action", SELECTIVE)
def test_products_run_once_and_the_rest_twice(action: Action, tmp_path: Path) -> None:
    model = Chain(Residual(), Residual())
    plain = counted(lambda: model(batch()).sum().backward())
    with BlockEngine(model, ["blocks.0", "blocks.1"], spill_directory=tmp_path) as engine:
        engine.actions = lambda block, call: Action.RECOMPUTE
        again = counted(lambda: model(batch()).sum().backward())
        engine.actions = lambda block, call: action
        selective = counted(lambda: model(batch()).sum().backward())
        assert [report.skipped_ops for report in engine.calls] == [2, 2]
    assert (plain["addmm"], again["addmm"], selective["addmm"]) == (5, 9, 5)
    for name in ("gelu", "native_layer_norm"):
        assert (plain[name], again[name], selective[name]) == (2, 4, 4)


@pytest.mark.parametrize("action", SELECTIVE)
def test_results_are_kept_and_nothing_else_is(action: Action, tmp_path: Path) -> None:
    held: dict[str, weakref.ref[Any]] = {}

    def function(block: Functional, x: Tensor) -> Tensor:
        first = block.one(x)
        middle = torch.sin(torch.cos(first))
        held.update(first=weakref.ref(storage_of(first)), middle=weakref.ref(storage_of(middle)))
        return torch.exp(block.two(middle))

    model, engine = engine_of(function, action, spill_directory=tmp_path)
    loss = model(batch()).square().sum()
    engine.settle()
    assert held["middle"]() is None
    assert (held["first"]() is not None) == (action is Action.SELECTIVE)
    assert engine.calls[0].kept_bytes == 2 * FLOATS
    assert used(engine) == ([8192] * 2 if action is Action.SELECTIVE_OFFLOADED else [])
    loss.backward()
    assert engine.calls[0].skipped_ops == 2
    engine.settle()
    assert held["first"]() is None
    assert used(engine) == []


def test_a_result_that_is_also_the_blocks_own_result_costs_nothing() -> None:
    model, engine = engine_of(lambda block, x: block.one(torch.sin(x)), Action.SELECTIVE)
    loss = model(batch()).sum()
    assert engine.calls[0].kept_bytes == 0
    loss.backward()


@pytest.mark.parametrize("action", SELECTIVE)
def test_what_is_kept_waits_for_a_second_backward_and_can_be_revoked(action: Action, tmp_path: Path) -> None:
    model, engine = engine_of(sines, action, count=2, spill_directory=tmp_path)
    plain = gradients(model, model(batch()).square().sum())
    loss = model(batch()).square().sum()
    model.zero_grad()
    loss.backward(retain_graph=True)
    assert [report.skipped_ops for report in engine.calls] == [1, 1], "the second run ends before the last product"
    engine.settle()
    assert engine.revoke("blocks.0") == (FLOATS if action is Action.SELECTIVE else 0), "the other is the block's result"
    assert same(plain, gradients(model, loss))
    assert [report.skipped_ops for report in engine.calls] == [1, 2]


# ------------------------------------------------------------------------------------------------------------- writes


def write_to_a_product(block: Functional, x: Tensor) -> Tensor:
    return block.two(block.one(x).mul_(2).relu_())


def write_unseen(block: Functional, x: Tensor) -> Tensor:
    y = block.one(x)
    y.data.mul_(2)  # raises no version counter
    return block.two(torch.sin(y))


class Biasless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32, bias=False), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x.view(4, 10, 32).transpose(0, 1))  # a product, and a view of it that does not say so
        return self.two(torch.sin(y.add_(1))).reshape(40, 32)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(2, 1, 3, padding=1), nn.BatchNorm2d(1),
            nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.view(10, 1, 8, 16)).view(40, 32)


WRITING: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {
    "in place": (lambda: Functional(write_to_a_product), [0, 2, 2]),
    "unseen": (lambda: Functional(write_unseen), [2, 4, 4]),
    "to a view that is not declared": (Biasless, [0, 2, 2]),
    "in a chain of layers": (Pictures, [2, 4, 4]),
}


@pytest.mark.parametrize("how", WRITING)
def test_a_result_that_is_written_to_is_copied_from_the_next_step_on(how: str) -> None:
    build, skipped = WRITING[how]
    assert skipped_and_exact(build) == skipped


@pytest.mark.parametrize("product", [nn.Linear(32, 32, bias=False), nn.Linear(32, 32)])
def test_an_op_runs_again_if_its_result_was_written_to_after_the_block(product: nn.Module) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.last = Inner(), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            y = self.block(x)
            return self.last(y.add_(1))

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(32, 32), product

        def forward(self, x: Tensor) -> Tensor:
            z = self.two(self.one(x).sin().view(4, 10, 32))  # without a bias a product, and a view that does not say so
            self.seen = z * z  # saves it, so that it is wanted again
            return z.view(40, 32)

    torch.manual_seed(0)
    model = Writing()

    def loss() -> Tensor:
        return model(batch()).square().sum() + model.block.seen.detach().sum()

    plain = gradients(model, loss())
    with BlockEngine(model, ["block"], actions=lambda block, call: Action.SELECTIVE) as engine:
        for _ in range(2):
            assert same(plain, gradients(model, loss()))
            assert engine.calls[0].skipped_ops == 1


# ------------------------------------------------------------------------------------------------ random numbers, casts


class Attending(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.project, self.out, self.dropout = nn.Linear(32, 96), nn.Linear(32, 32), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(2, 20, 3, 4, 8).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return x + F.dropout(self.out(attended.transpose(1, 2).reshape(40, 32)), 0.1)


def test_attention_is_skipped_where_it_draws_no_random_numbers() -> None:
    assert skipped_and_exact(lambda: Attending(0.0)) == [6, 6, 6]


def test_attention_that_draws_random_numbers_runs_again() -> None:
    assert skipped_and_exact(lambda: Attending(0.1)) == [4, 4, 4]


def test_a_cast_that_autocast_remembers_shifts_nothing() -> None:
    def function(block: Functional, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = block.one(torch.sin(block.one(x)))
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return block.two(torch.sin(block.two(y))).float()

    assert skipped_and_exact(lambda: Functional(function)) == [6, 6, 6]


def test_fused_attention_is_selected_without_dropout_alone() -> None:
    mode = Supplying(Selection(0, set()))
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    query = torch.empty(1, 1, 4, 8)
    assert op in EXPENSIVE
    assert mode.selects(op, (query, query, query), {})
    assert mode.selects(op, (query, query, query, 0.0), {})
    assert not mode.selects(op, (query, query, query, 0.1), {})
    assert not mode.selects(op, (query, query, query), {"dropout_p": 0.1})
