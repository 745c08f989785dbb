"""The CUDA engine on the late device: what is set aside, what runs again, whose tensors stay, what is reported."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway.engines.controller import UNLIMITED
from spillway.engines.tensors.cuda_machine import LIKELY_BANDWIDTH, Resized
from spillway.engines.tensors.devices import pinned_bytes
from spillway.errors import BudgetError, BudgetInfeasible, DeviceFullError, SessionError
from spillway.methods import LRU, Copy, Delta, Drop, Move
from spillway.session import Session
from tests.cpu.late_device import LateDriver, driver_of, late_session
from tests.cpu.pressure import PLENTY, is_dropped, is_moved, put_away
from tests.cpu.test_cuda_machine import ITEMS, NBYTES, begin, raw


@pytest.fixture(params=[True, False], ids=["exchanged", "resized"])
def exchanges(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def memory(exchanges: bool) -> Iterator[Session]:
    late = LateDriver(lag=1 << 30)
    session = late_session(nn.Linear(2, 2), budget=PLENTY, method=LRU(), exchanges=exchanges, driver=late)
    with session, session.step():
        yield session
    assert late.pinned == 0


# ---------------------------------------------------------------------- what is set aside


def test_what_others_have_of_the_device_is_set_aside_in_the_budget() -> None:
    late = LateDriver()
    late.beside = 5 * NBYTES
    with late_session(nn.Linear(2, 2), budget=12 * NBYTES, method=LRU(), driver=late) as memory:
        with memory.step():
            kept = [torch.arange(ITEMS) for _ in range(10)]
        report = memory.history[-1]
        assert report.reserved_bytes == 5 * NBYTES + 12 * NBYTES // 100
        assert report.peak_bytes + report.reserved_bytes <= memory.allowed == report.allowed == 12 * NBYTES
        assert report.moves + report.drops > 0
    assert len(kept) == 10


def test_what_grows_beside_the_account_within_a_step_is_seen() -> None:
    late = LateDriver()
    with late_session(nn.Linear(2, 2), budget=200 << 20, method=LRU(), driver=late) as memory, memory.step():
        roomy = memory._engine.controller.allowed
        late.beside = 50 << 20
        kept = [torch.arange(ITEMS) for _ in range(40)]
        assert memory._engine.controller.allowed == roomy - (50 << 20)
    assert kept


def test_a_refusal_speaks_of_the_whole_budget() -> None:
    late = LateDriver()
    late.beside = 5 * NBYTES
    with late_session(nn.Linear(2, 2), budget=7 * NBYTES, method=LRU(), driver=late) as memory:
        with pytest.raises(BudgetInfeasible) as refusal, memory.step():
            torch.arange(ITEMS).expand(2, -1).clone()
        assert refusal.value.allowed == 7 * NBYTES
        told = refusal.value.smallest_budget
    assert told > 8 * NBYTES
    with late_session(nn.Linear(2, 2), budget=told, method=LRU(), driver=late) as memory, memory.step():
        torch.arange(ITEMS).expand(2, -1).clone()


def test_a_peak_above_the_budget_is_reported_and_more_is_set_aside_afterwards() -> None:
    late = LateDriver()
    with late_session(nn.Linear(2, 2), budget=12 * NBYTES, method=LRU(), driver=late) as memory:
        for excess in (4 * NBYTES, 0):
            with memory.step():
                kept = [torch.arange(ITEMS) for _ in range(10)]
                late._peak = 12 * NBYTES + excess
                del kept
        first, second = memory.history
        assert first.device_peak_bytes == 16 * NBYTES > first.allowed
        assert second.reserved_bytes == first.reserved_bytes + 4 * NBYTES


def test_the_nearer_the_budget_the_more_often_it_is_looked_at() -> None:
    late, budget = LateDriver(), 20 << 20
    with late_session(nn.Linear(2, 2), budget=budget, method=LRU(), driver=late) as memory, memory.step():
        kept = [torch.arange(ITEMS) for _ in range(34)]
        late.beside = 1 << 20
        kept += [torch.arange(ITEMS) for _ in range(8)]
        assert memory._engine.controller.allowed == budget - budget // 100 - (1 << 20)
    assert kept


@pytest.mark.parametrize("escaped", [False, True])
def test_room_is_made_for_what_a_hungry_op_may_need_the_first_time_and_nothing_is_refused_for_it(escaped: bool) -> None:
    picture, layer, made = torch.ones(1, 8, 64, 64), nn.Conv2d(8, 8, 3, padding=1), 8 * 64 * 64 * 4
    with late_session(layer, budget=PLENTY, method=LRU()) as memory, memory.step():
        others, controller = [torch.randperm(4096) for _ in range(16)], memory._engine.controller
        held = [other.numpy() for other in others if escaped]
        controller.allowed = controller.resident + 2 * made + 4096
        layer(picture)
        assert controller.resident <= controller.allowed - (0 if escaped else 2 * made)
        assert any(is_moved(memory, other) or is_dropped(memory, other) for other in others) != escaped
        controller.allowed = PLENTY
    assert len(held) == 16 * escaped


def test_what_an_op_needs_for_itself_is_measured_and_room_is_made_for_it_the_next_time() -> None:
    late = LateDriver()
    picture, layer = torch.ones(1, 8, 64, 64), nn.Conv2d(8, 8, 3, padding=1)
    made = 8 * 64 * 64 * 4
    with late_session(layer, budget=PLENTY, method=LRU(), driver=late) as memory, memory.step():
        late.inside = 3 * made
        for _ in range(3):
            layer(picture)
        late.inside = 0
        known = memory._engine.place.workspaces
        assert known is not None
        assert [looks for looks in known._known.values() if looks == [3 * made, 3 * made]]
        controller = memory._engine.controller
        controller.allowed = controller.resident + 2 * made
        with pytest.raises(BudgetInfeasible):
            layer(picture)
        controller.allowed = PLENTY


# ---------------------------------------------------------------------- no memory all the same


class Failing:
    """Stands in the way of an op: so many calls find no memory."""

    def __init__(self, memory: Session, monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> None:
        self.left = times
        place: Any = memory._engine.place
        guarded, self.calls = place.retry.guarded, 0

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

        monkeypatch.setattr(place.retry, "guarded", failing)


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
    place: Any = memory._engine.place
    assert place.retry.count == 1
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
    place: Any = memory._engine.place
    guarded = place.retry.guarded

    def drawing_first(info: Any, call: Any) -> Any:
        left = [1]

        def run(*args: Any, **kwargs: Any) -> Any:
            out = call(*args, **kwargs)
            if info.name == "aten::bernoulli_" and left:
                left.pop()
                raise torch.OutOfMemoryError("CUDA out of memory. After it drew.")
            return out

        return guarded(info, run)

    monkeypatch.setattr(place.retry, "guarded", drawing_first)
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
        give, left = Resized.give, [times]

        def failing(self: Resized, real: torch.UntypedStorage, temporary: torch.UntypedStorage) -> None:
            left[0] -= 1
            if left[0] >= 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. And so on.")
            give(self, real, temporary)

        monkeypatch.setattr(Resized, "give", failing)
        if times == 99:
            with pytest.raises(DeviceFullError, match="bringing a storage back found no memory"):
                tensor + 1
            assert is_dropped(memory, tensor)
            monkeypatch.undo()
        assert int((tensor + 1)[-1]) == 2 * ITEMS - 1
        assert is_moved(memory, other) or is_dropped(memory, other)
        engine.controller.empty_graveyard()
        present = [s.nbytes for s in engine.table.values() if s.value is not None and not s.value.absent]
        assert engine.controller.resident == sum(present)
        assert [storage.locks for storage in engine.table.values() if storage.locks] == []


# ---------------------------------------------------------------------- guests


class Outside(torch.autograd.Function):
    """Reads its tensors without asking anybody, as a kernel of somebody else's does."""

    seen: ClassVar[list[Tensor]] = []
    memory: Session

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        Outside.seen.append(raw(x))
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        assert not put_away(Outside.memory, x, Move), "it stays until the function returns"
        Outside.seen.append(raw(x))
        return gradient * 2


@pytest.mark.parametrize("way", [Move, Drop])
def test_custom_functions_find_their_tensors(memory: Session, way: type[Move | Drop]) -> None:
    Outside.seen, Outside.memory = [], memory
    source = torch.arange(ITEMS, dtype=torch.float32, requires_grad=True)
    x = source + 1
    assert put_away(memory, x, way)
    out = Outside.apply(x)
    assert put_away(memory, x, Move), "and nothing stays locked"
    out.sum().backward()
    assert len(Outside.seen) == 2
    assert all(torch.equal(seen, torch.arange(ITEMS) + 1.0) for seen in Outside.seen)
    assert put_away(memory, x, Move)


class Remembering(torch.autograd.Function):
    """Keeps tensors as attributes of its context, by themselves and in containers."""

    seen: ClassVar[list[Tensor]] = []
    memory: Session

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.x, ctx.others = x, {"y": [y]}
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.x, ctx.others["y"][0]
        assert not put_away(Remembering.memory, x, Move), "it stays until the function returns"
        Remembering.seen += [raw(x), raw(y)]
        return gradient * y, gradient * x


def test_custom_functions_find_what_they_keep_as_attributes(memory: Session) -> None:
    Remembering.seen, Remembering.memory = [], memory
    source = torch.arange(ITEMS, dtype=torch.float32, requires_grad=True)
    out = Remembering.apply(source + 1, source + 2)
    context: Any = out.grad_fn
    assert put_away(memory, context.x, Move)
    assert put_away(memory, context.others["y"][0], Move)
    out.sum().backward()
    assert torch.equal(Remembering.seen[0], torch.arange(ITEMS) + 1.0)
    assert torch.equal(Remembering.seen[1], torch.arange(ITEMS) + 2.0)


def write_unseen(tensor: Tensor, value: float) -> None:
    """As a kernel of an extension does, which has the address and asks nobody."""
    wanted = np.full(tensor.numel(), value, np.float32)
    ctypes.memmove(torch._C.TensorBase.data_ptr(tensor), wanted.ctypes.data, wanted.nbytes)


class Filling(torch.autograd.Function):
    """A kernel fills what an op made for it."""

    memory: Session

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        out = x.new_zeros(x.shape)
        assert not begin(Filling.memory, out, Copy), "the copy would be older than what the kernel writes"
        write_unseen(out, 3.0)
        doubled = out * 2
        assert not put_away(Filling.memory, out, Drop), "zeros would come back"
        assert not put_away(Filling.memory, doubled, Drop)
        assert put_away(Filling.memory, out, Move)
        return out, doubled

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, doubled: Tensor) -> Tensor:
        slope = gradient.new_zeros(gradient.shape)
        write_unseen(slope, 7.0)
        return slope


def test_what_a_kernel_writes_in_a_custom_function_is_not_recomputed(memory: Session) -> None:
    Filling.memory = memory
    source = torch.ones(ITEMS, requires_grad=True)
    out, doubled = Filling.apply(source + 1)
    later = out + doubled
    assert not put_away(memory, out, Drop)
    assert not put_away(memory, doubled, Drop)
    assert put_away(memory, later, Drop), "what is made of them afterwards is"
    assert put_away(memory, doubled, Move)
    assert torch.equal(later, torch.full((ITEMS,), 9.0))
    later.sum().backward()
    assert source.grad is not None
    assert put_away(memory, source.grad, Drop) or put_away(memory, source.grad, Move)
    assert torch.equal(source.grad, torch.full((ITEMS,), 7.0))


class Returning(torch.autograd.Function):
    """What a kernel writes leaves before and after."""

    memory: Session

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.new_zeros(x.shape)
        assert put_away(Returning.memory, out, Move)
        assert float(out.sum()) == 0.0
        write_unseen(out, 3.0)
        assert put_away(Returning.memory, out, Move)
        return out


def test_what_a_kernel_writes_is_not_taken_for_the_copy_from_before(memory: Session) -> None:
    Returning.memory = memory
    assert torch.equal(Returning.apply(torch.ones(ITEMS)), torch.full((ITEMS,), 3.0))


class Counting(torch.autograd.Function):
    """A kernel writes an argument and does not say so, as those for running statistics do."""

    memory: Session
    tripled: Tensor

    @staticmethod
    def forward(ctx: Any, x: Tensor, statistic: Tensor) -> Tensor:
        assert not put_away(Counting.memory, Counting.tripled, Drop), "it would be made from what the kernel writes"
        write_unseen(statistic, 5.0)
        return x * 2


@pytest.mark.parametrize("known", [True, False])
def test_an_argument_that_a_kernel_writes_is_another_value_afterwards(memory: Session, known: bool) -> None:
    Counting.memory = memory
    with contextlib.nullcontext() if known else torch._C._DisableTorchDispatch():
        statistic = torch.ones(ITEMS) + 1
    doubled, Counting.tripled = statistic * 2, statistic * 3
    assert begin(memory, statistic, Copy)
    assert put_away(memory, doubled, Drop)
    Counting.apply(torch.ones(ITEMS), statistic)
    assert not put_away(memory, statistic, Drop)
    assert put_away(memory, statistic, Move)
    assert put_away(memory, Counting.tripled, Drop) == known, "by way of what the argument was before"
    assert torch.equal(statistic, torch.full((ITEMS,), 5.0))
    assert torch.equal(doubled, torch.full((ITEMS,), 4.0))
    assert torch.equal(Counting.tripled, torch.full((ITEMS,), 6.0))
    assert [storage.locks for storage in memory._engine.table.values() if storage.locks] == []


def test_a_custom_function_that_fails_leaves_nothing_lent(memory: Session) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            raise ValueError("no kernel")

    x = torch.ones(ITEMS) + 1
    with pytest.raises(ValueError, match="no kernel"):
        Failing.apply(x)
    assert not memory._engine.controller.lending.running
    assert put_away(memory, x, Move)
    assert put_away(memory, x + 1, Drop)


def test_nothing_of_torch_stays_changed_when_the_last_session_closes() -> None:
    names = ("apply", "saved_tensors", "apply_boxed")
    node, function = torch.autograd.function.BackwardCFunction, torch.autograd.Function
    before = [node.__dict__.get(name) for name in names], function.__dict__["apply"]
    first = late_session(nn.Linear(2, 2), budget=PLENTY, method=LRU())
    second = late_session(nn.Linear(2, 2), budget=PLENTY, method=LRU())
    first.close()
    assert function.__dict__["apply"] is not before[1]
    second.close()
    assert ([node.__dict__.get(name) for name in names], function.__dict__["apply"]) == before


def test_nothing_of_torch_stays_changed_when_a_session_that_nobody_closed_is_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured: list[object] = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", captured.append)
    before = torch.autograd.Function.__dict__["apply"]
    memory = late_session(nn.Linear(2, 2), budget=PLENTY, method=LRU())
    forgotten = weakref.ref(memory._engine)
    with memory.step():
        torch.arange(ITEMS)
    assert torch.autograd.Function.__dict__["apply"] is not before
    del memory
    gc.collect()
    assert forgotten() is None
    assert torch.autograd.Function.__dict__["apply"] is before
    torch.cuda.CUDAGraph.capture_begin("a graph")  # type: ignore[arg-type]
    assert captured == ["a graph"]


def test_capturing_a_cuda_graph_is_refused_while_a_session_is_open() -> None:
    late = LateDriver()
    with late_session(nn.Linear(2, 2), budget=PLENTY, method=LRU(), driver=late) as memory:
        with pytest.raises(SessionError, match=r"A CUDA graph keeps the addresses .* outside of spillway\.manage"):
            torch.cuda.CUDAGraph.capture_begin(object())  # type: ignore[arg-type]
        late.is_capturing = True
        with pytest.raises(SessionError, match="CUDA graph"), memory.step():
            pass
        late.is_capturing = False
        with memory.step():
            pass


def test_replaying_a_cuda_graph_is_refused_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[object] = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replayed.append)
    with late_session(nn.Linear(2, 2), budget=PLENTY, method=LRU()) as memory:
        with memory.step(), pytest.raises(SessionError, match=r"the addresses .* replay no graph within a step"):
            torch.cuda.CUDAGraph.replay("a graph")  # type: ignore[arg-type]
        assert replayed == []
        torch.cuda.CUDAGraph.replay("a graph")  # type: ignore[arg-type]
    torch.cuda.CUDAGraph.replay("another")  # type: ignore[arg-type]
    assert replayed == ["a graph", "another"]


# ---------------------------------------------------------------------- figures


@pytest.mark.parametrize(
    ("budget", "method", "copies"), [(UNLIMITED, LRU(), 0), (PLENTY, LRU(short_chain=0), 0), (PLENTY, LRU(), 4)]
)
def test_the_link_is_measured_for_who_weighs_copies_under_a_limit_and_nothing_stays_pinned(
    budget: int, method: LRU, copies: int
) -> None:
    late = LateDriver()
    with late_session(nn.Linear(2, 2), budget=budget, method=method, driver=late) as memory:
        for _ in range(2):
            with memory.step():
                pass
        assert late.copies_out + late.copies_in == copies
        assert late.pinned == 0
        assert (memory._engine.machine.transfer_seconds(1) != 2 / LIKELY_BANDWIDTH) == (copies > 0)


def test_the_link_is_measured_within_the_budget_as_soon_as_there_is_room() -> None:
    late = LateDriver()
    with late_session(nn.Linear(2, 2), budget=20 << 20, method=LRU(), driver=late) as memory:
        for beside, copies in ((39 << 19, 0), (0, 2)):
            late.beside = beside
            with memory.step():
                assert late.copies_out == copies


def test_costs_are_measured_with_the_device_once_and_taken_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    late, waited = LateDriver(), [0]
    synchronize = LateDriver.synchronize

    def counted(self: LateDriver) -> None:
        waited[0] += 1
        synchronize(self)

    monkeypatch.setattr(LateDriver, "synchronize", counted)
    model = nn.Linear(64, 64)
    batch = torch.ones(256, 64)
    found = []
    with late_session(model, budget=PLENTY, method=LRU(), driver=late, costs=True) as memory:
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
        with memory.step():
            kept = [torch.randperm(ITEMS) for _ in range(12)]
            assert sum(int(tensor[0] >= 0) for tensor in kept) == 12
        report, late = memory.history[-1], driver_of(memory)
        assert report.transfer_seconds == pytest.approx((late.copies_out + late.copies_in) * 1e-3)
        assert report.stall_seconds == pytest.approx(late.waits * 1e-4)
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
