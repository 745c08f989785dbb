"""What the user's code changes between a forward and its backward: a second run is the same as the first, or it is told
that it cannot be."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize

from spillway.errors import RecomputeError
from tests.cpu.callbacks import BLOCKS, TENSORS, Block, Training
from tests.cpu.families import difference, state_of
from tests.shared import in_turn

Undo = Callable[[], object]
METHODS = [*TENSORS, *(method for method in BLOCKS if method != "offload")]


def replaced(owner: Any, name: str, value: Any) -> Undo:
    had, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before) if had else delattr(owner, name)


def part(training: Training) -> Any:
    return training.model[2]


def hooked(training: Training) -> Undo:
    return part(training).norm.register_forward_hook(lambda *seen: seen[2] * 1.3).remove  # type: ignore[no-any-return]


def hooked_before(training: Training) -> Undo:
    handle = part(training).norm.register_forward_pre_hook(lambda _, given: (given[0] * 1.3,))
    return handle.remove  # type: ignore[no-any-return]


def hooked_everywhere(training: Training) -> Undo:
    def louder(module: nn.Module, _: Any, out: Tensor) -> Tensor | None:
        return out * 1.1 if isinstance(module, nn.Linear) else None

    return register_module_forward_hook(louder).remove


def hooked_before_everything(training: Training) -> Undo:
    def louder(module: nn.Module, given: Any) -> Any:
        return (given[0] * 1.1,) if isinstance(module, nn.Linear) else None

    return register_module_forward_pre_hook(louder).remove


def frozen_in_the_forward(training: Training) -> Undo:
    weight = training.model[0].first.weight
    weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    return lambda: weight.requires_grad_(True)  # type: ignore[union-attr, operator]


def frozen_afterwards(training: Training) -> Undo:
    return lambda: training.model[0].first.weight.requires_grad_(False)  # type: ignore[union-attr, operator]


def evaluated(training: Training) -> Undo:
    training.model.eval()
    return training.model.train


def forward_of_a_module(training: Training) -> Undo:
    norm = part(training).norm
    forward = norm.forward
    return replaced(norm, "forward", lambda x: forward(x) * 1.2)


def forward_of_a_class_of_blocks(training: Training) -> Undo:
    forward = Block.forward
    return replaced(Block, "forward", lambda block, x: forward(block, x) * 1.2)


def another_class(training: Training) -> Undo:
    class Louder(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1.2

    part(training).__class__ = Louder
    return lambda: None


def another_module(training: Training) -> Undo:
    before, part(training).norm = part(training).norm, nn.Identity()
    return lambda: setattr(part(training), "norm", before)


def another_value(training: Training) -> Undo:
    weight = part(training).second.weight
    before, weight.data = weight.data, weight.data * 2
    return lambda: setattr(weight, "data", before)


def a_method_of_tensors(training: Training) -> Undo:
    tanh = torch.Tensor.tanh
    return replaced(torch.Tensor, "tanh", lambda x: tanh(x) * 1.5)


def a_method_of_a_class(training: Training) -> Undo:
    forward = nn.BatchNorm1d.forward
    return replaced(nn.BatchNorm1d, "forward", lambda norm, x: forward(norm, x) * 1.2)


def a_function(training: Training) -> Undo:
    batch_norm = functional.batch_norm
    return replaced(functional, "batch_norm", lambda *args, **rest: batch_norm(*args, **rest) * 1.2)


def parametrized(training: Training) -> Undo:
    class Louder(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1.5

    linear = part(training).first
    parametrize.register_parametrization(linear, "weight", Louder())
    return lambda: parametrize.remove_parametrizations(linear, "weight", leave_parametrized=False)


PUT_BACK: dict[str, Callable[[Training], Undo]] = {
    "a hook": hooked,
    "a hook before": hooked_before,
    "a hook on all modules": hooked_everywhere,
    "a hook before all modules": hooked_before_everything,
    "frozen in the forward": frozen_in_the_forward,
    "frozen afterwards": frozen_afterwards,
    "trained afterwards": evaluated,
    "evaluated afterwards": lambda training: training.model.eval,
    "an attribute": lambda training: replaced(part(training).dropout, "p", 0.6),
    "the forward of a module": forward_of_a_module,
    "the forward of the class of blocks": forward_of_a_class_of_blocks,
    "another class": another_class,
    "another module": another_module,
    "another value": another_value,
    "random streams": lambda _: lambda: (torch.manual_seed(5), random.seed(3)),
    "the default dtype": lambda _: lambda: torch.set_default_dtype(torch.float64),
}
TOLD: dict[str, Callable[[Training], Undo]] = {
    "a method of tensors": a_method_of_tensors,
    "a method of a class": a_method_of_a_class,
    "a function": a_function,
    "a parametrization": parametrized,
}


def trained(method: str | None, change: Callable[[Training], Undo]) -> dict[str, Any]:
    torch.manual_seed(0)
    random.seed(0)
    training = Training()
    session = training.manage(method) if method is not None else None
    try:
        for _ in range(4):  # the first calls of a block are looked at closely
            with session.step(training.rows) if session is not None else nullcontext():
                training.optimizer.zero_grad()
                batch = torch.stack(training.rows)
                undo = change(training)
                loss = training.loss(training.model(batch))
                undo()
                loss.backward()  # type: ignore[no-untyped-call]
                training.optimizer.step()
                training.model.train()
                torch.set_default_dtype(torch.float32)
        return state_of(training.model, training.optimizer)
    finally:
        torch.set_default_dtype(torch.float32)
        if session is not None:
            session.close()


@pytest.mark.long(but=4)
@pytest.mark.parametrize(("change", "method"), in_turn(PUT_BACK, METHODS, times=3))
def test_a_second_run_finds_what_the_first_one_found(method: str, change: str) -> None:
    assert difference(trained(None, PUT_BACK[change]), trained(method, PUT_BACK[change])) is None


@pytest.mark.long(but=6)
@pytest.mark.parametrize(("change", "method"), in_turn(TOLD, METHODS, times=3))
def test_what_no_second_run_can_find_is_told_and_not_trained_on(method: str, change: str) -> None:
    if method in TENSORS:
        assert difference(trained(None, TOLD[change]), trained(method, TOLD[change])) is None
        return
    with pytest.raises(RecomputeError, match=r"holds other values|the class of a ParametrizedLinear"):
        trained(method, TOLD[change])
