"""The CUDA machine's logic on the late device: what has to wait for what, what is counted, what is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spillway.engines.tensors.cuda_machine import CudaMachine
from spillway.errors import BudgetInfeasible, DeviceFullError, SpillFullError
from spillway.internals.dispatch_key import unwatched
from spillway.methods import LRU, AbstractPolicy, Copy, Fetch, Move
from spillway.methods.base import MemoryView, Proposal
from spillway.session import Session
from tests.cpu.late_device import LateCopy, LateStreams, OutOfOrderError, driver_of, late_session, late_step
from tests.cpu.pressure import PLENTY, is_moved, put_away

ITEMS = 64 << 10
NBYTES = 8 * ITEMS


@pytest.fixture(params=[True, False], ids=["exchanged", "resized"])
def exchanges(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def memory(exchanges: bool) -> Iterator[Session]:
    with late_step(exchanges) as session:
        yield session


def begin(memory: Session, tensor: Tensor, way: type[Copy | Fetch]) -> bool:
    return put_away(memory, tensor, way)  # type: ignore[arg-type]


def raw(tensor: Tensor) -> Tensor:
    """Its bytes as code finds them that asks nobody."""
    storage = torch._C.TensorBase.untyped_storage(tensor)
    with unwatched():
        return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride()).clone()


# ---------------------------------------------------------------------- order on the device


def test_what_is_moved_comes_back_as_it_was(memory: Session) -> None:
    tensor = torch.arange(ITEMS)
    assert put_away(memory, tensor, Move)
    assert is_moved(memory, tensor)
    assert int((tensor * 2)[-1]) == 2 * ITEMS - 2


def test_an_op_waits_for_the_copy_in_and_a_leaving_storage_for_its_copy_out(memory: Session) -> None:
    tensor, late = torch.arange(ITEMS), driver_of(memory)
    assert begin(memory, tensor, Copy)
    assert (late.copies_out, late.waits, len(late.out)) == (1, 0, 1)
    assert put_away(memory, tensor, Move)
    assert (late.copies_out, late.waits, len(late.out)) == (1, 1, 0)
    assert begin(memory, tensor, Fetch)
    assert (late.copies_in, late.waits, len(late.back)) == (1, 1, 1)
    assert torch.equal(tensor, torch.arange(ITEMS))
    assert (late.copies_in, late.waits, len(late.back)) == (1, 2, 0)


def test_the_host_waits_for_nothing_within_a_step(memory: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[LateCopy] = []
    within = LateStreams.compute_waits
    monkeypatch.setattr(LateStreams, "compute_waits", lambda self, event: (waited.append(event), within(self, event)))
    synchronise = LateCopy.synchronize

    def told(self: LateCopy) -> None:
        assert self in waited or self.done or self.lane is not waited[-1].lane, "the host waits"
        synchronise(self)

    monkeypatch.setattr(LateCopy, "synchronize", told)
    tensors = [torch.arange(ITEMS) + number for number in range(4)]
    for tensor in tensors:
        assert put_away(memory, tensor, Move)
    assert [int(tensor[1]) for tensor in tensors] == [1, 2, 3, 4]
    assert len(waited) == 8


def test_what_dies_while_it_is_copied_lives_until_the_copy_is_done(memory: Session) -> None:
    late, before = driver_of(memory), memory._engine.controller.budget.resident
    tensor = torch.arange(ITEMS)
    assert begin(memory, tensor, Copy)
    after = memory._engine.controller.budget.resident
    del tensor
    assert memory._engine.controller.budget.resident == after == before + NBYTES, "in flight is resident"
    memory._engine.machine.reap()
    assert memory._engine.controller.budget.resident == after
    late.synchronize()
    memory._engine.machine.reap()
    assert memory._engine.controller.budget.resident == before


def test_room_is_made_of_what_lives_for_its_copy_alone(memory: Session) -> None:
    tensor, controller = torch.arange(ITEMS), memory._engine.controller
    before = controller.budget.resident - NBYTES
    assert begin(memory, tensor, Copy)
    del tensor
    memory._engine.machine.settle()
    assert controller.budget.resident == before


def test_a_write_while_a_copy_is_under_way_is_what_comes_back(memory: Session) -> None:
    tensor = torch.zeros(ITEMS)
    assert begin(memory, tensor, Copy)
    tensor += 1
    assert put_away(memory, tensor, Move)
    assert torch.equal(tensor, torch.ones(ITEMS))


def test_a_fetch_that_is_not_wanted_any_more_leaves_nothing(memory: Session) -> None:
    tensor, engine = torch.arange(ITEMS), memory._engine
    assert put_away(memory, tensor, Move)
    before = engine.controller.budget.resident
    assert begin(memory, tensor, Fetch)
    assert engine.controller.budget.resident == before + NBYTES
    del tensor
    engine.controller.collect_dead()
    engine.controller.copies.land(wait=True)  # a storage that is its own target lives until then
    assert engine.controller.budget.resident == before


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateStreams, "compute_waits", lambda self, event: None)


def _free_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaMachine, "discard", lambda self, home: self.pool.free(home.block))


def _start_before_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def query(self) -> bool:
            return True

        def synchronize(self) -> None: ...

    monkeypatch.setattr(LateStreams, "reached", lambda self: Nothing())


def _forget_the_copy_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in that does not wait for the copy out which fills its block."""
    begin_in = LateStreams.copy_in
    monkeypatch.setattr(
        LateStreams, "copy_in", lambda self, block, target, after: begin_in(self, block, target, after[:1])
    )
    monkeypatch.setattr(LateStreams, "compute_waits", lambda self, event: None)


@pytest.mark.parametrize(
    "break_something",
    [_forget, _free_at_once, _start_before_the_ops, _forget_the_copy_out],
    ids=["no waits", "blocks at once", "before the ops", "before the copy out"],
)
def test_a_machine_that_forgets_to_wait_is_found_out(
    break_something: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_something(monkeypatch)
    late = LateStreams(lag=1 << 30)
    with pytest.raises((OutOfOrderError, AssertionError)):
        leave_and_come_back(late)


@pytest.mark.parametrize("behind", [0, 2, 1 << 30])
def test_a_machine_that_waits_is_not_blamed(behind: int) -> None:
    leave_and_come_back(LateStreams(lag=1 << 30, behind=behind))


def test_a_block_that_is_free_at_once_is_found_out_where_copies_are_done_and_ops_are_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _free_at_once(monkeypatch)
    with pytest.raises(OutOfOrderError, match="the compute stream may still read it"):
        leave_and_come_back(LateStreams(lag=0, behind=1))


def leave_and_come_back(late: LateStreams) -> None:
    memory = late_session(nn.Linear(2, 2), budget=PLENTY, method=LRU(), streams=late, host_budget=32 * NBYTES)
    with memory, memory.step():
        for number in range(8):
            tensor, other = torch.arange(ITEMS) + number, torch.arange(ITEMS) - number
            assert begin(memory, tensor, Copy)
            assert begin(memory, other, Copy)
            assert put_away(memory, tensor, Move)
            assert begin(memory, tensor, Fetch)
            assert torch.equal(tensor, torch.arange(ITEMS) + number)
            tensor += 1
            assert begin(memory, tensor, Copy)
            tensor += 1  # what is on its way out is good for nothing
            memory._engine.controller.collect_dead()
            assert torch.equal(tensor, torch.arange(ITEMS) + number + 2)


# ---------------------------------------------------------------------- a compute stream that is late


def give_up_a_block(memory: Session) -> None:
    tensor = torch.zeros(ITEMS, dtype=torch.int64)
    assert put_away(memory, tensor, Move)
    tensor += 1
    memory._engine.controller.collect_dead()


def test_a_block_is_free_when_the_compute_stream_has_passed_the_moment_at_which_it_was_given_up() -> None:
    late = LateStreams(behind=1 << 30)
    with late_session(nn.Linear(2, 2), budget=PLENTY, method=LRU(), streams=late) as memory, memory.step():
        machine: Any = memory._engine.machine
        give_up_a_block(memory)
        machine.reap()
        assert machine.pool.used == NBYTES
        late.passed = late.given
        machine.reap()
        assert machine.pool.used == 0


def test_the_host_waits_for_the_compute_stream_where_no_block_is_left() -> None:
    late = LateStreams(behind=1 << 30)
    with (
        late_session(nn.Linear(2, 2), budget=PLENTY, method=LRU(), host_budget=NBYTES, streams=late) as memory,
        memory.step(),
    ):
        machine: Any = memory._engine.machine
        for _ in range(3):
            give_up_a_block(memory)  # which takes the block of the one before
            machine.reap()
            assert machine.pool.used == NBYTES, "the device has not said that it is done with it"
            assert late.passed < late.given


# ---------------------------------------------------------------------- who reads what is absent


def test_a_moved_storage_can_be_read_where_it_is(memory: Session, exchanges: bool) -> None:
    tensor = torch.arange(ITEMS)
    assert put_away(memory, tensor, Move)
    assert memory._engine.machine.readable_in_place == exchanges
    if exchanges:
        assert torch.equal(raw(tensor), torch.arange(ITEMS))
    else:
        assert torch._C.TensorBase.untyped_storage(tensor).nbytes() == 0


def test_what_is_written_where_a_moved_storage_waits_comes_back(memory: Session, exchanges: bool) -> None:
    if not exchanges:
        pytest.skip("it has no bytes while it is absent")
    tensor = torch.zeros(ITEMS)
    assert put_away(memory, tensor, Move)
    with unwatched():
        tensor.fill_(7.0)
    assert is_moved(memory, tensor)
    assert torch.equal(tensor, torch.full((ITEMS,), 7.0))


@pytest.mark.parametrize("readable", [True, False])
def test_nothing_is_absent_between_steps_where_it_could_not_be_read(exchanges: bool, readable: bool) -> None:
    late = LateStreams(readable=readable)
    with late_session(nn.Linear(2, 2), budget=PLENTY, method=LRU(), exchanges=exchanges, streams=late) as memory:
        with memory.step():
            tensor = torch.arange(ITEMS)
            assert put_away(memory, tensor, Move)
        assert is_moved(memory, tensor) == (exchanges and readable)
        assert torch.equal(raw(tensor), torch.arange(ITEMS))


def test_a_step_whose_end_does_not_fit_is_refused_where_absent_storages_cannot_be_read() -> None:
    kept = []
    with late_session(nn.Linear(2, 2), budget=4 * NBYTES, method=LRU(), exchanges=False) as memory:
        with pytest.raises(BudgetInfeasible, match="the end of the step") as refusal, memory.step():
            kept += [torch.arange(ITEMS) + number for number in range(6)]
        assert refusal.value.smallest_budget >= 6 * NBYTES
        assert [int(tensor[1]) for tensor in kept] == [1, 2, 3, 4, 5, 6]
        assert not any(is_moved(memory, tensor) for tensor in kept)


def test_printing_a_tensor_that_cannot_be_read_in_place_brings_it_back_for_good(memory: Session) -> None:
    tensor = torch.arange(ITEMS)
    assert put_away(memory, tensor, Move)
    assert tensor.tolist()[-1] == ITEMS - 1
    assert is_moved(memory, tensor) == memory._engine.machine.readable_in_place
    tensor += 1
    assert put_away(memory, tensor, Move) == memory._engine.machine.readable_in_place


# ---------------------------------------------------------------------- host memory


def test_running_out_of_host_memory_is_an_error_about_host_memory() -> None:
    late = LateStreams(pins=1 << 40)
    with (
        late_session(
            nn.Linear(2, 2), budget=3 * NBYTES, method=LRU(short_chain=0), host_budget=2 * NBYTES, streams=late
        ) as memory,
        pytest.raises(SpillFullError, match=r"host budget of 1\.00 MiB .* raise SpillOptions.host_budget="),
        memory.step(),
    ):
        kept = [torch.randperm(ITEMS) for _ in range(12)]
        sum(int(tensor[0]) for tensor in kept)
    assert late.pinned == 0


def test_a_copy_that_nothing_needs_yet_is_refused_where_the_host_would_have_to_wait(exchanges: bool) -> None:
    late = LateStreams(lag=1 << 30)
    session = late_session(
        nn.Linear(2, 2), budget=PLENTY, method=LRU(), host_budget=NBYTES, exchanges=exchanges, streams=late
    )
    with session as memory, memory.step():
        first, second, controller = torch.arange(ITEMS), torch.arange(ITEMS) + 1, memory._engine.controller
        assert begin(memory, first, Copy)
        first += 1  # what is on its way out is good for nothing
        controller.collect_dead()
        assert not begin(memory, second, Copy)
        assert controller.counters.refusals == {"slower tier full": 1}
        assert len(late.out) == 1, "nobody waited"
        assert put_away(memory, second, Move)
        assert torch.equal(second, torch.arange(ITEMS) + 1)


class LeavesItToTheController(AbstractPolicy):
    """Moves whatever may leave, and drops it where the tier is full."""

    name = "last resort"

    def relieve(self, view: MemoryView, needed: int) -> Generator[Proposal, bool, None]:
        yield from ()


def test_what_host_memory_cannot_hold_is_recomputed() -> None:
    method = LeavesItToTheController()
    with (
        late_session(nn.Linear(2, 2), budget=4 * NBYTES, method=method, host_budget=2 * NBYTES) as memory,
        memory.step(),
    ):
        kept = [torch.arange(ITEMS) for _ in range(12)]
        assert [int(tensor[1]) for tensor in kept] == [1] * 12
        del kept
    report = memory.history[-1]
    assert report.refusals["slower tier full"] > 0
    assert report.drops > 0 < report.moves


def test_memory_that_the_system_does_not_pin_is_told_from_a_host_budget_that_is_used_up() -> None:
    late = LateStreams(pins=2 * NBYTES)
    with (
        late_session(nn.Linear(2, 2), budget=3 * NBYTES, method=LRU(short_chain=0), streams=late) as memory,
        pytest.raises(SpillFullError, match=r"The system pins no 512\.00 KiB more of host memory .* larger budget="),
        memory.step(),
    ):
        kept = [torch.randperm(ITEMS) for _ in range(12)]
        sum(int(tensor[0]) for tensor in kept)
    assert late.pinned == 0


def test_a_copy_ahead_that_finds_no_device_memory_is_refused_and_nothing_else(memory: Session, exchanges: bool) -> None:
    if not exchanges:
        pytest.skip("the storage itself is resized there")
    tensor = torch.arange(ITEMS)
    assert put_away(memory, tensor, Move)
    driver_of(memory).full = 1
    assert not begin(memory, tensor, Fetch)
    assert sum(memory._engine.controller.counters.refusals.values()) == 1
    assert torch.equal(tensor, torch.arange(ITEMS))


def test_a_session_leaves_no_pinned_byte_behind_and_what_was_away_is_back() -> None:
    model, late = nn.Linear(256, 256), LateStreams()
    before = model.weight.detach().clone()
    for _ in range(5):
        with late_session(model, budget=PLENTY, method=LRU(), streams=late) as memory:
            with memory.step():
                assert put_away(memory, model.weight, Move)
            assert late.pinned > 0
        assert late.pinned == 0
        assert torch.equal(model.weight, before)
    assert late.released


def test_memory_of_the_pool_is_not_given_back_while_something_still_points_at_it() -> None:
    tensor, late = torch.arange(ITEMS), LateStreams()
    memory = late_session(nn.Linear(2, 2), budget=PLENTY, method=LRU(), streams=late)
    with memory.step():
        assert put_away(memory, tensor, Move)
    late.full = 1 << 30  # the device has no memory for it any more
    with pytest.raises(DeviceFullError, match="bringing a storage back found no memory"):
        memory.close()
    assert late.pinned > 0
    assert torch.equal(raw(tensor), torch.arange(ITEMS))
    late.account = lambda: 0  # which knows the engine
    del memory
    gc.collect()
    assert late.pinned > 0
    assert torch.equal(raw(tensor), torch.arange(ITEMS))
    del tensor
    gc.collect()
    assert late.pinned == 0


def test_a_session_that_nobody_closes_leaves_values_right_and_pins_memory_for_as_long_as_they_are_there() -> None:
    late, model, tensor = LateStreams(), nn.Linear(256, 256), torch.arange(ITEMS)
    back = torch.arange(ITEMS)
    before, apply = model.weight.detach().clone(), torch.autograd.Function.__dict__["apply"]
    memory = late_session(model, budget=PLENTY, method=LRU(), streams=late)
    with memory.step():
        assert put_away(memory, model.weight, Move)
        assert put_away(memory, tensor, Move)
        assert put_away(memory, back, Move)
    assert back.numpy()[-1] == ITEMS - 1
    late.account = lambda: 0
    del memory
    gc.collect()
    assert late.pinned > 0
    assert torch.equal(tensor, torch.arange(ITEMS))
    with torch.no_grad():
        model.weight += 1
    assert torch.equal(model.weight, before + 1)
    assert torch.autograd.Function.__dict__["apply"] is apply
    del tensor
    gc.collect()
    assert late.pinned > 0
    del model
    gc.collect()
    assert late.pinned == 0, "what came back points elsewhere"
    assert torch.equal(back, torch.arange(ITEMS))
