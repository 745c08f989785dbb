"""Small models, each with one thing in its blocks that a second run of them could get wrong.

Every case builds a model, the names of its blocks and a function that gives the loss of one step.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 32


class Case(NamedTuple):
    model: nn.Module
    blocks: list[str]
    loss: Callable[[nn.Module, Tensor], Tensor]
    backward: Callable[[Tensor], None] = Tensor.backward
    generators: tuple[Any, ...] = ()


Build = Callable[[], Case]


class Chain(nn.Module):
    """Blocks one after the other, as most models have them."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def chain(
    block: Callable[[], nn.Module], loss: Callable[[nn.Module, Tensor], Tensor] = mean_square, **rest: Any
) -> Case:
    return Case(Chain(block(), block(), block()), [f"blocks.{i}" for i in range(3)], loss, **rest)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Functional(nn.Module):
    """A residual block around a function of two linear layers."""

    def __init__(self, function: Callable[[Functional, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def of(function: Callable[[Any, Tensor], Tensor], **rest: Any) -> Build:
    return lambda: chain(lambda: Functional(function), **rest)


def branch_by_python(block: Functional, x: Tensor) -> Tensor:
    chosen = block.one if random.random() < 0.5 else block.two
    return x + torch.tanh(chosen(x)) * random.gauss(1.0, 0.1)


def noise_by_numpy(block: Functional, x: Tensor) -> Tensor:
    scale = torch.from_numpy(numpy.random.randn(*x.shape).astype("float32"))
    return torch.tanh(block.two(block.one(x) * scale)) * numpy.random.standard_normal()


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.stream = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * torch.rand(x.shape, generator=self.stream))


def registered_generators() -> Case:
    drawn, shuffled = numpy.random.default_rng(3), random.Random(4)

    def function(block: Functional, x: Tensor) -> Tensor:
        scale = torch.from_numpy(drawn.standard_normal(x.shape, dtype="float32"))
        return torch.tanh(block.one(x) * scale) * shuffled.random()

    return chain(lambda: Functional(function), generators=(drawn, shuffled))


class Normalised(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.linear(x)))


class Spectral(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.linear = wrap(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Averaging(nn.Module):
    """One running mean written in place, one assigned anew, a counter that decides, and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("written", torch.zeros(WIDTH))
        self.register_buffer("assigned", torch.zeros(WIDTH))
        self.register_buffer("late", None)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.written.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.assigned = 0.9 * self.assigned + 0.1 * y.mean(0)
            self.late = y.std(0) if self.late is None else self.late + y.std(0)
        self.count += 1
        y = torch.tanh(y) if self.count % 2 else torch.sigmoid(y)
        return (y - self.written) * self.assigned.cos() + self.late


def write_to_input(block: Functional, x: Tensor) -> Tensor:
    y = torch.tanh(block.one(x * 1.0))
    x += y
    return block.two(x.clone()) * y


class WritingCaller(Chain):
    """What each block got is written to after the block has run."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x * 1.0
            y = block(x)
            x += y
        return x


def read_a_copy(block: Functional, x: Tensor) -> Tensor:
    return torch.tanh(block.one(x * 2))


class Cache:
    def __init__(self) -> None:
        self.layers: list[dict[str, Tensor]] = []
        self.seen = 0


class Caching(nn.Module):
    """Reads what blocks before it left in the cache, and leaves something."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, cache: Cache, lists: list[Tensor]) -> Tensor:
        mixed = torch.tanh(self.linear(x))
        for layer in cache.layers:
            mixed = mixed * torch.sigmoid(layer["keys"])
        cache.layers.append({"keys": mixed})
        cache.seen += 1
        lists.append(mixed.sum())
        return F.dropout(mixed, 0.1) + cache.seen


class CachingModel(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x, cache, lists = self.embed(x), Cache(), []
        for block in self.blocks:
            x = block(x, cache=cache, lists=lists)
        return x + torch.stack(lists).mean() * 1e-2


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, *, mask: Tensor, scales: dict[str, Tensor]) -> Tensor:
        return F.dropout(torch.tanh(self.linear(hidden) * mask) * scales["first"], 0.2) + hidden


class MaskedModel(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x, scales = self.embed(x), {"first": self.embed.bias.cos()}
        mask = (x.detach() > -0.5).float()
        for block in self.blocks:
            x = block(hidden=x, mask=mask, scales=scales)
        return x


@dataclass
class Result:
    hidden: Tensor
    extra: Tensor


class Answering(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: Any) -> Any:
        if isinstance(x, Result):
            x = x.hidden
        elif not isinstance(x, Tensor):
            x = x["hidden"] if isinstance(x, dict) else x[0]
        y = F.dropout(torch.tanh(self.linear(x)), 0.2)
        if self.kind == "tuple":
            return y, (y.square(), None)
        if self.kind == "dict":
            return {"hidden": y, "extra": [y.square()]}
        return Result(y, y.square()) if self.kind == "dataclass" else model_output(hidden=y, extra=y.square())


def model_output(**fields: Tensor) -> OrderedDict[str, Tensor]:
    from transformers.utils import ModelOutput

    @dataclass
    class Output(ModelOutput):
        hidden: Tensor | None = None
        extra: Tensor | None = None

    return Output(**fields)


class AnsweringModel(Chain):
    def forward(self, x: Tensor) -> Tensor:
        answer: Any = self.embed(x)
        for block in self.blocks:
            answer = block(answer)
        if isinstance(answer, Result):
            return answer.hidden + answer.extra
        if isinstance(answer, dict):
            extra = answer["extra"]
            return answer["hidden"] + (extra[0] if isinstance(extra, list) else extra)
        return answer[0] + answer[1][0]


def answering(kind: str) -> Build:
    return lambda: Case(AnsweringModel(*(Answering(kind) for _ in range(3))), ["blocks.0", "blocks.2"], mean_square)


class Shared(nn.Module):
    """One module, called four times."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.block(x)
        return x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Residual(), Normalised(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.last(self.first(x) * self.second(self.first(x))))


def nested(*blocks: str) -> Build:
    names = [f"blocks.{i}{name}" for i in range(2) for name in blocks]
    return lambda: Case(Chain(Outer(), Outer()), names, mean_square)


class Differentiating(nn.Module):
    """Calls a block twice, and needs the gradient of the first call at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.linear = Residual(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        start = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.inner(start).square().sum(), start)
        y = self.inner(x)
        (other,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        return y + torch.tanh(self.linear(slope)) + other


class Giving(nn.Module):
    """Fails when it is called; the block around it goes on without it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = Functional(give_up), Residual()

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.inner(x)
        except ValueError:
            return self.other(x)


def give_up(block: Functional, x: Tensor) -> Tensor:
    if block.one(x).sum().item() != 0:
        raise ValueError
    return x


def end_in_rrelu(block: Functional, x: Tensor) -> Tensor:
    return F.rrelu(block.one(x) + x, training=True)


def catch_everything(block: Functional, x: Tensor) -> Tensor:
    try:
        return block.two(torch.sin(block.one(x)) * torch.cos(x))
    except Exception:  # what a stop in the middle must not run into
        return torch.sin(block.two(x.exp()))


def differentiate_inside(block: Functional, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = torch.tanh(block.one(x))
        (slope,) = torch.autograd.grad(y.square().sum(), y, retain_graph=True)
        (other,) = torch.autograd.grad(block.two(y).exp().sum(), y)
    return y + block.two(slope) + other


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * ctx.saved_tensors[0].exp() + 0 * x


def custom_function(block: Functional, x: Tensor) -> Tensor:
    return ReadsTwice.apply(torch.tanh(block.one(x)))


def checkpointed_inside(block: Functional, x: Tensor) -> Tensor:
    return checkpoint(lambda y: F.dropout(torch.tanh(block.two(torch.sin(block.one(y)))), 0.1), x, use_reentrant=False)


def views_and_duplicates(block: Functional, x: Tensor) -> Tensor:
    one, two = block.one(x).chunk(2, dim=1)
    return torch.cat([one * two, one.exp() * two.t().sin().t()], dim=1) * x


def in_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).float().square().mean()


def with_saved_tensors_hooks(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor.detach() * 2,), lambda packed: packed[0] / 2):
        return mean_square(model, x)


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y.square().mean() + slope.square().mean()


def twice(loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    return mean_square(model, x) + mean_square(model, x * 0.5)


def part_by_part(model: nn.Module, x: Tensor) -> Tensor:
    """A backward that stops half-way, and then the rest."""
    y = model(x)
    torch.autograd.grad(y.sum(), list(model.blocks[-1].parameters()), retain_graph=True)
    return y.square().mean()


def with_module_hooks() -> Case:
    case = chain(Residual)
    for block in case.model.blocks:
        block.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
        block.register_forward_hook(lambda _, args, output: torch.tanh(output))
        block.register_full_backward_hook(lambda _, before, after: (before[0] * 0.5,))
        block.up.register_forward_hook(lambda _, args, output: output * 2)
        block.up.register_full_backward_hook(lambda _, before, after: (before[0] * 0.25,))
    return case


def tied() -> Case:
    case = chain(Residual)
    for block in case.model.blocks[1:]:
        block.up.weight = case.model.blocks[0].up.weight
    return case


def chain_of_nested(block: Callable[[], nn.Module]) -> Case:
    names = [f"blocks.{number}{inner}" for number in range(2) for inner in ("", ".inner")]
    return Case(Chain(block(), block()), names, mean_square)


CASES: dict[str, Build] = {
    "dropout": lambda: chain(Residual),
    "python-random": of(branch_by_python),
    "numpy-random": of(noise_by_numpy),
    "own-generator": lambda: chain(OwnGenerator),
    "registered-generators": registered_generators,
    "batch-norm": lambda: chain(Normalised),
    "batch-norm-cumulative": lambda: chain(lambda: Normalised(momentum=None)),
    "spectral-norm": lambda: chain(lambda: Spectral(parametrizations.spectral_norm)),
    "old-spectral-norm": lambda: chain(lambda: Spectral(nn.utils.spectral_norm)),
    "averages-and-counters": lambda: chain(Averaging),
    "writes-to-its-input": of(write_to_input),
    "caller-writes-to-the-input": lambda: Case(
        WritingCaller(*(Functional(read_a_copy) for _ in range(3))), [f"blocks.{i}" for i in range(3)], mean_square
    ),
    "opaque-cache": lambda: Case(
        CachingModel(*(Caching() for _ in range(3))), ["blocks.0", "blocks.1", "blocks.2"], mean_square
    ),
    "tensor-keywords": lambda: Case(MaskedModel(*(Masked() for _ in range(3))), ["blocks.0", "blocks.2"], mean_square),
    "tuple": answering("tuple"),
    "dict": answering("dict"),
    "dataclass": answering("dataclass"),
    "model-output": answering("model output"),
    "shared": lambda: Case(Shared(Residual()), ["block"], mean_square),
    "shared-batch-norm": lambda: Case(Shared(Normalised()), ["block"], mean_square),
    "nested-all": nested("", ".first", ".second"),
    "nested-inner": nested(".first", ".second"),
    "nested-differentiates": lambda: chain_of_nested(Differentiating),
    "nested-fails": lambda: chain_of_nested(Giving),
    "rrelu": of(end_in_rrelu),
    "catches-exceptions": of(catch_everything),
    "differentiates-inside": of(differentiate_inside),
    "custom-function": of(custom_function),
    "checkpointed-inside": of(checkpointed_inside),
    "views": of(views_and_duplicates),
    "autocast": lambda: chain(Residual, in_autocast),
    "saved-tensors-hooks": lambda: chain(Residual, with_saved_tensors_hooks),
    "create-graph": lambda: chain(Residual, penalised),
    "retain-graph": lambda: chain(Residual, backward=twice),
    "two-forwards": lambda: chain(Normalised, two_forwards),
    "part-by-part": lambda: chain(Residual, part_by_part),
    "module-hooks": with_module_hooks,
    "tied-weights": tied,
}
