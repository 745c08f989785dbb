"""The state machine that keeps the budget: torch-free, one for every machine.

NOTE [Safety rules]. They live in this folder and nowhere else; code points back at them.

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
 8. A lossy home is used only after the last forward use, and only with `BlockOptions(lossy=True)`. None is made
    here, but in `engines/blocks/compress.py`.
 9. What a method proposes may be refused; the refusal is counted and shown.
10. What has escaped is left alone, checked when evicting, and counted.
11. The end of a step is explicit: recipes die there; what anything but the manager can reach comes back or is
    readable in place.
12. On any exception, and on close, everything the user can reach is correct, and every file is released.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import final

from spillway.errors import BudgetInfeasible, EngineError, SpillFullError
from spillway.ir.step import Phase
from spillway.ir.timeline import Change
from spillway.memory.ancestry import UNCAPPED, Ancestry, PlannedReturn, ancestry, chain_fits
from spillway.memory.budget import UNLIMITED, Budget
from spillway.memory.copies import Copies, Flights
from spillway.memory.ledger import CHAIN_CAP, AbstractLedger
from spillway.memory.machine import Machine
from spillway.memory.recompute import Replay, in_order_of_return
from spillway.memory.records import AWAY, DROPPED, GONE, HERE, Counters, Storage, Value
from spillway.memory.unsafe_region import UnsafeRegion
from spillway.memory.view import View
from spillway.methods.base import AbstractPolicy, Copy, Drop, Fetch, Proposal, Recall, Restore
from spillway.units import Bytes

PATIENCE = 1 << 16
"""Refusals after which a policy is not asked any further."""


@final
class Controller(AbstractLedger):
    """Owns values, cuts, locks, the budget and the replay stack; the machine is what really holds the bytes. Callers
    hold `lock`. No drop may lead to a chain of replays that is longer than `chain_cap` (rule 4)."""

    __slots__ = ("_drops_allowed", "copies", "flights", "tier_full", "unsafe", "view")

    def __init__(
        self, machine: Machine, policy: AbstractPolicy, allowed: Bytes | Budget, chain_cap: int = CHAIN_CAP
    ) -> None:
        super().__init__(machine, policy, allowed if isinstance(allowed, Budget) else Budget(allowed), chain_cap)
        self.tier_full = ""  # what the slower tier said when room was last made
        self._drops_allowed = True
        self.unsafe = UnsafeRegion(self)
        self.copies, self.flights = Copies(self, self.unsafe), Flights(self, self.unsafe)
        self.view = View(self, self.copies)

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
                    self._rematerialize(needed_value)
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
            self.collect_dead()
            while value is not None and value.dependents:
                self.restore(next(iter(value.dependents)))
                self.collect_dead()
        finally:
            storage.written = doomed

    # ------------------------------------------------------------------ room

    def make_room(self, needed: Bytes, name: str) -> None:
        """Free bytes until `needed` more fit in the budget (rule 4). Raises BudgetInfeasible if everything that may
        leave has left, and it is not enough, and SpillFullError if it would have been enough if the slower tier had
        room."""
        if self._dead:
            self.collect_dead()
        short = self.budget.short
        if short(needed) <= 0:
            return
        self.tier_full = ""
        self.copies.land()
        self._ask_policy(needed)
        if short(needed) > 0:
            self.copies.land(wait=True)
            self._use_last_resort(needed)
            if short(needed) > 0 and self.flights.land(wait=True):
                self._use_last_resort(needed)
        self.machine.settle()
        if short(needed) > 0:
            raise self._refusal(needed, name)

    def make_room_if_possible(self, needed: Bytes, name: str, *, stays: Bytes) -> None:
        if stays + needed <= self.budget.allowed:
            with self.budget.keeping_reserve(), contextlib.suppress(BudgetInfeasible, SpillFullError):
                self.make_room(needed, name)

    def _ask_policy(self, needed: Bytes) -> None:
        """Grant what the policy proposes until `needed` more bytes fit. Policies may refuse as well."""

        def ask() -> None:
            proposals = self.policy.relieve(self.view, self.budget.short(needed))
            self.grant_in_turn(proposals, lambda: self.budget.short(needed) <= 0)

        try:
            ask()
        except BudgetInfeasible:
            if not self.budget.spend_reserve():
                raise
            ask()

    def _use_last_resort(self, needed: Bytes) -> None:
        """What no method proposed: move whatever may leave, and where the tier is full, drop it; then take what is
        reserved."""
        for leave in (self.move, self.drop):
            for storage in list(self.view.candidates()):
                if self.budget.short(needed) <= 0:
                    return
                self._while_held(leave, storage)
                self.collect_dead()
        if self.budget.short(needed) > 0:
            self.budget.spend_reserve()

    def _refusal(self, needed: Bytes, name: str) -> BudgetInfeasible | SpillFullError:
        floor = self.counters.floor_bytes
        if self.tier_full and floor <= self.budget.allowed:
            return SpillFullError(self.tier_full)
        smallest = max(self.budget.resident + needed, floor)
        return self.budget.refusal(smallest, name, self.view.op_index, smallest, exact=False)

    def foresee(self, phase: Phase) -> None:
        """Between two ops: let the policy begin copies."""
        self.phase = phase
        self.copies.foresee(self.view)

    def grant_in_turn(self, proposals: Generator[Proposal, bool, None], enough: Callable[[], bool]) -> None:
        granted, refused = None, 0
        try:
            while not enough() and refused < PATIENCE:
                try:
                    proposal = next(proposals) if granted is None else proposals.send(granted)
                except StopIteration:
                    return
                granted = self.grant(proposal)
                refused += not granted
                if self._dead:
                    self.collect_dead()
        finally:
            proposals.close()

    def grant(self, proposal: Proposal) -> bool:
        """Carry a proposal out, or refuse and count it (rule 9)."""
        storage = proposal.storage
        if not isinstance(storage, Storage):
            raise EngineError(f"A method proposed {storage!r}, which is no storage of this controller.")
        match proposal:
            case Copy() | Fetch():
                return self.copies.begin(proposal)
            case Restore():
                # Bring back what no op wants yet, or refuse and count it (rule 9).
                value = storage.value
                if value is None or value.absent not in (AWAY, DROPPED):
                    self.counters.refuse("not absent")
                    return False
                try:
                    with self.budget.keeping_reserve():
                        self.restore(value)
                except (BudgetInfeasible, SpillFullError):
                    self.counters.refuse("no room to bring it back early")
                    return False
                return True
            case Drop(ops=ops, back=back):
                return self._while_held(partial(self.drop, ops=ops, back=back), storage)
        return self._while_held(self.move, storage)

    def _while_held(self, leave: Callable[[Storage], bool], storage: Storage) -> bool:
        """Let it leave, or refuse. A collection of garbage must not take it away half-way."""
        self._hold(storage)
        try:
            return leave(storage)
        finally:
            self._unhold(storage)

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
        value, found = storage.value, self._way_back_if_dropped(storage, recipes)
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

    # ------------------------------------------------------------------ ways back

    def way_back(self, storage: Storage) -> Ancestry | str:
        """How a present storage would be recomputed if it were dropped now, or a moved one instead of read; or why it
        cannot be."""
        away = storage.value is not None and storage.value.absent == AWAY
        return self._way_back_if_moved(storage) if away else self._way_back_if_dropped(storage)

    def _way_back_if_dropped(self, storage: Storage, recipes: frozenset[int] | None = None) -> Ancestry | str:
        value = storage.value
        if not self._drops_allowed:
            return "the step is ending"
        if value is None or value.absent or not self.may_leave(storage):
            return "not free to leave"
        if value.wanted or storage.written:
            return "wanted by an op or a replay"
        if storage.exposed:
            return "reached from outside"
        return self._legal_ancestry(value, recipes)

    def _way_back_if_moved(self, storage: Storage) -> Ancestry | str:
        """A moved value keeps its recipe for as long as the step lasts, and nothing is held for it meanwhile: what it
        was made from may die or be written. So this is looked up in the moment in which an op wants the value."""
        value = storage.value
        if value is None or value.absent != AWAY or value in self.arriving:
            return "not away"
        if storage.exposed or storage.escaped:
            return "reached from outside"
        return self._legal_ancestry(value, None)

    def _legal_ancestry(self, value: Value, ops: frozenset[int] | None) -> Ancestry | str:
        """The recipes and leaves from which `value` can be recomputed now (rules 2, 3, 4, 10). A plan says itself which
        ops, and was verified as a whole: no cap is needed."""
        if self.unsafe.made(value.recipe):
            return "in the hands of a custom function"
        found = ancestry(value, self.chain_cap if ops is None else UNCAPPED, ops)
        if found is None:
            return "no recipe within the cap"
        if any(leaf.storage.written or self.unsafe.holds(leaf.storage) for leaf in found.leaves):
            return "would depend on what is being written"
        for leaf in found.leaves:  # whoever holds its address may write it at any moment
            if leaf.storage.escaped or (not leaf.absent and self.machine.escaped(leaf.storage)):
                return "would depend on what has escaped"
        return found if ops is not None or chain_fits(value, found.chain, self.chain_cap) else "chain too long"

    # ------------------------------------------------------------------ coming back

    def restore(self, value: Value) -> None:
        if value.absent == GONE:
            raise EngineError(f"{value!r} is gone and cannot come back.")
        self._hold(value.storage)  # a collection of garbage must not take it away half-way
        try:
            if value.absent == DROPPED:
                for dropped in in_order_of_return(value, self.planned):
                    if dropped.absent == DROPPED:
                        Replay(self, dropped).run()
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
            early = value in self.arriving
            if not early:
                self.make_room(storage.nbytes, name)
            began = self.machine.now()
            unchanged = self.copies.arrive(value) if early else self.machine.page_in(storage, value.home)
        finally:
            storage.locks -= 1
        if unchanged and not self.unsafe.running:
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

    def _rematerialize(self, value: Value) -> None:
        """Recompute a moved value that an op wants, if the policy says so and it is legal; else leave it where it is.

        The cut is held from then on, as for a drop (rule 2), until the value is there. Should the replay fail for want
        of room, the copy in the slower tier is still what it was, and is read.
        """
        storage = value.storage
        if value in self.arriving or self.policy.bring_back(self.view, storage) is Recall.RELOAD:
            return
        found = self._way_back_if_moved(storage)
        if isinstance(found, str):
            self.counters.refuse(found)
            return
        self.away -= 1
        self.cut(value, tuple(found.leaves), found.chain)
        try:
            with self.budget.keeping_reserve():
                self.restore(value)
        except (BudgetInfeasible, SpillFullError):
            self.counters.refuse("no room to recompute it")
        finally:
            if value.absent == DROPPED:  # given up
                self.dropped.pop(value, None)
                self.release(value)
                value.absent = AWAY
                self.away += 1
            else:
                self.counters.recalls += 1
                self.copies.came_back(storage, early=False)
                if value.home is not None:
                    self.note_copied(value)  # the copy is as good as before: leaving again costs nothing

    # ------------------------------------------------------------------ steps

    def begin_step(self, signature: str = "") -> None:
        """Start counting anew. Steps of one signature are expected to want the same things in the same order."""
        self.collect_dead()
        self.distrust_copies()
        self.counters = Counters()
        self.budget.begin()
        self.first_op = self.clock
        self.phase = Phase.FORWARD
        self.copies.begin_step(signature, self._next_number)

    def end_step(self) -> None:
        """Rule 11: restore what was dropped, then forget every recipe; what is alive becomes a source."""
        try:
            self.copies.end_step()
            # Rule 11: nothing stays dropped; what has to make room for it is moved.
            self.collect_dead()
            self._drops_allowed = False
            try:
                while self.dropped:
                    self.restore(next(iter(self.dropped)))
                    self.collect_dead()
            finally:
                self._drops_allowed = True
        except BaseException:
            self._bring_back(list(self.dropped))
            raise
        finally:
            if not self.dropped:
                self.forget_recipes()
                self.recipes.clear()
                self.view.forget_recipes()
            self.collect_dead()
            self.distrust_copies()
            self.machine.reap()
            self.young = [storage for storage in self.young if storage.value is not None]

    def restore_all(self, storages: Iterable[Storage]) -> None:
        """Rule 12, on close: every storage has its bytes in memory again; this may exceed the budget."""
        self.collect_dead()
        self._bring_back([*self.dropped, *(storage.value for storage in storages if storage.value is not None)])

    def _bring_back(self, values: Iterable[Value]) -> None:
        """Rule 12: right before small, so without a budget; one value that is lost does not keep the others away."""
        errors: list[BaseException] = []
        with self.budget.as_if(UNLIMITED):
            for value in values:
                try:
                    if value.absent in (DROPPED, AWAY):
                        self.restore(value)
                except BaseException as error:
                    errors.append(error)
        if errors:
            raise errors[0]
