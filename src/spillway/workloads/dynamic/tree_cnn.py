"""A Tree-CNN that reads a function's syntax tree and guesses the first word of its name.

Each frequent type of node has a convolution of its own over its children, as in the paper's Fig. 1, and a gate that
decides from the result whether it is refined: what runs is decided by the tree and by what was learned.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spillway.pilots.paths import BaseType, Dynamism
from spillway.workloads.dynamic.gates import RATE, SETTLING, Gate, groups, settle
from spillway.workloads.dynamic.tree_batches import batches, children_of, loss, nodes_of_cells, roots_of, sizes
from spillway.workloads.stdlib_trees import NODE_TYPES, VERBS, type_ranks
from spillway.workloads.workload import Workload, seed_everything

NAME = "tree-cnn"


class Cell(nn.Module):
    """Nodes of one type. Input [width] and results of the children [width] each -> its own result"""

    def __init__(self, width: int, target: float) -> None:
        super().__init__()
        self.alone = nn.Linear(width, width)
        self.pairs = nn.Conv1d(width, width, 2)
        # A type has several nodes in one tree, each of which moves the threshold.
        self.gate = Gate(width, target, rate=RATE / 4)
        self.refine = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, children: list[Tensor]) -> Tensor:
        y = F.relu(self.alone(x))
        if not children:
            return y
        pairs = self.pairs(torch.stack([y, *children], dim=1).unsqueeze(0))
        y = F.relu(pairs).amax(dim=2).squeeze(0) + y
        weight, is_open = self.gate(y)
        return y + weight * self.refine(y) if is_open else y


class TreeCnn(nn.Module):
    """Types and parents of nodes [nodes] -> scores [trees, VERBS]"""

    def __init__(self, *, width: int, cells: int, target: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(NODE_TYPES), width)
        self.cells = nn.ModuleList(Cell(width, target) for _ in range(cells))
        self.head = nn.Linear(width, VERBS)
        ranks = type_ranks()
        self.cell_of = [min(ranks.get(kind, cells), cells - 1) for kind in range(len(NODE_TYPES))]

    def forward(self, types: Tensor, parents: Tensor) -> Tensor:
        inputs, above, kinds = self.embedding(types).unbind(), parents.tolist(), types.tolist()
        results: list[Tensor] = []
        for x, below, kind in zip(inputs, children_of(above), kinds, strict=True):
            results.append(self.cells[self.cell_of[kind]](x, [results[child] for child in below]))
        return cast(Tensor, self.head(roots_of(results, above)))


def build(
    seed: int = 0, *, width: int = 32, cells: int = 26, batch: int = 1, largest: int = 48, target: float = 0.5
) -> Workload:
    """The Tree-CNN with AdamW.

    Args:
        cells: Types of nodes with a cell of their own, the last of which all others share.
        batch: Functions, with trees of up to `largest` nodes.
        target: The share of nodes that each gate is to refine.
    """
    seed_everything(seed)
    model = TreeCnn(width=width, cells=cells, target=target)
    given = partial(batches, seed=seed, batch=batch, largest=largest)
    first = given(SETTLING)
    settle(model, lambda: loss(model, next(first)))
    return Workload(
        name=NAME, model=model, optimizers=(torch.optim.AdamW(groups(model, 1e-3)),), batches=given, loss=loss,
        dynamism=Dynamism(
            base=BaseType.CNN, embedding="embedding", sizes=sizes,
            structure=partial(nodes_of_cells, cell_of=model.cell_of),
        ),
    )  # fmt: skip
