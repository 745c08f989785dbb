"""Watches every op above the tensor engine, and checks what the engine believes about it against what it really did."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spillway.engines.records import EXACT, HERE, Recipe, Storage, Value
from spillway.engines.tensors.calls import Environment, operands
from spillway.engines.tensors.engine import TensorEngine
from spillway.engines.tensors.ops import OpInfo
from spillway.engines.tensors.sizes import Sizes
from spillway.methods.base import Drop

_storage_of = torch._C.TensorBase.untyped_storage
_address = torch._C._storage_address


def bytes_of(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def storage_with(content: bytes) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(len(content))
    if content:
        ctypes.memmove(storage.data_ptr(), content, len(content))
    return storage


def dirty_the_heap(nbytes: int, pattern: int) -> None:
    """Leave freed memory of this size full of `pattern`, so that bytes which nobody wrote differ from run to run."""
    blocks = [torch.UntypedStorage(max(nbytes, 1)) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block.data_ptr(), pattern, block.nbytes())


def strided(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and torch._C._has_storage(value)
    )


@final
class Before:
    """The storages of a call's operands, and what they held before it."""

    def __init__(self, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.content: dict[int, bytes] = {}
        self.names: defaultdict[int, set[str]] = defaultdict(set)
        self.places: defaultdict[int, set[Any]] = defaultdict(set)
        for place, tensor, name in operands(info, args, kwargs):
            if strided(tensor):
                key = _address(tensor)
                if key not in self.storages:
                    self.storages[key] = _storage_of(tensor)
                    self.content[key] = bytes_of(self.storages[key])
                self.names[key].add(name)
                self.places[key].add(place)

    def changed(self) -> list[int]:
        return [key for key, storage in self.storages.items() if bytes_of(storage) != self.content[key]]

    def grown(self) -> int:
        return sum(max(s.nbytes() - len(self.content[key]), 0) for key, s in self.storages.items())


@final
class Audit(TorchDispatchMode):
    """Entered above an engine's own mode, inside a step that keeps recipes."""

    def __init__(self, engine: TensorEngine) -> None:
        super().__init__()
        self.engine = engine
        self.sizes = Sizes()
        self.seen: set[str] = set()
        self.replayed: set[str] = set()
        self.dropped: set[str] = set()
        self.found: defaultdict[str, set[str]] = defaultdict(set)
        self.case = ""

    def blame(self, info: OpInfo, what: str, numbers: str = "") -> None:
        self.found[f"{info.func} {what}"].add(f"{self.case} {numbers}".rstrip())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        engine = self.engine
        info = engine.infos.get(func) or engine.learn_op(func)
        with torch._C._DisableTorchDispatch():
            for _, tensor, _ in operands(info, args, kwargs):
                engine.lookup(tensor)
            before = Before(info, args, kwargs)
            key, bounds = self._bounds(info, args, kwargs)
            dirty_the_heap(sum(map(len, before.content.values())), 0xAB)
        created, recipes = engine.created, len(engine.controller.recipes)
        out = func(*args, **kwargs)
        with torch._C._DisableTorchDispatch():
            self.seen.add(str(func))
            made = engine.created - created + before.grown()
            self._check_bounds(info, bounds, made)
            self.sizes.learn(key, made)
            self._check_writes(info, args, before)
            self._check_outputs(info, before, out, made)
            for recipe in engine.controller.recipes[recipes:]:
                if recipe.exactness == EXACT:
                    self._check_replay(info, recipe, before)
                    self._check_drops(info, recipe)
        return out

    # ------------------------------------------------------------------ sizes

    def _bounds(self, info: OpInfo, args: Any, kwargs: Any) -> tuple[Any, dict[str, int]]:
        if not info.fresh:
            return None, {"an op that creates nothing": 0}
        cheap = info.bound(args) if info.bound is not None and args else None
        key, known = self.sizes.expected(info, args, kwargs)
        bounds = {"Sizes.expected": known, "a fresh Sizes.expected": Sizes().expected(info, args, kwargs)[1]}
        return key, bounds | ({} if cheap is None else {"BOUNDS": cheap})

    def _check_bounds(self, info: OpInfo, bounds: dict[str, int], made: int) -> None:
        for name, bound in bounds.items():
            if bound < made:
                self.blame(info, f"creates more than {name} says", f"{bound} and {made} bytes")

    # ------------------------------------------------------------------ writes and aliases

    def _check_writes(self, info: OpInfo, args: Sequence[Any], before: Before) -> None:
        training = bool(info.scratch) and info.trains(args)
        for key in before.changed():
            declared = before.names[key] & info.schema_writes
            running = training and before.places[key] & set(info.scratch)
            if not declared and not running:
                self.blame(info, f"writes {sorted(before.names[key])} without saying so")

    def _check_outputs(self, info: OpInfo, before: Before, out: Any, made: int) -> None:
        table = self.engine.table
        for tensor in filter(strided, tree_leaves(out)):
            key = _address(tensor)
            if info.view and key not in before.storages:
                self.blame(info, "is taken for a view and created a storage")
            elif not info.view and key not in table:
                self.blame(info, "created a storage that the engine does not know")
            elif key in table and table[key].nbytes != _storage_of(tensor).nbytes():
                self.blame(info, "changed the size of a storage and the account does not know")

    # ------------------------------------------------------------------ replays

    def _check_replay(self, info: OpInfo, recipe: Recipe, before: Before) -> None:
        bindings = self._bindings(recipe, before)
        if bindings is None:
            self.blame(info, "read a value that is not among its operands")
            return
        originals = [bytes_of(value.storage.handle()) for value in recipe.creates]
        random, environment = torch.get_rng_state(), Environment.now()
        dirty_the_heap(max(map(len, originals), default=0), 0x54)
        try:
            handles = self.engine.machine.run(recipe, bindings)
        except Exception as error:
            self.blame(info, f"raised in its replay: {type(error).__name__} {str(error)[:120]}")
            return
        if len(handles) != len(originals):
            self.blame(info, "created another number of storages in its replay")
        elif [bytes_of(handle) for handle in handles] != originals:
            self.blame(info, "created other bytes in its replay")
        self._check_side_effects(info, recipe, bindings, before)
        if not torch.equal(random, torch.get_rng_state()) or environment != Environment.now():
            self.blame(info, "left another random state or environment after its replay")
        self.replayed.add(str(info.func))

    def _bindings(self, recipe: Recipe, before: Before) -> list[Storage] | None:
        copies: dict[int, Storage] = {}
        for value in recipe.reads:
            key = value.storage.key
            if key not in before.content:
                return None
            if key not in copies:
                copies[key] = Storage(-1, 0, value.storage.nbytes, storage_with(before.content[key]), 0)
        return [copies[value.storage.key] for value in recipe.reads]

    def _check_side_effects(self, info: OpInfo, recipe: Recipe, bindings: list[Storage], before: Before) -> None:
        written = {bindings[position].handle.data_ptr() for position, _ in recipe.writes}
        for value, binding in zip(recipe.reads, bindings, strict=True):
            key, content = value.storage.key, bytes_of(binding.handle)
            if binding.handle.data_ptr() in written:
                if content != bytes_of(before.storages[key]):
                    self.blame(info, "wrote other bytes in its replay")
            elif content != before.content[key] and not before.names[key] & info.schema_writes:
                self.blame(info, "wrote an operand in its replay")

    def _check_drops(self, info: OpInfo, recipe: Recipe) -> None:
        """The whole way through the controller: drop what the op made, and bring it back."""
        controller = self.engine.controller
        for value in (*recipe.creates, *(value for _, value in recipe.writes)):
            storage = value.storage
            if storage.value is not value or value.absent != HERE or not storage.nbytes:
                continue
            original = bytes_of(storage.handle())
            if not controller.grant(Drop(storage)):
                continue
            try:
                controller.restore(value)
            except Exception as error:
                self.blame(info, f"raised when dropped and restored: {type(error).__name__} {str(error)[:120]}")
                continue
            self.dropped.add(str(info.func))
            if bytes_of(storage.handle()) != original:
                self.blame(info, "came back with other bytes after a drop")
