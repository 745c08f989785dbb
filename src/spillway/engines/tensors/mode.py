"""The dispatch mode: sees every op of a step, and hands it on to the function that was made for it (`handlers`).

What that function does not take comes back to `Usual` here: ops with several results, ops that write several tensors,
and any op while room is short. Whatever `Usual` does not take either (tensor lists, keyword tensors, random ops,
tensors that were never seen) goes through `General`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spillway.engines.controller import UNLIMITED
from spillway.engines.records import Recipe, Storage, Value
from spillway.engines.tensors.calls import (
    Call,
    Environment,
    Operand,
    Place,
    geometry_of,
    operands,
    random_state,
    surroundings_with,
    with_holes,
)
from spillway.engines.tensors.handlers import Handler, Usual, handler_for
from spillway.engines.tensors.machine import tensors_of
from spillway.engines.tensors.ops import LAZY_BITS, ODD_DTYPES, PLAIN_TENSORS, OpInfo
from spillway.engines.tensors.private import rules_of, unheard
from spillway.engines.tensors.private import storage_address as _address

if TYPE_CHECKING:
    from spillway.engines.tensors.engine import TensorEngine
    from spillway.engines.tensors.places import AbstractPlace

Completion = Callable[..., Any]
"""Runs a ready op: see `build_completion`."""


class Known(NamedTuple):
    """An op that was met."""

    func: Any
    """Kept alive, and so its id."""
    handler: Handler
    rules: dict[type, Handler]
    """Where torch looks for the handler (`rules_of`)."""


Around = Callable[[Known], Handler]
"""What stands in front of a handler in a step that is recorded."""


@final
class Dispatch:
    """The mode of one engine, and its handlers.

    The mode's class is the engine's own. torch finds a handler by op and class, so that no op waits for Python code
    that looks for it; only an op that was never seen, or a torch that does not look, comes through
    `__torch_dispatch__`. Handlers are where torch finds them only while a step is watched, because that place would
    keep the engine alive. The wrapper against dynamo is left out because it costs as much as all we do.
    """

    def __init__(self, engine: TensorEngine) -> None:
        self._engine = engine
        self._usual = build_usual(engine)
        self._handlers: dict[int, Known] = {}
        self._watching = False
        self._around: Around | None = None
        self._class = type(
            "TrackingMode",
            (TorchDispatchMode,),
            {
                "__torch_dispatch__": self._build(),
                "_should_skip_dynamo": classmethod(lambda cls: False),
            },
        )
        self._mode: Any = self._class()

    def _build(self) -> Handler:
        handlers, learn, watched = self._handlers, self._learn, self._watched

        def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            known = handlers.get(id(func)) or learn(func)
            return watched(known)(mode, func, types, args, kwargs)

        return dispatch

    def _learn(self, func: Any) -> Known:
        info = self._engine.infos.get(id(func)) or self._engine.learn_op(func)
        known = self._handlers[id(func)] = Known(func, handler_for(info, self._engine, self._usual), rules_of(func))
        if self._watching:
            known.rules[self._class] = self._watched(known)
        return known

    def _watched(self, known: Known) -> Handler:
        return known.handler if self._around is None else self._around(known)

    def disarm(self) -> None:
        """In a forked child: let every op through. The mode itself may be in use and stays where it is."""

        def let_through(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

        self.start_anew()
        type.__setattr__(self._class, "__torch_dispatch__", let_through)

    def push(self, around: Around | None = None) -> None:
        """Watch from here, through what `around` makes of the handlers."""
        self._watching, self._around = True, around
        for known in self._handlers.values():
            known.rules[self._class] = self._watched(known)
        self._mode.__enter__()

    def pop(self) -> None:
        """Watch no longer."""
        self._mode.__exit__(None, None, None)
        self._watching, self._around = False, None
        for known in self._handlers.values():
            known.rules.pop(self._class, None)

    def start_anew(self) -> None:
        """What is known about ops has changed: make their handlers again when they come next."""
        for known in self._handlers.values():
            known.rules.pop(self._class, None)
        self._handlers.clear()


@final
@dataclass(slots=True)
class Seen:
    """One op as the mode found it, on its way through the engine because it is not ready to run."""

    info: OpInfo
    args: Sequence[Any]
    kwargs: dict[str, Any] | None
    reads: list[Value]
    """The values it reads."""
    places: Sequence[Place]
    """Where their tensors stand in the call."""
    writes: Sequence[Storage]
    """Storages it writes."""
    scratch: Sequence[Operand] = ()
    """Operands that a replay replaces by zeros."""
    opaque: bool = False
    """Whether something about the call cannot be recorded, so that it gets no recipe."""

    def run(self, complete: Completion) -> Any:
        """Run the op, now that everything is ready."""
        return complete(
            self.info, self.args, self.kwargs, self.reads, self.places, self.writes, self.scratch, self.opaque
        )


def build_usual(engine: TensorEngine) -> Usual:
    """What takes the calls that no handler finishes; it counts the op."""
    controller, table, interrupts = engine.controller, engine.table, engine.interrupts
    plain, odd = PLAIN_TENSORS, ODD_DTYPES
    complete = build_completion(engine)
    general = General(engine, complete)
    limited = controller.allowed < UNLIMITED

    def usual(info: OpInfo, args: Sequence[Any], kwargs: Any) -> Any:
        if interrupts:
            engine.raise_interrupt()
        if not info.fast:
            return general(info, args, kwargs or {})
        controller.clock = clock = controller.clock + 1
        reads: list[Value] = []
        places: list[Place] = []
        ready = True
        for place in info.tensors:
            if place >= len(args):
                break
            tensor = args[place]
            if type(tensor) not in plain:
                if isinstance(tensor, torch.Tensor):
                    return general(info, args, kwargs or {})
                continue
            try:
                storage: Any = table.get(_address(tensor))
            except RuntimeError:  # sparse and oneDNN tensors have no storage
                storage = None
            if storage is None:  # taking it into account may make others leave, `tensor`'s neighbours too
                controller.clock = clock - 1
                return general(info, args, kwargs or {})
            storage.touched = clock
            value = storage.value
            if value.absent:
                ready = False
            if tensor.dtype in odd or tensor.is_nested:
                controller.clock = clock - 1
                return general(info, args, kwargs or {})
            reads.append(value)
            places.append(place)
        writes = _written(info.writes, args, table) if info.writes else ()
        if limited or not ready:
            for storage in writes:
                if storage.value.dependents:
                    ready = False
            bound = info.bound
            needed = bound(args) if bound is not None else None
            if not ready or needed is None or controller.resident + needed > controller.allowed:
                return engine.run_short_of_room(Seen(info, args, kwargs, reads, places, writes), complete)
        return complete(info, args, kwargs, reads, places, writes)

    return usual


def _written(places: Sequence[int], args: Sequence[Any], table: dict[int, Storage]) -> Sequence[Any]:
    return [table[_address(args[place])] for place in places if place < len(args) and args[place] is not None]


def build_completion(engine: TensorEngine) -> Completion:
    """The function that runs an op that is ready to run, and registers what it created and wrote."""
    recorder, overwrite, now = Recorder(engine), engine.controller.overwrite, engine.place.now
    recording = engine.controller.policy.uses_recipes

    def complete(
        info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any] | None, reads: list[Value], places: Sequence[Place],
        writes: Sequence[Any], scratch: Sequence[Operand] = (), opaque: bool = False,
    ) -> Any:  # fmt: skip
        payload: Any = None
        if recording and info.exactness and not opaque and (info.fresh or _has_history(writes)):
            payload = recorder.payload(info, args, kwargs, reads, places, scratch)
        began = now()
        try:
            out = info.call(*args, **kwargs) if kwargs else info.call(*args)
        except BaseException:
            for storage in writes:
                overwrite(storage, None)  # whatever it wrote until then
            raise
        seconds = now() - began
        edges: Sequence[tuple[int, Value]] = ()
        if writes:
            if recording or info.resizes:
                edges = recorder.note_writes(info, reads, writes, replayable=payload is not None)
            else:
                for storage in writes:
                    if storage.value.home is not None:
                        overwrite(storage, None)
        created = recorder.note_creations(out) if info.fresh and out is not None else {}
        if payload is not None and (created or edges):
            recorder.write_down(info, reads, payload, seconds, created, edges)
        return out

    return complete


@final
class Recorder:
    """Writes recipes, and the less usual things that an op does to storages."""

    __slots__ = ("_controller", "_engine", "_surroundings")

    def __init__(self, engine: TensorEngine) -> None:
        self._engine = engine
        self._controller = engine.controller
        self._surroundings = surroundings_with(engine.place.settings)

    def payload(
        self, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any] | None, reads: list[Value],
        places: Sequence[Any], scratch: Sequence[Operand],
    ) -> Call:  # fmt: skip
        """The op about to run, in enough detail to run it again."""
        for value in reads:
            value.recorded = True
        if not info.fast:
            return _record_generally(info, args, kwargs or {}, places, scratch, self._engine.place)
        holes = list(args)
        recorded: list[Operand] = []
        for place in places:
            recorded.append((place, geometry_of(holes[place])))
            holes[place] = None
        random = random_state(kwargs, self._engine.place.generator) if info.seeded else None
        return Call(info.func, holes, kwargs, recorded, self._surroundings.now(), random=random)

    def note_writes(
        self, info: OpInfo, reads: Sequence[Value], writes: Sequence[Storage], *, replayable: bool
    ) -> list[tuple[int, Value]]:
        """In-place: an edge from one version to the next if the old one can be recomputed, else a new source."""
        edges: list[tuple[int, Value]] = []
        for storage in dict.fromkeys(writes):  # a list may hold several views of one
            old = storage.value
            new = self._controller.overwrite(storage, None)
            if replayable and old is not None and old.recipe is not None and old in reads:
                edges.append((reads.index(old), new))
            if info.resizes:
                self._engine.check_size(storage)
        return edges

    def note_creations(self, out: Any) -> dict[int, Value]:
        """Register the storages of the results: their values by position."""
        created: dict[int, Value] = {}
        for position, tensor in enumerate(tensors_of(out)):
            storage = self._engine.register_new(tensor)
            if storage is not None and storage.value is not None:
                created[position] = storage.value
        return created

    def write_down(
        self, info: OpInfo, reads: Sequence[Value], payload: Call, seconds: float, created: dict[int, Value],
        edges: Sequence[tuple[int, Value]],
    ) -> None:  # fmt: skip
        """The recipe of what the op created and wrote."""
        recipe = Recipe(
            self._controller.clock,
            info.name,
            reads,
            payload._replace(outputs=tuple(created)),
            seconds,
            info.exactness,
            creates=tuple(created.values()),
            writes=edges,
            nbytes=sum(value.storage.nbytes for value in created.values()),
        )
        self._controller.remember(recipe)


def _record_generally(
    info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any], places: Sequence[Place], scratch: Sequence[Operand],
    device: AbstractPlace,
) -> Call:  # fmt: skip
    holes, named = with_holes(args, kwargs)
    wanted = set(places)
    recorded = [(place, geometry_of(t)) for place, t, _ in operands(info, args, kwargs) if place in wanted]
    random = random_state(kwargs, device.generator) if info.seeded else None
    return Call(info.func, holes, named, recorded, Environment.now(device.settings), (0,), scratch, random)


def _has_history(writes: Sequence[Storage]) -> bool:
    """Whether the next version of anything written can be recomputed: its present one must have a recipe."""
    return any(storage.value is not None and storage.value.recipe is not None for storage in writes)


@final
class General:
    """The long way: any call at all."""

    __slots__ = ("_complete", "_engine")

    def __init__(self, engine: TensorEngine, complete: Completion) -> None:
        self._engine = engine
        self._complete = complete

    @unheard
    def __call__(self, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        engine = self._engine
        engine.raise_interrupt()
        engine.controller.clock += 1
        if info.name in LAZY_BITS:
            engine.note_lazy_bits()
        seen = Seen(info, args, kwargs, [], (), ())
        seen.opaque = info.varies is not None and info.varies(args)
        places: list[Place] = []
        scratch: list[Operand] = []
        writes: list[Storage] = []
        training = bool(info.scratch) and info.trains(args)
        for place, tensor, name in operands(info, args, kwargs):
            storage = engine.lookup(tensor)
            if storage is None:
                engine.reveal_inside(tensor)
                seen.opaque = True
                continue
            seen.opaque |= tensor.is_conj() or tensor.is_neg() or tensor.is_nested or tensor.is_quantized
            storage.touched = engine.controller.clock
            running_statistic = training and place in info.scratch
            if running_statistic or name in info.schema_writes:
                writes.append(storage)
            if running_statistic:
                scratch.append((place, geometry_of(tensor)))
            else:
                seen.reads.append(engine.current(storage))
                places.append(place)
        seen.places, seen.scratch, seen.writes = places, scratch, writes
        out = engine.run_short_of_room(seen, self._complete)
        engine.fused_updates += info.name.startswith("aten::_fused_")
        if info.uncounted:
            torch.autograd.graph.increment_version([tensor for tensor in args[0] if not tensor.is_inference()])
        return out
