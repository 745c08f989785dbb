"""The private names of torch that the engine stands on, in one place."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, ParamSpec, Self, TypeVar, cast

import torch
from torch.nn.utils import parametrize
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass,
)

P = ParamSpec("P")
R = TypeVar("R")

storage_address: Final = cast("Callable[[torch.Tensor], int]", vars(torch._C)["_storage_address"])
"""Address of a tensor's storage object: the cheapest key there is, the same from its birth to its death."""

storage_of: Final = cast("Callable[[torch.Tensor], torch.UntypedStorage]", torch._C.TensorBase.untyped_storage)
"""`Tensor.untyped_storage` as torch defines it, whatever was put in its place on `Tensor`."""

resize_storage: Final[Callable[[torch.UntypedStorage, int], object]] = cast(Any, torch._C.StorageBase).resize_
"""`UntypedStorage.resize_` as torch defines it, which tells no engine: what a machine does to a storage is no news."""

raw_stream: Final[Callable[[int], int]] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
"""The current stream of a CUDA device as a number, which is quick enough to be asked before every op. A torch without
CUDA does not have it."""

CAN_SWAP: Final = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""Whether this torch can exchange the bytes under a storage (2.13 can, 2.11 cannot)."""


is_wrapper: Final = cast("Callable[[torch.Tensor], bool]", is_traceable_wrapper_subclass)
"""Whether a tensor is a subclass that wraps others: it has a storage with a size and no memory."""


def is_hollow(tensor: torch.Tensor) -> bool:
    """Whether its storage has a size and no memory: a wrapper's, also of one that does not say what it wraps, or a zero
    tensor's."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor._is_zerotensor()
    try:
        storage_of(tensor).data_ptr()
    except (RuntimeError, ValueError):  # the second of a parameter that is made later
        return True
    return is_wrapper(tensor) or tensor._is_zerotensor()


def convolves_by(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> str:
    """The name of the implementation that torch chooses for a convolution, by the arguments of `aten::convolution`."""
    chosen: Any = cast(Any, torch._C)._select_conv_backend(x, weight, bias, *how, bias_sizes=None)
    return str(chosen.name)


def function_modes() -> list[Any]:
    """Those of this thread, the outermost first, whether they hear what runs now or not."""
    return [*_hidden.functions, *_function_mode_stack()]


class _Hidden(threading.local):
    """Modes that hear nothing at the moment, the outermost first."""

    functions: Sequence[Any] = ()
    dispatch: Sequence[Any] = ()
    """With our own that were open among them, which go on to hear."""


_hidden: Final = _Hidden()
_function_mode_stack: Final = cast("Callable[[], list[Any]]", _get_current_function_mode_stack)
_open_function_modes: Final = cast("Callable[[], int]", cast(Any, torch._C)._len_torch_function_stack)
_dispatch_mode_stack: Final = cast("Callable[[], list[Any]]", _get_current_dispatch_mode_stack)
_open_dispatch_modes: Final = cast("Callable[[], int]", cast(Any, torch._C)._len_torch_dispatch_stack)


def _set_function_modes(modes: Sequence[Any]) -> None:
    while _open_function_modes():
        cast(Any, torch._C)._pop_torch_function_stack()
    for mode in modes:
        cast(Any, torch._C)._push_on_torch_function_stack(mode)


def _set_dispatch_modes(modes: Sequence[Any]) -> None:
    while _open_dispatch_modes():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def _is_ours(mode: object) -> bool:
    return type(mode).__module__.startswith("spillway.")


def unheard_by_modes(function: Callable[P, R]) -> Callable[P, R]:
    """What the function asks of tensors, and the ops that it runs, are no news to the user's modes, of functions and of
    ops; but for what it calls through `heard`."""

    @functools.wraps(function)
    def quietly(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _open_function_modes() and not _open_dispatch_modes():
            return function(*args, **kwargs)
        before, functions, modes = (_hidden.functions, _hidden.dispatch), _function_mode_stack(), _dispatch_mode_stack()
        ours = list(filter(_is_ours, modes))
        hides, others = bool(functions), len(ours) < len(modes)
        try:
            if hides:
                _hidden.functions = functions
                _set_function_modes(())
            if others:
                _hidden.dispatch = modes
                _set_dispatch_modes(ours)
            return function(*args, **kwargs)
        finally:
            if others:
                _set_dispatch_modes(_hidden.dispatch)
                _hidden.dispatch = before[1]
            if hides:
                _set_function_modes(_hidden.functions)
                _hidden.functions = before[0]

    return quietly


def unheard_by_function_modes(function: Callable[P, R]) -> Callable[P, R]:
    """The same for modes of functions alone: for what a mode of ours does with an op, of which the modes around it are
    to hear."""

    @functools.wraps(function)
    def quietly(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _open_function_modes():
            return function(*args, **kwargs)
        before, modes = _hidden.functions, _function_mode_stack()
        try:
            _hidden.functions = modes
            _set_function_modes(())
            return function(*args, **kwargs)
        finally:
            _set_function_modes(_hidden.functions)
            _hidden.functions = before

    return quietly


@contextlib.contextmanager
def only_function_modes(modes: Sequence[Any], *, bypassed: bool = False) -> Iterator[None]:
    """These alone hear what runs within; `bypassed`, what it calls through `heard`."""
    before, now = _hidden.functions, _function_mode_stack()
    try:
        _hidden.functions = modes if bypassed else ()
        _set_function_modes(() if bypassed else modes)
        yield
    finally:
        _set_function_modes(now)
        _hidden.functions = before


@contextlib.contextmanager
def only_dispatch_modes(modes: Sequence[Any], *, bypassed: bool = False) -> Iterator[None]:
    """These and our own that are open hear what runs within; `bypassed`, these what it calls through `heard`."""
    before, now = _hidden.dispatch, _dispatch_mode_stack()
    ours = [mode for mode in now if _is_ours(mode)]
    wanted = [*modes, *ours]
    try:
        _hidden.dispatch = wanted if bypassed and modes else ()
        _set_dispatch_modes(ours if bypassed else wanted)
        yield
    finally:
        _set_dispatch_modes(now)
        _hidden.dispatch = before


def heard(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call what is the user's, from within what is `unheard_by_modes`."""
    if _hidden.dispatch:
        return _heard_by_dispatch_modes(function, *args, **kwargs)
    return _heard_by_function_modes(function, *args, **kwargs)


def _heard_by_function_modes(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    if not _hidden.functions:
        return function(*args, **kwargs)
    modes, _hidden.functions = _hidden.functions, ()
    try:
        _set_function_modes(modes)
        return function(*args, **kwargs)
    finally:
        _hidden.functions = _function_mode_stack()
        _set_function_modes(())


def _heard_by_dispatch_modes(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Around modes of ours that were opened since."""
    now, modes = _dispatch_mode_stack(), _hidden.dispatch
    inner = [one for one in now if not any(one is other for other in modes)]
    try:
        _hidden.dispatch = ()
        _set_dispatch_modes([*modes, *inner])
        return _heard_by_function_modes(function, *args, **kwargs)
    finally:
        _hidden.dispatch = [one for one in _dispatch_mode_stack() if not any(one is other for other in inner)]
        _set_dispatch_modes(now)


def dispatch_modes() -> list[Any]:
    """Of this thread, the outermost first, whether they hear what runs now or not; but for our own."""
    return [mode for mode in (*_hidden.dispatch, *_dispatch_mode_stack()) if not _is_ours(mode)]


_included: Final = cast("Callable[[Any], bool]", cast(Any, torch._C)._dispatch_tls_is_dispatch_key_included)
_BEFORE_AUTOGRAD: Final = cast(Any, torch._C).DispatchKey.PreDispatch
_PYTHON_DISPATCHER: Final = cast(Any, torch._C)._dispatch_key_parse("PythonDispatcher")


def traced() -> bool:
    """Whether a mode of torch's stands around what runs that takes ops for something else: `make_fx` writes them down,
    fake tensors have no content, `functionalize` knows no writes. Or every op is another one, in Python."""
    if _included(_BEFORE_AUTOGRAD) or _included(_PYTHON_DISPATCHER):
        return True
    return bool(_hidden.dispatch or _open_dispatch_modes()) and any(
        getattr(mode, "_mode_key", None) is not None for mode in dispatch_modes()
    )


def unheard(function: Callable[P, R]) -> Callable[P, R]:
    """What the function asks of tensors, and the ops that it runs, are no news to a subclass's `__torch_function__`."""

    @functools.wraps(function)
    def quietly(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return quietly


def set_gradients(enabled: bool) -> None:
    """As `torch.set_grad_enabled`, of which the user's function modes hear, and at which they may raise."""
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(enabled)


@contextlib.contextmanager
def grad_mode(*, enabled: bool) -> Iterator[None]:
    """As `torch.enable_grad` and `torch.no_grad`, unheard."""
    before = torch.is_grad_enabled()
    try:
        set_gradients(enabled)
        yield
    finally:
        set_gradients(before)


def parametrized(*, copied: bool = True) -> tuple[int, dict[Any, Any]]:
    """How many `torch.nn.utils.parametrize.cached()` are open, and the weights that they hold."""
    cache: dict[Any, Any] = parametrize._cache
    return parametrize._cache_enabled, dict(cache) if copied else cache


def set_parametrized(held: tuple[int, dict[Any, Any]]) -> None:
    """Have these instead."""
    parametrize._cache_enabled, parametrize._cache = held


def swap_bytes(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange the bytes of two storages of one size; tensors, views and version counters do not notice."""
    cast(Any, one)._swap_data_ptr_(other)


def fresh_storage(nbytes: int, device: torch.device | None = None) -> torch.UntypedStorage:
    """A storage of uninitialised bytes, on the CPU unless it is said where, whichever modes are active.

    On the CPU it comes from the arena if that serves, and otherwise from torch's default allocator, whichever tensors
    come from.
    """
    if device is None:
        return cast(torch.UntypedStorage, cast(Any, torch.UntypedStorage)(nbytes))
    return cast(torch.UntypedStorage, cast(Any, torch.UntypedStorage)(nbytes, device=device))


def storage_at(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage over memory that somebody else keeps."""
    return cast(torch.UntypedStorage, torch._C._construct_storage_from_data_pointer(address, device, nbytes))


def bytes_over(storage: torch.UntypedStorage, offset: int = 0, nbytes: int | None = None) -> torch.Tensor:
    """The bytes of a storage, or some of them, as a tensor; of a real one as many without content, where all that is
    made is without."""
    size = storage.nbytes() - offset if nbytes is None else nbytes
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    if type(empty) is not torch.Tensor and storage.device.type != "meta":
        return empty.new_empty(size)
    return empty.set_(storage, offset, (size,), (1,))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: ops such as `resize_`, `set_` and `t_`, and `tensor.data = other`, change that in place."""

    storage: torch.UntypedStorage = field(compare=False)
    key: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self | None:
        """None of a nested tensor, which has a place for each of its parts, and keeps it."""
        if tensor.is_nested:
            return None
        storage, offset = storage_of(tensor), int(tensor.storage_offset())
        where = storage._cdata, tensor.size(), tensor.stride(), offset, tensor.dtype
        return cls(storage, *where, tensor.is_conj(), tensor.is_neg())

    def put_back(self, tensor: torch.Tensor) -> None:
        """The tensor lies there again, with the version that it has."""
        if Place.of(tensor) != self:
            empty = torch.empty(0, dtype=self.dtype, device=self.storage.device)
            there = empty.set_(self.storage, self.offset, self.size, self.stride)
            there = there.conj() if self.conjugate else there
            tensor.data = torch._neg_view(there) if self.negative else there


def counted_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """A tensor's storage for who asks for its size alone. One in host memory has its size wherever its bytes are, so
    that no engine is told; one on a device may have none while it is away."""
    return tensor.untyped_storage() if tensor.is_cuda else storage_of(tensor)


def owners(storage: torch.UntypedStorage) -> int:
    """How many hold it: its Python object is one, each of its tensors another."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def unbox_work(boxed: torch.ScriptObject) -> Any:
    """The `Work` that an op of c10d returned, as Python knows it: the same object for all, while one of them has it."""
    return cast(Any, torch.distributed.Work).unbox(boxed)


def unwaited_works() -> int:
    """Tensors of functional collectives that nobody has waited for."""
    from torch._C import _distributed_c10d

    return int(cast(Any, _distributed_c10d)._get_work_registry_size())


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a `DTensor`; that none was imported is the quick answer."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor lies in this process: of a `DTensor` its part."""
    return cast(torch.Tensor, cast(Any, tensor)._local_tensor) if is_distributed(tensor) else tensor


def default_to_foreach(parameters: list[torch.Tensor], *, differentiable: bool) -> bool:
    """Whether optimizers update these in ops over lists if they are not told."""
    return _default_to_fused_or_foreach(parameters, differentiable)[1]


def fully_sharded(module: torch.nn.Module) -> bool:
    """Whether `fully_shard` gathers parameters around its forward."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return False
    return bool(cast(Any, module)._get_fsdp_state()._fsdp_param_groups)


def process_groups() -> list[Any]:
    """Those of which this process is a part."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    return list(cast(Any, torch.distributed.distributed_c10d)._world.pg_map)


def default_store() -> Any:
    """The store by which the processes of the default process group found each other."""
    return cast(Any, torch.distributed.distributed_c10d)._get_default_store()


def ports_of(store: Any) -> set[int]:
    """The port of a store that is served over TCP; none of others."""
    port = getattr(getattr(store, "_underlying_non_prefix_store", store), "port", None)
    return set() if port is None else {int(port)}


def nccl_backends() -> list[Any]:
    """Of the process groups that have one."""
    if not torch.cuda.is_available():
        return []
    every = [backend for group in process_groups() for backend in _backends_of(group)]
    return [backend for backend in every if backend.name() == "nccl"]


def _backends_of(group: Any) -> list[Any]:
    found = []
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):
            found.append(group._get_backend(device))
    return found


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether autograd begins at a tensor. One of several views of a base that was written to since cannot tell."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False
