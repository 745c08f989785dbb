"""The peak of a step whose blocks are kept or recomputed, and plans that hold in every moment of it.

NOTE: what is counted. A step passes these moments; the bytes of a moment are the sum of what it names.

1. The forward of block b: the rest of the step, what the kept blocks before b save, what b works with, and what b
   saves if it is kept.
2. The turn, from the end of the last block's forward until the backward comes back to it, the loss in between: what
   the step needs then beside the blocks (`Forecast.turn`), and what all kept blocks save.
3. The backward of block b: the rest of the step (`Forecast.rest`), parameter gradients of b and of the blocks after
   it, what the kept blocks before b save, what b works with, and what b saves. That b is recomputed does not help
   here: its saved bytes come back while its backward runs, and those of the blocks before it are all still there. This
   is why recomputing the last block alone lowers nothing (Fig. 11), and what the published planner leaves to its
   reserve.

Moment 3 of a block needs no less than its moment 1. So a plan holds if what the kept ones among the first b blocks save
never passes a bound, one for every b: that is what `limits` and `holding` work on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heappop, heappush
from itertools import accumulate, islice
from math import inf
from operator import add
from typing import Final

from spillway.methods.by_block import Forecast
from spillway.units import Bytes, Seconds

ALIKE: Final = 1.10
"""Blocks whose seconds per byte differ by less are taken in order of the forward: the paper's 10 %."""
EXCHANGES: Final = 4
"""How often a block of a plan is exchanged for a cheaper one at most."""


def alike(forecast: Forecast) -> bool:
    """Whether all blocks save the same and take the same time (ALIKE): then the earliest are the best."""
    saved, seconds = forecast.saved, forecast.seconds
    return not saved or (min(saved) == max(saved) and max(seconds) <= min(seconds) * ALIKE)


def limits(forecast: Forecast) -> list[Bytes]:
    """What a step needs beside kept blocks: of entry b, at the worst moment at which the first b blocks are held.

    From 0 blocks to all of them; never increasing, because what holds more blocks comes later and goes earlier. A plan
    stays within `available` if for every b the kept ones among the first b blocks save no more than `available` less
    that, and this is what `highest` and `holding` go by.
    """
    worst, created = forecast.turn, forecast.rest
    found = [worst]
    blocks = zip(reversed(forecast.gradients), reversed(forecast.saved), reversed(forecast.working), strict=True)
    for gradients, saved, working in blocks:
        created += gradients
        needs = created + saved + working
        if needs > worst:
            worst = needs
        found.append(worst)
    found.reverse()
    return found


def highest(forecast: Forecast, recomputed: Collection[int], limit: Sequence[Bytes]) -> Bytes:
    """The most bytes of the step at any of these moments; `limit` is its `limits`."""
    saved = forecast.saved
    kept = [0 if block in recomputed else nbytes for block, nbytes in enumerate(saved)] if recomputed else saved
    peak: Bytes = max(map(add, accumulate(kept, initial=0), limit))
    return peak


def holding(forecast: Forecast, available: Bytes, limit: Sequence[Bytes]) -> frozenset[int]:
    """Blocks to recompute so that the step stays within `available` in every moment, cheap seconds per byte first.

    Blocks are kept from the first on; whenever those before a moment are too many, the cheapest of them is recomputed
    instead, the earliest among alike (ALIKE). At the end the dearest whose bytes turn out to fit are kept after all,
    and the dearest left is exchanged for a cheaper one that does as well. Every block is chosen if even that does not
    fit.
    """
    if limit[0] > available:
        return forecast.everything
    saved = forecast.saved
    room = [available - needs for needs in islice(limit, 1, None)]
    if alike(forecast):
        return _earliest(saved, room)
    blocks = len(saved)
    kept: list[int] = []
    recomputed: set[int] = set()
    held = 0
    for order, nbytes, most in zip(orders(saved, forecast.seconds), saved, room, strict=True):
        heappush(kept, order)
        held += nbytes
        while held > most:
            cheapest = heappop(kept) % blocks
            recomputed.add(cheapest)
            held -= saved[cheapest]
    if recomputed and min(map(saved.__getitem__, recomputed)) <= room[-1] - held:  # nothing more can be kept than that
        held += _keep_needless(forecast, recomputed, room)
    _exchange(forecast, recomputed, room, held)
    return frozenset(recomputed)


def _earliest(saved: Sequence[Bytes], room: Sequence[Bytes]) -> frozenset[int]:
    """Of blocks that are alike the fewest that do: the first of them count in every moment."""
    nbytes = saved[0] if saved else 0
    if not nbytes:
        return frozenset()
    return frozenset(range(max(number - most // nbytes for number, most in enumerate(room, 1))))


def _exchange(forecast: Forecast, recomputed: set[int], room: Sequence[Bytes], held: Bytes) -> None:
    """Keep the dearest block in exchange for the cheapest that does in its place, as long as that is much cheaper."""
    saved, seconds = forecast.saved, forecast.seconds
    least = min(seconds, default=inf)
    for _ in range(min(EXCHANGES, len(recomputed))):
        dearest = max(sorted(recomputed), key=seconds.__getitem__)
        if seconds[dearest] / ALIKE < least:
            return
        recomputed.remove(dearest)
        held += saved[dearest]
        best = _cheapest_that_does(forecast, recomputed, room, held, seconds[dearest] / ALIKE)
        recomputed.add(dearest if best is None else best)
        if best is None:
            return
        held -= saved[best]


def _cheapest_that_does(
    forecast: Forecast, recomputed: Collection[int], room: Sequence[Bytes], held: Bytes, at_most: Seconds
) -> int | None:
    """The block of the fewest seconds without which all that are kept fit, the earliest of equal ones.

    Args:
        forecast: The blocks.
        recomputed: Blocks that are.
        room: What kept blocks may save when the backward of each block runs.
        held: What they save together.
        at_most: More seconds are too many.
    """
    best, cheapest, left = None, at_most, room[-1] - held
    for block, nbytes, seconds, most in zip(
        range(len(room) - 1, -1, -1), reversed(forecast.saved), reversed(forecast.seconds), reversed(room), strict=True
    ):
        if most < held:
            best, cheapest = None, at_most  # those behind it come too late for this moment
            if most - held < left:
                left = most - held
        if block not in recomputed:
            held -= nbytes
            if seconds <= cheapest and nbytes + left >= 0:
                best, cheapest = block, seconds
    return best


def orders(saved: Sequence[Bytes], seconds: Sequence[Seconds]) -> Sequence[int]:
    """Of each block a number to go by: fewest seconds per byte first, and by the block's own number among alike ones.

    Alike are those within ALIKE of the cheapest of them. The block is the remainder by the number of blocks.
    """
    prices = [time / nbytes if nbytes else inf for time, nbytes in zip(seconds, saved, strict=True)]
    blocks = len(prices)
    orders, rank, dearest = [0] * blocks, -blocks, -1.0
    for block in sorted(range(blocks), key=prices.__getitem__):
        if prices[block] > dearest:
            rank, dearest = rank + blocks, prices[block] * ALIKE
        orders[block] = rank + block
    return orders


def _keep_needless(forecast: Forecast, recomputed: set[int], room: Sequence[Bytes]) -> Bytes:
    """Keep what fits after all, the dearest in seconds first, the latest of equal ones; how much that saves."""
    saved, added = forecast.saved, 0
    left = _left(saved, recomputed, room)
    if any(saved[block] <= left[block] for block in recomputed):
        for block in sorted(recomputed, key=lambda block: (-forecast.seconds[block], -block)):
            if saved[block] <= left[block]:
                recomputed.discard(block)
                added += saved[block]
                left = _left(saved, recomputed, room)
    return added


def _left(saved: Sequence[Bytes], recomputed: Collection[int], room: Sequence[Bytes]) -> list[Bytes]:
    """What each block may save on top if it is kept: the least that is left in all moments behind it.

    Args:
        saved: By each block.
        recomputed: The blocks that are not kept.
        room: What kept blocks may save when the backward of each block runs.
    """
    found, held = [], 0
    for block, nbytes in enumerate(saved):
        if block not in recomputed:
            held += nbytes
        found.append(room[block] - held)
    least = found[-1]
    for block in range(len(found) - 1, -1, -1):
        if found[block] < least:
            least = found[block]
        found[block] = least
    return found


def seconds_of(forecast: Forecast, recomputed: Collection[int]) -> Seconds:
    """What recomputing these blocks takes."""
    return sum([forecast.seconds[block] for block in recomputed], 0.0)


def outside(
    forecast: Forecast, recomputed: Collection[int], turn_peak: Bytes, backward_peak: Bytes
) -> tuple[Bytes, Bytes]:
    """At most how much a step needs beside its blocks at the turn and in the backward, by what was measured of it.

    Bounds, because the peak may have been at another moment. From a step whose blocks were all recomputed, and of which
    one peak is known, they make of any other plan at least what the public code makes of it.

    Args:
        forecast: The blocks; its `turn` and `rest` are not read.
        recomputed: The blocks that were.
        turn_peak: Most bytes up to the turn, or in the whole step if that is all that is known.
        backward_peak: Most bytes from there on, or in the whole step.
    """
    held = sum(saved for block, saved in enumerate(forecast.saved) if block not in recomputed)
    turn = max(turn_peak - held, 0)
    created = highest_in_backward = 0
    for block in reversed(range(len(forecast.saved))):
        created += forecast.gradients[block]
        if block not in recomputed:
            held -= forecast.saved[block]
        needs = created + held + forecast.saved[block] + forecast.working[block]
        highest_in_backward = max(highest_in_backward, needs)
    return turn, max(backward_peak - highest_in_backward, 0)
