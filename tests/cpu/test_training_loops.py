"""The many ways in which people write a training step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from tests.cpu.training import Trainer, assert_trains_as_plainly, batch_of, train

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd for-loop": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
    "sgd foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adam for-loop": partial(torch.optim.Adam, lr=1e-2, amsgrad=True, foreach=False),
    "adam foreach": partial(torch.optim.Adam, lr=1e-2, amsgrad=True, foreach=True),
    "adam fused": partial(torch.optim.Adam, lr=1e-2, amsgrad=True, fused=True),
    "adamw fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adamw foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adagrad fused": partial(torch.optim.Adagrad, lr=1e-2, fused=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.5),
    "nadam": partial(torch.optim.NAdam, lr=1e-3),
    "radam": partial(torch.optim.RAdam, lr=1e-3),
    "adamax": partial(torch.optim.Adamax, lr=1e-3),
    "adadelta": partial(torch.optim.Adadelta, lr=1e-1),
    "asgd": partial(torch.optim.ASGD, lr=1e-2),
    "rprop": partial(torch.optim.Rprop, lr=1e-3),
}


@pytest.mark.long(but=2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_as_it_does_plainly(name: str) -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Tensor]:
        losses = []
        for number in range(3):
            with trainer.step():
                losses.append(train(model, optimizer, number))
        return losses

    assert_trains_as_plainly(program, lambda model: OPTIMIZERS[name](model.parameters()))


def test_an_optimizer_that_calls_back_for_the_loss() -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(batch_of(0)).square().mean()
            loss.backward()
            return loss

        losses = []
        for _ in range(2):
            with trainer.step():
                losses.append(optimizer.step(closure))
        return losses

    assert_trains_as_plainly(program, lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4))


@pytest.mark.long(but=1)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("where", ["before", "after"])
def test_gradients_cleared_either_way_before_or_after(where: str, set_to_none: bool) -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Tensor]:
        losses = []
        for number in range(3):
            with trainer.step():
                if where == "before":
                    optimizer.zero_grad(set_to_none=set_to_none)
                loss = model(batch_of(number)).square().mean()
                loss.backward()
                optimizer.step()
                if where == "after":
                    optimizer.zero_grad(set_to_none=set_to_none)
                losses.append(loss.detach())
        return losses

    assert_trains_as_plainly(program)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulated_over_several_backward_passes_of_one_step(set_to_none: bool) -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> None:
        for number in range(2):
            with trainer.step():
                optimizer.zero_grad(set_to_none=set_to_none)
                for part in range(3):
                    (model(batch_of(10 * number + part)).square().mean() / 3).backward()
                optimizer.step()

    assert_trains_as_plainly(program)


def test_gradients_accumulated_across_steps() -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> None:
        for number in range(6):
            with trainer.step(batch_of(number)):
                (model(batch_of(number)).square().mean() / 3).backward()
                if number % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()

    assert_trains_as_plainly(program)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Tensor]:
        losses = []
        for number in range(3):
            with trainer.step():
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=dtype):
                    loss = model(batch_of(number)).float().square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        return losses

    assert_trains_as_plainly(program)


def test_autocast_around_several_steps_with_its_cache_of_weights() -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for number in range(3):
                with trainer.step():
                    optimizer.zero_grad()
                    for _ in range(2):
                        model(batch_of(number)).float().square().mean().backward()
                    optimizer.step()

    assert_trains_as_plainly(program)


def test_a_graph_that_is_kept_for_a_second_backward() -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Any]:
        with trainer.step():
            out = model(batch_of(0))
            loss = out.square().mean()
            loss.backward(retain_graph=True)
            first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            loss.backward(retain_graph=True)
            out.sum().backward()
            optimizer.step()
        return first

    assert_trains_as_plainly(program)


def test_double_backward() -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Any]:
        seen = []
        for number in range(2):
            with trainer.step():
                optimizer.zero_grad()
                inputs = batch_of(number).requires_grad_()
                out = model(inputs)
                (slopes,) = torch.autograd.grad(out.square().mean(), inputs, create_graph=True)
                loss = out.mean() + slopes.square().sum()
                loss.backward()
                optimizer.step()
                seen.append(slopes.detach())
        return seen

    assert_trains_as_plainly(program)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_gradients_of_functions() -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Any]:
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

        def loss_of(weights: dict[str, Tensor], rows: Tensor) -> Tensor:
            return torch.func.functional_call(model.eval(), (weights, buffers), (rows,)).square().mean()

        with trainer.step():
            gradients = torch.func.grad(loss_of)(parameters, batch_of(0))
            each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(parameters, batch_of(1, 12)[:, None])
            pushed = torch.func.jvp(model, (batch_of(2),), (batch_of(3),))
        return [gradients, {name: value.sum(0) for name, value in each.items()}, pushed]

    assert_trains_as_plainly(program)


def test_clipped_gradients() -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Any]:
        seen = []
        for number in range(3):
            with trainer.step():
                optimizer.zero_grad()
                model(batch_of(number)).square().mean().backward()
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
        return seen

    assert_trains_as_plainly(program)


def test_a_gradient_scaler_and_a_schedule() -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        seen = []
        for number in range(3):
            with trainer.step():
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(batch_of(number)).float().square().mean()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            schedule.step()
            seen.append(scaler.get_scale())
        return seen

    assert_trains_as_plainly(program)


def void(result: object) -> None:
    """For hooks that must return nothing."""


def test_hooks_on_modules_and_tensors() -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Any]:
        seen: list[Any] = []
        handles = [
            model[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.5,)),
            model[2].register_forward_hook(lambda module, inputs, out: out + inputs[0].sin()),
            model[4].register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 2,)),
            model[4].register_full_backward_hook(lambda module, inner, outer: seen.append([inner[0], outer[0]])),
            model[6].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3)),
            model[0].weight.register_post_accumulate_grad_hook(lambda parameter: void(parameter.grad.mul_(0.5))),
        ]
        for number in range(2):
            with trainer.step():
                optimizer.zero_grad()
                hidden = model[:5](batch_of(number))
                hidden.register_hook(lambda gradient: seen.append(gradient.norm()) or gradient * 3)
                hidden.retain_grad()
                model[5:](hidden).square().mean().backward()
                seen.append(hidden.grad)
                optimizer.step()
        for handle in handles:
            handle.remove()
        return seen

    assert_trains_as_plainly(program)


def test_an_optimizer_that_steps_inside_backward() -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> None:
        each = {parameter: torch.optim.Adam([parameter], foreach=False) for parameter in model.parameters()}

        def step(parameter: Tensor) -> None:
            each[parameter].step()
            each[parameter].zero_grad()

        handles = [parameter.register_post_accumulate_grad_hook(step) for parameter in model.parameters()]
        for number in range(3):
            with trainer.step():
                model(batch_of(number)).square().mean().backward()
        for handle in handles:
            handle.remove()

    assert_trains_as_plainly(program)


def test_saved_tensor_hooks_of_the_users_own() -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> None:
        def pack(tensor: Tensor) -> tuple[torch.dtype, Tensor]:
            return tensor.dtype, tensor if isinstance(tensor, nn.Parameter) else tensor.to(torch.float64, copy=True)

        def unpack(packed: tuple[torch.dtype, Tensor]) -> Tensor:
            return packed[1].to(packed[0])

        for number in range(2):
            with trainer.step(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                train(model, optimizer, number)

    assert_trains_as_plainly(program)


def test_several_optimizers_take_turns() -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Any]:
        front = torch.optim.SGD(model[:5].parameters(), lr=0.1, momentum=0.9, foreach=True)
        back = torch.optim.AdamW(model[5:].parameters(), fused=True)
        for number in range(4):
            with trainer.step():
                model.zero_grad()
                loss = model(batch_of(number)).square().mean()
                loss.backward(retain_graph=number == 0)
                (front if number % 2 else back).step()
        return [state for each in (front, back) for state in each.state_dict()["state"].values()]

    assert_trains_as_plainly(program)


def test_weights_averaged_and_a_teacher_inside_the_step() -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Any]:
        averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        teacher = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        ).eval()
        for number in range(3):
            with trainer.step():
                optimizer.zero_grad()
                with torch.no_grad():
                    target = teacher(batch_of(number))
                F.mse_loss(model(batch_of(number)), target + 1).backward()
                optimizer.step()
                averaged.update_parameters(model)
                teacher.update_parameters(model)
        return [*averaged.state_dict().values(), *teacher.state_dict().values()]

    assert_trains_as_plainly(program)
