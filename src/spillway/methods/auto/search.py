"""From a choice to a faster one: moves drawn from a seed, of which each that gains is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import inf, prod
from random import Random
from typing import Final, TypeAlias

from spillway.methods.auto.simulate import Clock, Row
from spillway.units import Seconds

DRAWN: Final = 10
"""Moves that are drawn for each that is simulated; most are seen to gain nothing, or not to fit, without that."""
FEW: Final = 300
"""Where there are no more choices than these, or than moves to simulate, all are tried instead of moves."""

Timed: TypeAlias = tuple[Seconds, list[int]]
"""A choice that fits, after what it takes."""
Timing: TypeAlias = Callable[[Sequence[Row], Seconds], Seconds]


def improve(clock: Clock, begin: Timed, simulated: int, seed: int = 1, timed: Timing | None = None) -> Timed:
    """Try so many moves: another option for a block, or for two or three, or those of two exchanged. Where there are
    but few choices, all of them.

    Args:
        simulated: How many moves are simulated.
        seed: Of the moves.
        timed: What rows come to, never less than their seconds, or infinity if it is no less than a number; by default
            their seconds.
    """
    rows, (seconds, choice), timed = clock.rows, begin, timed or clock.seconds
    free = [number for number, options in enumerate(rows) if len(options) > 1]
    if not free:
        return begin
    if prod(map(len, rows)) <= max(simulated, FEW):
        return _best_of_all(clock, begin, timed)
    count = len(free)
    current, taken = list(choice), clock.picked(choice)
    after = _room_after(clock, taken)
    busy = sum(row[8] for row in taken)
    draw = Random(seed).getrandbits
    drawn, until = 0, clock.runs + simulated
    while clock.runs < until and drawn < simulated * DRAWN:
        drawn += 1
        bits = draw(48)
        one, other = free[(bits >> 3) % count], free[(bits >> 14) % count]
        if one > other:
            one, other = other, one
        first, second, kind = rows[one], rows[other], bits & 7
        if kind < 2 or one == other:
            move = [(one, (bits >> 25) % len(first))]
        elif kind < 5:
            if current[one] >= len(second) or current[other] >= len(first):
                continue
            move = [(one, current[other]), (other, current[one])]
        else:
            move = [(one, (bits >> 25) % len(first)), (other, (bits >> 29) % len(second))]
            if kind == 7:
                third = free[(bits >> 33) % count]
                if third not in (one, other):
                    move.append((third, (bits >> 44) % len(rows[third])))
                    move.sort()
        more, freed = 0.0, 0
        for number, option in move:
            new, old = rows[number][option], taken[number]
            more += new[8] - old[8]
            freed += old[0] - new[0]
        last, option = move[-1]
        if busy + more >= seconds or -freed > after[last] or current[last] == option:
            continue
        before = [taken[number] for number, _ in move]
        for number, option in move:
            taken[number] = rows[number][option]
        found = timed(taken, seconds)
        if found < seconds:
            seconds, busy = found, busy + more
            after = _room_after(clock, taken)
            for number, option in move:
                current[number] = option
        else:
            for (number, _), row in zip(move, before, strict=True):
                taken[number] = row
    return seconds, current


def _best_of_all(clock: Clock, begin: Timed, timed: Timing) -> Timed:
    seconds, best = begin
    for choice in product(*(range(len(options)) for options in clock.rows)):
        taken = clock.picked(choice)
        if sum([row[8] for row in taken]) < seconds:
            found = timed(taken, seconds)
            if found < seconds:
                seconds, best = found, list(choice)
    return seconds, best


def _room_after(clock: Clock, taken: Sequence[Row]) -> list[float]:
    """By block: how many more bytes it may hold, for all blocks after it."""
    slack = clock.slack(taken)
    after, least = [inf] * len(slack), inf
    for number in range(len(slack) - 1, -1, -1):
        after[number] = least
        least = min(least, slack[number])
    return after
