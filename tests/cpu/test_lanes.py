"""Lanes of real steps: they add up to the step's figures, and cost nothing where nobody looks."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import spillway
from spillway.engines.tensors.mode import Dispatch
from spillway.ir import Change, Lane, Span, StepReport, Timeline, Work, read_run
from spillway.methods import LRU, AbstractPolicy, Copy, Drop, Fetch, Move
from spillway.session import Session
from tests.cpu.pressure import PLENTY, copying_beside, put_away
from tests.cpu.test_copies import ITEMS, Gate, begin

BUDGET = 9_000_000


def steps(method: AbstractPolicy, number: int = 3, **options: Any) -> Session:
    """A closed session that trained under pressure."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(1))
    with spillway.manage(model, optimizer, budget=BUDGET, method=method, **options) as memory:
        for _ in range(number):
            with memory.step(x):
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return memory


def recorded(memory: Session) -> tuple[Timeline, StepReport]:
    assert memory.timeline is not None
    return memory.timeline, memory.history[memory.timeline.step]


def of(timeline: Timeline, lane: Lane, work: Work = Work.COPY) -> list[Span]:
    return [span for span in timeline.spans if (span.lane, span.work) == (lane, work)]


@pytest.mark.parametrize("method", [copying_beside, lambda: LRU(short_chain=32), lambda: LRU(short_chain=0)])
def test_lanes_add_up_to_the_figures_of_their_step(method: Any) -> None:
    timeline, report = recorded(steps(method(), report=spillway.ReportOptions(timeline=True)))
    ops = of(timeline, Lane.COMPUTE, Work.OP)
    assert sorted(span.op for span in ops) == list(range(report.ops)), "every op once"
    assert len(of(timeline, Lane.COMPUTE, Work.RECOMPUTE)) == report.recomputed_ops
    # A copy that is given up before a worker takes it was begun and never made; one in that is given up was made.
    begun_and_given_up = report.bytes_out - sum(span.nbytes for span in of(timeline, Lane.COPY_OUT))
    assert 0 <= begun_and_given_up <= report.bytes_out_beside
    assert len(of(timeline, Lane.COPY_OUT)) > 0
    assert sum(span.nbytes for span in of(timeline, Lane.COPY_IN)) >= report.bytes_in > 0
    assert len(of(timeline, Lane.DISK)) == len(of(timeline, Lane.COPY_OUT)) + len(of(timeline, Lane.COPY_IN))
    assert timeline.transfers().seconds == pytest.approx(report.transfer_seconds, abs=1e-6)
    assert timeline.transfers().hidden_seconds == pytest.approx(report.hidden_seconds, abs=1e-6)
    stalled = sum(span.seconds for span in of(timeline, Lane.COMPUTE, Work.STALL))
    assert stalled == pytest.approx(report.stall_seconds, abs=1e-6), "no stall counts twice"
    assert timeline.seconds() <= report.seconds


def test_stalls_and_recomputing_lie_within_the_op_that_they_are_for_or_between_ops() -> None:
    timeline, _ = recorded(steps(LRU(short_chain=32), report=spillway.ReportOptions(timeline=True)))
    ops = of(timeline, Lane.COMPUTE, Work.OP)
    others = [*of(timeline, Lane.COMPUTE, Work.STALL), *of(timeline, Lane.COMPUTE, Work.RECOMPUTE)]
    assert others
    inside = 0
    for span in others:
        touched = [op for op in ops if op.began < span.ended and span.began < op.ended]
        assert all(op.began <= span.began and span.ended <= op.ended and op.op == span.op for op in touched)
        inside += len(touched)
    assert inside > 0


def test_what_a_copy_moved_is_what_its_event_says() -> None:
    timeline, _ = recorded(steps(LRU(short_chain=0), report=spillway.ReportOptions(timeline=True)))
    left = Counter(event.storage for event in timeline.events if event.change is Change.PAGE_IN)
    back = Counter(span.storage for span in of(timeline, Lane.COPY_IN))
    assert back == left
    sizes = {line.storage: line.nbytes for line in timeline.storages}
    assert all(span.nbytes == sizes[span.storage] for span in of(timeline, Lane.COPY_OUT) if span.storage is not None)


def test_when_compute_waits_for_every_copy_none_is_hidden() -> None:
    for report in steps(LRU(short_chain=0)).history:
        assert report.transfer_seconds > 0
        assert (report.hidden_seconds, report.bytes_out_beside, report.bytes_in_beside) == (0.0, 0, 0)
        assert report.stall_seconds >= report.transfer_seconds


def test_copies_beside_the_ops_are_counted_and_some_of_their_time_is_hidden() -> None:
    reports = steps(copying_beside()).history
    assert all(0 <= report.hidden_seconds <= report.transfer_seconds for report in reports)
    assert sum(report.hidden_seconds for report in reports) > 0
    assert 0 < reports[-1].bytes_out_beside <= reports[-1].bytes_out
    assert 0 < reports[-1].bytes_in_beside <= reports[-1].bytes_in


def test_a_copy_that_ran_while_ops_did_is_hidden_and_one_that_an_op_waited_for_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with spillway.manage(
        nn.Linear(2, 2), budget=PLENTY, method=copying_beside(), report=spillway.ReportOptions(timeline=True)
    ) as memory:
        with memory.step():
            free, waited = torch.arange(ITEMS), torch.arange(ITEMS) * 2
            assert begin(memory, free, Copy)
            memory._engine.await_copies()  # what a long op would do
            gate = Gate(monkeypatch, "_fill")
            assert begin(memory, waited, Copy)
            with gate.opened_when_waited_for():
                assert put_away(memory, waited, Move)
        timeline, report = recorded(memory)
    first, second = of(timeline, Lane.COPY_OUT)
    assert first.stalled == 0
    assert second.stalled > 0.9 * second.seconds
    assert report.hidden_seconds == pytest.approx(first.seconds + second.seconds - second.stalled, abs=1e-6)


@pytest.mark.parametrize("way", ["drop", "write"])
def test_a_wait_that_the_controller_does_not_see_is_a_stall_too(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    with spillway.manage(nn.Linear(2, 2), budget=PLENTY, method=copying_beside()) as memory:
        with memory.step():
            gate = Gate(monkeypatch, "_fill")
            tensor = torch.arange(ITEMS) * 3
            assert begin(memory, tensor, Copy)
            with gate.opened_when_waited_for():
                if way == "drop":
                    assert put_away(memory, tensor, Drop)
                else:
                    tensor += 1
                    memory._engine.controller.collect_dead()
        assert memory.history[-1].stall_seconds > 0


def test_a_fetch_that_an_op_waits_for_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    with spillway.manage(
        nn.Linear(2, 2), budget=PLENTY, method=copying_beside(), report=spillway.ReportOptions(timeline=True)
    ) as memory:
        with memory.step():
            tensor = torch.arange(ITEMS)
            put_away(memory, tensor, Move)
            gate = Gate(monkeypatch, "_read_file")
            assert begin(memory, tensor, Fetch)
            with gate.opened_when_waited_for():
                tensor + 1
        timeline, report = recorded(memory)
    (back,) = of(timeline, Lane.COPY_IN)
    assert 0 < back.stalled <= back.seconds
    assert report.bytes_in_beside == report.bytes_in == 8 * ITEMS


def test_where_no_timeline_is_kept_handlers_stand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    around: list[bool] = []
    pop = Dispatch.pop

    def noting(dispatch: Dispatch) -> None:
        around.extend(handler is not dispatch._known[key].handler for key, handler in dispatch._handlers.items())
        pop(dispatch)

    monkeypatch.setattr(Dispatch, "pop", noting)
    memory = steps(LRU(short_chain=0))
    assert memory.timeline is None
    assert len(around) > 10
    assert not any(around)
    around.clear()
    steps(LRU(short_chain=0), report=spillway.ReportOptions(timeline=True))
    assert any(around), "this test would notice"


def test_after_a_recorded_step_nothing_is_left_of_it() -> None:
    with spillway.manage(
        nn.Linear(64, 64), budget=PLENTY, method="lru", report=spillway.ReportOptions(timeline=True)
    ) as memory:
        with memory.step():
            torch.ones(ITEMS) + 1
        dispatch = memory._engine._dispatch
        assert dispatch._handlers == {}
        assert (dispatch._around, memory._engine.history, memory._engine.controller.events) == (None, None, None)


def test_a_run_file_has_the_lanes_of_the_step_under_most_pressure(tmp_path: Any) -> None:
    memory = steps(copying_beside(), report=spillway.ReportOptions(timeline=True, run_file=tmp_path / "run.jsonl"))
    run = read_run(tmp_path / "run.jsonl")
    assert run.timelines == [memory.timeline]
    assert run.steps == memory.history


def test_two_sessions_in_two_threads_keep_lanes_of_their_own() -> None:
    found: dict[str, Session] = {}

    def train(name: str) -> None:
        found[name] = steps(copying_beside(), report=spillway.ReportOptions(timeline=True))

    threads = [threading.Thread(target=train, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for memory in found.values():
        timeline, report = recorded(memory)
        assert timeline.transfers().seconds == pytest.approx(report.transfer_seconds, abs=1e-6)
        assert {span.storage for span in of(timeline, Lane.COPY_IN)} <= {line.storage for line in timeline.storages}
