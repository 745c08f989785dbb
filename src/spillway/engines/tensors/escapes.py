"""Ways around the dispatcher, and how they are made to ask first.

`print`, `tolist`, `numpy`, `data_ptr`, dlpack, pickling and the storage accessors read a tensor's memory directly.
While an engine is open, these methods of `torch.Tensor` first tell it. Changing a class is global by nature, so the
list of open engines is too; with the last engine the methods are as they were.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, final

import torch
import torch.utils.dlpack

from spillway.engines.tensors.turns import forget_turns

if TYPE_CHECKING:
    from spillway.engines.tensors.engine import TensorEngine

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

MODULES: Final[tuple[Any, ...]] = (torch, torch.utils.dlpack)
"""Where `to_dlpack` stands as a function; it hands out the address."""

_open: weakref.WeakSet[TensorEngine] = weakref.WeakSet()
_installed = False
_lock = threading.RLock()  # a collection of garbage may find an engine that nobody closed while the lock is held


@final
class Escapes:
    """One engine's place among those that are told."""

    def __init__(self, engine: TensorEngine) -> None:
        self._engine = engine
        with _lock:
            _open.add(engine)  # first: an engine that is collected meanwhile must not find the list empty
            if not _installed:
                try:
                    _install()
                except BaseException:  # Ctrl-C
                    _open.discard(engine)
                    _uninstall()
                    raise
        weakref.finalize(engine, _uninstall_after_the_last).atexit = False

    def remove(self) -> None:
        """The engine is closed and needs no telling."""
        with _lock:
            _open.discard(self._engine)
            _uninstall_after_the_last()


def others_open(engine: TensorEngine) -> bool:
    """Whether another engine is open."""
    if len(_open) == 1 and engine in _open:  # the usual case, without a walk through the set
        return False
    return any(other is not engine for other in tuple(_open))


def _uninstall_after_the_last() -> None:
    with _lock:
        if _installed and not tuple(_open):  # its length may count an engine that has just been collected
            _uninstall()


def _await_copies() -> None:
    for engine in tuple(_open):
        engine.await_copies()


def _disarm_all() -> None:
    global _lock
    _lock = threading.RLock()
    forget_turns()
    for engine in tuple(_open):
        engine.disarm()


if hasattr(os, "register_at_fork"):
    # A worker of a DataLoader is forked in the middle of a step: it shares the spill file and is not in the step. The
    # threads that copy are not forked with it.
    os.register_at_fork(before=_await_copies, after_in_child=_disarm_all)


def _install() -> None:
    global _installed
    _installed = True
    for name in (*BY_ADDRESS, *READING, *RESIZING):
        _replace(torch.Tensor, name)
    for module in MODULES:
        _replace(module, "to_dlpack")


def _replace(owner: Any, name: str) -> None:
    by_address = name in BY_ADDRESS or owner in MODULES
    setattr(owner, name, _telling(getattr(owner, name), by_address=by_address, resizing=name in RESIZING))


def _uninstall() -> None:
    global _installed
    _installed = False
    for module in MODULES:
        module.to_dlpack = getattr(module.to_dlpack, "__wrapped__", module.to_dlpack)
    for name in (*BY_ADDRESS, *READING, *RESIZING):
        wrapper = torch.Tensor.__dict__.get(name)
        original = getattr(wrapper, "__wrapped__", None)
        if original is None:
            continue
        if getattr(torch._C.TensorBase, name, None) is original:
            delattr(torch.Tensor, name)
        else:
            setattr(torch.Tensor, name, original)


def _telling(original: Any, *, by_address: bool, resizing: bool) -> Any:
    @functools.wraps(original)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for engine in tuple(_open):
            if resizing:
                engine.recall(self)
            else:
                engine.reveal(self, by_address=by_address)
        return original(self, *args, **kwargs)

    return method
