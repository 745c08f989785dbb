"""Bringing a dropped value back: the controller's replay stack.

Replay is a graph over values, not over storages: an in-place op is an edge from one version to the next, and
everything on the way lives in *temporaries*, so that the user's storages only ever receive their current version.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, final

from spillway.engines.records import DROPPED, EXACT, GONE, HERE, NEVER, TEMPORARY, Recipe, Storage, Value
from spillway.errors import EngineError
from spillway.ir.timeline import Change

if TYPE_CHECKING:
    from spillway.engines.controller import Controller


UNCAPPED: Final = 1 << 30
"""A cap on chains that none reaches."""


class PlannedReturn(NamedTuple):
    """How a plan brings back what it dropped."""

    moment: int | None
    """The op of the step before which it comes back; None for whenever it is read, by a replay of its own."""
    ops: frozenset[int]
    """The ops that run again. What has the same moment and the same ops comes back by one replay."""


@dataclass(frozen=True, slots=True)
class Ancestry:
    """What it takes to recompute a value: recipes by op number, and the living values that they end in."""

    recipes: dict[int, Recipe]
    leaves: dict[Value, None]

    @property
    def chain(self) -> int:
        """Ops that would run now: these, and those that bring dropped leaves back first."""
        return len(self.recipes) + sum(leaf.chain for leaf in self.leaves)


def ancestry(value: Value, cap: int, ops: frozenset[int] | None = None) -> Ancestry | None:
    """The recipes between `value` and the nearest living values. With `ops` no other recipes than those of these
    numbers, and all of them, even behind values that live.

    None if more than `cap` ops would have to run, or if the way ends in a value that is gone for good or in an op
    that is never replayed.
    """
    first = value.recipe
    if first is None or first.exactness != EXACT:
        return None
    recipes = {first.number: first}
    leaves: dict[Value, None] = {}
    stack = [first]
    while stack:
        for read in stack.pop().reads:
            recipe = read.recipe
            if read.absent != GONE and (ops is None or recipe is None or recipe.number not in ops):
                leaves[read] = None
                continue
            if recipe is None or recipe.exactness == NEVER or (ops is not None and recipe.number not in ops):
                return None
            if recipe.number not in recipes:
                if len(recipes) >= cap:
                    return None
                recipes[recipe.number] = recipe
                stack.append(recipe)
    return Ancestry(recipes, leaves)


def chain_fits(value: Value, chain: int, cap: int) -> bool:
    """Whether `value` may be dropped with that chain: neither it nor anything that hangs on it passes the cap (rule 4).

    A dependent grows by `chain` along each path that leads to it.
    """
    grown = {value: chain}
    stack = [value] if chain <= cap else []
    while stack:
        for dependent in stack.pop().dependents or ():
            grown[dependent] = grown.get(dependent, dependent.chain) + chain
            if grown[dependent] > cap:
                return False
            stack.append(dependent)
    return chain <= cap


def grow_chains(value: Value, chain: int) -> None:
    """`value` is dropped with that chain, or comes back with minus its chain: it and all that hangs on it change."""
    stack = [value] if chain else []
    while stack:
        grown = stack.pop()
        grown.chain += chain
        stack.extend(grown.dependents or ())


def replay(controller: Controller, value: Value) -> None:
    """Bring a dropped value back."""
    for dropped in _in_order_of_return(value, controller.planned):
        if dropped.absent == DROPPED:
            Replay(controller, dropped).run()


def _in_order_of_return(value: Value, planned: Collection[Value]) -> list[Value]:
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


def _returning_together(controller: Controller, target: Value, planned: PlannedReturn | None) -> list[Value]:
    """What a replay of that value brings back."""
    if planned is None or planned.moment is None:
        return [target]
    others = (value for value, when in controller.planned.items() if when == planned and value is not target)
    return [target, *(value for value in others if value.absent == DROPPED)]


@final
class Replay:
    """Recomputes one dropped value, or those that a plan has back together, op by op, within the budget."""

    __slots__ = ("_controller", "_last_use", "_leaves", "_recipes", "_targets", "_temporaries")

    def __init__(self, controller: Controller, target: Value) -> None:
        planned = controller.planned.get(target)
        self._controller = controller
        self._targets = _returning_together(controller, target, planned)
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
        controller = self._controller
        for read in recipe.reads:
            if read.absent == DROPPED and read not in self._temporaries:  # a plan's replay may have its own
                controller.restore(read)
        bindings = [self._temporaries.get(read, read.storage) for read in recipe.reads]
        distinct = dict.fromkeys(bindings)
        for storage in distinct:
            storage.locks += 1
        try:
            for storage in distinct:
                if storage.value is not None and storage.value.absent:
                    controller.page_in(storage.value, recipe.name)
            controller.make_room(recipe.nbytes, recipe.name)
            began = controller.machine.now()
            handles = controller.machine.run(recipe, bindings)
            controller.counters.recomputed(recipe, began, controller.machine.now())
            self._take_outputs(recipe, bindings, handles)
        finally:
            for storage in distinct:
                storage.locks -= 1
        self._hand_over(recipe)
        self._free_used_up(recipe)

    def _take_outputs(self, recipe: Recipe, bindings: Sequence[Storage], handles: Sequence[object]) -> None:
        """Register what the op created or wrote as temporaries, under the value that they now hold."""
        if len(handles) != len(recipe.creates):
            made = f"{len(handles)} storages when replayed and {len(recipe.creates)} before"
            raise EngineError(f"{recipe!r} created {made}.")
        for value, handle in zip(recipe.creates, handles, strict=True):
            self._temporaries[value] = self._controller.adopt(TEMPORARY, value.nbytes, handle, temporary=True)
        for position, value in recipe.writes:
            temporary = bindings[position]
            if recipe.reads[position] not in self._temporaries:
                raise EngineError(f"{recipe!r} would write {recipe.reads[position]!r} itself when replayed.")
            self._temporaries.pop(recipe.reads[position], None)
            self._temporaries[value] = temporary
            self._controller.overwrite(temporary, None)

    def _hand_over(self, recipe: Recipe) -> None:
        """Give finished values their bytes: the targets, and siblings that were dropped too (their bytes are here
        anyway)."""
        made = (*recipe.creates, *(value for _, value in recipe.writes))
        temporaries = [self._temporaries[value] for value in made]
        for temporary in temporaries:
            temporary.locks += 1  # giving may make room on the device
        try:
            for value in made:
                if value.absent != DROPPED or (value in self._controller.planned and value not in self._targets):
                    continue  # a plan says itself when what it dropped comes back
                self._give(value)
        finally:
            for temporary in temporaries:
                temporary.locks -= 1

    def _give(self, value: Value) -> None:
        controller, temporary = self._controller, self._temporaries[value]
        controller.machine.give(temporary, value.storage)
        del self._temporaries[value]  # not before: where giving failed, it is freed with the others
        controller.bury(temporary)
        controller.dropped.pop(value, None)
        value.absent = HERE
        controller.came_back(value.storage, Change.RECOMPUTE)
        controller.counters.recomputes += 1
        value.storage.touched = controller.clock
        controller.cut_loose(value)

    def _free_used_up(self, recipe: Recipe) -> None:
        for value, temporary in list(self._temporaries.items()):
            if self._last_use.get(value, -1) <= recipe.number:
                del self._temporaries[value]
                self._free(temporary)

    def _free(self, temporary: Storage) -> None:
        self._controller.bury(temporary)
        temporary.handle = None
