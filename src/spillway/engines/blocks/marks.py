"""Where iterators stood and what caches of functions held: what is not put back in place, but by another like it.

NOTE [Marks]. An iterator cannot be told to go back. So whoever is about to run a forward that must leave no trace puts
others in the place of all iterators, which stand where they stood (`Mark.again`), and puts the originals back
afterwards, which nobody has moved. The same is done with `functools.lru_cache`: an empty one would draw random numbers
again, a filled one would not draw them. What holds such a thing and cannot be written to (a tuple, a partial function,
a bound `__next__`) is replaced with it. Of a generator there is no other: in its place stands something that refuses,
and whether a run has moved it on is seen in its frame.
"""

from __future__ import annotations

import abc
import functools
import gc
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, final

from torch import Tensor

from spillway.engines.blocks.iterators import (
    CannotCopyError,
    Parts,
    assembled,
    description,
    holding,
    is_iterator,
    parts_of,
    standing,
)

ATOMS: Final = frozenset({type(None), bool, int, float, complex, str, bytes, slice, range, type(...)})
_CACHE: Final = functools._lru_cache_wrapper


class Mark(abc.ABC):
    """Something as it was."""

    original: Any
    lost: str = ""
    """What cannot be made again, for messages; empty if it can."""

    @abc.abstractmethod
    def stands(self, now: Any) -> bool:
        """Whether something is as the original was."""

    @abc.abstractmethod
    def again(self, made: dict[Mark, Any]) -> Any:
        """Another that is as the original was; the same one for what is in `made` already."""


@final
class Marks:
    """Makes marks, of each thing one."""

    def __init__(self, follow: Callable[[Iterable[Any]], None]) -> None:
        self._follow = follow
        self._found: dict[int, Mark] = {}

    def of(self, value: Any) -> Any:
        """A mark where the value can move or holds something that can; else the value."""
        kind = type(value)
        if kind in ATOMS or isinstance(value, Tensor):
            return value
        known = self._found.get(id(value))
        if known is not None:
            return known
        if kind is _CACHE:
            return self._keep(value, _Cache(value, self._follow))
        if is_iterator(value):
            return self._keep(value, self._of_iterator(value))
        parts = _holder(value)
        if parts is not None:
            inside = tuple(map(self.of, parts.arguments))
            if not all(map(operator.is_, inside, parts.arguments)):
                return self._keep(value, _Made(value, parts._replace(arguments=inside), _holder))
        return value

    def _of_iterator(self, value: Any) -> Mark:
        try:
            parts = parts_of(value)
        except CannotCopyError:
            self._follow(standing(value)[1])
            return _Unknown(value, self)
        self._follow((*parts.arguments, *_inside(parts.state)))
        arguments = tuple(map(self.of, parts.arguments))
        state = self._of_state(parts.state)
        return _Made(value, Parts(parts.make, arguments, state), parts_of)

    def _of_state(self, state: Any) -> Any:
        if type(state) is tuple:
            return tuple(map(self._of_state, state))
        return list(state) if type(state) is list else self.of(state)  # `itertools.cycle` goes on writing to it

    def _keep(self, value: Any, mark: Mark) -> Mark:
        self._found[id(value)] = mark
        return mark


@final
class _Made(Mark):
    """What can be made again of its parts."""

    def __init__(self, original: Any, parts: Parts, read: Callable[[Any], Parts | None]) -> None:
        self.original, self._parts, self._read = original, parts, read
        self.lost = next((one.lost for one in parts.arguments if isinstance(one, Mark) and one.lost), "")

    def stands(self, now: Any) -> bool:
        if type(now) is not type(self.original):
            return False
        parts = self._read(now)
        return parts is not None and _alike(tuple(self._parts), tuple(parts))

    def again(self, made: dict[Mark, Any]) -> Any:
        if self not in made:
            make, arguments, state = self._parts
            again = tuple(_again(one, made) for one in arguments)
            made[self] = assembled(Parts(make, again, _state_again(state, made)))
        return made[self]


@final
class _Cache(Mark):
    """`functools.lru_cache`, whose entries only the garbage collector tells. Another like it forgets none of them."""

    def __init__(self, original: Any, follow: Callable[[Iterable[Any]], None]) -> None:
        self.original = original
        self._misses = _misses(original)
        size = self._misses[1]
        held = gc.get_referents(original)
        linked = size if original.cache_parameters()["maxsize"] is not None else 0
        own, self._function = held[1 + 3 * linked : 3 + 3 * linked]
        # Where there are links, each has a key, a result and a type here, the oldest first.
        entries = dict(zip(held[1 : 1 + 3 * linked : 3], held[2 : 2 + 3 * linked : 3], strict=True)) if linked else own
        if type(own) is dict and own.keys() == entries.keys() and len(own) == size:
            self._entries: dict[Any, Any] = dict(entries)
        else:
            self._entries, self.lost = {}, "a cache of functools"
        follow((self._function, *self._entries.values()))

    def stands(self, now: Any) -> bool:
        return type(now) is _CACHE and self._misses == _misses(now)

    def again(self, made: dict[Mark, Any]) -> Any:
        if self not in made:
            typed = self.original.cache_parameters()["typed"]
            cache: Any = functools.lru_cache(maxsize=None, typed=typed)(self._function)
            vars(cache).update(vars(self.original))
            gc.get_referents(cache)[1].update(self._entries)
            made[self] = cache
        return made[self]


@final
class _Unknown(Mark):
    """A generator, or another iterator that nothing can make again."""

    def __init__(self, original: Any, marks: Marks) -> None:
        self.original, self.lost = original, description(original)
        self._at, held = standing(original)
        self._held = [id(one) if isinstance(one, Tensor) else marks.of(one) for one in held]

    def stands(self, now: Any) -> bool:
        at, held = standing(self.original)
        same = now is self.original and self._at == at
        return same and _alike(self._held, [id(one) if isinstance(one, Tensor) else one for one in held])

    def again(self, made: dict[Mark, Any]) -> Any:
        return _Refusing(self.lost)


@final
class _Refusing:
    """Stands where a generator stood that must not be moved on."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __iter__(self) -> _Refusing:
        return self

    def __next__(self) -> Any:
        raise CannotCopyError(f"{self._what}, which it moves on, cannot be put back")

    def send(self, value: Any) -> Any:
        next(self)

    def throw(self, *_: Any) -> Any:
        next(self)

    def close(self) -> None:
        next(self)


def _holder(value: Any) -> Parts | None:
    """Of what holds others and cannot be written to."""
    if isinstance(value, tuple):
        return Parts(functools.partial(_tuple, type(value)), tuple(value))
    return holding(value)


def _tuple(kind: type, *items: Any) -> Any:
    return tuple.__new__(kind, items)


def _inside(state: Any) -> Iterator[Any]:
    if isinstance(state, tuple | list):
        for one in state:
            yield from _inside(one)
    else:
        yield state


def _again(value: Any, made: dict[Mark, Any]) -> Any:
    return value.again(made) if isinstance(value, Mark) else value


def _state_again(state: Any, made: dict[Mark, Any]) -> Any:
    if type(state) is tuple:
        return tuple(_state_again(one, made) for one in state)
    return list(state) if type(state) is list else _again(state, made)


def _alike(was: Any, now: Any) -> bool:
    """Item by item, by identity; numbers and strings by value, iterators by where they stand."""
    if was is now:
        return True
    if isinstance(was, Mark):
        return was.stands(now)
    if type(was) is not type(now):
        return False
    if isinstance(was, tuple | list):
        return len(was) == len(now) and all(map(_alike, was, now))
    if isinstance(was, functools.partial):
        return was.func is now.func and _alike(was.args, now.args)
    return bool(type(was) in ATOMS and was == now)


def _misses(cache: Any) -> tuple[int, int]:
    information = cache.cache_info()
    return information.misses, information.currsize
