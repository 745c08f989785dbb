"""The lanes of a CUDA device, by its own clock: when it copied, what it waited for, and what that tells a policy.

The late device is given ops of hours first: it is behind the host then, and takes as long as it says.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from spillway.engines.tensors.calls import Call
from spillway.ir import Lane, Work
from spillway.methods import LRU, Copy, Drop, Fetch, Move
from spillway.session import Session
from spillway.tiers import cuda_streams
from spillway.tiers.cuda_streams import CudaStreams
from tests.cpu.late_device import COPYING, LateStreams, late_session
from tests.cpu.pressure import PLENTY, put_away
from tests.cpu.test_cuda_machine import ITEMS, NBYTES, begin
from tests.cpu.test_lanes import of, recorded

BEHIND = 10_000.0
"""Seconds of ops that the device has to do before all else, by its own clock. The host never takes that long."""


def close_to(seconds: float) -> Any:
    return pytest.approx(seconds, abs=1e-6)


@pytest.fixture
def late() -> LateStreams:
    return LateStreams(lag=1 << 30)


@pytest.fixture
def memory(late: LateStreams) -> Iterator[Session]:
    """A session on the late device, between steps."""
    with late_session(nn.Linear(2, 2), budget=PLENTY, method=LRU(), streams=late, timeline=True) as session:
        yield session


def test_a_copy_that_ran_beside_ops_is_hidden_and_one_that_they_waited_for_is_not(
    memory: Session, late: LateStreams
) -> None:
    with memory.step():
        late.compute(BEHIND)
        free, waited = torch.arange(ITEMS), torch.arange(ITEMS) * 2
        assert begin(memory, free, Copy)
        late.compute(5 * COPYING)
        assert begin(memory, waited, Copy)
        assert put_away(memory, waited, Move)
        assert put_away(memory, free, Move)
    timeline, report = recorded(memory)
    first, second = of(timeline, Lane.COPY_OUT)
    assert (first.stalled, second.stalled) == (0.0, close_to(COPYING))
    assert report.transfer_seconds == close_to(2 * COPYING)
    assert (report.stall_seconds, report.hidden_seconds) == (close_to(COPYING), close_to(COPYING))


def test_of_two_copies_at_a_time_that_ops_wait_for_neither_is_hidden(memory: Session, late: LateStreams) -> None:
    with memory.step():
        late.compute(BEHIND)
        leaving, coming = torch.arange(ITEMS), torch.arange(ITEMS) * 2
        assert put_away(memory, coming, Move)
        assert begin(memory, leaving, Copy)
        assert begin(memory, coming, Fetch)
        assert put_away(memory, leaving, Move)
        assert int(coming[1]) == 2
    report = memory.history[-1]
    assert (report.transfer_seconds, report.stall_seconds) == (close_to(3 * COPYING), close_to(2 * COPYING))
    assert report.hidden_seconds == 0.0


def test_a_recorded_step_has_the_lanes_of_the_device(memory: Session, late: LateStreams) -> None:
    with memory.step():
        late.compute(BEHIND)
        tensor = torch.arange(ITEMS)
        number = memory._engine.table[torch._C._storage_address(tensor)].number
        assert begin(memory, tensor, Copy)
        late.compute(3 * COPYING)
        assert put_away(memory, tensor, Move)
        doubled = tensor * 2
    timeline, report = recorded(memory)
    (out,), (back,) = of(timeline, Lane.COPY_OUT), of(timeline, Lane.COPY_IN)
    assert [(copy.storage, copy.nbytes) for copy in (out, back)] == [(number, NBYTES)] * 2
    assert [copy.seconds for copy in (out, back)] == [close_to(COPYING)] * 2
    assert (out.stalled, back.stalled) == (0.0, close_to(COPYING))
    assert back.began == close_to(out.began + 3 * COPYING)
    assert out.began >= BEHIND, "when the device began, and not when it was told"
    (stall,) = (span for span in of(timeline, Lane.COMPUTE, Work.STALL) if span.seconds > 0)
    assert (stall.storage, stall.seconds) == (number, close_to(COPYING))
    (product,) = (span for span in of(timeline, Lane.COMPUTE, Work.OP) if span.name == "aten::mul")
    assert product.began <= stall.began < stall.ended <= product.ended
    assert of(timeline, Lane.DISK) == []
    assert timeline.transfers().seconds == close_to(report.transfer_seconds)
    assert timeline.transfers().hidden_seconds == close_to(report.hidden_seconds)
    assert len(doubled) == ITEMS


def test_what_was_copied_between_steps_belongs_to_none(memory: Session) -> None:
    with memory.step():
        tensor = torch.arange(ITEMS)
        assert put_away(memory, tensor, Move)
    assert memory.history[-1].transfer_seconds > 0.99 * COPYING  # clocks round
    assert int(tensor.numpy()[-1]) == ITEMS - 1
    with memory.step():
        pass
    assert memory.history[-1].transfer_seconds == 0.0


def test_ops_that_run_again_take_what_they_take_on_the_device(
    memory: Session, late: LateStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = Call.again

    def slow(self: Call, storages: Any) -> Any:
        late.compute(4e-3)
        return again(self, storages)

    monkeypatch.setattr(Call, "again", slow)
    with memory.step():
        late.compute(BEHIND)
        source = torch.arange(ITEMS)
        tensor = source * 2
        assert put_away(memory, tensor, Drop)
        assert int(tensor[1]) == 2
    timeline, report = recorded(memory)
    (replay,) = of(timeline, Lane.COMPUTE, Work.RECOMPUTE)
    assert (replay.name, replay.nbytes, replay.seconds) == ("aten::mul", NBYTES, close_to(4e-3))
    assert (report.recomputed_ops, report.recomputed_seconds) == (1, close_to(4e-3))


# ---------------------------------------------------------------------- what a policy hears


def step(memory: Session, late: LateStreams, *, beside: float) -> float:
    """One storage leaves, with so many seconds of ops while it is copied; the share that is exposed then."""
    with memory.step():
        late.compute(BEHIND)
        tensor = torch.arange(ITEMS)
        assert begin(memory, tensor, Copy)
        late.compute(beside)
        assert put_away(memory, tensor, Move)
    return memory._engine.controller.view.exposed


def test_a_policy_hears_what_ops_waited_for_on_the_device(memory: Session, late: LateStreams) -> None:
    assert memory._engine.controller.view.exposed == 1.0, "nothing was copied"
    assert step(memory, late, beside=0.0) == close_to(1.0), "the host took no time for it"
    assert step(memory, late, beside=COPYING) == close_to(1 / 3), "the step before counts half"
    assert step(memory, late, beside=COPYING / 2) == close_to(3 / 7)


def test_a_step_in_which_the_host_waits_around_every_op_says_nothing_of_others(late: LateStreams) -> None:
    with late_session(nn.Linear(2, 2), budget=PLENTY, method=LRU(), streams=late, costs=True) as memory:
        assert step(memory, late, beside=COPYING) == close_to(1.0)
        assert memory.history[-1].hidden_seconds == close_to(COPYING)
        assert step(memory, late, beside=COPYING) == 0.0


# ---------------------------------------------------------------------- events of CUDA


class Stream:
    """Stands in for one of CUDA, with a clock that the test turns."""

    now = 100.0

    def wait_event(self, event: Tick) -> None:
        self.now = max(self.now, event.at)


class Tick:
    """Stands in for an event of CUDA: events know nothing but how far apart they are."""

    def __init__(self, at: float = 0.0) -> None:
        self.at = at

    def record(self, stream: Stream) -> None:
        self.at = stream.now

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Tick) -> float:
        return (other.at - self.at) * 1e3


def test_distances_of_events_become_times_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, copy = Stream(), Tick(at=100.5)
    cuda = SimpleNamespace(Event=lambda *, enable_timing: Tick(), current_stream=lambda device: stream)
    monkeypatch.setattr(cuda_streams, "_cuda", cuda)
    streams: Any = CudaStreams.__new__(CudaStreams)
    streams.device, streams._stream = torch.device("cuda", 0), lambda: stream
    streams._times, streams._last = {"out": [], "in": [], "stall": []}, None
    streams.compute_waits(copy)
    moment = streams.moment()
    stream.now = 103.0
    before = time.perf_counter()
    (stall,) = streams.lane_times().stall
    after = time.perf_counter()
    assert stall.event is copy
    assert (stall.ended, stall.seconds) == (close_to(streams.when(moment)), close_to(0.5))
    assert before - 2.5 - 1e-6 <= streams.when(moment) <= after - 2.5 + 1e-6
    assert streams.lane_times().stall == [], "they are told once"
