"""Blocks of models are found, and transformers' models train under every action as they train plainly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.blocks.discovery import Watch, discover
from spillway.engines.blocks.extra_forward import undone
from spillway.engines.blocks.reach import Reach, reach_of
from spillway.engines.environment import Environment
from spillway.engines.tensors.twins import unseen
from spillway.errors import ModelError
from spillway.methods.actions import LOSSLESS, Action
from tests.cpu.block_cases import Chain, Residual, Shared
from tests.cpu.families import FAMILIES, difference, state_of

X = torch.ones(4, 32)


class Stage(nn.Module):
    """Two blocks behind each other, as the stages of a convolutional network hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Residual(), Residual()])
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Once(nn.Module):
    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*children)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_what_repeats_is_a_block() -> None:
    model = Chain(Residual(), Residual())
    assert discover(model, lambda: model(X)) == ["blocks.0", "blocks.1"]


def test_stages_that_hold_little_but_blocks_are_none() -> None:
    model = Chain(Stage(), Stage())
    expected = [f"blocks.{stage}.layers.{layer}" for stage in range(2) for layer in range(2)]
    assert discover(model, lambda: model(X)) == expected


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_buffers_without_a_storage_of_their_own_are_no_obstacle(layout: torch.layout) -> None:
    model = Chain(Residual(), Residual())
    for block in model.blocks:
        block.register_buffer("mask", torch.eye(32).to_sparse(layout=layout))
    assert discover(model, lambda: model(X)) == ["blocks.0", "blocks.1"]


def test_one_module_that_is_called_again_is_a_block() -> None:
    model = Shared(Residual())
    assert discover(model, lambda: model(X)) == ["block"]


def test_modules_that_are_not_called_do_not_count() -> None:
    model = Chain(Residual(), Residual())
    model.spare = nn.ModuleList([Stage(), Stage()])
    assert discover(model, lambda: model(X)) == ["blocks.0", "blocks.1"]


def test_a_model_without_blocks_is_told_so_and_offered_the_tensor_engine() -> None:
    model = Once(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    with pytest.raises(ModelError, match=r"Once has no blocks.*or take a method of the tensor engine"):
        discover(model, lambda: model(X))
    assert "forward" not in vars(model)


def test_names_that_are_no_modules_are_refused() -> None:
    model = Chain(Residual(), Residual())
    with pytest.raises(ModelError, match=r"no module named 'blocks\.2'"):
        BlockEngine(model, ["blocks.0", "blocks.2"])
    with pytest.raises(ModelError, match="no module named ''"):
        BlockEngine(model, [""])
    model.blocks.append(model.blocks[0])
    with pytest.raises(ModelError, match="Two names in blocks= are of one module"):
        BlockEngine(model, ["blocks.0", "blocks.2"])


# ------------------------------------------------------------------------------------------------------- transformers


def albert(library: Any) -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]:
    config = library.AlbertConfig(
        vocab_size=64,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    return library.AlbertForMaskedLM(config), lambda model, ids: model(input_ids=ids, labels=ids).loss


def gpt2(library: Any) -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]:
    config = library.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
    )
    assert config.use_cache
    return library.GPT2Model(config), lambda model, ids: model(input_ids=ids).last_hidden_state.square().mean()


def t5(library: Any) -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]:
    config = library.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    assert config.use_cache
    return library.T5ForConditionalGeneration(
        config
    ), lambda model, ids: model(input_ids=ids, labels=ids[:, :9].contiguous()).loss


BLOCKS = {
    "bert": [f"bert.encoder.layer.{layer}" for layer in range(3)],
    "gpt2": [f"h.{layer}" for layer in range(3)],
    "albert": ["albert.encoder.albert_layer_groups.0"],
    "t5": [f"{half}.block.{layer}" for half in ("encoder", "decoder") for layer in range(2)],
}


def built(name: str) -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]:
    library = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "bert":
        return FAMILIES["bert"](0).model, lambda model, ids: model(input_ids=ids, labels=ids).loss
    model, loss = {"gpt2": gpt2, "albert": albert, "t5": t5}[name](library)
    return model.train(), loss


def ids(length: int) -> Tensor:
    return torch.randint(1, 64, (4, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("name", BLOCKS)
def test_the_blocks_of_transformers_are_its_layers(name: str) -> None:
    model, loss = built(name)
    assert discover(model, lambda: loss(model, ids(12))) == BLOCKS[name]


@pytest.mark.long(but=6)
@pytest.mark.parametrize("action", LOSSLESS)
@pytest.mark.parametrize("name", BLOCKS)
def test_transformers_train_as_plainly(name: str, action: Action, tmp_path: Path) -> None:
    states = []
    for managed in (False, True):
        model, loss = built(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine = BlockEngine(
            model,
            BLOCKS[name],
            actions=lambda block, call: action,
            spill_directory=tmp_path,
        )
        if not managed:
            engine.close()
        torch.manual_seed(7)
        for length in (16, 11):
            optimizer.zero_grad()
            loss(model, ids(length)).backward()
            optimizer.step()
            if managed:
                assert len(engine.calls) == 4 or name in ("bert", "gpt2")
                assert {report.recomputes for report in engine.calls} == {int(action.recomputes)}
                assert {report.kept_because for report in engine.calls} == {""}
        engine.close()
        states.append(state_of(model, optimizer))
    assert difference(*states) is None


def test_blocks_are_found_while_another_thread_runs_something_once_more() -> None:
    """Which puts hooks on all modules back as they were, and ours are not its own."""
    model, other = Chain(), Residual()
    watch = Watch(model)
    begins = undone(Environment((), ()), (other,), (X,), {})
    with ExitStack() as stack:
        with begins:
            stack.enter_context(watch.watching())
        model(X)
        assert watch.calls[model] == 1
        ends = undone(Environment((), ()), (other,), (X,), {})
        ends.__enter__()
        stack.close()
        ends.__exit__(None, None, None)
    model(X)
    assert watch.calls[model] == 1


def test_hooks_on_all_modules_stay_that_another_thread_did_not_hear_for_a_while() -> None:
    """Which tells what a step takes meanwhile, and hears no hooks of the user's."""
    heard = list[nn.Module]()
    hook = register_module_forward_hook(lambda module, args, out: heard.append(module))
    try:
        unheard = unseen()
        unheard.__enter__()
        reach = Reach(reach_of((Residual(),)))
        unheard.__exit__(None, None, None)
        reach.restore()
        Residual()(X)
        assert heard
    finally:
        hook.remove()
