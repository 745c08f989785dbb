"""Published ways to decide, one file each. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from spillway.errors import UnknownMethodError
from spillway.methods.base import (
    AbstractPlanner,
    AbstractPolicy,
    Candidate,
    Copy,
    Drop,
    Evicted,
    Fetch,
    MemoryView,
    Move,
    Problem,
    Proposal,
    Recall,
    Restore,
)
from spillway.methods.delta import Delta
from spillway.methods.dtr import DTR, HEURISTICS
from spillway.methods.keep_all import KeepAll
from spillway.methods.lru import LRU
from spillway.methods.planned import Planned

METHODS: Mapping[str, Callable[[], AbstractPolicy]] = MappingProxyType(
    {
        KeepAll.name: KeepAll,
        LRU.name: LRU,
        Delta.name: Delta,
        "delta-published": Delta.as_published,
        **{name: DTR.named(name) for name in HEURISTICS},
    }
)
"""Every method by the name that users write."""


def resolve(method: str | AbstractPolicy) -> AbstractPolicy:
    """The policy behind a name; a policy object is taken as it is.

    Raises:
        UnknownMethodError: No method has that name.
    """
    if isinstance(method, AbstractPolicy):
        return method
    if isinstance(method, str) and method in METHODS:
        return METHODS[method]()
    raise UnknownMethodError(f"There is no method {method!r}; choose one of {', '.join(sorted(METHODS))}.")


__all__ = [
    "DTR",
    "LRU",
    "METHODS",
    "AbstractPlanner",
    "AbstractPolicy",
    "Candidate",
    "Copy",
    "Delta",
    "Drop",
    "Evicted",
    "Fetch",
    "KeepAll",
    "MemoryView",
    "Move",
    "Planned",
    "Problem",
    "Proposal",
    "Recall",
    "Restore",
    "resolve",
]
