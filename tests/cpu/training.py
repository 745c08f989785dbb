"""The same training program run plainly and managed, to compare what it leaves and what it saw."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import spillway
from spillway.methods import Drop, Move
from tests.cpu.families import State, difference, state_of
from tests.cpu.pressure import ORDERS, PLENTY, InputsLeave, Way, image, put_away

WIDTH = 64


class Trainer:
    """What a program gets to open its steps with: a session, or nothing at all."""

    def __init__(self, memory: spillway.Session | None = None, ways: tuple[Way, ...] = ()) -> None:
        self.memory = memory
        self.ways = ways

    @contextmanager
    def step(self, batch: Any = None) -> Iterator[None]:
        if self.memory is None:
            yield
            return
        with self.memory.step(batch):
            if not self.ways:
                yield
                return
            with InputsLeave(self.memory, *self.ways):
                yield

    def put_away(self, *tensors: Tensor) -> None:
        """Move what can be moved; nothing where nothing is managed."""
        for tensor in tensors if self.memory is not None else ():
            put_away(self.memory, tensor, Move)


Program: TypeAlias = Callable[[nn.Module, Optimizer, Trainer], Any]


class Outcome(NamedTuple):
    seen: Any
    state: State
    peak: int
    moved_or_dropped: int


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.Tanh(),
        nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH),
    )  # fmt: skip


def batch_of(number: int, rows: int = 96) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Optimizer, number: int) -> Tensor:
    """The body of an ordinary step; gradients stay until the next."""
    optimizer.zero_grad()
    loss = model(batch_of(number)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def plainly(program: Program, optimizer_of: Callable[[nn.Module], Optimizer] = adam) -> Outcome:
    model = network()
    optimizer = optimizer_of(model)
    _seed()
    seen = frozen(program(model, optimizer, Trainer()))
    return Outcome(seen, state_of(model, optimizer), 0, 0)


def managed(
    program: Program,
    optimizer_of: Callable[[nn.Module], Optimizer] = adam,
    *,
    budget: int | None = None,
    order: str = "recompute first",
    ways: tuple[Way, ...] = (),
) -> Outcome:
    model = network()
    optimizer = optimizer_of(model)
    _seed()
    with spillway.manage(model, optimizer, budget=budget, method=ORDERS[order]()) as memory:
        seen = frozen(program(model, optimizer, Trainer(memory, ways)))
        reports = memory.history
        assert [report.peak_bytes for report in reports if report.peak_bytes > report.allowed] == []
    state = state_of(model, optimizer)
    left = sum(report.moves + report.drops for report in reports)
    return Outcome(seen, state, max((report.peak_bytes for report in reports), default=0), left)


def assert_trains_as_plainly(
    program: Program, optimizer_of: Callable[[nn.Module], Optimizer] = adam, *, share: int = 55
) -> None:
    """Without a budget, at a share of the peak in both orders, and with the inputs of every op absent, in both ways."""
    plain = plainly(program, optimizer_of)
    tracked = managed(program, optimizer_of)
    assert_equal(plain, tracked)
    for order in ORDERS:
        limited = _at_a_share(program, optimizer_of, tracked.peak, share, order)
        assert_equal(plain, limited)
        assert limited.moved_or_dropped > 0
    for ways in ((Drop, Move), (Move,)):
        absent = managed(program, optimizer_of, budget=PLENTY, ways=ways)
        assert_equal(plain, absent)
        assert absent.moved_or_dropped > 0


def assert_stays_right(program: Program, *, share: int = 55) -> None:
    """For programs that make things absent by themselves: with room for everything, and at a share of the peak."""
    plain = plainly(program)
    roomy = managed(program, budget=PLENTY)
    assert_equal(plain, roomy)
    limited = _at_a_share(program, adam, roomy.peak, share, "recompute first")
    assert_equal(plain, limited)
    assert limited.moved_or_dropped > 0


def _at_a_share(
    program: Program, optimizer_of: Callable[[nn.Module], Optimizer], peak: int, share: int, order: str
) -> Outcome:
    try:
        return managed(program, optimizer_of, budget=peak * share // 100, order=order)
    except spillway.BudgetInfeasible as refusal:
        assert refusal.smallest_budget <= peak
        return managed(program, optimizer_of, budget=refusal.smallest_budget, order=order)


def assert_equal(plain: Outcome, found: Outcome) -> None:
    assert plain.seen == found.seen
    assert difference(plain.state, found.state) is None


def frozen(value: Any) -> Any:
    """Tensors by value, wherever they stand."""
    if isinstance(value, Tensor):
        return image(value)
    if isinstance(value, dict):
        return {name: frozen(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(entry) for entry in value]
    return copy.deepcopy(value)


def _seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
