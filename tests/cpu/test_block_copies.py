"""Copies of the block engine beside the ops: what is read ahead, what still leaves, and that nothing is left behind."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spillway.engines.blocks.block_engine import BlockEngine
from spillway.errors import RecomputeError, SpillCorruptedError, SpillError, SpillFullError
from spillway.methods.actions import Action
from spillway.tiers import disk
from spillway.tiers.spill_file import SpillFile
from spillway.tiers.transfer import DiskLanes, SpilledStorage, Transfer
from tests.cpu.block_cases import Chain, Functional
from tests.cpu.test_block_engine import FLOATS, batch, engine_of, gradients, same, saved_tensors, sines, used
from tests.shared import HANGS

MOVING = [Action.OFFLOAD, Action.RECOMPUTE_OFFLOADED]
SLOTS = {Action.OFFLOAD: 3, Action.RECOMPUTE_OFFLOADED: 1}
"""Storages of a block that leave, of one activation each."""


def ahead(engine: BlockEngine, call: int) -> list[int]:
    """For each block, bytes that were read before they were wanted, and not taken yet."""
    calls = [engine._calls[f"blocks.{number}", call]() for number in range(len(engine.blocks))]
    return [sum(source.nbytes for source in one.waiting() if source.ahead) if one else 0 for one in calls]


def looked_at(model: Chain, engine: BlockEngine, seen: list[list[int]]) -> Tensor:
    """A loss whose backward looks at what was read ahead whenever it has left a block."""
    hidden = model.embed(batch())
    call = engine._found[0].calls
    for block in model.blocks:
        hidden.register_hook(lambda _: seen.append(ahead(engine, call)))
        hidden = block(hidden)
    engine.settle()
    return hidden.square().sum()


@pytest.mark.parametrize("action", MOVING)
@pytest.mark.parametrize("blocks_ahead", [None, 0, 2])
def test_what_the_backward_wants_next_is_read_before_it_wants_it(
    action: Action, blocks_ahead: int | None, tmp_path: Path
) -> None:
    model, engine = engine_of(sines, action, count=4, spill_directory=tmp_path)
    plain = gradients(model, model(batch()).square().sum())
    block = SLOTS[action] * FLOATS
    engine.read_ahead = None if blocks_ahead is None else blocks_ahead * block
    seen: list[list[int]] = []
    assert same(plain, gradients(model, looked_at(model, engine, seen)))
    # The backward has left block 3, 2, 1, 0.
    if blocks_ahead is None:
        assert seen == [[0, 0, block, 0], [0, block, 0, 0], [block, 0, 0, 0], [0] * 4]
    elif blocks_ahead == 0:
        assert seen == [[0] * 4] * 4
    else:
        assert seen == [[0, block, block, 0], [block, block, 0, 0], [block, 0, 0, 0], [0] * 4]


def test_a_part_of_a_block_is_read_ahead_where_all_of_it_is_too_much(tmp_path: Path) -> None:
    model, engine = engine_of(sines, Action.OFFLOAD, count=2, spill_directory=tmp_path)
    engine.read_ahead = 2 * FLOATS
    seen: list[list[int]] = []
    looked_at(model, engine, seen).backward()
    assert seen == [[2 * FLOATS, 0], [0, 0]]


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[threading.Event]:
    """Workers stand still before they write or read, until the event is set."""
    gate = threading.Event()
    real = getattr(SpillFile, name)

    def wait(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(HANGS)
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(SpillFile, name, wait)
        try:
            yield gate
        finally:
            gate.set()


@pytest.mark.parametrize("action", MOVING)
def test_what_is_still_leaving_is_resident_and_used_where_it_is(
    action: Action, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine = engine_of(sines, action, count=2, spill_directory=tmp_path)
    engine.write_behind = 1 << 30
    plain = gradients(model, model(batch()).square().sum())
    engine.settle()  # a copy of that step may still be under way
    with held(monkeypatch, "write") as gate:
        loss = model(batch()).square().sum()
        assert engine.leaving_bytes == 2 * SLOTS[action] * FLOATS
        assert same(plain, gradients(model, loss))
        gate.set()
        engine.settle()
    assert engine.leaving_bytes == 0
    store: Any = engine._runtime.store
    assert [transfer for transfer in store._lanes.tier.log.transfers if transfer.lane == "copy-in"] == []
    assert used(engine) == []


def test_each_storage_is_freed_when_its_own_copy_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = engine_of(sines, Action.OFFLOAD, spill_directory=tmp_path)
    written = threading.Semaphore(0)
    turn = threading.Semaphore(0)
    real = SpillFile.write

    def one_by_one(*args: Any) -> None:
        turn.acquire()
        real(*args)

    monkeypatch.setattr(SpillFile, "write", one_by_one)
    loss = model(batch()).square().sum()
    frame: Any = engine._calls["blocks.0", 0]()
    for source in frame.waiting():
        source._transfer.slot.writing.add_done_callback(lambda _: written.release())
    for left in (3, 2, 1):
        assert engine.leaving_bytes == left * FLOATS
        turn.release()
        assert written.acquire(timeout=HANGS)
    assert engine.leaving_bytes == 0
    loss.backward()


@pytest.mark.parametrize("write_behind", [None, 0])
def test_no_more_than_was_allowed_is_leaving_when_a_block_has_ended(
    write_behind: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine = engine_of(sines, Action.OFFLOAD, count=2, spill_directory=tmp_path)
    engine.write_behind = write_behind
    hidden = model.embed(batch())
    with held(monkeypatch, "write") as gate:
        if write_behind == 0:
            gate.set()
        hidden = model.blocks[0](hidden)
        assert engine.leaving_bytes == (0 if write_behind == 0 else 3 * FLOATS)
        first: Any = engine._calls["blocks.0", 0]()
        gate.set()
        loss = model.blocks[1](hidden).sum()
        assert all(source.absent for source in first.waiting())
    loss.backward()


def test_where_the_workers_have_enough_to_do_bytes_leave_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine = engine_of(sines, Action.OFFLOAD, spill_directory=tmp_path)
    plain = gradients(model, model(batch()).square().sum())
    with held(monkeypatch, "write"):
        monkeypatch.setattr(disk, "MOST_JOBS", 2)
        loss = model(batch()).square().sum()
        assert engine.leaving_bytes == 2 * FLOATS, "the third was written by the thread that computes"
        assert same(plain, gradients(model, loss))
    engine.settle()
    assert used(engine) == []


def test_bytes_that_find_no_room_stay_and_the_next_block_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model, engine = engine_of(sines, Action.OFFLOAD, spill_directory=tmp_path)
    plain = gradients(model, model(batch()).square().sum())
    with monkeypatch.context() as patch:
        patch.setattr(SpillFile, "write", full)
        loss = model(batch()).square().sum()
        with pytest.raises(SpillFullError, match="has no room"):
            engine.settle()
        assert same(plain, gradients(model, loss))
        loss = model(batch()).square().sum()
        with pytest.raises(SpillFullError, match="has no room"):
            for _ in range(2):
                model(batch())
        assert same(plain, gradients(model, loss))
    engine.close()


def test_a_failed_read_is_told_when_the_bytes_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    model, engine = engine_of(sines, Action.OFFLOAD, count=2, spill_directory=tmp_path)
    loss = model(batch()).square().sum()
    engine.settle()
    with monkeypatch.context() as patch:
        patch.setattr(SpillFile, "read", broken)
        with pytest.raises(SpillError, match=r"Reading 5\.00 KiB back from the spill file failed"):
            loss.backward()


@pytest.mark.parametrize("action", MOVING)
@pytest.mark.parametrize("end", ["stops half-way", "fails half-way", "closes half-way", "never runs"])
def test_nothing_is_left_behind(action: Action, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = engine_of(sines, action, count=3, spill_directory=tmp_path)
    plain = gradients(model, model(batch()).square().sum())
    hidden = model.blocks[1](model.blocks[0](model.embed(batch())))
    middle, loss = hidden, model.blocks[2](hidden).square().sum()
    engine.settle()
    store: Any = engine._runtime.store
    with held(monkeypatch, "read") as gate:
        if end == "stops half-way":
            torch.autograd.grad(loss, middle, retain_graph=True)
            assert ahead(engine, 1) == [0, 0, 0], "what the backward did not come to is not held"
        elif end == "fails half-way":
            middle.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
        elif end == "closes half-way":
            middle.register_hook(lambda _: (gate.set(), engine.close())[0])
            assert same(plain, gradients(model, loss))
            assert store._lanes.tier.closed
        del hidden, middle, loss
        gate.set()
    engine.settle()
    assert end == "closes half-way" or used(engine) == []
    engine.close()
    assert list(tmp_path.iterdir()) == []


def tear(monkeypatch: pytest.MonkeyPatch, sources: list[SpilledStorage]) -> None:
    """Bytes of these were written while they were copied: who reads them finds a wrong checksum."""
    assert sources
    load = SpilledStorage.load

    def load_of_torn(source: SpilledStorage) -> torch.UntypedStorage:
        if source in sources:
            raise SpillCorruptedError("A slot of 128 bytes has a wrong checksum.")
        return load(source)

    monkeypatch.setattr(SpilledStorage, "load", load_of_torn)


@pytest.mark.parametrize("closes", [False, True])
def test_bytes_that_were_written_while_they_were_copied_are_not_read(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Tensor] = []

    def function(block: Functional, x: Tensor) -> Tensor:
        inner = block.one(x).exp()
        saved.append(inner)
        return block.two(inner).sin().tanh()  # what the sine saved comes back first, with all that the block sent

    model, engine = engine_of(function, Action.OFFLOAD)
    loss = model(batch()).sum()
    engine.settle()
    with torch.no_grad():
        saved[-1].mul_(2)
    tear(monkeypatch, [saved.spilled.source for saved in saved_tensors(engine) if saved.written and saved.spilled])
    if closes:
        engine.close()  # everything comes back
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    engine.close()  # the model holds its own graph here, and nobody collects that


def test_an_argument_that_was_written_while_it_was_copied_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = engine_of(sines, Action.RECOMPUTE_OFFLOADED, count=2)
    gradients(model, model(batch()).sum())  # from now on arguments are known not to be written to, and not copied
    hidden: list[Tensor] = []
    model.blocks[1].register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    loss = model(batch()).sum()
    engine.settle()
    with torch.no_grad():
        hidden[0].mul_(2)
    calls = [ref() for ref in engine._calls.values()]
    moved = [one for call in calls if call for one in call.arguments() if one.moved_on and not one.copied]
    tear(monkeypatch, [one.spilled.source for one in moved if one.spilled])
    engine.close()
    with pytest.raises(RecomputeError, match="was written to in place"):
        loss.backward()


def test_who_has_waited_for_a_copy_out_holds_its_source_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    written, late = DiskLanes._written, threading.Event()

    def written_late(lanes: DiskLanes, transfer: Transfer, writing: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            late.wait(timeout=1)  # as a worker does that gets no turn of the interpreter
        written(lanes, transfer, writing)

    monkeypatch.setattr(DiskLanes, "_written", written_late)
    model, engine = engine_of(sines, Action.OFFLOAD)
    loss = model(batch()).sum()
    engine.settle()
    sources = [saved.spilled.source for saved in saved_tensors(engine) if saved.spilled]
    assert [source._transfer.source for source in sources] == [None] * len(sources) != []
    late.set()
    loss.backward()
