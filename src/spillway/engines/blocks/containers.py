"""What a block was called with, kept so that it can be called again: containers copied, tensors shared."""

from __future__ import annotations

import copy
import enum
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from spillway.engines.blocks.iterators import CannotCopyError, Parts, assembled, holding, is_iterator, parts_of
from spillway.engines.blocks.saved import FrozenTensor
from spillway.engines.environment import Generator

MOST_OBJECTS: Final = 4096
"""An argument from which more can be reached is no cache but half of the program."""
_HEAP_TYPE: Final = 1 << 9  # of `type.__flags__`: a class that Python code defines
_ATOMS: Final = frozenset({type(None), bool, int, float, complex, str, bytes, slice, range, type(...), torch.Size})
_NEVER: Final = (nn.Module, type, enum.Enum, BaseException, torch.Generator)


def freeze(value: Any, make: Callable[[Tensor], FrozenTensor]) -> Any:
    """The same structure with a `FrozenTensor` for every tensor, and copies of all containers on the way.

    Containers are lists, tuples, dicts, sets, deques, dataclasses and instances of other classes that Python code
    defines, such as the caches of transformers. Random streams and iterators are copied. Modules, functions,
    configurations and whatever has no `__dict__` are shared.

    Raises CannotCopyError if more than `MOST_OBJECTS` objects can be reached, or a generator.
    """
    return _Walk(Tensor, make).rebuilt(value)


def thaw(value: Any) -> Any:
    """What `freeze` was given, with containers that may be written to."""
    return _Walk(FrozenTensor, FrozenTensor.thaw).rebuilt(value)


def rebuilt(value: Any, leaf: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """The same structure with `leaf(x)` for every x of a kind, and copies of all containers as `freeze` makes them.
    Raises CannotCopyError as `freeze` does."""
    return _Walk(kind, leaf).rebuilt(value)


def tensors(value: Any) -> list[Tensor]:
    """Every tensor that the structure holds."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _Walk(Tensor, note).rebuilt(value)
    return found


class _Walk:
    """Rebuilds a structure with `leaf(x)` in place of every x of a kind; what is met twice is rebuilt once."""

    def __init__(self, kind: type, leaf: Callable[[Any], Any]) -> None:
        self._kind = kind
        self._leaf = leaf
        self._made: dict[int, Any] = {}
        self._originals: list[Any] = []  # so that no id is used twice

    def rebuilt(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if id(value) in self._made:
            return self._made[id(value)]
        if isinstance(value, self._kind):
            return self._leaf_of(value)
        if len(self._originals) > MOST_OBJECTS:
            raise CannotCopyError(f"more than {MOST_OBJECTS} objects can be reached from its arguments")
        if kind is list:
            made: Any = self._keep(value, [])
            made.extend(self.rebuilt(item) for item in value)
            return made
        if kind is dict:
            made = self._keep(value, {})
            made.update((key, self.rebuilt(item)) for key, item in value.items())
            return made
        if kind is tuple:
            return self._keep(value, tuple(self.rebuilt(item) for item in value))
        if isinstance(value, tuple):
            return self._keep(value, self._tuple(value))
        if isinstance(value, Generator):
            return self._keep(
                value, value.clone_state() if isinstance(value, torch.Generator) else copy.deepcopy(value)
            )
        parts = parts_of(value) if is_iterator(value) else _with_iterators(value)
        if parts is not None:
            return self._keep(value, self._again(parts))
        return self._instance(value) if _is_container(value) else value

    def _leaf_of(self, value: Any) -> Any:
        """With what Python code has attached to a tensor, but for what cannot be copied: a block may never read it."""
        made = self._keep(value, self._leaf(value))
        attached = value.attributes if isinstance(value, FrozenTensor) else vars(value) if type(value) is Tensor else {}
        if attached and made is not value:
            rebuilt: dict[str, Any] = {}
            for name, item in attached.items():
                before, kept = dict(self._made), len(self._originals)
                try:
                    rebuilt[name] = self.rebuilt(item)
                except CannotCopyError:
                    self._made = before
                    del self._originals[kept:]
            if isinstance(made, FrozenTensor):
                made.attributes = rebuilt
            elif isinstance(made, Tensor):
                vars(made).update(rebuilt)
        return made

    def _keep(self, value: Any, made: Any) -> Any:
        self._made[id(value)] = made
        self._originals.append(value)
        return made

    def _tuple(self, value: Any) -> Any:
        items = [self.rebuilt(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if hasattr(value, "n_sequence_fields"):  # such as `torch.return_types.topk`
            return type(value)(items)
        made = tuple.__new__(type(value), items)  # not its own `__new__`, which may look into what it is given
        for name, item in getattr(value, "__dict__", {}).items():
            object.__setattr__(made, name, self.rebuilt(item))
        return made

    def _again(self, parts: Parts) -> Any:
        arguments = tuple([self.rebuilt(one) for one in parts.arguments])
        return assembled(Parts(parts.make, arguments, self.rebuilt(parts.state)))

    def _instance(self, value: Any) -> Any:
        try:
            made = copy.copy(value)
        except Exception as error:
            raise CannotCopyError(f"a {type(value).__name__} among its arguments cannot be copied") from error
        if made is value:
            return value
        self._keep(value, made)
        if isinstance(value, dict):
            for key, item in value.items():
                dict.__setitem__(made, key, self.rebuilt(item))
            if isinstance(value, defaultdict):
                made.default_factory = self.rebuilt(value.default_factory)
        elif isinstance(value, list):
            list.__setitem__(made, slice(None), [self.rebuilt(item) for item in value])
        elif isinstance(value, deque):
            made.clear()
            made.extend(self.rebuilt(item) for item in value)
        for name, item in _attributes(value):
            object.__setattr__(made, name, self.rebuilt(item))
        return made


def _with_iterators(value: Any) -> Parts | None:
    """Of a partial function, or a bound method, that moves iterators on."""
    parts = holding(value)
    inside = () if parts is None else (*parts.arguments, *getattr(value, "args", ()))
    return parts if any(map(is_iterator, inside)) else None


def _is_container(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, dict | list | set | deque):
        return True
    if not kind.__flags__ & _HEAP_TYPE or isinstance(value, (*_NEVER, Tensor, FrozenTensor)):
        return False
    if isinstance(value, weakref.ref) or callable(value) or kind.__name__.endswith("Config"):
        return False  # what can be called is a part of the program; nobody writes to a configuration
    return hasattr(value, "__dict__") or any("__slots__" in vars(base) for base in kind.__mro__)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for base in type(value).__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)
