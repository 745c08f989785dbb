"""A BERT whose layers are skipped where a gate says so, on masked docstrings of natural length.

Gates on layers are those of Pappagari et al.'s and Wang et al.'s (SkipNet, 2018) kind: the layer's result is weighted
by the gate's score, through which the gate is trained, and where the gate is closed the layer does not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spillway.pilots.paths import BaseType, Dynamism
from spillway.workloads import stdlib_trees
from spillway.workloads.dynamic.gates import SETTLING, Gate, groups, settle
from spillway.workloads.stdlib_text import PAD, VOCABULARY
from spillway.workloads.workload import Batch, Workload, seed_everything

NAME = "var-bert"
MASKED = 0.15
"""The share of tokens that have to be guessed, as BERT has it."""
IGNORED = -100
"""The label of a token that nobody has to guess."""


class Layer(nn.Module):
    """An encoder layer. [batch, length, width] -> the same"""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.into(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts.unbind(0)).transpose(1, 2).reshape(batch, length, width)
        y = x + self.out(attended)
        return cast(Tensor, x + weight * (y + self.narrow(F.gelu(self.wide(self.between(y)))) - x))


class Embedding(nn.Module):
    """Tokens and places. [batch, length] -> [batch, length, width]"""

    def __init__(self, width: int, longest: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(longest, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.tokens(tokens) + self.places.weight[: tokens.shape[1]])


class VarBert(nn.Module):
    """Masked tokens [batch, length] -> scores [batch, length, VOCABULARY]"""

    def __init__(self, *, width: int, layers: int, heads: int, longest: int, target: float) -> None:
        super().__init__()
        self.embedding = Embedding(width, longest)
        self.gates = nn.ModuleList(Gate(width, target) for _ in range(layers))
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for gate, layer in zip(self.gates, self.layers, strict=True):
            weight, is_open = gate(x)
            if is_open:
                x = layer(x, weight)
        return cast(Tensor, self.head(x))


def batches(steps: int, *, seed: int, batch: int, longest: int) -> Iterator[dict[str, Tensor]]:
    """`tokens` and `labels`, int64, both [batch, length] with `length <= longest`; texts of one batch of any length."""
    texts, random = stdlib_trees.docstrings(seed=seed, longest=longest), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = [list(text) for text in islice(texts, batch)]
        length = max(map(len, rows))
        tokens = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
        hidden = (torch.rand(tokens.shape, generator=random) < MASKED) & (tokens != PAD)
        hidden[:, 0] = True  # so that there is something to guess
        yield {"tokens": tokens.masked_fill(hidden, PAD + 1), "labels": tokens.masked_fill(~hidden, IGNORED)}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of the hidden tokens, in nats."""
    given = cast(dict[str, Tensor], batch)
    return F.cross_entropy(model(given["tokens"]).flatten(0, 1), given["labels"].flatten(), ignore_index=IGNORED)


def sizes(batch: Batch) -> tuple[float, ...]:
    """Tokens of a sequence, and how many are hidden."""
    given = cast(dict[str, Tensor], batch)
    return float(given["tokens"].shape[1]), float((given["labels"] != IGNORED).sum())


def build(
    seed: int = 0, *, width: int = 32, layers: int = 12, heads: int = 4, batch: int = 1, longest: int = 80,
    target: float = 0.5, trained: int = 0, rate: float = 3e-4,
) -> Workload:  # fmt: skip
    """The gated BERT with AdamW.

    Args:
        width: Elements of a token, a multiple of `heads`.
        batch: Docstrings; a gate decides for all of them together.
        longest: Bytes of the longest docstring that takes part.
        target: The share of samples for which each gate is held open.
        trained: Steps of training that come before, on other samples, for who wants a network that stays as it is.
        rate: The learning rate. At 1e-3 the loss is as low after 500 steps, and falls no further: what gates decide
            drifts three times as fast.
    """
    seed_everything(seed)
    model = VarBert(width=width, layers=layers, heads=heads, longest=longest, target=target)
    workload = Workload(
        name=NAME, model=model, optimizers=(torch.optim.AdamW(groups(model, rate)),), loss=loss,
        batches=partial(batches, seed=seed, batch=batch, longest=longest),
        dynamism=Dynamism(base=BaseType.TRANSFORMER, embedding="embedding", sizes=sizes),
    )  # fmt: skip
    before = batches(2 * SETTLING + trained, seed=seed + 1, batch=batch, longest=longest)
    settle(model, lambda: loss(model, next(before)))
    if trained:
        for given in islice(before, trained):
            workload.train_step(given)
        settle(model, lambda: loss(model, next(before)))
    return workload
