"""What a workload is: a model, its optimizers, and the same batches every time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Batch: TypeAlias = Mapping[str, Tensor] | tuple[Tensor, ...]
"""What one step consumes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Something to train. Whoever runs its steps, plainly or under a budget, runs the same ones."""

    name: str
    """What reports call it."""
    model: nn.Module
    """In training mode, initialised from the seed."""
    optimizers: tuple[Optimizer, ...]
    """All of them are stepped at the end of every step, in this order."""
    batches: Callable[[int], Iterator[Batch]]
    """`batches(steps)` gives that many batches. Every call starts again from the first one and gives the same
    batches; none draws from the global random streams, which belong to the steps."""
    loss: Callable[[nn.Module, Batch], Tensor]
    """`loss(model, batch)` is the number that a step makes smaller, a tensor without dimensions."""
    size: int | None = None
    """The input size in the workload's own measure, such as the length of a sequence; None if it has none."""

    def train_step(self, batch: Batch) -> Tensor:
        """One plain step: forward, backward, optimizers; the gradients are gone afterwards.

        Returns:
            The loss before the step, detached.
        """
        loss = self.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return loss.detach()


def seed_everything(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's global random streams."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
