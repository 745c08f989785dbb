"""What runs for Spillway alone warns nobody, and Python goes on as if it had not run.

Not by `warnings.catch_warnings`: whoever enters and leaves that makes Python forget which warnings it has shown once
per place, and the user sees them again and again. What torch enters beside the training makes it forget nothing either.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final, cast, final

from spillway.internals.locks import renew_in_children

_python: Final = cast(Any, warnings)
_FORGETS: Final = tuple(
    name for name in ("_filters_mutated", "_filters_mutated_lock_held") if hasattr(warnings, name)
)  # the second one from Python 3.14 on


@contextlib.contextmanager
def unwarned(category: type[Warning] = Warning, message: str = "") -> Iterator[None]:
    """Warnings of a category that begin as an expression says are not shown, and do not count as shown."""
    entry = ("ignore", re.compile(message) if message else None, category, None, 0)
    filters = cast("list[Any]", warnings.filters)
    with _REMEMBERING.inside(threading.get_ident()):
        filters.insert(0, entry)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # somebody has begun a new list
                filters.remove(entry)


@contextlib.contextmanager
def unshown(holds: Callable[[], bool]) -> Iterator[None]:
    """Where it `holds` warnings that would be shown are not, unless somebody inside collects them."""
    with _HIDING.inside((holds, _ways_to_show())):
        yield


@final
class _Around:
    """Functions of a module that others stand in for as long as anybody is inside, in whatever order they leave."""

    def __init__(self, module: ModuleType, names: tuple[str, ...], instead: Callable[[_Around, Any], Any]) -> None:
        self.by: Counter[Any] = Counter()
        self._module, self._names, self._instead = module, names, instead
        self._stands: dict[str, tuple[Any, Any]] = {}
        self._lock = threading.RLock()
        renew_in_children(self, "_lock")

    @contextlib.contextmanager
    def inside(self, who: Any) -> Iterator[None]:
        with self._lock:
            if not self.by.total():
                for name in self._names:
                    original = getattr(self._module, name)
                    self._stands[name] = original, self._instead(self, original)
                    setattr(self._module, name, self._stands[name][1])
            self.by[who] += 1
        try:
            yield
        finally:
            with self._lock:
                self.by[who] -= 1
                self.by = +self.by
                for name, (original, stands) in self._stands.items() if not self.by else ():
                    if getattr(self._module, name) is stands:
                        setattr(self._module, name, original)


def _unless_by_torch(around: _Around, original: Callable[[], None]) -> Callable[[], None]:
    def forget() -> None:
        if around.by[threading.get_ident()] == 0 or not _is_by_torch():
            original()

    return forget


def _is_by_torch() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in ("warnings", "_py_warnings", "contextlib"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"


def _unless_hidden(around: _Around, original: Callable[[Any], None]) -> Callable[[Any], None]:
    def show(message: Any) -> None:
        if not any(_ways_to_show() == shown and holds() for holds, shown in tuple(around.by)):
            original(message)

    return show


def _ways_to_show() -> tuple[Any, Any]:
    return _python.showwarning, _python._showwarnmsg_impl


_REMEMBERING: Final = _Around(warnings, _FORGETS, _unless_by_torch)
_HIDING: Final = _Around(warnings, ("_showwarnmsg",), _unless_hidden)
