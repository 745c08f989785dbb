"""Algorithm 1: which blocks are recomputed, greedily by bytes (section 4.4).

The paper's listing, its text and the public code disagree. `Reading` has a choice for each point; its defaults are what
the paper means where listing and text are put side by side, and `Reading.literal` and `Reading.code` are the other two.
Whether a selection holds in every moment of the step is `peaks.py`'s question, not this one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Literal, Self, final

from spillway.units import Bytes

BUCKET: Final = 0.10
"""A bucket reaches this share down from its largest block: "±10 % in our implementation"."""

Covering = Literal["smallest", "largest"]
NothingCovers = Literal["largest-bucket", "largest-block", "smallest-bucket"]
Excess = Literal["whole-model", "sum-of-blocks"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How Algorithm 1 is read where it can be read in several ways."""

    excess: Excess = "whole-model"
    """Line 15. "whole-model": bytes that the whole model would need, by an estimate of its own, less what is available
    when the forward begins (public code). "sum-of-blocks": the listing's sum of estimates less the budget, which leaves
    out parameters, gradients, optimizer state and all that no block saves."""
    covering: Covering = "smallest"
    """Lines 17 and 21, if a block covers the excess: the bucket that it is taken from. The text takes what is "nearest
    to the excess", so the smallest that covers, as the code does. The listing's `bucket_candidates.top()` is the
    largest."""
    tests_each: bool = True
    """Within that bucket: the earliest block that covers (code). Otherwise the earliest, covering or not: the listing
    compares the bucket's largest alone."""
    nothing_covers: NothingCovers = "largest-bucket"
    """Line 19, if no block covers. "largest-bucket": its earliest block, as the listing's `buckets.top().top()`;
    "largest-block": the largest to the byte, as its comment says. "smallest-bucket": its earliest block, which the
    public code takes: the list ran out in its search. It goes unseen where all blocks are alike."""
    at_least: bool = True
    """Lines 8 and 17: whether 90 % of the largest is still its bucket, and what equals the excess covers it (>=, code),
    or not (>, listing)."""
    bucket: float = BUCKET
    """The share of line 8, one-sided: a bucket spans from (1 - share) of its largest up to it."""

    @classmethod
    def literal(cls) -> Self:
        """The listing to the letter."""
        return cls(excess="sum-of-blocks", covering="largest", tests_each=False, at_least=False)

    @classmethod
    def code(cls) -> Self:
        """What the public code does."""
        return cls(nothing_covers="smallest-bucket")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The blocks that Algorithm 1 has chosen."""

    blocks: tuple[int, ...]
    """By number, in the order in which they were chosen."""
    uncovered: Bytes
    """What is left of the excess although every block is chosen, 0 if it is covered. The listing loops for ever."""


def select(nbytes: Sequence[Bytes], excess: Bytes, reading: Reading = Reading()) -> Selection:
    """Choose blocks until their bytes, in the order in which their forwards ran, cover the excess, or none is left.
    Without excess nothing is chosen."""
    if excess <= 0:
        return Selection(blocks=(), uncovered=0)
    # In the order of the forward where bytes are equal.
    by_bytes = sorted(range(len(nbytes)), key=nbytes.__getitem__, reverse=True)
    buckets = buckets_of(nbytes, by_bytes, reading)
    to_the_front = reading.nothing_covers == "largest-bucket"
    chosen: dict[int, None] = {}
    largest = 0
    while excess > 0 and buckets:
        while by_bytes[largest] in chosen:
            largest += 1
        most = nbytes[by_bytes[largest]]
        at, within = (0, 0) if to_the_front and most < excess else _next(buckets, nbytes, excess, most, reading)
        block = buckets[at].pop(within)
        if not buckets[at]:
            del buckets[at]
        chosen[block] = None
        excess -= nbytes[block]
    return Selection(blocks=tuple(chosen), uncovered=max(excess, 0))


def buckets_of(nbytes: Sequence[Bytes], by_bytes: Sequence[int], reading: Reading) -> list[list[int]]:
    """Lines 4 to 14: blocks of similar bytes together, largest buckets first, each in order of the forward. `by_bytes`
    are the blocks, largest first."""
    buckets: list[list[int]] = []
    bucket, least, share, at_least = [], inf, reading.bucket, reading.at_least
    for block in by_bytes:
        size = nbytes[block]
        if size > least or (at_least and size == least):
            bucket.append(block)
        else:
            bucket = [block]
            buckets.append(bucket)
            least = size - size * share
    for bucket in buckets:
        if len(bucket) > 1:
            bucket.sort()
    return buckets


def _next(
    buckets: Sequence[Sequence[int]], nbytes: Sequence[Bytes], excess: Bytes, largest: Bytes, reading: Reading
) -> tuple[int, int]:
    """Lines 17 to 22: the bucket and the place in it. `largest` are the bytes of the largest block that is left."""
    needed = excess if reading.at_least else excess + 1
    if largest >= needed:
        order = range(len(buckets)) if reading.covering == "largest" else range(len(buckets) - 1, -1, -1)
        covering = ((at, within) for at in order for within, block in enumerate(buckets[at]) if nbytes[block] >= needed)
        at, within = next(covering)
        return at, within if reading.tests_each else 0
    if reading.nothing_covers == "smallest-bucket":
        return len(buckets) - 1, 0
    if reading.nothing_covers == "largest-bucket":
        return 0, 0
    return 0, max(range(len(buckets[0])), key=lambda within: nbytes[buckets[0][within]])
