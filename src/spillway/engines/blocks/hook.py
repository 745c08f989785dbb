"""What stands in front of the forward of a block, in the module's own `__dict__`."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn, Protocol, final

import torch
from torch import nn
from torch._compile import _disable_dynamo

from spillway.errors import ModelError

_NAME: Final = "forward"
_OF_FUNCTIONS: Final = frozenset(
    f"__{name}__" for name in ("code", "globals", "defaults", "kwdefaults", "closure", "annotations")
)
"""What exporters read of a forward. Not `__func__`: who takes that leaves out what stands in front."""
_SCRIPTS: Final = "torch._jit_internal"
"""The module of TorchScript that reads a function before it is compiled; no tracer or exporter calls it."""


def refuse_script() -> NoReturn:
    """TorchScript is about to compile what stands in front of a module, or was told of its calls."""
    raise ModelError(
        "A model that is managed has parts of Spillway in it, which torch.jit.script cannot compile: script it before "
        "it is managed or when its session has ended; torch.jit.trace and torch.export take it as it is, between steps."
    )


class Unscripted:
    """Hooks of modules."""

    __name__ = "spillway"

    @property
    def __globals__(self) -> Any:
        """Asked by TorchScript alone."""
        refuse_script()


class Bypassed(Protocol):
    """Whoever has put a hook there."""

    @property
    def bypassed(self) -> bool:
        """Whether it does nothing at the moment."""


@final
class OwnForward:
    """The forward of a module behind what is about to stand in front of it.

    What its class has may be another at every call: a class is patched, or a module given another one, between steps.
    """

    def __init__(self, module: nn.Module, instead: Callable[..., Any] | None = None) -> None:
        self._module = module
        self._found: Callable[..., Any] = module.forward if instead is None else instead
        self._of_class = True
        self._of_class = vars(module).get(_NAME) is None and self._found == self.now()
        self.declared: Any = type(module).forward
        self.bound = self.now()
        """What `now` gives as long as the class of the module has the same: on the way of every call, without one."""

    def now(self) -> Callable[..., Any]:
        """What a call of the module would call."""
        kind = type(self._module)
        for one in kind.__mro__ if self._of_class else ():
            own: Any = vars(one).get(_NAME)
            if own is not None:
                return own.__get__(self._module, kind) if hasattr(own, "__get__") else own  # type: ignore[no-any-return]
        return self._found


@final
class Hook:
    """Called in place of `module.forward`; a copy of the module, by whatever means, has a plain forward again.

    A closure would fail to pickle, and a deep copy of it would run the weights of the original without a word.

    Args:
        owner: Says whether a compiler may leave `instead` out at the moment, as between steps.

    Raises TypeError if the module has no forward of its own to stand in front of.
    """

    def __init__(self, module: nn.Module, instead: Callable[..., Any], owner: Bypassed) -> None:
        self.module = module
        self._owner = owner
        self.patched = vars(module).get(_NAME)
        """A forward that somebody else had put there; None if there was none."""
        self._own = OwnForward(module)
        self._instead = instead
        original = self.original
        self.__name__ = getattr(original, "__name__", _NAME)
        self.__doc__ = original.__doc__
        with contextlib.suppress(TypeError, ValueError):  # some callables have none
            self.__signature__ = inspect.signature(original)

    @property
    def original(self) -> Callable[..., Any]:
        """What would be called if nothing stood here."""
        return self._own.now()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what is compiled is good for as long as `bypassed` stays as it is
            if self._owner.bypassed:
                return self.original(*args, **kwargs)
            _refuse(type(self.module).__name__)
        return self._instead(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What Accelerate asks for when it takes its own wrappers off a model, also from below this one."""
        return self.original

    def __getattr__(self, name: str) -> Any:
        if name == "__globals__" and sys._getframe(1).f_globals.get("__name__") == _SCRIPTS:
            refuse_script()
        if name in _OF_FUNCTIONS:
            return getattr(self.original, name)
        raise AttributeError(name)

    def install(self) -> None:
        vars(self.module)[_NAME] = self

    def remove(self) -> None:
        """Leave everything as it was found."""
        if vars(self.module).get(_NAME) is not self:
            return  # somebody stands in front of this one, and calls it; see `BlockEngine.close`
        if self.patched is None:
            del vars(self.module)[_NAME]
        else:
            vars(self.module)[_NAME] = self.patched

    @contextlib.contextmanager
    def back(self) -> Iterator[None]:
        """Stand there for a while, also after `remove`."""
        found = vars(self.module).get(_NAME)
        self.install()
        try:
            yield
        finally:
            if found is None:
                del vars(self.module)[_NAME]
            else:
                vars(self.module)[_NAME] = found

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # While a module is unpickled its `__dict__` is still empty: what `getattr` finds is the class's forward.
        return (_itself, (self.patched,)) if self.patched is not None else (getattr, (self.module, _NAME))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.patched is not None:
            return copy.deepcopy(self.patched, memo)
        twin = memo.get(id(self.module))
        if twin is None:  # the hook alone is copied, and the module with it
            return copy.deepcopy(self.module, memo).forward
        return types.MethodType(type(self.module).forward, twin)


@_disable_dynamo
def _refuse(name: str) -> None:
    """A compiler does not look inside: what it makes of a hook calls this when it runs."""
    raise ModelError(
        f"{name} is managed, and a compiler that takes it apart would leave out what is done around its blocks; "
        "compile the blocks one by one (block.compile()) before they are managed, or do not compile what contains them."
    )


def _itself(value: Any) -> Any:
    return value
