"""A step under a choice of options, on the clock: when compute waits, and how full memory gets.

NOTE [Lanes]. The rules by which copies go, for the engine as well as here.
1. What a block has moved goes out from the end of its forward on, one block after the other. It is freed while it goes:
   of what is still to go out t seconds before the lane is free, t x out_rate bytes are left.
2. Copies in begin at beginnings of backwards alone, those of later blocks first. Each is planned for the last of them
   that leaves 1.25 times what it and the copies after it take until their own blocks begin (`comes_in`). Earlier would
   not only gain nothing: it would take room in which bytes still go out, and compute would wait for them.
3. A copy in takes only room that is free when it begins, beside what is going out then, the block that begins, and
   every block until its own. Where there is none it is tried again at the next beginning, at last at its own. So no
   copy in ever makes compute wait for room. Nor does one begin whose own way out has not ended.
4. A block begins when there is room for it beside what is still going out, and its backward when it is there again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, TypeAlias, final

from spillway.methods.auto.block_problem import Block, BlockProblem, Option
from spillway.units import Bytes, Seconds

EARLIER: Final = 1.25
"""How many times what copies in take they are given."""

Choice: TypeAlias = tuple[int, ...]
"""For each block, the number of its option."""

Row: TypeAlias = tuple[Bytes, Bytes, Bytes, Bytes, Seconds, Seconds, Seconds, Seconds, Seconds]
"""An option of a block, as the clock reads it: resident, moved, peaks of forward and backward, seconds of forward and
backward, of the copies out and in, of both runs together."""

_Away: TypeAlias = tuple[int, Bytes, Seconds, Seconds, Seconds]
"""What has moved: its block, bytes, when its copy in begins at the latest (counted from the end of the step back), what
that takes, and when the copy out has ended."""

NOT: Final = (inf, 0.0, 0.0, 0)
"""What does not fit, or takes too long, comes to."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a choice comes to."""

    fits: bool
    """Whether it stays within what is available, and within the host's memory."""
    seconds: Seconds
    """Of the step, waiting included; infinite where it does not fit."""
    peak: Bytes
    """Most bytes at once; where it does not fit, what it would need."""
    room_stall: Seconds
    """Of it, compute waiting for bytes to go out."""
    data_stall: Seconds
    """Of it, compute waiting for bytes to come in."""
    comes_in: tuple[int, ...]
    """By block: at the beginning of whose backward its copy in is to begin; its own number where nothing is moved."""


@final
class Clock:
    """Runs choices of one problem; what does not depend on the choice is worked out once."""

    def __init__(self, problem: BlockProblem) -> None:
        self.problem = problem
        self.available = problem.available
        self.host = inf if problem.host is None else problem.host
        self.rows: list[list[Row]] = []
        """By block and option."""
        made: dict[tuple[int, Seconds, Seconds], list[Row]] = {}
        for block in problem.blocks:
            key = block.kind, block.forward, block.backward
            if key not in made:
                made[key] = [_row(block, option, problem) for option in block.options]
            self.rows.append(made[key])
        self.gradients: list[Bytes] = []
        """By block: those of its own parameters and of all later ones."""
        after = 0
        for block in reversed(problem.blocks):
            after += block.gradients
            self.gradients.append(after)
        self.gradients.reverse()
        self.plain = problem.plain
        self.runs = 0
        """How many choices have been run: what searches count."""

    def picked(self, choice: Sequence[int]) -> list[Row]:
        return [rows[option] for rows, option in zip(self.rows, choice, strict=True)]

    def needed(self, rows: Sequence[Row]) -> Bytes:
        """The least that has to be available for them, with all the waiting in the world."""
        held, most = 0, 0
        for row, gradients in zip(rows, self.gradients, strict=True):
            most = max(most, held + row[2], held + gradients + row[3])
            held += row[0]
        return most

    def slack(self, rows: Sequence[Row]) -> list[Bytes]:
        """By block: what is left of what is available beside it and what blocks before it hold."""
        left, found = self.available, []
        for row, gradients in zip(rows, self.gradients, strict=True):
            found.append(left - max(row[2], gradients + row[3]))
            left -= row[0]
        return found

    def seconds(self, rows: Sequence[Row], below: Seconds = inf) -> Seconds:
        """Of the step; infinite where the rows do not fit, or take `below` or longer."""
        return self._run(rows, below)[0]

    def outcome(self, choice: Sequence[int]) -> Outcome:
        rows = self.picked(choice)
        seconds, room_stall, data_stall, peak = self._run(rows, inf)
        fits = seconds < inf
        return Outcome(
            fits=fits, seconds=seconds, peak=peak if fits else self.needed(rows), room_stall=room_stall,
            data_stall=data_stall, comes_in=comes_in(rows),
        )  # fmt: skip

    def _run(self, rows: Sequence[Row], below: Seconds) -> tuple[Seconds, Seconds, Seconds, Bytes]:
        """Seconds, of them waiting for room and for data, and the peak; see NOTE [Lanes]."""
        self.runs += 1
        out_rate = self.problem.out_rate
        now = out_free = room_stall = until_end = latest = 0.0
        free = least = self.available
        slack: list[Bytes] = []  # by block: free while it goes backward, beside itself and what is held before it
        ends: list[Seconds] = []  # by block: compute from the beginning of its backward on
        away: list[_Away] = []
        for row, gradients in zip(rows, self.gradients, strict=True):
            resident, moved, forward_peak, backward_peak, forward, backward, out, into, _ = row
            room = free - forward_peak
            left = free - gradients - backward_peak
            if room < 0 or left < 0:
                return NOT
            if out_free > now:
                begin = out_free - room / out_rate
                if begin > now:
                    room_stall += begin - now
                    now = begin
                # Rounded up, but for what the clock's own arithmetic leaves.
                room -= int((out_free - now) * out_rate + 0.999)
            if room < least:
                least = room
            now += forward
            until_end += backward
            if moved:
                out_free = (out_free if out_free > now else now) + out
                latest = (latest if latest > until_end else until_end) + EARLIER * into
                away.append((len(slack), moved, latest, into, out_free))
            slack.append(left)
            ends.append(until_end)
            free -= resident
        allowed = below - now - until_end
        if allowed <= 0 or (away and sum(one[1] for one in away) > self.host):
            return NOT
        if not away:
            return now + until_end, 0.0, 0.0, self.available - min([least, *slack])
        state = now, out_free, room_stall, least
        return self._backward(rows, slack, ends, away, state, allowed)

    def _backward(
        self, rows: Sequence[Row], slack: Sequence[Bytes], ends: Sequence[Seconds], away: Sequence[_Away],
        state: tuple[Seconds, Seconds, Seconds, Bytes], allowed: Seconds,
    ) -> tuple[Seconds, Seconds, Seconds, Bytes]:  # fmt: skip
        now, out_free, room_stall, least = state
        out_rate = self.problem.out_rate
        allowed += room_stall
        data_stall = in_free = 0.0
        claimed = 0
        pending = len(away) - 1
        early, wanted, latest, into, gone = away[pending]  # the next to come in
        due: dict[int, tuple[Bytes, Seconds]] = {}  # by block: bytes that are claimed, and when they are there
        for number in range(len(rows) - 1, -1, -1):
            backward = rows[number][5]
            arrives = 0.0
            if claimed and number in due:
                nbytes, arrives = due.pop(number)
                claimed -= nbytes
            room = slack[number] - claimed
            if out_free > now:
                begin = out_free - room / out_rate
                if begin > now:
                    room_stall += begin - now
                    now = begin
                room -= int((out_free - now) * out_rate + 0.999)
            before = ends[number] - backward
            while pending >= 0 and (latest > before or early == number):
                if early == number:
                    arrives = in_free = max(in_free, now, gone) + into
                else:
                    going = slack[number] - claimed - room
                    if gone > now or wanted > room or (
                        min(slack[early + 1 : number + 1]) - claimed - going < wanted
                        and not _has_room(slack, due, early, number, wanted + going)
                    ):  # fmt: skip
                        break
                    in_free = (in_free if in_free > now else now) + into
                    due[early] = wanted, in_free
                    claimed += wanted
                    room -= wanted
                pending -= 1
                early, wanted, latest, into, gone = away[pending]
            if room < least:
                least = room
            if arrives > now:
                data_stall += arrives - now
                now = arrives
            if room_stall + data_stall >= allowed:
                return NOT
            now += backward
        return now, room_stall, data_stall, self.available - least


def simulate(problem: BlockProblem, choice: Sequence[int]) -> Outcome:
    """Run a step under a choice."""
    return Clock(problem).outcome(choice)


def comes_in(rows: Sequence[Row]) -> tuple[int, ...]:
    """By block: at the beginning of whose backward its copy in is to begin (rule 2)."""
    ends: list[Seconds] = []
    planned: list[int] = []
    until_end = 0.0
    for row in rows:
        until_end += row[5]
        ends.append(until_end)
    latest = 0.0
    at = 0
    for number, row in enumerate(rows):
        if not row[1]:
            planned.append(number)
            continue
        latest = max(latest, ends[number]) + EARLIER * row[7]
        at = max(at, number)
        while at < len(rows) - 1 and ends[at] < latest:
            at += 1
        planned.append(at)
    return tuple(planned)


def _row(block: Block, option: Option, problem: BlockProblem) -> Row:
    forward, backward = block.forward + option.forward, block.backward + option.backward
    moved = option.moved
    return (
        option.resident, moved, option.forward_peak, option.backward_peak, forward, backward,
        moved / problem.out_rate if moved else 0.0, moved / problem.in_rate if moved else 0.0, forward + backward,
    )  # fmt: skip


def _has_room(
    slack: Sequence[Bytes], due: dict[int, tuple[Bytes, Seconds]], early: int, late: int, nbytes: float
) -> bool:
    """Whether so many bytes for an early block fit beside every block from a late one down to it, each with what is
    claimed for blocks before it."""
    claimed = 0
    for number in range(early + 1, late + 1):
        if number - 1 in due:
            claimed += due[number - 1][0]
        if slack[number] - claimed < nbytes:
            return False
    return True


def shrunk(row: Row, sizes: float, times: float) -> Row:
    """The same with every number of bytes and of seconds multiplied."""
    resident, moved, forward_peak, backward_peak, forward, backward, out, into, both = row
    return (
        int(resident * sizes), int(moved * sizes), int(forward_peak * sizes), int(backward_peak * sizes),
        forward * times, backward * times, out * sizes, into * sizes, both * times,
    )  # fmt: skip
