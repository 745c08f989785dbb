"""A first choice: block by block through the step's peaks, the cheapest second per byte gives way."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import TypeAlias, final

from spillway.methods.auto.simulate import Clock
from spillway.units import Bytes

Step: TypeAlias = tuple[float, int, Bytes, Bytes]
"""To an option that holds less: seconds a byte that it frees, the option, bytes freed, bytes moved in addition."""


@final
class Filler:
    """Choices for one problem, each under a price of what is moved and a pace of moving."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        blocks = clock.problem.blocks
        self.kinds = [block.kind for block in blocks]
        self.forward = [rows[0][4] for rows in clock.rows]
        self.mean = sum(self.forward) / max(len(blocks), 1)
        self.lane = min(sum(self.forward) * clock.problem.out_rate, clock.host)
        """What the lane out carries while the blocks run forward, if the host has room for it: more than that would be
        waited for."""

    def fill(self, price: float, pace: float, share: float = 1.0) -> list[int] | None:
        """The option of each block; None if they do not fit so.

        A laminar fill: going through the blocks in order, where the peak of a block's forward or backward does not fit,
        blocks before it step down the lower convex hull of bytes that are held and seconds, cheapest step first.

        Args:
            price: Seconds for a second of the lane out, beside what an option takes.
            pace: Blocks are moved where the lane is at most so far behind, in mean forwards of a block: at 0 where it
                is free, which spreads over the step what is moved.
            share: Of what is available, what is filled; so much less compute has to wait for what is still going out.
        """
        clock, lane = self.clock, self.lane
        steps: dict[tuple[int, int, float], Step | None] = {}
        outs: dict[int, float] = {}  # by kind: seconds on the lane of what would be moved
        gradients = clock.gradients
        choice = [0] * len(self.kinds)
        heap: list[tuple[float, int, float, Step]] = []
        room, now, out_free, behind = int(clock.available * share), 0.0, 0.0, pace * self.mean
        for number, kind in enumerate(self.kinds):
            kept = clock.rows[number][0]
            need = max(kept[2], gradients[number] + kept[3])
            opened = False
            while room < need:
                if not heap:
                    if opened:
                        break
                    opened = True
                    self._open(heap, steps, choice[:number], price)
                    continue
                _, at, most, (_, option, freed, moved) = heappop(heap)
                if moved > 0 and moved > lane and not opened:
                    most = lane
                    option = choice[at]
                else:
                    lane -= moved
                    room += freed
                    choice[at] = option
                key = self.kinds[at], option, most
                step = steps[key] if key in steps else self._step(steps, at, key, price)
                if step is not None:
                    heappush(heap, (step[0], at, most, step))
            if room < need:
                choice[number] = own = self._smaller(number, room)
                if own < 0:
                    return None
                room -= clock.rows[number][own][0]
                continue
            room -= kept[0]
            now += self.forward[number]
            if kind not in outs:
                outs[kind] = self._moves(steps, number, price)
            most = 0.0
            if outs[kind] > 0 and out_free - now <= behind:
                most = self.lane
                out_free = max(out_free, now) + outs[kind]
            key = kind, 0, most
            step = steps[key] if key in steps else self._step(steps, number, key, price)
            if step is not None:
                heappush(heap, (step[0], number, most, step))
        return self.trimmed(choice)

    def _open(
        self, heap: list[tuple[float, int, float, Step]], steps: dict[tuple[int, int, float], Step | None],
        choice: Sequence[int], price: float,
    ) -> None:  # fmt: skip
        """Everything may be moved, whatever the lane has to carry: otherwise it does not fit."""
        for number, option in enumerate(choice):
            key = self.kinds[number], option, inf
            step = steps[key] if key in steps else self._step(steps, number, key, price)
            if step is not None:
                heappush(heap, (step[0], number, inf, step))

    def _step(
        self, steps: dict[tuple[int, int, float], Step | None], number: int, key: tuple[int, int, float], price: float
    ) -> Step | None:
        """The next vertex of the lower convex hull: the flattest way to less that is held."""
        rows = self.clock.rows[number]
        resident, moved, _, _, _, _, out, _, seconds = rows[key[1]]
        seconds += price * out
        best: Step | None = None
        for other, row in enumerate(rows):
            freed = resident - row[0]
            if freed > 0 and (row[1] <= moved or row[1] - moved <= key[2]):
                slope = (row[8] + price * row[6] - seconds) / freed
                if best is None or slope < best[0] or (slope == best[0] and freed > best[2]):
                    best = slope, other, freed, row[1] - moved
        steps[key] = best
        return best

    def _moves(self, steps: dict[tuple[int, int, float], Step | None], number: int, price: float) -> float:
        """Seconds on the lane out of the first vertex of a block's hull that moves anything; 0 without one."""
        key = self.kinds[number], 0, float(self.lane)
        while step := steps[key] if key in steps else self._step(steps, number, key, price):
            row = self.clock.rows[number][step[1]]
            if row[1]:
                return row[6]
            key = key[0], step[1], key[2]
        return 0.0

    def _smaller(self, number: int, room: Bytes) -> int:
        """The fastest option of a block that fits by itself; -1 if none does."""
        gradients = self.clock.gradients[number]
        fitting = [
            (row[8], row[0], option)
            for option, row in enumerate(self.clock.rows[number])
            if row[2] <= room and gradients + row[3] <= room
        ]
        return min(fitting)[2] if fitting else -1

    def trimmed(self, choice: Sequence[int]) -> list[int]:
        """What the last steps freed too much is given back, from the last block on: to what takes fewest seconds."""
        clock, choice = self.clock, list(choice)
        slack = clock.slack(clock.picked(choice))
        least: float = inf
        for number in range(len(choice) - 1, -1, -1):
            option = choice[number]
            if option and least > 0:
                rows = clock.rows[number]
                resident, moved, forward_peak, backward_peak, _, _, _, _, seconds = rows[option]
                room, own = resident + least, slack[number]
                for other, row in enumerate(rows):
                    if (
                        row[8] < seconds and row[0] <= room and row[1] <= moved
                        and row[2] - forward_peak <= own and row[3] - backward_peak <= own
                    ):  # fmt: skip
                        seconds, option = row[8], other
                if option != choice[number]:
                    choice[number], row = option, rows[option]
                    least -= row[0] - resident
                    slack[number] -= max(row[2] - forward_peak, row[3] - backward_peak, 0)
            if slack[number] < least:
                least = slack[number]
        return choice
