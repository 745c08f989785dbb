"""The blocks of a recorded step, what may become of each, and the planner's problem that they are.

A *way* is what an action does to a call of a block: which values it recomputes by one replay, and which wait in host
memory. What a call leaves to the backward may be in either; what it was called with is moved where nothing reads it
later in the forward. A selective call keeps of what it leaves those values that cannot be made of the rest without an
expensive op; the engine keeps results of these ops instead, which are as many bytes.

An option's bytes are read off the account of the step in which every block takes it: what is there during a block's
forward or backward beside what earlier blocks left and gradients. What stands between blocks, and the head, are blocks
that can only be kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final, TypeAlias, final

from spillway.costs.device import Device
from spillway.ir import Gap, Host, Kind, Phase, Recompute, Step
from spillway.ir.account import account
from spillway.ir.block_calls import BlockCall, MicroBatch, block_calls, micro_batches
from spillway.ir.lives import Kept, Life, kept_for_backward, lives_of
from spillway.ir.recipes import as_one, together
from spillway.ir.step import ValueId
from spillway.methods.actions import Action, is_expensive
from spillway.methods.auto.block_problem import Block, BlockProblem, Option
from spillway.methods.base import SMALLEST
from spillway.units import Bytes, Seconds

MENU: Final = (
    Action.KEEP, Action.RECOMPUTE, Action.RECOMPUTE_OFFLOADED, Action.OFFLOAD, Action.SELECTIVE,
    Action.SELECTIVE_OFFLOADED,
)  # fmt: skip

Chosen: TypeAlias = tuple[Action, ...]
"""What becomes of every call of the step, in forward order."""


# ---------------------------------------------------------------------- blocks and what may become of them


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What an action does to a call."""

    again: tuple[Gap, ...] = ()
    """What it recomputes, by one replay."""
    moved: tuple[Kept, ...] = ()
    """What waits in host memory."""
    gone: Bytes = 0
    """Bytes that are not there between forward and backward."""
    away: Bytes = 0
    """Of them, those in host memory."""
    seconds: Seconds = 0.0
    """Of the replay."""


@final
class Blocks:
    """The calls of blocks of a recorded step, whose ops have seconds, and what may become of each; below `smallest`
    bytes nothing is moved."""

    def __init__(self, step: Step, smallest: Bytes = SMALLEST) -> None:
        self.step, self.smallest = step, smallest
        self.lives: list[Life] = lives_of(step)
        self.calls = block_calls(step, self.lives)
        self.ways: list[dict[Action, Way]] = []
        """Of every call; what frees nothing is not among them."""
        inputs = self._inputs()
        everything = {value for call in self.calls for value in call.kept}
        for number, call in enumerate(self.calls):
            ways = {Action.KEEP: Way(), **dict(self._ways(call, inputs[number], everything - call.kept.keys()))}
            self.ways.append({action: way for action, way in ways.items() if way.gone or action is Action.KEEP})

    def nbytes(self, values: Iterable[ValueId]) -> Bytes:
        """Of their storages, each once."""
        return sum(self.step.storages[one].nbytes for one in {self.step.values[value].storage for value in values})

    def _inputs(self) -> list[list[Kept]]:
        """Of every call what it was called with and the backward wants, if it is the last that reads it."""
        owners = {op: number for number, call in enumerate(self.calls) for op in call.ops}
        own = {value for call in self.calls for value in call.kept}
        found: list[list[Kept]] = [[] for _ in self.calls]
        for kept in kept_for_backward(self.step, self.lives):
            reader = owners.get(kept.last)
            if reader is not None and kept.value not in own and owners.get(self.lives[kept.value].created) != reader:
                found[reader].append(kept)
        return found

    def _ways(
        self, call: BlockCall, inputs: Sequence[Kept], elsewhere: Collection[ValueId]
    ) -> Iterator[tuple[Action, Way]]:
        around = [one for one in inputs if self._large(one)]
        if any(self._large(one) for one in call.kept.values()):
            yield Action.OFFLOAD, self._way((), [*filter(self._large, call.kept.values()), *around])
        yield Action.RECOMPUTE, self._way(call.gaps, ())
        if around:
            yield Action.RECOMPUTE_OFFLOADED, self._way(call.gaps, around)
        results = _expensive(self.step, self.lives, call.kept)
        cheap = {value: kept for value, kept in call.kept.items() if value not in results}
        inside = frozenset(call.ops)
        again = as_one(together(cheap, elsewhere, step=self.step, lives=self.lives, inside=inside), self.step)
        if again and len(again) < len(call.gaps):
            yield Action.SELECTIVE, self._way(again, ())
            back = {gap.value for gap in again}
            kept = (one for value, one in call.kept.items() if value not in back)
            yield Action.SELECTIVE_OFFLOADED, self._way(again, [*filter(self._large, kept), *around])

    def _large(self, kept: Kept) -> bool:
        return self.step.storages[self.step.values[kept.value].storage].nbytes >= max(self.smallest, 1)

    def _way(self, again: Sequence[Gap], moved: Iterable[Kept]) -> Way:
        moved = tuple(moved)
        away, dropped = self.nbytes(one.value for one in moved), self.nbytes(gap.value for gap in again)
        homes = [gap.home for gap in again if isinstance(gap.home, Recompute)]
        held = self.nbytes({leaf for home in homes for leaf in home.held})
        return Way(
            again=tuple(again), moved=moved, gone=away + dropped - held, away=away,
            seconds=sum(self.step.ops[op].seconds or 0.0 for op in sorted({op for home in homes for op in home.ops})),
        )  # fmt: skip

    def gaps(self, chosen: Sequence[Action]) -> list[Gap]:
        """Each as long as it may be: from the last use to the next, or to the replay that reads it."""
        ways = [ways[action] for ways, action in zip(self.ways, chosen, strict=True)]
        gaps = [gap for way in ways for gap in way.again]
        until: dict[ValueId, int] = {}
        for gap in gaps:
            if isinstance(gap.home, Recompute):
                for value in (value for op in gap.home.ops for value in self.step.ops[op].reads):
                    until[value] = min(until.get(value, gap.end), gap.end)
        for kept in (kept for way in ways for kept in way.moved):
            start, end = kept.last + 1, min(kept.needed, until.get(kept.value, kept.needed))
            if start < end:
                gaps.append(Gap(value=kept.value, start=start, end=end, home=Host()))
        return gaps

    def everywhere(self, action: Action) -> Chosen:
        """The same becomes of every call, where it frees anything."""
        return tuple(action if action in ways else Action.KEEP for ways in self.ways)


def _expensive(step: Step, lives: Sequence[Life], kept: Mapping[ValueId, Kept]) -> set[ValueId]:
    """Of what a call leaves to the backward, what cannot be made of the rest of it without an expensive op."""
    found: set[ValueId] = set()
    for value in sorted(kept, key=lambda value: lives[value].created):
        open_, seen = [value], set[int]()
        while open_:
            created = lives[open_.pop()].created
            if created < 0 or created in seen or step.ops[created].phase is not Phase.FORWARD:
                continue
            seen.add(created)
            if is_expensive(step.ops[created].name):
                found.add(value)
                break
            open_ += (
                read
                for read in step.ops[created].reads
                if read not in kept and not lives[read].readable(kept[value].needed)
            )
    return found


# ---------------------------------------------------------------------- the planner's problem


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """A block as the problem has it: a call, or what stands between two, or the head."""

    call: int | None
    """The number of the call within the step; None for what can only be kept."""
    forward: tuple[int, int]
    """Its ops, half-open."""
    backward: tuple[int, int]
    """From where the backward comes to it to where it comes to the next."""


def _stretches(step: Step, first: int, part: MicroBatch) -> list[_Stretch]:
    """In order of the forward; `first` is the number of the micro-batch's first call within the step."""
    calls = part.calls
    order = sorted(range(len(calls)), key=lambda call: calls[call].returns)
    returns = [calls[call].returns for call in order]
    back = dict(zip(order, pairwise([*returns, part.end]), strict=True))
    found, reached = [], part.begin
    for number, call in enumerate(calls):
        begin, end = max(call.ops[0], reached), max(call.ops[-1] + 1, reached)
        if reached < begin:
            found.append(_Stretch(call=None, forward=(reached, begin), backward=(0, 0)))
        found.append(_Stretch(call=first + number, forward=(begin, end), backward=back[number]))
        reached = end
    turn = next((op.number for op in step.ops[reached : returns[0]] if op.phase is not Phase.FORWARD), returns[0])
    return [*found, _Stretch(call=None, forward=(reached, turn), backward=(turn, returns[0]))]


def problems(blocks: Blocks, allowed: Bytes, device: Device) -> list[tuple[BlockProblem, list[int | None]]]:
    """Of each micro-batch what the planner is asked, and which call of the step each of its blocks is."""
    step, found, first = blocks.step, [], 0
    levels = {action: account(step, blocks.gaps(blocks.everywhere(action)), blocks.lives).levels for action in MENU}
    rates = _rates(blocks, device)
    for part in micro_batches(step, blocks.calls):
        stretches = _stretches(step, first, part)
        first += len(part.calls)
        start = part.start(step)
        made = list(_Made(blocks, part, stretches, levels, start, device).blocks())
        problem = BlockProblem(blocks=made, available=allowed - start, out_rate=rates[0], in_rate=rates[1])
        found.append((problem, [stretch.call for stretch in stretches]))
    return found


def _rates(blocks: Blocks, device: Device) -> tuple[float, float]:
    """Of the lanes for what blocks would move, the time that each copy takes beside its bytes included; half of it
    where there is one lane for both."""
    moved = {one.value: one for ways in blocks.ways for way in ways.values() for one in way.moved}
    sizes = [blocks.nbytes([value]) for value in moved]
    lanes = 1 if device.duplex else 2
    out, into = sum(map(device.out_seconds, sizes)), sum(map(device.in_seconds, sizes))
    if not sizes:
        return device.out_per_second, device.in_per_second
    return sum(sizes) / out / lanes, sum(sizes) / into / lanes


@final
class _Made:
    """Blocks of one micro-batch with their menus."""

    def __init__(
        self, blocks: Blocks, part: MicroBatch, stretches: Sequence[_Stretch], levels: Mapping[Action, Sequence[Bytes]],
        start: Bytes, device: Device,
    ) -> None:  # fmt: skip
        self._blocks, self._stretches, self._levels, self._start = blocks, stretches, levels, start
        self._device, self._part = device, part
        self._begins = list(accumulate((op.seconds or 0.0 for op in blocks.step.ops), initial=0.0))
        born = [0] * (len(blocks.step.ops) + 1)
        for storage in blocks.step.storages:
            if storage.kind is Kind.GRADIENT and not storage.present_at_start:
                born[storage.alive_from + 1] += storage.nbytes
        self._born = list(accumulate(born))
        """Bytes of gradients that are born before every op."""
        self._kinds: dict[object, int] = {}

    def blocks(self) -> Iterator[Block]:
        """In order of the forward."""
        held = dict.fromkeys(MENU, 0)  # by earlier blocks, if that becomes of all of them
        for stretch in self._stretches:
            ways = self._blocks.ways[stretch.call] if stretch.call is not None else {Action.KEEP: Way()}
            most = max(way.gone for way in ways.values())
            options = tuple(
                self._option(action, ways[action], stretch, most, held[action]) for action in MENU if action in ways
            )
            begin, end = stretch.backward
            yield Block(
                kind=self._kind(options), forward=self._seconds(*stretch.forward),
                backward=self._seconds(begin, end), gradients=self._born[end] - self._born[begin], options=options,
            )  # fmt: skip
            for action in MENU:
                held[action] += most - ways.get(action, ways[Action.KEEP]).gone

    def _option(self, action: Action, way: Way, stretch: _Stretch, most: Bytes, held: Bytes) -> Option:
        levels, beside = self._levels[action], self._start + held
        (first, turn), (begin, end) = stretch.forward, stretch.backward
        born = self._born[end] - self._born[self._part.begin] if begin < end else 0
        device, count = self._device, len(way.moved)
        copies = 0.0
        if not device.overlaps:
            copies = (
                2 * count * device.copy_seconds + way.away / device.out_per_second + way.away / device.in_per_second
            )
        return Option(
            action=action, resident=most - way.gone, moved=way.away if device.overlaps else 0,
            backward=way.seconds + copies,
            forward_peak=max(max(levels[first:turn], default=0) - beside, 0),
            backward_peak=max(max(levels[begin:end], default=0) - beside - born, 0),
        )  # fmt: skip

    def _kind(self, options: Sequence[Option]) -> int:
        """One number for menus of the same bytes and, but for rounding, the same seconds."""
        menu = tuple((replace(option, backward=0.0), f"{option.backward:.9g}") for option in options)
        return self._kinds.setdefault(menu, len(self._kinds))

    def _seconds(self, begin: int, end: int) -> Seconds:
        return self._begins[end] - self._begins[begin]
