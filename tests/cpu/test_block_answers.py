"""What the block engine never takes, what it answers where it cannot serve, and what it costs when it is bypassed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.blocks.discovery import discover
from spillway.engines.blocks.saved import SavedTensor
from spillway.errors import ModelError
from spillway.methods.actions import Action
from tests.cpu.block_cases import Chain, Functional, Outer, Residual, mean_square
from tests.cpu.families import FAMILIES

WIDTH = 32
X = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1))


# -------------------------------------------------------------------------------------------------- parameters stay


class Holding(nn.Module):
    """Saves its weight whole, transposed and in part, a buffer, and one activation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, WIDTH))
        self.register_buffer("scale", torch.randn(40, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)  # saves its result
        turned, part = (y.t() * self.weight.t()).t(), y[:20] * self.weight[:20]
        return y * self.weight * self.scale + turned + F.pad(part, (0, 0, 20, 0))


@pytest.mark.parametrize("action", Action)
def test_parameters_and_buffers_are_never_counted_given_up_or_sent_away(action: Action, tmp_path: Path) -> None:
    model = Chain(Holding(), Holding())
    fixed = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    given: list[int] = []
    let_go = SavedTensor.let_go

    def noted(saved: SavedTensor) -> None:
        before = saved.value
        let_go(saved)
        if before is not None and saved.value is None:
            given.append(before.untyped_storage().data_ptr())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedTensor, "let_go", noted)
        with BlockEngine(
            model,
            ["blocks.0", "blocks.1"],
            actions=lambda block, call: action,
            spill_directory=tmp_path,
            lossy=action.lossy,
        ) as engine:
            for _ in range(2):
                before = len(given)
                loss = mean_square(model, X)
                assert [report.own_bytes for report in engine.calls] == [X.nbytes] * 2
                assert (len(given) > before) == (action is not Action.KEEP)
                for report in engine.calls:
                    engine.revoke(report.block, report.call)
                loss.backward()
    assert given
    assert not fixed & set(given)


# ------------------------------------------------------------------------------------------------------------ answers


def test_transformers_own_checkpointing_is_refused_before_and_told_of_after() -> None:
    pytest.importorskip("transformers")
    built = FAMILIES["bert"](0)
    model: Any = built.model
    names = [f"bert.encoder.layer.{layer}" for layer in range(3)]
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{kind}_checkpointing_enable")()
    with pytest.raises(ModelError, match=rf"checkpoints its layers itself.*{kind}_checkpointing_disable\(\)"):
        BlockEngine(model, names)
    getattr(model, f"{kind}_checkpointing_disable")()
    with BlockEngine(model, names, actions=lambda block, call: Action.RECOMPUTE) as engine:
        getattr(model, f"{kind}_checkpointing_enable")()
        model(**built.batches[0]).loss.backward()
        told = {(report.block, report.kept_because) for report in engine.calls}
    assert told == {(name, "torch.utils.checkpoint, which somebody put there, runs it again itself") for name in names}


def test_an_action_for_a_block_that_is_not_there_is_refused() -> None:
    model = Chain(Residual(), Residual())
    wrong = {("blocks.0", 0): Action.KEEP, ("blocks.2", 0): Action.RECOMPUTE}
    with pytest.raises(ModelError, match=r"an action for 'blocks\.2', which is none of the 1 blocks"):
        BlockEngine(model, ["blocks.0"], actions=wrong)
    assert "forward" not in vars(model)
    with BlockEngine(model, ["blocks.0"]) as engine:
        with pytest.raises(ModelError, match=r"the first is 'blocks\.0'"):
            engine.actions = wrong
        assert engine.actions == {}


def test_layers_that_were_left_out_by_chance_are_blocks_too() -> None:
    class Skipping(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](self.embed(x))

    model = Skipping(Residual(), Residual(), Residual())
    model.other = nn.ModuleList([Outer()])  # of another class, and never called
    assert discover(model, lambda: model(X)) == [f"blocks.{number}" for number in range(3)]


# ------------------------------------------------------------------------------------------------------------- bypassed


def python_calls(model: nn.Module) -> int:
    """Of a forward and a backward; the fewest of three, since the collector may come between."""

    def once() -> int:
        counted = 0

        def count(frame: FrameType, event: str, _: object) -> None:
            nonlocal counted
            counted += event == "call"

        sys.setprofile(count)
        try:
            loss = mean_square(model, X)
            loss.backward()
        finally:
            sys.setprofile(None)
        return counted

    return min(once() for _ in range(3))


@pytest.mark.parametrize("ops", [1, 50])
def test_an_engine_that_is_bypassed_adds_a_few_calls_a_block_and_none_an_op(ops: int) -> None:
    def function(block: Functional, x: Tensor) -> Tensor:
        for _ in range(ops):
            x = torch.sin(x)
        return block.one(x)

    model = Chain(*(Functional(function) for _ in range(4)))
    plain = python_calls(model)
    with BlockEngine(model, [f"blocks.{number}" for number in range(4)]) as engine:
        python_calls(model)  # the first calls of a block are looked at closely
        kept = python_calls(model)
        engine.bypassed = True
        assert python_calls(model) - plain == 4 * 9 + 1
        assert engine.calls == []
        engine.bypassed = False
        assert python_calls(model) == kept > plain + 4 * (ops + 20)
        assert len(engine.calls) == 4


def test_an_engine_bypassed_in_the_middle_of_a_block_is_so_from_the_next_block_on() -> None:
    model = Chain(Outer(), Outer())
    names = [f"blocks.{number}{name}" for number in range(2) for name in ("", ".first", ".second")]
    torch.manual_seed(0)
    plain = torch.autograd.grad(mean_square(model, X), list(model.parameters()))
    with BlockEngine(model, names, actions=lambda block, call: Action.RECOMPUTE) as engine:
        handle = model.blocks[0].first.register_forward_hook(lambda *_: setattr(engine, "bypassed", True))
        torch.manual_seed(0)
        loss = mean_square(model, X)
        handle.remove()
        called = [(report.block, report.call) for report in engine.calls]
        inside = [("blocks.0.first", 0), ("blocks.0.first", 1), ("blocks.0.second", 0)]
        assert sorted(called) == [("blocks.0", 0), *inside]
        found = torch.autograd.grad(loss, list(model.parameters()))
        assert engine.calls[0].recomputes == 1
    assert all(map(torch.equal, plain, found))
