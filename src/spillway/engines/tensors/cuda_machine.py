"""The CUDA machine: moves the bytes of device storages to pinned host memory and back.

NOTE [Order on the device]. The host enqueues and does not wait. Everything that could go wrong is a matter of the
order in which the device does things, and these are the rules by which it is kept:

 1. A copy out begins after what the compute stream had been given before it: its source has been written.
 2. Before the source of a copy out is freed, the compute stream is made to wait for the copy. The caching allocator
    may hand the memory out at once: whoever gets it writes in the compute stream's order. So a storage that leaves
    stays as long as its copy runs (rule 5 of the controller) without the host waiting. A storage that dies meanwhile
    is kept alive until the copy is done.
 3. The target of a copy in is allocated on the compute stream, and the copy begins after what that had been given
    before: the memory may have been somebody else's until then. It also begins after the copy out that filled its
    block.
 4. Before an op may use what came in, or its memory is freed unused, the compute stream waits for the copy.
 5. A block of the pool is free again when the compute stream has passed the moment at which it was given up, and with
    it everything that was made to wait for copies from and to the block; only then another copy out may fill it.

`record_stream` is used nowhere: it would tie memory to the moment at which the host looks.

The compute stream is whichever is current. Before an op, a replay or a custom function runs on another stream than what
came before, that stream is made to wait for it (`CudaStreams.follow`). So whatever a step gives the device is in one
order, that of the host, and the rules hold for all of it. Between steps nobody looks; a step begins when the device has
done everything.

NOTE [Absent storages]. With `_swap_data_ptr_` (torch 2.13) a moved storage points at its pinned block, which kernels
read where it is, slowly and right, and what they write there is what comes back. A dropped one points at a range that
nobody can read. Without it (torch 2.11) an absent storage has no bytes (`resize_`): whoever reads it without asking
stops, so that nothing may be absent between steps.

A storage that points at a block keeps its memory, whatever becomes of the machine (`Block.keep_for`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar, final

import torch

from spillway.engines.tensors.calls import Call
from spillway.engines.tensors.cpu_machine import (
    UNREADABLE_RANGE,
    Watch,
    hold,
    real_storage,
    tensors_of,
    unhold,
    unreadable_range,
)
from spillway.errors import EngineError, SpillError
from spillway.internals.private import bytes_over, owners, resize_storage, storage_at, swap_bytes
from spillway.ir.spans import Lane
from spillway.memory.lanes import Again, CopySpan, OnDevice, Stall
from spillway.memory.records import Recipe, Storage
from spillway.tiers.cuda_streams import CudaStreams, Event, unseen
from spillway.tiers.host import ALIGNMENT, Block, HostPool
from spillway.tiers.transfer import HostCopy, HostTier
from spillway.units import Bytes, Seconds

T = TypeVar("T")

_PROBED: Bytes = 32 << 20
"""Bytes of the copies by which the link is measured, if there is room for so many."""

_LEAST_PROBED: Bytes = 1 << 20
"""Copies of less say nothing about the link."""

LIKELY_BANDWIDTH = 20e9
"""Bytes per second of a link that could not be measured."""


class Arrival(NamedTuple):
    """Bytes on their way in."""

    target: torch.UntypedStorage
    done: Event
    home: HostCopy
    """Where they come from."""


class Copied(NamedTuple):
    """What a copy moved."""

    nbytes: Bytes
    storage: int
    """Its number; negative if it is not known."""


_NOBODYS: Final = Copied(0, -1)


class AbstractAbsence(ABC):
    """How a storage is without its bytes."""

    readable: bool
    """Whether a moved storage can be read where it is."""

    @abstractmethod
    def take_away(self, real: torch.UntypedStorage, nbytes: Bytes, block: Block | None) -> None:
        """Free the bytes; the storage is absent, with a block as its home or none."""

    @abstractmethod
    def target(self, real: torch.UntypedStorage, nbytes: Bytes) -> torch.UntypedStorage:
        """Where its bytes may be copied to. Raises `torch.OutOfMemoryError`; then nothing has changed."""

    @abstractmethod
    def bring(self, real: torch.UntypedStorage, target: torch.UntypedStorage) -> None:
        """The bytes are in the target: the storage has them."""

    @abstractmethod
    def give_up(self, target: torch.UntypedStorage) -> None:
        """The target is not wanted; the storage stays absent."""

    @abstractmethod
    def transfer(self, real: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
        """An absent storage gets the bytes of another one, which dies. Raises `torch.OutOfMemoryError`; then nothing
        has changed."""


@final
class Exchanged(AbstractAbsence):
    """What is under the storage is exchanged (torch 2.13)."""

    readable = True

    def __init__(self, streams: CudaStreams) -> None:
        self._streams = streams
        self._unreadable = unreadable_range()

    def take_away(self, real: torch.UntypedStorage, nbytes: Bytes, block: Block | None) -> None:
        """It points at the block, or at nothing that can be read."""
        if nbytes > UNREADABLE_RANGE:
            raise EngineError(f"A storage of {nbytes} bytes is larger than the range for dropped storages.")
        address = self._unreadable if block is None or not block.device_address else block.device_address
        instead = storage_at(address, nbytes, self._streams.device)
        swap_bytes(real, instead)

    def target(self, real: torch.UntypedStorage, nbytes: Bytes) -> torch.UntypedStorage:
        """Fresh memory beside it."""
        return self._streams.fresh(nbytes)

    def bring(self, real: torch.UntypedStorage, target: torch.UntypedStorage) -> None:
        """It points at the fresh memory."""
        swap_bytes(real, target)

    def give_up(self, target: torch.UntypedStorage) -> None:
        """The fresh memory dies with its last owner."""

    def transfer(self, real: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
        """It points at the other one's bytes."""
        swap_bytes(real, source)


@final
class Resized(AbstractAbsence):
    """The storage has no bytes while it is absent (torch 2.11)."""

    readable = False

    def take_away(self, real: torch.UntypedStorage, nbytes: Bytes, block: Block | None) -> None:
        resize_storage(real, 0)

    def target(self, real: torch.UntypedStorage, nbytes: Bytes) -> torch.UntypedStorage:
        """The storage itself: nobody but the engine knows that it has a size again."""
        resize_storage(real, nbytes)
        return real

    def bring(self, real: torch.UntypedStorage, target: torch.UntypedStorage) -> None:
        """They are there already."""

    def give_up(self, target: torch.UntypedStorage) -> None:
        """Empty again."""
        resize_storage(target, 0)

    def transfer(self, real: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
        """For a moment both are there."""
        resize_storage(real, source.nbytes())
        with unseen():
            bytes_over(real).copy_(bytes_over(source))


@final
class CudaMachine:
    """Carries out what the controller decides on device tensors, with pinned host memory as the slower tier."""

    now = staticmethod(time.perf_counter)
    hold, unhold = staticmethod(hold), staticmethod(unhold)

    def __init__(self, streams: CudaStreams, pool: HostPool, absence: AbstractAbsence) -> None:
        self.tier = HostTier(streams, pool)
        self.streams, self.pool = streams, pool
        self.absence = absence
        self.allocate: Callable[[Callable[[], Any], Bytes], Any] = _just_once
        """Runs what allocates device memory for so many bytes; may make room and run it again."""
        self.again: Callable[[Callable[[], Any], str, Bytes], Any] = lambda run, name, nbytes: run()
        """The same for a replayed op."""
        self.largest_given: Bytes = 0
        """Where giving bytes takes memory twice for a moment: the largest storage that was dropped."""
        self.spare: Callable[[], Bytes] = lambda: _PROBED
        """Bytes of device memory that may be taken for a moment."""
        self.seconds_of: Callable[[Recipe], Seconds] = lambda recipe: recipe.seconds
        """Seconds that an op takes on the device."""
        pool.make_free = self._free_cooled
        self._leaving: list[tuple[HostCopy, torch.UntypedStorage]] = []  # sources of copies out that may be under way
        self._cooling: list[tuple[Block, tuple[Event, ...]]] = []  # blocks that the device may still use
        self._copied: dict[Event, Copied] = {}  # by the event of the copy, in this step
        self._replayed: list[tuple[Recipe, Event, Event]] = []  # and between which moments
        self._seconds_per_byte = 2 / LIKELY_BANDWIDTH
        self._measured = False

    @property
    def readable_in_place(self) -> bool:
        return self.absence.readable and self.pool.readable

    # ------------------------------------------------------------------ ops

    def run(self, recipe: Recipe, bindings: Sequence[Storage]) -> Sequence[torch.UntypedStorage]:
        """Make the recorded call again; the storages it created, in the order of `recipe.creates`."""
        self.streams.follow()
        call = Call.unpacked(recipe.payload)
        inputs = [real_storage(storage) for storage in bindings]
        began = self.streams.moment()
        if recipe.writes:  # half of it may have happened when it fails: it is not begun twice
            results = call.again(inputs)
        else:
            results = self.again(lambda: call.again(inputs), recipe.name, recipe.nbytes)
        self._replayed.append((recipe, began, self.streams.moment()))
        flat = tensors_of(results)
        return [flat[position].untyped_storage() for position in call.outputs[: len(recipe.creates)]]

    # ------------------------------------------------------------------ out

    def page_out(self, storage: Storage) -> HostCopy:
        home = self._begin_out(storage, wait=True)
        self.leave(storage, home)
        return home

    def start_out(self, storage: Storage) -> HostCopy:
        """Enqueue the copy (rules 1 and 2). Nothing needs it yet: for a block of the pool the host does not wait."""
        return self._begin_out(storage, wait=False)

    def _begin_out(self, storage: Storage, *, wait: bool) -> HostCopy:
        real = real_storage(storage)
        home = self.tier.start_out(real, wait=wait)
        self._copied[home.done] = Copied(storage.nbytes, storage.number)
        self._leaving.append((home, real))
        return home

    def leave(self, storage: Storage, home: HostCopy) -> None:
        """Free the bytes behind the copy (rule 2)."""
        self.wait_for_readers(storage)  # of this copy, if it is not done, and of those of older versions
        real = real_storage(storage)
        if self.absence.readable:
            home.let_go = home.block.keep_for(real)
        self.absence.take_away(real, storage.nbytes, home.block)

    def release(self, storage: Storage) -> None:
        self.wait_for_readers(storage)
        if not self.absence.readable:
            self.largest_given = max(self.largest_given, storage.nbytes)
        self.absence.take_away(real_storage(storage), storage.nbytes, None)

    def wait_for_readers(self, storage: Storage) -> None:
        """The compute stream waits for copies out of the storage: its memory is about to be freed or resized."""
        if not self._leaving:
            return
        real = real_storage(storage)
        self._let_go(lambda source: source is real)

    def _let_go(self, wanted: Callable[[torch.UntypedStorage], bool]) -> None:
        going = [(home, real) for home, real in self._leaving if wanted(real)]
        if going:
            self._leaving = [(home, real) for home, real in self._leaving if not wanted(real)]
        for home, _ in going:
            if not home.done.query():
                self.streams.compute_waits(home.done)

    # ------------------------------------------------------------------ in

    def page_in(self, storage: Storage, home: HostCopy) -> bool:
        """Copy the block to device memory; ops that follow wait for it on the device."""
        real = real_storage(storage)
        target = self.allocate(lambda: self.absence.target(real, storage.nbytes), storage.nbytes)
        return self.finish_in(storage, self._begin_in(storage, target, home))

    def start_in(self, storage: Storage, home: HostCopy) -> Arrival:
        """Enqueue the copy (rule 3). Raises `SpillError` if the device has no memory to spare after all."""
        real = real_storage(storage)
        try:
            target = self.absence.target(real, storage.nbytes)
        except torch.OutOfMemoryError as error:
            raise SpillError("The device has no memory for a copy ahead of its use.") from error
        return self._begin_in(storage, target, home)

    def _begin_in(self, storage: Storage, target: torch.UntypedStorage, home: HostCopy) -> Arrival:
        try:
            done = self.tier.start_in(home, target)
        except BaseException:
            self.absence.give_up(target)
            raise
        self._copied[done] = Copied(storage.nbytes, storage.number)
        return Arrival(target, done, home)

    def arrived(self, arrival: Arrival) -> bool:
        return arrival.done.query()

    def finish_in(self, storage: Storage, arrival: Arrival) -> bool:
        """Ops that follow find the bytes (rule 4). The block holds the same: it is what was read."""
        if not arrival.done.query():
            self.streams.compute_waits(arrival.done)
        self.absence.bring(real_storage(storage), arrival.target)
        arrival.home.point_away()
        return True

    def abandon(self, arrival: Arrival) -> None:
        """Its memory may be freed when the copy is done (rule 4)."""
        self.streams.compute_waits(arrival.done)
        self.absence.give_up(arrival.target)

    def await_workers(self, arrivals: Sequence[Arrival]) -> None:
        for event in (*(arrival.done for arrival in arrivals), *(home.done for home, _ in list(self._leaving))):
            event.synchronize()

    # ------------------------------------------------------------------ what is kept

    def reap(self) -> None:
        if self._leaving:
            self._leaving = [(home, real) for home, real in self._leaving if not home.done.query()]
        if self._cooling:
            self._free_cooled()

    def settle(self) -> None:
        """Room was short: what lives on for copies alone may die, in the order of the device (rule 2)."""
        self._let_go(lambda real: owners(real) <= 1)

    def transfer(self, source: Storage, target: Storage) -> None:
        """The target's storage takes the temporary's bytes; where they cannot be exchanged, into memory of its own."""
        one, other = real_storage(target), real_storage(source)
        self.allocate(lambda: self.absence.transfer(one, other), target.nbytes)

    def discard(self, home: HostCopy) -> None:
        """Free the block as soon as the device is done with it (rule 5)."""
        home.point_away()
        busy: tuple[Event, ...] = (self.streams.reached(),)
        if not home.done.query():
            busy = (*busy, home.done)
        self._cooling.append((home.block, busy))

    def _free_cooled(self, *, wait: bool = False) -> None:
        """Free blocks that the device is done with. With `wait` it is waited for; by the host, for once."""
        warm: list[tuple[Block, tuple[Event, ...]]] = []
        for block, busy in self._cooling:
            if wait:
                for event in busy:
                    event.synchronize()
            if wait or all(event.query() for event in busy):
                self.pool.free(block)
            else:
                warm.append((block, busy))
        self._cooling = warm

    def escaped(self, storage: Storage) -> bool:
        """Whether its memory is somebody else's (it cannot be resized then), or it was resized unseen."""
        watch = storage.handle
        real = watch() if isinstance(watch, Watch) else watch
        return real is None or not real.resizable() or real.nbytes() != storage.nbytes

    # ------------------------------------------------------------------ the link

    def transfer_seconds(self, nbytes: Bytes) -> Seconds:
        """Seconds to copy `nbytes` out and in, by the bandwidth that was measured, if it was, or else a likely one."""
        return nbytes * self._seconds_per_byte

    @property
    def overlaps(self) -> bool:
        """Copy engines are not what computes."""
        return True

    def measure_link(self) -> None:
        """Copy some bytes out and in, and wait. What is pinned for that goes back.

        Done once, before a step; where there is not enough memory for it, a likely figure is taken.
        """
        if self._measured:
            return
        room = min(_PROBED, self.pool.budget - self.pool.pinned, self.spare())
        nbytes = room // ALIGNMENT * ALIGNMENT
        if nbytes < _LEAST_PROBED:
            return
        self._measured = True
        probe = HostPool(self.streams.pin, nbytes)
        try:
            source, block = self.streams.fresh(nbytes), probe.take(nbytes)
        except (torch.OutOfMemoryError, SpillError):
            return
        for _ in range(2):  # the first finds everything cold
            self.streams.synchronize()
            self.streams.lane_times()
            self.streams.copy_out(source, block, (self.streams.reached(),)).synchronize()
            self.streams.copy_in(block, source, (self.streams.reached(),)).synchronize()
        times = self.streams.lane_times()
        probe.free(block)
        probe.close()
        self._seconds_per_byte = sum(copy.seconds for copy in (*times.out, *times.back)) / nbytes

    # ------------------------------------------------------------------ times

    def forget_times(self) -> None:
        """Nobody will ask what was copied, waited for and run again so far."""
        self._copied.clear()
        self._replayed.clear()
        self.streams.forget_times()

    def lanes(self, *, synchronised: bool) -> OnDevice:
        """What was since `forget_times`. Everything has to be done."""
        times, when, copied = self.streams.lane_times(), self.streams.when, self._copied
        transfers = [
            CopySpan(lane, copied.get(one.event, _NOBODYS), one.began, one.began, one.ended)
            for lane, copies in ((Lane.COPY_OUT, times.out), (Lane.COPY_IN, times.back))
            for one in copies
        ]
        stalls = []
        for wait in times.stall:
            one = copied.get(wait.event, _NOBODYS)
            stalls.append(Stall(wait.began, wait.ended, one.storage if one.storage >= 0 else None, one.nbytes))
        again, self._replayed = self._replayed, []
        replays = [Again(when(began), when(ended), recipe.name, recipe.nbytes) for recipe, began, ended in again]
        return OnDevice(transfers, stalls, replays, synchronised)

    def close(self) -> None:
        """Give the pinned memory back, but for blocks that storages still point at."""
        self.streams.synchronize()
        self._leaving.clear()
        self._free_cooled()
        self.pool.close()


def _just_once(run: Callable[[], T], nbytes: Bytes) -> T:
    return run()
