"""A policy under a budget that it may pass, as the runs behind DELTA's tables were.

Spillway's controller never lets a step pass its budget. Those runs did: DELTA releases before the loss alone (its
assumption 2), whatever the backward then brings back; DTR's prototype evicts when an op has already passed the budget.
Here the controller has no bound, or the device's memory where the largest batch is asked for, and the policy a budget
that only it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, Final, cast, final

from benchmarks.record import frozen
from spillway.costs import Device
from spillway.ir import Step
from spillway.ir.timeline import Change, Kind
from spillway.methods import AbstractPolicy, Candidate, Copy, Fetch, MemoryView, Move, Proposal, Recall
from spillway.simulation.simulated_engine import Simulation, simulate
from spillway.units import Bytes, Seconds

MADE_BY_OPS: Final = frozenset({Kind.ACTIVATION.value, Kind.TEMPORARY.value})
"""What the papers' runtimes release: tensors that ops of the step made. Parameters and the like are constants."""


@final
class _SoftView:
    """The controller's view, with another budget and nothing but what ops of the step made."""

    def __init__(self, view: MemoryView, allowed: Bytes, launch: Seconds | None) -> None:
        self.allowed = allowed
        self.below = view
        self._launch = launch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    def candidates(self) -> Iterator[Candidate]:
        """Storages that may leave now and that ops made, least recently used first."""
        return (storage for storage in self.below.candidates() if cast(Any, storage).kind in MADE_BY_OPS)

    def own_seconds(self, storage: Candidate) -> Seconds:
        """As told below, or the time of a launch."""
        seconds = self.below.own_seconds(storage)
        return seconds if self._launch is None else min(seconds, self._launch)

    def recompute_seconds(self, storage: Candidate) -> Seconds:
        """As told below, or the time of as many launches as the chain has ops."""
        chain = None if self._launch is None else self.below.chain(storage)
        if chain is None or self._launch is None:
            return self.below.recompute_seconds(storage)
        return chain * self._launch


@final
class SoftBudget(AbstractPolicy):
    """Has a policy work towards a budget that nobody enforces.

    A policy that looks ahead is asked what it foresees. Another is asked to relieve whenever more than the budget is
    resident after an op, as DTR's prototype does. Should the device's memory be short, the policy is asked as usual.

    Arguments:
        policy: Decides.
        budget: The budget in bytes.
        overlapped: Whether copies run beside ops; else they are made in turn, and nothing is brought back early.
        launch: Seconds that the policy takes an op for, whatever it takes; None for the truth.
    """

    foresees = True

    def __init__(
        self, policy: AbstractPolicy, budget: Bytes, *, overlapped: bool = True, launch: Seconds | None = None
    ) -> None:
        self.name = policy.name
        self.uses_recipes = policy.uses_recipes
        self.recalls = policy.recalls
        self.looks_after = policy.looks_after
        self._policy = policy
        self._budget = budget
        self._overlapped = overlapped
        self._launch = launch
        self._view: _SoftView | None = None

    def foresee(self, view: MemoryView) -> Generator[Proposal, bool, None]:
        """What the policy foresees under its budget, or proposes while more than that is resident."""
        soft = self._soft(view)
        if self._policy.foresees:
            yield from self._passed_on(self._policy.foresee(soft), lambda: True)
        elif view.resident > self._budget:
            proposals = self._policy.relieve(soft, view.resident - self._budget)
            yield from self._passed_on(proposals, lambda: view.resident > self._budget)

    def relieve(self, view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        """Should even the device be too small."""
        return self._policy.relieve(self._soft(view), needed)

    def bring_back(self, view: MemoryView, storage: Candidate) -> Recall:
        """As the policy says."""
        return self._policy.bring_back(self._soft(view), storage)

    def _soft(self, view: MemoryView) -> MemoryView:
        if self._view is None or self._view.below is not view:
            self._view = _SoftView(view, self._budget, self._launch)
        return cast(MemoryView, self._view)

    def _passed_on(
        self, proposals: Generator[Proposal, bool, None], more: Callable[[], bool]
    ) -> Generator[Proposal, bool, None]:
        """The same proposals; without overlap a copy out is made at once and nothing comes back early."""
        granted: bool | None = None
        while more():
            try:
                proposal = next(proposals) if granted is None else proposals.send(granted)
            except StopIteration:
                return
            if self._overlapped or not isinstance(proposal, Copy | Fetch):
                granted = yield proposal
            elif isinstance(proposal, Copy):
                granted = yield Move(proposal.storage)
            else:
                granted = False


@frozen
class Ran:
    """A step that ran under a soft budget."""

    budget: Bytes
    """What the policy was told."""
    simulation: Simulation
    """The step."""
    offloads: int
    """Storages that left by a copy."""
    reloads: int
    """Storages that came back by one."""
    recalls: int
    """Storages that left by a copy and were recomputed."""

    @property
    def ok(self) -> bool:
        """Whether the step ended."""
        return self.simulation.status == "ok"


def run_softly(
    step: Step, policy: AbstractPolicy, budget: Bytes, device: Device, *, allocator: str = "exact",
    limited: bool = False, overlapped: bool = True, launch: Seconds | None = None,
) -> Ran:  # fmt: skip
    """Simulate the step under a soft budget; with `limited`, in the device's memory and no more."""
    simulation = simulate(
        step, allowed=device.memory if limited else 1 << 50, device=device, allocator=allocator,
        limit=device.memory if limited else None,
        method=SoftBudget(policy, budget, overlapped=overlapped, launch=launch),
    )  # fmt: skip
    return Ran(budget=budget, simulation=simulation, **_counted(simulation))


def _counted(simulation: Simulation) -> dict[str, int]:
    moved: set[int] = set()
    counts = {"offloads": 0, "reloads": 0, "recalls": 0}
    for event in simulation.timeline.events:
        if event.change is Change.MOVE:
            counts["offloads"] += 1
            moved.add(event.storage)
        elif event.change is Change.PAGE_IN:
            counts["reloads"] += 1
            moved.discard(event.storage)
        elif event.change is Change.RECOMPUTE and event.storage in moved:
            counts["recalls"] += 1
            moved.discard(event.storage)
    return counts
