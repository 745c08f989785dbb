"""What no plan of `auto` can beat: its problem as a mixed integer program, relaxed where copies are concerned.

Against the clock of `methods/auto/simulate.py`: options are chosen as there; compute may wait anywhere, for any time;
the backlog of the lane out is the clock's, which is fluid; copies in are fluid, go in any order and need not be
planned, but take the lane's time and room like the clock's. So every run of the clock is a solution that takes as long.
"""

from __future__ import annotations

from math import inf

from spillway.methods.auto.block_problem import BlockProblem
from spillway.methods.auto.simulate import Clock
from spillway.methods.linear_program import LinearProgram
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
        self.program = LinearProgram()
        self.unit = max(problem.available, 1)
        self.plain = problem.plain
        self.chosen = [[self._decision() for _ in rows] for rows in self.clock.rows]
        for variables in self.chosen:
            self.program.row(*((variable, 1.0) for variable in variables), most=1.0)
            self.program.row(*((variable, -1.0) for variable in variables), most=-1.0)
        self._lanes()

    def _decision(self) -> int:
        return self.program.variable(upper=1.0, whole=True)

    def _of(self, number: int, column: int, factor: float) -> Terms:
        """A column of the clock's rows, under the option that is chosen."""
        rows = zip(self.chosen[number], self.clock.rows[number], strict=True)
        return [(variable, factor * row[column]) for variable, row in rows if row[column]]

    def _lanes(self) -> None:
        count, share, time = len(self.chosen), 1.0 / self.unit, 1.0 / self.plain
        out, into = self.problem.out_rate * self.plain * share, self.problem.in_rate * self.plain * share
        for number in range(count):
            for variable, row in zip(self.chosen[number], self.clock.rows[number], strict=True):
                self.program.cost[variable] = (row[4] + row[5]) * time
        moved = [self._of(number, 1, share) for number in range(count)]
        if self.problem.host is not None:
            self.program.row(*(term for terms in moved for term in terms), most=self.problem.host * share)
        held = [self._of(number, 0, share) for number in range(count)]
        before: list[Terms] = [[term for terms in held[:number] for term in terms] for number in range(count)]
        waits = [[self.program.variable(cost=1.0) for _ in range(count)] for _ in range(2)]
        backlog = [[self.program.variable() for _ in range(count)] for _ in range(2)]
        there = [self.program.variable() for _ in range(count)]  # come in when the block's backward begins
        later = [self.program.variable() for _ in range(count)]  # and when it has ended
        for number in range(count):
            going, wait = backlog[0][number], waits[0][number]
            self.program.row(*before[number], (going, 1.0), *self._of(number, 2, share), most=1.0)
            if number:
                self._drains((going, wait), backlog[0][number - 1], number - 1, moved[number - 1], 4, out * time)
        everything = [term for terms in moved for term in terms]
        for number in reversed(range(count)):
            going, wait = backlog[1][number], waits[1][number]
            if number == count - 1:
                self._drains((going, wait), backlog[0][number], number, moved[number], 4, out * time)
                self.program.row((there[number], 1.0), (wait, -into), most=0.0)
            else:
                self._drains((going, wait), backlog[1][number + 1], number + 1, [], 5, out * time)
                self.program.row((there[number], 1.0), (later[number + 1], -1.0), (wait, -into), most=0.0)
            wanted = [term for terms in moved[number:] for term in terms]
            self.program.row(*wanted, (there[number], -1.0), most=0.0)
            self.program.row(*wanted, (later[number], -1.0), most=0.0)
            self.program.row((there[number], 1.0), (going, 1.0), *_minus(everything), most=0.0)
            self.program.row((later[number], 1.0), *_minus(everything), most=0.0)
            self.program.row((later[number], 1.0), (there[number], -1.0), *self._of(number, 5, -into * time), most=0.0)
            gradients = self.clock.gradients[number] * share
            own = [*before[number], *self._of(number, 3, share), (going, 1.0)]
            self.program.row(*own, (later[number], 1.0), *_minus(wanted), most=1.0 - gradients)
            if number and self.whole:
                self._begun(number - 1, own, 1.0 - gradients, waits[1][number - 1])

    def _begun(self, number: int, beside: Terms, room: float, wait: int) -> None:
        """A copy in either has all its room while the backward before its own runs, or takes all its time after it."""
        early, late = [], []
        for variable, row in zip(self.chosen[number], self.clock.rows[number], strict=True):
            if row[1]:
                begun = self._decision()
                self.program.row((begun, 1.0), (variable, -1.0), most=0.0)
                early.append((begun, row[1] / self.unit))
                late += [(variable, row[7] / self.plain), (begun, -row[7] / self.plain)]
        if early:
            self.program.row(*beside, *early, most=room)
            self.program.row(*late, (wait, -1.0), most=0.0)

    def _drains(
        self, now: tuple[int, int], before: int, number: int, moved: Terms, seconds: int, rate: float
    ) -> None:  # fmt: skip
        """A backlog after a block has run, which has then moved something, and after a wait."""
        going, wait = now
        waited = (wait, -rate * self.plain)
        self.program.row((before, 1.0), *moved, *self._of(number, seconds, -rate), waited, (going, -1.0), most=0.0)
        if moved:
            self.program.row(*moved, waited, (going, -1.0), most=0.0)

    def bound(self, time_limit: Seconds, *, relaxed: bool = False) -> Seconds:
        """No plan takes less; infinite where none fits."""
        found = self.program.solve("The bound", relaxed=relaxed, time_limit=time_limit, mip_rel_gap=2e-4)
        if found.status == 2:
            return inf
        least = found.fun if relaxed else found.mip_dual_bound
        return float(least) * self.plain if least is not None else self.plain


def _minus(terms: Terms) -> Terms:
    return [(variable, -factor) for variable, factor in terms]
