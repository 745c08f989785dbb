"""What is done for the ops that make up nearly all of a step: one function per op, made for it.

NOTE [The shortest way]. What is known about an op once and for all (is it a view, does it create storages, does it
write its first argument) is decided when its function is made. The function looks each tensor's storage up by the
address of its storage object, compares one bound with the budget, runs the op and registers what it created. State
lives in closure cells.

Between two ops comes what waited for that: a Ctrl-C, a look ahead. Then, before the op runs, a function changes nothing
but when a storage was last used. So whatever it meets that is unusual (an absent input, a tensor that was never seen,
no room) it leaves as it is to `usual`, which begins anew and counts the op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch

from spillway.engines.environment import Surroundings
from spillway.engines.tensors.abstract import AbstractTensorEngine
from spillway.engines.tensors.bindings import quickest_call
from spillway.engines.tensors.calls import OPERAND, Call, Operand, random_state
from spillway.engines.tensors.collectives import NAMESPACES
from spillway.engines.tensors.cpu_machine import tensors_of
from spillway.engines.tensors.ops import KEPT_WITHIN, NO_TENSORS, ODD_DTYPES, PLAIN_TENSORS, OpInfo
from spillway.internals.dispatch_key import Handler
from spillway.internals.private import storage_address as _address
from spillway.memory.records import LARGE, Recipe, Storage, Value

HANDED_OVER: Final = "aten::lift_fresh"
"""By this view `torch.tensor()` hands over what it has made."""

Usual = Callable[[OpInfo, Sequence[Any], Any], Any]
"""Takes any call at all."""

_recipe = cast("Callable[[tuple[Any, ...]], Recipe]", functools.partial(tuple.__new__, Recipe))
"""A recipe of all its fields, in a third of the time that naming them takes."""


def handler_for(info: OpInfo, engine: AbstractTensorEngine, usual: Usual, *, recipes: bool) -> Handler:
    """The cheapest function that does all there is to do for the op. Some write recipes also if none are wanted."""
    if info.name.startswith(NAMESPACES):
        run = engine.collectives.run
        return lambda _, func, types, args=(), kwargs=None: run(info, args, kwargs or {})
    if info.name == HANDED_OVER:
        return _taking_in(info, engine)
    if info.name in KEPT_WITHIN:
        return _handing_out(info, engine)
    if info.view:
        view = _passing_by(info) if engine.machine.readable_in_place else _bringing_back(info, engine)
        return _parting(info, view, usual) if engine.sparse_tensors else view
    recorded = bool(engine.controller.policy.uses_recipes and info.exactness)
    if info.writes_statistics and info.bound is not None and recorded:
        return _normalising(info, engine, usual)
    recorded = recorded and recipes
    if info.fast and not info.resizes:
        if info.fresh and not info.writes:
            return (_creating_with_recipe if recorded else _creating)(info, engine, usual)
        if not info.fresh and info.writes in ((), (0,)):
            write = _writing(info, engine, usual)
            return _filling(info, engine, write, usual) if info.resized else write
    return lambda _, func, types, args=(), kwargs=None: usual(info, args, kwargs)


def _passing_by(info: OpInfo) -> Handler:
    """For views: they touch no bytes."""
    call, call_with = quickest_call(info.func)  # it needs no memory
    plain, as_it_came = PLAIN_TENSORS, info.call

    def handle(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and type(args[0]) in plain:
            return call_with(*args, **kwargs) if kwargs else call(*args)
        with torch._C.DisableTorchFunctionSubclass():  # a subclass has had its say
            return as_it_came(*args, **(kwargs or {}))

    return handle


def _taking_in(info: OpInfo, engine: AbstractTensorEngine) -> Handler:
    """For a view of what was made out of sight: it is in memory already, used or not."""
    view, lookup = _passing_by(info), engine.lookup

    def handle(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lookup(args[0])
        return view(_, func, types, args, kwargs)

    return handle


def _handing_out(info: OpInfo, engine: AbstractTensorEngine) -> Handler:
    """For what torch goes on to read within another tensor."""
    view = _passing_by(info)

    def handle(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = view(_, func, types, args, kwargs)
        engine.stay([out])
        return out

    return handle


def _bringing_back(info: OpInfo, engine: AbstractTensorEngine) -> Handler:
    """For views where an absent storage has a size of 0, beyond which torch makes none."""
    view, find = _passing_by(info), engine.find

    def handle(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        storage = find(args[0]) if args else None
        if storage is not None and storage.value is not None and storage.value.absent:
            with engine.controller.lock:
                engine.fetch(storage)
        return view(_, func, types, args, kwargs)

    return handle


def _parting(info: OpInfo, view: Handler, usual: Usual) -> Handler:
    """For views, once something sparse is about."""
    of_parts, plain, strided = info.of_parts(), PLAIN_TENSORS, torch.strided

    def handle(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and type(args[0]) in plain and args[0].layout is not strided:
            return usual(of_parts, args, kwargs)
        return view(_, func, types, args, kwargs)

    return handle


def _creating(info: OpInfo, engine: AbstractTensorEngine, usual: Usual) -> Handler:
    """For ops that create storages and write none, when no recipes are wanted."""
    controller, table, interrupts, register = engine.controller, engine.table, engine.interrupts, engine.register
    budget = engine.budget
    call, call_with = engine.backend.calls(info)
    bound, safety, limited = info.bound, info.safety, engine.budget.limited
    plain, harmless, here, expect = PLAIN_TENSORS, NO_TENSORS, engine.backend.devices, engine.creations.expect
    several = None if info.single else _registering_several(info, engine)

    def handle(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if interrupts:
            engine.raise_interrupt()
        clock = controller.clock + 1
        for given in args:
            if type(given) in plain:
                try:
                    storage = table[_address(given)]
                except (KeyError, RuntimeError):
                    return usual(info, args, kwargs)
                storage.touched = clock
                if storage.value.absent:  # type: ignore[union-attr]
                    return usual(info, args, kwargs)
            elif type(given) not in harmless:
                return usual(info, args, kwargs)
        if limited:
            needed = bound(args) if bound is not None else None
            if needed is None or budget.resident + needed > budget.allowed:
                return usual(info, args, kwargs)
            if needed >= LARGE:
                expect(needed // safety)
        controller.clock = clock
        out = call_with(*args, **kwargs) if kwargs else call(*args)
        if several is not None:
            return several(out, clock, [], None, 0.0)
        try:
            key = _address(out)
        except (RuntimeError, TypeError):
            engine.pass_by(out)
            return out
        if key not in table:
            if kwargs and info.takes_device and out.device not in here:
                engine.unmanaged += 1
                return out
            register(out, key)
        return out

    return handle


def _creating_with_recipe(info: OpInfo, engine: AbstractTensorEngine, usual: Usual) -> Handler:
    """For ops that create storages and write none. The payload of their recipes is what `Call.unpacked` reads."""
    controller, table, interrupts, register = engine.controller, engine.table, engine.interrupts, engine.register
    call, call_with = engine.backend.calls(info)
    budget, bound, safety, limited = engine.budget, info.bound, info.safety, engine.budget.limited
    append, expect, now = controller.recipes.append, engine.creations.expect, engine.backend.now
    plain, harmless, odd, name, exactness = PLAIN_TENSORS, NO_TENSORS, ODD_DTYPES, info.name, info.exactness
    surroundings, same = Surroundings(engine.backend.settings_of(info)), engine.geometries.setdefault
    several = None if info.single else _registering_several(info, engine)

    def handle(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if interrupts:
            engine.raise_interrupt()
        clock, last = controller.clock + 1, -1
        reads: list[Value] = []
        payload = [info.func, args, kwargs, surroundings.now()]
        for place, given in enumerate(args):
            if type(given) in plain:
                try:
                    storage = table[_address(given)]
                    geometry = given.shape, given.stride(), given.storage_offset(), given.dtype
                except (KeyError, RuntimeError):
                    return usual(info, args, kwargs)
                storage.touched = clock
                value: Any = storage.value
                if value.absent or geometry[3] in odd:
                    return usual(info, args, kwargs)
                value.recorded = True
                reads.append(value)
                payload.append(same(geometry, geometry))
                last = place
            elif type(given) not in harmless:
                return usual(info, args, kwargs)
        needed = (bound(args) if bound is not None else None) if limited else 0
        if needed is None or budget.resident + needed > budget.allowed:
            return usual(info, args, kwargs)
        if needed >= LARGE:
            expect(needed // safety)
        controller.clock = clock
        payload[1] = args[len(reads) :] if last + 1 == len(reads) else _where_tensors_stand(args)
        began = now()
        out = call_with(*args, **kwargs) if kwargs else call(*args)
        seconds = now() - began
        if several is not None:
            return several(out, clock, reads, payload, seconds)
        try:
            key = _address(out)
        except (RuntimeError, TypeError):
            engine.pass_by(out)
            return out
        if key not in table:
            if kwargs and info.takes_device and out.device not in engine.backend.devices:
                engine.unmanaged += 1
                return out
            storage = register(out, key)
            recipe = _recipe((clock, name, reads, payload, seconds, exactness, (storage.value,), (), storage.nbytes, 0))
            storage.value.recipe = recipe  # type: ignore[union-attr]
            append(recipe)
        return out

    return handle


def _normalising(info: OpInfo, engine: AbstractTensorEngine, usual: Usual) -> Handler:
    """For ops that create storages and write running statistics, which a replay does without."""
    controller, table, interrupts = engine.controller, engine.table, engine.interrupts
    budget = engine.budget
    call, bound, finish = engine.backend.calls(info)[0], info.bound, _registering_several(info, engine)
    overwrite, expect, now = controller.overwrite, engine.creations.expect, engine.backend.now
    plain, harmless, odd, statistics = PLAIN_TENSORS, NO_TENSORS, ODD_DTYPES, info.scratch
    surroundings, same = Surroundings(engine.backend.settings_of(info)), engine.geometries.setdefault

    def handle(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if interrupts:
            engine.raise_interrupt()
        clock = controller.clock + 1
        reads: list[Value] = []
        recorded: list[Operand] = []
        written: list[tuple[Storage, Operand]] = []
        for place, given in enumerate(args):
            if type(given) in plain:
                try:
                    storage = table[_address(given)]
                    geometry = given.shape, given.stride(), given.storage_offset(), given.dtype
                except (KeyError, RuntimeError):
                    return usual(info, args, kwargs)
                storage.touched = clock
                value: Any = storage.value
                if value.absent or geometry[3] in odd or (value.dependents and place in statistics):
                    return usual(info, args, kwargs)
                if place in statistics:
                    written.append((storage, (place, same(geometry, geometry))))
                else:
                    value.recorded = True
                    reads.append(value)
                    recorded.append((place, same(geometry, geometry)))
            elif type(given) not in harmless:
                return usual(info, args, kwargs)
        needed = bound(args) if bound is not None and info.trains(args) and not kwargs else None
        if needed is None or budget.resident + needed > budget.allowed:
            return usual(info, args, kwargs)
        if needed >= LARGE:
            expect(needed)
        controller.clock = clock
        holes = [None if type(given) in plain else given for given in args]
        scratch = [operand for _, operand in written]
        payload = Call(info.func, holes, None, recorded, surroundings.now(), (), scratch)
        began = now()
        try:
            out = call(*args)
        finally:
            for storage, _ in written:
                overwrite(storage, None)  # in an error whatever it wrote until then
        return finish(out, clock, reads, payload, now() - began)

    return handle


def _writing(info: OpInfo, engine: AbstractTensorEngine, usual: Usual) -> Handler:
    """For ops that create nothing, and write their first argument or nothing at all.

    A value that could be recomputed has its next version recorded. Any other value is its own source: if no recipe
    reads it and there is no copy of it, the new content may take its place.
    """
    controller, table, interrupts, budget = engine.controller, engine.table, engine.interrupts, engine.budget
    overwrite = controller.overwrite
    call, call_with = engine.backend.calls(info)
    plain, harmless, writes = PLAIN_TENSORS, NO_TENSORS, bool(info.writes)
    write_recorded = _recorded_write(info, engine, usual) if info.exactness else usual

    def handle(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if interrupts:
            engine.raise_interrupt()
        clock = controller.clock + 1
        first: Any = None
        for given in args:
            if type(given) in plain:
                try:
                    storage = table[_address(given)]
                except (KeyError, RuntimeError):
                    return usual(info, args, kwargs)
                storage.touched = clock
                if storage.value.absent:  # type: ignore[union-attr]
                    return usual(info, args, kwargs)
                if first is None:
                    first = storage
            elif type(given) not in harmless:
                return usual(info, args, kwargs)
        if budget.resident > budget.allowed:
            return usual(info, args, kwargs)
        if writes:
            old = first.value
            if old.dependents:
                return usual(info, args, kwargs)
            if old.recipe is not None:
                return write_recorded(info, args, kwargs)
        controller.clock = clock
        try:
            out = call_with(*args, **kwargs) if kwargs else call(*args)
        except BaseException:
            if writes:
                overwrite(first, None)  # whatever it wrote until then
            raise
        if writes and (old.recorded or old.home is not None):
            overwrite(first, None)
        return out

    return handle


def _filling(info: OpInfo, engine: AbstractTensorEngine, write: Handler, usual: Usual) -> Handler:
    """For `copy_`, whose target may have grown out of sight: there is room for that before anybody writes to it."""
    controller, find = engine.controller, engine.find

    def handle(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = find(args[0]) if engine.budget.limited else None
        grown = 0 if target is None else engine.growth((target,))
        if not grown:
            return write(_, func, types, args, kwargs)
        with controller.lock:
            controller.make_room(grown, info.name)
        return usual(info, args, kwargs)

    return handle


def _recorded_write(info: OpInfo, engine: AbstractTensorEngine, usual: Usual) -> Usual:
    """An edge from one version of the first argument to the next, once it is known that everything is ready."""
    controller, table, overwrite, same = (
        engine.controller,
        engine.table,
        engine.controller.overwrite,
        engine.geometries.setdefault,
    )
    call, call_with = engine.backend.calls(info)
    plain, surroundings, odd = PLAIN_TENSORS, Surroundings(engine.backend.settings_of(info)), ODD_DTYPES
    seeded, generator, now = info.seeded, engine.backend.generator, engine.backend.now
    append, made, operator, name, exactness = controller.recipes.append, _recipe, info.func, info.name, info.exactness

    def write(_: OpInfo, args: Sequence[Any], kwargs: Any) -> Any:
        reads: list[Value] = []
        payload: Any = [operator, args, kwargs, surroundings.now()]
        last = -1
        for place, given in enumerate(args):
            if type(given) in plain:
                geometry = given.shape, given.stride(), given.storage_offset(), given.dtype
                if geometry[3] in odd:
                    return usual(info, args, kwargs)
                value: Any = table[_address(given)].value
                value.recorded = True
                reads.append(value)
                payload.append(same(geometry, geometry))
                last = place
        payload[1] = args[len(reads) :] if last + 1 == len(reads) else _where_tensors_stand(args)
        if seeded:
            payload = Call.listed(payload)._replace(random=random_state(kwargs, generator))
        controller.clock = clock = controller.clock + 1
        written = reads[0].storage
        began = now()
        try:
            out = call_with(*args, **kwargs) if kwargs else call(*args)
        except BaseException:
            overwrite(written, None)  # whatever it wrote until then
            raise
        seconds = now() - began
        value = overwrite(written, None)
        value.recipe = recipe = made((clock, name, reads, payload, seconds, exactness, (), ((0, value),), 0, 0))
        append(recipe)
        return out

    return write


def _registering_several(info: OpInfo, engine: AbstractTensorEngine) -> Callable[..., Any]:
    """What registers the results of an op that has several, under one recipe if there is a payload for it; it returns
    them."""
    register, remember = engine.register_new, engine.controller.remember
    name, exactness, operator = info.name, info.exactness, info.func

    def finish(out: Any, clock: int, reads: list[Value], payload: list[Any] | Call | None, seconds: float) -> Any:
        created: list[Value] = []
        positions: list[int] = []
        nbytes = 0
        for position, tensor in enumerate(tensors_of(out)):
            storage = register(tensor)
            if storage is not None:
                created.append(storage.value)  # type: ignore[arg-type]  # its tensor is alive
                positions.append(position)
                nbytes += storage.nbytes
        if created and payload is not None:
            if isinstance(payload, Call):
                payload = payload._replace(outputs=tuple(positions))
            else:
                payload[0] = (operator, tuple(positions))
            remember(_recipe((clock, name, reads, payload, seconds, exactness, created, (), nbytes, 0)))
        return out

    return finish


def _where_tensors_stand(args: Sequence[Any]) -> list[Any]:
    return [OPERAND if type(given) in PLAIN_TENSORS else given for given in args]
