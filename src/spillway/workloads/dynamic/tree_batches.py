"""Syntax trees as batches, and what a network that walks them has to know of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spillway.workloads import stdlib_trees
from spillway.workloads.workload import Batch


def batches(steps: int, *, seed: int, batch: int, largest: int) -> Iterator[dict[str, Tensor]]:
    """`types` and `parents`, int64 [nodes], of all trees of the batch one after the other, `verbs`, int64 [batch]."""
    samples = stdlib_trees.trees(seed=seed, largest=largest)
    for _ in range(steps):
        chosen = list(islice(samples, batch))
        types = [kind for tree in chosen for kind in tree.types]
        parents: list[int] = []
        for tree in chosen:
            before = len(parents)
            parents += [parent + before if parent >= 0 else -1 for parent in tree.parents]
        verbs = torch.tensor([tree.verb for tree in chosen])
        yield {"types": torch.tensor(types), "parents": torch.tensor(parents), "verbs": verbs}


def children_of(parents: list[int]) -> list[list[int]]:
    """The children of every node, in order."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    return children


def roots_of(results: list[Tensor], parents: list[int]) -> Tensor:
    """The results of the roots [trees, width], of those of all nodes [width] each."""
    return torch.stack([result for result, parent in zip(results, parents, strict=True) if parent < 0])


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of the first word of a function's name, in nats."""
    given = cast(dict[str, Tensor], batch)
    return F.cross_entropy(model(given["types"], given["parents"]), given["verbs"])


def sizes(batch: Batch) -> tuple[float, ...]:
    """Nodes, the depth of the deepest, leaves, and how many types of nodes there are."""
    given = cast(dict[str, Tensor], batch)
    parents = given["parents"].tolist()
    depths = [1] * len(parents)
    for node in reversed(range(len(parents))):
        if parents[node] >= 0:
            depths[node] = depths[parents[node]] + 1
    leaves = len(parents) - len({parent for parent in parents if parent >= 0})
    return float(len(parents)), float(max(depths)), float(leaves), float(len(set(given["types"].tolist())))


def inner_nodes(batch: Batch, *, places: int) -> list[float]:
    """Of every node whether it has children: 1 or -1, and 0 up to so many places."""
    parents = cast(dict[str, Tensor], batch)["parents"].tolist()
    inner = set(parents)
    return [1.0 if node in inner else -1.0 for node in range(len(parents))] + [0.0] * (places - len(parents))


def nodes_of_cells(batch: Batch, *, cell_of: Sequence[int]) -> list[float]:
    """Of every cell how many nodes are its, and how many of these have children."""
    given = cast(dict[str, Tensor], batch)
    inner = set(given["parents"].tolist())
    counts = [0.0] * (2 * (max(cell_of) + 1))
    for node, kind in enumerate(given["types"].tolist()):
        counts[2 * cell_of[kind]] += 1
        counts[2 * cell_of[kind] + 1] += node in inner
    return counts
