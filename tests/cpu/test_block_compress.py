"""Blocks whose saved tensors are quantized: what is, what is not, what comes back, and who has to allow it."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spillway.engines.blocks import compress
from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.blocks.compress import Compressor
from spillway.engines.blocks.saved import SpilledTensor, storages
from spillway.errors import UsageError
from spillway.internals.private import storage_of
from spillway.methods.actions import LOSSLESS, Action, ActionOptions
from tests.cpu.block_cases import Chain, Functional, Residual, mean_square
from tests.cpu.test_block_engine import batch, engine_of, gradients, same, saved_tensors, used

LOSSY = tuple(action for action in Action if action.lossy)
COMPRESSING = [Action.COMPRESS, Action.COMPRESS_OFFLOADED]
FLOATS = 40 * 32 * 4
PACKED = 40 * 32 // 256 * (128 + 8)
"""Bytes of one activation before and after."""


def relus(block: Functional, x: Tensor) -> Tensor:
    return F.relu(block.two(F.relu(block.one(x))))


def held(engine: BlockEngine) -> int:
    """Bytes of activations that saved tensors hold in full."""
    return sum(storages(saved_tensors(engine)).values())


def far(left: list[Tensor], right: list[Tensor]) -> float:
    """The norm of the difference, as a share of that of the left."""
    flat = [torch.cat([one.flatten() for one in both]) for both in (left, right)]
    return float((flat[0] - flat[1]).norm() / flat[0].norm())


# ------------------------------------------------------------------------------------------------------------- who may


@pytest.mark.parametrize("action", LOSSY)
def test_a_lossy_action_has_to_be_allowed(action: Action) -> None:
    model = Chain(Residual())
    with pytest.raises(UsageError, match=rf"Action\.{action.name} quantizes .* allow that with lossy=True"):
        BlockEngine(model, ["blocks.0"], actions={("blocks.0", 0): action})
    with BlockEngine(model, ["blocks.0"], actions=lambda block, call: action) as engine:
        with pytest.raises(UsageError, match="allow that with lossy=True"):
            model(batch())
        engine.actions = {}
        with pytest.raises(UsageError, match="allow that with lossy=True"):
            engine.actions = {("blocks.0", 0): action}
        model(batch()).sum().backward()


def test_an_engine_that_may_lose_bits_loses_none_under_other_actions(tmp_path: Path) -> None:
    model = Chain(Residual(), Residual())
    with BlockEngine(model, ["blocks.0", "blocks.1"], lossy=True, spill_directory=tmp_path) as engine:
        found = []
        for action in LOSSLESS:
            engine.actions = lambda block, call, action=action: action
            torch.manual_seed(3)
            found.append(gradients(model, mean_square(model, batch())))
        assert all(same(found[0], one) for one in found[1:])


@pytest.mark.parametrize("bits", [0, 3, 16, "4", None])
def test_bits_are_two_four_or_eight(bits: Any) -> None:
    with pytest.raises(UsageError, match="2, 4 or 8 bits; got bits="):
        ActionOptions(bits=bits)


# --------------------------------------------------------------------------------------------------- what is quantized


@pytest.mark.parametrize("action", COMPRESSING)
def test_saved_activations_are_held_in_an_eighth_each_once(action: Action, tmp_path: Path) -> None:
    model, engine = engine_of(relus, action, count=3, spill_directory=tmp_path)
    loss = model(batch()).square().sum()
    # Four activations a block, of which the last is the next one's argument; the last block's result is its caller's.
    assert held(engine) == 0
    own = [report.packed_bytes for report in engine.calls]
    assert own == [(1 + 2) * PACKED, 2 * PACKED, 2 * PACKED], (
        "an argument that the last block saved is not packed again"
    )
    assert [report.saved_bytes for report in engine.calls] == [3 * FLOATS] * 3
    loss.backward()
    assert [report.recomputes for report in engine.calls] == [0, 0, 0]


def test_views_of_one_storage_come_back_as_views_of_one() -> None:
    base = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    found = Compressor().compress(base, ActionOptions(bits=8))
    assert found is not None
    home, nbytes = found
    assert nbytes == base.numel() + 10 * 8
    views = [base[:, 32:], base.t(), base[3].expand(7, 64), base[::3], base.view(8, 5, 64).transpose(0, 1)]
    storage = home.load()
    for view in views:
        back = SpilledTensor.of(home, view).over(storage)
        assert (back.shape, back.stride(), back.storage_offset()) == (view.shape, view.stride(), view.storage_offset())
        assert back.untyped_storage().data_ptr() == storage.data_ptr()
        assert (back - view).abs().max() < 0.05


def test_an_exact_copy_may_stand_for_a_lossy_one_and_not_the_other_way_round() -> None:
    compressor, tensor = Compressor(), torch.randn(1000)
    lossy = compressor.compress(tensor, ActionOptions())
    assert lossy is not None
    assert compressor.compress(tensor, ActionOptions()) == (lossy[0], 0)
    assert compressor.compress(tensor, None) is None
    mask = torch.rand(1000) < 0.5
    exact = compressor.compress(mask, None)
    assert exact is not None
    assert compressor.compress(mask, ActionOptions()) == (exact[0], 0)
    tensor.add_(1)
    written = compressor.compress(tensor, ActionOptions())
    assert written is not None
    assert written[0] is not lossy[0], "it is another value"


def test_statistics_integers_small_tensors_and_weights_stay_and_masks_take_a_bit() -> None:
    def function(block: Functional, x: Tensor) -> Tensor:
        picked = torch.arange(300).remainder(40)
        wide = F.layer_norm(block.one(x)[picked], (32,))  # saves the mean and deviation of 300 rows
        return x * block.two(F.dropout(wide, 0.2)).sum(0)[:32].tanh()  # `tanh` saves 32 elements

    model, engine = engine_of(function, Action.COMPRESS)
    loss = model(batch()).square().sum()
    kept = [one for one in saved_tensors(engine) if one.spilled is None]
    shapes = sorted(
        {tuple(one.shape) for one in kept if not one.pinned and one.value.untyped_storage().nbytes() >= 1024}
    )
    assert shapes == [(300,), (300, 1)], "the index of rows; their mean and deviation"
    assert {one.spilled.source.nbytes for one in saved_tensors(engine) if one.spilled} >= {-(-300 * 32 // 8)}
    loss.backward()


def test_what_the_forward_reads_is_never_changed() -> None:
    model, engine = engine_of(relus, Action.COMPRESS, count=3)
    loss = mean_square(model, batch())
    engine.close()
    assert torch.equal(loss, mean_square(model, batch()))


# ------------------------------------------------------------------------------------------------------ what comes back


def test_each_action_of_a_forward_has_options_of_its_own(tmp_path: Path) -> None:
    mixed = [Action.COMPRESS, Action.RECOMPUTE_COMPRESSED, Action.OFFLOAD, Action.COMPRESS_OFFLOADED]

    def taken(**of: ActionOptions) -> tuple[list[int], list[int]]:
        """What each call takes packed, and what is leaving when it has ended."""
        model, engine = engine_of(relus, Action.COMPRESS, count=4, spill_directory=tmp_path)
        engine.actions = {(f"blocks.{number}", 0): action for number, action in enumerate(mixed)}
        engine.options = {action: of.get(action.name, ActionOptions()) for action in mixed}
        hidden, leaving = model.embed(batch()), []
        for block in model.blocks:
            hidden = block(hidden)
            leaving.append(engine.leaving_bytes)
        packed = [call.packed_bytes for call in engine.calls]
        hidden.sum().backward()
        engine.close()
        return packed, leaving

    usual, _ = taken()
    for number, name in ((0, "COMPRESS"), (1, "RECOMPUTE_COMPRESSED"), (3, "COMPRESS_OFFLOADED")):
        packed, _ = taken(**{name: ActionOptions(bits=8)})
        assert [more > few for more, few in zip(packed, usual, strict=True)] == [at == number for at in range(4)]
    assert taken(OFFLOAD=ActionOptions(waits=True))[1][2] == 0
    assert taken(OFFLOAD=ActionOptions(bits=8))[0] == usual, "what another action is told does not count for these"


@pytest.mark.parametrize(("action", "bits", "most"), [(a, *b) for a in LOSSY for b in ((2, 0.7), (4, 0.15), (8, 0.01))])
def test_gradients_are_near_by_as_many_bits_as_there_are(
    action: Action, bits: int, most: float, tmp_path: Path
) -> None:
    model, engine = engine_of(
        relus, action, count=3, options={action: ActionOptions(bits=bits)}, spill_directory=tmp_path
    )
    lossy = gradients(model, mean_square(model, batch()))
    engine.close()
    assert 0 < far(gradients(model, mean_square(model, batch())), lossy) < most


@pytest.mark.parametrize("action", LOSSY)
def test_random_streams_stay_where_plain_pytorch_leaves_them_and_seeds_repeat(
    action: Action, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, streams = [], []
    for seed in (None, 0, 0, 1):
        torch.manual_seed(0)
        model = Chain(Residual(), Residual())
        if seed is not None:
            monkeypatch.setattr(compress, "SEED", seed)
            BlockEngine(
                model, ["blocks.0", "blocks.1"], actions=lambda block, call: action, lossy=True,
                spill_directory=tmp_path,
            )  # fmt: skip
        found.append(gradients(model, mean_square(model, batch())))
        streams.append(torch.get_rng_state())
    assert all(torch.equal(streams[0], one) for one in streams)
    assert same(found[1], found[2])
    assert not same(found[0], found[1])
    assert not same(found[1], found[3])


@pytest.mark.parametrize("action", LOSSY)
def test_a_graph_gives_the_same_gradients_again_and_after_close(action: Action, tmp_path: Path) -> None:
    model, engine = engine_of(relus, action, count=3, spill_directory=tmp_path)
    loss = mean_square(model, batch())
    model.zero_grad()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    held_after = [one.value for one in saved_tensors(engine) if not one.pinned]
    assert all(value is None or value.untyped_storage().nbytes() < 4096 for value in held_after)
    engine.close()
    assert used(engine) == []
    assert same(first, gradients(model, loss))


def test_only_what_a_node_wants_comes_back_for_it() -> None:
    seen: list[int] = []

    def function(block: Functional, x: Tensor) -> Tensor:
        x = F.gelu(block.one(x))
        x.register_hook(lambda gradient: seen.append(held(engine)))
        for _ in range(6):
            x = torch.sin(x)
        x.register_hook(lambda gradient: seen.append(held(engine)))
        return block.two(x)

    model, engine = engine_of(function, Action.COMPRESS)
    model(batch()).square().sum().backward()
    assert len(seen) == 2
    assert max(seen) <= 2 * FLOATS, "of eight that were saved"


def test_a_compressed_block_is_not_revoked_and_says_why() -> None:
    model, engine = engine_of(relus, Action.COMPRESS)
    loss = model(batch()).sum()
    assert engine.revoke("blocks.0") == 0
    assert engine.calls[0].kept_because == "what it was called with is held compressed"
    loss.backward()


@pytest.mark.parametrize("inner", LOSSY)
def test_a_block_around_that_runs_again_brings_back_exact_bits(inner: Action, tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Functional(relus)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.inner(torch.cos(x)))

    torch.manual_seed(0)
    model = Chain(Outer(), Outer())
    names = [f"blocks.{number}{inner}" for number in range(2) for inner in ("", ".inner")]
    with BlockEngine(model, names, lossy=True, spill_directory=tmp_path) as engine:
        plain = gradients(model, mean_square(model, batch()))
        engine.actions = lambda block, call: inner if block.endswith("inner") else Action.RECOMPUTE
        assert same(plain, gradients(model, mean_square(model, batch())))
        assert [report.packed_bytes for report in engine.calls] == [0] * 4
        engine.actions = lambda block, call: inner if block.endswith("inner") else Action.KEEP
        loss = mean_square(model, batch())
        assert all(report.packed_bytes > 0 for report in engine.calls if report.block.endswith("inner"))
        assert engine.revoke("blocks.0") > 0
        assert engine.revoke("blocks.1") > 0
        assert same(plain, gradients(model, loss))


def test_what_inner_blocks_were_called_with_goes_with_the_outer_block() -> None:
    arguments: list[weakref.ref[Any]] = []

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Functional(lambda block, x: x.sin())

        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            arguments.append(weakref.ref(storage_of(y)))
            return self.inner(y) + 1

    model = Chain(Outer())
    with BlockEngine(model, ["blocks.0", "blocks.0.inner"]) as engine:
        loss = mean_square(model, batch())
        assert engine.revoke("blocks.0") > 0
        assert arguments[0]() is None
        loss.backward()


# ------------------------------------------------------------------------------------------- a second run on less


def test_a_block_runs_again_on_what_it_was_called_with_quantized() -> None:
    was_called = Mock()  # a list would be put back

    def function(block: Functional, x: Tensor) -> Tensor:
        was_called(x.detach().clone())
        return relus(block, x)

    model, engine = engine_of(function, Action.RECOMPUTE_COMPRESSED, count=2)
    loss = mean_square(model, batch())
    assert held(engine) == 0
    assert [report.packed_bytes for report in engine.calls] == [PACKED, PACKED]
    loss.backward()
    assert [report.recomputes for report in engine.calls] == [1, 1]
    seen = [call.args[0] for call in was_called.call_args_list]
    for first, again in zip(seen[:2], reversed(seen[2:]), strict=True):
        assert 0 < float((first - again).abs().max()) < float((first.max() - first.min()) / 14)
    assert torch.equal(seen[1] == 0, seen[2] == 0), "the argument of the second is the result of a ReLU"
