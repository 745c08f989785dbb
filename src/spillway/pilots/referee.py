"""The referee: which pilot acts, by the seconds of stall that each would have spared so far."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from spillway.costs.device import Device
from spillway.costs.roofline import Work, kind_of, seconds_of
from spillway.errors import UsageError
from spillway.ir.step import Op, Phase
from spillway.pilots.architecture import Architecture
from spillway.pilots.paths import Sample
from spillway.pilots.pilot import AbstractPilot, Foresight
from spillway.pilots.prefetching import Forward, on_demand, stalls
from spillway.pilots.program import Group, Program, Uses
from spillway.units import Bytes, Seconds

DECAY: Final = 0.98
"""What is left of a score after a step: the last fifty count."""
LISTED: Final = 256
"""Mispredictions that are kept."""
AS_GOOD: Final = 0.99
"""Pilots that spare this share of what the best one does are as good; the one that is right more often acts."""
ON_DEMAND: Final = "on demand"
"""Who acts where fetching ahead has made stalls longer, whoever foresaw."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Misprediction:
    """A step whose forward was another than who acted had expected as it began."""

    step: int
    """Which step, as the sample says."""
    pilot: str
    """Who acted."""
    decisions: int
    """How many decisions were others than expected."""
    seconds: Seconds
    """What that cost: stalls beyond those under the true path, what it learned on the way included."""


@final
@dataclass(slots=True, kw_only=True)
class Standing:
    """How a pilot has done."""

    pilot: str
    score: Seconds = 0.0
    """Stalls that it would have spared in a step, decayed: `DECAY`."""
    spared_seconds: Seconds = 0.0
    """Stalls that it would have spared in all steps."""
    recent: float = 0.0
    """Share of steps that were as expected, decayed likewise."""
    steps: int = 0
    exact: int = 0
    """Those in which all decisions were as it had expected when the step began."""
    acted: int = 0

    @property
    def hit_rate(self) -> float:
        return self.exact / self.steps if self.steps else 0.0


@final
@dataclass(slots=True, kw_only=True)
class Record:
    """What the referee knows of all steps together."""

    stall_seconds: Seconds = 0.0
    """Under who acted."""
    on_demand_seconds: Seconds = 0.0
    """Had nothing been fetched ahead."""
    known_seconds: Seconds = 0.0
    """Had every path been known."""
    mispredictions: int = 0
    """Steps that were not as who acted had expected."""
    misprediction_seconds: Seconds = 0.0
    """What they cost together."""
    last: deque[Misprediction] = field(default_factory=lambda: deque(maxlen=LISTED))


def modelled_seconds(architecture: Architecture, device: Device) -> NDArray[np.float64]:
    """[signatures] What an op of each takes on a device, by its roofline."""
    works = []
    for one in architecture.signatures:
        op = Op(
            number=0, name=one.name, phase=Phase.FORWARD, reads=(), creates=(0,) if one.created else (),
            flops=one.flops, traffic=one.traffic,
        )  # fmt: skip
        works.append(Work(kind_of(op), one.flops, one.traffic))
    return seconds_of(works, device)


@final
class Referee:
    """Judges pilots by forwards that ran, and lets the best act in the next.

    After each step every pilot is asked what it had foreseen, and its fetches are run on paper against the path that
    the step took (`prefetching`). The first of the pilots is the floor: it acts until another is better.

    Arguments:
        pilots: Program order in front.
        device: How fast groups come in.
        room: For parameters in use, there and on their way.
    """

    def __init__(self, program: Program, pilots: Sequence[AbstractPilot], *, device: Device, room: Bytes) -> None:
        if not pilots or len({pilot.name for pilot in pilots}) < len(pilots) or room < 1:
            raise UsageError(
                f"A referee needs pilots of different names and room of 1 byte or more; got {len(pilots)} and {room}."
            )
        self.program = program
        self.pilots = tuple(pilots)
        self.device = device
        self.room = room
        self.standings = {pilot.name: Standing(pilot=pilot.name) for pilot in pilots}
        """By name, the floor in front."""
        self.record = Record()
        self._version = -1
        self._copying: list[Seconds] = []

    @property
    def acting(self) -> AbstractPilot | None:
        """Who acts now; None if nobody would have spared anything in the last steps, and groups come on demand."""
        first = self.pilots[0]
        if not self.standings[first.name].steps:
            return first
        most = max(standing.score for standing in self.standings.values())
        if most < 0:
            return None
        good = [pilot for pilot in self.pilots if self.standings[pilot.name].score >= AS_GOOD * most]
        return max(good, key=lambda pilot: self.standings[pilot.name].recent)  # the first of equals

    def told(self) -> dict[str, Any]:
        """Who acts, how each pilot has done, and every misprediction that is kept with what it cost: what JSON can
        hold."""
        record = self.record
        return {
            "winner": ON_DEMAND if self.acting is None else self.acting.name,
            "standings": [{**asdict(one), "hit_rate": one.hit_rate} for one in self.standings.values()],
            "stall_seconds": record.stall_seconds, "on_demand_seconds": record.on_demand_seconds,
            "known_seconds": record.known_seconds, "mispredictions": record.mispredictions,
            "misprediction_seconds": record.misprediction_seconds, "last": [asdict(one) for one in record.last],
        }  # fmt: skip

    def learn(self, sample: Sample, seconds: NDArray[np.float64]) -> None:
        """Judge a step that ran, then have every pilot learn it. `seconds` [ops] is what each op of its path took."""
        self.program.follow()
        acting = self.acting
        forward, places = self._forward(sample, seconds)
        demanded = stalls(forward, on_demand)
        known = _run(forward, places, [(0, self.program.uses_of(sample.path))])
        stalled = demanded
        bits = self.program.bits(sample.path) > 0.5
        self.record.on_demand_seconds += demanded
        self.record.known_seconds += known
        for standing in self.standings.values():
            standing.score *= DECAY
            standing.recent *= DECAY
        for pilot in self.pilots:
            foreseen = self._foresights(pilot, sample)
            moments = [(at, foresight.uses(self.program)) for at, foresight in foreseen]
            found = _run(forward, places, moments)
            expected = foreseen[0][1].probabilities > 0.5
            wrong = int((np.pad(expected, (0, max(len(bits) - len(expected), 0)))[: len(bits)] != bits).sum())
            standing = self.standings[pilot.name]
            standing.score += (1 - DECAY) * (demanded - found)
            standing.spared_seconds += demanded - found
            standing.steps += 1
            standing.exact += not wrong
            standing.recent += (1 - DECAY) * (not wrong)
            if pilot is acting:
                stalled = found
                standing.acted += 1
                if wrong:
                    cost = found - known
                    self.record.mispredictions += 1
                    self.record.misprediction_seconds += cost
                    told = Misprediction(step=sample.step, pilot=pilot.name, decisions=wrong, seconds=cost)
                    self.record.last.append(told)
        self.record.stall_seconds += stalled
        for pilot in self.pilots:
            pilot.learn(sample)

    def _foresights(self, pilot: AbstractPilot, sample: Sample) -> list[tuple[int, Foresight]]:
        """What it foresaw, and from which op of the path on it did."""
        found = [(0, pilot.foresee(sample))]
        if pilot.redirects:
            for asked, op in enumerate(sample.asked_at.tolist(), start=1):
                found.append((op + 1, pilot.foresee(sample, asked)))
        return found

    def _forward(self, sample: Sample, seconds: NDArray[np.float64]) -> tuple[Forward, list[tuple[int, int]]]:
        """The forward as a sequence of visits, and the op and the rank of each."""
        program = self.program
        if self._version != program.version:
            self._version = program.version
            self._copying = [self.device.in_seconds(nbytes) for nbytes in program.nbytes]
        visits = program.visits(sample.path)
        clock = np.concatenate([[0.0], np.cumsum(seconds)])
        ends = [*visits.ops[1:], len(sample.path)]
        forward = Forward(
            visits=visits.groups, seconds=(clock[ends] - clock[list(visits.ops)]).tolist(), copying=self._copying,
            nbytes=program.nbytes, room=self.room,
        )  # fmt: skip
        return forward, list(zip(visits.ops, program.uses_of(sample.path)[0], strict=True))


def _run(forward: Forward, places: Sequence[tuple[int, int]], moments: Sequence[tuple[int, Uses]]) -> Seconds:
    """For how long the forward waits with what was foreseen at those ops; `places` are the op and the rank of each
    visit."""
    at = 0

    def ahead(visit: int) -> Sequence[Group]:
        nonlocal at
        op, rank = places[visit]
        while at + 1 < len(moments) and moments[at + 1][0] <= op:
            at += 1
        ranks, groups = moments[at][1]
        return groups[bisect_left(ranks, rank) :]

    return stalls(forward, ahead)
