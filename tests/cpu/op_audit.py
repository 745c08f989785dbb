"""Watches every op above the tensor engine, and checks what the engine believes about it against what it really did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch.utils._pytree import tree_leaves

from spillway.engines.environment import OpEnvironment
from spillway.engines.tensors.calls import inner_tensors, operands
from spillway.engines.tensors.ops import OpInfo
from spillway.engines.tensors.sizes import Sizes
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.internals.dispatch_key import Handler
from spillway.memory.records import EXACT, HERE, SCAFFOLD, Recipe, Storage, Value
from spillway.methods.base import Drop
from tests.cpu.bits import (
    UNWRITTEN,
    address_of,
    bytes_of,
    dirty_the_heap,
    fill,
    overwrite,
    reached,
    same,
    storage_of,
    storage_with,
)
from tests.cpu.bits import strided as is_strided

TOPICS = ("replays", "sizes", "writes", "account", "versions", "failures")

PADDED = {"aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"}
"""oneDNN leaves most of the workspace (the only uint8 tensor) of its recurrent layers unwritten, and never reads it."""

TIMES = 2
"""How often an op is looked at with arguments of the same shapes, dtypes and numbers."""


@final
class Watched:
    """One call: what its operands' storages held before it, and which storages it left behind."""

    def __init__(self, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.info = info
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.before: dict[int, bytes] = {}
        self.names: defaultdict[int, set[str]] = defaultdict(set)
        self.places: defaultdict[int, set[Any]] = defaultdict(set)
        self.tensors: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self.created: dict[int, torch.UntypedStorage] = {}
        self.running = set(info.scratch) if info.scratch and info.trains(args) else set()
        self._operands = list(operands(info, args, kwargs))
        for place, tensor, name in self._operands:
            for part in _with_bytes(tensor):
                key = self._note(part, self.storages)
                self.before.setdefault(key, bytes_of(self.storages[key]))
                self.names[key].add(name)
                self.places[key].add(place)

    def _note(self, tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> int:
        key = address_of(tensor)
        storages.setdefault(key, storage_of(tensor))
        self.tensors[key].append(tensor)
        return key

    def finish(self, out: Any) -> None:
        """Note the storages of the results that were no operand's."""
        for tensor in (*tree_leaves(out), *(tensor for _, tensor, _ in self._operands)):
            for part in _with_bytes(tensor):
                if address_of(part) not in self.storages:
                    self._note(part, self.created)

    def made(self) -> int:
        """Bytes that the call added to what is alive."""
        grown = sum(max(storage.nbytes() - len(self.before[key]), 0) for key, storage in self.storages.items())
        return grown + sum(storage.nbytes() for storage in self.created.values())

    def may_write(self, key: int) -> bool:
        """Whether the engine expects a write to this storage."""
        return bool(self.names[key] & self.info.schema_writes or self.places[key] & self.running)

    def agree(self, key: int, again: bytes, original: bytes) -> bool:
        """Whether a replay gave the same bytes, wherever a tensor of this call can see them and somebody wrote them."""
        if self.info.name in PADDED and self.tensors[key][0].dtype == torch.uint8:
            return len(again) == len(original)
        return same(original, again, reached(len(original), self.tensors[key]), unwritten_allowed=True)


@final
class Audit:
    """Stands before an engine's handlers in steps that keep recipes.

    `seen` are the overloads that ran, `replayed` those of them that were run again, `restored` those whose results were
    dropped and brought back by the controller; `found` says for each complaint in which cases it came up.
    """

    def __init__(self, engine: TensorEngine) -> None:
        self.engine = engine
        self.sizes = Sizes()
        self.seen: set[str] = set()
        self.replayed: set[str] = set()
        self.restored: set[str] = set()
        self.found: dict[str, defaultdict[str, set[str]]] = {topic: defaultdict(set) for topic in TOPICS}
        self.case, self.cases = "", 0
        self._times: defaultdict[Any, int] = defaultdict(int)

    def blame(self, topic: str, info: OpInfo, what: str, numbers: str = "") -> None:
        self.found[topic][f"{info.func} {what}"].add(f"{self.case} {numbers}".rstrip())

    def front(self, func: Any, handler: Handler) -> Handler:
        def handle(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self._look(func, args, kwargs or {}, handler)

        return handle

    def _look(self, func: Any, args: Any, kwargs: Any, handler: Handler) -> Any:
        info = self.engine.infos[id(func)]
        if info.exactness != SCAFFOLD and not self._is_news(func, args, kwargs):
            return handler(None, func, (), args, kwargs)
        for _, tensor, _ in operands(info, args, kwargs):
            self.engine.lookup(tensor)
        watched = Watched(info, args, kwargs)
        key, bounds = self._bounds(info, args, kwargs)
        dirty_the_heap(sum(map(len, watched.before.values())), UNWRITTEN)
        recipes = len(self.engine.controller.recipes)
        out = handler(None, func, (), args, kwargs)
        self._check(watched, out, key, bounds, self.engine.controller.recipes[recipes:])
        return out

    def _is_news(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the op was not seen often enough with arguments of these shapes and dtypes."""
        signature = (func, _signature(args), _signature(kwargs))
        self._times[signature] += 1
        return self._times[signature] <= TIMES

    def _check(self, watched: Watched, out: Any, key: Any, bounds: dict[str, int], recipes: Sequence[Recipe]) -> None:
        self.seen.add(str(watched.info.func))
        watched.finish(out)
        if watched.info.exactness == SCAFFOLD:
            for storage in watched.created.values():
                fill(storage, UNWRITTEN)
        self._check_bounds(watched, bounds)
        self.sizes.learn(key, watched.made())
        self._check_writes(watched)
        self._check_account(watched)
        for recipe in recipes:
            if recipe.exactness == EXACT:
                self._check_replay(watched, recipe)
                self._check_drops(watched, recipe)

    # ------------------------------------------------------------------ sizes

    def _bounds(self, info: OpInfo, args: Any, kwargs: Any) -> tuple[Any, dict[str, int]]:
        if not info.fresh and not info.resizes:
            return None, {"it may": 0}
        key, known = self.sizes.expected(info, args, kwargs)
        bounds = {"was learned": known, "was expected": Sizes().expected(info, args, kwargs)[1]}
        cheap = info.bound(args) if info.bound is not None and args else None
        return key, bounds if cheap is None else bounds | {"its cheap bound": cheap}

    def _check_bounds(self, watched: Watched, bounds: dict[str, int]) -> None:
        for name, bound in bounds.items():
            if bound < watched.made():
                self.blame("sizes", watched.info, f"created more than {name}", f"({watched.made()} bytes, not {bound})")

    # ------------------------------------------------------------------ writes and aliases

    def _check_writes(self, watched: Watched) -> None:
        for key, storage in watched.storages.items():
            if bytes_of(storage) != watched.before[key] and not watched.may_write(key):
                self.blame("writes", watched.info, f"wrote {sorted(watched.names[key])} without saying so")

    def _check_account(self, watched: Watched) -> None:
        table = self.engine.table
        if watched.info.view and watched.created:
            self.blame("account", watched.info, "is taken for a view and created a storage")
        for key, storage in (watched.storages | watched.created).items():
            if key not in table:
                self.blame("account", watched.info, "left a storage behind that the engine does not know")
            elif table[key].nbytes != storage.nbytes() and (key not in watched.before or watched.may_write(key)):
                self.blame("account", watched.info, "changed the size of a storage, and the account does not know")

    # ------------------------------------------------------------------ replays

    def _check_replay(self, watched: Watched, recipe: Recipe) -> None:
        """Run the recorded call again on copies of what its operands held."""
        bindings = self._bindings(watched, recipe)
        originals = [bytes_of(value.storage.handle()) for value in recipe.creates]
        random, environment = torch.get_rng_state(), OpEnvironment.now()
        dirty_the_heap(max(map(len, originals), default=0), 0x54)
        try:
            handles = self.engine.machine.run(recipe, bindings)
        except Exception as error:
            self.blame("replays", watched.info, "raised in its replay", _words(error))
            return
        self.replayed.add(str(watched.info.func))
        if not torch.equal(random, torch.get_rng_state()) or environment != OpEnvironment.now():
            self.blame("replays", watched.info, "left another random state or environment after its replay")
        if len(handles) != len(originals):
            self.blame("replays", watched.info, "created another number of storages in its replay")
            return
        for value, handle, original in zip(recipe.creates, handles, originals, strict=True):
            if not watched.agree(value.storage.key, bytes_of(handle), original):
                self.blame("replays", watched.info, "created other bytes in its replay")
        self._check_side_effects(watched, recipe, bindings)

    def _bindings(self, watched: Watched, recipe: Recipe) -> list[Storage]:
        keys = [value.storage.key for value in recipe.reads]
        copies = {key: storage_with(watched.before[key]) for key in keys}
        records = {key: Storage(-1, 0, copy.nbytes(), copy, 0) for key, copy in copies.items()}
        return [records[key] for key in keys]

    def _check_side_effects(self, watched: Watched, recipe: Recipe, bindings: Sequence[Storage]) -> None:
        written = {position for position, _ in recipe.writes}
        for position, (value, binding) in enumerate(zip(recipe.reads, bindings, strict=True)):
            key, again = value.storage.key, bytes_of(binding.handle)
            if position in written:
                if not watched.agree(key, again, bytes_of(watched.storages[key])):
                    self.blame("replays", watched.info, "wrote other bytes in its replay")
            elif again != watched.before[key] and not watched.may_write(key):
                self.blame("replays", watched.info, "wrote an operand in its replay and did not say so")

    def _check_drops(self, watched: Watched, recipe: Recipe) -> None:
        """The whole way through the controller: drop what the op made, and bring it back."""
        controller = self.engine.controller
        for value in _present(recipe):
            original = bytes_of(value.storage.handle())
            if not controller.grant(Drop(value.storage)):
                continue
            try:
                controller.restore(value)
            except Exception as error:
                self.blame("replays", watched.info, "raised when restored", _words(error))
                continue
            self.restored.add(str(watched.info.func))
            if not watched.agree(value.storage.key, bytes_of(value.storage.handle()), original):
                self.blame("replays", watched.info, "came back with other bytes after a drop")
            overwrite(value.storage.handle(), original)  # what nobody wrote is known by its pattern also the next time


def _with_bytes(value: Any) -> list[torch.Tensor]:
    """The tensor, or what a sparse tensor consists of."""
    sparse = isinstance(value, torch.Tensor) and value.layout is not torch.strided
    return [tensor for tensor in (inner_tensors(value) if sparse else [value]) if is_strided(tensor)]


def _words(error: Exception) -> str:
    return f"({type(error).__name__}: {str(error)[:120]})"


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.layout
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((name, _signature(element)) for name, element in sorted(value.items()))
    return str(value)


def _present(recipe: Recipe) -> Iterator[Value]:
    for value in (*recipe.creates, *(value for _, value in recipe.writes)):
        if value.storage.value is value and value.absent == HERE and value.storage.nbytes:
            yield value
