"""Schedules that need no solver: every k-th node of the forward is kept, the others run again segment by segment.

Chen et al., arXiv:1604.06174, in the words of `milp.py`. They compete with what the solver finds in time.
"""

from __future__ import annotations

from collections.abc import Iterator

from spillway.ir import Phase
from spillway.methods.checkmate.graph import Graph

Kept = dict[tuple[int, int], float]
"""How much of a datum is kept into a stage, 0 or 1."""


def checkpoint_schedules(graph: Graph, variables: Kept | dict[tuple[int, int], int]) -> Iterator[Kept]:
    """What is kept, for every length of a segment from 2 nodes to the whole forward.

    Args:
        graph: The nodes.
        variables: Stages and data that may be kept.
    """
    forward = sum(graph.step.ops[node.first].phase is Phase.FORWARD for node in graph.nodes)
    for length in range(2, forward + 1):
        comes_back = _first_wanted(graph, forward, length)
        kept: Kept = {}
        for stage, index in variables:
            datum = graph.data[index]
            stays = datum.maker >= forward or datum.maker % length == length - 1
            used = max((reader for reader in datum.readers if reader < forward), default=0)
            kept[stage, index] = float(stays or stage <= used or stage > comes_back[datum.maker // length])
        yield kept


def _first_wanted(graph: Graph, forward: int, length: int) -> dict[int, int]:
    """By segment, the first stage behind the forward that reads anything of it that is not kept."""
    found: dict[int, int] = {}
    for datum in graph.data:
        if datum.maker < forward and datum.maker % length != length - 1:
            wanted = min((reader for reader in datum.readers if reader >= forward), default=len(graph.nodes))
            segment = datum.maker // length
            found[segment] = min(found.get(segment, wanted), wanted)
    return {segment: found.get(segment, len(graph.nodes)) for segment in range(forward // length + 1)}
