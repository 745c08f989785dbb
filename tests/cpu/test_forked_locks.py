"""A forked child waits for no thread that it does not have."""

from __future__ import annotations

import os
import pkgutil
import signal
import sys
import threading
from importlib import import_module
from types import ModuleType
from typing import Final

import pytest

from spillway.engines.locks import renewed_in_children
from tests.shared import HANGS

KINDS: Final = (type(threading.Lock()), type(threading.RLock()), threading.Condition)
PARTS: Final = ("spillway.engines", "spillway.session", "spillway.runs", "spillway.recording", "spillway.report")

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def locks() -> dict[str, tuple[ModuleType, str]]:
    """Of all modules of the package that sessions have to do with."""
    for part in PARTS:
        for found in pkgutil.walk_packages(import_module(part).__path__, f"{part}."):
            import_module(found.name)
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("spillway.")]
    return {
        f"{module.__name__}.{name}": (module, name)
        for module in ours for name, value in vars(module).items() if isinstance(value, KINDS)
    }  # fmt: skip


LOCKS: Final = locks()


def test_every_lock_of_a_module_is_new_in_a_child() -> None:
    assert len(LOCKS) >= 6
    assert [name for name, (module, short) in LOCKS.items() if short not in renewed_in_children(module)] == []


@pytest.mark.parametrize("lock", LOCKS)
def test_a_child_that_is_forked_while_another_thread_holds_a_lock_works(lock: str) -> None:
    module, name = LOCKS[lock]
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with getattr(module, name):
            held.set()
            go.wait(HANGS)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(HANGS)
    child = os.fork()
    if child == 0:
        signal.alarm(HANGS)
        with getattr(module, name):
            os._exit(42)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    finally:
        go.set()
        thread.join()


def test_a_thread_that_forks_while_it_holds_a_lock_lets_go_of_it_in_the_child() -> None:
    module, name = next(iter(LOCKS.values()))
    with getattr(module, name):
        child = os.fork()
        before = getattr(module, name)
    if child == 0:
        os._exit(42 if getattr(module, name) is before and not before._is_owned() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
