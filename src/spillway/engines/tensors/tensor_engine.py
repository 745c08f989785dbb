"""The tensor engine: handlers of ops in front, the controller behind, a machine below.

It knows every storage by address from the moment an op first touches it until it dies, and hears of its death through
a weak reference.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, cast, final

import torch

from spillway.engines.tensors.abstract import AbstractBackend, AbstractTensorEngine, Around, Completion, Seen
from spillway.engines.tensors.calls import Geometry, inner_tensors, operands
from spillway.engines.tensors.collectives import Collectives
from spillway.engines.tensors.cpu_backend import CpuBackend
from spillway.engines.tensors.cpu_machine import Watch, real_storage
from spillway.engines.tensors.followed import Followed
from spillway.engines.tensors.history import ByName, StepHistory
from spillway.engines.tensors.mode import Dispatch
from spillway.engines.tensors.ops import OpInfo
from spillway.engines.tensors.sizes import READS_CONTENT, Sizes
from spillway.engines.tensors.torch_patches import METHODS, PATCHES, held_elsewhere, tensors_of_python
from spillway.engines.tensors.turns import end_turn
from spillway.errors import BudgetInfeasible, EngineError, SpillFullError
from spillway.internals.dispatch_key import unwatched
from spillway.internals.interrupts import deliver
from spillway.internals.private import bytes_over, is_hollow, is_leaf, unheard
from spillway.internals.private import storage_address as _address
from spillway.internals.private import storage_of as _storage_of
from spillway.internals.process_memory import ResidentSet
from spillway.ir.spans import Transfers, total
from spillway.ir.step import Phase
from spillway.ir.timeline import Kind
from spillway.memory.budget import UNLIMITED, Budget
from spillway.memory.controller import Controller
from spillway.memory.lanes import stalled_intervals, transfers_beside, unseen
from spillway.memory.ledger import SMALLEST_MOVABLE
from spillway.memory.records import DROPPED, LARGE, Storage, Value
from spillway.methods.base import AbstractPolicy
from spillway.native.arena import OpMemory
from spillway.tiers.spill_file import SpillIO
from spillway.units import Bytes, Seconds

Named = Callable[[], Iterable[tuple[Kind, torch.Tensor]]]

_has_storage = torch._C._has_storage

NO_ADDRESS: Final = -1
"""In place of the address of a storage, where there is none."""


@final
class TensorEngine(AbstractTensorEngine):
    """Pages storages of the tensors of one device under one budget.

    Arguments:
        allowed: The budget in bytes, or the account of it; `UNLIMITED` keeps account only.
        spill_directory: Where the spill file goes; the system's temporary directory by default.
        spill_io: Through the page cache, or past it where the file system can.
        backend: The device, where it is not the CPU.
    """

    def __init__(
        self, policy: AbstractPolicy, allowed: Bytes | Budget, spill_directory: str | os.PathLike[str] | None = None,
        spill_io: SpillIO = "buffered", *, backend: AbstractBackend | None = None,
    ) -> None:  # fmt: skip
        self.backend = backend if backend is not None else CpuBackend(spill_directory, spill_io)
        self.log = self.backend.log
        self.machine = self.backend.machine
        self.creations = self.backend.creations
        self.controller = Controller(self.machine, policy, allowed)
        self.budget = self.controller.budget
        self.table: dict[int, Storage] = {}
        self.infos: dict[int, OpInfo] = {}
        self.geometries: dict[Geometry, Geometry] = {}
        self.sizes = Sizes()
        self.interrupts: list[Callable[[], None]] = []
        self.odd_tensors = self.sparse_tensors = False
        self.unmanaged = 0
        self._newcomers: list[torch.Tensor] = []
        self._foreign: list[Storage] = []
        self.unwatched: list[OpMemory] = []
        """What counts, in a step that nobody watches."""
        self.register, self.died = build_register(self)
        self.fused_updates = 0
        self.ran_eagerly = False
        """Whether something that is compiled ran op by op, because a step was watched."""
        self.in_step = False
        self._left: Bytes = 0
        """What unwatched steps made, and this one outside of ops: it counts, and no storage is known for it."""
        self._looked = False
        """Whether Python was asked for tensors of that since there was more of it."""
        self._resizes = False
        """Whether code of the user's is resizing a known storage, whose new size counts by itself."""
        self._given_away: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """What no step has met, or left in the spill directory, and has to stay where it is, by the addresses of
        storages."""
        self.from_outside: Bytes = 0
        """What this step met that it had not made, and that nobody had named."""
        self._begun = False
        """Whether a step began whose end is not done."""
        self.recording = True
        self.foresees = policy.foresees and self.budget.limited
        self.start_bytes: Bytes = 0
        self.ops = 0
        self.transfers = Transfers(seconds=0.0, hidden_seconds=0.0)
        """The copies of the step that ended last."""
        self.began: Seconds = 0.0
        self.history: StepHistory | None = None
        self.recorded: Callable[[Around | None], Around] | None = None
        """What writes the next step down stands around handlers, and within what asks the policy."""
        self.inputs: set[Storage] = set()
        """Storages of the step's batch."""
        self.following = Followed(self) if policy.follows and self.budget.limited else None
        self._first_op = 0
        METHODS.add(self)
        PATCHES.add(self)
        self._closed = False
        self.collectives: Collectives = Collectives(self)
        self._dispatch = Dispatch(self)
        self.backend.attach(self)
        self._dispatch.hook()

    @property
    def resident_set(self) -> ResidentSet:
        """Of the process, for a session on the CPU."""
        return self._on_cpu.resident_set

    @property
    def _on_cpu(self) -> CpuBackend:
        if not isinstance(self.backend, CpuBackend):
            raise EngineError(f"A session on {self.backend.device} was asked for what only one on the CPU has.")
        return self.backend

    # ------------------------------------------------------------------ storages

    def learn_op(self, func: Any) -> OpInfo:
        """Read the op's schema, once."""
        info = self.infos[id(func)] = OpInfo(func)  # which keeps `func` alive, and so its id
        if self.odd_tensors:
            info.take_the_long_way()
        self.backend.learn_op(info)
        return info

    def info_of(self, func: Any) -> OpInfo:
        return self.infos.get(id(func)) or self.learn_op(func)

    def note_odd_tensors(self) -> None:
        if self.odd_tensors:
            return
        self.odd_tensors = True
        for info in self.infos.values():
            info.take_the_long_way()
        self._dispatch.start_anew()

    def start_anew(self) -> None:
        self._dispatch.start_anew()

    def note_eager(self) -> None:
        self.ran_eagerly = True

    def find(self, tensor: torch.Tensor) -> Storage | None:
        return self.table.get(_address_or_none(tensor))

    def lookup(self, tensor: torch.Tensor) -> Storage | None:
        return self.table.get(_address_or_none(tensor)) or self.adopt(tensor)

    @unheard
    def adopt(self, tensor: torch.Tensor) -> Storage | None:
        """Take a storage into account that existed before the engine saw it. Sparse, meta and the like are passed
        by."""
        if tensor.layout is not torch.strided or tensor.device not in self.backend.devices or not _has_storage(tensor):
            self.pass_by(tensor)
            return None
        key = _address_or_none(tensor)
        if key == NO_ADDRESS or is_hollow(tensor):
            self.unmanaged += 1
            return None
        if tensor.is_conj() or tensor.is_neg() or tensor.is_nested:
            self.note_odd_tensors()
        if self.in_step:
            self.from_outside += 0 if self._taken_over(key) else _storage_of(tensor).nbytes()
            with self.controller.lock:
                self.controller.make_room(_storage_of(tensor).nbytes(), "first use of a tensor from outside the step")
            if self.backend.unwatched is not None and self.backend.unwatched.lends():
                self._on_cpu.bring_into_memory(self._free_to_move([tensor]), _storage_of(tensor).nbytes())
        storage = self.register(tensor, key)
        if self.history is not None:
            self.history.note_found(storage)
        storage.escaped = key in self._given_away
        if storage.nbytes >= SMALLEST_MOVABLE and self.budget.limited:
            self._newcomers.append(tensor)
            if self.in_step:
                self._leave_alone_what_others_hold(())
        return storage

    def _leave_alone_what_others_hold(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Rule 10 for what came from outside, where nobody was asked who got hold of the bytes."""
        newcomers, self._newcomers = self._newcomers, []
        for tensor in held_elsewhere(newcomers, named, running=self.in_step):
            self.table[_address(tensor)].escaped = True
        if self.machine.readable_in_place:
            found = [(one, self.table[_address(one)]) for one in newcomers]
            if not self.in_step and isinstance(self.backend, CpuBackend):
                # Not what may be loaded anew in every step: who shows it takes a look at all objects.
                self.backend.take_loaded([one for one, it in found if not it.escaped and it.kind is not Kind.INPUT])
            self._leave_alone_what_overlaps([it for _, it in found])

    def _leave_alone_what_overlaps(self, newcomers: Sequence[Storage]) -> None:
        """Memory that is not torch's own (which cannot be resized, and stays) may be that of another storage."""
        foreign = [storage for storage in newcomers if not real_storage(storage).resizable()]
        self._foreign = [storage for storage in self._foreign if storage.value is not None] + foreign
        if not self._foreign:
            return
        ranges = sorted(filter(None, map(_range_of, self._foreign)))
        starts, ends = [start for start, _ in ranges], list(itertools.accumulate((end for _, end in ranges), max))
        for storage in list(self.table.values()) if foreign else newcomers:
            if storage.value is not None and storage.nbytes >= SMALLEST_MOVABLE and (place := _range_of(storage)):
                before = bisect.bisect_left(starts, place[1])
                storage.escaped |= before > 0 and ends[before - 1] > place[0]

    def takes_outside(self) -> bool:
        return self._dispatch.between_ops and not self._resizes

    @unheard
    def take_outside(self, nbytes: Bytes) -> bool:
        self._count_what_is_left()
        if self.budget.short(nbytes) > 0:
            self._meet_what_is_left()
        with self.controller.lock:
            self.controller.make_room_if_possible(nbytes, "memory that no op makes", stays=0)
            if self.budget.short(nbytes) > 0:
                return False
            self.budget.create(nbytes)
        self._left += nbytes
        self._looked = False
        return True

    def _taken_over(self, key: int) -> bool:
        """Whether it was not made by a watched step's op, and its bytes count already."""
        meter = self.backend.unwatched
        taken = meter is not None and self._left > 0 and meter.adopt((key,)) > 0
        self._count_what_is_left()
        return taken

    def _meet_what_is_left(self) -> None:
        """What no op of this step has touched can leave from here on, where Python has a tensor of it."""
        meter = self.backend.unwatched
        if meter is None or self._looked or self._left < SMALLEST_MOVABLE:
            return
        self._looked, met = True, self.from_outside
        for tensor in tensors_of_python():
            key = _address_or_none(tensor)
            if key != NO_ADDRESS and key not in self.table and self._taken_over(key):
                self.adopt(tensor)
        self.from_outside = met  # the step made all of that, or an earlier one

    def _count_what_is_left(self) -> None:
        """Of what unwatched steps made some may be gone by now, or taken over."""
        meter = self.backend.unwatched
        if meter is not None and self._left:
            gone = self._left - meter.held()
            self._left -= gone
            self.budget.free(gone)

    def stay(self, tensors: Iterable[torch.Tensor]) -> None:
        for storage in filter(None, map(self.lookup, tensors)):
            storage.escaped = True

    def pass_by(self, out: torch.Tensor | None) -> None:
        if isinstance(out, torch.Tensor):
            self.unmanaged += 1
            self.take_in_parts(out)

    def take_in_parts(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided and tensor.device in self.backend.devices:
            if not self.sparse_tensors:
                self.sparse_tensors = True
                self._dispatch.start_anew()
            with unwatched():
                parts = list(inner_tensors(tensor))
            for part in parts:
                storage = self.lookup(part)
                if storage is not None:
                    self.check_size(storage)  # an op on the whole may have changed it

    def register_new(self, tensor: torch.Tensor) -> Storage | None:
        key = _address_or_none(tensor)
        if key == NO_ADDRESS or tensor.device not in self.backend.devices or is_hollow(tensor):
            self.pass_by(tensor)
            return None
        return None if key in self.table else self.register(tensor, key)

    def current(self, storage: Storage) -> Value:
        if storage.value is None:
            raise EngineError(f"{storage!r} is dead and was used all the same.")
        return storage.value

    def check_size(self, storage: Storage) -> bool:
        real = storage.handle() if storage.handle is not None else None
        if real is None or real.nbytes() == storage.nbytes:
            return False
        self.controller.resize(storage, real.nbytes())
        return True

    def growth(self, storages: Iterable[Storage]) -> Bytes:
        real = ((storage.nbytes, storage.handle()) for storage in storages if storage.handle is not None)
        return sum(max(now.nbytes() - known, 0) for known, now in real if now is not None)

    def _grown_by_set(self, args: Sequence[Any]) -> Bytes:
        """What `set_(storage, offset, sizes, strides)` adds to a storage that is shorter than the tensor is to be."""
        if len(args) < 5 or not isinstance(args[1], torch.UntypedStorage):
            return 0
        tensor, real, offset, sizes, strides = args[:5]
        known = self.table.get(real._cdata)
        length = real.nbytes() if known is None else max(real.nbytes(), known.nbytes)  # it may be away
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=False))
        return max((offset + last + 1) * tensor.element_size() - length, 0) if min(sizes, default=1) else 0

    # ------------------------------------------------------------------ ops

    def run_short_of_room(self, seen: Seen, complete: Completion) -> Any:
        self._count_what_is_left()
        info, controller, ready, key, needed = seen.info, self.controller, _ready(seen), None, 0
        if info.resizes:
            for storage in seen.writes:
                self.machine.wait_for_readers(storage)
        if info.creates(seen.args):
            bound = info.bound(seen.args) if info.bound is not None and seen.args and not seen.opaque else None
            needed = bound or 0
            if bound is None or not ready or self.budget.short(bound) > 0:
                self._restore_what_sizes_read(seen)
                key, needed = self.sizes.expected(info, seen.args, seen.kwargs or {})
                needed = needed if bound is None else min(needed, bound)
        needed += self.growth(seen.writes) if info.resized else 0
        needed += self._grown_by_set(seen.args) if info.resizes else 0
        if needed and self.budget.short(needed) > 0 and _on_meta(seen):
            needed = 0
        if needed > self.backend.memory and (info.sets_storage or self.sizes.sure(key)):
            self._ask_device(needed + (sum(one.nbytes for one in seen.writes) if info.resizes else 0))
        guess = 0
        workspaces = self.backend.workspaces
        if workspaces is not None and not workspaces.required:
            guess = workspaces.expected(key)
        elif workspaces is not None and key is not None:
            guess = workspaces.guess(info.name, seen.reads, key, needed, self.budget.allowed)
            needed += workspaces.expected(key)
        if self.budget.short(needed + guess) > 0:
            self._meet_what_is_left()
        if ready and self.budget.short(needed + guess) <= 0:
            return self._run_and_learn(seen, complete, key, needed)
        # Room is short in a step that was known to fit. What came before has no recipe: it can be moved.
        if not self.recording:
            self.recording = True
            self._dispatch.rearm()
        with controller.lock:
            controller.prepare(info.name, seen.reads, seen.writes, needed)
            try:
                if guess:
                    stays = sum(storage.nbytes for storage in {value.storage for value in seen.reads})
                    controller.make_room_if_possible(needed + guess, info.name, stays=stays)
                return self._run_and_learn(seen, complete, key, needed)
            finally:
                controller.finish(seen.reads, seen.writes)
                self.look_ahead()

    def _ask_device(self, nbytes: Bytes) -> None:
        """For more than it has, for which no room that is made here is enough: its allocator says so, as it does where
        nobody manages it, and code that expects that goes on. Some systems promise more than they have."""
        cast(Any, torch.UntypedStorage)(nbytes, device=self.backend.device)

    def record_no_further(self) -> None:
        """What writes this step down has seen all that it wants: ops come as they come without it."""
        self.recorded = None
        if self.following is None and self.history is None:
            self._dispatch.stand_alone()

    def fits_at_once(self, seen: Seen) -> bool:
        together = {value.storage: value for value in seen.reads}
        absent = sum(storage.nbytes for storage, value in together.items() if value.absent)
        needed = 0
        if seen.info.fresh and self.budget.limited:
            _, needed = self.sizes.expected(seen.info, seen.args, seen.kwargs or {})
        return absent + needed == 0 or self.budget.short(absent + needed) <= 0

    def never_leaves(self) -> Bytes:
        return sum(s.nbytes for s in list(self.table.values()) if s.escaped or s.nbytes < SMALLEST_MOVABLE)

    def look_ahead(self) -> None:
        """Before the next op the policy is asked for copies that may begin: not now, an op may be half registered."""
        if self.foresees and self.in_step and self._foresee not in self.interrupts:
            self.controller.phase = self._phase()  # asked or not: a short backward may pass without a question
            if self.controller.copies.asks():
                self.interrupts.append(self._foresee)

    def _foresee(self) -> None:
        controller = self.controller
        if self.in_step:
            with controller.lock, unwatched():
                controller.foresee(self._phase())

    def _phase(self) -> Phase:
        """Where the step is. What runs without a graph is a part of the forward until there was a backward."""
        if torch._C._current_graph_task_id() >= 0:
            return Phase.BACKWARD
        forward = torch.is_grad_enabled() or self.controller.phase is Phase.FORWARD
        return Phase.FORWARD if forward else Phase.OPTIMIZER

    def _restore_what_sizes_read(self, seen: Seen) -> None:
        if seen.info.name in READS_CONTENT:
            with self.controller.lock:
                for value in seen.reads:
                    self.controller.restore(value)

    def _run_and_learn(self, seen: Seen, complete: Completion, key: Any, needed: Bytes) -> Any:
        before = self.budget.created
        if needed >= LARGE:
            self.creations.expect(needed if key is not None else needed // seen.info.safety)
        if self.backend.workspaces is None:
            out = seen.run(complete)
        else:
            out = self.backend.workspaces.watch(self.controller, key, lambda: seen.run(complete))
        if key is not None and not seen.info.resizes:
            self.sizes.learn(key, self.budget.created - before)
        if self.budget.short(0) > 0:
            self.controller.make_room(0, seen.info.name)
        return out

    # ------------------------------------------------------------------ reached from outside

    def reveal(self, tensor: torch.Tensor | torch.UntypedStorage, *, by_address: bool) -> None:
        by_address = by_address or not self.machine.readable_in_place
        key = tensor._cdata if isinstance(tensor, torch.UntypedStorage) else _address_or_none(tensor)
        storage = self.table.get(key)
        if storage is None and by_address:
            storage = self._take_over_one(tensor, key)
        if storage is None or storage.value is None:
            return
        with self.controller.lock, unwatched():
            storage.locks += 1
            try:
                self.machine.wait_for_readers(storage)  # whoever has the storage may give it another size
                if by_address:
                    self.controller.restore_dependents(storage)  # a write through the address would not be seen
                if storage.value.absent == DROPPED or (by_address and storage.value.absent):
                    self.fetch(storage)
                storage.exposed = True
                storage.escaped = storage.escaped or by_address
            finally:
                storage.locks -= 1

    def _take_over_one(self, tensor: torch.Tensor | torch.UntypedStorage, key: int) -> Storage | None:
        """Of what an unwatched step made the account begins to know here that it has to stay; of the rest when it
        meets it."""
        meter = self.backend.unwatched
        if key == NO_ADDRESS:
            return None
        real = tensor if isinstance(tensor, torch.UntypedStorage) else _storage_of(tensor)
        if meter is None or not meter.knows(key) or meter.is_beyond(real.data_ptr()):  # which does not count
            self._note_given_away(key, real)
            return None
        meter.adopt((key,))
        self._count_what_is_left()
        with unwatched():
            storage = self.register(bytes_over(real), key)
        for running in self.unwatched:
            running.died(-storage.nbytes)
        return storage

    def leave_as(self, before: TensorEngine) -> None:
        """What has to stay where it is in another engine does so in this one."""
        for key, known in before._given_away.items():
            if (real := known()) is not None:
                self._note_given_away(key, real)
        for key, storage in before.table.items():
            if storage.escaped and storage.value is not None:
                self._note_given_away(key, real_storage(storage))

    def _note_given_away(self, key: int, real: torch.UntypedStorage) -> None:
        self._given_away[key] = weakref.ref(real, lambda _: self._given_away.pop(key, None))

    def reveal_inside(self, tensor: torch.Tensor) -> None:
        with unwatched():
            inner = list(inner_tensors(tensor))
        for part in inner:
            self.reveal(part, by_address=True)

    def ensure_resident(self, tensor: torch.Tensor) -> None:
        storage = self.table.get(_address_or_none(tensor))
        if storage is None or storage.value is None:
            return
        self.machine.wait_for_readers(storage)
        if not storage.value.absent:
            return
        with self.controller.lock, unwatched():
            self.fetch(storage)

    @contextlib.contextmanager
    def resizing(self, real: torch.UntypedStorage, nbytes: Bytes) -> Iterator[None]:
        storage = self.table.get(real._cdata)
        if storage is None or storage.value is None:
            yield
            return
        with self.controller.lock, unwatched():
            self.machine.wait_for_readers(storage)
            reads, prepared = [storage.value], self.in_step
            if prepared:
                if nbytes > self.backend.memory:
                    self._ask_device(nbytes)
                self.controller.prepare("resize of a storage", reads, [storage], max(nbytes - storage.nbytes, 0))
            elif storage.value.absent:
                self.fetch(storage)
            try:
                self._resizes = True
                try:
                    yield
                finally:
                    self._resizes = False
                self.controller.overwrite(storage, None)
                if self.unwatched and real.nbytes() != storage.nbytes:  # what it has now counts, as it is new
                    self.died(storage.handle)
                self.check_size(storage)
            finally:
                if prepared:
                    self.controller.finish(reads, [storage])

    @contextlib.contextmanager
    def steadying(
        self, name: str, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor], needed: Bytes
    ) -> Iterator[None]:  # fmt: skip
        values = [self.current(storage) for tensor in read if (storage := self.find(tensor)) is not None]
        writes = [storage for tensor in written if (storage := self.find(tensor)) is not None]
        if not (values or writes) or not (writes or self.in_step):
            yield
            return
        prepared = self.in_step
        with self.controller.lock, unwatched():
            if prepared:
                self.controller.prepare(name, values, writes, 0)
                stays = sum(value.storage.nbytes for value in values)
                self.controller.make_room_if_possible(needed, name, stays=stays)
            else:
                for storage in writes:
                    self.fetch(storage)
        try:
            yield
        finally:
            with self.controller.lock, unwatched():
                for storage in writes:
                    self.controller.overwrite(storage, None)
                if prepared:
                    self.controller.finish(values, writes)

    def also_here(self) -> contextlib.AbstractContextManager[None]:
        return self._dispatch.also_here()

    def fetch(self, storage: Storage) -> None:
        if self.in_step:
            self.controller.restore(self.current(storage))
        else:
            self.controller.restore_all([storage])

    # ------------------------------------------------------------------ steps

    def begin_step(
        self, tensors: Iterable[tuple[str, torch.Tensor]], *, base_rss: Bytes | None = None,
        record: ByName | None = None, signature: str = "", recipes: bool = True,
    ) -> None:  # fmt: skip
        """Take the given tensors into account, come under the budget, and start watching.

        `base_rss` is the resident set without any of this; it and the budget together are what the resident set is
        kept to, and without it freed memory stays with the allocator. `record` gives what is known by name to a
        timeline; steps of one `signature` are expected to be alike. One that is known to fit needs no `recipes`.

        Raises BudgetInfeasible if what cannot leave is more than the budget.
        """
        self.began = time.perf_counter()
        self.recording = recipes
        self.from_outside = 0
        self.inputs.clear()
        self.label(tensors)
        controller = self.controller
        self.collectives.land()
        self._left, self._looked = self._take_over(), False
        self.budget.begin(controller.flights.beside + self._left + self._present_bytes())
        self.backend.begin_step(self.budget.allowed, base_rss, signature)
        self._begun = True
        try:
            self.log.begin_step()
            controller.begin_step(signature)
            if self.following is not None:
                self.following.begin_step()
            controller.make_room(0, "begin step")
            self.budget.begin()
            self.start_bytes = self.budget.resident
            self._first_op = controller.clock
            self.fused_updates = 0
            self.unmanaged = 0
            self.history = StepHistory(self, record) if record is not None else None
            self.in_step = True
            alone = self.history is None and self.recorded is None
            asked = self._asked
            hooked = asked.hooked() if asked is not None and alone else None
            self._dispatch.push(self._around(), hooked)
            self.poll_flights()
        except BaseException:
            with contextlib.suppress(BudgetInfeasible, SpillFullError):
                self.end_step()
            raise

    def _present_bytes(self) -> Bytes:
        """What is there. The user may have changed sizes between steps."""
        odd, present, _ = self._dispatch.survey()
        for storage in odd:
            self.check_size(storage)
        return present + sum(s.nbytes for s in odd if s.value is not None and not s.value.absent)

    def _take_over(self) -> Bytes:
        """What unwatched steps made and is still there is in the account from here on: each storage that a tensor is
        known for, and all others together, which is returned: what graphs keep, and what is small."""
        meter = self.backend.unwatched
        if meter is None or not meter.held():
            return 0
        meter.adopt(tuple(self.table))
        if meter.held() >= SMALLEST_MOVABLE:
            for tensor in tensors_of_python():
                key = _address_or_none(tensor)
                if key != NO_ADDRESS and key not in self.table and meter.adopt((key,)):
                    self.adopt(tensor)
            self._leave_alone_what_others_hold(())
        return meter.held()

    @property
    def _asked(self) -> Followed | None:
        """Who asks the policy around the ops of this step, if it wants to be asked anything."""
        return self.following if self.following is not None and self.following.asks else None

    def _around(self) -> Around | None:
        """What stands around handlers in this step."""
        inner: Around | None = self.history.timed if self.history is not None else None
        if self.recorded is not None:
            inner = self.recorded(inner)
        asked = self._asked
        return inner if asked is None else asked.around(inner)

    def present(self) -> list[Storage]:
        return sorted(self.table.values(), key=self.left_over)

    def newer_than(self, number: int) -> list[Storage]:
        """Storages that were taken into account after the one of that number: they stand at the end of the table."""
        while True:
            with contextlib.suppress(RuntimeError):  # a collection of garbage took something out of it meanwhile
                newer = itertools.takewhile(lambda one: one.number > number, reversed(self.table.values()))
                return list(newer)[::-1]

    def left_over(self, storage: Storage) -> bool:
        """Whether it was input of an earlier step and not of this one."""
        return storage.kind is Kind.INPUT and storage not in self.inputs

    def label(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors = list(tensors)
        self._label(tensors)  # whose variables end with it: here they would be taken for an array (`without_arrays`)
        if self._newcomers:
            self._leave_alone_what_others_hold(tensors)

    def _label(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        known = self.table.get
        for kind, tensor in tensors:
            try:
                storage = known(_address(tensor)) or self.adopt(tensor)
            except (RuntimeError, TypeError):  # as in `lookup`
                storage = self.adopt(tensor)
            if storage is not None:
                storage.kind = kind
                if kind is Kind.INPUT:
                    self.inputs.add(storage)

    def end_step(self) -> None:
        """Stop watching; everything the user can reach is right and readable (rules 11 and 12). Does nothing where no
        step began; what was interrupted half-way is done when it is called again.
        """
        if not self._begun:
            return
        watched, self.in_step = self.in_step, False
        self._dispatch.pop()
        if watched:
            self.ops = self.controller.clock - self._first_op
            self.backend.finish_ops()
            if self.following is not None:
                self.following.before_op()
        try:
            with self.controller.lock:
                self.controller.end_step()
        finally:
            left, self._left = self._left, 0
            self.budget.free(left)  # from here on it counts besides
            self.geometries.clear()
            self.inputs.clear()
            try:
                self.backend.end_step()
            finally:
                self._begun = False
                self._add_up_lanes()

    # ------------------------------------------------------------------ steps that nobody watches

    @property
    def needs_no_watch(self) -> bool:
        """Whether a step like the one that ended last may run unwatched: the arena would have seen all that it made."""
        odd = self.unmanaged or self.sparse_tensors or self.ran_eagerly or len(self.controller.flights)
        native = self._dispatch.native
        heard_one_thread = native is not None and not native.heard_other_threads
        return self.backend.unwatched is not None and heard_one_thread and not odd

    @property
    def resident(self) -> Bytes:
        """What is there between steps, with what unwatched ones left behind."""
        known, meter = self.budget.resident, self.backend.unwatched
        return known if meter is None else meter.counted(known)

    def meet(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer], named: Named
    ) -> None:
        """Take into account what came since the last step of these, or has another size by now: the arena counts what
        steps make, and not what is made between them."""
        meter = self.backend.unwatched
        if meter is None:
            return
        for storage in self._dispatch.survey()[0]:
            if storage.value is not None and self.check_size(storage):
                meter.adopt((storage.key,))
        new = self._dispatch.uncounted(models, optimizers, meter.asked)
        # No variable may hold a tensor here either, as in `label`.
        keys = {_address_or_none(one): one for one in ([one for _, one in named()] if new is None else new)}
        for key in keys:
            if key != NO_ADDRESS and key not in self.table and not meter.knows(key):
                self.adopt(keys[key])
        if self._newcomers:
            self._leave_alone_what_others_hold(list(named()))

    def begin_unwatched(self, inputs: Iterable[torch.Tensor], unseen: Bytes) -> None:
        """A step begins that is known to fit, and runs as if nothing were there: no op of it is seen. The arena counts
        what it takes; what has no room in the budget, less what is `unseen` in such steps, lies in the spill directory.
        """
        meter = self.backend.unwatched
        assert meter is not None, "it needs no watch"
        self.began = time.perf_counter()
        self.recording, self.ops = False, 0
        new = {_address(one): _storage_of(one).nbytes() for one in inputs if _has_storage(one)}
        beside = sum(nbytes for key, nbytes in new.items() if key not in self.table and not meter.knows(key))
        self.budget.begin()
        self.unwatched.append(meter)
        self.start_bytes = meter.begin_unwatched(self.budget.allowed - unseen, self.budget.resident + beside)

    def end_unwatched(self) -> tuple[Bytes, Bytes]:
        """It ended: the most that it had in memory, and the most above the budget. Called again it says that again."""
        meter = self.backend.unwatched
        if meter is None:
            return 0, 0
        if self.unwatched:
            meter.end()
            self.unwatched.clear()  # now: what was interrupted is called again
        return meter.taken()

    def bring_into_memory(self, tensors: Iterable[torch.Tensor]) -> None:
        """Of these what an unwatched step left in the spill directory, as far as there is room."""
        self._on_cpu.bring_into_memory(self._free_to_move(tensors), self.budget.allowed - self.resident)

    def _free_to_move(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        for tensor in tensors:
            known = self.find(tensor)
            if (known is None or not known.escaped) and _address_or_none(tensor) not in self._given_away:
                yield tensor

    def _add_up_lanes(self) -> None:
        """Compute also waits where the controller does not see it: a copy has to end before its bytes are given up."""
        counters, log, device = self.controller.counters, self.log, self.backend.measured().lanes
        if device is None:
            counters.stalls += unseen(log.waits, counters.stalls)
        else:  # the host saw when the device was told
            log.transfers, counters.stalls, counters.replays = device.transfers, device.stalls, device.replays
            counters.recomputed_seconds = sum(again.ended - again.began for again in device.replays)
        stalled = stalled_intervals(counters.stalls)
        counters.stall_seconds = total(stalled)
        self.transfers = transfers_beside(log.transfers, stalled)
        if device is not None:
            known = (0.0, 0.0) if device.synchronised else (self.transfers.seconds, counters.stall_seconds)
            self.controller.copies.weigh(*known)

    def restore_all(self) -> None:
        controller = self.controller
        absent = [
            storage for storage in list(self.table.values()) if storage.value is not None and storage.value.absent
        ]
        together = self.budget.resident + sum(storage.nbytes for storage in absent)
        controller.restore_all(absent)
        if together > self.budget.allowed:
            last = max(self.ops - 1, 0)
            raise self.budget.refusal(together, "the end of the step", last, together, exact=False)

    def disarm(self) -> None:
        self.controller.lock = threading.RLock()  # another thread, which is not in the child, may hold it
        self.budget.allow(UNLIMITED)
        self.controller.flights.forget()
        self.foresees = False
        self._dispatch.disarm()

    def await_copies(self) -> None:
        self.machine.await_workers(list(self.controller.arriving.values()))

    def close(self) -> None:
        """Bring everything back, forget everything, give the spill file back to the system. A step that is running is
        ended first.
        """
        if self._closed:
            return
        self.end_unwatched()
        try:
            with contextlib.suppress(BudgetInfeasible, SpillFullError):  # everything is back all the same
                self.end_step()
        finally:
            try:
                with self.controller.lock:
                    self.controller.restore_all(list(self.table.values()))
                    self.controller.distrust_copies()
                self._leave_the_file()
            finally:
                PATCHES.remove(self)
                METHODS.remove(self)
                self.controller.flights.forget()
                self._look_no_longer()
                self.backend.close()
                end_turn(self)
                self._closed = True

    def _look_no_longer(self) -> None:
        """Nobody is to hear of deaths, now and not as soon as the cycles that this is in are collected: where a storage
        dies to which several weak references with callbacks lead, and Python collects them just then, it crashes."""
        for storage in list(self.table.values()):  # meanwhile others may die
            storage.handle = storage.value = None
        self.table.clear()
        self._given_away.clear()

    def _leave_the_file(self) -> None:
        """What unwatched steps left in the spill directory is in memory afterwards, where a tensor is known for it."""
        if self.backend.unwatched is not None and self.backend.unwatched.lends():
            with unwatched(), torch._C.DisableTorchFunction():
                found = [one for one in tensors_of_python() if _address_or_none(one) != NO_ADDRESS]
                found += [one.grad for one in found if is_leaf(one) and one.grad is not None]
                self._on_cpu.bring_into_memory(self._free_to_move(found), UNLIMITED)

    def raise_interrupt(self) -> None:
        try:
            deliver(self.interrupts)
        finally:
            if len(self.controller.flights):
                self.collectives.land()
                self.poll_flights()

    def poll_flights(self) -> None:
        if len(self.controller.flights) and not self.interrupts:
            self.interrupts.append(lambda: None)

    def escaped_count(self) -> int:
        """Storages that are left alone because something else holds their address (rule 10)."""
        return self._dispatch.survey()[2]


def build_register(engine: TensorEngine) -> tuple[Callable[[torch.Tensor, int], Storage], Callable[[Any], None]]:
    """The function that begins to account for the storage of a tensor, at a key, and the one that hears of its death:
    they are called by nearly every op."""
    controller, table, unwatched = engine.controller, engine.table, engine.unwatched
    adopt, forget, created = controller.adopt, controller.forget, engine.creations.created

    def died(watch: Any) -> None:
        try:
            storage: Storage = watch.record
        except AttributeError:  # Ctrl-C came before it had one
            return
        if not hasattr(controller, "budget"):  # the garbage collector is taking the engine apart
            return
        table.pop(storage.key, None)
        storage.handle = None
        forget(storage)
        for meter in unwatched:
            meter.died(storage.nbytes)

    def register(tensor: torch.Tensor, key: int) -> Storage:
        real = _storage_of(tensor)
        nbytes = real.nbytes()
        watch = Watch(real, died)
        storage = watch.record = table[key] = adopt(key, nbytes, watch)
        if nbytes >= LARGE:
            created(nbytes)
            engine.look_ahead()
        if engine.history is not None:
            engine.history.note_kind(storage)
        return storage

    return register, died


def _range_of(storage: Storage) -> tuple[int, int] | None:
    """Where its bytes lie; nowhere if it is just dying, in a cycle of references that is being collected."""
    real = storage.handle() if storage.handle is not None else None
    return None if real is None else (real.data_ptr(), real.data_ptr() + storage.nbytes)


def _ready(seen: Seen) -> bool:
    if any(value.absent for value in seen.reads):
        return False
    written = [storage.value for storage in seen.writes if storage.value is not None]
    return not any(value.absent or value.dependents for value in written)


def _on_meta(seen: Seen) -> bool:
    """Whether what it makes has no content, and takes no memory."""
    kwargs = seen.kwargs or {}
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "meta"
    return any(tensor.is_meta for _, tensor, _ in operands(seen.info, seen.args, kwargs))


def _address_or_none(tensor: Any) -> int:
    try:
        return _address(tensor)
    except (RuntimeError, TypeError):
        return NO_ADDRESS
