"""Checkmate's program: which nodes run in which stage, and what is kept from one stage to the next.

Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020, arXiv:1910.02653,
section 4: R[t, i] says that stage t runs node i, S[t, d] that datum d is kept from stage t - 1 into stage t. Frontier
advancing (section 4.6): stage t runs node t for the first time, and nothing after it. U[t, k] is what is in memory when
node k of stage t has run (equations 3 to 5), FREE[t, d, k] that d is freed then (equations 6 to 8).

FREE is a product of binaries. The paper linearises it with a sum of hazards (equation 7); here each hazard has a
constraint of its own, FREE <= 1 - hazard. The integer solutions are the same, FREE need not be declared integer, and
the relaxation is tighter.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import final

from spillway.methods.checkmate.graph import Graph
from spillway.methods.linear_program import GAP, LinearProgram
from spillway.units import Bytes, Seconds

Terms = list[tuple[int, float]]
"""Variables with their coefficients."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the solver found."""

    run: frozenset[tuple[int, int]]
    """Stages and nodes that run then, beside the stage's own node."""
    keep: frozenset[tuple[int, int]]
    """Stages, and data that are kept into them."""


@final
class Program:
    """The variables and constraints for one graph under one budget."""

    def __init__(self, graph: Graph, allowed: Bytes) -> None:
        self.graph = graph
        # Bytes as shares of the budget: a solver's tolerances are absolute.
        self.unit = max(allowed, 1)
        self.scale = sum(node.seconds for node in graph.nodes) or 1.0
        self.program = LinearProgram()
        self.until = _useful_until(graph)
        self.run, self.keep = self._decisions()
        self._correct()
        self._memory()

    def _decisions(self) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
        run, keep = {}, {}
        for number, node in enumerate(self.graph.nodes):
            last = min(node.last_again, max((self.until[datum] for datum in node.makes), default=number))
            for stage in range(number, last + 1):
                own = stage == number
                cost = node.seconds if own else node.seconds_again
                run[stage, number] = self.program.variable(
                    cost=cost / self.scale, lower=float(own), upper=1.0, whole=not own
                )
        for index, datum in enumerate(self.graph.data):
            for stage in range(datum.maker + 1, self.until[index] + 1):
                keep[stage, index] = self.program.variable(upper=1.0, whole=True)
        return run, keep

    def _correct(self) -> None:
        """Equations 1b and 1c: what a node reads is there; what is kept was there."""
        data = self.graph.data
        for (stage, number), running in self.run.items():
            for index in self.graph.nodes[number].reads:
                self.program.row((running, 1.0), *self._available(stage, index), most=0.0)
        for (stage, index), kept in self.keep.items():
            if stage - 1 > data[index].maker:
                self.program.row((kept, 1.0), *self._available(stage - 1, index), most=0.0)

    def _available(self, stage: int, index: int) -> Terms:
        maker = self.graph.data[index].maker
        found = (self.run.get((stage, maker)), self.keep.get((stage, index)))
        return [(variable, -1.0) for variable in found if variable is not None]

    def _memory(self) -> None:
        """Equations 3 to 8, stage by stage."""
        by_stage: dict[int, list[int]] = {}
        for stage, index in self.keep:
            by_stage.setdefault(stage, []).append(index)
        for stage in range(len(self.graph.nodes)):
            before: Terms = [(self.keep[stage, d], self._share(d)) for d in by_stage.get(stage, ())]
            for number in range(stage + 1):
                if (stage, number) in self.run:
                    before = self._after(stage, number, before)

    def _share(self, index: int) -> float:
        return self.graph.data[index].nbytes / self.unit

    def _after(self, stage: int, number: int, before: Terms) -> Terms:
        """Bound memory while the node runs; what is there after it has run and freed."""
        node, running = self.graph.nodes[number], self.run[stage, number]
        used = self.program.variable()
        made = sum(self._share(index) for index in node.makes)
        self.program.row((used, 1.0), (running, -made), *((v, -c) for v, c in before), least=0.0, most=0.0)
        if stage == number:
            self.program.row((used, 1.0), most=1.0 - node.running / self.unit)
        else:
            given = self.graph.nodes[stage].given
            self.program.row((used, 1.0), (running, node.again / self.unit), most=1.0 - given / self.unit)
        return [(used, 1.0), *((self._freed(stage, number, d), -self._share(d)) for d in (*node.reads, *node.makes))]

    def _freed(self, stage: int, number: int, index: int) -> int:
        """FREE: the node ran, no later one of the stage reads the datum, and it is not kept."""
        freed = self.program.variable(upper=1.0)
        hazards = [self.run.get((stage, reader)) for reader in self.graph.data[index].readers if reader > number]
        hazards.append(self.keep.get((stage + 1, index)))
        for hazard in hazards:
            if hazard is not None:
                self.program.row((freed, 1.0), (hazard, 1.0), most=1.0)
        self.program.row((freed, 1.0), (self.run[stage, number], -1.0), most=0.0)
        return freed

    def solve(self, time_limit: Seconds, *, below: Seconds = inf) -> Answer | None:
        """Solve it within about `time_limit` seconds, for schedules that take less than `below`: HiGHS takes no
        schedule to begin with, as Gurobi does, and prunes by this instead. None without a solution, and where nothing
        can be kept."""
        spent = ((variable, cost) for variable, cost in enumerate(self.program.cost) if cost)
        self.program.row(*spent, most=below / self.scale)
        found = self.program.solve("Checkmate", time_limit=max(time_limit, 0.1), mip_rel_gap=GAP)
        if found.x is None or not self.keep:
            return None
        runs = (key for key, variable in self.run.items() if key[0] != key[1] and found.x[variable] > 0.5)
        keeps = (key for key, variable in self.keep.items() if found.x[variable] > 0.5)
        return Answer(run=frozenset(runs), keep=frozenset(keeps))


def _useful_until(graph: Graph) -> list[int]:
    """For every datum the last stage in which it can be of use: read there, or to make what is."""
    until = [max(datum.readers) for datum in graph.data]
    for index in sorted(range(len(graph.data)), key=lambda index: -graph.data[index].maker):
        for reader in graph.data[index].readers:
            again = graph.nodes[reader].last_again
            until[index] = max(until[index], *(min(until[d], again) for d in graph.nodes[reader].makes), 0)
    return until
