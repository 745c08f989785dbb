"""Training steps that use more of autograd than one forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from tests.cpu.family import Batch, Build, Built, classified, seeded, tokens, training


def _vectors(stream: torch.Generator, counts: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(count, 64, generator=stream), tokens(stream, 10, count)) for count in counts]


def _perceptron(dropout: float) -> nn.Sequential:
    hidden = (nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(dropout)) for _ in range(10))
    return nn.Sequential(*hidden, nn.Linear(64, 10))


def _accumulating_step(model: nn.Module, optimizers: list[Optimizer], batch: Batch) -> Tensor:
    inputs, labels = batch
    optimizers[0].zero_grad(set_to_none=False)
    total = torch.zeros(())
    for part, answers in zip(inputs.chunk(3), labels.chunk(3), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(part), answers) / 3
        loss.backward()
        total += loss.detach()
    optimizers[0].step()
    return total


def accumulation(seed: int) -> Built:
    """Three micro-batches a step, under autocast to bfloat16."""
    stream = seeded(seed)
    model = _perceptron(0.1)
    return Built(
        model,
        [AdamW(model.parameters(), lr=1e-3, fused=True)],
        _vectors(stream, (1152, 768, 900, 600, 1152)),
        _accumulating_step,
    )


class Checkpointed(nn.Module):
    """Every hidden layer under torch.utils.checkpoint, dropout included."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers = _perceptron(0.2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        *hidden, out = self.layers
        # The reentrant kind gives no gradients to a layer none of whose inputs needs one.
        x = x.detach().requires_grad_() if self.reentrant else x
        for layer in hidden:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return out(x)


def reentrant_checkpoint(seed: int) -> Built:
    stream = seeded(seed)
    model = Checkpointed(reentrant=True)
    return Built(
        model,
        [Adam(model.parameters(), lr=1e-3, foreach=False)],
        _vectors(stream, (1024, 700, 900, 512, 1024)),
        training(classified),
    )


def saved_tensor_checkpoint(seed: int) -> Built:
    stream = seeded(seed)
    model = Checkpointed(reentrant=False)
    return Built(
        model,
        [SGD(model.parameters(), lr=0.1, foreach=True)],
        _vectors(stream, (1024, 700, 900, 512, 1024)),
        training(classified, set_to_none=False),
    )


class InPlaceLeakyReLU(torch.autograd.Function):
    """Overwrites its input and works out its gradient from what it wrote."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        x.mul_((x > 0).to(x.dtype).mul_(1 - slope).add_(slope))
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        ctx.slope = slope
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (written,) = ctx.saved_tensors
        passed = gradient.clone()
        passed[written < 0] *= ctx.slope
        return passed, None


class Scaled(torch.autograd.Function):
    """Keeps a tensor as an attribute, outside of what autograd saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        ctx.squashed = torch.tanh(x)
        return ctx.squashed * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (factor,) = ctx.saved_tensors
        slope = ctx.squashed.square().neg_().add_(1)
        return slope.mul_(gradient).mul_(factor), (gradient * ctx.squashed).sum(0)


class CustomFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.factors = nn.ParameterList(torch.full((64,), 1.5) for _ in range(8))
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer, factor in zip(self.layers, self.factors, strict=True):
            x = Scaled.apply(InPlaceLeakyReLU.apply(layer(x), 0.1), factor)
            x += 0.1
        return self.out(x)


def custom_function(seed: int) -> Built:
    stream = seeded(seed)
    model = CustomFunctions()
    return Built(
        model,
        [SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, foreach=False)],
        _vectors(stream, (1024, 700, 900, 512, 1024)),
        training(classified),
    )


def _penalised(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    inputs = (inputs + 0.1 * torch.randn_like(inputs)).requires_grad_()
    scores = model(inputs)
    (slopes,) = torch.autograd.grad(scores.logsumexp(1).sum(), inputs, create_graph=True)
    return F.cross_entropy(scores, labels) + (slopes.norm(dim=1) - 1).square().mean()


def gradient_penalty(seed: int) -> Built:
    """The loss contains a gradient, so backward goes through a backward."""
    stream = seeded(seed)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Softplus()) for _ in range(4)), nn.Linear(64, 10))
    return Built(
        model,
        [Adam(model.parameters(), lr=1e-3, foreach=True)],
        _vectors(stream, (768, 512, 600, 400, 768)),
        training(_penalised),
    )


AUTOGRAD: dict[str, Build] = {
    "accumulation-autocast": accumulation,
    "checkpoint-reentrant": reentrant_checkpoint,
    "checkpoint": saved_tensor_checkpoint,
    "custom-function": custom_function,
    "gradient-penalty": gradient_penalty,
}
