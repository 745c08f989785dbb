"""A hundred sessions in a row leave no file, thread, descriptor, mapping, child or byte behind, however they end."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import spillway
from spillway.engines.tensors import torch_patches
from tests.cpu.families import difference, state_of
from tests.cpu.pressure import ORDERS
from tests.cpu.test_interruptions import Fault, RaisesBefore, fresh, ops_of_a_step, step_of
from tests.shared import HANGS

SESSIONS = 100
METHODS: dict[str, Callable[[], Any]] = {**ORDERS, "delta": lambda: "delta", "lru": lambda: "lru"}
ENDS = ("closed", "an exception", "never closed")


class Left(NamedTuple):
    """What a process has open."""

    descriptors: tuple[str, ...]
    threads: int
    spill_mappings: int
    children: str
    files: int
    methods: Any
    registered: int


def left(directory: Path) -> Left:
    gc.collect()
    await_threads()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return Left(
        tuple(sorted(os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists())),
        threading.active_count(),
        sum("spillway-" in line for line in maps),
        Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        len(list(directory.iterdir())),
        torch.Tensor.numpy,
        len(torch_patches._open),
    )


OTHERS = {thread for thread in threading.enumerate() if thread.name.startswith("spillway-disk")}
"""Workers of sessions of other tests, which may stay."""


def await_threads() -> None:
    """Workers of a session that nobody closed end by themselves, soon after it is gone."""
    for thread in threading.enumerate():
        if thread.name.startswith("spillway-disk") and thread not in OTHERS:
            thread.join(timeout=HANGS)
            if thread.is_alive():
                OTHERS.add(thread)  # it counts as one that is left, and is not waited for again


def played(method: Callable[[], Any], end: str, directory: Path) -> Any:
    """One session under pressure and what it leaves of model, optimizer and random streams."""
    model, optimizer = fresh()
    memory = spillway.manage(
        model, optimizer, budget="280 KiB", method=method(), spill=spillway.SpillOptions(directory=directory)
    )
    with memory.step():
        step_of(model, optimizer, 1)
    assert memory.history[-1].moves + memory.history[-1].drops > 0
    if end == "an exception":
        with pytest.raises(Fault), memory, memory.step(), RaisesBefore(ops_of_a_step() // 2, Fault()):
            step_of(model, optimizer, 2)
    elif end == "closed":
        memory.close()
    return model, optimizer


@pytest.mark.long
@pytest.mark.parametrize("method", ["lru", "delta"])
def test_a_hundred_sessions_leave_nothing(method: str, tmp_path: Path) -> None:
    for end in ENDS:
        played(METHODS[method], end, tmp_path)  # what is made once for the process
    before, states = left(tmp_path), set()
    for number in range(SESSIONS):
        end = ENDS[number % len(ENDS)]
        model, optimizer = played(METHODS[method], end, tmp_path)
        states.add((end, hash(tuple(state_of(model, optimizer).items()))))
        del model, optimizer
        if number in (0, 1, 2, 50):
            assert left(tmp_path) == before, f"after session {number}, {end}"
    assert left(tmp_path) == before
    assert len(states) == len(ENDS)


def test_a_model_keeps_its_values_and_no_descriptor_when_its_session_was_forgotten(tmp_path: Path) -> None:
    before = left(tmp_path)
    model, optimizer = played(METHODS["lru"], "never closed", tmp_path)
    plain, plain_optimizer = fresh()
    step_of(plain, plain_optimizer, 1)
    after = left(tmp_path)
    assert after.spill_mappings > before.spill_mappings, "nothing was away: this test shows nothing"
    assert after._replace(spill_mappings=before.spill_mappings) == before
    assert difference(state_of(plain, plain_optimizer), state_of(model, optimizer)) is None
    for one, other in ((model, optimizer), (plain, plain_optimizer)):
        torch.manual_seed(5)
        step_of(one, other, 2)
    assert difference(state_of(plain, plain_optimizer), state_of(model, optimizer)) is None
    del model, optimizer
    assert left(tmp_path) == before


@pytest.mark.long
def test_sessions_leave_no_more_resident_memory_than_the_first_did(tmp_path: Path) -> None:
    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for _ in range(15):
        played(METHODS["delta"], "closed", tmp_path)
    after_some = resident()
    for _ in range(30):
        played(METHODS["delta"], "closed", tmp_path)
    assert resident() - after_some < 2 << 20, "of 30 sessions that held 280 KiB each"
