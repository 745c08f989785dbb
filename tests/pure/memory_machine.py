"""A small world without torch: storages are lists of integers, and each integer counts for one page.

`MemoryMachine` is a machine under the real controller, `Program` runs ops on it in the tensor engine's order of calls,
and `Plain` runs the same ops with no controller at all. Whatever differs between the last two is a bug.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

from spillway.engines.controller import CHAIN_CAP, SMALLEST_MOVABLE, UNLIMITED, Controller
from spillway.engines.records import AWAY, DROPPED, EXACT, GONE, HERE, NEVER, SCAFFOLD, Recipe, Storage, Value
from spillway.errors import SpillFullError
from spillway.methods.base import AbstractPolicy, Drop, Move
from spillway.methods.keep_all import KeepAll
from spillway.methods.lru import LRU
from spillway.units import Bytes, Seconds

ITEM: Bytes = SMALLEST_MOVABLE
"""Bytes that one integer counts for: the smallest storage that may leave."""

PRIME = 1_000_003

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


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
        self.replayed: list[str] = []
        self.reading: list[Home] = []
        self.flights: set[str] = set()
        """Kinds of copies that ran beside ops: out, in, abandoned."""
        self.before: Callable[[str], None] = lambda action: None
        """Called with the name of every action before it happens."""
        self.died: Callable[[Storage], None] = lambda storage: None
        """Called when a storage dies because the controller let go of it."""

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

    def give(self, source: Storage, target: Storage) -> None:
        self.before("give")
        assert target.handle.items is None, "bytes are given to a storage that has some"
        assert target.handle.home is None, "bytes are given to a storage that has some elsewhere"
        target.handle.items, source.handle.items = present_items(source), None

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

    def transfer_seconds(self, nbytes: Bytes) -> Seconds:
        return 2 * nbytes / 1e9

    def settle(self) -> None:
        self.before("settle")


def present_items(storage: Storage) -> list[int]:
    """The bytes of a storage as an op sees them: in memory, or the rules were broken (rule 1)."""
    assert storage.handle is not None, f"{storage!r} is used after its death"
    items: list[int] | None = storage.handle.items
    assert items is not None, f"{storage!r} is used while it is absent"
    return items


@final
class Program:
    """Runs ops by name under a controller, in the tensor engine's order of calls.

    Several names of one storage are its views; a storage dies with its last name, unless it is held.
    """

    def __init__(
        self,
        allowed: Bytes = UNLIMITED,
        policy: AbstractPolicy | None = None,
        *,
        chain_cap: int = CHAIN_CAP,
        tier_bytes: Bytes = UNLIMITED,
    ) -> None:
        self.machine = MemoryMachine(tier_bytes)
        self.controller = Controller(self.machine, policy or LRU(short_chain=0), allowed, chain_cap)
        self.world = World()
        self.names: dict[str, Storage] = {}
        self.machine.before = self.check_account
        self.machine.died = self._die
        self.recipes_wanted = not isinstance(policy, KeepAll)

    def __getitem__(self, name: str) -> Value:
        value = self.names[name].value
        assert value is not None, f"{name} is dead"
        return value

    def check_account(self, action: str) -> None:
        """What the controller believes to be in memory is what is there."""
        assert self.controller.resident == self.machine.present(), f"before {action}"

    # ------------------------------------------------------------------ what a user does

    def source(self, name: str, items: Sequence[int], nbytes: Bytes | None = None) -> None:
        """A storage that existed before any op."""
        cell = self.machine.new_cell(list(items), len(items) * ITEM if nbytes is None else nbytes)
        self._bind(name, self.controller.adopt(0, cell.nbytes, cell))

    def view(self, name: str, of: str) -> None:
        """Another name for the same storage."""
        self._bind(name, self.names[of])

    def free(self, name: str) -> None:
        storage = self.names.pop(name)
        storage.handle.users -= 1
        if storage.handle.users == 0 and not storage.handle.kept and not self.machine.is_read(storage.handle):
            self._die(storage)

    def look(self, name: str) -> list[int]:
        """Read without asking anybody, as `.numpy()` would."""
        cell: Cell = self.names[name].handle
        items = cell.items if cell.home is None else cell.home.mapping
        assert items is not None, f"{name} cannot be read"
        return list(items)

    def poke(self, name: str, item: int) -> None:
        """Write the first item without asking anybody, as code between steps does."""
        cell: Cell = self.names[name].handle
        items = cell.items if cell.home is None else cell.home.mapping
        assert items is not None, f"{name} cannot be written"
        items[0] = item

    def read(self, name: str) -> list[int]:
        """Read through an op."""
        return self._ready("read", [self.names[name]], [], 0, lambda: list(present_items(self.names[name])))

    def reveal(self, name: str, by_address: bool) -> None:
        """Code is about to read past the dispatcher; `by_address` if it may keep the address."""
        storage, value = self.names[name], self[name]
        storage.locks += 1
        try:
            if by_address:
                self.controller.restore_dependents(storage)
            if value.absent == DROPPED or (by_address and value.absent):
                self.controller.restore(value)
            storage.exposed = True
            storage.escaped |= by_address
            storage.handle.escaped |= by_address
        finally:
            storage.locks -= 1

    def begin_step(self) -> None:
        self.controller.begin_step()
        self.controller.make_room(0, "begin step")
        self.controller.peak = self.machine.peak = self.machine.present()

    def end_step(self) -> None:
        self.controller.end_step()

    def drop(self, name: str) -> bool:
        """Propose to drop by name; whether it was granted."""
        return self.controller.grant(Drop(self.names[name]))

    def move(self, name: str) -> bool:
        """Propose to move by name; whether it was granted."""
        return self.controller.grant(Move(self.names[name]))

    def run(self, op: Op, reads: str = "", creates: str = "", statistics: str = "") -> None:
        """One op: operands, names for what it creates, and storages that it writes without mention."""
        operands = [self.names[name] for name in reads.split()]
        hidden = [self.names[name] for name in statistics.split()]
        writes = [operands[place] for place in op.writes] + hidden
        needed = sum(op.creates) * ITEM
        created = self._ready(op.name, operands, writes, needed, lambda: self._complete(op, operands, hidden, writes))
        for name, storage in zip(creates.split(), created, strict=True):
            self._bind(name, storage)

    # ------------------------------------------------------------------ what the engine does

    def _ready(
        self, name: str, operands: Sequence[Storage], writes: Sequence[Storage], needed: Bytes, act: Callable[[], T]
    ) -> T:
        if self.controller.policy.foresees:
            self.controller.copies.foresee()
        self.controller.clock += 1
        for storage in operands:
            storage.touched = self.controller.clock
        reads = [value_of(storage) for storage in operands]
        absent = any(value_of(storage).absent for storage in (*operands, *writes))
        risky = any(value_of(storage).dependents for storage in writes)
        if not absent and not risky and self.controller.resident + needed <= self.controller.allowed:
            return act()
        self.controller.prepare(name, reads, writes, needed)
        try:
            return act()
        finally:
            self.controller.finish(reads, writes)

    def _complete(
        self, op: Op, operands: Sequence[Storage], hidden: Sequence[Storage], writes: Sequence[Storage]
    ) -> list[Storage]:
        reads = [value_of(storage) for storage in operands]
        call = Call(op, self.world.random)
        try:
            created = op.apply(self.world, [present_items(s) for s in operands], [present_items(s) for s in hidden])
        except OpFailed:
            for storage in writes:
                self.controller.overwrite(storage, None)
            raise
        recipe: Recipe | None = None
        if self.recipes_wanted and op.exactness != NEVER:
            recipe = Recipe(self.controller.clock, op.name, reads, call, 1e-9, op.exactness)
        for storage in dict.fromkeys(writes):
            self._note_write(storage, None if storage in hidden else recipe, reads)
        storages = [self._register(items, recipe) for items in created]
        if recipe is not None:
            recipe.creates = [value_of(storage) for storage in storages]
            recipe.nbytes = sum(storage.nbytes for storage in storages)
            self.controller.recipes.append(recipe)
        return storages

    def _note_write(self, storage: Storage, recipe: Recipe | None, reads: Sequence[Value]) -> None:
        old = value_of(storage)
        replayable = recipe is not None and old.recipe is not None
        value = self.controller.overwrite(storage, recipe if replayable else None)
        if replayable and recipe is not None:
            recipe.writes = (*recipe.writes, (reads.index(old), value))

    def _register(self, items: list[int], recipe: Recipe | None) -> Storage:
        cell = self.machine.new_cell(items, len(items) * ITEM)
        storage = self.controller.adopt(0, cell.nbytes, cell)
        value_of(storage).recipe = recipe
        return storage

    def _bind(self, name: str, storage: Storage) -> None:
        storage.handle.users += 1
        if name in self.names:
            self.free(name)
        self.names[name] = storage

    def _die(self, storage: Storage) -> None:
        storage.handle = None
        self.controller.bury(storage)


@final
class Plain:
    """The same names and ops with nobody in between."""

    def __init__(self) -> None:
        self.world = World()
        self.names: dict[str, list[int]] = {}

    def source(self, name: str, items: Sequence[int], nbytes: Bytes | None = None) -> None:
        self.names[name] = list(items)

    def view(self, name: str, of: str) -> None:
        self.names[name] = self.names[of]

    def free(self, name: str) -> None:
        del self.names[name]

    def poke(self, name: str, item: int) -> None:
        self.names[name][0] = item

    def read(self, name: str) -> list[int]:
        return list(self.names[name])

    def reveal(self, name: str, by_address: bool) -> None:
        """Plain code can be read by anybody."""

    def begin_step(self) -> None:
        """Plain code has no steps."""

    end_step = begin_step

    def run(self, op: Op, reads: str = "", creates: str = "", statistics: str = "") -> None:
        operands, hidden = ([self.names[name] for name in text.split()] for text in (reads, statistics))
        created = op.apply(self.world, operands, hidden)
        self.names.update(zip(creates.split(), created, strict=True))


def value_of(storage: Storage) -> Value:
    assert storage.value is not None, f"{storage!r} is dead"
    return storage.value


def error_of(kind: type[E], act: Callable[..., Any], *args: Any) -> E:
    """The error that `act` raises, without the frames that would keep what it worked on alive."""
    try:
        act(*args)
    except kind as error:
        return error.with_traceback(None)
    raise AssertionError(f"{kind.__name__} was not raised")


def audit(program: Program) -> None:
    """Between ops: nothing is locked or wanted, every count is what a fresh count gives."""
    controller, machine = program.controller, program.machine
    controller.empty_graveyard()
    for home in machine.reading:
        machine.finish(home)
    machine.let_go()
    controller.empty_graveyard()
    assert len(machine.arrivals) == len(controller.copies.arriving)
    program.check_account("the audit")
    values = list(living(program))
    assert controller.dropped == {value for value in values if value.absent == DROPPED}
    assert controller.away == sum(value.absent == AWAY for value in values)
    assert machine.homes == {value.home for value in values if value.home is not None}
    for value in values:
        storage = value.storage
        held_by = {dropped for dropped in controller.dropped if value in (dropped.leaves or ())}
        assert (storage.locks, storage.written, value.wanted) == (0, False, 0), f"{storage!r} is not let go of"
        assert (value.dependents or set()) == held_by, f"{storage!r} does not know who depends on it"
        assert (storage.held, storage.handle.kept) == (len(held_by), bool(held_by)), f"{storage!r} is not held right"
        assert value.chain == chain_of(value), f"{storage!r} has a chain of {chain_of(value)}"
        assert value.chain <= controller.chain_cap
        assert value.absent != GONE, f"{storage!r} is gone and still reached"
        assert (value.absent == HERE) == (storage.handle.items is not None), f"{storage!r} is not where it should be"


def living(program: Program) -> Iterable[Value]:
    """Current values of named storages, and of those that only the drops of others keep alive."""
    found: dict[Value, None] = {}
    stack = [value_of(storage) for storage in program.names.values()] + list(program.controller.dropped)
    while stack:
        value = stack.pop()
        if value not in found:
            found[value] = None
            stack.extend(value.leaves or ())
    return found


def chain_of(value: Value) -> int:
    """Ops that would run to bring a value back now, each path counted: a second, slow way to say `Value.chain`."""
    if value.absent != DROPPED or value.recipe is None:
        return 0
    recipes, leaves, stack = {value.recipe}, set[Value](), [value.recipe]
    while stack:
        for read in stack.pop().reads:
            if read.absent != GONE:
                leaves.add(read)
            elif read.recipe is not None and read.recipe not in recipes:
                recipes.add(read.recipe)
                stack.append(read.recipe)
    return len(recipes) + sum(chain_of(leaf) for leaf in leaves)
