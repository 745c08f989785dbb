"""Updates of a session's parameters outside of its steps: noticed, and said once.

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
from collections.abc import Iterable
from typing import Any, Final, final

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from spillway.internals.locks import renew_in_children

_open: Final[weakref.WeakSet[Updates]] = weakref.WeakSet()
_handles: Final[list[RemovableHandle]] = []
_lock = threading.RLock()
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

    def step_ended(self) -> None:
        """Updates are outside again."""
        self.stepping = None

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
                stacklevel=4,
            )


def _forget() -> None:
    """With the last session, closed or collected, the hook is gone."""
    with _lock:
        while _handles and not tuple(_open):
            _handles.pop().remove()


def _heard(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """With a closure, in which a step may begin, the update comes when that is through."""
    if torch.compiler.is_compiling() or _inside():
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        _tell(optimizer)
        return None

    @functools.wraps(closure)
    def heard(*given: Any, **named: Any) -> Any:
        loss = closure(*given, **named)
        if not _inside():
            _tell(optimizer)
        return loss

    return ((args[0], heard, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": heard})


def _inside() -> bool:
    """Whether this thread is in a step of any session."""
    here = threading.current_thread()
    return any(session.stepping is here for session in tuple(_open))


def _tell(optimizer: torch.optim.Optimizer) -> None:
    for session in tuple(_open):
        session.outside(optimizer)
