"""Whether a value can be recomputed, and how a moved one is: instead of reading it back.

A moved value keeps its recipe for as long as the step lasts, and nothing is held for it meanwhile: what it was made
from may die or be written. So the way back is looked up in the moment in which an op wants the value. If it is legal
and within the cap, the cut is held from then on, as for a drop (rule 2), until the value is there. Should the replay
fail for want of room, the copy in the slower tier is still what it was, and is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from spillway.engines.records import AWAY, DROPPED, Storage, Value
from spillway.engines.replay import UNCAPPED, Ancestry, ancestry, chain_fits
from spillway.engines.room import leaving_reserved
from spillway.errors import BudgetInfeasible, SpillFullError
from spillway.methods.base import Recall
from spillway.units import Bytes

if TYPE_CHECKING:
    from spillway.engines.controller import Controller


def way_back(controller: Controller, value: Value, ops: frozenset[int] | None = None) -> Ancestry | str:
    """The recipes and leaves from which `value` can be recomputed now, or why it cannot be (rules 2, 3, 4, 10). A plan
    says itself which ops, and was verified as a whole: no cap is needed."""
    if controller.lending.made(value.recipe):
        return "in the hands of a custom function"
    found = ancestry(value, controller.chain_cap if ops is None else UNCAPPED, ops)
    if found is None:
        return "no recipe within the cap"
    if any(leaf.storage.written or controller.lending.lent(leaf.storage) for leaf in found.leaves):
        return "would depend on what is being written"
    if any(_may_change_unseen(controller, leaf) for leaf in found.leaves):
        return "would depend on what has escaped"
    return found if ops is not None or chain_fits(value, found.chain, controller.chain_cap) else "chain too long"


def _may_change_unseen(controller: Controller, leaf: Value) -> bool:
    """Rules 2 and 10: whoever holds its address may write it at any moment."""
    return leaf.storage.escaped or (not leaf.absent and controller.machine.escaped(leaf.storage))


def way_back_of_moved(controller: Controller, storage: Storage) -> Ancestry | str:
    """How a moved storage would be recomputed instead of read, or why it has to be read."""
    value = storage.value
    if value is None or value.absent != AWAY or value in controller.copies.arriving:
        return "not away"
    if storage.exposed or storage.escaped:
        return "reached from outside"
    return way_back(controller, value)


def recall(controller: Controller, value: Value) -> None:
    """Recompute a moved value that an op wants, if the policy says so and it is legal; else leave it where it is."""
    storage = value.storage
    if value in controller.copies.arriving or controller.policy.bring_back(controller.view, storage) is Recall.RELOAD:
        return
    found = way_back_of_moved(controller, storage)
    if isinstance(found, str):
        controller.counters.refuse(found)
        return
    controller.away -= 1
    controller.cut(value, tuple(found.leaves), found.chain)
    try:
        with leaving_reserved(controller):
            controller.restore(value)
    except (BudgetInfeasible, SpillFullError):
        controller.counters.refuse("no room to recompute it")
    finally:
        _conclude(controller, value)


def restore_early(controller: Controller, storage: Storage) -> bool:
    """Bring back what no op wants yet, or refuse and count it (rule 9)."""
    value = storage.value
    if value is None or value.absent not in (AWAY, DROPPED):
        controller.counters.refuse("not absent")
        return False
    try:
        with leaving_reserved(controller):
            controller.restore(value)
    except (BudgetInfeasible, SpillFullError):
        controller.counters.refuse("no room to bring it back early")
        return False
    return True


def bring_back(controller: Controller, values: Iterable[Value], unlimited: Bytes) -> None:
    """Rule 12: right before small, so without a budget; one value that is lost does not keep the others away."""
    allowed, controller.allowed = controller.allowed, unlimited
    errors: list[BaseException] = []
    for value in values:
        try:
            if value.absent in (DROPPED, AWAY):
                controller.restore(value)
        except BaseException as error:
            errors.append(error)
    controller.allowed = allowed
    if errors:
        raise errors[0]


def _conclude(controller: Controller, value: Value) -> None:
    """Keep the books of a recall, whether it brought the value back or was given up."""
    if value.absent == DROPPED:
        controller.dropped.pop(value, None)
        controller.cut_loose(value)
        value.absent = AWAY
        controller.away += 1
        return
    controller.counters.recalls += 1
    controller.copies.came_back(value.storage, early=False)
    if value.home is not None:
        controller.note_copied(value)  # the copy is as good as before: leaving again costs nothing
