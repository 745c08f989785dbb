"""An LSTM that runs as many times as a docstring has words, and guesses each word from those before it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spillway.pilots.paths import BaseType, Dynamism
from spillway.workloads import stdlib_trees
from spillway.workloads.workload import Batch, Workload, seed_everything

NAME = "var-lstm"
VOCABULARY: Final = 2048
"""Numbers that words may have."""


class VarLstm(nn.Module):
    """Words [batch, length] -> scores of the word after each [batch, length, VOCABULARY]"""

    def __init__(self, *, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        embedded = self.embedding(words)
        nothing = embedded.new_zeros(embedded.shape[0], embedded.shape[2])
        states = [(nothing, nothing) for _ in self.cells]
        results = []
        for x in embedded.unbind(1):
            for place, cell in enumerate(self.cells):
                states[place] = cell(x, states[place])
                x = states[place][0]
            results.append(x)
        return cast(Tensor, self.head(torch.stack(results, dim=1)))


def batches(steps: int, *, seed: int, batch: int, longest: int) -> Iterator[dict[str, Tensor]]:
    """`words`, int64 [batch, length + 1]; the texts of a batch are as long as the shortest of them."""
    samples = stdlib_trees.words(seed=seed, most=longest + 1, vocabulary=VOCABULARY)
    for _ in range(steps):
        rows = list(islice(samples, batch))
        length = min(map(len, rows))
        yield {"words": torch.tensor([row[:length] for row in rows])}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of the next word, in nats."""
    words = cast(dict[str, Tensor], batch)["words"]
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def sizes(batch: Batch) -> tuple[float, ...]:
    """Words that are read."""
    return (float(cast(dict[str, Tensor], batch)["words"].shape[1] - 1),)


def build(seed: int = 0, *, width: int = 32, layers: int = 2, batch: int = 1, longest: int = 48) -> Workload:
    """The LSTM with AdamW.

    Args:
        width: Elements of a word.
        layers: Cells above each other.
        batch: Docstrings in a batch.
        longest: Words that are read at most.
    """
    seed_everything(seed)
    model = VarLstm(width=width, layers=layers)
    return Workload(
        name=NAME, model=model, optimizers=(torch.optim.AdamW(model.parameters(), lr=2e-3),), loss=loss,
        batches=partial(batches, seed=seed, batch=batch, longest=longest),
        dynamism=Dynamism(base=BaseType.LSTM, embedding="embedding", sizes=sizes),
    )  # fmt: skip
