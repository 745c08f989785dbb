"""Ops of threads that torch starts for a watched step."""

from __future__ import annotations

import threading
from typing import Any, Final

import torch

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
