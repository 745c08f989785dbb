"""The loop around the model: optimizers, averages, scalers, states, data."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm, parameters_to_vector, vector_to_parameters
from torch.optim import swa_utils
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler, random_split

from tests.cpu.world import Instruction, World, action


@action(4)
def sparse_learn(world: World, i: Instruction) -> None:
    """Sparse gradients, added up, made dense or given to an optimizer of their own."""
    table = world.table
    numbers = torch.arange(64) * (i.a % 7 + 1) % 40
    with torch.enable_grad():
        (table(numbers).square().sum() * 0.1).backward()
    gradient = table.weight.grad
    if i.b % 5 == 0 and gradient.is_sparse:
        table.weight.grad = gradient.coalesce()
    elif i.b % 5 == 1:
        table.weight.grad = gradient.to_dense()
    elif i.b % 5 == 2 and gradient.is_sparse:
        world.note("values", float(gradient.coalesce().values().abs().sum()), gradient._nnz())
    if i.c % 2:
        world.sparse_optimizer.step()
        world.sparse_optimizer.zero_grad(set_to_none=i.c % 3 > 0)


@action(4)
def train(world: World, i: Instruction) -> None:
    """A whole small training step."""
    x = world.pick(i.a, lambda t: t.is_floating_point() and t.dim() == 2 and t.shape[1] == 64).detach().float()
    network, optimizer = world.network, world.optimizer
    chain = network["chain"] if "chain" in network else network["linear"]

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = network["narrow"](chain(x)).square().mean()
        loss.backward()
        return loss

    scaled = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=i.b % 4 != 0)
    if i.c % 6 == 0:
        with torch.enable_grad():
            scaled.scale(chain(x).square().mean()).backward()
        scaled.unscale_(optimizer)
        clip_grad_norm_(network.parameters(), 1.0)
        scaled.step(optimizer)
        scaled.update()
        if scaled.is_enabled() and scaled.get_scale() < 2.0**8:  # skipped: momentum of fused SGD is unwritten
            optimizer.state.clear()
    elif i.c % 6 == 1:
        with torch.enable_grad(), torch.autocast("cpu", dtype=(torch.bfloat16, torch.float16)[i.b % 2]):
            loss = network["linear"](network["linear"](x)).float().mean() + chain(x).float().mean()
        loss.backward()
        optimizer.step()
    elif i.c % 6 == 2:
        for _ in range(2):
            closure()
            clip_grad_value_(network.parameters(), 0.05)
            optimizer.step()
    elif i.c % 6 == 3 and not isinstance(optimizer, torch.optim.LBFGS):
        world.note("closure", float(optimizer.step(closure)))  # type: ignore[arg-type]
    elif i.c % 6 == 4:
        torch.optim.LBFGS(chain.parameters(), max_iter=2, history_size=2).step(closure)  # type: ignore[arg-type]
    else:
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.grad is not None and parameter.grad.layout is torch.strided:
                    parameter -= 0.01 * parameter.grad
                    parameter.grad.zero_()
        world.note("total", float(get_total_norm([p.detach() for p in network.parameters()])))


@action(3)
def average(world: World, i: Instruction) -> None:
    """Averages of the weights, made and used."""
    chain = world.network["linear"]
    if world.averaged is None:
        kinds: tuple[Callable[[], Any], ...] = (
            lambda: swa_utils.AveragedModel(chain),
            lambda: swa_utils.AveragedModel(chain, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
            lambda: swa_utils.AveragedModel(chain, avg_fn=lambda a, b, n: a * 0.5 + b * 0.5, use_buffers=True),
        )  # fmt: skip
        world.averaged = kinds[i.a % 3]()
    world.averaged.update_parameters(chain)
    if i.b % 3 == 0:
        with torch.no_grad():
            world.note("averaged", float(world.averaged(torch.ones(2, 64)).sum()))
    elif i.b % 3 == 1:
        chain.load_state_dict(world.averaged.module.state_dict())


@action(3)
def saved_state(world: World, i: Instruction) -> Any:
    """States saved and loaded, copies of modules, parameters as one vector, modules in another dtype."""
    network, optimizer, linear = world.network, world.optimizer, world.network["linear"]

    def through_file(state: Any) -> Any:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    calls: tuple[Callable[[], Any], ...] = (
        lambda: network.load_state_dict(through_file(network.state_dict())) and None,
        lambda: optimizer.load_state_dict(through_file(optimizer.state_dict())),
        lambda: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
        lambda: copy.deepcopy(linear)(torch.ones(32, 64)), lambda: parameters_to_vector(linear.parameters()),
        lambda: vector_to_parameters(parameters_to_vector(linear.parameters()).detach() * 0.99, linear.parameters()),
        lambda: linear.to(torch.bfloat16).to(torch.float32) and None,
        lambda: linear.apply(_begin_anew) and None,
        lambda: nn.init.orthogonal_(linear.weight) is None,
        lambda: nn.init.trunc_normal_(linear.weight, std=0.1) is None,
        lambda: network.load_state_dict(network.state_dict(), assign=True) and None,
        lambda: linear.requires_grad_(i.b % 2 == 0) and None,
        lambda: linear.register_buffer("extra", torch.ones(40, 40) * i.b) , lambda: optimizer.state_dict() and None,
        lambda: optimizer.zero_grad(set_to_none=i.b % 2 == 0),
        lambda: linear.double().float() and None,
        lambda: setattr(linear, "bias", nn.Parameter(linear.bias.detach().clone())),
        lambda: list(copy.deepcopy(network).state_dict().values())[:2],
        lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5).step(),
        lambda: network.to(memory_format=torch.channels_last) and None,
        lambda: nn.utils.parametrize.register_parametrization(linear, "weight", _Symmetric()) and None,
        lambda: nn.utils.parametrize.remove_parametrizations(linear, "weight") and None,
        lambda: nn.utils.prune.l1_unstructured(linear, "weight", 0.3) and None, lambda: optimizer.state.clear(),
    )  # fmt: skip
    made = calls[i.c % len(calls)]()
    return made if isinstance(made, Tensor | list) else None


def _begin_anew(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


@action(2)
def toggle(world: World, i: Instruction) -> None:
    """Parts of the network learn or do not; a step begins afresh; the random stream is set."""
    parameters = list(world.network.parameters())
    calls: tuple[Callable[[], Any], ...] = (
        lambda: parameters[i.a % len(parameters)].requires_grad_(i.b % 2 == 0),
        lambda: torch.default_generator.manual_seed(i.a),
        lambda: torch.set_rng_state(torch.get_rng_state()), lambda: world.own[0].set_state(world.own[1].get_state()),
        lambda: world.network.zero_grad(),
        lambda: world.own[1].manual_seed(i.a), lambda: world.kept.append(world.own[0].get_state()),
        lambda: torch.random.seed() and torch.default_generator.manual_seed(i.b),
        lambda: world.network["narrow"].reset_running_stats(), lambda: torch.manual_seed(i.a) and None,
    )  # fmt: skip
    calls[i.c % len(calls)]()


@action(3)
def data(world: World, i: Instruction) -> Any:
    """Batches as loaders make them."""
    x = world.floats(i.a).detach()
    dataset = TensorDataset(x, torch.arange(len(x)))
    generator = world.own[i.b % 2]
    samplers: tuple[Callable[[], DataLoader[Any]], ...] = (
        lambda: DataLoader(dataset, 16, shuffle=True, generator=generator),
        lambda: DataLoader(dataset, 20, drop_last=True),
        lambda: DataLoader(dataset, 16, sampler=WeightedRandomSampler([1.0] * len(x), 32, generator=generator)),
        lambda: DataLoader(dataset, 8, sampler=RandomSampler(dataset, generator=generator)),
        lambda: DataLoader(random_split(dataset, [0.5, 0.5], generator=generator)[0], 16, shuffle=True),
        lambda: DataLoader(dataset, 8, collate_fn=lambda rows: (torch.stack([r[0] for r in rows]),)),
    )  # fmt: skip
    batches = [batch[0] for number, batch in enumerate(samplers[i.c % len(samplers)]()) if number < 2]
    return [batches[0] * 2, *batches]
