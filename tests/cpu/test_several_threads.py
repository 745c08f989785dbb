"""Ops of threads that torch starts for a watched step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import pytest
import torch
from torch import nn

import spillway
from spillway.internals import dispatch_key
from spillway.internals.dispatch_key import Watcher

FORKS: Final = """
def turns(x: Tensor, times: int) -> Tensor:
    y = x
    for _ in range(times):
        y = torch.tanh(y @ x) + y.sin()
    return y

def forked(a: Tensor, b: Tensor, times: int) -> Tensor:
    first = torch.jit.fork(turns, a, times)
    second = torch.jit.fork(turns, b, times)
    return turns(a + b, times) + torch.jit.wait(first) + torch.jit.wait(second)
"""


def test_every_op_of_torch_jit_fork_is_seen() -> None:
    forked: Any = torch.jit.CompilationUnit(FORKS).forked  # type: ignore[no-untyped-call]
    model = torch.nn.ParameterList([*torch.randn(2, 96, 96) / 10])
    with torch.no_grad():
        plain = forked(*model, 40)
    with spillway.manage(model, budget="320KiB", method="lru") as memory:
        for _ in range(4):
            with memory.step(), torch.no_grad():
                watched = forked(*model, 40)
            assert watched.equal(plain)
    assert {report.ops for report in memory.history} == {3 * 4 * 40 + 3}
    assert max(report.peak_bytes for report in memory.history) <= 320 << 10


class _Turn:
    """A lock that says when a thread has to wait for it."""

    def __init__(self, waits: threading.Event) -> None:
        self._lock = threading.RLock()
        self._waits = waits

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waits.set()
            self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


def test_an_op_of_another_thread_waits_and_is_seen_and_one_of_the_same_thread_is_a_part() -> None:
    seen: list[str] = []
    within, done = threading.Event(), threading.Event()

    def handle(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func.name())
        if func.name() == "aten::sin":
            within.set()
            done.wait()  # for the other thread's turn to come, or for its op to be over
            dispatch_key._include(dispatch_key._KEY, True)  # as a future does that continues in this thread
            args[0].exp()
            seen.append("sin ends")
        return func(*args, **(kwargs or {}))

    def work() -> None:
        dispatch_key._of_torch._stash_obj_in_tls(dispatch_key._NAME, watcher)
        dispatch_key._include(dispatch_key._KEY, True)
        within.wait()
        x.cos()
        done.set()

    watcher, x = Watcher({}, lambda op: handle), torch.ones(3)
    watcher.turn = _Turn(done)  # type: ignore[assignment]
    other = threading.Thread(target=work)
    watcher.begin()
    other.start()
    x.sin()
    other.join()
    watcher.end()
    assert seen == ["aten::sin", "sin ends", "aten::cos"]


def _in_a_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


_POOL = ThreadPoolExecutor(1)


def _in_an_old_pool(work: Callable[[], Any]) -> None:
    _POOL.submit(work).result()


@pytest.mark.long(but=4)
@pytest.mark.parametrize("method", ["lru", "delta", "dtr", "largest", "keep-all"])
@pytest.mark.parametrize("elsewhere", [_in_a_thread, _in_an_old_pool])
def test_a_backward_in_another_thread_is_a_part_of_the_step_that_made_its_graph(
    elsewhere: Callable[[Callable[[], Any]], None], method: str
) -> None:
    _POOL.submit(int).result()  # its thread is there

    def trained(budget: int | None) -> tuple[list[torch.Tensor], list[spillway.StepReport]]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(8)])
        optimizer, x = torch.optim.SGD(model.parameters(), 0.1), torch.randn(1024, 128)
        session = spillway.manage(model, optimizer, budget=budget, method=method) if budget else None
        for number in range(4):
            with nullcontext() if session is None else session.step(x):
                loss = model(x).square().mean()
                if number % 2:
                    elsewhere(loss.backward)
                else:
                    elsewhere(partial(_filled, loss, list(model.parameters())))
                optimizer.step()
                optimizer.zero_grad()
        if session is not None:
            session.close()
        reports = [] if session is None else session.history
        return [parameter.detach() for parameter in model.parameters()], reports

    plain, _ = trained(None)
    budget = (16 if method == "keep-all" else 5) << 20
    found, reports = trained(budget)
    assert all(map(torch.equal, plain, found))
    assert max(report.peak_bytes for report in reports) <= budget
    assert len({report.ops for report in reports[1::2]}) == 1
    assert method == "keep-all" or all(report.bytes_out + report.recomputed_ops for report in reports)
    assert not hasattr(torch.autograd._engine_run_backward, "__wrapped__")  # type: ignore[attr-defined]


def _filled(loss: torch.Tensor, parameters: list[nn.Parameter]) -> None:
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


def test_a_backward_of_somebody_elses_graph_is_no_part_of_a_step() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    loss = other(torch.ones(4)).sum()
    with spillway.manage(model, budget="1MiB", method="lru") as memory, memory.step():
        ops = memory._engine.controller.clock
        _in_a_thread(loss.backward)
        assert memory._engine.controller.clock == ops
    assert other.weight.grad is not None
