"""A part of a block that counts, iterates or draws somewhere, and computes by that."""

from __future__ import annotations

import array
import collections
import copy
import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor

from tests.cpu import block_elsewhere as elsewhere
from tests.cpu.block_elsewhere import Lower, Stats, by_attribute, by_default, drawn, drawn_bounded, late
from tests.cpu.block_elsewhere import count as count_elsewhere
from tests.cpu.block_parts import Box, Part


def _attribute(part: Any) -> int:
    elsewhere.attribute += 1
    return elsewhere.attribute


def _imported_inside(part: Any) -> int:
    from tests.cpu import block_elsewhere as again

    again.attribute += 1
    return again.attribute


def _by_name(part: Any) -> int:
    module = sys.modules["tests.cpu.block_elsewhere"]
    setattr(module, "attribute", module.attribute + 1)  # noqa: B010  # by a string
    return int(module.attribute)


def _class(part: Any) -> int:
    Stats.n += 1
    return Stats.n


def _by_object(part: Any) -> int:
    elsewhere.by_object[part] = elsewhere.by_object.get(part, 0) + 1
    return elsewhere.by_object[part]


def _local(part: Any) -> int:
    elsewhere.local.n = getattr(elsewhere.local, "n", 0) + 1
    return int(elsewhere.local.n)


def _variable(part: Any) -> int:
    value = elsewhere.variable.get()
    elsewhere.variable.set(value + 1)
    return value


def _bytes(part: Any) -> int:
    part.held[0] = (part.held[0] + 1) % 100
    return int(part.held[0])


def _counter(part: Any) -> int:
    part.held["n"] += 1
    return int(part.held["n"])


def _ordered(part: Any) -> int:
    first = next(iter(part.held))
    part.held.move_to_end(first)
    return int(part.held[first])


def _objects(part: Any) -> int:
    part.held[0].value += 1
    part.held[1] += 1
    return int(part.held[0].value + part.held[1])


def _grows(part: Any) -> int:
    part.held[0][0] += 1
    part.held.append(1)
    return int(part.held[0][0])


def _prints(part: Any) -> int:
    print("forward of", type(part).__name__)
    print("and more", file=sys.stderr)
    return 0


def _logs(part: Any) -> int:
    elsewhere.log.info("a forward")
    return 0


def _generator() -> Iterator[int]:
    total = 0
    while True:
        total += 1
        yield total


def _next(part: Any) -> int:
    item = next(part.held, 3)
    return sum(item) if isinstance(item, tuple) else int(item)


def _longer(part: Any) -> int:
    part.held.resize_(len(part.held) + 1)[-1] = len(part.held)
    return int(part.held.sum())


def _turned(part: Any) -> int:
    return int(part.held.t_()[0, 1].imag) if part.held.is_complex() else int(part.held.t_()[0, 1])


def _set_elsewhere(part: Any) -> int:
    return int(part.held.set_(part.held.repeat(2).add_(1))[0])


def _other_data(part: Any) -> int:
    part.held.data = part.held.repeat(2) + 1
    return len(part.held)


def _another_place(part: Any) -> int:
    held = part.held[0] if isinstance(part.held, list) else part.held
    held.data = held + 1
    return int(held)


def _set_to_another(part: Any) -> int:
    return int(part.held.set_(part.held + 1))


def _swapped(part: Any) -> int:
    torch.utils.swap_tensors(part.held, torch.nn.Parameter(part.held.detach() + 1))
    return int(part.held)


def _attribute_of_tensor(part: Any) -> int:
    part.held.n = getattr(part.held, "n", 0) + 1
    return int(part.held.n)


class _Subclass(torch.nn.Parameter):
    pass


ELSEWHERE: dict[str, Callable[[Any], int]] = {
    "global of another module": lambda part: elsewhere.count(),
    "imported function": lambda part: count_elsewhere(),
    "dict of another module": lambda part: elsewhere.count_in_box(),
    "iterator of another module": lambda part: elsewhere.turn(),
    "attribute of a module": _attribute,
    "imported inside": _imported_inside,
    "by name": _by_name,
    "not there yet": lambda part: late(),
    "class that is named": _class,
    "class method": lambda part: Stats.count(),
    "class method of a subclass": lambda part: Lower.count(),
    "static method": lambda part: Stats.append(),
    "property": lambda part: Stats().so_far,
    "attribute of a function": lambda part: by_attribute(),
    "decorated": lambda part: elsewhere.decorated(),
    "default": lambda part: by_default(),
    "cache": lambda part: drawn(part.turn % 4),
    "bounded cache": lambda part: drawn_bounded(part.turn % 3),
    "by object": _by_object,
    "thread local": _local,
    "context variable": _variable,
    "prints": _prints,
    "logs": _logs,
}
HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], int]]] = {
    "cycle": (lambda: itertools.cycle([1, 2, 3]), _next),
    "count": (lambda: [itertools.count(1)], lambda part: next(part.held[0])),
    "list iterator": (lambda: iter(list(range(60))), _next),
    "set iterator": (lambda: Box(iter(set(range(60)))), lambda part: next(part.held.value, 3)),
    "dict iterator": (lambda: iter({n: n + 1 for n in range(60)}.items()), _next),
    "range iterator": (lambda: iter(range(300, 360)), _next),
    "enumerate": (lambda: enumerate(itertools.cycle([3, 1, 4])), _next),
    "zip": (lambda: zip(itertools.count(), itertools.cycle([3, 1, 4])), _next),
    "chain": (lambda: itertools.chain([1, 2], range(70)), _next),
    "map": (lambda: map(abs, itertools.count(-9)), _next),
    "bound": (lambda: itertools.cycle([1, 2, 3]).__next__, lambda part: part.held()),
    "partial": (lambda: functools.partial(next, itertools.cycle([1, 2, 3])), lambda part: part.held()),
    "in a tuple": (lambda: (1, (itertools.cycle([1, 2, 3]),)), lambda part: next(part.held[1][0])),
    "shared": (lambda: (lambda one: [one, {"again": one}])(itertools.count(1)),
               lambda part: next(part.held[0]) + next(part.held[1]["again"])),
    "deep, and grows": (lambda: [[0]], _grows),
    "generator": (_generator, _next),
    "generator inside": (lambda: enumerate(_generator()), _next),
    "bytearray": (lambda: bytearray(4), _bytes),
    "array": (lambda: array.array("i", [0, 0]), _bytes),
    "view of bytes": (lambda: memoryview(bytearray(4)), _bytes),
    "view of an array": (lambda: memoryview(numpy.zeros(4, dtype=numpy.int32))[2:], _bytes),
    "counter": (collections.Counter, _counter),
    "default dict": (lambda: collections.defaultdict(itertools.count(1).__next__),
                     lambda part: part.held[part.turn] + len(part.held)),
    "ordered dict": (lambda: collections.OrderedDict(a=1, b=2, c=3), _ordered),
    "user dict": (lambda: collections.UserDict(n=0), _counter),
    "deque": (lambda: collections.deque([1, 2, 3]), lambda part: (part.held.rotate(1), part.held[0])[1]),
    "random": (lambda: {"stream": random.Random(3)}, lambda part: part.held["stream"].randrange(9)),
    "numpy generator": (lambda: numpy.random.default_rng(3), lambda part: int(part.held.integers(9))),
    "numpy bits": (lambda: numpy.random.PCG64(3), lambda part: int(part.held.random_raw() % 9)),
    "numpy state": (lambda: [numpy.random.RandomState(3)], lambda part: int(part.held[0].randint(9))),
    "objects": (lambda: numpy.array([Box(1), 2], dtype=object), _objects),
    "tensor that grows": (lambda: torch.zeros(0), _longer),
    "tensor that is turned": (lambda: torch.arange(4).view(2, 2), _turned),
    "conjugate that is turned": (lambda: (1j * torch.arange(4).view(2, 2)).conj(), _turned),
    "tensor that is set": (lambda: torch.ones(1), _set_elsewhere),
    "tensor of other data": (lambda: torch.ones(1), _other_data),
    "attribute of a tensor": (lambda: torch.ones(1), _attribute_of_tensor),
    "attribute of a parameter": (lambda: torch.nn.Parameter(torch.ones(1)), _attribute_of_tensor),
    "parameter of other data": (lambda: torch.nn.Parameter(torch.ones(1)), _another_place),
    "frozen parameter of other data": (lambda: torch.nn.Parameter(torch.ones(1), requires_grad=False), _another_place),
    "parameter that is set": (lambda: torch.nn.Parameter(torch.ones(1), requires_grad=False), _set_to_another),
    "parameter that is swapped": (lambda: torch.nn.Parameter(torch.ones(1)), _swapped),
    "parameter of other data in a list": (lambda: [torch.nn.Parameter(torch.ones(1))], _another_place),
    "attribute of what Python defines": (lambda: _Subclass(torch.ones(1)), _attribute_of_tensor),
    "buffer that grows": (lambda: torch.zeros(0), _longer),
    "buffer that is turned": (lambda: torch.arange(4).view(2, 2), _turned),
    "buffer that is set": (lambda: torch.ones(1), _set_elsewhere),
    "buffer of other data": (lambda: torch.ones(1), _other_data),
}  # fmt: skip


class Stateful(Part):
    """Computes by what it finds somewhere, and changes that."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.turn = kind, 0
        held = HELD[kind][0]() if kind in HELD else None
        if kind.startswith("buffer"):
            self.register_buffer("held", held)
        else:
            self.held = held
        self.step = HELD[kind][1] if kind in HELD else ELSEWHERE[kind]

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        y = self.linear(x) * (1.0 + 0.1 * (self.step(self) % 5))
        return torch.nn.functional.dropout(torch.tanh(y), 0.1, self.training) if "cache" in self.kind else y.tanh()

    def facts(self) -> Any:
        held = "" if self.kind.startswith("generator") else repr(_told(self.held))
        return self.kind, self.turn, held, elsewhere.facts()


def _told(held: Any) -> Any:
    if isinstance(held, Box):
        return _told(held.value)
    if isinstance(held, random.Random):
        return hash(held.getstate())
    if isinstance(held, numpy.random.RandomState):
        return held.get_state()[2]
    if isinstance(held, numpy.random.Generator):
        return held.bit_generator.state
    if isinstance(held, Tensor) and vars(held):
        return vars(held)
    if isinstance(held, collections.defaultdict):
        return dict(held)
    if isinstance(held, numpy.random.BitGenerator):
        return held.state
    if isinstance(held, dict) and "stream" in held:
        return _told(held["stream"])
    if isinstance(held, list | tuple | numpy.ndarray | memoryview):
        return [_told(one) for one in held]
    if callable(held):
        return ""
    return list(itertools.islice(copy.deepcopy(held), 3)) if hasattr(held, "__next__") else held


KINDS = (*ELSEWHERE, *HELD)
PARAMETERS = tuple(kind for kind in HELD if kind.removeprefix("frozen ").startswith("parameter"))
"""Those that put a parameter elsewhere."""
OWN_PARAMETERS = tuple(kind for kind in PARAMETERS if not kind.endswith("list"))
"""One of the block's own: it is not copied, and such blocks run once."""
COPIED_KINDS = tuple(kind for kind in KINDS if not kind.startswith("view") and kind not in PARAMETERS)
"""Those of modules that can be copied, as programs are, which draw the others by themselves."""
