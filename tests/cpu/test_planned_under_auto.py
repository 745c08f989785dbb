"""Under `auto`, steps that are watched op by op and come back often are recorded, planned and followed."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway.errors import BudgetInfeasible
from spillway.methods import LRU, ImprovedWindow
from spillway.session import planned_steps
from spillway.session.block_session import BlockSession
from spillway.session.planned_steps import PlannedSteps
from spillway.session.tensor_session import TensorSession
from spillway.units import MiB
from tests.cpu.test_paged_steps import BUDGET, LARGE, SMALL, Training

OFTEN, COMPARED = 3, 2


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned after few steps, and whatever these took."""
    monkeypatch.setattr(planned_steps, "OFTEN", OFTEN)
    monkeypatch.setattr(planned_steps, "COMPARED", COMPARED)
    turns = count()  # the planned steps take less than those before
    monkeypatch.setattr(planned_steps, "median", lambda seconds: next(turns))


class Chain:
    """A network without blocks, whose steps move as many bytes as it has weights, and more."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Bilinear(64, 64, 512)
        self.optimizer = torch.optim.Adam(self.model.parameters(), foreach=False)

    def batch(self, rows: int) -> Tensor:
        return torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))

    def step(self, x: Tensor) -> float:
        loss = self.model(x, x).relu().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    state = Training.state


def managed(training: Any, budget: int) -> Any:
    return spillway.manage(training.model, training.optimizer, budget=budget)


def trained(training: Any, rows: list[int], memory: Any) -> list[Any]:
    torch.manual_seed(1)
    losses = []
    for number in rows:
        x = training.batch(number)
        if memory is None:
            losses.append(training.step(x))
        else:
            with memory.step(x):
                losses.append(training.step(x))
    return [losses, training.state()]


def plans_of(memory: Any) -> PlannedSteps:
    now = memory._now
    plans = now._paging.plans if isinstance(now, BlockSession) else now._plans
    assert isinstance(plans, PlannedSteps)
    return plans


def followed(memory: Any) -> int:
    return sum(known.followed for known in plans_of(memory)._kinds.values())


def flat_budget() -> int:
    """Three of the four times that weights, gradients and state take."""
    return 3 * sum(one.nbytes for one in Chain().model.parameters()) + MiB


CASES = {
    "blocks that do not fit": (Training, BUDGET, [LARGE, SMALL, LARGE, LARGE, 960, SMALL, *[LARGE] * 8, 960, LARGE]),
    "no blocks": (Chain, 0, [128] * 9 + [96, 128, 96]),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_that_come_back_follow_a_plan_to_the_same_bits_within_the_budget(case: str) -> None:
    kind, budget, rows = CASES[case]
    budget = budget or flat_budget()
    plain, training = trained(kind(), rows, None), kind()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with managed(training, budget) as memory:
            assert trained(training, rows, memory) == plain
    assert isinstance(memory._now, BlockSession if kind is Training else TensorSession)
    assert max(one.peak_bytes for one in memory.history) <= budget
    assert followed(memory) >= COMPARED
    planned = [known for known in plans_of(memory)._kinds.values() if known.planned is not None]
    assert len(planned) == 1, "what is rare has none"
    assert planned[0].planned.plan.gaps
    assert planned[0].recordings == 1


def test_a_plan_that_is_no_faster_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([1.0, 1.0])  # the planned steps, and those before
    monkeypatch.setattr(planned_steps, "median", lambda seconds: next(answers))
    rows, training = [LARGE] * 12, Training()
    plain = trained(Training(), rows, None)
    with managed(training, BUDGET) as memory:
        assert trained(training, rows, memory) == plain
    (known,) = [one for one in plans_of(memory)._kinds.values() if one.seen >= OFTEN]
    assert known.left
    assert known.planned is None
    assert (known.recordings, known.followed) == (1, COMPARED)


@pytest.mark.parametrize("error", [MemoryError(), KeyError(3), BudgetInfeasible], ids=repr)
def test_where_no_plan_can_be_made_lru_goes_on_without_a_word(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if error is BudgetInfeasible:
        error = BudgetInfeasible(needed=2, allowed=1, op="an op", op_index=0, smallest_budget=2, exact=True)
    monkeypatch.setattr(ImprovedWindow, "plan", Mock(side_effect=error))
    rows, training = [LARGE] * 8, Training()
    plain = trained(Training(), rows, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with managed(training, BUDGET) as memory:
            assert trained(training, rows, memory) == plain
    (known,) = [one for one in plans_of(memory)._kinds.values() if one.seen >= OFTEN]
    assert (known.left, known.recordings, known.planned) == (True, 1, None)


def test_kinds_that_come_once_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_steps, "REMEMBERED", 4)
    training = Chain()
    with managed(training, flat_budget()) as memory:
        trained(training, [*[128] * 8, *range(96, 112)], memory)
    assert followed(memory) > 0
    assert len(plans_of(memory)._kinds) <= 6


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each question for room was one for `lru`, which may drop."""
    asked: list[bool] = []
    relieve = LRU.relieve

    def told(self: LRU, view: Any, needed: int) -> Any:
        asked.append(True)
        return relieve(self, view, needed)

    monkeypatch.setattr(LRU, "relieve", told)
    return asked


def test_lru_decides_until_then_and_not_while_a_step_is_recorded_or_follows(dropped: list[bool]) -> None:
    training, often = Training(), []
    with managed(training, BUDGET) as memory:
        for _ in range(10):
            del dropped[:]
            trained(training, [LARGE], memory)
            often.append((bool(dropped), followed(memory) > 0))
    assert [one for one, _ in often[:OFTEN]] == [True] * OFTEN
    first = next(number for number, (_, follows) in enumerate(often) if follows)
    assert not any(one for one, _ in often[first - 1 :]), "neither the recorded step nor those after it"


class _Failure(Exception):
    pass


@pytest.mark.parametrize("at", ["recorded", "followed"])
def test_a_step_that_fails_while_it_is_recorded_or_followed_leaves_everything_right(at: str) -> None:
    plain, training = Training(), Training()
    rows = [LARGE] * (OFTEN + 1 if at == "recorded" else OFTEN + 4)
    torch.manual_seed(1)
    with managed(training, BUDGET) as memory:
        for number, _ in enumerate([*rows, None, *rows]):
            x = training.batch(LARGE)
            if number == len(rows):
                for one, within in ((plain, None), (training, memory)):
                    state = torch.get_rng_state()
                    with pytest.raises(_Failure):
                        _fail(one, x, within)
                    torch.set_rng_state(state)
                continue
            state = torch.get_rng_state()
            loss = plain.step(x)
            torch.set_rng_state(state)
            with memory.step(x):
                assert training.step(x) == loss
    assert training.state() == plain.state()
    assert followed(memory) >= COMPARED


@pytest.mark.parametrize("at", ["recorded", "followed"])
def test_what_fails_again_and_again_is_left_and_nothing_of_it_is_held(at: str) -> None:
    plain, training = Training(), Training()
    batches = []
    with managed(training, BUDGET) as memory:
        plans = trained(training, [LARGE] * (OFTEN + 1 if at == "recorded" else OFTEN + 4), memory) and plans_of(memory)
        for left in (False, True):
            x = training.batch(LARGE)
            batches.append(weakref.ref(x))
            with pytest.raises(_Failure):
                _fail(training, x, memory)
            (known,) = [one for one in plans._kinds.values() if one.seen >= OFTEN]
            assert (known.left, plans._recorder) == (left, None)
            del x
        assert [one() for one in batches] == [None, None]
        last = trained(training, [LARGE] * 2, memory)
        assert (known.planned, known.recordings) == (None, int(at == "followed"))
    trained(plain, [LARGE] * (OFTEN + 1 if at == "recorded" else OFTEN + 4), None)
    for _ in batches:
        with pytest.raises(_Failure):
            _fail(plain, plain.batch(LARGE), None)
    assert last == trained(plain, [LARGE] * 2, None)


def _fail(training: Training, x: Tensor, memory: Any) -> None:
    def forward_and_fail() -> None:
        training.model(x).square().mean().backward()
        training.optimizer.zero_grad()
        raise _Failure

    if memory is None:
        forward_and_fail()
    else:
        with memory.step(x):
            forward_and_fail()


def test_another_budget_has_another_plan_and_one_that_all_fits_into_has_none() -> None:
    training, rows = Chain(), [128] * 8
    plain = trained(Chain(), rows * 3, None)
    small, losses = flat_budget(), []
    with managed(training, small) as memory:
        torch.manual_seed(1)
        for budget in (small, small + MiB, 64 * MiB):
            memory.budget = budget
            for number in rows:
                x = training.batch(number)
                with memory.step(x):
                    losses.append(training.step(x))
            known = list(plans_of(memory)._kinds.values())
            assert any(one.planned is not None for one in known) == (budget < 64 * MiB)
            assert memory.history[-1].peak_bytes <= budget
    assert [losses, training.state()] == plain
    assert memory.history[-1].ops == 0, "nobody watches what is known to fit"
