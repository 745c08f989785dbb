"""Iterators of Python's own, made again where they stand."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple

_BOUND: Final = (types.BuiltinMethodType, types.MethodWrapperType, types.MethodType)


class CannotCopyError(Exception):
    """Something that cannot be told from the rest of the program, or made again; its text is a clause."""


class Parts(NamedTuple):
    """How to make a thing again."""

    make: Callable[..., Any]
    arguments: tuple[Any, ...]
    state: Any = None


def is_iterator(value: Any) -> bool:
    """Whether it is an iterator of Python's own."""
    kind = type(value)
    return kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")


def parts_of(value: Any) -> Parts:
    """Of an iterator where it stands. Iterators in it are those that it draws from. Raises CannotCopyError if there are
    iterators that nothing can make again, such as generators."""
    try:
        with contextlib.ExitStack() as stack:
            if sys.version_info >= (3, 12):
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore", DeprecationWarning)
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


def _partial(*parts: Any) -> Any:
    """Of names, a function, arguments, and what the names stand for."""
    count = len(parts) // 2 - 1
    names, (function, arguments, *values) = parts[:count], parts[count:]
    return functools.partial(function, *arguments, **dict(zip(names, values, strict=True)))
