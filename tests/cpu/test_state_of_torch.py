"""Objects of torch's own Python code that have a state and that a block holds: a second run finds them as the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.distributions.transforms import ExpTransform
from torch.nn.utils import parametrize
from torch.quasirandom import SobolEngine
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torch.utils.weak import WeakTensorKeyDictionary

import spillway
from spillway.engines.blocks import code, reach
from spillway.methods.actions import Action
from tests.cpu.block_cases import Chain, Functional, mean_square
from tests.cpu.families import difference
from tests.cpu.test_block_second_runs import WIDTH, assert_recomputed_as_plain, block_of, trained


def with_engine(engine: SobolEngine, draw: Callable[[Any], Tensor]) -> Functional:
    def function(block: Any, x: Tensor) -> Tensor:
        return x + torch.tanh(block.one(x)) * draw(block.engine)

    block = block_of(function)
    block.engine = engine
    return block


DRAWS = {
    "draw": lambda engine: engine.draw(20),
    "draw twice": lambda engine: torch.cat([engine.draw(7), engine.draw(13)]),
    "fast forward": lambda engine: engine.fast_forward(3).draw(20),
    "reset": lambda engine: torch.cat([engine.draw(10), engine.reset().draw(10)]),
}


@pytest.mark.parametrize("scramble", [False, True])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_quasirandom_numbers(draw: Callable[[SobolEngine], Tensor], scramble: bool) -> None:
    engine = SobolEngine(WIDTH, scramble=scramble, seed=1)
    assert_recomputed_as_plain(Chain(with_engine(engine, draw), with_engine(engine, draw)))


def test_without_a_look_into_torchs_objects_they_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "is_foreign", lambda module: code.package(module) in code.FOREIGN)
    with pytest.raises(AssertionError):
        pass_or_differ(Chain(with_engine(SobolEngine(WIDTH), DRAWS["draw"])))


def pass_or_differ(model: nn.Module) -> None:
    try:
        assert_recomputed_as_plain(model)
    except Exception as error:
        raise AssertionError(str(error)) from error


def test_an_engine_that_a_function_names() -> None:
    engine = SobolEngine(WIDTH, scramble=True, seed=2)

    def function(block: Functional, x: Tensor) -> Tensor:
        return x + torch.tanh(block.one(x)) * engine.draw(20)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        torch.testing.assert_close(engine.num_generated % 40, 0)
        return mean_square(model, x)

    model = Chain(block_of(function), block_of(function))
    plain = trained(model, None, loss_of)
    engine.reset()
    again = trained(model, Action.RECOMPUTE, loss_of)
    assert [difference(a, b) for a, b in zip(plain.states, again.states, strict=True)] == [None] * 3


def test_a_sampler_with_a_generator_of_its_own() -> None:
    def function(block: Any, x: Tensor) -> Tensor:
        return x + torch.tanh(block.one(x[torch.tensor(list(block.sampler))]))

    block = block_of(function)
    block.sampler = RandomSampler(range(20), generator=torch.Generator().manual_seed(3))
    assert_recomputed_as_plain(Chain(block))


def test_a_loader_that_a_block_goes_through() -> None:
    def function(block: Any, x: Tensor) -> Tensor:
        (rows,) = next(iter(block.loader))
        return x + torch.tanh(block.one(x)) * rows

    block = block_of(function)
    data = TensorDataset(torch.randn(100, WIDTH))
    block.loader = DataLoader(data, batch_size=20, shuffle=True, generator=torch.Generator().manual_seed(3))
    assert_recomputed_as_plain(Chain(block))


def test_a_block_that_draws_from_the_iterator_of_a_loader_is_kept() -> None:
    class Loading(Functional):
        def __init__(self) -> None:
            super().__init__(lambda block, x: x)
            self.data = TensorDataset(torch.arange(2000.0 * WIDTH).reshape(2000, WIDTH).sin())

        def forward(self, x: Tensor) -> Tensor:
            if "rows" not in vars(self):
                self.rows = iter(DataLoader(self.data, batch_size=20))
            return x + torch.tanh(self.one(x)) * next(self.rows)[0]

    torch.manual_seed(0)
    model = Chain(Loading())
    plain, again = trained(model, None), trained(model, Action.RECOMPUTE)
    assert [difference(a, b) for a, b in zip(plain.states, again.states, strict=True)] == [None] * 3
    assert [bool(report.kept_because) for report in again.reports] == [False, True, True]


def test_lazy_values_of_distributions_and_their_caches() -> None:
    def function(block: Any, x: Tensor) -> Tensor:
        there = {"_param", "probs", "logits"} & set(vars(block.kinds))
        weight = block.kinds.probs if len(there) > 2 else block.kinds.logits.exp()
        return x + torch.tanh(block.one(x)) * weight * block.kinds.probs

    block = block_of(function)
    block.kinds = Categorical(logits=torch.linspace(-1.0, 1.0, WIDTH))
    assert_recomputed_as_plain(Chain(block, block_of(lambda block, x: x + torch.tanh(block.one(x)))))


def test_a_transform_that_keeps_its_last_result() -> None:
    def function(block: Any, x: Tensor) -> Tensor:
        return x + torch.tanh(block.one(x)) * block.transform(block.scale).sin()

    block = block_of(function)
    block.scale = nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH))
    block.transform = ExpTransform(cache_size=1)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        model.blocks[0].transform._cached_x_y = (None, None)
        return model(x).square().mean()

    assert_recomputed_as_plain(Chain(block), loss_of)


def test_a_dictionary_by_tensors() -> None:
    def function(block: Any, x: Tensor) -> Tensor:
        count = block.calls[block.one.weight] = block.calls.get(block.one.weight, 0) + 1
        return x + torch.tanh(block.one(x)) * count

    class Counting(Functional):
        def __init__(self) -> None:
            super().__init__(function)
            self.calls = WeakTensorKeyDictionary()

        def __deepcopy__(self, memo: Any) -> Counting:
            made = Counting()
            made.load_state_dict(self.state_dict())
            return made

    assert_recomputed_as_plain(Chain(Counting()))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.sin() * 2.0


def test_cached_parametrizations() -> None:
    def function(block: Functional, x: Tensor) -> Tensor:
        return x + torch.tanh(block.two(torch.tanh(block.two(x))))

    block = block_of(function)
    parametrize.register_parametrization(block.two, "weight", Doubled())

    def within(model: nn.Module, x: Tensor) -> Tensor:
        with parametrize.cached():
            return model(x).square().mean()

    assert_recomputed_as_plain(Chain(block, block_of(function)), within)


def test_a_scaler_of_gradients_that_begins_in_a_block() -> None:
    def function(block: Any, x: Tensor) -> Tensor:
        begins = block.scaler._scale is None
        scaled: Tensor = block.scaler.scale(torch.tanh(block.one(x)))
        return x + scaled * (2.0 if begins else 1.0)

    block: Any = block_of(function)
    block.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert_recomputed_as_plain(Chain(block))


def test_an_averaged_model_that_a_block_updates() -> None:
    def function(block: Any, x: Tensor) -> Tensor:
        block.averaged[0].update_parameters(block.one)
        return x + torch.tanh(block.one(x)) * block.averaged[0](x).detach()

    class Averaging(Functional):
        def __init__(self) -> None:
            super().__init__(function)
            self.averaged = [torch.optim.swa_utils.AveragedModel(self.one)]

    torch.manual_seed(0)
    model = Chain(Averaging())
    plain, again = trained(model, None), trained(model, Action.RECOMPUTE)
    assert [difference(a, b) for a, b in zip(plain.states, again.states, strict=True)] == [None] * 3
    assert {report.kept_because for report in again.reports} == {"it writes to a parameter that is not its own"}


def test_an_inner_optimizer() -> None:
    def function(block: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            (block.latent - 0.1).square().sum().backward()
        block.inner.step()
        block.inner.zero_grad()
        return x + torch.tanh(block.one(x)) * block.latent.detach().clone()

    class Inner(Functional):
        def __init__(self) -> None:
            super().__init__(function)
            self.held = [torch.ones(WIDTH, requires_grad=True)]
            self.inner = torch.optim.Adam(self.held, lr=0.1)

        @property
        def latent(self) -> Tensor:
            return self.held[0]

    torch.manual_seed(0)
    model = Chain(Inner())
    plain, again = trained(model, None), trained(model, Action.RECOMPUTE)
    assert [difference(a, b) for a, b in zip(plain.states, again.states, strict=True)] == [None] * 3


@pytest.mark.parametrize("method", ["checkpoint", "mimose", "auto"])
def test_under_the_methods(method: str) -> None:
    def parameters(budget: int | None, name: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Chain(*(with_engine(SobolEngine(WIDTH, scramble=True, seed=k), DRAWS["draw"]) for k in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session = spillway.manage(model, optimizer, budget=budget, method=name) if name else None
        for number in range(6):
            batch = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(number))
            with session.step(batch) if session is not None else torch.enable_grad():
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        if session is not None:
            session.close()
        return [one.detach().clone() for one in model.parameters()]

    assert all(map(torch.equal, parameters(None, None), parameters(1 << 22, method)))
