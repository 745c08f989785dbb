"""What the parts of the tensor engine have in common: the engine as they know it, its device, and an op on its way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, final

import torch

from spillway.engines.environment import ELEMENTWISE, Settings
from spillway.engines.tensors.bindings import Binding
from spillway.engines.tensors.calls import Geometry, Operand, Place
from spillway.engines.tensors.ops import OpInfo
from spillway.engines.tensors.reserve import Workspaces
from spillway.engines.tensors.sizes import Sizes
from spillway.internals.dispatch_key import Handler
from spillway.memory.budget import Budget
from spillway.memory.controller import Controller
from spillway.memory.lanes import OnDevice, TransferLog
from spillway.memory.machine import Machine
from spillway.memory.records import Storage, Value
from spillway.native.arena import OpMemory
from spillway.tiers.spill_file import SpillIO
from spillway.units import Bytes, Seconds

Completion = Callable[..., Any]
"""Runs a ready op: see `build_completion`."""


class Known(NamedTuple):
    """An op that was met."""

    func: Any
    """Kept alive, and so its id."""
    handler: Handler
    unrecorded: Handler
    """The same without recipes."""


Around = Callable[[Known], Handler]
"""What stands in front of a handler in a step that is recorded."""


@final
@dataclass(slots=True)
class Seen:
    """One op as the mode found it, on its way through the engine because it is not ready to run."""

    info: OpInfo
    args: Sequence[Any]
    kwargs: dict[str, Any] | None
    reads: list[Value]
    places: Sequence[Place]
    """Where their tensors stand in the call."""
    writes: Sequence[Storage]
    scratch: Sequence[Operand] = ()
    """Operands that a replay replaces by zeros."""
    opaque: bool = False
    """Whether something about the call cannot be recorded, so that it gets no recipe."""

    def run(self, complete: Completion) -> Any:
        """Run the op, now that everything is ready."""
        return complete(
            self.info, self.args, self.kwargs, self.reads, self.places, self.writes, self.scratch, self.opaque
        )


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
@dataclass(frozen=True, slots=True)
class Hooked:
    """What the native hook has to know of a device."""

    cells: int
    """Address of the account of what ops take for themselves (`OpMemory`); 0 where nobody keeps it."""
    around: Callable[[OpInfo], tuple[Callable[[list[torch.Tensor]], None], Callable[[str], None]]]
    """For an op: what is done with its results where it took more for itself than there was room for, and what raises
    the error where there was no other place either."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the device itself says of a step."""

    peak: Bytes = 0
    """The most that its allocator had handed out; 0 where nobody counts that."""
    beyond: Bytes = 0
    """The most that an op took for itself above the budget, in a file."""
    lanes: OnDevice | None = None
    """Its copies, stalls and replays; None where the host waits, and its clock is the one to ask."""


class AbstractBackend(ABC):
    """One device, for one engine."""

    devices: frozenset[torch.device]
    """Tensors on these are managed."""
    device: torch.device
    """The usual one of them."""
    memory: Bytes
    """What there is of it, whatever the budget."""
    machine: TensorMachine
    log: TransferLog
    """Copies that a tier made, and what waited for them; where the device keeps account of that, empty until the step
    ends."""
    creations: Creations
    """Hears of what is created."""
    generator: torch.Generator
    """What ops draw from that are given no generator."""
    settings: Settings
    """Settings that are inputs of every op."""
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
    unwatched: OpMemory | None = None
    """Counts what a step takes that nobody watches, where there can be one."""
    hooked: Hooked | None = None
    """For the native hook, on a device for which there is one."""

    @abstractmethod
    def attach(self, engine: AbstractTensorEngine) -> None:
        """The engine is ready."""

    def settings_of(self, info: OpInfo) -> Settings:
        """Those that are inputs of an op."""
        return ELEMENTWISE if torch.Tag.pointwise in info.func.tags else self.settings

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
        """Give back what was taken for it."""


class AbstractCollectives(ABC):
    """Collectives that ops of a step, or code between two steps, begin."""

    @abstractmethod
    def run(self, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the op, which begins the collective; what that uses is in flight from here on."""

    @abstractmethod
    def begin_elsewhere(self, given: Iterable[Any]) -> None:
        """One is about to begin that no mode sees."""

    @abstractmethod
    def begun_elsewhere(self, work: Any, given: Iterable[Any]) -> None:
        """It has begun."""


class AbstractTensorEngine(ABC):
    """The engine as its parts know it: what they look at, and what they ask it to do. See `TensorEngine`."""

    controller: Controller
    budget: Budget
    backend: AbstractBackend
    machine: TensorMachine
    creations: Creations
    collectives: AbstractCollectives
    sizes: Sizes
    log: TransferLog
    table: dict[int, Storage]
    """Storages by the addresses of what torch calls a storage."""
    infos: dict[int, OpInfo]
    """What is known about ops, by their ids."""
    geometries: dict[Geometry, Geometry]
    """Each geometry that recipes of this step mention, once: what many recipes share is one thing to walk for the
    garbage collector."""
    interrupts: list[Callable[[], None]]
    """What is to be done before the next op."""
    register: Callable[[torch.Tensor, int], Storage]
    """Begins to account for the storage of a tensor, at a key."""
    died: Callable[[Any], None]
    """Hears of the death of a storage, from its handle."""
    in_step: bool
    """Whether ops are watched."""
    recording: bool
    """Whether recipes are written where the policy uses them: not in a step of a size that is known to fit, until its
    room gets short."""
    foresees: bool
    """Whether the policy is asked while ops run."""
    sparse_tensors: bool
    unmanaged: int
    """Tensors that were met and are not managed."""
    fused_updates: int
    """Fused optimizer ops in this step; torch counts no version for what they write."""
    began: Seconds
    """When the step began, by `time.perf_counter`."""
    graph_grows: Callable[[], None] | None = None
    """Hears, in any thread, of each backward that is about to make a graph of itself."""

    @abstractmethod
    def info_of(self, func: Any) -> OpInfo:
        """What is known about an op."""

    @abstractmethod
    def find(self, tensor: torch.Tensor) -> Storage | None:
        """The tensor's storage if it is known."""

    @abstractmethod
    def lookup(self, tensor: torch.Tensor) -> Storage | None:
        """The tensor's storage, taken into account if it was unknown; None if it is not ours to manage."""

    @abstractmethod
    def register_new(self, tensor: torch.Tensor) -> Storage | None:
        """A storage that an op created; None if it is an operand's, or not ours to manage."""

    @abstractmethod
    def current(self, storage: Storage) -> Value:
        """The storage's current value."""

    @abstractmethod
    def check_size(self, storage: Storage) -> bool:
        """An op may have changed the size of what it wrote: whether it did."""

    @abstractmethod
    def growth(self, storages: Iterable[Storage]) -> Bytes:
        """By how much they have grown out of sight, as a lazily negated `out=` does before `copy_` fills it."""

    @abstractmethod
    def pass_by(self, out: torch.Tensor | None) -> None:
        """It is not managed, but for what a sparse tensor consists of."""

    @abstractmethod
    def take_in_parts(self, tensor: torch.Tensor) -> None:
        """Take into account what a sparse tensor consists of."""

    @abstractmethod
    def stay(self, tensors: Iterable[torch.Tensor]) -> None:
        """Their bytes do not leave any more (rule 10)."""

    @abstractmethod
    def note_odd_tensors(self) -> None:
        """Nested tensors, or some with a conjugate or negative bit, are about: the short way, which does not look for
        them, is closed."""

    @abstractmethod
    def start_anew(self) -> None:
        """What is known about ops has changed."""

    @abstractmethod
    def note_eager(self) -> None:
        """Something that is compiled is about to run op by op."""

    @abstractmethod
    def run_short_of_room(self, seen: Seen, complete: Completion) -> Any:
        """Run an op that may have absent inputs or lack room: find its exact size, prepare, run, let go."""

    @abstractmethod
    def fits_at_once(self, seen: Seen) -> bool:
        """Whether everything that an op needs can be there without anything else leaving."""

    @abstractmethod
    def never_leaves(self) -> Bytes:
        """Bytes of what stays in memory whatever happens: what has escaped, and what is too small to be worth it."""

    @abstractmethod
    def raise_interrupt(self) -> None:
        """Between two ops: deliver a Ctrl-C that arrived while the engine could not be interrupted, and look ahead; let
        go of what is not in flight any more."""

    @abstractmethod
    def look_ahead(self) -> None:
        """Before the next op the policy is asked for copies that may begin."""

    @abstractmethod
    def poll_flights(self) -> None:
        """Before the next op as well, as long as anything is in flight."""

    @abstractmethod
    def reveal(self, tensor: torch.Tensor | torch.UntypedStorage, *, by_address: bool) -> None:
        """Something is about to read `tensor` without asking the dispatcher.

        With `by_address` it may keep the address: the bytes come back and stay. Otherwise a moved storage is read
        where it is, and a dropped one comes back and is not dropped again. Where a moved one cannot be read, it is
        the same as with an address.
        """

    @abstractmethod
    def reveal_inside(self, tensor: torch.Tensor) -> None:
        """`tensor` has no bytes of its own and an op is about to use it: what is in it comes back and stays."""

    @abstractmethod
    def ensure_resident(self, tensor: torch.Tensor) -> None:
        """`tensor` is about to get another size: its bytes come back."""

    @abstractmethod
    def resizing(self, real: torch.UntypedStorage, nbytes: Bytes) -> AbstractContextManager[None]:
        """A storage is about to get another size by its own method, which is no op: it comes back, and a next version
        begins."""

    @abstractmethod
    def steadying(
        self, name: str, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor], needed: Bytes
    ) -> AbstractContextManager[None]:
        """What an op reads and writes by address, between the ops that it consists of too: it is in memory until the
        op is done. Between steps nothing leaves, and what is moved can be read where it is. If it can be had, there is
        room for `needed` bytes, which are not seen."""

    @abstractmethod
    def takes_outside(self) -> bool:
        """Whether it is the user's code that takes memory in this thread now, in a watched step and in no op."""

    @abstractmethod
    def take_outside(self, nbytes: Bytes) -> bool:
        """So many bytes that no op makes are in the account from here on, if there is room for them."""

    @abstractmethod
    def also_here(self) -> AbstractContextManager[None]:
        """What this thread, which is not the step's, runs within is a part of the step."""

    @abstractmethod
    def fetch(self, storage: Storage) -> None:
        """Bring the bytes back: within the budget during a step; between steps nothing that plain PyTorch allows is
        refused."""

    @abstractmethod
    def label(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Say what storages are for, taking them into account if need be."""

    @abstractmethod
    def present(self) -> list[Storage]:
        """All storages that there are, in an order that stays the same from step to step: batches of earlier steps
        that somebody keeps come last."""

    @abstractmethod
    def newer_than(self, number: int) -> list[Storage]:
        """Storages that were taken into account after the one of that number, in their order."""

    @abstractmethod
    def restore_all(self) -> None:
        """Nothing is absent afterwards, for a machine whose absent storages cannot be read. Raises BudgetInfeasible if
        they do not fit together; they are back all the same: right comes before small."""

    @abstractmethod
    def disarm(self) -> None:
        """In a forked child: leave its ops alone, and the spill file to the parent that shares it."""

    @abstractmethod
    def await_copies(self) -> None:
        """No worker is busy afterwards. Changes nothing else: it may be asked by any thread, and at any moment."""
