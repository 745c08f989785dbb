"""What the CUDA machine asks of a device, and nothing more: memory, copies on two lanes, events, counters.

The tests have another one on the CPU, whose copies happen late.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, cast, final

import torch

from spillway.internals.dispatch_key import unwatched
from spillway.internals.private import bytes_over, fresh_storage, raw_stream
from spillway.tiers.host import Block
from spillway.units import Bytes, Seconds, format_bytes

_PORTABLE_AND_MAPPED: Final = 3
"""Flags of `cudaHostRegister`: for every context, and readable by the device."""


_cuda: Final[Any] = torch.cuda
"""Its functions for devices have no annotations."""


class Event(Protocol):
    """A moment on a lane or on the compute stream."""

    def query(self) -> bool:
        """Whether the device has come so far."""

    def synchronize(self) -> None:
        """Let the host wait for it."""


class Timed(NamedTuple):
    """What a lane or the compute stream did, from when to when by `time.perf_counter`."""

    event: Event
    """The copy, by its end; of a wait, what was waited for."""
    began: Seconds
    ended: Seconds

    @property
    def seconds(self) -> Seconds:
        return self.ended - self.began


@final
@dataclass(slots=True)
class LaneTimes:
    """What the device was busy with since it was asked last, each in the order in which it was told to."""

    out: list[Timed] = field(default_factory=list)
    back: list[Timed] = field(default_factory=list)
    stall: list[Timed] = field(default_factory=list)
    """The compute stream waiting for either."""


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Ops of our own: no mode sees them, autograd and autocast neither."""
    with unwatched(), torch._C._AutoDispatchBelowADInplaceOrView():
        yield


def bytes_at(address: int, nbytes: Bytes) -> torch.Tensor:
    """Host memory as a tensor, for as long as somebody else keeps the memory."""
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


@final
class RegisteredMemory:
    """Host memory of our own that CUDA was told of: `cudaHostRegister` pins any size, and unpins it when asked."""

    def __init__(self, memory: mmap.mmap, address: int, device_address: int, device: torch.device) -> None:
        self._memory = memory
        self._device = device
        self._process = os.getpid()
        self.address = address
        self.device_address = device_address

    def release(self) -> None:
        """Unpin it and give it back. The host waits for the device: a copy or a kernel may still be reading it.

        Memory that is not unpinned stays mapped, so that nobody gets its addresses.
        """
        _never_unmapped.append(self._memory)  # in a forked child these addresses may be anybody's
        if os.getpid() == self._process and self._unpinned():
            _never_unmapped.remove(self._memory)
            self._memory.close()

    def _unpinned(self) -> bool:
        try:
            with _cuda.device(self._device):
                _cuda.synchronize(self._device)
                failed = int(_cuda.cudart().cudaHostUnregister(self.address))
        except RuntimeError as error:  # of the device, which is of no use any more
            told = str(error).partition("\n")[0]
        else:
            if not failed:
                return True
            told = f"error {failed}"
            _forget_error(self._device)
        what = f"CUDA did not unpin {format_bytes(len(self._memory))} of host memory, which stay pinned ({told})."
        with contextlib.suppress(RuntimeWarning):  # where warnings are errors the other slabs go back all the same
            warnings.warn(what, RuntimeWarning, stacklevel=2)
        return False


_never_unmapped: Final[list[mmap.mmap]] = []


_Pair = tuple[torch.cuda.Event, torch.cuda.Event]
"""Events around something."""


@final
class CudaStreams:
    """One device. Unless it says otherwise, nothing here lets the host wait."""

    def __init__(self, device: torch.device) -> None:
        _cuda.init()
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._out = _cuda.Stream(self.device)
        self._in = _cuda.Stream(self.device)
        self._compute: torch.cuda.Stream | None = None
        self._raw: int | None = None  # the same as a number
        self._times: dict[str, list[tuple[Event, _Pair]]] = {"out": [], "in": [], "stall": []}
        self._last: tuple[torch.cuda.Event, Seconds] | None = None  # an event, and what time it was then
        self.generator = torch.cuda.default_generators[self.device.index]
        self.total = int(torch.cuda.get_device_properties(self.device).total_memory)

    # ------------------------------------------------------------------ memory

    def fresh(self, nbytes: Bytes) -> torch.UntypedStorage:
        """Uninitialised memory, allocated on the compute stream, whose order protects it when it is freed. Raises
        `torch.OutOfMemoryError`."""
        self._stream()
        with torch.cuda.device(self.device):
            return fresh_storage(nbytes, self.device)

    def pin(self, nbytes: Bytes) -> RegisteredMemory | None:
        """Pages of our own, pinned; None if the system gives none. A fork does not inherit them: a copy on write would
        part host and device."""
        try:
            memory = mmap.mmap(-1, nbytes)
        except (OSError, ValueError):
            return None
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_DONTFORK)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        with torch.cuda.device(self.device):
            failed = int(_cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE_AND_MAPPED))
            if failed:
                _forget_error(self.device)
                memory.close()
                return None
        return RegisteredMemory(memory, address, _address_on_device(address), self.device)

    # ------------------------------------------------------------------ lanes

    def _stream(self) -> torch.cuda.Stream:
        """The compute stream: the current one. If that is another than before, it follows on what was."""
        stream = torch.cuda.current_stream(self.device)
        if self._compute is not None and stream != self._compute:
            stream.wait_stream(self._compute)
        self._compute, self._raw = stream, stream.cuda_stream
        return stream

    def follow(self) -> None:
        """What comes next is for the stream that is current now, which is the compute stream from here on. It begins
        after what the one before was given."""
        if raw_stream(self.device.index) != self._raw:
            self._stream()

    def reached(self) -> Event:
        """The moment at which the compute stream has done all that it was given so far."""
        event: torch.cuda.Event = self._stream().record_event()
        return event

    def moment(self) -> torch.cuda.Event:
        """The same of the current stream, and `when` knows its time. To look at a clock puts no stream behind
        another."""
        event: torch.cuda.Event = _cuda.Event(enable_timing=True)
        event.record(_cuda.current_stream(self.device))
        return event

    def when(self, moment: Event) -> Seconds:
        """The time of a moment by `time.perf_counter`, by its distance from the event of which both times are known. It
        has passed, and `lane_times` was asked for since."""
        assert self._last is not None, "lane_times() comes first"
        last, now = self._last
        return now - float(cast(torch.cuda.Event, moment).elapsed_time(last)) / 1e3

    def compute_waits(self, event: Event) -> None:
        """What the compute stream is given from here on begins after `event`. How long it waits is measured by an event
        on either side."""
        stream, (begin, end) = self._stream(), _pair()
        begin.record(stream)
        stream.wait_event(cast(torch.cuda.Event, event))
        end.record(stream)
        self._times["stall"].append((event, (begin, end)))

    def copy_out(self, source: torch.UntypedStorage, target: Block, after: Sequence[Event]) -> Event:
        """Copy device memory to a block, on the lane for that, after some events; when it is done."""
        with unwatched():
            host, device = bytes_at(target.address, target.nbytes), bytes_over(source)
            return self._copy(self._out, "out", host, device, after)

    def copy_in(self, source: Block, target: torch.UntypedStorage, after: Sequence[Event]) -> Event:
        """Copy a block to device memory, on the other lane."""
        with unwatched():
            host, device = bytes_at(source.address, source.nbytes), bytes_over(target)
            return self._copy(self._in, "in", device, host, after)

    def _copy(
        self, lane: torch.cuda.Stream, name: str, target: torch.Tensor, source: torch.Tensor, after: Sequence[Event]
    ) -> Event:
        begin, end = _pair()
        for event in after:
            lane.wait_event(cast(torch.cuda.Event, event))
        with torch.cuda.stream(lane):
            begin.record(lane)
            target.copy_(source, non_blocking=True)
            end.record(lane)
        self._times[name].append((end, (begin, end)))
        return end

    def synchronize(self) -> None:
        """The host waits until the device has done everything."""
        torch.cuda.synchronize(self.device)

    def lane_times(self) -> LaneTimes:
        """What was copied and waited for since the last call, by the events around it. Everything has to be done.

        One more event tells what time it is on the device, which is idle now: as good as both clocks are. When a step
        begins the device may be busy with what was before.
        """
        last = self.moment()
        last.synchronize()
        self._last = last, time.perf_counter()
        times, self._times = self._times, {name: [] for name in self._times}
        return LaneTimes(*([self._timed(*one) for one in times[name]] for name in ("out", "in", "stall")))

    def _timed(self, event: Event, pair: _Pair) -> Timed:
        began = self.when(pair[0])
        return Timed(event, began, began + float(pair[0].elapsed_time(pair[1])) / 1e3)

    def forget_times(self) -> None:
        """Nobody will ask for those of the copies so far."""
        for pairs in self._times.values():
            pairs.clear()

    # ------------------------------------------------------------------ counters

    def allocated(self) -> Bytes:
        """What the caching allocator has handed out now: `torch.cuda.memory_allocated` without its long dictionary."""
        return int(self._counters()["current"])

    def peak(self) -> Bytes:
        """The most that it had handed out since `reset_peak`."""
        return int(self._counters()["peak"])

    def _counters(self) -> dict[str, int]:
        counters: dict[str, int] = torch._C._cuda_memoryStats(self.device.index)["allocated_bytes"]["all"]
        return counters

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def empty_cache(self) -> None:
        """Give what the caching allocator keeps back to the device. The host waits: what is cached may still be in use
        by what it was given."""
        self.synchronize()
        torch.cuda.empty_cache()

    def capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())


def _pair() -> _Pair:
    return _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)


def _forget_error(device: torch.device) -> None:
    """A refused call leaves its error behind, where the next kernel would be blamed for it."""
    with contextlib.suppress(RuntimeError), unwatched():
        torch.zeros(1, device=device)


def _address_on_device(address: int) -> int:
    """Where the device finds registered host memory; 0 if it does not say."""
    found = ctypes.c_uint64(0)
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuMemHostGetDevicePointer_v2
    except (OSError, AttributeError):
        return 0
    return int(found.value) if ask(ctypes.byref(found), ctypes.c_void_p(address), 0) == 0 else 0
