"""Ops of a step on several streams of a CUDA device: whatever moves, nothing overtakes what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from spillway.engines.tensors.calls import Call
from spillway.memory.budget import UNLIMITED
from spillway.methods import LRU, Drop, Fetch, Move
from spillway.session import Session
from spillway.tiers import cuda_streams
from spillway.tiers.cuda_streams import CudaStreams
from tests.cpu.late_device import LateStreams, OutOfOrderError, driver_of, late_session, late_step
from tests.cpu.pressure import PLENTY, put_away
from tests.cpu.test_cuda_machine import ITEMS, begin


@pytest.fixture(params=[True, False], ids=["exchanged", "resized"])
def memory(request: pytest.FixtureRequest) -> Iterator[Session]:
    with late_step(request.param) as session:
        yield session


def test_a_copy_out_waits_for_the_stream_that_its_source_was_made_on(memory: Session) -> None:
    with driver_of(memory).on("another"):
        made = torch.arange(ITEMS)
    assert put_away(memory, made, Move)
    assert begin(memory, made, Fetch)
    assert torch.equal(made, torch.arange(ITEMS))


def test_a_copy_out_that_does_not_wait_for_it_is_found_out(memory: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateStreams, "follow", lambda self: None)
    memory._engine._dispatch.start_anew()
    memory._engine.infos.clear()
    with driver_of(memory).on("another"):
        made = torch.arange(ITEMS)
    with pytest.raises(OutOfOrderError, match="another stream"):
        put_away(memory, made, Move)


def test_memory_that_is_freed_is_used_by_no_stream_before_what_still_reads_it(memory: Session) -> None:
    late = driver_of(memory)
    with late.on("another"):
        made = torch.arange(ITEMS)
    assert put_away(memory, made, Move)
    with late.on("another"):
        assert late.missed()
        torch.ones(ITEMS)
        assert not late.missed()


def test_a_replay_waits_for_the_stream_of_its_inputs(memory: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    late, missed = driver_of(memory), []
    tensor, expected = torch.arange(ITEMS) + 1, torch.arange(1, ITEMS + 1)
    assert put_away(memory, tensor, Drop)
    again = Call.again
    monkeypatch.setattr(Call, "again", lambda self, storages: (missed.append(late.missed()), again(self, storages))[1])
    with late.on("another"):
        assert torch.equal(tensor, expected)
    assert missed
    assert not any(missed)


class Launching(torch.autograd.Function):
    """A kernel that nobody sees."""

    late: Any
    missed: ClassVar[list[frozenset[str]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Launching.missed.append(Launching.late.missed())
        Launching.late.kernel()
        return x * 2


def test_a_custom_function_comes_after_what_other_streams_were_given(memory: Session) -> None:
    Launching.late, Launching.missed = driver_of(memory), []
    tensor = torch.arange(ITEMS)
    with Launching.late.on("another"):
        Launching.apply(tensor)
    assert Launching.missed == [frozenset()]
    assert put_away(memory, tensor, Move), "and what moves afterwards, after its kernel"


def test_a_step_begins_when_everything_that_was_given_between_steps_is_done() -> None:
    late = LateStreams()
    with late_session(nn.Linear(2, 2), budget=PLENTY, method=LRU(), streams=late) as memory:
        with late.on("another"):
            pass
        assert late.missed()
        with memory.step():
            assert not late.missed()


def test_where_nothing_leaves_streams_are_left_alone() -> None:
    late = LateStreams()
    with late_session(nn.Linear(2, 2), budget=UNLIMITED, method=LRU(), streams=late) as memory, memory.step():
        late.kernel()
        with late.on("another"):
            torch.arange(ITEMS)
            assert late.missed()


class FakeStream:
    def __init__(self, cuda_stream: int) -> None:
        self.cuda_stream = cuda_stream
        self.waited: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited.append(other)


def test_a_stream_waits_once_for_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = FakeStream(0), FakeStream(7)
    current = [one]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(cuda_streams, "raw_stream", lambda index: current[0].cuda_stream)
    streams = object.__new__(CudaStreams)
    streams.device, streams._compute, streams._raw = torch.device("cuda", 0), None, None
    for stream in (one, one, other, other, one):
        current[0] = stream
        streams.follow()
    assert (one.waited, other.waited) == ([other], [one])
