"""Consecutive children of a `Sequential` that run as one block.

A block is a module whose forward somebody stands in front of; what a flat `Sequential` is made of are layers of which
each saves little but its input, so that one by one they are poor blocks. A group of them is held by a `Sequential` of
its own, which runs the same modules and is no part of the model: neither its structure nor `state_dict()` show anything
of it, and the hooks of its children run as ever.
"""

from __future__ import annotations

import operator
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from torch import nn

from spillway.engines.blocks.compiled_blocks import is_compiled
from spillway.engines.blocks.hook import Hook, OwnForward
from spillway.errors import ModelError

_TO: Final = "-"


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Some of the children of a `Sequential`."""

    sequential: nn.Sequential
    first: int
    """The place of the first among the children, from 0."""
    last: int
    """That of the last, which belongs to it."""
    module: nn.Sequential
    """Runs them, and is no part of the model."""


def group_name(name: str, sequential: nn.Module, first: int, last: int) -> str:
    """How a group of the children of the `Sequential` of this name is called: "features.0-4" is five of them."""
    children = list(sequential._modules)
    own = f"{children[first]}{_TO}{children[last]}"
    return f"{name}.{own}" if name else own


def group_named(model: nn.Module, name: str) -> Group | None:
    """The group that is called so; None if there is none. Raises ModelError if there are such children, and what holds
    them does more than to run them."""
    above, _, own = name.rpartition(".")
    sequential = dict(model.named_modules(remove_duplicate=False)).get(above)
    if not isinstance(sequential, nn.Sequential):
        return None
    places = {child: place for place, child in enumerate(sequential._modules)}
    for at in (at for at, sign in enumerate(own) if sign == _TO):
        first, last = places.get(own[:at]), places.get(own[at + 1 :])
        if first is None or last is None or first > last:
            continue
        if not runs_children(sequential):
            raise ModelError(
                f"{name!r} cannot be a block: the forward of {above or type(sequential).__name__} is not that of "
                f"torch.nn.Sequential; name modules instead, such as {(above and above + '.') + own[:at]!r}."
            )
        module = nn.Sequential()
        module._modules.update(list(sequential._modules.items())[first : last + 1])  # nobody is told of a new child
        return Group(sequential=sequential, first=first, last=last, module=module)
    return None


def children_of(module: nn.Module) -> list[nn.Module]:
    """By their places: a module that stands at two of them is there twice."""
    return [child for child in module._modules.values() if child is not None]


def runs_children(module: nn.Module, *, behind_hook: bool = False) -> bool:
    """Whether a module is a `Sequential` that runs its children one after the other and does nothing besides; with
    `behind_hook` what a hook of ours stands in front of is looked at, where there is one."""
    kind, own = type(module), vars(module).get("forward")
    if behind_hook and isinstance(own, Hook):
        own = own.patched
    if own is not None and not (isinstance(own, types.MethodType) and own.__self__ is module):
        return False
    return (
        isinstance(module, nn.Sequential)
        and getattr(own, "__func__", kind.forward) is nn.Sequential.forward
        and getattr(kind, "__iter__", None) is nn.Sequential.__iter__
        and None not in module._modules.values()
        and not is_compiled(module)
    )


@final
class Grouped:
    """The forward of a `Sequential` of which groups run as blocks. A model may put other children into it at any
    time."""

    def __init__(self, sequential: nn.Sequential, calls: Mapping[Group, Callable[[Any], Any]]) -> None:
        self._sequential = sequential
        self._plainly = OwnForward(sequential).now
        self._behind = self._plainly()
        self._children = children_of(sequential)
        self._parts: list[Callable[[Any], Any]] = []
        place = 0
        for group in sorted(calls, key=lambda one: one.first):
            self._parts += [*self._children[place : group.first], calls[group]]
            place = group.last + 1
        self._parts += self._children[place:]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        children = self._sequential._modules.values()
        plainly = self._plainly()
        same = len(children) == len(self._children) and all(map(operator.is_, children, self._children))
        if not same or plainly != self._behind or len(args) != 1 or kwargs:
            return plainly(*args, **kwargs)
        (given,) = args
        for part in self._parts:
            given = part(given)
        return given


def first_children(model: nn.Module, groups: Iterable[Group]) -> Iterator[tuple[str, nn.Module]]:
    """By their names: a module that is compiled passes them by as it does the groups."""
    names = {module: name for name, module in model.named_modules()}
    for group in groups:
        module = next(iter(group.module.children()))
        yield names[module], module


def by_sequential(groups: Mapping[str, Group]) -> Iterator[tuple[nn.Sequential, dict[str, Group]]]:
    """Groups by whose children they are. Raises ModelError if a child is in two of them."""
    found: dict[nn.Sequential, dict[str, Group]] = defaultdict(dict)
    for name, group in groups.items():
        for other_name, other in found[group.sequential].items():
            if group.first <= other.last and other.first <= group.last:
                raise ModelError(f"The blocks {other_name} and {name} have a module in common; no two groups may.")
        found[group.sequential][name] = group
    yield from found.items()
