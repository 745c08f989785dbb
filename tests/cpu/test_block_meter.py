"""The meter of the block engine: libraries take memory that they never touch, and no step is refused for that."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import spillway
from spillway.engines.blocks.meter import HeapMeter, ResidentMeter, meter_for
from spillway.methods import Action, Checkpoint
from spillway.units import KiB, MiB
from tests.cpu.test_block_session import Training, managed, run

if not isinstance(meter_for(torch.device("cpu")), HeapMeter):
    pytest.skip("the C library does not tell what it has handed out", allow_module_level=True)

RESERVED = 8 * MiB


@pytest.fixture
def reserve() -> Iterator[Callable[[], None]]:
    """Takes memory from the allocator and leaves it alone, as oneDNN does for code."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    taken: list[int] = []

    def take() -> None:
        taken.append(libc.malloc(ctypes.c_size_t(RESERVED)))

    yield take
    for address in taken:
        libc.free(address)


def test_what_others_free_while_the_allocator_is_looked_for_hides_it_not(monkeypatch: pytest.MonkeyPatch) -> None:
    read, freed = HeapMeter.read, count(0, MiB)

    def falling(meter: HeapMeter) -> int:
        return read(meter) - min(next(freed), 5 * MiB)

    monkeypatch.setattr(HeapMeter, "read", falling)
    found = [meter_for(torch.device("cpu"))]
    monkeypatch.setattr(HeapMeter, "read", lambda _: 0)  # tensors come from elsewhere
    found.append(meter_for(torch.device("cpu")))
    for meter in found:
        meter.close()
    assert [type(meter) for meter in found] == [HeapMeter, ResidentMeter]


def test_what_is_reserved_is_read_and_told_from_what_is_there(reserve: Callable[[], None]) -> None:
    found: list[int] = []
    for _ in range(5):  # a system that takes pages of the process away meanwhile hides some
        with contextlib.closing(HeapMeter()) as meter:
            start = meter.begin(0)
            tensor = torch.ones(6 * MiB, dtype=torch.uint8)
            reserve()
            assert meter.read() - start >= tensor.nbytes + RESERVED
            most = meter.most()
            assert most is not None
            found.append(most)
            del tensor
    # Small blocks come and go, and the allocator's own word at the head of a block may have a huge page.
    assert 5 * MiB < max(found) < 6 * MiB + RESERVED // 2, found


def told_after_others_gave_up() -> list[int]:
    found: list[int] = []
    for _ in range(5):
        with contextlib.closing(HeapMeter()) as meter:
            others = torch.ones(16 * MiB, dtype=torch.uint8)
            meter.begin(0)
            del others
            meter.begin(0)
            tensor = torch.ones(6 * MiB, dtype=torch.uint8)
            most = meter.most()
            assert most is not None
            found.append(most)
            del tensor
    return found


@pytest.mark.long
def test_what_others_gave_up_between_steps_makes_no_room() -> None:
    """In a process of its own: what earlier tests left, and give up meanwhile, is in the resident set as well."""
    code = f"from {__name__} import told_after_others_gave_up; print(max(told_after_others_gave_up()))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert int(ran.stdout) > 5 * MiB  # small blocks come and go


@pytest.mark.long(but=1)
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_step_is_not_refused_for_what_a_library_reserves(when: str, reserve: Callable[[], None]) -> None:
    training = Training((64,))
    with managed(training, "1GiB", "checkpoint", report=spillway.ReportOptions(timeline=True)) as memory:
        run(training, memory)
    budget = memory.history[0].peak_bytes + 3 * MiB
    assert budget < RESERVED
    training = Training((64,))
    block = training.model.blocks[2]
    hook = block.register_forward_pre_hook if when == "forward" else block.register_full_backward_hook
    hook(lambda *_: reserve())
    with managed(training, budget, "checkpoint") as memory:
        run(training, memory)
    assert memory.history[0].peak_bytes <= budget


@pytest.mark.long
def test_a_step_that_takes_too_much_is_refused_all_the_same(reserve: Callable[[], None]) -> None:
    training = Training((64,))
    training.model.blocks[2].register_forward_pre_hook(lambda *_: reserve())
    with managed(training, 900 * KiB, "checkpoint") as memory, pytest.raises(spillway.BudgetInfeasible):
        run(training, memory)


@pytest.mark.long
def test_what_others_give_up_within_a_step_makes_no_room() -> None:
    training = Training()
    with managed(
        training, "1GiB", Checkpoint(Action.OFFLOAD, waits=True), report=spillway.ReportOptions(timeline=True)
    ) as memory:
        run(training, memory)
    budget = int(1.1 * max(report.peak_bytes for report in memory.history))
    training, others = Training(), [torch.ones(16 * MiB, dtype=torch.uint8) for _ in range(10)]
    given_up = Mock(  # out of reach of what an extra forward puts back
        side_effect=lambda *_: others.clear() if len(others) < 2 else others.__delitem__(0)
    )
    training.model.blocks[1].register_forward_pre_hook(given_up)
    with managed(training, budget, Checkpoint(Action.OFFLOAD), report=spillway.ReportOptions(timeline=True)) as memory:
        assert run(training, memory) == run(Training(), None)
    assert max(report.peak_bytes for report in memory.history) <= budget
