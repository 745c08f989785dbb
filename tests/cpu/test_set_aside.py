"""What the resident set was above the budget is set aside in the steps that follow, as far as that helps anybody."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from spillway.engines.tensors import places
from spillway.engines.tensors.engine import TensorEngine
from spillway.methods import LRU
from spillway.session import manage
from spillway.units import KiB, MiB

BUDGET = 10 * MiB


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[TensorEngine]:
    """Of a budget that is large enough to be adjusted, in a process whose resident set begins at 100 MiB."""
    monkeypatch.setattr(places, "LEAST_ADJUSTED", MiB)
    engine = TensorEngine(LRU(short_chain=0), BUDGET)
    yield engine
    engine.close()


@pytest.fixture
def rises_to(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let the highest resident set above the start be so many budgets."""

    def rise(budgets: float) -> None:
        monkeypatch.setattr(places, "peak_anonymous", lambda: 100 * MiB + int(budgets * BUDGET))

    return rise


def pressed(engine: TensorEngine, tensors: int = 20) -> None:
    """A step that needs so many MiB."""
    engine.begin_step([], base_rss=100 * MiB)
    try:
        kept = [torch.ones(MiB // 4) for _ in range(tensors)]
        assert all(tensor.sum() == MiB // 4 for tensor in kept)
    finally:
        engine.end_step()
    del kept


def aside(engine: TensorEngine) -> int:
    """What the next step does without; its budget is what it was."""
    engine.begin_step([], base_rss=100 * MiB)
    engine.end_step()
    assert engine.controller.allowed + engine.place.measured().reserved == BUDGET
    return engine.place.measured().reserved


def test_what_was_above_a_tenth_is_set_aside_from_the_next_step_on(
    engine: TensorEngine, rises_to: Callable[[float], None]
) -> None:
    rises_to(1.1)
    pressed(engine)
    assert aside(engine) == 0
    rises_to(1.15)
    pressed(engine)
    assert aside(engine) == pytest.approx(0.05 * BUDGET, abs=2)
    rises_to(1.1)
    pressed(engine)
    assert engine.controller.peak <= 0.95 * BUDGET + 2
    assert aside(engine) == pytest.approx(0.05 * BUDGET, abs=2), "it is what keeps it there"


def test_it_is_never_more_than_a_share_of_the_budget(engine: TensorEngine, rises_to: Callable[[float], None]) -> None:
    rises_to(3)  # the program read its data, say
    pressed(engine)
    assert aside(engine) == int(places.MOST_SET_ASIDE * BUDGET)


def test_a_step_from_which_nothing_leaves_is_left_alone(
    engine: TensorEngine, rises_to: Callable[[float], None]
) -> None:
    rises_to(2)
    pressed(engine, tensors=5)
    assert aside(engine) == 0


def test_small_budgets_are_left_alone(
    engine: TensorEngine, rises_to: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "LEAST_ADJUSTED", BUDGET + 1)
    rises_to(2)
    pressed(engine)
    assert aside(engine) == 0


def test_rather_than_refuse_an_op_it_is_taken(engine: TensorEngine, rises_to: Callable[[float], None]) -> None:
    rises_to(3)
    pressed(engine)
    engine.begin_step([], base_rss=100 * MiB)
    try:
        assert engine.controller.allowed < 9 * MiB
        wide = torch.ones(9 * MiB // 8)
        assert (wide + wide).sum() == 9 * MiB // 4  # 9 MiB, and a sum
        assert (engine.controller.allowed, engine.place.measured().reserved) == (BUDGET, 0)
    finally:
        engine.end_step()
    assert aside(engine) > 0, "the next step does without it again"


def test_a_session_sets_nothing_aside_if_freed_memory_is_kept(
    monkeypatch: pytest.MonkeyPatch, rises_to: Callable[[float], None]
) -> None:
    monkeypatch.setattr(places, "LEAST_ADJUSTED", KiB)
    monkeypatch.setattr(places, "peak_anonymous", lambda: 1 << 40)
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)])
    for return_freed in (True, False):
        with manage(model, budget=BUDGET // 4, method=LRU(short_chain=0), return_freed=return_freed) as session:
            for _ in range(2):
                with session.step():
                    model(torch.ones(2048, 128)).sum().backward()
        last = session.history[-1]
        assert last.moves
        assert last.allowed == BUDGET // 4
        assert (last.reserved_bytes > 0) == return_freed
