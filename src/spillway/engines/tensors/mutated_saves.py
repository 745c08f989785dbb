"""Saved tensors that may be written to (`torch.autograd.graph.allow_mutation_on_saved_tensors`), told apart without
their addresses.

torch's book of them goes by `data_ptr`, which it asks of everything that is saved: all of that would have to stay where
it is. While an engine is open a number stands there in place of the address of a storage, and nothing is given away.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from spillway.internals.private import storage_of, unheard_by_function_modes

_GRAPH: Final[Any] = torch.autograd.graph
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_MOST: Final = 1 << 16
"""How many numbers there are: the book forgets nothing as long as it is open, and is not to grow with every step."""
_NO_ADDRESS: Final = 48
"""Addresses have fewer bits."""

_begins: Final[weakref.WeakKeyDictionary[torch.UntypedStorage, int]] = weakref.WeakKeyDictionary()
_wanted: Final = threading.Event()
"""As long as an engine is open."""
_numbers: Final = itertools.cycle(range(-_MOST, 0))


def go_by_numbers(known: Callable[[], Iterable[torch.Tensor]]) -> None:
    """Before anything moves. What is `known` keeps its address as its number if there may be a book with it."""
    _wanted.set()
    for tensor in known() if _GRAPH._allow_mutation_on_saved_tensors_enabled else ():
        if type(tensor) in _PLAIN[:2] and torch._C._has_storage(tensor):
            _begins.setdefault(storage_of(tensor), storage_of(tensor).data_ptr())
    _GRAPH._get_tid = _instead_of(_GRAPH._get_tid, lambda tensor: (id(tensor), *_place(tensor)))
    _GRAPH._get_sid = _instead_of(_GRAPH._get_sid, _place)


def go_by_addresses() -> None:
    """As torch does, as soon as there is no book any more that may have numbers in it."""
    _wanted.clear()
    if _GRAPH._allow_mutation_on_saved_tensors_enabled:
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, _GRAPH._CloneArgBeforeMutateMode):
                weakref.finalize(mode.ctx, _when_it_is_gone).atexit = False
        return
    for name in ("_get_tid", "_get_sid"):
        setattr(_GRAPH, name, getattr(getattr(_GRAPH, name), "__wrapped__", getattr(_GRAPH, name)))


def _when_it_is_gone() -> None:
    if not _wanted.is_set():
        go_by_addresses()


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Around what runs beside the step: it may write to what it has saved, with a book of its own."""
    before, book = _GRAPH._allow_mutation_on_saved_tensors_enabled, _GRAPH._AllowMutationOnSavedContext()
    with _GRAPH._swap_with_cloned(book), _GRAPH._CloneArgBeforeMutateMode(book):
        _GRAPH._allow_mutation_on_saved_tensors_enabled = True
        try:
            yield
        finally:
            _GRAPH._allow_mutation_on_saved_tensors_enabled = before


def _instead_of(original: Any, key: Callable[[torch.Tensor], tuple[int, ...]]) -> Any:
    if hasattr(original, "__wrapped__"):
        return original

    @functools.wraps(original)
    @unheard_by_function_modes
    def keyed(tensor: torch.Tensor) -> Any:
        plain = type(tensor) in _PLAIN and torch._C._has_storage(tensor)
        return key(tensor) if plain else original(tensor)

    return keyed


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where its first element lies, and its version."""
    real = storage_of(tensor)
    begin = _begins.get(real)
    if begin is None:
        begin = _begins.setdefault(real, next(_numbers) << _NO_ADDRESS)
    return begin + int(tensor.storage_offset()) * tensor.element_size(), tensor._version
