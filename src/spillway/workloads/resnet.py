"""A residual network that tells from a picture of source text which package of the standard library it shows.

The layout is ResNet-34's (He et al. 2016, table 1: 3, 4, 6 and 3 basic blocks) on pictures of 64 x 64, with the stem
that the paper uses for small pictures (section 4.2) and a quarter of the channels.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spillway.workloads import stdlib_text
from spillway.workloads.workload import Batch, Workload, seed_everything

NAME = "resnet"
SIDE = 64
"""Pixels along a side of a picture; one byte is one pixel."""
CLASSES = 16
"""The packages with the most source take part."""


class BasicBlock(nn.Module):
    """Two convolutions of 3 x 3, added to what came in. [batch, inner, h, w] -> [batch, outer, h/stride, w/stride]"""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.shortcut = nn.Sequential()
        if inner != outer or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Pictures [batch, 3, side, side] -> scores [batch, classes]"""

    def __init__(self, *, width: int, blocks: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.stages = nn.Sequential()
        inner = width
        for stage, count in enumerate(blocks):
            outer = width * 2**stage
            strides = [1 if stage == 0 else 2] + [1] * (count - 1)
            self.stages.extend([BasicBlock(inner if i == 0 else outer, outer, s) for i, s in enumerate(strides)])
            inner = outer
        self.head = nn.Linear(inner, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.stages(self.stem(pictures)).mean(dim=(2, 3))))


def _pieces() -> list[tuple[Path, int, int]]:
    """(file, offset, label) of every piece of `SIDE` x `SIDE` bytes in the largest packages."""
    packages: dict[str, list[tuple[Path, int]]] = {}
    for path in stdlib_text.source_files():
        package = path.relative_to(stdlib_text.root()).parts[0]
        if not package.endswith(".py"):
            pieces = packages.setdefault(package, [])
            pieces += [(path, start) for start in range(0, path.stat().st_size - SIDE**2 + 1, SIDE**2)]
    largest = sorted(packages.values(), key=len, reverse=True)[:CLASSES]
    return [(path, start, label) for label, pieces in enumerate(largest) for path, start in pieces]


def batches(steps: int, *, seed: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pictures float32 [batch, 3, SIDE, SIDE] between -1 and 1, and labels int64 [batch]."""
    order, pieces = random.Random(seed), _pieces()
    for _ in range(steps):
        chosen = order.sample(pieces, batch)
        pictures = []
        for path, start, _ in chosen:
            with path.open("rb") as file:
                file.seek(start)
                pixels = torch.frombuffer(bytearray(file.read(SIDE**2)), dtype=torch.uint8)
            pictures.append((pixels.float() / 127.5 - 1).reshape(1, SIDE, SIDE).repeat(3, 1, 1))
        yield torch.stack(pictures), torch.tensor([label for _, _, label in chosen])


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of the package, in nats."""
    pictures, labels = cast(tuple[Tensor, Tensor], batch)
    return F.cross_entropy(model(pictures), labels)


def build(seed: int = 0, *, width: int = 16, blocks: tuple[int, ...] = (3, 4, 6, 3), batch: int = 16) -> Workload:
    """The residual network with SGD and momentum.

    Args:
        width: Channels of the first stage; every further stage has twice as many.
        blocks: Basic blocks in each stage.
        batch: Pictures in a batch.
    """
    seed_everything(seed)
    model = ResNet(width=width, blocks=blocks, classes=CLASSES)
    return Workload(
        name=NAME, model=model, batches=partial(batches, seed=seed, batch=batch), loss=loss,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4),),
    )  # fmt: skip
