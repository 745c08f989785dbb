"""Every allocation of a step, with its time: exact peaks between any two moments.

Where CPU tensors are born in the arena, and on CUDA, the allocator itself counts the peak between two moments.
Elsewhere torch's profiler hears of every allocation. It is asked for these alone, which costs about 4 us each when the
step is over.

NOTE: what counts on the CPU. What was there at the beginning and is known by name, and every allocation since. That
something else goes, such as what the user still held of an earlier step, makes no room: it never counted. The
profiler does not tell of what was allocated while it was off and is freed while it is on, so those who know of such
storages say when they are gone (`AbstractTrace.died`). Nor does it hear of what another thread frees: that thread says
so (`AbstractTrace.freed`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple, cast, final

import torch
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _ExperimentalConfig,
    _ExtraFields_Allocation,
)  # fmt: skip
from torch.autograd.profiler import KinetoStepTracker
from torch.autograd.profiler import profile as autograd_profile

from spillway.internals.locks import renew_in_children
from spillway.native import arena
from spillway.units import Bytes

_profiler: Final[Any] = torch._C._autograd
_python_profiler: Final[Any] = torch.autograd.profiler
_LOG_LEVEL: Final = "KINETO_LOG_LEVEL"
_NOBODYS: Final = RecordScope.STATIC_RUNTIME_MODEL
"""No eager op and no `record_function` has this scope. One that is open while the profiler ends, as `Optimizer.step` is
when the optimizer's hooks are called, would write its end into memory that the profiler has given up."""
_prepare_trace: Final[Any] = cast(Any, autograd_profile)._prepare_trace
_SILENT: Final = "99"
_NEVER: Final = 1 << 63
_PATIENCE: Final = 2.0
"""Seconds that another thread's profiler waits for a trace to end: it may be what the tracing thread waits for."""
_turns = threading.RLock()
renew_in_children(sys.modules[__name__], "_turns")
_tracing: Final[weakref.WeakSet[AllocationTrace]] = weakref.WeakSet()
"""Who has the profiler: there is one in a process, whatever its threads are told."""


class Window(NamedTuple):
    """From one mark to the next; bytes above what was there at the first mark."""

    level: Bytes
    """At its beginning."""
    peak: Bytes
    """At most, the beginning included."""


class Held(NamedTuple):
    """What was there at the highest peak, of what was allocated since the first mark."""

    at: int
    """When that was, by `time.time_ns`."""
    storages: Mapping[int, tuple[int, Bytes]]
    """By address, when it was allocated and its bytes."""


class AbstractTrace(ABC):
    """Peaks of one step, between moments that are named while it runs."""

    @abstractmethod
    def mark(self) -> None:
        """A moment; they are numbered from 0."""

    @abstractmethod
    def died(self, address: int, nbytes: Bytes) -> None:
        """A storage that was known at the beginning is gone."""

    @abstractmethod
    def freed(self, at: int, address: int, nbytes: Bytes) -> None:
        """Another thread freed a storage, at that time by `time.time_ns`. Called by that thread."""

    def level(self) -> Bytes | None:
        """What is taken now, above the first mark, where that is told at any moment, by whatever thread; else None."""
        return None

    def guard(self, most: Bytes, lender: object) -> bool:
        """Have what would be more than so many bytes above the first mark lie elsewhere, uncounted; whether that is
        done from here on."""
        return False

    @abstractmethod
    def so_far(self) -> list[Window]:
        """The same as `stop`, and the trace goes on."""

    @abstractmethod
    def stop(self) -> list[Window]:
        """From each mark to the next one, from the last to now; empty if somebody else ended the trace. Nothing is
        traced any more; calling it again gives the same."""


@final
class AllocationTrace(AbstractTrace):
    """On the CPU, from torch's profiler. Only where `AllocationTrace.possible()`."""

    def __init__(self, known: Mapping[int, Bytes]) -> None:
        self._marks: list[int] = []
        self._known = dict(known)
        self._memory: list[Event] = []
        self._stopped = False
        self._lost = False
        """Whether something was missed, so that nothing is known."""
        self._thread = threading.get_ident()
        self._wanted, self._over = threading.Event(), threading.Event()
        try:
            with _turns:
                self._lost = bool(_tracing)
                if not self._lost:
                    _tracing.add(self)
            if not self._lost:
                self._begin()
        except BaseException:  # Ctrl-C
            self._end()
            _tracing.discard(self)
            raise

    @staticmethod
    def possible() -> bool:
        """Whether nobody else has the profiler, or is about to have it: a schedule that warms up, or waits, loses its
        own if another one begins."""
        others = _python_profiler._is_profiler_enabled or "ProfilerStep" in KinetoStepTracker._step_dict
        return not (_profiler._profiler_enabled() or others or _tracing)

    def mark(self) -> None:
        # Within a backward it would not end.
        if self._wanted.is_set() and not self._lost and torch._C._current_graph_task_id() < 0:
            self._lose()
        self._marks.append(time.time_ns())  # the clock of the profiler's events

    def died(self, address: int, nbytes: Bytes) -> None:
        self._memory.append(Event(time.time_ns(), -nbytes, address, told=True))

    def freed(self, at: int, address: int, nbytes: Bytes) -> None:
        self._memory.append(Event(at, -nbytes, address))

    def so_far(self) -> list[Window]:
        self._end()
        if self._lost:
            return []
        self._begin()
        return _windows(self._memory, self._marks, self._known)

    def stop(self) -> list[Window]:
        if not self._stopped:
            self._end()
            self._stopped = True
            _tracing.discard(self)
            self._over.set()
        return [] if self._lost else _windows(self._memory, self._marks, self._known)

    def at_peak(self) -> Held | None:
        """After `stop`; None where nobody knows."""
        return None if self._lost or not self._marks else _at_peak(self._memory, self._marks[0], self._known)

    def allocated(self, address: int, before: int) -> int | None:
        """After `stop`: when the storage was allocated that lay at an address at some time; None before the trace."""
        found = [event.at for event in self._memory if event.address == address and event.nbytes > 0]
        return max((at for at in found if at <= before), default=None)

    def _begin(self) -> None:
        config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
        activities = {ProfilerActivity.CPU}
        with _silence():
            _profiler._prepare_profiler(config, activities)
            _profiler._enable_profiler(config, activities, {_NOBODYS})
        _give_way(self._lose)

    def _lose(self) -> None:
        """Somebody begins to profile. Only the thread that traces can end that: another one waits for its next mark."""
        if threading.get_ident() == self._thread:
            self._end()
            self._lost = True
            self._over.set()
        else:
            self._wanted.set()
            self._lost |= not self._over.wait(_PATIENCE)

    def _end(self) -> None:
        if self._lost:
            return
        _give_way(None)
        if not _profiler._profiler_enabled():
            self._lost = True  # somebody has ended it for us
            return
        with _silence():
            result = _profiler._disable_profiler()
        heard, make = self._memory.append, tuple.__new__  # thousands a step
        for event in result.experimental_event_tree():
            fields = event.extra_fields
            if type(fields) is _ExtraFields_Allocation:
                heard(make(Event, (event.start_time_ns, fields.alloc_size, fields.ptr, False)))


class Event(NamedTuple):
    """An allocation, or a release with a minus."""

    at: int
    nbytes: Bytes
    address: int
    told: bool = False
    """Whether somebody who knew the storage says so, and not the allocator."""


def _levels(
    memory: list[Event], begin: int, known: Mapping[int, Bytes]
) -> Iterator[tuple[int, Bytes, Bytes, Mapping[int, tuple[int, Bytes]]]]:
    """Before every event from a moment on, and after the last: when the event is and its bytes, what is held until
    then, and of that what was allocated since."""
    ours, before, held = dict[int, tuple[int, Bytes]](), dict(known), 0
    for at, nbytes, address, told in sorted(memory, key=lambda event: event.at):
        if at < begin:
            continue
        yield at, nbytes, held, ours
        if nbytes > 0:
            # What is there now was not before: the release of what had this address was not heard of.
            held += nbytes - before.pop(address, 0) - ours.get(address, (0, 0))[1]
            ours[address] = at, nbytes
        elif told or address not in ours:
            held -= before.pop(address, 0)
        else:
            held -= ours.pop(address)[1]
    yield _NEVER, 0, held, ours


def _at_peak(memory: list[Event], begin: int, known: Mapping[int, Bytes]) -> Held:
    best, peak, rising, latest, last = Held(begin, {}), 0, False, begin, begin
    for at, nbytes, held, ours in _levels(memory, begin, known):
        if held > peak:
            peak, rising, latest = held, True, last
        if rising and nbytes <= 0:  # copied when it ends, and not at every byte that it is higher
            best, rising = Held(latest, dict(ours)), False
        last = at
    return best


def _windows(memory: list[Event], marks: list[int], known: Mapping[int, Bytes]) -> list[Window]:
    found: list[Window] = []
    level = peak = 0
    for at, _, held, _ in _levels(memory, marks[0], known) if marks else ():
        peak = max(peak, held)
        while len(found) < len(marks) and marks[len(found)] <= at:
            if found:
                found[-1] = Window(level, peak)
            found.append(Window(held, held))
            level = peak = held
    return [*found[:-1], Window(level, peak)] if found else []


def _give_way(lose: Callable[[], None] | None) -> None:
    """Two profilers at a time end in a segmentation fault: call `lose` before another one is prepared. None: we have no
    profiler any more, and everything is as torch has it."""
    if lose is None:
        cast(Any, autograd_profile)._prepare_trace = _prepare_trace
        return

    def prepare(profile: Any, *args: Any, **kwargs: Any) -> Any:
        lose()
        return _prepare_trace(profile, *args, **kwargs)

    cast(Any, autograd_profile)._prepare_trace = prepare


@contextmanager
def _silence() -> Iterator[None]:
    """The library below the profiler says when it starts and stops, on standard error."""
    with ExitStack() as stack:
        if not os.environ.get(_LOG_LEVEL):
            stack.callback(os.environ.pop, _LOG_LEVEL, None)
            os.environ[_LOG_LEVEL] = _SILENT
        yield


class AbstractCounter(AbstractTrace):
    """Where the allocator counts the peak between two moments itself."""

    def __init__(self) -> None:
        self._marked: list[Window] = []
        self._stopped = False

    @abstractmethod
    def since(self) -> Window:
        """What is taken now above the beginning, and the peak since this was last asked."""

    def mark(self) -> None:
        level = self._look()
        self._marked.append(Window(level, level))

    def _look(self) -> Bytes:
        level, peak = self.since()
        if self._marked:
            begin, highest = self._marked[-1]
            self._marked[-1] = Window(begin, max(highest, peak))
        return level

    def died(self, address: int, nbytes: Bytes) -> None:
        """The allocator knows."""

    def freed(self, at: int, address: int, nbytes: Bytes) -> None:
        """The allocator knows."""

    def so_far(self) -> list[Window]:
        self._look()
        return list(self._marked)

    def stop(self) -> list[Window]:
        if not self._stopped:
            self._look()
            self._stopped = True
        return self._marked


@final
class CudaTrace(AbstractCounter):
    """On CUDA, from the allocator's own peak, which is reset at every look: `torch.cuda.max_memory_allocated` is then
    that since the last seam between two blocks."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._base: Bytes = torch.cuda.memory_allocated(device)

    def since(self) -> Window:
        level, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return Window(level - self._base, peak - self._base)


@final
class ArenaTrace(AbstractCounter):
    """On the CPU where tensors are born in the arena: it counts, in every thread that is in no step of its own."""

    def __init__(self, known: Mapping[int, Bytes]) -> None:
        super().__init__()
        self._counted = arena.Trace(known)

    def since(self) -> Window:
        return Window(*self._counted.since())

    def level(self) -> Bytes:
        return self._look()

    def guard(self, most: Bytes, lender: object) -> bool:
        if isinstance(lender, arena.OpMemory):
            self._counted.guard(most, lender)
        return isinstance(lender, arena.OpMemory)

    def died(self, address: int, nbytes: Bytes) -> None:
        self._counted.forget(address)

    def stop(self) -> list[Window]:
        over = self._stopped
        windows = super().stop()
        if not over:
            self._counted.end()
        return windows


def trace_for(device: torch.device, known: Mapping[int, Bytes]) -> AbstractTrace | None:
    """A trace that has begun; None where none can be had. `known` has the bytes of the storages that are known now, by
    the address of their memory."""
    if device.type == "cuda":
        return CudaTrace(device)
    if arena.serves():
        return ArenaTrace(known)
    return AllocationTrace(known) if AllocationTrace.possible() else None
