"""Making room when it is short: what the policy proposes, then everything, then a refusal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import TYPE_CHECKING

from spillway.errors import BudgetInfeasible, SpillFullError
from spillway.methods.base import Proposal
from spillway.units import Bytes

if TYPE_CHECKING:
    from spillway.engines.controller import Controller

PATIENCE = 1 << 16
"""Refusals after which a policy is not asked any further."""


def grant_in_turn(
    controller: Controller, proposals: Generator[Proposal, bool, None], enough: Callable[[], bool]
) -> None:
    """Grant or refuse one proposal after the other, until it is enough, the policy ends, or patience does."""
    granted, refused = None, 0
    with contextlib.closing(proposals):
        while not enough() and refused < PATIENCE:
            try:
                proposal = next(proposals) if granted is None else proposals.send(granted)
            except StopIteration:
                return
            granted = controller.grant(proposal)
            refused += not granted
            controller.empty_graveyard()


def ask_policy(controller: Controller, needed: Bytes) -> None:
    """Grant what the policy proposes until `needed` more bytes fit. Policies may refuse as well."""
    try:
        _ask(controller, needed)
    except BudgetInfeasible:
        if not _take_reserved(controller):
            raise
        _ask(controller, needed)


def _ask(controller: Controller, needed: Bytes) -> None:
    proposals = controller.policy.relieve(controller.view, controller.resident + needed - controller.allowed)
    grant_in_turn(controller, proposals, lambda: controller.resident + needed <= controller.allowed)


def use_last_resort(controller: Controller, needed: Bytes) -> None:
    """What no method proposed: move whatever may leave, and where the tier is full, drop it; then take what is
    reserved.
    """
    for leave in (controller.move, controller.drop):
        for storage in list(controller.view.candidates()):
            if controller.resident + needed <= controller.allowed:
                return
            controller.while_held(leave, storage)
            controller.empty_graveyard()
    if controller.resident + needed > controller.allowed:
        _take_reserved(controller)


def _take_reserved(controller: Controller) -> bool:
    """Rather than refuse: until the step ends the whole budget is allowed. False if it is already."""
    reserved, controller.reserved = controller.reserved, 0
    controller.allowed += reserved
    return reserved > 0


@contextlib.contextmanager
def leaving_reserved(controller: Controller) -> Iterator[None]:
    """What is made room for here is not needed: what is reserved stays so."""
    reserved, controller.reserved = controller.reserved, 0
    try:
        yield
    finally:
        controller.reserved = reserved


def refusal(controller: Controller, needed: Bytes, name: str) -> BudgetInfeasible | SpillFullError:
    """Why the op cannot run."""
    if controller.tier_full and controller.counters.floor_bytes <= controller.allowed:
        return SpillFullError(controller.tier_full)
    smallest = max(controller.resident + needed, controller.counters.floor_bytes)
    said = partial(
        BudgetInfeasible, needed=smallest, allowed=controller.allowed, op=name, op_index=controller.view.op_index,
        smallest_budget=smallest, exact=False,
    )  # fmt: skip
    controller.refused = said()
    return said()
