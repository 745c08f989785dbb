"""Whose step is running: several sessions in one process keep out of each other's way.

Two modes in one thread would both see the inner step's ops, and each would take away what the other believes to be
there. Two threads may run steps at the same time if they share no storage: what one of them moves, the other's op may
be reading.

A turn is respected as long as its step can go on. Whoever finds one whose step was lost (nobody can leave it any more,
or its thread is gone) ends that step first.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from spillway.engines.tensors.abstract import AbstractTensorEngine
from spillway.errors import SessionError
from spillway.internals.private import storage_address, storage_of


class Taker(Protocol):
    """A step, as its turn knows it."""

    @property
    def lost(self) -> bool:
        """Whether nobody can leave it any more, so that this thread may end it."""

    def give_back(self) -> None:
        """End it, if it has not ended, and give back what it took."""


class _Turn(NamedTuple):
    """A step that is running."""

    engine: AbstractTensorEngine
    thread: threading.Thread
    step: weakref.ref[Taker]
    keys: dict[int, Any]
    """Storages that it is known by name to use, by address. No other one has the address of one that is gone while a
    weak reference to that is held."""
    abandon: Callable[[], None]
    """Ends the step of a session that is gone."""

    def is_stale(self) -> bool:
        step = self.step()
        return step.lost if step is not None else may_end(self.thread)

    def clear(self) -> None:
        step = self.step()
        try:
            if step is not None:
                step.give_back()
            else:
                self.abandon()
        finally:
            end_turn(self.engine)


_turns: Final[dict[int, _Turn]] = {}
"""By the engine's id, in the order in which they were taken. No lock that an interruption could leave taken."""


def take_turn(
    engine: AbstractTensorEngine, step: Taker, tensors: Callable[[], Iterable[torch.Tensor]],
    abandon: Callable[[], None], *, alone: bool,
) -> None:  # fmt: skip
    """A step of this engine begins in this thread. `alone` says that there is no other engine to meet. Raises
    SessionError if another session's step is running in this thread, or in another one on the same storages."""
    keys = {} if alone else _keys(tensors())
    mine = _turns[id(engine)] = _Turn(engine, threading.current_thread(), weakref.ref(step), keys, abandon)
    try:
        for other in list(_turns.values()):
            if other is mine:
                break  # of two threads at once, the later one gives way
            if other.thread is mine.thread:
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
    except BaseException:
        end_turn(engine)
        raise


def end_lost_steps() -> None:
    """Those that nobody else can end; to be called before a step takes anything."""
    for turn in list(_turns.values()):
        if turn.is_stale():
            turn.clear()


def end_turn(engine: AbstractTensorEngine) -> None:
    """Its step has ended."""
    _turns.pop(id(engine), None)


def may_end(thread: threading.Thread) -> bool:
    """Whether the running thread can end what that thread began: it is the same, or that one is gone. What a step
    changed about its thread cannot be undone from another.
    """
    if thread is threading.current_thread():
        return True
    return not thread.is_alive() or thread.ident not in sys._current_frames()  # some are not known to have ended


def forget_turns() -> None:
    """In a forked child, where no step is watched."""
    _turns.clear()


def _keys(tensors: Iterable[torch.Tensor]) -> dict[int, Any]:
    weak: Any = StorageWeakRef
    there = (tensor for tensor in tensors if torch._C._has_storage(tensor))
    return {storage_address(tensor): weak(storage_of(tensor)) for tensor in there}
