"""A small world without torch, over the machine of `cells`.

`Program` runs ops under the real controller in the tensor engine's order of calls, and `Plain` runs the same ops with
no controller at all. Whatever differs between the two is a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, final

from spillway.memory.budget import UNLIMITED
from spillway.memory.controller import Controller
from spillway.memory.ledger import CHAIN_CAP
from spillway.memory.records import AWAY, DROPPED, GONE, HERE, NEVER, Recipe, Storage, Value
from spillway.methods.base import AbstractPolicy, Drop, Move
from spillway.methods.keep_all import KeepAll
from spillway.methods.lru import LRU
from spillway.units import Bytes
from tests.pure.cells import ITEM, Call, Cell, MemoryMachine, Op, OpFailed, World, present_items

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


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
        assert self.controller.budget.resident == self.machine.present(), f"before {action}"

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
        self.controller.budget.begin()
        self.machine.peak = self.machine.present()

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
            self.controller.copies.foresee(self.controller.view)
        self.controller.clock += 1
        for storage in operands:
            storage.touched = self.controller.clock
        reads = [value_of(storage) for storage in operands]
        absent = any(value_of(storage).absent for storage in (*operands, *writes))
        risky = any(value_of(storage).dependents for storage in writes)
        if not absent and not risky and self.controller.budget.resident + needed <= self.controller.budget.allowed:
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
        replayable = self.recipes_wanted and op.exactness != NEVER
        edges: list[tuple[int, Value]] = []
        for storage in dict.fromkeys(writes):
            old = value_of(storage)
            new = self.controller.overwrite(storage, None)
            if replayable and storage not in hidden and old.recipe is not None:
                edges.append((reads.index(old), new))
        storages = [self._register(items) for items in created]
        if replayable:
            made, nbytes = [value_of(storage) for storage in storages], sum(storage.nbytes for storage in storages)
            recipe = Recipe(
                self.controller.clock, op.name, reads, call, 1e-9, op.exactness, tuple(made), tuple(edges), nbytes
            )
            self.controller.remember(recipe)
        return storages

    def _register(self, items: list[int]) -> Storage:
        cell = self.machine.new_cell(items, len(items) * ITEM)
        return self.controller.adopt(0, cell.nbytes, cell)

    def _bind(self, name: str, storage: Storage) -> None:
        storage.handle.users += 1
        if name in self.names:
            self.free(name)
        self.names[name] = storage

    def _die(self, storage: Storage) -> None:
        storage.handle = None
        self.controller.forget(storage)


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
    controller.collect_dead()
    for home in machine.reading:
        machine.finish(home)
    machine.let_go()
    controller.collect_dead()
    assert len(machine.arrivals) == len(controller.arriving)
    program.check_account("the audit")
    values = list(living(program))
    assert set(controller.dropped) == {value for value in values if value.absent == DROPPED}
    assert controller.away == sum(value.absent == AWAY for value in values)
    assert machine.homes == {value.home for value in values if value.home is not None}
    for value in values:
        storage = value.storage
        held_by = {dropped for dropped in controller.dropped if value in (dropped.leaves or ())}
        assert (storage.locks, storage.written, value.wanted) == (0, False, 0), f"{storage!r} is not let go of"
        assert set(value.dependents or ()) == held_by, f"{storage!r} does not know who depends on it"
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
    recipes, leaves, stack = {value.recipe.number}, set[Value](), [value.recipe]
    while stack:
        for read in stack.pop().reads:
            if read.absent != GONE:
                leaves.add(read)
            elif read.recipe is not None and read.recipe.number not in recipes:
                recipes.add(read.recipe.number)
                stack.append(read.recipe)
    return len(recipes) + sum(chain_of(leaf) for leaf in leaves)
