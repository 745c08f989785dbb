"""Nothing is written by a forward that runs once more: what this thread prints, logs and warns of is dropped.

Not dropped: warnings that the forward itself collects, what a debugger says, what goes to another file
than `sys.stdout` and `sys.stderr`, and what code in C writes.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final, cast, final

from spillway.internals.python_warnings import unshown

_SPEAKS: Final = frozenset({"warnings", "pdb", "bdb", "cmd", "code"})
"""Modules whose words are for whoever sits in front of the screen."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Around a run of which nothing is to be seen. Other threads print and log as ever."""
    silence = _Silence()
    handlers = [one for one in (ref() for ref in cast(Any, logging)._handlerList) if one is not None]
    with contextlib.ExitStack() as stack:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is not None:
                stack.callback(_take_away, name)
                setattr(sys, name, _Muffled(getattr(sys, name), silence))
        stack.callback(_unfilter, handlers, silence)
        for handler in handlers:
            handler.filters = [silence, *handler.filters]
        stack.enter_context(unshown(lambda: silence.holds("")))
        stack.callback(silence.end)
        yield


def _take_away(name: str) -> None:
    """What muffles, unless somebody has put something else in its place, and all below that is over."""
    now = getattr(sys, name)
    while isinstance(now, _Muffled) and now.silence.over:
        now = now.muffled
    setattr(sys, name, now)


def _unfilter(handlers: Iterable[logging.Handler], silence: _Silence) -> None:
    for handler in handlers:
        handler.filters = [one for one in handler.filters if one is not silence]


@final
class _Silence:
    """Of one thread, for a while; a filter of log records."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.over = False

    def end(self) -> None:
        """Whoever holds on to what muffles is heard again."""
        self.over = True

    def holds(self, speaker: str) -> bool:
        """Whether nothing may be heard of a module in this thread."""
        return not self.over and threading.get_ident() == self._thread and speaker not in _SPEAKS

    def filter(self, record: logging.LogRecord) -> bool:
        return record.name == "py.warnings" or not self.holds("")


@final
class _Muffled:
    """A file to which one thread does not write."""

    def __init__(self, muffled: Any, silence: _Silence) -> None:
        self.muffled, self.silence = muffled, silence

    def write(self, text: Any) -> Any:
        return len(text) if self._drops() else self.muffled.write(text)

    def writelines(self, lines: Iterable[Any]) -> None:
        if not self._drops():
            self.muffled.writelines(lines)

    def _drops(self) -> bool:
        return self.silence.holds(sys._getframe(2).f_globals.get("__name__", ""))

    @property
    def buffer(self) -> Any:
        """The bytes below the text."""
        return _Muffled(self.muffled.buffer, self.silence)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.muffled)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.muffled, name)
