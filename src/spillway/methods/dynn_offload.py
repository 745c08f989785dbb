"""DyNN-Offload for a step whose path is known: execution blocks, each brought in while the one before it computes.

Ren et al., "Enabling Large Dynamic Neural Network Training with Learning-based Memory Management", HPCA 2024, section
IV-E. The pilots in `pilots/` foresee the path; this says what moves once it is foreseen, or was recorded.

Differs from the paper in:

- What is not needed by the next block stays where there is room for it, and what is used again last leaves first. As
  published (`as_published`) device memory is two halves, and all that neither this block nor the next touches leaves.
- Blocks fill the share of the budget that takes the least time (`keeping_blocks`). As published they fill half of it,
  cut by dynamic programming in place of Sentinel's partition, of which the paper says that it maximizes the overlap.
- A copy out begins right after the last use, not when the next block begins.
- Storages below `SMALLEST` stay, as the engines do not move them.
- A session foresees nothing yet: it follows the plan of the last step of the same sizes, and what turns out to be
  another step is finished as room gets short.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, Self, final

from spillway.costs.device import Device
from spillway.errors import BudgetInfeasible
from spillway.ir import Gap, Host, Plan, Step, StorageId, ValueId
from spillway.ir.account import account
from spillway.ir.lives import lives_of
from spillway.methods.base import AbstractPlanner, Problem
from spillway.pilots.execution_blocks import Cuts, Touches, keeping_blocks, largest_op, max_fill, search_blocks
from spillway.units import Bytes, KiB, Seconds

SMALLEST: Final[Bytes] = 4 * KiB
"""Storages below this stay."""
TIGHTER: Final = 0.9
"""Of the room for two blocks, what is tried next where what stays, or is on its way, was too much."""
TRIES: Final = 24


@final
class DynnOffload(AbstractPlanner):
    """Blocks in memory, the next on its way.

    Arguments:
        double_buffer: Two halves with nothing kept beside.
        search: Cut the halves by dynamic programming.
    """

    name = "dynn-offload"
    uses_recipes = False
    begin = "at op"

    def __init__(self, *, double_buffer: bool = False, search: bool = False) -> None:
        self.double_buffer = double_buffer
        self.search = search

    @classmethod
    def as_published(cls) -> Self:
        """Two halves, the cuts searched."""
        made = cls(double_buffer=True, search=True)
        made.name = "dynn-offload-published"
        return made

    def plan(self, problem: Problem) -> Plan:
        """Raises BudgetInfeasible if an op alone needs more than a buffer, or than the budget where halves are not
        rigid."""
        step, lives = problem.step, lives_of(problem.step)
        touches, room = Touches.of_step(step), problem.allowed
        fixed = sum(one.nbytes for one in step.storages if one.nbytes < SMALLEST)
        gaps: list[Gap] = []
        for _ in range(TRIES):
            try:
                cuts = self._cuts(touches, room, problem.device)
            except BudgetInfeasible as error:  # two halves of an odd number are a byte less
                raise BudgetInfeasible(
                    needed=error.needed, allowed=problem.allowed, op=error.op, op_index=error.op_index,
                    smallest_budget=error.smallest_budget, exact=True,
                ) from None  # fmt: skip
            gaps = list(_Schedule(problem, touches, cuts, room - fixed, double_buffer=self.double_buffer).gaps())
            if account(step, gaps, lives).peak <= problem.allowed:
                break
            if room * TIGHTER < (2 if self.double_buffer else 1) * largest_op(touches):
                break
            room = int(room * TIGHTER)
        return problem.plan_with(gaps, lives)

    def _cuts(self, touches: Touches, room: Bytes, device: Device) -> Cuts:
        if not self.double_buffer:
            return keeping_blocks(touches, room, device)
        return search_blocks(touches, room // 2, device) if self.search else max_fill(touches, room // 2)


@final
@dataclass(frozen=True, slots=True)
class _Away:
    """A storage that left."""

    start: int
    """The op from which on its bytes are gone."""
    used: int
    """The last op that touched it; -1 if none has in this step."""


@final
class _Schedule:
    """What leaves and comes, block by block."""

    def __init__(self, problem: Problem, touches: Touches, cuts: Cuts, room: Bytes, *, double_buffer: bool) -> None:
        self._step, self._device = problem.step, problem.device
        self._touches, self._cuts, self._room = touches, cuts, room
        self._double_buffer = double_buffer
        self._nbytes: list[Bytes] = touches.nbytes.tolist()
        self._until: list[int] = touches.until.tolist()
        self._clock = list(accumulate(touches.seconds.tolist(), initial=0.0))
        starts, storages = touches.starts, touches.storages
        self._blocks = [set(storages[starts[i] : starts[j]].tolist()) for i, j in pairwise(cuts)]
        self._uses: dict[StorageId, list[int]] = {}
        for number in reversed(range(len(self._blocks))):
            for storage in self._blocks[number]:
                self._uses.setdefault(storage, []).append(number)
        self._touched: dict[StorageId, list[int]] = {}
        for op in range(touches.ops):
            for storage in storages[starts[op] : starts[op + 1]].tolist():
                self._touched.setdefault(storage, []).append(op)
        self._values = _versions(problem.step)
        self._away: dict[StorageId, _Away] = {}
        self._present = set[StorageId]()

    def gaps(self) -> Iterator[Gap]:
        """As they end."""
        yield from ()
        there = {one.id for one in self._step.storages if one.present_at_start}
        self._present = set(there)
        for storage in self._leaving(set(), self._blocks[0] if self._blocks else set(), -1):
            self._away[storage] = _Away(0, -1)
            self._present.discard(storage)
        for number, block in enumerate(self._blocks):
            following = self._blocks[number + 1] if number + 1 < len(self._blocks) else set[StorageId]()
            yield from self._during(number, block, following)
        for storage, away in self._away.items():
            yield from self._gap(storage, away, min(self._until[storage], len(self._step.ops)))

    def _during(self, number: int, block: set[StorageId], following: set[StorageId]) -> Iterator[Gap]:
        """Out what leaves, then in what the next block lacks, each from when the link is free."""
        begins, ends = self._cuts[number], self._cuts[number + 1]
        self._present |= block
        free = self._clock[begins]
        for storage in self._leaving(block, following, number):
            free += self._device.out_seconds(self._nbytes[storage])
            used = self._touched.get(storage, [])
            last = used[bisect_left(used, begins) - 1] if used and used[0] < begins else -1
            self._away[storage] = _Away(self._op_at(free, begins, ends), last)
            self._present.discard(storage)
        for storage in sorted(following & self._away.keys(), key=lambda one: self._touched[one][
                bisect_left(self._touched[one], ends)]):  # fmt: skip
            yield from self._gap(storage, self._away.pop(storage), self._op_at(free, begins, ends))
            free += self._device.in_seconds(self._nbytes[storage])
        self._present |= following
        self._present -= {one for one in self._present if self._until[one] <= ends}

    def _leaving(self, block: set[StorageId], following: set[StorageId], number: int) -> list[StorageId]:
        free = [one for one in self._present - block - following if self._nbytes[one] >= SMALLEST]
        last = len(self._blocks)
        free.sort(key=lambda one: (-(last if (use := self._next(one, number)) is None else use), one))
        if self._double_buffer:
            return free
        wanted = self._sum(self._present | block | following) - self._room
        chosen = list[StorageId]()
        for storage in free:
            if wanted <= 0:
                break
            chosen.append(storage)
            wanted -= self._nbytes[storage]
        return chosen

    def _next(self, storage: StorageId, number: int) -> int | None:
        """The block after that one which touches it."""
        uses = self._uses.get(storage, [])
        while uses and uses[-1] <= number:
            uses.pop()
        return uses[-1] if uses else None

    def _op_at(self, moment: Seconds, begins: int, ends: int) -> int:
        return bisect_left(self._clock, moment, begins, ends)

    def _gap(self, storage: StorageId, away: _Away, end: int) -> Iterator[Gap]:
        """Of the value that the storage holds then."""
        if away.start < end:
            held = self._values[storage]
            value = held[bisect_left(held, (away.used + 1, -1)) - 1][1]
            yield Gap(value=value, start=away.start, end=end, home=Host())

    def _sum(self, storages: Iterable[StorageId]) -> Bytes:
        nbytes = self._nbytes
        return sum([nbytes[one] for one in storages])


def _versions(step: Step) -> dict[StorageId, list[tuple[int, ValueId]]]:
    """Of every storage the ops that create its values, -1 for a source, and the values, in order."""
    created = {value: op.number for op in step.ops for value in op.creates}
    found: dict[StorageId, list[tuple[int, ValueId]]] = {}
    for value in sorted(step.values, key=lambda one: (one.storage, one.version)):
        found.setdefault(value.storage, []).append((created.get(value.id, -1), value.id))
    return found
