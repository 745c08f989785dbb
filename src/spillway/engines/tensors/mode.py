"""The dispatch mode: sees every op of a step, and costs as little as Python allows while there is room.

NOTE [The short way]. For most ops it is: look up each tensor's storage by address, compare one bound with the budget, run
the op, register what it created. State lives in closure cells instead of attributes, and anything unusual (tensor lists,
keyword tensors, random ops, absent inputs, not enough room) leaves through `_general` or `prepare`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spillway.engines.records import NEVER, Recipe, Storage, Value
from spillway.engines.tensors.calls import Call, Environment, Geometry, operands, with_holes
from spillway.engines.tensors.machine import tensors_of
from spillway.engines.tensors.ops import LAZY_BITS, PLAIN_TENSORS, OpInfo

if TYPE_CHECKING:
    from spillway.engines.tensors.engine import TensorEngine

_address = torch._C._storage_address
_storage_of = torch._C.TensorBase.untyped_storage
_now = time.perf_counter


def tracking_mode(engine: TensorEngine) -> TorchDispatchMode:
    """The mode to push for the length of a step.

    A class of its own per engine: torch looks `__torch_dispatch__` up on the class, and a plain function with closure cells is
    the cheapest thing that it can find there. The wrapper against dynamo is left out because it costs as much as all we do.
    """
    members = {"__torch_dispatch__": build_dispatch(engine), "_should_skip_dynamo": classmethod(lambda cls: False)}
    mode: TorchDispatchMode = type("TrackingMode", (TorchDispatchMode,), members)()
    return mode


@final
class Seen:
    """One op as the mode found it: the values it reads, where they stand, what it writes."""

    __slots__ = ("args", "geometry", "info", "kwargs", "opaque", "reads", "scratch", "writes")

    def __init__(self, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any] | None) -> None:
        self.info = info
        self.args = args
        self.kwargs = kwargs
        self.reads: list[Value] = []
        self.geometry: list[Geometry] = []
        self.scratch: list[Geometry] = []
        self.writes: list[Storage] = []
        self.opaque = False
        """Whether something about the call cannot be recorded, so that it gets no recipe."""


def build_dispatch(engine: TensorEngine) -> Callable[..., Any]:
    """The function that torch calls for every op; see NOTE [The short way]."""
    controller, table, infos, interrupts = engine.controller, engine.table, engine.infos, engine.interrupts
    adopt, learn, complete, general, plain = engine.adopt, engine.learn_op, Completion(engine), General(engine), PLAIN_TENSORS

    def dispatch(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        info = infos.get(func) or learn(func)
        if info.view:
            return func(*args, **kwargs) if kwargs else func(*args)
        if not info.fast or interrupts or engine.lazy_bits:
            return general(info, args, kwargs or {})
        controller.clock = clock = controller.clock + 1
        seen = Seen(info, args, kwargs)
        reads, geometry, ready = seen.reads, seen.geometry, True
        for place in info.tensors:
            if place >= len(args):
                break
            tensor = args[place]
            if type(tensor) not in plain:
                if isinstance(tensor, torch.Tensor):
                    return general(info, args, kwargs or {})
                continue
            storage = table.get(_address(tensor)) or adopt(tensor)
            if storage is None:
                return general(info, args, kwargs or {})
            storage.touched = clock
            value = storage.value
            if value.absent:
                ready = False
            reads.append(value)
            geometry.append((place, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype))
        for place in info.writes:
            if place < len(args) and args[place] is not None:
                storage = table[_address(args[place])]
                seen.writes.append(storage)
                if storage.value.dependents:
                    ready = False
        if ready:
            needed = info.bound(args) if info.bound is not None else None
            if needed is not None and controller.resident + needed <= controller.allowed:
                return complete(seen)
        return engine.run_short_of_room(seen, complete)

    return dispatch


@final
class Completion:
    """Runs an op that is ready to run, and registers what it created and wrote."""

    __slots__ = ("_engine", "_environment", "_raw", "_recipes_wanted")

    def __init__(self, engine: TensorEngine) -> None:
        self._engine = engine
        self._environment = Environment.now()
        self._raw = tuple(self._environment)
        self._recipes_wanted = engine.controller.policy.uses_recipes

    def __call__(self, seen: Seen) -> Any:
        info, args, kwargs = seen.info, seen.args, seen.kwargs
        call = self._record(seen) if self._recipes_wanted and not seen.opaque else None
        began = _now()
        try:
            out = info.func(*args, **kwargs) if kwargs else info.func(*args)
        except BaseException:
            for storage in seen.writes:
                self._engine.controller.overwrite(storage, None)  # whatever it wrote until then
            raise
        recipe: Recipe | None = None
        if call is not None:
            recipe = Recipe(
                self._engine.controller.clock, info.name, seen.reads, call, _now() - began, info.exactness
            )
        if seen.writes:
            self._note_writes(seen, recipe)
        if info.single:
            self._note_creation(out, recipe, call)
        elif out is not None:
            self._note_creations(out, recipe, call)
        if recipe is not None and (recipe.creates or recipe.writes):
            self._engine.controller.recipes.append(recipe)
        return out

    def _record(self, seen: Seen) -> Call | None:
        if seen.info.exactness == NEVER:
            return None
        raw = (
            torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype(),
            torch._C._get_deterministic_algorithms(), torch._C._get_mkldnn_enabled(),
        )  # fmt: skip
        if raw != self._raw:
            self._raw, self._environment = raw, Environment(*raw)
        if seen.info.fast:
            holes, named = list(seen.args), seen.kwargs
            for operand in seen.geometry:
                holes[operand[0]] = None
        else:
            holes, named = with_holes(seen.args, seen.kwargs or {})
        call = Call(seen.info.func, holes, named, seen.geometry, self._environment)
        if seen.info.seeded:
            generator = (seen.kwargs or {}).get("generator") or torch.default_generator
            call.random = (generator, generator.get_state())
        if seen.scratch:
            call.scratch = seen.scratch
        return call

    def _note_writes(self, seen: Seen, recipe: Recipe | None) -> None:
        """In-place: an edge from one version to the next if the old one can be recomputed, else a new source."""
        controller = self._engine.controller
        for storage in seen.writes:
            old = storage.value
            replayable = recipe is not None and old is not None and old.recipe is not None
            value = controller.overwrite(storage, recipe if replayable else None)
            if replayable and recipe is not None and old is not None:
                recipe.writes = (*recipe.writes, (seen.reads.index(old), value))
            if seen.info.resizes:
                self._engine.check_size(storage)

    def _note_creation(self, out: Any, recipe: Recipe | None, call: Call | None) -> None:
        try:
            key = _address(out)
        except (RuntimeError, NotImplementedError, TypeError):
            self._engine.unmanaged += 1
            return
        if key in self._engine.table:
            return
        storage = self._engine.register(out, key)
        if recipe is not None and storage is not None:
            recipe.creates = (storage.value,)
            recipe.nbytes = storage.nbytes
            storage.value.recipe = recipe

    def _note_creations(self, out: Any, recipe: Recipe | None, call: Call | None) -> None:
        created: list[Value] = []
        positions: list[int] = []
        for position, tensor in enumerate(tensors_of(out)):
            storage = self._engine.register_new(tensor)
            if storage is None:
                continue
            created.append(storage.value)
            positions.append(position)
            storage.value.recipe = recipe
        if recipe is not None and call is not None:
            recipe.creates = created
            recipe.nbytes = sum(value.storage.nbytes for value in created)
            call.outputs = tuple(positions)


@final
class General:
    """The long way: any call at all."""

    __slots__ = ("_complete", "_engine")

    def __init__(self, engine: TensorEngine) -> None:
        self._engine = engine
        self._complete = Completion(engine)

    def __call__(self, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        engine = self._engine
        engine.raise_interrupt()
        engine.controller.clock += 1
        if info.name in LAZY_BITS:
            engine.lazy_bits = True
        seen = Seen(info, args, kwargs)
        training = bool(info.scratch) and info.trains(args)
        for place, tensor, name in operands(info, args, kwargs):
            storage = engine.lookup(tensor)
            if storage is None:
                seen.opaque = True
                continue
            geometry = (place, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
            seen.opaque |= tensor.is_conj() or tensor.is_neg()
            storage.touched = engine.controller.clock
            running_statistic = training and place in info.scratch
            if running_statistic or name in info.schema_writes:
                seen.writes.append(storage)
            if running_statistic:
                seen.scratch.append(geometry)
            else:
                seen.reads.append(engine.current(storage))
                seen.geometry.append(geometry)
        return engine.run_short_of_room(seen, self._complete)
