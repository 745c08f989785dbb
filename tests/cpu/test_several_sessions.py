"""Several sessions, models and threads in one process: each as if it were alone, or refused with a sentence."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import spillway
from spillway.errors import SessionError
from spillway.internals.private import storage_address
from spillway.methods import Drop, Move
from tests.cpu.another_process import run_python
from tests.cpu.families import State, difference, state_of
from tests.cpu.pressure import ORDERS, PLENTY, put_away
from tests.cpu.training import WIDTH, adam, train

BUDGET = "300 KiB"
STEPS = 4

NEST = r"(?m)steps do not nest: .*manage\(\[model, other\], \.\.\.\)\.$"


def without_dropout(seed: int) -> tuple[nn.Sequential, Optimizer]:
    """Threads that draw from torch's one random stream would get numbers in an order that nobody knows."""
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()] * 2
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
    return model, adam(model)


def trained(model: nn.Module, optimizer: Optimizer, memory: spillway.Session | None) -> None:
    for number in range(STEPS):
        if memory is None:
            train(model, optimizer, number)
        else:
            with memory.step():
                train(model, optimizer, number)


def plain_states(count: int) -> list[State]:
    states = []
    for seed in range(count):
        model, optimizer = without_dropout(seed)
        trained(model, optimizer, None)
        states.append(state_of(model, optimizer))
    return states


def in_threads(*bodies: Callable[[], Any]) -> list[BaseException]:
    """Run all of them at once; what they raised."""
    errors: list[BaseException] = []

    def caught(body: Callable[[], Any]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caught, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def without_streams(state: State) -> State:
    return {name: value for name, value in state.items() if name.startswith(("model", "optimizer"))}


def assert_same(plain: list[State], made: list[tuple[nn.Sequential, Optimizer]]) -> None:
    found = [state_of(model, optimizer) for model, optimizer in made]
    pairs = zip(plain, found, strict=True)
    assert [difference(without_streams(one), without_streams(other)) for one, other in pairs] == [None] * len(made)


def assert_pressed(*sessions: spillway.Session) -> None:
    for memory in sessions:
        assert len(memory.history) >= 1
        assert all(report.moves + report.drops > 0 for report in memory.history)
        assert max(report.peak_bytes for report in memory.history) <= memory.allowed


# ---------------------------------------------------------------------- in one thread


@pytest.mark.parametrize("order", ORDERS)
def test_two_sessions_take_turns_step_by_step(order: str) -> None:
    plain = plain_states(2)
    made = [without_dropout(seed) for seed in range(2)]
    sessions = [spillway.manage(*one, budget=BUDGET, method=ORDERS[order]()) for one in made]
    for number in range(STEPS):
        for (model, optimizer), memory in zip(made, sessions, strict=True):
            with memory.step():
                train(model, optimizer, number)
    assert_pressed(*sessions)
    for memory in sessions:
        memory.close()
    assert_same(plain, made)


@pytest.mark.parametrize("known", [False, True])
def test_a_step_inside_a_step_of_another_session_is_refused_and_both_go_on(known: bool) -> None:
    outer = spillway.manage(nn.Linear(4, 4), budget=PLENTY, method="lru")
    inner = spillway.manage(nn.Linear(4, 4), budget=PLENTY, method="lru")
    batch, x = torch.ones(2, 4), torch.arange(5000.0)
    for _ in range(3):
        with outer.step(batch if known else None):
            doubled = x * 2
            with pytest.raises(SessionError, match=NEST), inner.step(batch if known else None):
                pass
            assert put_away(outer, doubled, Drop) or known
            assert torch.equal(doubled + 0, torch.arange(0, 10000, 2.0))
    with inner.step(), pytest.raises(SessionError), outer.step():
        pass
    assert [len(outer.history), len(inner.history)] == [3, 1]
    outer.close()
    inner.close()


def test_one_model_under_two_sessions_takes_what_the_other_wrote() -> None:
    model = nn.Linear(64, 64, bias=False)
    weight = model.weight
    sessions = [spillway.manage(model, budget=PLENTY, method="lru") for _ in range(2)]
    expected = weight.detach().clone()
    for turn in range(6):
        memory = sessions[turn % 2]
        with memory.step(), torch.no_grad():
            weight.add_(1)
            expected += 1
            assert torch.equal(weight, expected), f"turn {turn}"
            put_away(memory, weight, Move)
        assert torch.equal(weight, expected)
    sessions[0].close()
    assert torch.equal(weight, expected)
    sessions[1].close()
    assert torch.equal(weight, expected)


# ---------------------------------------------------------------------- in several threads


@pytest.mark.parametrize("order", ORDERS)
def test_two_sessions_in_two_threads_at_once(order: str) -> None:
    plain = plain_states(2)
    made = [without_dropout(seed) for seed in range(2)]
    sessions = [spillway.manage(*one, budget=BUDGET, method=ORDERS[order]()) for one in made]
    bodies = [
        (lambda one=one, memory=memory: trained(*one, memory)) for one, memory in zip(made, sessions, strict=True)
    ]
    assert in_threads(*bodies) == []
    assert_pressed(*sessions)
    for memory in sessions:
        memory.close()
    assert_same(plain, made)


def test_what_a_step_in_another_thread_has_let_go_of_is_nobodys() -> None:
    """The storages that come next have the addresses of those that went."""
    (one, _), (other, _) = (without_dropout(seed) for seed in range(2))
    for parameter in one.parameters():
        parameter.grad = torch.zeros_like(parameter)
    sessions = [spillway.manage(model, budget=PLENTY, method="lru") for model in (one, other)]
    begun, over = threading.Event(), threading.Event()

    def step() -> None:
        with sessions[0].step():
            begun.set()
            over.wait(60)

    thread = threading.Thread(target=step)
    thread.start()
    assert begun.wait(60)
    gone = {storage_address(parameter.grad) for parameter in one.parameters() if parameter.grad is not None}
    for parameter in one.parameters():
        parameter.grad = None
    came = [torch.zeros(parameter.shape) for parameter in other.parameters()]
    for parameter, gradient in zip(other.parameters(), came, strict=True):
        parameter.grad = gradient
    with sessions[1].step():
        pass
    over.set()
    thread.join()
    assert not gone & {*map(storage_address, came)}, "no address is another storage's while a step may ask for it"
    for memory in sessions:
        memory.close()


@pytest.mark.parametrize("order", ORDERS)
def test_a_session_in_a_thread_beside_a_thread_that_trains_without_one(order: str) -> None:
    plain = plain_states(2)
    alone = without_dropout(0)
    with spillway.manage(*alone, budget=BUDGET, method=ORDERS[order]()) as memory:
        trained(*alone, memory)
    ops = [report.ops for report in memory.history]
    made = [without_dropout(seed) for seed in range(2)]
    with spillway.manage(*made[0], budget=BUDGET, method=ORDERS[order]()) as memory:
        assert in_threads(lambda: trained(*made[0], memory), lambda: trained(*made[1], None)) == []
        assert_pressed(memory)
        assert [report.ops for report in memory.history] == ops, "it saw ops of the other thread"
    assert_same(plain, made)


@pytest.mark.parametrize("order", ORDERS)
def test_a_session_made_in_one_thread_stepped_in_others_and_closed_in_the_first(order: str) -> None:
    plain = plain_states(1)
    made = without_dropout(0)
    memory = spillway.manage(*made, budget=BUDGET, method=ORDERS[order]())

    def step(number: int) -> None:
        with memory.step():
            train(*made, number)

    for number in range(STEPS):
        assert in_threads(lambda number=number: step(number)) == []  # type: ignore[misc]
    assert_pressed(memory)
    memory.close()
    assert_same(plain, [made])


def test_a_step_is_left_by_the_thread_that_entered_it() -> None:
    memory = spillway.manage(nn.Linear(4, 4), budget=PLENTY, method="lru")
    step = memory.step()
    step.__enter__()
    (error,) = in_threads(lambda: step.__exit__(None, None, None))
    assert isinstance(error, SessionError)
    assert str(error) == "This step began in another thread, and has to be left by that thread."
    x = torch.arange(5000.0) * 2
    assert put_away(memory, x, Drop)
    assert torch.equal(x, torch.arange(0, 10000, 2.0)), "the step is not watched any more"
    step.__exit__(None, None, None)
    memory.close()


@pytest.mark.parametrize("shared", ["model", "batch"])
def test_steps_of_two_threads_on_one_storage_are_refused(shared: str) -> None:
    one, batch = nn.Linear(4, 4), torch.ones(2, 4)
    other = one if shared == "model" else nn.Linear(4, 4)
    sessions = [spillway.manage(model, budget=PLENTY) for model in (one, other)]

    def step(memory: spillway.Session, x: Tensor) -> None:
        with memory.step(x):
            pass

    def step_apart() -> None:
        with spillway.manage(nn.Linear(4, 4), budget=PLENTY) as memory:
            step(memory, torch.ones(2, 4))

    with sessions[0].step(batch):
        given = batch[:1] if shared == "batch" else torch.ones(2, 4)
        (error,) = in_threads(lambda: step(sessions[1], given))
        assert isinstance(error, SessionError)
        assert "another thread on" in str(error)
        assert in_threads(step_apart) == []
    assert in_threads(lambda: step(sessions[1], given)) == []
    for memory in sessions:
        memory.close()


# ---------------------------------------------------------------------- what would end the process


@pytest.mark.long
@pytest.mark.parametrize("method", ["checkpoint", "mimose"])
def test_block_sessions_in_several_threads_at_once(method: str) -> None:
    done = run_python(
        f"""
        import contextlib, threading, torch, spillway
        from torch import nn
        from spillway.native import library
        from tests.cpu.families import difference, state_of

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(64, 64)

            def forward(self, x):
                return x + self.linear(x).relu()

        def train(seed, managed, found, begin):
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
            with managed as memory:
                begin.wait()
                for rows in (16, 32, 64, 48, 16, 64):
                    with memory.step(x[:rows]):
                        models[seed](x[:rows]).square().mean().backward()
                        optimizers[seed].step()
                        optimizers[seed].zero_grad()
            found[seed] = state_of(models[seed], optimizers[seed])

        class Plain:
            def step(self, batch):
                return contextlib.nullcontext()

        found = []
        for managed in (False, True):
            models, optimizers, states, begin = [], [], {{}}, threading.Barrier(4)
            for seed in range(4):
                torch.manual_seed(seed)
                models.append(nn.Sequential(*(Block() for _ in range(4))))
                optimizers.append(torch.optim.Adam(models[seed].parameters()))
            sessions = [
                spillway.manage(models[seed], optimizers[seed], method={method!r}, budget="256 MiB")
                if managed else contextlib.nullcontext(Plain()) for seed in range(4)
            ]
            threads = [threading.Thread(target=train, args=(n, sessions[n], states, begin)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            found.append(states)
        assert [difference(found[0][seed], found[1][seed]) for seed in range(4)] == [None] * 4
        peaks = [[report.peak_bytes for report in session.history] for session in sessions]
        apart = [max(at_once) - min(at_once) for at_once in zip(*peaks)]  # some states of random streams
        assert not library.wanted() or max(apart) < 16 * 5056 < min(map(min, peaks)) / 3, peaks
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_thread_that_ends_after_the_program_does_not_abort_it() -> None:
    """The thread is slow to end and the interpreter holds on to the GIL on its way out."""
    done = run_python(
        """
        import atexit, ctypes, threading

        atexit.register(ctypes.PyDLL(None).usleep, 600_000)
        import torch, spillway

        library = ctypes.CDLL(None)
        library.__cxa_thread_atexit_impl.argtypes = [ctypes.c_void_p] * 3
        sleep = ctypes.cast(library.usleep, ctypes.c_void_p)

        def train():
            with spillway.manage(torch.nn.Linear(8, 8), budget="64 MiB") as memory, memory.step():
                torch.ones(8) + 1
            library.__cxa_thread_atexit_impl(sleep, 200_000, None)

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        """
    )
    assert done.returncode == 0, done.stderr
