"""What training code does to tensors most of the time."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.cpu.world import Instruction, World, action

SIDES = (32, 64, 128)
"""Matrices have these sides: 4 to 64 KiB of floats."""


# ---------------------------------------------------------------------- making tensors


def _shape(number: int) -> tuple[int, int]:
    return SIDES[number % 3], SIDES[number // 3 % 3]


@action(6)
def make(world: World, i: Instruction) -> Tensor:
    kinds: tuple[Callable[..., Tensor], ...] = (torch.zeros, torch.ones, torch.rand, torch.randn)
    return kinds[i.b % 4](_shape(i.a))


@action(4)
def leaf(world: World, i: Instruction) -> Tensor:
    return torch.randn(_shape(i.a), requires_grad=True)


@action(5)
def draw(world: World, i: Instruction) -> Tensor:
    generator = world.generator(i.b)
    kinds = (
        lambda shape: torch.randn(shape, generator=generator),
        lambda shape: torch.rand(shape, generator=generator),
        lambda shape: torch.randint(0, 40, shape, generator=generator),
        lambda shape: torch.empty(shape).uniform_(-1, 1, generator=generator),
        lambda shape: torch.bernoulli(torch.full(shape, 0.3), generator=generator),
        lambda shape: torch.randperm(shape[0] * shape[1], generator=generator).view(shape),
    )
    return kinds[i.c % len(kinds)](_shape(i.a))


# ---------------------------------------------------------------------- computing

UNARY: tuple[Callable[[Tensor], Any], ...] = (
    F.relu, F.gelu, torch.tanh, torch.sigmoid, torch.sin, F.silu, torch.abs, torch.neg, F.leaky_relu, torch.clone,
    lambda x: x.softmax(-1), lambda x: x.log_softmax(-1), lambda x: x * 0.5, lambda x: x.square().clamp(max=4),
    lambda x: x.cumsum(-1).tanh(), lambda x: x.sort(-1), lambda x: x.flip(0), lambda x: x.roll(3, 0),
    lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: x - x.mean(), lambda x: F.normalize(x, dim=-1),
    lambda x: x.topk(8), lambda x: x.logsumexp(-1), lambda x: x.var(-1), torch.tril, lambda x: x.contiguous(),
    lambda x: x.max(dim=-1), lambda x: torch.linalg.vector_norm(x), lambda x: x.double().mul(2), lambda x: x.bfloat16(),
    lambda x: torch.cat([x, x]), lambda x: x.repeat(2, 1), lambda x: x.to(torch.float32),
    lambda x: x.repeat_interleave(2, 0),
)  # fmt: skip


@action(18)
def unary(world: World, i: Instruction) -> Any:
    return UNARY[i.b % len(UNARY)](world.numbers(i.a, least=i.c % 3))


BINARY: tuple[Callable[[Tensor, Tensor], Any], ...] = (
    torch.add, torch.sub, torch.mul, torch.maximum, torch.atan2, lambda x, y: x / (y.abs() + 1), torch.hypot,
    lambda x, y: torch.where(x > y, x, y * 0.5), lambda x, y: x.lerp(y, 0.3), lambda x, y: torch.addcmul(x, x, y),
    lambda x, y: torch.cat([x, y]), lambda x, y: torch.stack([x, y]).mean(0), lambda x, y: x @ y.t() / 64,
    lambda x, y: torch.einsum("ij,ij->i", x, y), lambda x, y: x.gather(0, y.argsort(0)),
    lambda x, y: torch.cdist(x, y) / 16,
)  # fmt: skip


@action(12)
def binary(world: World, i: Instruction) -> Any:
    x = world.numbers(i.a)
    return BINARY[i.c % len(BINARY)](x, world.like(i.b, x))


@action(5)
def layer(world: World, i: Instruction) -> Any:
    """A layer of the network, fed with whatever fits it."""
    network = world.network
    by_rows = world.pick(i.a, lambda t: t.dtype == torch.float32 and t.dim() == 2 and t.shape[1] == 64)
    wholes = world.pick(i.b, lambda t: t.dtype == torch.float32 and t.numel() % 1024 == 0 and t.numel() > 1024)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: network["linear"](by_rows),
        lambda: network["wide"](wholes.reshape(-1, 1024)),
        lambda: network["narrow"](by_rows),
        lambda: network["table"](torch.arange(32) + i.a % 8),
        lambda: network["convolution"](by_rows[None, None]),
        lambda: network["recurrent"](wholes.reshape(-1, 1, 32)[:16])[0],
        lambda: F.group_norm(wholes.reshape(-1, 16, 16), 4),
        lambda: F.cross_entropy(by_rows, torch.arange(by_rows.shape[0]) % 64),
    )
    return calls[i.c % len(calls)]()


@action(8)
def chance(world: World, i: Instruction) -> Any:
    x, generator = world.floats(i.a), world.generator(i.b)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: F.dropout(x, 0.3),
        lambda: F.dropout(x.clone(), 0.2, inplace=True),
        lambda: F.alpha_dropout(x, 0.1),
        # As F.rrelu, whose noise nobody has written yet where `allow_mutation_on_saved_tensors` keeps a copy of it.
        lambda: torch.ops.aten.rrelu_with_noise(x, torch.zeros_like(x), 1 / 8, 1 / 3, True),
        lambda: torch.rand_like(x) + x,
        lambda: x.detach().clone().normal_(generator=generator),
        lambda: x.detach().clone().bernoulli_(0.4, generator=generator).mul(x),
        lambda: torch.multinomial(x.detach().softmax(-1).view(-1, x.shape[-1]), 8, generator=generator),
        lambda: x[torch.randperm(x.shape[0], generator=generator)],
        lambda: F.gumbel_softmax(x),
        lambda: torch.normal(x, 0.1, generator=generator),
    )
    return calls[i.c % len(calls)]()


# ---------------------------------------------------------------------- views and writes

VIEWS: tuple[Callable[[Tensor, int], Any], ...] = (
    lambda x, n: x.t(), lambda x, n: x[: x.shape[0] // 2], lambda x, n: x[::2], lambda x, n: x[:1].expand_as(x),
    lambda x, n: x.view(-1), lambda x, n: x[n % x.shape[0]], lambda x, n: x.narrow(1, n % 8, 16),
    lambda x, n: x.unfold(0, 8, 8), lambda x, n: x.unsqueeze(0), lambda x, n: x.chunk(2, 0),
    lambda x, n: x.diagonal(), lambda x, n: x.split(16, 1),
    lambda x, n: x.view(32, -1), lambda x, n: x.movedim(0, 1), lambda x, n: x.unbind(0)[:2], lambda x, n: x.detach(),
    lambda x, n: x.as_strided((32, 16), (16, 1), n % 4), lambda x, n: x.view_as(x), lambda x, n: x.view(torch.int32),
    lambda x, n: x.swapaxes(0, 1)[1:], lambda x, n: x.reshape(-1, 16),
)  # fmt: skip


@action(14)
def view(world: World, i: Instruction) -> Any:
    return VIEWS[i.b % len(VIEWS)](world.numbers(i.a, least=1), i.c)


WRITES: tuple[Callable[[Tensor, Tensor, torch.Generator | None], Any], ...] = (
    lambda x, y, g: x.add_(1), lambda x, y, g: x.mul_(0.7), lambda x, y, g: x.relu_(), lambda x, y, g: x.tanh_(),
    lambda x, y, g: x.clamp_(-1, 1), lambda x, y, g: x.zero_(), lambda x, y, g: x.copy_(y), lambda x, y, g: x.sub_(y),
    lambda x, y, g: x.addcmul_(y, y, value=0.1), lambda x, y, g: x.masked_fill_(y > 0, 0.25), lambda x, y, g: x.neg_(),
    lambda x, y, g: x.index_fill_(0, torch.tensor([1, 3]), 2.0), lambda x, y, g: x.sigmoid_(),
    lambda x, y, g: x.index_add_(0, torch.arange(2), y[:2]), lambda x, y, g: x.normal_(generator=g),
    lambda x, y, g: x.uniform_(-1, 1, generator=g),
    lambda x, y, g: x.bernoulli_(0.5, generator=g), lambda x, y, g: x.lerp_(y, 0.5), lambda x, y, g: x.t_(),
    lambda x, y, g: F.dropout(x, 0.2, inplace=True),
    lambda x, y, g: x.scatter_(0, torch.zeros(1, 8, dtype=torch.long), 3.0),
    lambda x, y, g: x.cumsum_(0), lambda x, y, g: torch.add(x, y, out=x), lambda x, y, g: x.fill_(y.mean()),
    lambda x, y, g: torch.mul(y, 2, out=torch.empty(0)),
)  # fmt: skip


@action(14)
def in_place(world: World, i: Instruction) -> None:
    """On a base or a view, under autograd or past it; what autograd forbids is an error in both runs."""
    x = world.floats(i.a)
    write = WRITES[i.c % len(WRITES)]
    with torch.no_grad() if x.is_leaf or i.b % 3 == 0 else contextlib.nullcontext():
        write(x, world.like(i.b, x), world.generator(i.b))


@action(6)
def assign(world: World, i: Instruction) -> None:
    """Through an index."""
    x = world.floats(i.a)
    y, rows = world.like(i.b, x), x.shape[0]
    with torch.no_grad():
        if i.c % 5 == 0:
            x[: rows // 2] = y[rows - rows // 2 :]
        elif i.c % 5 == 1:
            x[x > 0.5] = -0.5
        elif i.c % 5 == 2:
            x[torch.arange(0, rows, 2)] += 0.5
        elif i.c % 5 == 3:
            x.index_put_((torch.tensor([0, 0, 1]),), y[:3], accumulate=True)
        else:
            x[::2, 1::3] = y[::2, 1::3]


@action(5)
def foreach(world: World, i: Instruction) -> Any:
    """One op on several tensors, views of one storage among them."""
    chosen = [t for t in (world.floats(i.a), world.floats(i.b), world.floats(i.c)) if not t.requires_grad]
    halves = world.floats(i.a).detach().chunk(2)
    lists = (chosen or list(halves), list(halves), list({id(t): t for t in chosen}.values()))[i.c % 3]
    with torch.no_grad():
        if i.b % 5 == 0:
            torch._foreach_add_(lists, 0.5)
        elif i.b % 5 == 1:
            torch._foreach_mul_(lists, 0.9)
        elif i.b % 5 == 2:
            return torch._foreach_tanh(lists)
        elif i.b % 5 == 3:
            torch._foreach_addcmul_(lists, lists, lists, 0.1)
        else:
            torch._foreach_copy_(lists, [t.flip(0) for t in lists])
    return None


# ---------------------------------------------------------------------- autograd


def _loss(world: World, i: Instruction) -> Tensor | None:
    wanting = [t for t in world.tensors if t.requires_grad and t.is_floating_point() and t.numel()]
    chosen = [wanting[number % len(wanting)] for number in (i.a, i.b, i.c)] if wanting else []
    return torch.stack([t.float().mean() for t in chosen]).sum() if chosen else None


@action(5)
def learn(world: World, i: Instruction) -> None:
    """A loss and its backward; afterwards most of what hangs on the graph is let go."""
    with torch.enable_grad():
        loss = _loss(world, i)
    if loss is None:
        return
    world.note("loss", loss.item())
    loss.backward(retain_graph=i.b % 3 == 0)
    if i.b % 3:
        world.tensors = [t.detach() if t.requires_grad and not t.is_leaf else t for t in world.tensors]


@action(2)
def learn_twice(world: World, i: Instruction) -> Any:
    """Gradients of gradients."""
    x = world.floats(i.a)
    x = x if x.requires_grad else x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(x.tanh().square().sum(), x, create_graph=True)
    if i.b % 2:
        (gradient.square().sum() * 0.1).backward()
    return gradient


@action(3)
def optimize(world: World, i: Instruction) -> None:
    for parameter in world.network.parameters():
        if parameter.grad is None and i.b % 2:
            parameter.grad = torch.full_like(parameter, 0.125)
    if i.a % 3 == 0:
        world.note("norm", torch.nn.utils.clip_grad_norm_(world.network.parameters(), 0.5).item())
    world.optimizer.step()
    world.optimizer.zero_grad(set_to_none=i.c % 2 == 0)


@action(2)
def hook(world: World, i: Instruction) -> Tensor:
    """On a copy: torch does not survive a hook on some of the views whose base was written."""
    x = world.pick(i.a, lambda t: t.requires_grad).clone()
    if x.requires_grad:
        x.register_hook((lambda g: g * 0.5, lambda g: g.clone().clamp_(-1, 1), lambda g: None)[i.b % 3])
    return x


class _Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y.detach().exp().clamp_(max=3))
        ctx.hidden = x.detach() * 2
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return gradient * y, gradient * x + ctx.hidden


@action(2)
def custom(world: World, i: Instruction) -> Any:
    x = world.floats(i.a)
    return _Saving.apply(x, world.like(i.b, x))


@action(2)
def checkpointed(world: World, i: Instruction) -> Any:
    x = world.floats(i.a)

    def block(inner: Tensor) -> Tensor:
        return F.dropout(F.gelu(inner) * 2, 0.2).tanh()

    return checkpoint(block, x, use_reentrant=i.b % 2 == 0)


# ---------------------------------------------------------------------- control flow, and the end of tensors


@action(6)
def branch(world: World, i: Instruction) -> Any:
    x = world.floats(i.a)
    kind = i.b % 4
    value = (x.mean().item(), bool((x > 0.5).any()), int(x.argmax()), len(x.nonzero()))[kind]
    world.note("branch", value)
    return x * 0.9 if (value > 0 if kind == 0 else int(value) % 2) else F.dropout(x, 0.1)


@action(10)
def die(world: World, i: Instruction) -> None:
    for number in range(1 + i.b % 3):
        if world.tensors:
            world.tensors.pop((i.a + number) % len(world.tensors))


@action(0)
def begin_anew(world: World, i: Instruction) -> None:
    """Nothing of the steps before is left by name: the same instructions mean the same."""
    for held in (world.tensors, world.kept, world.odd, world.rest, world.aliases):
        held.clear()
    world.grad, world.autocast = True, None


@action(1)
def die_late(world: World, i: Instruction) -> None:
    """In a cycle of references, which only a collection of garbage finds."""
    cycle: list[Any] = [world.tensors.pop(i.a % len(world.tensors))] if world.tensors else []
    cycle.append(cycle)
    if i.b % 2:
        gc.collect()


@action(2)
def change_mode(world: World, i: Instruction) -> None:
    world.grad = i.a % 3 != 0
    world.autocast = {0: torch.bfloat16, 1: torch.float16}.get(i.b % 8)


# ---------------------------------------------------------------------- numbers of other kinds


@action(5)
def complex_numbers(world: World, i: Instruction) -> Any:
    x = world.pick(i.a, lambda t: t.dtype == torch.float32 and t.numel() >= 64 and t.numel() % 2 == 0)
    z = torch.view_as_complex(x.reshape(-1, 2)) if i.a % 2 else torch.fft.rfft(x)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: z.conj(),
        lambda: (z.conj() * 2, z.abs()),
        lambda: z.conj().imag,
        lambda: torch.view_as_real(z),
        lambda: z.real,
        lambda: (z.conj() @ z).abs() if z.dim() == 1 else z.mul(z.conj()).real,
        lambda: world.pick(i.b, torch.is_complex).conj().resolve_conj(),
        lambda: world.pick(i.b, torch.is_complex).imag,
        lambda: world.pick(i.b, torch.is_complex).detach().mul_(0.5),
        lambda: world.pick(i.b, lambda t: t.is_neg() or t.is_conj()).clone(),
        lambda: torch.fft.ifft(z).real,
    )
    return calls[i.c % len(calls)]()


@action(7)
def choose(world: World, i: Instruction) -> Any:
    """Results whose size depends on the content, masks and whole-number indices."""
    x = world.floats(i.a)
    mask = x.detach() > (i.b % 5 - 2) / 4
    numbers = world.pick(i.b, lambda t: t.dtype == torch.int64 and t.numel() > 0).abs()
    calls: tuple[Callable[[], Any], ...] = (
        lambda: x.nonzero(),
        lambda: x[mask],
        lambda: x.masked_select(mask),
        lambda: torch.unique(x.detach().round()),
        lambda: torch.where(mask, x, -x),
        lambda: mask,
        lambda: x[numbers.view(-1)[:40] % x.shape[0]],
        lambda: torch.bincount(numbers.view(-1) % 500),
        lambda: torch.repeat_interleave(numbers.view(-1)[:600] % 4),
        lambda: x.masked_scatter(mask, x.detach().flip(0)),
        lambda: F.one_hot(numbers.view(-1)[:64] % 16),
        lambda: torch.histc(x.detach().clamp(-1, 1), 32),
        lambda: x.index_select(0, numbers.view(-1)[:8] % x.shape[0]),
        lambda: (x.detach().long(), mask.sum(0), mask.float()),
    )
    return calls[i.c % len(calls)]()


# ---------------------------------------------------------------------- past the dispatcher


@action(3)
def look(world: World, i: Instruction) -> Any:
    """Reads that no op makes."""
    x = world.pick(i.a)
    kind = i.b % 8
    if kind == 0:
        world.note("list", hash(str(x.detach().resolve_conj().resolve_neg().flatten()[:64].tolist())))
    elif kind == 1:
        world.note("text", hash(str(x)))
    elif kind == 2:
        return copy.deepcopy(x.detach())
    elif kind == 3:
        world.note("array", hash(x.detach().float().numpy().tobytes()))
    elif kind == 4:
        world.rest.append(x.detach().numpy())
    elif kind == 5:
        world.note("state", sum(hash(str(v.flatten()[:9].tolist())) for v in world.network.state_dict().values()))
    elif kind == 6:
        return torch.from_numpy(x.detach().float().numpy().copy())
    else:
        world.note("equal", torch.equal(x, world.like(i.c, x)), x.is_contiguous(), bool(x.isnan().any()))
    return None


@action(2)
def set_data(world: World, i: Instruction) -> Any:
    """Changes of what a tensor is, instead of what it holds."""
    x = world.pick(i.a, lambda t: t.dtype == torch.float32 and t.is_leaf)
    kind = i.b % 6
    if kind == 0:
        x.data = x.data * 0.5
    elif kind == 1:
        x.requires_grad_(not x.requires_grad)
    elif kind == 2:
        return x.detach().clone().resize_(48, 64).fill_(1.0)
    elif kind == 3:
        return torch.empty(0).set_(x.detach())
    elif kind == 4:
        x.data.mul_(0.5)
    elif kind == 5 and x.grad is not None:
        x.grad = None
    return None
