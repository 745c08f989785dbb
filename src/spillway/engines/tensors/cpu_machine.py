"""The CPU machine: moves the bytes of real storages, in place.

A storage's bytes are exchanged under it (`UntypedStorage._swap_data_ptr_`), so that tensors, views and what autograd
saved stay valid and its address as a storage never changes. A moved storage points at the mapped spill file. A
dropped one points at an address range that cannot be read: whoever reaches it without asking the engine stops there
and does not get wrong numbers (`torch_patches` makes the usual ways ask).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final, NamedTuple, final

import torch

from spillway.engines.tensors.bindings import Binding
from spillway.engines.tensors.calls import Call
from spillway.errors import EngineError, SpillError, SpillFullError
from spillway.internals.private import fresh_storage, storage_at, storage_of, swap_bytes
from spillway.internals.process_memory import Reclaimer, give_pages_back, memory_for, prefer_huge_pages
from spillway.memory.budget import UNLIMITED, Budget
from spillway.memory.records import Recipe, Storage
from spillway.native.arena import BEGINS, IDLE, MOST, REFUSED, RESIDENT, RUNS, STATE, Arena, OpMemory
from spillway.tiers.disk import DiskTier, Slot
from spillway.units import Bytes, Seconds, format_bytes

UNREADABLE_RANGE: Final = 1 << 40
"""Length of the range that dropped storages point at: address space, not memory."""

_PROBE: Final = 1 << 20
_PROBES: Final = 4
"""Bytes of a copy that measures the link at most, and how many there are."""

_CPU: Final = torch.device("cpu")


@final
class Watch(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a real storage that knows its record; the handle of every storage that somebody else owns."""

    __slots__ = ("kept", "record")
    kept: torch.UntypedStorage | None
    record: Storage


def hold(storage: Storage) -> None:
    """Own the storage, so that it outlives its last tensor."""
    watch = storage.handle
    if isinstance(watch, Watch):
        watch.kept = watch()


def unhold(storage: Storage) -> None:
    """Stop owning it; it dies here if nobody else does."""
    watch = storage.handle
    if isinstance(watch, Watch):
        watch.kept = None


class Arrival(NamedTuple):
    """Bytes that a worker brings back."""

    fresh: torch.UntypedStorage
    reading: Future[bool]


@final
class CpuMachine:
    """Carries out what the controller decides, on CPU tensors, with the disk as the slower tier."""

    readable_in_place = True
    """Whether a moved storage can be read where it is."""
    now = staticmethod(time.perf_counter)
    hold, unhold = staticmethod(hold), staticmethod(unhold)

    def __init__(self, tier: DiskTier, reclaimer: Reclaimer, arena: Arena | None) -> None:
        self.tier = tier
        self._arena = arena
        self.op_memory: OpMemory | None = None
        self.budget = Budget(UNLIMITED)
        self._reclaimer = reclaimer
        self.returns_pages = True
        """Whether the pages of bytes that leave go back to the system, or stay with the allocator for what comes."""
        self._unreadable = unreadable_range()
        self._leaving: list[tuple[Slot, torch.UntypedStorage]] = []  # what workers read is kept alive

    def run(self, recipe: Recipe, bindings: Sequence[Storage]) -> Sequence[torch.UntypedStorage]:
        """Make the recorded call again; the storages it created, in the order of `recipe.creates`."""
        call = Call.unpacked(recipe.payload)
        inputs = [real_storage(storage) for storage in bindings]
        self._reclaimer.expect(recipe.nbytes)
        with memory_for(f"what {recipe.name} made, which is computed again"):
            results = self.counted(recipe.name, call.again, _nothing)(inputs)
        self._reclaimer.created(recipe.nbytes)
        flat = tensors_of(results)
        return [flat[position].untyped_storage() for position in call.outputs[: len(recipe.creates)]]

    def counted(self, name: str, call: Binding, learn: Callable[[Bytes], object], *, resizes: bool = False) -> Binding:
        """`call`, where what the op takes for itself counts too. Where there was no room for it, its results are in
        memory afterwards, with what it was given if it `resizes` that, and `learn` is told how much it was."""
        memory, budget = self.op_memory, self.budget
        if memory is None:
            return call
        cells = memory.cells

        def counted(*args: Any, **kwargs: Any) -> Any:
            cells[RESIDENT] = budget.resident
            cells[STATE] = BEGINS
            try:
                out = call(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                if cells[STATE] != REFUSED:
                    raise
                raise self.no_room(name, str(error)) from None
            finally:
                state = cells[STATE]
                cells[STATE] = IDLE
            if state > RUNS:
                self.bring_into_memory(tensors_of((out, args) if resizes else out), learn)
            return out

        return counted

    def no_room(self, name: str, said: str) -> SpillFullError:
        """For what an op takes for itself, neither in the budget nor in the spill directory."""
        assert self.op_memory is not None, "it said so"
        cells = self.op_memory.cells
        return SpillFullError(
            f"{name} takes {format_bytes(cells[MOST])} or more for itself beside {format_bytes(cells[RESIDENT])} in "
            f"memory, and neither the budget nor the spill directory {self.tier.directory} has room for it "
            f"({said.splitlines()[0]}); raise the budget, or free some space there or choose another with "
            f"SpillOptions(directory=...) or --spill-directory."
        )

    def bring_into_memory(self, tensors: Iterable[torch.Tensor], learn: Callable[[Bytes], object]) -> None:
        """What lies above the budget of these is needed after the op that made it, and there is room now. Not what has
        given its address away already (which torch notes for NumPy). `learn` is told what the op took for itself."""
        memory = self.op_memory
        assert memory is not None, "it went beyond"
        inside = memory.inside()
        for tensor in tensors:
            if tensor.layout is torch.strided and tensor.device.type == "cpu":
                real = storage_of(tensor)
                if real.resizable() and memory.is_beyond(real.data_ptr()):
                    fresh = self._fresh(real.nbytes())
                    ctypes.memmove(fresh.data_ptr(), real.data_ptr(), real.nbytes())
                    swap_bytes(real, fresh)
        learn(inside)

    def page_out(self, storage: Storage) -> Slot:
        """Write the bytes to a slot and point the storage at its mapping."""
        self.wait_for_readers(storage)
        real = real_storage(storage)
        slot = self.tier.write(real.data_ptr(), storage.nbytes)
        slot.storage = storage.number
        self._exchange(real, self._mapping(slot))
        return slot

    def leave(self, storage: Storage, home: Slot) -> None:
        """The slot holds the same content, or will in a moment: point the storage at it."""
        self.tier.finish_write(home)
        self.wait_for_readers(storage)  # an older version may still be on its way out
        self._exchange(real_storage(storage), self._mapping(home))

    def page_in(self, storage: Storage, home: Slot) -> bool:
        """Read the bytes into fresh memory and point the storage there."""
        fresh = self._fresh(storage.nbytes)
        unchanged = self.tier.read(home, fresh.data_ptr())
        self._reclaimer.created(storage.nbytes)
        swap_bytes(real_storage(storage), fresh)
        return unchanged

    def start_out(self, storage: Storage) -> Slot:
        """Let a worker write the bytes to a slot."""
        real = real_storage(storage)
        slot = self.tier.start_write(real.data_ptr(), storage.nbytes)
        slot.storage = storage.number
        self._leaving.append((slot, real))
        return slot

    def start_in(self, storage: Storage, home: Slot) -> Arrival:
        """Let a worker read the bytes into fresh memory."""
        fresh = self._fresh(storage.nbytes)
        arrival = Arrival(fresh, self.tier.start_read(home, fresh.data_ptr()))
        self._reclaimer.arrives(fresh.nbytes())
        return arrival

    def arrived(self, arrival: Arrival) -> bool:
        return arrival.reading.done()

    def finish_in(self, storage: Storage, arrival: Arrival) -> bool:
        """Wait for the worker and point the storage at what it read."""
        try:
            unchanged = arrival.reading.result()
        finally:
            self._reclaimer.arrived(arrival.fresh.nbytes())
        swap_bytes(real_storage(storage), arrival.fresh)
        return unchanged

    def abandon(self, arrival: Arrival) -> None:
        """Its memory dies with the arrival, once the worker has let go of it."""
        if not arrival.reading.cancel():
            self.tier.log.wait([arrival.reading])
        self._reclaimer.arrived(arrival.fresh.nbytes())

    def reap(self) -> None:
        """Let go of storages that a worker has read; some may die here, and not in the worker's thread."""
        if self._leaving:
            self._leaving = [(slot, real) for slot, real in self._leaving if not self.tier.written(slot)]

    def wait_for_readers(self, storage: Storage) -> None:
        if not self._leaving:
            return
        real = real_storage(storage)
        self.tier.log.wait([slot.writing for slot, read in self._leaving if read is real and slot.writing is not None])

    def await_workers(self, arrivals: Sequence[Arrival]) -> None:
        wait([arrival.reading for arrival in arrivals])
        wait([writing for slot, _ in list(self._leaving) if (writing := slot.writing) is not None])

    def _fresh(self, nbytes: Bytes) -> torch.UntypedStorage:
        self._reclaimer.expect(nbytes)
        counted = contextlib.nullcontext() if self.op_memory is None else self.op_memory.counted_elsewhere()
        with memory_for("what comes back from the spill file"), counted:
            fresh = fresh_storage(nbytes)
        if self._arena is None:
            prefer_huge_pages(fresh.data_ptr(), nbytes)
        return fresh

    def release(self, storage: Storage) -> None:
        """Free the bytes; the storage points at memory that cannot be read."""
        if storage.nbytes > UNREADABLE_RANGE:
            raise EngineError(f"A storage of {storage.nbytes} bytes is larger than the range for dropped storages.")
        nowhere = storage_at(self._unreadable, storage.nbytes, _CPU)
        self.wait_for_readers(storage)
        self._exchange(real_storage(storage), nowhere)

    def transfer(self, source: Storage, target: Storage) -> None:
        swap_bytes(real_storage(target), real_storage(source))

    def discard(self, home: Slot) -> None:
        self.tier.free(home)

    def escaped(self, storage: Storage) -> bool:
        """Whether NumPy, dlpack or another process shares it (it cannot be resized then), or it was resized unseen."""
        watch = storage.handle
        real = watch() if isinstance(watch, Watch) else watch
        return real is None or not real.resizable() or real.nbytes() != storage.nbytes or bool(real.is_shared())

    @property
    def overlaps(self) -> bool:
        """Whether the disk does the copying, or this process has more processors than torch computes with."""
        return self.tier.io == "direct" or len(os.sched_getaffinity(0)) > torch.get_num_threads()

    def measure_link(self) -> None:
        """Copy a little out and in, as far as the budget has room for that; the disk tier keeps account of how long
        copies take."""
        nbytes = min(_PROBE, self.budget.allowed - self.budget.resident)
        if nbytes <= 0:
            return
        with memory_for("the copies that tell how quick the spill file is"):
            scratch = fresh_storage(nbytes)
        with contextlib.suppress(SpillError):  # whoever needs the room will hear of it
            for _ in range(_PROBES):
                slot = self.tier.write(scratch.data_ptr(), nbytes)
                self.tier.read(slot, scratch.data_ptr())
                self.tier.free(slot)

    def transfer_seconds(self, nbytes: Bytes) -> Seconds:
        return 2 * self.tier.seconds_for(nbytes)

    def seconds_of(self, recipe: Recipe) -> Seconds:
        return recipe.seconds

    def settle(self) -> None:
        """Return freed memory to the system when the resident set has outgrown the account."""
        self._reclaimer.settle()

    def _exchange(self, real: torch.UntypedStorage, instead: torch.UntypedStorage) -> None:
        """Point a storage elsewhere and free the bytes it had: pages and all if they are to be returned, and not the
        arena's."""
        swap_bytes(real, instead)
        left = instead.data_ptr()
        if self.returns_pages and (self._arena is None or not self._arena.owns(left)):
            give_pages_back(left, instead.nbytes())

    def _mapping(self, slot: Slot) -> torch.UntypedStorage:
        mapped = self.tier.mapped(slot)
        return storage_of(torch.frombuffer(mapped.buffer, dtype=torch.uint8, count=slot.nbytes, offset=mapped.start))


def _nothing(inside: Bytes) -> None:
    """Of a replay nothing is learned: its recipe says what the op took the first time."""


def real_storage(storage: Storage) -> torch.UntypedStorage:
    """The real storage behind a record."""
    handle = storage.handle
    real = handle() if isinstance(handle, Watch) else handle
    if not isinstance(real, torch.UntypedStorage):
        raise EngineError(f"{storage!r} died while the engine was using it.")
    return real


def tensors_of(results: object) -> list[torch.Tensor]:
    """Tensors of an op's result in order, lists flattened."""
    if isinstance(results, torch.Tensor):
        return [results]
    found: list[torch.Tensor] = []
    if isinstance(results, list | tuple):
        for result in results:
            found.extend(tensors_of(result))
    return found


@functools.cache
def unreadable_range() -> int:
    """An address range without memory behind it, readable by nobody; one for the process, because it is never given
    back."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    address = libc.mmap(None, UNREADABLE_RANGE, 0, flags, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise SpillError(
            "The system gives no address range of 1 TiB, which takes no memory, for dropped storages; lift `ulimit -v`."
        )
    return int(address)
