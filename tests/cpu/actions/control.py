"""Instructions within contexts: modes, errors that are caught, hooks for what is saved, threads."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cpu.world import ACTIONS, Instruction, World, action


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _anomaly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(check_nan=False):
            yield


class _Passing(TorchDispatchMode):
    """A mode of the user's own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Function(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _through_numpy(x: Tensor) -> Any:
    return x.detach().numpy().copy() if x.dtype == torch.float32 and not x.is_conj() and not x.is_neg() else x


def _from_numpy(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.from_numpy(x)


def _widen(x: Tensor) -> tuple[torch.dtype, Tensor]:
    return x.dtype, x.double() if x.dtype == torch.float32 else x


def _narrow(kept: tuple[torch.dtype, Tensor]) -> Tensor:
    return kept[1].to(kept[0])


CONTEXTS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    torch.no_grad, torch.enable_grad, _anomaly, _deterministic,
    lambda: _default_dtype(torch.float64), lambda: torch.random.fork_rng(devices=[]),
    lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.autocast("cpu", torch.float16),
    lambda: saved_tensors_hooks(lambda x: x.clone(), lambda x: x),
    lambda: saved_tensors_hooks(_through_numpy, _from_numpy), lambda: saved_tensors_hooks(_widen, _narrow), save_on_cpu,
    _Passing, _Function, lambda: torch.autograd.set_multithreading_enabled(False),
    lambda: torch.backends.mkldnn.flags(enabled=False), lambda: torch.autograd.profiler.record_function("part"),
    lambda: torch.device("cpu"), torch.autograd.graph.allow_mutation_on_saved_tensors,
    lambda: torch.autograd._force_original_view_tracking(True),
    lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=True), torch.autograd.forward_ad.dual_level,
)  # fmt: skip

_HELD_BACK = ("under", "fails", "in_thread", "change_mode")


def inner(i: Instruction, count: int) -> Iterator[Instruction]:
    """Instructions within an instruction, drawn from its numbers."""
    names = [name for name, (weight, _) in ACTIONS.items() if weight and name not in _HELD_BACK]
    number = i.a * 65521 + i.b
    for _ in range(count):
        number = (number * 1103515245 + 12345) % (1 << 31)
        a, b, c = (number >> bits & 0xFFFF for bits in (4, 9, 3))
        yield Instruction(names[(number >> 8) % len(names)], a, b, c)


@action(7)
def under(world: World, i: Instruction) -> None:
    """A few instructions within a context."""
    with CONTEXTS[i.c % len(CONTEXTS)]():
        for instruction in inner(i, 1 + i.c % 4):
            world.run_one(instruction)


class _OnPurpose(Exception):
    pass


@action(3)
def fails(world: World, i: Instruction) -> None:
    """An error in the middle of something, which is caught."""
    x = world.floats(i.a)

    def bad(gradient: Tensor) -> Tensor:
        raise _OnPurpose

    try:
        if i.c % 4 == 0:
            with torch.enable_grad():
                y = (x if x.requires_grad else x.detach().requires_grad_()) * 2
                z = y.tanh()
                y.register_hook(bad)
                (z * y).sum().backward()
        elif i.c % 4 == 1:
            _fail_after(x * 2, x.detach().clone().add_(1))
        elif i.c % 4 == 2:
            torch.stack([x, x[:3]])
        else:
            handle = world.network["linear"].register_forward_hook(lambda *_: bad(x))
            try:
                world.network["linear"](torch.ones(32, 64))
            finally:
                handle.remove()
    except (_OnPurpose, RuntimeError) as error:
        world.note("caught", type(error).__name__)


def _fail_after(*held: Tensor) -> None:
    raise _OnPurpose


@action(2)
def in_thread(world: World, i: Instruction) -> Any:
    """A thread makes tensors of its own; the step goes on with them."""
    made: list[Tensor] = []

    def work() -> None:
        rows = torch.arange(4096, dtype=torch.float32).view(64, 64) / 4096
        made.append(rows.sin() @ rows + i.a % 7)
        if i.b % 2:
            made[0] = made[0].requires_grad_()
        if i.b % 3 == 0:
            made[0].requires_grad_().square().mean().backward()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return [made[0], made[0] * 2]
