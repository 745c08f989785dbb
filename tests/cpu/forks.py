"""Children that are forked within tests."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import traceback
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


def said_by_a_child(does: Callable[[], object]) -> str:
    """What a child that is forked here prints; the test fails with that where the child fails, crashes or hangs."""
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            signal.alarm(HANGS)
            code = 1
            try:
                sys.stdout = sys.stderr = said
                os.dup2(said.fileno(), 2)
                does()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                said.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        told = said.read()
    assert code == 0, f"the child ended with {code}: {told}"
    return told
