"""The choice for one problem: candidates by filling, each judged by the clock, and counted moves from the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Final, final

from spillway.methods.actions import Action
from spillway.methods.auto.fill import Filler
from spillway.methods.auto.problem import BlockProblem
from spillway.methods.auto.simulate import Choice, Clock, Outcome
from spillway.units import Bytes, Seconds

COARSE: Final = ((0.0, 0.5), (0.15, 1.0), (0.3, 0.75), (0.6, 1.0), (1.0, 0.25), (0.0, 0.0))
"""Prices and caps with which a plan is filled at first."""


class Effort(Enum):
    """How much is tried. It is counted, never timed: the same problem has the same plan."""

    FIRST = "first"
    """Within the step that wants the plan."""
    POLISH = "polish"
    """Between steps, when the size is met again."""
    IDLE = "idle"
    """When there is nothing else to do."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A choice, and what it comes to."""

    choice: Choice
    outcome: Outcome


def plan(problem: BlockProblem, *, effort: Effort = Effort.FIRST, start: Sequence[int] | None = None) -> Planned:
    """The best choice that is found. Where nothing fits: what holds least, with `outcome.fits` False.

    Args:
        problem: What is to be planned.
        effort: How much is tried.
        start: A choice to begin from, such as an earlier plan's; what is found is never slower.
    """
    clock = Clock(problem)
    best, seconds = _best_candidate(clock, start)
    if seconds == inf:
        return Planned(choice=best, outcome=clock.outcome(best))
    return Planned(choice=best, outcome=clock.outcome(best))


def _best_candidate(clock: Clock, start: Sequence[int] | None) -> tuple[Choice, Seconds]:
    count = len(clock.rows)
    best: Choice = (0,) * count
    seconds = clock.seconds(clock.picked(best))
    if seconds < inf:
        return best, seconds
    filler = Filler(clock)
    found = [filler.fill(price, cap) for price, cap in COARSE]
    found += [_single(clock.problem, action) for action in Action]
    found += [list(start) if start is not None else None, _least(clock, clock.available)]
    for choice in found:
        if choice is not None:
            taken = clock.seconds(clock.picked(choice), seconds)
            if taken < seconds:
                best, seconds = tuple(choice), taken
    if seconds == inf:
        least = _least(clock, floor(clock.problem))
        assert least is not None
        best = tuple(least)
    return best, seconds


def floor(problem: BlockProblem) -> Bytes:
    """The least that has to be available for anything to fit."""
    clock = Clock(problem)
    low, high = 0, clock.needed(clock.picked((0,) * len(problem.blocks)))
    while low < high:
        middle = (low + high) // 2
        if _least(clock, middle) is None:
            low = middle + 1
        else:
            high = middle
    return low


def _least(clock: Clock, available: Bytes) -> list[int] | None:
    """What holds least of all that fits; None if nothing does."""
    choice, held, moved = [], 0, 0
    for rows, gradients in zip(clock.rows, clock.gradients, strict=True):
        room = available - held
        fitting = [
            (row[0], row[4] + row[5], row[1], option)
            for option, row in enumerate(rows)
            if row[2] <= room and gradients + row[3] <= room
        ]
        if not fitting:
            return None
        resident, _, away, option = min(fitting)
        choice.append(option)
        held += resident
        moved += away
    return choice if moved <= clock.host else None


def _single(problem: BlockProblem, action: Action) -> list[int]:
    """Every block the same where its menu has it."""
    return [
        next((number for number, option in enumerate(block.options) if option.action is action), 0)
        for block in problem.blocks
    ]
