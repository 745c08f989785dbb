"""A forked child waits for no thread that it does not have."""

from __future__ import annotations

import gc
import os
import pkgutil
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from spillway.engines.tensors.torch_patches import WhileOpen
from spillway.internals.locks import _owners
from spillway.tiers.disk import DiskTier
from spillway.tiers.transfer import DiskLanes, Store
from tests.cpu.forks import held_elsewhere, true_in_a_child

KINDS: Final = (type(threading.Lock()), type(threading.RLock()), threading.Condition)
PARTS: Final = (
    "spillway.engines",
    "spillway.session",
    "spillway.subprocess_runs",
    "spillway.recording",
    "spillway.report",
)

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def locks() -> dict[str, tuple[Any, str]]:
    """Of all modules of the package that sessions have to do with, and of what is installed while one is open."""
    for part in PARTS:
        for found in pkgutil.walk_packages(import_module(part).__path__, f"{part}."):
            import_module(found.name)
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("spillway.")]
    owners: dict[str, Any] = {module.__name__: module for module in ours}
    for module in ours:
        shared = {name: value for name, value in vars(module).items() if isinstance(value, WhileOpen)}
        owners |= {f"{module.__name__}.{name}": value for name, value in shared.items()}
    return {
        f"{owner}.{name}": (found, name)
        for owner, found in owners.items() for name, value in vars(found).items() if isinstance(value, KINDS)
    }  # fmt: skip


LOCKS: Final = locks()


def test_every_lock_of_a_module_is_new_in_a_child() -> None:
    assert len(LOCKS) >= 6
    assert [name for name, (module, short) in LOCKS.items() if short not in _owners.get(module, ())] == []


@pytest.mark.parametrize("lock", LOCKS)
def test_a_child_that_is_forked_while_another_thread_holds_a_lock_works(lock: str) -> None:
    module, name = LOCKS[lock]

    def taken() -> bool:
        with getattr(module, name):
            return True

    with held_elsewhere(getattr(module, name)):
        assert true_in_a_child(taken)


def test_a_store_sends_in_a_child_that_is_forked_while_another_thread_sends(tmp_path: Path) -> None:
    store = Store(DiskLanes(DiskTier(tmp_path)))
    sent = torch.arange(4096)

    def comes_back() -> bool:
        home = store.send(sent.untyped_storage())
        store.finish_out()
        return bytes(home.load()) == bytes(sent.untyped_storage())

    with held_elsewhere(store._lock):
        assert true_in_a_child(comes_back)
    assert comes_back()
    store.close()


def test_garbage_that_is_collected_while_a_store_sends_gives_no_place_back_then(tmp_path: Path) -> None:
    store = Store(DiskLanes(DiskTier(tmp_path)))
    home = store.send(torch.arange(4096).untyped_storage())
    store.finish_out()
    with store._lock:
        del home
        assert len(store._dead) == 1
    store.begin_step()
    assert len(store._dead) == 0
    store.close()


def test_a_thread_that_forks_while_it_holds_a_lock_lets_go_of_it_in_the_child() -> None:
    module, name = next(iter(LOCKS.values()))
    with getattr(module, name):
        before = getattr(module, name)
        child = os.fork()
    if child == 0:
        os._exit(42 if getattr(module, name) is before and not before._is_owned() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


def test_garbage_may_be_collected_while_a_store_looks_through_what_it_has(tmp_path: Path) -> None:
    """Wherever in the look: a collection comes after so many objects, and changes what is looked through."""
    store = Store(DiskLanes(DiskTier(tmp_path)))
    for allocated in range(1, 30):
        homes = [store.send(torch.arange(4096).untyped_storage()) for _ in range(3)]
        store.finish_out()
        for home in homes:
            home.start_in()
        thresholds = gc.get_threshold()
        gc.collect()
        gc.disable()
        circle: list[Any] = [homes.pop(0)]
        circle.append(circle)
        del circle
        try:
            gc.set_threshold(allocated)
            gc.enable()
            assert store.arrived_bytes <= 3 * 4096 * 8
            assert store.leaving_bytes == 0
            store.settle()
        finally:
            gc.set_threshold(*thresholds)
            gc.enable()
        gc.collect()
    store.close()
