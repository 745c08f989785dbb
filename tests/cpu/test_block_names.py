"""The blocks that names tell are those that modules tell, and free the bytes that the engine counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.blocks.discovery import discover
from spillway.ir import Plan, Step, verify
from spillway.ir.account import account
from spillway.ir.block_calls import block_calls
from spillway.ir.lives import lives_of
from spillway.recording.steps import record_step
from tests.cpu.block_cases import Chain, Residual, Shared
from tests.cpu.test_block_discovery import BLOCKS, Stage, X, built, ids
from tests.pure.block_steps import block_names

LENGTH = 12


def resnet() -> nn.Module:
    library = pytest.importorskip("transformers")
    config = library.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=4
    )  # fmt: skip
    return library.ResNetForImageClassification(config)  # type: ignore[no-any-return]


def recorded(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    def step() -> None:
        loss().backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    return record_step(step, models=model)


@pytest.mark.parametrize("name", ["albert", "t5"])
def test_names_tell_the_blocks_of_transformers(name: str) -> None:
    model, loss = built(name)
    step = recorded(model, lambda: loss(model, ids(LENGTH)))
    assert block_names(step) == BLOCKS[name]
    calls = block_calls(step)
    assert [call.name for call in calls] == (BLOCKS[name] * 4 if name == "albert" else BLOCKS[name])
    gaps = tuple(gap for call in calls for gap in call.gaps)
    peak = account(step, gaps, lives_of(step)).peak
    verify(Plan(step=step.digest(), allowed=peak, projected=peak, gaps=gaps), step, peak)


@pytest.mark.parametrize("model", [Chain(Residual(), Residual()), Chain(Stage(), Stage()), Shared(Residual())])
def test_names_tell_what_modules_tell(model: nn.Module) -> None:
    def forward() -> Tensor:
        return model(X).square().mean()  # type: ignore[no-any-return]

    assert block_names(recorded(model, forward)) == discover(model, forward)


def test_blocks_of_pictures_are_told_alike_although_the_first_of_a_stage_has_a_shortcut() -> None:
    model = resnet()
    pixels = torch.ones(2, 3, 32, 32)

    def forward() -> Tensor:
        return model(pixel_values=pixels, labels=torch.zeros(2).long()).loss  # type: ignore[no-any-return]

    names = block_names(recorded(model, forward))
    assert sorted(names) == sorted(discover(model, forward))
    assert len(names) > 4


@pytest.mark.parametrize("name", ["bert", "albert"])
def test_recomputing_a_block_frees_what_the_engine_counts(name: str) -> None:
    model, loss = built(name)
    calls = block_calls(recorded(model, lambda: loss(model, ids(LENGTH))))
    engine = BlockEngine(model, BLOCKS[name])
    try:
        loss(model, ids(LENGTH)).backward()
        counted = [report.own_bytes for report in engine.calls]
    finally:
        engine.close()
    assert [call.nbytes for call in calls] == counted
