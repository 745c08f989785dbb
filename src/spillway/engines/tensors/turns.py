"""Whose step is running: several sessions in one process keep out of each other's way.

Two modes in one thread would both see the inner step's ops, and each would take away what the other believes to be
there. Two threads may run steps at the same time if they share no storage: what one of them moves, the other's op may
be reading.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from spillway.engines.tensors.private import storage_address
from spillway.errors import SessionError

if TYPE_CHECKING:
    from spillway.engines.tensors.engine import TensorEngine


class _Turn(NamedTuple):
    """A step that is running."""

    engine: TensorEngine
    thread: int
    keys: frozenset[int]
    """Storages that it is known by name to use."""


_turns: Final[dict[int, _Turn]] = {}
"""By the engine's id."""
_lock = threading.Lock()


def take_turn(engine: TensorEngine, tensors: Callable[[], Iterable[torch.Tensor]], *, alone: bool) -> None:
    """A step of this engine begins in this thread. `alone` says that there is no other engine to meet.

    Raises:
        SessionError: Another session's step is running in this thread, or in another one on the same storages.
    """
    thread = threading.get_ident()
    keys = frozenset() if alone else _keys(tensors())
    with _lock:
        for other in _turns.values():
            if other.thread == thread:
                raise SessionError(
                    "A step of another session is running in this thread, and steps do not nest: leave it first, or "
                    "give both models to one session, spillway.manage([model, other], ...)."
                )
            shared = sum(key in other.keys or key in other.engine.table for key in keys)
            if shared:
                raise SessionError(
                    f"A step of another session is running in another thread on {shared} of the tensors that this step "
                    f"uses: let the sessions take turns, or give each thread copies of its own."
                )
        _turns[id(engine)] = _Turn(engine, thread, keys)


def end_turn(engine: TensorEngine) -> None:
    """Its step has ended."""
    with _lock:
        _turns.pop(id(engine), None)


def check_thread(engine: TensorEngine) -> None:
    """What a step changed about its thread cannot be undone from another.

    Raises:
        SessionError: The step of this engine began in another thread; nothing was changed.
    """
    turn = _turns.get(id(engine))
    if turn is not None and turn.thread != threading.get_ident():
        raise SessionError("This step began in another thread, and has to be left by that thread.")


def forget_turns() -> None:
    """In a forked child, where no step is watched."""
    global _lock
    _lock = threading.Lock()
    _turns.clear()


def _keys(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    return frozenset(storage_address(tensor) for tensor in tensors if torch._C._has_storage(tensor))
