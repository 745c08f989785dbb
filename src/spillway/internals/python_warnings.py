"""What runs for Spillway alone warns nobody, and Python goes on as if it had not run.

Not by `warnings.catch_warnings`: whoever enters and leaves that makes Python forget which warnings it has shown once
per place, and the user sees them again and again.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

_python: Final = cast(Any, warnings)
_FORGETS: Final = tuple(
    name for name in ("_filters_mutated", "_filters_mutated_lock_held") if hasattr(warnings, name)
)  # the second one from Python 3.14 on


@contextlib.contextmanager
def unwarned(category: type[Warning] = Warning, message: str = "") -> Iterator[None]:
    """Warnings of a category that begin as an expression says are not shown, and do not count as shown."""
    entry = ("ignore", re.compile(message) if message else None, category, None, 0)
    filters = cast("list[Any]", warnings.filters)
    with _nothing_forgotten():
        filters.insert(0, entry)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # somebody has begun a new list
                filters.remove(entry)


@contextlib.contextmanager
def unshown(holds: Callable[[], bool]) -> Iterator[None]:
    """Where it `holds` warnings that would be shown are not, unless somebody inside collects them."""
    original, shown = _python._showwarnmsg, _ways_to_show()

    def show(message: Any) -> None:
        if _ways_to_show() != shown or not holds():
            original(message)

    _python._showwarnmsg = show
    try:
        yield
    finally:
        _python._showwarnmsg = original


def _ways_to_show() -> tuple[Any, Any]:
    return _python.showwarning, _python._showwarnmsg_impl


@contextlib.contextmanager
def _nothing_forgotten() -> Iterator[None]:
    """As `catch_warnings` inside begins and ends in this thread."""
    thread, originals = threading.get_ident(), {name: getattr(warnings, name) for name in _FORGETS}
    inside = True

    def elsewhere(original: Callable[[], None]) -> None:
        if not inside or threading.get_ident() != thread:  # another thread may put this back after the end
            original()

    for name, original in originals.items():
        setattr(warnings, name, functools.partial(elsewhere, original))
    try:
        yield
    finally:
        inside = False
        for name, original in originals.items():
            setattr(warnings, name, original)
