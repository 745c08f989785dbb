"""A lower bound for steps of any length: what has to run again behind one op, whatever was kept in front of it.

NOTE [The program of a cut]. Take a schedule that runs every op of the step in its order, runs some of them again in
between, moves nothing and stays within the budget; and one op t of the step. Let k[v] be 1 if the content of value v is
in memory while t runs for the first time, and r[i] if op i, which ran before t, runs again at any time after that. Then

 1. k[v] = 1 for what t reads. What no op can make again, a source or the result of an op that is not replayable, is
    there if an op from t on reads it, or if it outlives the step.
 2. What an op from t on reads and an op before t had made was in memory while t ran, or was made again since:
    k[v] + r[maker of v] >= 1. So is what outlives the step.
 3. An op that runs again reads too: r[i] <= k[u] + r[maker of u] for every u that it reads and that was made before t.
    What t itself and the ops behind it make costs nothing here.
 4. While t runs there are the storages of what it reads and makes, and the contents with k[v] = 1, each in bytes of its
    own: two versions of one storage differ, so that both cannot be in one place. Versions of the storages that t reads
    and makes are counted once. Together they are no more than the budget.
 5. It takes the seconds of the step and at least those of all i with r[i] = 1, each once.

So k and r of every such schedule satisfy the program, whose optimum is a lower bound. Nothing was merged: variables are
values and ops of the step itself. What was merged is time, into before and after t. That is allowed because every
constraint speaks of what happened at any time since t, and costs count an op once that may have run more often; a
schedule that is fine within the two halves satisfies them all the same. Where ops are merged instead, as by intervals
that run as a whole, a finer schedule satisfies nothing of the kind, and the optimum is no bound for it.

Every t gives a bound, the largest of them is one; and where one of the programs has no solution, no such schedule
exists. Relaxed, k and r between 0 and 1, it is a bound too, if a lower one. The program of one t is Checkmate's
(Jain et al., arXiv:1910.02653, section 4) with two stages in place of as many as there are ops, so it has about as many
variables as the step has ops, not their square.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Final, final

from spillway.errors import BudgetInfeasible
from spillway.ir import Step
from spillway.ir.lives import Life
from spillway.ir.step import ValueId
from spillway.methods.linear_program import GAP, INFEASIBLE, LinearProgram
from spillway.units import Bytes, Seconds

RELAXED: Final = 24
"""Ops whose programs are relaxed to see which say most."""

EXACT: Final = 3
"""Of these, those that are solved over whole numbers."""

NODES: Final = 2_000
"""Nodes of the search for an optimum; what was proven until then is a bound all the same."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What the program of one op says."""

    op: int
    bound: Seconds
    """No schedule that only recomputes takes less; infinite if there is none."""
    gone: frozenset[ValueId]
    """Values that were made before, are wanted later, and are not in memory while it runs, in the best solution that
    was found."""


def cuts(step: Step, lives: Sequence[Life], allowed: Bytes) -> list[Cut]:
    """The programs that say most, the highest bound first; empty if the step fits as it is.

    Counts its work, and looks at no clock: the same step and budget have the same cuts.

    Raises BudgetInfeasible if no schedule that only recomputes stays within so little, and UsageError without SciPy.
    """
    found = []
    for op in _fullest(step, allowed):
        program = _Program(step, lives, allowed, op)
        found.append(program.solved(exactly=False))
        if found[-1].bound == inf:
            needs = max(program.needs, allowed + 1)
            raise BudgetInfeasible(
                needed=needs, allowed=allowed, op=step.ops[op].name, op_index=op, smallest_budget=needs, exact=False
            )
    best = sorted(found, key=lambda cut: (-cut.bound, cut.op))[:EXACT]
    solved = [_Program(step, lives, allowed, cut.op).solved(exactly=True) for cut in best]
    both = (replace(one, bound=max(one.bound, relaxed.bound)) for one, relaxed in zip(solved, best, strict=True))
    return sorted(both, key=lambda cut: (-cut.bound, cut.op))


def _fullest(step: Step, allowed: Bytes) -> list[int]:
    """Ops during which the plain step is over the budget: the fullest of `RELAXED` stretches of the same number."""
    levels = step.levels()
    over = [op for op, nbytes in enumerate(levels) if nbytes > allowed]
    stretches = min(RELAXED, len(over))
    bounds = [len(over) * part // stretches for part in range(stretches + 1)] if stretches else []
    return [max(over[first:end], key=lambda op: (levels[op], -op)) for first, end in pairwise(bounds)]


@final
class _Program:
    """The program of one op."""

    def __init__(self, step: Step, lives: Sequence[Life], allowed: Bytes, op: int) -> None:
        self._step, self._lives, self._op = step, lives, op
        self._unit = max(allowed, 1)  # bytes as shares of the budget: a solver's tolerances are absolute
        self._plain = sum(one.seconds or 0.0 for one in step.ops)
        self._program = LinearProgram()
        last = {value.storage: value.id for value in step.values}
        self._outlives = {version for storage, version in last.items() if step.storages[storage].present_at_end}
        self._wanted, useful, self._again = self._useful()
        self._kept = self._values(useful)
        costs = {number: (step.ops[number].seconds or 0.0) / (self._plain or 1.0) for number in sorted(self._again)}
        self._run = {number: self._program.variable(cost=cost, upper=1.0) for number, cost in costs.items()}
        self._memory()
        self._correct()

    def _useful(self) -> tuple[set[ValueId], set[ValueId], set[int]]:
        """What is wanted later of what is made before the op, that and what it is made from, and the ops that may have
        to run again for it."""
        step, lives, op = self._step, self._lives, self._op
        made = (value.id for value in step.values if lives[value.id].created < op)
        wanted = {one for one in made if one in self._outlives or max(lives[one].reads, default=-1) >= op}
        useful, again = set(wanted), set[int]()
        for one in reversed(step.ops[:op]):
            if one.replayable and not useful.isdisjoint(one.creates):
                again.add(one.number)
                useful.update(one.reads)
        return wanted, useful, again

    def _values(self, useful: set[ValueId]) -> dict[ValueId, int]:
        reads = set(self._step.ops[self._op].reads)
        kept = {}
        for value in sorted(useful):
            cannot = self._lives[value].created not in self._again
            there = float(value in reads or (cannot and value in self._wanted))
            kept[value] = self._program.variable(lower=there, upper=1.0, whole=True)
        return kept

    def _memory(self) -> None:
        step, op = self._step, self._step.ops[self._op]
        busy = {step.values[value].storage for value in (*op.reads, *op.creates)}
        self.needs = sum(step.storages[storage].nbytes for storage in busy)
        room = self._unit - self.needs
        terms = []
        for value, variable in self._kept.items():
            storage = step.values[value].storage
            if storage not in busy and step.storages[storage].nbytes:
                terms.append((variable, step.storages[storage].nbytes / self._unit))
                self.needs += int(self._program.lower[variable]) * step.storages[storage].nbytes
        self._program.row(*terms, most=room / self._unit)

    def _correct(self) -> None:
        for value in sorted(self._wanted):
            self._program.row(*self._there(value), least=1.0)
        for number, running in self._run.items():
            for value in self._step.ops[number].reads:
                self._program.row(*self._there(value), (running, -1.0), least=0.0)

    def _there(self, value: ValueId) -> list[tuple[int, float]]:
        run = self._run.get(self._lives[value].created)
        return [(self._kept[value], 1.0)] + ([(run, 1.0)] if run is not None else [])

    def solved(self, *, exactly: bool) -> Cut:
        """The optimum, or its relaxation's."""
        if not self._kept:  # nothing that was made before is wanted any more: there is nothing to choose
            return Cut(op=self._op, bound=self._plain if self.needs <= self._unit else inf, gone=frozenset())
        found = self._program.solve("Checkmate", relaxed=not exactly, node_limit=NODES, mip_rel_gap=GAP)
        if found.status == INFEASIBLE:
            return Cut(op=self._op, bound=inf, gone=frozenset())
        proven = found.mip_dual_bound if exactly else found.fun
        more = proven if proven is not None and proven > 0 and proven != inf else 0.0
        shares = found.x if found.x is not None else [1.0] * len(self._program.cost)
        there = frozenset(value for value, one in self._kept.items() if shares[one] > 0.5)
        return Cut(op=self._op, bound=self._plain * (1 + more), gone=frozenset(self._wanted - there))
