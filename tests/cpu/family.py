"""What one small model for the tests is made of."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Batch: TypeAlias = Any
Loss: TypeAlias = Callable[[nn.Module, Batch], Tensor]
Step: TypeAlias = Callable[[nn.Module, list[Optimizer], Batch], Tensor]
Build: TypeAlias = Callable[[int], "Built"]


class Built(NamedTuple):
    """A family, ready for its first step."""

    model: nn.Module
    optimizers: list[Optimizer]
    batches: list[Batch]
    step: Step
    """`step(model, optimizers, batch)` runs one step and gives its loss, detached."""


def seeded(seed: int) -> torch.Generator:
    """Seeds the global streams for the model and the steps, and gives a stream of its own for the batches."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def training(loss_of: Loss, *, set_to_none: bool = True, clip: float | None = None) -> Step:
    """The usual step, except that the gradients are cleared at its beginning: after it they can be compared."""

    def step(model: nn.Module, optimizers: list[Optimizer], batch: Batch) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(model, batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    return step


def tokens(stream: torch.Generator, vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(vocabulary, shape, generator=stream)


def pictures(stream: torch.Generator, count: int, side: int, classes: int) -> tuple[Tensor, Tensor]:
    """Pictures and their labels."""
    return torch.randn(count, 3, side, side, generator=stream), tokens(stream, classes, count)


def classified(model: nn.Module, batch: Batch) -> Tensor:
    """Loss of a model that gives scores of classes."""
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)
