"""Sessions on a real CUDA device: the same bits, within the budget by the allocator's count, nothing left behind."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import spillway
from spillway.engines.tensors.cuda_machine import LIKELY_BANDWIDTH
from spillway.engines.tensors.devices import allowed_bytes, engine_for, pinned_bytes
from spillway.errors import SessionError, SpillFullError
from spillway.internals.dispatch_key import unwatched
from spillway.internals.private import CAN_SWAP
from spillway.ir import Lane, Span, Work
from spillway.methods import LRU, Copy, Drop, Move
from tests.cpu.pressure import is_dropped, is_moved, put_away
from tests.gpu.models import CASES, DEVICE, Trained, difference, train

pytestmark = pytest.mark.gpu

ITEMS = 1 << 20
PLENTY = 1 << 30
FIRST_STEP = 1.1
"""Of the budget: what the first step may take."""


@functools.cache
def plain(name: str) -> Trained:
    return train(name)


@pytest.mark.parametrize("method", ["lru", "delta", "delta-published"])
@pytest.mark.parametrize("share", [80, 60])
@pytest.mark.parametrize("name", CASES)
def test_training_under_a_budget_gives_the_same_bits_within_it(name: str, share: int, method: str) -> None:
    expected = plain(name)
    assert difference(expected, train(name)) is None, "plain training itself is not the same twice"
    budget = expected.peak * share // 100
    found = train(name, budget=budget, method=method)
    assert difference(expected, found) is None
    assert sum(report.moves + report.drops for report in found.reports) > 0
    first, *later = [report.device_peak_bytes for report in found.reports]
    told = f"budget {budget}, peaks {later}, first {first}"
    assert max(later) <= budget, told
    # What an op needs for itself is only guessed until it has run once (README, limits).
    assert first <= budget * FIRST_STEP, told


def test_without_a_budget_a_session_keeps_account_of_the_same_training() -> None:
    found = train("transformer", budget=None)
    assert difference(plain("transformer"), found) is None
    assert found.reports[0].peak_bytes <= found.peak


@pytest.fixture
def memory() -> Any:
    with spillway.manage(nn.Linear(8, 8).to(DEVICE), budget=PLENTY, method=LRU()) as session, session.step():
        yield session


@pytest.mark.parametrize("way", [Move, Drop])
def test_what_leaves_comes_back_as_it_was_while_kernels_are_under_way(memory: Any, way: Any) -> None:
    source = torch.arange(ITEMS, device=DEVICE)
    for number in range(50):
        tensor = source * 3 + number
        big = torch.randn(2048, 2048, device=DEVICE)
        for _ in range(4):
            big = big @ big  # the device is busy, and far behind the host
        assert put_away(memory, tensor, way)
        scratch = torch.full((ITEMS,), -1, device=DEVICE)  # takes the memory that was freed
        assert torch.equal(tensor, torch.arange(ITEMS, device=DEVICE) * 3 + number)
        del scratch


def test_what_another_stream_makes_leaves_when_it_is_made(memory: Any) -> None:
    other, source = torch.cuda.Stream(), torch.arange(ITEMS, device=DEVICE)
    for number in range(20):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            big = torch.randn(2048, 2048, device=DEVICE)
            for _ in range(8):
                big = big @ big  # the stream is busy
            tensor = source * 3 + number
        assert put_away(memory, tensor, Move)
        with torch.cuda.stream(other):
            scratch = torch.full((ITEMS,), -1, device=DEVICE)  # takes the memory that was freed
        torch.cuda.current_stream().wait_stream(other)
        assert torch.equal(tensor, torch.arange(ITEMS, device=DEVICE) * 3 + number)
        del scratch


@pytest.mark.skipif(not CAN_SWAP, reason="this torch cannot point a storage at host memory")
def test_a_moved_storage_is_read_in_place_by_kernels_that_do_not_ask(memory: Any) -> None:
    tensor = torch.arange(ITEMS, device=DEVICE)
    assert put_away(memory, tensor, Move)
    assert memory._engine.machine.readable_in_place
    with unwatched():
        doubled = tensor * 2
    assert is_moved(memory, tensor)
    assert torch.equal(doubled, torch.arange(ITEMS, device=DEVICE) * 2)


def test_dropout_is_replayed_with_the_devices_random_numbers(memory: Any) -> None:
    source = torch.ones(ITEMS, device=DEVICE)
    state = torch.cuda.get_rng_state(DEVICE)
    expected = nn.functional.dropout(source, 0.5)
    after = torch.cuda.get_rng_state(DEVICE)
    torch.cuda.set_rng_state(state, DEVICE)
    tensor = nn.functional.dropout(source, 0.5)
    assert put_away(memory, tensor, Drop)
    assert is_dropped(memory, tensor)
    assert torch.equal(tensor, expected)
    assert torch.equal(torch.cuda.get_rng_state(DEVICE), after)


def test_gradients_of_convolutions_are_recomputed_only_where_they_are_the_same_twice(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Conv2d(16, 16, 3, padding=1).to(DEVICE)
    picture = torch.randn(8, 16, 64, 64, device=DEVICE, requires_grad=True)
    for same_twice in (True, False):
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", same_twice)
        out = layer(picture)
        (gradient,) = torch.autograd.grad(out, picture, torch.ones_like(out))
        kept = gradient.clone()
        assert put_away(memory, gradient, Drop) == same_twice
        assert put_away(memory, out, Drop)
        assert torch.equal(gradient, kept)
        assert torch.equal(out, layer(picture))


class Outside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        with unwatched():
            return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        with unwatched():
            return gradient * ctx.saved_tensors[0]


@pytest.mark.parametrize("way", [Move, Drop])
def test_custom_functions_find_their_tensors(memory: Any, way: Any) -> None:
    source = torch.arange(ITEMS, dtype=torch.float32, device=DEVICE, requires_grad=True)
    x = source + 1
    assert put_away(memory, x, way)
    out = Outside.apply(x)
    assert put_away(memory, x, Move)
    out.sum().backward()
    assert source.grad is not None
    assert torch.equal(source.grad, torch.arange(ITEMS, device=DEVICE) + 1.0)


class Remembering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        with unwatched():
            return gradient * ctx.x


def test_custom_functions_find_what_they_keep_as_attributes(memory: Any) -> None:
    source = torch.arange(ITEMS, dtype=torch.float32, device=DEVICE, requires_grad=True)
    out = Remembering.apply(source + 1)
    context: Any = out.grad_fn
    assert put_away(memory, context.x, Move)
    out.sum().backward()
    assert source.grad is not None
    assert torch.equal(source.grad, torch.arange(ITEMS, device=DEVICE) + 1.0)


class Filling(torch.autograd.Function):
    """A kernel that nobody sees fills what an op made for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(x.shape)
        with unwatched():
            out += x
        return out


def test_what_a_kernel_writes_in_a_custom_function_is_moved_and_not_recomputed(memory: Any) -> None:
    out = Filling.apply(torch.arange(ITEMS, device=DEVICE))
    assert not put_away(memory, out, Drop)
    assert put_away(memory, out, Move)
    assert torch.equal(out, torch.arange(ITEMS, device=DEVICE))


def test_running_out_of_host_memory_is_an_error_about_host_memory() -> None:
    model = nn.Linear(8, 8).to(DEVICE)
    method = LRU(short_chain=0)
    with (
        spillway.manage(
            model, budget="200MiB", method=method, spill=spillway.SpillOptions(host_budget="16MiB")
        ) as memory,
        pytest.raises(SpillFullError, match="host_budget="),
        memory.step(),
    ):
        kept = [torch.randperm(ITEMS, device=DEVICE) for _ in range(60)]
        sum(int(tensor[0]) for tensor in kept)


def test_capturing_a_graph_is_refused(memory: Any) -> None:
    with pytest.raises(SessionError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        pass


def test_replaying_a_graph_is_refused_within_a_step() -> None:
    tensor, graph = torch.zeros(ITEMS, device=DEVICE), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor += 1
    with spillway.manage(nn.Linear(8, 8).to(DEVICE), budget=PLENTY, method=LRU()) as memory:
        with memory.step(), pytest.raises(SessionError, match="replay no graph within a step"):
            graph.replay()
        graph.replay()
    assert int(tensor[0]) == 1


def test_a_hundred_sessions_leave_nothing_pinned_and_nothing_allocated() -> None:
    model = nn.Linear(1024, 1024).to(DEVICE)
    before = None
    for _ in range(100):
        with spillway.manage(
            model, budget=PLENTY, method=LRU(), spill=spillway.SpillOptions(host_budget="64MiB")
        ) as memory:
            pool = memory._engine.backend.pool
            with memory.step():
                assert put_away(memory, model.weight, Move)
        assert pool.pinned == 0
        torch.cuda.synchronize()
        before = before if before is not None else torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.skipif(not CAN_SWAP, reason="this torch cannot point a storage at host memory")
def test_a_session_that_nobody_closes_leaves_values_right_and_its_memory_is_unpinned_when_they_die() -> None:
    model = nn.Linear(1024, 1024).to(DEVICE)
    before = model.weight.detach().clone()
    memory = spillway.manage(model, budget=PLENTY, method=LRU(), spill=spillway.SpillOptions(host_budget="64MiB"))
    with memory.step():
        assert put_away(memory, model.weight, Move)
    slab = weakref.ref(memory._engine.backend.pool._slabs[0])  # type: ignore[attr-defined]
    del memory
    gc.collect()
    assert slab() is not None
    assert torch.equal(model.weight, before)
    model(torch.ones(8, 1024, device=DEVICE)).sum().backward()
    with torch.no_grad():
        model.weight += 1
    assert torch.equal(model.weight, before + 1)
    del model
    gc.collect()
    assert slab() is None
    assert float(torch.ones(8, device=DEVICE).sum()) == 8, "no error was left behind"


def test_pinned_memory_copies_faster_than_pageable_memory_would_and_the_link_was_measured() -> None:
    engine = engine_for(DEVICE, LRU(), allowed_bytes(DEVICE, "50%"), pinned_bytes(DEVICE, "256MiB"), None)
    try:
        assert engine.backend.pool.pinned == 0, "nobody asked"  # type: ignore[attr-defined]
        engine.machine.measure_link()
        assert engine.backend.pool.pinned == 0  # type: ignore[attr-defined]
        assert engine.machine.transfer_seconds(1) != 2 / LIKELY_BANDWIDTH
        assert 1e9 < 2 / engine.machine.transfer_seconds(1) < 1e12
    finally:
        engine.close()


def busy() -> torch.Tensor:
    """Some milliseconds of products, which the host does not wait for."""
    big = torch.randn(4096, 4096, device=DEVICE)
    for _ in range(8):
        big = big @ big
    return big


def test_lanes_are_those_of_the_device_and_hidden_is_what_no_op_waited_for() -> None:
    model = nn.Linear(8, 8).to(DEVICE)
    with spillway.manage(
        model, budget=4 * PLENTY, method=LRU(), report=spillway.ReportOptions(timeline=True)
    ) as memory:
        for number in (1, 8):  # the first step waits around every op; of the second more leaves
            with memory.step():
                tensor = torch.arange(number * ITEMS, device=DEVICE)
                assert put_away(memory, tensor, Copy)  # type: ignore[arg-type]
                big = busy()
                assert put_away(memory, tensor, Move)
                assert int((tensor + big.numel())[1]) == big.numel() + 1
    timeline, report = memory.timeline, memory.history[-1]
    assert timeline is not None
    assert timeline.step == report.step == 1

    def spans(lane: Lane, work: Work) -> list[Span]:
        return [span for span in timeline.spans if (span.lane, span.work) == (lane, work)]

    (out,), (back,) = spans(Lane.COPY_OUT, Work.COPY), spans(Lane.COPY_IN, Work.COPY)
    assert out.nbytes == back.nbytes == 8 * 8 * ITEMS
    assert all(1e9 < copy.nbytes / copy.seconds < 1e12 for copy in (out, back))
    assert out.stalled < 0.2 * out.seconds, "products ran meanwhile"
    assert back.stalled > 0.8 * back.seconds
    assert out.ended <= back.began
    products = [span for span in spans(Lane.COMPUTE, Work.OP) if span.name == "aten::mm"]
    assert len(products) == 8
    assert all(before.ended <= after.began for before, after in itertools.pairwise(products))
    assert sum(span.seconds for span in products) > 1e-3, "as long as they ran, and not as long as launching them took"
    assert timeline.seconds() <= report.seconds
    assert report.transfer_seconds == pytest.approx(out.seconds + back.seconds, rel=0.01)
    assert report.hidden_seconds == pytest.approx(report.transfer_seconds - out.stalled - back.stalled, rel=0.01)
    assert memory._engine.controller.view.exposed == pytest.approx(report.stall_seconds / report.transfer_seconds)


def test_ops_that_run_again_take_what_they_take_on_the_device() -> None:
    with spillway.manage(nn.Linear(8, 8).to(DEVICE), budget=4 * PLENTY, method=LRU()) as memory:
        for _ in range(2):
            with memory.step():
                left = torch.randn(4096, 4096, device=DEVICE)
                product = left @ left
                began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                began.record()
                left @ left
                ended.record()
                assert put_away(memory, product, Drop)
                product.sum()
    seconds, report = began.elapsed_time(ended) / 1e3, memory.history[-1]
    assert report.recomputed_ops == 1
    assert 0.3 * seconds < report.recomputed_seconds < 3 * seconds


def test_an_op_that_finds_no_memory_runs_again(memory: Any) -> None:
    free = torch.cuda.mem_get_info(DEVICE)[0]
    fraction = (torch.cuda.memory_reserved(DEVICE) + (96 << 20)) / torch.cuda.get_device_properties(DEVICE).total_memory
    assert free > (96 << 20)
    torch.cuda.set_per_process_memory_fraction(fraction, DEVICE)
    try:
        kept = [torch.randperm(ITEMS, device=DEVICE) for _ in range(40)]  # 320 MiB: others have to leave
        assert sum(int(tensor.max()) for tensor in kept) == 40 * (ITEMS - 1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    assert memory._engine.backend.retry.count > 0
