"""Execution blocks: where a resolved step is cut so that copies for the next block run beside this one.

DyNN-Offload (HPCA 2024), sections IV-B, IV-D and IV-E. The paper takes Sentinel's partition and says of it that it
maximizes the overlap within the capacity; what stands here is ours: a block takes as many ops as fit (`max_fill`), the
quickest of some such fills is taken (`quickest_fill`), or cuts are searched (`search_blocks`). With two buffers, as
published, a block may touch half of the memory; while it computes, the link first takes out what the block before
leaves behind, then brings what the next one lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Final, Self, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from spillway.costs.device import Device
from spillway.errors import BudgetInfeasible
from spillway.ir.step import Step
from spillway.units import Bytes, Seconds

Cuts: TypeAlias = Sequence[int]
"""The first op of every block, then the number of ops: block b is the half-open interval from `cuts[b]` to the next."""

CANDIDATES: Final = 72
"""Places at which `search_blocks` may cut, besides those of `quickest_fill`."""

SHARES: Final = (2, 4, 8, 16, 32, 64)
"""What a buffer is divided by for the first block of a ramp (`quickest_fill`), and memory that is not halved for every
block, as small ones leave room for what is used again soon."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Touches:
    """What every op of a resolved step has to have in memory. Storages are numbered from 0."""

    starts: NDArray[np.int64]
    """[ops + 1]: op k touches `storages[starts[k]:starts[k + 1]]`."""
    storages: NDArray[np.int64]
    """[touches], each storage once an op."""
    writes: NDArray[np.bool_]
    """[touches]: whether the op changes or creates it."""
    seconds: NDArray[np.float64]
    """[ops]: how long each computes."""
    nbytes: NDArray[np.int64]
    """[storages]"""
    there: NDArray[np.bool_]
    """[storages]: whether it exists before the step."""
    until: NDArray[np.int64]
    """[storages]: the op from which on it is dead; more than the number of ops if it outlives the step."""

    @classmethod
    def of_step(cls, step: Step) -> Self:
        """Those of a recorded step. Raises ValueError if an op has no seconds."""
        if any(op.seconds is None for op in step.ops):
            raise ValueError("the ops of a step that is cut into blocks have seconds")
        starts, storages, writes = [0], list[int](), list[bool]()
        for op in step.ops:
            made = {step.values[value].storage for value in op.creates}
            read = {step.values[value].storage for value in op.reads}
            storages += sorted(made | read)
            writes += [storage in made for storage in sorted(made | read)]
            starts.append(len(storages))
        return cls(
            starts=np.array(starts), storages=np.array(storages, np.int64), writes=np.array(writes, bool),
            seconds=np.array([op.seconds for op in step.ops], np.float64),
            nbytes=np.array([info.nbytes for info in step.storages], np.int64),
            there=np.array([info.present_at_start for info in step.storages], bool),
            until=np.array(
                [len(step.ops) + 1 if one.present_at_end else one.alive_until for one in step.storages], np.int64
            ),
        )  # fmt: skip

    @property
    def ops(self) -> int:
        return len(self.seconds)

    def first_and_last(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first op that touches each storage, and the last; the number of ops and -1 where none does."""
        ops = np.repeat(np.arange(self.ops), np.diff(self.starts))
        first, last = np.full(len(self.nbytes), self.ops), np.full(len(self.nbytes), -1)
        np.minimum.at(first, self.storages, ops)
        np.maximum.at(last, self.storages, ops)
        return first, last


def max_fill(touches: Touches, most: Bytes, *, alone: Bytes | None = None) -> list[int]:
    """Blocks that each take ops until the distinct storages that they touch would pass `most` bytes. O(touches).

    With two buffers `most` is half of the memory. Where memory is not halved, an op that alone touches more may be a
    block of its own, up to `alone` bytes. Raises BudgetInfeasible for an op that touches more than that.
    """
    limit, times = (most, 2) if alone is None else (max(alone, most), 1)
    starts, storages, nbytes = touches.starts.tolist(), touches.storages.tolist(), touches.nbytes.tolist()
    cuts, inside, filled = [0], set[int](), 0
    for op in range(touches.ops):
        touched = storages[starts[op] : starts[op + 1]]
        new = [one for one in touched if one not in inside]
        more = sum([nbytes[one] for one in new])
        if filled + more > most and op > cuts[-1]:
            cuts.append(op)
            inside, new = set(), touched
            filled, more = 0, sum([nbytes[one] for one in touched])
        if filled + more > limit:
            raise BudgetInfeasible(
                needed=times * more, allowed=times * limit, op="a block of one op", op_index=op,
                smallest_budget=times * largest_op(touches), exact=True,
            )  # fmt: skip
        inside.update(new)
        filled += more
    return [*cuts, touches.ops] if touches.ops else cuts


def largest_op(touches: Touches) -> Bytes:
    """The most bytes that one op touches."""
    sums = np.add.reduceat(np.append(touches.nbytes[touches.storages], 0), touches.starts[:-1])
    return int(np.where(np.diff(touches.starts) > 0, sums, 0).max(initial=0))


def quickest_fill(touches: Touches, most: Bytes, device: Device) -> list[int]:
    """The cuts that take the least time with two buffers, of those that are found in one pass each.

    Nothing hides what the first block lacks, nor what a block lacks beyond what the one before computes. So the fullest
    block is the worst to begin with where ops outlast copies. Tried are:

    - `max_fill`, which has the fewest blocks and mostly the fewest copies; and the same from the last op to the first,
      which begins with the block that is not full;
    - ramps: first a share of a buffer (`SHARES`), then twice as much from block to block until they are full;
    - parts of even ops, bytes and seconds, about as few as fit, and no fewer than the blocks of `max_fill`.

    Raises what `max_fill` raises.
    """
    filled = max_fill(touches, most)
    fills, halves = _Fills(touches, most), Halves(touches)
    tried = [
        filled, fills.from_the_end(), *(fills.ramp(share) for share in SHARES),
        *(fills.even(weights, len(filled) - 1) for weights in _weights(touches)),
    ]  # fmt: skip
    return min(tried, key=lambda cuts: halves.times(cuts, device)[0])


def search_blocks(touches: Touches, most: Bytes, device: Device, candidates: int = CANDIDATES) -> list[int]:
    """The cuts among so many places that take the least time with two buffers, by dynamic programming.

    With C for what a block computes, and the link's times for what [k, l) lacks after [j, k) and for what [i, j) leaves
    behind that [j, k) does not use, f(i, j, k) is the time from op j on:

        f(i, j, k) = min over l of max(C(j, k), out(i, j, k) + in(j, k, l)) + f(j, k, l)

    What one block leaves to the next but one is taken to be copied out and in. O(candidates * width^3), where width is
    the most places that a block covers. Places are the cuts of `quickest_fill`, which is returned where it is no slower
    by `Halves`, and those into parts of even bytes.

    Raises what `max_fill` raises.
    """
    quick = quickest_fill(touches, most, device)
    places = sorted({*quick, *_even(_weights(touches)[1], candidates)})
    sets = _sets_of(touches, places, most)
    clock = np.concatenate([[0.0], np.cumsum(touches.seconds)])[places]
    out, lacking = _links(touches, places, sets, device)
    rest: dict[tuple[int, int], NDArray[np.float64]] = {}  # by (j, k): over the l of `after[k]`, f(j, k, l)
    chosen: dict[tuple[int, int], NDArray[np.intp]] = {}
    before, after = _neighbours(sets, len(places))
    for j, k in sorted(sets, reverse=True):
        computes, left = clock[k] - clock[j], out.get((j, k), np.zeros(1))
        if not after[k]:
            rest[j, k], chosen[j, k] = np.maximum(computes, left), np.full(len(left), -1)
            continue
        following = np.array([rest[k, one][before[k].index(j)] for one in after[k]])
        times = np.maximum(computes, left[:, None] + lacking[j, k][None]) + following
        rest[j, k], chosen[j, k] = times.min(axis=1), times.argmin(axis=1)
    k = min(after[0], key=lambda one: rest[0, one][0])
    j, row, found = 0, 0, [0, places[k]]
    while (place := int(chosen[j, k][row])) != -1:
        row = before[k].index(j)
        j, k = k, after[k][place]
        found.append(places[k])
    halves = Halves(touches)
    return min((quick, found), key=lambda cuts: halves.times(cuts, device)[0])


_Sets: TypeAlias = dict[tuple[int, int], tuple[NDArray[np.float64], NDArray[np.float64]]]
_Pairs: TypeAlias = dict[tuple[int, int], NDArray[np.float64]]


def _neighbours(sets: _Sets, places: int) -> tuple[list[list[int]], list[list[int]]]:
    """Of every place, where blocks that end there begin, and where those that begin there end."""
    before: list[list[int]] = [[] for _ in range(places)]
    after: list[list[int]] = [[] for _ in range(places)]
    for i, j in sorted(sets):
        before[j].append(i)
        after[i].append(j)
    return before, after


def _links(touches: Touches, places: Sequence[int], sets: _Sets, device: Device) -> tuple[_Pairs, _Pairs]:
    """Seconds by (j, k): to take out what each [i, j) leaves behind, and to bring in what each [k, l) lacks."""
    nbytes = touches.nbytes.astype(np.float64)
    first, last = touches.first_and_last()
    before, after = _neighbours(sets, len(places))
    out: _Pairs = {}
    lacking: _Pairs = {}
    for j in range(1, len(places) - 1):
        if not after[j] or not before[j]:
            continue
        behind = np.stack([sets[i, j][0] for i in before[j]])
        written = np.stack([sets[i, j][1] for i in before[j]])
        ahead = np.stack([sets[j, k][0] for k in after[j]])
        old = nbytes * (touches.there | (first < places[j]))
        alive = nbytes * ((touches.until > touches.ops) | (last >= places[j]))
        leaves = ((written * alive).sum(axis=1)[:, None] - (written * alive) @ ahead.T) / device.out_per_second
        lacks = ((ahead @ old)[None] - (behind * old) @ ahead.T) / device.in_per_second
        leaves += device.copy_seconds * (leaves > 0)
        lacks += device.copy_seconds * (lacks > 0)
        out |= {(j, k): leaves[:, column] for column, k in enumerate(after[j])}
        lacking |= {(i, j): lacks[row] for row, i in enumerate(before[j])}
    return out, lacking


def _weights(touches: Touches) -> tuple[NDArray[np.float64], ...]:
    """Of every op: one, the bytes that it touches, its seconds."""
    each = np.repeat(np.arange(touches.ops), np.diff(touches.starts))
    touched = np.bincount(each, touches.nbytes[touches.storages], touches.ops)
    return np.ones(touches.ops), touched.astype(np.float64), touches.seconds


def _even(weights: NDArray[np.float64], count: int) -> list[int]:
    """Cuts into so many parts of about the same weight."""
    total = np.cumsum(weights)
    inner = np.searchsorted(total, total[-1] * np.arange(1, count) / count) + 1
    cuts: list[int] = np.unique(np.append(inner[inner < len(weights)], (0, len(weights)))).tolist()
    return cuts


@final
class _Fills:
    """Ways to fill blocks up to so many bytes each, where every op alone fits."""

    def __init__(self, touches: Touches, most: Bytes) -> None:
        self._starts: list[int] = touches.starts.tolist()
        self._storages: list[int] = touches.storages.tolist()
        self._nbytes: list[Bytes] = touches.nbytes.tolist()
        self._ops, self._most = touches.ops, most
        self._ends = np.array(self._longest(), np.int64)

    def _longest(self) -> list[int]:
        """Where the longest block ends that begins at each op."""
        ends, counts, filled, end = list[int](), [0] * len(self._nbytes), 0, 0
        for op in range(self._ops):
            while end < self._ops:
                touched = self._storages[self._starts[end] : self._starts[end + 1]]
                more = sum([self._nbytes[one] for one in touched if not counts[one]])
                if filled + more > self._most:
                    break
                for one in touched:
                    counts[one] += 1
                filled, end = filled + more, end + 1
            ends.append(end)
            for one in self._storages[self._starts[op] : self._starts[op + 1]]:
                counts[one] -= 1
                if not counts[one]:
                    filled -= self._nbytes[one]
        return ends

    def ramp(self, share: int) -> list[int]:
        """First that share of a buffer, then twice as much from block to block until they are full."""
        cuts, limit = [0], self._most // share
        while limit < self._most and cuts[-1] < self._ops:
            cuts.append(self._end(cuts[-1], limit))
            limit *= 2
        while cuts[-1] < self._ops:
            cuts.append(int(self._ends[cuts[-1]]))
        return cuts

    def _end(self, first: int, limit: Bytes) -> int:
        """Of a block that takes ops up to that limit, at least one."""
        inside, filled = set[int](), 0
        for op in range(first, self._ops):
            new = [one for one in self._storages[self._starts[op] : self._starts[op + 1]] if one not in inside]
            filled += sum([self._nbytes[one] for one in new])
            if filled > limit and op > first:
                return op
            inside.update(new)
        return self._ops

    def from_the_end(self) -> list[int]:
        """Each as long as it can be, the last first."""
        cuts = [self._ops]
        while cuts[-1] > 0:
            cuts.append(int(np.searchsorted(self._ends, cuts[-1])))
        return cuts[::-1]

    def even(self, weights: NDArray[np.float64], least: int) -> list[int]:
        """Parts of about the same weight, so many or more until they fit; from 32 on a sixteenth more at a time."""
        count = least
        while count < self._ops:
            cuts = _even(weights, count)
            if np.all(self._ends[cuts[:-1]] >= cuts[1:]):
                return cuts
            count += max(count // 16, 1)
        return list(range(self._ops + 1))


def _sets_of(touches: Touches, places: Sequence[int], most: Bytes) -> _Sets:
    """Of every block that fits, by the indices of its ends: which storages it touches, and which of them it writes."""
    found: _Sets = {}
    for i in range(len(places) - 1):
        touched, written = np.zeros(len(touches.nbytes)), np.zeros(len(touches.nbytes))
        for j in range(i + 1, len(places)):
            part = slice(touches.starts[places[j - 1]], touches.starts[places[j]])
            touched[touches.storages[part]] = 1
            written[touches.storages[part][touches.writes[part]]] = 1
            if touched @ touches.nbytes > most:
                break
            found[i, j] = touched.copy(), written.copy()
    return found


# ---------------------------------------------------------------------- what blocks take


@final
class Halves:
    """What a step takes in two buffers that is known in advance, by where it is cut.

    As block b begins, the link takes out what neither it nor the next one touches, although there may be room for it,
    and then brings what block b + 1 lacks, as published (section IV-E); block b + 1 begins when both it and block b are
    done. Touches are sorted once, by storage and then by op.
    """

    def __init__(self, touches: Touches) -> None:
        self._touches = touches
        order = np.argsort(touches.storages, kind="stable")
        self._storages, self._writes = touches.storages[order], touches.writes[order]
        self._ops = np.repeat(np.arange(touches.ops), np.diff(touches.starts))[order]

    def times(self, cuts: Cuts, device: Device) -> tuple[Seconds, Bytes, Bytes]:
        """What the step takes, and its bytes out and in.

        A storage is in memory for runs of blocks, of which no more than one after the other does not touch it: it
        comes in beside the block before a run, and goes out beside the one after it, if it was written and lives on.
        """
        touches, ends, blocks = self._touches, np.asarray(cuts), len(cuts) - 1
        block = np.repeat(np.arange(blocks), np.diff(ends))[self._ops]
        other = np.ones(len(block), bool)
        other[1:] = self._storages[1:] != self._storages[:-1]
        begins = other.copy()
        begins[1:] |= np.diff(block) > 2  # what the next block but one touches stays
        runs = np.flatnonzero(begins)
        storage, fresh, first = self._storages[runs], other[runs], block[runs]
        after = block[np.append(runs, len(block))[1:] - 1] + 1  # the block after each run
        comes = ~fresh | touches.there[storage]
        again = ~np.append(fresh, True)[1:]
        goes = (after < blocks) & (again | (touches.until[storage] > ends[after]))
        goes &= ~comes | (np.logical_or.reduceat(self._writes, runs) if len(runs) else fresh)
        nbytes = touches.nbytes[storage]
        brought = np.bincount(first[comes], nbytes[comes], blocks + 1)
        out = np.bincount(after[goes], nbytes[goes], blocks)
        link = out / device.out_per_second + brought[1:] / device.in_per_second
        link += device.copy_seconds * ((out > 0).astype(int) + (brought[1:] > 0))
        computed = np.add.reduceat(np.append(touches.seconds, 0.0), ends[:-1]) if blocks else np.zeros(0)
        clock = float(brought[0] / device.in_per_second + np.maximum(computed, link).sum())
        return clock, int(out.sum()), int(brought.sum())


@final
class Uses:
    """What each block touches, and by which block a storage is touched next. Asked as the blocks come."""

    def __init__(self, touches: Touches, cuts: Cuts) -> None:
        starts, storages = touches.starts, touches.storages
        self.blocks = [set(storages[starts[i] : starts[j]].tolist()) for i, j in pairwise(cuts)]
        self._nbytes: list[Bytes] = touches.nbytes.tolist()
        self._uses: dict[int, list[int]] = {}  # the last first
        for number in reversed(range(len(self.blocks))):
            for storage in self.blocks[number]:
                self._uses.setdefault(storage, []).append(number)

    def following(self, number: int) -> set[int]:
        """The storages of the block after that one."""
        return self.blocks[number + 1] if number + 1 < len(self.blocks) else set()

    def nbytes(self, storages: Iterable[int]) -> Bytes:
        return sum([self._nbytes[one] for one in storages])

    def last_used(self, free: Iterable[int], number: int, wanted: float) -> list[int]:
        """Those that are used last of all after that block, the last in front, until they have so many bytes."""
        chosen = list[int]()
        for storage in sorted(free, key=lambda one: (-self._next(one, number), one)):
            if wanted <= 0:
                break
            chosen.append(storage)
            wanted -= self._nbytes[storage]
        return chosen

    def _next(self, storage: int, number: int) -> float:
        uses = self._uses.get(storage, [])
        while uses and uses[-1] <= number:
            uses.pop()
        return uses[-1] if uses else inf
