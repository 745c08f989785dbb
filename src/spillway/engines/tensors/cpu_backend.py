"""The CPU as the device of a session, with a spill file as its slower tier."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NoReturn, TypeVar, final

import torch

from spillway.engines.environment import GENERAL
from spillway.engines.tensors.abstract import AbstractBackend, AbstractTensorEngine, Hooked, Measured
from spillway.engines.tensors.bindings import Binding, quickest_call
from spillway.engines.tensors.cpu_machine import CpuMachine
from spillway.engines.tensors.ops import OpInfo
from spillway.engines.tensors.reserve import Workspaces
from spillway.engines.tensors.torch_patches import without_arrays
from spillway.errors import SpillError
from spillway.internals.machine_memory import usable_memory
from spillway.internals.private import storage_of
from spillway.internals.process_memory import HeldHeap, Reclaimer, ResidentSet
from spillway.memory.budget import UNLIMITED
from spillway.memory.controller import Controller
from spillway.methods.planned import SelfPlanned
from spillway.native.arena import ABOVE, BEYOND, COUNTED, LOCAL, MOST, NONE, OF_ENGINE, PEAK, Arena, OpMemory
from spillway.tiers.disk import DiskTier
from spillway.tiers.spill_file import SpillIO
from spillway.units import Bytes

T = TypeVar("T")

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

PLANNED: Final = 4
"""Threads that copy past the page cache where a plan says what and when. They only wait for the disk, which is as fast
with several copies at a time, and small ones do not stand behind large ones. What is foreseen from step to step copies
more than is wanted: there what compute waits for would be slowed down (`delta` by a fifth to a third)."""

CPU: Final = frozenset({torch.device("cpu"), torch.device("cpu", 0)})


@final
class OpMeter:
    """What single ops take for themselves, by the arena."""

    def __init__(self, memory: OpMemory) -> None:
        self._memory = memory

    def around(self, run: Callable[[], T]) -> tuple[T, Bytes]:
        cells = self._memory.cells
        cells[MOST] = cells[LOCAL] = cells[ABOVE] = 0
        out = run()
        return out, self._memory.inside()


@final
class CpuBackend(AbstractBackend):
    """RAM, with a file below it."""

    def __init__(self, spill_directory: str | os.PathLike[str] | None, spill_io: SpillIO = "buffered") -> None:
        self.devices = CPU
        self.device = torch.device("cpu")
        self.memory = usable_memory()
        self.tier = DiskTier(spill_directory, spill_io)
        self.log = self.tier.log
        self.spill_io = self.tier.io
        self.resident_set = ResidentSet()
        self._heap = HeldHeap()
        self._arena = Arena.for_session()
        self.creations = self.reclaimer = Reclaimer(self.resident_set, kept=self._arena is not None)
        self._controller: Controller | None = None
        self._base_rss: Bytes | None = None
        self._learned: Bytes = 0  # what is to be reserved
        self.machine = self._machine = CpuMachine(self.tier, self.reclaimer, self._arena)
        self.generator = torch.default_generator
        self.settings = GENERAL
        self.now = self.moment = time.perf_counter
        self.when = float
        self._measures_link = False
        self._op_memory: OpMemory | None = None

    def attach(self, engine: AbstractTensorEngine) -> None:
        """Threads that copy are there before memory is short."""
        self._engine, self._controller = engine, engine.controller
        copies_beside = engine.foresees or (engine.controller.policy.follows and engine.budget.limited)
        policy = engine.controller.policy  # who plans seldom has the link measured when a plan is made
        self._measures_link = copies_beside and not (isinstance(policy, SelfPlanned) and not policy.asked)
        self._machine.budget = engine.budget
        if self._arena is not None and engine.budget.limited:
            self._op_memory = self._machine.op_memory = OpMemory(self.tier.directory, _asking(engine))
            self.unwatched = self._op_memory
            self.workspaces = Workspaces(OpMeter(self._op_memory), frozenset(), required=False)
        if self._arena is not None:
            self.hooked = Hooked(0 if self._op_memory is None else self._op_memory.address, self._around)
        if copies_beside:
            if engine.controller.policy.follows and self.tier.io == "direct":
                self.tier.workers = PLANNED
            with contextlib.suppress(SpillError):  # there may be threads later
                self.tier.start_workers()

    def learn_op(self, info: OpInfo) -> None:
        """Schemas and tables are right."""
        info.call = self._counted(info, info.call)

    def calls(self, info: OpInfo) -> tuple[Binding, Binding]:
        call, call_with = quickest_call(info.func)
        return self._counted(info, call), self._counted(info, call_with)

    def _counted(self, info: OpInfo, call: Binding) -> Binding:
        """`call`, where what it takes for itself counts too."""
        learn = partial(self._learn_inside, info)
        return call if info.view else self._machine.counted(info.name, call, learn, resizes=info.resizes)

    def _around(self, info: OpInfo) -> tuple[Callable[[list[torch.Tensor]], None], Callable[[str], None]]:
        def refuse(said: str) -> None:
            raise self._machine.no_room(info.name, said)

        return partial(self._machine.bring_into_memory, learn=partial(self._learn_inside, info)), refuse

    def _learn_inside(self, info: OpInfo, inside: Bytes) -> None:
        """From now on room is made for what a call takes for itself, where there was none."""
        if inside > info.inside:
            info.takes_inside(inside)
            self._engine.start_anew()

    def bring_into_memory(self, tensors: Iterable[torch.Tensor], room: Bytes) -> None:
        """Of these what an unwatched step left in the spill directory, as far as there is room."""
        memory = self._op_memory
        for tensor in tensors:
            if memory is None or not torch._C._has_storage(tensor):
                continue
            real = storage_of(tensor)
            nbytes = real.nbytes() if real.device.type == "cpu" else 0  # that of a fake tensor is on no device
            try:
                lent = 0 < nbytes <= room and memory.lends(real.data_ptr())
            except RuntimeError:  # others of torch's own have no address either
                continue
            if lent:
                room -= nbytes
                self._machine.bring_into_memory([tensor], lambda _: None)

    def take_loaded(self, tensors: Iterable[torch.Tensor]) -> None:
        """What `torch.load` made leaves like anything else, unless an array of NumPy shows it (rule 10)."""
        arena = self._arena
        if arena is None:
            return
        loaded = [tensor for tensor in tensors if arena.is_loaded(storage_of(tensor))]
        for tensor in without_arrays(loaded) if loaded else ():
            arena.make_resizable(storage_of(tensor))

    def follow(self) -> None:
        """One thing comes after the other anyway."""

    def begin_step(self, allowed: Bytes, base_rss: Bytes | None, signature: str) -> None:
        """What is in slots of earlier steps may have been written by the user. The first step measures the link."""
        if self._measures_link:
            self._measures_link = False
            self.machine.measure_link()
        self.tier.generation += 1
        if self._op_memory is not None:
            self._op_memory.begin(self._attached().budget.named)
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
        if self._op_memory is not None:
            self._op_memory.end()
        if self._base_rss is not None:
            self._learn(self._base_rss)

    def _reserve(self) -> Bytes:
        """Let the step do without what is to be reserved. Returns the budget."""
        budget = self._attached().budget
        budget.reserve(min(self._learned, int(budget.named * MOST_RESERVED)), spendable=True)
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
        """What the arena counted; what the system says of a step's resident set is asked by the session itself."""
        if self._op_memory is None:
            return Measured()
        cells = self._op_memory.cells
        return Measured(peak=max(cells[PEAK], self._attached().budget.peak), beyond=cells[BEYOND])

    def close(self) -> None:
        """Give the file back, the heap to the C library, and free pages to the system."""
        self._heap.release()
        if self._op_memory is not None:
            self._op_memory.close()
        if self._arena is not None:
            self._arena.release()
        self.tier.close()
        self.resident_set.close()

    def _attached(self) -> Controller:
        assert self._controller is not None, "attach() comes first"
        return self._controller


def _asking(engine: AbstractTensorEngine) -> Callable[[Bytes], int]:
    """What the arena calls where the step's thread takes memory outside of any op. No error may leave it: the next op
    raises that."""
    own = weakref.ref(engine)

    def ask(nbytes: Bytes) -> int:
        engine = own()
        if engine is None or not engine.takes_outside():
            return OF_ENGINE
        try:
            return COUNTED if engine.take_outside(nbytes) else NONE
        except BaseException as error:
            engine.interrupts.append(partial(_raise, error))
            return NONE

    return ask


def _raise(error: BaseException) -> NoReturn:
    raise error
