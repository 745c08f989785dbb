"""What was evicted around a value: DTR's neighbourhoods, over the controller's records.

*Evicted* is a value whose bytes are nowhere and whose recipe is known: it was dropped, or its storage died or was
overwritten. Recipes tell what a value was made from; who read it is told by an index that this file keeps, of the
recipes of one step. It grows only when somebody asks, and goes when the recipes do.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING, final

from spillway.engines.records import DROPPED, GONE, NEVER, Value
from spillway.methods.base import Evicted
from spillway.units import Seconds

if TYPE_CHECKING:
    from spillway.engines.controller import Controller


def _evicted(value: Value) -> bool:
    gone = value.absent == DROPPED or value.absent == GONE
    return gone and value.recipe is not None and value.recipe.exactness != NEVER


def _name(value: Value) -> Evicted | None:
    return None if value.recipe is None else Evicted(value.storage.number, value.recipe.number)


@final
class Neighbours:
    """The graph of one step's values, as far as it has been looked at."""

    __slots__ = ("_clock", "_controller", "_numbers", "_readers", "_values")

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._values: dict[Evicted, Value] = {}
        self._readers: dict[Value, list[Value]] = {}
        self._numbers: list[int] = []
        self._clock: list[Seconds] = [0.0]

    def forget(self) -> None:
        """The recipes are forgotten."""
        self._values.clear()
        self._readers.clear()
        self._numbers.clear()
        del self._clock[1:]

    def _catch_up(self) -> None:
        recipes, seconds_of = self._controller.recipes, self._controller.machine.seconds_of
        for recipe in recipes[len(self._numbers) :]:
            made = [*recipe.creates, *(value for _, value in recipe.writes)]
            for read in recipe.reads:
                self._readers.setdefault(read, []).extend(made)
            for value in made:
                self._values[Evicted(value.storage.number, recipe.number)] = value
            self._numbers.append(recipe.number)
            self._clock.append(self._clock[-1] + seconds_of(recipe))

    def name(self, value: Value | None) -> Evicted | None:
        """What `value` is called once it is evicted; None if no recipe is known."""
        return None if value is None else _name(value)

    def evicted(self) -> dict[Evicted, Seconds]:
        """All that is evicted, in the order in which it was made."""
        self._catch_up()
        return self._told(value for value in self._values.values() if _evicted(value))

    def around(self, of: Value | Evicted) -> dict[Evicted, Seconds]:
        """What is evicted and was read to make it, or made by reading it."""
        self._catch_up()
        value = self._values.get(of) if isinstance(of, Evicted) else of
        if value is None:
            return {}
        return self._told(near for near in (*_parents(value), *self._readers.get(value, ())) if _evicted(near))

    def ancestors(self, value: Value) -> dict[Evicted, Seconds]:
        """What is evicted and has to be made again to make `value` again."""
        found, stack = dict.fromkeys((value,)), [value]
        while stack:
            for near in _parents(stack.pop()):
                if near not in found and _evicted(near):
                    found[near] = None
                    stack.append(near)
        del found[value]
        return self._told(found)

    def descendants(self, value: Value) -> dict[Evicted, Seconds]:
        """What is evicted and made from it, through nothing but what is evicted."""
        self._catch_up()
        found, stack = dict.fromkeys((value,)), [value]
        while stack:
            for near in self._readers.get(stack.pop(), ()):
                if near not in found and _evicted(near):
                    found[near] = None
                    stack.append(near)
        del found[value]
        return self._told(found)

    def seconds_since(self, value: Value) -> Seconds:
        """What ops took since one last began to read it, or had made it."""
        self._catch_up()
        touched, recipe = value.storage.touched, value.recipe
        made_last = recipe is not None and recipe.number == touched
        return self._clock[-1] - self._clock[(bisect_right if made_last else bisect_left)(self._numbers, touched)]

    def _told(self, values: Iterable[Value]) -> dict[Evicted, Seconds]:
        seconds_of = self._controller.machine.seconds_of
        named = ((value.storage.number, value.recipe) for value in values)
        return {Evicted(number, recipe.number): seconds_of(recipe) for number, recipe in named if recipe is not None}


def _parents(value: Value) -> Iterable[Value]:
    return () if value.recipe is None else value.recipe.reads
