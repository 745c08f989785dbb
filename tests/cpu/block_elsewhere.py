"""A module beside that of the blocks: what a forward changes in it, and through it."""

from __future__ import annotations

import contextvars
import copy
import functools
import itertools
import logging
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch

number = 0
attribute = 0
box: dict[str, int] = {}
turns = itertools.cycle([1, 2, 3, 4])
by_object: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
local = threading.local()
variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
log = logging.getLogger("tests.cpu.block_elsewhere")


class Records(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


records = Records()
log.addHandler(records)
log.propagate = False
log.setLevel(logging.INFO)


def count() -> int:
    global number
    number += 1
    return number


def count_in_box() -> int:
    box["n"] = box.get("n", 0) + 1
    return box["n"]


def turn() -> int:
    return next(turns)


def late() -> int:
    """Makes a global that is not there yet."""
    global made_late
    made_late = globals().get("made_late", 0) + 1
    return int(made_late)


class Stats:
    n: ClassVar[int] = 0
    of_kind: ClassVar[int] = 0
    total: ClassVar[list[int]] = []

    @classmethod
    def count(cls) -> int:
        cls.of_kind += 1
        return cls.of_kind

    @staticmethod
    def append() -> int:
        Stats.total.append(1)
        return len(Stats.total)

    @property
    def so_far(self) -> int:
        return count()


class Lower(Stats):
    """Whose base class is changed."""


def by_attribute() -> int:
    by_attribute.calls = getattr(by_attribute, "calls", 0) + 1  # type: ignore[attr-defined]
    return int(by_attribute.calls)  # type: ignore[attr-defined]


def counted(function: Callable[[], int]) -> Callable[[], int]:
    """A decorator that counts."""
    calls = itertools.count(1)

    @functools.wraps(function)
    def wrapped() -> int:
        return function() + next(calls)

    return wrapped


@counted
def decorated() -> int:
    return 1


def by_default(calls: Any = itertools.count(1)) -> int:  # noqa: B008  # what is kept in it is what this is about
    return int(next(calls))


@functools.cache
def drawn(key: int) -> int:
    """Impure: the first call with a key draws from a random stream."""
    return int(torch.randint(100, ()).item()) + random.randrange(3)


@functools.lru_cache(maxsize=2)
def drawn_bounded(key: int) -> int:
    """The same, and forgetful."""
    return int(torch.randint(100, ()).item())


def forget() -> None:
    """As if this module had just been imported."""
    global number, attribute, turns
    number, attribute, turns = 0, 0, itertools.cycle([1, 2, 3, 4])
    globals().pop("made_late", None)
    box.clear()
    by_object.clear()
    vars(local).clear()
    variable.set(0)
    records.lines.clear()
    Stats.n, Stats.of_kind, Stats.total = 0, 0, []
    Lower.of_kind = 0
    vars(by_attribute).clear()
    by_default.__defaults__ = (itertools.count(1),)
    globals()["decorated"] = counted(lambda: 1)
    drawn.cache_clear()
    drawn_bounded.cache_clear()


def facts() -> list[Any]:
    """What can be told of it."""
    return [
        number, attribute, dict(box), list(itertools.islice(copy.deepcopy(turns), 4)),
        sorted(by_object.values()), dict(vars(local)), variable.get(), list(records.lines),
        Stats.n, Stats.of_kind, list(Stats.total), Lower.of_kind, vars(by_attribute).get("calls"),
        repr(by_default.__defaults__), drawn.cache_info().misses, drawn_bounded.cache_info().misses,
        globals().get("made_late"),
    ]  # fmt: skip
