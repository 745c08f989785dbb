"""Bringing a dropped value back: the controller's replay stack.

Replay is a graph over values, not over storages: an in-place op is an edge from one version to the next, and
everything on the way lives in *temporaries*, so that the user's storages only ever receive their current version.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

from spillway.errors import EngineError
from spillway.ir.timeline import Change
from spillway.memory.ancestry import UNCAPPED, ancestry
from spillway.memory.ledger import AbstractLedger
from spillway.memory.records import DROPPED, HERE, TEMPORARY, Recipe, Storage, Value


def in_order_of_return(value: Value, planned: Collection[Value]) -> list[Value]:
    """What has to be replayed to bring a dropped value back, one after the other. What a method dropped under pressure
    has short chains, and `Replay` brings its leaves back as it comes to them. Chains of a plan have any length."""
    order: dict[Value, None] = {}
    stack = [value]
    while stack:
        top = stack[-1]
        below = [leaf for leaf in top.leaves or () if leaf.absent == DROPPED and leaf not in order]
        if below and value in planned:
            stack += below
        else:
            order[stack.pop()] = None
    return list(order)


@final
class Replay:
    """Recomputes one dropped value, or those that a plan has back together, op by op, within the budget."""

    __slots__ = ("_last_use", "_leaves", "_ledger", "_recipes", "_targets", "_temporaries")

    def __init__(self, ledger: AbstractLedger, target: Value) -> None:
        planned = ledger.planned.get(target)
        self._ledger = ledger
        self._targets = [target]
        if planned is not None and planned.moment is not None:
            others = (value for value, when in ledger.planned.items() if when == planned and value is not target)
            self._targets += [value for value in others if value.absent == DROPPED]
        self._leaves: dict[Value, None] = {}
        recipes: dict[int, Recipe] = {}
        for one in self._targets:
            found = ancestry(one, UNCAPPED, None if planned is None else planned.ops)
            if found is None:
                raise EngineError(f"The cut of {one!r} was lost; it cannot be recomputed.")
            self._leaves |= found.leaves
            recipes |= found.recipes
        self._recipes = [recipes[number] for number in sorted(recipes)]
        self._temporaries: dict[Value, Storage] = {}
        self._last_use = {read: recipe.number for recipe in self._recipes for read in recipe.reads}

    def run(self) -> None:
        """Recompute the targets and give them their bytes. Inputs are wanted meanwhile (rule 3)."""
        for leaf in self._leaves:
            leaf.wanted += 1
        try:
            for recipe in self._recipes:
                self._run_one(recipe)
        finally:
            for leaf in self._leaves:
                leaf.wanted -= 1
            for temporary in list(self._temporaries.values()):
                self._free(temporary)
        for target in self._targets:
            if target.absent != HERE:
                raise EngineError(f"A replay of {len(self._recipes)} ops did not bring {target!r} back.")

    def _run_one(self, recipe: Recipe) -> None:
        ledger = self._ledger
        for read in recipe.reads:
            if read.absent == DROPPED and read not in self._temporaries:  # a plan's replay may have its own
                ledger.restore(read)
        bindings = [self._temporaries.get(read, read.storage) for read in recipe.reads]
        distinct = dict.fromkeys(bindings)
        for storage in distinct:
            storage.locks += 1
        try:
            for storage in distinct:
                if storage.value is not None and storage.value.absent:
                    ledger.page_in(storage.value, recipe.name)
            ledger.make_room(recipe.nbytes, recipe.name)
            if recipe.inside:
                stays = sum(storage.nbytes for storage in distinct)
                ledger.make_room_if_possible(recipe.nbytes + recipe.inside, recipe.name, stays=stays)
            began = ledger.machine.now()
            handles = ledger.machine.run(recipe, bindings)
            ledger.counters.recomputed(recipe, began, ledger.machine.now())
            self._take_outputs(recipe, bindings, handles)
        finally:
            for storage in distinct:
                storage.locks -= 1
        self._hand_over(recipe)
        for value, temporary in list(self._temporaries.items()):
            if self._last_use.get(value, -1) <= recipe.number:
                del self._temporaries[value]
                self._free(temporary)

    def _take_outputs(self, recipe: Recipe, bindings: Sequence[Storage], handles: Sequence[object]) -> None:
        """Register what the op created or wrote as temporaries, under the value that they now hold."""
        if len(handles) != len(recipe.creates):
            made = f"{len(handles)} storages when replayed and {len(recipe.creates)} before"
            raise EngineError(f"{recipe!r} created {made}.")
        for value, handle in zip(recipe.creates, handles, strict=True):
            self._temporaries[value] = self._ledger.adopt(TEMPORARY, value.nbytes, handle, temporary=True)
        for position, value in recipe.writes:
            temporary = bindings[position]
            if recipe.reads[position] not in self._temporaries:
                raise EngineError(f"{recipe!r} would write {recipe.reads[position]!r} itself when replayed.")
            self._temporaries.pop(recipe.reads[position], None)
            self._temporaries[value] = temporary
            self._ledger.overwrite(temporary, None)

    def _hand_over(self, recipe: Recipe) -> None:
        """Give finished values their bytes: the targets, and siblings that were dropped too (their bytes are here
        anyway)."""
        made = (*recipe.creates, *(value for _, value in recipe.writes))
        temporaries = [self._temporaries[value] for value in made]
        for temporary in temporaries:
            temporary.locks += 1  # transferring may make room on the device
        try:
            for value in made:
                if value.absent != DROPPED or (value in self._ledger.planned and value not in self._targets):
                    continue  # a plan says itself when what it dropped comes back
                self._transfer(value)
        finally:
            for temporary in temporaries:
                temporary.locks -= 1

    def _transfer(self, value: Value) -> None:
        ledger, temporary = self._ledger, self._temporaries[value]
        ledger.machine.transfer(temporary, value.storage)
        del self._temporaries[value]  # not before: where that failed, it is freed with the others
        ledger.forget(temporary)
        ledger.dropped.pop(value, None)
        value.absent = HERE
        ledger.came_back(value.storage, Change.RECOMPUTE)
        ledger.counters.recomputes += 1
        value.storage.touched = ledger.clock
        ledger.release(value)

    def _free(self, temporary: Storage) -> None:
        self._ledger.forget(temporary)
        temporary.handle = None
