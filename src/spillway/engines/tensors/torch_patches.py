"""Ways around the dispatcher, and how they are made to ask first.

`print`, `tolist`, `numpy`, `data_ptr`, dlpack, pickling and the storage accessors read a tensor's memory directly.
While an engine is open, these methods of `torch.Tensor` and of its storages first tell it. Changing a class is global
by nature, so the list of open engines is too; with the last engine the methods are as they were.

Who got hold of the bytes before, or through a function of torch's that was looked up before, is found by counting
(`held_elsewhere`): torch counts who holds a storage, and Python's garbage collector knows all tensors among them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, cast, final

import torch
import torch.utils.dlpack

from spillway.engines.tensors.abstract import AbstractTensorEngine
from spillway.engines.tensors.mutated_saves import go_by_addresses, go_by_numbers
from spillway.engines.tensors.torch_compile import forget_steps
from spillway.engines.tensors.turns import forget_turns
from spillway.internals.dispatch_key import watcher_here
from spillway.internals.host_reads import make_them_ask
from spillway.internals.locks import renew_in_children
from spillway.internals.private import owners, storage_address, storage_of
from spillway.ir.timeline import Kind
from spillway.units import Bytes

BY_ADDRESS: Final = (
    "numpy", "__array__", "data_ptr", "const_data_ptr", "__dlpack__", "share_memory_", "apply_", "map_",
)  # fmt: skip
"""They hand out the address, which somebody may keep."""

READING: Final = (
    "tolist", "__repr__", "__format__", "__reduce_ex__", "__deepcopy__", "untyped_storage", "_typed_storage", "storage",
)  # fmt: skip
"""They read the bytes, or hand out a storage object that reads them later."""

RESIZING: Final = ("resize_", "resize_as_")
"""They want memory that can be given another size, which only bytes in torch's own memory are."""

BEGINNING: Final = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced",
    "alltoall", "alltoall_base", "broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
"""Methods of process groups: between two steps no mode sees the collectives that they begin, and the next step may
find them under way."""

OF_STORAGES: Final = ("__getitem__", "share_memory_", "_share_fd_cpu_", "_share_filename_cpu_")
"""Methods of storages that hand out the address, or put the bytes elsewhere. `data_ptr` is not among them: `torch.save`
and many others ask for it to tell storages apart."""

MODULES: Final[tuple[Any, ...]] = (torch, torch.utils.dlpack)
"""Where `to_dlpack` stands as a function; it hands out the address."""


@final
class WhileOpen:
    """What is installed for as long as an engine is open; with the last one torch is as it was. `install` may be
    interrupted; `uninstall` takes away what is there, and may be called again."""

    def __init__(self, install: Callable[[], None], uninstall: Callable[[], None]) -> None:
        self.engines: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those that are open."""
        self._install, self._uninstall = install, uninstall
        self._installed = False
        self._lock = threading.RLock()  # a collection of garbage may find an engine that nobody closed while it is held
        renew_in_children(self, "_lock")

    def add(self, engine: object) -> None:
        """It is open, until it is removed or collected."""
        with self._lock:
            self.engines.add(engine)  # first: an engine that is collected meanwhile must not find the list empty
            if not self._installed:
                try:
                    self._installed = True
                    self._install()
                except BaseException:  # Ctrl-C
                    self.engines.discard(engine)
                    self.uninstall()
                    raise
        weakref.finalize(engine, self._uninstall_after_the_last).atexit = False

    def remove(self, engine: object) -> None:
        with self._lock:
            self.engines.discard(engine)
            self._uninstall_after_the_last()

    def uninstall(self) -> None:
        """Nothing is installed any more."""
        self._uninstall()
        self._installed = False  # at the end: what was interrupted is done again

    def _uninstall_after_the_last(self) -> None:
        with self._lock:
            # The length may count one that has just been collected, and a collection in the walk may have ended here.
            if not tuple(self.engines) and self._installed:
                self.uninstall()


def others_open(engine: AbstractTensorEngine) -> bool:
    """Whether another engine is open."""
    if len(_open) == 1 and engine in _open:  # the usual case, without a walk through the set
        return False
    return any(other is not engine for other in tuple(_open))


def _await_copies() -> None:
    for engine in tuple(_open):
        engine.await_copies()


def _disarm_all() -> None:
    forget_turns()
    forget_steps()
    for engine in tuple(_open):
        engine.disarm()


if hasattr(os, "register_at_fork"):
    # A worker of a DataLoader is forked in the middle of a step: it shares the spill file and is not in the step. The
    # threads that copy are not forked with it.
    os.register_at_fork(before=_await_copies, after_in_child=_disarm_all)


def _install() -> None:
    go_by_numbers(tensors_of_python)
    make_them_ask(_steady)
    storages: Any = torch.UntypedStorage
    storages.resize_ = _telling_of_size(storages.resize_)
    if torch.distributed.is_available():
        group, work = _communication()
        for name in BEGINNING:
            if name in vars(group):
                setattr(group, name, _telling_of_work(vars(group)[name]))
        work.get_future = _waiting(vars(work)["get_future"])
    autograd: Any = torch.autograd
    autograd._engine_run_backward = _as_a_part(autograd._engine_run_backward)


def _install_methods() -> None:
    for name in (*BY_ADDRESS, *READING, *RESIZING):
        _replace(torch.Tensor, name)
    for name in OF_STORAGES:
        _replace(torch.UntypedStorage, name)
    for module in MODULES:
        _replace(module, "to_dlpack")


@contextlib.contextmanager
def _steady(
    name: str, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor], needed: Bytes
) -> Iterator[None]:  # fmt: skip
    with contextlib.ExitStack() as stack:
        for engine in tuple(_open):
            stack.enter_context(engine.steadying(name, read, written, needed))
        yield


def _communication() -> tuple[Any, Any]:
    return torch.distributed.ProcessGroup, torch.distributed.Work


def _replace(owner: Any, name: str) -> None:
    by_address = owner is not torch.Tensor or name in BY_ADDRESS
    setattr(owner, name, _telling(getattr(owner, name), by_address=by_address, resizing=name in RESIZING))


def _uninstall() -> None:
    go_by_addresses()
    autograd: Any = torch.autograd
    autograd._engine_run_backward = getattr(autograd._engine_run_backward, "__wrapped__", autograd._engine_run_backward)
    if torch.distributed.is_available():
        for owner in _communication():
            for name in (*BEGINNING, "get_future"):
                wrapper = vars(owner).get(name)
                if hasattr(wrapper, "__wrapped__"):
                    setattr(owner, name, wrapper.__wrapped__)
    take_away(torch.UntypedStorage, ("resize_",))


def _uninstall_methods() -> None:
    for module in MODULES:
        module.to_dlpack = getattr(module.to_dlpack, "__wrapped__", module.to_dlpack)
    take_away(torch.Tensor, (*BY_ADDRESS, *READING, *RESIZING))
    take_away(torch.UntypedStorage, OF_STORAGES)


def take_away(owner: Any, names: Sequence[str]) -> None:
    """What stands around others, if it stands there still: those come back."""
    for name in names:
        original = getattr(owner.__dict__.get(name), "__wrapped__", None)
        if original is None:
            continue
        if any(vars(base).get(name) is original for base in owner.__mro__[1:]):
            with contextlib.suppress(AttributeError):  # a collection of garbage has taken all away meanwhile
                delattr(owner, name)
        else:
            setattr(owner, name, original)


METHODS: Final = WhileOpen(_install_methods, _uninstall_methods)
"""For engines of both kinds."""
NOTING: Final[list[weakref.ref[Any]]] = []
"""Their `noticed` is told of whose bytes are handed out to who may write to them, and by what."""
PATCHES: Final = WhileOpen(_install, _uninstall)
_open: Final = PATCHES.engines


def _telling(original: Any, *, by_address: bool, resizing: bool) -> Any:
    @functools.wraps(original)
    def method(self: torch.Tensor | torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        for engine in tuple(_open) if len(_open) else ():
            if resizing:
                engine.ensure_resident(cast(torch.Tensor, self))
            else:
                engine.reveal(self, by_address=by_address)
        for reference in tuple(NOTING) if by_address else ():
            if (noting := reference()) is not None:
                noting.noticed(self, original.__name__)
        return original(self, *args, **kwargs)

    return method


def _telling_of_size(original: Any) -> Any:
    @functools.wraps(original)
    def resize_(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for engine in tuple(_open):
                stack.enter_context(engine.resizing(self, *args, **kwargs))
            return original(self, *args, **kwargs)

    return resize_


def _telling_of_work(original: Any) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        elsewhere = [engine for engine in tuple(_open) if not engine.in_step]
        for engine in elsewhere:
            engine.collectives.begin_elsewhere((*args, *kwargs.values()))
        work = original(self, *args, **kwargs)
        for engine in elsewhere:
            engine.collectives.begun_elsewhere(work, (*args, *kwargs.values()))
        return work

    return method


def _waiting(original: Any) -> Any:
    """What waits for a future is called by the thread that carries the work out, unseen, or here if the work is done:
    within a step it is done first. (What cannot be waited for twice has no future.)
    """

    @functools.wraps(original)
    def get_future(self: Any) -> Any:
        future = original(self)
        if any(engine.in_step for engine in tuple(_open)):
            future.wait()
        return future

    return get_future


def _as_a_part(original: Any) -> Any:
    """A backward that another thread runs is a part of the step that made its graph: it may read what was dropped. One
    that makes a graph of itself is told before it begins."""

    @functools.wraps(original)
    def run_backward(outputs: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for engine in tuple(_open):
                if engine.graph_grows is not None and len(args) > 2 and args[2]:
                    engine.graph_grows()
                if watcher_here() is None and engine.in_step and any(map(engine.find, outputs)):
                    stack.enter_context(engine.also_here())
            return original(outputs, *args, **kwargs)

    return run_backward


def held_elsewhere(
    newcomers: Sequence[torch.Tensor], named: Sequence[tuple[str, torch.Tensor]], *, running: bool
) -> list[torch.Tensor]:
    """Those whose bytes somebody holds who is no tensor that Python knows: a capsule of dlpack, a part of the storage.

    A storage is held by its Python object and by each of its tensors; a tensor by its Python object, by its views and,
    if it is a gradient, by whose gradient it is. The graph of autograd holds what requires a gradient, which dlpack
    does not take, and an op that is `running` the newcomer. Where nothing is unusual this asks two numbers of each of
    them; else it looks among what is known by name, and then among all that the garbage collector knows.
    """
    gradients = {id(tensor) for kind, tensor in named if kind == Kind.GRADIENT}

    def explained(tensor: torch.Tensor, sharing: Iterable[torch.Tensor]) -> bool:
        by_number = {one._cdata: one for one in (tensor, *sharing)}
        bases = [one._base for one in by_number.values() if one._base is not None]  # unknown to Python until now, maybe
        by_number |= {base._cdata: base for base in bases}
        if owners(storage_of(tensor)) > 1 + len(by_number):
            return False
        return all(
            one.requires_grad or (running and one is tensor)
            or cast(Any, one)._use_count() <= 1 + sum(base is one for base in bases) + (id(one) in gradients)
            for one in by_number.values()
        )  # fmt: skip

    suspects = [tensor for tensor in newcomers if not explained(tensor, ())]
    for known in (lambda: [tensor for _, tensor in named], gc.get_objects):
        if not suspects:
            break
        sharing: dict[int, list[torch.Tensor]] = {storage_address(tensor): [] for tensor in suspects}
        kinds = _tensor_types()
        for one in [one for one in known() if type(one) in kinds]:
            if torch._C._has_storage(one):
                sharing.get(storage_address(one), []).append(one)
        suspects = [tensor for tensor in suspects if not explained(tensor, sharing[storage_address(tensor)])]
    return suspects


def without_arrays(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those whose bytes no array of NumPy shows. It holds a tensor of that storage, and the garbage collector does not
    know of it; whoever else holds one unknown to it, such as a variable of a function that runs, is taken for an array.
    """
    places = {storage_address(tensor) for tensor in tensors}
    # Only this list refers to the first: what else is counted there is how this is counted.
    sharing = [torch.empty(0), *tensors]  # `gc.freeze` hides them from the collector, and whoever holds them
    met = {id(one) for one in tensors}
    sharing += (one for one in tensors_of_python() if id(one) not in met and _lies_in(places, one))
    known = _references_to({id(one) for one in sharing})
    usual, *unknown = [sys.getrefcount(one) - known[id(one)] for one in sharing]
    shown = {storage_address(one) for one, count in zip(sharing[1:], unknown, strict=True) if count > usual}
    return [tensor for tensor in tensors if storage_address(tensor) not in shown]


def _lies_in(places: set[int], tensor: torch.Tensor) -> bool:
    return torch._C._has_storage(tensor) and storage_address(tensor) in places


def _references_to(ids: set[int]) -> Counter[int]:
    """How often each is referred to by what the garbage collector knows."""
    return Counter(id(one) for holder in gc.get_objects() for one in gc.get_referents(holder) if id(one) in ids)


def tensors_of_python() -> list[torch.Tensor]:
    """All that the garbage collector knows."""
    kinds = _tensor_types()
    return [one for one in gc.get_objects() if type(one) in kinds]


def _tensor_types() -> set[type]:
    """Of tensors: asked for each of very many objects, a set answers sooner than `isinstance`."""
    kinds: list[type] = [torch.Tensor]
    for kind in kinds:
        kinds += type.__subclasses__(kind)
    return set(kinds)
