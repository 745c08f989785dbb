"""The state machine that keeps the budget: torch-free, one for every machine.

NOTE [Safety rules]. They live here, in `engines.replay`, `engines.recall`, `engines.copies`, `engines.lending` and
`engines.flights` (its other parts) and nowhere else; code points back at them.

 1. An op never runs with an absent input.
 2. A value is dropped only with a cut: the values its recipe ends in, held alive by the drop and registered with each.
    Before a leaf of the cut is written, its dependents are restored.
 3. What the running op reads or writes is locked. What it will write is doomed: nothing may come to depend on it.
    Inputs of pending replays are wanted: they may be moved, not dropped.
 4. Room is made before it is used, a replay's temporaries included; temporaries can be spilled; chains are capped, and
    beyond the cap a value is moved.
 5. A copy in flight counts as resident until it is done.
 6. A replay sees the environment of the original and has no side effect (`Machine.run`).
 7. A write invalidates every home made from the old version.
 8. A lossy home is used only after the last forward use, and only with `lossy=True`. None is made here, but in
    `engines/blocks/compress.py`.
 9. What a method proposes may be refused; the refusal is counted and shown.
10. What has escaped is left alone, checked when evicting, and counted.
11. The end of a step is explicit: recipes die there; what anything but the manager can reach comes back or is
    readable in place.
12. On any exception, and on close, everything the user can reach is correct, and every file is released.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, final

from spillway.engines.copies import Copies
from spillway.engines.flights import Flights
from spillway.engines.lending import Lending
from spillway.engines.machine import Machine
from spillway.engines.recall import bring_back, recall, restore_early, way_back
from spillway.engines.records import AWAY, DROPPED, GONE, HERE, Counters, Recipe, Storage, Value
from spillway.engines.replay import Ancestry, PlannedReturn, grow_chains, replay
from spillway.engines.room import ask_policy, refusal, use_last_resort
from spillway.engines.view import View
from spillway.errors import BudgetInfeasible, EngineError, SpillFullError
from spillway.ir.step import Phase
from spillway.ir.timeline import Change
from spillway.methods.base import AbstractPolicy, Copy, Drop, Fetch, Proposal, Restore
from spillway.units import Bytes

SMALLEST_MOVABLE: Bytes = 4096
"""Storages below one page stay: moving them costs more than it frees."""

CHAIN_CAP = 32
"""The longest chain of replays, in ops, that a drop may lead to (rule 4)."""

UNLIMITED: Bytes = 1 << 62
"""The budget of a session that only keeps account."""

FIRST_TEMPORARY = 1 << 40
"""Temporaries of replays are numbered from here."""


@final
class Controller:
    """Owns values, cuts, locks, the budget and the replay stack. Callers hold `lock`."""

    __slots__ = (
        "_copied", "_drops_allowed", "_graveyard", "_next_number", "_next_temporary", "allowed", "away",
        "chain_cap", "clock", "copies", "counters", "created", "dropped", "events", "first_op", "flights", "lending",
        "lock", "machine", "peak", "phase", "planned", "policy", "recipes", "refused", "reserved", "resident",
        "tier_full", "view", "young",
    )  # fmt: skip

    def __init__(self, machine: Machine, policy: AbstractPolicy, allowed: Bytes, chain_cap: int = CHAIN_CAP) -> None:
        self.machine = machine
        self.policy = policy
        self.allowed = allowed
        self.chain_cap = chain_cap
        self.reserved: Bytes = 0  # of the budget, not in `allowed`; rather taken than an op refused
        self.resident = self.peak = self.created = 0
        self.clock = self.first_op = self.away = 0
        self.counters = Counters()
        self.lock = threading.RLock()
        self.dropped: dict[Value, None] = {}
        self.planned: dict[Value, PlannedReturn] = {}
        self.recipes: list[Recipe] = []
        self.young: list[Storage] = []
        self.events: list[tuple[int, Storage, Change]] | None = None
        self._graveyard: list[Value] = []
        self._copied: list[Value] = []  # present values whose home is still valid, and some that left again
        self.refused: BudgetInfeasible | None = None  # what was said last; never raised itself, or it would hold frames
        self.tier_full = ""  # what the slower tier said when room was last made
        self._next_number, self._next_temporary = 0, FIRST_TEMPORARY
        self._drops_allowed = True
        self.phase = Phase.FORWARD
        self.copies, self.lending, self.flights = Copies(self), Lending(self), Flights(self)
        self.view = View(self)

    # ------------------------------------------------------------------ storages come and go

    def adopt(self, key: int, nbytes: Bytes, handle: Any, *, temporary: bool = False) -> Storage:
        """Take a present storage into account. Its value is a source until somebody gives it a recipe."""
        if temporary:  # replays differ from step to step; the numbers of what the step itself creates do not
            self._next_temporary = number = self._next_temporary + 1
        else:
            self._next_number = number = self._next_number + 1
        storage = Storage(number, key, nbytes, handle, self.clock)
        self.created += nbytes
        self.resident = resident = self.resident + nbytes
        if resident > self.peak:
            self.peak = resident
        if nbytes >= SMALLEST_MOVABLE:
            self.young.append(storage)
        if self.events is not None:
            self.events.append((self.clock, storage, Change.CREATE))
        return storage

    def bury(self, storage: Storage) -> None:
        """The storage died: nobody can reach it any more. Safe at any moment, also inside the controller's own code."""
        value = storage.value
        if value is None:
            return
        storage.value = None
        if value.absent == HERE:
            self.resident -= storage.nbytes
        elif value.absent == AWAY:
            self.away -= 1
        value.absent = GONE
        if storage.escaped:
            value.recipe = None  # somebody may have written it unseen (rule 10)
        if value.home is not None or value.leaves is not None:
            self._graveyard.append(value)
        self._note(storage, Change.DIE)

    def overwrite(self, storage: Storage, recipe: Recipe | None) -> Value:
        """The running op wrote `storage`: its next version begins (rules 2 and 7 were seen to by `prepare`)."""
        old = storage.value
        if old is not None:
            old.absent = GONE
            if storage.escaped:
                old.recipe = None  # as in `bury`
            if old.home is not None:
                self._graveyard.append(old)
        storage.value = value = Value(storage, recipe)
        return value

    def resize(self, storage: Storage, nbytes: Bytes) -> None:
        """The running op changed the size of a present storage."""
        self.resident += nbytes - storage.nbytes
        self.peak = max(self.peak, self.resident)
        if storage.nbytes < SMALLEST_MOVABLE <= nbytes:
            self.young.append(storage)  # only now it may leave
        storage.nbytes = nbytes
        if storage.value is not None:
            storage.value.nbytes = nbytes

    def empty_graveyard(self) -> None:
        graveyard = self._graveyard
        while graveyard:
            value = graveyard.pop()
            if value.leaves is not None:
                self.dropped.pop(value, None)
                self.cut_loose(value)
            self.copies.abandon(value)
            self._discard_home(value)

    def _discard_home(self, value: Value) -> None:
        if value.home is not None:
            home, value.home = value.home, None
            self.machine.discard(home)

    def note_copied(self, value: Value) -> None:
        """A present value has a home that is good until it is written, or until the step ends."""
        self._copied.append(value)

    def distrust_copies(self) -> None:
        """Rule 7. Between steps a present storage may be written unseen: its home is good for nothing afterwards."""
        for value in self._copied:
            if value.absent == HERE:
                self._discard_home(value)
        self._copied.clear()

    # ------------------------------------------------------------------ around one op

    def prepare(self, name: str, reads: Sequence[Value], writes: Sequence[Storage], needed: Bytes) -> None:
        """Make the op runnable: inputs present (rule 1), dependents safe (rule 2), room for `needed` bytes (rule 4).

        Everything it reads or writes stays locked until `finish`. On an error nothing is locked and nothing is lost.
        """
        storages = {value.storage: None for value in reads} | dict.fromkeys(writes)
        working = sum(storage.nbytes for storage in storages) + needed
        self.counters.floor_bytes = max(self.counters.floor_bytes, working)
        for value in reads:
            value.wanted += 1
        try:
            for storage in writes:
                storage.written = True
                self.restore_dependents(storage)
            for needed_value in (*reads, *(storage.value for storage in writes)):
                if needed_value is not None and needed_value.absent == DROPPED:
                    self.restore(needed_value)
                elif needed_value is not None and needed_value.absent == AWAY and self.policy.recalls:
                    recall(self, needed_value)
        except BaseException:
            self._unlock(reads, (), writes)
            raise
        for storage in storages:
            storage.locks += 1
        try:
            for storage in storages:
                if storage.value is not None and storage.value.absent:
                    self.page_in(storage.value, name)
            self.make_room(needed, name)
        except BaseException:
            self._unlock(reads, storages, writes)
            raise

    def finish(self, reads: Sequence[Value], writes: Sequence[Storage]) -> None:
        """The op ran, or failed: let go of what `prepare` locked."""
        self._unlock(reads, {value.storage: None for value in reads} | dict.fromkeys(writes), writes)

    def _unlock(self, reads: Iterable[Value], storages: Iterable[Storage], writes: Iterable[Storage]) -> None:
        for value in reads:
            value.wanted -= 1
        for storage in storages:
            storage.locks -= 1
        for storage in writes:
            storage.written = False

    def restore_dependents(self, storage: Storage) -> None:
        """Rules 2 and 3. Dependents come back while their leaf has the old content, and none takes their place."""
        value, doomed = storage.value, storage.written
        storage.written = True
        try:
            self.empty_graveyard()
            while value is not None and value.dependents:
                self.restore(next(iter(value.dependents)))
                self.empty_graveyard()
        finally:
            storage.written = doomed

    # ------------------------------------------------------------------ room

    def make_room(self, needed: Bytes, name: str) -> None:
        """Free bytes until `needed` more fit in the budget (rule 4).

        Raises:
            BudgetInfeasible: Everything that may leave has left, and it is not enough.
            SpillFullError: It would have been enough if the slower tier had room.
        """
        if self._graveyard:
            self.empty_graveyard()
        if self.resident + needed <= self.allowed:
            return
        self.tier_full = ""
        self.copies.land()
        ask_policy(self, needed)
        if self.resident + needed > self.allowed:
            self.copies.land(wait=True)
            use_last_resort(self, needed)
            if self.resident + needed > self.allowed and self.flights.land(wait=True):
                use_last_resort(self, needed)
        self.machine.settle()
        if self.resident + needed > self.allowed:
            raise refusal(self, needed, name)

    def foresee(self, phase: Phase) -> None:
        """Between two ops: let the policy begin copies."""
        self.phase = phase
        self.copies.foresee()

    def grant(self, proposal: Proposal) -> bool:
        """Carry a proposal out, or refuse and count it (rule 9)."""
        storage = proposal.storage
        if not isinstance(storage, Storage):
            raise EngineError(f"A method proposed {storage!r}, which is no storage of this controller.")
        match proposal:
            case Copy() | Fetch():
                return self.copies.begin(proposal)
            case Restore():
                return restore_early(self, storage)
            case Drop(ops=ops, back=back):
                return self.while_held(partial(self.drop, ops=ops, back=back), storage)
        return self.while_held(self.move, storage)

    def while_held(self, leave: Callable[[Storage], bool], storage: Storage) -> bool:
        """Let it leave, or refuse. A collection of garbage must not take it away half-way."""
        self._hold(storage)
        try:
            return leave(storage)
        finally:
            self._unhold(storage)

    def may_leave(self, storage: Storage) -> bool:
        """Whether a present storage is free to leave: not locked (rule 3), not escaped (rule 10), and not empty."""
        if storage.locks or storage.escaped or not storage.nbytes:
            return False
        if self.machine.escaped(storage):
            storage.escaped = True
            return False
        return True

    def move(self, storage: Storage) -> bool:
        value = storage.value
        if value is None or value.absent or not self.may_leave(storage):
            self.counters.refuse("not free to leave")
            return False
        began = self.machine.now()
        try:
            if value.home is None:
                value.home = self.machine.page_out(storage)
                self.counters.bytes_out += storage.nbytes
            else:
                self.machine.leave(storage, value.home)
        except BaseException as error:  # of whatever kind: the home may not have the bytes
            self._discard_home(value)
            if not isinstance(error, SpillFullError):
                raise
            self.tier_full = str(error)
            self.counters.refuse("slower tier full")
            return False
        value.absent = AWAY
        self.away += 1
        self.copies.left(storage)
        self.counters.stalled(storage, began, self.machine.now())
        self.counters.moves += 1
        self._left(storage, Change.MOVE)
        return True

    def drop(self, storage: Storage, ops: frozenset[int] | None = None, back: int | None = None) -> bool:
        recipes = None if ops is None else frozenset(self.first_op + 1 + op for op in ops)
        value, found = storage.value, self.way_back(storage, recipes)
        if value is None or isinstance(found, str):
            self.counters.refuse(str(found))
            return False
        self.cut(value, tuple(found.leaves), found.chain if recipes is None else 0)
        if recipes is not None:
            self.planned[value] = PlannedReturn(back, recipes)
        self.machine.release(storage)
        self.counters.drops += 1
        self.counters.dropped_bytes += storage.nbytes
        self._left(storage, Change.DROP)
        return True

    def way_back(self, storage: Storage, recipes: frozenset[int] | None = None) -> Ancestry | str:
        """How a present storage would come back if it were dropped now, or why it may not be dropped."""
        value = storage.value
        if not self._drops_allowed:
            return "the step is ending"
        if value is None or value.absent or not self.may_leave(storage):
            return "not free to leave"
        if value.wanted or storage.written:
            return "wanted by an op or a replay"
        if storage.exposed:
            return "reached from outside"
        return way_back(self, value, recipes)

    def _left(self, storage: Storage, change: Change) -> None:
        self.resident -= storage.nbytes
        self._note(storage, change)

    def _note(self, storage: Storage, change: Change) -> None:
        if self.events is not None:
            self.events.append((self.clock, storage, change))

    def came_back(self, storage: Storage, change: Change) -> None:
        """Account for bytes that are in device memory again."""
        self.resident += storage.nbytes
        self.peak = max(self.peak, self.resident)
        self.young.append(storage)
        self._note(storage, change)

    # ------------------------------------------------------------------ cuts and chains

    def cut(self, value: Value, leaves: tuple[Value, ...], chain: int) -> None:
        """Rule 2: register the drop with every leaf and hold it alive."""
        for leaf in leaves:
            if leaf.dependents is None:
                leaf.dependents = {}
            leaf.dependents[value] = None
            self._hold(leaf.storage)
        value.leaves = leaves
        value.absent = DROPPED
        self.dropped[value] = None
        grow_chains(value, chain)

    def cut_loose(self, value: Value) -> None:
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

    # ------------------------------------------------------------------ coming back

    def restore(self, value: Value) -> None:
        """Bring an absent value back, whatever its home. Nothing but the caller's locks keeps it there afterwards."""
        if value.absent == GONE:
            raise EngineError(f"{value!r} is gone and cannot come back.")
        self._hold(value.storage)  # a collection of garbage must not take it away half-way
        try:
            if value.absent == DROPPED:
                replay(self, value)
            elif value.absent == AWAY:
                self.page_in(value, "page in")
        finally:
            self._unhold(value.storage)

    def page_in(self, value: Value, name: str) -> None:
        """Bring a moved value back. Its home stays valid until the next write (rule 7)."""
        storage = value.storage
        if value.absent != AWAY:
            raise EngineError(f"{name} found {value!r} where a moved value was expected.")
        storage.locks += 1
        try:
            early = value in self.copies.arriving
            if not early:
                self.make_room(storage.nbytes, name)
            began = self.machine.now()
            unchanged = self.copies.arrive(value) if early else self.machine.page_in(storage, value.home)
        finally:
            storage.locks -= 1
        if unchanged and not self.lending.running:
            self.note_copied(value)
        else:
            self._discard_home(value)
        self.counters.stalled(storage, began, self.machine.now())
        self.counters.bytes_in += storage.nbytes
        self.counters.reloads += 1
        value.absent = HERE
        self.away -= 1
        self.copies.came_back(storage, early=early)
        self.came_back(storage, Change.PAGE_IN)

    def _restore_dropped(self) -> None:
        """Rule 11: nothing stays dropped; what has to make room for it is moved."""
        self.empty_graveyard()
        self._drops_allowed = False
        try:
            while self.dropped:
                self.restore(next(iter(self.dropped)))
                self.empty_graveyard()
        finally:
            self._drops_allowed = True

    # ------------------------------------------------------------------ steps

    def begin_step(self, signature: str = "") -> None:
        """Start counting anew. Steps of one signature are expected to want the same things in the same order."""
        self.empty_graveyard()
        self.distrust_copies()
        self.counters = Counters()
        self.peak = self.resident
        self.first_op = self.clock
        self.phase = Phase.FORWARD
        self.copies.begin_step(signature, self._next_number)

    def end_step(self) -> None:
        """Rule 11: restore what was dropped, then forget every recipe; what is alive becomes a source."""
        try:
            self.copies.end_step()
            self._restore_dropped()
        except BaseException:
            bring_back(self, list(self.dropped), UNLIMITED)
            raise
        finally:
            self.forget_recipes()
            self.empty_graveyard()
            self.distrust_copies()
            self.machine.reap()
            self.young = [storage for storage in self.young if storage.value is not None]

    def remember(self, recipe: Recipe) -> None:
        """From here on this is how what it created and wrote is made again."""
        for value in (*recipe.creates, *(value for _, value in recipe.writes)):
            value.recipe = recipe
        self.recipes.append(recipe)

    def forget_recipes(self) -> None:
        """Make every value that is not dropped a source, and free the graph of recipes."""
        if self.dropped:
            return
        for recipe in self.recipes:
            for value in recipe.creates:
                value.recipe = None
            for _, value in recipe.writes:
                value.recipe = None
        self.recipes.clear()
        self.view.forget_recipes()

    def bring_back_all(self, storages: Iterable[Storage]) -> None:
        """Rule 12, on close: every storage has its bytes in memory again; this may exceed the budget."""
        self.empty_graveyard()
        values = [*self.dropped, *(storage.value for storage in storages if storage.value is not None)]
        bring_back(self, values, UNLIMITED)
