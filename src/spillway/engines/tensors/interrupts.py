"""Ctrl-C, and what else a signal's handler raises, at a moment when the engine's books are open waits until they are
closed."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, final

BOOKS_OPEN: Final = ("spillway.engines.", "spillway.session")
"""Modules that are never interrupted half-way."""

SIGNALS: Final = tuple(
    getattr(signal, name)
    for name in (
        "SIGINT", "SIGCHLD", "SIGALRM", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGVTALRM", "SIGPROF",
    )
    if hasattr(signal, name)
)  # fmt: skip
"""Signals for which programs install handlers that raise. A `DataLoader` has one for SIGCHLD: when a worker died, it
raises wherever the main thread happens to be."""


@final
class DeferredInterrupts:
    """Context manager: while it is open, signals inside a session or its engines are delivered before the next op.

    In user code nothing changes: whatever handler was installed is called at once. Outside the main thread, where
    Python delivers no signals, it does nothing.
    """

    def __init__(self, pending: list[Callable[[], None]]) -> None:
        self._pending = pending
        self._previous: dict[int, Any] = {}
        self._open = False
        self._caught: dict[int, FrameType | None] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._open = True
        try:
            for number in SIGNALS:
                previous = signal.getsignal(number)
                if callable(previous):
                    self._previous[number] = previous
                    signal.signal(number, self._handle)
        except BaseException:  # one of them came before it was its turn
            self.__exit__()
            raise

    def __exit__(self, *exception: object) -> None:
        if not self._open:
            return
        self._open = False
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:  # else the user installed another one meanwhile
                signal.signal(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A handler that was installed meanwhile may go on calling this one after the step.
        if not (self._open and _inside_engine(frame)):
            self._previous[number](number, frame)
        elif number not in self._caught:
            self._caught[number] = frame
            self._pending.append(functools.partial(self._deliver, number))

    def _deliver(self, number: int) -> None:
        self._previous[number](number, self._caught.pop(number))


def _inside_engine(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(BOOKS_OPEN):
            return True
        frame = frame.f_back
    return False
