"""What ran where, from when to when: the spans of a step's lanes, and how much of the copying compute did not wait for.

A lane is a resource that works in order. `compute` runs ops and replays and stalls; `copy-out` and `copy-in` take bytes
out of device memory and back; `disk` is the part of a copy in which the file was written or read. The picture is that
of DELTA's Figures 4 and 5 (arXiv:2203.15980).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import final

from spillway.units import Bytes, Seconds

Interval = tuple[Seconds, Seconds]
"""From when to when; half-open."""


@final
class Lane(StrEnum):
    """A resource that works in order."""

    COMPUTE = "compute"
    COPY_OUT = "copy-out"
    COPY_IN = "copy-in"
    DISK = "disk"


@final
class Work(StrEnum):
    """What a lane was busy with. The first three are the compute lane's."""

    OP = "op"
    RECOMPUTE = "recompute"
    STALL = "stall"
    COPY = "copy"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One piece of work on one lane. Raises ValueError when built if it ends before it begins."""

    lane: Lane
    work: Work
    """What it was. An op's span holds what was done for the op: stalls and recomputing lie within it."""
    began: Seconds
    """Since the step began."""
    ended: Seconds
    """Since the step began."""
    op: int
    """The op at which it was noted."""
    name: str
    """The op's name, of ops and recomputing; else empty."""
    storage: int | None
    """The storage that was copied or waited for; None for ops, and where it is not known."""
    nbytes: Bytes
    stalled: Seconds
    """Of a copy: how much of its time compute was stalled. The rest of it was hidden behind compute."""

    def __post_init__(self) -> None:
        if not 0 <= self.stalled <= self.ended - self.began:
            raise ValueError(f"{self.work} on {self.lane} from {self.began} to {self.ended} stalled for {self.stalled}")
        if (self.work is Work.COPY) is (self.lane is Lane.COMPUTE):
            raise ValueError(f"{self.work} does not run on the lane {self.lane}")

    @property
    def seconds(self) -> Seconds:
        return self.ended - self.began


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """The copies of a step, summed."""

    seconds: Seconds
    """Of all copies, out and in; two at a time count twice."""
    hidden_seconds: Seconds
    """The part of it in which compute was not stalled."""

    @property
    def hidden_share(self) -> float:
        """Hidden seconds as a share of all; 0.0 without copies."""
        return self.hidden_seconds / self.seconds if self.seconds else 0.0


def transfers_of(spans: Iterable[Span]) -> Transfers:
    """Sum the copies of the lanes copy-out and copy-in."""
    copies = [span for span in spans if span.lane in (Lane.COPY_OUT, Lane.COPY_IN)]
    seconds, hidden = sum(span.seconds for span in copies), sum(span.seconds - span.stalled for span in copies)
    return Transfers(seconds=seconds, hidden_seconds=min(round(hidden, 9), seconds))


def merged(intervals: Iterable[Interval], gap: Seconds = 0.0) -> list[Interval]:
    """The same time as disjoint intervals in order; those no more than `gap` apart become one."""
    joined: list[Interval] = []
    for began, ended in sorted(intervals):
        if joined and began <= joined[-1][1] + gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], ended))
        else:
            joined.append((began, ended))
    return joined


def within(interval: Interval, others: Sequence[Interval]) -> list[Interval]:
    """The parts of `interval` that lie within `others`, which are disjoint and in order, as `merged` gives them."""
    began, ended = interval
    parts, at = [], max(bisect_left(others, (began, began)) - 1, 0)
    while at < len(others) and others[at][0] < ended:
        part = max(began, others[at][0]), min(ended, others[at][1])
        if part[0] < part[1]:
            parts.append(part)
        at += 1
    return parts


def outside(interval: Interval, others: Sequence[Interval]) -> list[Interval]:
    """The parts of `interval` that lie within none of `others`."""
    edges = [interval[0], *(edge for part in within(interval, others) for edge in part), interval[1]]
    return [part for part in zip(edges[::2], edges[1::2], strict=True) if part[0] < part[1]]


def overlap(interval: Interval, others: Sequence[Interval]) -> Seconds:
    """Seconds of those parts."""
    began, ended = interval
    return min(total(within(interval, others)), ended - began)


def total(intervals: Iterable[Interval]) -> Seconds:
    """Seconds of disjoint intervals."""
    return sum(ended - began for began, ended in intervals)
