"""The paper's machine: a plan carried out as NNabla does it, by the clock, and the allocator that NNabla has without
virtual addresses.

NOTE [As in sony/nnabla and sony/nnabla-ext-cuda]. Around an op, in this order: what is precleared is freed; copies in
begin, and in front of each, as long as the budget has no room for it, the oldest copy out is waited for and freed, for
which the host waits and lets compute run dry; what else the op needs room for is waited for likewise; the op runs once
its inputs are there; copies out of what leaves the window begin. Every copy waits for the op in front of it. Both
directions share one lane, unless the device is duplex. What host memory has already is not copied out again. At the
end of a step everything leaves, and the host waits; what the plan has in memory when a step begins comes in before the
first op.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, final

from spillway.costs import Device
from spillway.errors import DeviceFullError
from spillway.ir import Gap, Plan, Step
from spillway.ir.account import comes_back
from spillway.ir.lives import Life, lives_of
from spillway.simulation.allocators import AbstractAllocator, AbstractPools, BestFit, Block, ChunkAllocator, rounded_up
from spillway.units import Bytes, KiB, MiB, Seconds


class Memory(NamedTuple):
    """Memory of a storage is taken, or given back."""

    storage: int
    taken: bool


@final
@dataclass(slots=True)
class _Around:
    """What is done around one op, by numbers of storages."""

    cleared: list[int] = field(default_factory=list)
    """Freed before it; nobody reads them again."""
    waited: list[int] = field(default_factory=list)
    """Freed before it once they are copied out, the oldest in front."""
    fetched: list[int] = field(default_factory=list)
    """Copies in begin before it."""
    used: list[int] = field(default_factory=list)
    """It reads, writes or makes them."""
    copied: list[int] = field(default_factory=list)
    """Copies out begin after it."""
    dies: list[int] = field(default_factory=list)
    """After it."""


@final
class Script:
    """A plan for a step, as the list of what is done. What has bytes counts as whole chunks, unless it is exempt.

    With `at_once` what is copied out is freed as its copy begins: no machine is as fast.
    """

    def __init__(
        self, step: Step, plan: Plan, chunk: Bytes = 1, exempt: Bytes = 0, *, at_once: bool = False
    ) -> None:  # fmt: skip
        self._allowed = plan.allowed
        self._at_once = at_once
        self._sizes = [storage.nbytes for storage in step.storages]
        self._counted = [nbytes if nbytes < exempt else rounded_up(nbytes, chunk) for nbytes in self._sizes]
        self._seconds = [op.seconds or 0.0 for op in step.ops]
        self._around = [_Around() for _ in step.ops]
        self._write_ops(step)
        away = {step.values[gap.value].storage for gap in plan.gaps if not gap.start}
        self._around[0].fetched += [
            one.id for one in step.storages
            if one.present_at_start and one.alive_until and one.nbytes and one.id not in away
        ]  # fmt: skip
        gaps: dict[int, list[Gap]] = defaultdict(list)
        for gap in sorted(plan.gaps, key=lambda gap: gap.start):
            gaps[gap.value].append(gap)
        latest = {value.storage: value.id for value in step.values}
        for value, life in enumerate(lives_of(step)):
            storage = step.storages[step.values[value].storage]
            last = latest[storage.id] == value and storage.present_at_end
            if storage.nbytes and (last or value in gaps):
                self._write_value(storage.id, life, gaps[value], leaves=last)
        self._in_order_of_leaving()

    def _write_ops(self, step: Step) -> None:
        for op in step.ops:
            storages = (step.values[value].storage for value in (*op.reads, *op.creates))
            self._around[op.number].used = [one for one in dict.fromkeys(storages) if self._sizes[one]]
        for storage in step.storages:
            if storage.nbytes and storage.alive_until and not storage.present_at_end:
                self._around[storage.alive_until - 1].dies.append(storage.id)

    def _write_value(self, storage: int, life: Life, gaps: list[Gap], *, leaves: bool) -> None:
        """When it is copied: once, as host memory keeps it."""
        ops = len(self._around)
        on_host = life.created < 0
        for gap in gaps:
            back = comes_back(gap, life, ops)
            lost = not back and (life.overwritten is not None or life.dies <= ops)  # nobody reads it again
            if not (lost or on_host):
                on_host = True
                self._around[max(use for use in life.uses if use < gap.start)].copied.append(storage)
            if gap.start:
                left = max(use for use in life.uses if use < gap.start) + 1 if self._at_once else gap.start
                around = self._around[left]
                (around.cleared if lost else around.waited).append(storage)
            if back:
                self._around[gap.end].fetched.append(storage)
        if leaves and not on_host:
            self._around[max(life.uses[-1], 0)].copied.append(storage)

    def _in_order_of_leaving(self) -> None:
        used = dict[int, int]()
        for op, around in enumerate(self._around):
            around.waited.sort(key=lambda storage: used.get(storage, -1))
            used.update(dict.fromkeys(around.used, op))

    @property
    def bytes_out(self) -> Bytes:
        """Copied out in a step."""
        return sum(self._sizes[storage] for around in self._around for storage in around.copied)

    @property
    def bytes_in(self) -> Bytes:
        """Copied in."""
        return sum(self._sizes[storage] for around in self._around for storage in around.fetched)

    def seconds(self, device: Device) -> Seconds:
        """Of a step, by the device's link and the seconds of the ops."""
        now = 0.0
        free = {True: 0.0, False: 0.0}  # the lanes out and in, by when they are
        left: dict[int, Seconds] = {}  # when each copy out is done
        there: dict[int, Seconds] = {}  # and each copy in

        def copy(storage: int, *, out: bool) -> Seconds:
            lanes = (out,) if device.duplex else (True, False)
            took = device.out_seconds(self._sizes[storage]) if out else device.in_seconds(self._sizes[storage])
            done = max(now, *(free[lane] for lane in lanes), 0.0 if out else left.get(storage, 0.0)) + took
            free.update(dict.fromkeys(lanes, done))
            return done

        for around, seconds in zip(self._around, self._seconds, strict=True):
            now = max(now, *(left.get(storage, 0.0) for storage in around.waited), 0.0)
            for storage in around.fetched:
                there[storage] = copy(storage, out=False)
            now = max(now, *(there.pop(storage, 0.0) for storage in around.used), 0.0) + seconds
            for storage in around.copied:
                left[storage] = copy(storage, out=True)
        return max(now, *free.values())

    def memory(self) -> Iterator[Memory]:
        """What a step asks of the allocator, in order. Nothing is there when it begins, nor when it has ended."""
        there: dict[int, None] = {}
        for around in self._around:
            waited = deque(around.waited)
            yield from self._freed(around.cleared, there)
            for storage in around.fetched:
                while waited and self._bytes((*there, storage)) > self._allowed:
                    yield from self._freed([waited.popleft()], there)
                yield from self._taken([storage], there)
            yield from self._freed(waited, there)
            yield from self._taken(around.used, there)
            yield from self._freed(around.dies, there)
        yield from self._freed(list(there), there)

    def _bytes(self, there: Iterable[int]) -> Bytes:
        return sum(self._counted[storage] for storage in there)

    @staticmethod
    def _freed(storages: Iterable[int], there: dict[int, None]) -> Iterator[Memory]:
        for storage in storages:
            if storage in there:
                del there[storage]
                yield Memory(storage, False)

    @staticmethod
    def _taken(storages: Iterable[int], there: dict[int, None]) -> Iterator[Memory]:
        for storage in storages:
            if storage not in there:
                there[storage] = None
                yield Memory(storage, True)

    def fits(self, allocator: AbstractAllocator, steps: int) -> bool:
        """Whether the allocator serves so many steps in a row."""
        tokens, asked = dict[int, Any](), list(self.memory())
        try:
            for _ in range(steps):
                for storage, taken in asked:
                    if taken:
                        tokens[storage] = allocator.allocate(self._sizes[storage])
                    else:
                        allocator.free(tokens.pop(storage))
        except DeviceFullError:
            return False
        return True


# ---------------------------------------------------------------------- allocators: NNabla's, and TensorFlow's

SMALL: Final[Bytes] = MiB
"""Smaller requests have a pool of their own."""
SMALL_ROUNDING: Final[Bytes] = 512
LARGE_ROUNDING: Final[Bytes] = 128 * KiB
REGION_ROUNDING: Final[Bytes] = 256
MOST_REST: Final[Bytes] = 128 * MiB
"""Both of TensorFlow's allocator: `kMinAllocationSize`, `kMaxInternalFragmentation`."""


@final
class BucketAllocator(AbstractPools):
    """NNabla's caching allocator: the smallest free block that fits, split where enough is left over.

    A new piece of memory is taken from the device for what fits nowhere; where the device has none, pieces in which
    nothing is in use are given back first.
    """

    def __init__(self, limit: Bytes) -> None:
        super().__init__(limit, small=BestFit(least_rest=SMALL_ROUNDING), large=BestFit(least_rest=SMALL))

    def _place_of(self, nbytes: Bytes) -> tuple[BestFit, Bytes, Bytes]:
        small = nbytes < SMALL
        rounded = rounded_up(nbytes, SMALL_ROUNDING if small else LARGE_ROUNDING)
        return self._small if small else self._large, rounded, rounded


@final
class OneRegion(AbstractAllocator):
    """TensorFlow's allocator ("best fit with coalescing"): all memory is one region, in pieces of 256 bytes; the
    smallest free block that fits is split if it is twice what is asked for, or 128 MiB would be left.
    """

    def __init__(self, limit: Bytes) -> None:
        super().__init__(limit)
        self._blocks = BestFit(least_rest=REGION_ROUNDING)
        self._blocks.add(0, limit // REGION_ROUNDING * REGION_ROUNDING)
        self.reserved = limit

    def allocate(self, nbytes: Bytes) -> Block:
        """A block of the region."""
        rounded = rounded_up(max(nbytes, 1), REGION_ROUNDING)
        block = self._blocks.take(rounded, min(rounded, MOST_REST))
        if block is None:
            raise self._full(nbytes)
        return self._given(block, nbytes)

    def free(self, token: Block) -> None:
        """The block is part of the region again."""
        self.allocated -= token.asked
        self._blocks.free(token)


@final
class WholeChunks(AbstractAllocator):
    """The paper's virtual addresses: every array has chunks of its own (section 4), wherever they lie.

    Arguments:
        exempt: Arrays below so many bytes share chunks, best fit, in pieces of 512 bytes: not the paper's.
    """

    def __init__(self, limit: Bytes, chunk: Bytes, exempt: Bytes = 0) -> None:
        super().__init__(limit)
        self._chunks = ChunkAllocator(limit, chunk, shared=exempt - 1)
        self._arrays = 0
        self.most_arrays = 0
        """The most there were at once: N_max (eq. 2)."""
        self.most_lost: Bytes = 0
        """The most bytes of chunks that belonged to an array and that it did not need: IF_max."""

    def allocate(self, nbytes: Bytes) -> Block | Bytes:
        """The token is a block of a shared chunk, or the size of what has its own."""
        token = self._chunks.allocate(nbytes)
        self._count(1)
        self.most_arrays = max(self.most_arrays, self._arrays)
        self.most_lost = max(self.most_lost, self.reserved - self.allocated)
        return token

    def free(self, token: Block | Bytes) -> None:
        """Chunks in which nothing is in use are anybody's."""
        self._chunks.free(token)
        self._count(-1)

    def _count(self, arrays: int) -> None:
        self._arrays += arrays
        self.reserved, self.allocated = self._chunks.reserved, self._chunks.allocated
