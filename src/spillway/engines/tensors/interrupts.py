"""Ctrl-C at a moment when the engine's books are open waits until they are closed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, final

BOOKS_OPEN: Final = ("spillway.engines.", "spillway.session")
"""Modules that are never interrupted half-way."""


@final
class DeferredInterrupts:
    """Context manager: while it is open, SIGINT inside a session or its engines is delivered before the next op.

    In user code nothing changes: whatever handler was installed is called at once. Outside the main thread, where
    Python delivers no signals, it does nothing.
    """

    def __init__(self, pending: list[Callable[[], None]]) -> None:
        self._pending = pending
        self._previous: Any = None
        self._installed = False
        self._caught: tuple[int, FrameType | None] = (0, None)

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._previous = signal.getsignal(signal.SIGINT)
        if callable(self._previous):
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True

    def __exit__(self, *exception: object) -> None:
        if self._installed:
            self._installed = False
            if signal.getsignal(signal.SIGINT) == self._handle:  # else the user installed another one meanwhile
                signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not _inside_engine(frame):
            self._previous(number, frame)
        elif self._deliver not in self._pending:  # other things wait for the next op too
            self._caught = number, frame
            self._pending.append(self._deliver)

    def _deliver(self) -> None:
        self._previous(*self._caught)


def _inside_engine(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(BOOKS_OPEN):
            return True
        frame = frame.f_back
    return False
