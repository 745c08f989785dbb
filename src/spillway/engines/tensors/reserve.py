"""What is set aside inside the budget of a CUDA device, and how much the device really needed.

The account knows storages. The caching allocator hands out more: workspaces of libraries, memory that an op takes and
gives back inside itself, tensors that no op of a step has touched, blocks that are larger than what was asked for. What
is there all the time is seen by looking, the more often the nearer the account is to the budget; what an op needs for
itself is guessed the first time, and measured around the op, so that room is made for it the next time; and if the
allocator's peak was above the budget all the same, more is set aside from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, TypeVar, final

from spillway.memory.budget import UNLIMITED, Budget
from spillway.memory.controller import Controller
from spillway.memory.records import Value
from spillway.tiers.cuda_streams import CudaStreams
from spillway.units import Bytes

T = TypeVar("T")

MARGIN: Final = 0.01
"""Share of the budget that is set aside beside what is seen."""

BETWEEN_LOOKS: Final[Bytes] = 16 << 20
"""The most bytes created between two looks at the allocator's counters, which cost as much as two ops. Where less is
left of the budget it is looked at more often: blocks may be larger than their storages."""
_LEAST_BETWEEN_LOOKS: Final[Bytes] = 2 << 20


@final
class Reserve:
    """Sets aside what the device needs beside the account (`Budget.reserve`)."""

    def __init__(self, streams: CudaStreams) -> None:
        self._streams = streams
        self._budget = Budget(UNLIMITED)
        self._until_look: Bytes = 0
        self._learned: Bytes = 0
        self.twice: Callable[[], Bytes] = lambda: 0
        """Bytes that are there twice for a moment when dropped bytes are given back."""

    def attach(self, budget: Budget) -> None:
        """Which account it is that is compared with the allocator's."""
        self._budget = budget

    def unused(self) -> Bytes:
        """What the allocator has not handed out of the budget."""
        return self._budget.named - self._streams.allocated()

    def expect(self, nbytes: Bytes) -> None:
        """So many bytes are about to be created: room was made for them."""

    def created(self, nbytes: Bytes) -> None:
        self._until_look -= nbytes
        if self._until_look < 0:
            self.look()

    def look(self) -> None:
        """Set aside what the allocator has handed out beside the account."""
        budget = self._budget
        if budget.named >= UNLIMITED:
            self._until_look = BETWEEN_LOOKS
            return
        beside = max(self._streams.allocated() - budget.resident, 0)
        budget.reserve(beside + int(MARGIN * budget.named) + self._learned + self.twice())
        left = -budget.short(0)
        self._until_look = max(min(left, BETWEEN_LOOKS), _LEAST_BETWEEN_LOOKS)

    def learn(self, peak: Bytes) -> None:
        """The allocator's peak in a step: what was above the budget is set aside from now on."""
        if self._budget.named < UNLIMITED:
            self._learned += max(peak - self._budget.named, 0)


@final
class Meter:
    """The allocator's peak in a step, and in single ops of it."""

    def __init__(self, streams: CudaStreams) -> None:
        self._streams = streams
        self._most: Bytes = 0

    def begin(self) -> None:
        """Let the peak begin anew."""
        self._streams.reset_peak()
        self._most = 0

    def peak(self) -> Bytes:
        """The most that was handed out since `begin`."""
        return max(self._most, self._streams.peak())

    def around(self, run: Callable[[], T]) -> tuple[T, Bytes]:
        self._most = self.peak()
        self._streams.reset_peak()
        before = self._streams.allocated()
        out = run()
        return out, max(self._streams.peak() - max(before, self._streams.allocated()), 0)


class AbstractMeter(Protocol):
    """Measures single ops."""

    def around(self, run: Callable[[], T]) -> tuple[T, Bytes]:
        """Run an op; what it needed for itself beside what it left behind."""


_LOOKS_PER_CALL: Final = 2
"""A call is measured so often: the first time it may load what it never loads again."""

_MOST_KNOWN: Final = 1 << 10


@final
class Workspaces:
    """Bytes that calls need for themselves while they run, by the keys of `Sizes`."""

    def __init__(self, meter: AbstractMeter, hungry: frozenset[str], *, required: bool = True) -> None:
        self._meter = meter
        self._hungry = hungry
        self.required = required
        """Whether a call fails for which there is no room with them."""
        self._known: dict[Any, list[Bytes]] = {}

    def expected(self, key: Any) -> Bytes:
        """What the call will need beside its results, if it was measured."""
        measured = self._known.get(key)
        return measured[-1] if measured else 0

    def guess(self, name: str, reads: Iterable[Value], key: Any, created: Bytes, allowed: Bytes) -> Bytes:
        """What it may need the first time, when nobody knows: for ops that are known to be hungry as much again as
        their operands and results, which libraries bring into another order, or what fits beside them."""
        if name not in self._hungry or self._known.get(key):
            return 0
        working = created + sum(storage.nbytes for storage in {value.storage for value in reads})
        return max(min(working, allowed - working), 0)

    def watch(self, controller: Controller, key: Any, run: Callable[[], T]) -> T:
        """Run a call and learn. If it left a recipe, a replay makes room for as much."""
        measured = self._known.get(key, [])
        if key is None:
            return run()
        recipes = len(controller.recipes)
        if len(measured) < _LOOKS_PER_CALL:
            out, inside = self._meter.around(run)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known.setdefault(key, []).append(inside)
        else:
            out, inside = run(), measured[-1]
        if inside and len(controller.recipes) > recipes:
            recipe = controller.recipes.pop()
            needed, may_need = (inside, 0) if self.required else (0, inside)
            controller.remember(recipe._replace(nbytes=recipe.nbytes + needed, inside=may_need))
        return out
