"""What the block engine keeps, gives up, counts, detects and refuses."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import random
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import Tensor, nn

from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.blocks.call import BlockCall
from spillway.engines.blocks.saved import SavedTensor
from spillway.errors import ModelError, RecomputeError
from spillway.internals.private import storage_of
from spillway.methods.actions import LOSSLESS, Action
from tests.cpu.block_cases import Chain, Functional, Residual

ALL = list(Action)
RECOMPUTING = [Action.RECOMPUTE, Action.RECOMPUTE_OFFLOADED]
FLOATS = 40 * 32 * 4
"""Bytes of one activation."""


def engine_of(function: Any, action: Action, count: int = 1, **rest: Any) -> tuple[Chain, BlockEngine]:
    torch.manual_seed(0)
    model = Chain(*(Functional(function) for _ in range(count)))
    names = [f"blocks.{number}" for number in range(count)]
    return model, BlockEngine(model, names, actions=lambda block, call: action, lossy=action.lossy, **rest)


def batch() -> Tensor:
    return torch.randn(40, 32, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def sines(block: Functional, x: Tensor) -> Tensor:
    return block.two(torch.sin(torch.cos(block.one(x))))


def used(engine: BlockEngine) -> list[int]:
    """Bytes of the slots in use."""
    store = engine._runtime.store
    return list(store._lanes.tier._in_use.values()) if store is not None else []


def saved_tensors(engine: BlockEngine) -> list[SavedTensor]:
    """What holds a saved tensor of its blocks, and of no engine of another test whose graph is still there."""
    return [thing for thing in gc.get_objects() if type(thing) is SavedTensor and thing.owner.block in engine._found]


def living(kind: type) -> int:
    return sum(type(thing) is kind for thing in gc.get_objects())


# --------------------------------------------------------------------------------------------------- bytes and calls


def test_bytes_are_those_of_each_storage_once_without_parameters() -> None:
    def function(block: Functional, x: Tensor) -> Tensor:
        one, two = block.one(x).chunk(2, dim=1)  # one storage, saved twice by the product
        return torch.cat([one * two, two * one], dim=1).sin()

    model, engine = engine_of(function, Action.KEEP)
    loss = model(batch()).sum()
    (report,) = engine.calls
    # The input (for the weight's gradient), the linear layer's result, the concatenation (for the sine).
    assert (report.saved_bytes, report.own_bytes) == (3 * FLOATS, 2 * FLOATS)
    del loss


@pytest.mark.parametrize("action", RECOMPUTING)
def test_a_recomputed_block_holds_no_more_than_its_argument(action: Action) -> None:
    held: list[weakref.ref[Any]] = []

    def function(block: Functional, x: Tensor) -> Tensor:
        inner = torch.cos(block.one(x))
        held.append(weakref.ref(storage_of(inner)))
        return block.two(torch.sin(inner))

    model, engine = engine_of(function, action)
    model(batch()).sum().backward()
    loss = model(batch()).sum()
    assert held[-1]() is None
    loss.backward()
    assert [report.recomputes for report in engine.calls] == [1]


def test_revoking_frees_what_the_report_says() -> None:
    model, engine = engine_of(sines, Action.KEEP)
    plain = gradients(model, model(batch()).square().sum())
    loss = model(batch()).square().sum()
    (report,) = engine.calls
    assert engine.revoke("blocks.0") == report.own_bytes == 3 * FLOATS
    assert engine.revoke("blocks.0") == 0
    assert same(plain, gradients(model, loss))
    assert engine.calls[0].recomputes == 1


def test_a_block_is_revoked_in_the_middle_of_the_backward() -> None:
    model, engine = engine_of(sines, Action.KEEP, count=3)
    plain = gradients(model, model(batch()).square().sum())
    x = batch()
    freed: list[int] = []
    hidden = model.embed(x)
    for number, block in enumerate(model.blocks):
        hidden = block(hidden)
        if number == 1:
            # Here the backward has left block 2 and not begun with block 1.
            hidden.register_hook(lambda _: freed.extend(engine.revoke(f"blocks.{i}", 1) for i in range(3)))
    assert same(plain, gradients(model, hidden.square().sum()))
    assert freed == [3 * FLOATS, 3 * FLOATS, 0]
    assert [report.recomputes for report in engine.calls[-3:]] == [1, 1, 0]


def test_a_call_that_is_still_running_is_not_revoked() -> None:
    engines: list[BlockEngine] = []

    def function(block: Functional, x: Tensor) -> Tensor:
        y = sines(block, x)
        assert engines[0].revoke("blocks.0") == 0
        return y

    model, engine = engine_of(function, Action.KEEP)
    engines.append(engine)
    model(batch()).sum().backward()


@pytest.mark.parametrize("action", ALL)
def test_nothing_outlives_the_step_nor_waits_for_the_collector(action: Action, tmp_path: Path) -> None:
    def function(block: Functional, x: Tensor) -> Tensor:
        return block.two(torch.tanh(block.one(x)).exp())  # both save their own results

    model, engine = engine_of(function, action, spill_directory=tmp_path)
    model(batch()).sum().backward()  # torch imports what it needs, and leaves frames of the interpreter behind
    engine.close()
    gc.collect()
    gc.disable()
    try:
        before = living(BlockCall), living(SavedTensor)
        model, engine = engine_of(function, action, count=2, spill_directory=tmp_path)
        for _ in range(2):
            model(batch()).sum().backward()
        model(batch())  # a graph that nobody runs backward
        assert (living(BlockCall), living(SavedTensor)) == before
        engine.settle()
        assert used(engine) == []
    finally:
        gc.enable()


def test_every_saved_storage_is_offloaded_once(tmp_path: Path) -> None:
    def function(block: Functional, x: Tensor) -> Tensor:
        one, two = block.one(x).chunk(2, dim=1)
        return block.two(torch.cat([one * two, two * one], dim=1).sin())

    model, engine = engine_of(function, Action.OFFLOAD, spill_directory=tmp_path)
    loss = model(batch()).sum()
    # Neither the argument nor a weight: the linear layer's result, the concatenation, its sine; in whole pages.
    assert used(engine) == [-(-FLOATS // 4096) * 4096] * 3
    loss.backward()
    engine.settle()
    assert used(engine) == []


@pytest.mark.parametrize("action", [*RECOMPUTING, Action.OFFLOAD])
def test_a_retained_graph_does_not_retain_what_was_brought_back(action: Action) -> None:
    model, engine = engine_of(sines, action, count=2)
    model(batch()).sum().backward()
    loss = model(batch()).sum()
    loss.backward(retain_graph=True)
    values = [saved.value for saved in saved_tensors(engine) if not saved.pinned]
    assert values
    assert all(value is None or value.untyped_storage().nbytes() == FLOATS for value in values)
    kept = sum(value is not None for value in values)
    assert kept == (0 if action.recomputes else 2), "only arguments, which others hold"


def test_what_a_retained_graph_has_handed_out_is_dropped_at_once() -> None:
    model, engine = engine_of(sines, Action.RECOMPUTE, count=2)
    hidden = model.blocks[0](model.embed(batch()))
    held: list[int] = []

    def look(_: Tensor) -> None:
        values = [saved.value for saved in saved_tensors(engine) if not saved.pinned]
        held.append(sum(value is not None for value in values))

    hidden.register_hook(look)  # the backward has left block 1
    model.blocks[1](hidden).sum().backward(retain_graph=True)
    assert held == [0]


class Doubled(nn.Module):
    """A block of two, which tells what is alive of what the first of them saved, before the second and at the end."""

    def __init__(self) -> None:
        super().__init__()
        # Not followed, as plain objects would be: a second run would find and leave them as they were.
        self.notes = mock.Mock(held=[], seen=[])
        self.one, self.two = Functional(self.inner), Functional(sines)

    def inner(self, block: Functional, x: Tensor) -> Tensor:
        y = torch.cos(block.one(x))
        self.notes.held.append(weakref.ref(storage_of(y)))
        return block.two(torch.sin(y))

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        self.notes.seen.append(self.notes.held[-1]() is not None)
        return self.two(x)


@pytest.mark.parametrize("inner", [Action.KEEP, Action.RECOMPUTE])
def test_an_outer_block_gives_up_what_inner_ones_hold(inner: Action) -> None:
    model = Chain(Doubled())
    block: Any = model.blocks[0]
    with BlockEngine(model, ["blocks.0", "blocks.0.one", "blocks.0.two"]) as engine:
        plain = gradients(model, model(batch()).square().sum())
        engine.actions = lambda name, call: Action.RECOMPUTE if name == "blocks.0" else inner
        block.notes.seen.clear()
        loss = model(batch()).square().sum()
        assert block.notes.held[-1]() is None
        assert same(plain, gradients(model, loss))
        # In the first run and in the second of the outer block: one that recomputes by itself holds nothing in either.
        assert block.notes.seen == [inner is Action.KEEP] * 2
        assert [report.recomputes for report in engine.calls] == [1, int(inner.recomputes), int(inner.recomputes)]


def test_a_second_run_stops_when_all_that_was_saved_has_been_saved_again() -> None:
    done: list[str] = []

    def function(block: Functional, x: Tensor) -> Tensor:
        y = block.one(x)
        for _ in range(5):
            y = torch.sin(y)
        done.append("saved")
        y = y + 1
        done.append("to the end")
        return y

    model, _ = engine_of(function, Action.RECOMPUTE)
    model(batch()).sum().backward()
    assert done == ["saved", "to the end"]


# ------------------------------------------------------------------------------------------------ what has to be found


@pytest.mark.parametrize("action", ALL)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_write_to_a_saved_tensor_is_found_as_plain_pytorch_finds_it(action: Action, where: str) -> None:
    saved: list[Tensor] = []

    def function(block: Functional, x: Tensor) -> Tensor:
        inner = block.one(x).exp()  # saves its result
        saved.append(inner)
        return block.two(inner.add_(1) if where == "inside" else inner)

    model, engine = engine_of(function, action)
    for managed in (True, False):
        if not managed:
            engine.close()
        loss = model(batch()).sum()
        if where == "outside":
            with torch.no_grad():
                saved[-1].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("action", ALL)
def test_a_weight_written_between_forward_and_backward_is_found(action: Action) -> None:
    model, _ = engine_of(sines, action)
    loss = model(batch()).sum()
    with torch.no_grad():
        model.blocks[0].two.weight.mul_(2)
    with pytest.raises(
        (RuntimeError, RecomputeError), match=r"modified by an inplace operation|weight .* was written to"
    ):
        loss.backward()


def test_a_block_with_a_written_bias_is_kept_or_refused_and_never_wrong() -> None:
    model, engine = engine_of(sines, Action.KEEP)
    plain = gradients(model, model(batch()).square().sum())
    loss = model(batch()).square().sum()
    with torch.no_grad():
        model.blocks[0].one.bias.add_(1)  # autograd does not save it
    assert engine.revoke("blocks.0") == 0
    assert engine.calls[0].kept_because == "bias was written to after it had ended"
    assert same(plain, gradients(model, loss))

    engine.actions = {("blocks.0", 0): Action.RECOMPUTE}
    loss = model(batch()).square().sum()
    with torch.no_grad():
        model.blocks[0].one.bias.add_(1)
    with pytest.raises(RecomputeError, match=r"bias of blocks\.0 was written to between its forward and its backward"):
        loss.backward()


def test_a_late_write_to_an_argument_is_refused_once_and_copied_from_then_on() -> None:
    class Caller(Chain):
        writes = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x) * 1
            y = self.blocks[0](x)
            return y + (x.add_(1) if self.writes else x + 1)

    model = Caller(Functional(lambda block, x: sines(block, x * 2)))
    engine = BlockEngine(model, ["blocks.0"], actions=lambda block, call: Action.RECOMPUTE)
    plain = gradients(model, model(batch()).square().sum())
    model.writes = True
    with pytest.raises(RecomputeError, match=r"Argument 0 of call 0 of blocks\.0 was written to in place"):
        model(batch()).square().sum().backward()
    for _ in range(2):
        assert same(plain, gradients(model, model(batch()).square().sum()))
        assert engine.calls[0].recomputes == 1


@pytest.mark.parametrize("action", RECOMPUTING)
def test_a_second_run_that_differs_is_refused(action: Action) -> None:
    runs = mock.Mock()  # what a list would count is put back

    def function(block: Functional, x: Tensor) -> Tensor:
        runs()
        y = block.one(x)
        return block.two(y.sin() if runs.call_count % 2 else y.sin().cos())

    model, engine = engine_of(function, action)
    with (
        engine,  # a backward that failed keeps its graph, and that the engine, for as long as autograd does
        pytest.raises(RecomputeError, match=r"The second run of call 0 of blocks\.0 was not the same as the first"),
    ):
        model(batch()).sum().backward()


def test_a_second_run_that_saves_less_is_refused() -> None:
    runs = mock.Mock()

    def function(block: Functional, x: Tensor) -> Tensor:
        runs()
        y = block.one(x)
        for _ in range(8 - runs.call_count):
            y = torch.sin(y)
        return y

    model, _ = engine_of(function, Action.RECOMPUTE)
    with pytest.raises(RecomputeError, match="autograd saved 8 tensors, and 9 in the first run"):
        model(batch()).sum().backward()


def test_a_run_that_fails_leaves_streams_buffers_and_flags_as_they_were() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm, self.state = nn.Linear(32, 32), nn.BatchNorm1d(32), mock.Mock(broken=False)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.sin(self.norm(self.linear(x)) * random.random() * numpy.random.rand() * torch.rand(()))
            if self.state.broken:
                raise KeyboardInterrupt
            return y

    model = Chain(Broken())
    with BlockEngine(model, ["blocks.0"], actions={("blocks.0", 0): Action.RECOMPUTE}) as engine:
        loss = model(batch()).sum()
        block: Any = model.blocks[0]
        block.state.broken = True
        block.eval()
        before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        assert (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
        assert not block.norm.training
        assert engine._runtime.replay is None


# --------------------------------------------------------------------------------------------------- hook and front


def test_copies_of_a_managed_model_are_plain() -> None:
    model = Chain(Residual(), Residual())
    with BlockEngine(model, ["blocks.0", "blocks.1"], actions=lambda block, call: Action.RECOMPUTE) as engine:
        keys = list(model.state_dict())
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)]
        for twin in twins:
            assert list(twin.state_dict()) == keys
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.zero_()
            model.eval()
            twin.eval()
            assert torch.count_nonzero(twin(batch())) == 0
            assert torch.count_nonzero(model(batch())) > 0
            assert type(twin.blocks[0].forward).__name__ == "method"
        assert len(engine.calls) == 2
        assert inspect.signature(model.blocks[0].forward) == inspect.signature(Residual().forward)
        assert copy.deepcopy(model.blocks[0].forward).__self__ is not model.blocks[0]
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_forward_that_somebody_else_put_there_is_called_and_left_there() -> None:
    model = Chain(Residual())
    calls = mock.Mock()
    block = model.blocks[0]

    def patched(x: Tensor) -> Tensor:
        calls()
        return Residual.forward(block, x)  # type: ignore[arg-type]

    block.forward = patched
    with BlockEngine(model, ["blocks.0"], actions=lambda name, call: Action.RECOMPUTE):
        model(batch()).sum().backward()
    assert calls.call_count == 2
    assert vars(block)["forward"] is patched


def test_without_gradients_a_block_is_no_frame() -> None:
    model, engine = engine_of(sines, Action.RECOMPUTE)
    with torch.no_grad():
        model(batch())
    assert engine.calls == []
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        model(batch()).sum().backward()
    assert engine.calls == []


@pytest.mark.parametrize("action", LOSSLESS)
def test_a_graph_can_be_run_backward_after_close(action: Action, tmp_path: Path) -> None:
    model, engine = engine_of(sines, action, count=2, spill_directory=tmp_path)
    plain = gradients(model, model(batch()).square().sum())
    loss = model(batch()).square().sum()
    engine.close()
    engine.close()
    assert same(plain, gradients(model, loss))


def test_settings_of_the_forward_hold_in_the_second_run() -> None:
    seen = mock.Mock()

    def function(block: Functional, x: Tensor) -> Tensor:
        seen(torch.get_default_dtype(), torch.get_num_threads(), block.training, torch.is_grad_enabled())
        return sines(block, x)

    model, _ = engine_of(function, Action.RECOMPUTE)
    threads = torch.get_num_threads()
    loss = model(batch()).sum()
    model.eval()
    torch.set_default_dtype(torch.float64)
    try:
        torch.set_num_threads(threads + 1)
        loss.backward()
        assert (torch.get_default_dtype(), torch.get_num_threads()) == (torch.float64, threads + 1)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
    assert seen.call_args_list == [mock.call(torch.float32, threads, True, True)] * 2
    assert not model.blocks[0].training


def test_a_model_that_checkpoints_itself_is_refused() -> None:
    model = Chain(Residual())
    model.gradient_checkpointing = True  # type: ignore[assignment]
    with pytest.raises(ModelError, match="checkpoints its layers itself"):
        BlockEngine(model, ["blocks.0"])
