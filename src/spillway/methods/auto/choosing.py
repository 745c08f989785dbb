"""The choice for one problem: candidates by filling, each judged by the clock, and counted moves from the best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Final, final

from spillway.methods.actions import Action
from spillway.methods.auto.block_problem import BlockProblem
from spillway.methods.auto.fill import Filler
from spillway.methods.auto.search import Timed, improve
from spillway.methods.auto.simulate import Choice, Clock, Outcome, Row, shrunk
from spillway.methods.mimose.scheduler import select
from spillway.units import Bytes, Seconds

FILLED: Final = (
    (0.0, 0.5, 1.0), (0.04, 4.0, 1.0), (0.15, inf, 1.0), (0.08, 0.5, 1.0), (0.25, 2.0, 0.97),
    (0.0, 2.0, 1.0), (0.15, 1.0, 0.9), (0.0, inf, 0.97), (0.15, 4.0, 1.0), (0.08, inf, 0.97),
    (0.15, 1.0, 1.0), (0.4, 1.0, 1.0), (0.04, inf, 1.0), (0.15, 2.0, 0.9), (0.0, inf, 1.0), (0.08, 2.0, 1.0),
    (0.25, inf, 0.97), (0.04, 0.5, 0.97), (0.8, 1.0, 1.0), (0.8, inf, 1.0),
)  # fmt: skip
"""Prices, paces and shares of what is available with which choices are filled, the most useful first."""

WAITS: Final = 0.03
"""Of the plain step: where the best choice waits longer than that, more of them are tried at once."""

MOVES: Final = 400
"""Moves that are simulated at first, over the number of blocks, so that few blocks take no less time than many."""

NEAR: Final = 600
"""The same where more choices are tried, and where one is looked for that is steady (`_steady`)."""

ALONE: Final = 3
"""Choices with one block that is not kept of which the seconds are looked at."""

SMALLER: Final = tuple((1 - 0.005 * part, times) for part in range(1, 9) for times in (1.0, 1 - 0.005 * part))
"""What a plan is also used for: bytes and seconds of inputs that are a little smaller than its own, as shares."""

LOSES: Final = 0.004
"""Of the plain step: a plan that takes so much longer there has another looked for, which does not."""

LITTLE: Final = 0.006
"""Of the plain step: of 10,000 plans for random problems none that waits for less took longer there at all."""

LOSS_COUNTS: Final = 10
"""Of what a plan loses there beyond that, a second counts as so many of the step."""

LABELS: Final = 64
"""Ways to move fewer or more bytes that are followed where the host's memory is short."""


class Effort(Enum):
    """How much is tried. It is counted, never timed: the same problem has the same plan."""

    FIRST = (5, 1, 8)
    """Within the step that wants the plan."""
    POLISH = (10, 2, 150)
    """Between steps, when the size is met again."""
    IDLE = (20, 4, 2000)
    """When there is nothing else to do."""

    def __init__(self, fills: int, starts: int, moves: int) -> None:
        self.fills = fills
        """Choices that are filled."""
        self.starts = starts
        """Of all candidates, the best ones, from which moves are tried."""
        self.moves = moves
        """That are simulated from each start, at least."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A choice, and what it comes to."""

    choice: Choice
    outcome: Outcome


def plan(problem: BlockProblem, *, effort: Effort = Effort.FIRST) -> Planned:
    """The fastest choice that is found. Where nothing fits: what needs least, with `outcome.fits` False.

    It is never slower than the same for every block, whichever option that is, nor than Algorithm 1 of Mimose. Nor does
    it take longer where everything is a little smaller, if there is such a choice (`_steady`). So much `effort` is made
    unless compute would wait for more than `WAITS`: so near the floor, all that may be filled is, at once.
    """
    clock = Clock(problem)
    enough = clock.plain * (1 + 1e-4)
    kept = [0] * len(clock.rows)
    found = _best(clock, [kept], [], effort.starts)
    if not found or found[0][0] > enough:
        filler = Filler(clock)
        found = _best(clock, _alone(clock), found, effort.starts)
        found = _best(clock, _filled(filler, FILLED[: effort.fills]), found, effort.starts)
        moves = max(effort.moves, MOVES // len(clock.rows))
        if not found or _waits(clock, *found[0]) > WAITS * clock.plain:
            found = _best(clock, _filled(filler, FILLED[effort.fills :]), found, effort.starts)
            moves = max(moves, NEAR)
        found = _best(clock, _tight(clock, filler), found, effort.starts)
        found = _best(clock, _greedy(clock, found), found, effort.starts)
        for number, begin in enumerate(found[:]):
            if found[0][0] > enough:
                found.insert(0, min(found[0], improve(clock, begin, moves, seed=number + 1)))
        if found:
            found.insert(0, _steady(clock, found[0], [kept, *_tight(clock, filler)]))
    choice = found[0][1] if found else least_held(clock, floor(problem)) or kept
    return Planned(choice=tuple(choice), outcome=clock.outcome(choice))


def _best(clock: Clock, choices: Iterable[list[int]], found: list[Timed], count: int) -> list[Timed]:
    """The fastest that fit of these choices and of those found, so many at most, the fastest first."""
    for choice in choices:
        below = found[-1][0] if len(found) == count else inf
        rows = clock.picked(choice)
        if sum([row[8] for row in rows]) < below:
            seconds = clock.seconds(rows, below)
            if seconds < below and all(choice != other for _, other in found):
                found = sorted([*found, (seconds, choice)])[:count]
    return found


def _waits(clock: Clock, seconds: Seconds, choice: Sequence[int]) -> Seconds:
    return seconds - sum([row[8] for row in clock.picked(choice)])


def _steady(clock: Clock, best: Timed, simple: Iterable[list[int]]) -> Timed:
    """The choice, or one that takes no longer where everything is smaller, and here no longer than what is simple.

    A choice that waits for copies may wait longer there: what runs earlier finds copies under way that it would not
    have met (Graham's anomalies). One that does not wait has no wait to lose.
    """

    def counted(rows: Sequence[Row], below: Seconds = inf) -> Seconds:
        seconds = clock.seconds(rows, below)
        if seconds < below:
            most = seconds + LOSES * clock.plain
            for share, times in SMALLER:
                smaller = clock.seconds([shrunk(row, share, times) for row in rows])
                seconds += LOSS_COUNTS * max(smaller - most, 0.0)
                if seconds >= below:
                    return inf
        return seconds

    if _waits(clock, *best) <= LITTLE * clock.plain:
        return best
    seconds = counted(clock.picked(best[1]))
    if seconds <= best[0]:
        return best
    choice = improve(clock, (seconds, best[1]), NEAR, timed=counted)[1]
    seconds = clock.seconds(clock.picked(choice))
    faster = _best(clock, [*simple, *_greedy(clock, ())], [(seconds, choice)], 1)
    return best if faster[0][0] < seconds else (seconds, choice)


def _alone(clock: Clock) -> list[list[int]]:
    """All kept but for one block, where that is enough: the cheapest of such choices."""
    room, missing, first = clock.available, 0, len(clock.rows)
    rooms: list[Bytes] = []
    for number, (rows, gradients) in enumerate(zip(clock.rows, clock.gradients, strict=True)):
        rooms.append(room)
        short = max(rows[0][2], gradients + rows[0][3]) - room
        if short > 0:
            first = min(first, number)
            missing = max(missing, short)
        room -= rows[0][0]
    enough: list[tuple[Seconds, Bytes, int, int]] = []
    for number in range(first):
        rows, room, gradients = clock.rows[number], rooms[number], clock.gradients[number]
        if rows[0][0] >= missing:
            enough += [
                (row[8] - rows[0][8], row[1], number, option)
                for option, row in enumerate(rows)
                if rows[0][0] - row[0] >= missing and row[2] <= room and gradients + row[3] <= room
            ]
    enough.sort()
    # What is moved may be waited for; what is not takes what it says.
    tried = [*enough[:ALONE], *[one for one in enough if not one[1]][:1]]
    return [[option if at == number else 0 for at in range(len(clock.rows))] for *_, number, option in tried]


def _filled(filler: Filler, ways: Sequence[tuple[float, float, float]]) -> Iterator[list[int]]:
    for price, pace, share in ways:
        filled = filler.fill(price, pace, share)
        if filled is not None:
            yield filled


def _tight(clock: Clock, filler: Filler) -> Iterator[list[int]]:
    """The same for every block; what holds least."""
    menus = {block.kind: block.options for block in clock.problem.blocks}
    offered = {option.action for options in menus.values() for option in options}
    for action in Action:
        if action in offered:
            alike = {
                kind: next((number for number, option in enumerate(options) if option.action is action), 0)
                for kind, options in menus.items()
            }
            yield [alike[block.kind] for block in clock.problem.blocks]
    least = least_held(clock, clock.available)
    if least is not None:
        yield least
        yield filler.trimmed(least)


def _greedy(clock: Clock, found: Sequence[Timed]) -> Iterator[list[int]]:
    """Algorithm 1 of Mimose: whole blocks recomputed, more of them until they are enough.

    It is not asked where even parts of blocks, cheapest bytes first, would take no less than the best that is found.
    """
    again = [
        next((number for number, option in enumerate(block.options) if option.action is Action.RECOMPUTE), 0)
        for block in clock.problem.blocks
    ]
    pairs = [(rows[0], rows[option]) for rows, option in zip(clock.rows, again, strict=True)]
    freed = [kept[0] - row[0] for kept, row in pairs]
    excess = missing = clock.needed([kept for kept, _ in pairs]) - clock.available
    takes = sum([kept[8] for kept, _ in pairs])
    for slope, nbytes in sorted([((row[8] - kept[8]) / (kept[0] - row[0]), kept[0] - row[0])
                                 for kept, row in pairs if kept[0] > row[0]]):  # fmt: skip
        takes += slope * min(nbytes, max(missing, 0))
        missing -= nbytes
    step = max(min([nbytes for nbytes in freed if nbytes > 0], default=1), 1)
    while missing <= 0 and (not found or takes < found[0][0]):
        selection = select(freed, excess)
        chosen = frozenset(selection.blocks)
        choice = [option if number in chosen else 0 for number, option in enumerate(again)]
        if selection.uncovered or clock.needed(clock.picked(choice)) <= clock.available:
            yield choice
            return
        excess += step


def floor(problem: BlockProblem) -> Bytes:
    """The least that has to be available for anything to fit."""
    clock = Clock(problem)
    low, high = 0, clock.needed(clock.picked((0,) * len(problem.blocks)))
    while low < high:
        middle = (low + high) // 2
        if least_held(clock, middle) is None:
            low = middle + 1
        else:
            high = middle
    return low


def least_held(clock: Clock, available: Bytes) -> list[int] | None:
    """The choice that holds least after every block, of those that fit; None if nothing does."""
    choice, held, moved = [], 0, 0
    for rows, gradients in zip(clock.rows, clock.gradients, strict=True):
        room = available - held
        fitting = [
            (row[0], row[8], row[1], option)
            for option, row in enumerate(rows)
            if row[2] <= room and gradients + row[3] <= room
        ]
        if not fitting:
            return None
        resident, _, away, option = min(fitting)
        choice.append(option)
        held += resident
        moved += away
    return choice if moved <= clock.host else _within_host(clock, available)


def _within_host(clock: Clock, available: Bytes) -> list[int] | None:
    """The same where not everything that would be moved may be: by bytes moved, what holds least so far."""
    labels: list[tuple[Bytes, Bytes, tuple[int, ...]]] = [(0, 0, ())]
    for rows, gradients in zip(clock.rows, clock.gradients, strict=True):
        found = sorted(
            (moved + row[1], held + row[0], (*choice, option))
            for moved, held, choice in labels
            for option, row in enumerate(rows)
            if moved + row[1] <= clock.host and held + row[2] <= available and held + gradients + row[3] <= available
        )
        labels = []
        for label in found:
            if not labels or label[1] < labels[-1][1]:
                labels.append(label)
        if len(labels) > LABELS:
            labels = [labels[at * (len(labels) - 1) // (LABELS - 1)] for at in range(LABELS)]
    return list(labels[-1][2]) if labels else None
