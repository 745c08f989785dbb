"""From samples to a plan: the paper's way, and one whose plans hold in every moment of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Final, final

from spillway.methods.actions import Action
from spillway.methods.by_block import BlockPlan, BlockSample, Forecast, InputSize, StepSample, recomputing
from spillway.methods.mimose.choices import Options
from spillway.methods.mimose.estimator import (
    Estimate,
    Laws,
    Quadratic,
    Quadratics,
    fit_quadratic,
)
from spillway.methods.mimose.exact import BytesAt
from spillway.methods.mimose.peaks import alike, highest, holding, limits, outside, seconds_of
from spillway.methods.mimose.scheduler import select
from spillway.units import Bytes, Seconds

NOTHING: Final = frozenset[int]()
NEAR: Final = 0.01
"""Of a peak: where the rest of a step needs less by a smaller share than was expected, plans stay as they are."""
REMEMBERED: Final = 1024
"""Sizes whose blocks' bytes and seconds are."""


@final
class PublishedPlanning:
    """The paper's: a quadratic per block and one for the whole model, and Algorithm 1 on what that one is over.

    With `Options.exact_bytes` laws take the place of the blocks' quadratics where there are any.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._blocks: dict[int, list[BlockSample]] = {}
        self._whole: list[tuple[InputSize, float]] = []
        self._learned: _Learned | None = None

    def observe(self, step: StepSample, blocks: Sequence[BlockSample], *, whole: bool) -> bool:
        """Take what a step measured; `whole` says whether it is a sample of the whole model. Without recomputing, the
        step would have needed what that saved on top (public code). Returns whether plans are out of date."""
        for sample in blocks:
            self._blocks.setdefault(sample.block, []).append(sample)
        saved = {sample.block: sample.nbytes for sample in blocks}
        if whole and step.recomputed <= saved.keys():
            self._whole.append((step.size, step.peak + sum(saved[block] for block in step.recomputed)))
        self._learned = None
        return True

    @property
    def ready(self) -> bool:
        """Whether there are samples enough for a plan."""
        return bool(self._whole) and sorted(self._blocks) == list(range(len(self._blocks)))

    @property
    def settled(self) -> bool:
        """Whether the bytes of every block are on an exact law, if one is looked for."""
        laws = self._learn().laws
        return bool(laws) and None not in laws

    def nbytes(self, block: int, size: InputSize) -> Bytes:
        return self._learn().nbytes(block, size)

    def whole(self, size: InputSize) -> Bytes:
        """What a step of this size is expected to need if nothing is recomputed. Raises ValueError without a sample."""
        fit = self._learn().whole or fit_quadratic(self._whole)
        return max(round(fit.at(size)), 0)

    def plan(self, size: InputSize, available: Bytes) -> BlockPlan:
        """Algorithm 1, on what the whole model is over. Raises ValueError before there is a sample of that."""
        learned = self._learn()
        nbytes = [learned.nbytes(block, size) for block in range(len(learned.fits))]
        whole = self.whole(size)
        chosen = frozenset(select(nbytes, whole - available).blocks)
        return BlockPlan(
            size=size,
            actions=recomputing(chosen, len(nbytes)),
            otherwise=Action.RECOMPUTE,
            projected=max(whole - sum(nbytes[block] for block in chosen), 0),
            available=available,
            seconds=sum(max(learned.times[block].at(size), 0.0) for block in chosen),
            smallest=min((nbytes[block] for block in chosen), default=0),
        )

    def _learn(self) -> _Learned:
        if self._learned is None:
            batched = self.options.batched
            laws: Laws = {}
            samples = [self._blocks[block] for block in range(len(self._blocks))]
            self._learned = _Learned(
                fits=[fit_quadratic([(one.size, one.nbytes) for one in block], batched=batched) for block in samples],
                times=[fit_quadratic([(one.size, one.seconds) for one in block], batched=batched) for block in samples],
                laws=[_law(block, laws, batched=batched) for block in samples] if self.options.exact_bytes else [],
                whole=fit_quadratic(self._whole, batched=batched) if self._whole else None,
            )
        return self._learned


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Learned:
    """What samples have led to."""

    fits: list[Quadratic]
    times: list[Quadratic]
    laws: list[BytesAt | None]
    """Of every block; empty if none is looked for."""
    whole: Quadratic | None
    """None before there is a sample of it."""

    def nbytes(self, block: int, size: InputSize) -> Bytes:
        law = self.laws[block] if self.laws else None
        exact = law(size) if law is not None else None
        return exact if exact is not None else max(round(self.fits[block].at(size)), 0)


def _law(samples: Sequence[BlockSample], known: Laws, *, batched: bool) -> BytesAt | None:
    estimate = Estimate(batched=batched, laws=known)
    for sample in samples:
        estimate.observe(sample.size, sample.nbytes)
    return estimate.law()


@final
class SimulatedPlanning:
    """Spillway's: estimates that are exact or err upwards, and the cheaper of two plans that hold in every moment.

    One is Algorithm 1's selection, the other `holding`'s. Blocks that only some steps call are planned as if every step
    did.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._laws: Laws = {}
        self._saved: list[Estimate] = []
        self._working: list[Estimate] = []
        self._gradients: list[Bytes] = []
        self._times: list[dict[InputSize, Seconds]] = []
        self._turn = self._estimate(windows=False)
        self._rest = self._estimate(windows=False)
        self._margin: Bytes = 0
        self._corrected: set[InputSize] = set()
        self._blocks: Callable[[InputSize], tuple[list[Bytes], Sequence[Seconds]]] | None = None
        """Bytes and seconds of the blocks at a size, which forwards ask for as often as they have it."""

    def _estimate(self, *, windows: bool = True) -> Estimate:
        lawless = not self.options.exact_bytes
        return Estimate(batched=self.options.batched, laws=self._laws, lawless=lawless, windows=windows)

    # ------------------------------------------------------------------ learning

    def observe(self, step: StepSample, blocks: Sequence[BlockSample], *, whole: bool) -> bool:
        """As of `PublishedPlanning`; samples of blocks first, so that what the step needed beside them is known
        better."""
        changed = [self._take(sample) for sample in blocks]
        if whole and self._saved and all(one.measured for one in self._saved):
            changed.append(self._learn_rest(step, blocks))
        return any(changed)

    def _take(self, sample: BlockSample) -> bool:
        while len(self._saved) <= sample.block:
            self._saved.append(self._estimate())
            self._working.append(self._estimate())
            self._gradients.append(0)
            self._times.append({})
        times, shorter = self._times[sample.block], False
        if sample.seconds < times.get(sample.size, inf):
            times[sample.size] = sample.seconds  # the shortest: whatever else a machine does only adds
            shorter = True
        changed = [
            self._saved[sample.block].observe(sample.size, sample.nbytes),
            self._working[sample.block].observe(sample.size, sample.working),
            self._gradients[sample.block] < sample.gradients,
        ]
        # The most: whoever accumulates creates them in some steps only.
        self._gradients[sample.block] = max(sample.gradients, self._gradients[sample.block])
        if shorter or any(changed):
            self._blocks = None
        return any(changed)

    def _learn_rest(self, step: StepSample, blocks: Sequence[BlockSample]) -> bool:
        """Learn what the step needed beside its blocks, and the gradients that it created: none in micro-batches after
        the first, whose peak would else be taken for a lower bound than it is.

        NOTE: A peak bounds that from above, and of several bounds of one size the lowest counts. A peak above what was
        to be expected of that plan and size shows that a bound was too low, or that blocks need more than their samples
        say: the bound is raised by as much, and lower ones no longer count. Where the peak is not known by part of the
        step, both bounds are. The most by which a peak was too high also becomes a margin at every other size, for
        plans that keep a block; the floor under all recomputed blocks is known from the collecting steps.
        """
        created = {sample.block: sample.gradients for sample in blocks}
        forecast = self._forecast(step.size, turn=0, rest=0)
        if blocks:  # those that it left out took nothing
            forecast = replace(
                forecast,
                saved=[nbytes if block in created else 0 for block, nbytes in enumerate(forecast.saved)],
                working=[nbytes if block in created else 0 for block, nbytes in enumerate(forecast.working)],
                gradients=[created.get(block, 0) for block in range(len(forecast.gradients))],
            )
        turn_peak, backward_peak = step.turn_peak, step.backward_peak
        by_part = turn_peak is not None and backward_peak is not None
        if turn_peak is None or backward_peak is None:
            turn_peak = backward_peak = step.peak
        turn, rest = outside(forecast, step.recomputed, turn_peak, backward_peak)
        keeps = len(step.recomputed) < (len(blocks) or len(self._saved))
        if not self._turn.measured or not (keeps or step.size in self._turn.measured):
            # Fits to a few collecting steps know less than the bounds themselves.
            return self._turn.bound(step.size, turn, proven=False) | self._rest.bound(step.size, rest, proven=False)
        expected = replace(forecast, turn=self._turn.at(step.size), rest=self._rest.at(step.size))
        over = max(step.peak - highest(expected, step.recomputed, limits(expected)), 0)
        if over and keeps:
            self._margin = max(self._margin, over)
            self._corrected.add(step.size)
        if not by_part:
            turn = expected.turn + over if over else min(turn, expected.turn)
            rest = expected.rest + over if over else min(rest, expected.rest)
        self._turn.bound(step.size, turn, proven=turn > expected.turn)
        self._rest.bound(step.size, rest, proven=rest > expected.rest)
        less = max(expected.turn - self._turn.at(step.size), expected.rest - self._rest.at(step.size))
        return over > 0 or turn > expected.turn or rest > expected.rest or less > NEAR * step.peak

    @property
    def ready(self) -> bool:
        return bool(self._saved) and all(one.measured for one in self._saved) and bool(self._turn.measured)

    @property
    def settled(self) -> bool:
        return self.ready and all(one.law() is not None for one in self._saved)

    # ------------------------------------------------------------------ planning

    def nbytes(self, block: int, size: InputSize) -> Bytes:
        return self._saved[block].at(size)

    def forecast(self, size: InputSize) -> Forecast:
        """What a step of this size is expected to need. Raises ValueError without samples."""
        return self._forecast(size, turn=self._turn.at(size), rest=self._rest.at(size))

    def plan(self, size: InputSize, available: Bytes) -> BlockPlan:
        """Nothing is recomputed where nothing has to be; everything if even that does not hold."""
        forecast = self.forecast(size)
        limit = limits(forecast)
        margin = 0 if size in self._corrected else self._margin
        projected = highest(forecast, (), limit) + margin
        chosen, seconds = NOTHING, 0.0
        if projected > available:
            chosen, seconds = self._cheaper(forecast, limit, available - margin, projected - available)
            projected = highest(forecast, chosen, limit) + (margin if len(chosen) < len(forecast.saved) else 0)
        return BlockPlan(
            size=size,
            actions=recomputing(chosen, len(forecast.saved)),
            otherwise=Action.RECOMPUTE,
            projected=projected,
            available=available,
            seconds=seconds,
            smallest=min(map(forecast.saved.__getitem__, chosen), default=0),
        )

    def looked_at(self, plan: BlockPlan) -> BlockPlan | None:
        """A plan that was made, with the bytes that it is expected to need by what is known now, and as much more or
        less for it as those are more or less. None where the model has other blocks since."""
        forecast = self.forecast(plan.size)
        chosen = plan.given_up
        if len(plan.actions) != len(forecast.saved):
            return None
        margin = 0 if plan.size in self._corrected or len(chosen) == len(plan.actions) else self._margin
        projected = highest(forecast, chosen, limits(forecast)) + margin
        return replace(
            plan,
            projected=projected,
            available=plan.available + projected - plan.projected,
            smallest=min(map(forecast.saved.__getitem__, chosen), default=0),
        )

    def _cheaper(
        self, forecast: Forecast, limit: Sequence[Bytes], available: Bytes, excess: Bytes
    ) -> tuple[frozenset[int], Seconds]:
        """`holding`'s blocks or those of Algorithm 1, with their seconds."""
        chosen = holding(forecast, available, limit)
        seconds = seconds_of(forecast, chosen)
        if alike(forecast):
            return chosen, seconds  # Algorithm 1 would take the earliest too, and as many or too few
        greedy = frozenset(select(forecast.saved, excess).blocks)
        less = seconds_of(forecast, greedy)
        if less < seconds and highest(forecast, greedy, limit) <= available:
            return greedy, less
        return chosen, seconds

    def _forecast(self, size: InputSize, *, turn: Bytes, rest: Bytes) -> Forecast:
        if self._blocks is None:
            fits = [fit_quadratic(list(times.items()), batched=self.options.batched) for times in self._times]
            estimates, times = [*self._saved, *self._working], Quadratics(fits)
            self._blocks = lru_cache(maxsize=REMEMBERED)(
                lambda size: ([one.at(size) for one in estimates], times.at(size))
            )
        nbytes, seconds = self._blocks(size)
        blocks = len(self._saved)
        return Forecast(
            saved=nbytes[:blocks],
            seconds=seconds,
            turn=turn,
            rest=rest,
            working=nbytes[blocks:],
            gradients=self._gradients,
        )
