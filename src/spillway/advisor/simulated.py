"""Trials on a device that is not here: a recorded step with the method in it, its seconds modelled, nothing limited.

What a step does at other batch sizes than the recorded ones is derived (`costs/scaling.py`), where the same ops run at
all sizes; else each size is recorded. Peaks are bytes of storages, exactly: PAPAYA's are `max_memory_allocated`, which
counts the same. Fragments are in neither, and in the limit that the advisor is given.

Differs from measuring: what a device does beside the step's ops takes no time and no memory, but for the host's
launches where the device says what they take. How far modelled seconds are to be trusted says `Efficiency`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, final

from spillway.advisor.bench import NAMES, OTHER, AbstractBench, Trial
from spillway.advisor.measurements import SIMULATED
from spillway.advisor.ways import Way, way_of
from spillway.costs.device import Device
from spillway.costs.roofline import PUBLISHED, step_seconds, timed
from spillway.costs.scaling import Scaling, fit_scaling
from spillway.errors import UsageError
from spillway.ir.lives import kept_for_backward, lives_of
from spillway.ir.step import Phase, Step
from spillway.ir.timeline import Kind
from spillway.memory.budget import UNLIMITED
from spillway.methods.actions import Action, is_expensive
from spillway.methods.base import Problem
from spillway.methods.graph_rewrite import GraphRewrite, compressed, run_twice
from spillway.methods.planned import Planned
from spillway.methods.swap import Swap
from spillway.simulation.simulated_engine import Simulation, simulate
from spillway.units import Bytes, Seconds

RECORDED: Final = (2, 3, 5)
"""Batch sizes whose steps are recorded: what is linear in the batch is found by two and checked by a third."""


@final
class Steps:
    """A workload's step at any batch size: `record` records that of so many samples, at `sizes`, when it is first
    needed."""

    def __init__(self, record: Callable[[int], Step], sizes: Sequence[int] = RECORDED) -> None:
        self._record, self._sizes = record, tuple(sizes)
        self._known: dict[int, Step] = {}
        self._scaling: Scaling | None = None
        self._alike = True

    def at(self, size: int) -> Step:
        if size not in self._known and self._alike and self._scaling is None:
            for one in self._sizes:
                self._known[one] = self._known.get(one) or self._record(one)
            try:
                self._scaling = fit_scaling({one: self._known[one] for one in self._sizes})
            except ValueError:
                self._alike = False
        if size not in self._known:
            exact = self._scaling is not None and not self._scaling.doubtful(size)
            self._known[size] = self._scaling.step_at(size) if self._scaling and exact else self._record(size)
        return self._known[size]


@final
class SimulatedBench(AbstractBench):
    """Measures on a device by its description. The device's memory limits nothing here: whoever asks has a limit."""

    def __init__(self, name: str, steps: Steps, device: Device) -> None:
        self.name = name
        self.hardware = f"{device.name}{SIMULATED}"
        self.device = device
        self.spread = (device.efficiency or PUBLISHED).step_spread
        self._steps = steps
        self._timed: dict[int, Step] = {}
        self._trials: dict[tuple[str, int], Trial] = {}

    def measure(self, method: str, size: int) -> Trial:
        """Simulate one step of a method. Raises UsageError for a name that is none."""
        if (method, size) not in self._trials:
            way = way_of(method)
            peak, seconds, kinds = self._accumulated(way, size) if way.micro else self._trial(way, size)
            self._trials[method, size] = Trial(
                method=method, size=size, peak=peak, seconds=seconds, by_kind=dict(kinds)
            )
        return self._trials[method, size]

    def step_of(self, way: Way, size: int) -> GraphRewrite:
        """The step of a method without what it moves, and what of it would be moved."""
        step = self._steps.at(size)
        match way.action:
            case None:
                return GraphRewrite(step=self._step(size), waiting=())
            case Action.OFFLOAD:
                step = self._step(size)
                kept = kept_for_backward(step, lives_of(step), step.saved)
                return GraphRewrite(step=step, waiting=tuple(one.value for one in kept))
            case Action.COMPRESS | Action.COMPRESS_OFFLOADED:
                done = compressed(step)
            case Action.RECOMPUTE | Action.RECOMPUTE_OFFLOADED:
                done = run_twice(step)
            case Action.RECOMPUTE_COMPRESSED:
                done = run_twice(step, bits=4)
            case Action.SELECTIVE | Action.SELECTIVE_OFFLOADED:
                done = run_twice(step, keeps=lambda op: is_expensive(op.name))
            case _:
                raise UsageError(f"Nobody can simulate {way.name}.")
        # All of it anew: what a device waits for its host depends on what runs before.
        return replace(done, step=timed(done.step, self.device))

    def gradient_bytes(self) -> Bytes:
        return sum(one.nbytes for one in self._step(min(RECORDED)).storages if one.kind is Kind.GRADIENT)

    def _step(self, size: int) -> Step:
        if size not in self._timed:
            self._timed[size] = timed(self._steps.at(size), self.device)
        return self._timed[size]

    def _trial(self, way: Way, size: int) -> tuple[Bytes, Seconds, Mapping[str, Bytes]]:
        done = self.step_of(way, size)
        if way.action is None or not way.action.moves:
            peak, kinds = _fullest(done.step)
            return peak, step_seconds(done.step), kinds
        # What is moved waits in host memory, compute waiting for copies or not.
        waits = way.waits or way.action is not Action.OFFLOAD
        step = replace(done.step, saved=done.waiting, savings=())
        plan = Swap(prefetched=not waits).plan(Problem(step=step, allowed=UNLIMITED, device=self.device))
        policy = Planned(plan, done.step, ahead=0) if waits else Planned(plan, done.step)
        steps = 1 if waits else 2
        ran = simulate(done.step, allowed=UNLIMITED, method=policy, device=self.device, steps=steps)
        return ran.peak_bytes, ran.seconds, _kinds_of(ran)

    def _accumulated(self, way: Way, size: int) -> tuple[Bytes, Seconds, Mapping[str, Bytes]]:
        """Micro-batches one after the other: gradients are there from the second on, and the update runs once."""
        step = self._step(way.micro)
        peak, kinds = _fullest(step)
        update = sum(op.seconds or 0.0 for op in step.ops if op.phase is Phase.OPTIMIZER)
        seconds = (size // way.micro) * (step_seconds(step) - update) + update
        if size > way.micro:
            gradients = sum(storage.nbytes for storage in step.storages if storage.kind is Kind.GRADIENT)
            missing = gradients - kinds.get("gradients", 0)
            peak, kinds = peak + missing, {**kinds, "gradients": gradients}
        return peak, seconds, kinds


def _fullest(step: Step) -> tuple[Bytes, Mapping[str, Bytes]]:
    """The peak of a step from which nothing is missing, and what it is made of."""
    levels = step.levels() or [0]
    peak = max(levels)
    fullest, kinds = levels.index(peak), Counter[str]()
    for storage in step.storages:
        if storage.alive_from <= fullest < storage.alive_until:
            kinds[NAMES.get(storage.kind, OTHER)] += storage.nbytes
    return peak, kinds


def _kinds_of(ran: Simulation) -> Mapping[str, Bytes]:
    """At the fullest moment of a simulated step; what is on its way out besides is other."""
    resident = ran.timeline.resident()
    place = max(range(len(resident)), key=lambda number: resident[number][1])
    kinds: Counter[str] = Counter()
    for kind, levels in ran.timeline.by_kind().items():
        if levels[place][1]:
            kinds[NAMES.get(kind, OTHER)] += levels[place][1]
    kinds[OTHER] += ran.peak_bytes - kinds.total()
    return kinds
