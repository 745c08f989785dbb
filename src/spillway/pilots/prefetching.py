"""What a foresight is worth: a forward whose parameters wait in host memory, brought in ahead as foreseen.

The forward is a sequence of visits, each of a group of parameters that are used together. Groups come in over one lane,
one after the other; what is on its way is never stopped, what is only queued is dropped as soon as another foresight
is there. Parameters do not change in the forward, so a group leaves without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from spillway.pilots.program import Group
from spillway.units import Bytes, Seconds

Foresees: TypeAlias = Callable[[int], Sequence[Group]]
"""Asked as visit k begins: the groups from visit k on, in the order of their use."""


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
    nbytes: Sequence[Bytes]
    """[groups]"""
    room: Bytes
    """For groups in use, there and on their way; what is in use may pass it alone."""


def on_demand(visit: int) -> Sequence[Group]:
    """Nothing is foreseen."""
    return ()


def stalls(forward: Forward, foresees: Foresees) -> Seconds:
    """For how long compute waits in the forward with that foresight.

    While a visit computes, the lane brings what is foreseen next and is not there. What leaves for it is what is not
    foreseen and was used longest ago, then what is foreseen last; what is foreseen before it stays.
    """
    copying, present = forward.copying, _Present(forward)
    now = lane = stalled = 0.0
    for number, (group, seconds) in enumerate(zip(forward.visits, forward.seconds, strict=True)):
        ahead = foresees(number)
        if group in present.ready:
            there = present.ready.pop(group)
        else:
            present.make_room(group, ahead, {group})
            lane = there = max(now, lane) + copying[group]
        present.ready[group] = there  # behind all that was used before
        stalled += max(there - now, 0.0)
        now = max(there, now)
        end = now + seconds
        lane = max(lane, now)
        before = {group}
        for following in ahead:
            if lane >= end:
                break
            if following not in present.ready:
                before.add(following)
                if not present.make_room(following, ahead, before):
                    break
                lane += copying[following]
                present.ready[following] = lane
            before.add(following)
        now = end
    return stalled


@final
class _Present:
    """The groups that are there or on their way, the one that was used longest ago in front."""

    def __init__(self, forward: Forward) -> None:
        self.ready: dict[Group, Seconds] = {}
        """When each is there."""
        self._nbytes, self._room = forward.nbytes, forward.room
        self._filled = 0

    def make_room(self, group: Group, ahead: Sequence[Group], keep: set[Group]) -> bool:
        """Let others leave until the group fits, and count it in; False, and nothing has left, if those to keep leave
        it no room. One that is to be kept because it is used now is counted in anyway."""
        nbytes, wanted = self._nbytes, self._filled + self._nbytes[group] - self._room
        leaving = list[Group]()
        if wanted > 0:
            place = {one: at for at, one in reversed(list(enumerate(ahead)))}
            free = [one for one in self.ready if one not in keep]
            free.sort(key=lambda one: -place.get(one, len(ahead)))
            for one in free:
                leaving.append(one)
                wanted -= nbytes[one]
                if wanted <= 0:
                    break
            if wanted > 0 and len(keep) > 1:
                return False
        for one in leaving:
            del self.ready[one]
            self._filled -= nbytes[one]
        self._filled += nbytes[group]
        return True
