from __future__ import annotations

import copy
import random

import numpy
import pytest
import torch
from torch import nn

from tests.cpu.families import FAMILIES, Built, State, difference, state_of


def trained(built: Built) -> State:
    for batch in built.batches:
        loss = built.step(built.model, built.optimizers, batch)
        assert torch.isfinite(loss)
        assert not loss.requires_grad
    return state_of(built.model, built.optimizers)


@pytest.mark.long(but=5)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_to_the_same_bits_from_the_same_seed(name: str) -> None:
    first = FAMILIES[name](0)
    assert len(first.batches) == 5
    untrained = state_of(first.model, first.optimizers)
    after = trained(first)
    assert difference(untrained, after) is not None
    assert difference(after, trained(FAMILIES[name](0))) is None


@pytest.mark.long(but=10)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_gradients_to_compare_after_its_steps(name: str) -> None:
    state = trained(FAMILIES[name](0))
    gradients = [value for key, value in state.items() if "gradient of" in key]
    # Stochastic depth leaves out every other branch.
    assert sum(value != "none" for value in gradients) >= len(gradients) / 3


def a_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model[0].weight.data[1, 2] *= -1", "model 0: parameter 0.weight: 1 of 48 bytes differ"),
        ("model[0].weight.grad[0, 0] += 1", "model 0: gradient of 0.weight: "),
        ("model[0].weight.grad = None", "model 0: gradient of 0.weight: torch.float32 of shape (4, 3) against none"),
        ("model[0].weight.data = model[0].weight.data.t().contiguous().t()", "strides (3, 1) against (1, 4)"),
        ("model[0].double()", "model 0: parameter 0.weight: dtype torch.float32 against torch.float64"),
        ("model[1].running_var = torch.ones(2, 2)", "model 0: buffer 1.running_var: shape (4,) against (2, 2)"),
        ("model[1].num_batches_tracked += 1", "model 0: buffer 1.num_batches_tracked: 1 of 8 bytes differ"),
        ("model[1].running_mean[0] = float('nan')", "model 0: buffer 1.running_mean: "),
        ("optimizer.state[model[0].bias]['exp_avg'].neg_()", "optimizer 0: exp_avg of parameter 1: "),
        ("optimizer.param_groups[0]['lr'] = 1.0", "optimizer 0: group 0: "),
        ("del optimizer.state[model[0].bias]['exp_avg']", "optimizer 0: exp_avg of parameter 1 is only in the first"),
        ("torch.rand(1)", "torch's random stream: not at the same place"),
        ("random.random()", "Python's random stream: not at the same place"),
        ("numpy.random.random()", "NumPy's random stream: not at the same place"),
    ],
)
def test_a_change_is_named(change: str, said: str) -> None:
    model, optimizer = a_model()
    before = state_of(model, optimizer)
    exec(change, {"model": model, "optimizer": optimizer, "torch": torch, "random": random, "numpy": numpy})
    assert said in str(difference(before, state_of(model, optimizer)))


def test_negative_zero_and_zero_are_two_values_and_nan_is_itself() -> None:
    model, optimizer = a_model()
    model[0].bias.data.fill_(float("nan"))
    model[1].bias.data.zero_()
    before = state_of(model, optimizer)
    assert difference(before, state_of(model, optimizer)) is None
    model[1].bias.data.neg_()
    assert difference(before, state_of(model, optimizer)) == "model 0: parameter 1.bias: 4 of 16 bytes differ"


def test_collecting_a_state_changes_nothing_and_does_not_follow_later_changes() -> None:
    model, optimizer = a_model()
    before = state_of(model, optimizer)
    twin = copy.deepcopy(before)
    model[0].weight.data.zero_()
    assert difference(before, twin) is None
