"""Runs beside the training: an extra forward, of which nothing is left when it has ended.

NOTE [Undone]. What a forward changes is put back: random streams and flags (`Environment`), what Python code can reach
(`Reach`), and the bytes of every tensor that was there before. Of these nobody knows beforehand which will be written
to, and copies of all would not fit. So the ops of the extra forward are watched, and the bytes of a storage are copied
before the first op that writes to it, or an array or an address of it is handed out, unless it was made since the run
began. Under the mode that watches them some ops take other formulas; of this run nobody uses the numbers.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spillway.engines.blocks.containers import rebuilt, tensors
from spillway.engines.blocks.homes import ALIASES, only_looks
from spillway.engines.blocks.iterators import CannotCopyError
from spillway.engines.blocks.quiet import quiet
from spillway.engines.blocks.reach import Reach, reach_of, unhung
from spillway.engines.blocks.saved import over
from spillway.engines.environment import Environment
from spillway.engines.tensors.torch_compile import asked_before
from spillway.engines.tensors.torch_patches import METHODS, NOTING
from spillway.engines.tensors.twins import nobody_warned
from spillway.internals.private import (
    Place,
    dispatch_modes,
    function_modes,
    grad_mode,
    owners,
    unheard_by_function_modes,
    unheard_by_modes,
)
from spillway.internals.private import storage_address as address
from spillway.units import Bytes

_UNDECLARED: Final = frozenset({"running_mean", "running_var"})
"""Arguments that `native_batch_norm` and its kin write to without saying so."""


def without_locals(error: BaseException) -> BaseException:
    """The same, and what the frames that it went through hold is let go."""
    traceback.clear_frames(error.__traceback__)
    return error


def is_the_models(error: BaseException) -> bool:
    """Whether it was not raised at a line of ours: a forward that counts will raise it as well."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return not str(frame.f_globals.get("__name__", "")).startswith("spillway.")


@contextlib.contextmanager
def undone(
    environment: Environment,
    modules: Sequence[nn.Module],
    args: Any,
    kwargs: dict[str, Any],
    seen: Seen | None = None,
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Around an extra forward of modules; gives what it is to be called with: the same bytes, and no graph behind.

    Args:
        environment: What the modules read beside their arguments.
        modules: They are put back.
        seen: Watches the ops, for whoever wants to know what they left.

    Raises CannotCopyError if it is called with something that cannot be told from the rest of the program, more can be
    reached than is looked at, or the forward moves a generator on.
    """
    reach = Reach(reach_of(modules, args, kwargs, *dispatch_modes(), *function_modes()))
    if reach.too_much:
        raise CannotCopyError(reach.too_much)
    seen = seen or Seen()
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(nobody_warned())
        stack.enter_context(reach.substituted())
        stack.callback(seen.undo)
        stack.enter_context(environment(environment.capture()))
        stack.enter_context(asked_before(lambda: False))
        if any(isinstance(part, torch.jit.ScriptModule) for one in modules for part in one.modules()):
            stack.enter_context(cast(Any, torch.jit).optimized_execution(False))  # or it would count as a run
            stack.callback(register_module_forward_pre_hook(_prepared).remove)
        stack.enter_context(grad_mode(enabled=True))
        alone = rebuilt((args, kwargs), _without_graph)
        stack.enter_context(unhung())
        stack.enter_context(_told(seen))
        stack.enter_context(seen)
        yield alone


@contextlib.contextmanager
def _told(seen: Seen) -> Iterator[None]:
    """It is told of what may write without an op."""
    reference = weakref.ref(seen)
    METHODS.add(seen)
    ALIASES.add(seen)
    NOTING.append(reference)
    try:
        yield
    finally:
        NOTING.remove(reference)
        ALIASES.remove(seen)
        METHODS.remove(seen)


def _prepared(module: nn.Module, _: Any) -> None:
    """TorchScript prepares a graph (inlines it, casts as autocast says) when it first runs, and not where that does not
    count; it would run unprepared for good."""
    if isinstance(module, torch.jit.ScriptModule):
        with contextlib.suppress(RuntimeError), cast(Any, torch.jit).optimized_execution(True):  # asked too early
            cast(Any, module).get_debug_state()


class _Fresh(torch.autograd.Function):
    """Makes a tensor that hangs in a graph, and can be written to, of one that does not."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, held: list[Tensor]) -> Tensor:
        return held.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        return None, None


def _without_graph(tensor: Tensor) -> Tensor:
    alias = tensor.detach()
    if not tensor.requires_grad or tensor.is_leaf or type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return alias.requires_grad_(tensor.requires_grad)
    with grad_mode(enabled=True):
        leaf = torch.zeros((), requires_grad=True)
        fresh: Tensor = cast(Any, _Fresh).apply(leaf, [over(alias.untyped_storage(), alias)])
    return fresh


@final
class Seen(cast(Any, TorchDispatchMode)):  # type: ignore[misc]  # torch's class has no annotations
    """The ops of an extra forward: copies the bytes of what is going to be written to and was there before, and knows
    what was made since."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._thread, self._copying = threading.get_ident(), False
        self._made: dict[int, tuple[Any, Bytes]] = {}
        """Weak references to the storages of results, by address, with their bytes: one that died is not taken for what
        is there now."""
        self._begins: dict[int, int] = {}
        """The same addresses by where the bytes begin: what is made of an address is another storage over these."""
        self._copies: dict[int, tuple[torch.UntypedStorage, Any]] = {}
        self._versions: list[tuple[Tensor, int]] = []
        self._places: list[tuple[Tensor, Place]] = []

    @unheard_by_function_modes
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._copying:
            return func(*args, **kwargs)
        for tensor in _written(func, args, kwargs):
            for part in _parts(tensor):
                self._before(part)
        given = {address(part) for tensor in _tensors((args, kwargs)) for part in _parts(tensor)}
        given |= {one._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.UntypedStorage)}
        result = func(*args, **kwargs)
        # An op of torch's returns what it was given or what it made.
        ours = isinstance(func, torch._ops.OpOverload) and func.namespace in ("aten", "prim", "prims")
        for tensor in _tensors(result) if ours else _returned_alone(result):
            for part in _parts(tensor):
                if address(part) not in given:
                    storage = part.untyped_storage()
                    self._made[address(part)] = cast(Any, StorageWeakRef)(storage), storage.nbytes()
                    self._begins[_begin(storage)] = address(part)
        return result

    def noticed(self, thing: Tensor | torch.UntypedStorage, name: str = "", alias: Tensor | None = None) -> None:
        """Somebody is about to have what writes to it without an op, such as an array; an `alias` needs one."""
        if not (alias is not None or self._copying or threading.get_ident() != self._thread or only_looks()):
            self._before_all(thing)

    @unheard_by_modes
    def _before_all(self, thing: Tensor | torch.UntypedStorage) -> None:
        if not isinstance(thing, torch.UntypedStorage):
            for part in _parts(thing):
                self._before(part)
        elif not self._is_there(thing._cdata) and thing.device.type != "meta":
            self._copy(thing._cdata, thing)

    @unheard_by_modes
    def _before(self, tensor: Tensor) -> None:
        key, storage = address(tensor), tensor.untyped_storage()
        if self._is_there(key) or self._is_over_made(storage):
            return
        if not tensor.is_inference():
            self._versions.append((tensor, tensor._version))  # an alias made here would have a counter of its own
        if (place := Place.of(tensor)) is not None:
            self._places.append((tensor, place))
        self._copy(key, storage)

    def _copy(self, key: int, storage: torch.UntypedStorage) -> None:
        if key in self._copies:
            return
        self._copying = True  # which writes to a storage
        try:
            self._copies[key] = storage, cast(Any, storage).clone()
        finally:
            self._copying = False

    def _is_there(self, key: int) -> bool:
        """Whether a storage was made since the run began, and is there."""
        made = self._made.get(key)
        return made is not None and not made[0].expired()

    def _is_over_made(self, storage: torch.UntypedStorage) -> bool:
        """Whether its bytes are those of one that was made since. Not whether those began there when they were made:
        in a step that is watched bytes move, and others come to lie where they lay."""
        begin = _begin(storage)
        key = self._begins.get(begin, 0)
        if not begin or not self._is_there(key):
            return False
        made: torch.UntypedStorage | None = cast(Any, torch.UntypedStorage)._new_with_weak_ptr(self._made[key][0].cdata)
        return made is not None and _begin(made) == begin

    def left(self, result: Any) -> Bytes:
        """Storages that were made since the run began and are there now, without those of the result: the difference
        that an allocator's count would show, to the byte. Raises CannotCopyError for a result that cannot be told."""
        handed_on = {address(part) for tensor in tensors(result) for part in _parts(tensor)}
        there = {key: nbytes for key, (_, nbytes) in self._made.items() if self._is_there(key)}
        return sum(nbytes for key, nbytes in there.items() if key not in handed_on)

    def undo(self) -> None:
        """Put back what was written to. For whoever has saved one of these tensors nothing was written."""
        for storage, was in reversed(self._copies.values()):  # two may lie over the same bytes
            if storage.nbytes() != was.nbytes():
                cast(Any, storage).resize_(was.nbytes())
            cast(Any, storage).copy_(was)
        for tensor, place in reversed(self._places):
            place.put_back(tensor)
        for tensor, version in reversed(self._versions):
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def _returned_alone(result: Any) -> list[Tensor]:
    """The results of somebody else's op that nobody but the caller holds: others may have been there before, such as a
    table that the op looks up."""
    tensors = [torch.empty(0), *_tensors(result)]
    least, *held = [sys.getrefcount(tensor) for tensor in tensors]
    usual = least + (2 if isinstance(result, Tensor) else 1)  # who called holds it, and this function, or their list
    alone = [cast(Any, one) for one, count in zip(tensors[1:], held, strict=True) if count == usual]
    return [
        one for one in alone
        if one._use_count() == 1 and all(owners(part.untyped_storage()) == 2 for part in _parts(one))
    ]  # fmt: skip


def _begin(storage: torch.UntypedStorage) -> int:
    """Where its bytes begin; 0 of one without any."""
    try:
        return storage.data_ptr()
    except RuntimeError:  # of a tensor of tensors, which `torch.func` makes
        return 0


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """What an op writes to."""
    found: list[Any] = []
    schema = getattr(func, "_schema", None)
    for number, argument in enumerate(schema.arguments if schema is not None else ()):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or argument.name in _UNDECLARED:
            found.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return _tensors(found)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _parts(tensor: Tensor) -> list[Tensor]:
    """The tensors with storages that a tensor consists of."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _parts(getattr(tensor, name))]
    if tensor.layout is torch.strided and torch._C._has_storage(tensor):
        return [tensor]
    return []
