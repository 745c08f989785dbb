"""The budget of an open session changes between steps: the bits stay, each step keeps the budget of its time."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import spillway
from spillway.errors import BudgetError, BudgetInfeasible, SessionError
from spillway.methods import METHODS, Mimose
from spillway.methods.by_block import BlockPlan
from spillway.report.live import Console, LiveLine
from spillway.session.auto_session import AutoSession
from spillway.session.block_session import BlockSession
from spillway.session.tensor_session import TensorSession
from tests.cpu.test_block_session import Training, run
from tests.shared import in_turn

EACH = spillway.ReportOptions(timeline=True)
LENGTHS = (64, 48) * 8
METHODS_OF_ALL_KINDS = ("lru", "delta", "window", "mimose", "mimose-published", "checkpoint", "auto")


def managed(training: Training, budget: Any, method: Any) -> Any:
    return spillway.manage(training.model, training.optimizer, budget=budget, method=method, report=EACH)


@pytest.fixture(scope="module")
def plain() -> tuple[list[bytes], int, int]:
    """Bits, the bytes with which steps begin, and the peak with everything kept."""
    training = Training(LENGTHS)
    with managed(training, None, "mimose") as memory:
        bits = run(training, memory)
    return bits, memory.history[-1].start_bytes, max(one.peak_bytes for one in memory.history)


def changing(training: Training, memory: Any, budgets: dict[int, int | None]) -> list[bytes]:
    """Train on all batches, with other budgets before these steps; losses and final state."""
    torch.manual_seed(1)
    losses = []
    for number, tokens in enumerate(training.batches):
        if number in budgets:
            memory.budget = budgets[number]
            assert memory.budget == budgets[number]
        with memory.step(tokens):
            losses.append(training.step(tokens))
    return [*(loss.numpy().tobytes() for loss in losses), *training.state()]


@pytest.mark.long
@pytest.mark.parametrize(("method", "first"), in_turn(METHODS_OF_ALL_KINDS, [None, 0.9]))
def test_every_step_keeps_the_budget_of_its_time(
    method: str, first: float | None, plain: tuple[list[bytes], int, int]
) -> None:
    bits, start, peak = plain
    shares = {0: first, 4: 0.5, 8: 0.8, 10: None, 12: 0.4}
    budgets = {step: None if share is None else int(start + share * (peak - start)) for step, share in shares.items()}
    training = Training(LENGTHS)
    with managed(training, budgets[0], method) as memory:
        assert changing(training, memory, budgets) == bits
    assert len(memory.history) == len(LENGTHS)
    assert [one.step for one in memory.history] == [*range(len(LENGTHS))]
    allowed = None
    for number, report in enumerate(memory.history):
        allowed = budgets.get(number, allowed)
        if allowed is not None:
            assert report.allowed == allowed
            assert report.peak_bytes <= allowed
    assert max(one.peak_bytes for one in memory.history[10:12]) > budgets[4], "without a budget nothing gives way"


def test_auto_plans_for_the_budget_that_there_is_now(plain: tuple[list[bytes], int, int]) -> None:
    _, start, peak = plain
    roomy, tight = (int(start + share * (peak - start)) for share in (0.95, 0.45))
    training = Training((64,) * 16)
    with managed(training, roomy, "auto") as memory:
        changing(training, memory, {8: tight})
    before, after = memory.history[7], memory.history[-1]
    assert tight < before.projected_bytes <= roomy
    assert 0 < after.projected_bytes <= tight
    assert after.peak_bytes <= tight < before.peak_bytes
    assert after.recomputed_blocks + after.moves > 0


def test_a_plan_that_is_trusted_whatever_is_available_is_made_again(plain: tuple[list[bytes], int, int]) -> None:
    _, start, peak = plain
    made: list[BlockPlan] = []
    begin = Mimose.begin

    def told(self: Mimose, size: Any, available: int) -> Any:
        decision = begin(self, size, available)
        made.append(decision.plan)
        return decision

    training = Training((64,) * 16)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Mimose, "begin", told)
        with managed(training, int(start + 0.9 * (peak - start)), "mimose-published") as memory:
            changing(training, memory, {13: int(start + 0.5 * (peak - start))})
    assert made[-4] is not made[-1]
    assert made[-1].available < made[-4].available


@pytest.mark.long
def test_steps_that_were_planned_op_by_op_are_recorded_and_planned_anew(plain: tuple[list[bytes], int, int]) -> None:
    _, start, peak = plain
    roomy, tight = (int(start + share * (peak - start)) for share in (0.9, 0.6))
    training = Training((64,) * 8)
    with managed(training, roomy, "window") as memory:
        changing(training, memory, {})
        first = memory._engine.controller.policy.planned
        memory.budget = tight
        assert memory._plans._kinds.keys()
        changing(training, memory, {})
        second = memory._engine.controller.policy.planned
    assert first is not None
    assert second is not None
    assert first is not second


def test_auto_without_a_budget_looks_for_blocks_when_one_is_named(plain: tuple[list[bytes], int, int]) -> None:
    bits, start, peak = plain
    training = Training(LENGTHS)
    with managed(training, None, "auto") as memory:
        assert isinstance(memory, AutoSession)
        assert isinstance(memory._now, TensorSession)
        assert changing(training, memory, {6: int(start + 0.6 * (peak - start))}) == bits
        assert isinstance(memory._now, BlockSession)
        assert any(one.recomputed_blocks for one in memory.history)


@pytest.mark.long
@pytest.mark.parametrize("method", ["lru", "mimose", "auto"])
def test_less_than_has_to_be_there_is_refused_when_the_next_step_begins_and_more_helps(method: str) -> None:
    training, plainly = Training((64,) * 3), Training((64,) * 3)
    with managed(training, "1GiB", method) as memory:
        bits = changing(training, memory, {})
        memory.budget = 5000
        with pytest.raises(BudgetInfeasible, match="smallest budget") as refused, memory.step(training.batches[0]):
            training.step(training.batches[0])
        assert refused.value.allowed == 5000
        memory.budget = "1GiB"
        with memory.step(training.batches[0]):
            training.step(training.batches[0])
    assert bits == run(plainly, None)


def test_what_left_under_a_small_budget_is_right_under_a_large_one(plain: tuple[list[bytes], int, int]) -> None:
    bits, start, peak = plain
    training = Training(LENGTHS)
    with managed(training, int(start + 0.3 * (peak - start)), "lru") as memory:
        assert changing(training, memory, {3: None, 6: int(start + 0.3 * (peak - start)), 9: peak * 2}) == bits
        assert sum(one.bytes_out for one in memory.history) > 0


@pytest.mark.parametrize("method", sorted(METHODS))
def test_bad_budgets_are_refused_in_one_sentence_and_change_nothing(method: str) -> None:
    training = Training((24,))
    with managed(training, "1GiB", method) as memory:
        for bad in ("4G", "-1", 0, "0%", "200%", 0.5, True, "1000TiB"):
            with pytest.raises(BudgetError) as refused:
                memory.budget = bad
            assert str(refused.value).count(". ") == 0
        assert memory.budget == 1 << 30


@pytest.mark.parametrize("method", ["lru", "mimose", "auto"])
def test_it_changes_between_steps_alone(method: str) -> None:
    training = Training((24,))
    memory = managed(training, "1GiB", method)
    with memory.step(training.batches[0]), pytest.raises(SessionError, match="when the step has ended"):
        memory.budget = "2GiB"
    assert memory.budget == 1 << 30
    memory.close()
    with pytest.raises(SessionError, match="closed"):
        memory.budget = "2GiB"


def test_the_live_line_shows_the_budget_of_its_step() -> None:
    training, written = Training((24, 24)), io.StringIO()
    with managed(training, "1GiB", "lru") as memory:
        changing(training, memory, {1: 2 << 30})
    live = LiveLine(console=Console(file=written, width=200))
    live.update(memory.history[1])
    live.close()
    assert "of 2.00 GiB" in written.getvalue()
