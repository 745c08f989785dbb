"""Planners in a session: steps are recorded, planned and followed, and the bits are those of plain PyTorch."""

from __future__ import annotations

import contextlib
import gc
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, final

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import spillway
from spillway.engines.tensors.cpu_machine import CpuMachine
from spillway.errors import BudgetInfeasible
from spillway.ir import Plan, Step
from spillway.memory.lanes import Stall
from spillway.methods import AbstractPlanner, Planned, Problem, Window
from spillway.native.arena import Arena, counts, reset_peaks
from spillway.recording.steps import record_step
from spillway.session.planned_steps import MOST_RECORDINGS, SERVED, StoppedClock
from spillway.session.tensor_session import TensorSession
from spillway.workloads import seed_everything
from tests.cpu.families import FAMILIES, State, difference, state_of
from tests.shared import in_turn

STEPS = 9
SHARES = (0.75, 0.5, 0.34)
WIDTH = 384


class Setting(NamedTuple):
    model: nn.Module
    optimizer: Optimizer
    batches: Sequence[Tensor]


def draws(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(sizes, generator=generator) for _ in range(STEPS)]


def mlp() -> Setting:
    """Parameters, their gradients and Adam's state are nearly all of it."""
    model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    return Setting(model, torch.optim.Adam(model.parameters(), lr=1e-3), draws(16, WIDTH))


def encoder() -> Setting:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(64, 8))
    return Setting(model, torch.optim.AdamW(model.parameters(), lr=1e-3), draws(8, 32, 64))


def pictures() -> Setting:
    blocks = (
        (nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())
        for before, after in ((3, 16), (16, 16), (16, 16), (16, 16), (16, 16), (16, 16))
    )
    model = nn.Sequential(*(layer for block in blocks for layer in block), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Setting(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), draws(8, 3, 32, 32))


PLANNERS = [
    "window", "window-improved", "lms", "swap", "swap-prefetch", "sqrt-n", "window-published", "dynn-offload-published",
]  # fmt: skip
SETTINGS: dict[str, Callable[[], Setting]] = {"mlp": mlp, "encoder": encoder, "pictures": pictures}


class Trained(NamedTuple):
    state: State
    losses: list[float]
    reports: list[spillway.StepReport]
    planned: list[Planned | None]
    """What was followed, or would be, after each step."""
    told: list[str]


def train(setting: Setting, x: Tensor) -> float:
    setting.optimizer.zero_grad()
    loss = setting.model(x).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    setting.optimizer.step()
    return loss.item()


def trained(name: str, method: str | AbstractPlanner = "lru", budget: int | None = None) -> Trained:
    """A session's steps; each is given its batch."""
    seed_everything(0)
    setting = SETTINGS[name]()
    losses, planned = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with spillway.manage(setting.model, setting.optimizer, budget=budget, method=method) as memory:
            for x in setting.batches:
                with memory.step(x):
                    losses.append(train(setting, x))
                planned.append(followed(memory))
    state = state_of(setting.model, setting.optimizer)
    return Trained(state, losses, memory.history, planned, [str(one.message) for one in caught])


def followed(memory: spillway.Session) -> Planned | None:
    assert isinstance(memory, TensorSession)
    return memory._plans._now.planned if memory._plans is not None else None


def planned_bytes(planned: Planned) -> tuple[int, int]:
    """What goes out in a step that follows another by the same plan, and what comes in. What is gone when a step ends
    and when it begins is gone once."""
    gaps, step, ops = planned._gaps, planned._gaps._step, planned.ops
    late = {gaps.storage_of(gap) for gap in planned.plan.gaps if gap.end == ops}
    early = {gaps.storage_of(gap) for gap in planned.plan.gaps if gap.start == 0}
    lasting = {number for number in late if step.storages[number].present_at_end}
    out = [gaps.storage_of(gap) for gap in planned.plan.gaps if gap.start or gaps.storage_of(gap) not in lasting]
    back = [*map(gaps.storage_of, gaps.coming_back), *(lasting - early)]
    return tuple(sum(step.storages[number].nbytes for number in numbers) for numbers in (out, back))  # type: ignore[return-value]


@cache
def plain(name: str) -> tuple[State, list[float], int]:
    seed_everything(0)
    setting = SETTINGS[name]()
    losses = [train(setting, x) for x in setting.batches]
    state = state_of(setting.model, setting.optimizer)
    return state, losses, max(report.peak_bytes for report in trained(name).reports)


@pytest.mark.long(but=2)
@pytest.mark.parametrize(("method", "name", "share"), in_turn(PLANNERS, SETTINGS, SHARES, times=3))
def test_the_bits_are_those_of_plain_pytorch_and_no_peak_is_above_the_budget(
    name: str, method: str, share: float
) -> None:
    state, losses, peak = plain(name)
    budget = int(peak * share)
    found = trained(name, method, budget)
    assert found.losses == losses
    assert difference(found.state, state) is None
    assert max(report.peak_bytes for report in found.reports) <= budget
    made = found.planned[1]
    assert found.planned[0] is None
    assert found.planned[1:] == [made] * (STEPS - 1)  # planned once, or never
    assert len(found.told) == (made is None)
    assert made is None or made.diverged is None
    assert made is not None or method != "window"


@pytest.mark.long(but=2)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_moved_is_what_the_plan_moves(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "for_session", lambda: None)  # no plan knows what ops take for themselves
    found = trained(name, "window", int(plain(name)[2] * share))
    made = found.planned[-1]
    assert made is not None
    out, back = planned_bytes(made)
    batch = (
        SETTINGS[name]().batches[0].nbytes
    )  # those of earlier steps are kept here: they leave, and the plan knows none
    for report in found.reports[4:]:
        assert 0.7 * out <= report.bytes_out <= out + batch  # what has not been written to leaves for nothing
        assert 0.7 * back <= report.bytes_in <= back + batch
    assert len({(report.bytes_out, report.bytes_in) for report in found.reports[4:]}) == 1


def test_there_is_room_for_what_convolutions_take_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan does not know of it. Where there was none, results came out of the spill directory, page by page."""
    brought: list[int] = []
    bring = CpuMachine.bring_into_memory

    def counting(machine: CpuMachine, *args: Any, **kwargs: Any) -> None:
        brought[-1] += 1
        bring(machine, *args, **kwargs)

    monkeypatch.setattr(CpuMachine, "bring_into_memory", counting)
    seed_everything(0)
    setting, budget = SETTINGS["pictures"](), plain("pictures")[2] // 2
    with spillway.manage(setting.model, setting.optimizer, budget=budget, method="window") as memory:
        for x in setting.batches:
            brought.append(0)
            with memory.step(x):
                train(setting, x)
        assert followed(memory) is not None
    assert sum(brought[-4:]) == 0, brought
    assert max(report.peak_bytes for report in memory.history) <= budget


@final
class Shown(AbstractPlanner):
    """Keeps what it is shown, and plans as the window does; or is out of ideas for a while."""

    name = "shown"
    uses_recipes = False
    begin = Window.begin

    def __init__(self, plan: Callable[[Problem], Plan] | None = None) -> None:
        self.problems: list[Problem] = []
        self._plan = plan if plan is not None else Window().plan

    def plan(self, problem: Problem) -> Plan:
        self.problems.append(problem)
        return self._plan(problem)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_is_recorded_within_a_session_as_outside_of_one(name: str) -> None:
    seed_everything(0)
    setting = SETTINGS[name]()
    x = setting.batches[0]
    outside = record_step(lambda: train(setting, x), models=setting.model, optimizers=setting.optimizer, batch=x)
    shown = Shown()
    trained(name, shown, plain(name)[2] // 2)
    (problem,) = shown.problems
    within = problem.step
    assert [(op.name, op.phase, op.module) for op in within.ops] == [
        (op.name, op.phase, op.module) for op in outside.ops
    ]
    assert [len(op.reads) for op in within.ops] == [len(op.reads) for op in outside.ops]
    assert [len(op.creates) for op in within.ops] == [len(op.creates) for op in outside.ops]
    assert within.plain_peak() == outside.plain_peak()
    assert lives(within) == lives(outside)
    assert all(op.seconds is not None for op in within.ops)
    assert problem.allowed == plain(name)[2] // 2
    assert problem.device.out_per_second > 0


def lives(step: Step) -> list[tuple[Any, ...]]:
    return sorted((one.nbytes, one.kind, one.name, one.alive_from, one.alive_until) for one in step.storages)


def session(
    name: str, method: str | AbstractPlanner = "window", share: float = 0.5
) -> tuple[Setting, spillway.Session]:
    budget = int(plain(name)[2] * share)
    seed_everything(0)
    setting = SETTINGS[name]()
    return setting, spillway.manage(setting.model, setting.optimizer, budget=budget, method=method)


def run(
    setting: Setting, memory: spillway.Session, batches: Sequence[Any], step: Callable[[Setting, Any], object]
) -> None:
    with memory:
        for batch in batches:
            with memory.step(batch if isinstance(batch, Tensor) else batch[0]):
                step(setting, batch)


def plainly(name: str, batches: Sequence[Any], step: Callable[[Setting, Any], object]) -> State:
    seed_everything(0)
    setting = SETTINGS[name]()
    for batch in batches:
        step(setting, batch)
    return state_of(setting.model, setting.optimizer)


def test_steps_of_two_sizes_in_turn_have_a_plan_each() -> None:
    batches = [x[: 16 - 6 * (number % 2)] for number, x in enumerate([*mlp().batches, *mlp().batches])]
    setting, memory = session("mlp")
    with memory:
        made = []
        for x in batches:
            with memory.step(x):
                train(setting, x)
            made.append(followed(memory))
    assert made[:2] == [None, None]
    assert made[2] is not None
    assert made[3] is not None
    assert made[2] is not made[3]
    assert made[2:] == [made[2], made[3]] * 8
    assert made[2].diverged is made[3].diverged is None
    assert max(report.peak_bytes for report in memory.history) <= memory.allowed
    assert difference(state_of(setting.model, setting.optimizer), plainly("mlp", batches, train)) is None


def branching(setting: Setting, batch: tuple[Tensor, bool]) -> None:
    x, other = batch
    setting.optimizer.zero_grad()
    hidden = setting.model(x)
    loss = (hidden.exp() + torch.cat([hidden, hidden])[:16]).square().mean() if other else hidden.square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    setting.optimizer.step()


def test_a_step_that_takes_another_branch_is_finished_and_the_next_recorded_anew() -> None:
    others = (False, False, False, True, True, True, True, False, False)
    batches = list(zip(mlp().batches, others, strict=True))
    shown = Shown()
    setting, memory = session("mlp", shown)
    with memory:
        made = []
        for batch in batches:
            with memory.step(batch[0]):
                branching(setting, batch)
            made.append(followed(memory))
            # others in steps 3 and 7, recorded in 1, 4 and 8
            assert len(shown.problems) == (0, 1, 1, 1, 2, 2, 2, 2, 3)[len(made) - 1]
    assert [one is not None for one in made] == [False, True, True, False, True, True, True, False, True]
    assert made[1] is made[2]
    assert made[4] is made[5] is made[6]
    assert max(report.peak_bytes for report in memory.history) <= memory.allowed
    assert difference(state_of(setting.model, setting.optimizer), plainly("mlp", batches, branching)) is None


def test_steps_that_never_stay_the_same_are_left_alone_after_some_recordings_and_one_warning() -> None:
    shown = Shown()
    setting, memory = session("mlp", shown)
    batches = [(x, bool(number // 2 % 2)) for number, x in enumerate([*setting.batches, *setting.batches])]
    with pytest.warns(UserWarning, match=r"^'shown' has no plan .* after 3 recordings, steps .* others") as told:
        run(setting, memory, batches, branching)
    assert len(told) == 1
    assert told[0].filename == __file__
    assert len(shown.problems) == MOST_RECORDINGS
    assert difference(state_of(setting.model, setting.optimizer), plainly("mlp", batches, branching)) is None


def test_a_rare_step_that_is_another_one_costs_no_more_than_a_recording() -> None:
    shown = Shown()
    setting, memory = session("mlp", shown)
    batches = [(setting.batches[0], number % (SERVED + 3) == 1) for number in range(5 * (SERVED + 3))]
    run(setting, memory, batches, branching)
    assert len(shown.problems) > MOST_RECORDINGS
    assert difference(state_of(setting.model, setting.optimizer), plainly("mlp", batches, branching)) is None


def test_a_step_that_ends_early_is_another_one() -> None:
    setting, memory = session("mlp")
    with memory:
        for x in setting.batches[:3]:
            with memory.step(x):
                train(setting, x)
        assert followed(memory) is not None
        with memory.step(setting.batches[3]):
            setting.model(setting.batches[3]).square().mean().backward()
        assert followed(memory) is None


def hooks() -> tuple[Any, ...]:
    """What a recording hangs up everywhere, and whether garbage is collected."""
    return (
        *map(len, (_global_forward_pre_hooks, _global_forward_hooks)),
        *map(len, (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)),
        gc.isenabled(), gc.get_threshold(),
    )  # fmt: skip


class Stop(Exception):
    """Raised by a step."""


@pytest.mark.long(but=3)
@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_step_that_fails_while_it_is_recorded_or_followed_leaves_everything_right(
    failing: int, error: type[BaseException]
) -> None:
    before = hooks()
    setting, memory = session("mlp")

    def fails(setting: Setting, x: Tensor) -> None:
        setting.optimizer.zero_grad()
        setting.model(x).square().mean().backward()  # and no update

    with memory:
        for number, x in enumerate(setting.batches):
            if number == failing:
                with pytest.raises(error), memory.step(x):
                    assert bool(gc.get_threshold()[0]) == (failing != 1)
                    fails(setting, x)
                    raise error
                assert gc.get_threshold()[0]
                continue
            with memory.step(x):
                train(setting, x)
        made = followed(memory)
        assert made is not None
        assert made.diverged is None
    expected = plainly(
        "mlp",
        list(enumerate(setting.batches)),
        lambda one, batch: (fails if batch[0] == failing else train)(one, batch[1]),
    )
    assert difference(state_of(setting.model, setting.optimizer), expected) is None
    assert hooks() == before


def test_an_op_that_fails_and_is_caught_spoils_the_recording_alone() -> None:
    def step(setting: Setting, x: Tensor) -> None:
        with contextlib.suppress(RuntimeError):
            x @ x
        train(setting, x)

    setting, memory = session("mlp")
    with pytest.warns(UserWarning, match="It could not be recorded"):
        run(setting, memory, setting.batches, step)
    assert difference(state_of(setting.model, setting.optimizer), plainly("mlp", setting.batches, step)) is None


def test_a_session_that_is_lost_in_a_recorded_step_leaves_no_hooks() -> None:
    before = hooks()
    setting, memory = session("mlp")
    x = setting.batches[0]
    with memory.step(x):
        train(setting, x)
    memory.begin(x)
    assert hooks() != before
    train(setting, x)
    del memory
    gc.collect()
    other, next_one = session("mlp")
    with next_one, next_one.step(x):
        train(other, x)
    assert hooks() == before


def test_a_budget_in_which_a_planner_has_no_plan_is_said_once_with_the_numbers() -> None:
    found = trained("mlp", "swap", plain("mlp")[2] // 2)
    (told,) = found.told
    assert re.fullmatch(
        r"'swap' has no plan for steps such as this one, in which the stalest storages are moved instead when room "
        r"gets short: Op \d+ \(.*\) needs [\d.]+ MiB in memory at once and [\d.]+ MiB are allowed: .*\.",
        told,
    )


def test_a_plan_that_breaks_a_rule_is_not_followed() -> None:
    def spoiled(problem: Problem) -> Plan:
        return replace(Window().plan(problem), projected=1)

    found = trained("mlp", Shown(spoiled), plain("mlp")[2] // 2)
    assert found.planned == [None] * STEPS
    assert len(found.told) == 1
    assert difference(found.state, plain("mlp")[0]) is None


def test_the_link_is_measured_in_the_room_that_a_step_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_peak = plain("mlp")[2]
    measured: list[int] = []
    measure = CpuMachine.measure_link

    def measuring(machine: CpuMachine) -> None:
        reset_peaks()
        before, room = counts().live, machine.budget.allowed - machine.budget.resident
        measure(machine)
        measured.append(room)
        assert counts().peak_live - before <= -(-room // 4096) * 4096

    monkeypatch.setattr(CpuMachine, "measure_link", measuring)
    trained("mlp", "window", int(plain_peak * 0.34))
    assert min(measured) < 1 << 20, "there was always room"


def test_a_planner_is_given_as_it_is() -> None:
    by_name, given = (trained("encoder", method, plain("encoder")[2] // 2) for method in ("window", Window()))
    assert [report.bytes_out for report in by_name.reports] == [report.bytes_out for report in given.reports]


def test_without_a_budget_nothing_is_recorded() -> None:
    shown = Shown()
    trained("mlp", shown, None)
    assert shown.problems == []


@pytest.mark.parametrize("keep", [True, False])
def test_a_step_without_a_batch_is_followed_whatever_the_user_keeps(keep: bool) -> None:
    """Its input is made within, or met within; losses of earlier steps stay."""
    setting, memory = session("encoder")
    kept: list[Tensor] = []
    with memory:
        for number in range(STEPS):
            fresh = setting.batches[number].clone() if keep else None
            with memory.step():
                x = fresh if fresh is not None else torch.from_numpy(setting.batches[number].numpy().copy())
                setting.optimizer.zero_grad()
                loss = setting.model(x).square().mean()
                loss.backward()
                setting.optimizer.step()
                if keep:
                    kept.append(loss.detach())
            made = followed(memory)
            assert (made is None) == (number == 0)
            assert made is None or made.diverged is None
    assert difference(state_of(setting.model, setting.optimizer), plain("encoder")[0]) is None


@pytest.mark.parametrize("numpy", [False, True])
def test_what_nobody_may_move_is_set_aside_before_a_step_is_planned(
    numpy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arena, "for_session", lambda: None)  # no plan knows what ops take for themselves
    setting, memory = session("pictures")
    with memory:
        x = torch.from_numpy(setting.batches[0].numpy().copy()) if numpy else setting.batches[0]
        for _ in range(6):
            with memory.step(x):
                train(setting, x)
        made = followed(memory)
    assert made is not None
    assert made.plan.allowed == memory.allowed - numpy * x.nbytes
    out, back = planned_bytes(made)
    assert all(report.bytes_out <= out and report.bytes_in <= back for report in memory.history[3:])
    assert max(report.peak_bytes for report in memory.history) <= memory.allowed


def test_a_session_that_keeps_timelines_follows_its_plans_too(tmp_path: Path) -> None:
    budget = plain("encoder")[2] // 2
    seed_everything(0)
    setting = encoder()
    with spillway.manage(
        setting.model, setting.optimizer, budget=budget, method="window", report=spillway.ReportOptions(timeline=True)
    ) as memory:
        for x in setting.batches:
            with memory.step(x):
                train(setting, x)
        made = followed(memory)
    assert made is not None
    assert made.diverged is None
    assert memory.timeline is not None
    assert memory.timeline.window == made.plan.window, "drawn over the step that it planned"
    assert memory.timeline.step >= 2
    page = tmp_path / "page.html"
    memory.report(page)
    assert "The window over the step" in page.read_text()
    assert difference(state_of(setting.model, setting.optimizer), plain("encoder")[0]) is None


TWELVE = (
    "resnet", "unet", "gan", "lstm", "tied-lm", "bert", "gpt2", "t5", "vit", "swin", "mixture-of-experts",
    "gradient-penalty",
)  # fmt: skip


class FamilyTrained(NamedTuple):
    state: State
    reports: list[spillway.StepReport]
    planned: Planned | None


def family_trained(name: str, method: str | None = None, budget: int | None = None) -> FamilyTrained:
    """Two batches, each so often that it is recorded and followed; without a method in no session."""
    built, planned = FAMILIES[name](0), None
    with contextlib.ExitStack() as stack:
        memory = None
        if method is not None:
            memory = stack.enter_context(
                spillway.manage(built.model, built.optimizers, budget=budget, method=method)
            )  # fmt: skip
        for batch in built.batches[:2]:
            for _ in range(4):
                with memory.step(batch) if memory is not None else contextlib.nullcontext():
                    built.step(built.model, built.optimizers, batch)
        state = state_of(built.model, built.optimizers)
        planned = followed(memory) if memory is not None else None
    return FamilyTrained(state, [] if memory is None else memory.history, planned)


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("name", "share"), list(zip(TWELVE, SHARES * 4, strict=True)))
def test_families_train_to_the_same_bits(name: str, share: float) -> None:
    """The benchmark `out_of_core` has all budgets for each."""
    expected, counted = family_trained(name), family_trained(name, "keep-all")
    budget = int(share * max(report.peak_bytes for report in counted.reports))
    try:
        found = family_trained(name, "window", budget)
    except BudgetInfeasible as refusal:
        budget = refusal.smallest_budget
        found = family_trained(name, "window", budget)
    assert difference(found.state, expected.state) is None
    assert max(report.peak_bytes for report in found.reports) <= budget
    if name != "mixture-of-experts":  # whose steps are others on other parameters
        assert found.planned is not None
        assert found.planned.diverged is None


def by_length(method: str | AbstractPlanner | Planned, lengths: Sequence[int]) -> list[Planned | None]:
    """What was followed, or would be, after steps that do not say how long they are. They have as many ops each."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer, made = torch.optim.SGD(model.parameters(), lr=0.1), []
    with spillway.manage(model, optimizer, budget="600KiB", method=method) as memory:
        for length in lengths:
            with memory.step():
                model(torch.ones(length, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            made.append(followed(memory))
    return made


@pytest.mark.parametrize("natively", [True, False])
def test_a_step_of_other_sizes_is_another_one_though_the_plan_moves_nothing_of_it(
    natively: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not natively:
        monkeypatch.setattr("spillway.engines.tensors.mode.native_module", lambda: None)
    made = by_length("window", [8, 8, 8, 512, 512, 512])
    assert made[2] is not None
    assert not made[2].plan.gaps
    assert made[3] is None
    assert made[5] is not None
    assert made[5].plan.gaps
    with pytest.warns(UserWarning, match=r"The plan is for another step, of \d+ ops: this one, of \d+, is different"):
        by_length(Planned(made[2].plan, made[2].step), [8, 512])


def test_a_clock_that_stands_still_looks_at_nothing_twice() -> None:
    """What ops take is asked twice an op, of as many copies as a step has."""

    class Looked(list[Stall]):
        def __iter__(self) -> Iterator[Stall]:
            looked.extend(self[:])
            return super().__iter__()

    looked: list[Stall] = []
    spans = Looked(Stall(0.0, 1000.0, None, 0) for _ in range(3))
    clock = StoppedClock(lambda: spans)
    before = clock()
    looked.clear()
    assert clock() - before < 500
    spans.append(Stall(0.0, 1000.0, None, 0))
    assert clock() - before < -500
    assert looked == []
