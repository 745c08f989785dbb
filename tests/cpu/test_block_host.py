"""Blocks offloaded to pinned host memory, on a device of CPU memory whose copies happen as late as they may."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spillway.engines.blocks.block_engine import BlockEngine
from spillway.errors import SpillFullError
from spillway.methods.actions import Action
from spillway.tiers.host import HostPool
from spillway.tiers.transfer import HostLanes, Store, Transfer
from tests.cpu.block_cases import Case
from tests.cpu.late_device import LateStreams
from tests.cpu.test_block_engine import FLOATS, batch, engine_of, gradients, same, sines
from tests.cpu.test_block_exactness import STEPS, Watched, difference, plainly, trained

MOVING = [Action.OFFLOAD, Action.RECOMPUTE_OFFLOADED, Action.SELECTIVE_OFFLOADED]


def late(engine: BlockEngine, *, lag: int = 3, host: int = 1 << 20, **rest: Any) -> LateStreams:
    """Let an engine's bytes wait in such a device's host memory."""
    streams = LateStreams(lag=lag)
    lanes = HostLanes(streams, HostPool(streams.pin, host, slab=1 << 16))
    engine._runtime._open_store = lambda: Store(lanes, **rest)
    return streams


def plain_gradients(model: nn.Module, engine: BlockEngine) -> list[Tensor]:
    """Of a step in which every block is kept."""
    actions, engine.actions = engine.actions, {}
    found = gradients(model, model(batch()).square().sum())
    engine.actions = actions
    return found


def on_a_late_device(action: Action, lag: int, devices: list[LateStreams]) -> Callable[[Case], Any]:
    @contextmanager
    def around(case: Case) -> Iterator[Watched]:
        chosen = lambda block, call: action  # noqa: E731
        with BlockEngine(case.model, case.blocks, actions=chosen, generators=case.generators) as engine:
            devices.append(late(engine, lag=lag))
            yield Watched()

    return around


@pytest.mark.long(but=6)
@pytest.mark.parametrize("lag", [3, 1 << 30])
@pytest.mark.parametrize("action", MOVING)
@pytest.mark.parametrize("name", ["dropout", "views", "nested-all", "retain-graph"])
def test_steps_end_as_plain_ones_do_however_late_copies_are(name: str, action: Action, lag: int) -> None:
    states, losses = trained(name, plainly)
    devices: list[LateStreams] = []
    found, others = trained(name, on_a_late_device(action, lag, devices))
    assert all(torch.equal(losses[step], others[step]) for step in range(STEPS))
    assert all(difference(states[step], found[step]) is None for step in range(STEPS))
    assert devices[0].copies_out > 0
    assert devices[0].pinned == 0, "all of it was given back"


def test_the_next_block_is_copied_in_while_this_one_runs() -> None:
    model, engine = engine_of(sines, Action.OFFLOAD, count=3)
    streams = late(engine, lag=1 << 30)
    hidden, seen = model.embed(batch()), []
    for block in model.blocks:
        hidden.register_hook(lambda _: seen.append((streams.copies_in, len(streams.back))))
        hidden = block(hidden)
    loss = hidden.square().sum()
    engine.settle()
    loss.backward()
    # The backward has left block 2, 1, 0: of each three storages came in; those of the next were begun, and not made.
    assert seen == [(6, 3), (9, 3), (9, 0)]


def test_a_source_stays_until_its_copy_is_done_and_is_used_as_long() -> None:
    model, engine = engine_of(sines, Action.OFFLOAD)
    streams = late(engine, lag=1 << 30)
    plain = plain_gradients(model, engine)
    loss = model(batch()).square().sum()
    assert engine.leaving_bytes == 3 * FLOATS
    assert same(plain, gradients(model, loss))
    assert (streams.copies_out, streams.copies_in, streams.waits) == (3, 0, 0)


def test_the_compute_stream_waits_for_copies_out_before_their_sources_go() -> None:
    model, engine = engine_of(sines, Action.OFFLOAD, count=2)
    streams = late(engine, lag=1 << 30)
    hidden = model.blocks[0](model.embed(batch()))
    assert streams.waits == 0
    loss = model.blocks[1](hidden).sum()
    assert streams.waits == 3, "before the second block's bytes left, those of the first were out"
    assert engine.leaving_bytes == 3 * FLOATS
    loss.backward()


def test_host_memory_that_nobody_needs_any_more_is_used_again() -> None:
    model, engine = engine_of(sines, Action.OFFLOAD)
    streams = late(engine, lag=1 << 30, host=1 << 15)
    for _ in range(4):
        model(batch())  # a graph that nobody runs backward
    assert streams.pinned == 1 << 15
    assert streams.copies_out == 12


def test_a_full_host_budget_is_said_and_what_was_to_leave_is_still_there() -> None:
    model, engine = engine_of(sines, Action.OFFLOAD, count=2)
    late(engine, host=1 << 15)
    hidden = model.blocks[0](model.embed(batch()))
    with pytest.raises(SpillFullError, match="host_budget="):
        model.blocks[1](model.blocks[1](hidden))
    hidden.sum().backward()


def test_a_device_without_memory_to_spare_reads_nothing_ahead() -> None:
    model, engine = engine_of(sines, Action.OFFLOAD, count=2)
    streams = late(engine)
    plain = plain_gradients(model, engine)
    loss = model(batch()).square().sum()
    engine.settle()
    frame: Any = engine._calls["blocks.0", 0]()
    streams.full = 1
    frame.start_in(None)
    assert [source.ahead for source in frame.waiting()] == [False, True, True]
    assert same(plain, gradients(model, loss))


def test_what_is_read_ahead_and_not_wanted_is_kept_until_its_copy_is_done() -> None:
    model, engine = engine_of(sines, Action.OFFLOAD, count=2)
    streams = late(engine, lag=1 << 30)
    hidden = model.blocks[0](model.embed(batch()))
    loss = model.blocks[1](hidden).sum()
    engine.settle()
    torch.autograd.grad(loss, hidden)
    del hidden, loss
    assert len(streams.back) == 3
    streams.synchronize()  # a copy whose target is gone raises
    engine.close()
    assert streams.pinned == 0


def test_closing_brings_everything_back_and_unpins_it() -> None:
    model, engine = engine_of(sines, Action.OFFLOAD, count=2)
    streams = late(engine, lag=1 << 30)
    plain = plain_gradients(model, engine)
    loss = model(batch()).square().sum()
    engine.close()
    assert streams.copies_out == 6
    assert streams.pinned == 0
    assert same(plain, gradients(model, loss))


def test_tensors_elsewhere_stay_where_they_are() -> None:
    streams = LateStreams()
    streams.device = torch.device("cuda", 0)
    assert not HostLanes(streams, HostPool(streams.pin, 1 << 20)).takes(torch.zeros(8))


def test_a_copy_in_begins_after_the_copy_out_that_fills_its_block() -> None:
    streams = LateStreams(lag=1 << 30)
    lanes = HostLanes(streams, HostPool(streams.pin, 1 << 20))
    tensor = torch.arange(4096, dtype=torch.uint8)
    transfer = Transfer(tensor.untyped_storage())
    lanes.start_out(transfer)
    found = lanes.finish_in(transfer, lanes.start_in(transfer))
    assert found.tolist() == tensor.tolist()
