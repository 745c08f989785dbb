"""Plans by input size (section 5): those of similar sizes are each other's."""

from __future__ import annotations

from math import inf
from typing import Final, final

from spillway.methods.by_block import BlockPlan, InputSize
from spillway.units import Bytes

MOST: Final = 10_000
"""Plans that are kept; beyond, all are forgotten. Sizes of several dimensions may never repeat."""


@final
class PlanCache:
    """Remembers plans by rounded size and counts how often that helped.

    Arguments:
        interval: Lengths are rounded up to its multiples: `ceil(x / interval) * interval`.
        batched: Whether the first number of a size counts samples; it is not rounded.
        trusting: Whether a plan is used whatever is available now, as the paper does. Otherwise it is made again if it
            no longer holds, or if so much more is available that another block might be kept.
    """

    def __init__(self, interval: int = 5, *, batched: bool = False, trusting: bool = False) -> None:
        self.interval = interval
        self.batched = batched
        self.trusting = trusting
        self.hits = 0
        self.misses = 0
        self.made = 0
        """Plans that were put in."""
        self._plans: dict[InputSize, tuple[BlockPlan, float, float]] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def rounded(self, size: InputSize) -> InputSize:
        """The size that plans are made for and remembered by."""
        interval = self.interval
        if interval == 1:
            return size
        if self.batched:
            return size[0], *(-(-length // interval) * interval for length in size[1:])
        return tuple(-(-length // interval) * interval for length in size)

    def find(self, rounded: InputSize, available: Bytes) -> BlockPlan | None:
        """The plan of a rounded size, None if there is none that can be used. Counts a hit or a miss."""
        entry = self._plans.get(rounded)
        if entry is None or not (self.trusting or entry[1] <= available < entry[2]):
            self.misses += 1
            return None
        self.hits += 1
        return entry[0]

    def put(self, plan: BlockPlan) -> None:
        """Remember a plan."""
        if len(self._plans) >= MOST:
            self._plans.clear()
        self.made += 1
        self._plans[plan.size] = plan, *_good_for(plan)

    def forget(self) -> None:
        """Drop all plans: estimates have changed."""
        self._plans.clear()


def _good_for(plan: BlockPlan) -> tuple[float, float]:
    """From and below how many available bytes there is no better plan, as far as is easily told."""
    if not plan.holds:
        return -inf, plan.projected
    return plan.projected, plan.available + max(plan.smallest, 1) if plan.given_up else inf
