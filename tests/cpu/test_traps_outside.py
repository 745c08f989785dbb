"""Traps that prototypes of the engine fell into, by name: what the dispatcher does not show (11 to 13), absent
storages."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spillway
from spillway.methods import Drop, Move
from spillway.session import Session
from tests.cpu.bits import storage_of
from tests.cpu.pressure import ORDERS, PLENTY, InputsLeave, Way, image, is_dropped, is_moved, put_away

SIDE = 64


@pytest.fixture
def memory() -> Iterator[Session]:
    """A session that lets tests decide what leaves."""
    with spillway.manage(nn.Linear(SIDE, SIDE), budget=PLENTY, method=ORDERS["recompute first"]()) as session:
        yield session


def matrix(seed: int = 0) -> Tensor:
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------- 11. undeclared aliases, tensors without storage


@pytest.mark.parametrize("way", [Drop, Move])
@pytest.mark.parametrize(
    "alias",
    [
        lambda x: torch.ops.aten._unsafe_view(x, [SIDE * SIDE]),
        lambda x: torch.ops.aten.unsafe_split(x, 16)[1],
        lambda x: torch.ops.aten.unsafe_split_with_sizes(x, [24, 40])[1],
        lambda x: x.view(torch.int32),
        lambda x: torch.view_as_real(torch.view_as_complex(x.view(SIDE, SIDE // 2, 2))),
        lambda x: x.as_strided((SIDE,), (SIDE + 1,)),
        lambda x: x.reshape(-1).unfold(0, 8, 4),
    ],
    ids=["_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "view of a dtype", "complex", "diagonal", "unfold"],
)
def test_an_alias_shares_the_absence_and_the_bytes_of_its_storage(
    memory: Session, alias: Callable[[Tensor], Tensor], way: Way
) -> None:
    with memory.step(), torch.no_grad():
        x = matrix() + 1
        known = len(memory._engine.table)
        other = alias(x)
        assert len(memory._engine.table) == known
        expected = image(other)
        assert put_away(memory, x, way)
        assert image(other) == expected
        hanging = x * 2
        before = image(hanging)
        assert put_away(memory, hanging, way)
        other.zero_()
        assert image(hanging) == before
        assert put_away(memory, other, way)
        assert not image(other)[3].strip(b"\0")


def test_conjugated_and_negated_views_are_read_as_what_they_are(memory: Session) -> None:
    with memory.step():
        x = torch.complex(matrix(), matrix(1)) * 2
        conjugate, imaginary = x.conj(), x.conj().imag
        products = [conjugate * 3, imaginary + 1, conjugate.resolve_conj(), imaginary.resolve_neg()]
        expected = [image(product) for product in products]
        for way in (Drop, Move):
            for tensor in (*products, x):
                put_away(memory, tensor, way)
            assert [image(product) for product in products] == expected


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda x: x.relu().to_sparse(),
    "compressed rows": lambda x: x.relu().to_sparse_csr(),
    "oneDNN": lambda x: x.to_mkldnn(),
    "meta": lambda x: x.to("meta"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("budget", [None, "120 KiB"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_without_a_storage_of_their_own_are_passed_by_and_counted(name: str, budget: str | None) -> None:
    def program() -> list[Tensor]:
        x = LAYOUTS[name](matrix())
        if name == "meta":
            return [matrix() * 2, torch.tensor((x @ x).shape)]
        dense = torch.relu(x).to_dense()
        return [dense, matrix() @ dense]

    expected = [image(tensor) for tensor in program()]
    with spillway.manage(nn.Linear(1, 1), budget=budget, method="lru") as memory:
        with memory.step():
            assert [image(tensor) for tensor in program()] == expected
        assert memory.history[-1].unmanaged > 0


def test_sparse_gradients_train_as_they_do_plainly() -> None:
    def trained(budget: str | None, managed: bool) -> list[Any]:
        torch.manual_seed(0)
        table = nn.Embedding(500, SIDE, sparse=True)
        optimizer = torch.optim.SparseAdam(list(table.parameters()))
        rows = torch.arange(3 * SIDE).remainder(50)
        with spillway.manage(table, optimizer, budget=budget, method="lru") as memory:
            for _ in range(3):
                if managed:
                    with memory.step(rows):
                        train_rows(table, optimizer, rows)
                else:
                    train_rows(table, optimizer, rows)
        return [image(tensor) for tensor in (table.weight, table.weight.grad.to_dense())]

    def train_rows(table: nn.Embedding, optimizer: torch.optim.Optimizer, rows: Tensor) -> None:
        optimizer.zero_grad()
        table(rows).square().sum().backward()
        optimizer.step()

    plain = trained(None, managed=False)
    assert trained(None, managed=True) == plain
    assert trained("700 KiB", managed=True) == plain


def test_inference_mode_inside_a_step_gives_right_values_and_tensors_of_its_kind(memory: Session) -> None:
    net = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Dropout(0.5), nn.LayerNorm(SIDE), nn.ReLU(inplace=True)).eval()
    expected = image(net(matrix()))
    with memory.step(), torch.inference_mode(), InputsLeave(memory, Drop, Move):
        out = net(matrix())
        assert put_away(memory, out, Drop)
        assert image(out) == expected
        assert out.is_inference()


# ---------------------------------------------------------------------- 12. never replayed


def test_what_holds_no_content_yet_is_not_dropped_but_what_was_filled_is(memory: Session) -> None:
    with memory.step():
        hollow = torch.empty(SIDE, SIDE)
        bytes_of_nobody = image(hollow)
        assert not put_away(memory, hollow, Drop)
        assert put_away(memory, hollow, Move)
        assert image(hollow) == bytes_of_nobody
        filled = torch.empty(SIDE, SIDE).fill_(3)
        assert put_away(memory, filled, Drop)
        assert bool((filled == 3).all())
        half = torch.empty(SIDE, SIDE)
        half[: SIDE // 2] = 1
        before = image(half)
        assert not put_away(memory, half, Drop) or image(half) == before
    assert memory.history[-1].refusals


def test_a_loss_whose_sums_have_no_order_is_moved_instead(memory: Session) -> None:
    def work() -> list[Tensor]:
        scores = torch.randn(50, 16, 20, generator=torch.Generator().manual_seed(0)).requires_grad_()
        labels = torch.arange(16 * 10).remainder(19).view(16, 10) + 1
        losses = F.ctc_loss(
            scores.log_softmax(2), labels, torch.full((16,), 50), torch.full((16,), 10), reduction="none"
        )
        losses.sum().backward()
        assert scores.grad is not None
        return [losses.detach(), scores.grad]

    expected = [image(tensor) for tensor in work()]
    with memory.step():
        made = torch.ops.aten._ctc_loss(
            torch.zeros(50, 16, 20), torch.ones(16, 10, dtype=torch.long), [50] * 16, [10] * 16
        )
        assert not put_away(memory, made[1], Drop)
        with InputsLeave(memory, Drop, Move):
            found = work()
        assert [image(tensor) for tensor in found] == expected


# ---------------------------------------------------------------------- 13. around the dispatcher


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def address_read(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


def in_a_thread(read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def run(tensor: Tensor) -> Any:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(read(tensor)))
        thread.start()
        thread.join()
        return found[0]

    return run


READERS: dict[str, Callable[[Tensor], Any]] = {
    "print": str,
    "repr": repr,
    "format": lambda t: f"{t}",
    "tolist": lambda t: t.tolist(),
    "item": lambda t: t[1, 2].item(),
    "iteration": lambda t: [float(row[3]) for row in t],
    "numpy": lambda t: t.numpy().tolist(),
    "numpy of a view": lambda t: t.t()[3:].numpy().tolist(),
    "numpy.asarray": lambda t: numpy.asarray(t).tolist(),
    "numpy.array of a list": lambda t: numpy.array([t, t]).tolist(),
    "data_ptr": lambda t: ctypes.string_at(t.data_ptr(), t.nbytes),
    "data_ptr of a view": lambda t: ctypes.string_at(t[3].data_ptr(), t[3].nbytes),
    "dlpack": lambda t: torch.from_dlpack(t).tolist(),
    "dlpack to NumPy": lambda t: numpy.from_dlpack(t).tolist(),
    "dlpack by hand": lambda t: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t)).tolist(),
    "storage bytes": lambda t: [t.untyped_storage()[n] for n in range(100)],
    "storage address": lambda t: address_read(t.untyped_storage()),
    "storage clone": lambda t: address_read(t.untyped_storage().clone()),
    "save": lambda t: saved(t).tolist(),
    "save of a storage": lambda t: address_read(saved(t.untyped_storage())._untyped_storage),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)).tolist(),
    "pickle of a parameter": lambda t: pickle.loads(pickle.dumps(nn.Parameter(t))).tolist(),
    "deepcopy": lambda t: copy.deepcopy(t).tolist(),
    "deepcopy of a parameter": lambda t: copy.deepcopy(nn.Parameter(t)).tolist(),
    "deepcopy of a storage": lambda t: address_read(copy.deepcopy(t.untyped_storage())),
    "share_memory_": lambda t: t.share_memory_().tolist(),
    "map_": lambda t: t.clone().map_(t, lambda a, b: a + b).tolist(),
    "new from data": lambda t: torch.tensor(t.tolist()).tolist(),
    "equal": lambda t: torch.equal(t, t.clone()),
    "tolist in a thread": in_a_thread(lambda t: t.tolist()),
    "numpy in a thread": in_a_thread(lambda t: t.numpy().tolist()),
    "repr in a thread": in_a_thread(repr),
}


@pytest.mark.parametrize("way", [Drop, Move])
@pytest.mark.parametrize("name", READERS)
def test_what_the_dispatcher_does_not_see_reads_right_values_in_the_middle_of_a_step(
    memory: Session, name: str, way: Way
) -> None:
    expected = READERS[name](matrix() * 2)
    with memory.step():
        x = matrix() * 2
        assert put_away(memory, x, way)
        assert READERS[name](x) == expected
        put_away(memory, x, way)
        assert READERS[name](x) == expected
        assert image(x) == image(matrix() * 2)
    assert READERS[name](x) == expected


@pytest.mark.parametrize("name", READERS)
def test_what_the_dispatcher_does_not_see_reads_right_values_between_steps(memory: Session, name: str) -> None:
    expected = READERS[name](matrix() * 2)
    with memory.step():
        x, unread = matrix() * 2, matrix() * 2
        for tensor in (x, unread):
            assert put_away(memory, tensor, Move)
    assert is_moved(memory, x)
    assert READERS[name](x) == expected
    with memory.step():
        assert image(x) == image(matrix() * 2)
    assert is_moved(memory, unread)
    memory.close()
    assert READERS[name](unread) == expected


@pytest.mark.parametrize("read", [in_a_thread(lambda t: t.sum().item()), in_a_thread(lambda t: (t * 2).tolist())])
def test_ops_in_another_thread_read_what_was_moved(memory: Session, read: Callable[[Tensor], Any]) -> None:
    expected = read(matrix())
    with memory.step():
        x = matrix()
        assert put_away(memory, x, Move)
        assert read(x) == expected


WRITERS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda t: t.numpy().fill(7),
    "numpy of a view": lambda t: t[3:9].numpy().fill(7),
    "dlpack": lambda t: torch.from_dlpack(t).fill_(7),
    "data_ptr": lambda t: ctypes.memset(t.data_ptr(), 0, t.nbytes),
    "apply_": lambda t: t.apply_(lambda value: value + 1),
    "storage": lambda t: t.untyped_storage().fill_(0),
}


@pytest.mark.parametrize("way", [Drop, Move])
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_past_the_dispatcher_stays_written(memory: Session, name: str, way: Way) -> None:
    plain = matrix() * 2
    WRITERS[name](plain)
    with memory.step():
        x = matrix() * 2
        assert put_away(memory, x, way)
        WRITERS[name](x)
        assert image(x) == image(plain)
        assert image(x * 3) == image(plain * 3)
        for again in (Drop, Move):
            put_away(memory, x, again)
            assert image(x) == image(plain)
    assert image(x) == image(plain)


# ---------------------------------------------------------------------- absent storages


def test_a_moved_storage_keeps_identity_views_saved_tensors_and_version_counters(memory: Session) -> None:
    with memory.step():
        x = (matrix() * 2).requires_grad_()
        view, loss = x[3:9], (x * x).sum()
        storage, version, number = x.untyped_storage(), x._version, torch._C._storage_address(x)
        expected = image(view)
        assert put_away(memory, x, Move)
        assert x.untyped_storage()._cdata == storage._cdata
        assert (x._version, torch._C._storage_address(x)) == (version, number)
        assert image(view) == expected
        assert put_away(memory, x, Move)
        loss.backward()
        assert x.grad is not None
        assert image(x.grad) == image(2 * x)


@pytest.mark.parametrize("way", [Drop, Move])
def test_a_view_in_numpy_keeps_a_storage_where_it_is_and_is_counted(memory: Session, way: Way) -> None:
    with memory.step():
        x = matrix() * 2
        array = x.numpy()
        assert not put_away(memory, x, way)
        array[3, 4] = 5
        assert x[3, 4].item() == 5
        x.add_(1)
        assert array[3, 4] == 6
        assert not put_away(memory, x, way)
    assert memory.history[-1].escaped == 1
    assert "not free to leave" in memory.history[-1].refusals


@pytest.mark.parametrize("make", [lambda: torch.from_numpy(numpy.ones((SIDE, SIDE))), lambda: matrix().share_memory_()])
def test_memory_that_is_not_torchs_own_is_left_alone(memory: Session, make: Callable[[], Tensor]) -> None:
    batch = make()
    expected = image(batch + 1)
    with memory.step(batch):
        assert not put_away(memory, batch, Move)
        assert image(batch + 1) == expected
    assert memory.history[-1].escaped == 1


def test_storages_below_a_page_are_not_offered_to_leave(memory: Session) -> None:
    with memory.step():
        small, large = [torch.ones(100) * n for n in range(50)], matrix() * 2
        offered = [storage.nbytes for storage in memory._engine.controller.view.candidates()]
        assert large.nbytes in offered
        assert small[0].nbytes not in offered


@pytest.mark.parametrize("rows", [SIDE // 2, 2 * SIDE])
def test_a_moved_storage_can_be_given_another_size(memory: Session, rows: int) -> None:
    with memory.step():
        x = matrix() * 2
        assert put_away(memory, x, Move)
        x.resize_(rows, SIDE)
        assert image(x[: SIDE // 2]) == image((matrix() * 2)[: SIDE // 2])
        x.fill_(3)
        assert put_away(memory, x, Move)
        assert bool((x == 3).all())


@pytest.mark.parametrize("way", [Move, Drop])
def test_a_storage_can_be_emptied_and_filled_again_as_sharded_training_does(memory: Session, way: Way) -> None:
    controller = memory._engine.controller
    with memory.step():
        x = matrix()
        doubled = x * 2
        real = storage_of(x)
        assert put_away(memory, doubled, way)
        assert put_away(memory, x, Move)
        real.resize_(0)
        assert way is Move or not is_dropped(memory, doubled), "what would be recomputed from it came back first"
        present = controller.budget.resident
        real.resize_(doubled.nbytes)
        assert controller.budget.resident == present + doubled.nbytes
        x.fill_(3)
        assert put_away(memory, x, Move)
        assert bool((x == 3).all())
        assert image(doubled) == image(matrix() * 2)


def test_a_storage_does_not_grow_beyond_the_budget() -> None:
    with spillway.manage(nn.Linear(SIDE, SIDE), budget=4 << 20) as memory, memory.step():
        x = matrix() + 0
        with pytest.raises(spillway.BudgetInfeasible, match="resize of a storage"):
            x.untyped_storage().resize_(8 << 20)
        assert image(x) == image(matrix())


@pytest.mark.parametrize("rows", [SIDE // 4, 4 * SIDE])
def test_a_replay_accounts_for_what_a_storage_was_before_it_got_another_size(memory: Session, rows: int) -> None:
    controller = memory._engine.controller
    with memory.step():
        x = matrix() * 2
        y = x.exp()
        storage_of(x).resize_(rows * SIDE * 4)
        assert put_away(memory, y, Drop)
        controller.budget.begin()
        present = controller.budget.resident
        y.neg_()
        assert controller.budget.peak == present + 2 * y.nbytes
        assert image(y) == image((matrix() * 2).exp().neg())


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_what_an_op_made_larger_is_not_dropped(memory: Session) -> None:
    with memory.step():
        target = matrix() * 2
        torch.cat([matrix(), matrix(1)], out=target)
        assert not put_away(memory, target, Drop), "a replay would grow, and no room is made for that"
        assert put_away(memory, target, Move)
        assert image(target) == image(torch.cat([matrix(), matrix(1)]))
