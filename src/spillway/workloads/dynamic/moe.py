"""A mixture of experts on docstrings: a router sends each word to two of eight experts, and an expert without words
does not run (Shazeer et al. 2017; the balancing loss is Fedus et al.'s, 2021, equation 4).
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spillway.pilots.paths import BaseType, Dynamism
from spillway.workloads.dynamic.var_lstm import VOCABULARY, batches, sizes
from spillway.workloads.workload import Batch, Workload, seed_everything

NAME = "moe"
BALANCE = 0.01
"""The weight of the balancing loss."""


class Router(nn.Module):
    """Words [words, width] -> weights and numbers of their experts [words, top], the experts with words, and the loss
    that is least where all experts have as many."""

    def __init__(self, width: int, experts: int, top: int) -> None:
        super().__init__()
        self.top, self.experts = top, experts
        self.scores = nn.Linear(width, experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, list[int], Tensor]:
        shares = self.scores(x).softmax(dim=-1)
        weights, chosen = shares.topk(self.top)
        counts = torch.zeros_like(shares).scatter(1, chosen, 1.0).mean(0)
        balance = self.experts * (counts * shares.mean(0)).sum()
        return weights, chosen, counts.nonzero().flatten().tolist(), balance


class Expert(nn.Module):
    """Adds to the results what an expert makes of its words. [words, width] -> the same"""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.number = number
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, results: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        words, place = (chosen == self.number).nonzero(as_tuple=True)
        made: Tensor = self.narrow(F.gelu(self.wide(x[words])))
        return results.index_add(0, words, made * weights[words, place].unsqueeze(1))


class Layer(nn.Module):
    """Mean of the words before, and experts. [batch, length, width] -> the same, and the balancing loss"""

    def __init__(self, *, width: int, experts: int, top: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.router = Router(width, experts, top)
        self.experts = nn.ModuleList(Expert(number, width) for number in range(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        counts = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)
        x = x + self.mix(self.before(x).cumsum(1) / counts.unsqueeze(1))
        words = self.between(x).flatten(0, 1)
        weights, chosen, used, balance = self.router(words)
        results = torch.zeros_like(words)
        for number in used:
            results = self.experts[number](words, results, weights, chosen)
        return x + results.view_as(x), balance


class Moe(nn.Module):
    """Words [batch, length] -> scores of the word after each [batch, length, VOCABULARY], and the balancing loss"""

    def __init__(self, *, width: int, layers: int, experts: int, top: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width=width, experts=experts, top=top) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        x, total = self.embedding(words), []
        for layer in self.layers:
            x, balance = layer(x)
            total.append(balance)
        return cast(Tensor, self.head(x)), torch.stack(total).sum()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of the next word, in nats, and the balancing loss with its weight."""
    words = cast(dict[str, Tensor], batch)["words"]
    scores, balance = model(words[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten()) + BALANCE * cast(Tensor, balance)


def build(
    seed: int = 0, *, width: int = 32, layers: int = 4, experts: int = 8, top: int = 2, batch: int = 1,
    longest: int = 24,
) -> Workload:  # fmt: skip
    """The mixture of experts with AdamW.

    Args:
        width: Elements of a word.
        experts: Of each layer.
        top: Experts that a word is sent to.
        batch: Docstrings in a batch.
        longest: Words that are read at most.
    """
    seed_everything(seed)
    model = Moe(width=width, layers=layers, experts=experts, top=top)
    return Workload(
        name=NAME, model=model, optimizers=(torch.optim.AdamW(model.parameters(), lr=2e-3),), loss=loss,
        batches=partial(batches, seed=seed, batch=batch, longest=longest),
        dynamism=Dynamism(base=BaseType.TRANSFORMER, embedding="embedding", sizes=sizes),
    )  # fmt: skip
