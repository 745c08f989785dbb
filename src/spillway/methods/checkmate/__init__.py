"""Checkmate: the recomputation that takes least time under a budget.

Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020, arXiv:1910.02653.
The program (section 4) stands in `milp.py`; what are nodes and data in `graph.py`; how a solution becomes gaps in
`gaps.py`. SciPy's HiGHS solves it, where the paper has Gurobi. The program has about the square of the ops in binaries,
so it is solved for short steps alone, and for what takes less than the best plan that is known already.

Every plan is made op by op, of a step of any length, by changing drafts (`draft.py`). They start from

- the rounded solution of the program of a cut (`cut.py`), in place of the paper's two-phase rounding (section 5);
- what DTR does (Kirisame et al., arXiv:2006.09616), knowing the step: nothing is gone at first, and where the step is
  over its budget what takes least time a byte to bring back goes, until it fits; op by op as the step runs, as DTR, and
  where it is fullest first;
- what other methods have gone (`starts`): plans as they are, and what policies leave absent when, where the problem
  comes with somebody who simulates them (`Problem.rehearse`). By its name it has checkpoints after every square root of
  n layers, and by bytes, and DTR and MSPS.

Then what replays make in passing stays, what has room is not gone, and the best drafts are changed on, as long as
that takes less time. `lower_bound` is the cuts': no schedule of the step's own ops goes below it.

Differs from the paper in:

- Several outputs. A node of the paper has one; here a node makes data that are kept or freed one by one.
- What an op needs while it runs beside its outputs, and what no plan frees, counts (the paper leaves it out).
- A plan cannot say everything that Checkmate's schedule says (`gaps.py` lists what). Where the plan of a schedule needs
  more than is allowed, the program is solved again for less, by as much.
- Nodes of the backward run once in the program: half of the variables, for schedules that are hardly ever better. The
  bound and the drafts leave them free to run again.

Not implemented: the paper's cost model of a TPU and its TensorFlow graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, final

from spillway.errors import NoPlanFound, UsageError
from spillway.ir import Gap, Plan, Step
from spillway.ir.account import account, comes_back
from spillway.ir.lives import Life, lives_of
from spillway.ir.plan import Recompute
from spillway.ir.recipes import replayed
from spillway.methods.base import Absence, AbstractPlanner, AbstractPolicy, Problem
from spillway.methods.checkmate.cut import Cut, cuts
from spillway.methods.checkmate.draft import Draft
from spillway.methods.checkmate.gaps import gaps_of, without_idle_ends
from spillway.methods.checkmate.graph import graph_of
from spillway.methods.checkmate.milp import Program
from spillway.methods.linear_program import GAP, load_solver
from spillway.units import Seconds, format_seconds

TIGHTENED: Final = 6
"""How often the program is solved for less than the budget."""

STARTING: Final = 500_000
"""Ops that may be looked at to make one draft fit."""

IMPROVED: Final = 3
"""Drafts, the fastest ones, that are made better."""

IMPROVING: Final = 200_000
"""Ops that may be looked at to make one of them better."""


@final
class Checkmate(AbstractPlanner):
    """The best recomputation that drafts and the paper's program find.

    Arguments:
        time_limit: Seconds after which nothing new is begun. Drafts count their work and mostly end by themselves; the
            program takes what is left.
        most_nodes: Nodes up to which the program is solved.
        starts: Make other methods; drafts start from what these have gone.
    """

    name = "checkmate"

    def __init__(
        self, time_limit: Seconds = 60.0, most_nodes: int = 40, *,
        starts: Sequence[Callable[[], AbstractPlanner | AbstractPolicy]] = (),
    ) -> None:  # fmt: skip
        if not (time_limit > 0 and most_nodes >= 0):
            raise UsageError(f"Checkmate needs time and 0 nodes or more, got {time_limit} s and {most_nodes} nodes.")
        self.time_limit = time_limit
        self.most_nodes = most_nodes
        self.starts = tuple(starts)

    def plan(self, problem: Problem) -> Plan:
        """The best plan that was found.

        Raises BudgetInfeasible if no plan that only recomputes fits, NoPlanFound if none was found that does, and
        UsageError without SciPy.
        """
        load_solver("Checkmate")
        deadline = time.monotonic() + self.time_limit
        lives = lives_of(problem.step)
        if account(problem.step, (), lives).peak <= problem.allowed:
            return problem.plan_with((), lives)
        cut = cuts(problem.step, lives, problem.allowed)[0]
        best = self._best_draft(problem, lives, cut, deadline)
        if best is None or seconds_of(problem.step, lives, best) > cut.bound * (1 + GAP):
            best = self._by_program(problem, lives, best, deadline)
        if best is None:
            raise NoPlanFound(
                f"Checkmate found no plan within {problem.allowed} bytes in {format_seconds(self.time_limit)}: allow a "
                f"larger budget."
            )
        return problem.plan_with(best, lives)

    def _by_program(
        self, problem: Problem, lives: Sequence[Life], best: tuple[Gap, ...] | None, deadline: float
    ) -> tuple[Gap, ...] | None:
        """The best plan with the program's among them."""
        step, budget = problem.step, problem.allowed
        if len(step.ops) > self.most_nodes:  # a node is one op or more
            return best
        graph = graph_of(step)
        for _ in range(TIGHTENED):
            left = deadline - time.monotonic()
            if left <= 0:
                return best
            known = seconds_of(step, lives, best) if best is not None else float("inf")
            # A schedule that a plan cannot say leaves half of the time to look for another.
            answer = Program(graph, budget).solve(left / 2, below=known * (1 - GAP))
            gaps = None if answer is None else gaps_of(graph, answer)
            if gaps is None:
                return best
            over = account(step, gaps, lives).peak - problem.allowed
            if over <= 0:
                gaps = without_idle_ends(graph, gaps, problem.allowed)
                return gaps if seconds_of(step, lives, gaps) < known else best
            budget -= over
        return best

    def _best_draft(self, problem: Problem, lives: Sequence[Life], cut: Cut, deadline: float) -> tuple[Gap, ...] | None:
        """The gaps of the draft that takes least time; None if none fits."""
        plain = sum(op.seconds or 0.0 for op in problem.step.ops)
        drafts = list[Draft]()
        for in_order, draft in self._drafts(problem, lives, cut):
            draft.share()
            if draft.repair(draft.work + STARTING, in_order=in_order):
                draft.share()
                draft.thin()
                drafts.append(draft)
            if time.monotonic() > deadline:
                break
        drafts.sort(key=lambda draft: draft.seconds)
        for draft in drafts[:IMPROVED]:
            if time.monotonic() < deadline and draft.seconds + plain > cut.bound * (1 + GAP):
                draft.improve(draft.work + IMPROVING)
        return min(drafts, key=lambda draft: draft.seconds).gaps() if drafts else None

    def _drafts(self, problem: Problem, lives: Sequence[Life], cut: Cut) -> Iterator[tuple[bool, Draft]]:
        """What is made to fit, and whether in the order of the ops: with nothing gone, with what the cut has gone, with
        what other methods have gone."""

        def draft() -> Draft:
            return Draft(problem.step, lives, problem.allowed, 1 / problem.device.out_per_second)

        yield from ((in_order, draft()) for in_order in (False, True))
        started = draft()
        started.drop(cut.gone, cut.op, STARTING)
        yield False, started
        unlimited = Problem(step=problem.step, allowed=problem.step.plain_peak() * 2, device=problem.device)
        for start in self.starts:
            method = start()
            if isinstance(method, AbstractPlanner):
                gone: Sequence[Gap | Absence] = method.plan(unlimited).gaps
            else:
                gone = problem.rehearse(method) if problem.rehearse is not None else ()
            if gone:  # or it is the first of all again
                started = draft()
                started.follow(gone)
                yield False, started


def lower_bound(problem: Problem) -> Seconds:
    """Seconds that no schedule of the step's ops goes below within the budget, if it recomputes and does not move.

    Proven in `cut.py`, for steps of any length. It is the time of the plain step if that fits.

    Raises BudgetInfeasible if no such schedule fits, and UsageError without SciPy.
    """
    found = cuts(problem.step, lives_of(problem.step), problem.allowed)
    return found[0].bound if found else sum(op.seconds or 0.0 for op in problem.step.ops)


def seconds_of(step: Step, lives: Sequence[Life], gaps: Sequence[Gap]) -> Seconds:
    """What ops and replays of a step take under a plan, without any copy."""
    back = [
        (gap.end, gap.value, gap.home)
        for gap in gaps
        if isinstance(gap.home, Recompute) and comes_back(gap, lives[gap.value], len(step.ops))
    ]
    again = sum(step.ops[op].seconds or 0.0 for op in replayed(back, step))
    return sum(op.seconds or 0.0 for op in step.ops) + again
