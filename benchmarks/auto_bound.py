"""What no plan of `auto` can beat: its problem as a mixed integer program, relaxed where copies are concerned.

Against the clock of `methods/auto/simulate.py`: options are chosen as there; compute may wait anywhere, for any time;
the backlog of the lane out is the clock's, which is fluid; copies in are fluid, go in any order and need not be
planned, but take the lane's time and room like the clock's. So every run of the clock is a solution that takes as long.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from spillway.methods.auto.block_problem import BlockProblem
from spillway.methods.auto.simulate import Clock
from spillway.units import Seconds

Terms = list[tuple[int, float]]
"""Variables with their coefficients."""


class Program:
    """Variables and rows. Bytes are shares of what is available, seconds of the plain step: tolerances are absolute."""

    def __init__(self, problem: BlockProblem, *, whole: bool) -> None:
        self.problem = problem
        self.whole = whole
        """Whether a copy in has room for all of it or for nothing: tighter, with more that is undecided."""
        self.clock = Clock(problem)
        self.count = 0
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.binary: list[int] = []
        self.rows: list[tuple[Terms, float]] = []
        """Each at most a number."""
        self.unit = max(problem.available, 1)
        self.plain = problem.plain
        self.chosen = [[self._variable(binary=True) for _ in rows] for rows in self.clock.rows]
        for variables in self.chosen:
            self._at_most([(variable, 1.0) for variable in variables], 1.0)
            self._at_most([(variable, -1.0) for variable in variables], -1.0)
        self._lanes()

    def _variable(self, *, cost: float = 0.0, binary: bool = False) -> int:
        self.cost.append(cost)
        self.upper.append(1.0 if binary else inf)
        self.binary.append(int(binary))
        self.count += 1
        return self.count - 1

    def _at_most(self, terms: Iterable[tuple[int, float]], bound: float) -> None:
        self.rows.append((list(terms), bound))

    def _of(self, number: int, column: int, factor: float) -> Terms:
        """A column of the clock's rows, under the option that is chosen."""
        rows = zip(self.chosen[number], self.clock.rows[number], strict=True)
        return [(variable, factor * row[column]) for variable, row in rows if row[column]]

    def _lanes(self) -> None:
        count, share, time = len(self.chosen), 1.0 / self.unit, 1.0 / self.plain
        out, into = self.problem.out_rate * self.plain * share, self.problem.in_rate * self.plain * share
        for number in range(count):
            for variable, row in zip(self.chosen[number], self.clock.rows[number], strict=True):
                self.cost[variable] = (row[4] + row[5]) * time
        moved = [self._of(number, 1, share) for number in range(count)]
        if self.problem.host is not None:
            self._at_most([term for terms in moved for term in terms], self.problem.host * share)
        held = [self._of(number, 0, share) for number in range(count)]
        before: list[Terms] = [[term for terms in held[:number] for term in terms] for number in range(count)]
        waits = [[self._variable(cost=1.0) for _ in range(count)] for _ in range(2)]
        backlog = [[self._variable() for _ in range(count)] for _ in range(2)]
        there = [self._variable() for _ in range(count)]  # come in when the block's backward begins
        later = [self._variable() for _ in range(count)]  # and when it has ended
        for number in range(count):
            going, wait = backlog[0][number], waits[0][number]
            self._at_most([*before[number], (going, 1.0), *self._of(number, 2, share)], 1.0)
            if number:
                self._drains((going, wait), backlog[0][number - 1], number - 1, moved[number - 1], 4, out * time)
        everything = [term for terms in moved for term in terms]
        for number in reversed(range(count)):
            going, wait = backlog[1][number], waits[1][number]
            if number == count - 1:
                self._drains((going, wait), backlog[0][number], number, moved[number], 4, out * time)
                self._at_most([(there[number], 1.0), (wait, -into)], 0.0)
            else:
                self._drains((going, wait), backlog[1][number + 1], number + 1, [], 5, out * time)
                self._at_most([(there[number], 1.0), (later[number + 1], -1.0), (wait, -into)], 0.0)
            wanted = [term for terms in moved[number:] for term in terms]
            self._at_most([*wanted, (there[number], -1.0)], 0.0)
            self._at_most([*wanted, (later[number], -1.0)], 0.0)
            self._at_most([(there[number], 1.0), (going, 1.0), *_minus(everything)], 0.0)
            self._at_most([(later[number], 1.0), *_minus(everything)], 0.0)
            self._at_most([(later[number], 1.0), (there[number], -1.0), *self._of(number, 5, -into * time)], 0.0)
            gradients = self.clock.gradients[number] * share
            own = [*before[number], *self._of(number, 3, share), (going, 1.0)]
            self._at_most([*own, (later[number], 1.0), *_minus(wanted)], 1.0 - gradients)
            if number and self.whole:
                self._begun(number - 1, own, 1.0 - gradients, waits[1][number - 1])

    def _begun(self, number: int, beside: Terms, room: float, wait: int) -> None:
        """A copy in either has all its room while the backward before its own runs, or takes all its time after it."""
        early, late = [], []
        for variable, row in zip(self.chosen[number], self.clock.rows[number], strict=True):
            if row[1]:
                begun = self._variable(binary=True)
                self._at_most([(begun, 1.0), (variable, -1.0)], 0.0)
                early.append((begun, row[1] / self.unit))
                late += [(variable, row[7] / self.plain), (begun, -row[7] / self.plain)]
        if early:
            self._at_most([*beside, *early], room)
            self._at_most([*late, (wait, -1.0)], 0.0)

    def _drains(
        self, now: tuple[int, int], before: int, number: int, moved: Terms, seconds: int, rate: float
    ) -> None:  # fmt: skip
        """A backlog after a block has run, which has then moved something, and after a wait."""
        going, wait = now
        waited = (wait, -rate * self.plain)
        self._at_most([(before, 1.0), *moved, *self._of(number, seconds, -rate), waited, (going, -1.0)], 0.0)
        if moved:
            self._at_most([*moved, waited, (going, -1.0)], 0.0)

    def bound(self, time_limit: Seconds, *, relaxed: bool = False) -> Seconds:
        """No plan takes less; infinite where none fits."""
        terms = [(row, variable, factor) for row, (one, _) in enumerate(self.rows) for variable, factor in one]
        row, column, factor = (np.array(part) for part in zip(*terms, strict=True))
        matrix = coo_array((factor, (row, column)), shape=(len(self.rows), self.count)).tocsr()
        found = milp(
            np.array(self.cost), integrality=np.zeros(self.count) if relaxed else np.array(self.binary),
            bounds=Bounds(np.zeros(self.count), np.array(self.upper)),
            constraints=LinearConstraint(matrix, ub=np.array([limit for _, limit in self.rows])),
            options={"time_limit": time_limit, "mip_rel_gap": 2e-4},
        )  # fmt: skip
        if found.status == 2:
            return inf
        least = found.fun if relaxed else found.mip_dual_bound
        return float(least) * self.plain if least is not None else self.plain


def _minus(terms: Terms) -> Terms:
    return [(variable, -factor) for variable, factor in terms]
