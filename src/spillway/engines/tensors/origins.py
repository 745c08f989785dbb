"""What made each storage of a step: the op, the module whose forward asked for it, and the line of the user's code.

Only steps that keep a timeline ask. Nothing about the model changes, and no hook is set: a look at the stack tells the
module whose forward runs and the innermost line that is neither torch's, nor Spillway's, nor the standard library's. In
the backward the stack ends in `loss.backward()`; there the node that runs tells. Autograd numbers nodes in the order in
which the forward makes them, so the number that comes next when an op arrives says whose node was the last.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, cast, final

import torch

from spillway.ir.reading import fits_on_a_line
from spillway.ir.timeline import Origin

_CALL: Final = torch.nn.Module._call_impl.__code__
_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OURS: Final = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, _PACKAGE + os.sep)
_EXAMPLES: Final = os.path.join(_PACKAGE, "workloads") + os.sep
"""What stands in for a user's code where Spillway trains something itself."""
_STANDARD: Final = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))
_INSTALLED: Final = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
"""Folders below the standard library's that are not of it."""


class Asked(NamedTuple):
    """Who asked for an op."""

    module: torch.nn.Module | None
    line: str


_NOBODY: Final = Asked(None, "")


@final
class Origins:
    """Begins with a step; is told of every op, and of every storage that one creates."""

    def __init__(self) -> None:
        self._op = ""
        self._asked: Asked | None = None
        self._numbers: list[int] = []
        self._whose: list[Asked] = []
        self._made: dict[int, tuple[str, Asked]] = {}
        self._places: dict[str, str] = {}

    def op(self, name: str) -> None:
        """An op is about to run."""
        self._op, self._asked = name, None
        if torch.is_grad_enabled():  # in the backward: a checkpoint runs a forward again, or that has a graph itself
            self._asked = self._look()
            if self._asked.module is None:
                self._asked = self._in_backward() or self._asked
            number = torch._C._autograd._get_sequence_nr()
            if not self._numbers or self._numbers[-1] < number:  # else it made no node, or is in another thread
                self._numbers.append(number)
                self._whose.append(self._asked)

    def created(self, storage: int) -> None:
        """By the op that was told of last."""
        if self._asked is None:
            self._asked = self._in_backward() or self._look()
        self._made[storage] = self._op, self._asked

    def found(self, storage: int) -> None:
        """What the op that was told of last is the first to use was there before."""
        self._made[storage] = "", self._made.pop(storage, ("", _NOBODY))[1]

    def told(
        self, names: Mapping[int, str], modules: Mapping[int, str], numbers: Iterable[int]
    ) -> Iterator[Origin]:  # fmt: skip
        """What is known of these storages: `names` of parameters and what belongs to them, by the number of the
        storage, and qualified names of `modules`, by their `id`."""
        for number in numbers:
            op, asked = self._made.get(number, ("", _NOBODY))
            module = "" if asked.module is None else modules.get(id(asked.module)) or type(asked.module).__name__
            texts = [_plain(text) for text in (names.get(number, ""), op, module, asked.line)]
            if any(texts):
                yield Origin(storage=number, **dict(zip(("name", "op", "module", "line"), texts, strict=True)))

    def _in_backward(self) -> Asked | None:
        """Who asked for the op whose node runs; None outside of a backward, and of what accumulates gradients."""
        node: Any = torch._C._current_autograd_node()
        if node is None or getattr(node, "variable", None) is not None or not self._numbers:
            return None
        place = bisect_left(self._numbers, node._sequence_nr() + 1)
        return self._whose[place] if place < len(self._whose) else None

    def _look(self) -> Asked:
        frame, module, line = sys._getframe(2), None, ""
        while frame is not None and not (line and module is not None):
            code = frame.f_code
            if code is _CALL and module is None:
                there = frame.f_locals
                module = there["self"]
                if type(there) is dict:  # before Python 3.13 a copy, which would hold what the call was given
                    there.clear()
            elif not line and (place := self._place(code.co_filename)):
                line = f"{place}:{frame.f_lineno}"
            frame = cast(Any, frame.f_back)
        return Asked(module, line)

    def _place(self, file: str) -> str:
        """A file as people would name it; empty if its lines tell nobody anything."""
        place = self._places.get(file)
        if place is None:
            place = self._places[file] = "" if _is_known_to_nobody(file) else _shortened(file)
        return place


def modules_by_id(models: Iterable[torch.nn.Module]) -> dict[int, str]:
    """Qualified names, by the `id` of the module."""
    return {id(module): name for model in models for name, module in model.named_modules()}


def named_tensors(
    models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[str, torch.Tensor]]:  # fmt: skip
    """Parameters, their gradients, buffers and optimizer state by the names that the models give them."""
    names = dict[torch.Tensor, str]()
    for model in models:
        for name, parameter in model.named_parameters():
            names[parameter] = name
            yield name, parameter
            if parameter.grad is not None:
                yield name, parameter.grad
        yield from model.named_buffers()
    for optimizer in optimizers:
        for tensor, state in optimizer.state.items():
            if isinstance(state, Mapping):
                owner = names.get(tensor, "")
                yield from ((owner, one) for one in state.values() if isinstance(one, torch.Tensor))


def line_of_forward(module: torch.nn.Module) -> str:
    """Where a module's class says what its forward is, `model.py:20`; empty of torch's own."""
    code = getattr(type(module).forward, "__code__", None)
    if code is None or _is_known_to_nobody(code.co_filename):
        return ""
    return _plain(f"{_shortened(code.co_filename)}:{code.co_firstlineno}")


def _is_known_to_nobody(file: str) -> bool:
    """Whether it is a part of Python, torch or Spillway, or was made while the program runs."""
    if file.startswith("<"):
        return not file.startswith(("<stdin>", "<ipython-input"))  # what somebody types
    file = os.path.abspath(file)
    standard = file.startswith(_STANDARD) and not any(folder in file for folder in _INSTALLED)
    return standard or (file.startswith(_OURS) and not file.startswith(_EXAMPLES))


def _shortened(file: str) -> str:
    """Below the folder that it was imported from, or below the working directory."""
    if file.startswith("<"):
        return file
    file = os.path.abspath(file)
    folders = {os.path.join(os.path.abspath(folder), "") for folder in (*sys.path, "")}
    return file[max((len(folder) for folder in folders if file.startswith(folder)), default=0) :]


def _plain(text: str) -> str:
    return text if fits_on_a_line(text) else ascii(text)
