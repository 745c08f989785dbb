"""A device for the CUDA machine that is made of CPU memory, and whose copies happen as late as they may.

A copy is made when something waits for its event, or when that has been asked for often enough whether it is done.
What the machine forgot to wait for is then found out: fresh memory holds a pattern until the copy into it is made, and
a copy whose source or target is gone by the time it is made fails.

Ops have run when they return, but the compute stream may tell of it late: it has passed a moment when that has been
asked for often enough (`behind`), or was waited for. A block that is used again before that fails.

It has streams as far as their order goes: of each is written down after how much of the others it comes.

By the device's clock a copy takes a millisecond, ops take what `compute` says, and nothing begins before the host has
told the device.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import pytest
import torch
from torch import nn

from spillway.engines.tensors.cuda_backend import cuda_engine
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.internals.private import CAN_SWAP
from spillway.methods import LRU, AbstractPolicy
from spillway.session.tensor_session import TensorSession
from spillway.tiers.cuda_streams import Event, LaneTimes, Timed
from spillway.tiers.host import Block
from tests.cpu.bits import fill
from tests.cpu.pressure import PLENTY

PATTERN = 0xA7
"""What fresh memory holds."""

RELEASED = 0x5C
"""What host memory holds that was given back."""

COPYING = 1e-3
"""Seconds of a copy."""


class OutOfOrderError(AssertionError):
    """The machine let the device do something in the wrong order."""


@final
class Reached:
    """The compute stream has come so far."""

    def __init__(self, streams: LateStreams, number: int, missed: frozenset[str] = frozenset()) -> None:
        self.streams = streams
        self.number = number
        self.missed = missed
        """Streams whose kernels may still be running all the same."""
        self.at = streams.now()
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        if self.asked > self.streams.behind:
            self.synchronize()
        return self.number <= self.streams.passed

    def synchronize(self) -> None:
        self.streams.passed = max(self.streams.passed, self.number)


def nothing() -> None:
    """What is left to do of a copy that was made."""


@final
class LateCopy:
    """A copy that is an event too: it is made when somebody waits for it."""

    def __init__(self, streams: LateStreams, lane: list[LateCopy], make: Callable[[], None], after: Sequence[Event]):
        self.lane = lane
        self.make = make
        self.after = after
        self.asked = 0
        self.done = False
        self.streams = streams
        self.host_range: tuple[int, int] = (0, 0)
        self.ended = 0.0
        lane.append(self)

    def query(self) -> bool:
        self.asked += 1
        if not self.done and self.asked > self.streams.lag:
            self.synchronize()
        return self.done

    def synchronize(self) -> None:
        """Everything that stands before it in its lane comes first."""
        while not self.done:
            first = self.lane.pop(0)
            for event in first.after:
                event.synchronize()
            first.done = True
            first.make()
            first.make, first.after = nothing, ()  # it holds no memory any more


@final
class HostMemory:
    """Ordinary memory that passes for pinned memory."""

    def __init__(self, streams: LateStreams, nbytes: int, *, readable: bool) -> None:
        self._memory = np.zeros(nbytes + 512, np.uint8)
        self.address = -(-self._memory.ctypes.data // 512) * 512
        self.device_address = self.address if readable else 0
        self.nbytes = nbytes
        self._streams = streams
        streams.pinned += nbytes

    def release(self) -> None:
        self._memory[:] = RELEASED
        self._streams.released.append(self._memory)  # whoever still points at it reads the pattern
        self._streams.pinned -= self.nbytes


@final
class LateStreams:
    """See the module."""

    def __init__(self, *, lag: int = 3, behind: int = 0, readable: bool = True, pins: int = 1 << 40) -> None:
        self.device = torch.device("cpu")
        self.generator = torch.default_generator
        self.total = 1 << 40
        self.lag = lag
        self.behind = behind
        self.given = self.passed = 0
        """Moments of the compute stream: those that were asked for, and how many of them it says it has passed."""
        self.busy_until = 0.0
        self.times = LaneTimes()
        self.readable = readable
        self.pins_left = pins
        self.pinned = 0
        self.released: list[Any] = []
        self.out: list[LateCopy] = []
        self.back: list[LateCopy] = []
        self.copies_out = self.copies_in = self.waits = self.caches_emptied = 0
        self.account: Callable[[], int] = lambda: 0
        self.beside = 0
        """Bytes that are handed out and in nobody's account."""
        self.inside = 0
        """Bytes that the next ops need for themselves."""
        self.is_capturing = False
        self.full = 0
        """So many of the next asked for are refused."""
        self._peak = 0
        self.stream = "the first"
        """The one that is current."""
        self._compute = self.stream
        self._given: Counter[str] = Counter()  # how much each stream was given
        self._behind: defaultdict[str, Counter[str]] = defaultdict(Counter)  # after how much of others each comes

    def fresh(self, nbytes: int) -> torch.UntypedStorage:
        self._order()
        if self.full:
            self.full -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has nothing left.")
        storage = torch.UntypedStorage(nbytes)
        fill(storage, PATTERN)
        return storage

    def pin(self, nbytes: int) -> HostMemory | None:
        if nbytes > self.pins_left:
            return None
        self.pins_left -= nbytes
        return HostMemory(self, nbytes, readable=self.readable)

    def now(self) -> float:
        """When the compute stream is done with what it was given."""
        return max(self.busy_until, time.perf_counter())

    def compute(self, seconds: float) -> None:
        """Give it ops that take so long."""
        self.busy_until = self.now() + seconds

    def reached(self) -> Reached:
        self._order()
        self.given += 1
        return Reached(self, self.given, self.missed())

    def follow(self) -> None:
        self._order()
        self.kernel()

    def _order(self) -> None:
        """As `CudaStreams._stream`."""
        before, self._compute = self._compute, self.stream
        if before != self.stream:
            self._behind[self.stream] |= self._behind[before] | Counter({before: self._given[before]})

    def kernel(self) -> None:
        """The current stream is given something."""
        self._given[self.stream] += 1

    def missed(self) -> frozenset[str]:
        """Streams after which the current one does not come, as things are now."""
        behind = self._behind[self.stream]
        return frozenset(name for name in self._given if name != self.stream and behind[name] < self._given[name])

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Another stream is current, and something runs there that nobody sees."""
        before, self.stream = self.stream, stream
        try:
            self.kernel()
            yield
        finally:
            self.stream = before

    def moment(self) -> Reached:
        return Reached(self, self.given)

    def when(self, moment: Event) -> float:
        assert isinstance(moment, Reached)
        return moment.at

    def compute_waits(self, event: Event) -> None:
        self.follow()
        self.waits += 1
        began = self.now()
        self.busy_until = max(began, event.ended if isinstance(event, LateCopy) else began)
        self.times.stall.append(Timed(event, began, self.busy_until))
        event.synchronize()

    def copy_out(self, source: torch.UntypedStorage, target: Block, after: Sequence[Event]) -> LateCopy:
        self._check(after)
        self._check_free(target, after)
        self.copies_out += 1
        at = _Place(source)
        copy = LateCopy(self, self.out, lambda: _copy(target.address, at.address_now(), target.nbytes), after)
        copy.host_range = (target.address, target.address + target.nbytes)
        return self._timed(copy, self.times.out, after)

    def copy_in(self, source: Block, target: torch.UntypedStorage, after: Sequence[Event]) -> LateCopy:
        self._check(after)
        self.copies_in += 1
        at = _Place(target)
        for copy in self.out:
            if _overlap(copy, source) and copy not in after:
                raise OutOfOrderError("A copy in begins before the copy out that fills its block is done.")
        copy = LateCopy(self, self.back, lambda: _copy(at.address_now(), source.address, source.nbytes), after)
        copy.host_range = (source.address, source.address + source.nbytes)
        return self._timed(copy, self.times.back, after)

    def _timed(self, copy: LateCopy, lane: list[Timed], after: Sequence[Event]) -> LateCopy:
        copies = [event.ended for event in after if isinstance(event, LateCopy)]
        began = max([self.now(), *copies, *(before.ended for before in lane[-1:])])
        copy.ended = began + COPYING
        lane.append(Timed(copy, began, copy.ended))
        return copy

    def _check(self, after: Sequence[Event]) -> None:
        if not any(isinstance(event, Reached) and event.number == self.given for event in after):
            raise OutOfOrderError("A copy does not wait for what the compute stream was given before it.")
        if any(event.missed for event in after if isinstance(event, Reached)):
            raise OutOfOrderError("A copy does not wait for what another stream was given before it.")

    def _check_free(self, target: Block, after: Sequence[Event]) -> None:
        if any(_overlap(copy, target) and copy not in after for copy in (*self.back, *self.out)):
            raise OutOfOrderError("A copy out fills a block that another copy has not done with.")

    def synchronize(self) -> None:
        given = Counter(self._given)
        self._behind = defaultdict(lambda: Counter(given))
        for lane in (self.out, self.back):
            while lane:
                lane[-1].synchronize()
        self.passed = self.given

    def lane_times(self) -> LaneTimes:
        if self.out or self.back:
            raise OutOfOrderError("Times of copies are asked for before they are done.")
        times, self.times = self.times, LaneTimes()
        return times

    def forget_times(self) -> None:
        self.times = LaneTimes()

    def allocated(self) -> int:
        self._peak = max(self._peak, self.account() + self.beside + self.inside)
        return self.account() + self.beside

    def peak(self) -> int:
        self.allocated()
        return self._peak

    def reset_peak(self) -> None:
        self._peak = 0

    def empty_cache(self) -> None:
        self.caches_emptied += 1

    def capturing(self) -> bool:
        return self.is_capturing


@final
class _Place:
    """Where a storage's bytes are when a copy is begun, and whether they are still there when it is made."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = weakref.ref(storage)
        self._address = storage.data_ptr()

    def address_now(self) -> int:
        storage = self._storage()
        if storage is None or storage.data_ptr() != self._address:
            raise OutOfOrderError("Memory was freed while a copy needed it.")
        return self._address


def _overlap(copy: LateCopy, block: Block) -> bool:
    begin, end = copy.host_range
    return begin < block.address + block.nbytes and block.address < end


def _copy(target: int, source: int, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)


def late_engine(
    policy: AbstractPolicy, allowed: int, streams: LateStreams, host_budget: int = 96 << 20, *,
    exchanges: bool = CAN_SWAP, costs: bool = False,
) -> TensorEngine:  # fmt: skip
    """The engine of such a session."""
    if exchanges and not CAN_SWAP:
        pytest.skip("this torch cannot exchange bytes under a storage")
    engine = cuda_engine(policy, allowed, streams, host_budget, exchanges=exchanges)
    streams.account = lambda: engine.controller.budget.resident
    _watch_blocks(engine.machine, streams)
    backend: Any = engine.backend
    if not costs:
        backend.clock.begin_step = lambda signature, wanted: None
    return engine


def _watch_blocks(machine: Any, streams: LateStreams) -> None:
    """A block is free when the compute stream has passed the moment at which it was given up."""
    discard, free = machine.discard, machine.pool.free
    given_up: dict[int, int] = {}

    def discarding(home: Any) -> None:
        given_up[id(home.block)] = streams.given + 1
        discard(home)

    def freeing(block: Block) -> None:
        if streams.passed < given_up.pop(id(block), 0):
            raise OutOfOrderError("A block is used again while the compute stream may still read it.")
        free(block)

    machine.discard, machine.pool.free = discarding, freeing


def late_session(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = (), *, budget: int, method: AbstractPolicy,
    host_budget: int = 96 << 20, exchanges: bool = CAN_SWAP, streams: LateStreams | None = None,
    costs: bool = False, timeline: bool = False,
) -> TensorSession:  # fmt: skip
    """A session whose tensors lie, as far as its engine can tell, on a CUDA device.

    With `costs` its first step measures them, which waits for the device, so that nothing in it is late.
    """
    streams = streams if streams is not None else LateStreams()

    def opens(allowed: int) -> TensorEngine:
        return late_engine(method, allowed, streams, host_budget, exchanges=exchanges, costs=costs)

    return TensorSession(
        [model], optimizers, opens(budget), None, None, opens=opens, keep_timeline=timeline, return_freed=True
    )


@contextmanager
def late_step(exchanges: bool) -> Iterator[TensorSession]:
    """A session in a step, whose copies are made when something waits for them and not before."""
    late = LateStreams(lag=1 << 30)
    session = late_session(nn.Linear(2, 2), budget=PLENTY, method=LRU(), exchanges=exchanges, streams=late)
    with session, session.step():
        late.copies_out = late.copies_in = 0  # those by which the link is measured
        yield session
    assert late.pinned == 0


def driver_of(memory: TensorSession) -> Any:
    backend: Any = memory._engine.backend
    return backend.streams
