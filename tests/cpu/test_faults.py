"""What goes wrong below a step makes it slower or ends it with a clear error: no wrong number, nothing left behind.

`docs/faults.md` lists the faults. Here are those of the machine and the system; those of hooks, Ctrl-C and errors
between ops are in `test_interruptions`, those of several sessions in `test_several_sessions`.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import spillway
from spillway.engines.tensors import cpu_machine as machine
from spillway.engines.tensors.calls import Call
from spillway.errors import DeviceFullError, SpillError, SpillFullError
from spillway.methods import Copy, Move
from spillway.tiers.spill_file import SpillFile
from tests.cpu.families import difference, state_of
from tests.cpu.pressure import ORDERS, PLENTY, put_away
from tests.cpu.test_copies import begin
from tests.cpu.test_interruptions import after_each_op, fresh, ops_of_a_step, step_of, stopped_plainly
from tests.shared import in_turn

TIGHT = "280 KiB"
"""Under half of what the step asks for: storages are dropped too, where the policy prefers that."""


class Failing:
    """The function under a name raises at its call number `first`, and at so many after that."""

    def __init__(self, owner: Any, name: str, error: Callable[[], BaseException], first: int, times: int = 1) -> None:
        self.owner, self.name, self.error = owner, name, error
        self.numbers = itertools.count()
        self.failing = range(first, first + times)
        self.failed = 0

    def __enter__(self) -> Failing:
        self.plainly = plainly = getattr(self.owner, self.name)

        def now_and_then(*args: Any, **kwargs: Any) -> Any:
            if next(self.numbers) in self.failing:
                self.failed += 1
                raise self.error()
            return plainly(*args, **kwargs)

        setattr(self.owner, self.name, now_and_then)
        return self

    def __exit__(self, *exception: object) -> None:
        setattr(self.owner, self.name, self.plainly)


class CountsOps(TorchDispatchMode):
    """Counts ops that were done before the first that raised."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0
        self.raised = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            out = func(*args, **(kwargs or {}))
        except BaseException:
            self.raised = True
            raise
        self.done += not self.raised  # what runs afterwards is the end of a `record_function`
        return out


def no_memory() -> BaseException:
    return MemoryError("no memory")


def allocator() -> BaseException:
    return RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")


def damaged() -> BaseException:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def full() -> BaseException:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def unmapped() -> BaseException:
    return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def after_a_step_with(
    fault: AbstractContextManager[Any], order: str, *errors: type[BaseException]
) -> BaseException | None:
    """The error that ended the step, which left what plain PyTorch leaves between two ops; training goes on."""
    numbers = after_each_op()
    model, optimizer = fresh()
    seen: BaseException | None = None
    with spillway.manage(model, optimizer, budget=TIGHT, method=ORDERS[order]()) as memory:
        try:
            with fault, memory.step():
                step_of(model, optimizer, 1)
        except errors as error:
            seen = error
        number = numbers[hash(tuple(state_of(model, optimizer).items()))]
        assert (number == ops_of_a_step()) or seen is not None
        with memory.step():
            step_of(model, optimizer, 2)
        assert memory.history[-1].peak_bytes <= memory.allowed
        assert memory.history[-1].moves + memory.history[-1].drops > 0
    plain, plain_optimizer = stopped_plainly(number)
    step_of(plain, plain_optimizer, 2)
    assert difference(state_of(plain, plain_optimizer), state_of(model, optimizer)) is None
    return seen


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before


# ---------------------------------------------------------------------- the machine below fails once, or for good

PLACES: dict[
    str, tuple[Any, str, Callable[[], BaseException], type[BaseException] | tuple[type[BaseException], ...]]
] = {
    "no memory to bring back into": (machine, "fresh_storage", allocator, DeviceFullError),
    "no memory to map": (machine.CpuMachine, "_mapping", no_memory, MemoryError),
    "no memory in a replay": (Call, "again", allocator, DeviceFullError),
    "no memory to write": (SpillFile, "write", no_memory, MemoryError),
    "no memory to read": (SpillFile, "read", no_memory, MemoryError),
    "an error of the disk when writing": (SpillFile, "write", damaged, SpillError),
    "an error of the disk when reading": (SpillFile, "read", damaged, SpillError),
    "a full disk": (SpillFile, "write", full, SpillFullError),
    "no mapping": (SpillFile, "map", unmapped, SpillFullError),
}


@pytest.mark.long(but=3)
@pytest.mark.parametrize(
    ("place", "order", "times"), in_turn(PLACES, ORDERS, [1, 1 << 30], times=2)
)  # once, or for good
def test_a_fault_below_makes_a_step_slower_or_ends_it_between_two_ops(place: str, order: str, times: int) -> None:
    owner, name, error, expected = PLACES[place]
    happened = []
    for first in (0, 1, 2, 5, 11, 23):
        fault = Failing(owner, name, error, first, times)
        kinds = expected if isinstance(expected, tuple) else (expected,)
        seen = after_a_step_with(fault, order, *kinds, spillway.BudgetInfeasible)
        happened.append(fault.failed)
        if isinstance(seen, SpillError):
            assert str(seen).endswith(".")
            assert "\n" not in str(seen)
    assert sum(happened) > 0 or (order != "recompute first" and name == "again"), "the fault did not happen"


@pytest.mark.long(but=4)
@pytest.mark.parametrize(("place", "order"), in_turn(PLACES, ORDERS, times=2))
def test_a_step_whose_error_was_caught_goes_on_with_right_values(place: str, order: str) -> None:
    owner, name, error, expected = PLACES[place]
    for first in (0, 1, 3, 9):
        model, optimizer = fresh()
        counting, fault = CountsOps(), Failing(owner, name, error, first)
        with spillway.manage(model, optimizer, budget=TIGHT, method=ORDERS[order]()) as memory, memory.step():
            with fault, suppress(expected), counting:
                step_of(model, optimizer, 1)
            step_of(model, optimizer, 2)
        plain, plain_optimizer = stopped_plainly(counting.done)
        step_of(plain, plain_optimizer, 2)
        assert difference(state_of(plain, plain_optimizer), state_of(model, optimizer)) is None


@pytest.mark.parametrize("error", [no_memory, damaged, KeyboardInterrupt])
def test_a_copy_that_failed_is_not_taken_for_a_home(error: Callable[[], BaseException]) -> None:
    with spillway.manage(nn.Linear(2, 2), budget=PLENTY, method=ORDERS["copy beside"]()) as memory, memory.step():
        tensor = torch.arange(100_000)
        with Failing(SpillFile, "write", error, 0):
            assert begin(memory, tensor, Copy)
            memory._engine.await_copies()
        with pytest.raises((MemoryError, SpillError, KeyboardInterrupt)):
            put_away(memory, tensor, Move)
        assert put_away(memory, tensor, Move)
        assert torch.equal(tensor, torch.arange(100_000))
