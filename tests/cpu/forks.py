"""Children that are forked within tests."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.shared import HANGS


@contextmanager
def held_elsewhere(lock: Any) -> Iterator[None]:
    """Another thread holds a lock, which a child of this thread does not have."""
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            go.wait(HANGS)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(HANGS)
    try:
        yield
    finally:
        go.set()
        thread.join()


def true_in_a_child(found: Callable[[], bool]) -> bool:
    """Whether a child that is forked here finds so; one that hangs does not."""
    child = os.fork()
    if child == 0:
        signal.alarm(HANGS)
        code = 1
        try:
            code = 42 if found() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
