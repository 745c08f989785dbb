"""Execution blocks: where a resolved step is cut so that copies for the next block run beside this one.

DyNN-Offload (HPCA 2024), sections IV-B, IV-D and IV-E. The paper takes Sentinel's partition and says of it that it
maximizes the overlap within the capacity; what stands here is ours: a block takes as many ops as fit (`max_fill`), or the
cuts are searched (`search_blocks`). With two buffers, as published, a block may touch half of the memory; while it
computes, the link first takes out what the block before leaves behind, then brings what the next one lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
"""Places at which `search_blocks` may cut, besides those of `max_fill`."""


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
    stays: NDArray[np.bool_]
    """[storages]: whether it exists after the step."""

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
            stays=np.array([info.present_at_end for info in step.storages], bool),
        )  # fmt: skip

    @property
    def ops(self) -> int:
        """How many."""
        return len(self.seconds)

    def first_and_last(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first op that touches each storage, and the last; the number of ops and -1 where none does."""
        ops = np.repeat(np.arange(self.ops), np.diff(self.starts))
        first, last = np.full(len(self.nbytes), self.ops), np.full(len(self.nbytes), -1)
        np.minimum.at(first, self.storages, ops)
        np.maximum.at(last, self.storages, ops)
        return first, last


def max_fill(touches: Touches, most: Bytes) -> list[int]:
    """Blocks that each take ops until the distinct storages that they touch would pass `most` bytes.

    O(touches). Raises BudgetInfeasible, with twice what it touches, for an op that alone touches more: with two
    buffers `most` is half of the memory.
    """
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
        if filled + more > most:
            raise BudgetInfeasible(
                needed=2 * more, allowed=2 * most, op="an op in one of two buffers", op_index=op,
                smallest_budget=2 * _largest_op(touches), exact=True,
            )  # fmt: skip
        inside.update(new)
        filled += more
    return [*cuts, touches.ops]


def _largest_op(touches: Touches) -> Bytes:
    sums = np.add.reduceat(np.append(touches.nbytes[touches.storages], 0), touches.starts[:-1])
    return int(np.where(np.diff(touches.starts) > 0, sums, 0).max(initial=0))


def search_blocks(touches: Touches, most: Bytes, device: Device, candidates: int = CANDIDATES) -> list[int]:
    """The cuts among so many places that take the least time with two buffers, by dynamic programming.

    With f(i, j) for the time from op j on if the block before it is [i, j), C for what it computes and the link's times
    for what [j, k) lacks after it and for what it leaves behind:

        f(i, j) = min over k of max(C(i, j), in(i, j, k) + out(i, j, k)) + f(j, k)

    What leaves is charged one block early. O(candidates * width^2) products of sets, where width is the most places
    that a block covers. What `max_fill` cuts is returned where `block_times` finds that faster.

    Raises what `max_fill` raises.
    """
    filled = max_fill(touches, most)
    places = sorted({*filled, *_quantiles(touches, candidates)})
    sets = _sets_of(touches, places, most)
    nbytes = touches.nbytes.astype(np.float64)
    first, last = touches.first_and_last()
    clock = np.concatenate([[0.0], np.cumsum(touches.seconds)])
    best: dict[tuple[int, int], tuple[Seconds, int]] = {}
    for j in range(len(places) - 1, 0, -1):
        before = [i for i in range(j) if (i, j) in sets]
        after = [k for k in range(j + 1, len(places)) if (j, k) in sets]
        computed = np.array([clock[places[j]] - clock[places[i]] for i in before])
        if not after:
            best |= {(i, j): (float(one), -1) for i, one in zip(before, computed, strict=True)}
            continue
        behind, written = (np.stack([sets[i, j][which] for i in before]) for which in (0, 1))
        ahead = np.stack([sets[j, k][0] for k in after])
        old = nbytes * (touches.there | (first < places[j]))
        alive = nbytes * (touches.stays | (last >= places[j]))
        lacking = ahead @ old - (behind * old) @ ahead.T
        leaving = ((written * alive).sum(axis=1)[:, None]) - (written * alive) @ ahead.T
        link = lacking / device.in_per_second + leaving / device.out_per_second
        rest = np.array([best[j, k][0] for k in after])
        times = np.maximum(computed[:, None], link) + rest
        chosen = times.argmin(axis=1)
        best |= {
            (i, j): (float(times[row, one]), after[one])
            for row, (i, one) in enumerate(zip(before, chosen.tolist(), strict=True))
        }
    j = min((j for j in range(1, len(places)) if (0, j) in best), key=lambda j: best[0, j][0])
    i, found = 0, [0, places[j]]
    while best[i, j][1] != -1:
        i, j = j, best[i, j][1]
        found.append(places[j])
    return min(
        (found, filled), key=lambda cuts: block_times(touches, cuts, 2 * most, device, double_buffer=True).seconds
    )


def _quantiles(touches: Touches, count: int) -> Iterator[int]:
    """Ops between which about the same bytes are touched."""
    moved = np.cumsum(np.bincount(
        np.repeat(np.arange(touches.ops), np.diff(touches.starts)), touches.nbytes[touches.storages], touches.ops
    ))  # fmt: skip
    yield from (int(one) for one in np.searchsorted(moved, np.linspace(0, moved[-1], count + 1)[1:-1]))


def _sets_of(
    touches: Touches, places: Sequence[int], most: Bytes
) -> dict[tuple[int, int], tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Of every block that fits, by the indices of its ends: which storages it touches, and which of them it writes."""
    found: dict[tuple[int, int], tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
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
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """What a step takes in blocks on a device."""

    seconds: Seconds
    """From its beginning to its end."""
    stall_seconds: Seconds
    """Of them, those in which compute waited for copies."""
    bytes_out: Bytes
    """Copied to host memory."""
    bytes_in: Bytes
    """Copied back."""


def block_times(touches: Touches, cuts: Cuts, allowed: Bytes, device: Device, *, double_buffer: bool) -> BlockTimes:
    """What the step takes if it is known in advance and cut so.

    As block b begins, the link takes out what has to leave and then brings what block b + 1 lacks, one after the other,
    as published (section IV-E); block b + 1 begins when both it and block b are done.

    Arguments:
        double_buffer: Two halves, as published: what neither block b nor the next touches leaves, although there may
            be room for it. Otherwise only as much leaves as block b + 1 has no room for in `allowed`, and first what
            is used again last.
    """
    blocks = [set(touches.storages[touches.starts[i] : touches.starts[j]].tolist()) for i, j in pairwise(cuts)]
    uses = _uses(blocks)
    run = _Run(touches, allowed, uses)
    clock = link = run.bring(blocks[0]) / device.in_per_second if blocks else 0.0
    computed = np.add.reduceat(np.append(touches.seconds, 0.0), cuts[:-1]) if blocks else np.zeros(0)
    for number, block in enumerate(blocks):
        written = touches.writes[touches.starts[cuts[number]] : touches.starts[cuts[number + 1]]]
        part = touches.storages[touches.starts[cuts[number]] : touches.starts[cuts[number + 1]]]
        following = blocks[number + 1] if number + 1 < len(blocks) else set[int]()
        out = run.leave(block, following, number, double_buffer=double_buffer)
        back = run.bring(following)
        run.wrote(set(part[written].tolist()))
        link = out / device.out_per_second + back / device.in_per_second
        link += device.copy_seconds * ((out > 0) + (back > 0))
        clock += max(float(computed[number]), link)
        run.forget(block, number)
    total = float(touches.seconds.sum())
    return BlockTimes(seconds=clock, stall_seconds=clock - total, bytes_out=run.bytes_out, bytes_in=run.bytes_in)


def _uses(blocks: Sequence[set[int]]) -> dict[int, list[int]]:
    """Of every storage the blocks that touch it, the last first."""
    uses: dict[int, list[int]] = {}
    for number in reversed(range(len(blocks))):
        for storage in blocks[number]:
            uses.setdefault(storage, []).append(number)
    return uses


@final
class _Run:
    """What is in memory, block by block."""

    def __init__(self, touches: Touches, allowed: Bytes, uses: dict[int, list[int]]) -> None:
        self._nbytes = touches.nbytes.tolist()
        self._stays = touches.stays.tolist()
        self._allowed = allowed
        self._uses = uses
        self._hosted = set(np.flatnonzero(touches.there).tolist())  # those of which host memory has these bytes
        self._present = set[int]()
        self._born = set(self._hosted)  # those that exist
        self.bytes_out = 0
        self.bytes_in = 0

    def bring(self, block: set[int]) -> Bytes:
        """Everything that the block touches is there; the bytes that were copied in."""
        lacking = block - self._present
        copied = self._sum(lacking & self._born)
        self._present |= lacking
        self._born |= lacking
        self.bytes_in += copied
        return copied

    def leave(self, block: set[int], following: set[int], number: int, *, double_buffer: bool) -> Bytes:
        """Room for the block after block `number`; the bytes that were copied out."""
        free = self._present - block - following
        if not double_buffer:
            wanted = self._sum(self._present | following) - self._allowed
            free = self._farthest(free, number, wanted)
        copied = self._sum(free - self._hosted)
        self._hosted |= free
        self._present -= free
        self.bytes_out += copied
        return copied

    def _farthest(self, free: set[int], number: int, wanted: Bytes) -> set[int]:
        """Of those that may leave, those used again last, until they have `wanted` bytes."""
        chosen = set[int]()
        for storage in sorted(free, key=lambda one: (-self._next(one, number), one)):
            if wanted <= 0:
                break
            chosen.add(storage)
            wanted -= self._nbytes[storage]
        return chosen

    def _next(self, storage: int, number: int) -> float:
        uses = self._uses[storage]
        while uses and uses[-1] <= number:
            uses.pop()
        return uses[-1] if uses else float("inf")

    def wrote(self, storages: set[int]) -> None:
        """Host memory's bytes of these are old."""
        self._hosted -= storages

    def forget(self, block: set[int], number: int) -> None:
        """What dies with block `number` is gone."""
        dead = {one for one in block if not self._stays[one] and self._next(one, number) == float("inf")}
        self._present -= dead

    def _sum(self, storages: set[int]) -> Bytes:
        nbytes = self._nbytes
        return sum([nbytes[one] for one in storages])
