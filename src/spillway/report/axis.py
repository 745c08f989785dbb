"""The axis that the pictures of a step share: time where somebody looked at the clock, else ops."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Final, final

from spillway.ir import Timeline, Work
from spillway.units import Seconds, format_seconds

WIDTH: Final = 960
"""Of every picture."""
COLUMNS: Final = 480


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark on an axis."""

    at: float
    """Its coordinate."""
    text: str
    """What stands beside it."""


def op_ranges(timeline: Timeline, most: int = COLUMNS) -> list[tuple[int, int]]:
    """The ops of every column, half-open; all columns are equally wide.

    By ops every op is in one column. By time a column holds the ops that ran in it, so a long op is in several.
    """
    if not timeline.spans:
        moments = timeline.ops + 1
        columns = min(moments, most)
        edges = [column * moments // columns for column in range(columns + 1)]
        return list(pairwise(edges))
    starts, wide = op_starts(timeline), timeline.seconds() / most
    firsts = [max(bisect_right(starts, column * wide) - 1, 0) for column in range(most)]
    ends = [bisect_left(starts, (column + 1) * wide) for column in range(most - 1)]
    return [(first, max(end, first + 1)) for first, end in zip(firsts, [*ends, len(starts)], strict=True)]


def op_starts(timeline: Timeline) -> list[Seconds]:
    """When every op began, and at last when the last one had ended; ascending.

    An op whose begin nobody saw counts from the begin of the one before it.
    """
    began, end = [0.0] * timeline.ops, 0.0
    for span in timeline.spans:
        if span.work is Work.OP:
            end = max(end, span.ended)
            if span.op < timeline.ops:
                began[span.op] = began[span.op] or span.began
    for op in range(1, timeline.ops):
        began[op] = max(began[op], began[op - 1])
    return [*began, max(end, *began[-1:])]


def ticks(timeline: Timeline) -> list[Tick]:
    """Round numbers along the axis."""
    if not timeline.spans:
        # There is one moment more than ops: what came after the last one.
        step = next(step for step in round_numbers() if timeline.ops / step <= 8)
        numbers = range(0, timeline.ops + 1, step)
        return [Tick(at=WIDTH * op / (timeline.ops + 1), text=f"op {op}" if not op else str(op)) for op in numbers]
    seconds = timeline.seconds()
    apart = 1e-9 * next(number for number in round_numbers() if seconds / (number * 1e-9) <= 8)
    times = [mark * apart for mark in range(int(seconds / apart + 1e-9) + 1)]
    return [Tick(at=WIDTH * at / (seconds or 1), text=short_seconds(at)) for at in times]


def round_numbers() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50 and so on."""
    return (factor * 10**zeros for zeros in count() for factor in (1, 2, 5))


def short_seconds(seconds: Seconds) -> str:
    """Round numbers need no decimals."""
    return format_seconds(seconds).replace(".00 ", " ").replace(".0 ", " ") if seconds else "0 s"
