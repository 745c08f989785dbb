"""Storages whose bytes somebody else holds: they stay, and only they."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway.native import library
from tests.cpu.alias_cases import ALIASES, KINDS, MOMENTS, loaded
from tests.cpu.another_process import run_python
from tests.cpu.pressure import PLENTY, Move, is_moved, put_away

SIDE = 64


@pytest.mark.long
def test_every_alias_sees_what_it_sees_without_a_session_whenever_it_was_taken() -> None:
    done = run_python("from tests.cpu.alias_cases import main; main()")
    every = product(ALIASES, MOMENTS, KINDS)
    assert done.stdout.splitlines() == [" ".join(map(str, (*case, True))) for case in every], done.stderr


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(SIDE, SIDE), nn.BatchNorm1d(SIDE), nn.Linear(SIDE, SIDE))
    return net, torch.optim.AdamW(net.parameters())


def train(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    loss: Tensor = net(batch).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


WITHOUT_OTHERS: dict[str, Callable[[nn.Module, torch.optim.Optimizer, Tensor], Any]] = {
    "nothing": lambda net, optimizer, batch: None,
    "a step before": train,
    "a snapshot": lambda net, optimizer, batch: net.state_dict(),
    "a snapshot of all": lambda net, optimizer, batch: (train(net, optimizer, batch), optimizer.state_dict()),
    "views": lambda net, optimizer, batch: [p[1:] for p in net.parameters() if p.dim() > 1] + [batch[2:], batch.T],
    "data": lambda net, optimizer, batch: (
        [p.data for p in net.parameters()] + [p.detach().view(-1) for p in net.parameters()]
    ),
    "storages": lambda net, optimizer, batch: [p.untyped_storage() for p in net.parameters()],
    "a second module": lambda net, optimizer, batch: nn.ParameterList(
        [nn.Parameter(p.detach()) for p in net.parameters()]
    ),
}


@pytest.mark.parametrize("name", WITHOUT_OTHERS)
def test_tensors_of_torch_that_share_a_storage_do_not_keep_it(name: str) -> None:
    net, optimizer = network()
    batch = torch.ones(4 * SIDE, SIDE)[SIDE:]
    held = WITHOUT_OTHERS[name](net, optimizer, batch)
    with spillway.manage(net, optimizer, budget=PLENTY, method="lru") as memory:
        for _ in range(2):
            with memory.step(batch):
                train(net, optimizer, batch)
            assert memory.history[-1].escaped == 0
    del held


def test_a_batch_of_slices_is_looked_for_by_its_base_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = network()
    monkeypatch.setattr(gc, "get_objects", lambda: pytest.fail("all objects were gone through"))
    with spillway.manage(net, optimizer, budget=PLENTY, method="lru") as memory:
        for _ in range(2):
            with memory.step(part := torch.ones(4 * SIDE, SIDE).chunk(2)):
                train(net, optimizer, part[0])


def exported(net: nn.Module) -> Iterator[tuple[Tensor, Any]]:
    weight: Tensor = net[0].weight  # type: ignore[assignment, index, union-attr]
    assert weight.grad is not None
    for tensor in (weight.detach(), weight.data, weight.grad, weight.detach()[3:], weight.detach().T):
        yield tensor, numpy.from_dlpack(tensor)


@pytest.mark.parametrize("number", range(5))
def test_what_a_capsule_holds_stays_and_is_counted(number: int) -> None:
    net, optimizer = network()
    batch = torch.ones(SIDE, SIDE)
    train(net, optimizer, batch)
    tensor, array = list(exported(net))[number]
    with spillway.manage(net, optimizer, budget=PLENTY, method="lru") as memory:
        with memory.step(batch):
            assert not put_away(memory, tensor, Move)
            assert put_away(memory, net[2].weight, Move)  # type: ignore[arg-type, index, union-attr]
        assert memory.history[-1].escaped == 1
        assert (array == tensor.numpy()).all()


def test_a_tensor_met_in_a_step_whose_bytes_a_capsule_holds_stays() -> None:
    net, table = nn.Linear(SIDE, SIDE), torch.ones(SIDE, SIDE)
    array = numpy.from_dlpack(table.view(-1))
    with spillway.manage(net, budget=PLENTY, method="lru") as memory:
        with memory.step():
            net(table).sum().backward()
            assert not put_away(memory, table, Move)
        array.fill(2)
        with memory.step():
            assert (table == 2).all()


def resumed(*, assign: bool) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A network and an optimizer as they come from a file, and what was read from it."""
    net, optimizer = network()
    train(net, optimizer, torch.ones(SIDE, SIDE))
    read = loaded([net.state_dict(), optimizer.state_dict()])
    net, _ = network()
    net.load_state_dict(read[0], assign=assign)
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.load_state_dict(read[1])
    return net, optimizer, read


@pytest.mark.parametrize("assign", [False, True])
def test_what_was_loaded_from_a_file_can_leave(assign: bool) -> None:
    if not library.wanted():
        pytest.skip("without the native part nobody knows whose memory it is")
    net, optimizer, read = resumed(assign=assign)
    batch = torch.ones(SIDE, SIDE)
    with spillway.manage(net, optimizer, budget=PLENTY, method="lru") as memory:
        for later in (False, True):
            if later:
                read = loaded(optimizer.state_dict())
                optimizer.load_state_dict(read)
            with memory.step(batch):
                train(net, optimizer, batch)
                for name in ("exp_avg", "exp_avg_sq"):
                    assert put_away(memory, optimizer.state[net[0].weight][name], Move)  # type: ignore[index]
                assert put_away(memory, net[0].weight, Move)  # type: ignore[arg-type, index]
        assert [report.escaped for report in memory.history] == [0, 0]
    moment = optimizer.state[net[0].weight]["exp_avg"]  # type: ignore[index]
    assert moment.untyped_storage().resizable()
    assert moment.resize_(4 * SIDE, SIDE).shape == (4 * SIDE, SIDE)


@pytest.fixture
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.long(but=2)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("of", [lambda t: t, lambda t: t[3:], lambda t: t.view(torch.int32), lambda t: t.detach()])
def test_what_was_loaded_and_is_shown_by_an_array_stays(
    of: Callable[[Tensor], Tensor], frozen: bool, unfrozen: None
) -> None:
    net, optimizer, read = resumed(assign=True)
    array = of(read[1]["state"][0]["exp_avg"]).numpy()
    batch = torch.ones(SIDE, SIDE)
    if frozen:
        gc.freeze()
    with spillway.manage(net, optimizer, budget=PLENTY, method="lru") as memory:
        for _ in range(2):
            with memory.step(batch):
                train(net, optimizer, batch)
                moment = optimizer.state[net[0].weight]["exp_avg"]  # type: ignore[index]
                assert not put_away(memory, moment, Move)
                other = optimizer.state[net[2].weight]["exp_avg"]  # type: ignore[index]
                assert put_away(memory, other, Move) == (library.wanted() and not frozen)
            assert (array == of(moment).numpy()).all()
        assert frozen or memory.history[0].escaped == 1


def test_a_second_session_finds_who_holds_what_anew() -> None:
    net, optimizer = network()
    batch = torch.ones(SIDE, SIDE)
    weight: Tensor = net[0].weight  # type: ignore[assignment, index, union-attr]
    array: Any = None
    for escaped in (0, 1, 0):
        with spillway.manage(net, optimizer, budget=PLENTY, method="lru") as memory:
            with memory.step(batch):
                train(net, optimizer, batch)
                assert put_away(memory, weight, Move) == (not escaped)
            assert memory.history[-1].escaped == escaped
        array = numpy.from_dlpack(weight.detach()) if not escaped and array is None else None


@pytest.mark.parametrize("together", [True, False])
def test_a_tensor_over_the_memory_of_another_keeps_it_where_it_is(together: bool) -> None:
    own, other = nn.Parameter(torch.ones(SIDE, SIDE)), torch.ones(SIDE, SIDE)
    part = (ctypes.c_char * 4096).from_address(own.data_ptr() + 4096)
    alias = torch.frombuffer(part, dtype=torch.float32)
    with spillway.manage(nn.ParameterList([own]), budget=PLENTY, method="lru") as memory:
        if not together:
            with memory.step(other):
                assert put_away(memory, other, Move)
        with memory.step((other, alias)):
            assert not put_away(memory, own, Move)
            assert is_moved(memory, other) or put_away(memory, other, Move)
            with torch.no_grad():
                own.add_(1)
            assert (alias == 2).all()


@pytest.mark.long
def test_first_steps_of_several_threads_may_begin_at_once() -> None:
    done = run_python(
        """
        import threading, torch, numpy, spillway
        from tests.cpu.pressure import PLENTY, Move, put_away

        begin, failed = threading.Barrier(4), []

        def train():
            shared, own = torch.ones(64, 64), torch.nn.Parameter(torch.ones(64, 64))
            array = numpy.from_dlpack(shared)
            try:
                with spillway.manage(torch.nn.ParameterList([own]), budget=PLENTY, method="lru") as memory:
                    begin.wait()
                    with memory.step(shared):
                        assert not put_away(memory, shared, Move)
                        assert put_away(memory, own, Move)
                        shared.add_(1)
                        assert (array == 2).all()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=train) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("when", ["before there is a budget", "before a step has met it"])
def test_what_gave_its_address_away_stays_whenever_it_did(when: str) -> None:
    weight, other = nn.Parameter(torch.zeros(SIDE, SIDE)), nn.Parameter(torch.zeros(SIDE, SIDE))
    model = nn.ParameterList([weight, other])
    with spillway.manage(model, budget=None if "budget" in when else PLENTY, method="lru") as memory:
        with memory.step():
            (weight + other).sum().backward()
        if "met" in when:
            weight.data = torch.ones(SIDE, SIDE)
        seen = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
        memory.budget = PLENTY
        with memory.step():
            (weight + other).sum().backward()
            assert put_away(memory, other, Move)
            assert not put_away(memory, weight, Move)
            with torch.no_grad():
                weight.fill_(3)
            assert seen[-1] == 3
        assert memory.history[-1].escaped == 1
