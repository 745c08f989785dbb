"""What a value was made from: the recipes that would make it again, where they end, and how long the way is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from spillway.memory.records import EXACT, GONE, NEVER, Recipe, Value

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
