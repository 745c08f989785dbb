"""A step that ends early, by an error or by Ctrl-C, leaves everything as plain PyTorch would have left it."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, TypeAlias

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import spillway
from spillway.engines.tensors.ops import OpInfo
from tests.cpu.families import State, difference, state_of
from tests.cpu.pressure import ORDERS
from tests.cpu.training import WIDTH, batch_of, network
from tests.shared import in_turn, some_of

BUDGET = "380 KiB"
"""About 60 % of what the step asks for."""


class Fault(Exception):
    """What the tests raise."""


class RaisesBefore(TorchDispatchMode):
    """Raises before the op with a number; views can be left out of the count."""

    def __init__(self, number: int, error: BaseException, *, views: bool = True) -> None:
        super().__init__()
        self.left = number
        self.error = error
        self.views = views

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left == 0:
            raise self.error
        self.left -= self.views or not OpInfo(func).view
        return func(*args, **(kwargs or {}))


def step_of(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    """Every change that it makes is made by an op."""
    optimizer.zero_grad(set_to_none=False)
    model(batch_of(number)).square().mean().backward()
    optimizer.step()


def fresh(foreach: bool = False) -> tuple[nn.Sequential, Optimizer]:
    """A model with gradients and optimizer state, before its second step."""
    model = network()
    optimizer = Adam(model.parameters(), lr=1e-2, foreach=foreach)
    torch.manual_seed(3)
    random.seed(3)  # these two are not drawn from here; what other tests draw must not tell two states apart
    numpy.random.seed(3)
    step_of(model, optimizer, 0)
    return model, optimizer


Interruption: TypeAlias = Callable[[nn.Sequential, Optimizer], AbstractContextManager[object]]


def interrupted(interruption: Interruption, budget: str | None, order: str, foreach: bool = False) -> list[State]:
    """States after an interrupted step, after another that is whole, and after closing; plain without a budget."""
    model, optimizer = fresh(foreach)
    states = []
    if budget is None:
        with pytest.raises((Fault, KeyboardInterrupt)), interruption(model, optimizer):
            step_of(model, optimizer, 1)
        states.append(state_of(model, optimizer))
        step_of(model, optimizer, 2)
        return [*states, state_of(model, optimizer), state_of(model, optimizer)]
    with spillway.manage(model, optimizer, budget=budget, method=ORDERS[order]()) as memory:
        with pytest.raises((Fault, KeyboardInterrupt)), memory.step(), interruption(model, optimizer):
            step_of(model, optimizer, 1)
        states.append(state_of(model, optimizer))
        with memory.step():
            step_of(model, optimizer, 2)
        states.append(state_of(model, optimizer))
        assert memory.history[-1].peak_bytes <= memory.allowed
        assert memory.history[-1].moves + memory.history[-1].drops > 0
    return [*states, state_of(model, optimizer)]


def assert_left_as_plainly(interruption: Interruption, order: str, foreach: bool = False) -> None:
    plain, found = interrupted(interruption, None, order, foreach), interrupted(interruption, BUDGET, order, foreach)
    assert [difference(one, other) for one, other in zip(plain, found, strict=True)] == [None] * 3


@functools.cache
def ops_of_a_step() -> int:
    counting = RaisesBefore(-1, Fault())
    model, optimizer = fresh()
    with counting:
        step_of(model, optimizer, 1)
    return -1 - counting.left


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    gc.collect()  # mapped files that earlier tests left to the collector
    before = what_is_open()
    yield
    assert what_is_open() == before


def what_is_open() -> tuple[Any, ...]:
    return (
        len(os.listdir("/proc/self/fd")), threading.active_count(), signal.getsignal(signal.SIGINT),
        len(_get_current_dispatch_mode_stack()), torch.Tensor.numpy, torch.is_grad_enabled(),
    )  # fmt: skip


# ---------------------------------------------------------------------- errors


@pytest.mark.long(but=19)
@pytest.mark.parametrize(("percent", "order"), some_of(itertools.product(range(0, 100, 5), ORDERS), 0.5))
def test_an_error_before_any_op_leaves_what_it_would_have_left_plainly(percent: int, order: str) -> None:
    number = ops_of_a_step() * percent // 100
    assert_left_as_plainly(lambda model, optimizer: RaisesBefore(number, Fault()), order)


def fails(*_: Any) -> None:
    raise Fault


def interrupts(*_: Any) -> None:
    signal.raise_signal(signal.SIGINT)


class Removing:
    """Context manager over a handle of a hook."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __enter__(self) -> None:
        """The hook is there already."""

    def __exit__(self, *exception: object) -> None:
        self.handle.remove()


PLACES: dict[str, Callable[[nn.Sequential, Optimizer, Callable[..., None]], Any]] = {
    "forward of the first layer": lambda model, optimizer, act: model[0].register_forward_hook(act),
    "forward of the norm": lambda model, optimizer, act: model[1].register_forward_hook(act),
    "forward of the dropout": lambda model, optimizer, act: model[3].register_forward_pre_hook(act),
    "forward of the last layer": lambda model, optimizer, act: model[9].register_forward_hook(act),
    "backward of the last layer": lambda model, optimizer, act: model[9].register_full_backward_pre_hook(act),
    "backward of the norm": lambda model, optimizer, act: model[1].register_full_backward_hook(act),
    "gradient of a weight": lambda model, optimizer, act: model[4].weight.register_hook(act),
    "accumulated gradient": lambda model, optimizer, act: model[4].weight.register_post_accumulate_grad_hook(act),
    "before the optimizer": lambda model, optimizer, act: optimizer.register_step_pre_hook(act),
    "after the optimizer": lambda model, optimizer, act: optimizer.register_step_post_hook(act),
}


@pytest.mark.long(but=23)
@pytest.mark.parametrize(
    ("place", "order", "act"), some_of(itertools.product(PLACES, ORDERS, [fails, interrupts]), 0.5)
)
def test_a_hook_that_ends_the_step(place: str, order: str, act: Callable[..., None]) -> None:
    assert_left_as_plainly(lambda model, optimizer: Removing(PLACES[place](model, optimizer, act)), order, foreach=True)


def test_the_error_of_the_body_is_the_one_that_is_seen() -> None:
    model, optimizer = fresh()
    with spillway.manage(model, optimizer, budget=BUDGET) as memory:
        for _ in range(2):
            with pytest.raises(Fault) as caught, memory.step():
                model(batch_of(0))
                raise Fault
            assert caught.value.__context__ is None
        assert memory.history == []


@pytest.mark.long(but=2)
@pytest.mark.parametrize("wide", [2, 5])
@pytest.mark.parametrize("order", ORDERS)
def test_a_refused_step_leaves_what_an_error_before_that_op_would_have_left(wide: int, order: str) -> None:
    def model_and_optimizer() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(1)
        widths = [WIDTH] * 8
        widths[wide] = 40 * WIDTH
        layers = [
            nn.Sequential(nn.Linear(a, b), nn.Dropout(0.1), nn.BatchNorm1d(b)) for a, b in itertools.pairwise(widths)
        ]
        model = nn.Sequential(*layers)
        optimizer = Adam(model.parameters(), foreach=False)
        return model, optimizer

    for budget in ("300 KiB", "1 MiB", "2 MiB"):
        model, optimizer = model_and_optimizer()
        with spillway.manage(model, optimizer, budget=budget, method=ORDERS[order]()) as memory:
            with pytest.raises(spillway.BudgetInfeasible) as refusal, memory.step(batch_of(1)):
                step_of(model, optimizer, 1)
            refused = state_of(model, optimizer)
            assert vars(model).keys() == vars(model_and_optimizer()[0]).keys()
        plain, plain_optimizer = model_and_optimizer()
        with pytest.raises(Fault), RaisesBefore(refusal.value.op_index, Fault(), views=False):
            step_of(plain, plain_optimizer, 1)
        assert difference(state_of(plain, plain_optimizer), refused) is None
        assert refusal.value.allowed == memory.allowed
        assert refusal.value.smallest_budget > memory.allowed


class Remembering(nn.Module):
    """Counts its calls, keeps what it saw, and draws from every random stream."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 60 * WIDTH)
        self.calls = 0
        self.seen: list[Tensor] = []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        self.seen.append(x * random.random() * numpy.random.random())
        return self.wide(x)


def test_finding_the_smallest_budget_that_works_leaves_no_trace() -> None:
    def model_and_optimizer() -> tuple[nn.Sequential, Optimizer]:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Remembering())
        return model, Adam(model.parameters())

    model, optimizer = model_and_optimizer()
    heard: list[type] = []
    model[0].register_forward_hook(lambda module, inputs, out: heard.append(type(out)))
    model[0].weight.register_hook(lambda gradient: heard.append(type(gradient)))
    memory = spillway.manage(model, optimizer, budget="800 KiB", method="lru")
    with pytest.raises(spillway.BudgetInfeasible) as refusal, memory.step(batch_of(0)):
        step_of(model, optimizer, 0)
    memory.close()
    assert not refusal.value.exact  # nobody knows beforehand what the forward hook will take
    assert heard == [Tensor]
    assert [type(tensor) for tensor in model[1].seen] == [Tensor]
    assert model[1].calls == 1
    refused = state_of(model, optimizer)
    plain, plain_optimizer = model_and_optimizer()
    with pytest.raises(Fault), RaisesBefore(refusal.value.op_index, Fault(), views=False):
        step_of(plain, plain_optimizer, 0)
    assert difference(state_of(plain, plain_optimizer), refused) is None
    enough = refusal.value.smallest_budget
    with spillway.manage(model, optimizer, budget=enough, method="lru") as memory, memory.step(batch_of(0)):
        step_of(model, optimizer, 0)


# ---------------------------------------------------------------------- Ctrl-C at any moment


def stopped_plainly(number: int) -> tuple[nn.Sequential, Optimizer]:
    """After a plain step that ended before the op with that number, or after its last op."""
    whole = number == ops_of_a_step()
    model, optimizer = fresh()
    with nullcontext() if whole else pytest.raises(Fault), RaisesBefore(number, Fault()):
        step_of(model, optimizer, 1)
    return model, optimizer


@functools.cache
def after_each_op() -> dict[int, int]:
    """Every state (by its hash) that an interruption between two ops of a plain step can leave: after how many ops."""
    numbers = range(ops_of_a_step() + 1)
    return {hash(tuple(state_of(*stopped_plainly(number)).items())): number for number in numbers}


def assert_interrupted_between_two_ops(interruption: AbstractContextManager[object], order: str) -> bool:
    """Whether the interruption came in time; if it did, the state is one that plain PyTorch can be left in."""
    numbers = after_each_op()
    model, optimizer = fresh()
    with spillway.manage(model, optimizer, budget=BUDGET, method=ORDERS[order]()) as memory:
        interrupted = False
        try:
            with interruption, memory.step():
                step_of(model, optimizer, 1)
        except KeyboardInterrupt:
            interrupted = True
        number = numbers[hash(tuple(state_of(model, optimizer).items()))]
        with memory.step():
            step_of(model, optimizer, 2)
        assert memory.history[-1].peak_bytes <= memory.allowed
    plain, plain_optimizer = stopped_plainly(number)
    step_of(plain, plain_optimizer, 2)
    assert difference(state_of(plain, plain_optimizer), state_of(model, optimizer)) is None
    return interrupted


@contextmanager
def ctrl_c_at_line(number: int) -> Iterator[list[int]]:
    """Ctrl-C when so many lines of the session and its engine have run."""
    count = [0]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not str(frame.f_globals.get("__name__", "")).startswith("spillway."):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == number:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


@functools.cache
def lines_of_a_step(order: str) -> int:
    """Lines that run once every op was seen before, as in the steps that are interrupted."""
    _count_lines(order)
    return _count_lines(order)


def _count_lines(order: str) -> int:
    counting = ctrl_c_at_line(0)
    with counting as count:
        model, optimizer = fresh()
        with spillway.manage(model, optimizer, budget=BUDGET, method=ORDERS[order]()) as memory:
            count[0] = 0
            with memory.step():
                step_of(model, optimizer, 1)
            return count[0]


@pytest.mark.long
@pytest.mark.parametrize(("part", "order"), in_turn([0, 1, 2, 3], ORDERS))
def test_ctrl_c_at_a_line_of_the_engine_is_ctrl_c_between_two_ops(part: int, order: str) -> None:
    lines = lines_of_a_step(order)
    spread = [lines * (4 * n + part) // 64 + n for n in range(16)]
    positions = {0: [*range(1, 60, 3), *spread], 3: [*range(lines - 60, lines, 3), *spread]}.get(part, spread)
    came = [assert_interrupted_between_two_ops(ctrl_c_at_line(position), order) for position in positions if position]
    # How many lines run varies a little where workers copy: the last positions may not be reached.
    assert sum(came) > len(came) * (0.4 if ORDERS[order]().foresees else 0.8)


class KilledIn(TorchDispatchMode):
    """Ctrl-C from the system while the op with a number runs: below the session's mode, that is inside its handler.

    By number and not by the clock: after so many milliseconds it might as well come within Python code of torch that
    is not made for it (half-way out of `torch.no_grad()`), and what that leaves would fail every test that follows.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)
        self.left -= 1
        return func(*args, **(kwargs or {}))


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS)
def test_ctrl_c_from_the_system_is_ctrl_c_between_two_ops(order: str) -> None:
    ops = ops_of_a_step()
    came = [assert_interrupted_between_two_ops(KilledIn(ops * n // 24), order) for n in range(24)]
    assert all(came)


def test_a_handler_that_the_user_installs_inside_a_step_stays() -> None:
    model, optimizer = fresh()
    before = signal.getsignal(signal.SIGINT)
    pressed: list[int] = []
    try:
        with spillway.manage(model, optimizer, budget=BUDGET) as memory:
            with memory.step():
                signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
                step_of(model, optimizer, 1)
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            with memory.step():
                signal.raise_signal(signal.SIGINT)
                step_of(model, optimizer, 2)
        assert pressed == [signal.SIGINT] * 3
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    model, optimizer = fresh()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with spillway.manage(model, optimizer, budget=BUDGET) as memory, memory.step():
            signal.raise_signal(signal.SIGINT)
            step_of(model, optimizer, 1)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_session_works_outside_the_main_thread() -> None:
    model, optimizer = fresh()
    plain, plain_optimizer = fresh()
    torch.manual_seed(5)
    step_of(plain, plain_optimizer, 1)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with spillway.manage(model, optimizer, budget=BUDGET) as memory, memory.step():
                step_of(model, optimizer, 1)
        except BaseException as error:
            errors.append(error)

    torch.manual_seed(5)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
    assert difference(state_of(plain, plain_optimizer), state_of(model, optimizer)) is None


@pytest.mark.parametrize("order", ORDERS)
def test_a_tensor_that_was_dropped_when_the_step_broke_has_its_value(order: str) -> None:
    model, optimizer = fresh()
    kept: list[Tensor] = []
    model.register_forward_hook(lambda module, inputs, out: kept.append(out))
    for layer in model:
        layer.register_forward_hook(lambda module, inputs, out: kept.append(out * 2))
    torch.manual_seed(5)
    with pytest.raises(Fault), RaisesBefore(ops_of_a_step() // 2, Fault()):
        step_of(model, optimizer, 1)
    plain, kept = [tensor.detach().clone() for tensor in kept], []
    model, optimizer = fresh()
    for layer in model:
        layer.register_forward_hook(lambda module, inputs, out: kept.append(out * 2))
    torch.manual_seed(5)
    with spillway.manage(model, optimizer, budget=BUDGET, method=ORDERS[order]()) as memory:
        with pytest.raises(Fault), memory.step(), RaisesBefore(ops_of_a_step() // 2, Fault()):
            step_of(model, optimizer, 1)
        assert all(torch.equal(one, other) for one, other in zip(plain, kept, strict=False))
    assert all(torch.equal(one, other) for one, other in zip(plain, kept, strict=False))
