"""What code that asks nobody has in its hands: a custom function, and the kernels that it launches.

While it runs it may read and write whatever it was given, and whatever ops make for it, and nobody hears of that. So
until it returns

- what it was given stays. Nothing comes to depend on it, and what did comes back first (rules 2 and 3).
- what ops make or write meanwhile is not recomputed: what they read may have been changed since, and what they made.
- no copies begin beside the ops, and what comes back keeps no home (rule 7): either may be older than the bytes.

What was made meanwhile may still be moved when room is short, with the bytes that it has then. When the code returns,
what it was given counts as written; when the last such code returns, the ops that ran meanwhile have no recipes.
"""

from __future__ import annotations

from typing import final

from spillway.memory.ledger import AbstractLedger
from spillway.memory.records import HERE, Recipe, Storage


@final
class UnsafeRegion:
    """What is in it, and since when. Callers hold the controller's lock."""

    __slots__ = ("_first_op", "_first_recipe", "_ledger", "_running", "_storages")

    def __init__(self, ledger: AbstractLedger) -> None:
        self._ledger = ledger
        self._running = self._first_op = self._first_recipe = 0
        self._storages: dict[Storage, int] = {}

    @property
    def running(self) -> bool:
        return self._running > 0

    def begin(self) -> None:
        """Such code is about to run; calls may nest."""
        if not self._running:
            self._first_op, self._first_recipe = self._ledger.clock, len(self._ledger.recipes)
        self._running += 1

    def end(self) -> None:
        """It returned, or failed."""
        self._running -= 1
        if not self._running:
            self._ledger.forget_recipes(self._first_recipe)

    def made(self, recipe: Recipe | None) -> bool:
        """Whether the op ran while such code did that has not returned yet."""
        return self._running > 0 and recipe is not None and recipe.number > self._first_op

    def enter(self, storage: Storage) -> None:
        """Such code is given this, which stays from here on; bringing the bytes back is the caller's."""
        storage.locks += 1
        self._storages[storage] = self._storages.get(storage, 0) + 1
        self._ledger.restore_dependents(storage)

    def holds(self, storage: Storage) -> bool:
        """Whether such code has it."""
        return storage in self._storages

    def leave(self, storage: Storage) -> None:
        """Such code is done with it, and may have written it."""
        storage.locks -= 1
        times = self._storages.pop(storage) - 1
        if times:
            self._storages[storage] = times
        if storage.value is not None and storage.value.absent == HERE:
            self._ledger.overwrite(storage, None)
