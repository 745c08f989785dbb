"""Loops that train under `auto`, the default, to the plain bits: what a step does is not what the one before it did."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import spillway
from spillway.errors import RecomputeError
from spillway.methods import Action
from spillway.methods.auto import Auto
from spillway.methods.by_block import BlockPlan, BlockSample, InputSize, StepSample
from spillway.session.block_session import BlockSession
from spillway.session.paging import Paging
from spillway.session.tensor_session import TensorSession
from tests.shared import in_turn

WIDTH = 64
Loop = Callable[[Callable[..., Any]], list[Any]]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(6))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def unmanaged(*_: Any) -> Any:
    class Plain:
        budget: Any = None

        @staticmethod
        def step(batch: Any = None) -> Any:
            return contextlib.nullcontext()

    return contextlib.nullcontext(Plain())


def batch() -> Tensor:
    return torch.randn(256, WIDTH)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, memory: Any, steps: int = 5) -> Iterator[Tensor]:
    for _ in range(steps):
        x = batch()
        with memory.step(x):
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        yield loss.detach()


def parts_shared(manage: Callable[..., Any]) -> list[Any]:
    """Two sessions, open at once, on models with blocks in common."""
    body = Net()
    models = [nn.Sequential(body, nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    found: list[Any] = []
    with manage(models[0], optimizers[0]) as first, manage(models[1], optimizers[1]) as second:
        turns = [
            losses(model, optimizer, memory, 3)
            for model, optimizer, memory in zip(models, optimizers, (first, second), strict=True)
        ]
        for pair in zip(*turns, strict=True):
            found += pair
    return [*found, *models[0].state_dict().values(), *models[1].state_dict().values()]


def cached_weights(manage: Callable[..., Any]) -> list[Any]:
    """Weights that are computed once for two forwards."""
    model = Net()
    for block in model.blocks:
        parametrizations.spectral_norm(block.wide)
    parametrizations.spectral_norm(model.last)
    optimizer = torch.optim.Adam(model.parameters())
    found: list[Any] = []
    with manage(model, optimizer) as memory:
        for _ in range(4):
            x = batch()
            with memory.step(x):
                with parametrize.cached():
                    y = model(x)
                    with torch.no_grad():
                        other = model(x.flip(0))
                    loss = (y - other).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.detach())
    return [*found, *model.state_dict().values()]


def first_without_backward(manage: Callable[..., Any]) -> list[Any]:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    with manage(model, optimizer) as memory:
        x = batch()
        with memory.step(x):
            model(x)
        found = list(losses(model, optimizer, memory))
    return [*found, *model.state_dict().values()]


def frozen_at_first(manage: Callable[..., Any]) -> list[Any]:
    model = Net()
    model.blocks.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with manage(model, optimizer) as memory:
        found = list(losses(model, optimizer, memory, 3))
        model.requires_grad_(True)
        found += losses(model, optimizer, memory, 3)
    return [*found, *model.state_dict().values()]


def other_budgets(manage: Callable[..., Any]) -> list[Any]:
    """No budget for a while, and then the first one again."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    with manage(model, optimizer) as memory:
        first = memory.budget
        found = list(losses(model, optimizer, memory, 1))
        memory.budget = None if first is None else first * 3 // 2
        found += losses(model, optimizer, memory, 2)
        memory.budget = None
        found += losses(model, optimizer, memory, 2)
        memory.budget = first
        found += losses(model, optimizer, memory, 3)
    return [*found, *model.state_dict().values()]


def batch_left_out(manage: Callable[..., Any]) -> list[Any]:
    """A backward between two steps, of which the second has no batch."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    found: list[Any] = []
    with manage(model, optimizer) as memory:
        for _ in range(3):
            x = batch()
            with memory.step(x):
                loss = (model(x) - x).square().mean()
                loss.backward()
            with memory.step():
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.detach())
    return [*found, *model.state_dict().values()]


def by_hand(manage: Callable[..., Any]) -> list[Any]:
    """Without an optimizer: weights are updated by the loop, which leaves no gradient behind."""
    model = Net()
    found: list[Any] = []
    with manage(model, None) as memory:
        for _ in range(6):
            x = batch()
            with memory.step(x):
                loss = mean_square(model(x), x)
                slopes = torch.autograd.grad(loss, [*model.parameters()])
                with torch.no_grad():
                    for weight, slope in zip(model.parameters(), slopes, strict=True):
                        weight.sub_(slope, alpha=0.1)
                del slopes, slope
            found.append(loss.detach())
    return [*found, *model.state_dict().values()]


def three_backwards(manage: Callable[..., Any]) -> list[Any]:
    """Of one graph, in steps of their own after a while."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    with manage(model, optimizer) as memory:
        found = list(losses(model, optimizer, memory, 2))
        x = batch()
        for turn in range(4):
            with contextlib.ExitStack() as stack:
                stack.enter_context(memory.step(x))
                loss = mean_square(model(x), x)
                for _ in range(2):
                    loss.backward(retain_graph=True)
                    if turn > 1:
                        stack.close()
                        stack.enter_context(memory.step(x))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.detach())
    return [*found, *model.state_dict().values()]


def learns_to_learn(manage: Callable[..., Any]) -> list[Any]:
    """A forward with weights that an update of the first has made, differentiated through that update."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    found: list[Any] = []
    with manage(model, optimizer) as memory:
        for _ in range(4):
            x = batch()
            with memory.step(x):
                weights: dict[str, Tensor] = dict(model.named_parameters())
                loss = mean_square(torch.func.functional_call(model, weights, (x,)), x)
                slopes = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
                updated = {name: w - 0.1 * d for (name, w), d in zip(weights.items(), slopes, strict=True)}
                loss = mean_square(torch.func.functional_call(model, updated, (x.flip(0),)), x)
                del weights, slopes, updated
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.detach())
    return [*found, *model.state_dict().values()]


def updated_in_backward(manage: Callable[..., Any]) -> list[Any]:
    model = Net()
    optimizers = {one: torch.optim.Adam([one]) for one in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for one in optimizers:
        one.register_post_accumulate_grad_hook(update)
    found: list[Any] = []
    with manage(model, list(optimizers.values())) as memory:
        for _ in range(6):
            x = batch()
            with memory.step(x):
                loss = mean_square(model(x), x)
                loss.backward()
            found.append(loss.detach())
    return [*found, *model.state_dict().values()]


def in_parts(manage: Callable[..., Any]) -> list[Any]:
    """Gradients are accumulated over parts of a batch."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    found: list[Any] = []
    with manage(model, optimizer) as memory:
        for _ in range(6):
            x = batch()
            with memory.step(x):
                for part in x.split(64):
                    loss = mean_square(model(part), part)
                    loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.detach())
    return [*found, *model.state_dict().values()]


def once_a_penalty(manage: Callable[..., Any]) -> list[Any]:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    found: list[Any] = []
    with manage(model, optimizer) as memory:
        for turn in range(7):
            x = batch()
            with memory.step(x):
                loss = mean_square(model(x), x)
                if turn == 1:
                    slopes = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
                    loss = loss + torch.stack([one.square().sum() for one in slopes]).sum()
                    del slopes
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.detach())
    return [*found, *model.state_dict().values()]


def mean_square(y: Tensor, x: Tensor) -> Tensor:
    return (y - x).square().mean()


def seeded(loop: Loop, manage: Callable[..., Any]) -> list[bytes]:
    torch.manual_seed(0)
    found = loop(manage)
    return [*(one.numpy().tobytes() for one in found), torch.get_rng_state().numpy().tobytes()]


RETURNING = [by_hand, updated_in_backward, in_parts, once_a_penalty]
LOOPS = [
    parts_shared, cached_weights, first_without_backward, frozen_at_first, other_budgets, batch_left_out,
    three_backwards, learns_to_learn, *RETURNING,
]  # fmt: skip


@pytest.mark.long(but=2)
@pytest.mark.filterwarnings("ignore:3 steps of Net have told nothing")
@pytest.mark.parametrize(("loop", "share"), in_turn(LOOPS, [1.05, 0.55, 0.36]))
def test_what_lru_trains_auto_trains_to_the_same_bits(loop: Loop, share: float) -> None:
    trains_as_lru(loop, share)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("loop", RETURNING, ids=lambda one: one.__name__)
@pytest.mark.usefixtures("counted")
def test_steps_that_recomputing_is_enough_for_are_not_watched_op_by_op_for_ever(loop: Loop) -> None:
    assert [report.ops for report in trains_as_lru(loop, 0.9)[-3:]] == [0, 0, 0]


@pytest.mark.usefixtures("counted")
def test_a_block_that_did_not_run_again_as_it_ran_is_not_asked_to_again() -> None:
    raised: list[RecomputeError] = []

    def trained(manage: Callable[..., Any]) -> list[Any]:
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())
        with manage(model, optimizer) as memory:
            found = list(losses(model, optimizer, memory, 2))
            for _ in range(2):
                x = batch()
                for _ in range(2):
                    with contextlib.suppress(RecomputeError), memory.step(x):
                        loss = mean_square(model(x), x)
                        weights = [block.wide.weight.data for block in model.blocks]
                        torch._foreach_mul_(weights, 0.5)
                        try:
                            loss.backward()
                        except RecomputeError as error:
                            torch._foreach_mul_(weights, 2.0)
                            optimizer.zero_grad()
                            raised.append(error)
                            raise
                        optimizer.step()
                        found.append(loss.detach())
                        break
                optimizer.zero_grad()
        return [*found, *model.state_dict().values()]

    reports = trains_as_lru(trained, 0.9)
    assert [report.ops > 0 for report in reports] == [True, False, True, True]
    assert "every op is watched" in "".join(raised.pop().__notes__)
    assert not raised


def trains_as_lru(loop: Loop, share: float) -> list[spillway.StepReport]:
    """Of the steps under `auto`, at a share of the peak."""
    sessions: list[Any] = []

    def under(budget: Any, method: str) -> Callable[..., Any]:
        def manage(model: Any, optimizer: Any) -> Any:
            sessions.append(spillway.manage(model, optimizer, budget=budget, method=method))
            return sessions[-1]

        return manage

    plain = seeded(loop, unmanaged)
    assert seeded(loop, under("1GiB", "lru")) == plain
    allowed = int(share * max(report.peak_bytes for memory in sessions for report in memory.history))
    sessions.clear()
    assert seeded(loop, under(allowed, "auto")) == plain
    reports = [report for memory in sessions for report in memory.history]
    assert all(report.peak_bytes <= report.allowed for report in reports)
    return reports


class Other(Layer):
    """Saves more than the layer in whose place it comes."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.wide(x)).sin()
        return x + self.narrow(torch.relu(hidden) * hidden.sigmoid())


def surprises(kind: str) -> Loop:
    """Four steps as any, and then others: a gradient that is differentiated, in all steps or these; a second forward
    before the backward; blocks of another class, put there between two steps or within one."""

    def rebuild(model: Net, optimizer: Any) -> None:
        for number in range(3):
            model.blocks[number] = Other()
            optimizer.add_param_group({"params": list(model.blocks[number].parameters())})

    def loop(manage: Callable[..., Any]) -> list[Any]:
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())
        found: list[Any] = []
        with manage(model, optimizer) as memory:
            for turn in range(7):
                late = turn > 3
                if turn == 4 and kind == "rebuilt":
                    rebuild(model, optimizer)
                x = batch().requires_grad_()
                with memory.step(x):
                    if turn == 4 and kind == "rebuilt within":
                        rebuild(model, optimizer)
                    y = model(x)
                    loss = (y - x).square().mean()
                    if kind == "penalty" or (late and kind == "late penalty"):
                        (slope,) = torch.autograd.grad(y.square().mean(), x, create_graph=True)
                        loss = loss + slope.norm()
                    if late and kind == "second forward":
                        loss = loss + model(x.flip(0)).abs().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(loss.detach())
        return [*found, *model.state_dict().values()]

    return loop


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock has a say in plans: blocks take a second for so many bytes, and so do copies."""
    end = Auto.end

    def told(method: Auto, step: StepSample, blocks: Sequence[BlockSample] = ()) -> None:
        rates = {"out_rate": 1e9 * (step.out_rate > 0), "in_rate": 1e9 * (step.in_rate > 0)}
        times = [
            {"seconds": one.nbytes / 1e9, "backward": 2e-9 * one.nbytes * (one.backward > 0), "again": 0.0}
            for one in blocks
        ]
        end(
            method,
            replace(step, seconds=0.0, **rates),
            [replace(one, **of) for one, of in zip(blocks, times, strict=True)],
        )

    monkeypatch.setattr(Auto, "end", told)


@pytest.mark.long(but=1)
@pytest.mark.filterwarnings("ignore:3 steps of Net have told nothing")
@pytest.mark.parametrize(
    ("kind", "share"),
    in_turn(["penalty", "late penalty", "second forward", "rebuilt", "rebuilt within"], [0.95, 0.7, 0.5]),
)
@pytest.mark.usefixtures("counted")
def test_what_nobody_expected_of_a_step_is_no_reason_to_refuse_it(kind: str, share: float) -> None:
    trains_as_lru(surprises(kind), share)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("lends", [True, False])
@pytest.mark.parametrize("action", [Action.OFFLOAD, Action.RECOMPUTE_OFFLOADED, Action.SELECTIVE])
def test_nor_is_what_plans_had_made_of_blocks_by_then(
    action: Action, lends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of these it is depends on how fast copies were."""
    plan = Auto.plan

    def planned(method: Auto, size: InputSize, available: int) -> BlockPlan:
        made = plan(method, size, available)
        actions = tuple(Action.KEEP if one is Action.KEEP else action for one in made.actions)
        return replace(made, actions=actions, comes_in=tuple(range(len(actions))))

    monkeypatch.setattr(Auto, "plan", planned)
    if not lends:
        monkeypatch.setattr(Paging, "guards", lambda *_: False)
    trains_as_lru(surprises("late penalty"), 0.5)


def test_blocks_of_a_rebuilt_model_are_found_and_planned() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    with spillway.manage(model, optimizer, budget=5 << 20) as memory:
        list(losses(model, optimizer, memory, 3))
        model.blocks.append(Layer())
        optimizer.add_param_group({"params": list(model.blocks[-1].parameters())})
        list(losses(model, optimizer, memory, 7))
        assert len(memory.blocks) == 7  # type: ignore[attr-defined]
        assert memory.history[-1].projected_bytes > 0


def test_a_watched_step_whose_blocks_are_recomputed_leaves_all_parameters_free_to_move() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    with spillway.manage(model, optimizer, budget=3 << 20) as memory:
        list(losses(model, optimizer, memory, 1))
    assert memory.history[0].recomputed_blocks == 6
    assert memory.history[0].escaped == 0


@pytest.mark.long(but=2)
@pytest.mark.parametrize("failing", [1, 4])
@pytest.mark.parametrize("how", ["raises", "no batch"])
def test_first_steps_that_tell_nothing_are_made_up_for(how: str, failing: int) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    failing = min(failing, 2) if how == "no batch" else failing
    with spillway.manage(model, optimizer, budget=5 << 20) as memory:
        for _ in range(failing):
            x = batch()
            with contextlib.suppress(KeyError), memory.step(x if how == "raises" else None):
                (model(x) - x).square().mean().backward()
                if how == "raises":
                    raise KeyError
                optimizer.step()
            optimizer.zero_grad()
        list(losses(model, optimizer, memory, 7))
        assert isinstance(memory._now, BlockSession)  # type: ignore[attr-defined]
        assert memory.history[-1].projected_bytes > 0


def test_where_no_step_has_a_batch_that_is_said_once() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    with spillway.manage(model, optimizer, budget=5 << 20) as memory:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(5):
                with memory.step():
                    model(batch()).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        said = [str(one.message) for one in told]
        assert sum(one.startswith("3 steps in a row were entered with no tensor") for one in said) == 1
        assert isinstance(memory._now, TensorSession)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:What torch.compile made")
@pytest.mark.parametrize("where", ["forward", "part"])
def test_a_model_in_which_something_compiled_calls_the_blocks_is_left_to_the_tensor_engine(where: str) -> None:
    class Compiled(Net):
        @torch.compile(backend="eager")
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    torch.compiler.reset()
    model = Compiled() if where == "forward" else nn.Sequential(Net(), nn.Linear(WIDTH, WIDTH))
    if where == "part":
        model[0].compile(backend="eager")
    optimizer = torch.optim.Adam(model.parameters())
    with spillway.manage(model, optimizer, budget="1GiB") as memory:
        assert isinstance(memory._now, BlockSession)  # type: ignore[attr-defined]
        list(losses(model, optimizer, memory, 3))
        assert isinstance(memory._now, TensorSession)  # type: ignore[attr-defined]
    torch.compiler.reset()


@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_are_found_in_a_model_that_is_called_by_what_dynamo_leaves_alone(reentrant: bool) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    with spillway.manage(model, optimizer, budget="1GiB") as memory:
        for _ in range(3):
            x = batch().requires_grad_()
            with memory.step(x):
                checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert len(memory.blocks) == 6  # type: ignore[attr-defined]


def test_a_size_that_the_user_tells_counts_for_batches_without_tensors() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    sized = spillway.BlockOptions(size=lambda rows: rows)
    with spillway.manage(model, optimizer, budget="1GiB", blocks=sized) as memory:
        for _ in range(2):
            with memory.step(256):
                model(batch()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert len(memory.blocks) == 6  # type: ignore[attr-defined]
