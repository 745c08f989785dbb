"""How models are called in a step, without their bytes: a refusal has to tell what the step would have needed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, final

import torch

from spillway.engines.blocks.containers import rebuilt
from spillway.engines.blocks.hook import Unscripted
from spillway.engines.blocks.iterators import CannotCopyError
from spillway.engines.tensors.probe import Called, Like
from spillway.session.inputs import signature_of

MOST: Final = 8
"""Calls that are written down."""


@final
class Calls(Unscripted):
    """Hooks on models for the time of a step. Copies of a model, by whatever means, have none that tells anybody."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], Called] = {}
        self._handles: list[Any] = []

    def begin(self, models: Sequence[torch.nn.Module]) -> None:
        """Write down from here on; how the modules of TorchScript are called is not asked."""
        hooked = [model for model in models if not isinstance(model, torch.jit.ScriptModule)]
        self._handles += [model.register_forward_pre_hook(self, with_kwargs=True) for model in hooked]

    def end(self) -> None:
        """Hear of no more calls. Calling it again does nothing."""
        while self._handles:
            self._handles.pop().remove()

    def abandon(self, *ends: Callable[[], None]) -> None:
        """The session of the step is gone: these are called, whatever becomes of those before."""
        with contextlib.ExitStack() as stack:
            for end in reversed(ends):
                stack.callback(end)
            self.end()

    @property
    def found(self) -> list[Called]:
        """Those of different sizes."""
        return list(self._found.values())

    def __call__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if torch.compiler.is_compiling():  # dynamo, which looks into a hook as into the model
            return
        if kwargs is None:  # removed by a hook of the same call, which ended the step
            return
        with torch._C.DisableTorchFunction():  # nothing of it is news to the user's modes and tensor classes
            key = id(model), signature_of((args, kwargs))
            if key in self._found or len(self._found) >= MOST:
                return
            try:
                frozen = rebuilt((args, kwargs), _like)
            except (CannotCopyError, RuntimeError, TypeError):  # or tensors without strides
                return
        again = partial(rebuilt, frozen, kind=Like)
        self._found[key] = Called(weakref.ref(model), again, torch.is_grad_enabled())

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_unheard,)


def _unheard(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    return None


def _like(tensor: torch.Tensor) -> Any:
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    content = weakref.ref(tensor) if whole else _gone
    return Like(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, content)


def _gone() -> None:
    return None
