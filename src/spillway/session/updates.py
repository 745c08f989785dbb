"""Updates of a session's parameters: heard of right before they begin; outside of its steps noticed, and said once.

An optimizer that steps there takes memory that no step counts. A hook on all optimizers hears of it, because which of
them updates a model need not be known to its session. Such a hook is global by nature, so the list of open sessions is
too; with the last one it is gone.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias, final

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from spillway.engines.tensors.optimizers import GroupsInParts, OptimizerInParts, sizes_of_parts
from spillway.internals.locks import renew_in_children
from spillway.units import Bytes

_open: Final[weakref.WeakSet[Updates]] = weakref.WeakSet()
_handles: Final[list[RemovableHandle]] = []
_lock = threading.RLock()
_LIBRARIES: Final = frozenset({"spillway", "torch", "accelerate", "lightning", "pytorch_lightning", "transformers"})
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a call."""
renew_in_children(sys.modules[__name__], "_lock")


@final
class Updates:
    """What one session hears of optimizers, from here until `close`."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.stepping: threading.Thread | None = None
        """Who is in a step of the session."""
        self._parameters = {id(parameter) for parameter in parameters}
        self._begun = self._told = False
        with _lock:
            _open.add(self)
            if not _handles:
                _handles.append(register_optimizer_step_pre_hook(_heard))
        weakref.finalize(self, _forget).atexit = False

    def close(self) -> None:
        """Hear of nothing any more. Calling it again does nothing."""
        with _lock:
            _open.discard(self)
            _forget()

    def step_begins(self) -> None:
        """In this thread."""
        self._begun, self.stepping = True, threading.current_thread()

    def outside(self, optimizer: torch.optim.Optimizer) -> None:
        """It is about to step while this thread is in no step."""
        if self._told or not self._begun:
            return
        if any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
            self._told = True
            warnings.warn(
                f"{type(optimizer).__name__}.step() ran outside of the session's steps, so that what it takes is "
                f"neither kept under the budget nor reported: call it before the step is left, or, where forward and "
                f"update are far apart, put memory.begin(batch) and memory.end() around both.",
                stacklevel=users_level(),
            )


def _forget() -> None:
    """With the last session, closed or collected, the hook is gone."""
    with _lock:
        while not tuple(_open) and _handles:  # in this order: a collection of garbage in the first may end up here
            _handles.pop().remove()


def _heard(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    if torch.compiler.is_compiling() or _inside():
        return None
    return before_update(functools.partial(_tell, optimizer), args, kwargs)


def _inside() -> bool:
    """Whether this thread is in a step of any session."""
    here = threading.current_thread()
    return any(session.stepping is here for session in tuple(_open))


def _tell(optimizer: torch.optim.Optimizer) -> None:
    if not _inside():
        for session in tuple(_open):
            session.outside(optimizer)


def before_update(tell: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """What a pre-hook of `Optimizer.step` returns that has `tell` called right before parameters are updated.

    That is at once or, with a closure, which runs forward and backward and in which a step or a session may begin, each
    time that the closure is through.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        tell()
        return None

    @functools.wraps(closure)
    def told(*given: Any, **named: Any) -> Any:
        loss = closure(*given, **named)
        tell()
        return loss

    return ((args[0], told, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": told})


def update_in_parts(
    optimizer: torch.optim.Optimizer,
    tell: Callable[[bool], Bytes | None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Arguments | None:
    """The same for `tell` that says in parts of how many bytes parameters are to be updated, or None for all at once,
    as it must be where it is told True. What `step` then takes for its optimizer has smaller groups, and is that
    optimizer in everything else."""
    return _in_parts(optimizer, tell, torch.compiler.is_compiling() or args[0] is not optimizer, args, kwargs)


@_disable_dynamo
def _in_parts(
    optimizer: torch.optim.Optimizer, tell: Callable[[bool], Bytes | None], at_once: bool, args: Any, kwargs: Any
) -> Arguments | None:
    groups = GroupsInParts(optimizer)

    def told() -> None:
        groups.part_bytes = tell(at_once)

    changed = before_update(told, args, kwargs)
    if at_once or (groups.part_bytes is None and (changed is None or not sizes_of_parts(optimizer))):
        return changed
    (_, *given), named = changed or (args, kwargs)
    return (OptimizerInParts(groups), *given), named  # also where a closure has not run yet, and said nothing


def users_level() -> int:
    """The `stacklevel` of a warning about the user's line that called an optimizer, through whatever libraries."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level
