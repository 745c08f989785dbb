"""Where a session's tensors are: everything in which the CPU and a CUDA device differ for the engine."""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, final

import torch

from spillway.engines.tensors.bindings import Binding, quickest_call
from spillway.engines.tensors.calls import NO_SETTINGS, Settings
from spillway.engines.tensors.machine import CpuMachine
from spillway.engines.tensors.ops import OpInfo
from spillway.engines.tensors.system import HeldHeap, Reclaimer, ResidentSet
from spillway.engines.tiers.disk import DiskTier
from spillway.engines.tiers.spill_file import SpillIO
from spillway.errors import SpillError
from spillway.memory.budget import UNLIMITED
from spillway.memory.controller import Controller
from spillway.memory.lanes import OnDevice, TransferLog
from spillway.memory.machine import Machine
from spillway.memory.records import Storage
from spillway.units import Bytes, Seconds

if TYPE_CHECKING:
    from spillway.engines.tensors.engine import TensorEngine
    from spillway.engines.tensors.reserve import Workspaces

RSS_SLACK = 0.05
"""Freed memory is returned to the system when the resident set passes the budget by this share."""

RSS_TOLERATED = 0.10
"""A resident set may be above the budget by this share. What it was beyond is reserved in the steps that follow."""

MOST_RESERVED = 0.15
"""The most, as a share of the budget: the program may have grown by what is no business of the session."""

GIVEN_BACK = 16
"""Where a step stayed below what is tolerated, one part in so many of what it stayed below is reserved no longer, at
most of what lies between the mark at which memory is returned and what is tolerated: lower nobody looks."""

LEAST_ADJUSTED: Bytes = 64 << 20
"""In budgets below this nothing is reserved: what Python takes decides the resident set."""


class TensorMachine(Machine, Protocol):
    """A machine over real storages: what the engine asks of it besides what the controller does."""

    @property
    def readable_in_place(self) -> bool:
        """Whether a moved storage can be read where it is."""

    def wait_for_readers(self, storage: Storage) -> None:
        """No copy reads the bytes afterwards: they are about to be put elsewhere."""

    def await_workers(self, arrivals: Sequence[Any]) -> None:
        """Nothing is copied afterwards; what copies have to tell is not heard yet."""


class Creations(Protocol):
    """Hears of what is created."""

    def expect(self, nbytes: Bytes) -> None:
        """So many bytes are about to be created."""

    def created(self, nbytes: Bytes) -> None:
        """So many bytes are new."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the device itself says of a step."""

    peak: Bytes = 0
    """The most that its allocator had handed out; 0 where nobody counts that."""
    lanes: OnDevice | None = None
    """Its copies, stalls and replays; None where the host waits, and its clock is the one to ask."""


class AbstractBackend(ABC):
    """One device, for one engine."""

    devices: frozenset[torch.device]
    """Tensors on these are managed."""
    device: torch.device
    """The usual one of them."""
    machine: TensorMachine
    """Moves the bytes."""
    log: TransferLog
    """Copies that a tier made, and what waited for them; where the device keeps account of that, empty until the step
    ends."""
    creations: Creations
    """Hears of what is created."""
    generator: torch.Generator
    """What ops draw from that are given no generator."""
    settings: Settings
    """Further settings that are inputs of every op."""
    now: Callable[[], Seconds]
    """The clock by which ops are timed."""
    moment: Callable[[], Any]
    """Now, for whoever computes; `when` knows the time of it at the end of the step."""
    when: Callable[[Any], Seconds]
    """The time of a moment by `time.perf_counter`."""
    spill_io: SpillIO | None = None
    """How bytes go to a spill file, where there is one."""
    workspaces: Workspaces | None = None
    """What ops need for themselves, where that counts."""

    @abstractmethod
    def attach(self, engine: TensorEngine) -> None:
        """The engine is ready."""

    @abstractmethod
    def learn_op(self, info: OpInfo) -> None:
        """Put right what an op's schema says, for this device."""

    @abstractmethod
    def calls(self, info: OpInfo) -> tuple[Binding, Binding]:
        """What calls the op: with positional arguments alone, and with keywords."""

    @abstractmethod
    def follow(self) -> None:
        """Code that no mode sees is about to use the device."""

    @abstractmethod
    def begin_step(self, allowed: Bytes, base_rss: Bytes | None, signature: str) -> None:
        """A watched step begins."""

    @abstractmethod
    def finish_ops(self) -> None:
        """Its last op ran; recipes are still there."""

    @abstractmethod
    def end_step(self) -> None:
        """It ended."""

    @abstractmethod
    def measured(self) -> Measured:
        """Of the last step."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the place took."""


CPU: Final = frozenset({torch.device("cpu"), torch.device("cpu", 0)})


@final
class CpuBackend(AbstractBackend):
    """RAM, with a file below it."""

    def __init__(self, spill_directory: str | os.PathLike[str] | None, spill_io: SpillIO = "buffered") -> None:
        self.devices = CPU
        self.device = torch.device("cpu")
        self.tier = DiskTier(spill_directory, spill_io)
        self.log = self.tier.log
        self.spill_io = self.tier.io
        self.resident_set = ResidentSet()
        self._heap = HeldHeap()
        self.creations = self.reclaimer = Reclaimer(self.resident_set)
        self._controller: Controller | None = None
        self._base_rss: Bytes | None = None
        self._learned: Bytes = 0  # what is to be reserved
        self.machine = self._machine = CpuMachine(self.tier, self.reclaimer)
        self.generator = torch.default_generator
        self.settings = NO_SETTINGS
        self.now = self.moment = time.perf_counter
        self.when = float
        self._measures_link = False

    def attach(self, engine: TensorEngine) -> None:
        """Threads that copy are there before memory is short."""
        self._controller = engine.controller
        self._measures_link = engine.foresees
        if engine.foresees:
            with contextlib.suppress(SpillError):  # there may be threads later
                self.tier.start_workers()

    def learn_op(self, info: OpInfo) -> None:
        """Schemas and tables are right."""

    def calls(self, info: OpInfo) -> tuple[Binding, Binding]:
        """The quickest."""
        return quickest_call(info.func)

    def follow(self) -> None:
        """One thing comes after the other anyway."""

    def begin_step(self, allowed: Bytes, base_rss: Bytes | None, signature: str) -> None:
        """What is in slots of earlier steps may have been written by the user. The first step measures the link."""
        if self._measures_link:
            self._measures_link = False
            self.machine.measure_link()
        self.tier.generation += 1
        self._machine.returns_pages = base_rss is not None
        self._base_rss = base_rss if allowed < UNLIMITED else None
        if self._base_rss is not None:
            self.reclaimer.limit = self._base_rss + int(self._reserve() * (1 + RSS_SLACK))
            self.reclaimer.highest = 0

    def finish_ops(self) -> None:
        """Nothing to do."""

    def end_step(self) -> None:
        """From here on the user may write through mapped slots."""
        self.tier.generation += 1
        if self._base_rss is not None:
            self._learn(self._base_rss)

    def _reserve(self) -> Bytes:
        """Let the step do without what is to be reserved. Returns the budget."""
        budget = self._attached().budget
        budget.reserve(self._learned, spendable=True)
        return budget.named

    def _learn(self, base_rss: Bytes) -> None:
        """Beside the account there is what libraries keep, most of it for every size of input that they meet, and what
        lies between blocks in use. From a step from which nothing had to leave, nothing is learned.
        """
        controller = self._attached()
        budget, counters = controller.budget.named, controller.counters
        if budget >= LEAST_ADJUSTED and (counters.moves or counters.drops):
            above = max(self.reclaimer.highest, self.reclaimer.limit) - base_rss - int(budget * (1 + RSS_TOLERATED))
            if above > 0:  # with what was reserved to the end, which is nothing if the step took it
                learned = max(self._learned, controller.budget.reserved + above)
            else:
                learned = max(self._learned + above // GIVEN_BACK, 0)
            self._learned = min(learned, int(budget * MOST_RESERVED))

    def measured(self) -> Measured:
        """Nothing: what the system says of a step's resident set is asked by the session itself."""
        return Measured()

    def close(self) -> None:
        """Give the file back, and the heap to the C library."""
        self._heap.release()
        self.tier.close()
        self.resident_set.close()

    def _attached(self) -> Controller:
        assert self._controller is not None, "attach() comes first"
        return self._controller
