"""What a forward reads beside its arguments and its modules: random streams, autocast, flags, context variables."""

from __future__ import annotations

import _random
import contextlib
import contextvars
import ctypes
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol, TypeAlias, cast, final

import numpy as np
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

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
    """How to read and set a random stream of the user's.

    Raises:
        TypeError: It is none that is known.
    """
    if isinstance(source, torch.Generator):
        return TorchStream(source)
    if isinstance(source, np.random.Generator):
        return NumpyGeneratorStream(source)
    if isinstance(source, np.random.RandomState):
        return NumpyStream(source)
    if isinstance(source, random.Random):
        return PythonStream(source)
    raise TypeError(f"{type(source).__name__} is no random stream: torch.Generator, numpy's or random.Random are.")


_Flag: TypeAlias = tuple[Callable[[], Any], Callable[[Any], Any]]
_FLAGS: Final[tuple[_Flag, ...]] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
)
"""Settings that decide which kernel runs, and so which bits come out and what is saved."""

Autocast: TypeAlias = tuple[str, bool, torch.dtype, bool]


@final
class Environment:
    """Reads the environment when a block begins, and runs its recompute in it.

    Args:
        devices: Types of the devices on which the model lies, the CPU not needed among them.
        generators: Random streams that blocks draw from, beside the global ones of Python, NumPy and torch.
    """

    def __init__(self, devices: Iterable[torch.device], generators: Iterable[Generator]) -> None:
        others = {device for device in devices if device.type not in ("cpu", "meta")}
        self._types = ("cpu", *sorted({device.type for device in others}))
        self._streams: list[Stream] = [
            PythonStream(random._inst),
            NumpyStream(np.random.mtrand._rand),
            TorchStream(torch.default_generator),
            *(TorchStream(_generator_of(device)) for device in others),
            *(stream(generator) for generator in generators),
        ]

    def streams(self) -> list[Any]:
        """Where the random streams stand."""
        return [one.get() for one in self._streams]

    def capture(self) -> Captured:
        """The environment now."""
        return Captured(
            self.streams(),
            [_autocast(kind) for kind in self._types],
            [get() for get, _ in _FLAGS],
            _device_context(),
            contextvars.copy_context(),
        )

    @contextlib.contextmanager
    def __call__(self, wanted: Captured) -> Iterator[None]:
        """Everything inside runs as it would have when `wanted` was captured; afterwards all is as before."""
        streams = self.streams()
        flags = [get() for get, _ in _FLAGS]
        with contextlib.ExitStack() as stack:
            # Each stands before what it undoes: an interrupt in between leaves nothing behind.
            stack.callback(_set_flags, wanted.flags, flags)
            _set_flags(flags, wanted.flags)
            stack.callback(self.set_streams, streams)
            for one, old, new in zip(self._streams, streams, wanted.streams, strict=True):
                if old is not new:
                    one.set(new)
            for kind, enabled, dtype, cached in wanted.autocast:
                # A cast that is cached while the user's autocast is on would outlive this.
                cached = cached and not torch.is_autocast_enabled(kind)
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            if wanted.device_context is not None:
                stack.enter_context(wanted.device_context)
            stack.enter_context(_within(wanted.variables.copy()))
            yield

    def set_streams(self, states: list[Any]) -> None:
        """Put the random streams back there."""
        for one, state in zip(self._streams, states, strict=True):
            one.set(state)


@final
class Captured:
    """An environment, written down."""

    __slots__ = ("autocast", "device_context", "flags", "streams", "variables")

    def __init__(
        self,
        streams: list[Any],
        autocast: list[Autocast],
        flags: list[Any],
        device_context: Any,
        variables: contextvars.Context,
    ) -> None:
        self.streams = streams
        self.autocast = autocast
        self.flags = flags
        self.device_context = device_context
        self.variables = variables


@contextlib.contextmanager
def _within(variables: contextvars.Context) -> Iterator[None]:
    """What `variables.run` does, around more than one function."""
    try:
        _enter(variables)
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # interrupted before it was entered
            _exit(variables)


def _autocast(kind: str) -> Autocast:
    enabled = torch.is_autocast_enabled(kind)
    return kind, enabled, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def _set_flags(now: list[Any], wanted: list[Any]) -> None:
    for (_, put), old, new in zip(_FLAGS, now, wanted, strict=True):
        if old != new:
            put(new)


def _device_context() -> Any:
    """The `with torch.device(...)` around the forward, if there is one."""
    found = [mode for mode in cast(Any, _get_current_function_mode_stack)() if isinstance(mode, DeviceContext)]
    return found[-1] if found else None


def _generator_of(device: torch.device) -> torch.Generator:
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    generator: torch.Generator = module.default_generators[index]
    return generator
