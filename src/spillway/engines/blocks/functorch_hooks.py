"""Hooks for saved tensors that let `torch.func` work inside, and around."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, cast, final

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import graph
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

_autograd: Final[Any] = torch._C._autograd
_MINE: Final = __name__.rpartition(".")[0]
_VMAP: Final = cast(Any, torch._C)._dispatch_key_parse("VmapMode")
"""By which `is_grads_batched` refuses random numbers."""


@final
class Packing(saved_tensors_hooks):
    """Around what a block, or a model, runs.

    `torch.func.grad` and its kin refuse to run where there are hooks. What they save is wanted at once, by the gradient
    that they are for: inside them our hooks are passed by. With two threads in blocks at a time torch's refusal may
    come back for one of them.
    """

    def __enter__(self) -> None:
        super().__enter__()
        self._found = graph.disable_saved_tensors_hooks
        cast(Any, graph).disable_saved_tensors_hooks = _pass_ours_by

    def __exit__(self, *exception: object) -> None:
        cast(Any, graph).disable_saved_tensors_hooks = self._found
        super().__exit__(*exception)


def under_transforms() -> bool:
    """Whether transforms of `torch.func`, or `is_grads_batched`, stand around what runs, or hooks are refused."""
    included = cast(Any, torch._C)._dispatch_tls_is_dispatch_key_included(_VMAP)
    return included or torch._C._functorch.peek_interpreter_stack() is not None or _refusal() is not None


@contextlib.contextmanager
def outside_of_transforms() -> Iterator[None]:
    """Around what was outside of them when it first ran, and runs again in a backward that is not."""
    hidden, refused = torch._C.DispatchKeySet(_VMAP), _refusal()
    with cast(Any, torch._C)._ExcludeDispatchKeyGuard(hidden), temporarily_clear_interpreter_stack():
        try:
            _autograd._saved_tensors_hooks_enable()
            yield
        finally:
            if refused is not None:
                _autograd._saved_tensors_hooks_disable(refused, False)


def _refusal() -> str | None:
    """With which hooks are refused, if they are."""
    refusal: str | None = _autograd._saved_tensors_hooks_get_disabled_error_message()
    return refusal


@contextlib.contextmanager
def _pass_ours_by(message: str) -> Iterator[None]:
    """In place of `disable_saved_tensors_hooks`, which fails where there are any."""
    top = _autograd._top_saved_tensors_default_hooks(True)
    if top is None or not type(getattr(top[0], "__self__", None)).__module__.startswith(_MINE):
        with disable_saved_tensors_hooks(message):
            yield
        return
    before = _refusal()
    passed_by = _autograd._saved_tensors_hooks_set_tracing(True)
    _autograd._saved_tensors_hooks_disable(message, False)
    try:
        yield
    finally:
        _autograd._saved_tensors_hooks_set_tracing(passed_by)
        if before is None:
            _autograd._saved_tensors_hooks_enable()
        else:
            _autograd._saved_tensors_hooks_disable(before, False)
