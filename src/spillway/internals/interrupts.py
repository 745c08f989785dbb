"""Ctrl-C, and what else a signal's handler raises, at a moment when the engine's books are open waits until they are
closed."""

from __future__ import annotations

import functools
import signal
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, final

WATCHED: Final = ("spillway.engines.", "spillway.session")
"""Modules that are never interrupted half-way where a session watches ops: no code of the user's runs inside."""

SIGNALS: Final = tuple(
    int(getattr(signal, name))
    for name in (
        "SIGINT", "SIGCHLD", "SIGALRM", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGVTALRM", "SIGPROF",
    )
    if hasattr(signal, name)
)  # fmt: skip
"""Signals for which programs install handlers that raise. A `DataLoader` has one for SIGCHLD: when a worker died, it
raises wherever the main thread happens to be."""


_raw: Final[Any] = getattr(signal, "_signal", signal)
"""The same functions without turning numbers and handlers into enumerations and back, which takes ten times as long."""


@final
class DeferredInterrupts:
    """Between `open` and `shut` signals inside a session or its engines wait among the pending ones.

    In user code nothing changes: whatever handler was installed is called at once. Outside the main thread, where
    Python delivers no signals, it does nothing. Each of them is opened once.

    Args:
        pending: Where those stand that wait. Who closes the books calls them.
        inside: Modules that are not interrupted, by how their names begin.
    """

    def __init__(self, pending: list[Callable[[], None]], inside: tuple[str, ...] = WATCHED) -> None:
        self._pending = pending
        self._inside = inside
        self._previous: dict[int, Any] = {}
        self._open = False
        self._caught: dict[int, FrameType | None] = {}

    def open(self) -> None:
        """From here on they wait. If this raises, because one came before it was its turn, `shut` is to be called."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._open = True
        for number in SIGNALS:
            previous = _raw.getsignal(number)
            if callable(previous) and previous != self._handle:
                self._previous[number] = previous
                _raw.signal(number, self._handle)

    def shut(self) -> None:
        """Handlers are as they were. Calling it again does nothing, or what is left: another thread than the main one
        changes no handlers."""
        if threading.current_thread() is threading.main_thread():
            try:
                self._put_back()
            except BaseException:  # a signal that waits no longer came before another's handler was put back
                self._put_back()
                raise
        self._open = False

    def _put_back(self) -> None:
        for number, previous in self._previous.items():
            if _raw.getsignal(number) == self._handle:  # else the user installed another one meanwhile
                _raw.signal(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A handler that was installed meanwhile may go on calling this one after the step.
        if not (self._open and self._is_inside(frame)):
            self._previous[number](number, frame)
        elif number not in self._caught:
            self._caught[number] = frame
            self._pending.append(functools.partial(self._deliver, number))

    def _deliver(self, number: int) -> None:
        self._previous[number](number, self._caught.pop(number))

    def _is_inside(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if str(frame.f_globals.get("__name__", "")).startswith(self._inside):
                return True
            frame = frame.f_back
        return False


def by_signal(error: BaseException) -> bool:
    """Whether a signal's handler raised it while a step ran: what is run again will not raise it again."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    ours = (DeferredInterrupts._handle.__code__, DeferredInterrupts._deliver.__code__)
    return any(frame.f_code in ours for frame in frames)


def deliver(pending: list[Callable[[], None]]) -> None:
    """What waited is raised now, the latest first; what that leaves is for the next time."""
    while pending:
        pending.pop()()
