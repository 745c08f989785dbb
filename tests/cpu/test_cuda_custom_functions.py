"""Custom functions and CUDA graphs on the late device: what kernels find, what they may write, what is refused."""

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

from spillway.errors import SessionError
from spillway.internals.dispatch_key import unwatched
from spillway.methods import LRU, Copy, Drop, Move
from spillway.session import Session
from tests.cpu.late_device import LateStreams, late_session, late_step
from tests.cpu.pressure import PLENTY, put_away
from tests.cpu.test_cuda_machine import ITEMS, begin, raw


@pytest.fixture(params=[True, False], ids=["exchanged", "resized"])
def exchanges(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def memory(exchanges: bool) -> Iterator[Session]:
    with late_step(exchanges) as session:
        yield session


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
    with contextlib.nullcontext() if known else unwatched():
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
    assert not memory._engine.controller.unsafe.running
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
    late = LateStreams()
    with late_session(nn.Linear(2, 2), budget=PLENTY, method=LRU(), streams=late) as memory:
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
