"""How many bytes a step needs under given gaps, op by op: the account that planners keep while they choose.

It counts what `verify.py` counts, in one pass and by other means; a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

from spillway.ir.lives import Life
from spillway.ir.plan import Gap, Recompute
from spillway.ir.step import Step, StorageId
from spillway.units import Bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Bytes of one step under a set of gaps."""

    during: tuple[Bytes, ...]
    before: tuple[Bytes, ...]
    """Bytes before every op, and after the last, where something is replayed there; elsewhere 0."""

    @property
    def levels(self) -> list[Bytes]:
        """The most bytes around every op, and after the last: before it or during it."""
        return list(map(max, zip((*self.during, 0), self.before, strict=True)))

    @property
    def peak(self) -> Bytes:
        return max((*self.during, *self.before), default=0)

    @property
    def fullest(self) -> int:
        """The op at which that is so; the last op for what is so after it."""
        peak = self.peak
        return next((op for op, both in enumerate(zip(self.during, self.before, strict=False)) if peak in both), -1)


def comes_back(gap: Gap, life: Life, ops: int) -> bool:
    """Whether the gap's value is wanted when the gap ends: it exists still, or is read as it is written over."""
    if gap.end in life.reads:
        return True
    return gap.end < life.ends and (gap.end < ops or isinstance(gap.home, Recompute))


def account(step: Step, gaps: Iterable[Gap], lives: Sequence[Life]) -> Account:
    """Count the bytes of the step under the gaps, which no two of one value hold the same op."""
    ops = len(step.ops)
    during, before = [0] * (ops + 2), [0] * (ops + 3)
    temporaries: dict[int, Bytes] = {}
    for storage in step.storages:
        _add(during, storage.alive_from, storage.alive_until, storage.nbytes)
        first = 0 if storage.present_at_start else storage.alive_from + 1
        _add(before, first, ops + 1 if storage.present_at_end else storage.alive_until, storage.nbytes)
    holds: dict[StorageId, list[tuple[int, int]]] = {}
    for gap in gaps:
        life, nbytes = lives[gap.value], step.storages[step.values[gap.value].storage].nbytes
        back = comes_back(gap, life, ops)
        # A source that leaves before op 0 is gone then; a storage that dies with the gap is in neither sum.
        _add(during, gap.start, min(gap.end, life.dies), -nbytes)
        _add(before, gap.start, min(gap.end if back else gap.end + 1, life.dies), -nbytes)
        if isinstance(gap.home, Recompute):
            if back:
                temporaries[gap.end] = max(temporaries.get(gap.end, 0), gap.home.temporaries)
            for leaf in gap.home.held:
                holds.setdefault(step.values[leaf].storage, []).append((gap.start, gap.end))
    for storage_id, intervals in holds.items():
        _hold(step, storage_id, intervals, during, before)
    summed = list(accumulate(before))
    return Account(
        during=tuple(accumulate(during))[:ops],
        before=tuple(summed[op] + temporaries[op] if op in temporaries else 0 for op in range(ops + 1)),
    )


def _add(sums: list[Bytes], start: int, end: int, nbytes: Bytes) -> None:
    if start < end:
        sums[start] += nbytes
        sums[end] -= nbytes


def _hold(
    step: Step, storage_id: StorageId, intervals: list[tuple[int, int]], during: list[Bytes], before: list[Bytes]
) -> None:
    """Add what gaps hold of one storage while it does not exist otherwise, each op once."""
    storage = step.storages[storage_id]
    dies = len(step.ops) + 1 if storage.present_at_end else storage.alive_until
    # What is held for a replay before op `end` is still there then, which only the sums `before` count.
    for sums, extra in ((during, 0), (before, 1)):
        reached = dies
        for start, end in sorted(intervals):
            _add(sums, max(start, reached), end + extra, storage.nbytes)
            reached = max(reached, end + extra)
