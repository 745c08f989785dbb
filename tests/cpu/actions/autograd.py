"""What training code tells autograd: hooks, functions of its own, gradients of gradients, `torch.func`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.cpu.world import Instruction, World, action


class _MarksDirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.mark_dirty(x)
        ctx.factor = factor
        return x.mul_(factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.factor, None


class _InPlaceInside(torch.autograd.Function):
    """Writes its own temporaries, and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        buffer = torch.empty_like(x)
        buffer.copy_(x).sigmoid_()
        half = buffer[: len(buffer) // 2]
        half.add_(1)
        ctx.save_for_backward(buffer)
        ctx.shape = x.shape
        ctx.scale = torch.ones(64, 32)
        return buffer * 2, x.detach().argmax(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:  # type: ignore[override]
        (buffer,) = ctx.saved_tensors
        made = gradient.clone()
        made.mul_(buffer)
        made[0] += 1
        ctx.scale.add_(1)
        return made.mul_(ctx.scale.mean())


class _NoZeros(torch.autograd.Function):
    """Gradients that are not there stay None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        ctx.mark_non_differentiable(mask := x > y)
        return x + y, x * y, mask

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any, _: Any) -> Any:  # type: ignore[override]
        x, y = ctx.saved_tensors
        if first is None and second is None:
            return None, None
        if first is None:
            return second * y, second * x if ctx.needs_input_grad[1] else None
        return (first if second is None else first + second * y), None


class _Nested(torch.autograd.Function):
    """Builds a graph of its own in its backward, as reentrant checkpoints do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x.detach()
        ctx.state = torch.get_rng_state()
        return F.dropout(x.tanh(), 0.3)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            x = ctx.x.requires_grad_()
            F.dropout(x.tanh(), 0.3).backward(gradient)
        return x.grad


class _ForFunc(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp().clamp(max=9), x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> Any:  # type: ignore[override]
        x, e, _ = ctx.saved_tensors
        return a * e * (e < 9) + b * x.cos()


@action(4)
def function(world: World, i: Instruction) -> Any:
    x = world.numbers(i.a)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: _MarksDirty.apply(x * 1, 0.5), lambda: _MarksDirty.apply(x.detach(), 0.5),
        lambda: _InPlaceInside.apply(x)[0],
        lambda: _NoZeros.apply(x, world.like(i.b, x)), lambda: _NoZeros.apply(x, world.like(i.b, x))[1],
        lambda: _Nested.apply(x),
        lambda: _ForFunc.apply(x), lambda: torch.vmap(lambda row: _ForFunc.apply(row)[0])(x),
        lambda: _MarksDirty.apply((x * 2)[:4], 3.0),
    )  # fmt: skip
    return calls[i.c % len(calls)]()


def _rough(gradient: Tensor) -> None:
    """Changes the gradient that it is given, which training code should not do, and does."""
    gradient.mul_(0.5)


@action(5)
def hooks(world: World, i: Instruction) -> Any:
    """Hooks that change gradients, count, or let gradients go as soon as they are used."""
    x = world.pick(i.a, lambda t: t.requires_grad and t.is_floating_point())
    y = x.clone() if i.b % 2 else x * 0.5
    parameter = list(world.network.parameters())[i.b % 8]

    def step_at_once(p: Tensor) -> None:
        with torch.no_grad():
            p.sub_(p.grad, alpha=1e-3)
        p.grad = None

    def accumulated(p: Tensor) -> None:
        if p.grad is not None:
            p.grad.clamp_(-0.1, 0.1)

    def several(gradients: Any) -> None:
        world.note("several", [g is not None for g in gradients])

    calls: tuple[Callable[[], Any], ...] = (
        lambda: y.register_hook(_rough), lambda: y.register_hook(lambda g: g.mul_(2)),
        lambda: y.register_hook(lambda g: g.detach().clone().zero_()),
        lambda: y.retain_grad(),
        lambda: _count(world, "hooks", lambda: parameter.register_post_accumulate_grad_hook(accumulated)),
        lambda: _count(world, "hooks", lambda: parameter.register_post_accumulate_grad_hook(step_at_once)),
        lambda: _count(world, "hooks", lambda: parameter.register_hook(lambda g: g * 0.9)),
        lambda: y.grad_fn and y.grad_fn.register_hook(lambda into, _: tuple(g if g is None else g * 1.5 for g in into)),
        lambda: y.grad_fn and y.grad_fn.register_prehook(lambda out: tuple(g if g is None else g + 0.1 for g in out)),
        lambda: torch.autograd.graph.register_multi_grad_hook((y, parameter), several),
        lambda: world.handles.pop().remove() if world.handles else None,
        lambda: y.register_hook(lambda g: world.kept.append(g[:2])),
        lambda: y.register_hook(lambda g: world.note("g", float(g.detach().float().abs().sum()))),
        lambda: y.register_hook(lambda g: _raise()), lambda: y.register_hook(lambda g: torch.randn_like(g) * 0.01 + g),
    )  # fmt: skip
    calls[i.c % len(calls)]()
    return y


def _raise() -> None:
    raise ValueError("a hook that fails")


def _count(world: World, name: str, register: Callable[[], Any]) -> None:
    if len(world.handles) < 4:
        world.handles.append(register())


@action(3)
def hook_of_module(world: World, i: Instruction) -> None:
    module = list(world.network.values())[i.a % len(world.network)]

    def forward_hook(_: Any, given: Any, made: Any) -> Any:
        return made * 1.01 if isinstance(made, Tensor) and made.is_floating_point() else None

    def before(_: Any, given: Any) -> Any:
        return tuple(g * 0.99 if isinstance(g, Tensor) and g.is_floating_point() else g for g in given)

    def backward_hook(_: Any, into: Any, out: Any) -> Any:
        return tuple(g if g is None else g * 0.5 for g in into)

    def backward_before(_: Any, out: Any) -> Any:
        return tuple(g if g is None else g.clone().clamp_(-1, 1) for g in out)

    def stepped(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"][:2]:
                if parameter.grad is not None and parameter.grad.layout is torch.strided:
                    parameter.grad.mul_(0.9)

    calls: tuple[Callable[[], Any], ...] = (
        lambda: module.register_forward_hook(forward_hook), lambda: module.register_forward_pre_hook(before),
        lambda: module.register_full_backward_hook(backward_hook),
        lambda: module.register_full_backward_pre_hook(backward_before),
        lambda: world.optimizer.register_step_pre_hook(stepped),
        lambda: world.optimizer.register_step_post_hook(stepped),
        lambda: module.register_full_backward_hook(lambda m, a, b: world.note("hook", len(b))),
    )  # fmt: skip
    if i.b % 4 == 0 and world.handles:
        world.handles.pop(0).remove()
    else:
        _count(world, "module", calls[i.c % len(calls)])


@action(4)
def functional(world: World, i: Instruction) -> Any:
    """`torch.func`, forward mode, and the functions of `torch.autograd`."""
    x = world.floats(i.a)
    x = x[:16, :32].float()
    first = x[0] if x[0].numel() <= 512 else x[0].reshape(-1)[:512]  # else a Hessian takes gigabytes
    linear, tf = world.network["linear"], torch.func
    parameters = {name: p.detach() for name, p in linear.named_parameters()}
    rows = torch.ones(8, 64) * x.mean()

    def loss(row: Tensor) -> Tensor:
        return (row.sin() * row).sum()

    def of_parameters(given: dict[str, Tensor], row: Tensor) -> Tensor:
        return tf.functional_call(linear, given, (row,)).square().mean()

    def dual() -> Any:
        with forward_ad.dual_level():
            made = forward_ad.make_dual(x.detach(), torch.ones_like(x)).sin() * 2
            return forward_ad.unpack_dual(made).tangent

    calls: tuple[Callable[[], Any], ...] = (
        lambda: tf.grad(loss)(x), lambda: torch.vmap(loss)(x), lambda: torch.vmap(tf.grad(loss))(x),
        lambda: tf.jacrev(lambda r: r.tanh() * 2)(first), lambda: tf.jacfwd(lambda r: r.sigmoid())(first),
        lambda: tf.hessian(loss)(first), lambda: tf.jvp(torch.tanh, (x,), (torch.ones_like(x),)),
        lambda: tf.vjp(torch.sin, x)[1](torch.ones_like(x)), lambda: tf.functional_call(linear, parameters, (rows,)),
        lambda: list(tf.grad(of_parameters)(parameters, rows).values()),
        lambda: list(torch.vmap(tf.grad(of_parameters), in_dims=(None, 0))(parameters, rows).values())[1], dual,
        lambda: torch.autograd.functional.jacobian(torch.sin, x[0].reshape(-1)[:32]),
        lambda: torch.autograd.functional.hvp(loss, x, torch.ones_like(x))[1],
        lambda: torch.autograd.functional.vjp(torch.sin, x)[1],
        lambda: torch.vmap(lambda r: F.dropout(r, 0.3), randomness="different")(x),
        lambda: torch.vmap(lambda r: r + torch.randn(32), randomness="same")(x), lambda: tf.grad_and_value(loss)(x)[0],
        lambda: torch.autograd.grad(tf.functional_call(linear, parameters, (rows.requires_grad_(),)).sum(), rows)[0],
        lambda: tf.linearize(torch.sin, x)[1](x), lambda: tf.stack_module_state([linear, linear])[0]["weight"],
        lambda: tf.functionalize(lambda r: r.clone().add_(1).view(-1))(x),
        lambda: torch.vmap(torch.mm)(x.view(2, 8, 32), x.view(2, 8, 32).mT),
    )  # fmt: skip
    return calls[i.c % len(calls)]()


@action(5)
def gradient(world: World, i: Instruction) -> Any:
    """Ways to ask for gradients."""
    x = world.pick(i.a, lambda t: t.is_floating_point() and t.dim() >= 1 and t.numel() > 0)
    x = x if x.requires_grad else x.detach().clone().requires_grad_()
    weight = world.network["linear"].weight

    def block(inner: Tensor) -> Tensor:
        return F.dropout(F.gelu(inner) * weight.mean(), 0.2).tanh()

    def twice(inner: Tensor) -> Tensor:
        return checkpoint(block, checkpoint(block, inner, use_reentrant=False), use_reentrant=False)

    def loss() -> Tensor:
        return (block(x).square().sum() + (x * weight.sum()).mean()).float()

    with torch.enable_grad():
        calls: tuple[Callable[[], Any], ...] = (
            lambda: torch.autograd.grad(loss(), [x, weight]),
            lambda: torch.autograd.grad(x.sum(), [x, weight], allow_unused=True)[:1],
            lambda: loss().backward(inputs=[weight]),
            lambda: torch.autograd.grad(torch.autograd.grad(x.tanh().pow(3).sum(), x, create_graph=True)[0].sum(), x),
            lambda: torch.autograd.grad(x.exp(), x, grad_outputs=torch.ones_like(x)),
            lambda: torch.autograd.grad(loss(), x, create_graph=True),
            lambda: torch.autograd.grad(x.sin(), x, x.detach().expand(2, *x.shape), is_grads_batched=True),
            lambda: torch.autograd.backward([loss(), x.mean().float()]), lambda: twice(x).sum().backward(),
            lambda: checkpoint(block, x, use_reentrant=False, preserve_rng_state=False),
            lambda: checkpoint(twice, x, use_reentrant=True), lambda: (loss() + _penalty(x)).backward(),
            lambda: _accumulated(x, loss), lambda: x.detach_() if x.is_leaf else x.detach(),
            lambda: weight.grad.detach() if weight.grad is not None else None,
            lambda: setattr(weight, "grad", torch.ones_like(weight)),
            lambda: setattr(weight, "grad", weight.detach().t().clone().t()),
            lambda: weight.grad is not None and weight.grad.zero_() is None,
            lambda: x.expand(2, *x.shape).sum().backward(),
            lambda: torch.stack([x, x]).unbind()[1].backward(torch.ones_like(x)),
            lambda: x.to_sparse().coalesce().values().sum().backward(),
            lambda: torch.prod(x.tanh(), 0).sum().backward(),
            lambda: (x.view(-1)[::2].clone().mul_(2).sum() + x.mean()).backward(),
            lambda: _written_view(x).sum().backward(),
            lambda: x.index_select(0, torch.zeros(3, dtype=torch.long)).sum().backward(),
            lambda: x.norm().backward(retain_graph=True),
        )  # fmt: skip
        made = calls[i.c % len(calls)]()
    return made if isinstance(made, Tensor | list | tuple) else None


def _penalty(x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(x.sigmoid().sum(), x, create_graph=True)
    return found.norm().float()


def _accumulated(x: Tensor, loss: Callable[[], Tensor]) -> None:
    for _ in range(3):
        (loss() / 3).backward()


def _written_view(x: Tensor) -> Tensor:
    base = x * 1
    base[: len(base) // 2].mul_(2)
    base.view(-1)[0] = 1
    return base.relu_()
