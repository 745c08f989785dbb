"""Which module an op belongs to: the one whose `forward` runs; in the backward the one whose forward made the node.

Hooks are global, so that nothing about the model changes. Autograd numbers the nodes of its graph in the order in which
the forward makes them; noting the next number whenever the module changes tells whose node every number is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_next_node = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node


@final
class Modules:
    """The names of modules, and whose turn it is."""

    def __init__(self, models: Iterable[torch.nn.Module] = ()) -> None:
        self._names: dict[int, str] = {}
        self._owners: dict[int, str] = {}  # of parameters
        self._running: list[str] = [""]
        self._since: list[int] = []
        self._whose: list[str] = []
        for model in models:
            self._learn(model)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, every call of a module is noted."""
        handles = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            del self._running[1:]

    def of_op(self, *, backward: bool) -> str:
        """The name of the module that the op that runs now belongs to; empty if there is none."""
        if not backward or len(self._running) > 1:  # a forward within the backward is run again by a checkpoint
            return self._running[-1]
        node: Any = _current_node()
        if node is None:
            return ""
        variable = getattr(node, "variable", None)  # of what adds up a parameter's gradient
        if variable is not None:
            return self._owners.get(id(variable), "")
        place = bisect_right(self._since, node._sequence_nr())
        return self._whose[place - 1] if place else ""

    def _learn(self, model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            self._names.setdefault(id(module), name)
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), name)

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if id(module) not in self._names:
            self._learn(module)
        self._running.append(self._names[id(module)])
        self._note()

    def _leave(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if len(self._running) > 1:
            self._running.pop()
        self._note()

    def _note(self) -> None:
        number = _next_node()
        if self._since and self._since[-1] > number:
            return  # another thread, which counts by itself
        self._since.append(number)
        self._whose.append(self._running[-1])
