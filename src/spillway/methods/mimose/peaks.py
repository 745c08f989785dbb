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
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from math import inf
from typing import Final, Literal, final

from spillway.methods.by_block import Forecast
from spillway.units import Bytes, Seconds

ALIKE: Final = 1.10
"""Blocks whose seconds per byte differ by less are taken in order of the forward: the paper's 10 %."""
EXCHANGES: Final = 4
"""How often a block of a plan is exchanged for a cheaper one at most."""

Part = Literal["forward", "turn", "backward"]


@final
@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes of a step, and when."""

    nbytes: Bytes
    part: Part
    block: int
    """The block that runs then; the last one at the turn."""


def simulate(forecast: Forecast, recomputed: Collection[int]) -> Peak:
    """Go through a step moment by moment (the note above). The first of equal peaks is the one that is named."""
    blocks, held = len(forecast.saved), 0
    best = Peak(0, "forward", 0)
    for block in range(blocks):
        runs = forecast.rest + held + forecast.working[block]
        if block not in recomputed:
            held += forecast.saved[block]
            runs += forecast.saved[block]
        best = _higher(best, runs, "forward", block)
    best = _higher(best, forecast.turn + held, "turn", max(blocks - 1, 0))
    created = 0
    for block in reversed(range(blocks)):
        created += forecast.gradients[block]
        if block not in recomputed:
            held -= forecast.saved[block]
        runs = forecast.rest + created + held + forecast.saved[block] + forecast.working[block]
        best = _higher(best, runs, "backward", block)
    return best


def _higher(best: Peak, nbytes: Bytes, part: Part, block: int) -> Peak:
    return Peak(nbytes, part, block) if nbytes > best.nbytes else best


def limits(forecast: Forecast) -> list[Bytes]:
    """What a step needs beside kept blocks: of entry b, at the worst moment at which the first b blocks are held.

    From 0 blocks to all of them; never increasing, because what holds more blocks comes later and goes earlier. A plan
    stays within `available` if for every b the kept ones among the first b blocks save no more than `available` less
    that, and this is what `highest` and `holding` go by.
    """
    worst, created = forecast.turn, forecast.rest
    found = [worst]
    for block in range(len(forecast.saved) - 1, -1, -1):
        created += forecast.gradients[block]
        needs = created + forecast.saved[block] + forecast.working[block]
        if needs > worst:
            worst = needs
        found.append(worst)
    found.reverse()
    return found


def highest(forecast: Forecast, recomputed: Collection[int], limit: Sequence[Bytes]) -> Bytes:
    """The peak that `simulate` finds, from `limits`."""
    best, held = limit[0], 0
    for block, (saved, needs) in enumerate(zip(forecast.saved, islice(limit, 1, None), strict=True)):
        if block not in recomputed:
            held += saved
        if held + needs > best:
            best = held + needs
    return best


def holding(forecast: Forecast, available: Bytes, limit: Sequence[Bytes]) -> frozenset[int]:
    """Blocks to recompute so that the step stays within `available` in every moment, cheap seconds per byte first.

    Blocks are kept from the first on; whenever those before a moment are too many, the cheapest of them is recomputed
    instead, the earliest among alike (ALIKE). At the end the dearest whose bytes turn out to fit are kept after all,
    and the dearest left is exchanged for a cheaper one that does as well. Every block is chosen if even that does not
    fit.
    """
    if limit[0] > available:
        return forecast.everything
    ranks = _ranks(forecast.saved, forecast.seconds)
    kept: list[tuple[int, int, Bytes]] = []
    recomputed: set[int] = set()
    held = 0
    for block, saved in enumerate(forecast.saved):
        heappush(kept, (ranks[block], block, saved))
        held += saved
        most = available - limit[block + 1]
        while held > most:
            _, cheapest, freed = heappop(kept)
            recomputed.add(cheapest)
            held -= freed
    chosen = _without_needless(forecast, recomputed, available, limit)
    return _with_a_cheaper_one(forecast, chosen, available, limit)


def _with_a_cheaper_one(
    forecast: Forecast, chosen: frozenset[int], available: Bytes, limit: Sequence[Bytes]
) -> frozenset[int]:
    """The dearest block exchanged for the cheapest that does in its place, as long as that is much cheaper."""
    seconds = forecast.seconds
    for _ in range(min(EXCHANGES, len(chosen))):
        dearest = max(chosen, key=seconds.__getitem__)
        others = chosen - {dearest}
        left = _left(forecast.saved, others, available, limit)
        best, cheapest, held = dearest, seconds[dearest] / ALIKE, 0
        for block, saved in enumerate(forecast.saved):
            if block not in others:
                if saved + left[block] >= 0 and seconds[block] < cheapest:
                    best, cheapest = block, seconds[block]
                held += saved
            if held + limit[block + 1] > available:
                break  # later blocks come too late for this moment
        if best == dearest:
            return chosen
        chosen = others | {best}
    return chosen


def _ranks(saved: Sequence[Bytes], seconds: Sequence[Seconds]) -> list[int]:
    """Of each block: 0 for the fewest seconds per byte and all that are alike, and so on."""
    prices = [time / nbytes if nbytes else inf for time, nbytes in zip(seconds, saved, strict=True)]
    ranks, rank, alike = [0] * len(prices), -1, -1.0
    for block in sorted(range(len(prices)), key=prices.__getitem__):
        if prices[block] > alike:
            rank, alike = rank + 1, prices[block] * ALIKE
        ranks[block] = rank
    return ranks


def _without_needless(
    forecast: Forecast, recomputed: set[int], available: Bytes, limit: Sequence[Bytes]
) -> frozenset[int]:
    """Keep what fits after all, the dearest in seconds first, the latest of equal ones."""
    saved = forecast.saved
    left = _left(saved, recomputed, available, limit)
    if any(saved[block] <= left[block] for block in recomputed):
        for block in sorted(recomputed, key=lambda block: (-forecast.seconds[block], -block)):
            if saved[block] <= left[block]:
                recomputed.discard(block)
                left = _left(saved, recomputed, available, limit)
    return frozenset(recomputed)


def _left(saved: Sequence[Bytes], recomputed: Collection[int], available: Bytes, limit: Sequence[Bytes]) -> list[Bytes]:
    """What each block may save on top if it is kept: the least that is left in all moments behind it."""
    found, held = [], 0
    for block, nbytes in enumerate(saved):
        if block not in recomputed:
            held += nbytes
        found.append(available - limit[block + 1] - held)
    least = found[-1] if found else 0
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
