"""The machine on paper: storages are sizes, time is a number, and lanes take as long as a device says.

NOTE [Time]. The clock stands still unless something takes time, and everything that takes time says so here:

 1. An op, run for the first time or again, takes `Op.seconds` of the compute lane.
 2. A copy takes what `costs.device.Device` says, on a lane that does one copy after the other: copy-out, copy-in; one
    lane for both where the link is not duplex, and one where the tier is the disk.
 3. Compute waits for a copy when the controller does: a copy out before its bytes are freed, a copy in before its bytes
    are used, and whoever frees bytes waits for what still reads them. No other copy stops compute.
 4. Watching an op, handling a storage and asking a method that foresees take what the device says, of the compute
    lane. Nothing else that is decided takes time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final, Literal, final

from spillway.costs.device import Device
from spillway.errors import EngineError
from spillway.ir.spans import Lane
from spillway.memory.lanes import CopySpan, Stall, TransferLog
from spillway.memory.records import Recipe, Storage
from spillway.simulation.allocators import AbstractAllocator
from spillway.units import Bytes, Seconds, format_seconds

Tier = Literal["host", "disk"]
"""Where moved bytes wait."""

TIERS: Final[tuple[Tier, ...]] = ("host", "disk")

PROBE: Final[Bytes] = 1 << 20
PROBES: Final = 4
"""Copies out and in before the first step of a method that foresees, as on the CPU."""

ROUNDING: Final = 1e-9
"""Share by which a sum of seconds may be off."""


class Thrashing(Exception):
    """More was recomputed than is worth going on for."""


@final
@dataclass(slots=True, eq=False)
class PaperHome:
    """Where a value waits."""

    nbytes: Bytes
    storage: int
    ready: Seconds
    """When the copy into it is done."""


@final
@dataclass(slots=True, eq=False)
class PaperArrival:
    """Bytes on their way in, and the memory that they are to have."""

    token: Any
    ready: Seconds


@final
class Sheet:
    """What stands for the real storage: a size, and a place in device memory while its bytes are there. Its memory is
    given back when nothing refers to it any more, as a tensor's is."""

    __slots__ = ("_allocator", "kept", "nbytes", "reachable", "read_until", "token")

    def __init__(self, nbytes: Bytes, allocator: AbstractAllocator) -> None:
        self._allocator = allocator
        self.nbytes = nbytes
        self.token: Any = allocator.allocate(nbytes)
        self.reachable = True  # by the program
        self.kept = False  # by the controller
        self.read_until: Seconds = 0.0  # by copies out

    def leave(self) -> None:
        token, self.token = self.token, None
        self._allocator.free(token)

    def __del__(self) -> None:
        if getattr(self, "token", None) is not None:
            self.leave()


@final
class Lanes:
    """The lanes of copies, by when each is free again."""

    __slots__ = ("_device", "_free", "_seconds_moving", "_tier", "bytes_moved", "log")

    def __init__(self, device: Device, tier: Tier) -> None:
        self._device = device
        self._tier = tier
        self._free: dict[Lane, Seconds] = {Lane.COPY_OUT: 0.0, Lane.COPY_IN: 0.0}
        self.bytes_moved: Bytes = 0
        self._seconds_moving: Seconds = 0.0
        self.log = TransferLog()

    def seconds(self, lane: Lane, nbytes: Bytes) -> Seconds:
        """What a copy takes, alone on its lane."""
        device, out = self._device, lane is Lane.COPY_OUT
        if self._tier == "host":
            return device.out_seconds(nbytes) if out else device.in_seconds(nbytes)
        link, disk = (
            (device.out_per_second, device.disk_out_per_second)
            if out
            else (device.in_per_second, device.disk_in_per_second)
        )
        return device.copy_seconds + nbytes / min(link, disk)

    def copy(self, lane: Lane, place: PaperHome, now: Seconds) -> Seconds:
        """Begin a copy as soon as its lane is free; when it is done."""
        together = not self._device.duplex or self._tier == "disk"
        lanes = tuple(self._free) if together else (lane,)
        began = max(now, *(self._free[one] for one in lanes))
        ended = began + self.seconds(lane, place.nbytes)
        for one in lanes:
            self._free[one] = ended
        self.took(place.nbytes, ended - began)
        on_disk = ended if self._tier == "disk" else began
        self.log.transfers.append(CopySpan(lane, place, began, on_disk, ended))
        return ended

    def took(self, nbytes: Bytes, seconds: Seconds) -> None:
        """A copy of so many bytes took so long."""
        self.bytes_moved += nbytes
        self._seconds_moving += seconds

    def expected(self, nbytes: Bytes) -> Seconds:
        """To copy out and in again, as `DiskTier` expects it: by the bytes and seconds of all copies so far, so that
        small ones make every byte dearer. Before there were any, what the two take."""
        if not self.bytes_moved:
            return self.seconds(Lane.COPY_OUT, nbytes) + self.seconds(Lane.COPY_IN, nbytes)
        return 2 * nbytes * self._seconds_moving / self.bytes_moved


@final
class PaperMachine:
    """Carries out on sheets what the controller decides.

    Arguments:
        allocator: What device memory is taken from.
        most_recomputing: Seconds of recomputing in one step after which it is given up.
        overlaps: Whether copies beside ops take nothing from them; the methods are told so.
    """

    def __init__(
        self, device: Device, allocator: AbstractAllocator, *, tier: Tier = "host", most_recomputing: Seconds = inf,
        overlaps: bool = True,
    ) -> None:  # fmt: skip
        self.allocator = allocator
        self.most_recomputing = most_recomputing
        self.overlaps = overlaps
        self.lanes = Lanes(device, tier)
        self.log = self.lanes.log
        self.died: Callable[[Storage], None] = lambda storage: None
        """Called when a storage dies because the machine or the controller let go of it."""
        self._time: Seconds = 0.0
        self._recomputing: Seconds = 0.0
        self._leaving: dict[Storage, None] = {}  # the program let go of them while they were copied

    # ------------------------------------------------------------------ what the driver does

    def now(self) -> Seconds:
        """Seconds since the first step began."""
        return self._time

    def work(self, seconds: Seconds) -> None:
        """The compute lane is busy."""
        self._time += seconds

    def begin_step(self) -> None:
        """Count anew."""
        self._recomputing = 0.0
        self.log.begin_step()
        self.allocator.reset_peak()

    def create(self, nbytes: Bytes) -> Sheet:
        """A storage that the program makes. Raises DeviceFullError."""
        return Sheet(nbytes, self.allocator)

    def let_go(self, storage: Storage) -> None:
        """The program does not reach it any more."""
        storage.handle.reachable = False
        if storage.handle.read_until > self._time and not storage.handle.kept:
            self._leaving[storage] = None
        else:
            self._die(storage)

    def _die(self, storage: Storage) -> None:
        sheet = storage.handle
        if sheet is not None and not sheet.reachable and not sheet.kept and sheet.read_until <= self._time:
            self.died(storage)

    def _wait(self, until: Seconds) -> None:
        """Compute waits. The controller sees it where it waits on purpose; elsewhere the log tells."""
        if until > self._time:
            self.log.waits.append(Stall(self._time, until, None, 0))
            self._time = until

    # ------------------------------------------------------------------ what the controller asks for

    def run(self, recipe: Recipe, bindings: Sequence[Storage]) -> Sequence[Sheet]:
        """The op takes its time again; what it creates takes memory."""
        for storage in bindings:
            if storage.handle is None or storage.handle.token is None:
                raise EngineError(f"{recipe!r} would run again on {storage!r}, whose bytes are not there.")
        sheets = [self.create(value.storage.nbytes) for value in recipe.creates]
        self.work(recipe.seconds)
        self._recomputing += recipe.seconds
        if self._recomputing > self.most_recomputing * (1 + ROUNDING):
            spent = format_seconds(self._recomputing)
            raise Thrashing(f"{spent} went into recomputing, and {format_seconds(self.most_recomputing)} may")
        return sheets

    def page_out(self, storage: Storage) -> PaperHome:
        home = self.start_out(storage)
        self.leave(storage, home)
        return home

    def leave(self, storage: Storage, home: PaperHome) -> None:
        """Free the bytes as soon as they are in the home, and nothing reads them."""
        self._wait(max(home.ready, storage.handle.read_until))
        storage.handle.leave()

    def page_in(self, storage: Storage, home: PaperHome) -> bool:
        return self.finish_in(storage, self.start_in(storage, home))

    def start_out(self, storage: Storage) -> PaperHome:
        """Begin a copy out; the storage lives until it is done."""
        home = PaperHome(storage.nbytes, storage.number, 0.0)
        home.ready = self.lanes.copy(Lane.COPY_OUT, home, self._time)
        storage.handle.read_until = max(storage.handle.read_until, home.ready)
        return home

    def start_in(self, storage: Storage, home: PaperHome) -> PaperArrival:
        """Begin a copy in, into fresh memory, once the copy out has ended."""
        token = self.allocator.allocate(storage.nbytes)
        return PaperArrival(token, self.lanes.copy(Lane.COPY_IN, home, max(self._time, home.ready)))

    def arrived(self, arrival: PaperArrival) -> bool:
        return arrival.ready <= self._time

    def finish_in(self, storage: Storage, arrival: PaperArrival) -> bool:
        """Wait for the copy. Nobody wrote to the home meanwhile."""
        self._wait(arrival.ready)
        storage.handle.token = arrival.token
        return True

    def abandon(self, arrival: PaperArrival) -> None:
        """Its memory is free when the copy is done, for which compute waits."""
        self._wait(arrival.ready)
        self.allocator.free(arrival.token)

    def reap(self) -> None:
        """Who lived on for a copy that is done dies."""
        for storage in list(self._leaving):
            if storage.handle is None or storage.handle.read_until <= self._time:
                del self._leaving[storage]
                self._die(storage)

    def release(self, storage: Storage) -> None:
        self._wait(storage.handle.read_until)
        storage.handle.leave()

    def transfer(self, source: Storage, target: Storage) -> None:
        target.handle.token, source.handle.token = source.handle.token, None

    def hold(self, storage: Storage) -> None:
        if storage.handle is not None:
            storage.handle.kept = True

    def unhold(self, storage: Storage) -> None:
        """It dies here if the program does not reach it."""
        if storage.handle is not None:
            storage.handle.kept = False
            if not storage.handle.reachable and storage.handle.read_until > self._time:
                self._leaving[storage] = None
            else:
                self._die(storage)

    def discard(self, home: PaperHome) -> None:
        """Nothing is kept there; a copy under way goes on."""

    def escaped(self, storage: Storage) -> bool:
        """Nobody has an address on paper."""
        return False

    def measure_link(self) -> None:
        """Before the first step, which nobody times."""
        if not self.lanes.bytes_moved:
            for lane in (Lane.COPY_OUT, Lane.COPY_IN):
                self.lanes.took(PROBES * PROBE, PROBES * self.lanes.seconds(lane, PROBE))

    def transfer_seconds(self, nbytes: Bytes) -> Seconds:
        return self.lanes.expected(nbytes)

    def seconds_of(self, recipe: Recipe) -> Seconds:
        return recipe.seconds

    def settle(self) -> None:
        """Nothing lies about."""
