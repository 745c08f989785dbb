"""Checkmate: the recomputation that takes least time under a budget, by mixed-integer programming.

Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020, arXiv:1910.02653.
The program (section 4) stands in `milp.py`, two-phase rounding of its relaxation (section 5) too; what are nodes and
data in `graph.py`; how a solution becomes gaps in `gaps.py`. SciPy's HiGHS solves it, where the paper has Gurobi.

Differs from the paper in:

- Several outputs. A node of the paper has one; here a node makes data that are kept or freed one by one.
- Coarsening. A step of more than `most_nodes` ops is cut into intervals of ops, and an interval runs as a whole. What
  is optimal for them, and the bound that the relaxation gives, is so **for the coarsened problem alone**: a finer plan
  may be faster than the bound. `Solution.coarsened` says which it is. Where the budget is too small for the intervals,
  they are cut finer while time lasts.
- What an op needs while it runs beside its outputs, and what no plan frees, counts (the paper leaves it out).
- A plan cannot say everything that Checkmate's schedule says (`gaps.py` lists what). Where the plan of a schedule needs
  more than is allowed, the program is solved again for less, by as much. `Solution.bound` stays that of the budget.
- Nodes of the backward run once unless `backward_again` asks for more: half of the variables, for schedules that are
  hardly ever better. `lower_bound` leaves them free to run again, so that its bound is one for the paper's program.
- When time is up the best plan so far is taken, rounding included, and `Solution.gap` says how far it may be off. Plain
  schedules of checkpoints (`Program.checkpoints`) compete: HiGHS takes no schedule to begin with, as Gurobi does.

Not implemented: the paper's cost model of a TPU and its TensorFlow graphs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, final

from spillway.errors import BudgetInfeasible, NoPlanFound, UsageError
from spillway.ir import Gap, Plan
from spillway.ir.account import account, comes_back
from spillway.ir.plan import Recompute
from spillway.ir.recipes import replayed
from spillway.methods.absent_bytes import load_solver
from spillway.methods.base import AbstractPlanner, Problem
from spillway.methods.checkmate.gaps import gaps_of, without_idle_ends
from spillway.methods.checkmate.graph import Graph, graph_of
from spillway.methods.checkmate.milp import INFEASIBLE, OPTIMAL, Answer, Program
from spillway.units import Bytes, Seconds, format_seconds

THRESHOLDS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Where two-phase rounding cuts."""

MARGIN: Final = 0.01
"""Share of the budget that the relaxation leaves free before it is rounded: the paper's epsilon."""

TIGHTENED: Final = 6
"""How often the program is solved for less than the budget."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A plan, and how good it is known to be."""

    plan: Plan
    """The plan."""
    seconds: Seconds
    """Time of all ops of the step and of its replays, without any copy."""
    bound: Seconds
    """No schedule of these nodes takes less under the budget, by the program that was solved."""
    proven: bool
    """Whether it is an optimum of the program for the whole budget."""
    nodes: int
    """Nodes of the program."""
    coarsened: bool
    """Whether nodes are several ops, so that all of this is about a coarser problem than the step's own."""
    tightened: Bytes
    """Bytes of the budget given up because a plan cannot say what the schedule says."""

    @property
    def gap(self) -> float:
        """How much longer than the bound the plan takes, as a share of the bound."""
        return self.seconds / self.bound - 1 if self.bound else 0.0


@final
class Checkmate(AbstractPlanner):
    """The paper's program.

    Arguments:
        time_limit: Seconds for all solving together. Loading SciPy and building the program come on top.
        most_nodes: Nodes beyond which the step is coarsened, at first. The program has about this number squared of
            binaries.
        backward_again: Whether nodes of the backward may run again too.
    """

    name = "checkmate"

    def __init__(self, time_limit: Seconds = 60.0, most_nodes: int = 40, *, backward_again: bool = False) -> None:
        if not (time_limit > 0 and most_nodes >= 3):
            raise UsageError(f"Checkmate needs time and 3 nodes or more, got {time_limit} s and {most_nodes} nodes.")
        self.time_limit = time_limit
        self.most_nodes = most_nodes
        self.backward_again = backward_again

    def plan(self, problem: Problem) -> Plan:
        """The best plan found within the time limit.

        Raises BudgetInfeasible if the budget is too small for the nodes, NoPlanFound if time was up before any plan
        was found, and UsageError without SciPy.
        """
        return self.solve(problem).plan

    def solve(self, problem: Problem) -> Solution:
        """As `plan`, with what is known about it."""
        load_solver("Checkmate")
        deadline, most_nodes = time.monotonic() + self.time_limit, self.most_nodes
        failure: BudgetInfeasible | NoPlanFound | None = None
        while True:
            graph = graph_of(problem.step, most_nodes, backward_again=self.backward_again)
            search = _Search(graph, problem.allowed, deadline)
            search.run()
            if search.best is not None:
                break
            failure = failure or search.failure(self.time_limit)  # the first one knows what its nodes need
            if not (search.infeasible and graph.coarsened and time.monotonic() < deadline):
                raise failure
            most_nodes *= 2
        seconds, gaps, peak, tightened = search.best
        plan = Plan(step=problem.step.digest(), allowed=problem.allowed, projected=peak, gaps=gaps)
        return Solution(
            plan=plan, seconds=seconds, bound=search.bound, proven=search.proven, nodes=len(graph.nodes),
            coarsened=graph.coarsened, tightened=tightened,
        )  # fmt: skip


def lower_bound(problem: Problem, time_limit: Seconds = 60.0, most_nodes: int = 40) -> Seconds:
    """Seconds that no schedule of the step's nodes goes below within the budget, if it recomputes and does not move.

    The optimum of Checkmate's linear relaxation. If the step has more than `most_nodes` ops this is a bound for the
    coarsened problem alone. It is the time of the plain step if the solver ran out of time.

    Raises BudgetInfeasible if the relaxation has no solution, and UsageError without SciPy.
    """
    graph = graph_of(problem.step, most_nodes)
    if max(_needs(graph)) > problem.allowed:
        raise _infeasible(graph, problem.allowed)
    answer = Program(graph, problem.allowed).solve(time_limit, relaxed=True)
    if answer.status == INFEASIBLE:
        raise _infeasible(graph, problem.allowed)
    return answer.bound


class _Search:
    """Looks for the best plan until the deadline."""

    def __init__(self, graph: Graph, allowed: Bytes, deadline: float) -> None:
        self.graph, self.allowed, self.deadline = graph, allowed, deadline
        self.best: tuple[Seconds, tuple[Gap, ...], Bytes, Bytes] | None = None
        self.bound: Seconds = sum(node.seconds for node in graph.nodes)
        self.proven = False
        self.infeasible = False
        self.nearest: Bytes | None = None
        """The lowest peak of a plan that was over the budget."""

    def run(self) -> None:
        step = self.graph.step
        if account(step, (), self.graph.lives).peak <= self.allowed:
            self.proven = True
            self.best = self.bound, (), step.plain_peak(), 0
            return
        if max(_needs(self.graph)) > self.allowed:
            self.infeasible = True
            return
        relaxed = Program(self.graph, self.allowed).solve(self._left(), relaxed=True)
        self.bound, self.infeasible = relaxed.bound, relaxed.status == INFEASIBLE
        if not self.infeasible:
            self._keep_checkpoints()
            self._solve_exactly()
        if not (self.infeasible or self.proven):
            self._round()

    def _left(self) -> Seconds:
        return self.deadline - time.monotonic()

    def _keep_checkpoints(self) -> None:
        """Whatever the solver finds, it is no worse than checkpoints."""
        program = Program(self.graph, self.allowed)
        for keep in program.checkpoints():
            if self._left() <= 0:
                return
            answer = program.rounded(keep, 0.5)
            if answer is not None:
                self._consider(answer, self.allowed)

    def _solve_exactly(self) -> None:
        budget = self.allowed
        for attempt in range(TIGHTENED):
            if attempt and self._left() <= 0:
                return
            # A schedule that a plan cannot say leaves half of the time to look for another.
            answer = Program(self.graph, budget).solve(self._left() / 2)
            if not attempt:
                self.infeasible = answer.status == INFEASIBLE
                self.bound = max(self.bound, answer.bound)
            over = self._consider(answer, budget) if answer.keep else None
            if not over:
                self.proven = answer.status == OPTIMAL and attempt == 0 and over == 0
                return
            budget -= over

    def _consider(self, answer: Answer, budget: Bytes) -> Bytes | None:
        """Take the answer's plan if it is the best. Returns the bytes by which it is over the budget, None without."""
        gaps = gaps_of(self.graph, answer)
        if gaps is None:
            return None
        peak = account(self.graph.step, gaps, self.graph.lives).peak
        if peak > self.allowed:
            self.nearest = min(peak, self.nearest if self.nearest is not None else peak)
            return peak - self.allowed
        gaps = without_idle_ends(self.graph, gaps, self.allowed)
        peak = account(self.graph.step, gaps, self.graph.lives).peak
        seconds = self._seconds(gaps)
        if self.best is None or seconds < self.best[0]:
            self.best = seconds, gaps, peak, self.allowed - budget
        return 0

    def _seconds(self, gaps: tuple[Gap, ...]) -> Seconds:
        step, lives = self.graph.step, self.graph.lives
        back = [
            (gap.end, gap.value, gap.home)
            for gap in gaps
            if isinstance(gap.home, Recompute) and comes_back(gap, lives[gap.value], len(step.ops))
        ]
        again = sum(step.ops[op].seconds or 0.0 for op in replayed(back, step))
        return sum(op.seconds or 0.0 for op in step.ops) + again

    def _round(self) -> None:
        """Two-phase rounding; where that gives no plan, for less and less of the budget."""
        budget = int(self.allowed * (1 - MARGIN))
        for _ in range(TIGHTENED):
            program = Program(self.graph, budget)
            relaxed = program.solve(max(self._left(), 1.0), relaxed=True)
            for threshold in THRESHOLDS:
                answer = program.rounded(relaxed.keep, threshold)
                if answer is not None:
                    self._consider(answer, budget)
            if self.best is not None or not relaxed.keep or self._left() <= 0:
                return
            budget = int(budget * 0.93)

    def failure(self, time_limit: Seconds) -> BudgetInfeasible | NoPlanFound:
        if self.infeasible:
            return _infeasible(self.graph, self.allowed)
        needs = f"; the nearest plan needs {self.nearest} bytes" if self.nearest is not None else ""
        return NoPlanFound(
            f"Checkmate found no plan within {self.allowed} bytes in {format_seconds(time_limit)}{needs}: allow more "
            f"time, fewer nodes or a larger budget."
        )


def _needs(graph: Graph) -> list[Bytes]:
    """Bytes that each node needs by itself, whatever else is gone."""
    return [
        node.running + sum(graph.data[index].nbytes for index in {*node.reads, *node.makes}) for node in graph.nodes
    ]


def _infeasible(graph: Graph, allowed: Bytes) -> BudgetInfeasible:
    """The largest node by itself is what any plan of these nodes needs; together they may need more."""
    needs = _needs(graph)
    worst = max(range(len(needs)), key=needs.__getitem__)
    node = graph.nodes[worst]
    smallest = max(needs[worst], allowed + 1)
    return BudgetInfeasible(
        needed=smallest, allowed=allowed, op=graph.step.ops[node.first].name, op_index=node.first,
        smallest_budget=smallest, exact=False,
    )  # fmt: skip
