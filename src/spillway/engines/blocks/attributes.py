"""What the modules of a block hold in attributes that are neither parameters, buffers nor modules.

NOTE [Attributes]. A second run has to find every attribute as the first run found it, and nothing tells when one is
changed. So when a call begins they are compared, by identity, with what they were when the last one began:

 1. One that was changed, by a call or between calls, is *watched* from then on: each call writes down what it is.
 2. One that never was is *stable*. All calls share one list of these, and a second run goes back to it if one of them
    was changed meanwhile.
 3. A tensor that hangs in a graph is watched at once, and held without its graph: the graph of one step must not hold
    that of the step before.
 4. What a call changes without assigning it is found by the version of a tensor, and by the items (in the first call)
    or the length (later) of a list, dict, set or deque. Unless it was copied before, the block is kept; from then on
    it is copied. What lies deeper, in an object or in a list within a list, `Reach` finds.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn

from spillway.engines.blocks.containers import freeze, thaw
from spillway.engines.blocks.iterators import CannotCopyError
from spillway.engines.blocks.saved import FrozenTensor
from spillway.internals.private import is_leaf

_OWN: Final = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
"""Attributes of every module that are torch's own business, and ours."""
_MISSING: Final = object()
_CONTAINERS: Final = (list, dict, set, deque)
Attribute: TypeAlias = tuple[nn.Module, str]
"""A module, and the name of one of its attributes."""


class _Stable(NamedTuple):
    """Attributes of one module that never changed."""

    module: nn.Module
    held: dict[str, Any]
    """All that the module holds."""
    known: frozenset[str]
    """The names of all that it held when this was written down."""
    names: tuple[str, ...]
    read: Callable[[dict[str, Any]], tuple[Any, ...]]
    values: tuple[Any, ...]

    def changed(self) -> list[tuple[str, Any]]:
        """Names of what is not as it was, with what it was."""
        held = self.held
        try:
            if len(held) == len(self.known) and all(map(operator.is_, self.read(held), self.values)):
                return []
        except KeyError:
            pass  # one of them is gone
        found = [
            (name, value)
            for name, value in zip(self.names, self.values, strict=True)
            if held.get(name, _MISSING) is not value
        ]
        return found + [(name, _MISSING) for name in held if name not in self.known]


@dataclass(slots=True)
class _Mode:
    """What is known where the modules have one set of training flags."""

    watched: set[Attribute] = field(default_factory=set)
    copied: set[Attribute] = field(default_factory=set)
    """Those of them whose tensors are written to."""
    stable: tuple[_Stable, ...] = ()
    tensors: tuple[tuple[Tensor, Attribute], ...] = ()
    sizes: tuple[tuple[Any, int, Attribute], ...] = ()
    """Stable containers, and how many items they have."""


@dataclass(slots=True)
class Seen:
    """Attributes when a call began."""

    frozen: dict[Attribute, Any]
    """What the watched ones were."""
    stable: tuple[_Stable, ...]
    versions: list[tuple[Tensor, int, str]]
    """Tensors that are not to be written to until the block has run again."""
    everything: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)
    """In the first call, all of them; containers copied."""
    whole: dict[Attribute, Any] = field(default_factory=dict)
    """In the first call, containers and all that is in them."""
    uncopied: str = ""
    """The name of one that should be among the frozen and cannot be copied."""


@final
class Attributes:
    """Knows which attributes of some modules change, and gives second runs what they were."""

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        self._modules = modules
        self._modes: dict[tuple[bool, ...], _Mode] = {}

    def look(self, training: tuple[bool, ...]) -> Seen:
        """At the beginning of a call."""
        mode = self._modes.get(training)
        if mode is None:
            return self._look_first()
        moved = [(one.module, name) for one in mode.stable for name, _ in one.changed()]
        if moved:
            mode.watched.update(moved)
            self._settle(mode)
        seen = Seen({}, mode.stable, [(tensor, tensor._version, where[1]) for tensor, where in mode.tensors])
        for where in mode.watched:
            try:
                seen.frozen[where] = _frozen(_value(where), copied=where in mode.copied)
            except CannotCopyError:
                seen.uncopied = where[1]
        return seen

    def learn(self, training: tuple[bool, ...], seen: Seen) -> str:
        """After the forward. The name of what it changed and nobody had copied; empty if there is none."""
        mode = self._modes.get(training)
        if mode is None:
            return self._learn_first(training, seen)
        later = {id(tensor) for tensor, version, _ in seen.versions if tensor._version != version}
        written = [where for tensor, where in mode.tensors if id(tensor) in later]
        written += [where for where, frozen in seen.frozen.items() if _is_written(frozen)]
        grown = [where for container, size, where in mode.sizes if len(container) != size]
        if written or grown:
            mode.watched.update(written, grown)
            mode.copied.update(written)
            self._settle(mode)
        return next((name for _, name in (*written, *grown)), seen.uncopied)

    @contextlib.contextmanager
    def as_of(self, seen: Seen) -> Iterator[None]:
        """The attributes as they were; afterwards they are again as before."""
        wanted = {(one.module, name): value for one in seen.stable for name, value in one.changed()}
        wanted |= {where: thaw(value) for where, value in seen.frozen.items()}
        for module, held in seen.everything.items():  # nothing is known yet
            wanted |= {(module, name): _shallow(held[name]) for name in held.keys() - _OWN}
            wanted |= {(module, name): _MISSING for name in vars(module).keys() - held.keys() - _OWN}
        before = {where: _value(where) for where in wanted}
        try:
            _assign(wanted)
            yield
        finally:
            for module, held in seen.everything.items():
                _assign({(module, name): _MISSING for name in vars(module).keys() - held.keys() - _OWN})
            _assign(before)

    def _look_first(self) -> Seen:
        seen = Seen({}, (), [])
        for module in self._modules:
            held = seen.everything[module] = dict(vars(module))
            for name in held.keys() - _OWN:
                value = held[name]
                held[name] = _shallow(value)
                if isinstance(value, _CONTAINERS):
                    with contextlib.suppress(CannotCopyError):
                        seen.whole[module, name] = _frozen(value)
                if isinstance(value, Tensor):
                    seen.versions.append((value, value._version, name))
                    if _hangs(value):
                        seen.frozen[module, name] = _frozen(value)
        return seen

    def _learn_first(self, training: tuple[bool, ...], seen: Seen) -> str:
        versions = {id(tensor): version for tensor, version, _ in seen.versions}
        mode = self._modes[training] = _Mode()
        for module, before in seen.everything.items():
            now = vars(module)
            for name in (before.keys() | now.keys()) - _OWN:
                where, old, new = (module, name), before.get(name, _MISSING), now.get(name, _MISSING)
                if isinstance(old, Tensor) and old._version != versions[id(old)]:
                    mode.copied.add(where)
                if not (_same_items(old, new) if isinstance(old, _CONTAINERS) else old is new) or where in mode.copied:
                    try:
                        seen.frozen.setdefault(where, seen.whole[where] if where in seen.whole else _frozen(old))
                    except CannotCopyError:
                        seen.uncopied = name
                        mode.watched.add(where)
        mode.watched.update(seen.frozen)
        self._settle(mode)
        fixed = {id(tensor) for tensor, _ in mode.tensors}
        seen.versions = [entry for entry in seen.versions if id(entry[0]) in fixed]
        seen.stable, seen.everything, seen.whole = mode.stable, {}, {}
        return next((name for _, name in mode.copied), seen.uncopied)

    def _settle(self, mode: _Mode) -> None:
        """Everything that is not watched is stable, as it is now."""
        stable: list[_Stable] = []
        for module in self._modules:
            held = vars(module)
            own = [name for name in held if name not in _OWN]
            mode.watched.update((module, name) for name in own if _hangs(held[name]))
            names = tuple(name for name in own if (module, name) not in mode.watched)
            stable.append(_Stable(module, held, frozenset(held), names, _reader(names), tuple(held[n] for n in names)))
        mode.stable = tuple(stable)
        values = [(value, (one.module, n)) for one in stable for n, value in zip(one.names, one.values, strict=True)]
        mode.tensors = tuple((value, where) for value, where in values if isinstance(value, Tensor))
        mode.sizes = tuple((value, len(value), where) for value, where in values if isinstance(value, _CONTAINERS))


def _reader(names: tuple[str, ...]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    if len(names) > 1:
        return operator.itemgetter(*names)
    return lambda held: tuple(held[name] for name in names)


def _value(where: Attribute) -> Any:
    return vars(where[0]).get(where[1], _MISSING)


def _shallow(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value


def _assign(values: dict[Attribute, Any]) -> None:
    for (module, name), value in values.items():
        if value is _MISSING:
            vars(module).pop(name, None)
        else:
            vars(module)[name] = value


def _frozen(value: Any, *, copied: bool = False) -> Any:
    """Without the graph that a tensor may hang in; with bytes of its own if they are going to be written to."""
    copies: dict[int, torch.UntypedStorage] = {}

    def make(tensor: Tensor) -> FrozenTensor:
        frozen = FrozenTensor(tensor, copies if copied else None)
        frozen.written = copied
        return frozen

    return freeze(value, make)


def _is_written(frozen: Any) -> bool:
    return isinstance(frozen, FrozenTensor) and frozen.moved_on and not frozen.copied


def _hangs(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and not is_leaf(value)


def _same_items(before: Any, now: Any) -> bool:
    """Whether a container still has the items of which there is a copy."""
    if type(now) is not type(before) or len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(map(operator.is_, (*now, *now.values()), (*before, *before.values())))
    return bool(now == before) if isinstance(now, set) else all(map(operator.is_, now, before))
