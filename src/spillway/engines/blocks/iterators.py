"""Iterators of Python's own, made again where they stand."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import types
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from spillway.internals.python_warnings import unwarned

_BOUND: Final = (types.BuiltinMethodType, types.MethodWrapperType, types.MethodType)
_LOADER: Final = "torch.utils.data.dataloader"


class CannotCopyError(Exception):
    """Something that cannot be told from the rest of the program, or made again; its text is a clause."""


class Parts(NamedTuple):
    """How to make a thing again."""

    make: Callable[..., Any]
    arguments: tuple[Any, ...]
    state: Any = None


def is_iterator(value: Any) -> bool:
    """Whether it is an iterator of Python's own, or of a `DataLoader`."""
    kind = type(value)
    return kind.__module__ in ("builtins", "itertools", _LOADER) and hasattr(kind, "__next__")


def parts_of(value: Any) -> Parts:
    """Of an iterator where it stands. Iterators in it are those that it draws from. Raises CannotCopyError if there are
    iterators that nothing can make again, such as generators."""
    try:
        with contextlib.ExitStack() as stack:
            if sys.version_info >= (3, 12):
                stack.enter_context(unwarned(DeprecationWarning))
            reduced = value.__reduce__()
    except (TypeError, RuntimeError) as error:
        raise CannotCopyError(f"{description(value)} cannot be made again where it stands") from error
    return Parts(reduced[0], tuple(reduced[1]), *reduced[2:3])


def holding(value: Any) -> Parts | None:
    """Of what can be called, may hold an iterator, and cannot be written to."""
    if type(value) is functools.partial:
        return Parts(functools.partial(_partial, *value.keywords), (value.func, value.args, *value.keywords.values()))
    if isinstance(value, _BOUND) and is_iterator(value.__self__):
        return Parts(getattr, (value.__self__, value.__name__))
    return None


def assembled(parts: Parts) -> Any:
    """Another like it."""
    made = parts.make(*parts.arguments)
    if parts.state is not None:
        made.__setstate__(parts.state)
    return made


def description(value: Any) -> str:
    """For messages."""
    if isinstance(value, types.GeneratorType):
        return f"the generator {value.__qualname__}"
    return f"an iterator ({type(value).__name__})"


def standing(iterator: Any) -> tuple[Any, list[Any]]:
    """Where one stands that nothing can make again, and what it holds that tells; a loader holds all of its data."""
    if type(iterator).__module__ == _LOADER:
        return iterator._num_yielded, []
    frame = getattr(iterator, "gi_frame", None)
    return None if frame is None else frame.f_lasti, gc.get_referents(iterator)


def _partial(*parts: Any) -> Any:
    """Of names, a function, arguments, and what the names stand for."""
    count = len(parts) // 2 - 1
    names, (function, arguments, *values) = parts[:count], parts[count:]
    return functools.partial(function, *arguments, **dict(zip(names, values, strict=True)))
