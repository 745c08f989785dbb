"""From Checkmate's schedule to the gaps of a plan.

A stage is the ops of its node, and what runs again before them. A datum that a stage's node reads, or that is kept into
the next stage, is there in it; where one stage has it and a later one does too, with stages between that do not, there
is a gap, which ends before the first op of the later stage. Its recipe starts from what is there at that moment.

What a plan cannot say as Checkmate does:

- All values that come back in a stage are there before its first op, with the temporaries of one more replay. Checkmate
  counts replays one by one, and may free the input of one before the next.
- What replays alone read is there until the first op of the stage has run; Checkmate frees it before.
- A value that died in the plain step is created again by every recipe that wants it, where Checkmate would keep it.
- Checkmate frees a datum after its last use. The program may hold it for some ops more, and until then an engine can
  only move it. Such a gap is left out where the budget does not need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spillway.ir import Gap, Recompute
from spillway.ir.account import account, comes_back
from spillway.ir.lives import Life
from spillway.ir.recipes import recipe
from spillway.ir.step import StorageId, ValueId
from spillway.methods.checkmate.graph import Graph
from spillway.methods.checkmate.milp import Answer
from spillway.units import Bytes

Presence = list[tuple[int, int]]
"""Half-open intervals of ops during which a storage is there."""


def gaps_of(graph: Graph, answer: Answer) -> tuple[Gap, ...] | None:
    """The gaps of an answer; None if some value has no way back from what is there."""
    # The last value of a storage is what it holds once the maker of its datum has run.
    finals = {value.storage: value.id for value in graph.step.values}
    presence = {
        storage: _presence(graph, index, finals[storage], answer)
        for index, datum in enumerate(graph.data)
        for storage in datum.storages
    }
    gaps = []
    for storage, intervals in presence.items():
        value = finals[storage]
        for start, end in _between(graph, value, intervals):
            home = _home(graph, presence, value, start, end)
            if home is None:
                return None
            gaps.append(Gap(value=value, start=start, end=end, home=home))
    return tuple(gaps)


def without_idle_ends(graph: Graph, gaps: Sequence[Gap], allowed: Bytes) -> tuple[Gap, ...]:
    """The gaps without those at whose end nothing comes back, but for some without which the rest would not fit; none
    of these could be left out alone."""
    step, lives = graph.step, graph.lives
    kept: list[Gap] = []
    idle: list[Gap] = []
    for gap in gaps:
        (kept if comes_back(gap, lives[gap.value], len(step.ops)) else idle).append(gap)
    needed: list[Gap] = []
    while idle and (found := account(step, kept + needed, lives)).peak > allowed:
        fullest = found.fullest
        here = [gap for gap in idle if gap.start <= fullest <= gap.end] or idle
        most = max(here, key=lambda gap: step.storages[step.values[gap.value].storage].nbytes)
        needed.append(most)
        idle.remove(most)
    for gap in list(needed):
        others = [other for other in needed if other is not gap]
        if account(step, kept + others, lives).peak <= allowed:
            needed = others
    return (*kept, *needed)


def _presence(graph: Graph, index: int, value: ValueId, answer: Answer) -> Presence:
    """When the value's storage, of the datum `index`, is there, stage by stage, from its creation on."""
    datum, life, kept, again = graph.data[index], graph.lives[value], answer.keep, answer.run
    reads = _reads_by_node(graph, life)
    intervals: Presence = []
    for stage in range(datum.maker, len(graph.nodes)):
        node = graph.nodes[stage]
        is_kept = (stage, index) in kept
        if stage != datum.maker and not is_kept and (stage, datum.maker) not in again:
            continue
        first = node.first if stage != datum.maker else graph.step.storages[graph.step.values[value].storage].alive_from
        used = max((op + 1 for op in reads.get(stage, ())), default=0)
        if (stage + 1, index) in kept:
            used = node.end
        elif stage == datum.maker:
            used = max(used, life.created + 1)
        elif is_kept and any((stage, reader) in again for reader in datum.readers):
            used = max(used, first + 1)
        if used:
            intervals.append((first, used))
    return intervals


def _reads_by_node(graph: Graph, life: Life) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    node = 0
    for read in life.reads:
        while graph.nodes[node].end <= read:
            node += 1
        found.setdefault(node, []).append(read)
    return found


def _between(graph: Graph, value: ValueId, intervals: Presence) -> Iterator[tuple[int, int]]:
    """The intervals in which it would be there in the plain step, and is not."""
    alive = min(graph.lives[value].ends, len(graph.step.ops))
    starts = [start for start, _ in intervals[1:]] + [alive]
    for (_, left), back in zip(intervals, starts, strict=True):
        if left < min(back, alive):
            yield left, min(back, alive)


def _home(graph: Graph, presence: dict[StorageId, Presence], value: ValueId, start: int, end: int) -> Recompute | None:
    if end >= graph.lives[value].ends and end not in graph.lives[value].reads:
        return Recompute(ops=())  # It dies there, and does not come back.
    values = graph.step.values

    def present(leaf: ValueId) -> bool:
        intervals = presence.get(values[leaf].storage)
        return intervals is None or any(first <= end < last for first, last in intervals)

    return recipe(value, start, end, step=graph.step, lives=graph.lives, present=present)
