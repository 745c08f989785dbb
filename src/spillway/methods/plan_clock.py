"""What a step takes under a plan whose copies begin at ops: a clock that knows ops, two lanes and replays, and nothing
of what an engine costs. For planners that choose the fastest of several plans."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import final

from spillway.costs.device import Device
from spillway.ir import Gap, Recompute, Step
from spillway.ir.lives import Life
from spillway.ir.step import StorageId
from spillway.methods.absent_bytes import comes_in
from spillway.units import Seconds


@final
@dataclass(slots=True)
class _Before:
    """What is done in front of an op, or after the last, in this order."""

    copied: list[StorageId] = field(default_factory=list)
    """Copies out begin."""
    waited: list[StorageId] = field(default_factory=list)
    """Copies out have to be done."""
    fetched: list[StorageId] = field(default_factory=list)
    """Copies in begin."""
    replayed: dict[tuple[int, ...], None] = field(default_factory=dict)
    """Ops of replays; what has the same comes back by one."""
    read: list[StorageId] = field(default_factory=list)
    """Copies in have to be done."""


@final
class PlanClock:
    """Of one step on one device.

    Copies are as `Planned` has them with `begin="at op"`: out right after the last use, waited for where the gap
    begins; in where it ends, waited for by whoever reads.
    """

    def __init__(self, step: Step, lives: Sequence[Life], device: Device) -> None:
        self._step, self._lives, self._device = step, lives, device
        self.begins = list(accumulate((op.seconds or 0.0 for op in step.ops), initial=0.0))
        """When every op begins if nothing is in front of any, and when the last has ended."""
        self._uses: dict[StorageId, list[int]] = defaultdict(list)
        for op in step.ops:
            for storage in {step.values[value].storage for value in (*op.reads, *op.creates)}:
                self._uses[storage].append(op.number)

    def seconds(self, gaps: Iterable[Gap]) -> Seconds:
        """Of the step, under these gaps."""
        around = self._around(gaps)
        if not self._device.overlaps:
            return self._in_turn(around)
        step = self._step
        now, at = 0.0, 0
        free = {True: 0.0, False: 0.0}  # the lanes out and in, by when they are
        left: dict[StorageId, Seconds] = {}  # when each copy out is done
        there: dict[StorageId, Seconds] = {}  # and each copy in
        for op in sorted(around):
            now, at, before = now + self.begins[op] - self.begins[at], op, around[op]
            for storage in before.copied:
                left[storage] = self._copy(storage, now, free, out=True)
            now = max(now, *(left.get(storage, 0.0) for storage in before.waited), 0.0)
            for storage in before.fetched:
                there[storage] = self._copy(storage, max(now, left.get(storage, 0.0)), free, out=False)
            for ops in before.replayed:
                leaves = {step.values[value].storage for number in ops for value in step.ops[number].reads}
                now = max(now, *(there.get(storage, 0.0) for storage in leaves), 0.0)
                now += sum(step.ops[number].seconds or 0.0 for number in ops)
            now = max(now, *(there.pop(storage, 0.0) for storage in before.read), 0.0)
        return now + self.begins[-1] - self.begins[at]

    def _in_turn(self, around: Mapping[int, _Before]) -> Seconds:
        """With copies that keep compute from running."""
        sizes, ops, device = self._step.storages, self._step.ops, self._device
        seconds = self.begins[-1]
        for before in around.values():
            seconds += sum(device.out_seconds(sizes[storage].nbytes) for storage in before.copied)
            seconds += sum(device.in_seconds(sizes[storage].nbytes) for storage in before.fetched)
            seconds += sum(ops[number].seconds or 0.0 for replay in before.replayed for number in replay)
        return seconds

    def _copy(self, storage: StorageId, earliest: Seconds, free: dict[bool, Seconds], *, out: bool) -> Seconds:
        nbytes, device = self._step.storages[storage].nbytes, self._device
        lanes = (out,) if device.duplex else (True, False)
        took = device.out_seconds(nbytes) if out else device.in_seconds(nbytes)
        done = max(earliest, *(free[lane] for lane in lanes)) + took
        free.update(dict.fromkeys(lanes, done))
        return done

    def _around(self, gaps: Iterable[Gap]) -> dict[int, _Before]:
        ops, step, lives = len(self._step.ops), self._step, self._lives
        made: dict[int, _Before] = defaultdict(_Before)
        gaps = sorted(gaps, key=lambda gap: (gap.start, gap.value))
        away = {step.values[gap.value].storage for gap in gaps if gap.end == ops < lives[gap.value].ends}
        on_host = {one.id for one in step.values if not one.version and one.storage in away}
        early = {gap.value for gap in gaps if not gap.start}
        for value in sorted(on_host - early):
            self._fetch(made, step.values[value].storage, 0)
        for gap in gaps:
            life, storage = lives[gap.value], step.values[gap.value].storage
            if isinstance(gap.home, Recompute):
                made[gap.end].replayed[gap.home.ops] = None
                continue
            if gap.value not in on_host:
                used = max(use for use in life.uses if use < gap.start)
                made[used + 1].copied.append(storage)
                made[gap.start].waited.append(storage)
            on_host.add(gap.value)
            if comes_in(life, gap.end, ops):
                self._fetch(made, storage, gap.end)
        return made

    def _fetch(self, made: dict[int, _Before], storage: StorageId, op: int) -> None:
        made[op].fetched.append(storage)
        uses = self._uses[storage]
        place = bisect_left(uses, op)
        if place < len(uses):
            made[uses[place]].read.append(storage)
