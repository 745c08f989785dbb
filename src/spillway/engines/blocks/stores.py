"""Where offloaded bytes of blocks wait: copies run beside the ops, and each storage is freed when its own is done.

NOTE [Parcels]. A `Parcel` is one storage's bytes: on their way out, waiting, or on their way in. These rules keep its
bytes right and lose none of its resources:

 1. The source lives until its copy out is done, and counts as resident as long. Who wants the bytes before that gets
    the source itself. If the copy fails, the source stays, and the next block that sends anything raises the error.
 2. The target of a copy in lives until that copy is done, whoever still wants it.
 3. A place is given back when no copy from or to it is under way. A finalizer never waits for one, since it may run
    in the thread that makes the copy, or in one that holds a lock which that thread wants: it leaves the parcel to
    whoever uses the store next.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeAlias, cast, final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from spillway.errors import SpillError, SpillFullError
from spillway.internals.locks import held_here, renew_in_children
from spillway.tiers.disk import DiskTier, Slot
from spillway.units import Bytes, Seconds

Storage = torch.UntypedStorage
Freed: TypeAlias = Callable[[int, int, Bytes], None]
"""Takes when it was, by `time.time_ns`, where it lay, and its bytes."""


@final
class Parcel:
    """One storage's bytes."""

    __slots__ = ("arrival", "nbytes", "place", "source", "under_way")

    def __init__(self, source: Storage) -> None:
        self.nbytes: Bytes = source.nbytes()
        self.source: Storage | None = source
        """The storage, until its bytes are out."""
        self.place: Any = None
        """Where the bytes are or will be: whatever the lanes put here."""
        self.arrival: Any = None
        """A copy in that was begun before anybody asked for it, and not taken yet."""
        self.under_way: Any = None
        """The copy in that was begun last."""


class Lanes(Protocol):
    """How bytes get to where they wait, and back. Called by one thread at a time."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the bytes of a plain strided tensor lie where these lanes begin."""

    def start_out(self, parcel: Parcel) -> None:
        """Begin to copy; where that cannot be done beside the ops, the bytes are out afterwards.

        Raises:
            SpillFullError: There is no room; nothing has changed.
        """

    def sender_let_go(self) -> None:
        """Who sent storages holds none of them any more."""

    def finish_out(self, parcel: Parcel) -> None:
        """Afterwards the source may be freed. Raises the error with which the copy ended."""

    def start_in(self, parcel: Parcel) -> Any:
        """Begin a copy in beside the ops; what it is known by.

        Raises:
            SpillError: It cannot be done now.
            RuntimeError: There is no memory for it.
        """

    def finish_in(self, parcel: Parcel, arrival: Any) -> Storage:
        """The bytes, in a storage of their own that ops may read. Makes the whole copy if `arrival` is None."""

    def reap(self, parcel: Parcel) -> None:
        """Free the source if its copy is done."""

    def free(self, parcel: Parcel) -> bool:
        """Give the place back; False if a copy is under way, which is then not wanted any more."""

    def settle(self, parcel: Parcel) -> None:
        """Wait until no copy from or to the place is under way."""

    def abandon(self, arrival: Any) -> None:
        """A copy in is not wanted any more; called by any thread."""

    def begin_step(self) -> None:
        """Forget what was written down about copies of earlier steps."""

    def close(self) -> None:
        """Give everything back once what is under way is done."""


@final
class Home:
    """Bytes that wait, for as long as somebody refers to this."""

    __slots__ = ("__weakref__", "_parcel", "_store")

    def __init__(self, parcel: Parcel, store: Store) -> None:
        self._parcel, self._store = parcel, store
        weakref.finalize(self, store.forget, parcel).atexit = False

    @property
    def nbytes(self) -> Bytes:
        """Bytes of the storage."""
        return self._parcel.nbytes

    @property
    def absent(self) -> bool:
        """Whether the bytes are neither in memory nor on their way there."""
        return self._parcel.source is None and self._parcel.arrival is None

    @property
    def ahead(self) -> bool:
        """Whether the bytes came, or are coming, before anybody asked for them."""
        return self._parcel.arrival is not None

    def load(self) -> Storage:
        """The bytes."""
        return self._store.load(self._parcel)

    def start_in(self) -> None:
        """Let the bytes come beside the ops."""
        self._store.start_in(self._parcel)

    def drop_arrival(self) -> None:
        """What came before anybody asked for it is not wanted any more."""
        self._store.drop_arrival(self._parcel)


@final
class Store:
    """Sends storages away and brings them back.

    Args:
        lanes: How.
        write_behind: Bytes that may still be leaving, and so are resident, when a block has ended. None: those of one
            block.
    """

    def __init__(self, lanes: Lanes, write_behind: Bytes | None = None) -> None:
        self.write_behind = write_behind
        self.takes = lanes.takes
        self.sent = 0
        """Storages so far."""
        self.bytes_out: Bytes = 0
        """That were sent so far."""
        self.bytes_in: Bytes = 0
        """That came back so far, whoever asked."""
        self.stall_seconds: Seconds = 0.0
        """For which ops waited so far."""
        self._lanes = lanes
        self._lock = threading.RLock()
        renew_in_children(self, "_lock")
        self._leaving: deque[Parcel] = deque()
        self._dead: deque[Parcel] = deque()

    @property
    def leaving_bytes(self) -> Bytes:
        """Bytes of the storages whose copies out are not done: they are resident."""
        return sum(parcel.nbytes for parcel in tuple(self._leaving) if parcel.source is not None)

    def begin_block(self) -> None:
        """A block is about to send what it holds.

        Raises:
            SpillFullError: An earlier block's bytes found no room; they are where they were.
        """
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
        while self._leaving and self.leaving_bytes > but_for:
            parcel = self._leaving.popleft()
            with self._waiting():
                self._lanes.finish_out(parcel)

    def send(self, storage: Storage) -> Home:
        """Begin to send a storage away, which nobody may write to until it is out."""
        parcel = Parcel(storage)
        with self._waiting():  # what no worker takes is written here
            try:
                self._start_out(parcel)
            except SpillFullError:
                if not self._dead:
                    raise
                self._free_dead()
                self._start_out(parcel)
        self.sent += 1
        self.bytes_out += parcel.nbytes
        if parcel.source is not None:
            self._leaving.append(parcel)
        return Home(parcel, self)

    def load(self, parcel: Parcel) -> Storage:
        """The bytes of a parcel."""
        source = parcel.source  # once: a worker may let go of it at any moment
        if source is not None:
            return source
        arrival, parcel.arrival = parcel.arrival, None
        with self._waiting():
            storage = self._lanes.finish_in(parcel, arrival)
        self.bytes_in += parcel.nbytes
        self._reap()
        return storage

    def start_in(self, parcel: Parcel) -> None:
        """Let the bytes come, if there is a way to let them come now."""
        if parcel.source is None and parcel.arrival is None:
            try:
                parcel.arrival = self._lanes.start_in(parcel)
            except (SpillError, RuntimeError):  # no room in the queue, or no memory: later then
                return

    def drop_arrival(self, parcel: Parcel) -> None:
        """Nobody wants what was read ahead."""
        arrival, parcel.arrival = parcel.arrival, None
        if arrival is not None:
            self._lanes.abandon(arrival)

    def forget(self, parcel: Parcel) -> None:
        """Nobody wants the bytes any more (rule 3)."""
        self.drop_arrival(parcel)
        self._dead.append(parcel)
        self._reap()

    def begin_step(self) -> None:
        """A forward begins."""
        self._reap()
        self._lanes.begin_step()

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
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.stall_seconds += time.perf_counter() - began

    def _start_out(self, parcel: Parcel) -> None:
        with self._lock:
            self._lanes.start_out(parcel)

    def _free_dead(self) -> None:
        for parcel in tuple(self._dead):
            self._lanes.settle(parcel)
        self._reap()

    def _reap(self) -> None:
        if held_here(self._lock) or not self._lock.acquire(blocking=False):  # garbage may be collected in between
            return
        try:
            for parcel in tuple(self._leaving):
                self._lanes.reap(parcel)
            while self._leaving and self._leaving[0].source is None:
                self._leaving.popleft()
            for _ in range(len(self._dead)):
                parcel = self._dead.popleft()
                if self._lanes.free(parcel):
                    parcel.source = None
                else:
                    self._dead.append(parcel)
        finally:
            self._lock.release()


@final
class DiskLanes:
    """The spill file, for tensors on the CPU.

    Args:
        tier: The file.
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
        """Tensors on the CPU."""
        return tensor.device.type == "cpu"

    def start_out(self, parcel: Parcel) -> None:
        """By a worker, or at once where the workers have enough to do."""
        address = cast(Storage, parcel.source).data_ptr()  # nobody here may hold the source when the worker lets go
        try:
            parcel.place = self.tier.start_write(address, parcel.nbytes)
        except SpillFullError:
            raise
        except SpillError:
            parcel.place = self.tier.write(address, parcel.nbytes)
            parcel.source = None
            return
        writing = cast("Future[None]", parcel.place.writing)
        writing.add_done_callback(partial(self._written, parcel))

    def _written(self, parcel: Parcel, writing: Future[None]) -> None:
        """The bytes are out (rule 1): called by the worker, and by whoever waited for it and got here first."""
        if writing.cancelled() or writing.exception() is not None:
            return
        at = time.time_ns()
        with self._letting_go:
            source, parcel.source = parcel.source, None
            if self._when_freed and source is not None:
                weak: Any = StorageWeakRef
                address, there = source.data_ptr(), weak(source)
                source = None
                if there.expired():
                    self._tell(at, address, parcel.nbytes)
                else:  # whoever sends it may have it still
                    self._held.append((there, address, parcel.nbytes))
        parcel.place.writing = None  # it refers to the parcel

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

    def finish_out(self, parcel: Parcel) -> None:
        """The host waits."""
        writing = parcel.place.writing
        if writing is not None and not writing.cancelled():
            self.tier.log.wait([writing])
            writing.result()
            self._written(parcel, writing)  # the worker may not come to it for as long as this thread runs

    def start_in(self, parcel: Parcel) -> tuple[Storage, Future[bool]]:
        """By a worker."""
        target = _fresh(parcel.nbytes)
        reading = self.tier.start_read(parcel.place, target.data_ptr())
        reading.add_done_callback(partial(_kept_until_now, target))  # rule 2
        parcel.under_way = reading
        return target, reading

    def finish_in(self, parcel: Parcel, arrival: Any) -> Storage:
        """Wait for the worker, or read."""
        if arrival is None:
            target = _fresh(parcel.nbytes)
            self.tier.read(parcel.place, target.data_ptr())
            return target
        target, reading = arrival
        self.tier.log.wait([reading])
        reading.result()
        return cast(Storage, target)

    def reap(self, parcel: Parcel) -> None:
        """The worker does that, when it is done."""

    def free(self, parcel: Parcel) -> bool:
        """If no worker is at it."""
        if not all(copy.done() or copy.cancel() for copy in _copies(parcel)):
            return False
        self.tier.free(parcel.place)
        return True

    def settle(self, parcel: Parcel) -> None:
        """The host waits."""
        self.tier.log.wait(_copies(parcel))

    def abandon(self, arrival: Any) -> None:
        """The worker keeps what it fills as long as it fills it (rule 2)."""

    def begin_step(self) -> None:
        """The log of copies begins anew."""
        self.tier.log.begin_step()

    def close(self) -> None:
        """The workers end what they are at."""
        self.tier.close()


def _copies(parcel: Parcel) -> list[Future[Any]]:
    slot: Slot = parcel.place
    return [copy for copy in (slot.writing, parcel.under_way) if copy is not None]


def _kept_until_now(target: Storage, reading: Future[bool]) -> None:
    """What this is called with is alive until it is called."""


def _fresh(nbytes: Bytes) -> Storage:
    storage: Storage = cast(Callable[[Bytes], Storage], torch.UntypedStorage)(nbytes)
    return storage
