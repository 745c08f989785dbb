"""Everything that Python code could have changed: what can be reached from modules, written down and put back.

What is followed: attributes of modules and of objects whose class Python code defines, containers, closures, defaults
and attributes of functions (hooks and what they are bound to among them), arrays, random streams, iterators and caches
of functions (NOTE [Marks]), of tensors gradients, attributes, flags and hooks, and what the code of all these functions
and classes names, in its own module and in others: globals, functions, classes and their attributes. Of torch this is
true of modules and of `STATEFUL`. Code of installed packages is followed up to `MOST_INSTALLED` functions, that of
`LIBRARIES` not at all.
What is not: files, objects of libraries written in C, and what else belongs to torch and to this package.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import operator
import threading
import types
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from spillway.engines.blocks.code import FOREIGN, LIBRARIES, is_foreign, is_installed, modules_named, names_of, package
from spillway.engines.blocks.fingerprints import Fingerprint, fingerprint
from spillway.engines.blocks.marks import ATOMS, Mark, Marks
from spillway.engines.blocks.saved import PLAIN
from spillway.engines.environment import Generator, stream
from spillway.engines.tensors.twins import TENSOR_HOOKS
from spillway.internals.private import Place, bytes_over, grad_mode, is_leaf
from spillway.internals.private import storage_address as address
from spillway.units import Bytes, MiB

MOST_THINGS: Final = 100_000
"""Where more can be reached, no forward is run that has to leave no trace."""
MOST_BYTES: Final[Bytes] = 16 * MiB
"""Of tensors whose bytes are written down, and of an array."""
MOST_INSTALLED: Final = 2000
"""Functions of installed packages that are looked into: what a model uses of them lies near."""
_ATOMS: Final = ATOMS | {torch.Size, weakref.ProxyType, weakref.CallableProxyType}
_HEAP_TYPE: Final = 1 << 9  # of `type.__flags__`: a class that Python code defines
_HANDLED: Final = ("_parameters", "_buffers")
_MISSING: Final = object()

_PROGRAM: Final = (types.FunctionType, types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType)
_REFERRING: Final = (
    types.MethodType, types.BuiltinMethodType, types.MethodWrapperType, staticmethod, classmethod, property,
)  # fmt: skip
_REFERS: Final = ("__self__", "__func__", "fget", "fset", "fdel")
_WEAK: Final = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)


@final
class _Values(dict[Any, Any]):
    """Values by names or keys, each of them noted."""


@final
class _Items(list[Any]):
    """The items of a container, in order, each of them noted."""


class _Entry(NamedTuple):
    """One thing that can change: how to read it, what it was, how to put that back."""

    read: Callable[[], Any]
    was: Any
    write: Callable[[Any], None]
    same: Callable[[Any, Any], bool]
    marked: bool = False


@final
class Copies:
    """Of the bytes of tensors, which calls share that find the same ones there, as long as one of them holds them; on a
    device, which would have to be waited for, a copy for each."""

    def __init__(self) -> None:
        self._held: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def of(self, tensor: Tensor) -> Tensor:
        """Of the storage of a tensor, as it is now."""
        now = bytes_over(tensor.untyped_storage())
        if tensor.device.type != "cpu":
            return now.clone()
        held = self._held.get(address(tensor))
        if held is None or held.shape != now.shape or not torch.equal(held, now):
            held = self._held[address(tensor)] = now.clone()
        return held


@final
class Reach:
    """What can be reached from some roots, as it is now.

    Args:
        apart: Modules of whose own attributes, parameters and buffers somebody else takes care.
        lasting: Whether this is held beyond the forward: then tensors that hang in a graph are held without it.
        copies: Of bytes of tensors, where these count, those of parameters and buffers left out, up to `MOST_BYTES`.
        prints: Whether fingerprints tell of changes beyond `MOST_BYTES`.
        beside: What this one reached is written down as well, as it is now, wherever it has gone since.
    """

    def __init__(
        self,
        roots: Iterable[Any],
        *,
        apart: Sequence[nn.Module] = (),
        lasting: bool = False,
        copies: Copies | None = None,
        prints: bool = False,
        beside: Reach | None = None,
    ) -> None:
        self._entries: list[_Entry] = []
        self._bytes: list[tuple[Tensor, Tensor]] = []
        """Of the storages of tensors."""
        self._versions: list[tuple[Tensor, int]] = []
        """Of tensors, which may share bytes: what a run writes to may have been saved by another one before."""
        self._lasting = lasting
        self._with_bytes, self._copies, self._room = copies is not None, copies or Copies(), MOST_BYTES
        self._noted: set[tuple[int, str]] = set()
        self._apart = set(apart)
        self._fixed = {
            id(tensor) for module in apart for tensor in (*module._parameters.values(), *module._buffers.values())
        }
        self._prints: list[tuple[Tensor, Fingerprint]] | None = [] if prints else None
        """Of what is too large to be written down."""
        self._parameters: list[tuple[nn.Parameter, int]] = []
        """Of modules apart from those that somebody takes care of, with their versions."""
        self._large: list[np.ndarray[Any, Any]] = []
        """Arrays that are too large for that."""
        self._seen: dict[int, Any] = {}  # the things themselves, so that no id is used twice
        self._next: collections.deque[Any] = collections.deque(roots)
        self._marks = Marks(self._next.extend)
        self._lost: list[Mark] = []
        self._installed = 0
        for entry in beside._entries if beside is not None else ():
            if entry.same is _same:
                self._note(entry.read, entry.write)
            else:
                self._entries.append(entry._replace(was=copy.copy(entry.read())))
        while self._next and len(self._seen) < MOST_THINGS:
            thing = self._next.popleft()
            if type(thing) not in _ATOMS and id(thing) not in self._seen:
                self._seen[id(thing)] = thing
                self._visit(thing)
        there = {address(tensor) for tensor, *_ in self._bytes}
        for tensor, *_ in beside._bytes if beside is not None else ():
            if address(tensor) in there:
                self._versions.append((tensor, version_of(tensor)))
            else:
                self._write_down(tensor)
        self.too_much = f"more than {MOST_THINGS} things can be reached from it" if self._next else ""
        """Why it is not everything; empty if it is."""
        del self._seen, self._next, self._marks, self._noted

    def changed(self) -> bool:
        """Whether anything is not what it was."""
        written = (not torch.equal(bytes_over(tensor.untyped_storage()), was) for tensor, was in self._bytes)
        return any(not entry.same(entry.was, entry.read()) for entry in self._entries) or any(written)

    def drop_bytes(self) -> None:
        """Forget the bytes of tensors, which have not changed."""
        self._bytes, self._versions = [], []

    def lost(self) -> str:
        """What has moved and cannot be put back; empty if there is nothing."""
        return next((was.lost for was in self._lost if not was.stands(was.original)), "")

    def overwritten(self) -> str:
        """Says of something that is not written down that it is not what it was, as a clause; or it is empty."""
        if any(parameter._version != version for parameter, version in self._parameters):
            return "it writes to a parameter that is not its own"
        changed = any(not torch.equal(was, fingerprint(one, {})) for one, was in self._prints or ())
        return f"it writes to a tensor or an array of more than {MOST_BYTES >> 20} MiB" if changed else ""

    def restore(self, *, substitute: bool = False) -> None:
        """Put everything back in place that has changed. `substitute` puts others in the place of all iterators and
        caches, also where these have not moved: they are about to be used by a run that is to leave them alone. A
        generator is replaced by what refuses."""
        made: dict[Mark, Any] = {}
        for entry in self._entries:
            if (substitute and entry.marked) or not entry.same(entry.was, entry.read()):
                entry.write(_resolved(entry.was, made, substitute=substitute) if entry.marked else entry.was)
        for tensor, was in self._bytes:
            if (storage := tensor.untyped_storage()).nbytes() != was.numel():
                storage.resize_(was.numel())
            with grad_mode(enabled=False):
                bytes_over(storage).copy_(was)
        for tensor, version in self._versions:
            if not tensor.is_inference():
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))

    @contextlib.contextmanager
    def substituted(self) -> Iterator[None]:
        """Around a run of which nothing is to be left. Arrays of more than `MOST_BYTES` can only be read in it."""
        try:
            self.restore(substitute=True)
            for one in self._large:
                one.flags.writeable = False
            yield
        finally:
            for one in sorted(self._large, key=lambda one: one.base is not None):  # a view after what it looks at
                one.flags.writeable = True
            self.restore()

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
        elif isinstance(thing, _REFERRING):
            self._next.extend(getattr(thing, name, None) for name in _REFERS)
        elif isinstance(thing, functools.partial):
            self._next.extend((thing.func, thing.args, thing.keywords, vars(thing)))
        elif isinstance(thing, types.CellType):
            self._note(functools.partial(_cell, thing), functools.partial(setattr, thing, "cell_contents"))
        elif isinstance(thing, Generator):
            one = stream(thing)
            self._entries.append(_Entry(one.get, one.get(), one.set, _same_state))
        elif isinstance(thing, np.random.BitGenerator):
            self._entries.append(
                _Entry(lambda: thing.state, thing.state, functools.partial(setattr, thing, "state"), _same_state)
            )
        elif isinstance(thing, np.ndarray):
            self._visit_array(thing)
        elif isinstance(thing, bytearray | array):
            self._entries.append(
                _Entry(lambda: thing, thing[:], functools.partial(operator.setitem, thing, slice(None)), operator.eq)
            )
        elif isinstance(thing, memoryview):
            self._next.append(thing.obj)
        elif isinstance(thing, weakref.ReferenceType):
            self._next.append(thing())
        elif isinstance(thing, _WEAK):
            self._next.append(cast(Any, thing).data)
        elif isinstance(thing, DataLoader):  # not what it loads, which may be large
            self._next.extend((thing.generator, getattr(thing.sampler, "generator", None)))
        elif isinstance(thing, types.MappingProxyType):
            self._next.extend(thing.values())
        elif isinstance(thing, type):
            self._visit_class(thing)
        elif isinstance(thing, types.ModuleType):  # that something holds: nobody knows which of its names are used
            if package(thing.__name__) not in LIBRARIES and not is_installed(thing.__name__):
                self._note_globals(vars(thing), [name for name in vars(thing) if not name.startswith("__")])
        elif (
            isinstance(thing, nn.Module)
            or kind is types.SimpleNamespace
            or (kind.__flags__ & _HEAP_TYPE and not is_foreign(kind.__module__))
        ):
            self._visit_instance(thing)

    def _note(self, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        """Write down what is read, and follow it."""
        was = read()
        if isinstance(was, _Values):
            self._next.extend(was.values())
            was = _Values((name, self._held(value)) for name, value in was.items())
            marked = any(isinstance(value, Mark) for value in was.values())
        elif isinstance(was, _Items):
            self._next.extend(was)
            was = _Items(self._held(value) for value in was)
            marked = any(isinstance(value, Mark) for value in was)
        else:
            self._next.append(was)
            was = self._held(was)
            marked = isinstance(was, Mark)
        self._entries.append(_Entry(read, was, write, _same, marked))

    def _held(self, value: Any) -> Any:
        """What stands for a value: an iterator is moved on by whoever uses it, and a graph is not to be held."""
        if isinstance(value, Tensor):
            hangs = self._lasting and value.requires_grad and not is_leaf(value)
            return value.detach().requires_grad_() if hangs else value
        mark = self._marks.of(value)
        if isinstance(mark, Mark) and mark.lost:
            self._lost.append(mark)
        return mark

    def _visit_container(self, thing: Any) -> None:
        if any(thing is one for one in _OF_ALL_MODULES):
            self._note(functools.partial(_of_others, thing), functools.partial(_put_others, thing))
        elif isinstance(thing, dict):
            self._note(functools.partial(_Values, thing), functools.partial(_refill_dict, thing))
        else:
            self._note(functools.partial(_Items, thing), functools.partial(_refill, thing))
        if isinstance(thing, collections.defaultdict):
            put = functools.partial(setattr, thing, "default_factory")
            self._note(functools.partial(getattr, thing, "default_factory"), put)
        if type(thing).__flags__ & _HEAP_TYPE and not is_foreign(type(thing).__module__):
            self._visit_instance(thing)

    def _visit_instance(self, thing: Any) -> None:
        held = _own(thing, "__dict__")
        if type(held) is dict:
            if isinstance(thing, nn.Module) and thing in self._apart:
                self._next.extend(value for name, value in held.items() if name not in _HANDLED)
                self._next.extend(thing._parameters.values())
                for name in [name for name, value in held.items() if isinstance(self._held(value), Mark)]:
                    self._note(functools.partial(held.get, name), functools.partial(held.__setitem__, name))
            else:
                self._next.append(held)
        for base in type(thing).__mro__:
            if base is object or is_foreign(base.__module__):
                break
            names, owner = vars(base).get("__slots__", ()), base.__name__.lstrip("_")
            for name in (names,) if isinstance(names, str) else names:
                if name.startswith("__") and not name.endswith("__") and owner:
                    name = f"_{owner}{name}"  # as the class has it
                if name not in ("__dict__", "__weakref__"):
                    self._note(functools.partial(_own, thing, name), functools.partial(_put_slot, thing, name))
            self._next.append(base)

    def _visit_class(self, kind: type) -> None:
        if package(kind.__module__) in LIBRARIES or not kind.__flags__ & _HEAP_TYPE:
            return
        self._note(functools.partial(_class_values, kind), functools.partial(_put_class_values, kind))
        self._next.extend((*vars(kind).values(), *kind.__bases__, type(kind)))

    def _visit_function(self, function: types.FunctionType) -> None:
        if package(function.__module__ or "") in FOREIGN:
            return
        self._next.extend((*(function.__closure__ or ()), function.__dict__))
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name):
                self._note(functools.partial(getattr, function, name), functools.partial(setattr, function, name))
        own = function.__globals__
        home = str(own.get("__name__"))
        if package(home) in LIBRARIES:
            return
        self._installed += is_installed(home)
        if is_installed(home) and self._installed > MOST_INSTALLED:
            return
        names = names_of(function.__code__)
        self._note_globals(own, names.written)
        spaces, seen = [own, *map(vars, modules_named(names, own.get("__package__")))], set[int]()
        for space in spaces:  # they become more
            if id(space) in seen or package(str(space.get("__name__"))) in LIBRARIES:
                continue
            seen.add(id(space))
            there = [name for name in (names.globals if space is own else names.read) if name in space]
            spaces += [vars(space[name]) for name in there if isinstance(space[name], types.ModuleType)]
            self._next.extend(space[name] for name in there if isinstance(space[name], types.FunctionType | type))
            self._note_globals(space, (name for name in there if _is_state(space[name])))
            if space is not own:
                self._note_globals(space, names.attributes)

    def _note_globals(self, space: dict[str, Any], names: Iterable[str]) -> None:
        fresh = tuple(name for name in names if (id(space), name) not in self._noted)
        if fresh:
            self._noted.update((id(space), name) for name in fresh)
            self._note(functools.partial(_named, space, fresh), functools.partial(_put_named, space))

    def _visit_array(self, held: np.ndarray[Any, Any]) -> None:
        if not held.flags.writeable:
            return
        if held.dtype.hasobject:
            self._next.extend(held.flat)
        if held.nbytes <= MOST_BYTES:
            put = functools.partial(np.copyto, held)
            self._entries.append(_Entry(lambda: held, held.copy(), put, _same_array))
            return
        self._large.append(held)
        if self._prints is not None and held.flags.c_contiguous and not held.dtype.hasobject:
            raw = torch.from_numpy(held.reshape(-1).view(np.uint8))
            self._prints.append((raw, fingerprint(raw, {})))

    def _visit_tensor(self, tensor: Tensor) -> None:
        if type(tensor) is Tensor or type(tensor) is nn.Parameter:
            held = tensor.__dict__
            self._note(functools.partial(_Values, held), functools.partial(_refill_dict, held))
        elif not is_foreign(type(tensor).__module__):
            self._visit_instance(tensor)
        if is_leaf(tensor) and not (self._lasting and id(tensor) in self._fixed):
            # Of parameters no longer than for one run: a place holds the storage.
            kinds = PLAIN if self._lasting else (*PLAIN, nn.Parameter)
            if is_plain(tensor, kinds) and (place := Place.of(tensor)) is not None:
                there = functools.partial(Place.of, tensor)
                self._entries.append(_Entry(there, place, lambda was: was.put_back(tensor), operator.eq))
            self._note(functools.partial(_of_leaf, tensor), functools.partial(_put_leaf, tensor))
            for name in TENSOR_HOOKS:
                read, write = functools.partial(hooks_of, tensor, name), functools.partial(put_hooks, tensor, name)
                # Not `_same`: what hooks reach is not followed, whoever writes them down again.
                self._entries.append(_Entry(read, read(), write, lambda was, now: _same(was, now)))
        if not self._with_bytes or id(tensor) in self._fixed:
            return
        if isinstance(tensor, nn.Parameter):
            if not tensor.is_inference():
                self._parameters.append((tensor, tensor._version))
            return
        if not is_plain(tensor):
            return
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes <= self._room:
            self._room -= nbytes
            self._write_down(tensor)
        elif self._prints is not None and type(tensor) in (Tensor, nn.Parameter):
            self._prints.append((tensor.detach(), fingerprint(tensor, {})))

    def _write_down(self, tensor: Tensor) -> None:
        alias = tensor.detach()
        self._bytes.append((alias, self._copies.of(tensor)))
        self._versions.append((alias, version_of(tensor)))


def reach_of(modules: Sequence[nn.Module], *others: Any) -> tuple[Any, ...]:
    """The roots of a call of modules: they, what they are called with, and hooks on all modules."""
    return *modules, *others, *_OF_ALL_MODULES


_OF_ALL_MODULES: Final[Any] = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks


def _of_others(hooks: dict[int, Any]) -> _Values:
    """Hooks on all modules but our own, which come and go while other threads run something once more."""
    real = {
        number: getattr(hook, "instead_of", hook) if _is_ours(hook) else hook for number, hook in hooks.copy().items()
    }
    return _Values((number, hook) for number, hook in real.items() if not _is_ours(hook))


def _put_others(hooks: dict[int, Any], was: _Values) -> None:
    ours = {number: hook for number, hook in hooks.copy().items() if _is_ours(hook)}
    _refill_dict(hooks, _Values(sorted({**ours, **was}.items())))


def _is_ours(hook: Any) -> bool:
    return package(getattr(hook, "__module__", None) or "") == "spillway"


def version_of(tensor: Tensor) -> int:
    """Of inference tensors nobody counts them."""
    return 0 if tensor.is_inference() else tensor._version


def is_plain(tensor: Tensor, kinds: tuple[type, ...] = PLAIN) -> bool:
    """Of one of these classes, with bytes of its own."""
    strided = type(tensor) in kinds and tensor.layout is torch.strided
    return strided and torch._C._has_storage(tensor) and not tensor.is_meta


def _is_state(value: Any) -> bool:
    """Whether a global may be more than a name for a part of the program."""
    return type(value) not in _PROGRAM and not isinstance(value, types.ModuleType | type)


def _same(was: Any, now: Any) -> bool:
    """By identity, item by item; what a mark stands for by where it is."""
    if isinstance(was, _Values):
        alike = len(was) == len(now) and all(map(operator.is_, was, now))
        return alike and all(map(_is, was.values(), now.values()))
    if isinstance(was, _Items):
        return len(was) == len(now) and all(map(_is, was, now))
    return _is(was, now)


def _same_state(was: Any, now: Any) -> bool:
    return torch.equal(was, now) if isinstance(was, Tensor) else bool(repr(was) == repr(now))


def _same_array(was: np.ndarray[Any, Any], now: np.ndarray[Any, Any]) -> bool:
    return bool(was.shape == now.shape and was.dtype == now.dtype and was.tobytes() == now.tobytes())


def _is(was: Any, now: Any) -> bool:
    return was is now or (isinstance(was, Mark) and was.original is now and was.stands(now))


def _resolved(was: Any, made: dict[Mark, Any], *, substitute: bool) -> Any:
    """What is to be put in place."""

    def one(value: Any) -> Any:
        if not isinstance(value, Mark):
            return value
        return value.original if not substitute and value.stands(value.original) else value.again(made)

    if isinstance(was, _Values):
        return _Values((name, one(value)) for name, value in was.items())
    return _Items(map(one, was)) if isinstance(was, _Items) else one(was)


def _refill(container: Any, items: list[Any]) -> None:
    if isinstance(container, list):
        list.__setitem__(container, slice(None), items)
        return
    container.clear()
    container.update(items) if isinstance(container, set) else container.extend(items)


def _refill_dict(container: dict[Any, Any], items: dict[Any, Any]) -> None:
    kind: Any = collections.OrderedDict if isinstance(container, collections.OrderedDict) else dict
    if len(container) == len(items) and all(map(operator.is_, container, items)):
        items = {key: value for key, value in items.items() if kind.__getitem__(container, key) is not value}
    else:
        kind.clear(container)
    for key, value in items.items():
        kind.__setitem__(container, key, value)


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty as yet
        return _MISSING


def _own(thing: Any, name: str) -> Any:
    """An attribute, without the code with which a class may answer for those that are not there (`__getattr__`)."""
    try:
        return cast(Any, type(thing)).__getattribute__(thing, name)
    except Exception:
        return _MISSING


def _put_slot(thing: Any, name: str, value: Any) -> None:
    if value is _MISSING:
        object.__delattr__(thing, name)
    else:
        object.__setattr__(thing, name, value)


def _class_values(kind: type) -> _Values:
    return _Values((name, value) for name, value in vars(kind).items() if not name.startswith("__"))


def _put_class_values(kind: type, values: dict[str, Any]) -> None:
    now = _class_values(kind)
    for name in now.keys() - values.keys():
        type.__delattr__(kind, name)
    for name, value in values.items():
        if now.get(name, _MISSING) is not value:
            type.__setattr__(kind, name, value)


def _named(held: dict[str, Any], names: Sequence[str]) -> _Values:
    return _Values((name, held.get(name, _MISSING)) for name in names)


def _put_named(held: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is _MISSING:
            held.pop(name, None)
        elif held.get(name, _MISSING) is not value:
            held[name] = value


def _of_leaf(tensor: Tensor) -> _Values:
    leaf = is_leaf(tensor)
    grad = tensor.grad if leaf else None
    return _Values(leaf=leaf, requires_grad=tensor.requires_grad, grad=grad)


def _put_leaf(tensor: Tensor, values: dict[str, Any]) -> None:
    if not is_leaf(tensor):
        tensor.detach_()
    if tensor.requires_grad != values["requires_grad"]:
        tensor.requires_grad_(values["requires_grad"])
    tensor.grad = values["grad"]


_hangs = threading.local()
_hang: Callable[..., None] = RemovableHandle.__init__


def _noted(handle: RemovableHandle, *given: Any, **named: Any) -> None:
    _hang(handle, *given, **named)
    getattr(_hangs, "made", []).append(handle)


@functools.cache
def _note_handles() -> None:
    global _hang
    kind: Any = RemovableHandle
    if (hang := kind.__init__) is not _noted:
        _hang, kind.__init__ = hang, _noted


@contextlib.contextmanager
def unhung() -> Iterator[None]:
    """Around a run of which nothing is to be left: hooks that this thread hangs meanwhile, on whatever it finds, are
    taken down, but for our own. Every kind of hook of torch is hung by way of a handle, which is noted from now on."""
    _note_handles()
    before, made = getattr(_hangs, "made", None), list[RemovableHandle]()
    try:
        _hangs.made = made
        yield
    finally:
        _hangs.made = [] if before is None else before
        for handle in made:
            if not _is_ours((handle.hooks_dict_ref() or {}).get(handle.id)):
                handle.remove()


def hooks_of(tensor: Tensor, name: str) -> _Values:
    """Its hooks of one of `TENSOR_HOOKS`, in order."""
    return _Values(getattr(tensor, name) or {})


def put_hooks(tensor: Tensor, name: str, values: dict[Any, Any]) -> None:
    """It has these and no others."""
    hooks = getattr(tensor, name)
    if hooks is not None and not _same(values, _Values(hooks)):
        hooks.clear()
        hooks.update(values)
