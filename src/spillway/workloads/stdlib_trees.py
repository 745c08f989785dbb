"""Real input with a structure: the syntax trees and the docstrings of the standard library's functions."""

from __future__ import annotations

import ast
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Final, NamedTuple, TypeVar

from spillway.errors import WorkloadError
from spillway.workloads import stdlib_text

T = TypeVar("T")

NODE_TYPES: Final = tuple(
    sorted(
        name for name, kind in vars(ast).items()
        if isinstance(kind, type) and issubclass(kind, ast.AST) and not name.startswith("_")
    )
)  # fmt: skip
"""What a node of a tree can be, in the order of the numbers."""
_NUMBERS: Final = {name: number for number, name in enumerate(NODE_TYPES)}

VERBS: Final = 32
"""Classes of functions: the most frequent first words of their names, and all others together."""


class Tree(NamedTuple):
    """The syntax tree of a function; children stand before their parents, in the order of the source."""

    types: tuple[int, ...]
    """Of every node, by its place in `NODE_TYPES`."""
    parents: tuple[int, ...]
    """The place of every node's parent; -1 for the root, which stands last."""
    verb: int
    """The class of the function, from 0 to `VERBS` - 1: the first word of its name. The tree itself has no names."""


def trees(*, seed: int, smallest: int = 6, largest: int = 48) -> Iterator[Tree]:
    """Trees of the functions with that many nodes, again and again, in an order that the seed decides."""
    ranks = _verbs()
    fitting = [
        Tree(types, parents, ranks.get(verb, VERBS - 1))
        for types, parents, verb, _ in _functions() if smallest <= len(types) <= largest
    ]  # fmt: skip
    yield from _again_and_again(fitting, seed, f"syntax tree of {smallest} to {largest} nodes")


def docstrings(*, seed: int, shortest: int = 12, longest: int = 80) -> Iterator[bytes]:
    """The first paragraphs of docstrings with that many bytes, again and again, in an order that the seed decides."""
    fitting = sorted({text for *_, text in _functions() if shortest <= len(text) <= longest})
    yield from _again_and_again(fitting, seed, f"docstring of {shortest} to {longest} bytes")


def words(*, seed: int, most: int, vocabulary: int) -> Iterator[list[int]]:
    """The words of docstrings' first paragraphs, at least two and at most that many, as numbers below `vocabulary`.

    A word's number is a checksum of it, so that few words share one and nothing has to be counted before.
    """
    if most < 2:
        raise WorkloadError(f"The words of a docstring are two or more, of which {most} cannot be the most.")
    for text in docstrings(seed=seed, longest=10_000):
        found = re.findall(rb"\w+|[^\w\s]", text.lower())[:most]
        if len(found) > 1:
            yield [zlib.crc32(word) % vocabulary for word in found]


def type_ranks() -> dict[int, int]:
    """Types of nodes by how many functions of the standard library have one, the most frequent first."""
    counts = Counter(kind for types, *_ in _functions() for kind in set(types))
    return {kind: rank for rank, (kind, _) in enumerate(sorted(counts.items(), key=lambda one: (-one[1], one[0])))}


def _again_and_again(samples: list[T], seed: int, what: str) -> Iterator[T]:
    if not samples:
        raise WorkloadError(f"No function of the standard library has a {what}.")
    order, samples = random.Random(seed), list(samples)
    while True:
        order.shuffle(samples)
        yield from samples


@cache
def _verbs() -> dict[str, int]:
    counts = Counter(verb for _, _, verb, _ in _functions())
    ranked = sorted(counts, key=lambda verb: (-counts[verb], verb))
    return {verb: rank for rank, verb in enumerate(ranked[: VERBS - 1])}


@cache
def _functions() -> tuple[tuple[tuple[int, ...], tuple[int, ...], str, bytes], ...]:
    """Types and parents of the nodes, the first word of the name, and the docstring's first paragraph of every function
    of the standard library, in the order of files and places."""
    found = []
    for path in stdlib_text.source_files():
        for node in stdlib_text.definitions(path.read_bytes()):
            text = re.split(r"\n\s*\n", ast.get_docstring(node) or "")[0]
            verb = node.name.strip("_").partition("_")[0].lower()
            found.append((*_flat(node), verb, " ".join(text.split()).encode()))
    return tuple(found)


def _flat(root: ast.AST) -> tuple[tuple[int, ...], tuple[int, ...]]:
    types: list[int] = []
    parents: list[int] = []

    def add(node: ast.AST) -> int:
        below = [add(child) for child in ast.iter_child_nodes(node) if _stands_for_something(child)]
        types.append(_NUMBERS[type(node).__name__])
        parents.append(-1)
        for child in below:
            parents[child] = len(types) - 1
        return len(types) - 1

    add(root)
    return tuple(types), tuple(parents)


def _stands_for_something(node: ast.AST) -> bool:
    """Contexts of names (`Load`, `Store`) do not, nor do lists of no arguments."""
    if isinstance(node, ast.expr | ast.stmt | ast.arg | ast.operator | ast.cmpop):
        return True
    return not isinstance(node, ast.expr_context) and next(ast.iter_child_nodes(node), None) is not None
