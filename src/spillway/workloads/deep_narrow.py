"""Two hundred thin layers, whose small parameters and many small activations show how far down a budget can go.

The model guesses the next byte of the standard library's source from the bytes before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spillway.workloads import stdlib_text
from spillway.workloads.workload import Batch, Workload, seed_everything

NAME = "deep-narrow"
WINDOWS = 16
"""Samples taken from one function."""


class Layer(nn.Module):
    """A linear layer and a GELU, added to what came in. [batch, width] -> [batch, width]"""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * F.gelu(self.linear(x))


def batches(steps: int, *, seed: int, batch: int, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`width` neighbouring bytes, float32 [batch, width] between -1 and 1, and the byte after them, int64 [batch]."""
    order = random.Random(seed)
    long_enough = (text for text in stdlib_text.functions(seed=seed) if len(text) > width)
    for _ in range(steps):
        chosen = list(islice(long_enough, -(-batch // WINDOWS)))
        begun = [(chosen[i // WINDOWS], order.randrange(len(chosen[i // WINDOWS]) - width)) for i in range(batch)]
        table = torch.tensor([list(text[start : start + width + 1]) for text, start in begun])
        yield table[:, :-1].float() / 127.5 - 1, table[:, -1].clone()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of the next byte, in nats."""
    windows, following = cast(tuple[Tensor, Tensor], batch)
    return F.cross_entropy(model(windows), following)


def build(seed: int = 0, *, width: int = 64, layers: int = 200, batch: int = 512) -> Workload:
    """The deep narrow network with SGD and momentum; a batch has `batch` windows of `width` bytes."""
    seed_everything(seed)
    # Scaled so that the sum over all layers stays as large as what came in, however many there are.
    stack = [Layer(width, layers**-0.5) for _ in range(layers)]
    model = nn.Sequential(*stack, nn.LayerNorm(width), nn.Linear(width, 256))
    return Workload(
        name=NAME, model=model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),),
        batches=partial(batches, seed=seed, batch=batch, width=width), loss=loss,
    )  # fmt: skip
