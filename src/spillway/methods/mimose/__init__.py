"""Mimose: which blocks are recomputed, decided for every input size.

Liao et al., "Mimose: An Input-Aware Checkpointing Planner for Efficient Training on GPU", arXiv:2209.02478. The two
phases (section 4.1, "sheltered" and "responsive execution") are `Mimose.phase`; the estimator (4.3) stands in
`estimator.py` and `exact.py`, Algorithm 1 (4.4) in `scheduler.py`, the plan cache (5) in `cache.py`. What is measured,
and so the shuttling collector (4.2), is the engine's: `Decision` says what it has to do in a step, `Mimose.end` takes
what it measured. With two forwards (`Options.forwards`) it is what the first one left, of those that the data filter
(Fig. 12, `data_filter.py` of the block engine) lets count; with one, what the engine counts as it is saved, which takes
no filter.

Differs from the paper in: every field of `Options`, which gives the paper's choice, Spillway's, and the reason.
`Mimose.as_published` has the paper's. In both:

- Blocks are known by the order of their forwards, not by a number in their names.
- With fewer measured sizes than a quadratic has coefficients, the polynomial is of lower degree.
- A budget that no selection meets ends Algorithm 1 and is reported (`BlockPlan.shortfall`); the listing loops.
- What a block saves is what recomputing it frees, the public code's variant for pictures, which any output suits.

Not implemented: sub-blocks chosen by dynamic programming, and attention tried in place of a whole block (public code).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Self, final

from spillway.methods.by_block import (
    AbstractBlockMethod,
    BlockPlan,
    BlockSample,
    Decision,
    Forecast,
    InputSize,
    Phase,
    StepSample,
)
from spillway.methods.mimose.cache import PlanCache
from spillway.methods.mimose.choices import Options
from spillway.methods.mimose.planning import PublishedPlanning, SimulatedPlanning
from spillway.units import Bytes

FEWEST: Final = 4
"""Steps of the collecting phase even where it ends early: a quadratic takes three sizes, and one more to be sure of."""


@final
class Mimose(AbstractBlockMethod):
    """Decides before each step, learns after it. One object belongs to one training. `options` are Spillway's choices
    if not given."""

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self.name = "mimose" if self.options.checks_peak else "mimose-published"
        self.takes_vectors = self.options.checks_peak
        self.forwards = self.options.forwards
        self.cache = PlanCache(
            self.options.interval,
            share=self.options.similar,
            batched=self.options.batched,
            trusting=not self.options.checks_peak,
        )
        self._steps = 0
        """Of the collecting phase, that have ended."""
        self._collected: set[InputSize] = set()
        """Sizes at which blocks were measured in it."""
        self._settled = False
        """Whether it ended early, with nothing left to measure."""
        kind = SimulatedPlanning if self.options.checks_peak else PublishedPlanning
        self._planning: SimulatedPlanning | PublishedPlanning = kind(self.options)

    @classmethod
    def as_published(cls, options: Options | None = None) -> Self:
        """The paper's choices, with the arguments of `Options.as_published` where they are given."""
        return cls(options or Options.as_published())

    @classmethod
    def static(cls, size: InputSize) -> Self:
        """One plan for the largest input, used for all: what the paper's Fig. 13 calls Sublinear."""
        static = cls(Options(static_size=size))
        static.name = "static"
        return static

    def fresh(self, *, batched: bool) -> Self:
        other = type(self)(replace(self.options, batched=batched))
        other.name = self.name
        return other

    @property
    def phase(self) -> Phase:
        """Of the step that comes next."""
        over = self._settled or self._steps >= self.options.iterations
        return Phase.PLANNED if over else Phase.COLLECTING

    @property
    def collecting(self) -> bool:
        return self.phase is Phase.COLLECTING or not self._planning.ready

    def begin(self, size: InputSize, available: Bytes) -> Decision:
        """Until every block and the whole model were measured, and in the collecting phase, nothing is kept."""
        if self.collecting:
            wanted = self.options.collects_known_sizes or size not in self._collected
            measures = not self._planning.ready or (self.phase is Phase.COLLECTING and wanted)
            return Decision(Phase.COLLECTING, BlockPlan.nothing_kept(size, available), measures)
        return Decision(Phase.PLANNED, self.plan(size, available), False)

    def plan(self, size: InputSize, available: Bytes) -> BlockPlan:
        """The plan of this size or a similar one, or of `Options.static_size`: a remembered one, or a new one that is
        remembered.

        Raises ValueError before every block and the whole model were measured.
        """
        static = self.options.static_size
        rounded = self.cache.rounded(static if static is not None and len(static) == len(size) else size)
        available -= self.options.reserve
        planning = self._planning
        look = planning.looked_at if isinstance(planning, SimulatedPlanning) else None
        plan = self.cache.find(rounded, available, look)
        if plan is None:
            plan = planning.plan(rounded, available)
            self.cache.put(plan)
        return plan

    def end(self, step: StepSample, blocks: Sequence[BlockSample] = ()) -> None:
        """Steps that do not collect may bring what they counted anyway, of blocks that were kept."""
        collecting = self.collecting
        if collecting or self.options.corrects:
            whole = self.options.first_counts or self._steps > 0
            if self._planning.observe(step, blocks, whole=whole):
                self.cache.doubt()
        if collecting:
            self._steps += 1
            if blocks:
                self._collected.add(step.size)
            self._settled |= self.options.ends_early and self._steps >= FEWEST and self._planning.settled

    def forget_plans(self) -> None:
        self.cache.forget()

    def nbytes(self, block: int, size: InputSize) -> Bytes:
        """What a block is expected to save at this size. Raises ValueError if it was not measured."""
        return self._planning.nbytes(block, size)

    def forecast(self, size: InputSize) -> Forecast | None:
        """What a step of this size is expected to need; None where plans are not simulated (`Options.checks_peak`), and
        before every block and the whole model were measured."""
        planning = self._planning
        return planning.forecast(size) if isinstance(planning, SimulatedPlanning) and planning.ready else None


__all__ = ["Mimose", "Options"]
