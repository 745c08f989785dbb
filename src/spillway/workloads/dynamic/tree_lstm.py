"""A Tree-LSTM that reads a function's syntax tree and guesses the first word of its name.

The child-sum unit of Tai et al. 2015 (section 3.1, equations 2 to 8) on trees of their natural shapes: what runs is
decided by the tree, and every node runs the same cell.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from spillway.pilots.paths import BaseType, Dynamism
from spillway.workloads.dynamic.tree_batches import batches, children_of, inner_nodes, loss, roots_of, sizes
from spillway.workloads.stdlib_trees import NODE_TYPES, VERBS
from spillway.workloads.workload import Workload, seed_everything

NAME = "tree-lstm"


class Cell(nn.Module):
    """One node. Input [width], hidden and cell states of its children [width] each -> its own two."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_input, self.of_children = nn.Linear(width, 4 * width), nn.Linear(width, 3 * width, bias=False)
        self.forget = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, hidden: list[Tensor], cells: list[Tensor]) -> tuple[Tensor, Tensor]:
        gates, forget = self.of_input(x).split([3 * len(x), len(x)])
        kept: Tensor | None = None
        if hidden:
            below = torch.stack(hidden)
            gates = gates + self.of_children(below.sum(0))
            kept = (torch.sigmoid(forget + self.forget(below)) * torch.stack(cells)).sum(0)
        into, out, update = gates.chunk(3)
        cell = torch.sigmoid(into) * torch.tanh(update)
        if kept is not None:
            cell = cell + kept
        return torch.sigmoid(out) * torch.tanh(cell), cell


class TreeLstm(nn.Module):
    """Types and parents of nodes [nodes] -> scores [trees, VERBS]"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(NODE_TYPES), width)
        self.cell = Cell(width)
        self.head = nn.Linear(width, VERBS)

    def forward(self, types: Tensor, parents: Tensor) -> Tensor:
        inputs, above = self.embedding(types).unbind(), parents.tolist()
        states: list[tuple[Tensor, Tensor]] = []
        for x, below in zip(inputs, children_of(above), strict=True):
            states.append(self.cell(x, [states[child][0] for child in below], [states[child][1] for child in below]))
        return cast(Tensor, self.head(roots_of([hidden for hidden, _ in states], above)))


def build(seed: int = 0, *, width: int = 32, batch: int = 1, largest: int = 48) -> Workload:
    """The Tree-LSTM with AdamW.

    Args:
        width: Elements of a node's state.
        batch: Functions in a batch.
        largest: Nodes of the largest tree that takes part.
    """
    seed_everything(seed)
    model = TreeLstm(width)
    return Workload(
        name=NAME, model=model, optimizers=(torch.optim.AdamW(model.parameters(), lr=2e-3),), loss=loss,
        batches=partial(batches, seed=seed, batch=batch, largest=largest),
        dynamism=Dynamism(
            base=BaseType.LSTM, embedding="embedding", sizes=sizes,
            structure=partial(inner_nodes, places=batch * largest),
        ),
    )  # fmt: skip
