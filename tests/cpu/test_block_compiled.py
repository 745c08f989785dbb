"""Compiled blocks under every action, and compilations that would pass the engine by."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.blocks.discovery import discover
from spillway.errors import ModelError
from spillway.methods.actions import LOSSLESS
from tests.cpu.block_cases import Chain, Normalised, Residual
from tests.cpu.test_block_engine import batch, gradients, same

NAMES = ["blocks.0", "blocks.1"]
pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Residual(), Normalised()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


def compiled_model(how: str) -> Chain:
    torch.manual_seed(0)
    model = Chain(Mixed(), Mixed())
    for number, block in enumerate(model.blocks):
        if how == "block":
            block.compile(backend="aot_eager")
        elif how == "part":
            block.one.compile(backend="aot_eager")
        else:
            model.blocks[number] = torch.compile(block, backend="aot_eager")
    return model


def graph_breaks() -> int:
    """Since this process began."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def trained(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    found: list[Tensor] = []
    for _ in range(2):
        loss = model(batch()).square().mean()
        found += [loss.detach(), *gradients(model, loss), torch.get_rng_state()]
        found += [buffer.clone() for buffer in model.buffers()]
    return found


@pytest.mark.long
@pytest.mark.parametrize("how", ["block", "part", "wrapped"])
def test_compiled_blocks_train_as_they_do_without_the_engine(how: str, tmp_path: Path) -> None:
    model = compiled_model(how)
    before = copy.deepcopy(model.state_dict())
    plain = trained(model)
    graphs, breaks = torch._dynamo.utils.counters["stats"]["unique_graphs"], graph_breaks()
    assert graphs > 0
    for action in LOSSLESS:
        model.load_state_dict(before)
        with BlockEngine(model, NAMES, actions=lambda block, call, a=action: a, spill_directory=tmp_path) as engine:
            assert same(plain, trained(model)), action
            assert [report.recomputes for report in engine.calls] == [int(action.recomputes)] * 2
            assert all(report.saved_bytes > 0 for report in engine.calls)
    model.load_state_dict(before)
    assert same(plain, trained(model)), "the compiled blocks are there again"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "nothing was compiled twice"
    assert graph_breaks() == breaks


def test_a_compiled_block_that_is_recomputed_holds_nothing_in_between() -> None:
    model = compiled_model("block")
    with BlockEngine(model, NAMES) as engine:
        loss = model(batch()).square().mean()
        for name in NAMES:
            report = next(one for one in engine.calls if one.block == name)
            assert engine.revoke(name) == report.own_bytes > 0
        loss.backward()


def test_copies_of_a_compiled_block_are_plain_and_it_is_found_as_if_it_were_not_compiled() -> None:
    model = compiled_model("block")
    blocks = discover(model, lambda: model(batch()))
    assert blocks == ["blocks.0", "blocks.1"]
    with BlockEngine(model, blocks) as engine:
        twin = copy.deepcopy(model)
        twin(batch()).sum().backward()
        assert engine.calls == []
        assert all(parameter.grad is None for parameter in model.parameters())


def test_compiling_a_block_afterwards_is_detected() -> None:
    model = Chain(Residual(), Residual())
    engine = BlockEngine(model, NAMES)
    model.blocks[1].compile(backend="aot_eager")
    with pytest.raises(ModelError, match=r"blocks\.1 was compiled after it had been managed"):
        model(batch())
    engine.close()
    model(batch())

    model = compiled_model("block")
    with BlockEngine(model, NAMES):
        model.blocks[0].compile(backend="eager")
        with pytest.raises(ModelError, match=r"blocks\.0 was compiled after it had been managed"):
            model(batch())


def test_compiling_the_whole_model_is_detected_before_and_afterwards() -> None:
    with pytest.raises(ModelError, match="compiled as a whole"):
        BlockEngine(torch.compile(Chain(Residual()), backend="eager"), ["_orig_mod.blocks.0"])
    inside = Chain(Mixed())
    inside.blocks[0].compile(backend="eager")
    with pytest.raises(ModelError, match=r"blocks\.0 is compiled as a whole, and so passes its block blocks\.0\.one"):
        BlockEngine(inside, ["blocks.0", "blocks.0.one"])
    model = Chain(Residual())
    with BlockEngine(model, ["blocks.0"]):
        with pytest.raises(ModelError, match=r"Chain is managed, and a compiler"):
            torch.compile(model, backend="eager")(batch())
        model(batch()).sum().backward()
        with pytest.raises(ModelError, match=r"Residual is managed, and a compiler"):
            torch.compile(lambda x: model.blocks[0](x) * 2, backend="eager")(batch())


def unseen_writes(graph: Callable[..., Sequence[Tensor]], _: object) -> Callable[..., Sequence[Tensor]]:
    """A compiler whose kernels write to what ops have returned."""

    def run(*args: Tensor) -> Sequence[Tensor]:
        made = graph(*args)
        for one in made:
            one.detach().numpy()[...] += 1
        return made

    return run


class Calling(nn.Module):
    """Calls something that is compiled, or compiles itself, between two layers."""

    def __init__(self, called: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 16), nn.Linear(16, 32)
        self.called = called

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + torch.relu(self.down(self.called(self.up(x), self.up.weight.detach())))
        return result


def attention(x: Tensor, _: Tensor) -> Tensor:
    """Without gradients of its own: on the CPU it has no backward."""
    heads = x.detach().reshape(1, 1, -1, 16)
    mixed: Any = flex_attention(heads, heads, heads, score_mod=lambda score, b, h, q, k: score - (q - k) / 8)
    result: Tensor = x + mixed.view_as(x)
    return result


def product(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight) @ weight.T


def counted(x: Tensor, weight: Tensor) -> Tensor:
    """In two graphs, with an op between them that dynamo leaves alone."""
    return product(x, weight) + x.detach().relu().nonzero().sum()


@pytest.mark.long(but=2)
@pytest.mark.parametrize("what", ["unseen writes", "two graphs", "flex_attention"])
def test_what_is_compiled_within_a_block_runs_compiled_under_every_action(what: str) -> None:
    """Selective actions stand in front of ops with a mode, under which dynamo would compile nothing."""
    called = {
        "unseen writes": torch.compile(product, backend=unseen_writes),
        "two graphs": torch.compile(counted, backend="aot_eager"),
        "flex_attention": attention,
    }[what]
    torch.manual_seed(0)
    model = Chain(Calling(called), Calling(called))

    def step() -> list[Tensor]:
        loss = model(batch()).square().mean()
        return [loss.detach(), *gradients(model, loss)]

    plain = step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for action in LOSSLESS:
        with BlockEngine(model, NAMES, actions=lambda block, call, a=action: a) as engine:
            assert same(plain, step()), action
            assert [report.recomputes for report in engine.calls] == [int(action.recomputes)] * 2
    assert same(plain, step())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0, "nothing was compiled twice"
