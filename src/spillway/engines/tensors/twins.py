"""Copies of the user's model, and optimizers like the user's, that run on tensors without content: what they do tells
what the real ones will need. No hook, no mode and no random stream of the user's hears of it.
"""

from __future__ import annotations

import copy
import functools
import random
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy
import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from spillway.engines.tensors.private import function_modes


@contextmanager
def unseen() -> Iterator[None]:
    """Around such runs. Global random streams end where they began, and nobody is warned."""
    streams = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        with warnings.catch_warnings(), _disable_current_modes(), _functions_unseen(), _nothing_cached():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(streams[0])
        numpy.random.set_state(streams[1])
        torch.set_rng_state(streams[2])


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
def _functions_unseen() -> Iterator[None]:
    before = function_modes()
    _stand([mode for mode in before if isinstance(mode, DeviceContext)])  # which say where tensors are made
    try:
        yield
    finally:
        _stand(before)


def _stand(modes: list[Any]) -> None:
    for _ in function_modes():
        cast(Any, _pop_mode)()
    for mode in modes:
        cast(Any, _push_mode)(mode)


def without_content(model: torch.nn.Module, fake: FakeTensorMode) -> torch.nn.Module:
    """A copy of the model on fake tensors, whose modules are called without hooks, be they their own or global.

    What a forward does to a model (counters, buffers) must not happen to the user's.
    """
    with FakeCopyMode(fake):
        twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(vars(module).get("forward"), types.FunctionType):  # it would run the user's model
            del vars(module)["forward"]
        vars(module)["_call_impl"] = functools.partial(_call, module)
    return twin


@contextmanager
def gradients_kept(model: torch.nn.Module) -> Iterator[None]:
    """A closure may hold one of the model's modules, which then has no copy: afterwards its gradients are as before."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


def bare_step(optimizer: torch.optim.Optimizer) -> None:
    """The step of an optimizer's class without the hooks that stand around it, which may be global."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)
