"""Published ways to decide, one file each. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from spillway.errors import UnknownMethodError
from spillway.methods.actions import Action
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
from spillway.methods.by_block import AbstractBlockMethod
from spillway.methods.checkmate import Checkmate
from spillway.methods.checkpoint import Checkpoint, CheckpointPlanner
from spillway.methods.delta import Delta
from spillway.methods.dtr import DTR, HEURISTICS
from spillway.methods.keep_all import KeepAll
from spillway.methods.lru import LRU
from spillway.methods.mimose import Mimose
from spillway.methods.mimose.planner import MimosePlanner
from spillway.methods.planned import Planned
from spillway.methods.sqrt_n import SqrtN
from spillway.methods.swap import Swap
from spillway.methods.uvm import UVM
from spillway.methods.zero_offload import ZeroOffload

METHODS: Mapping[str, Callable[[], AbstractPolicy | AbstractPlanner]] = MappingProxyType(
    {
        KeepAll.name: KeepAll,
        LRU.name: LRU,
        Delta.name: Delta,
        "delta-published": Delta.as_published,
        **{name: DTR.named(name) for name in HEURISTICS},
        SqrtN.name: SqrtN,
        Checkmate.name: Checkmate,
        Swap.name: Swap,
        "swap-prefetch": Swap.ahead,
        UVM.name: UVM,
        ZeroOffload.name: ZeroOffload,
        MimosePlanner.name: MimosePlanner,
        "mimose-published": MimosePlanner.as_published,
        CheckpointPlanner.name: CheckpointPlanner,
    }
)
"""Policies and planners by the name that users write. Planners that stand in `BLOCK_METHODS` as well are for recorded
steps; a session takes the method of that name."""

BLOCK_METHODS: Mapping[str, Callable[[], AbstractBlockMethod]] = MappingProxyType(
    {"mimose": Mimose, "mimose-published": Mimose.as_published, Checkpoint.name: Checkpoint}
)
"""Methods of the block engine by the name that users write."""


def resolve(method: str | AbstractPolicy | AbstractBlockMethod) -> AbstractPolicy | AbstractBlockMethod:
    """The policy, or the method of the block engine, behind a name; an object is taken as it is.

    Raises:
        UnknownMethodError: No method has that name, or it decides before the step and so needs a recorded one.
    """
    if isinstance(method, AbstractPolicy | AbstractBlockMethod):
        return method
    if isinstance(method, str) and method in BLOCK_METHODS:
        return BLOCK_METHODS[method]()
    if not (isinstance(method, str) and method in METHODS):
        policies = [name for name, make in METHODS.items() if isinstance(make(), AbstractPolicy)]
        names = ", ".join(sorted([*policies, *BLOCK_METHODS]))
        raise UnknownMethodError(f"There is no method {method!r}; choose one of {names}.")
    found = method_named(method)
    if isinstance(found, AbstractPolicy):
        return found
    raise UnknownMethodError(
        f"{method!r} plans before the step: record one, make a plan with spillway.plan(step, budget=..., "
        f"method={method!r}, device=...), and give method=Planned(plan, step) instead of the name."
    )


def method_named(method: str) -> AbstractPolicy | AbstractPlanner:
    """The policy or planner behind a name. Raises UnknownMethodError if no method has it."""
    if isinstance(method, str) and method in METHODS:
        return METHODS[method]()
    raise UnknownMethodError(f"There is no method {method!r}; choose one of {', '.join(sorted(METHODS))}.")


__all__ = [
    "BLOCK_METHODS",
    "DTR",
    "LRU",
    "METHODS",
    "UVM",
    "AbstractBlockMethod",
    "AbstractPlanner",
    "AbstractPolicy",
    "Action",
    "Candidate",
    "Checkmate",
    "Checkpoint",
    "Copy",
    "Delta",
    "Drop",
    "Evicted",
    "Fetch",
    "KeepAll",
    "MemoryView",
    "Mimose",
    "Move",
    "Planned",
    "Problem",
    "Proposal",
    "Recall",
    "Restore",
    "SqrtN",
    "Swap",
    "ZeroOffload",
    "method_named",
    "resolve",
]
