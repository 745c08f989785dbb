"""Whatever the user's own code raises, wherever it runs within a step: it is seen as it was raised, the model is as
plain PyTorch leaves it, the same thread trains on, and nothing is left open."""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, final

import pytest
import torch
from torch import Tensor

import spillway
from tests.cpu.callbacks import BLOCKS, KINDS, PLACES, TENSORS, WIDTH, Fault, Training
from tests.cpu.families import State, difference, state_of
from tests.cpu.interrupted import needs_known
from tests.cpu.leftovers import clean_up, world
from tests.shared import FULL_AUDIT

ANYWHERE: Final = "all "
"""Places that ops come to of which plain PyTorch knows nothing."""


class Played(NamedTuple):
    """What came of a training that was interrupted in its second step."""

    seen: tuple[Any, ...]
    """Of the exception: what the user can tell of it."""
    raised_in: str
    states: list[State]
    """After the interrupted step, and after two whole ones."""


def seen(error: BaseException | None, fault: Fault) -> tuple[Any, ...]:
    if error is None:
        return ("nothing",)
    return (
        error is fault.error, type(error), str(error), getattr(error, "__notes__", None), type(error.__cause__),
        type(error.__context__), error.__suppress_context__,
    )  # fmt: skip


def play(method: str | None, place: str, at: int, kind: str, *, caught: bool = False, in_loss: bool = False) -> Played:
    """Train four steps, the second with the fault at the place, or in the loss, where the place comes to no harm.

    An exception that is caught within the step is followed by a whole training step in it.
    """
    training = Training()
    fault = Fault(KINDS[kind]("mine"), at)
    session = training.manage(method) if method is not None else None
    step = session.step if session is not None else _Plainly
    error: BaseException | None = None
    with step(training.rows), nullcontext() if method is None else needs_known(method):
        training.step()
    harmless = Fault(fault.error, -1)
    in_place = PLACES[place](training, harmless if in_loss else fault)
    with in_place, PLACES["the loss"](training, fault) if in_loss else nullcontext():
        fault.training = training
        try:
            with step(training.rows):
                error = interrupted(training, fault, caught=caught)
        except BaseException as raised:
            error = raised
        fault.training = None
    found = seen(error, fault)
    error = None
    states = [state_of(training.model, training.optimizer)]
    for _ in range(2):
        with step(training.rows):
            training.step()
        states.append(state_of(training.model, training.optimizer))
    if session is not None:
        assert all(report.peak_bytes <= session.allowed for report in session.history)
        assert len(session.history) == 3 + (found == ("nothing",) or caught)
        session.close()
    return Played(found, fault.raised_in, states)


def interrupted(training: Training, fault: Fault, *, caught: bool) -> BaseException | None:
    """A step of the training, and another one after what it raised, if that is caught."""
    try:
        training.step()
    except BaseException as raised:
        if not caught:
            raise
        fault.training = None
        training.step()
        return raised
    return None


@final
class _Plainly:
    def __init__(self, batch: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


plainly = functools.cache(functools.partial(play, None))


@functools.cache
def calls(method: str, place: str) -> int:
    """How often the place is come to in a second step."""
    training, fault = Training(), Fault(KeyboardInterrupt(), -1)
    with training.manage(method) as memory:
        with memory.step(training.rows), needs_known(method):
            training.step()
        with memory.step(training.rows), PLACES[place](training, fault):
            training.step()
    return fault.calls


def without_gradients(state: State) -> State:
    return {name: value for name, value in state.items() if "gradient of" not in name}


def assert_as_plainly(method: str, place: str, at: int, kind: str, *, caught: bool) -> None:
    plain, found = plainly(place, at, kind, caught=caught), play(method, place, at, kind, caught=caught)
    as_often = method in TENSORS or not (place.startswith(ANYWHERE) and found.raised_in)
    if as_often and (method in TENSORS or plain.raised_in == found.raised_in):
        assert found.seen == plain.seen
        assert [difference(*pair) for pair in zip(plain.states, found.states, strict=True)] == [None] * 3
        return
    # A second run, of which plain PyTorch knows nothing, came to the place within the backward; or more ops are run.
    assert found.seen[0] is True
    assert found.seen[3:] == (None, type(None), type(None), False)
    if found.raised_in == "backward":
        plain = plainly(place, 1, kind, caught=caught, in_loss=True)
        pairs = [tuple(map(without_gradients, pair)) for pair in zip(plain.states, found.states, strict=True)]
        assert [difference(*pair) for pair in pairs] == [None] * 3
    else:
        assert place.startswith(ANYWHERE)


def cases(method: str) -> Iterator[tuple[str, int, str, bool]]:
    """Places, the first, middle and last time that they are come to, and exceptions of all kinds in turn."""
    turn = [*TENSORS, *BLOCKS].index(method)
    places = [*PLACES] if FULL_AUDIT else [*PLACES][turn % 6 :: 6]
    for number, place in enumerate(places, turn):
        most = calls(method, place)
        for moment, at in enumerate(dict.fromkeys((1, (most + 1) // 2, most))):
            for caught in (False, True):
                if FULL_AUDIT or caught == (number + moment) % 2:
                    yield place, at, [*KINDS][(number + moment + 5 * caught) % len(KINDS)], caught


@pytest.mark.long(but=1)
@pytest.mark.parametrize("method", [*TENSORS, *BLOCKS])
def test_what_the_users_code_raises_leaves_all_as_plainly_and_the_same_thread_trains_on(method: str) -> None:
    before = world()
    for case in cases(method):
        place, at, kind, caught = case
        assert_as_plainly(method, place, at, kind, caught=caught)
        assert clean_up(before) == [], case


WAYS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "finding": (1, {"method": "checkpoint"}),
        "rehearsing": (2, {"method": "mimose-published", "blocks": spillway.BlockOptions(names=["0", "2", "3"])}),
        "without content": (3, {"method": "checkpoint", "blocks": spillway.BlockOptions(names=["0", "2", "3"])}),
    }
)
"""Forwards of which plain PyTorch knows nothing, and the step in which they come."""


def counted(kind: str, wrong: int, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Of a training whose forward fails in a step, each time with a new exception: what is seen, and the state."""
    training = Training()
    session = spillway.manage(training.model, training.optimizer, budget="32 MiB", **options) if options else None
    step = session.step if session is not None else _Plainly
    counts = {"calls": 0}

    def does(x: Tensor) -> Tensor:
        counts["calls"] += 1
        if counts["calls"] == wrong:
            raise KINDS[kind]("mine")
        return x

    training.spot.does = does
    told: list[Any] = []
    for number in range(1, 5):
        rows = training.rows = list(torch.randn(16 * number, WIDTH, generator=torch.Generator().manual_seed(0)))
        try:
            with step(rows):
                training.step()
        except BaseException as error:
            told += [number, type(error), str(error), type(error.__cause__), type(error.__context__)]
        told.append(counts["calls"])
    if session is not None:
        session.close()
    return told, state_of(training.model, training.optimizer)


@pytest.mark.long(but=2)
@pytest.mark.parametrize("kind", ["Mine", "KeyboardInterrupt", "SystemExit", "SpillwayError"])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_forward_raises_is_raised_by_the_one_that_counts(way: str, kind: str) -> None:
    wrong, options = WAYS[way]
    (plain, state), (found, as_found) = counted(kind, wrong, None), counted(kind, wrong, options)
    assert found == plain
    assert difference(state, as_found) is None


@pytest.mark.parametrize("way", ["finding", "rehearsing"])
def test_what_a_signals_handler_raises_in_a_forward_that_is_forgotten_is_raised_at_once(
    way: str, tmp_path: Path
) -> None:
    training, calls = Training(), tmp_path / "calls"  # nobody puts back what is in a file

    def does(x: Tensor) -> Tensor:
        with calls.open("a") as file:
            file.write("one ")
        signal.raise_signal(signal.SIGALRM)
        return x

    def late(*_: object) -> None:
        raise TimeoutError

    training.spot.does = does
    before = signal.signal(signal.SIGALRM, late)
    try:
        with (
            spillway.manage(training.model, training.optimizer, budget="32 MiB", **WAYS[way][1]) as memory,
            pytest.raises(TimeoutError),
            memory.step(training.rows),
        ):
            training.step()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert calls.read_text() == "one "


@pytest.mark.parametrize("way", WAYS)
def test_closing_in_a_forward_that_is_forgotten_gives_the_model_its_own_back(way: str) -> None:
    training = Training()
    memory = spillway.manage(training.model, training.optimizer, budget="32 MiB", **WAYS[way][1])

    def does(x: Tensor) -> Tensor:
        memory.close()
        return x

    training.spot.does = does
    with memory.step(training.rows):
        training.step()
    assert not [module for module in training.model.modules() if "forward" in vars(module)]


def test_a_global_hook_of_optimizers_hears_of_the_users_alone() -> None:
    assert calls("checkpoint", "any optimizer") == 1
