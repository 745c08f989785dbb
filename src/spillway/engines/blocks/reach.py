"""Everything that Python code could have changed: what can be reached from modules, written down and put back.

What is followed: attributes of modules and of objects whose class Python code defines, containers, closures, defaults
and attributes of functions (hooks and what they are bound to among them), attributes of classes (of autograd functions
and tensors also where only the class is there), globals that a function names, arrays, counters, random streams, and
of tensors gradients, flags and hooks. What is not: generators that are running, files, what caches of `functools` hold,
and what belongs to torch and to this package.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from spillway.engines.blocks.containers import PLAIN, raw
from spillway.engines.blocks.environment import Generator, stream
from spillway.units import Bytes, MiB

MOST_THINGS: Final = 100_000
"""What lies further away is not followed."""
MOST_BYTES: Final[Bytes] = 16 * MiB
"""Of tensors whose bytes are written down, and of an array."""
_FOREIGN: Final = frozenset(
    {
        "torch", "numpy", "spillway", "logging", "threading", "queue", "multiprocessing", "concurrent", "asyncio",
        "abc", "socket", "subprocess", "importlib", "re", "inspect", "typing", "weakref", "enum", "pathlib",
        "contextlib", "contextvars", "warnings", "unittest", "pytest", "_pytest", "tqdm", "rich",
    }
)  # fmt: skip
"""Packages whose objects have nothing to do with what a model computes."""
_LIBRARIES: Final = _FOREIGN | sys.stdlib_module_names | {"transformers", "accelerate", "peft", "triton"}
"""Packages whose functions are not looked into for globals."""
_ATOMS: Final = frozenset({type(None), bool, int, float, complex, str, bytes, slice, range, type(...), torch.Size})
_HEAP_TYPE: Final = 1 << 9  # of `type.__flags__`: a class that Python code defines
_HANDLED: Final = ("_parameters", "_buffers")
_MISSING: Final = object()


class _Entry(NamedTuple):
    """One thing that can change: how to read it, what it was, how to put that back."""

    read: Callable[[], Any]
    was: Any
    write: Callable[[Any], None]
    same: Callable[[Any, Any], bool]


@final
class Reach:
    """What can be reached from some roots, as it is now.

    Args:
        roots: Where to begin.
        apart: Modules of whose own attributes, parameters and buffers somebody else takes care.
        lasting: Whether this is held beyond the forward: then tensors that hang in a graph are held without it.
        with_bytes: Whether bytes of tensors count, those of parameters and buffers left out, up to `MOST_BYTES`.
    """

    def __init__(
        self, roots: Iterable[Any], *, apart: Sequence[nn.Module] = (), lasting: bool = False, with_bytes: bool = False
    ) -> None:
        self._entries: list[_Entry] = []
        self._bytes: list[tuple[Tensor, Tensor]] = []
        self._lasting = lasting
        self._room = MOST_BYTES if with_bytes else 0
        self._apart = set(apart)
        self._fixed = {
            id(tensor) for module in apart for tensor in (*module._parameters.values(), *module._buffers.values())
        }
        self._seen: dict[int, Any] = {}  # the things themselves, so that no id is used twice
        self._next: collections.deque[Any] = collections.deque(roots)
        while self._next and len(self._seen) < MOST_THINGS:
            thing = self._next.popleft()
            if type(thing) not in _ATOMS and id(thing) not in self._seen:
                self._seen[id(thing)] = thing
                self._visit(thing)
        del self._seen, self._next

    def changed(self) -> bool:
        """Whether anything is not what it was."""
        return any(not entry.same(entry.was, entry.read()) for entry in self._entries) or self.written()

    def written(self) -> bool:
        """Whether bytes of a tensor are not what they were."""
        return any(not torch.equal(raw(tensor), was) for tensor, was in self._bytes)

    def drop_bytes(self) -> None:
        """Forget the bytes of tensors, which have not changed."""
        self._bytes = []

    def restore(self) -> None:
        """Put everything back in place that has changed."""
        for entry in self._entries:
            if not entry.same(entry.was, entry.read()):
                entry.write(entry.was)
        for tensor, was in self._bytes:
            with torch.no_grad(), cast(Any, torch.autograd)._unsafe_preserve_version_counter(tensor):
                raw(tensor).copy_(was)

    # ------------------------------------------------------------------------------------------------------- the walk

    def _visit(self, thing: Any) -> None:
        kind = type(thing)
        if isinstance(thing, Tensor):
            self._visit_tensor(thing)
        elif isinstance(thing, dict | list | set | collections.deque):
            self._visit_container(thing)
        elif isinstance(thing, tuple | frozenset):
            self._next.extend(thing)
        elif isinstance(thing, types.FunctionType):
            self._visit_function(thing)
        elif isinstance(thing, types.MethodType):
            self._next.extend((thing.__self__, thing.__func__))
        elif isinstance(thing, functools.partial):
            self._next.extend((thing.func, thing.args, thing.keywords))
        elif isinstance(thing, types.CellType):
            self._note(functools.partial(_cell, thing), functools.partial(setattr, thing, "cell_contents"))
        elif isinstance(thing, Generator):
            one = stream(thing)
            self._entries.append(_Entry(one.get, one.get(), one.set, _same_state))
        elif isinstance(thing, np.ndarray):
            if thing.nbytes <= MOST_BYTES and not thing.dtype.hasobject and thing.flags.writeable:
                self._note(thing.copy, functools.partial(np.copyto, thing))
        elif isinstance(thing, type):
            if _runs_by_itself(thing):
                self._visit_class(thing)
        elif isinstance(thing, types.ModuleType):
            pass
        elif (
            isinstance(thing, nn.Module)
            or kind is types.SimpleNamespace
            or (kind.__flags__ & _HEAP_TYPE and _package(kind) not in _FOREIGN)
        ):
            self._visit_instance(thing)

    def _note(self, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        """Write down what is read, and follow it."""
        was = read()
        if isinstance(was, dict):
            self._next.extend(was.values())
            was = {name: self._held(value) for name, value in was.items()}
        elif isinstance(was, list):
            self._next.extend(was)
            was = [self._held(value) for value in was]
        elif not isinstance(was, np.ndarray):
            self._next.append(was)
            was = self._held(was)
        self._entries.append(_Entry(read, was, write, _same))

    def _held(self, value: Any) -> Any:
        """What stands for a value: an iterator is moved on by whoever uses it, and a graph is not to be held."""
        if type(value) is itertools.count:
            return copy.copy(value)
        if self._lasting and isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
            return value.detach().requires_grad_()
        return value

    def _visit_container(self, thing: Any) -> None:
        if isinstance(thing, dict):
            self._note(functools.partial(dict, thing), functools.partial(_refill_dict, thing))
        else:
            self._note(functools.partial(list, thing), functools.partial(_refill, thing))
        if type(thing).__flags__ & _HEAP_TYPE and _package(type(thing)) not in _FOREIGN:
            self._visit_instance(thing)

    def _visit_instance(self, thing: Any) -> None:
        held = getattr(thing, "__dict__", None)
        if type(held) is dict:
            if isinstance(thing, nn.Module) and thing in self._apart:
                self._next.extend(value for name, value in held.items() if name not in _HANDLED)
                self._next.extend(thing._parameters.values())
                for name in [name for name, value in held.items() if type(value) is itertools.count]:
                    self._note(functools.partial(held.get, name), functools.partial(held.__setitem__, name))
            else:
                self._next.append(held)
        for base in type(thing).__mro__:
            if base is object or _package(base) in _FOREIGN:
                break
            names = vars(base).get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if name not in ("__dict__", "__weakref__"):
                    self._note(functools.partial(_slot, thing, name), functools.partial(_put_slot, thing, name))
            if id(base) not in self._seen:
                self._seen[id(base)] = base
                self._visit_class(base)

    def _visit_class(self, kind: type) -> None:
        if _package(kind) in _LIBRARIES:
            return
        self._note(functools.partial(_class_values, kind), functools.partial(_put_class_values, kind))
        members = (getattr(one, "__func__", one) for one in vars(kind).values())  # of static and class methods
        self._next.extend(one for one in members if isinstance(one, types.FunctionType))

    def _visit_function(self, function: types.FunctionType) -> None:
        if (function.__module__ or "").partition(".")[0] in _FOREIGN:
            return
        self._next.extend(function.__closure__ or ())
        self._next.extend((function.__defaults__, function.__kwdefaults__))
        if function.__dict__:
            self._next.append(function.__dict__)
        if (function.__module__ or "").partition(".")[0] in _LIBRARIES:
            return
        names = [name for name in _names(function.__code__) if _is_state(function.__globals__.get(name, _MISSING))]
        called = (function.__globals__.get(name) for name in _names(function.__code__))
        self._next.extend(one for one in called if isinstance(one, types.FunctionType) or _runs_by_itself(one))
        if names:
            held = function.__globals__
            self._note(functools.partial(_named, held, names), functools.partial(_put_named, held, names))

    def _visit_tensor(self, tensor: Tensor) -> None:
        if tensor.is_leaf and not (self._lasting and id(tensor) in self._fixed):
            self._note(functools.partial(_of_leaf, tensor), functools.partial(_put_leaf, tensor))
        if not self._room or id(tensor) in self._fixed or isinstance(tensor, nn.Parameter) or not _is_plain(tensor):
            return
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes <= self._room:
            self._room -= nbytes
            self._bytes.append((tensor.detach(), raw(tensor).clone()))


def reach_of(modules: Sequence[nn.Module], *others: Any) -> tuple[Any, ...]:
    """The roots of a call of modules: they, what they are called with, and hooks on all modules."""
    return *modules, *others, torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in PLAIN and tensor.layout is torch.strided and torch._C._has_storage(tensor)


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _is_state(value: Any) -> bool:
    """Whether a global may be more than a name for a part of the program."""
    return (
        value is not _MISSING
        and not isinstance(value, types.ModuleType | types.FunctionType | type)
        and (not callable(value) or _package(type(value)) not in _LIBRARIES)
    )


def _runs_by_itself(value: Any) -> bool:
    """Whether it is a class whose methods torch calls where nobody holds an object of it."""
    return isinstance(value, type) and issubclass(value, torch.autograd.Function | Tensor)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _same(was: Any, now: Any) -> bool:
    """By identity, item by item; what stands for an iterator by where it is."""
    if type(was) is not type(now):
        return False
    if isinstance(was, dict):
        alike = len(was) == len(now) and all(map(operator.is_, was, now))
        return alike and all(map(_is, was.values(), now.values()))
    if isinstance(was, list):
        return len(was) == len(now) and all(map(_is, was, now))
    if isinstance(was, np.ndarray):
        return bool(was.shape == now.shape and was.tobytes() == now.tobytes())
    return _is(was, now)


def _same_state(was: Any, now: Any) -> bool:
    return torch.equal(was, now) if isinstance(was, Tensor) else bool(repr(was) == repr(now))


def _is(was: Any, now: Any) -> bool:
    return was is now or (type(was) is itertools.count and type(now) is itertools.count and repr(was) == repr(now))


def _refill(container: Any, items: list[Any]) -> None:
    if isinstance(container, list):
        list.__setitem__(container, slice(None), items)
        return
    container.clear()
    container.update(items) if isinstance(container, set) else container.extend(items)


def _refill_dict(container: dict[Any, Any], items: dict[Any, Any]) -> None:
    kind: Any = collections.OrderedDict if isinstance(container, collections.OrderedDict) else dict
    kind.clear(container)
    for key, value in items.items():
        kind.__setitem__(container, key, value)


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty as yet
        return _MISSING


def _slot(thing: Any, name: str) -> Any:
    return getattr(thing, name, _MISSING)


def _put_slot(thing: Any, name: str, value: Any) -> None:
    if value is _MISSING:
        object.__delattr__(thing, name)
    else:
        object.__setattr__(thing, name, value)


def _class_values(kind: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("__") and not callable(value) and not hasattr(value, "__get__")
    }


def _put_class_values(kind: type, values: dict[str, Any]) -> None:
    for name in _class_values(kind).keys() - values.keys():
        delattr(kind, name)
    for name, value in values.items():
        setattr(kind, name, value)


def _named(held: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: held.get(name, _MISSING) for name in names}


def _put_named(held: dict[str, Any], names: Sequence[str], values: dict[str, Any]) -> None:
    held.update(values)


def _of_leaf(tensor: Tensor) -> dict[str, Any]:
    hooks = tensor._backward_hooks
    grad = tensor.grad if tensor.is_leaf else None
    return {"leaf": tensor.is_leaf, "requires_grad": tensor.requires_grad, "grad": grad, "hooks": len(hooks or ())}


def _put_leaf(tensor: Tensor, values: dict[str, Any]) -> None:
    if not tensor.is_leaf:
        tensor.detach_()
    if tensor.requires_grad != values["requires_grad"]:
        tensor.requires_grad_(values["requires_grad"])
    tensor.grad = values["grad"]
    hooks = tensor._backward_hooks or {}
    for added in list(hooks)[values["hooks"] :]:
        del hooks[added]
