"""Where a running forward is in the order of the program, and which parameters are expected from there on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import final

import numpy as np

from spillway.pilots.pilot import Foresight
from spillway.pilots.program import Group, Program


@final
class Course:
    """Follows a forward op by op, and is put right where it is another than foreseen.

    What is foreseen are parts that run. An op of another part is a misprediction: from there on that part is expected
    too, in place of what stands in front of it in the program.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.visits: list[tuple[int, Group]] = []
        """What ran so far: the clock at each use of a group that is not the one used last, and the group."""
        self._at = -1
        self._version = -1
        self._places: list[tuple[int, int]] = []
        self._expected: list[bool] = []
        self._uses: tuple[Sequence[int], Sequence[Group]] = ((), ())

    def begin(self) -> None:
        """A forward begins. Until a pilot was asked everything is expected, in the order of the program."""
        program = self.program
        if self._version != program.version:
            self._version = program.version
            self._places = list(zip(program.rank.tolist(), program.part.tolist(), strict=True))
        self._at = -1
        self.visits = []
        self.expect(Foresight(np.ones(program.decisions, np.float32)))

    def expect(self, foresight: Foresight) -> None:
        """From here on what a pilot foresees."""
        program = self.program
        likely = (foresight.probabilities > 0.5).tolist()
        self._expected = [True, *likely, *[False] * (program.decisions - len(likely))]
        self._uses = foresight.uses(program)

    def passed(self, key: int, clock: int) -> None:
        """An op of the forward begins, by its number in the architecture. A step of an engine asks this around every
        op: what follows a foresight that holds is looked up and compared, and no more."""
        if key >= len(self._places):  # at a site that nobody has seen
            return
        rank, part = self._places[key]
        if rank > self._at:
            self._at = rank
        if not self._expected[part]:
            self._expected[part] = True
            self._uses = self.program.uses_where(np.array(self._expected[1:], np.float32))
        for group in self.program.groups_of_op.get(key, ()):
            if not self.visits or self.visits[-1][1] != group:
                self.visits.append((clock, group))

    def ahead(self) -> Sequence[Group]:
        """The group that is in use, as only some of its parameters may have been used yet, and those that are expected
        from here on in the order of their use."""
        ranks, groups = self._uses
        return [*(group for _, group in self.visits[-1:]), *groups[bisect_right(ranks, self._at) :]]
