"""What is simulated is what runs: the same step under the same budget, decision by decision."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from math import inf
from typing import Any
from unittest.mock import patch

import pytest
import torch

import spillway
from spillway.costs.device import DEVICES
from spillway.ir import Change, Gap, Host, Op, Plan, Recompute, Recorded, Step, Timeline, verify
from spillway.ir.block_calls import block_calls
from spillway.ir.recipes import as_one
from spillway.memory.ledger import SMALLEST_MOVABLE
from spillway.methods import DTR, LRU, Checkmate, KeepAll, Planned, Problem, SqrtN, Swap
from spillway.methods.base import AbstractPlanner, AbstractPolicy
from spillway.native.arena import Arena
from spillway.session.tensor_session import TensorSession
from spillway.simulation.simulated_engine import Simulation, simulate
from spillway.units import Bytes
from spillway.workloads.named import get
from spillway.workloads.recorded import record
from spillway.workloads.workload import Workload
from tests.cpu.families import difference, state_of
from tests.pure.test_ir_properties import Machine, idle_intervals, plan_of, verdict

SMALL: dict[str, dict[str, Any]] = {
    "resnet": {"batch": 4, "width": 8, "blocks": (1, 1, 1, 1)},
    "deep-narrow": {"layers": 12, "batch": 64},
    "stdlib-lm": {"width": 32, "layers": 2, "heads": 2, "longest": 64},
}
STEPS = 2
MOST_DROPS = 10
"""To verify a plan takes a while."""


def workload(name: str) -> Workload:
    return get(name, **SMALL[name])


@pytest.fixture(scope="module", params=SMALL)
def recorded(request: pytest.FixtureRequest) -> Recorded:
    return record(workload(request.param))


def real(
    name: str, allowed: Bytes, method: AbstractPolicy
) -> tuple[list[spillway.StepReport], list[Timeline], Workload]:
    """Every step's report and timeline, and what they leave. One plain step goes before, as in the recording."""
    made = workload(name)
    batch = next(iter(made.batches(1)))
    made.train_step(batch)
    timelines = []
    with spillway.manage(
        made.model, made.optimizers, budget=allowed, method=method, report=spillway.ReportOptions(timeline=True)
    ) as memory:
        assert isinstance(memory, TensorSession)
        for _ in range(STEPS):
            memory._most_pressure = (False, -1, 0)  # so that this step's is kept
            with memory.step(batch):
                made.train_step(batch)
            assert memory.timeline is not None
            timelines.append(memory.timeline)
    return memory.history, timelines, made


def decisions(timeline: Timeline) -> list[tuple[int, str, int, Bytes]]:
    """All that came and went, but for births and deaths. A storage of the step is told by its place among those that
    the step creates, one from before by 0; both by their size."""
    created = [event.storage for event in timeline.events if event.change is Change.CREATE]
    first, nbytes = min(created), {line.storage: line.nbytes for line in timeline.storages}
    return [
        (event.op, event.change.value, max(event.storage - first + 1, 0), nbytes[event.storage])
        for event in timeline.events
        if event.change not in (Change.CREATE, Change.DIE)
    ]


def simulated(step: Step, allowed: Bytes, method: AbstractPolicy, steps: int) -> Simulation:
    with patch("spillway.simulation.simulated_engine.THRASH", inf):
        return simulate(step, allowed=allowed, method=method, device=DEVICES["a100"], tier="disk", steps=steps)


WITHOUT_SECONDS: dict[str, Callable[[], AbstractPolicy]] = {
    "lru": partial(LRU, worth=inf),
    "largest": DTR.named("largest"),
}
"""Policies that do not decide by seconds, which are measured there and recorded here, nor as UVM by what lies beside a
storage in a page."""


@pytest.mark.long(but=2)
@pytest.mark.parametrize("share", [0.8, 0.6, 0.5])
@pytest.mark.parametrize("method", WITHOUT_SECONDS)
def test_every_decision_and_the_peak_are_those_of_the_tensor_engine(
    recorded: Recorded, method: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arena, "for_session", lambda: None)  # on paper nobody knows what ops take for themselves
    step, policy = recorded.step, WITHOUT_SECONDS[method]
    allowed = int(step.plain_peak() * share)
    reports, timelines, _ = real(recorded.workload, allowed, policy())
    for number, (report, timeline) in enumerate(zip(reports, timelines, strict=True)):
        ran = simulated(step, allowed, policy(), number + 1)
        assert ran.status == "ok"
        assert decisions(ran.timeline) == decisions(timeline)
        assert ran.peak_bytes == report.peak_bytes
        figures = (report.moves, report.drops, report.recomputed_ops, report.bytes_out, report.bytes_in)
        assert (ran.moves, ran.drops, ran.recomputed_ops, ran.bytes_out, ran.bytes_in) == figures
    assert any(decisions(timeline) for timeline in timelines)


@cache
def random_plan(name: str, seed: int) -> tuple[Step, Plan]:
    """A recording of the workload, and a plan by which half of all values of a page or more are gone for as long as
    nothing uses them: a few are recomputed by the op that made them where that verifies, the others moved. The plan
    projects what it needs."""
    step = record(workload(name)).step
    draw, gaps, drops = random.Random(seed), list[Gap](), 0
    creator = {value: op for op in step.ops for value in op.creates}
    for value, start, end in idle_intervals(step):
        info = step.storages[step.values[value].storage]
        if info.nbytes < SMALLEST_MOVABLE or draw.random() < 0.5:
            continue
        gaps.append(Gap(value=value, start=start, end=end, home=Host()))
        made = creator.get(value)
        if made is not None and drops < MOST_DROPS and value in step.ops[min(end, len(step.ops) - 1)].reads:
            dropped = replace(gaps[-1], home=Recompute(ops=(made.number,), temporaries=temporaries_of(step, made)))
            if verdict(plan_of(step, [*gaps[:-1], dropped]), step) is None:
                drops, gaps[-1] = drops + 1, dropped
    machine = Machine(step=step, plan=plan_of(step, gaps))
    machine.run()
    plan = replace(plan_of(step, gaps), projected=machine.peak, allowed=machine.peak)
    verify(plan, step, machine.peak)
    return step, plan


def temporaries_of(step: Step, op: Op) -> Bytes:
    return sum(step.storages[step.values[value].storage].nbytes for value in op.creates)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_a_plan_is_followed_on_real_tensors_as_on_paper(
    recorded: Recorded, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arena, "for_session", lambda: None)  # on paper nobody knows what ops take for themselves
    step, plan = random_plan(recorded.workload, seed)
    followed = Planned(plan, step, ahead=0)
    # The engine expects more of some ops than they create, until it has seen them; on paper sizes are known.
    allowed = int(plan.projected * 1.05)
    reports, timelines, managed = real(recorded.workload, allowed, followed)
    assert followed.diverged is None
    assert sum(report.drops for report in reports) > 0
    assert sum(report.moves for report in reports) > 0
    assert max(report.peak_bytes for report in reports) <= plan.projected < step.plain_peak()
    for number, timeline in enumerate(timelines):
        ran = simulated(step, allowed, Planned(plan, step, ahead=0), number + 1)
        assert decisions(ran.timeline) == decisions(timeline)
        assert ran.peak_bytes == reports[number].peak_bytes
    _, _, plain = real(recorded.workload, 4 * step.plain_peak(), KeepAll())
    assert difference(state_of(plain.model, *plain.optimizers), state_of(managed.model, *managed.optimizers)) is None


PLANNERS: dict[str, Callable[[], AbstractPlanner]] = {
    "sqrt-n": SqrtN, "swap": Swap, "checkmate": partial(Checkmate, time_limit=10.0, most_nodes=16),
}  # fmt: skip


@pytest.mark.long(but=1)
@pytest.mark.parametrize("method", PLANNERS)
def test_what_a_planner_planned_is_done_on_real_tensors_as_on_paper(recorded: Recorded, method: str) -> None:
    step = recorded.step
    allowed = int(step.plain_peak() * 0.9)
    problem = Problem(step=step, allowed=allowed, device=DEVICES["a100"])
    plan = PLANNERS[method]().plan(problem)
    verify(plan, step, allowed)
    # The engine expects more of some ops than they create, until it has seen them; on paper sizes are known.
    roomy = step.plain_peak()
    followed = Planned(plan, step, ahead=0)
    reports, timelines, managed = real(recorded.workload, roomy, followed)
    assert followed.diverged is None
    assert sum(report.drops + report.moves for report in reports) > 0
    for number, timeline in enumerate(timelines):
        ran = simulated(step, roomy, Planned(plan, step, ahead=0), number + 1)
        assert decisions(ran.timeline) == decisions(timeline)
        assert ran.peak_bytes == reports[number].peak_bytes <= allowed
    _, _, plain = real(recorded.workload, 4 * step.plain_peak(), KeepAll())
    assert difference(state_of(plain.model, *plain.optimizers), state_of(managed.model, *managed.optimizers)) is None


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", ["resnet", "stdlib-lm"])
def test_blocks_are_recomputed_on_real_tensors_as_on_paper_each_op_once(name: str) -> None:
    step = record(workload(name)).step
    calls = block_calls(step)
    # What is small stays where it is on real tensors.
    gaps = [gap for call in calls for gap in as_one([gap for gap in call.gaps if _movable(step, gap)], step)]
    plan = replace(plan_of(step, gaps), projected=4 * step.plain_peak(), allowed=4 * step.plain_peak())
    verify(plan, step, plan.allowed)
    reports, timelines, managed = real(name, plan.allowed, Planned(plan, step))
    replayed = {(gap.end, op) for gap in gaps if isinstance(gap.home, Recompute) for op in gap.home.ops}
    assert reports[0].drops == len(gaps) > len(calls)
    assert 0 < reports[0].recomputed_ops <= len(replayed)
    for number, timeline in enumerate(timelines):
        ran = simulated(step, plan.allowed, Planned(plan, step), number + 1)
        assert decisions(ran.timeline) == decisions(timeline)
        assert (ran.peak_bytes, ran.recomputed_ops) == (reports[number].peak_bytes, reports[number].recomputed_ops)
    _, _, plain = real(name, plan.allowed, KeepAll())
    assert difference(state_of(plain.model, *plain.optimizers), state_of(managed.model, *managed.optimizers)) is None


def _movable(step: Step, gap: Gap) -> bool:
    return step.storages[step.values[gap.value].storage].nbytes >= SMALLEST_MOVABLE


@pytest.mark.long
def test_a_plan_whose_copies_run_beside_ops_is_exact_and_within_its_budget(recorded: Recorded) -> None:
    step, plan = random_plan(recorded.workload, 1)
    reports, _, managed = real(recorded.workload, plan.projected, Planned(plan, step, ahead=4))
    assert max(report.peak_bytes for report in reports) <= plan.projected
    _, _, plain = real(recorded.workload, 4 * step.plain_peak(), KeepAll())
    assert difference(state_of(plain.model, *plain.optimizers), state_of(managed.model, *managed.optimizers)) is None


@pytest.mark.long(but=1)
def test_a_plan_for_another_size_is_left_and_the_step_is_finished(recorded: Recorded) -> None:
    """The same workload on other batches: the step is not the one that the plan is for."""
    step, plan = random_plan(recorded.workload, 1)
    made = workload(recorded.workload)
    first, *others = made.batches(3)
    made.train_step(first)
    followed = Planned(plan, step)
    other = [tensor[:-1] if isinstance(tensor, torch.Tensor) else tensor for tensor in _tensors(others[0])]
    if isinstance(others[0], dict):
        other = dict(zip(others[0], other, strict=True))  # type: ignore[assignment]
    with spillway.manage(made.model, made.optimizers, budget=plan.projected, method=followed) as memory:
        said = (
            rf"^The plan is for another step, of {len(step.ops)} ops: this one, of \d+, is different from op \d+ on, "
        )
        with pytest.warns(UserWarning, match=said) as told, memory.step(other):
            made.train_step(other)
        assert (len(told), told[0].filename) == (1, __file__)
        assert followed.diverged is not None
        assert memory.history[-1].peak_bytes <= plan.projected
        with memory.step(other):  # said once
            made.train_step(other)


def _tensors(batch: Any) -> list[Any]:
    return list(batch.values() if isinstance(batch, dict) else batch)
