"""What ops take for themselves while they run is within the budget of their step, or in a file."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import random
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import spillway
from spillway import SpillOptions
from spillway.engines.environment import GENERAL, OpEnvironment
from spillway.engines.tensors import cpu_machine
from spillway.engines.tensors.calls import Call
from spillway.errors import BudgetInfeasible, SpillFullError
from spillway.internals.private import fresh_storage
from spillway.memory.controller import Controller
from spillway.memory.records import EXACT, Recipe
from spillway.native import arena, library
from spillway.native.arena import BEGINS, IDLE, OWN, PEAK, RESIDENT, RUNS, STATE, WENT_BEYOND, Arena, OpMemory
from tests.cpu.test_arena import filled, ran
from tests.shared import in_turn

KiB, MiB = 1 << 10, 1 << 20

pytestmark = pytest.mark.skipif(not library.wanted(), reason="SPILLWAY_NATIVE=0")


@pytest.fixture(autouse=True)
def served() -> Iterator[Arena]:
    one = Arena()
    arena.trim()
    yield one
    one.release()


class Taking(torch.autograd.Function):
    """Takes twice what it is given for itself, forward and backward, as no op does that a bound knows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ops.op_memory_test.takes(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.ops.op_memory_test.takes(gradient)


@torch.library.custom_op("op_memory_test::takes", mutates_args=())
def takes(x: Tensor) -> Tensor:
    inside = [x + 1, x * 2]
    return inside[1] - inside[0] + 1


@takes.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


SEEN: list[Any] = []


@torch.library.custom_op("op_memory_test::shows", mutates_args=())
def shows(x: Tensor) -> Tensor:
    inside = x + 1
    out = torch.empty_like(x)
    SEEN.append(out.numpy())
    return out.copy_(inside)


@shows.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Sorting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = self.weight(x).cumsum(0).sort(0).values
        values.mul_(0.5).index_put_((torch.arange(9),), torch.ones(9, 64), accumulate=True)
        return values.clamp(-1, 1)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Taking.apply(self.weight(x))  # type: ignore[no-untyped-call]
        return out


def convolutions() -> tuple[nn.Module, Tensor]:
    """In double precision they have columns of the whole picture inside, nine times as large."""
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(5)]
    return nn.Sequential(*layers).double(), torch.randn(4, 8, 48, 48, dtype=torch.double)


def pictures() -> tuple[nn.Module, Tensor]:
    """oneDNN brings operands into an order of its own."""
    layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(*layers), torch.randn(4, 16, 64, 64)


def sorting() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*[Sorting() for _ in range(6)]), torch.randn(2048, 64)


def custom() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*[Custom() for _ in range(6)]), torch.randn(4096, 64)


MODELS: list[Callable[[], tuple[nn.Module, Tensor]]] = [convolutions, sorting, custom]


def address_of(storage: torch.UntypedStorage) -> int:
    """Without asking for it to come back."""
    return torch._C.StorageBase.data_ptr(storage)  # type: ignore[attr-defined, no-any-return]


def absent(memory: Any, storage: torch.UntypedStorage) -> bool:
    known = memory._engine.table.get(storage._cdata)
    return known is not None and bool(known.value.absent)


class Trained:
    """Three steps: losses and parameters, reports, and by a trace of its own what was there at most above what was
    there before."""

    def __init__(self, made: Callable[[], tuple[nn.Module, Tensor]], budget: int | None, method: str = "lru") -> None:
        torch.manual_seed(0)
        model, x = made()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        given = [tensor.untyped_storage() for tensor in (x, *model.parameters())]
        self.peaks: list[int] = []
        self.losses: list[float] = []
        with spillway.manage(model, optimizer, budget=budget, method=method) as memory:
            for _ in range(3):
                there = [address_of(one) for one in given]
                known = {at: one.nbytes() for at, one in zip(there, given, strict=True) if not absent(memory, one)}
                trace = arena.Trace(known)
                with memory.step(x):
                    loss = model(x).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                self.losses.append(loss.item())
                self.peaks.append(trace.since()[1] + sum(known.values()))
                trace.end()
            self.reports = list(memory.history)
        self.parameters = [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.long(but=2)
@pytest.mark.parametrize("method", ["lru", "delta", "dtr"])
@pytest.mark.parametrize("made", MODELS)
def test_with_what_ops_take_inside_no_step_is_above_its_budget(
    made: Callable[[], tuple[nn.Module, Tensor]], method: str
) -> None:
    plain, account = Trained(made, None), 0
    for share in (1.0, 0.75, 0.6):
        account = account or plain.reports[0].peak_bytes
        try:
            found = Trained(made, int(share * account), method)
        except BudgetInfeasible as refusal:
            found = Trained(made, refusal.smallest_budget, method)
        allowed = found.reports[0].allowed
        assert found.losses == plain.losses
        assert all(map(torch.equal, found.parameters, plain.parameters))
        assert max(found.peaks) <= allowed + 64 * KiB, (
            share,
            found.peaks,
            allowed,
        )  # of small ones, which are malloc's
        assert all(report.peak_bytes <= report.device_peak_bytes <= allowed for report in found.reports)
    assert max(plain.peaks) > account  # or there was nothing to show


def test_room_is_made_beforehand_for_what_an_op_took_before() -> None:
    account = Trained(pictures, None).reports[0].peak_bytes
    found = Trained(pictures, int(0.6 * account))
    assert found.reports[0].beyond_bytes > 0
    assert found.reports[-1].beyond_bytes == 0


def test_what_an_op_returns_is_in_memory_and_its_file_goes_with_the_session(tmp_path: Path) -> None:
    model, x = convolutions()
    before = set(os.listdir("/proc/self/fd"))
    with spillway.manage(model, budget=int(3 * MiB), method="lru", spill=SpillOptions(directory=tmp_path)) as memory:
        with memory.step(x):
            out = model(x)
            loss = out.square().mean()
            loss.backward()
        assert memory.history[0].beyond_bytes > 0
        assert list(tmp_path.iterdir()) == []
        held = OpMemory(tmp_path)
        assert not held.is_beyond(out.untyped_storage().data_ptr())
        assert len(set(os.listdir("/proc/self/fd")) - before) > 1
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_result_that_had_no_room_beside_what_made_it_is_in_memory(tmp_path: Path) -> None:
    model, x, held = nn.Linear(4, 4), torch.randn(MiB), OpMemory(tmp_path)
    with spillway.manage(model, budget="10 MiB", method="lru") as memory:
        with memory.step(x):
            out = torch.ops.op_memory_test.takes(x)
            engine: Any = memory._engine
            call = Call(lambda: takes(x), [], None, [], OpEnvironment.now(GENERAL))
            recipe = Recipe(1, "takes", (), call, 0.0, EXACT, creates=(engine.find(out).value,))
            (again,) = engine.machine.run(recipe, [])
        assert memory.history[0].beyond_bytes >= 4 * MiB
    assert not held.is_beyond(out.untyped_storage().data_ptr())
    assert not held.is_beyond(again.data_ptr())
    assert torch.equal(out, takes(x))
    assert torch.equal(torch.empty(0).set_(again), out)


def test_where_the_directory_has_no_room_the_op_says_so_and_training_goes_on(tmp_path: Path) -> None:
    model, x = convolutions()
    directory = tmp_path / "spill"
    directory.mkdir()
    with spillway.manage(model, budget="3 MiB", method="lru", spill=SpillOptions(directory=directory)) as memory:
        directory.rmdir()
        with (
            pytest.raises(SpillFullError, match=r"for itself beside .* has room for it \(No such file"),
            memory.step(x),
        ):
            model(x).square().mean().backward()
        directory.mkdir()
        with memory.step(x):
            model(x).square().mean().backward()
    assert memory.history[-1].beyond_bytes > 0


def test_random_ops_take_what_they_are_allowed_and_the_rest_lies_in_the_file(tmp_path: Path) -> None:
    """Blocks that live on after their op, that are freed by later ones, and contents of all of them."""
    pick, memory = random.Random(0), OpMemory(tmp_path)
    held: list[tuple[Tensor, int]] = []
    beyond = 0
    memory.begin(16 * MiB)
    for _ in range(400):
        resident = sum(len(tensor) for tensor, _ in held if not memory.is_beyond(tensor.data_ptr()))
        memory.cells[RESIDENT], memory.cells[STATE] = resident, BEGINS
        inside: list[tuple[Tensor, int]] = []
        for _ in range(pick.randrange(6)):
            value = pick.randrange(256)
            inside.append((filled(int(32 * KiB * 2 ** pick.uniform(0, 7)), value), value))
            if pick.random() < 0.3:
                inside.pop(pick.randrange(len(inside)))
        beyond += memory.cells[STATE] == WENT_BEYOND
        taken = sum(len(tensor) for tensor, _ in inside if not memory.is_beyond(tensor.data_ptr()))
        assert resident + taken <= memory.cells[PEAK] <= 16 * MiB or not inside
        memory.cells[STATE] = IDLE
        held += inside
        while sum(len(tensor) for tensor, _ in held) > 24 * MiB:
            held.pop(pick.randrange(len(held)))
        assert all(int(tensor[0]) == int(tensor[-1]) == value for tensor, value in held)
    assert all(bool((tensor == value).all()) for tensor, value in held)
    assert beyond > 20
    memory.end()
    memory.close()
    held.clear()


@pytest.mark.long
def test_a_forked_child_that_frees_its_part_of_the_file_leaves_the_parents(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import os, sys, torch
        from spillway.native.arena import *
        one, memory = Arena(), OpMemory(sys.argv[1])
        memory.begin(0)
        memory.cells[STATE] = BEGINS
        held = torch.empty(1 << 20, dtype=torch.uint8).fill_(7)
        memory.end()
        assert memory.is_beyond(held.data_ptr())
        child = os.fork()
        if child == 0:
            del held
            os._exit(0)
        os.waitpid(child, 0)
        print(bool((held == 7).all()))
        """
    )
    assert ran(script, str(tmp_path)).split() == ["True"]


def test_a_result_whose_address_was_given_away_stays_where_it_is(tmp_path: Path) -> None:
    model, x, held = nn.Linear(4, 4), torch.ones(MiB), OpMemory(tmp_path)
    fake = FakeTensorMode().from_tensor(x)  # which closing looks at too, as at all tensors, and has no address
    with spillway.manage(model, budget="10 MiB", method="lru") as memory, memory.step(x):
        SEEN.clear()
        out = torch.ops.op_memory_test.shows(x)
        assert held.is_beyond(SEEN[0].ctypes.data)
        SEEN[0][:] = 3
        assert bool((out == 3).all())
    SEEN.clear()
    assert fake.shape == x.shape


@pytest.mark.long
def test_an_op_that_forks_shares_no_page_of_the_file_with_the_child(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import os, sys, torch
        from spillway.native.arena import *
        one, memory = Arena(), OpMemory(sys.argv[1])
        memory.begin(0)
        memory.cells[STATE] = BEGINS
        torch.empty(1 << 20, dtype=torch.uint8)  # the file is open
        child = os.fork()
        mine = torch.empty(1 << 20, dtype=torch.uint8).fill_(1 if child else 7)
        if child == 0:
            os._exit(memory.is_beyond(mine.data_ptr()))
        status = os.waitpid(child, 0)[1]
        memory.end()
        print(status, bool((mine == 1).all()))
        """
    )
    assert ran(script, str(tmp_path)).split() == ["0", "True"]


def test_a_session_that_nobody_closed_leaves_no_file() -> None:
    def leaves() -> None:
        model, x = convolutions()
        memory = spillway.manage(model, budget="3 MiB", method="lru")
        with memory.step(x):
            model(x).square().mean().backward()
        assert memory.history[0].beyond_bytes > 0

    leaves()
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    leaves()
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_replay_that_finds_no_room_for_what_it_takes_says_so(tmp_path: Path) -> None:
    model, x, directory = nn.Linear(4, 4), torch.randn(MiB), tmp_path / "spill"
    directory.mkdir()
    spill = SpillOptions(directory=directory)
    with spillway.manage(model, budget="10 MiB", method="lru", spill=spill) as memory, memory.step(x):
        out = x + 1
        engine: Any = memory._engine
        call = Call(lambda: takes(x), [], None, [], OpEnvironment.now(GENERAL))
        recipe = Recipe(1, "takes", (), call, 0.0, EXACT, creates=(engine.find(out).value,))
        directory.rmdir()
        with pytest.raises(SpillFullError, match=r"takes takes 4.00 MiB or more for itself beside 8.00 MiB in memory"):
            engine.machine.run(recipe, [])
        directory.mkdir()


def test_what_one_large_call_takes_makes_nothing_leave_for_small_ones() -> None:
    model, large = nn.Linear(4, 4), torch.randn(1 << 19, dtype=torch.double)
    with spillway.manage(model, budget="22 MiB", method="lru") as memory:
        with memory.step(large):
            kept = large + 1
            torch.ops.op_memory_test.takes(large.float()).sum()
            kept.sum()
        del kept
        for _ in range(2):
            with memory.step(large):
                kept = large + 1
                torch.ops.op_memory_test.takes(large[:64].float()).sum()
                kept.sum()
            del kept
    assert [report.moves + report.drops for report in memory.history[1:]] == [0, 0]


SHAPE = (512, 256)
NUMBERS = torch.ones(SHAPE).tolist()


def loaded(new: bool, count: int = 6) -> list[Tensor]:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save([torch.ones(SHAPE) for _ in range(count)], file, _use_new_zipfile_serialization=new)
    content = file.getvalue()
    return torch.load(io.BytesIO(content))


OUTSIDE_OF_OPS: dict[str, Callable[[], Any]] = {
    "torch.load": lambda: loaded(new=True),
    "torch.load, the older format": lambda: loaded(new=False),
    "pickle": lambda: pickle.loads(pickle.dumps([torch.ones(SHAPE) for _ in range(3)])),
    "deepcopy": lambda: copy.deepcopy([torch.ones(SHAPE) for _ in range(3)]),
    "storages": lambda: [torch.UntypedStorage(512 * KiB) for _ in range(6)],
    "resized": lambda: [torch.UntypedStorage(16).resize_(512 * KiB) for _ in range(6)],
    "numbers": lambda: [torch.tensor(NUMBERS) for _ in range(6)],
    "Tensor": lambda: [torch.Tensor(NUMBERS) for _ in range(6)],
}


@pytest.mark.long(but=3)
@pytest.mark.parametrize(
    ("kind", "used", "method"), in_turn(OUTSIDE_OF_OPS, [False, True], ["lru", "delta", "dtr", "window"], times=2)
)
def test_room_is_made_for_what_no_op_makes(kind: str, used: bool, method: str) -> None:
    """Also where no op uses it, and the account would never hear of it: the arena tells."""
    gc.collect()
    there = arena.counts().live
    model, x = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(12)]), torch.randn(SHAPE)
    with spillway.manage(model, budget="10 MiB", method=method) as memory:
        for _ in range(3):
            arena.reset_peaks()
            with memory.step(x):
                loss = model(x).sum()
                made = OUTSIDE_OF_OPS[kind]()
                for one in made if used else ():
                    if isinstance(one, Tensor):
                        loss = loss + one.mean()
                loss.backward()
            made = one = None
            model.zero_grad()
            report, known = memory.history[-1], 10 * MiB + there
            assert arena.counts().peak_live <= known
            assert report.peak_bytes <= 10 * MiB
            assert report.device_peak_bytes <= 10 * MiB
    assert memory.history[-1].moves + memory.history[-1].drops


def test_what_no_op_makes_counts_once_and_until_it_is_gone() -> None:
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    kept: list[Any] = []
    with spillway.manage(model, budget="16 MiB", method="lru") as memory:
        with memory.step(x):
            kept += [torch.UntypedStorage(MiB), torch.tensor(NUMBERS)]
            kept[1].sum()
            kept[1].sum()
            del kept[0]
            kept[0].sum()
        first = memory.history[-1]
        with memory.step(x):
            kept[0].sum()
        kept.clear()
        with memory.step(x):
            model(x)
    assert MiB < first.peak_bytes - first.start_bytes - 512 * KiB < MiB + 4 * KiB
    second, third = memory.history[1:]
    assert 512 * KiB <= second.start_bytes - first.start_bytes <= 516 * KiB
    assert second.peak_bytes - second.start_bytes < 4 * KiB
    assert third.start_bytes - first.start_bytes < 4 * KiB


def test_what_no_op_makes_and_has_no_room_lies_in_the_file(tmp_path: Path) -> None:
    model, x = convolutions()
    spill = SpillOptions(directory=tmp_path)
    with spillway.manage(model, budget="3 MiB", method="lru", spill=spill) as memory, memory.step(x):
        loss = model(x).square().mean()
        found: list[torch.UntypedStorage] = []
        other = threading.Thread(target=lambda: found.append(torch.UntypedStorage(8 * MiB)))
        other.start()
        other.join()
        storage = torch.UntypedStorage(8 * MiB)
        meter = OpMemory(tmp_path)
        assert [meter.is_beyond(one.data_ptr()) for one in (storage, *found)] == [True, False]
        loss.backward()
        del storage
    assert memory.history[-1].beyond_bytes == 8 * MiB
    assert memory.history[-1].device_peak_bytes <= 3 * MiB


def test_what_lies_in_the_file_outside_of_ops_counts_as_long_as_it_lies_there(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    spill = SpillOptions(directory=tmp_path)
    with spillway.manage(model, budget="1 MiB", method="lru", spill=spill) as memory:
        with memory.step(x):
            for _ in range(3):
                torch.UntypedStorage(2 * MiB)
        with memory.step(x):
            kept = []
            for _ in range(3):
                kept.append(torch.UntypedStorage(2 * MiB))
                model(x)
            kept.pop(0)
            kept.append(torch.UntypedStorage(2 * MiB))
    assert [report.beyond_bytes for report in memory.history] == [2 * MiB, 6 * MiB]


def test_where_the_directory_has_no_room_for_what_no_op_makes_nothing_is_taken(tmp_path: Path) -> None:
    model, x, directory = nn.Linear(4, 4), torch.randn(8, 4), tmp_path / "spill"
    directory.mkdir()
    with spillway.manage(model, budget="1 MiB", method="lru", spill=SpillOptions(directory=directory)) as memory:
        directory.rmdir()
        live = arena.counts().live
        with memory.step(x):
            with pytest.raises(torch.OutOfMemoryError, match=r"2097152 bytes more outside of any op.*1048576.*No such"):
                torch.UntypedStorage(2 * MiB)
            assert arena.counts().live == live
            model(x)
        directory.mkdir()
        with memory.step(x):
            torch.UntypedStorage(2 * MiB)
    assert [report.beyond_bytes for report in memory.history] == [0, 2 * MiB]


def test_an_error_in_making_room_for_what_no_op_makes_is_raised_by_the_next_op(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise KeyError("planted")

    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    with spillway.manage(model, budget="1 MiB", method="lru") as memory:
        with pytest.raises(KeyError, match="planted"), memory.step(x):
            with monkeypatch.context() as context:
                context.setattr(Controller, "make_room_if_possible", fail)
                storage = torch.UntypedStorage(MiB // 2)
            assert OpMemory("/tmp").is_beyond(storage.data_ptr())
            model(x)
        with memory.step(x):
            model(x)
    assert len(memory.history) == 1


def test_a_known_storage_that_is_resized_counts_once() -> None:
    x = torch.randn(8, 4)
    with spillway.manage(nn.Linear(4, 4), budget="16 MiB", method="lru") as memory, memory.step(x):
        known = torch.ones(MiB)
        for _ in range(2):
            known.untyped_storage().resize_(0)
            known.untyped_storage().resize_(4 * MiB)
            known.fill_(1)
        known.untyped_storage().resize_(8 * MiB)
    assert 8 * MiB <= memory.history[-1].peak_bytes <= 8 * MiB + 4 * KiB


def test_another_thread_that_has_something_brought_back_leaves_what_an_op_takes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, states = torch.randn(8, 4), []
    with spillway.manage(nn.Linear(4, 4), budget="6 MiB", method="lru") as memory, memory.step(x):
        machine, cells = memory._engine.machine, memory._engine.backend._op_memory.cells

        def fresh(nbytes: int) -> torch.UntypedStorage:
            states.append(cells[STATE])
            return fresh_storage(nbytes)

        monkeypatch.setattr(cpu_machine, "fresh_storage", fresh)
        cells[STATE] = RUNS
        other = threading.Thread(target=lambda: machine._fresh(MiB))
        other.start()
        other.join()
        cells[STATE] = IDLE
        machine._fresh(MiB)
    assert states == [RUNS, OWN]


@pytest.mark.parametrize("more", [lambda: [torch.ones(MiB // 2)], lambda: loaded(new=True, count=4)])
def test_what_no_op_has_touched_leaves_where_room_is_short(more: Callable[[], Any]) -> None:
    with spillway.manage(nn.Linear(4, 4), budget="4 MiB", method="lru") as memory:
        for _ in range(2):
            with memory.step(None):
                kept = loaded(new=False)
                made = more()
            assert memory.history[-1].moves >= 2
            assert memory.history[-1].beyond_bytes == 0
            assert all(bool((one == 1).all()) for one in [*kept, *made])
            kept.clear()
            del made
