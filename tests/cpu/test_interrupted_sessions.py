"""Whatever interrupts entering a step, leaving it or closing: the same thread trains on, and nothing is left open."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import spillway
from spillway.errors import SessionError
from spillway.internals import process_memory
from spillway.methods.by_block import BlockSample, StepSample
from spillway.methods.mimose import Mimose, Options
from spillway.session.block_session import _Family
from spillway.session.input_sizes import SizeReader
from tests.cpu.callbacks import BLOCKS, TENSORS
from tests.cpu.interrupted import ACTS, BATCH, PAGED, PHASES, Interrupted, Lines, Training, raises
from tests.cpu.leftovers import clean_up, world
from tests.shared import FULL_AUDIT

METHODS = ("lru", "checkpoint", PAGED)
"""One of each engine, and one of both."""
NEAR = ("session/", "turns.py", "interrupts.py", "tensors/engine.py", "tensors/mode.py", "private.py", "trace.py")
"""Files of which every fourth line is interrupted in any run; of others every 24th is. Where both engines run, half
as many are, since each engine has its own lines already. The full audit has every line, at every time that it runs."""


@functools.cache
def plain_states() -> list[list[Tensor]]:
    """After so many plain steps."""
    training = Training()
    states = [training.state()]
    for _ in range(4):
        training.train()
        states.append(training.state())
    return states


def assert_trained_as_plainly(training: Training) -> None:
    assert all(map(torch.equal, training.state(), plain_states()[training.steps]))


@functools.cache
def numbers(method: str, phase: str) -> list[int]:
    """Of the lines that run in a phase, those at which it is interrupted."""
    for _ in range(2):  # what runs once in a process has run
        lines = Lines(0, raises)
        one = Interrupted(method, lines)
        one.play(phase)
        one.go_on()
    if FULL_AUDIT:
        return list(range(1, len(lines.where) + 20))
    firsts = {where: number for number, where in reversed(list(enumerate(lines.where, 1)))}
    far = [number for (file, _), number in firsts.items() if not any(near in file for near in NEAR)]
    apart = 2 if method == PAGED else 1
    return sorted([*sorted(set(firsts.values()) - set(far))[:: 8 * apart], *sorted(far)[:: 48 * apart]])


@pytest.mark.long(but=1)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("method", [*TENSORS, *BLOCKS, PAGED] if FULL_AUDIT else METHODS)
def test_interrupted_at_any_line_the_same_thread_trains_on(method: str, phase: str, act: str) -> None:
    plain_states()
    chosen = numbers(method, phase)
    before = world()
    reached = 0
    for number in chosen if FULL_AUDIT else chosen[list(ACTS).index(act) :: 2]:
        lines = Lines(number, ACTS[act])
        one = Interrupted(method, lines)
        one.play(phase)
        where = lines.where[number - 1 : number]
        one.go_on()
        assert_trained_as_plainly(one.training)
        assert clean_up(before) == [], where
        reached += lines.reached
    assert reached > 0.7 * len(chosen) / (1 if FULL_AUDIT else 2)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("known", [False, True], ids=["sizes found", "sizes known"])
@pytest.mark.parametrize(
    "method", [Mimose(Options(exact_bytes=False)), Mimose.as_published()], ids=["mimose", "mimose-published"]
)
def test_what_a_method_learned_in_part_is_forgotten(method: Mimose, known: bool) -> None:
    """Interrupted at any line of learning, of sizes too, it learns from the next steps what it needs."""
    sizes = [(8, 16), (8, 24), (8, 32), (4, 24), (2, 48)]

    def interrupted_at(number: int) -> Lines:
        lines = Lines(number, raises)
        family = _Family(SizeReader(None, takes_vectors=True), method.fresh(batched=False))
        for shape in sizes if known else ():
            family.size(shape)
        for times, (rows, length) in enumerate(sizes * 4):
            with contextlib.suppress(KeyboardInterrupt), lines.counted(times < 10):
                size = family.size((rows, length))
                family.method.begin(size, 1 << 20)
                family.method.forecast(size)
                family.learn((rows, length), *learned(family.method.collecting, rows, length, 1.0 + times))
        assert not family.method.collecting
        forecast = family.method.forecast(family.size((8, 16)))
        assert forecast is None or len(forecast.saved) == len(forecast.working) == 3
        return lines

    def learned(collecting: bool, rows: int, length: int, seconds: float) -> tuple[StepSample, list[BlockSample]]:
        recomputed = frozenset(range(3)) if collecting else frozenset[int]()
        step = StepSample(size=(), recomputed=recomputed, peak=40 * rows * length)
        return step, [
            BlockSample(block=block, size=(), nbytes=10 * rows * length, seconds=seconds, working=rows * length)
            for block in range(3)
        ]

    where = interrupted_at(0).where
    firsts = {line: number for number, line in reversed(list(enumerate(where, 1)))}
    assert len(firsts) > 50
    for number in list(firsts.values())[known::2]:  # every second line, and the others where sizes are found
        assert interrupted_at(number).reached


# ---------------------------------------------------------------------- steps that are begun and ended


@pytest.mark.parametrize("method", METHODS)
def test_begin_and_end_are_a_step(method: str) -> None:
    training = Training()
    with training.manage(method) as memory:
        for _ in range(3):
            memory.begin(BATCH)
            training.train()
            memory.log(number=training.steps)
            memory.end()
        assert [report.logged["number"] for report in memory.history] == [1, 2, 3]
        assert max(report.peak_bytes for report in memory.history) <= memory.allowed
    assert_trained_as_plainly(training)


@pytest.mark.parametrize("method", METHODS)
def test_end_and_begin_out_of_turn_are_told(method: str) -> None:
    training = Training()
    memory = training.manage(method)
    with pytest.raises(SessionError, match=r"No step is running that could be ended; memory.begin\(batch\) begins one"):
        memory.end()
    memory.begin(BATCH)
    with pytest.raises(SessionError, match=r"A step is running already; .*by memory.end\(\)"):
        memory.begin(BATCH)
    training.train()
    memory.end()
    assert len(memory.history) == 1
    memory.close()
    memory.end()
    with pytest.raises(SessionError, match="closed"):
        memory.begin(BATCH)
    assert_trained_as_plainly(training)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_that_failed_has_no_report_and_its_own_error_is_seen(method: str) -> None:
    training = Training()
    with training.manage(method) as memory:
        with pytest.raises(KeyError, match="mine"):
            try:
                memory.begin(BATCH)
                raise KeyError("mine")
            finally:
                memory.end()
        assert memory.history == []
        try:
            raise KeyError
        except KeyError:  # somebody else's: the step is whole
            memory.begin(BATCH)
            training.train()
            memory.end()
        assert len(memory.history) == 1
    assert_trained_as_plainly(training)


def test_a_refused_step_between_begin_and_end_names_a_budget() -> None:
    training = Training()
    memory = spillway.manage(training.model, training.optimizer, budget="36 KiB", method="lru")
    with pytest.raises(spillway.BudgetInfeasible) as refusal:
        try:
            memory.begin(BATCH)
            training.train()
        finally:
            memory.end()
    assert refusal.value.smallest_budget > memory.allowed
    memory.close()


# ---------------------------------------------------------------------- closing


class Mine(Exception):
    """What the user's own code raises."""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("begun", ["with", "begin"])
def test_closing_inside_a_step_ends_it_and_the_users_error_comes_through(method: str, begun: str) -> None:
    training = Training()
    with pytest.raises(Mine) as caught, training.manage(method) as memory:
        if begun == "with":
            step = memory.step(BATCH)
            step.__enter__()
        else:
            memory.begin(BATCH)
        training.train()
        raise Mine
    assert caught.value.__context__ is None
    assert memory.history == []
    assert_trained_as_plainly(training)
    with training.manage(method) as another:
        with another.step(BATCH):
            training.train()
            another.close()
        assert another.history == []
    assert_trained_as_plainly(training)


def test_what_goes_wrong_while_closing_is_a_note_on_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    memory = training.manage("lru")
    close = memory._engine.close  # type: ignore[attr-defined]

    def failing() -> None:
        close()
        raise OSError("the disk is gone")

    monkeypatch.setattr(memory._engine, "close", failing)  # type: ignore[attr-defined]
    with pytest.raises(Mine) as caught, memory:
        raise Mine
    assert caught.value.__notes__ == ["Closing the session failed as well: OSError: the disk is gone"]
    memory.close()


def test_what_goes_wrong_while_leaving_is_a_note_on_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    with training.manage("lru") as memory:
        end = memory._engine.end_step  # type: ignore[attr-defined]

        def failing() -> None:
            end()
            raise OSError("the disk is gone")

        with monkeypatch.context() as patch:
            patch.setattr(memory._engine, "end_step", failing)  # type: ignore[attr-defined]
            with pytest.raises(Mine) as caught, memory.step(BATCH):
                raise Mine
        assert caught.value.__notes__ == ["Ending the step failed as well: OSError: the disk is gone"]
        with memory.step(BATCH):
            training.train()
    assert_trained_as_plainly(training)


# ---------------------------------------------------------------------- steps that nobody ends


@pytest.mark.parametrize("method", METHODS)
def test_a_step_whose_context_is_gone_does_not_keep_the_next_out(method: str) -> None:
    training = Training()
    memory = training.manage(method)
    memory.step(BATCH).__enter__()
    training.train()
    with memory.step(BATCH):
        training.train()
    assert len(memory.history) == 1
    memory.close()
    assert_trained_as_plainly(training)


def test_a_session_that_was_collected_within_its_step_keeps_nobody_out() -> None:
    training = Training()
    memory = training.manage("lru")
    memory.begin(BATCH)
    training.train()
    gone = weakref.ref(memory)
    del memory
    gc.collect()
    assert gone() is None
    with training.manage("lru") as another, another.step(BATCH):
        training.train()
    assert_trained_as_plainly(training)


def in_thread(body: Callable[[], Any]) -> BaseException | None:
    raised: list[BaseException] = []

    def caught() -> None:
        try:
            body()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=caught, name="another")
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_freed_memory_can_be_returned_by_another_thread_wherever_one_was_interrupted() -> None:
    def takes_turn() -> None:
        assert process_memory._holding.acquire(blocking=False)
        process_memory._holding.release()

    for number in itertools.count(1):
        lines = Lines(number, raises, (process_memory.__name__,))
        with contextlib.suppress(KeyboardInterrupt), lines.counted():
            process_memory._return_end_of_heap()
        assert in_thread(takes_turn) is None, lines.where[-1]
        if not lines.reached:
            break
    assert number > 9


@pytest.mark.parametrize("method", METHODS)
def test_a_session_closed_by_another_thread_closes_when_its_step_ends(method: str) -> None:
    training = Training()
    memory = training.manage(method)
    with memory.step(BATCH):
        error = in_thread(memory.close)
        assert isinstance(error, SessionError)
        assert "'MainThread', is in a step of this session" in str(error)
        assert isinstance(in_thread(memory.end), SessionError)
        training.train()
    with pytest.raises(SessionError, match="closed"):
        memory.begin(BATCH)
    assert_trained_as_plainly(training)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_whose_thread_is_gone_is_ended_by_whoever_comes_next(method: str) -> None:
    training = Training()
    memory = training.manage(method)

    def begun() -> None:
        memory.begin(BATCH)
        training.train()

    for _ in range(2):
        assert in_thread(begun) is None
    assert in_thread(memory.end) is None
    assert len(memory.history) == 1
    assert in_thread(begun) is None
    memory.close()
    with training.manage(method) as another, another.step(BATCH):
        training.train()
    assert_trained_as_plainly(training)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_users_may_outlive_the_step() -> None:
    training = Training()
    memory = training.manage("lru")
    mode = Passing()
    memory.begin(BATCH)
    mode.__enter__()
    training.train()
    memory.end()
    assert _get_current_dispatch_mode_stack() == [mode]
    mode.__exit__(None, None, None)
    assert not torch.utils._python_dispatch._is_in_torch_dispatch_mode
    memory.close()
    assert_trained_as_plainly(training)
