"""What there is: storages, their values, the cuts that hold them, recipes, and the account of their bytes."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

from spillway.ir.step import Phase
from spillway.ir.timeline import Change
from spillway.memory.ancestry import Ancestry, PlannedReturn, grow_chains
from spillway.memory.budget import Budget
from spillway.memory.machine import Machine
from spillway.memory.records import AWAY, DROPPED, GONE, HERE, Counters, Recipe, Storage, Value
from spillway.methods.base import AbstractPolicy, Proposal
from spillway.units import Bytes

SMALLEST_MOVABLE: Final[Bytes] = 4096
"""Storages below one page stay: moving them costs more than it frees."""

CHAIN_CAP: Final = 32
"""The longest chain of replays, in ops, that a drop may lead to (rule 4)."""

FIRST_TEMPORARY: Final = 1 << 40
"""Temporaries of replays are numbered from here."""


class AbstractLedger(ABC):
    """The books of the controller, and what its parts may ask it for. Callers hold `lock`."""

    __slots__ = (
        "_copied", "_dead", "_next_number", "_next_temporary", "arriving", "away", "budget", "chain_cap", "clock",
        "counters", "dropped", "events", "first_op", "lock", "machine", "phase", "planned", "policy", "recipes",
        "young",
    )  # fmt: skip

    def __init__(self, machine: Machine, policy: AbstractPolicy, budget: Budget, chain_cap: int = CHAIN_CAP) -> None:
        self.machine = machine
        self.policy = policy
        self.budget = budget
        self.chain_cap = chain_cap
        self.clock = self.first_op = self.away = 0
        self.phase = Phase.FORWARD
        self.counters = Counters()
        self.lock = threading.RLock()
        self.dropped: dict[Value, None] = {}
        self.planned: dict[Value, PlannedReturn] = {}
        self.arriving: dict[Value, Any] = {}
        """Copies in, by the value that they bring."""
        self.recipes: list[Recipe] = []
        self.young: list[Storage] = []
        """What may have become free to leave since it was last looked through."""
        self.events: list[tuple[int, Storage, Change]] | None = None
        self._dead: list[Value] = []
        self._copied: list[Value] = []  # present values whose home is still valid, and some that left again
        self._next_number, self._next_temporary = 0, FIRST_TEMPORARY

    # ------------------------------------------------------------------ what the controller does for its parts

    @abstractmethod
    def restore(self, value: Value) -> None:
        """Bring an absent value back, whatever its home. Nothing but the caller's locks keeps it there afterwards."""

    @abstractmethod
    def page_in(self, value: Value, name: str) -> None:
        """Bring a moved value back, for what is named."""

    @abstractmethod
    def make_room(self, needed: Bytes, name: str) -> None:
        """Free bytes until `needed` more fit in the budget (rule 4)."""

    @abstractmethod
    def make_room_if_possible(self, needed: Bytes, name: str, *, stays: Bytes) -> None:
        """The same for what an op may need, and does without: nothing leaves if it cannot be had beside what stays."""

    @abstractmethod
    def restore_dependents(self, storage: Storage) -> None:
        """Bring back what depends on its content, before that changes (rule 2)."""

    @abstractmethod
    def grant_in_turn(self, proposals: Generator[Proposal, bool, None], enough: Callable[[], bool]) -> None:
        """Grant or refuse one proposal after the other, until it is enough or the policy ends."""

    @abstractmethod
    def way_back(self, storage: Storage) -> Ancestry | str:
        """How a storage would be recomputed if it were dropped now, or is where it was moved; or why it cannot be."""

    # ------------------------------------------------------------------ storages come and go

    @property
    def newest(self) -> int:
        """The number of the storage that was taken into account last; temporaries of replays do not count."""
        return self._next_number

    def adopt(self, key: int, nbytes: Bytes, handle: Any, *, temporary: bool = False) -> Storage:
        """Take a present storage into account. Its value is a source until somebody gives it a recipe."""
        if temporary:  # replays differ from step to step; the numbers of what the step itself creates do not
            self._next_temporary = number = self._next_temporary + 1
        else:
            self._next_number = number = self._next_number + 1
        storage = Storage(number, key, nbytes, handle, self.clock)
        self.budget.create(nbytes)
        if nbytes >= SMALLEST_MOVABLE:
            self.young.append(storage)
        if self.events is not None:
            self.events.append((self.clock, storage, Change.CREATE))
        return storage

    def forget(self, storage: Storage) -> None:
        """The storage died: nobody can reach it any more. Safe at any moment, also inside the controller's own code."""
        value = storage.value
        if value is None:
            return
        storage.value = None
        if value.absent == HERE:
            self.budget.free(storage.nbytes)
        elif value.absent == AWAY:
            self.away -= 1
        value.absent = GONE
        if storage.escaped:
            value.recipe = None  # somebody may have written it unseen (rule 10)
        if value.home is not None or value.leaves is not None:
            self._dead.append(value)
        self._note(storage, Change.DIE)

    def overwrite(self, storage: Storage, recipe: Recipe | None) -> Value:
        """The running op wrote `storage`: its next version begins (rules 2 and 7 were seen to by `prepare`)."""
        old = storage.value
        if old is not None:
            old.absent = GONE
            if storage.escaped:
                old.recipe = None  # as in `forget`
            if old.home is not None:
                self._dead.append(old)
        storage.value = value = Value(storage, recipe)
        return value

    def resize(self, storage: Storage, nbytes: Bytes) -> None:
        """The running op changed the size of a present storage."""
        self.budget.take(nbytes - storage.nbytes)
        if storage.nbytes < SMALLEST_MOVABLE <= nbytes:
            self.young.append(storage)  # only now it may leave
        storage.nbytes = nbytes
        if storage.value is not None:
            storage.value.nbytes = nbytes

    def collect_dead(self) -> None:
        """Give up what values that are gone still had: a home, a cut, a copy on its way."""
        dead = self._dead
        while dead:
            value = dead.pop()
            if value.leaves is not None:
                self.dropped.pop(value, None)
                self.release(value)
            self.abandon(value)
            self._discard_home(value)

    def abandon(self, value: Value) -> None:
        """The bytes of a value that are on their way are not wanted any more: they stay where they are."""
        arrival = self.arriving.pop(value, None)
        if arrival is not None:
            self.machine.abandon(arrival)
            self.budget.free(value.storage.nbytes)

    def may_leave(self, storage: Storage) -> bool:
        """Whether a present storage is free to leave: not locked (rule 3), not escaped (rule 10), and not empty."""
        if storage.locks or storage.escaped or not storage.nbytes:
            return False
        if self.machine.escaped(storage):
            storage.escaped = True
            return False
        return True

    def came_back(self, storage: Storage, change: Change) -> None:
        """Account for bytes that are in device memory again."""
        self.budget.take(storage.nbytes)
        self.young.append(storage)
        self._note(storage, change)

    def _left(self, storage: Storage, change: Change) -> None:
        self.budget.free(storage.nbytes)
        self._note(storage, change)

    def _note(self, storage: Storage, change: Change) -> None:
        if self.events is not None:
            self.events.append((self.clock, storage, change))

    # ------------------------------------------------------------------ homes

    def note_copied(self, value: Value) -> None:
        """A present value has a home that is good until it is written, or until the step ends."""
        self._copied.append(value)

    def distrust_copies(self) -> None:
        """Rule 7. Between steps a present storage may be written unseen: its home is good for nothing afterwards."""
        for value in self._copied:
            if value.absent == HERE:
                self._discard_home(value)
        self._copied.clear()

    def _discard_home(self, value: Value) -> None:
        if value.home is not None:
            home, value.home = value.home, None
            self.machine.discard(home)

    # ------------------------------------------------------------------ cuts and recipes

    def cut(self, value: Value, leaves: Sequence[Value], chain: int) -> None:
        """Rule 2: register the drop with every leaf and hold it alive."""
        for leaf in leaves:
            if leaf.dependents is None:
                leaf.dependents = {}
            leaf.dependents[value] = None
            self._hold(leaf.storage)
        value.leaves = tuple(leaves)
        value.absent = DROPPED
        self.dropped[value] = None
        grow_chains(value, chain)

    def release(self, value: Value) -> None:
        """Undo `cut`: the value is back, or nobody needs it any more."""
        grow_chains(value, -value.chain)
        leaves, value.leaves = value.leaves or (), None
        self.planned.pop(value, None)
        for leaf in leaves:
            if leaf.dependents is not None:
                leaf.dependents.pop(value, None)
            self._unhold(leaf.storage)

    def _hold(self, storage: Storage) -> None:
        storage.held += 1
        if storage.held == 1:
            self.machine.hold(storage)

    def _unhold(self, storage: Storage) -> None:
        storage.held -= 1
        if storage.held == 0:
            self.machine.unhold(storage)

    def remember(self, recipe: Recipe) -> None:
        """From here on this is how what it created and wrote is made again."""
        for value in (*recipe.creates, *(value for _, value in recipe.writes)):
            value.recipe = recipe
        self.recipes.append(recipe)

    def forget_recipes(self, first: int = 0) -> None:
        """Nothing that the recipes from this place on made can be made again: it is a source from here on."""
        for recipe in self.recipes[first:]:
            for value in recipe.creates:
                value.recipe = None
            for _, value in recipe.writes:
                value.recipe = None
