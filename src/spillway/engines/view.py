"""What a policy sees of the controller: `methods.base.MemoryView` over the real records."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from math import inf
from typing import TYPE_CHECKING, final

from spillway.engines.neighbours import Neighbours
from spillway.engines.recall import way_back_of_moved
from spillway.engines.records import AWAY, DROPPED, EXACT, HERE, Storage
from spillway.engines.replay import Ancestry, ancestry
from spillway.ir.step import Phase
from spillway.methods.base import Evicted
from spillway.units import Bytes, Seconds

if TYPE_CHECKING:
    from spillway.engines.controller import Controller
    from spillway.methods.base import Candidate


@final
class View:
    """Read-only to policies. Keeps the order of last use in a heap that is put right lazily, only when room is
    short."""

    __slots__ = ("_controller", "_heap", "_neighbours", "_walked")

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._neighbours = Neighbours(controller)
        self._heap: list[tuple[int, int, Storage]] = []
        self._walked: list[tuple[int, int, Storage]] = []

    @property
    def allowed(self) -> Bytes:
        """The budget."""
        return self._controller.allowed

    @property
    def resident(self) -> Bytes:
        """Bytes in device memory now."""
        return self._controller.resident

    @property
    def clock(self) -> int:
        """The number of the op that is about to run."""
        return self._controller.clock

    @property
    def op_index(self) -> int:
        """Its number within the step; 0 before the first."""
        return max(self._controller.clock - self._controller.first_op - 1, 0)

    def candidates(self) -> Iterator[Storage]:
        """Storages that may leave now, least recently used first."""
        heap = self._heap
        self._put_back()  # what a walk took that was left unfinished
        young, self._controller.young = self._controller.young, []
        for storage in young:
            heapq.heappush(heap, (storage.touched, storage.number, storage))
        last: Storage | None = None
        try:
            while heap:
                touched, number, storage = heapq.heappop(heap)
                value = storage.value
                if value is None or value.absent or storage is last:
                    continue  # it comes back through `young`
                if storage.touched != touched:
                    heapq.heappush(heap, (storage.touched, number, storage))
                    continue
                self._walked.append((touched, number, storage))
                last = storage
                if self._controller.may_leave(storage):
                    yield storage
        finally:
            self._put_back()

    def _put_back(self) -> None:
        while self._walked:
            heapq.heappush(self._heap, self._walked.pop())

    def available(self, storage: Candidate) -> bool:
        """Whether it is present and may leave."""
        value = storage.value if isinstance(storage, Storage) else None
        return value is not None and value.absent == HERE and self._controller.may_leave(value.storage)

    def chain(self, storage: Candidate) -> int | None:
        """Ops to run to recompute `storage`; None if that is not legal."""
        found = self._ancestry(storage)
        return None if found is None else found.chain

    def own_seconds(self, storage: Candidate) -> Seconds:
        """Seconds of the op that made it."""
        self._controller.counters.questions += 1
        value = storage.value if isinstance(storage, Storage) else None
        recipe = None if value is None else value.recipe
        if recipe is None or recipe.exactness != EXACT:
            return inf
        return self._controller.machine.seconds_of(recipe)

    def recompute_seconds(self, storage: Candidate) -> Seconds:
        """Seconds of the chain, as measured when its ops ran, and to copy in what it needs of what was moved."""
        found = self._ancestry(storage)
        return inf if found is None else self._seconds(found)

    def _seconds(self, found: Ancestry) -> Seconds:
        own = sum(map(self._controller.machine.seconds_of, found.recipes.values()))
        below = (ancestry(leaf, self._controller.chain_cap) for leaf in found.leaves if leaf.absent == DROPPED)
        away = sum(leaf.storage.nbytes for leaf in found.leaves if leaf.absent == AWAY)
        copied_in = self._controller.machine.transfer_seconds(away) / 2 if away else 0.0
        return own + copied_in + sum(self._seconds(deeper) for deeper in below if deeper is not None)

    def recompute_seconds_at_worst(self, storage: Candidate) -> Seconds:
        """Seconds of the chain, and of bringing back what is present of its leaves, each in the cheaper way."""
        found = self._ancestry(storage)
        if found is None:
            return inf
        present = (leaf.storage for leaf in found.leaves if leaf.absent == HERE)
        link = self._controller.machine.transfer_seconds
        return self._seconds(found) + sum(min(self.own_seconds(leaf), link(leaf.nbytes) / 2) for leaf in present)

    def transfer_seconds(self, storage: Candidate) -> Seconds:
        """Seconds to copy `storage` out and in again, by the bandwidth measured so far."""
        self._controller.counters.questions += 1
        value = storage.value if isinstance(storage, Storage) else None
        out_and_in = self._controller.machine.transfer_seconds(storage.nbytes)
        return out_and_in / 2 if value is not None and value.home is not None else out_and_in

    @property
    def exposed(self) -> float:
        """Share of the seconds of copies for which ops waited."""
        return self._controller.copies.exposed

    @property
    def overlaps(self) -> bool:
        """Whether copies have a processor or a link of their own."""
        return self._controller.copies.overlaps

    def copied(self, storage: Candidate) -> bool:
        """Whether its value has a home."""
        return isinstance(storage, Storage) and storage.value is not None and storage.value.home is not None

    @property
    def anything_moved(self) -> bool:
        """Whether `moved` has any."""
        return self._controller.away > len(self._controller.copies.arriving)

    def moved(self) -> Iterator[Storage]:
        """Moved storages, the one that left first in front."""
        return self._controller.copies.in_order_of_leaving()

    def due(self) -> Iterator[Storage]:
        """Moved storages in the order in which the last step wanted them."""
        return self._controller.copies.in_order_of_use()

    @property
    def arriving(self) -> int:
        """Storages on their way back."""
        return len(self._controller.copies.arriving)

    @property
    def in_backward(self) -> bool:
        """Whether autograd runs a backward."""
        return self._controller.phase is Phase.BACKWARD

    @property
    def turned(self) -> bool:
        """Whether a backward has begun, and no other forward since."""
        return self._controller.phase is not Phase.FORWARD

    def held_bytes(self, storage: Candidate) -> Bytes:
        """Bytes of the leaves that a drop would have to hold alive and that are present now."""
        found = self._ancestry(storage)
        return 0 if found is None else sum(leaf.storage.nbytes for leaf in found.leaves if not leaf.absent)

    def stale_seconds(self, storage: Candidate) -> Seconds:
        """Seconds of the ops of this step since it was last used."""
        self._controller.counters.questions += 1
        value = storage.value if isinstance(storage, Storage) else None
        return 0.0 if value is None else self._neighbours.seconds_since(value)

    def as_evicted(self, storage: Candidate) -> Evicted | None:
        """What it is called once it is evicted."""
        return self._neighbours.name(storage.value) if isinstance(storage, Storage) else None

    def evicted(self) -> Mapping[Evicted, Seconds]:
        """All that is evicted."""
        return self._neighbours.evicted()

    def evicted_neighbours(self, of: Candidate | Evicted) -> Mapping[Evicted, Seconds]:
        """The evicted next to it."""
        self._controller.counters.questions += 1
        if isinstance(of, Evicted):
            return self._neighbours.around(of)
        value = of.value if isinstance(of, Storage) else None
        return {} if value is None else self._neighbours.around(value)

    def evicted_ancestors(self, storage: Candidate) -> Mapping[Evicted, Seconds]:
        """The evicted that it needs."""
        self._controller.counters.questions += 1
        value = storage.value if isinstance(storage, Storage) else None
        return {} if value is None else self._neighbours.ancestors(value)

    def evicted_descendants(self, storage: Candidate) -> Mapping[Evicted, Seconds]:
        """The evicted that need it."""
        self._controller.counters.questions += 1
        value = storage.value if isinstance(storage, Storage) else None
        return {} if value is None else self._neighbours.descendants(value)

    def forget_recipes(self) -> None:
        """The controller forgets them: so does what was made of them."""
        self._neighbours.forget()

    def _ancestry(self, storage: Candidate) -> Ancestry | None:
        self._controller.counters.questions += 1
        if not isinstance(storage, Storage):
            return None
        away = storage.value is not None and storage.value.absent == AWAY
        found = way_back_of_moved(self._controller, storage) if away else self._controller.way_back(storage)
        return found if isinstance(found, Ancestry) else None
