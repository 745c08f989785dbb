"""Code that uses tensors of a CUDA session without asking the dispatcher: custom autograd functions, and CUDA graphs.

A custom `torch.autograd.Function` may hand its tensors to kernels that no dispatch mode sees. So what it is given, what
it keeps as attributes of its context, and what it asks for of what it saved, is made resident first and stays until it
returns. That is done where Python hands the tensors over, and not by `saved_tensors_hooks`: those would stand at every
op's saved tensors, and torch leaves its check of versions to them.

Such a kernel may also write: an argument, or what was made for its results. What follows from that stands in
`memory.unsafe_region`.

A CUDA graph keeps addresses, and a session moves storages: a capture is refused while one is open, a replay in a step.

Changing classes is global by nature, so the list of open engines is too; with the last one they are as they were.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, final

import torch
from torch.autograd.function import BackwardCFunction, Function

from spillway.engines.tensors.abstract import AbstractTensorEngine
from spillway.engines.tensors.torch_patches import WhileOpen
from spillway.errors import SessionError
from spillway.internals.dispatch_key import unwatched
from spillway.memory.records import Storage

GRAPHS_REFUSED: Final = (
    "A CUDA graph keeps the addresses of its tensors, and a session moves what is behind them: capture graphs (also "
    'those of torch.compile(mode="reduce-overhead")) outside of spillway.manage().'
)

REPLAYS_REFUSED: Final = (
    "A CUDA graph uses the addresses that its tensors had when it was captured, and a step of spillway.manage() moves "
    "tensors: replay no graph within a step, and capture those of the model again when the session is closed."
)

_running = threading.local()
_originals: dict[tuple[Any, str], Any] = {}
"""What was replaced, and nothing while torch is as it was."""


@final
class _Given:
    """What one call of a custom function was given; it stays until the call returns, and counts as written then."""

    def __init__(self) -> None:
        self._engines = tuple(_open)
        self._storages: list[tuple[AbstractTensorEngine, Storage]] = []
        for engine in self._engines:
            with engine.controller.lock:
                engine.backend.follow()
                engine.controller.unsafe.begin()

    def add(self, values: Iterable[Any]) -> None:
        """Make the tensors among these resident, and keep them so."""
        for value in values:
            if isinstance(value, torch.Tensor):
                for engine in self._engines:
                    self._add_one(engine, value)
            elif isinstance(value, list | tuple):
                self.add(value)
            elif isinstance(value, dict):
                self.add(value.values())

    def _add_one(self, engine: AbstractTensorEngine, tensor: torch.Tensor) -> None:
        storage = engine.find(tensor)
        if storage is None or storage.value is None:
            return
        with engine.controller.lock, unwatched():
            engine.controller.unsafe.enter(storage)
            self._storages.append((engine, storage))
            if storage.value.absent:
                engine.fetch(storage)

    def end(self) -> None:
        """It returned."""
        try:
            for engine, storage in self._storages:
                with engine.controller.lock:
                    engine.controller.unsafe.leave(storage)
        finally:
            self._storages.clear()
            for engine in self._engines:
                with engine.controller.lock:
                    engine.controller.unsafe.end()


@contextlib.contextmanager
def _unsafe_call() -> Iterator[_Given]:
    given = _Given()
    stack: list[_Given] = _running.__dict__.setdefault("stack", [])
    stack.append(given)
    try:
        yield given
    finally:
        stack.pop()
        given.end()


def _install() -> None:
    original = Function.__dict__["apply"]

    @functools.wraps(getattr(original, "__func__", original))  # from torch 2.14 on it is written in C
    def forward(cls: Any, *args: Any, **kwargs: Any) -> Any:
        with _unsafe_call() as given:
            given.add((args, kwargs))
            return original.__get__(None, cls)(*args, **kwargs)

    _replace(Function, "apply", classmethod(forward))
    for name in ("apply", "apply_boxed"):
        if name in BackwardCFunction.__dict__:
            _replace(BackwardCFunction, name, _backward_of(BackwardCFunction.__dict__[name]))
    saved = vars(torch._C._FunctionBase)["saved_tensors"]
    _replace(BackwardCFunction, "saved_tensors", property(lambda context: _noted(saved.__get__(context))))
    _refuse("capture_begin", GRAPHS_REFUSED, lambda engine: True)
    _refuse("replay", REPLAYS_REFUSED, lambda engine: engine.in_step)


def _backward_of(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(context: Any, *gradients: Any) -> Any:
        with _unsafe_call() as given:
            given.add((gradients, vars(context)))
            return original(context, *gradients)

    return backward


def _noted(saved: Any) -> Any:
    stack: list[_Given] = _running.__dict__.get("stack", [])
    if stack:
        stack[-1].add(saved)
    return saved


def _refuse(name: str, told: str, refuses: Callable[[AbstractTensorEngine], bool]) -> None:
    original = getattr(torch.cuda.CUDAGraph, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(refuses(engine) for engine in tuple(_open)):
            raise SessionError(told)
        return original(self, *args, **kwargs)

    _replace(torch.cuda.CUDAGraph, name, method)


def _replace(owner: Any, name: str, new: Any) -> None:
    _originals[owner, name] = owner.__dict__.get(name)
    setattr(owner, name, new)


def _uninstall() -> None:
    for (owner, name), original in _originals.items():
        if original is not None:
            setattr(owner, name, original)
        elif name in owner.__dict__:
            delattr(owner, name)
    _originals.clear()


CUSTOM_FUNCTIONS: Final = WhileOpen(_install, _uninstall)
_open: Final = CUSTOM_FUNCTIONS.engines
