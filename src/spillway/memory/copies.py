"""Copies and collectives that are under way while ops run: the controller's side of rule 5.

A copy *out* leaves the storage where it is: it is present and counts, and its value has a home before the bytes are
there. Whoever lets it leave, or gives the home up, waits for the copy. A copy *in* counts from its beginning, before
the bytes can be used. Neither outlives its step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, final

from spillway.errors import EngineError, SpillBusyError, SpillError, SpillFullError
from spillway.memory.ledger import AbstractLedger
from spillway.memory.records import AWAY, TEMPORARY, Storage, Value
from spillway.memory.unsafe_region import UnsafeRegion
from spillway.methods.base import Copy, Fetch, MemoryView
from spillway.units import Bytes, Seconds

KNOWN_ORDERS = 64
"""Signatures of steps whose order of coming back is remembered."""

OLDER = 0.5
"""How much the step before counts where steps are averaged."""


@final
class Copies:
    """What is on its way out or in, and in which order the last step wanted what was away."""

    __slots__ = (
        "_asks_at", "_before", "_copying", "_expected", "_first", "_foreseeing", "_front", "_ledger", "_moved",
        "_next", "_order", "_orders", "_places", "_signature", "_unsafe", "_waiting", "exposed", "overlaps",
    )  # fmt: skip

    def __init__(self, ledger: AbstractLedger, unsafe: UnsafeRegion) -> None:
        self._ledger = ledger
        self._unsafe = unsafe
        self._moved: dict[int, Storage] = {}
        self._first = 0
        self._signature = ""
        self._orders: dict[str, list[int]] = {}
        self._order: list[int] = []
        self._expected: list[int] = []
        """The order in which the last step of that signature wanted things."""
        self._places: dict[int, int] = {}
        """The last place of each in it."""
        self._next = 0
        """The place after what an op wanted last."""
        self._front = 0
        """Nothing that is moved is expected at a place from `_next` up to this one, which is not included."""
        self._foreseeing = False
        self._asks_at = 0
        self._copying = self._waiting = 0.0  # seconds, older steps counting less and less
        self._before = (0.0, 0.0)  # the same before this step
        self.exposed = 1.0
        """Share of the seconds of copies, in the last steps, for which ops waited."""
        self.overlaps = ledger.machine.overlaps
        """What the machine said when the step began: asking takes longer than some ops."""

    # ------------------------------------------------------------------ what a policy foresees

    def asks(self) -> bool:
        """Whether the policy is to be asked before the next op. If so, the ops that follow do not ask, and what they
        would have asked for waits for the next that does."""
        clock = self._ledger.clock
        if clock < self._asks_at:
            return False
        self._asks_at = clock + self._ledger.policy.looks_after
        return True

    def foresee(self, view: MemoryView) -> None:
        """Let the policy begin copies, in and out; nothing that it proposes here is necessary."""
        ledger = self._ledger
        if self._foreseeing:  # making room for a copy is no occasion for another
            return
        self.land()
        if not ledger.policy.looks(view):
            return
        self._foreseeing = True
        try:
            ledger.collect_dead()
            ledger.grant_in_turn(ledger.policy.foresee(view), lambda: False)
        finally:
            self._foreseeing = False

    def begin(self, proposal: Copy | Fetch) -> bool:
        """Begin a copy, or refuse and count it (rule 9)."""
        if self._unsafe.running:
            self._ledger.counters.refuse("a custom function is running")
            return False
        storage: Any = proposal.storage
        return self._begin_out(storage) if isinstance(proposal, Copy) else self._begin_in(storage)

    def _begin_out(self, storage: Storage) -> bool:
        ledger, value = self._ledger, storage.value
        # What is exposed may be given another size at any moment, away from the bytes that are being read.
        free = storage.value is not None and not storage.exposed and ledger.may_leave(storage)
        if value is None or value.absent or value.home is not None or not free:
            ledger.counters.refuse("not free to be copied")
            return False
        try:
            value.home = ledger.machine.start_out(storage)
        except SpillError as error:
            ledger.counters.refuse(_why(error))
            return False
        ledger.note_copied(value)
        ledger.counters.bytes_out += storage.nbytes
        ledger.counters.early_out += storage.nbytes
        ledger.counters.early += 1
        return True

    def _begin_in(self, storage: Storage) -> bool:
        ledger, value = self._ledger, storage.value
        if value is None or value.absent != AWAY or value in self._ledger.arriving:
            ledger.counters.refuse("not away")
            return False
        if ledger.budget.short(storage.nbytes) > 0:
            ledger.counters.refuse("no room to bring it back early")
            return False
        try:
            self._ledger.arriving[value] = ledger.machine.start_in(storage, value.home)
        except SpillError as error:
            ledger.counters.refuse(_why(error))
            return False
        ledger.budget.take(storage.nbytes)
        ledger.counters.early += 1
        return True

    # ------------------------------------------------------------------ arrivals

    def land(self, *, wait: bool = False) -> None:
        """Take in what has arrived; with `wait`, all that is on its way."""
        machine = self._ledger.machine
        machine.reap()
        if not self._ledger.arriving:
            return
        for value in [value for value, arrival in self._ledger.arriving.items() if wait or machine.arrived(arrival)]:
            if value.absent == AWAY and value in self._ledger.arriving:
                self._ledger.restore(value)

    def arrive(self, value: Value) -> bool:
        """Wait for the bytes of a value and give them to its storage; whether its home is still good.

        The account is as if the copy had not begun: the caller takes the bytes into it.
        """
        arrival = self._ledger.arriving.pop(value, None)
        if arrival is None:
            raise EngineError(f"{value!r} is not on its way.")
        storage = value.storage
        self._ledger.budget.free(storage.nbytes)
        unchanged = self._ledger.machine.finish_in(storage, arrival)
        self._ledger.counters.early_in += storage.nbytes
        return unchanged

    # ------------------------------------------------------------------ the order of the last step

    def begin_step(self, signature: str, first: int) -> None:
        """`first` is the number of the last storage from before the step, by which those of the step are told apart."""
        still_away = [storage for storage in self._moved.values() if self._is_away(storage)]
        self._signature, self._first, self._order = signature, first, []
        self._next = self._front = self._asks_at = 0
        self._before = self._copying, self._waiting
        self.overlaps = self._ledger.machine.overlaps
        self._moved = {self._key(storage): storage for storage in still_away}
        self._expected = self._orders.get(signature) or next(reversed(self._orders.values()), [])
        self._places = {key: place for place, key in enumerate(self._expected)}

    def end_step(self) -> None:
        """Nothing is on its way afterwards."""
        for value in list(self._ledger.arriving):
            self._ledger.abandon(value)
        self._ledger.machine.reap()
        counters = self._ledger.counters
        copying = self._ledger.machine.transfer_seconds(counters.bytes_out + counters.bytes_in) / 2
        self.weigh(copying, counters.stall_seconds)
        self._orders.pop(self._signature, None)
        if len(self._orders) >= KNOWN_ORDERS:
            del self._orders[next(iter(self._orders))]
        self._orders[self._signature] = self._order

    def weigh(self, copying: Seconds, waiting: Seconds) -> None:
        """What the copies of this step took, and how long ops waited for them; said again, it takes the place of what
        was said. A step of which nothing is known has 0 of both.
        """
        older_copying, older_waiting = self._before
        self._copying, self._waiting = older_copying * OLDER + copying, older_waiting * OLDER + waiting
        self.exposed = min(self._waiting / self._copying, 1.0) if self._copying else 1.0

    def left(self, storage: Storage) -> None:
        key = self._key(storage)
        self._moved[key] = storage
        place = self._places.get(key, -1)
        if self._next <= place < self._front:
            self._front = place

    def came_back(self, storage: Storage, *, early: bool) -> None:
        """An op wanted it, or it came back before one did."""
        key = self._key(storage)
        self._moved.pop(key, None)
        self._order.append(key)
        if not early and key in self._places:
            self._next = self._front = self._places[key] + 1

    def in_order_of_leaving(self) -> Iterator[Storage]:
        """Moved storages that are not on their way back, the one that left first in front."""
        for storage in list(self._moved.values()):
            if self._is_away(storage):
                yield storage

    def in_order_of_use(self) -> Iterator[Storage]:
        """The same in the order in which the last step of that signature (or else the last step) wanted them, from the
        one after what came back last."""
        expected, places, moved = self._expected, self._places, self._moved
        while self._front < len(expected) and expected[self._front] not in moved:
            self._front += 1
        for place in range(self._front, len(expected)):
            key = expected[place]
            storage = moved.get(key)
            if storage is not None and places[key] == place and self._is_away(storage):
                yield storage

    def _is_away(self, storage: Storage) -> bool:
        value = storage.value
        return value is not None and value.absent == AWAY and value not in self._ledger.arriving

    def _key(self, storage: Storage) -> int:
        """Positive and the same in every step that makes the same storages, for those of the step; else negative."""
        return storage.number - self._first if storage.number > self._first else -storage.number


def _why(error: SpillError) -> str:
    """The reason for a refusal, to be counted."""
    if isinstance(error, SpillFullError):
        return "slower tier full"
    return "workers busy" if isinstance(error, SpillBusyError) else "no worker"


class Work(Protocol):
    """What is done by somebody else."""

    def done(self) -> bool:
        """Whether nothing is read or written any more."""

    def wait(self) -> bool:
        """Wait for that, where it comes about without anything that this thread would have to do; whether it did."""


class _Flight(NamedTuple):
    work: Work
    reads: Sequence[Storage]
    writes: Sequence[Storage]
    beside: Storage | None


@final
class Flights:
    """Collectives in flight: what another thread reads and writes after the op that began it has returned. Callers hold
    the controller's lock.

    From the op until the work is known to be done, also beyond the end of a step,

    - what it reads or writes stays where it is. Nothing comes to depend on what it writes, and what did came back
      before (rules 2 and 3).
    - what it needs beside its operands counts as resident (rule 5).

    When it is done, a next version begins of everything that it wrote, which no op made (rule 7).
    """

    __slots__ = ("_flights", "_ledger", "_unsafe")

    def __init__(self, ledger: AbstractLedger, unsafe: UnsafeRegion) -> None:
        self._ledger = ledger
        self._unsafe = unsafe
        self._flights: list[_Flight] = []

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def beside(self) -> Bytes:
        """What all need beside their operands."""
        return sum(flight.beside.nbytes for flight in self._flights if flight.beside is not None)

    def begin(self, work: Work, reads: Sequence[Storage], writes: Sequence[Storage], beside: Bytes = 0) -> None:
        """It has begun. All these are present; `beside` is what it needs besides, for which room was made."""
        for storage in reads:
            storage.locks += 1
        for storage in writes:
            self._unsafe.enter(storage)
        needed = self._ledger.adopt(TEMPORARY, beside, None, temporary=True) if beside else None
        if needed is not None:
            needed.locks += 1
        self._flights.append(_Flight(work, reads, writes, needed))

    def land(self, *, wait: bool = False) -> bool:
        """Let go of what is done; with `wait`, wait for what can be waited for. Whether anything was."""
        landed = [flight for flight in self._flights if flight.work.done() or (wait and flight.work.wait())]
        for flight in landed:
            self._flights.remove(flight)
            for storage in flight.reads:
                storage.locks -= 1
            for storage in flight.writes:
                self._unsafe.leave(storage)
            if flight.beside is not None:
                self._ledger.forget(flight.beside)
        return bool(landed)

    def forget(self) -> None:
        """Nothing is ever moved again."""
        self._flights.clear()
