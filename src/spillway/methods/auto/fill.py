"""A first plan: block by block through the backward's peaks, the cheapest second per byte gives way."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import TypeAlias, final

from spillway.methods.auto.simulate import Clock
from spillway.units import Bytes, Seconds

Step: TypeAlias = tuple[float, int, Bytes, Bytes]
"""To an option that holds less: seconds a byte that it frees, the option, bytes freed, bytes moved in addition."""


@final
class Filler:
    """Plans of one problem, each under a price of what is moved and a cap on it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.forward = sum(block.forward for block in clock.problem.blocks)
        self._steps: dict[tuple[int, int, float, bool], Step | None] = {}

    def fill(self, price: float, cap: float) -> list[int] | None:
        """The option of each block; None if they do not fit so.

        In a laminar fill: going through the blocks in order, where the peak of a block's forward or backward does not
        fit, blocks before it step down the lower convex hull of resident bytes and seconds, cheapest step first.

        Args:
            price: Seconds for a second of the lane out, beside what an option takes.
            cap: How much is moved at most, in bytes that the lane carries out in the blocks' forward.
        """
        clock = self.clock
        rows, gradients = clock.rows, clock.gradients
        lane = cap * self.forward * clock.problem.out_rate
        choice = [0] * len(rows)
        lanes_open = lane > 0
        heap: list[tuple[float, int, bool, Step]] = []
        room = clock.available
        for number, options in enumerate(rows):
            _, _, forward_peak, backward_peak, *_ = options[0]
            while room < forward_peak or room < gradients[number] + backward_peak:
                if not heap:
                    return None
                _, at, moving, step = heappop(heap)
                _, option, freed, moved = step
                if moved > 0 and moved > lane:
                    self._push(heap, at, choice[at], price, moving=False)
                    continue
                lane -= moved
                room += freed
                choice[at] = option
                self._push(heap, at, option, price, moving=moving)
            room -= options[0][0]
            self._push(heap, number, 0, price, moving=lanes_open)
        self._trim(choice)
        return choice

    def _push(
        self, heap: list[tuple[float, int, bool, Step]], number: int, option: int, price: float, *, moving: bool
    ) -> None:
        kind = self.clock.problem.blocks[number].kind
        key = kind, option, price, moving
        step = self._steps[key] if key in self._steps else self._steps.setdefault(key, self._step(number, *key[1:]))
        if step is not None:
            heappush(heap, (step[0], number, moving, step))

    def _step(self, number: int, option: int, price: float, moving: bool) -> Step | None:
        """The next vertex of the lower convex hull: the flattest way to less that is held."""
        rows = self.clock.rows[number]
        resident, moved, _, _, forward, backward, out, _ = rows[option]
        best: Step | None = None
        for other, row in enumerate(rows):
            freed = resident - row[0]
            if freed <= 0 or (row[1] > moved and not moving):
                continue
            slope = (row[4] + row[5] - forward - backward + price * (row[6] - out)) / freed
            if best is None or (slope, -freed) < (best[0], -best[2]):
                best = slope, other, freed, row[1] - moved
        return best

    def _trim(self, choice: list[int]) -> None:
        """Give back what the last steps freed too much, from the last block on: to what takes fewest seconds."""
        clock = self.clock
        rows = clock.picked(choice)
        held = 0
        slack: list[Bytes] = []
        for row, gradients in zip(rows, clock.gradients, strict=True):
            slack.append(clock.available - held - max(row[2], gradients + row[3]))
            held += row[0]
        least: float = inf
        for number in range(len(rows) - 1, -1, -1):
            row = rows[number]
            if choice[number] and least > 0:
                best: tuple[Seconds, int] = row[4] + row[5], choice[number]
                for option, other in enumerate(clock.rows[number]):
                    if (
                        other[0] - row[0] <= least and other[1] <= row[1]
                        and max(other[2] - row[2], other[3] - row[3]) <= slack[number]
                    ):  # fmt: skip
                        best = min(best, (other[4] + other[5], option))
                if best[1] != choice[number]:
                    choice[number] = best[1]
                    least -= clock.rows[number][best[1]][0] - row[0]
            least = min(least, slack[number])
