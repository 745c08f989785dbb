"""Copies of the user's model, and optimizers like the user's, that run on tensors without content: what they do tells
what the real ones will need. No hook, no context, no mode and no random stream of the user's hears of it.
"""

from __future__ import annotations

import copy
import functools
import random
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, cast, final

import numpy
import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.nn.modules import module as _modules
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from spillway.engines.tensors.torch_compile import asked_before
from spillway.internals.locks import renew_in_children
from spillway.internals.private import dispatch_modes, function_modes, only_dispatch_modes, only_function_modes
from spillway.internals.python_warnings import unwarned

_autograd: Final[Any] = torch._C._autograd


@contextmanager
def unseen() -> Iterator[None]:
    """Around such runs. Global random streams end where they began, nobody is warned, and what the user has opened
    (modes, hooks on saved tensors, a profiler, anomaly detection) or registered for all modules is told nothing.

    Anomaly detection is global by nature: other threads are without it meanwhile.
    """
    with ExitStack() as stack:
        for others in (_disable_current_modes, _modes_unseen, _nothing_profiled, _nothing_cached, _nothing_packed):
            stack.enter_context(others())
        stack.enter_context(asked_before(lambda: False))
        stack.enter_context(streams_kept())
        # With its checks a backward would ask for numbers that are not there.
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(_unheard_in(vars(_modules)[name] for name in _OF_ALL_MODULES))
        stack.enter_context(nobody_warned())
        yield


@contextmanager
def nobody_warned() -> Iterator[None]:
    """Around what the user's code does for us alone: what is said once is still to be said, by Python and by torch."""
    with _warned.lock:
        _warned.always = _warned.always if _warned.inside else torch.is_warn_always_enabled()
        _warned.inside += 1
        torch.set_warn_always(True)
    try:
        with unwarned():
            yield
    finally:
        with _warned.lock:
            _warned.inside -= 1
            torch.set_warn_always(_warned.always or _warned.inside > 0)


@final
class _Warned:
    """How many are inside of the above, in whatever threads, and whether torch warned always before the first."""

    def __init__(self) -> None:
        self.inside, self.always = 0, False
        self.lock = threading.RLock()
        renew_in_children(self, "lock")


_warned: Final = _Warned()


@contextmanager
def streams_kept() -> Iterator[None]:
    """Around what is built and run for us alone: the global random streams end where they began."""
    states = random.getstate(), numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])


_OF_ALL_MODULES: Final = (
    "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks",
    "_global_module_registration_hooks", "_global_parameter_registration_hooks", "_global_buffer_registration_hooks",
)  # fmt: skip
"""Copies are called without hooks; what their forward makes, or finds in a closure, is not."""
_AROUND_FORWARD: Final = ("_forward_pre_hooks", "_forward_hooks")
_OF_ONE_MODULE: Final = (*_AROUND_FORWARD, "_backward_pre_hooks", "_backward_hooks")
TENSOR_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where a tensor has those that are called with its gradient."""


@contextmanager
def _unheard_in(registered: Iterable[dict[int, Any] | None]) -> Iterator[None]:
    """Hooks, by their numbers, are not called from this thread; other threads go on calling them."""
    thread = threading.get_ident()

    def elsewhere(hook: Callable[..., Any]) -> Callable[..., Any]:
        def heard_elsewhere(*args: Any, **kwargs: Any) -> Any:
            return None if threading.get_ident() == thread else hook(*args, **kwargs)

        cast(Any, heard_elsewhere).instead_of = hook
        return heard_elsewhere

    quiet: list[tuple[dict[int, Any], int, Any, Any]] = []
    try:
        for hooks in registered:
            for number, hook in list((hooks or {}).items()):
                quiet.append((cast(Any, hooks), number, hook, elsewhere(hook)))
        for hooks, number, _, instead in quiet:
            hooks[number] = instead
        yield
    finally:
        for hooks, number, hook, instead in reversed(quiet):
            if hooks.get(number) is instead:  # else it was removed meanwhile
                hooks[number] = hook


@contextmanager
def _nothing_packed() -> Iterator[None]:
    hooks: list[Any] = []
    try:
        while (top := _autograd._top_saved_tensors_default_hooks(True)) is not None:
            hooks.append(top)
            _autograd._pop_saved_tensors_default_hooks()
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def _nothing_profiled() -> Iterator[None]:
    _autograd._enable_record_function(False)
    try:
        yield
    finally:
        _autograd._enable_record_function(True)


@contextmanager
def _nothing_cached() -> Iterator[None]:
    """What autocast has cast and kept for the user's step is real, and what is cast here is not."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _modes_unseen() -> Iterator[None]:
    # These say where tensors are made.
    devices = [mode for mode in function_modes() if isinstance(mode, DeviceContext)]
    with only_function_modes(devices), only_dispatch_modes(()):
        yield


def without_content(model: torch.nn.Module, fake: FakeTensorMode) -> torch.nn.Module:
    """A copy of the model on fake tensors, whose modules are called without hooks, be they their own or global.

    What a forward does to a model (counters, buffers) must not happen to the user's. The addresses of these tensors are
    null, and whoever asks for one gets an error.
    """
    cast(Any, fake)._allow_unsafe_data_ptr_access = False
    with FakeCopyMode(fake):
        twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(vars(module).get("forward"), types.FunctionType):  # it would run the user's model
            del vars(module)["forward"]
        vars(module)["_call_impl"] = functools.partial(_call, module)
    return twin


@contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """A closure may hold one of the model's modules, which then has no copy: its hooks are told nothing, and afterwards
    its gradients are as before."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    registered = [vars(module)[name] for module in model.modules() for name in _OF_ONE_MODULE]
    registered += [getattr(parameter, name) for parameter in parameters for name in TENSOR_HOOKS]
    try:
        with _unheard_in(registered):
            yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def others_hear(model: torch.nn.Module) -> bool:
    """Whether somebody stands around a forward of the model who does not stand around that of a copy, so that what he
    makes is not seen: a mode, or a hook other than torch's and Spillway's own."""
    # That of `allow_mutation_on_saved_tensors` is foreseen.
    if any(type(mode).__module__ != torch.autograd.graph.__name__ for mode in dispatch_modes()):
        return True
    if not all(isinstance(mode, DeviceContext) for mode in function_modes()):
        return True
    hooks = [hook for part in model.modules() for name in _AROUND_FORWARD for hook in vars(part)[name].values()]
    return any(not (getattr(hook, "__module__", None) or "").startswith(("torch.", "spillway.")) for hook in hooks)


def _call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


def results_of(out: Any) -> list[torch.Tensor]:
    """What a model has made."""
    return [one for one in tree_leaves(dict(out) if hasattr(out, "items") else out) if isinstance(one, torch.Tensor)]


def usual_loss(results: list[torch.Tensor]) -> torch.Tensor:
    """The model's own, or one that needs what the usual ones do: twice the result that is kept, and a gradient of its
    size."""
    ends = [one for one in results if one.requires_grad]
    own = [one for one in ends if one.numel() == 1]
    sizes = [(one.abs() if one.is_complex() else one).float() for one in own or ends]
    return torch.stack([one.sum() if own else one.square().mean() for one in sizes]).sum()


def bare_step(optimizer: torch.optim.Optimizer) -> None:
    """The step of an optimizer's class without the hooks that stand around it, which may be global."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)
