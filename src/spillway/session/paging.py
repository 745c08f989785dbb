"""Steps of the block engine that do not fit block by block: they run inside the tensor engine, under the same budget.

NOTE [Paged]. Every block is recomputed, and every op is watched: what a block needs at once, inside of its forward, its
second run or its backward, and what the optimizer needs, leaves in the middle of it. The engines meet in the account
alone: in such a step the tensor engine keeps it, op by op, and nobody looks at the block engine's meter.
A step is paged

 1. from its begin, if one of its size was paged, refused or lent memory before, or if what is away since an earlier one
    does not fit beside the rest; no more, `RETURNS` times, where a plan for its blocks is known to hold by then;
 2. from a forward on, if it is told there that it will not fit, or if the model was rebuilt within the step; from a
    backward on that makes a graph of itself, if no step was measured that did; from its optimizer on, if that needs
    more than is left. Blocks give up before what they hold, to be recomputed under the watch. What the step has made
    until then and has no name is not known storage by storage: so many bytes count as resident to its end, once more
    when an op comes to them.

Under `auto` steps that are paged from their begin, in which blocks run plainly, are recorded and planned where they
come back often (`planned_steps.watching`).

NOTE [Lent]. Plans go by what was measured, and a step may take more all the same: other layers are dropped at random,
other experts chosen. Where the arena traces it, what has no room in the budget lies in the spill directory then, as
what ops take for themselves does under the tensor engine. Nothing is learned of such a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import torch

from spillway.engines.blocks.trace import AbstractTrace
from spillway.engines.tensors.probe import smallest_budget
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.engines.tensors.torch_patches import others_open
from spillway.engines.tensors.turns import Taker, end_turn, take_turn
from spillway.errors import BudgetInfeasible, SpillFullError, SpillwayError
from spillway.ir import Kind
from spillway.methods.planned import SelfPlanned
from spillway.session.called import Calls
from spillway.session.input_sizes import Shape
from spillway.session.planned_steps import PlannedSteps
from spillway.units import Bytes

UNINTERRUPTED = ("spillway.session.abstract_session", "spillway.session.paging", "spillway.engines.tensors.")
"""Modules that are never interrupted half-way in a paged step: the model's own code runs inside of all others."""

RETURNS: Final = 2
"""How often a size comes back to its blocks at most, as long as the budget is not raised."""

Like: TypeAlias = tuple[str, Shape]
Named: TypeAlias = Callable[[], Iterable[tuple[Kind, torch.Tensor]]]


@final
@dataclass(slots=True)
class _Left:
    """A size whose steps are paged."""

    missed: Bytes = 0
    """By how much a step took more than there was room for."""
    returns: int = RETURNS
    """How often it may still come back."""


@final
class Paging:
    """The tensor engine under a block session. See NOTE [Paged]. `base_rss` is what the process takes beside tensors,
    if freed memory is to be returned."""

    def __init__(
        self, engine: TensorEngine, base_rss: Bytes | None, models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:  # fmt: skip
        self.engine = engine
        policy = engine.controller.policy
        self.plans = PlannedSteps(policy, engine, models, optimizers) if isinstance(policy, SelfPlanned) else None
        self._base_rss = base_rss
        self._sizes: dict[Like, _Left] = {}
        self._back: dict[Like, _Left] = {}
        self._calls = Calls()
        self._running = False
        self._nameless: Bytes = 0

    def remember(self, size: Like, missed: Bytes = 0) -> None:
        """Steps like this one are paged from here on; it took so much more than there was room for."""
        left = self._sizes.setdefault(size, self._back.pop(size, _Left()))
        left.missed = max(left.missed, missed)

    @property
    def room_for_copies(self) -> Bytes:
        """The largest storage that can be there beside a copy of it, with something to spare."""
        return (self.engine.budget.allowed - self.engine.never_leaves()) * 9 // 20

    def refused(self, size: Like) -> None:
        """The same, for good: what was refused once is not tried again."""
        self.remember(size)
        self._sizes[size].returns = 0

    def forget(self, size: Like) -> None:
        """They need not be."""
        self._sizes.pop(size, None)

    def forget_all(self) -> None:
        """Whether they need be is found out again: the budget is larger."""
        self._sizes.clear()
        self._back.clear()

    @property
    def left(self) -> int:
        """How many sizes are paged."""
        return len(self._sizes)

    def come_back(self, size: Like, holds: Callable[[Bytes], bool]) -> None:
        """Steps like this one are not paged any more, if `holds` says that their plan leaves so many bytes free."""
        left = self._sizes.get(size)
        if left is not None and left.returns and holds(left.missed):
            left.returns -= 1
            self._back[size] = self._sizes.pop(size)

    def missed(self, size: Like) -> Bytes:
        """What a plan has to leave free for steps of a size that has come back after it was lent memory; else 0."""
        return self._back[size].missed if size in self._back else 0

    def guards(self, trace: AbstractTrace, start: Bytes) -> bool:
        """Whether what a step takes above the budget is lent from here on, see NOTE [Lent]. Its trace is not yet
        marked; `start` is what was there when it began."""
        return trace.guard(self.engine.budget.allowed - start, self.engine.backend.unwatched)

    def lent(self, named: Named) -> Bytes:
        """The trace of such a step has ended: what it was lent at most. What is left of that is in memory afterwards,
        where it has a name and there is room for it."""
        lender = self.engine.backend.unwatched
        lent = lender.lent() if lender is not None else 0
        if lent:
            self.engine.bring_into_memory(tensor for _, tensor in named())
        return lent

    def knows(self, size: Like) -> bool:
        """Whether a step like this one is paged from its begin, whatever is away."""
        return size in self._sizes

    def wanted(self, size: Like, named: Bytes) -> bool:
        """Whether a step of this size and signature has to be paged from its begin; otherwise everything is back.
        `named` are the bytes of what is known by name."""
        controller, budget = self.engine.controller, self.engine.budget
        if size in self._sizes or (controller.away and named > budget.allowed):
            return True
        if controller.away:
            with controller.lock:
                controller.restore_all(list(self.engine.table.values()))
        return False

    def begin(
        self, step: Taker, named: Named, signature: str, models: Sequence[torch.nn.Module], nameless: Bytes,
        shut: Callable[[], None], kind: Hashable | None, batch: Any,
    ) -> None:  # fmt: skip
        """Every op of the step is watched from here on.

        Args:
            models: Whose calls a refusal will ask about.
            nameless: Bytes that the step has made until now.
            shut: Called where the step is lost.
            kind: Steps of one kind may have a plan; None for one that is to have none.

        Raises SessionError if a step of another session is running, and BudgetInfeasible if what cannot leave is more
        than the budget.
        """
        engine = self.engine
        self._calls = Calls()
        plans = [] if self.plans is None else [self.plans.end]
        abandon = functools.partial(self._calls.abandon, *plans, engine.close, shut)
        take_turn(engine, step, lambda: (tensor for _, tensor in named()), abandon, alone=not others_open(engine))
        self._running = True
        if self.plans is not None:
            self.plans.begin(kind, batch)
        engine.begin_step(named(), base_rss=self._base_rss, signature=signature)
        with engine.controller.lock:
            engine.controller.make_room(nameless, "what the step made before its first forward")
        self._nameless = nameless
        engine.budget.take(nameless)
        self._calls.begin(models)

    def end(self) -> SpillwayError | None:
        """Nothing is watched any more. Called again, it does what was not done. Returns why it did not end under the
        budget, if it did not."""
        self._calls.end()
        if not self._running:
            return None
        late: SpillwayError | None = None
        nameless, self._nameless = self._nameless, 0
        self.engine.budget.free(nameless)
        try:
            self.engine.end_step()
        except (BudgetInfeasible, SpillFullError) as at_the_end:
            late = at_the_end  # everything is back all the same
        finally:
            if self.plans is not None:
                self.plans.end()
            end_turn(self.engine)
            self.engine.budget.reserve(0)  # for what the account does not see of this engine's
        self._running = False
        return late

    def told(
        self, refusal: BudgetInfeasible, models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer], batch: Any, beside: Sequence[torch.Tensor],
    ) -> BudgetInfeasible:  # fmt: skip
        """A refusal of a paged step, with the budget to ask for; `beside` is what the session has in every step."""
        return smallest_budget(refusal, self.engine, models, optimizers, batch, self._calls.found, beside)

    def close(self) -> None:
        """Everything comes back."""
        try:
            self.end()
        finally:
            self.engine.close()
