"""Hooks for saved tensors that let `torch.func` work inside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, cast, final

import torch
from torch.autograd import graph
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

_autograd: Final[Any] = torch._C._autograd
_MINE: Final = __name__.rpartition(".")[0]


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


@contextlib.contextmanager
def _pass_ours_by(message: str) -> Iterator[None]:
    """In place of `disable_saved_tensors_hooks`, which fails where there are any."""
    top = _autograd._top_saved_tensors_default_hooks(True)
    if top is None or not type(getattr(top[0], "__self__", None)).__module__.startswith(_MINE):
        with disable_saved_tensors_hooks(message):
            yield
        return
    before = _autograd._saved_tensors_hooks_get_disabled_error_message()
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
