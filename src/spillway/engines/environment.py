"""What ops read beside their arguments and modules: settings, random streams, autocast, context variables.

A replay of one op is run in its `OpEnvironment` (rule 6), a second run of a block in its `Environment`.
"""

from __future__ import annotations

import _random
import collections
import contextlib
import contextvars
import ctypes
import functools
import operator
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast, final

import numpy as np
import torch

from spillway.internals.dispatch_key import unwatched
from spillway.internals.private import (
    dispatch_modes,
    function_modes,
    only_dispatch_modes,
    only_function_modes,
    parametrized,
    set_gradients,
    set_parametrized,
)

Flag: TypeAlias = tuple[Callable[[], Any], Callable[[Any], Any]]
"""What asks for a setting of torch's, and what changes it."""


@final
class Settings:
    """Settings of torch that decide how ops are computed: the same call under others need not give the same bits. `now`
    asks for all of them at once."""

    __slots__ = ("flags", "now")

    def __init__(self, *flags: Flag, now: Callable[[], tuple[Any, ...]] | None = None) -> None:
        getters = [get for get, _ in flags]
        self.flags = flags
        self.now = now if now is not None else lambda: tuple([get() for get in getters])

    def __add__(self, other: Settings) -> Settings:
        if not other.flags:
            return self
        mine, theirs = self.now, other.now
        return Settings(*self.flags, *other.flags, now=lambda: mine() + theirs())

    def restore(self, wanted: Sequence[Any]) -> None:
        """From whatever they are by now, as code may change them, to what they were."""
        self.change(self.now(), wanted)

    def change(self, present: Sequence[Any], wanted: Sequence[Any]) -> None:
        """From what they are to what they shall be."""
        for (_, put), one, other in zip(self.flags, present, wanted, strict=True):
            if one != other:
                put(other)


_threads, _default_dtype, _deterministic = (
    torch.get_num_threads, torch.get_default_dtype, torch.get_deterministic_debug_mode
)  # fmt: skip
_mkldnn_enabled = torch._C._get_mkldnn_enabled


def _be_deterministic(mode: int) -> None:
    """1 where ops that are not only warn, 2 where they raise."""
    torch._C._set_deterministic_algorithms(mode > 0, warn_only=mode == 1)


def _reduce_in(kind: str) -> Flag:
    """In which precision cuBLAS adds up: one value, or two."""
    get, put = (
        getattr(torch._C, f"_{verb}_cublas_allow_{kind}_reduced_precision_reduction") for verb in ("get", "set")
    )
    return get, lambda value: put(*(value if isinstance(value, tuple) else (value,)))


def _where_there_is_one(flag: Flag) -> Flag:
    """A library that is not there cannot be told."""

    def put(value: Any) -> None:
        with contextlib.suppress(RuntimeError):
            flag[1](value)

    return flag[0], put


def _flushes_denormals() -> bool:
    """`torch.set_flush_denormal`, which nobody can ask for."""
    return _smallest_normal * _half == 0.0


_of_torch: Final[Any] = torch._C
_smallest_normal, _half = sys.float_info.min, 0.5
_mkldnn_deterministic, _nnpack_enabled = torch._C._get_mkldnn_deterministic, torch._C._get_nnpack_enabled
_half_sums = _of_torch._get_cpu_allow_fp16_reduced_precision_reduction
_fills_memory = _of_torch._get_deterministic_fill_uninitialized_memory


def _products(backend: str, op: str) -> Flag:
    """In which precision floats of 32 bits are multiplied (`torch.backends.mkldnn.matmul.fp32_precision`), by whichever
    of torch's two ways it was said; "all" is what holds for a backend's ops that have none themselves, and "generic"
    for backends."""
    getter, setter = _of_torch._get_fp32_precision_getter, _of_torch._set_fp32_precision_setter
    above = backend if op != "all" else "generic"

    def put(value: str) -> None:
        around = getter(above, "all") if backend != "generic" else "none"  # what holds where this one has none
        if value == "none" != around:
            value = "ieee"
        setter(backend, op, "none" if value == around else value)

    return functools.partial(getter, backend, op), put


def _matmul_precision() -> str | None:
    """The older of the two ways (`torch.set_float32_matmul_precision`), which cannot be asked for where the newer one
    was used."""
    try:
        return torch._C._get_float32_matmul_precision()
    except RuntimeError:
        return None


def _put_matmul_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


_PRODUCTS: Final = ("matmul", "conv", "rnn")

ELEMENTWISE: Final = Settings(
    (_threads, torch.set_num_threads),
    (_default_dtype, torch.set_default_dtype),
    (_deterministic, _be_deterministic),
    (_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (_flushes_denormals, torch.set_flush_denormal),
    (_mkldnn_deterministic, torch._C._set_mkldnn_deterministic),
    (_nnpack_enabled, torch._C._set_nnpack_enabled),
    _where_there_is_one((_half_sums, _of_torch._set_cpu_allow_fp16_reduced_precision_reduction)),
    (_fills_memory, _of_torch._set_deterministic_fill_uninitialized_memory),
    now=lambda: (
        _threads(), _default_dtype(), _deterministic(), _mkldnn_enabled(),
        _smallest_normal * _half == 0.0, _mkldnn_deterministic(), _nnpack_enabled(), _half_sums(), _fills_memory(),
    ),
)  # fmt: skip
"""Of ops that have no products, on every device."""

GENERAL: Final = ELEMENTWISE + Settings(
    (_matmul_precision, _put_matmul_precision),  # first: it puts some of the others as well
    *(_products("mkldnn", op) for op in _PRODUCTS if torch.ops.mkldnn._is_mkldnn_bf16_supported()),
)
"""On every device; by precision where this processor has products of fewer bits."""

ATTENTION: Final = Settings(
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    (torch._C._get_math_sdp_allow_fp16_bf16_reduction, torch._C._set_math_sdp_allow_fp16_bf16_reduction),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
)
"""By which the kernel of attention is chosen: on the CPU above what the tensor engine is shown."""


def _attribute(holder: object, name: str) -> Flag:
    return functools.partial(getattr, holder, name), functools.partial(setattr, holder, name)


EINSUM: Final = Settings(*(_attribute(torch.backends.opt_einsum, name) for name in ("enabled", "strategy")))
"""In which order `einsum` contracts, which is decided in Python."""


def _anomalies() -> tuple[bool, bool]:
    """Whether autograd looks for them, and whether for NaN."""
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


ABOVE_OPS: Final = Settings(
    *(_products(backend, "all") for backend in ("generic", "mkldnn", "cuda")),
    (_anomalies, lambda value: torch.set_anomaly_enabled(*value)),
    (_of_torch._check_sparse_tensor_invariants, _of_torch._set_check_sparse_tensor_invariants),
    _attribute(torch.distributions.Distribution, "_validate_args"),
    *(_attribute(torch.__future__, f"_{one}_module_params_on_conversion") for one in ("overwrite", "swap")),
)
"""What holds where a setting of one kind of ops says nothing, and what is checked, or done by modules, above ops."""

CUDA: Final = Settings(
    *[
        _where_there_is_one(flag)
        for flag in (
            (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
            (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
            (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
            *(_products("cuda", op) for op in _PRODUCTS),
            (_of_torch._get_linalg_preferred_backend, _of_torch._set_linalg_preferred_backend),
            (_of_torch._get_blas_preferred_backend, _of_torch._set_blas_preferred_backend),
            _reduce_in("fp16"),
            _reduce_in("bf16"),
            *ATTENTION.flags,
        )
    ]
)
"""Of the libraries on a CUDA device, besides."""


# --------------------------------------------------------------------------------------------------------- of an op


_grad_enabled = torch.is_grad_enabled
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_AUTOCAST: Final = torch._C.DispatchKey.AutocastCPU


def _cast_to() -> torch.dtype | None:
    """What autocast casts to inside an op; None where it is off, or has had its say above the op."""
    return None if _is_excluded(_AUTOCAST) else torch.get_autocast_dtype("cpu")


class OpEnvironment(NamedTuple):
    """What is an input of every op beside its arguments."""

    grad: bool
    values: tuple[Any, ...]
    autocast: torch.dtype | None
    """What is cast to in the ops that the op consists of."""
    settings: Settings = GENERAL

    @staticmethod
    def now(settings: Settings = GENERAL) -> OpEnvironment:
        """In this thread and process at this moment."""
        return OpEnvironment(_grad_enabled(), settings.now(), _cast_to(), settings)


@final
class Surroundings:
    """The same at any moment; one record for as long as it stays the same."""

    __slots__ = ("_last", "_settings")

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._last = OpEnvironment.now(settings)

    def now(self) -> OpEnvironment:
        """In this thread and process at this moment."""
        present = (_grad_enabled(), self._settings.now(), _cast_to(), self._settings)
        last = self._last
        if last == present:
            return last
        self._last = found = OpEnvironment._make(present)
        return found


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

    def __init__(self, environment: OpEnvironment) -> None:
        self._wanted = environment
        self._guards: list[Any] = []

    def __enter__(self) -> None:
        self._before = OpEnvironment.now(self._wanted.settings)
        for kind in _GUARDS:  # a guard acts when it is made: each is entered before the next is made
            guard: Any = kind()
            guard.__enter__()
            self._guards.append(guard)
        if self._wanted.autocast is not None:
            self._cast_before = torch.get_autocast_dtype("cpu")
            _exclude(_AUTOCAST, False)
            torch.set_autocast_dtype("cpu", self._wanted.autocast)
        self._change(self._before, self._wanted)

    def __exit__(self, *exception: object) -> None:
        if self._wanted.autocast is not None:
            torch.set_autocast_dtype("cpu", self._cast_before)
            _exclude(_AUTOCAST, True)
        self._change(self._wanted, self._before)
        while self._guards:
            self._guards.pop().__exit__(None, None, None)

    @staticmethod
    def _change(present: OpEnvironment, wanted: OpEnvironment) -> None:
        if present != wanted:
            set_gradients(wanted.grad)
            wanted.settings.change(present.values, wanted.values)


# ----------------------------------------------------------------------------------------------------- of a forward


Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""A random stream that a user may register."""
_HEAD: Final = object.__basicsize__
_enter: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(("PyContext_Enter", ctypes.pythonapi))
_exit: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(("PyContext_Exit", ctypes.pythonapi))


class Stream(Protocol):
    """One random stream. Two answers of `get` that are the same object are the same state."""

    def get(self) -> Any:
        """The state, which nobody may write to."""

    def set(self, state: Any) -> None:
        """Put the stream back there."""


@final
class PythonStream:
    """Python's `random`, whose own `getstate` makes 625 numbers: it is asked only when the raw words have changed."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._raw: Any = None
        self._state: Any = None

    def get(self) -> Any:
        raw = (
            ctypes.string_at(id(self._source) + _HEAD, _random.Random.__basicsize__ - _HEAD),
            cast(Any, self._source).gauss_next,
        )
        if raw != self._raw:
            self._state = self._source.getstate()
            self._raw = raw
        return self._state

    def set(self, state: Any) -> None:
        if self.get() is not state:
            self._source.setstate(state)
            self._raw = None


@final
class NumpyStream:
    """NumPy's global stream, or a `RandomState`: asked only when its raw words, or its spare normal, have changed."""

    def __init__(self, source: np.random.RandomState) -> None:
        self._source: Any = source
        self._raw: Any = None
        self._state: Any = None

    def get(self) -> Any:
        raw = self._words()
        if raw is None or raw != self._raw:
            self._state = self._source.get_state(legacy=False)
            self._raw = raw
        return self._state

    def set(self, state: Any) -> None:
        if self.get() is not state:
            self._source.set_state(state)
            self._raw = None

    def _words(self) -> Any:
        bits = getattr(self._source, "_bit_generator", None)
        if not isinstance(bits, np.random.MT19937):
            return None  # somebody put another kind in its place
        own = type(self._source).__basicsize__ - _HEAD
        spare = ctypes.string_at(id(self._source) + _HEAD, own)
        return ctypes.string_at(bits.ctypes.state_address, 2500), spare


@final
class NumpyGeneratorStream:
    """A `numpy.random.Generator`."""

    def __init__(self, source: np.random.Generator) -> None:
        self._source = source

    def get(self) -> Any:
        return self._source.bit_generator.state

    def set(self, state: Any) -> None:
        self._source.bit_generator.state = state


@final
class TorchStream:
    """A `torch.Generator`, of any device."""

    def __init__(self, source: torch.Generator) -> None:
        self._source = source

    def get(self) -> Any:
        return self._source.get_state()

    def set(self, state: Any) -> None:
        self._source.set_state(state)


def stream(source: Generator) -> Stream:
    """How to read and set a random stream of the user's. Raises TypeError if it is none that is known."""
    if isinstance(source, torch.Generator):
        return TorchStream(source)
    if isinstance(source, np.random.Generator):
        return NumpyGeneratorStream(source)
    if isinstance(source, np.random.RandomState):
        return NumpyStream(source)
    if isinstance(source, random.Random):
        return PythonStream(source)
    raise TypeError(f"{type(source).__name__} is no random stream: torch.Generator, numpy's or random.Random are.")


Autocast: TypeAlias = tuple[str, bool, torch.dtype, bool]


@final
class Environment:
    """Reads the environment when a block begins, and runs its recompute in it: for a model on devices of these types,
    that draws from `generators` beside the global random streams of Python, NumPy and torch."""

    def __init__(self, devices: Iterable[torch.device], generators: Iterable[Generator]) -> None:
        others = {device for device in devices if device.type not in ("cpu", "meta")}
        self._types = ("cpu", *sorted({device.type for device in others}))
        # What is above comes first: what is put below it depends on that.
        self._settings = ABOVE_OPS + GENERAL + EINSUM + (CUDA if "cuda" in self._types else ATTENTION)
        self._streams: list[Stream] = [
            PythonStream(random._inst),
            NumpyStream(np.random.mtrand._rand),
            TorchStream(torch.default_generator),
            *(TorchStream(_generator_of(device)) for device in others),
            *(stream(generator) for generator in generators),
        ]
        self.heard: Callable[[list[Any]], None] | None = None
        """Told of every list of states that is read: no op makes them."""

    def streams(self) -> list[Any]:
        """Where the random streams stand."""
        states = [one.get() for one in self._streams]
        if self.heard is not None:
            self.heard(states)
        return states

    def capture(self) -> Captured:
        return Captured(
            self.streams(),
            [_autocast(kind) for kind in self._types],
            self._settings.now(),
            function_modes(),
            dispatch_modes(),
            _apart(contextvars.copy_context()),
            parametrized(),
        )

    @contextlib.contextmanager
    def __call__(self, wanted: Captured) -> Iterator[None]:
        """Everything inside runs as it would have when `wanted` was captured; afterwards all is as before. The user's
        modes hear what is called through `heard`."""
        streams = self.streams()
        flags = self._settings.now()
        with contextlib.ExitStack() as stack:
            # Each stands before what it undoes: an interrupt in between leaves nothing behind.
            stack.callback(self._settings.restore, flags)
            self._settings.change(flags, wanted.flags)
            stack.callback(self.set_streams, streams)
            for one, old, new in zip(self._streams, streams, wanted.streams, strict=True):
                if old is not new:
                    one.set(new)
            for kind, enabled, dtype, cached in wanted.autocast:
                # A cast that is cached while the user's autocast is on would outlive this.
                cached = cached and not torch.is_autocast_enabled(kind)
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            stack.callback(set_parametrized, parametrized(copied=False))
            many, weights = wanted.parametrized
            set_parametrized((many, dict(weights)))
            stack.enter_context(only_function_modes(wanted.function_modes, bypassed=True))
            stack.enter_context(only_dispatch_modes(wanted.dispatch_modes, bypassed=True))
            stack.enter_context(_within(_apart(wanted.variables.copy())))
            yield

    def set_streams(self, states: list[Any]) -> None:
        """Put the random streams back there."""
        for one, state in zip(self._streams, states, strict=True):
            one.set(state)


@final
@dataclass(slots=True, eq=False)
class Captured:
    """An environment, written down."""

    streams: list[Any]
    autocast: list[Autocast]
    flags: tuple[Any, ...]
    function_modes: Sequence[Any]
    dispatch_modes: Sequence[Any]
    variables: contextvars.Context
    parametrized: tuple[int, dict[Any, Any]]
    """The weights that `torch.nn.utils.parametrize.cached()` held: what finds one there does not compute it."""


@contextlib.contextmanager
def _within(variables: contextvars.Context) -> Iterator[None]:
    """What `variables.run` does, around more than one function."""
    try:
        _enter(variables)
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # interrupted before it was entered
            _exit(variables)


_CONTAINERS: Final = (dict, list, set, collections.deque, tuple)
MOST_COLLECTED: Final = 10_000
"""Things in containers of context variables; with more, or nested too deep, they are shared."""
_DEEPEST: Final = 100
"""Containers in containers. Whoever runs into Python's own limit instead may have the garbage collector run there, and
finalizers and callbacks of others fail."""


def _apart(variables: contextvars.Context) -> contextvars.Context:
    """With containers of its own: what code collects in one, as transformers does outputs of layers, a second run is
    not to collect again; and whatever holds these variables would hold the graphs that tensors in it hang in."""
    room, owns = [MOST_COLLECTED], dict[int, Any]()
    for variable, value in list(variables.items()):
        if type(value) in _CONTAINERS:
            try:
                own = _own(value, room, owns)
            except RecursionError:
                room[0] = 0
            if room[0] > 0:
                variables.run(variable.set, own)
    return variables


def _own(value: Any, room: list[int], owns: dict[int, Any], depth: int = 0) -> Any:
    """A container's copy, with those in it copied as well and tensors out of their graphs. `room` is how many things
    may still be looked at, `owns` what stands for those that were: what leads back to itself does so in copies too."""
    kind = type(value)
    if id(value) in owns:
        return owns[id(value)]
    if kind in (torch.Tensor, torch.nn.Parameter) and value.grad_fn is not None:
        return owns.setdefault(id(value), value.detach().requires_grad_())
    if kind not in _CONTAINERS or room[0] <= 0:
        return value
    room[0] -= len(value) if depth < _DEEPEST else room[0]
    if kind is tuple:
        return tuple(_own(one, room, owns, depth + 1) for one in value)
    own = owns[id(value)] = value.copy()  # at once: other threads may be writing there
    if kind is not set:
        for place, one in list(own.items() if kind is dict else enumerate(own)):
            own[place] = _own(one, room, owns, depth + 1)
    return own


def _autocast(kind: str) -> Autocast:
    enabled = torch.is_autocast_enabled(kind)
    return kind, enabled, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def _generator_of(device: torch.device) -> torch.Generator:
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    generator: torch.Generator = module.default_generators[index]
    return generator
