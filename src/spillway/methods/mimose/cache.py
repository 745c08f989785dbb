"""Plans by input size (section 5): those of similar sizes are each other's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import floor, inf, log, log1p
from typing import Final, final

from spillway.methods.by_block import BlockPlan, InputSize, of_lengths
from spillway.units import Bytes

MOST: Final = 10_000
"""Plans that are kept; beyond, all are forgotten. Sizes of several dimensions may never repeat."""


@dataclass(slots=True)
class _Kept:
    """A plan, and from and below how many available bytes it is used."""

    plan: BlockPlan
    least: float
    below: float
    doubted: bool = False
    """Whether estimates have changed since it was made or looked at."""


@final
class PlanCache:
    """Remembers plans by similar sizes and counts how often that helped.

    Arguments:
        interval: Lengths are rounded up to its multiples: `ceil(x / interval) * interval`.
        share: Where lengths are not rounded: those that are at most about this share apart have one plan, made for the
            largest that was seen of them, and made again when a larger one is. 0 for a plan of every size.
        batched: Whether the first number of a size counts samples; it is not rounded, and those of one plan have the
            same.
        trusting: Whether a plan is used whatever is available now, as the paper does. Otherwise it is made again if it
            no longer holds, or if so much more is available that another block might be kept.
    """

    def __init__(self, interval: int = 5, *, share: float = 0.0, batched: bool = False, trusting: bool = False) -> None:
        self.interval = interval
        self.share = share
        self.batched = batched
        self.trusting = trusting
        self.hits = 0
        self.misses = 0
        self.made = 0
        """Plans that were put in."""
        self._plans: dict[InputSize, _Kept] = {}
        self._largest: dict[InputSize, InputSize] = {}
        """By the bucket of similar sizes, the largest of each of their numbers."""

    def __len__(self) -> int:
        return len(self._plans)

    def rounded(self, size: InputSize) -> InputSize:
        """The size that a plan for this one is made for."""
        if self.interval > 1:
            return of_lengths(size, lambda length: -(-length // self.interval) * self.interval, batched=self.batched)
        bucket = self._bucket(size)
        self._largest[bucket] = largest = tuple(map(max, size, self._largest.get(bucket, size)))
        return largest

    def _bucket(self, size: InputSize) -> InputSize:
        """Sizes that have one plan have one of these: of each length how often it holds 1 + share as a factor."""
        if not self.share or self.interval > 1:
            return size
        factor = log1p(self.share)
        return of_lengths(size, lambda n: floor(log(n) / factor) if n > 0 else -1, batched=self.batched)

    def find(
        self, rounded: InputSize, available: Bytes, look: Callable[[BlockPlan], BlockPlan | None] | None = None
    ) -> BlockPlan | None:
        """The plan of a rounded size, None if there is none that can be used. Counts a hit or a miss.

        Args:
            rounded: By `rounded`.
            available: Bytes, now.
            look: Gives a doubted plan with what it is expected to need by the new estimates, or None if it is of no use
                any more; without it no such plan is used.
        """
        kept = self._plans.get(self._bucket(rounded))
        if kept is not None and kept.plan.size != rounded:
            kept = None
        if kept is not None and kept.doubted:
            plan = look(kept.plan) if look is not None else None
            kept = None if plan is None else self._keep(plan)
        if kept is not None and not (self.trusting or kept.least <= available < kept.below):
            kept = None
        self.hits += kept is not None
        self.misses += kept is None
        return None if kept is None else kept.plan

    def put(self, plan: BlockPlan) -> None:
        if len(self._plans) >= MOST:
            self.forget()
        self.made += 1
        self._keep(plan)

    def _keep(self, plan: BlockPlan) -> _Kept:
        # As far as is easily told there is no better plan for as many available bytes.
        below = plan.available + max(plan.smallest, 1) if plan.given_up else inf
        kept = _Kept(plan, plan.projected, below) if plan.holds else _Kept(plan, -inf, plan.projected)
        self._plans[self._bucket(plan.size)] = kept
        return kept

    def doubt(self) -> None:
        """Estimates have changed: what plans are expected to need is looked at before they are used again."""
        for kept in self._plans.values():
            kept.doubted = True

    def forget(self) -> None:
        self._plans.clear()
        self._largest.clear()
