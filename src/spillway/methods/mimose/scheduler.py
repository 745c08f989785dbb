"""Algorithm 1: which blocks are recomputed, greedily by bytes (section 4.4).

The paper's listing, its text and the public code disagree. What is taken is what the paper means where listing and text
are put side by side; `docs/decisions/0014-mimose.md` has all three, point by point. Whether a selection holds in every
moment of the step is `peaks.py`'s question, not this one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, final

from spillway.units import Bytes

BUCKET: Final = 0.10
"""A bucket reaches this share down from its largest block: "±10 % in our implementation"."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The blocks that Algorithm 1 has chosen."""

    blocks: tuple[int, ...]
    """By number, in the order in which they were chosen."""
    uncovered: Bytes
    """What is left of the excess although every block is chosen, 0 if it is covered. The listing loops for ever."""


def select(nbytes: Sequence[Bytes], excess: Bytes) -> Selection:
    """Choose blocks until their bytes, in the order in which their forwards ran, cover the excess, or none is left.
    Without excess nothing is chosen."""
    if excess <= 0:
        return Selection(blocks=(), uncovered=0)
    # In the order of the forward where bytes are equal.
    by_bytes = sorted(range(len(nbytes)), key=nbytes.__getitem__, reverse=True)
    buckets = buckets_of(nbytes, by_bytes)
    chosen: dict[int, None] = {}
    largest = 0
    while excess > 0 and buckets:
        while by_bytes[largest] in chosen:
            largest += 1
        covered = nbytes[by_bytes[largest]] >= excess
        # Line 19: where no block covers the excess, the earliest of the largest bucket.
        at, within = _nearest(buckets, nbytes, excess) if covered else (0, 0)
        block = buckets[at].pop(within)
        if not buckets[at]:
            del buckets[at]
        chosen[block] = None
        excess -= nbytes[block]
    return Selection(blocks=tuple(chosen), uncovered=max(excess, 0))


def buckets_of(nbytes: Sequence[Bytes], by_bytes: Sequence[int]) -> list[list[int]]:
    """Lines 4 to 14: blocks of similar bytes together, largest buckets first, each in order of the forward. `by_bytes`
    are the blocks, largest first."""
    buckets: list[list[int]] = []
    bucket, least = [], inf
    for block in by_bytes:
        size = nbytes[block]
        if size >= least:
            bucket.append(block)
        else:
            bucket = [block]
            buckets.append(bucket)
            least = size - size * BUCKET
    for bucket in buckets:
        if len(bucket) > 1:
            bucket.sort()
    return buckets


def _nearest(buckets: Sequence[Sequence[int]], nbytes: Sequence[Bytes], excess: Bytes) -> tuple[int, int]:
    """Lines 17 and 21: the bucket "nearest to the excess", so the smallest, in which a block covers it, and the place
    of the earliest that does."""
    return next(
        (at, within)
        for at in range(len(buckets) - 1, -1, -1)
        for within, block in enumerate(buckets[at])
        if nbytes[block] >= excess
    )
