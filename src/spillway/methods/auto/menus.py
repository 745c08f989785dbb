"""From what a training measured to a `BlockProblem`: what each option takes at a size that may be new.

NOTE [Menus]. Bytes that blocks save, work with and hand on come from the estimates of Mimose (`SimulatedPlanning`),
measured where every block was recomputed; they include the inputs of all blocks so far, which problems count by
themselves. What options take besides is learned as a share of what the same block saves, or of the seconds of its
forward, which hold at other sizes: second runs with and without the expensive ops, the backward, what a selective run
holds. Blocks that save the same, and are called with as much, are of one kind: what is known of one is known of all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, TypeAlias, final

from spillway.methods.actions import Action
from spillway.methods.auto.block_problem import Block, BlockProblem, Option
from spillway.methods.by_block import BlockPlan, BlockSample, Forecast, InputSize, StepSample
from spillway.methods.mimose.estimator import Estimate, Laws
from spillway.units import Bytes, Seconds

Like: TypeAlias = tuple[Bytes, Bytes, Bytes, Bytes, bool]
"""What a block saves, what of that could leave, what it is called with and keeps selectively, and whether its input can
leave."""

OFF: Final = 0.15
"""A rate is another one when it has changed by more than this share."""
WINDOW: Final = 8
"""Steps by which a rate is known at first. Small copies are slower than large ones, so that rates differ with the sizes
of steps: each time that one became another one, the next is known by twice as many."""
LONGEST: Final = 256
"""Steps by which it is known at most."""
ALIKE: Final = 0.002
"""Of what is available, by which the needs of blocks may differ that count as one kind: all as the most of them."""
WORTH: Final = 0.95
"""Selecting has to spare more than a twentieth of the second run to be on the menu."""


@final
class _Shares:
    """The least of several samples, one number a block, and the mean of those of one kind: what else a machine does
    only adds."""

    def __init__(self) -> None:
        self._least: dict[int, float] = {}

    def take(self, block: int, share: float) -> None:
        self._least[block] = min(share, self._least.get(block, share))

    def of(self, blocks: Iterable[int], unknown: float) -> float:
        """Of these blocks together, or this where none of them was measured."""
        known = [self._least[block] for block in blocks if block in self._least]
        return sum(known) / len(known) if known else unknown


@final
class _Rate:
    """Bytes a second of one lane: at first the most that was seen, since the first copies write where nothing was yet;
    then the median of what was seen lately, once it is off by more than `OFF`."""

    def __init__(self) -> None:
        self.known = 0.0
        """0 before anything was copied."""
        self._lately: deque[float] = deque(maxlen=WINDOW)
        self._first = True

    def take(self, rate: float) -> None:
        """Of one step; 0 where nothing was copied."""
        if rate <= 0:
            return
        self._lately.append(rate)
        steps = len(self._lately)
        if steps == self._lately.maxlen and abs(median(self._lately) - self.known) > OFF * self.known:
            self.known, self._first = median(self._lately), False
            self._lately = deque(maxlen=min(2 * steps, LONGEST))
        elif self._first and steps < WINDOW:
            self.known = max(self._lately)

    def doubt(self) -> None:
        """Forget what was seen, for what comes now."""
        self._lately, self._first = deque(maxlen=WINDOW), True


@final
class Menus:
    """Learns what the options of every block take. `batched` says whether the first number of a size counts samples."""

    def __init__(self, *, batched: bool) -> None:
        self._batched = batched
        self._laws: Laws = {}
        self._inputs: dict[int, Estimate] = {}
        self._staying: dict[int, Estimate] = {}
        """Of what blocks save, what is too small to leave. There is no law of it: where it is larger, it leaves."""
        self._kept: dict[int, Estimate] = {}
        self._stays: set[int] = set()
        """Blocks whose input stays where the one before them is kept."""
        self._again, self._selected, self._backward = _Shares(), _Shares(), _Shares()
        self._slower, self._extra = _Shares(), _Shares()
        self._out, self._in = _Rate(), _Rate()
        self._rest = _Shares()

    def take(self, step: StepSample, blocks: Sequence[BlockSample], forecast: Forecast | None) -> bool:
        """Take what a step measured; returns whether menus may have other options now. `forecast` is what was known of
        its size, its own sample included."""
        before = self._options
        moved = any(sample.action.moves for sample in blocks)
        plain = sum(sample.seconds + sample.backward for sample in blocks)
        if min(plain, step.seconds) > 0 and not moved and all(sample.backward for sample in blocks if sample.nbytes):
            ran = plain + sum(sample.again for sample in blocks)
            self._rest.take(0, max(step.seconds - ran, 0.0) / plain)
        known = len(blocks) if forecast is None else len(forecast.saved)
        for sample in blocks[:known]:  # calls that no step made of which bytes were learned teach nothing
            if not moved:
                self._estimate(self._inputs, sample.block).observe(sample.size, sample.inputs)
                staying = self._estimate(self._staying, sample.block, windows=False)
                staying.observe(sample.size, max(sample.nbytes - sample.leaving, 0))
                if sample.holds_result:
                    self._stays.add(sample.block + 1)
            if sample.action.selects and sample.kept:
                self._estimate(self._kept, sample.block).observe(sample.size, sample.kept)
            if sample.seconds > 0:
                self._take_seconds(sample, forecast)
            if forecast is not None and sample.action is Action.SELECTIVE and sample.kept and not moved:
                expected = forecast.rest + forecast.working[sample.block]
                self._extra.take(sample.block, max(sample.beside - expected, 0) / sample.kept)
        self._out.take(step.out_rate)
        self._in.take(step.in_rate)
        return before != self._options

    @property
    def rates(self) -> tuple[float, float]:
        """Bytes a second of copies out and in, as problems have them; 0 before anything was copied."""
        return self._out.known, self._in.known

    def doubt_rates(self) -> None:
        """What the next copies take counts, and nothing that earlier ones took."""
        self._out.doubt()
        self._in.doubt()

    @property
    def _options(self) -> tuple[bool, int]:
        return min(self.rates) > 0, len(self._kept)

    @property
    def knows_kept(self) -> bool:
        """Whether anything was learned where blocks ran selectively."""
        return bool(self._kept)

    def leaves(self, call: int, plan: BlockPlan) -> bool:
        """Whether a call's input is not held by anybody else under a plan."""
        held = call in self._stays and call > 0 and plan.keeps(call - 1)
        return not held and self._at(self._inputs, call, plan.size) > 0

    def _estimate(self, estimates: dict[int, Estimate], block: int, *, windows: bool = True) -> Estimate:
        if block not in estimates:
            estimates[block] = Estimate(batched=self._batched, laws=self._laws, windows=windows)
        return estimates[block]

    def _take_seconds(self, sample: BlockSample, forecast: Forecast | None) -> None:
        forward = forecast.seconds[sample.block] if forecast is not None else sample.seconds
        if forward <= 0:
            return
        if sample.backward > 0:
            self._backward.take(sample.block, sample.backward / forward)
        if sample.action.selects:
            if sample.kept:
                self._slower.take(sample.block, max(sample.seconds / forward - 1, 0.0))
            if sample.kept and sample.again > 0:
                self._selected.take(sample.block, sample.again / forward)
        elif sample.again > 0:
            self._again.take(sample.block, sample.again / forward)

    def problem(self, forecast: Forecast, available: Bytes, size: InputSize, *, moves: bool) -> BlockProblem:
        """A step of this size; `available` is the budget less what is there when the forward begins."""
        calls = range(len(forecast.saved))
        inputs = [self._at(self._inputs, call, size) for call in calls]
        kept = self._kept_at(forecast, inputs, size)
        likes = [
            (
                saved, max(saved - self._at(self._staying, call, size), 0) if call in self._staying else 0,
                inputs[call], kept[call], call not in self._stays,
            )
            for call, saved in enumerate(forecast.saved)
        ]  # fmt: skip
        alike: dict[Like, list[int]] = {}
        for call, like in enumerate(likes):
            alike.setdefault(like, []).append(call)
        costs = {like: self._costs(like, members, forecast) for like, members in alike.items()}
        out_rate, in_rate = self.rates
        moves = moves and min(out_rate, in_rate) > 0
        needs, before = [], 0
        for call in calls:
            needs.append(max(forecast.rest + forecast.working[call] + forecast.saved[call] - before, 0))
            before += inputs[call]
        for members in alike.values():
            most = max(needs[call] for call in members)
            if most - min(needs[call] for call in members) <= ALIKE * available:
                needs = [most if call in members else needs[call] for call in calls]
        kinds: dict[tuple[Like, Bytes], int] = {}
        made: dict[tuple[Like, Bytes, Bytes], Block] = {}
        blocks = []
        for like, need, gradients in zip(likes, needs, forecast.gradients, strict=True):
            key = like, need, gradients
            if key not in made:
                kind = kinds.setdefault((like, need), len(kinds))
                made[key] = _block(kind, *key, costs[like], moves=moves)
            blocks.append(made[key])
        turn = max(forecast.turn - before, 0)
        head = Option(action=Action.KEEP, resident=0, forward_peak=turn, backward_peak=turn)
        blocks.append(Block(kind=-1, forward=0.0, backward=0.0, gradients=0, options=(head,)))
        rest = self._rest.of((0,), 0.0) * sum(block.forward + block.backward for block in blocks)
        return BlockProblem(blocks=blocks, available=available, out_rate=out_rate, in_rate=in_rate, rest=rest)

    def _at(self, estimates: dict[int, Estimate], call: int, size: InputSize) -> Bytes:
        return estimates[call].at(size) if call in estimates and estimates[call].measured else 0

    def _kept_at(self, forecast: Forecast, inputs: Sequence[Bytes], size: InputSize) -> list[Bytes]:
        """What a selective run keeps; of a block that never ran so, what another of its kind keeps."""
        known: dict[tuple[Bytes, Bytes], Bytes] = {}
        for call in self._kept:
            if call < len(inputs):
                key = forecast.saved[call], inputs[call]
                known[key] = max(self._at(self._kept, call, size), known.get(key, 0))
        return [known.get(key, 0) for key in zip(forecast.saved, inputs, strict=True)]

    def _costs(self, like: Like, alike: Sequence[int], forecast: Forecast) -> _Costs:
        """Of blocks of one kind, from all that is known of any of them."""
        saved, _, _, kept, _ = like
        forward = sum(forecast.seconds[call] for call in alike) / len(alike)
        again = self._again.of(alike, 1.0) * forward
        slower = self._slower.of(alike, 0.0) * forward
        selected = self._selected.of(alike, 1.0) * forward
        return _Costs(
            forward=forward, backward=self._backward.of(alike, 2.0) * forward, again=again, slower=slower,
            selected=selected if 0 < kept < saved and selected + slower < WORTH * again else None,
            extra=round(self._extra.of(alike, 1.0) * kept),
        )  # fmt: skip


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """Seconds, and bytes, of one kind of block."""

    forward: Seconds
    backward: Seconds
    again: Seconds
    """Of a second run."""
    selected: Seconds | None
    """Of one that is given the results of expensive ops; None where that is not worth it."""
    slower: Seconds
    """By which a forward is that keeps these."""
    extra: Bytes
    """That a selective run needs besides."""


def _block(
    kind: int, like: Like, need: Bytes, gradients: Bytes, costs: _Costs, *, moves: bool
) -> Block:  # fmt: skip
    """With its whole menu; `need` is what it takes beside what earlier blocks left and its gradients."""
    saved, leaving, x, kept, leaves = like
    menu = [(Action.KEEP, x + saved, 0, 0.0, 0.0, 0)]
    if saved:
        menu.append((Action.RECOMPUTE, x, 0, 0.0, costs.again, 0))
    if leaving and moves:
        menu.append((Action.OFFLOAD, x + saved - leaving, leaving, 0.0, 0.0, 0))
    if saved and moves and leaves and x:
        menu.append((Action.RECOMPUTE_OFFLOADED, 0, x, 0.0, costs.again, 0))
    if costs.selected is not None:
        menu.append((Action.SELECTIVE, x + kept, 0, costs.slower, costs.selected, costs.extra))
        if moves:
            menu.append((Action.SELECTIVE_OFFLOADED, x, kept, costs.slower, costs.selected, costs.extra))
    options = tuple(
        Option(
            action=action, resident=resident, moved=moved, forward=forward, backward=backward,
            forward_peak=need + extra, backward_peak=need + extra,
        )
        for action, resident, moved, forward, backward, extra in menu
    )  # fmt: skip
    return Block(kind=kind, forward=costs.forward, backward=costs.backward, gradients=gradients, options=options)
