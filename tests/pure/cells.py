"""The machine of a small world without torch: storages are lists of integers, and each integer counts for one page."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from spillway.errors import SpillFullError
from spillway.memory.ledger import SMALLEST_MOVABLE
from spillway.memory.records import EXACT, NEVER, SCAFFOLD, Recipe, Storage
from spillway.units import Bytes, Seconds

ITEM: Bytes = SMALLEST_MOVABLE
"""Bytes that one integer counts for: the smallest storage that may leave."""

PRIME = 1_000_003


class OpFailed(Exception):
    """What an op raises that fails half-way."""


@final
class World:
    """What an op sees besides its operands: one random stream, and accidents that never repeat."""

    def __init__(self, random: int = 1, accidents: int = 0) -> None:
        self.random = random
        self.accidents = accidents

    def draw(self) -> int:
        self.random = (self.random * 48_271 + 11) % 2_147_483_647
        return self.random

    def accident(self) -> int:
        self.accidents += 1
        return self.accidents


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """What an op does to lists of integers."""

    name: str
    creates: tuple[int, ...] = ()
    """Items of each storage it creates."""
    writes: tuple[int, ...] = ()
    """Places among its operands that it writes."""
    fills: bool = False
    """Whether it writes without looking at what was there."""
    seeded: bool = False
    exactness: int = EXACT
    fails: bool = False
    """Whether it raises after it has written the first item."""

    def apply(
        self, world: World, operands: Sequence[list[int]], statistics: Sequence[list[int]] = ()
    ) -> list[list[int]]:
        """Write in place, return what is created. `statistics` are written and have no influence on the result."""
        if self.exactness == SCAFFOLD:
            return [[world.accident()] * items for items in self.creates]
        mixed = sum(map(ord, self.name)) + (world.draw() if self.seeded else 0)
        mixed += world.accident() if self.exactness == NEVER else 0
        for place, items in enumerate(operands):
            if not (self.fills and place in self.writes):
                for item in items:
                    mixed = (mixed * 31 + item + place) % PRIME
        for place in self.writes:
            self._write(operands[place], mixed)
        for items in statistics:
            items[:] = [(item + mixed) % PRIME for item in items]
        return [
            [(mixed + 7 * number + place) % PRIME for place in range(size)] for number, size in enumerate(self.creates)
        ]

    def _write(self, items: list[int], mixed: int) -> None:
        for place, item in enumerate(items):
            items[place] = (mixed + place + (0 if self.fills else 3 * item)) % PRIME
            if self.fails:
                raise OpFailed(self.name)


@dataclass(frozen=True, slots=True)
class Call:
    """The payload of a recipe: the op and the random stream as it stood."""

    op: Op
    random: int


@final
class Home:
    """A slot of the slower tier. `mapping` is what readers see: a private copy that they may write."""

    def __init__(self, items: list[int], nbytes: Bytes) -> None:
        self.nbytes = nbytes
        self.reading: Cell | None = None
        """What is still being copied here: its content is what the cell holds when the copy ends."""
        self.fill(items)

    def fill(self, items: list[int]) -> None:
        self.items = tuple(items)
        self.mapping = list(items)


@final
class Arrival:
    """Bytes on their way in."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.nbytes = home.nbytes
        self.looks = 0


@final
class Cell:
    """The real storage. `items` are None while its bytes are not in memory."""

    def __init__(self, items: list[int] | None, nbytes: Bytes) -> None:
        self.items = items
        self.nbytes = nbytes
        self.home: Home | None = None
        self.users = 0
        self.kept = False
        self.storage: Storage | None = None
        self.escaped = False


@final
class MemoryMachine:
    """Carries out on cells what the controller decides, and measures by itself what is in memory."""

    def __init__(self, tier_bytes: Bytes) -> None:
        self.tier_bytes = tier_bytes
        self.homes: set[Home] = set()
        self.arrivals: set[Arrival] = set()
        self.cells: weakref.WeakSet[Cell] = weakref.WeakSet()
        self.peak: Bytes = 0
        self.looks = 0
        self.replayed: list[str] = []
        self.reading: list[Home] = []
        self.flights: set[str] = set()
        """Kinds of copies that ran beside ops: out, in, abandoned."""
        self.before: Callable[[str], None] = lambda action: None
        """Called with the name of every action before it happens."""
        self.died: Callable[[Storage], None] = lambda storage: None
        """Called when a storage dies because the controller let go of it."""

    def now(self) -> Seconds:
        """Each look at the clock takes a second, and nothing else does."""
        self.looks += 1
        return float(self.looks)

    def present(self) -> Bytes:
        """Bytes in memory, counted anew."""
        arriving = sum(arrival.nbytes for arrival in self.arrivals)
        return arriving + sum(cell.nbytes for cell in self.cells if cell.items is not None)

    def new_cell(self, items: list[int], nbytes: Bytes) -> Cell:
        cell = Cell(items, nbytes)
        self.cells.add(cell)
        self.note_peak()
        return cell

    def note_peak(self) -> None:
        self.peak = max(self.peak, self.present())

    def run(self, recipe: Recipe, bindings: Sequence[Storage]) -> Sequence[Cell]:
        self.before("run")
        call: Call = recipe.payload
        self.replayed.append(recipe.name)
        again = World(random=call.random, accidents=-PRIME)
        created = call.op.apply(again, [present_items(storage) for storage in bindings])
        cells = [self.new_cell(items, len(items) * ITEM) for items in created]
        for cell in cells:
            cell.users = 1  # the replay, until it takes the handle away
        return cells

    def page_out(self, storage: Storage) -> Home:
        self.before("page_out")
        if sum(home.nbytes for home in self.homes) + storage.nbytes > self.tier_bytes:
            raise SpillFullError(f"The tier of {self.tier_bytes} bytes is full.")
        home = Home(present_items(storage), storage.nbytes)
        self.homes.add(home)
        storage.handle.items, storage.handle.home = None, home
        return home

    def page_in(self, storage: Storage, home: Home) -> bool:
        self.before("page_in")
        assert home in self.homes, "a home is read after it was given back"
        assert home.reading is None, "a home is read before it is written"
        storage.handle.items, storage.handle.home = list(home.mapping), None
        self.note_peak()
        return tuple(home.mapping) == home.items

    def leave(self, storage: Storage, home: Home) -> None:
        self.before("leave")
        assert home in self.homes, "a home is used after it was given back"
        self.finish(home)
        storage.handle.items, storage.handle.home = None, home

    def start_out(self, storage: Storage) -> Home:
        self.before("start_out")
        if sum(home.nbytes for home in self.homes) + storage.nbytes > self.tier_bytes:
            raise SpillFullError(f"The tier of {self.tier_bytes} bytes is full.")
        home = Home([], storage.nbytes)
        home.reading, home.reading.storage = storage.handle, storage
        present_items(storage)
        self.homes.add(home)
        self.reading.append(home)
        self.flights.add("out")
        return home

    def finish(self, home: Home) -> None:
        """The copy to the home ends, with what its source holds by now."""
        if home.reading is not None:
            assert home.reading.items is not None, "a storage's bytes were freed while they were copied"
            home.fill(home.reading.items)
            home.reading = None

    def reap(self) -> None:
        """Every second copy has ended by now; who lived on for one dies."""
        for home in self.reading[::2]:
            self.finish(home)
        self.let_go()

    def let_go(self) -> None:
        done = [home for home in self.reading if home.reading is None]
        self.reading = [home for home in self.reading if home.reading is not None]
        del done
        for cell in [cell for cell in self.cells if cell.storage is not None and not self.is_read(cell)]:
            storage, cell.storage = cell.storage, None
            if cell.users == 0 and not cell.kept and storage is not None and storage.handle is not None:
                self.died(storage)

    def is_read(self, cell: Cell) -> bool:
        return any(home.reading is cell for home in self.reading)

    def start_in(self, storage: Storage, home: Home) -> Arrival:
        self.before("start_in")
        assert home in self.homes, "a home is read after it was given back"
        assert home.reading is None, "a home is read before it is written"
        arrival = Arrival(home)
        self.arrivals.add(arrival)
        self.note_peak()
        return arrival

    def arrived(self, arrival: Arrival) -> bool:
        arrival.looks += 1
        return arrival.looks > 2

    def finish_in(self, storage: Storage, arrival: Arrival) -> bool:
        self.arrivals.remove(arrival)
        self.flights.add("in")
        return self.page_in(storage, arrival.home)

    def abandon(self, arrival: Arrival) -> None:
        assert arrival.home in self.homes, "a home was given back while it was read"
        self.flights.add("abandoned")
        self.arrivals.remove(arrival)

    def release(self, storage: Storage) -> None:
        self.before("release")
        present_items(storage)
        for home in self.reading:
            if home.reading is storage.handle:
                self.finish(home)
        storage.handle.items = None

    def transfer(self, source: Storage, target: Storage) -> None:
        self.before("give")
        assert target.handle.items is None, "bytes are given to a storage that has some"
        home = target.handle.home
        if home is not None:  # it was moved, and is recomputed all the same: that makes what its home holds
            assert home in self.homes, "a storage points at a home that was given back"
            assert tuple(home.mapping) == home.items == tuple(present_items(source)), "another content is recomputed"
        target.handle.items, source.handle.items, target.handle.home = present_items(source), None, None

    def hold(self, storage: Storage) -> None:
        if storage.handle is not None:
            storage.handle.kept = True

    def unhold(self, storage: Storage) -> None:
        if storage.handle is None:
            return
        storage.handle.kept = False
        if storage.handle.users == 0 and not self.is_read(storage.handle):
            self.died(storage)

    def discard(self, home: Home) -> None:
        self.homes.remove(home)
        home.reading = None

    def escaped(self, storage: Storage) -> bool:
        return bool(storage.handle.escaped)

    overlaps = True

    def measure_link(self) -> None:
        """It is known."""

    def transfer_seconds(self, nbytes: Bytes) -> Seconds:
        return 2 * nbytes / 1e9

    def seconds_of(self, recipe: Recipe) -> float:
        return recipe.seconds

    def settle(self) -> None:
        self.before("settle")


def present_items(storage: Storage) -> list[int]:
    """The bytes of a storage as an op sees them: in memory, or the rules were broken (rule 1)."""
    assert storage.handle is not None, f"{storage!r} is used after its death"
    items: list[int] | None = storage.handle.items
    assert items is not None, f"{storage!r} is used while it is absent"
    return items
