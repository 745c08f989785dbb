"""Where the ops of a watched step arrive: under a dispatch key of their own, below autograd and autocast.

NOTE [Unseen]. A `TorchDispatchMode` is shown the same ops, and changes them. While one is active torch takes every
tensor for a subclass: in 55 functions of torch 2.13 it then picks formulas that need no `item()` and no write in place
(`eigvalsh`, `svdvals`, the gradients of `prod` and `matrix_exp`), with other bits and more memory. And what the mode
calls is cast by autocast a second time. Nothing in torch asks for this key. It is `Fake`, for which torch has no
kernels, so that every op of a thread that includes it comes to the fallback below. It stands right below `Python`: the
user's own dispatch modes and subclasses of tensors have their say first, and what they make of an op arrives.

NOTE [Several threads]. Threads that torch starts for a step (`torch.jit.fork`, deep calls of reentrant backwards) have
key and watcher too, and so has a backward of its graph in any thread (`Watcher.also_here`). A handler that is between
looking for its op's operands and registering the results may not meet another one. So ops are handled one after the
other: what arrives from a second thread waits, and only what arrives from the thread whose op is under way is a part of
that op. A custom op that waits for such a thread waits for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any, Final, cast, final

import torch

from spillway.internals.host_reads import HOST_READS
from spillway.internals.locks import renew_in_children

Handler = Callable[..., Any]
"""Takes an op as a mode would: of the mode, the op, types, arguments and keywords only the last two matter."""

_of_torch: Final = cast(Any, torch._C)
_KEY: Final = _of_torch._dispatch_key_parse("Fake")
_PYTHON: Final = _of_torch.DispatchKey.Python
_BEHIND: Final = "TESTING_ONLY_GenericWrapper"
"""Where the handlers stand when native code comes first: under a key that no tensor and no thread has."""
_NAME: Final = "spillway"
"""Where a thread keeps who watches it; torch hands that on to the threads of autograd together with the key."""

_include: Final = _of_torch._dispatch_tls_set_dispatch_key_included
_is_excluded: Final = _of_torch._dispatch_tls_is_dispatch_key_excluded
_watcher: Final = _of_torch._get_obj_in_tls

_kept_by: Final[set[int]] = set()
"""Native identifiers of threads that keep something there, which none can remove."""

_registering = threading.RLock()
renew_in_children(sys.modules[__name__], "_registering")

_HIDDEN: Final = functools.reduce(
    operator.or_, map(_of_torch.DispatchKeySet, (_PYTHON, _of_torch.DispatchKey.PythonTLSSnapshot, _KEY))
)


def unwatched() -> AbstractContextManager[None]:
    """What runs within is shown to no engine, no dispatch mode and no subclass."""
    return cast(AbstractContextManager[None], _of_torch._ExcludeDispatchKeyGuard(_HIDDEN))


def watcher_here() -> Watcher | None:
    """Who watches this thread."""
    found = _watcher(_NAME) if _of_torch._is_key_in_tls(_NAME) else None
    return found if found is not None and found.watching else None


@final
class Watcher:
    """Shows every op of a thread to the handlers of one engine, by the `id` of the op, from `begin` to `end`; `learn`
    makes the handler of an op that has none."""

    __slots__ = ("handlers", "learn", "turn", "watching", "within")

    def __init__(self, handlers: dict[int, Handler], learn: Callable[[Any], Handler]) -> None:
        self.handlers = handlers
        self.learn = learn
        self.watching = False
        self.turn = threading.RLock()
        """Of the thread whose op is under way. See NOTE [Several threads]."""
        self.within = 0
        """That thread's identifier: what arrives from it meanwhile is a part of its op."""

    def begin(self) -> None:
        """In the thread whose ops are meant."""
        with _registering:
            registered, made_of_ops = _register(), torch._ops._higher_order_ops
            if registered.higher != len(made_of_ops):  # the ops that they are made of arrive
                for op in made_of_ops.values():
                    if cast(Any, op).non_fallthrough_keys.has(_KEY):
                        cast(Any, op).fallthrough(_KEY)
                registered.higher = len(made_of_ops)
        _kept_by.add(threading.get_native_id())
        _of_torch._stash_obj_in_tls(_NAME, self)
        self.watching = True
        _include(_KEY, True)

    @contextlib.contextmanager
    def also_here(self) -> Iterator[None]:
        """What runs within, in another thread, is shown to the handlers too, as long as the step is watched."""
        _kept_by.add(threading.get_native_id())
        _of_torch._stash_obj_in_tls(_NAME, self)
        _include(_KEY, True)
        try:
            yield
        finally:
            _include(_KEY, False)
            _of_torch._stash_obj_in_tls(_NAME, None)

    def end(self) -> None:
        """A thread that still includes the key leaves with its next op. Calling it again does what was not done."""
        with self.turn:
            self.watching = False
        if _of_torch._is_key_in_tls(_NAME) and _watcher(_NAME) is self:
            _include(_KEY, False)
            _of_torch._stash_obj_in_tls(_NAME, None)

    def disarm(self) -> None:
        """In a forked child, which may be in the middle of an op: let everything through."""
        self.watching, self.turn, self.within = False, threading.RLock(), 0
        _include(_KEY, False)


@atexit.register
def _outlive_threads() -> None:
    """A thread lets go of what it keeps after Python has seen it end, and wants the GIL for that. Where it waits for it
    while the interpreter goes, the C++ library aborts the process."""
    running = {threading.get_native_id(), *(thread.native_id for thread in threading.enumerate())}
    ending = _kept_by - running
    for _ in range(1000):
        ending = {thread for thread in ending if os.path.exists(f"/proc/self/task/{thread}")}
        if not ending:
            break
        time.sleep(0.001)


def _arrive(op: Any, /, *args: Any, **kwargs: Any) -> Any:
    watcher = _watcher(_NAME)
    if watcher is None or not watcher.watching:
        return _unwatched(op, args, kwargs)
    thread = get_ident()
    if watcher.within == thread or _is_excluded(_PYTHON):
        return _below(op, args, kwargs)
    with watcher.turn:
        if not watcher.watching:  # the step ended in the meantime
            return _unwatched(op, args, kwargs)
        try:
            watcher.within = thread
            _include(_KEY, False)
            return (watcher.handlers.get(id(op)) or watcher.learn(op))(None, op, (), args, kwargs)
        finally:
            _include(_KEY, watcher.watching)
            watcher.within = 0


def _unwatched(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    _include(_KEY, False)
    return op._op(*args, **kwargs)


def _below(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    try:
        _include(_KEY, False)
        return op._op(*args, **kwargs)
    finally:
        _include(_KEY, True)


_SPACES: Final = ("aten", "prims")


def serve_first(serve: Callable[[str], object]) -> None:
    """From now on ops of torch's own come to native code first, which `serve` puts in front of an op of that name. What
    it does not take it sends to where the handlers in Python stand from then on. Asked again it does nothing."""
    with _registering:
        registered = _register()
        if not registered.served:
            registered.served = True
            behind = [_library(space) for space in _SPACES]
            for full, op in registered.ops.items():
                library = behind[_SPACES.index(full.partition("::")[0])]
                cast(Any, library).m.impl(full, _BEHIND, functools.partial(_arrive, op), False)
            for library in registered.one_by_one:
                library._destroy()  # type: ignore[no-untyped-call]
            registered.one_by_one = behind
            for full in registered.ops:
                serve(full)


def _library(space: str) -> torch.library.Library:
    return torch.library.Library(space, "IMPL")  # type: ignore[no-untyped-call]


@final
class _Registered:
    def __init__(self) -> None:
        self.always = {space: _library(space) for space in ("_", *_SPACES)}
        self.ops: dict[str, Any] = {}
        """By their names in full: what native code may come before."""
        self.one_by_one = [_library(space) for space in _SPACES]
        self.served = False
        self.higher = 0
        """Ops of a higher order that fall through."""


@functools.cache
def _register() -> _Registered:
    """What is registered lasts as long as the process: nothing comes to it unless a thread includes the key.

    torch's own ops are registered one by one besides. To a fallback torch cannot come where a mode is open and hidden,
    which is how fake tensors run their kernels.
    """
    registered = _Registered()
    libraries = registered.always
    libraries["_"].fallback(_arrive, "Fake")  # type: ignore[no-untyped-call]
    for full in _of_torch._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        library = libraries.get(namespace)
        if library is None or full in HOST_READS:  # these have a kernel of their own there
            continue
        if full in ("aten::detach", "aten::alias") or _has_parts(full):
            # Two views that touch no storage: torch makes parameters of what they return, which must be new to Python.
            # And what autograd takes apart before it comes here, which without autograd (`inference_mode`) nobody does:
            # run as one op it would choose its parts by settings that are others when it is run again.
            library.impl(name, torch.library.fallthrough_kernel, "Fake")  # type: ignore[no-untyped-call]
        else:
            packet, _, overload = name.partition(".")
            op = registered.ops[full] = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
            library = registered.one_by_one[_SPACES.index(namespace)]
            cast(Any, library).m.impl(full, "Fake", functools.partial(_arrive, op), False)
    return registered


def _has_parts(full: str) -> bool:
    has_kernel = _of_torch._dispatch_has_kernel_for_dispatch_key
    return has_kernel(full, "CompositeImplicitAutograd") and not (has_kernel(full, "CPU") or has_kernel(full, "CUDA"))
