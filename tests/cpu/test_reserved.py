"""What the resident set was too far above the budget is reserved in the steps that follow, as far as that helps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

import pytest
import torch

from spillway.engines.tensors import cpu_backend
from spillway.engines.tensors.cpu_backend import CpuBackend
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.errors import BudgetInfeasible, SpillCorruptedError
from spillway.internals.dispatch_key import unwatched
from spillway.internals.process_memory import Reclaimer, ResidentSet
from spillway.methods import LRU, Fetch, Move, Proposal
from spillway.methods.base import MemoryView
from spillway.session import ReportOptions, SpillOptions, manage
from spillway.session.tensor_session import TensorSession
from spillway.units import KiB, MiB

BUDGET = 10 * MiB
START = 100 * MiB
"""What is resident before the model."""

RisesTo = Callable[[float], None]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[TensorEngine]:
    """Of a budget that is large enough to be adjusted."""
    monkeypatch.setattr(cpu_backend, "LEAST_ADJUSTED", MiB)
    engine = TensorEngine(LRU(short_chain=0), BUDGET)
    yield engine
    engine.close()


@pytest.fixture
def rises_to(monkeypatch: pytest.MonkeyPatch) -> RisesTo:
    """Let so many budgets be resident above the start, all of it in use, when 1 MiB more is about to come."""

    def rise(budgets: float) -> None:
        monkeypatch.setattr(ResidentSet, "read", lambda self: START + int(budgets * BUDGET) - MiB)
        monkeypatch.setattr(ResidentSet, "trim", lambda self: None)

    return rise


def pressed(engine: TensorEngine, tensors: int = 20) -> None:
    """A step that needs so many MiB."""
    engine.begin_step([], base_rss=START)
    try:
        kept = [torch.ones(MiB // 4) for _ in range(tensors)]
        assert all(tensor.sum() == MiB // 4 for tensor in kept)
    finally:
        engine.end_step()
    del kept


def reserved(engine: TensorEngine) -> int:
    """In the next step; its budget is what it was."""
    engine.begin_step([], base_rss=START)
    engine.end_step()
    assert engine.controller.budget.allowed + engine.controller.budget.reserved == BUDGET
    return engine.controller.budget.reserved


def test_what_was_above_a_tenth_is_reserved_from_the_next_step_on(engine: TensorEngine, rises_to: RisesTo) -> None:
    rises_to(1.1)
    pressed(engine)
    assert reserved(engine) <= KiB
    rises_to(1.15)
    pressed(engine)
    assert reserved(engine) == pytest.approx(0.05 * BUDGET, abs=KiB)
    rises_to(1.1)
    pressed(engine)
    assert engine.controller.budget.peak <= 0.95 * BUDGET + KiB
    assert reserved(engine) == pytest.approx(0.05 * BUDGET, abs=KiB), "it is what keeps it there"


def test_what_is_not_needed_any_more_is_given_back_little_by_little(engine: TensorEngine, rises_to: RisesTo) -> None:
    rises_to(1.2)
    pressed(engine)
    before = reserved(engine)
    rises_to(0.5)
    pressed(engine)
    assert before - reserved(engine) == pytest.approx(0.05 * BUDGET / cpu_backend.GIVEN_BACK, abs=KiB)
    for _ in range(40):
        pressed(engine)
    assert reserved(engine) == 0


def test_it_is_never_more_than_a_share_of_the_budget(engine: TensorEngine, rises_to: RisesTo) -> None:
    rises_to(3)  # the program read its data, say
    for _ in range(3):
        pressed(engine)
    assert reserved(engine) == int(cpu_backend.MOST_RESERVED * BUDGET)
    rises_to(1)
    pressed(engine)
    assert reserved(engine) < int(cpu_backend.MOST_RESERVED * BUDGET), "nothing beyond it is remembered"


def test_from_a_step_from_which_nothing_leaves_nothing_is_learned(engine: TensorEngine, rises_to: RisesTo) -> None:
    rises_to(2)
    pressed(engine, tensors=5)
    assert reserved(engine) == 0


def test_small_budgets_are_left_alone(engine: TensorEngine, rises_to: RisesTo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_backend, "LEAST_ADJUSTED", BUDGET + 1)
    rises_to(2)
    pressed(engine)
    assert reserved(engine) == 0


def test_rather_than_refuse_an_op_the_whole_budget_is_allowed(engine: TensorEngine, rises_to: RisesTo) -> None:
    rises_to(3)
    pressed(engine)
    engine.begin_step([], base_rss=START)
    try:
        assert engine.controller.budget.allowed < 9 * MiB
        wide = torch.ones(9 * MiB // 8)
        assert (wide + wide).sum() == 9 * MiB // 4  # 9 MiB, and a sum
        assert (engine.controller.budget.allowed, engine.controller.budget.reserved) == (BUDGET, 0)
        with pytest.raises(BudgetInfeasible) as refused:
            torch.ones(4 * MiB)
        assert refused.value.allowed == BUDGET
    finally:
        engine.end_step()
    assert reserved(engine) > 0, "the next step does without it again"


class RefusesOnce(LRU):
    """Refuses by itself where less than the budget is allowed, as paging on demand does beyond its limit."""

    def relieve(self, view: MemoryView, needed: int) -> Generator[Proposal, bool, None]:
        if view.allowed < BUDGET:
            raise BudgetInfeasible(
                needed=BUDGET, allowed=view.allowed, op="a test", op_index=0, smallest_budget=BUDGET, exact=False
            )
        yield from super().relieve(view, needed)


def test_a_step_that_took_it_does_not_learn_the_same_again(engine: TensorEngine, rises_to: RisesTo) -> None:
    rises_to(1.15)
    pressed(engine)
    for _ in range(3):
        engine.begin_step([], base_rss=START)
        try:
            half = torch.ones(BUDGET // 8 - 256)
            assert (half + 1).sum() == 2 * half.numel()  # all of the budget
            assert engine.controller.budget.reserved == 0
            torch.ones(MiB // 4)
        finally:
            engine.end_step()
        del half
    assert reserved(engine) == pytest.approx(0.05 * BUDGET, abs=KiB)


def test_a_method_that_refuses_is_asked_again_with_the_whole_budget(
    monkeypatch: pytest.MonkeyPatch, rises_to: RisesTo
) -> None:
    monkeypatch.setattr(cpu_backend, "LEAST_ADJUSTED", MiB)
    engine = TensorEngine(RefusesOnce(short_chain=0), BUDGET)
    rises_to(2)
    try:
        for _ in range(2):
            pressed(engine)
        assert engine.controller.counters.moves > 0
        assert (engine.controller.budget.allowed, engine.controller.budget.reserved) == (BUDGET, 0)
    finally:
        engine.close()


def test_what_is_not_needed_does_not_take_it(engine: TensorEngine, rises_to: RisesTo) -> None:
    rises_to(3)
    pressed(engine)
    engine.begin_step([], base_rss=START)
    controller = engine.controller
    try:
        allowed, kept = controller.budget.allowed, controller.budget.reserved
        with controller.budget.keeping_reserve(), pytest.raises(BudgetInfeasible):
            controller.make_room(BUDGET, "a test")
        assert (controller.budget.allowed, controller.budget.reserved) == (allowed, kept)
    finally:
        engine.end_step()


def test_a_session_reserves_nothing_if_freed_memory_is_kept(monkeypatch: pytest.MonkeyPatch, rises_to: RisesTo) -> None:
    monkeypatch.setattr(cpu_backend, "LEAST_ADJUSTED", KiB)
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)])
    for return_freed in (True, False):
        with manage(
            model,
            budget=BUDGET // 4,
            method=LRU(short_chain=0),
            spill=SpillOptions(return_freed=return_freed),
            report=ReportOptions(timeline=True),
        ) as session:
            monkeypatch.setattr(ResidentSet, "read", lambda self: 1 << 40)
            for _ in range(2):
                with session.step():
                    model(torch.ones(2048, 128)).sum().backward()
        last = session.history[-1]
        assert last.moves
        assert (last.reserved_bytes > 0) == return_freed
        assert last.allowed == BUDGET // 4
        assert session.timeline is not None
        assert session.timeline.allowed == BUDGET // 4
        monkeypatch.undo()
        monkeypatch.setattr(cpu_backend, "LEAST_ADJUSTED", KiB)


def test_a_step_that_fits_the_budget_but_not_what_is_left_of_it_is_managed() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = torch.ones(1024, 64)

    def managed(session: Any) -> bool:
        with session.step(batch):
            model(batch).sum().backward()
            optimizer.step()
        return session.history[-1].managed

    with manage(model, optimizer, budget=100 * MiB, method="lru") as session:
        assert [managed(session) for _ in range(4)][-1] is False
        assert isinstance(session, TensorSession)
        controller = session._engine.controller
        budget, most = controller.budget, max(report.peak_bytes for report in session.history if report.ops)
        budget.reserve(budget.named - most + KiB, spendable=True)
        assert managed(session)
        assert not managed(session), "nothing was learned that is to be reserved"


def test_what_workers_bring_is_counted_until_it_arrives_is_given_up_or_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = TensorEngine(LRU(short_chain=0), 100 * MiB)
    place, controller = cast(CpuBackend, engine.backend), engine.controller
    kept = torch.ones(MiB // 4)

    def begin() -> None:
        with controller.lock, unwatched():
            storage: Any = engine.lookup(kept)
            assert controller.grant(Move(storage))
            assert controller.grant(Fetch(storage))
        assert arriving(place.reclaimer) == MiB

    try:
        engine.begin_step([("kept", kept)], base_rss=START)
        begin()
        assert kept.sum() == MiB // 4
        assert arriving(place.reclaimer) == 0
        begin()
        engine.end_step()
        assert arriving(place.reclaimer) == 0, "given up"
        engine.begin_step([("kept", kept)], base_rss=START)
        kept.add_(0)
        with monkeypatch.context() as patch:
            patch.setattr(type(place.tier), "read", cannot_be_read)
            begin()
            with pytest.raises(SpillCorruptedError):
                kept.sum()
        assert arriving(place.reclaimer) == 0
        engine.end_step()
    finally:
        engine.close()


def cannot_be_read(*_: object) -> bool:
    raise SpillCorruptedError("a test")


def arriving(reclaimer: Reclaimer) -> int:
    return reclaimer._arriving
