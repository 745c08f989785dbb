"""What a foresight is worth: a forward whose parameters wait in host memory, brought in ahead as foreseen.

The forward is a sequence of visits, each of a group of parameters that are used together. Groups come in over one lane,
one after the other; what is on its way is never stopped, what is only queued is dropped as soon as another foresight
is there. Parameters do not change in the forward, so a group leaves without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from spillway.pilots.program import Group
from spillway.units import Seconds

Foresees: TypeAlias = Callable[[int], Sequence[Group]]
"""Asked before visit k, with k visits known: the groups from visit k on, in the order of their use."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """A forward that ran."""

    visits: Sequence[Group]
    """The groups in the order in which they were used."""
    seconds: Sequence[Seconds]
    """[visits]: how long each computes."""
    copying: Sequence[Seconds]
    """[groups]: how long each takes to come in."""
    room: int
    """How many groups there is room for, those in use and on their way included; 2 or more."""


@final
@dataclass(frozen=True, slots=True)
class Fetched:
    """What became of it."""

    stall_seconds: Seconds
    """Compute waited for so long."""
    hits: int
    """Visits whose group was there or on its way."""
    wasted: int
    """Groups that came in ahead and left unused."""


def nothing(visit: int) -> Sequence[Group]:
    """Every group comes on demand."""
    return ()


def fetched(forward: Forward, foresees: Foresees) -> Fetched:
    """Run the forward with that foresight.

    While a visit computes, the lane brings what is foreseen next and is not there. What leaves for it is what is
    foreseen last, or not at all and was used longest ago; what is foreseen before it stays.
    """
    copying, room = forward.copying, forward.room
    ready: dict[Group, Seconds] = {}  # groups there or on their way: when they are there; the least recently used first
    unused = set[Group]()
    now = lane = stalled = 0.0
    hits = wasted = 0
    for number, (group, seconds) in enumerate(zip(forward.visits, forward.seconds, strict=True)):
        ahead = foresees(number)
        if group in ready:
            hits += 1
            there = ready.pop(group)
        else:
            if len(ready) >= room:
                wasted += _leave(ready, unused, ahead, group)
            lane = there = max(now, lane) + copying[group]
        unused.discard(group)
        stalled += max(there - now, 0.0)
        now = max(there, now)
        ready[group] = there
        end = now + seconds
        lane = max(lane, now)
        wanted = dict.fromkeys(ahead)
        before = {group}
        for following in wanted:
            if lane >= end or len(before) >= room:
                break
            if following not in ready:
                if len(ready) >= room:
                    wasted += _leave(ready, unused, ahead, *before)
                lane = max(lane, now) + copying[following]
                ready[following] = lane
                unused.add(following)
            before.add(following)
        now = end
    return Fetched(stalled, hits, wasted + len(unused))


def _leave(ready: dict[Group, Seconds], unused: set[Group], ahead: Sequence[Group], *keep: Group) -> int:
    """One group leaves; 1 if nobody had used it."""
    place = {group: -at for at, group in reversed(list(enumerate(ahead)))}
    free = [group for group in ready if group not in keep]
    chosen = min(free, key=lambda group: place.get(group, -len(ahead) - 1))
    del ready[chosen]
    if chosen in unused:
        unused.discard(chosen)
        return 1
    return 0
