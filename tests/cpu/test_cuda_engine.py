"""The CUDA engine on the late device: what is set aside, what runs again, what is reported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import spillway
from spillway.engines.tensors.cuda_machine import LIKELY_BANDWIDTH, Resized
from spillway.engines.tensors.devices import pinned_bytes
from spillway.errors import BudgetError, BudgetInfeasible, DeviceFullError
from spillway.memory.budget import UNLIMITED
from spillway.methods import LRU, Delta, Drop, Move
from spillway.session import Session
from tests.cpu.late_device import COPYING, LateStreams, driver_of, late_session, late_step
from tests.cpu.pressure import PLENTY, is_dropped, is_moved, put_away
from tests.cpu.test_cuda_machine import ITEMS, NBYTES


@pytest.fixture(params=[True, False], ids=["exchanged", "resized"])
def exchanges(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def memory(exchanges: bool) -> Iterator[Session]:
    with late_step(exchanges) as session:
        yield session


# ---------------------------------------------------------------------- what is set aside


def test_what_others_have_of_the_device_is_set_aside_in_the_budget() -> None:
    late = LateStreams()
    late.beside = 5 * NBYTES
    with late_session(nn.Linear(2, 2), budget=12 * NBYTES, method=LRU(), streams=late) as memory:
        with memory.step():
            kept = [torch.arange(ITEMS) for _ in range(10)]
        report = memory.history[-1]
        assert report.reserved_bytes == 5 * NBYTES + 12 * NBYTES // 100
        assert report.peak_bytes + report.reserved_bytes <= memory.allowed == report.allowed == 12 * NBYTES
        assert report.moves + report.drops > 0
    assert len(kept) == 10


def test_what_grows_beside_the_account_within_a_step_is_seen() -> None:
    late = LateStreams()
    with late_session(nn.Linear(2, 2), budget=200 << 20, method=LRU(), streams=late) as memory, memory.step():
        roomy = memory._engine.controller.budget.allowed
        late.beside = 50 << 20
        kept = [torch.arange(ITEMS) for _ in range(40)]
        assert memory._engine.controller.budget.allowed == roomy - (50 << 20)
    assert kept


def test_a_refusal_speaks_of_the_whole_budget() -> None:
    late = LateStreams()
    late.beside = 5 * NBYTES
    with late_session(nn.Linear(2, 2), budget=7 * NBYTES, method=LRU(), streams=late) as memory:
        with pytest.raises(BudgetInfeasible) as refusal, memory.step():
            torch.arange(ITEMS).expand(2, -1).clone()
        assert refusal.value.allowed == 7 * NBYTES
        told = refusal.value.smallest_budget
    assert told > 8 * NBYTES
    with late_session(nn.Linear(2, 2), budget=told, method=LRU(), streams=late) as memory, memory.step():
        torch.arange(ITEMS).expand(2, -1).clone()


def test_a_peak_above_the_budget_is_reported_and_more_is_set_aside_afterwards() -> None:
    late = LateStreams()
    with late_session(nn.Linear(2, 2), budget=12 * NBYTES, method=LRU(), streams=late) as memory:
        for excess in (4 * NBYTES, 0):
            with memory.step():
                kept = [torch.arange(ITEMS) for _ in range(10)]
                late._peak = 12 * NBYTES + excess
                del kept
        first, second = memory.history
        assert first.device_peak_bytes == 16 * NBYTES > first.allowed
        assert second.reserved_bytes == first.reserved_bytes + 4 * NBYTES


def test_the_nearer_the_budget_the_more_often_it_is_looked_at() -> None:
    late, budget = LateStreams(), 20 << 20
    with late_session(nn.Linear(2, 2), budget=budget, method=LRU(), streams=late) as memory, memory.step():
        kept = [torch.arange(ITEMS) for _ in range(34)]
        late.beside = 1 << 20
        kept += [torch.arange(ITEMS) for _ in range(8)]
        assert memory._engine.controller.budget.allowed == budget - budget // 100 - (1 << 20)
    assert kept


@pytest.mark.parametrize("escaped", [False, True])
def test_room_is_made_for_what_a_hungry_op_may_need_the_first_time_and_nothing_is_refused_for_it(escaped: bool) -> None:
    picture, layer, made = torch.ones(1, 8, 64, 64), nn.Conv2d(8, 8, 3, padding=1), 8 * 64 * 64 * 4
    with late_session(layer, budget=PLENTY, method=LRU()) as memory, memory.step():
        others, controller = [torch.randperm(4096) for _ in range(16)], memory._engine.controller
        held = [other.numpy() for other in others if escaped]
        budget = controller.budget
        with budget.as_if(budget.resident + 2 * made + 4096):
            layer(picture)
            assert budget.resident <= budget.allowed - (0 if escaped else 2 * made)
        assert any(is_moved(memory, other) or is_dropped(memory, other) for other in others) != escaped
    assert len(held) == 16 * escaped


def test_what_an_op_needs_for_itself_is_measured_and_room_is_made_for_it_the_next_time() -> None:
    late = LateStreams()
    picture, layer = torch.ones(1, 8, 64, 64), nn.Conv2d(8, 8, 3, padding=1)
    made = 8 * 64 * 64 * 4
    with late_session(layer, budget=PLENTY, method=LRU(), streams=late) as memory, memory.step():
        late.inside = 3 * made
        for _ in range(3):
            layer(picture)
        late.inside = 0
        known = memory._engine.backend.workspaces
        assert known is not None
        assert [looks for looks in known._known.values() if looks == [3 * made, 3 * made]]
        budget = memory._engine.budget
        with budget.as_if(budget.resident + 2 * made), pytest.raises(BudgetInfeasible):
            layer(picture)


# ---------------------------------------------------------------------- no memory all the same


class Failing:
    """Stands in the way of an op: so many calls find no memory."""

    def __init__(self, memory: Session, monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> None:
        self.left = times
        backend: Any = memory._engine.backend
        guarded, self.calls = backend.retry.guarded, 0

        def failing(info: Any, call: Any) -> Any:
            if info.name != name:
                return guarded(info, call)

            def run(*args: Any, **kwargs: Any) -> Any:
                self.calls += 1
                self.left -= 1
                if self.left >= 0:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. And so on.")
                return call(*args, **kwargs)

            return guarded(info, run)

        monkeypatch.setattr(backend.retry, "guarded", failing)


@pytest.mark.parametrize("times", [1, 2, 4])
def test_an_op_that_finds_no_memory_runs_again_after_room_was_made(
    memory: Session, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    other, tensor = torch.randperm(ITEMS), torch.arange(ITEMS)
    failing = Failing(memory, monkeypatch, "aten::mul", times)
    assert int((tensor * 2)[-1]) == 2 * ITEMS - 2
    assert failing.calls == times + 1
    assert driver_of(memory).caches_emptied == times
    assert is_moved(memory, other) or is_dropped(memory, other) or times == 1
    backend: Any = memory._engine.backend
    assert backend.retry.count == 1
    assert [storage.locks for storage in memory._engine.table.values() if storage.locks] == []


def test_an_op_that_finds_no_memory_in_the_end_says_so(memory: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(ITEMS)
    Failing(memory, monkeypatch, "aten::mul", 99)
    told = r"aten::mul found no memory on cpu .*lower budget=.*torch said: CUDA out of memory\."
    with pytest.raises(DeviceFullError, match=told):
        tensor * 2
    assert torch.equal(tensor, torch.arange(ITEMS))
    assert [storage.locks for storage in memory._engine.table.values() if storage.locks] == []


def test_random_numbers_are_drawn_once_when_their_op_runs_twice(
    memory: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.empty(ITEMS)
    state = torch.get_rng_state()
    expected = tensor.clone().bernoulli_(0.5)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    backend: Any = memory._engine.backend
    guarded = backend.retry.guarded

    def drawing_first(info: Any, call: Any) -> Any:
        left = [1]

        def run(*args: Any, **kwargs: Any) -> Any:
            out = call(*args, **kwargs)
            if info.name == "aten::bernoulli_" and left:
                left.pop()
                raise torch.OutOfMemoryError("CUDA out of memory. After it drew.")
            return out

        return guarded(info, run)

    monkeypatch.setattr(backend.retry, "guarded", drawing_first)
    memory._engine._dispatch.start_anew()
    memory._engine.infos.clear()
    assert torch.equal(tensor.bernoulli_(0.5), expected)
    assert torch.equal(torch.get_rng_state(), after)


def test_ops_that_may_have_written_some_of_several_tensors_are_not_run_again(
    memory: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [torch.zeros(ITEMS), torch.zeros(ITEMS)]
    Failing(memory, monkeypatch, "aten::_foreach_add_", 1)
    with pytest.raises(torch.OutOfMemoryError):
        torch._foreach_add_(tensors, 1.0)


def test_bringing_a_storage_back_makes_room_too(memory: Session, exchanges: bool) -> None:
    if not exchanges:
        pytest.skip("the storage itself is resized there")
    other, tensor = torch.randperm(ITEMS), torch.arange(ITEMS)
    assert put_away(memory, tensor, Move)
    driver_of(memory).full = 2
    assert int((tensor * 2)[-1]) == 2 * ITEMS - 2
    assert is_moved(memory, other) or is_dropped(memory, other)


@pytest.mark.parametrize("times", [2, 4, 99])
def test_a_replay_that_finds_no_memory_for_what_it_brings_back_makes_room_and_leaves_the_account_right(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with late_session(nn.Linear(2, 2), budget=PLENTY, method=LRU(), exchanges=False) as memory, memory.step():
        other, source = torch.randperm(ITEMS), torch.arange(ITEMS)
        tensor, engine = source * 2, memory._engine
        assert put_away(memory, tensor, Drop)
        transfer, left = Resized.transfer, [times]

        def failing(self: Resized, real: torch.UntypedStorage, temporary: torch.UntypedStorage) -> None:
            left[0] -= 1
            if left[0] >= 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. And so on.")
            transfer(self, real, temporary)

        monkeypatch.setattr(Resized, "transfer", failing)
        if times == 99:
            with pytest.raises(DeviceFullError, match="bringing a storage back found no memory"):
                tensor + 1
            assert is_dropped(memory, tensor)
            monkeypatch.undo()
        assert int((tensor + 1)[-1]) == 2 * ITEMS - 1
        assert is_moved(memory, other) or is_dropped(memory, other)
        engine.controller.collect_dead()
        present = [s.nbytes for s in engine.table.values() if s.value is not None and not s.value.absent]
        assert engine.controller.budget.resident == sum(present)
        assert [storage.locks for storage in engine.table.values() if storage.locks] == []


# ---------------------------------------------------------------------- figures


@pytest.mark.parametrize(
    ("budget", "method", "copies"), [(UNLIMITED, LRU(), 0), (PLENTY, LRU(short_chain=0), 0), (PLENTY, LRU(), 4)]
)
def test_the_link_is_measured_for_who_weighs_copies_under_a_limit_and_nothing_stays_pinned(
    budget: int, method: LRU, copies: int
) -> None:
    late = LateStreams()
    with late_session(nn.Linear(2, 2), budget=budget, method=method, streams=late) as memory:
        for _ in range(2):
            with memory.step():
                pass
        assert late.copies_out + late.copies_in == copies
        assert late.pinned == 0
        assert (memory._engine.machine.transfer_seconds(1) != 2 / LIKELY_BANDWIDTH) == (copies > 0)


def test_the_link_is_measured_within_the_budget_as_soon_as_there_is_room() -> None:
    late = LateStreams()
    with late_session(nn.Linear(2, 2), budget=20 << 20, method=LRU(), streams=late) as memory:
        for beside, copies in ((39 << 19, 0), (0, 2)):
            late.beside = beside
            with memory.step():
                assert late.copies_out == copies


def test_costs_are_measured_with_the_device_once_and_taken_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    late, waited = LateStreams(), [0]
    synchronize = LateStreams.synchronize

    def counted(self: LateStreams) -> None:
        waited[0] += 1
        synchronize(self)

    monkeypatch.setattr(LateStreams, "synchronize", counted)
    model = nn.Linear(64, 64)
    batch = torch.ones(256, 64)
    found = []
    with late_session(model, budget=PLENTY, method=LRU(), streams=late, costs=True) as memory:
        for _ in range(2):
            waited[0] = 0
            with memory.step():
                out = model(batch).tanh()
                recipe = memory._engine.controller.recipes[-1]
                found.append((recipe, memory._engine.machine.seconds_of(recipe), waited[0]))
            del out
    (first, first_seconds, first_waits), (second, second_seconds, second_waits) = found
    assert first_waits >= 7, "when the step begins, two for the link, and two around every op"
    assert second_waits == 1, "when the step begins"
    assert first_seconds == first.seconds == second_seconds != second.seconds


def test_a_report_has_the_lanes_and_the_peak_of_the_device() -> None:
    with late_session(nn.Linear(2, 2), budget=8 * NBYTES, method=Delta()) as memory:
        late = driver_of(memory)
        with memory.step():
            late.copies_out = late.copies_in = 0  # those by which the link is measured
            kept = [torch.randperm(ITEMS) for _ in range(12)]
            assert sum(int(tensor[0] >= 0) for tensor in kept) == 12
        report = memory.history[-1]
        assert report.transfer_seconds == pytest.approx((late.copies_out + late.copies_in) * COPYING)
        assert 0 < report.stall_seconds <= report.transfer_seconds
        assert 0 <= report.hidden_seconds < report.transfer_seconds
        assert report.device_peak_bytes >= report.peak_bytes
        assert spillway.StepReport.from_json(report.to_json()) == report


def test_a_report_from_before_there_were_such_figures_can_be_read() -> None:
    with late_session(nn.Linear(2, 2), budget=PLENTY, method=LRU()) as memory, memory.step():
        pass
    written = memory.history[-1].to_json()
    for name in ("device_peak_bytes", "reserved_bytes", "transfer_seconds"):
        del written[name]
    assert spillway.StepReport.from_json(written).reserved_bytes == 0


@pytest.mark.parametrize(("given", "expected"), [(None, 2 << 30), ("25%", 1 << 30), (3 << 30, 3 << 30)])
def test_host_memory_is_pinned_within_what_a_container_allows(
    given: int | str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spillway.engines.tensors.devices.usable_memory", lambda: 4 << 30)
    assert pinned_bytes(torch.device("cuda", 0), given) == expected
    with pytest.raises(BudgetError, match=r"more than the 4\.00 GiB"):
        pinned_bytes(torch.device("cuda", 0), "5GiB")
