"""Planned sessions on the late device: the plan is followed, with the bits of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import spillway
from spillway.errors import BudgetInfeasible
from spillway.methods import AbstractPlanner, Planned, Window
from spillway.methods.planned import SelfPlanned
from spillway.methods.window.improved import ImprovedWindow
from spillway.workloads import seed_everything
from tests.cpu.families import FAMILIES, State, difference, state_of
from tests.cpu.late_device import LateStreams, late_session
from tests.cpu.test_planned_sessions import SETTINGS as MODELS
from tests.cpu.test_planned_sessions import STEPS, family_trained, followed, plain, planned_bytes, train


class Trained(NamedTuple):
    state: State
    losses: list[float]
    reports: list[spillway.StepReport]
    made: list[Planned | None]
    streams: LateStreams


def trained(name: str, planner: AbstractPlanner, budget: int, **options: Any) -> Trained:
    """As in `test_planned_sessions`, with pinned host memory in place of the disk."""
    seed_everything(0)
    setting = MODELS[name]()
    streams = LateStreams(**options.pop("streams", {}))
    losses, made = [], []
    with late_session(
        setting.model, [setting.optimizer], budget=budget, method=SelfPlanned(planner), streams=streams,
        host_budget=1 << 30, **options,
    ) as memory:  # fmt: skip
        for x in setting.batches:
            with memory.step(x):
                losses.append(train(setting, x))
            made.append(followed(memory))
    return Trained(state_of(setting.model, setting.optimizer), losses, memory.history, made, streams)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("planner", [Window, Window.as_published, ImprovedWindow])
@pytest.mark.parametrize(
    ("name", "exchanges"),
    # Without exchanging everything is in memory between steps, for which half of the peak is too little for the `mlp`.
    [("mlp", True), ("encoder", True), ("encoder", False), ("pictures", True), ("pictures", False)],
)
def test_a_plan_is_followed_with_late_copies_and_late_ops(
    name: str, exchanges: bool, planner: Callable[[], AbstractPlanner]
) -> None:
    state, losses, peak = plain(name)
    budget = peak // 2
    found = trained(name, planner(), budget, exchanges=exchanges, streams={"behind": 1 << 30})
    assert found.losses == losses
    assert difference(found.state, state) is None
    assert max(report.peak_bytes for report in found.reports) <= budget
    made = found.made[1]
    assert made is not None
    assert found.made == [None] + [made] * (STEPS - 1)
    assert made.diverged is None
    assert found.streams.pinned == 0
    _, back = planned_bytes(made)
    for report in found.reports[3:]:
        assert report.bytes_out_beside > report.bytes_out / 2
        assert report.bytes_in_beside > report.bytes_in / 2 > 0
        assert not exchanges or report.bytes_in <= back  # else what the end of the step brought back too


@pytest.mark.long(but=1)
@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "unet"])
def test_a_family_trains_to_the_same_bits_by_plan_with_late_copies(name: str, exchanges: bool) -> None:
    expected = family_trained(name)
    budget = max(report.peak_bytes for report in family_trained(name, "keep-all").reports) * 3 // 4
    built = FAMILIES[name](0)
    with late_session(
        built.model, built.optimizers, budget=budget, method=SelfPlanned(Window()), exchanges=exchanges,
        host_budget=1 << 30, streams=LateStreams(behind=1 << 30),
    ) as memory:  # fmt: skip
        for batch in built.batches[:2]:
            for _ in range(4):
                with memory.step(batch):
                    built.step(built.model, built.optimizers, batch)
        made = followed(memory)
    assert difference(state_of(built.model, built.optimizers), expected.state) is None
    assert made is not None
    assert made.diverged is None
    assert max(report.peak_bytes for report in memory.history) <= budget


def test_an_end_of_the_step_for_which_there_is_no_room_is_refused_with_the_numbers() -> None:
    budget = plain("mlp")[2] // 2
    with pytest.raises(
        BudgetInfeasible, match=r"\(the end of the step\) needs [\d.]+ MiB .* and [\d.]+ MiB are allowed"
    ):
        trained("mlp", Window(), budget, exchanges=False)
