"""Loops of Accelerate under `prepare`: as without it, within the budget, and nothing stays."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader

import spillway
from examples import accelerate_loop
from spillway.errors import BudgetInfeasible, SessionError, UsageError
from spillway.integrations.accelerate import prepare
from spillway.integrations.automatic_steps import AutomaticSteps
from tests.cpu.block_cases import Chain, Residual
from tests.cpu.integration_matrix import Row, Trained, cells, check


@functools.cache
def texts() -> list[Tensor]:
    return accelerate_loop.samples(24, longest=64)


def accelerator_of(**options: Any) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def prepared(accelerator: Accelerator, method: str | None, budget: int | str | None, *objects: Any) -> Any:
    if method is None:
        return accelerator.prepare(*objects)
    return prepare(accelerator, *objects, budget=budget, method=method)


def trained(situation: str, method: str | None, budget: int | None) -> Trained:
    told: list[Any] = []
    peaks: list[int] = []
    saves = situation == "save and resume"
    with tempfile.TemporaryDirectory() as directory:
        for part in range(1 + saves):
            accelerator = accelerator_of(
                mixed_precision="bf16" if situation == "bf16 autocast" else "no",
                gradient_accumulation_steps=3 if situation == "accumulation" else 1,
            )
            model = accelerate_loop.model_of(3, 32)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            loader = DataLoader(texts(), batch_size=4, shuffle=True, collate_fn=accelerate_loop.collated)
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
            objects = prepared(accelerator, method, budget, model, optimizer, loader, scheduler)
            if part:
                accelerator.load_state(directory)
            told += epoch(accelerator, situation, *objects)
            if saves and not part:
                accelerator.save_state(directory)
            if method is not None:
                peaks += [step.peak_bytes for step in accelerator.spillway.session.history]
            accelerator.end_training()
    return Trained(told, {name: value.clone() for name, value in objects[0].state_dict().items()}, peaks)


def epoch(accelerator: Accelerator, situation: str, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> Any:
    for batch in loader:
        model.train()
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if situation == "clipping":
                yield accelerator.clip_grad_norm_(model.parameters(), 0.05).item()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        yield accelerator.gather(loss.detach()).item()
        if situation == "evaluation":
            model.eval()
            with torch.no_grad():
                yield model(**batch).loss.item()


MATRIX = {"Accelerate": Row(trained)}


@pytest.mark.long
@pytest.mark.parametrize(("name", "situation"), cells(MATRIX))
def test_the_table_says_what_happens(name: str, situation: str) -> None:
    check(MATRIX, name, situation)


def small() -> tuple[Chain, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Chain(Residual(), Residual(), Residual())
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def batches(count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        yield torch.randn(64 + 32 * (number % 3), 32, generator=generator)


def step(model: Any, optimizer: Any, batch: Tensor) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("method", ["lru", "checkpoint", "dynn-offload"])
def test_every_update_is_a_step_and_evaluation_is_none(method: str) -> None:
    model, optimizer = small()
    with AutomaticSteps(model, optimizer, budget="1GiB", method=method) as steps:
        for number, batch in enumerate(batches(6)):
            model(batch).square().mean().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                model(batch)
            model.train()
        assert len(steps.session.history) == 3
        one, other = (f"float32[{64 + 32 * (number % 3)}, 32]" for number in range(2))
        assert steps.session.history[0].signature == f"{one}, {other}"
    assert not _global_optimizer_pre_hooks


def test_what_differs_in_size_within_a_step_is_planned_by_its_own_size() -> None:
    """A short and a long micro-batch in each step: what was measured of one says nothing of the other."""

    def recomputed(budget: int | None) -> tuple[list[int], int]:
        model, optimizer = small()
        with AutomaticSteps(model, optimizer, budget=budget, method="mimose") as steps:
            for number in range(24):
                model(torch.ones(64 + 960 * (number % 2), 32)).square().mean().backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        history = steps.session.history
        return [one.recomputed_blocks for one in history], max(one.peak_bytes for one in history)

    _, most = recomputed(None)
    given_up, peak = recomputed(int(0.8 * most))
    assert 0 < given_up[-1] <= 2
    assert peak <= 0.8 * most


@pytest.mark.parametrize("method", ["delta", "mimose", "auto"])
def test_a_step_that_differs_from_micro_batch_to_micro_batch_may_be_told_by_hand(method: str) -> None:
    model, optimizer = small()
    with spillway.manage(model, optimizer, budget="1GiB", method=method) as memory:
        for _ in range(3):
            with memory.step(torch.ones(8, 32)):
                for rows in (8, 8, 16):
                    memory.micro_batch(torch.ones(rows, 32))
                    model(torch.ones(rows, 32)).square().mean().backward()
                memory.micro_batch(None)  # which tells no size
                optimizer.step()
        assert memory.history[-1].signature.startswith("float32[8, 32], float32[16, 32]")
        assert all(one.managed for one in memory.history)  # a tensor session expects no other to be like it
        with pytest.raises(SessionError, match="inside a step"):
            memory.micro_batch(torch.ones(8, 32))


@pytest.mark.parametrize("method", ["delta", "mimose"])
def test_a_forward_that_raises_ends_its_step_and_the_next_one_is_whole(method: str) -> None:
    model, optimizer = small()
    with AutomaticSteps(model, optimizer, budget="1GiB", method=method) as steps:
        for batch in batches(3):
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                model(torch.ones(3, 5))
            step(model, optimizer, batch)
        assert len(steps.session.history) == 3


@pytest.mark.parametrize("method", ["lru", "checkpoint"])
def test_a_refusal_leaves_weights_alone_and_smaller_batches_go_on(method: str) -> None:
    model, optimizer = small()
    before = copy.deepcopy(model.state_dict())
    with AutomaticSteps(model, optimizer, budget="150KiB", method=method) as steps:
        with pytest.raises(BudgetInfeasible) as refusal:
            step(model, optimizer, torch.ones(4096, 32))
        assert refusal.value.exact
        optimizer.zero_grad()
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        for _ in range(2):
            step(model, optimizer, torch.ones(8, 32))
        assert [one.peak_bytes <= 150 << 10 for one in steps.session.history] == [True, True]


def test_two_models_that_update_in_turn_are_one_session_of_the_tensor_engine() -> None:
    def adversaries(method: str | None) -> list[Any]:
        accelerator = accelerator_of()
        torch.manual_seed(0)
        makes, judges = nn.Linear(8, 32), nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
        optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (makes, judges)]
        makes, judges, *optimizers = prepared(accelerator, method, "400KiB", makes, judges, *optimizers)
        for _ in range(3):
            made = makes(torch.randn(64, 8))
            accelerator.backward(judges(torch.randn(64, 32)).mean() - judges(made.detach()).mean())
            optimizers[1].step()
            optimizers[1].zero_grad()
            accelerator.backward(judges(makes(torch.randn(64, 8))).mean())
            optimizers[0].step()
            optimizers[0].zero_grad()
        if method is not None:
            assert max(one.peak_bytes for one in accelerator.spillway.session.history) <= 400 << 10
        accelerator.end_training()
        return [*makes.parameters(), *judges.parameters()]

    plain = adversaries(None)
    for method in ("delta", "auto"):
        assert all(map(torch.equal, plain, adversaries(method)))


def closures(method: str | None, optimizer_of: Callable[[Any], torch.optim.Optimizer]) -> list[Tensor]:
    model, _ = small()
    optimizer = optimizer_of(model.parameters())
    with contextlib.ExitStack() as stack:
        if method is not None:
            steps = stack.enter_context(AutomaticSteps(model, optimizer, budget="1GiB", method=method))
        for batch in batches(3):

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        if method is not None:
            assert len(steps.session.history) == 3
    return list(model.parameters())


@pytest.mark.parametrize("method", ["lru", "checkpoint", "auto"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, functools.partial(torch.optim.LBFGS, max_iter=3)])
def test_a_forward_in_a_closure_of_the_optimizer(method: str, kind: Any) -> None:
    plain = closures(None, functools.partial(kind, lr=0.01))
    assert all(map(torch.equal, plain, closures(method, functools.partial(kind, lr=0.01))))


def test_copies_of_a_model_belong_to_no_session() -> None:
    model, optimizer = small()
    with AutomaticSteps(model, optimizer, budget="1GiB", method="lru") as steps:
        step(model, optimizer, torch.ones(8, 32))
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(copied.eval()(torch.ones(8, 32)), model.eval()(torch.ones(8, 32)))
            copied.train()(torch.ones(8, 32)).sum().backward()
        step(model.train(), optimizer, torch.ones(8, 32))
        assert len(steps.session.history) == 2
        assert steps.session.history[-1].signature == "float32[8, 32]"
    with pytest.raises(UsageError, match="give AutomaticSteps the optimizer"):
        AutomaticSteps(model, None, budget="1GiB")


def test_who_trains_in_evaluation_mode_is_believed_after_the_first_update() -> None:
    model, optimizer = small()
    model.eval()
    with AutomaticSteps(model, optimizer, budget="1GiB", method="lru") as steps:
        for batch in batches(3):
            step(model, optimizer, batch)
        assert len(steps.session.history) == 2


@pytest.mark.parametrize("wrong", [{"budget": "lots"}, {"budget": "1GiB", "method": "best"}])
def test_what_makes_no_sense_is_refused_before_anything_is_prepared(wrong: dict[str, str]) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UsageError):
        prepare(accelerator, *small(), **wrong)
    assert not accelerator._models
    assert not accelerator._optimizers


@pytest.mark.parametrize("missing", ["model", "optimizer", "its optimizer"])
def test_who_forgets_one_of_them_is_told_before_anything_is_prepared(missing: str) -> None:
    accelerator, (model, optimizer) = Accelerator(cpu=True), small()
    given = {"model": [optimizer], "optimizer": [model], "its optimizer": [model, small()[1]]}[missing]
    with pytest.raises(UsageError, match="needs a model and the optimizer that updates it among what it prepares"):
        prepare(accelerator, *given, budget="1GiB")
    assert not accelerator._models
    assert not accelerator._optimizers


@pytest.mark.parametrize("steps_in", ["a closure", "a wrapper"])
def test_evaluation_mode_is_told_from_training_where_an_optimizer_calls_and_where_a_wrapper_is_called(
    steps_in: str,
) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, batch: Tensor) -> Any:
            return self.module(batch)

    model, optimizer = small()
    called: Any = model if steps_in == "a closure" else Wrapper(model)
    called.eval()
    if steps_in == "a wrapper":
        model.train()
    with AutomaticSteps(called, optimizer, budget="1GiB", method="lru") as steps:
        for batch in batches(3):
            if steps_in == "a closure":
                optimizer.step(lambda batch=batch: called(batch).square().mean().backward())  # type: ignore[arg-type]
            else:
                step(called, optimizer, batch)
        # In evaluation mode it is believed from the first update on.
        assert len(steps.session.history) == (2 if steps_in == "a closure" else 3)


def test_a_forward_that_returns_nothing_is_no_failure_where_an_error_is_being_handled() -> None:
    class Losing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 32)

        def forward(self, batch: torch.Tensor) -> None:
            self.loss = self.layer(batch).square().mean()

    model = Losing()
    optimizer = torch.optim.SGD(model.parameters())
    with AutomaticSteps(model, optimizer, budget="1GiB", method="lru") as steps:
        try:
            raise MemoryError
        except MemoryError:
            model(torch.ones(8, 32))
            model.loss.backward()
            optimizer.step()
        assert len(steps.session.history) == 1


def test_a_model_that_is_not_called_is_said_once() -> None:
    model, optimizer = small()
    with AutomaticSteps(model, optimizer, budget="1GiB", method="lru"):
        for number, batch in enumerate(batches(2)):
            said = (
                pytest.warns(UserWarning, match="no forward of the model") if number == 0 else contextlib.nullcontext()
            )
            with said as told:
                model.forward(batch).square().mean().backward()
                optimizer.step()
            assert told is None or told[0].filename == __file__


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("method", ["delta", "mimose"])
def test_a_model_is_unwrapped_while_the_session_is_open(precision: str, method: str) -> None:
    accelerator = accelerator_of(mixed_precision=precision)
    model, optimizer = small()
    model, optimizer = prepare(accelerator, model, optimizer, budget="1GiB", method=method)
    for batch in batches(2):
        step(model, optimizer, batch)
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    bare.eval()
    found = bare(batch)
    accelerator.end_training()
    assert "forward" not in vars(bare) or not hasattr(bare.forward, "original")
    with torch.no_grad():
        assert torch.equal(found, bare(batch))


def test_the_session_ends_with_the_training_and_another_may_begin() -> None:
    accelerator = accelerator_of()
    for ends in ("end_training", "free_memory", "clear"):
        model, optimizer = small()
        model, optimizer = prepare(accelerator, model, optimizer, budget="1GiB", method="lru")
        step(model, optimizer, torch.ones(8, 32))
        with pytest.raises(UsageError, match="prepare all models and optimizers in one call"):
            prepare(accelerator, *small(), budget="1GiB")
        model(torch.ones(8, 32))  # a step that is left running
        getattr(accelerator, ends)()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model, optimizer, torch.ones(8, 32))
        assert len(accelerator.spillway.session.history) == 1
    with pytest.raises(UsageError, match=r"found 1 models and 0 optimizers"):
        prepare(accelerator, small()[0], budget="1GiB")


@pytest.mark.parametrize("method", ["lru", "mimose"])
def test_what_the_loop_raises_closes_the_session_and_passes(method: str) -> None:
    accelerator = accelerator_of()
    model, optimizer = prepare(accelerator, *small(), budget="150KiB", method=method)
    with pytest.raises(ZeroDivisionError), accelerator.spillway:
        step(model, optimizer, torch.ones(16, 32))
        model(torch.ones(16, 32)).square().mean().backward()
        raise ZeroDivisionError
    assert all(torch.isfinite(one).all() for one in model.parameters())
    with pytest.raises(SessionError, match="closed"):
        accelerator.spillway.session.begin(torch.ones(2))


def test_nothing_stays_where_nobody_closes() -> None:
    model, optimizer = small()
    AutomaticSteps(model, optimizer, budget="150KiB", method="lru")
    model(torch.ones(16, 32)).square().mean().backward()
    del model, optimizer
    gc.collect()
    assert not _global_optimizer_pre_hooks
