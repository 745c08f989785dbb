"""One step, watched: every op is written down as it comes, and nothing is changed.

Ops come as they come to the tensor engine, under its dispatch key: in a dispatch mode torch would compute by other
formulas than the step has anywhere else (NOTE [Unseen] in `internals/dispatch_key.py`). Fake tensors are a mode
themselves, which keeps what it sees to itself, so that among them, and only there, a second mode watches.

Ops are numbered as the tensor engine numbers them: views pass by and are no ops. What an op reads and writes is read
off its schema and the tables of `engines/tensors/ops.py`, so that a recorded step and the engine know the same about an
op. A storage that comes from nowhere, as from NumPy, is created by an op `spillway.outside`, which cannot be replayed.

A step of an engine is recorded by standing around the engine's handlers (`writing_within`). What exists at its start is
what the engine knows, what comes from nowhere is created by the op that uses it first, as the engine has it, and what
autograd saves is not asked, because hooks for that change when it dies. Where the recorder fails, the step goes on.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import median
from typing import Any, Final, NamedTuple, TypeVar, cast, final

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from spillway.engines.tensors.abstract import Around, Known
from spillway.engines.tensors.calls import operands
from spillway.engines.tensors.cpu_machine import tensors_of
from spillway.engines.tensors.ops import OpInfo
from spillway.engines.tensors.torch_compile import begin_eagerly, end_eagerly
from spillway.errors import UsageError
from spillway.internals.dispatch_key import Handler, Watcher, watcher_here
from spillway.internals.private import unheard, unheard_by_modes
from spillway.ir import Kind, Op, Phase, Saving, Step, ValueId
from spillway.memory.records import NEVER, Storage
from spillway.recording.formulas import flops_of, shape_of, traffic_of
from spillway.recording.step_storages import Entry, Ledger
from spillway.units import Seconds

T = TypeVar("T")

OUTSIDE: Final = "spillway.outside"
"""The op that stands for whatever made a storage that no op made."""

Named = Callable[[], Iterable[tuple[Kind, str, torch.Tensor]]]
"""The tensors that are known by name at this moment: what each is for, its name, and itself."""


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Within, every new tensor is fake: it has a shape and no bytes, so that a step of any size takes no memory.

    A model has to be built within, its batch too, or its bytes would be real. Ops then compute shapes alone, and tell
    the same lifetimes, sizes and versions that they would with content. Where torch has another formula for subclasses
    of tensors and under dispatch modes, fake tensors take that one: attention with a mask adds it into a new tensor.

    Raises UsageError for a step that needs the content of a tensor, such as a loss read as a number.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            cast(Any, mode)._allow_unsafe_data_ptr_access = False  # it is null
            yield mode
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(
            f"The step cannot be recorded on fake tensors, because {error.func} needs to know what a tensor holds; "
            f"record it on real ones."
        ) from error


def tensors_are_fake() -> bool:
    """Whether new tensors are fake here."""
    of_torch = cast(Any, torch._C)
    return of_torch._get_dispatch_mode(of_torch._TorchDispatchModeKey.FAKE) is not None


def as_fake(mode: FakeTensorMode, tree: Any) -> Any:
    """The same nest of lists and mappings with every tensor fake."""
    return tree_map_only(torch.Tensor, lambda tensor: cast(Any, mode).from_tensor(tensor), tree)


@contextmanager
def arriving(handle: Handler) -> Iterator[None]:
    """Within, every op of this thread comes to `handle`.

    Raises UsageError where a step of an engine runs.
    """
    if tensors_are_fake():
        with _AmongFakes(handle):
            yield
        return
    if watcher_here() is not None:
        raise UsageError("A step of spillway.manage() is running in this thread: record a step outside of it.")
    watcher, thread = Watcher({}, lambda func: handle), threading.get_ident()
    begin_eagerly(lambda: None)
    try:
        watcher.begin()
        yield
        if watcher_here() is not watcher:
            raise UsageError("A step of spillway.manage() ran within what was to be recorded: record a plain step.")
    finally:
        watcher.end()
        end_eagerly(thread)


@final
class _AmongFakes(cast(Any, TorchDispatchMode)):  # type: ignore[misc]  # torch's class has no annotations
    def __init__(self, handle: Handler) -> None:
        super().__init__()
        self._handle = handle

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # a question about a fake tensor, such as its device
            return func(*args, **(kwargs or {}))
        return self._handle(self, func, types, args, kwargs or {})


@final
class Modules:
    """Which module an op belongs to: the one whose `forward` runs; in the backward the one whose forward made the node.

    Hooks are global, so that nothing about the model changes. Autograd numbers the nodes of its graph in the order in
    which the forward makes them; noting the next number whenever the module changes tells whose node every number is.
    """

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        self._names: dict[int, str] = {}
        self._owners: dict[int, str] = {}  # of parameters
        self._running: list[str] = [""]
        self._since: list[int] = []
        self._whose: list[str] = []
        for model in models:
            self._learn(model)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, every call of a module is noted."""
        handles = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            del self._running[1:]

    def of_op(self, *, backward: bool) -> str:
        """The name of the module that the op that runs now belongs to; empty if there is none."""
        if not backward or len(self._running) > 1:  # a forward within the backward is run again by a checkpoint
            return self._running[-1]
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        variable = getattr(node, "variable", None)  # of what adds up a parameter's gradient
        if variable is not None:
            return self._owners.get(id(variable), "")
        place = bisect_right(self._since, node._sequence_nr())
        return self._whose[place - 1] if place else ""

    def _learn(self, model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            self._names.setdefault(id(module), name)
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), name)

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if id(module) not in self._names:
            self._learn(module)
        self._running.append(self._names.get(id(module), ""))  # who names its modules itself may leave itself out
        self._note()

    def _leave(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if len(self._running) > 1:
            self._running.pop()
        self._note()

    def _note(self) -> None:
        number = torch._C._autograd._get_sequence_nr()
        if self._since and self._since[-1] > number:
            return  # another thread, which counts by itself
        self._since.append(number)
        self._whose.append(self._running[-1])


@final
class Begun(NamedTuple):
    """An op that is about to run."""

    phase: Phase
    reads: Iterable[ValueId]
    writes: list[tuple[Entry, torch.Tensor]]
    opaque: bool
    """Whether it cannot be replayed."""
    newcomers: list[ValueId]
    """What it is the first to use, and nobody created."""


@contextmanager
def _without_garbage() -> Iterator[None]:
    """Garbage is collected before, and not within; whether Python collects it afterwards is the user's, who may say so
    within."""
    gc.collect()
    threshold = gc.get_threshold()
    gc.set_threshold(0, *threshold[1:])
    try:
        yield
    finally:
        if gc.get_threshold() == (0, *threshold[1:]):
            gc.set_threshold(*threshold)


@final
class Recorder:
    """Watches the steps of one model: first those that are not written down, which show what exists, then one that is.

    Arguments:
        models: Whose modules give ops their names.
        named: What is known by name.
        clock: What tells how long ops take, if it is not the time.
    """

    def __init__(
        self, models: Sequence[torch.nn.Module], named: Named, clock: Callable[[], Seconds] | None = None
    ) -> None:
        self.failure: BaseException | None = None
        """Why a step of an engine could not be written down."""
        self._now = clock if clock is not None else time.perf_counter
        self._within_engine = False
        self._newcomers: list[ValueId] = []
        self._newer_than: Callable[[int], Sequence[Storage]] = lambda number: ()
        self._newest = -1
        self._ledger = Ledger()
        self._modules = Modules(models)
        self._named = named
        self._infos: dict[Any, OpInfo] = {}
        self._ops: list[Op] = []
        self._saved: dict[ValueId, None] = {}
        self._savings: list[Saving] = []
        self._writing = False
        self._updating = 0
        self._phase = Phase.FORWARD
        self._clock: list[tuple[str, Seconds]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, a step runs that is not written down."""
        self._ledger.label(self._named())
        with arriving(self._handle):
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Within, the step runs that is written down. Garbage is collected before, and not within: what dies when is
        the step's own doing."""
        with _without_garbage(), self._hooked():
            self._ledger.label(self._named())
            self._ledger.begin()
            self._writing = True
            try:
                with saved_tensors_hooks(self._note_saved, lambda tensor: tensor), arriving(self._handle):
                    yield
                self._ledger.label(self._named())
            finally:
                self._writing = False

    @contextmanager
    def writing_within(self) -> Iterator[None]:
        """Within, the step of an engine runs that is written down, once its handlers are `around`."""
        self._within_engine = True
        with _without_garbage(), self._hooked():
            yield
            self._guarded(lambda: self._ledger.label(self._named()))

    def around(
        self,
        inner: Around | None,
        present: Sequence[tuple[Storage, bool]],
        newer_than: Callable[[int], Sequence[Storage]],
    ) -> Around:
        """What writes ops down that handlers of an engine run, with `inner` around them; the step begins now. Of the
        storages that are `present` it is said whether each is left over from an earlier step; `newer_than` gives those
        that the engine has met since one of that number."""
        self._newer_than, self._newest = newer_than, max((one.number for one, _ in present), default=-1)

        def begin() -> None:
            self._ledger.begin_among(present)
            self._ledger.label(self._named())

        self._guarded(begin)

        def recording(known: Known) -> Handler:
            handler, info = known.handler if inner is None else inner(known), self._info_of(known.func)
            if info.view:
                return handler

            def handle(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                run = functools.partial(handler, mode, func, types, args, kwargs)
                return self._write_down_beside(info, args, kwargs or {}, run)

            return handle

        return recording

    def _meet(self) -> None:
        """What the engine has met meanwhile, as it does what NumPy made, the op creates that runs now."""
        for storage in self._newer_than(self._newest):
            self._newest = storage.number
            entry = self._ledger.take_in(storage)
            if entry is not None:
                entry.kind = Kind.INPUT
                self._ledger.enter(entry)
                self._newcomers.append(entry.value)

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """Within, it is noted whose update and which module runs."""
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._begin_update).remove)
            stack.callback(register_optimizer_step_post_hook(self._end_update).remove)
            stack.enter_context(self._modules.watched())
            yield

    @contextmanager
    def timing(self) -> Iterator[list[tuple[str, Seconds]]]:
        """Within, a step runs whose ops are timed: their names and seconds, in order."""
        clock = self._clock = []
        with arriving(self._handle):
            yield clock

    def finish(self) -> Step:
        """What was written down, with the seconds that every op took."""
        needed = {value for op in self._ops if op.phase is Phase.BACKWARD for value in op.reads} | self._saved.keys()
        return Step(
            storages=self._ledger.close(needed), values=tuple(self._ledger.values), ops=tuple(self._ops),
            saved=tuple(self._saved), savings=tuple(self._savings),
        )  # fmt: skip

    # ------------------------------------------------------------------ ops

    @unheard
    def _handle(self, _: Any, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        info = self._info_of(func)
        if info.view:
            return func(*args, **kwargs)
        out = self._write_down(info, args, kwargs) if self._writing else self._look(info, args, kwargs)
        if info.uncounted and tensors_are_fake():
            torch.autograd.graph.increment_version([tensor for tensor in args[0] if not tensor.is_inference()])
        return out

    def _info_of(self, func: Any) -> OpInfo:
        info = self._infos.get(func)
        if info is None:
            info = self._infos[func] = OpInfo(func)
        return info

    @unheard_by_modes
    def _guarded(self, write: Callable[[], T]) -> T | None:
        """In a step of the user's nothing that goes wrong here may be seen."""
        if self.failure is not None:
            return None
        try:
            return write()
        except Exception as error:
            self.failure = error
            return None

    def _look(self, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an op that is not written down: what it reads and makes is known afterwards."""
        began = self._now()
        out = info.func(*args, **kwargs)
        self._clock.append((str(info.func), self._now() - began))
        for _, tensor, _ in operands(info, args, kwargs):
            self._ledger.see(tensor)
        for tensor in tensors_of(out):
            self._ledger.see(tensor)
        return out

    def _write_down(self, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        begun = self._begin_op(info, args, kwargs)
        out, seconds = self._run(functools.partial(info.func, *args, **kwargs))
        self._end_op(info, args, kwargs, begun, out, seconds)
        return out

    def _write_down_beside(
        self, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """The same of an op that an engine runs, of which nothing is known any more once it has failed."""
        begun = self._guarded(lambda: self._begin_op(info, args, kwargs))
        try:
            out, seconds = self._run(run)
        except BaseException as error:
            self.failure = self.failure or error
            raise
        if begun is not None:
            self._guarded(lambda: self._end_op(info, args, kwargs, begun, out, seconds))
        return out

    def _run(self, run: Callable[[], Any]) -> tuple[Any, Seconds]:
        self._ledger.running = True
        began = self._now()
        try:
            out = run()
            return out, max(self._now() - began, 0.0)
        finally:
            self._ledger.running = False

    @unheard
    def _begin_op(self, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Begun:
        self._newcomers = []
        self._meet()
        phase = self._phase if info.func.namespace == "profiler" else self._turn()  # marks, which optimizers set
        reads, writes, opaque = self._operands(info, args, kwargs)
        return Begun(phase, reads, writes, opaque or bool(self._newcomers), self._newcomers)

    @unheard
    def _end_op(
        self, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any], begun: Begun, out: Any, seconds: Seconds
    ) -> None:
        phase, reads, writes, opaque, newcomers = begun
        new = set(newcomers)  # created by this op: it cannot read them, and writing them makes no other value
        writes = [(entry, tensor) for entry, tensor in writes if entry.value not in new]
        creates, resized = [*newcomers, *(self._ledger.write(entry) for entry, _ in writes)], False
        for entry, tensor in writes:
            resized |= self._ledger.resized(entry)
            creates += self._new(tensor)
        for tensor in tensors_of(out):
            creates += self._new(tensor)
        self._newcomers = creates
        self._meet()
        self._append(
            Op(
                number=self._ledger.now, name=str(info.func), phase=phase, creates=tuple(creates),
                reads=tuple(value for value in reads if value not in new), seconds=seconds, seeded=info.seeded,
                replayable=not (opaque or resized or info.exactness == NEVER),
                module=self._modules.of_op(backward=phase is Phase.BACKWARD),
                flops=flops_of(info, args, kwargs, out), traffic=traffic_of(info, args, kwargs, out),
                shape=shape_of(info, args, out),
            )
        )  # fmt: skip

    def _operands(
        self, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[dict[ValueId, None], list[tuple[Entry, torch.Tensor]], bool]:
        """The values that an op is about to read, the storages that it writes, and whether one operand has no bytes of
        its own. Running statistics are written and not read in training."""
        reads: dict[ValueId, None] = {}
        writes: dict[int, tuple[Entry, torch.Tensor]] = {}
        opaque, training = False, bool(info.scratch) and info.trains(args)
        for place, tensor, name in operands(info, args, kwargs):
            entry = self._entry(tensor)
            if entry is None:
                opaque = True
                continue
            opaque |= tensor.is_conj() or tensor.is_neg() or tensor.is_nested or tensor.is_quantized
            statistic = training and place in info.scratch
            if statistic or name in info.schema_writes:
                writes.setdefault(entry.number, (entry, tensor))
            if not statistic:
                reads[entry.value] = None
        return reads, list(writes.values()), opaque

    def _entry(self, tensor: torch.Tensor) -> Entry | None:
        """The storage of an operand; one that was never seen has just come into being."""
        entry, new = self._ledger.see(tensor)
        if entry is not None and new:
            entry.kind = Kind.INPUT
            if self._within_engine:
                self._newcomers.append(entry.value)
                return entry
            self._append(
                Op(
                    number=self._ledger.now, name=OUTSIDE, phase=self._phase, reads=(), creates=(entry.value,),
                    replayable=False, module=self._modules.of_op(backward=self._phase is Phase.BACKWARD),
                )
            )  # fmt: skip
        return entry

    def _new(self, tensor: torch.Tensor) -> list[ValueId]:
        entry, new = self._ledger.see(tensor)
        return [entry.value] if entry is not None and new else []

    def _append(self, op: Op) -> None:
        self._ops.append(op)
        self._ledger.now = len(self._ops)

    # ------------------------------------------------------------------ what else happens

    def _turn(self) -> Phase:
        """The phase of the op that is about to run. Gradients have their names when the backward is over."""
        before = self._phase
        if torch._C._current_graph_task_id() != -1:
            self._phase = Phase.BACKWARD
        elif self._updating or (before is not Phase.FORWARD and not torch.is_grad_enabled()):
            self._phase = Phase.OPTIMIZER
        else:
            self._phase = Phase.FORWARD
        if before is Phase.BACKWARD and self._phase is not before:
            self._ledger.label(self._named())
        return self._phase

    def _begin_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._updating += 1
        self._guarded(lambda: self._ledger.label(self._named()))

    def _end_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._updating -= 1

    @unheard
    def _note_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        entry = self._entry(tensor)
        if entry is not None and torch._C._current_graph_task_id() == -1:
            self._saved[entry.value] = None
            if entry.kind not in (Kind.PARAMETER, Kind.BUFFER):
                self._savings.append(
                    Saving(
                        value=entry.value, after=self._ledger.now, module=self._modules.of_op(backward=False),
                        dtype=str(tensor.dtype)[6:], differentiable=tensor.requires_grad,
                    )
                )  # fmt: skip
        return tensor


def with_medians(step: Step, again: Sequence[Sequence[tuple[str, Seconds]]]) -> Step:
    """The step with the medians of its own seconds and those of the runs of it that made the same ops `again`."""
    names = [op.name for op in step.ops if op.seconds is not None]
    alike = [[seconds for _, seconds in run] for run in again if [name for name, _ in run] == names]
    ops, position = [], 0
    for op in step.ops:
        if op.seconds is None:  # nobody ran it
            ops.append(op)
            continue
        ops.append(replace(op, seconds=median([op.seconds, *(run[position] for run in alike)])))
        position += 1
    return replace(step, ops=tuple(ops))
