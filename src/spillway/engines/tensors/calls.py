"""A call of an op in enough detail to make it again: arguments, geometry, environment, random state."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast, final

import torch

from spillway.engines.tensors.ops import OpInfo
from spillway.internals.dispatch_key import unwatched
from spillway.internals.private import is_wrapper, set_gradients
from spillway.internals.process_memory import memory_for

Place = int | str | tuple[int | str, int]
"""Where a tensor stands in a call: a position, a keyword, or either with an index into a list."""

Geometry = tuple[Any, ...]
"""How a tensor lies over its storage: shape, strides, storage offset, dtype."""

Operand = tuple[Place, Geometry]

OPERAND: Final = object()
"""Stands in the place of a tensor among the arguments that a handler wrote down."""


_grad_enabled, _threads, _default_dtype = torch.is_grad_enabled, torch.get_num_threads, torch.get_default_dtype
_deterministic, _mkldnn_enabled = torch.get_deterministic_debug_mode, torch._C._get_mkldnn_enabled
_matmul_precision = torch._C._get_float32_matmul_precision
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_AUTOCAST: Final = torch._C.DispatchKey.AutocastCPU


def _cast_to() -> torch.dtype | None:
    """What autocast casts to inside an op; None where it is off, or has had its say above the op."""
    return None if _is_excluded(_AUTOCAST) else torch.get_autocast_dtype("cpu")


@final
class Settings(NamedTuple):
    """Settings that count on one kind of device alone: what they are now, and how to change them."""

    now: Callable[[], tuple[Any, ...]]
    change: Callable[[tuple[Any, ...], tuple[Any, ...]], None]
    """Takes what they are and what they shall be."""


NO_SETTINGS: Final = Settings(tuple, lambda present, wanted: None)
"""Where `Environment` holds all."""


class Environment(NamedTuple):
    """Settings that are inputs of every op (the same call under others need not give the same bits)."""

    grad: bool
    threads: int
    dtype: torch.dtype
    deterministic: int
    """1 where ops that are not only warn, 2 where they raise."""
    mkldnn: bool
    matmul: str
    autocast: torch.dtype | None
    """What is cast to in the ops that the op consists of."""
    of_device: tuple[Any, ...] = ()
    settings: Settings = NO_SETTINGS
    """What `of_device` is of."""

    @staticmethod
    def now(settings: Settings = NO_SETTINGS) -> Environment:
        """The settings of this thread and process at this moment."""
        return Environment(
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.get_deterministic_debug_mode(),
            torch._C._get_mkldnn_enabled(),
            torch.get_float32_matmul_precision(),
            _cast_to(),
            settings.now(),
            settings,
        )


@final
class Surroundings:
    """The settings at any moment; one record for as long as they stay the same."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = Environment.now()

    def now(self) -> Environment:
        """The settings of this thread and process at this moment."""
        last = self._last
        present: Any = (
            _grad_enabled(), _threads(), _default_dtype(), _deterministic(), _mkldnn_enabled(), _matmul_precision(),
            _cast_to(), (), NO_SETTINGS,
        )  # fmt: skip
        if last == present:
            return last
        last = self._last = Environment.now()
        return last


@final
class DeviceSurroundings:
    """The same with the settings of a device."""

    __slots__ = ("_last", "_settings")

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._last = Environment.now(settings)

    def now(self) -> Environment:
        """The settings of this thread and process at this moment."""
        present = Environment.now(self._settings)
        if present != self._last:
            self._last = present
        return self._last


def surroundings_with(settings: Settings) -> Surroundings | DeviceSurroundings:
    """What tells the settings of every op."""
    return Surroundings() if settings is NO_SETTINGS else DeviceSurroundings(settings)


_TRANSFORMS: Final = functools.reduce(
    operator.or_,
    (
        torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))
        for key in ("VmapMode", "FuncTorchVmapMode", "FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode")
    ),
)
"""By which `vmap` and `torch.func` hear of ops."""

_GUARDS: Final = (
    torch._C._AutoDispatchBelowADInplaceOrView,
    torch._C._DisableAutocast,
    functools.partial(torch._C._ExcludeDispatchKeyGuard, _TRANSFORMS),
    unwatched,
)


@final
class InEnvironment:
    """Context manager: the settings of the original call, without autograd, which stood above it, unseen by the user's
    own dispatch modes, which saw the original, and by transforms, within which another op may be wanted. Autocast, too,
    stood above it, but for ops that it passes by and that consist of others (`_trilinear`, products of sparse tensors).
    """

    def __init__(self, environment: Environment) -> None:
        self._wanted = environment
        self._guards: list[Any] = []

    def __enter__(self) -> None:
        self._before = Environment.now(self._wanted.settings)
        for kind in _GUARDS:  # a guard acts when it is made: each is entered before the next is made
            guard: Any = kind()
            guard.__enter__()
            self._guards.append(guard)
        if self._wanted.autocast is not None:
            self._cast_before = torch.get_autocast_dtype("cpu")
            _exclude(_AUTOCAST, False)
            torch.set_autocast_dtype("cpu", self._wanted.autocast)
        _apply(self._before, self._wanted)

    def __exit__(self, *exception: object) -> None:
        if self._wanted.autocast is not None:
            torch.set_autocast_dtype("cpu", self._cast_before)
            _exclude(_AUTOCAST, True)
        _apply(self._wanted, self._before)
        while self._guards:
            self._guards.pop().__exit__(None, None, None)


def _apply(current: Environment, wanted: Environment) -> None:
    if current == wanted:
        return
    set_gradients(wanted.grad)
    if current.threads != wanted.threads:
        torch.set_num_threads(wanted.threads)
    if current.dtype != wanted.dtype:
        torch.set_default_dtype(wanted.dtype)
    if current.deterministic != wanted.deterministic:
        torch._C._set_deterministic_algorithms(wanted.deterministic > 0, warn_only=wanted.deterministic == 1)
    if current.mkldnn != wanted.mkldnn:
        torch._C._set_mkldnn_enabled(wanted.mkldnn)
    if current.matmul != wanted.matmul:
        torch.set_float32_matmul_precision(wanted.matmul)
    if current.of_device != wanted.of_device:
        wanted.settings.change(current.of_device, wanted.of_device)


class Call(NamedTuple):
    """The payload of a recipe. `args` and `kwargs` have a hole for each tensor; `operands` say what belongs there.

    The operands stand in the order of the recipe's reads; `scratch` are those that a replay fills with zeros.
    `random` pairs a generator with its state before the call. `outputs` are the positions, among the tensors that the
    op returns, of those with a storage of their own.
    """

    func: Any
    args: list[Any]
    kwargs: dict[str, Any] | None
    operands: Sequence[Operand]
    environment: Environment
    outputs: tuple[int, ...] = (0,)
    scratch: Sequence[Operand] = ()
    random: tuple[torch.Generator, torch.Tensor] | None = None

    @staticmethod
    def unpacked(payload: Any) -> Call:
        """The call that a recipe's payload stands for: itself, or a list of what the shortest way wrote down.

        That is the op, its arguments, keywords and environment, and then the geometry of each operand. Of the arguments
        there is a tuple of those behind the operands where operands come first, else a list with `OPERAND` in each of
        their places. An op with several results is paired with the positions of those with a storage of their own.
        """
        if isinstance(payload, Call):
            return payload
        func, args, kwargs, environment, *geometries = payload
        func, outputs = func if isinstance(func, tuple) else (func, (0,))
        holes: list[Any] = [OPERAND] * len(geometries) + list(args) if isinstance(args, tuple) else args
        places = [place for place, given in enumerate(holes) if given is OPERAND]
        return Call(func, holes, kwargs, list(zip(places, geometries, strict=True)), environment, outputs)

    def again(self, storages: Sequence[torch.UntypedStorage]) -> Any:
        """Make the call on tensors over `storages`; the random state and the settings end as they were."""
        args: list[Any] = [list(a) if isinstance(a, list) else a for a in self.args]
        kwargs: dict[str, Any] = {k: list(v) if isinstance(v, list) else v for k, v in (self.kwargs or {}).items()}
        with InEnvironment(self.environment):
            for (place, geometry), storage in zip(self.operands, storages, strict=True):
                fill(args, kwargs, place, tensor_over(storage, geometry))
            for place, geometry in self.scratch:
                fill(args, kwargs, place, torch.zeros(geometry[0], dtype=geometry[3], device=storages[0].device))
            if self.random is None:
                return self.func(*args, **kwargs)
            generator, state = self.random
            present = generator.get_state()
            generator.set_state(state)
            try:
                return self.func(*args, **kwargs)
            finally:
                generator.set_state(present)


def random_state(kwargs: Mapping[str, Any] | None, usual: torch.Generator) -> tuple[torch.Generator, torch.Tensor]:
    """The generator that a call draws from, which is the `usual` one if it is given none, and its state now."""
    generator = (kwargs or {}).get("generator") or usual
    with memory_for("the state of a random stream, which a replay draws from"):
        return generator, generator.get_state()


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """What `tensor_over` needs."""
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a sparse tensor or a wrapper subclass consists of; none for a tensor with bytes of its own."""
    if is_wrapper(tensor):
        attributes = [getattr(tensor, name) for name in cast(Any, tensor).__tensor_flatten__()[0]]
        inner = [attribute for attribute in attributes if isinstance(attribute, torch.Tensor)]
    else:
        inner = [getattr(tensor, name)() for name in _PARTS.get(tensor.layout, ())]
    for part in inner:
        yield part
        yield from inner_tensors(part)


_PARTS: Final[Mapping[torch.layout, tuple[str, ...]]] = MappingProxyType(
    {
        torch.sparse_coo: ("_indices", "_values"),
        torch.sparse_csr: ("crow_indices", "col_indices", "values"),
        torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
        torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
        torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    }
)


def tensor_over(storage: torch.UntypedStorage, geometry: Geometry) -> torch.Tensor:
    """A tensor of the recorded shape, strides, offset and dtype over `storage`."""
    shape, strides, offset, dtype = geometry
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, offset, shape, strides)


def fill(args: list[Any], kwargs: dict[str, Any], place: Place, value: Any) -> None:
    """Put `value` where `place` says."""
    outer, inner = place if isinstance(place, tuple) else (place, None)
    holder: Any = kwargs if isinstance(outer, str) else args
    if inner is None:
        holder[outer] = value
    else:
        holder[outer][inner] = value


def operands(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Place, Any, str]]:
    """Every tensor of a call: its place, the tensor, and the name of its argument."""
    arguments = info.func._schema.arguments
    positional = [argument.name for argument in arguments if not argument.kwarg_only]
    named: list[tuple[int | str, str, Any]] = [(p, positional[p], value) for p, value in enumerate(args)]
    named += [(name, name, value) for name, value in kwargs.items()]
    for outer, name, value in named:
        if isinstance(value, torch.Tensor):
            yield outer, value, name
        elif isinstance(value, list | tuple):
            for inner, element in enumerate(value):
                if isinstance(element, torch.Tensor):
                    yield (outer, inner), element, name


def with_holes(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Copies of the arguments in which every tensor is None."""
    return [_hole(value) for value in args], {name: _hole(value) for name, value in kwargs.items()}


def _hole(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, list | tuple) and any(isinstance(element, torch.Tensor) for element in value):
        return [None if isinstance(element, torch.Tensor) else element for element in value]
    return value
