"""Copies that are under way while ops run: the controller's side of rule 5.

A copy *out* leaves the storage where it is: it is present and counts, and its value has a home before the bytes are
there. Whoever lets it leave, or gives the home up, waits for the copy. A copy *in* counts from its beginning, before
the bytes can be used. Neither outlives its step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

from spillway.engines.records import AWAY, Storage, Value
from spillway.engines.room import grant_in_turn
from spillway.errors import EngineError, SpillBusyError, SpillError, SpillFullError
from spillway.methods.base import Copy, Fetch
from spillway.units import Seconds

if TYPE_CHECKING:
    from spillway.engines.controller import Controller

KNOWN_ORDERS = 64
"""Signatures of steps whose order of coming back is remembered."""

OLDER = 0.5
"""How much the step before counts where steps are averaged."""


@final
class Copies:
    """What is on its way out or in, and in which order the last step wanted what was away."""

    __slots__ = (
        "_asks_at", "_before", "_controller", "_copying", "_expected", "_first", "_foreseeing", "_front", "_moved",
        "_next", "_order", "_orders", "_places", "_signature", "_waiting", "arriving", "exposed", "overlaps",
    )  # fmt: skip

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.arriving: dict[Value, Any] = {}
        """Copies in, by the value that they bring."""
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
        self.overlaps = controller.machine.overlaps
        """What the machine said when the step began: asking takes longer than some ops."""

    # ------------------------------------------------------------------ what a policy foresees

    def asks(self) -> bool:
        """Whether the policy is to be asked before the next op. If so, the ops that follow do not ask, and what they
        would have asked for waits for the next that does."""
        clock = self._controller.clock
        if clock < self._asks_at:
            return False
        self._asks_at = clock + self._controller.policy.looks_after
        return True

    def foresee(self) -> None:
        """Let the policy begin copies, in and out; nothing that it proposes here is necessary."""
        controller = self._controller
        if self._foreseeing:  # making room for a copy is no occasion for another
            return
        self.land()
        if not controller.policy.looks(controller.view):
            return
        self._foreseeing = True
        try:
            controller.empty_graveyard()
            grant_in_turn(controller, controller.policy.foresee(controller.view), lambda: False)
        finally:
            self._foreseeing = False

    def begin(self, proposal: Copy | Fetch) -> bool:
        """Begin a copy, or refuse and count it (rule 9)."""
        if self._controller.lending.running:
            self._controller.counters.refuse("a custom function is running")
            return False
        storage: Any = proposal.storage
        return self._begin_out(storage) if isinstance(proposal, Copy) else self._begin_in(storage)

    def _begin_out(self, storage: Storage) -> bool:
        controller, value = self._controller, storage.value
        # What is exposed may be given another size at any moment, away from the bytes that are being read.
        free = storage.value is not None and not storage.exposed and controller.may_leave(storage)
        if value is None or value.absent or value.home is not None or not free:
            controller.counters.refuse("not free to be copied")
            return False
        try:
            value.home = controller.machine.start_out(storage)
        except SpillError as error:
            controller.counters.refuse(_why(error))
            return False
        controller.note_copied(value)
        controller.counters.bytes_out += storage.nbytes
        controller.counters.early_out += storage.nbytes
        return True

    def _begin_in(self, storage: Storage) -> bool:
        controller, value = self._controller, storage.value
        if value is None or value.absent != AWAY or value in self.arriving:
            controller.counters.refuse("not away")
            return False
        if controller.resident + storage.nbytes > controller.allowed:
            controller.counters.refuse("no room to bring it back early")
            return False
        try:
            self.arriving[value] = controller.machine.start_in(storage, value.home)
        except SpillError as error:
            controller.counters.refuse(_why(error))
            return False
        controller.resident += storage.nbytes
        controller.peak = max(controller.peak, controller.resident)
        return True

    # ------------------------------------------------------------------ arrivals

    def land(self, *, wait: bool = False) -> None:
        """Take in what has arrived; with `wait`, all that is on its way."""
        machine = self._controller.machine
        machine.reap()
        if not self.arriving:
            return
        for value in [value for value, arrival in self.arriving.items() if wait or machine.arrived(arrival)]:
            if value.absent == AWAY and value in self.arriving:
                self._controller.restore(value)

    def arrive(self, value: Value) -> bool:
        """Wait for the bytes of a value and give them to its storage; whether its home is still good.

        The account is as if the copy had not begun: the caller takes the bytes into it.
        """
        arrival = self.arriving.pop(value, None)
        if arrival is None:
            raise EngineError(f"{value!r} is not on its way.")
        storage = value.storage
        self._controller.resident -= storage.nbytes
        unchanged = self._controller.machine.finish_in(storage, arrival)
        self._controller.counters.early_in += storage.nbytes
        return unchanged

    def abandon(self, value: Value) -> None:
        """The bytes of a value are not wanted any more: they stay where they are."""
        arrival = self.arriving.pop(value, None)
        if arrival is not None:
            self._controller.machine.abandon(arrival)
            self._controller.resident -= value.storage.nbytes

    # ------------------------------------------------------------------ the order of the last step

    def begin_step(self, signature: str, first: int) -> None:
        """`first` is the number of the last storage from before the step, by which those of the step are told apart."""
        still_away = [storage for storage in self._moved.values() if self._is_away(storage)]
        self._signature, self._first, self._order = signature, first, []
        self._next = self._front = self._asks_at = 0
        self._before = self._copying, self._waiting
        self.overlaps = self._controller.machine.overlaps
        self._moved = {self._key(storage): storage for storage in still_away}
        self._expected = self._orders.get(signature) or next(reversed(self._orders.values()), [])
        self._places = {key: place for place, key in enumerate(self._expected)}

    def end_step(self) -> None:
        """Nothing is on its way afterwards."""
        for value in list(self.arriving):
            self.abandon(value)
        self._controller.machine.reap()
        counters = self._controller.counters
        copying = self._controller.machine.transfer_seconds(counters.bytes_out + counters.bytes_in) / 2
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
        """It was moved."""
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
        return value is not None and value.absent == AWAY and value not in self.arriving

    def _key(self, storage: Storage) -> int:
        """Positive and the same in every step that makes the same storages, for those of the step; else negative."""
        return storage.number - self._first if storage.number > self._first else -storage.number


def _why(error: SpillError) -> str:
    """The reason for a refusal, to be counted."""
    if isinstance(error, SpillFullError):
        return "slower tier full"
    return "workers busy" if isinstance(error, SpillBusyError) else "no worker"
