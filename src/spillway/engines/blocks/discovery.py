"""Which modules of a model are its blocks: one forward is watched, and what repeats in it is found."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from spillway.engines.blocks.compiled_blocks import passes_by, uncompiled
from spillway.engines.blocks.cuts import WORTH, Called, Cuts, names_of
from spillway.engines.blocks.extra_forward import undone, without_locals
from spillway.engines.blocks.functorch_hooks import Packing
from spillway.engines.blocks.groups import Group, group_named
from spillway.engines.blocks.homes import empty_witness
from spillway.engines.blocks.iterators import CannotCopyError
from spillway.engines.blocks.saved import PLAIN, detached
from spillway.engines.environment import Environment
from spillway.engines.tensors.torch_compile import running_compiled
from spillway.errors import ModelError, NoBlocksError
from spillway.internals.private import counted_storage, fully_sharded, heard, unheard_by_modes
from spillway.internals.private import storage_address as address
from spillway.units import Bytes

_CONTAINERS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
DESCEND_SHARE: Final = 0.8
"""A module of whose bytes one family of siblings inside holds so much is not a block: they are."""
COVERED: Final = 0.5
"""What repeats is enough if recomputing it frees so much of what autograd saves."""
LOWER: Final = 0.75
"""How low the floor of other blocks has to be, of that of those that repeat, to be taken instead."""


@final
class Watch:
    """How often the modules of a model were called in a forward, and what autograd saved in each.

    Args:
        keeps: Whether what autograd saves is held for a backward; otherwise it is let go at once, and whoever wants it
            in the forward meets `BackwardInside`.

    Attributes:
        calls: Calls of each module.
    """

    def __init__(self, model: nn.Module, *, keeps: bool = True) -> None:
        self._model = model
        self._mine = set(model.modules())
        self._keeps = keeps
        self._storages: dict[int, StorageWeakRef] = {}
        """Weak references: as long as they stand, no other storage gets the same address."""
        self.calls: Counter[nn.Module] = Counter()
        self._nbytes: dict[int, Bytes] = {}
        self._saved: dict[nn.Module, set[int]] = defaultdict(set)
        self._compiled: set[nn.Module] = set()
        """What something compiled calls that the model itself calls."""
        self._outer = False
        """Whether the model is called by something compiled."""
        self._forward: list[Called] = []
        self._outside: set[int] = set()
        self._inside: list[Called] = []
        self._witnesses: list[tuple[Called, Tensor, int]] = []
        every = (*model.parameters(), *model.buffers())
        self._fixed = {address(tensor) for tensor in every if torch._C._has_storage(tensor)}

    def nbytes(self, module: nn.Module) -> Bytes:
        """Bytes of the storages that autograd saved in the calls of a module, parameters left out, each once."""
        return sum(map(self._nbytes.__getitem__, self._saved[module]))

    def checked(self, names: list[str]) -> list[str]:
        """The same names of blocks. Raises NoBlocksError if one is called by something compiled inside of the model."""
        modules = dict(self._model.named_modules(remove_duplicate=False))
        for name in names:
            if modules[name if name in modules else name.rpartition("-")[0]] in self._compiled:
                raise NoBlocksError(
                    passes_by(f"Something compiled in {type(self._model).__name__}", name),
                    reason=f"the block {name} is called by something compiled",
                )
        return names

    @property
    def cuts(self) -> Cuts:
        """To find blocks by what was saved."""
        return Cuts(self._model, self._forward, outside=self._outside, nbytes=self._nbytes)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around one forward."""
        self._outer = running_compiled()
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
        try:
            with Packing(self._pack, _unpack), uncompiled(self._mine):
                yield
        finally:
            before.remove()
            after.remove()
            cast(Any, torch_module)._global_forward_hooks_with_kwargs.pop(after.id, None)  # torch leaves it there
            self._inside.clear()
            for call, witness, version in self._witnesses:
                call.written = call.written or witness._version != version
            self._witnesses.clear()

    @unheard_by_modes
    def _enter(self, module: nn.Module, args: Any) -> None:
        if module in self._mine:
            self.calls[module] += 1
            if not self._outer and running_compiled():
                self._compiled.add(module)
            call = Called(module)
            (self._inside[-1].inside if self._inside else self._forward).append(call)
            self._inside.append(call)
            for tensor in () if _transformed() else args:
                if type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_inference():
                    self._witnesses.append((call, empty_witness(tensor), tensor._version))

    @unheard_by_modes
    def _leave(self, module: nn.Module, args: Any, *rest: Any) -> None:  # no named arguments after an exception
        if module in self._mine and any(call.module is module for call in self._inside):
            while (call := self._inside.pop()).module is not module:
                pass
            for tensor in () if _transformed() else tree_leaves((args, rest[:-1])):
                if isinstance(tensor, Tensor) and tensor.layout is torch.strided and torch._C._has_storage(tensor):
                    call.taken.update(self._noted(tensor))

    def _noted(self, tensor: Tensor) -> list[int]:
        key = address(tensor)
        if key in self._fixed:
            return []
        storage = counted_storage(tensor)
        if key not in self._storages:
            self._storages[key] = cast(Any, StorageWeakRef)(storage)
        self._nbytes[key] = storage.nbytes()
        return [key]

    @unheard_by_modes
    def _pack(self, tensor: Tensor) -> Tensor | None:
        if tensor.layout is torch.strided:
            found = self._noted(tensor)
            (self._inside[-1].own if self._inside else self._outside).update(found)
            for call in self._inside:
                call.saved.update(found)
                self._saved[call.module].update(found)
        return detached(tensor) if self._keeps else None


def _transformed() -> bool:
    """Whether a transform of `torch.func` runs, in which tensors are none of the forward's."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class BackwardInside(Exception):
    """The forward runs a backward, which wants what was let go."""


def _unpack(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise BackwardInside
    return tensor


def discover(model: nn.Module, forward: Callable[[], object], *, keeps: bool = True) -> list[str]:
    """Names of the blocks of a model, in the order of `named_modules`.

    From the root downwards, a module that has children and is no container is a block if its class occurs at least
    twice among the modules that were called, or if it was called more often than the model; unless siblings of one
    class inside it hold `DESCEND_SHARE` of the bytes that autograd saved in it. Modules beside one of their class that
    was called count as called: layers may be left out by chance.

    Where recomputing these would free less than `COVERED` of what autograd saved, as where nothing repeats, the forward
    is cut by what it has saved (NOTE [Cuts] in `cuts.py`): blocks are then modules of any class and groups of
    consecutive children of a `Sequential`, called by the first and the last, as "features.0-4". Cuts replace what
    repeats only if they lower the floor to `LOWER` of its own: a loss or an embedding that holds most of the step is
    covered by neither.

    Args:
        model: In the mode, training or not, in which it will run.
        forward: Runs the model once, with gradients.
        keeps: As for `Watch`.

    Raises NoBlocksError if the model has no blocks.
    """
    watch = Watch(model, keeps=keeps)
    with watch.watching():
        forward()
    found, cuts = _blocks(model, watch), watch.cuts
    modules = dict(model.named_modules())
    there = cuts.judge(cuts.whole(modules[name] for name in found))
    best = cuts.best() if there.covered < COVERED else None
    if best is not None and (not found or best.floor <= LOWER * there.floor):
        return watch.checked(names_of(model, best.units))
    if not found:
        reason = (
            f"among the {len(watch.calls)} modules that its forward called no class with modules inside occurs twice, "
            f"and no choice of others would lower by {WORTH:.1%} what a step holds, if one at a time was recomputed"
        )
        raise NoBlocksError(
            f"{type(model).__name__} has no blocks: {reason}; name the blocks with "
            f"blocks=BlockOptions(names=[...]), or take a method of "
            f"the tensor engine, which needs none, such as method='delta'.",
            reason=reason,
        )
    return watch.checked(found)


def _blocks(model: nn.Module, watch: Watch) -> list[str]:
    called = _called(model, watch)
    classes = Counter(type(module) for module in called if _has_children(module))
    found: list[str] = []
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            if child in seen:
                continue
            seen.add(child)
            if not _has_children(child):
                continue
            repeats = classes[type(child)] >= 2 or watch.calls[child] > max(watch.calls[model], 1)
            if isinstance(child, _CONTAINERS) or child not in called or not repeats or _family_inside(child, watch):
                visit(full, child)
            else:
                found.append(full)

    visit("", model)
    return found


def _called(model: nn.Module, watch: Watch) -> set[nn.Module]:
    """Modules that were called, and those of their classes beside them."""
    called = set(watch.calls)
    for parent in model.modules():
        classes = {type(child) for child in parent.children() if child in watch.calls}
        called.update(child for child in parent.children() if type(child) in classes)
    return called


def _family_inside(module: nn.Module, watch: Watch) -> bool:
    """Whether siblings of one class inside hold most of what is saved in it."""
    most = 0
    for parent in module.modules():
        families: dict[type[nn.Module], list[nn.Module]] = defaultdict(list)
        for child in parent.children():
            if _has_children(child) and not isinstance(child, _CONTAINERS) and watch.calls[child]:
                families[type(child)].append(child)
        for family in families.values():
            if len(family) >= 2:
                most = max(most, sum(watch.nbytes(child) for child in family))
    return most > 0 and most >= DESCEND_SHARE * watch.nbytes(module)


def gathered_bytes(model: nn.Module) -> Bytes:
    """What the largest of its modules that `fully_shard` has sharded is, when it is gathered."""
    sharded = [name for name, one in model.named_modules() if fully_sharded(one)]
    whole: Counter[str] = Counter()
    for name, one in model.named_parameters():
        above = [other for other in sharded if name.startswith(f"{other}." if other else "")]
        whole.update({max(above, key=len): one.numel() * one.element_size()} if above else {})
    return max(whole.values(), default=0)


def sharded_blocks(model: nn.Module) -> list[str]:
    """Names of the modules below the root that `fully_shard` gathers by themselves, of the outermost ones those with
    modules inside; empty without. Before such a block runs again its parameters have been gathered for its backward, so
    that its second run adds no collective, whatever other processes plan."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{one}.") for one in found)
        if name and not inside and fully_sharded(module) and _has_children(module):
            found.append(name)
    return found


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def named(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module | Group]:
    """The blocks that a user names: modules by their names, consecutive children of a `Sequential` by those of the
    first and the last, such as "features.0-4". Raises ModelError if the model has no module of that name, one stands
    there twice, or no group can be made there."""
    modules: dict[str, nn.Module | Group] = dict(model.named_modules(remove_duplicate=False))
    chosen = {name: modules[name] if name in modules else group_named(model, name) for name in names if name}
    unknown = [name for name in names if chosen.get(name) is None]
    if unknown:
        raise ModelError(
            f"{type(model).__name__} has no module named {unknown[0]!r} to be a block; `model.named_modules()` lists "
            f"the {len(modules)} names that there are."
        )
    found = {name: block for name, block in chosen.items() if block is not None}
    if len(set(found.values())) < len(names):
        raise ModelError("Two names in blocks= are of one module; name it once, its calls are told apart by number.")
    return found


@unheard_by_modes
def find_blocks(
    model: nn.Module,
    forward: Callable[..., object],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    environment: Environment,
) -> list[str]:
    """Names of the blocks that this call of the model's forward has.

    The forward runs under gradients, and what autograd saves in it is let go at once, so that it needs little memory.
    Afterwards all is as it was before (`undone`).

    Raises NoBlocksError if the model has no blocks, or its arguments cannot be copied.
    """

    def found(*, keeps: bool) -> list[str]:
        with undone(environment, (model,), args, kwargs) as (given, named):
            return discover(model, lambda: heard(forward, *given, **named), keeps=keeps)

    try:
        return found(keeps=False)
    except BackwardInside:
        return found(keeps=True)
    except CannotCopyError as error:
        without_locals(error)
        reason = f"they cannot be looked for in a forward that runs once more, because {error}"
        raise NoBlocksError(
            f"The blocks of {type(model).__name__} cannot be found in a forward that runs once more, because {error}: "
            f"name them with blocks=BlockOptions(names=[...]).",
            reason=reason,
        ) from error
