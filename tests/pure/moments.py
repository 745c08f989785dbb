"""The peak of a step, gone through moment by moment: slow, obvious, and named by its moment."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, final

from spillway.methods.by_block import Forecast
from spillway.units import Bytes

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
    """Go through a step moment by moment (the note in `peaks.py`); of equal peaks the first is named."""
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
