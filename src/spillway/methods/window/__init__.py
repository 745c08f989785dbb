"""A window slides over the accesses of the step; what enters it comes in, and what has left it goes out.

"Out-of-core Training for Extremely Large-Scale Neural Networks with Adaptive Window-Based Scheduling" (the paper;
section 3, Fig. 2). Its public code (sony/nnabla, `SwapInOutScheduler`) does more than the paper says, and is followed:

NOTE [The schedule]. A step is the row of its accesses, op by op: each storage that the op reads or creates. *In* are
the bytes of what is in the window and in memory, copies on their way in included; *out* the bytes of what has left the
window, and of whose copy out nobody has waited yet. For every op:

 1. Swap in: the window's head goes on while what is in the window, each storage once, fits in the window, and what is
    in fits in the budget. A storage that was out is *cancelled*: its copy out never begins. One whose content the op
    does not read needs no copy: it is *unprefetched*, and gets its bytes when the op comes. For any other, copies out
    are waited for, the oldest first, until in and out and its own bytes fit in the budget; then its copy in begins.
 2. Reserve the bytes of what the op needs unprefetched, waiting likewise. Where that is not enough, the window reached
    too far. *Backtracking* takes accesses off its head until it is, keeps the head from passing there before the next
    op, and the whole schedule is made anew. A head that stops at an access stops in front of all that follow, later
    accesses of what is in the window already included.
 3. Swap out: a storage of the op that has no other access in the window leaves it, and its copy out begins. What
    nothing reads before it is written or dies is *precleared*: its bytes go, and nobody needs the copy.

Updates of the optimizer are ops like all others: parameters, gradients and state move too.

A copy out begins as the storage leaves the window. A copy in begins at the op of rule 1 (`issue` "at op": in that code
every copy waits for the op in front of it), or "host ahead": as early as there is room for it, in the same order, as if
the host ran ahead of the device and only memory held it up. Room is what the schedule leaves of the budget.

Differs from the code that was published with the paper in:

- The window is at most the budget, so that no schedule is ever made anew: what is in and what is unprefetched fit in it
  together. `Window.as_published()` has 1.5 x the budget, which is that code's default (the paper does not tell it), and
  backtracks.
- Copies in begin as early as there is room. As published they begin at their ops.
- What is in memory when the step ends stays, where the next step finds room for it, and what is precleared leaves when
  its bytes are wanted. As published everything leaves at the end of the step, and what is precleared at once.
- Backtracking takes off every access up to where it ends, not only the last one of each storage.
- An op is one ATen op, not a function of NNabla; no types are converted; no op runs on the host.
- Spillway has no way to lose what a plan says nobody reads, as a step may turn out to be another: what is precleared is
  copied out like anything else, and an engine brings in whatever an op writes to. So nothing is unprefetched but what
  ops make, except as published.
- Storages below `smallest` stay, as the engines do not move them.

Not implemented: NNabla's first iteration, in which everything leaves after each function; a session records that step
as it is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, NamedTuple, Self, TypeAlias, final, get_args

from spillway.errors import BudgetInfeasible, UsageError
from spillway.ir import Gap, Host, Plan, Step
from spillway.ir.account import account
from spillway.ir.lives import lives_of, versions_of
from spillway.ir.timeline import WindowAt
from spillway.methods.base import SMALLEST, AbstractPlanner, Problem
from spillway.units import Bytes, format_bytes

Issue: TypeAlias = Literal["at op", "host ahead"]
"""When copies in begin."""

PUBLISHED: Final = 1.5
"""The window as a multiple of the budget, in the code that was published."""

ROUNDS: Final = 4
"""How often a schedule is made to learn what may stay from one step to the next."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What the window does in a step."""

    gaps: tuple[Gap, ...]
    """When bytes are gone: from where a copy out was waited for to where a copy in begins."""
    restarts: int
    """How often backtracking made the schedule anew."""
    window: tuple[WindowAt, ...]
    """The bytes of the three rules op by op, before copies in were moved ahead."""


@final
class Window(AbstractPlanner):
    """The window's schedule as a plan.

    Arguments:
        window: How far it reaches, as a multiple of the budget; above 1 it may have to backtrack.
        issue: When copies in begin, "at op" or "host ahead".
        chunk: Every storage counts as whole chunks of so many bytes, as with virtual addresses (section 4, eq. 1).
        exempt: Storages below so many bytes share chunks, and count as what they are; the paper's do not.
        drained: Whether every step begins and ends with nothing in memory, and what is precleared leaves at once.
        smallest: Bytes below which a storage stays.

    Raises:
        UsageError: The window or the chunk is not above 0, `smallest` is below 0, or `issue` is neither of the two.
    """

    name = "window"
    uses_recipes = False
    begin = "at op"

    def __init__(
        self, *, window: float = 1.0, issue: Issue = "host ahead", chunk: Bytes = 1, exempt: Bytes = 0,
        drained: bool = False, smallest: Bytes = SMALLEST,
    ) -> None:  # fmt: skip
        if not (0 < window < float("inf") and chunk > 0 and min(exempt, smallest) >= 0):
            raise UsageError(
                f"A window is above 0 times the budget, a chunk of 1 byte or more, and what is exempt or stays of 0 or "
                f"more; got {window}, {chunk}, {exempt} and {smallest}."
            )
        if issue not in get_args(Issue):
            raise UsageError(f"Copies in begin {' or '.join(map(repr, get_args(Issue)))}, got {issue!r}.")
        self.window = window
        self.issue = issue
        self.chunk = chunk
        self.exempt = exempt
        self.drained = drained
        self.smallest = smallest

    @classmethod
    def as_published(cls, *, chunk: Bytes = 1, exempt: Bytes = 0, smallest: Bytes = SMALLEST) -> Self:
        """A window of 1.5 x the budget, restarts, copies at their ops, and nothing in memory between steps."""
        made = cls(
            window=PUBLISHED, issue="at op", chunk=chunk, exempt=exempt, drained=True, smallest=smallest
        )  # fmt: skip
        made.name = "window-published"
        return made

    def plan(self, problem: Problem) -> Plan:
        """Raises BudgetInfeasible if an op needs more than is allowed, or than the window holds."""
        step, lives = problem.step, lives_of(problem.step)
        made = self.schedule(problem)
        peak = account(step, made.gaps, lives).peak
        return Plan(
            step=step.digest(), allowed=problem.allowed, projected=peak, gaps=made.gaps, window=made.window
        )  # fmt: skip

    def schedule(self, problem: Problem) -> Schedule:
        """What the window does, and how often. Raises what `plan` raises."""
        row = _Row.of(problem.step, self.counted(problem.step), self.smallest, comes_in=not self.drained)
        budget = problem.allowed - row.small
        window = int(budget * self.window)
        needed, fullest = max(((row.needed(op), -op) for op in range(len(row.ops))), default=(0, 0))
        if needed > min(window, budget):
            smallest = row.small + max(needed, int(needed / self.window))
            while int((smallest - row.small) * self.window) < needed:  # what rounding took
                smallest += 1
            name = problem.step.ops[-fullest].name
            raise BudgetInfeasible(
                needed=row.small + needed, allowed=problem.allowed, op_index=-fullest, smallest_budget=smallest,
                op=name if window >= budget else f"{name}, in a window of {format_bytes(max(window, 0))}", exact=True,
            )  # fmt: skip
        staying = {source for source in row.sources if not self.drained}
        for _ in range(ROUNDS):
            made = self._made(row, budget, window, staying)
            if not made.unsteady:
                break
            staying -= made.unsteady
        else:
            made = self._made(row, budget, window, staying - row.through)
        return made.schedule(problem.allowed, self.issue)

    def counted(self, step: Step) -> list[Bytes]:
        """Of every storage its bytes, in whole chunks."""
        return [
            nbytes if nbytes < self.exempt else -(-nbytes // self.chunk) * self.chunk
            for nbytes in (storage.nbytes for storage in step.storages)
        ]

    def _made(self, row: _Row, budget: Bytes, window: Bytes, staying: Collection[int]) -> _Made:
        made = _Made(row, budget, window, staying, drained=self.drained)
        while not made.run():
            made = _Made(row, budget, window, staying, drained=self.drained, before=made)
        return made


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """The accesses of a step, one after the other. Storages that are too small to leave are not among them."""

    step: Step
    sizes: list[Bytes]
    """Of every storage, as it counts."""
    accesses: list[tuple[int, bool]]
    """A storage, and whether its content is read."""
    ops: list[int]
    """Of every op the place of its first access."""
    following: list[int]
    """Of every access the next one of the same storage; `len(accesses)` if there is none."""
    dies: list[int]
    """Of every storage the first op at which it is dead; one more than the number of ops if it outlives the step."""
    dying: dict[int, list[int]]
    """By op, storages that are dead from there on, although no op just before used them."""
    sources: list[int]
    """What is there before the step, what is used last in front: the order in which it had better leave."""
    through: frozenset[int]
    """What of it is there after the step too."""
    small: Bytes
    """The most bytes of what is too small to leave."""

    @classmethod
    def of(cls, step: Step, sizes: list[Bytes], smallest: Bytes, *, comes_in: bool) -> Self:
        """Written down op by op; with `comes_in`, what is written over counts as read."""
        managed = [storage.nbytes >= max(smallest, 1) for storage in step.storages]
        accesses: list[tuple[int, bool]] = []
        ops: list[int] = []
        last: dict[int, int] = {}
        for op in step.ops:
            ops.append(len(accesses))
            used = {step.values[value].storage: True for value in op.reads}
            for value in op.creates:
                used.setdefault(step.values[value].storage, comes_in and step.values[value].version > 0)
            accesses += ((storage, reads) for storage, reads in used.items() if managed[storage])
            last.update(dict.fromkeys(used, op.number))
        nowhere = len(accesses)
        following, first = [nowhere] * nowhere, [nowhere] * len(step.storages)
        for place in range(nowhere - 1, -1, -1):
            storage = accesses[place][0]
            following[place], first[storage] = first[storage], place
        count = len(step.ops)
        dies = [count + 1 if storage.present_at_end else storage.alive_until for storage in step.storages]
        dying = defaultdict(list)
        for info in step.storages:
            if managed[info.id] and last.get(info.id, -1) + 1 < dies[info.id] <= count:
                dying[dies[info.id]].append(info.id)
        sources = [info.id for info in step.storages if managed[info.id] and info.present_at_start and dies[info.id]]
        small = [0 if managed[number] else nbytes for number, nbytes in enumerate(sizes)]
        return cls(
            step=step, sizes=sizes, accesses=accesses, ops=ops, following=following, dies=dies, dying=dying,
            sources=sorted(sources, key=lambda source: (-first[source], source)),
            through=frozenset(source for source in sources if step.storages[source].present_at_end),
            small=max(step.levels(small), default=0),
        )  # fmt: skip

    def of_op(self, op: int) -> range:
        end = self.ops[op + 1] if op + 1 < len(self.ops) else len(self.accesses)
        return range(self.ops[op], end)

    def needed(self, op: int) -> Bytes:
        return sum(self.sizes[self.accesses[place][0]] for place in self.of_op(op))


class Gone(NamedTuple):
    """A storage without its bytes during a half-open interval of ops."""

    storage: int
    start: int
    end: int
    read: bool
    """Whether it comes back to be read, by a copy in."""


class _State(Enum):
    """Where a storage's bytes are."""

    AWAY = "away"
    """Nowhere in memory: not made yet, dead, or waited for."""
    IN = "in"
    """In the window and in memory, or on their way."""
    UNPREFETCHED = "unprefetched"
    """In the window; to be had when the op comes that writes them."""
    OUT = "out"
    """Left the window; in memory until somebody waits."""


@final
class _Made:
    """A schedule as it is made, by the three rules of the NOTE above."""

    def __init__(
        self, row: _Row, budget: Bytes, window: Bytes, staying: Collection[int], *, drained: bool,
        before: _Made | None = None,
    ) -> None:  # fmt: skip
        storages = len(row.sizes)
        self._row = row
        self._budget = budget
        self._window = window
        self._drained = drained
        # Places that the head does not pass before an op.
        self._stops: dict[int, int] = {} if before is None else before._stops
        self._restarts: int = 0 if before is None else before._restarts + 1
        self._there = set(staying)  # in memory when the step begins
        self._states = [_State.AWAY] * storages
        self._counts = [0] * storages  # accesses in the window
        self._head = 0
        self._in = self._prefetched = self._out = 0  # bytes; of the window, unprefetched ones are in the second alone
        self._left = [-1] * storages  # the op after which it left the window; -1 before the step
        self._pending: deque[tuple[int, int]] = deque()  # storages that are out, by when they left
        self._gone = [-1] * storages  # where the gap began that is open; -1 if none is
        self._gaps: list[Gone] = []
        self._dead = [False] * storages  # nobody reads it before it is written or dies
        ops = len(row.ops)
        self._until = [0] * ops
        # Bytes, op by op.
        self._in_at, self._cancelled_at, self._waited_at, self._precleared_at = ([0] * ops for _ in range(4))
        self.unsteady: set[int] = set()
        """What is in memory when the step begins, as it would be when the next one does, but not when this one ends."""
        for source in row.sources:
            if source in self._there:
                self._leaves(source, -1)
            else:
                self._gone[source] = 0

    def run(self) -> bool:
        """Whether it was made; False if a stop was set, and all has to be made anew."""
        for op in range(len(self._row.ops)):
            for storage in self._row.dying.get(op, ()):
                self._dies(storage, op)
            self._swap_in(op)
            self._until[op] = self._head
            if not self._reserve(op):
                return False
            self._swap_out(op)
        self._end()
        return True

    def schedule(self, allowed: Bytes, issue: Issue) -> Schedule:
        """Gaps of values, from those of storages."""
        step, sizes = self._row.step, self._row.sizes
        gaps = _of_values(step, self._gaps) if issue == "at op" else earlier(step, sizes, self._gaps, allowed)
        ops, places = self._row.ops, len(self._row.accesses)
        until = (len(ops) if head >= places else bisect_right(ops, head) - 1 for head in self._until)
        rows = zip(until, self._in_at, self._cancelled_at, self._waited_at, self._precleared_at, strict=True)
        window = tuple(
            WindowAt(until=until, swapped_in=into, cancelled=cancelled, waited=waited, precleared=precleared)
            for until, into, cancelled, waited, precleared in rows
        )
        return Schedule(gaps=tuple(gaps), restarts=self._restarts, window=window)

    # ------------------------------------------------------------------ rule 1

    def _swap_in(self, op: int) -> None:
        row, states, counts = self._row, self._states, self._counts
        while self._head < len(row.accesses) and self._stops.get(self._head, 0) <= op:
            storage, reads = row.accesses[self._head]
            if not counts[storage]:
                nbytes = row.sizes[storage]
                if self._prefetched + nbytes > self._window or self._in + nbytes > self._budget:
                    return
                if states[storage] is _State.OUT:
                    states[storage] = _State.IN
                    self._out -= nbytes
                    self._in += nbytes
                    self._cancelled_at[op] += nbytes
                elif reads:
                    self._make_room(nbytes, op)
                    self._in += nbytes
                    self._in_at[op] += nbytes
                    self._comes(storage, op, read=True)
                else:
                    states[storage] = _State.UNPREFETCHED
                self._prefetched += nbytes
            counts[storage] += 1
            self._head += 1

    def _make_room(self, nbytes: Bytes, op: int) -> bool:
        """Wait for copies out until so many bytes are free before the op; whether they are."""
        while self._in + self._out + nbytes > self._budget:
            if not self._pending:
                return False
            storage, left = self._pending.popleft()
            if self._states[storage] is _State.OUT and self._left[storage] == left:  # it was not cancelled since
                self._goes(storage, op)
                self._out -= self._row.sizes[storage]
        return True

    # ------------------------------------------------------------------ rule 2

    def _reserve(self, op: int) -> bool:
        row, states = self._row, self._states
        wanted = [row.accesses[place][0] for place in row.of_op(op)]
        wanted = [storage for storage in wanted if states[storage] is _State.UNPREFETCHED]
        nbytes = sum(row.sizes[storage] for storage in wanted)
        if not self._make_room(nbytes, op):
            self._backtrack(op, nbytes)
            return False
        self._in += nbytes
        for storage in wanted:
            self._comes(storage, op, read=False)
        return True

    def _backtrack(self, op: int, nbytes: Bytes) -> None:
        """Where the head has to stop until the op has run."""
        row, counts = self._row, dict[int, int]()
        free, place = self._budget - self._in - self._out, self._head
        while free < nbytes:
            place -= 1
            storage = row.accesses[place][0]
            counts[storage] = counts.get(storage, self._counts[storage]) - 1
            if not counts[storage] and self._states[storage] is _State.IN:
                free += row.sizes[storage]
        self._stops[place] = op + 1

    # ------------------------------------------------------------------ rule 3

    def _swap_out(self, op: int) -> None:
        row = self._row
        for place in row.of_op(op):
            storage = row.accesses[place][0]
            self._counts[storage] -= 1
            if self._counts[storage]:
                continue
            self._in -= row.sizes[storage]
            self._prefetched -= row.sizes[storage]
            if row.dies[storage] <= op + 1:
                self._states[storage] = _State.AWAY
                continue
            following = row.following[place]
            ends = row.dies[storage] <= len(row.ops)
            self._dead[storage] = ends if following == len(row.accesses) else not row.accesses[following][1]
            if self._dead[storage] and self._drained:
                self._goes(storage, op + 1)
            else:
                self._leaves(storage, op)

    def _leaves(self, storage: int, op: int) -> None:
        """Out of the window, after the op."""
        self._states[storage] = _State.OUT
        self._out += self._row.sizes[storage]
        self._left[storage] = op
        self._pending.append((storage, op))

    # ------------------------------------------------------------------ gaps

    def _goes(self, storage: int, op: int) -> None:
        """Out of memory, before the op."""
        self._states[storage] = _State.AWAY
        self._gone[storage] = op
        told = self._precleared_at if self._dead[storage] else self._waited_at
        told[min(op, len(told) - 1)] += self._row.sizes[storage]
        if not op:
            self._there.discard(storage)

    def _comes(self, storage: int, op: int, *, read: bool) -> None:
        """Into memory, before the op."""
        self._states[storage] = _State.IN
        self._close(storage, op, read=read)

    def _dies(self, storage: int, op: int) -> None:
        if self._states[storage] is _State.OUT:
            self._states[storage] = _State.AWAY
            self._out -= self._row.sizes[storage]
        self._close(storage, op, read=False)

    def _close(self, storage: int, op: int, *, read: bool) -> None:
        """A gap ends. What was waited for and wanted before one op has none: it might as well have stayed."""
        gone, self._gone[storage] = self._gone[storage], -1
        if 0 <= gone < op:
            self._gaps.append(Gone(storage, gone, op, read))

    def _end(self) -> None:
        """What is out and was not there when the step began leaves, if the next one begins without it too."""
        row, last = self._row, len(self._row.ops) - 1
        self.unsteady = {
            source for source in self._there & row.through if self._states[source] is not _State.OUT
        }  # fmt: skip
        for storage, state in enumerate(self._states):
            leaves = self._drained or (storage in row.through and storage not in self._there)
            # Before the last op rather than after it, as no gap lies beyond the step.
            if state is _State.OUT and leaves and self._left[storage] < last:
                self._goes(storage, last)
            self._close(storage, min(row.dies[storage], len(row.ops)), read=False)


def _of_values(step: Step, gaps: Iterable[Gone]) -> Iterator[Gap]:
    created = versions_of(step)
    for gap in gaps:
        there = created[gap.storage]
        yield Gap(value=there[bisect_left(there, (gap.start,)) - 1][1], start=gap.start, end=gap.end, home=Host())


# ---------------------------------------------------------------------- host ahead


def earlier(step: Step, sizes: Sequence[Bytes], gaps: Sequence[Gone], allowed: Bytes) -> Iterator[Gap]:
    """The same gaps with copies in that begin as early as there is room for them, none in front of the one before.

    What would come back as it goes stays.
    """
    levels = step.levels(sizes, ((gap.storage, gap.start, gap.end) for gap in gaps))
    return _of_values(step, _earlier(sizes, gaps, allowed, _Levels(levels)))


def _earlier(sizes: Sequence[Bytes], gaps: Sequence[Gone], allowed: Bytes, levels: _Levels) -> Iterator[Gone]:
    reached = 0
    for gap in gaps:
        end = gap.end
        if gap.read:
            nbytes = sizes[gap.storage]
            full = levels.last_above(end, allowed - nbytes)
            end = min(max(full + 1, gap.start, reached), end)
            levels.add(end, gap.end, nbytes)
            reached = end
        if gap.start < end:
            yield gap._replace(end=end)


@final
class _Levels:
    """Bytes during every op, as a tree of maxima: what is asked of it takes the logarithm of the number of ops."""

    def __init__(self, levels: Sequence[Bytes]) -> None:
        self._width = 1 << max(len(levels) - 1, 0).bit_length()
        leaves = [*levels, *[0] * (self._width - len(levels))]
        self._most = [0] * self._width + leaves  # below a node, with what was added there
        self._added = [0] * (2 * self._width)
        for node in range(self._width - 1, 0, -1):
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])

    def add(self, start: int, end: int, nbytes: Bytes) -> None:
        """To every op of the half-open interval."""
        if start < end:
            self._add(1, 0, self._width, start, end, nbytes)

    def _add(self, node: int, low: int, high: int, start: int, end: int, nbytes: Bytes) -> None:
        if start <= low and high <= end:
            self._most[node] += nbytes
            self._added[node] += nbytes
            return
        middle = (low + high) // 2
        if start < middle:
            self._add(2 * node, low, middle, start, end, nbytes)
        if end > middle:
            self._add(2 * node + 1, middle, high, start, end, nbytes)
        self._most[node] = max(self._most[2 * node], self._most[2 * node + 1]) + self._added[node]

    def last_above(self, end: int, limit: Bytes) -> int:
        """The last op before `end` with more than so many bytes; -1 if there is none."""
        return self._last_above(1, 0, self._width, end, limit)

    def _last_above(self, node: int, low: int, high: int, end: int, limit: Bytes) -> int:
        if low >= end or self._most[node] <= limit:
            return -1
        if high - low == 1:
            return low
        middle, below = (low + high) // 2, limit - self._added[node]
        found = self._last_above(2 * node + 1, middle, high, end, below)
        return found if found >= 0 else self._last_above(2 * node, low, middle, end, below)
