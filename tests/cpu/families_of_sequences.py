"""Recurrent networks, tied weights, and control flow that depends on the data."""

from __future__ import annotations

import random
from typing import TypeAlias, Union

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import SGD, Adagrad, Adam, AdamW

from spillway.workloads.stdlib_lm import LanguageModel
from tests.cpu.family import Batch, Build, Built, seeded, tokens, training


class Recurrent(nn.Module):
    """Tokens [batch, length] -> scores [batch, length, vocabulary]"""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 48)
        self.lstm = nn.LSTM(48, 48, num_layers=6, dropout=0.2, batch_first=True)
        self.out = nn.Linear(48, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.embedding(x))[0])


def _next_token(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def lstm(seed: int) -> Built:
    stream = seeded(seed)
    model = Recurrent()
    return Built(
        model,
        [SGD(model.parameters(), lr=0.5, foreach=False)],
        [tokens(stream, 64, 16, length) for length in (40, 24, 33, 40, 17)],
        training(_next_token, clip=1.0),
    )


class PackedGRU(nn.Module):
    """Rows of different lengths, read in both directions without their padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 48, padding_idx=0)
        self.gru = nn.GRU(48, 32, num_layers=3, dropout=0.2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(64, 10)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        rows, lengths = batch
        packed = pack_padded_sequence(self.embedding(rows), lengths, batch_first=True, enforce_sorted=False)
        last = self.gru(packed)[1][-2:]
        return self.out(torch.cat(list(last), dim=1))


def gru(seed: int) -> Built:
    stream = seeded(seed)
    model = PackedGRU()
    batches = []
    for length in (20, 15, 18, 12, 20):
        lengths = torch.randint(4, length + 1, (48,), generator=stream)
        batches.append(((tokens(stream, 64, 48, int(lengths.max())), lengths), tokens(stream, 10, 48)))
    return Built(
        model,
        [Adagrad(model.parameters(), lr=0.05)],
        batches,
        training(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])),
    )


def tied_lm(seed: int) -> Built:
    """One matrix is both the embedding and the output."""
    stream = seeded(seed)
    model = LanguageModel(width=48, layers=3, heads=4, longest=48, dropout=0.1)
    return Built(
        model,
        [AdamW(model.parameters(), lr=1e-3, fused=True)],
        [tokens(stream, 256, 12, length) for length in (48, 31, 40, 20, 48)],
        training(_next_token, set_to_none=False),
    )


class Mixture(nn.Module):
    """Every token goes to the two experts that it chooses; how many an expert gets is known only when it runs."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, choices = self.router(x).softmax(-1).topk(2)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = (choices == number).nonzero(as_tuple=True)
            if len(rows):
                mixed.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return x + F.dropout(mixed, 0.1, self.training)


def mixture(seed: int) -> Built:
    stream = seeded(seed)
    model = nn.Sequential(nn.Linear(32, 48), Mixture(48, 5), nn.LayerNorm(48), Mixture(48, 5), nn.Linear(48, 32))
    return Built(
        model,
        [Adam(model.parameters(), lr=1e-3, foreach=True)],
        [torch.randn(count, 32, generator=stream) for count in (768, 512, 640, 400, 768)],
        training(lambda model, batch: F.mse_loss(model(batch), batch.roll(1, dims=1))),
    )


Tree: TypeAlias = Union[int, "tuple[Tree, Tree]"]


def _random_tree(order: random.Random, first: int, leaves: int) -> Tree:
    if leaves == 1:
        return first
    left = order.randrange(1, leaves)
    return _random_tree(order, first, left), _random_tree(order, first + left, leaves - left)


class TreeNetwork(nn.Module):
    """Folds a tree from its leaves up, by recursion: the graph is another one for every tree."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Embedding(50, 32)
        self.gates = nn.Linear(64, 96)
        self.out = nn.Linear(32, 8)

    def forward(self, batch: tuple[Tree, Tensor]) -> Tensor:
        tree, words = batch
        return self.out(self._folded(tree, words))

    def _folded(self, tree: Tree, words: Tensor) -> Tensor:
        if isinstance(tree, int):
            return self.leaf(words[tree])
        left, right = (self._folded(branch, words) for branch in tree)
        keep, mix, new = self.gates(torch.cat([left, right], dim=1)).chunk(3, dim=1)
        return torch.sigmoid(keep) * torch.lerp(left, right, torch.sigmoid(mix)) + torch.tanh(new)


def tree(seed: int) -> Built:
    stream = seeded(seed)
    order = random.Random(seed)
    model = TreeNetwork()
    batches = []
    for leaves in (40, 30, 60, 20, 40):
        shape = _random_tree(order, 0, leaves)
        batches.append(((shape, tokens(stream, 50, leaves, 64)), tokens(stream, 8, 64)))
    return Built(
        model,
        [SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)],
        batches,
        training(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])),
    )


SEQUENCES: dict[str, Build] = {
    "lstm": lstm,
    "gru": gru,
    "tied-lm": tied_lm,
    "mixture-of-experts": mixture,
    "tree": tree,
}
