"""What a test may leave behind in the process that the next test would run into."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import pytest
import torch
from torch.autograd import profiler as autograd_profiler
from torch.autograd.profiler import KinetoStepTracker
from torch.optim import optimizer as torch_optimizer
from torch.overrides import _get_current_function_mode_stack, _pop_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from spillway.engines.blocks import homes, trace
from spillway.engines.environment import ATTENTION, EINSUM
from spillway.engines.tensors import custom_functions, torch_compile, torch_patches, turns
from spillway.internals import dispatch_key, process_memory
from spillway.session import updates

# SIGCHLD is left out: a `DataLoader` installs a handler for it once and leaves it.
_SIGNALS: Final = (signal.SIGINT, signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1)
_HOOKS: Final = {
    name: hooks
    for module in (torch.nn.modules.module, torch_optimizer)
    for name, hooks in vars(module).items()
    if name.startswith("_global") and isinstance(hooks, dict)
}


_OTHERS: Final = (custom_functions.CUSTOM_FUNCTIONS, homes.ALIASES)


class _Kind(NamedTuple):
    """One kind of thing: how it is now, and what makes it as it was."""

    read: Callable[[], Any]
    clean: Callable[[Any], Any]


def _close_engines(_: Any) -> None:
    for engine in tuple(torch_patches._open):
        engine.close()


def _leave_modes(before: tuple[Any, ...]) -> None:
    for mode in reversed([mode for mode in _get_current_dispatch_mode_stack() if mode not in before]):
        mode.__exit__(None, None, None)


def _leave_function_modes(before: tuple[Any, ...]) -> None:
    while len(_get_current_function_mode_stack()) > len(before):
        _pop_mode()


def _put_handlers_back(before: tuple[Any, ...]) -> None:
    for number, handler in zip(_SIGNALS, before, strict=True):
        signal.signal(number, handler)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _hooks() -> frozenset[tuple[str, int]]:
    return frozenset((name, key) for name, hooks in _HOOKS.items() for key in hooks)


def _remove_hooks(before: frozenset[tuple[str, int]]) -> None:
    for name, key in _hooks() - before:
        del _HOOKS[name][key]
    if not _HOOKS["_global_optimizer_pre_hooks"]:
        updates._handles.clear()


def _workers() -> frozenset[threading.Thread]:
    return frozenset(thread for thread in threading.enumerate() if thread.name.startswith("spillway"))


def _files() -> tuple[str, ...]:
    """Open files whose names say that they are ours."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # that of the listing itself
            continue
        if "spillway-" in target or target.endswith("/statm"):
            found.append(f"{number}: {target}")
    return tuple(sorted(found))


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("SPILLWAY_", "KINETO_"))}


def _set_environment(before: dict[str, str]) -> None:
    for name in _environment().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _profilers() -> tuple[bool, bool, dict[str, int], int]:
    return (
        torch._C._autograd._profiler_enabled(),
        autograd_profiler._is_profiler_enabled,
        dict(KinetoStepTracker._step_dict),
        len(trace._tracing),
    )


def _stop_profilers(before: tuple[bool, bool, dict[str, int], int]) -> None:
    if torch._C._autograd._profiler_enabled() > before[0]:
        torch._C._autograd._disable_profiler()
    autograd_profiler._is_profiler_enabled = before[1]
    KinetoStepTracker._step_dict.clear()
    KinetoStepTracker._step_dict.update(before[2])
    trace._give_way(None)
    trace._tracing.clear()


def _flags() -> tuple[Any, ...]:
    return tuple(read() for read, _ in _FLAGS)


def _set_flags(before: tuple[Any, ...]) -> None:
    for (_, write), value in zip(_FLAGS, before, strict=True):
        write(value)


_FLAGS: Final[tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...]] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.get_num_threads, torch.set_num_threads),
    (lambda: torch.is_autocast_enabled("cpu"), lambda value: torch.set_autocast_enabled("cpu", value)),
    (lambda: torch.get_autocast_dtype("cpu"), lambda value: torch.set_autocast_dtype("cpu", value)),
    *ATTENTION.flags,
    *EINSUM.flags,
)

_OURS: Final = tuple(map(torch._C._dispatch_key_parse, ("Fake", "Python", "PythonTLSSnapshot")))


def _dispatch_keys() -> tuple[Any, ...]:
    """Which keys this thread includes and excludes, and who watches it."""
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return *map(str, keys), dispatch_key.watcher_here()


def _set_dispatch_keys(before: tuple[Any, ...]) -> None:
    watcher = dispatch_key.watcher_here()
    if watcher is not None and watcher is not before[2]:
        watcher.end()
    for key in _OURS:
        torch._C._dispatch_tls_set_dispatch_key_included(key, f"{key.name}," in before[0].replace(")", ","))
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, f"{key.name}," in before[1].replace(")", ","))


def _dynamo() -> tuple[Any, ...]:
    """What compiles in this thread, whether we stand in its way, what all was told, and how many threads are spared."""
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:
        return None, False, "default", len(torch_compile._answers)
    ours = hasattr(eval_frame._callback_from_stance, "__wrapped__")
    return torch_compile.get_eval_frame_callback(), ours, eval_frame._stance.stance, len(torch_compile._answers)


def _give_dynamo_back(before: tuple[Any, ...]) -> None:
    torch_compile.forget_steps()
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is not None:
        eval_frame._set_stance(eval_frame.DynamoStance(before[2]))
        eval_frame.set_eval_frame(before[0])


KINDS: Final[dict[str, _Kind]] = {
    # First what ends sessions: much of the rest goes with them.
    "open engines": _Kind(lambda: len(tuple(torch_patches._open)), _close_engines),
    "turns": _Kind(lambda: len(turns._turns), lambda _: turns._turns.clear()),
    "hooks on all modules or optimizers": _Kind(_hooks, _remove_hooks),
    "dispatch modes": _Kind(lambda: tuple(_get_current_dispatch_mode_stack()), _leave_modes),
    "dispatch keys": _Kind(_dispatch_keys, _set_dispatch_keys),
    "what dynamo was told": _Kind(_dynamo, _give_dynamo_back),
    "function modes": _Kind(lambda: tuple(_get_current_function_mode_stack()), _leave_function_modes),
    "methods of torch.Tensor": _Kind(
        lambda: (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.data_ptr, torch.Tensor.data, torch.Tensor.set_),
        lambda _: [one.uninstall() for one in (torch_patches.PATCHES, torch_patches.METHODS, *_OTHERS)],
    ),
    "signal handlers": _Kind(lambda: tuple(map(signal.getsignal, _SIGNALS)), _put_handlers_back),
    "a profiler": _Kind(_profilers, _stop_profilers),
    "hooks for saved tensors": _Kind(
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(True),
        lambda _: torch._C._autograd._pop_saved_tensors_default_hooks(),
    ),
    "flags of torch": _Kind(_flags, _set_flags),
    "environment variables": _Kind(_environment, _set_environment),
    "spill files": _Kind(_files, lambda _: None),
    "who holds the heap": _Kind(lambda: len(process_memory._holders), lambda _: None),
    "workers": _Kind(_workers, lambda before: [thread.join(1) for thread in _workers() - before]),
}


@contextmanager
def nothing_left() -> Iterator[None]:
    """Reported at the test that left it, and cleaned, so that the next test does not fail for it."""
    before = world()
    yield
    left = clean_up(before)
    if left:
        pytest.fail("the test left behind " + "; ".join(left), pytrace=False)


def world() -> dict[str, Any]:
    """Everything of these kinds, as it is now."""
    return {name: kind.read() for name, kind in KINDS.items()}


def clean_up(before: dict[str, Any]) -> list[str]:
    """What was left, kind by kind; afterwards it is gone. What is collected with the garbage was not left."""
    if _same(before):
        return []
    gc.collect()
    updates.Updates(()).close()  # the hook of sessions that were collected
    for reference in tuple(torch_patches.NOTING):  # block engines that the frames of an error hold
        if (noting := reference()) is not None:
            noting.close()
    for thread in _workers() - before["workers"]:
        if not tuple(torch_patches._open):
            thread.join(10)  # it ends by itself, soon after its session was collected
    left = {name: now for name, kind in KINDS.items() if (now := kind.read()) != before[name]}
    for name in left:
        KINDS[name].clean(before[name])
    return [f"{name}: {now!r} instead of {before[name]!r}" for name, now in left.items()]


def _same(before: dict[str, Any]) -> bool:
    return all(kind.read() == before[name] for name, kind in KINDS.items())
