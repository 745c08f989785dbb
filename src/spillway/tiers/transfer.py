"""Whole storages on their way out, waiting and on their way in: copies run beside the ops, and each storage is freed
when its own is done.

NOTE [Transfers]. A `Transfer` is one storage's bytes: on their way out, waiting, or on their way in. These rules keep
its bytes right and lose none of its resources:

 1. The source lives until its copy out is done, and counts as resident as long. Who wants the bytes before that gets
    the source itself. If the copy fails, the source stays, and the next block that sends anything raises the error.
 2. The target of a copy in lives until that copy is done, whoever still wants it.
 3. A slot is given back when no copy from or to it is under way. A finalizer never waits for one, since it may run
    in the thread that makes the copy, or in one that holds a lock which that thread wants: it leaves the transfer to
    whoever uses the store next.

NOTE [Order on the device]. The host enqueues and does not wait. These are the rules of
`engines/tensors/cuda_machine.py`, for storages that autograd or a block saved:

 1. A copy out begins after what the compute stream had been given before it, which has written the source.
 2. The source is given up when the copy is seen to be done, or when the compute stream has been made to wait for it:
    whoever gets the memory next writes in the compute stream's order.
 3. The target of a copy in is allocated on the compute stream, and the copy begins after what that had been given
    before, since the memory may have been somebody else's until then; and after the copy out that fills its block.
 4. The compute stream waits for a copy in before anything may read it. What nobody wants is kept until its copy is seen
    to be done.
 5. A block is given back when both copies are seen to be done: finalizers run in any thread, and must not make a stream
    wait.

`record_stream` is used nowhere: it would tie memory to the moment at which the host looks.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from spillway.errors import SpillError, SpillFullError
from spillway.internals.locks import held_here, renew_in_children
from spillway.internals.private import fresh_storage
from spillway.ir.spans import Lane, merged, total
from spillway.tiers.cuda_streams import CudaStreams, Event
from spillway.tiers.disk import DiskTier, Slot
from spillway.tiers.host import Block, HostPool
from spillway.units import Bytes, Seconds

Storage = torch.UntypedStorage
Freed: TypeAlias = Callable[[int, int, Bytes], None]
"""Takes when it was, by `time.time_ns`, where it lay, and its bytes."""


@final
class Transfer:
    """One storage's bytes."""

    __slots__ = ("arrival", "nbytes", "slot", "source", "under_way")

    def __init__(self, source: Storage) -> None:
        self.nbytes: Bytes = source.nbytes()
        self.source: Storage | None = source
        """The storage, until its bytes are out."""
        self.slot: Any = None
        """Where the bytes are or will be: whatever the lanes put here."""
        self.arrival: Any = None
        """A copy in that was begun before anybody asked for it, and not taken yet."""
        self.under_way: Any = None
        """The copy in that was begun last."""


class Lanes(Protocol):
    """How bytes get to where they wait, and back. Called by one thread at a time."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the bytes of a plain strided tensor lie where these lanes begin."""

    def start_out(self, transfer: Transfer) -> None:
        """Begin to copy; where that cannot be done beside the ops, the bytes are out afterwards.

        Raises SpillFullError if there is no room; nothing has changed.
        """

    def sender_let_go(self) -> None:
        """Who sent storages holds none of them any more."""

    def finish_out(self, transfer: Transfer) -> None:
        """Afterwards the source may be freed. Raises the error with which the copy ended."""

    def start_in(self, transfer: Transfer) -> Any:
        """Begin a copy in beside the ops; what it is known by. Raises SpillError if it cannot be done now, and
        RuntimeError if there is no memory for it."""

    def finish_in(self, transfer: Transfer, arrival: Any) -> Storage:
        """The bytes, in a storage of their own that ops may read. Makes the whole copy if `arrival` is None."""

    def reap(self, transfer: Transfer) -> None:
        """Free the source if its copy is done."""

    def free(self, transfer: Transfer) -> bool:
        """Give the slot back; False if a copy is under way, which is then not wanted any more."""

    def settle(self, transfer: Transfer) -> None:
        """Wait until no copy from or to the slot is under way."""

    def abandon(self, arrival: Any) -> None:
        """A copy in is not wanted any more; called by any thread."""

    def take_back(self, arrival: Any) -> None:
        """The same, by the thread that computes: whoever lets go of it afterwards has its memory back at once."""

    def begin_step(self) -> None:
        """Forget what was written down about copies of earlier steps."""

    def busy(self) -> tuple[Seconds, Seconds]:
        """For how long anything went out, and came in, since the step began. What is under way is waited for."""

    def close(self) -> None:
        """Give everything back once what is under way is done."""


@final
class SpilledStorage:
    """Bytes that wait, for as long as somebody refers to this."""

    __slots__ = ("__weakref__", "_store", "_transfer")

    def __init__(self, transfer: Transfer, store: Store) -> None:
        self._transfer, self._store = transfer, store
        weakref.finalize(self, store.forget, transfer).atexit = False

    @property
    def nbytes(self) -> Bytes:
        return self._transfer.nbytes

    @property
    def sent(self) -> bool:
        """Whether it was sent away, wherever its bytes are now."""
        return True

    @property
    def absent(self) -> bool:
        """Whether the bytes are neither in memory nor on their way there."""
        return self._transfer.source is None and self._transfer.arrival is None

    @property
    def leaving(self) -> bool:
        """Whether the bytes are still in memory, since their copy out is not done: it holds them, whoever lets go."""
        return self._transfer.source is not None

    @property
    def ahead(self) -> bool:
        """Whether the bytes came, or are coming, before anybody asked for them."""
        return self._transfer.arrival is not None

    def load(self) -> Storage:
        return self._store.load(self._transfer)

    def start_in(self) -> None:
        self._store.start_in(self._transfer)

    def drop_arrival(self) -> None:
        """What came before anybody asked for it is not wanted any more."""
        self._store.drop_arrival(self._transfer)

    def forget_arrival(self) -> None:
        """The same, for its memory, which is free afterwards. The bytes wait where they did and can come again."""
        self._store.forget_arrival(self._transfer)


@final
class Store:
    """Sends storages away and brings them back."""

    def __init__(self, lanes: Lanes) -> None:
        self.write_behind: Bytes | None = None
        """Bytes that may still be leaving, and so are resident, when a block has ended; None for those of one block."""
        self.full = False
        """Whether there was no room, and whoever sends does without: nothing is taken any more."""
        self.when_full: Callable[[], bool] = lambda: False
        """Asked where there is no room, whether bytes may stay where they are; else that is raised."""
        self.sent = 0
        """Storages so far."""
        self.bytes_out: Bytes = 0
        """That were sent so far."""
        self.bytes_in: Bytes = 0
        """That came back so far, whoever asked."""
        self.room_seconds: Seconds = 0.0
        """For which ops waited so far until something was out. On CUDA it is the device that waits, untimed."""
        self.data_seconds: Seconds = 0.0
        """And until something was in."""
        self._before = (0, 0)
        self._lanes = lanes
        self._lock = threading.RLock()
        renew_in_children(self, "_lock")
        self._leaving: deque[Transfer] = deque()
        self._dead: deque[Transfer] = deque()
        self._arrivals: set[Transfer] = set()

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether such a tensor's storage could be sent."""
        return not self.full and self._lanes.takes(tensor)

    @property
    def leaving_bytes(self) -> Bytes:
        """Bytes of the storages whose copies out are not done: they are resident. Others are given up."""
        self._reap()
        return self._leaving_still()

    def _leaving_still(self) -> Bytes:
        return sum(transfer.nbytes for transfer in [*self._leaving] if transfer.source is not None)

    @property
    def arrived_bytes(self) -> Bytes:
        """Bytes that are here, or coming, before anybody asked for them: they are resident."""
        return sum(transfer.nbytes for transfer in [*self._arrivals] if transfer.arrival is not None)

    def begin_block(self) -> None:
        """A block is about to send what it holds. Raises SpillFullError if an earlier block's bytes found no room; they
        are where they were."""
        self._reap()
        if self.write_behind is None:
            self.finish_out()

    def end_block(self) -> None:
        """It has sent everything, and holds none of it any more."""
        self._lanes.sender_let_go()
        if self.write_behind is not None:
            self.finish_out(self.write_behind)

    def finish_out(self, but_for: Bytes = 0) -> None:
        """Wait until no more than so many bytes are leaving."""
        while self._leaving and self._leaving_still() > but_for:
            transfer = self._leaving.popleft()
            with self._waiting_for_room(), self._having_room():
                self._lanes.finish_out(transfer)

    def send(self, storage: Storage) -> SpilledStorage:
        """Begin to send a storage away, which nobody may write to until it is out."""
        transfer = Transfer(storage)
        with self._waiting_for_room(), self._having_room():  # what no worker takes is written here
            try:
                self._start_out(transfer)
            except SpillFullError:
                if not self._dead:
                    raise
                self._free_dead()
                self._start_out(transfer)
        if transfer.slot is not None or transfer.source is None:
            self.sent += 1
            self.bytes_out += transfer.nbytes
            if transfer.source is not None:
                self._leaving.append(transfer)
        return SpilledStorage(transfer, self)

    def load(self, transfer: Transfer) -> Storage:
        source = transfer.source  # once: a worker may let go of it at any moment
        if source is not None:
            return source
        arrival = self._taken(transfer)
        began = time.perf_counter()
        try:
            storage = self._lanes.finish_in(transfer, arrival)
        finally:
            self.data_seconds += time.perf_counter() - began
        self.bytes_in += transfer.nbytes
        self._reap()
        return storage

    def start_in(self, transfer: Transfer) -> None:
        """Let the bytes come, if there is a way to let them come now."""
        if transfer.source is None and transfer.arrival is None:
            try:
                transfer.arrival = self._lanes.start_in(transfer)
            except (SpillError, RuntimeError):  # no room in the queue, or no memory: later then
                return
            self._arrivals.add(transfer)

    def _taken(self, transfer: Transfer) -> Any:
        """What was read ahead, which is nobody else's from here on; None without."""
        arrival, transfer.arrival = transfer.arrival, None
        self._arrivals.discard(transfer)
        return arrival

    def drop_arrival(self, transfer: Transfer) -> None:
        """Nobody wants what was read ahead."""
        arrival = self._taken(transfer)
        if arrival is not None:
            self._lanes.abandon(arrival)

    def forget_arrival(self, transfer: Transfer) -> None:
        """Its memory is wanted more than what was read ahead, which can be read again."""
        arrival = self._taken(transfer)
        if arrival is not None:
            with self._waiting_for_room():
                self._lanes.take_back(arrival)

    def forget(self, transfer: Transfer) -> None:
        """Nobody wants the bytes any more (rule 3)."""
        self.drop_arrival(transfer)
        if transfer.slot is None:  # there was no room for it
            transfer.source = None
            return
        self._dead.append(transfer)
        self._reap()

    def begin_step(self) -> None:
        self._reap()
        self._lanes.begin_step()
        self._before = self.bytes_out, self.bytes_in

    def rates(self) -> tuple[float, float]:
        """Bytes a second of this step's copies out and in, while they ran; 0 where there were none."""
        moved = self.bytes_out - self._before[0], self.bytes_in - self._before[1]
        out, back = (nbytes / busy if busy > 0 else 0.0 for nbytes, busy in zip(moved, self._lanes.busy(), strict=True))
        return out, back

    def settle(self) -> None:
        """Wait until everything has left that is leaving, and give back what nobody wants."""
        self.finish_out()
        self._free_dead()

    def close(self) -> None:
        """Give the tier back. What is to come back has to have come."""
        self._free_dead()
        with self._lock:
            self._leaving.clear()
            self._lanes.close()

    @contextlib.contextmanager
    def _waiting_for_room(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.room_seconds += time.perf_counter() - began

    @contextlib.contextmanager
    def _having_room(self) -> Iterator[None]:
        try:
            yield
        except SpillFullError:
            self.full = self.full or self.when_full()
            if not self.full:
                raise

    def _start_out(self, transfer: Transfer) -> None:
        with self._lock:
            self._lanes.start_out(transfer)

    def _free_dead(self) -> None:
        for transfer in [*self._dead]:
            self._lanes.settle(transfer)
        self._reap()

    def _reap(self) -> None:
        if held_here(self._lock) or not self._lock.acquire(blocking=False):  # garbage may be collected in between
            return
        try:
            for transfer in [*self._leaving]:
                self._lanes.reap(transfer)
            while self._leaving and self._leaving[0].source is None:
                self._leaving.popleft()
            for _ in range(len(self._dead)):
                transfer = self._dead.popleft()
                if self._lanes.free(transfer):
                    transfer.source = None
                else:
                    self._dead.append(transfer)
        finally:
            self._lock.release()


@final
class DiskLanes:
    """The spill file, for tensors on the CPU.

    Args:
        when_freed: Told by a worker that freed a storage whose bytes were out.
    """

    def __init__(self, tier: DiskTier, when_freed: Sequence[Freed] = ()) -> None:
        self.tier = tier
        self._when_freed = when_freed
        self._letting_go = threading.RLock()
        renew_in_children(self, "_letting_go")
        self._held: list[tuple[Any, int, Bytes]] = []
        """What is out and its sender may hold: a weak reference, its address and bytes."""

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def start_out(self, transfer: Transfer) -> None:
        """By a worker, or at once where the workers have enough to do."""
        address = cast(Storage, transfer.source).data_ptr()  # nobody here may hold the source when the worker lets go
        try:
            transfer.slot = self.tier.start_write(address, transfer.nbytes)
        except SpillFullError:
            raise
        except SpillError:
            transfer.slot = self.tier.write(address, transfer.nbytes)
            transfer.source = None
            return
        writing = cast("Future[None]", transfer.slot.writing)
        writing.add_done_callback(partial(self._written, transfer))

    def _written(self, transfer: Transfer, writing: Future[None]) -> None:
        """The bytes are out (rule 1): called by the worker, and by whoever waited for it and got here first."""
        if writing.cancelled() or writing.exception() is not None:
            return
        at = time.time_ns()
        with self._letting_go:
            weak: Any = StorageWeakRef
            source = transfer.source
            address, there = (source.data_ptr(), weak(source)) if source is not None and self._when_freed else (0, None)
            source = None
            transfer.source = None  # the last that holds it here: who finds nothing leaving finds it freed
            if there is not None and there.expired():
                self._tell(at, address, transfer.nbytes)
            elif there is not None:  # whoever sends it may have it still
                self._held.append((there, address, transfer.nbytes))
        transfer.slot.writing = None  # it refers to the transfer

    def sender_let_go(self) -> None:
        """Tell of what the sender was the last to hold. Whoever holds the rest frees it by himself."""
        with self._letting_go:
            held, self._held = self._held, []
            for there, address, nbytes in held:
                if there.expired():
                    self._tell(time.time_ns(), address, nbytes)

    def _tell(self, at: int, address: int, nbytes: Bytes) -> None:
        for tell in tuple(self._when_freed):
            tell(at, address, nbytes)

    def finish_out(self, transfer: Transfer) -> None:
        writing = transfer.slot.writing
        if writing is not None and not writing.cancelled():
            self.tier.log.wait([writing])
            writing.result()
            self._written(transfer, writing)  # the worker may not come to it for as long as this thread runs

    def start_in(self, transfer: Transfer) -> tuple[list[Storage], Future[bool]]:
        target = [fresh_storage(transfer.nbytes)]
        reading = self.tier.start_read(transfer.slot, target[0].data_ptr())
        reading.add_done_callback(partial(_kept_until_now, target))  # rule 2
        transfer.under_way = reading
        return target, reading

    def finish_in(self, transfer: Transfer, arrival: Any) -> Storage:
        if arrival is None:
            target = fresh_storage(transfer.nbytes)
            self.tier.read(transfer.slot, target.data_ptr())
            return target
        kept, reading = arrival
        self.tier.log.wait([reading])
        reading.result()
        return cast(Storage, kept.pop())  # its future lives as long as the transfer, and is to hold it no longer

    def reap(self, transfer: Transfer) -> None:
        """The worker does that, when it is done."""

    def free(self, transfer: Transfer) -> bool:
        if not all(copy.done() or copy.cancel() for copy in _copies(transfer)):
            return False
        self.tier.free(transfer.slot)
        return True

    def settle(self, transfer: Transfer) -> None:
        self.tier.log.wait(_copies(transfer))

    def abandon(self, arrival: Any) -> None:
        """The worker keeps what it fills as long as it fills it (rule 2)."""

    def take_back(self, arrival: Any) -> None:
        """Unless no worker has begun, the host waits for the one that has."""
        target, reading = arrival
        if not reading.cancel():
            self.tier.log.wait([reading])
        target.clear()

    def begin_step(self) -> None:
        self.tier.log.begin_step()

    def busy(self) -> tuple[Seconds, Seconds]:
        spans = tuple(self.tier.log.transfers)
        out, back = (
            total(merged((one.began, one.ended) for one in spans if one.lane is lane))
            for lane in (Lane.COPY_OUT, Lane.COPY_IN)
        )
        return out, back

    def close(self) -> None:
        self.tier.close()


def _copies(transfer: Transfer) -> list[Future[Any]]:
    slot: Slot = transfer.slot
    return [copy for copy in (slot.writing, transfer.under_way) if copy is not None]


def _kept_until_now(target: list[Storage], reading: Future[bool]) -> None:
    """What this is called with is alive until it is called."""


@final
@dataclass(slots=True, eq=False)
class HostCopy:
    """Bytes in pinned memory, or on their way there."""

    block: Block
    done: Event
    """The copy out into it."""
    let_go: Callable[[], object] | None = None
    """A storage points at the block, and keeps the memory until this is called."""

    def point_away(self) -> None:
        """No storage points at it any more."""
        if self.let_go is not None:
            self.let_go()
            self.let_go = None


@final
class HostTier:
    """Copies between the device and the pool where bytes wait, in an order that neither the host nor the allocator can
    upset."""

    def __init__(self, streams: CudaStreams, pool: HostPool) -> None:
        self.streams, self.pool = streams, pool

    def start_out(self, source: Storage, *, wait: bool = True) -> HostCopy:
        """Enqueue a copy out, behind what the compute stream had been given, which has written the source.

        Raises:
            SpillFullError: The pool has no room. Without `wait`, none for which the host need not wait.
        """
        block = self.pool.take(source.nbytes(), wait=wait)
        try:
            return HostCopy(block, self.streams.copy_out(source, block, (self.streams.reached(),)))
        except BaseException:
            self.pool.free(block)
            raise

    def start_in(self, copy: HostCopy, target: Storage) -> Event:
        """Enqueue a copy in, behind what the compute stream had been given, since the target may have been somebody
        else's until then, and behind the copy out that fills the block."""
        after = [self.streams.reached()]
        if not copy.done.query():
            after.append(copy.done)
        return self.streams.copy_in(copy.block, target, after)


class _Arrival(NamedTuple):
    target: Storage
    done: Event


@final
class HostLanes:
    """A lane out and a lane in, beside the compute stream."""

    def __init__(self, streams: CudaStreams, pool: HostPool) -> None:
        self.streams, self.pool = streams, pool
        self.tier = HostTier(streams, pool)
        self._unwanted: list[_Arrival] = []

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.streams.device

    def start_out(self, transfer: Transfer) -> None:
        """Enqueue the copy (rule 1)."""
        assert transfer.source is not None
        transfer.slot = self.tier.start_out(transfer.source)

    def finish_out(self, transfer: Transfer) -> None:
        """The device waits, not the host (rule 2)."""
        if transfer.source is not None and not transfer.slot.done.query():
            self.streams.compute_waits(transfer.slot.done)
        transfer.source = None

    def start_in(self, transfer: Transfer) -> _Arrival:
        """Enqueue the copy (rule 3). Raises `torch.OutOfMemoryError`."""
        target = self.streams.fresh(transfer.nbytes)
        transfer.under_way = self.tier.start_in(transfer.slot, target)
        return _Arrival(target, transfer.under_way)

    def finish_in(self, transfer: Transfer, arrival: Any) -> Storage:
        """Ops that follow find the bytes (rule 4)."""
        found: _Arrival = arrival if arrival is not None else self.start_in(transfer)
        if not found.done.query():
            self.streams.compute_waits(found.done)
        return found.target

    def abandon(self, arrival: _Arrival) -> None:
        """Kept until the copy is done (rule 4)."""
        self._unwanted.append(arrival)

    def take_back(self, arrival: _Arrival) -> None:
        """The device waits, not the host: who gets the memory next writes behind the copy (rule 4)."""
        if not arrival.done.query():
            self.streams.compute_waits(arrival.done)

    def sender_let_go(self) -> None:
        """The allocator knows what is free."""

    def reap(self, transfer: Transfer) -> None:
        if transfer.source is not None and transfer.slot.done.query():
            transfer.source = None

    def free(self, transfer: Transfer) -> bool:
        """If the device is done with the block (rule 5)."""
        self._unwanted = [arrival for arrival in self._unwanted if not arrival.done.query()]
        if not all(event.query() for event in _events(transfer)):
            return False
        self.pool.free(transfer.slot.block)
        return True

    def settle(self, transfer: Transfer) -> None:
        for event in _events(transfer):
            event.synchronize()

    def begin_step(self) -> None:
        self._unwanted = [arrival for arrival in self._unwanted if not arrival.done.query()]
        self.streams.forget_times()

    def busy(self) -> tuple[Seconds, Seconds]:
        """By the device's own clock; the host waits for it."""
        self.streams.synchronize()
        times = self.streams.lane_times()
        out, back = (total(merged((one.began, one.ended) for one in lane)) for lane in (times.out, times.back))
        return out, back

    def close(self) -> None:
        self.streams.synchronize()
        self._unwanted.clear()
        self.pool.close()


def _events(transfer: Transfer) -> list[Event]:
    copy: HostCopy = transfer.slot
    return [copy.done] if transfer.under_way is None else [copy.done, transfer.under_way]
