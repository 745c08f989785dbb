"""Steps that are known to fit run as if nothing were there, and the arena holds them to their budget."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway import SpillOptions, StepReport
from spillway.native import library
from spillway.native.arena import HELD, Arena, counts
from tests.cpu.families import difference, state_of

pytestmark = pytest.mark.skipif(not library.wanted(library.HOOK), reason="SPILLWAY_NATIVE says so")

KiB, MiB = 1 << 10, 1 << 20
WIDTH = 128
BATCH = torch.ones(WIDTH, WIDTH)


class Training:
    """Layers of one width, as often as a step is told; a storage of 64 KiB for each turn and its activation."""

    def __init__(self, width: int = WIDTH) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(width, width)
        self.optimizer = torch.optim.Adam(self.model.parameters(), foreach=False)

    def step(self, batch: Tensor, turns: int = 4, *, clears: str = "behind") -> None:
        if clears == "before":
            self.optimizer.zero_grad()
        rows = batch
        for _ in range(turns):
            rows = torch.tanh(self.model(rows))
        rows.square().mean().backward()
        self.optimizer.step()
        if clears == "behind":
            self.optimizer.zero_grad()

    def under(
        self, budget: int | str, turns: list[int], batch: Tensor = BATCH, *, clears: str = "behind",
        between: Callable[[], object] = lambda: None, **options: Any,
    ) -> list[StepReport]:  # fmt: skip
        with spillway.manage(self.model, self.optimizer, budget=budget, **{"method": "lru"} | options) as memory:
            for count in turns:
                with memory.step(batch):
                    self.step(batch, count, clears=clears)
                between()
            return memory.history

    def plainly(self, turns: list[int], batch: Tensor = BATCH, *, clears: str = "behind") -> Any:
        for count in turns:
            self.step(batch, count, clears=clears)
        return state_of(self.model, self.optimizer)


def peak_of(turns: int, batch: Tensor = BATCH, width: int = WIDTH) -> int:
    """To the byte, as every op of it is seen; of what ops take for themselves there is nothing here."""
    with spillway.manage((one := Training(width)).model, one.optimizer, budget=None, method="lru") as memory:
        for _ in range(2):
            with memory.step(batch):
                one.step(batch, turns)
        return memory.history[-1].peak_bytes


def unwatched(reports: list[StepReport]) -> list[bool]:
    return [report.ops == 0 for report in reports]


@pytest.mark.parametrize("method", ["lru", "delta", "dtr", "keep-all"])
def test_a_step_that_is_known_to_fit_is_counted_and_not_watched(method: str) -> None:
    turns = [4] * 6
    found = Training()
    reports = found.under("64 MiB", turns, method=method)
    assert difference(Training().plainly(turns), state_of(found.model, found.optimizer)) is None
    assert unwatched(reports) == [False, False, True, True, True, True]
    watched = reports[1]
    for report in reports[2:]:
        assert (report.managed, report.signature, report.beyond_bytes) == (False, watched.signature, 0)
        assert 0 <= report.peak_bytes - watched.peak_bytes < watched.peak_bytes // 32
        assert 0 <= report.start_bytes - watched.start_bytes < 4 * KiB


@pytest.mark.parametrize("width", [WIDTH, 32])  # in the arena, and what is too small for it
def test_what_has_no_room_in_the_budget_lies_in_a_file_and_the_next_such_step_is_watched(width: int) -> None:
    turns, batch = [4, 4, 4, 40, 4, 4, 40, 4], torch.ones(width, width)
    budget = peak_of(4, batch, width) * 5 // 4
    found = Training(width)
    reports = found.under(budget, turns, batch)
    assert difference(Training(width).plainly(turns, batch), state_of(found.model, found.optimizer)) is None
    assert unwatched(reports) == [False, False, True, True, False, False, False, False]
    assert all(report.peak_bytes <= budget for report in reports)
    assert reports[3].beyond_bytes > budget
    assert reports[6].moves > 0
    assert not any(report.beyond_bytes for report in [*reports[:3], *reports[4:]])


def test_what_such_a_step_leaves_in_the_file_comes_into_memory() -> None:
    one = Training()
    budget = peak_of(4) * 5 // 4
    with spillway.manage(one.model, one.optimizer, budget=budget, method="lru") as memory:
        for _ in range(3):
            with memory.step(BATCH):
                one.step(BATCH)
        with memory.step(BATCH):
            one.step(BATCH, 40)
            for parameter in one.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            kept = [torch.ones(WIDTH, WIDTH) for _ in range(64)]  # of the user's own
        engine: Any = memory._engine
        is_beyond = engine.backend._op_memory.is_beyond
        assert any(is_beyond(tensor.data_ptr()) for tensor in kept)
        gradients = [parameter.grad for parameter in one.model.parameters() if parameter.grad is not None]
        assert not any(is_beyond(gradient.data_ptr()) for gradient in gradients)
        assert all(bool((tensor == 1).all()) for tensor in (*kept, *gradients))


@pytest.mark.parametrize("clears", ["before", "behind", "between"])
def test_what_dies_in_a_later_step_or_between_two_is_counted_no_longer(clears: str) -> None:
    one = Training()
    zero = one.optimizer.zero_grad if clears == "between" else lambda: None
    reports = one.under("64 MiB", [4] * 12, clears=clears, between=zero)
    assert unwatched(reports) == [False] * 2 + [True] * 10
    for figures in ({report.start_bytes for report in reports[3:]}, {report.peak_bytes for report in reports[3:]}):
        assert (
            max(figures) - min(figures) < KiB
        )  # malloc gives a little more than it is asked for, and not always as much
    assert reports[3].peak_bytes - reports[1].peak_bytes < reports[1].peak_bytes // 32


@pytest.mark.parametrize("clears", ["before", "behind"])
def test_watched_steps_between_them_take_over_what_they_left(clears: str) -> None:
    one, other = Training(), torch.ones(2 * WIDTH, WIDTH)
    with spillway.manage(one.model, one.optimizer, budget="64 MiB", method="lru") as memory:
        for number in range(24):
            batch = other if number in (6, 12, 18) else BATCH
            with memory.step(batch if number != 18 else None):  # without a signature it is always watched
                one.step(batch, clears=clears)
        reports = memory.history
    assert unwatched(reports[2:]) == [number in (6, 18) for number in range(2, 24)] or unwatched(reports[2:]) == [
        number not in (6, 18) for number in range(2, 24)
    ]
    starts = [report.start_bytes for report in reports[3:] if report.signature == reports[3].signature]
    assert max(starts) - min(starts) < 4 * KiB + other.nbytes
    peaks = [report.peak_bytes for report in reports[3:] if report.signature == reports[3].signature]
    assert max(peaks) - min(peaks) < max(peaks) // 32 + other.nbytes


def test_what_the_engine_knew_and_what_dies_meanwhile_is_counted_no_longer() -> None:
    one = Training()
    with spillway.manage(one.model, one.optimizer, budget="64 MiB", method="lru") as memory:
        for number in range(4):
            with memory.step(BATCH):
                one.step(BATCH, clears="never" if number < 2 else "before")
        last, first = memory.history[-1], memory.history[2]
    assert (last.ops, first.ops) == (0, 0)
    assert abs(last.peak_bytes - first.peak_bytes) < 4 * KiB


def test_a_step_with_ops_from_another_thread_is_watched() -> None:
    one = Training()

    def elsewhere() -> None:
        with torch.enable_grad():
            one.model(BATCH).sum().backward()

    with spillway.manage(one.model, one.optimizer, budget="64 MiB", method="lru") as memory:
        for _ in range(5):
            with memory.step(BATCH):
                loss = one.model(BATCH).sum()
                thread = threading.Thread(target=loss.backward)
                thread.start()
                thread.join()
                one.optimizer.step()
                one.optimizer.zero_grad()
    assert not any(unwatched(memory.history))


def test_what_a_step_uses_and_does_not_make_is_left_room_for() -> None:
    one, target = Training(), torch.ones(WIDTH, WIDTH)
    budget = peak_of(4) + 8 * target.nbytes
    targets = [torch.ones(WIDTH, WIDTH) for _ in range(8)]
    with spillway.manage(one.model, one.optimizer, budget=budget, method="lru") as memory:
        for number in range(8):
            with memory.step(BATCH):
                (one.model(BATCH) - targets[number]).square().mean().backward()
                one.optimizer.step()
                one.optimizer.zero_grad()
        session: Any = memory
        assert [unseen for _, unseen in session._unwatched.values()] == [target.nbytes]
        assert memory.history[-1].ops == 0


def test_where_the_directory_has_no_room_the_step_says_so_and_training_goes_on(tmp_path: Path) -> None:
    one, directory = Training(), tmp_path / "spill"
    directory.mkdir()
    spill = SpillOptions(directory=directory)
    with spillway.manage(one.model, one.optimizer, budget=peak_of(4) * 5 // 4, method="lru", spill=spill) as memory:
        for _ in range(3):
            with memory.step(BATCH):
                one.step(BATCH)
        directory.rmdir()
        said = r"This step takes \d+ bytes at once, its budget is \d+.*no room.*No such file.*raise the budget"
        with pytest.raises(torch.OutOfMemoryError, match=said), memory.step(BATCH):
            one.step(BATCH, 40)
        directory.mkdir()
        one.optimizer.zero_grad()
        for _ in range(2):
            with memory.step(BATCH):
                one.step(BATCH)
    assert all(report.peak_bytes <= memory.allowed for report in memory.history)


def test_an_error_in_such_a_step_is_the_users_and_the_next_one_begins() -> None:
    one = Training()
    with spillway.manage(one.model, one.optimizer, budget="64 MiB", method="lru") as memory:
        for number in range(6):
            if number == 3:
                with pytest.raises(KeyError), memory.step(BATCH):
                    one.step(BATCH)
                    raise KeyError(number)
            with memory.step(BATCH):
                one.step(BATCH)
        assert unwatched(memory.history) == [False, False, True, True, True, True]


def test_a_session_that_closes_in_such_a_step_or_is_dropped_counts_for_nobody() -> None:
    one = Training()
    for ends in ("closed", "dropped"):
        memory: Any = spillway.manage(one.model, one.optimizer, budget="64 MiB", method="lru")
        for _ in range(3):
            with memory.step(BATCH):
                one.step(BATCH)
        cells = memory._engine.backend._op_memory.cells
        memory.begin(BATCH)
        assert memory._engine.unwatched
        if ends == "closed":
            memory.close()
        else:
            del memory
            gc.collect()
            with spillway.manage(nn.Linear(2, 2), budget="1 MiB", method="lru") as another, another.step():
                pass
        before = cells[HELD]
        kept = torch.ones(MiB)
        assert cells[HELD] <= before
        assert kept.sum() == MiB


@pytest.mark.parametrize("kept_bytes", [256 * KiB, 8 * KiB])  # in the arena, and what is too small for it
def test_what_the_user_keeps_of_such_steps_counts_in_watched_ones_too(kept_bytes: int) -> None:
    one, kept, before = Training(), list[Tensor](), counts().live
    budget, count = 8 * MiB, 48 if kept_bytes > MiB // 8 else 512
    with spillway.manage(one.model, one.optimizer, budget=budget, method="lru") as memory:
        for number in range(3 + 12 * MiB // (count * kept_bytes // 16)):
            with memory.step(BATCH):
                one.step(BATCH)
                kept += [torch.full((kept_bytes // 4,), float(number)) for _ in range(count // 16)]
            assert counts().live - before <= budget
        reports = memory.history
        assert True in unwatched(reports)
        assert sum(report.moves for report in reports) > 0
        assert all(report.peak_bytes <= budget for report in reports)
        assert sum(tensor.nbytes for tensor in kept) > budget
        assert reports[-1].end_bytes > budget * 3 // 4
    assert [float(tensor[0]) for tensor in kept[:: count // 16]] == list(map(float, range(len(reports))))


def test_what_graphs_keep_of_such_steps_counts_in_watched_ones_too() -> None:
    one, kept = Training(), list[Tensor]()
    with spillway.manage(one.model, one.optimizer, budget="8 MiB", method="lru") as memory:
        for _ in range(4):
            with memory.step(BATCH):
                one.step(BATCH)
                rows = BATCH
                for _ in range(8):
                    rows = torch.tanh(one.model(rows))
                kept.append(rows.sum())
        with memory.step():
            pass
        assert unwatched(memory.history)[2:4] == [True, True]
        by_graphs = 2 * 8 * BATCH.nbytes
        assert memory.history[-1].start_bytes - memory.history[1].start_bytes >= by_graphs
        del rows, kept[2:]
        with memory.step():
            pass
        assert memory.history[-2].start_bytes - memory.history[-1].start_bytes >= by_graphs


def test_what_graphs_let_go_of_in_a_watched_step_leaves_room_for_others() -> None:
    one, kept = Training(), list[Tensor]()
    with spillway.manage(one.model, one.optimizer, budget="8 MiB", method="lru") as memory:
        for number in range(4):
            with memory.step(BATCH):
                one.step(BATCH)
                rows = BATCH
                for _ in range(64 if number == 3 else 1):
                    rows = torch.tanh(one.model(rows))
                kept.append(rows.sum())
        del rows
        with memory.step():
            kept.clear()
            parts = [torch.ones(WIDTH, WIDTH) for _ in range(96)]
        assert unwatched(memory.history) == [False, False, True, True, False]
        assert memory.history[-1].start_bytes > 4 * MiB
        assert (memory.history[-1].moves, memory.history[-1].drops) == (0, 0)
        del parts


def _loaded(one: Training) -> None:
    one.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))


def _assigned(one: Training) -> None:
    one.model.load_state_dict(copy.deepcopy(one.model.state_dict()), assign=True)


def _grown(one: Training) -> None:
    one.model.register_buffer("mask", torch.zeros(MiB))


def _resized(one: Training) -> None:
    one.optimizer.state[one.model.weight]["exp_avg"].resize_(2 * WIDTH, WIDTH).zero_().resize_(WIDTH, WIDTH)


def _given_a_gradient(one: Training) -> None:
    one.model(BATCH).sum().backward()


_RESTORED = torch.zeros(WIDTH, WIDTH)


def _pointed_elsewhere(one: Training) -> None:
    one.model.weight.data = _RESTORED  # made long ago


@pytest.mark.parametrize(
    ("change", "added"),
    [(_loaded, 0), (_assigned, BATCH.nbytes), (_pointed_elsewhere, 0), (_grown, 4 * MiB), (_resized, BATCH.nbytes),
     (_given_a_gradient, BATCH.nbytes)],
)  # fmt: skip
def test_what_is_put_in_place_of_what_has_a_name_between_steps_counts(
    change: Callable[[Training], None], added: int
) -> None:
    one = Training()
    with spillway.manage(one.model, one.optimizer, budget="64 MiB", method="lru") as memory:
        for number in range(5):
            if number == 4:
                change(one)
                gc.collect()
            with memory.step(BATCH):
                one.step(BATCH, clears="before")
                one.optimizer.zero_grad()
        before, after = memory.history[3:]
    assert (before.ops, after.ops) == (0, 0)
    assert abs(after.start_bytes - before.start_bytes - added) < 4 * KiB


def test_bytes_that_a_step_gives_another_size_count_once() -> None:
    one = Training()
    one.model.register_buffer("scratch", torch.zeros(4 * KiB))
    budget, kept = 8 * MiB, list[Tensor]()
    with spillway.manage(one.model, one.optimizer, budget=budget, method="lru") as memory:
        for number in range(4):
            before = counts().live
            with memory.step(BATCH):
                one.model.scratch.add_(1)
                if number == 3:
                    one.model.scratch.untyped_storage().resize_(6 * MiB)
                    one.model.scratch = torch.zeros(4 * KiB)
                    kept += [torch.ones(MiB // 8) for _ in range(24)]
                    assert counts().live - before <= budget
                one.step(BATCH)
    assert memory.history[-1].beyond_bytes > 0


def in_the_file(tensors: list[Tensor], memory: Any) -> list[bool]:
    """Asked so that nobody believes that the addresses were given away."""
    is_beyond = memory._engine.backend._op_memory.is_beyond
    return [is_beyond(tensor.untyped_storage().data_ptr()) for tensor in tensors]


def filled(budget: int, count: int = 64, numbers: int = WIDTH * WIDTH) -> tuple[Training, Any, list[Tensor]]:
    """A session with a step that made so many tensors, of which some lie in the file."""
    one = Training()
    memory = spillway.manage(one.model, one.optimizer, budget=budget, method="lru")
    for _ in range(3):
        with memory.step(BATCH):
            one.step(BATCH)
    with memory.step(BATCH):
        kept = [torch.ones(numbers) for _ in range(count)]
    return one, memory, kept


def test_what_lies_in_the_file_is_a_forked_childs_own_and_stays_the_parents() -> None:
    _, memory, kept = filled(2 * MiB)
    assert True in in_the_file(kept, memory)
    for parent_first in (False, True):
        (from_parent, to_child), (from_child, to_parent) = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            os.read(from_parent, 1)
            right = all(bool((tensor == 1).all()) for tensor in kept)
            for tensor in kept:
                tensor.zero_()
            os.write(to_parent, b"y" if right else b"n")
            os._exit(0)
        gone = [kept.pop(), kept.pop()] if parent_first else []
        for tensor in kept if parent_first else []:
            tensor.fill_(2)
        del gone
        more = [torch.full((WIDTH, WIDTH), 3.0) for _ in range(4)]
        os.write(to_child, b"x")
        assert os.read(from_child, 1) == b"y"
        os.waitpid(child, 0)
        for end in (from_parent, to_child, from_child, to_parent):
            os.close(end)
        assert all(bool((tensor == (2 if parent_first else 1)).all()) for tensor in kept)
        assert all(bool((tensor == 3).all()) for tensor in more)
    memory.close()


def test_nothing_that_a_tensor_is_known_for_stays_in_the_file_when_the_session_closes() -> None:
    files = set(os.listdir("/proc/self/fd"))
    one, memory, kept = filled(2 * MiB)
    with memory.step(torch.ones(WIDTH, 2)):
        pass
    with pytest.raises(KeyError), memory.step(BATCH):  # an optimizer's state and gradients among it
        raise KeyError
    assert True in in_the_file(kept, memory)
    memory.close()
    assert not any(in_the_file([*kept, *one.model.parameters()], memory))
    assert not memory._engine.backend._op_memory.lends()
    assert all(bool((tensor == 1).all()) for tensor in kept)
    assert set(os.listdir("/proc/self/fd")) == files


def test_a_view_that_autograd_forbids_to_look_at_is_brought_out_of_the_file_as_well() -> None:
    """Program 424 of the random ones, whose session could not be closed."""
    _, memory, kept = filled(2 * MiB)
    whole = torch.ones(4, requires_grad=True) * 2
    halves = whole.split(2)
    whole.add_(1)
    with pytest.raises(RuntimeError, match="modified inplace"):
        _ = halves[0].is_leaf
    memory.close()
    assert not any(in_the_file([*kept, whole], memory))


def test_what_lies_in_the_file_of_another_session_stays_there_when_one_closes() -> None:
    one, memory, kept = filled(2 * MiB)
    _, other, others = filled(2 * MiB)
    before = in_the_file(kept, memory)
    assert any(before)
    assert any(in_the_file(others, other))
    other.close()
    assert not any(in_the_file(others, other))
    assert in_the_file(kept, memory) == before
    with memory.step(BATCH):
        one.step(BATCH)
    memory.close()
    assert not any(in_the_file(kept, memory))


def test_what_is_small_takes_few_mappings_of_the_file() -> None:
    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    before = mappings()
    _, memory, kept = filled(2 * MiB, 4000, 256)
    assert sum(in_the_file(kept, memory)) > 1000
    assert mappings() - before < 200
    del kept[::2]
    more = [torch.full((300,), 2.0) for _ in range(100)]
    assert all(bool((tensor == 1).all()) for tensor in kept)
    assert all(bool((tensor == 2).all()) for tensor in more)
    memory.close()
    assert not memory._engine.backend._op_memory.lends()
    assert all(bool((tensor == 1).all()) for tensor in kept)


def test_what_is_small_counts_for_the_session_whose_steps_made_it() -> None:
    _, memory, kept = filled(8 * MiB, 1000, 256)
    other = Training()
    with spillway.manage(other.model, other.optimizer, budget="1 MiB", method="lru") as another:
        for _ in range(4):
            with another.step(BATCH):
                other.step(BATCH, 2)
    assert unwatched(another.history) == [False, False, True, True]
    assert another.history[-1].start_bytes < MiB // 2
    with memory.step():
        pass
    assert memory.history[-1].start_bytes > sum(tensor.nbytes for tensor in kept)
    memory.close()


def test_what_gives_its_address_away_in_such_a_step_stays() -> None:
    one, budget = Training(), 4 * MiB
    with spillway.manage(one.model, one.optimizer, budget=budget, method="lru") as memory:
        for _ in range(3):
            with memory.step(BATCH):
                one.step(BATCH)
        with memory.step(BATCH):
            one.step(BATCH)
            held, free = torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH)
            address = held.data_ptr()
        with memory.step():
            held + free
            rest = [torch.ones(WIDTH, WIDTH) for _ in range(80)]
        assert unwatched(memory.history) == [False, False, True, True, False]
        assert memory.history[-1].moves > 0
        assert held.untyped_storage().data_ptr() == address
        assert memory._engine.find(free).value.absent  # type: ignore[attr-defined]
        assert memory._engine.find(held).escaped  # type: ignore[attr-defined]
        del rest


def test_what_gives_its_address_away_in_the_file_stays_there_and_does_not_count() -> None:
    one, memory, kept = filled(2 * MiB)
    with memory.step(BATCH):
        one.step(BATCH, 1)
    lies = [tensor for tensor, in_file in zip(kept, in_the_file(kept, memory), strict=True) if in_file]
    arrays = [tensor.numpy() for tensor in lies]
    with memory.step():
        lies[0].add_(1)
        arrays[1] += 1
    assert memory.history[-1].peak_bytes <= 2 * MiB
    memory.close()
    for tensor, array in zip(lies, arrays, strict=True):
        array += 1
        tensor += 1
    assert [float(tensor[0]) for tensor in lies[:3]] == [4, 4, 3]
    assert all(bool((tensor == torch.from_numpy(array)).all()) for tensor, array in zip(lies, arrays, strict=True))


def test_without_the_arena_such_steps_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "for_session", lambda: None)
    assert not any(unwatched(Training().under("64 MiB", [4] * 4)))
