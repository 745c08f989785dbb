"""Collectives: ops that return before what they read and write is read and written.

c10d's ops declare no mutation. What they are given is taken as written, but for what they are known to read alone. They
return a `Work`, and until that is done its operands are in flight (`memory.copies.Flights`). A functional
collective keeps its `Work` to itself; what it made is in flight until `wait_tensor` is called on it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, final

import torch

from spillway.engines.tensors.abstract import AbstractCollectives, AbstractTensorEngine
from spillway.engines.tensors.cpu_machine import tensors_of
from spillway.engines.tensors.ops import OpInfo
from spillway.internals.private import unbox_work, unheard, unwaited_works
from spillway.memory.records import Storage
from spillway.units import Bytes

NAMESPACES: Final = ("c10d::", "_c10d_functional::")

READ_ONLY: Final[Mapping[str, int]] = MappingProxyType(
    {
        "c10d::_allgather_base_": 1, "c10d::_reduce_scatter_base_": 1, "c10d::allgather_": 1,
        "c10d::allgather_coalesced_": 1, "c10d::allgather_into_tensor_coalesced_": 1, "c10d::alltoall_": 1,
        "c10d::alltoall_base_": 1, "c10d::barrier": 0, "c10d::check_for_nan": 0, "c10d::gather_": 1,
        "c10d::monitored_barrier_": 0, "c10d::reduce_scatter_": 1, "c10d::reduce_scatter_tensor_coalesced_": 1,
        "c10d::scatter_": 1, "c10d::send": 0,
    }
)  # fmt: skip
"""By op, the argument that it reads and does not write."""

COPIED: Final[Mapping[str, int]] = MappingProxyType(
    {
        "c10d::_reduce_scatter_base_": 1, "c10d::allgather_": 0, "c10d::allgather_coalesced_": 0,
        "c10d::allreduce_coalesced_": 0, "c10d::alltoall_": 1, "c10d::gather_": 0, "c10d::reduce_scatter_": 1,
        "c10d::reduce_scatter_tensor_coalesced_": 1, "_c10d_functional::reduce_scatter_tensor": 0,
        "_c10d_functional::reduce_scatter_tensor_coalesced": 0,
    }
)  # fmt: skip
"""By op, the argument of whose tensors gloo makes a copy, in one piece."""

WRITING: Final = frozenset(f"_c10d_functional::{name}" for name in ("wait_tensor", "irecv", "isend", "batch_p2p_ops"))
"""Functional ones that write what they are given, or end what does."""


@final
class BegunWork:
    """A `Work` that an op returned.

    What a thread of the process group carries out has a future. What has none (sending, receiving, and what gloo puts
    together from other collectives) is carried out by whoever waits for it, once, and need not say so afterwards: such
    a work is also done when nobody but this is left to wait for it.
    """

    def __init__(self, work: Any) -> None:
        self._work = work
        asked = torch.distributed.Work.get_future  # by users, for whom it waits
        try:
            getattr(asked, "__wrapped__", asked)(work)
            self._by_itself = True
        except RuntimeError:
            self._by_itself = False

    def done(self) -> bool:
        if self._work.is_completed():
            return True
        return not self._by_itself and sys.getrefcount(self._work) <= _OWN_REFERENCES

    def wait(self) -> bool:
        if self._by_itself:
            try:
                self._work.wait()
            except RuntimeError:  # it failed, and says so to whoever waits for it
                return True
        return self._by_itself


_OWN_REFERENCES: Final = 2
"""The attribute, and the argument of `getrefcount`."""


@final
class UnwaitedResults:
    """What functional collectives made, until somebody waits for each."""

    def __init__(self, results: Iterable[Storage]) -> None:
        self._results = set(results)

    def waited_for(self, result: Storage) -> None:
        self._results.discard(result)

    def done(self) -> bool:
        return not unwaited_works() or all(storage.value is None for storage in self._results)

    def wait(self) -> bool:
        return False  # waiting takes the work from those who are to wait for it


@final
class Collectives(AbstractCollectives):
    """Runs the collectives of one engine's steps."""

    def __init__(self, engine: AbstractTensorEngine) -> None:
        self._engine = engine
        self._unwaited: list[UnwaitedResults] = []

    @unheard
    def run(self, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        engine, controller = self._engine, self._engine.controller
        engine.raise_interrupt()
        controller.clock += 1
        reads, writes = self._operands(info, args, kwargs)
        beside = _bytes_of(args[COPIED[info.name]]) if info.name in COPIED else 0
        with controller.lock:
            values = [engine.current(storage) for storage in (*reads, *writes)]
            controller.prepare(info.name, values, writes, _made(info, args) + beside)
            try:
                try:
                    out = info.call(*args, **kwargs)
                finally:
                    for storage in writes:
                        controller.overwrite(storage, None)
                self._take_off(info, args, out, (reads, writes), beside)
            finally:
                controller.finish(values, writes)
            if controller.budget.short(0) > 0:
                controller.make_room(0, info.name)
        return out

    def land(self) -> None:
        """Between two ops: let go of what is done."""
        with self._engine.controller.lock:
            self._engine.controller.flights.land()
        self._unwaited = [results for results in self._unwaited if not results.done()]

    def begin_elsewhere(self, given: object) -> None:
        """Outside of a step a collective is about to begin: what it is given comes back."""
        for tensor in tensors_of(given):
            self._engine.ensure_resident(tensor)

    def begun_elsewhere(self, work: Any, given: object) -> None:
        if work is None:
            return
        with self._engine.controller.lock:
            operands = [self._engine.lookup(tensor) for tensor in tensors_of(given)]
            writes = dict.fromkeys(storage for storage in operands if storage is not None)
            self._engine.controller.flights.begin(BegunWork(work), (), tuple(writes))
            self._engine.controller.flights.land()

    def _operands(
        self, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Storage], list[Storage]]:
        """The storages that are only read, and those that may be written."""
        arguments = info.func._schema.arguments
        named = [(arguments[place].name, place, given) for place, given in enumerate(args)]
        named += [(name, -1, given) for name, given in kwargs.items()]
        reads: dict[Storage, None] = {}
        writes: dict[Storage, None] = {}
        for name, place, given in named:
            if info.name.startswith("c10d::"):
                written = READ_ONLY.get(info.name) != place
            else:
                written = name in info.schema_writes or info.name in WRITING
            for tensor in tensors_of(given):
                storage = self._engine.lookup(tensor)
                if storage is None:
                    self._engine.reveal_inside(tensor)
                    continue
                storage.touched = self._engine.controller.clock
                (writes if written else reads)[storage] = None
        return [storage for storage in reads if storage not in writes], list(writes)

    def _take_off(
        self, info: OpInfo, args: Sequence[Any], out: Any, operands: tuple[list[Storage], list[Storage]], beside: Bytes
    ) -> None:
        engine, flights, (reads, writes) = self._engine, self._engine.controller.flights, operands
        if info.name == "_c10d_functional::wait_tensor":
            for results in self._unwaited:
                for storage in writes:
                    results.waited_for(storage)
            flights.land()
        elif info.name.startswith("c10d::"):
            work = out[-1] if isinstance(out, tuple) else out
            if isinstance(work, torch.ScriptObject):
                begun = BegunWork(unbox_work(work))
                # DDP's compression in C++ reduces a copy of a bucket in float16. Whoever carries that out then writes
                # the bucket; this thread does, if it is done before DDP asks.
                if torch._C._current_graph_task_id() >= 0 and all(
                    tensor.dtype == torch.float16 for tensor in tensors_of(args[0])
                ):
                    begun.wait()
                flights.begin(begun, reads, writes, beside)
        else:
            made = dict.fromkeys(writes)
            for tensor in tensors_of(out):
                engine.register_new(tensor)
                if (result := engine.find(tensor)) is not None:
                    made[result] = None
            results = UnwaitedResults(made)
            self._unwaited.append(results)
            flights.begin(results, [storage for storage in reads if storage not in made], tuple(made), beside)
        if len(flights):
            engine.poll_flights()


def _bytes_of(given: object) -> Bytes:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(given))


def _made(info: OpInfo, args: Sequence[Any]) -> Bytes:
    """What a functional collective creates. Its meta function, where there is none, is the collective."""
    name = info.name.removeprefix("_c10d_functional::").removesuffix("_coalesced")
    given = _bytes_of(args[0])
    if name == "all_gather_into_tensor":
        return given * int(args[1])
    if name == "all_to_all_single":
        return int(given * sum(args[1]) // max(sum(args[2]), 1))
    return given if name in ("all_reduce", "broadcast", "reduce_scatter_tensor") else 0
