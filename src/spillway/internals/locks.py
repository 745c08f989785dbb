"""Locks in a forked child: another thread of the parent may hold one, and that thread is not in the child."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Final

_owners: Final[weakref.WeakKeyDictionary[Any, set[str]]] = weakref.WeakKeyDictionary()
"""Of locks, by what they are called there."""


def renew_in_children(owner: Any, name: str) -> None:
    """The reentrant lock that a module, or an object, has under this name is a new one in every forked child, unless
    the thread that forks holds it, which goes on in the child."""
    _owners.setdefault(owner, set()).add(name)


def held_here(lock: Any) -> bool:
    """Whether this thread holds a reentrant lock."""
    return bool(lock._is_owned())


def _renew() -> None:
    for owner, names in list(_owners.items()):
        for name in names:
            if not held_here(getattr(owner, name)):
                setattr(owner, name, threading.RLock())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
