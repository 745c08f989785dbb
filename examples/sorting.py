"""A workload of your own: a small encoder learns to sort digits, in rows whose length changes from step to step.

spillway train examples/sorting.py:build --budget 64MiB --steps 4 --plain-check
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spillway.workloads import Batch, Workload, seed_everything

DIGITS = 10


class Sorter(nn.Module):
    """Digits [batch, length] -> scores of what stands at each place when they are sorted [batch, length, DIGITS]"""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.digits = nn.Embedding(DIGITS, width)
        self.places = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, DIGITS)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.digits(rows) + self.places(torch.arange(rows.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return cast(Tensor, self.head(x))


def batches(steps: int, *, seed: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and the same rows sorted. Their own generator: the global random streams belong to the steps."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        length = int(torch.randint(64, 129, (), generator=generator))
        rows = torch.randint(DIGITS, (batch, length), generator=generator)
        yield rows, rows.sort(dim=1).values


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of the digit at each place, in nats."""
    rows, in_order = cast(tuple[Tensor, Tensor], batch)
    return F.cross_entropy(model(rows).flatten(0, 1), in_order.flatten())


def build(seed: int = 0, *, width: int = 128, layers: int = 4, batch: int = 16) -> Workload:
    """What `spillway train` calls; the seed comes from its option of the same name."""
    seed_everything(seed)
    model = Sorter(width, layers)
    return Workload(
        name="sorting",
        model=model,
        optimizers=(torch.optim.AdamW(model.parameters(), lr=1e-3),),
        batches=partial(batches, seed=seed, batch=batch),
        loss=loss,
    )
