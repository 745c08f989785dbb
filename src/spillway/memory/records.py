"""What the controller knows: storages, values, recipes and counters.

A *storage* is the unit of residency, a *value* is a storage at one version of its content, a *recipe* is the op that
created a value. These records are written on every op of a step, so they are plain classes with positional
constructors and a tuple instead of the frozen dataclasses used elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from spillway.memory.lanes import Again, Stall
from spillway.units import Bytes, Seconds

HERE: Final = 0
"""The value's bytes are in its storage, in device memory."""
DROPPED: Final = 1
"""The bytes are gone; the value's home is its recipe (`Recompute`)."""
AWAY: Final = 2
"""The bytes are in a slower tier; the storage points at them where the machine can do that."""
GONE: Final = 3
"""The storage died or was overwritten: no bytes anywhere, only the recipe is left."""


NEVER: Final = 0
"""An op that cannot be replayed bit for bit."""
SCAFFOLD: Final = 1
"""An op whose result holds no content yet (`empty`): replayed on the way to a later version, never for its own sake."""
EXACT: Final = 2
"""An op that is replayed bit for bit."""


WITHOUT_CONTENT: Final = (
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "empty_quantized",
    "_empty_affine_quantized", "resize",
)  # fmt: skip
"""The ATen ops that are scaffold, by their bare names."""


LARGE: Final[Bytes] = 256 << 10
"""After an op that creates a storage of this size or more the policy may look ahead, and the machine at what is
resident."""


TEMPORARY: Final = 0
"""The key of a storage that only a replay knows."""


class Storage:
    """The bytes behind one or more tensors.

    `handle` belongs to the machine (the real storage, or a way to reach it) and is opaque to the controller. `value`
    is the current content, None once the storage is dead. `locks` counts the running ops that use it, `held` the
    drops that keep it alive, `written` says that the running op will write it. An `exposed` storage can be read by
    code that does not ask the controller (it may be moved, not dropped), an `escaped` one is reached by its address
    (it stays).
    """

    __slots__ = (
        "escaped", "exposed", "handle", "held", "key", "kind", "locks", "nbytes", "number", "touched", "value",
        "written",
    )  # fmt: skip

    def __init__(self, number: int, key: int, nbytes: Bytes, handle: Any, touched: int) -> None:
        self.number = number
        self.key = key
        self.nbytes = nbytes
        self.handle = handle
        self.touched = touched
        self.locks = self.held = 0
        self.written = self.escaped = self.exposed = False
        self.kind: str | None = None
        self.value: Value | None = Value(self, None)

    def __repr__(self) -> str:
        return f"Storage({self.number}, {self.nbytes} B, {self.value!r})"


class Value:
    """A storage at one version of its content.

    `absent` says where its bytes are, `home` the place of a copy in a slower tier, `leaves` the cut of a dropped
    value and `chain` the ops that recomputing it takes; `dependents` are the dropped values whose cut it is in,
    `wanted` counts the pending replays and ops that need it. `recorded` says that a recipe may read it: a write then
    has to begin another value, or a replay would take the new content for the old one. `nbytes` is the storage's size
    at this version: a later one may have another.
    """

    __slots__ = ("absent", "chain", "dependents", "home", "leaves", "nbytes", "recipe", "recorded", "storage", "wanted")

    def __init__(self, storage: Storage, recipe: Recipe | None) -> None:
        self.storage = storage
        self.nbytes = storage.nbytes
        self.recipe = recipe
        self.absent = HERE
        self.home: Any = None
        self.leaves: tuple[Value, ...] | None = None
        self.dependents: dict[Value, None] | None = None
        self.wanted = self.chain = 0
        self.recorded = False

    def __repr__(self) -> str:
        return f"Value({self.storage.number}, {('here', 'dropped', 'away', 'gone')[self.absent]})"


class Recipe(NamedTuple):
    """An op that ran, in enough detail to run it again.

    `reads` are the values it read; `creates` the values of the storages it created, in the order in which
    `Machine.run` returns them; `writes` pairs a position in `reads` with the value that took its place. `payload`
    belongs to the machine: the call itself. `nbytes` is what the created storages need, `inside` what the op was seen
    to take for itself, which is not needed.
    """

    number: int
    name: str
    reads: Sequence[Value]
    payload: Any
    seconds: Seconds
    exactness: int
    creates: Sequence[Value] = ()
    writes: Sequence[tuple[int, Value]] = ()
    nbytes: Bytes = 0
    inside: Bytes = 0

    def __repr__(self) -> str:
        return f"Recipe({self.number}, {self.name})"


@dataclass(slots=True)
class Counters:
    """What happened in one step. Counts, bytes and seconds; reset when a step begins.

    `early` copies began while ops ran; `early_out` and `early_in` are their bytes out and in. `stalls` and `replays`
    say when compute waited and ran ops again. `reloads` counts storages that were copied back, `recomputes` those that
    replays brought back, `recalls` those of them that had been moved. `questions` says how often the
    policy asked the view about a storage: what bringing it back takes, how stale it is, what is evicted around it.
    """

    recomputed_ops: int = 0
    recomputed_seconds: Seconds = 0.0
    stall_seconds: Seconds = 0.0
    bytes_out: Bytes = 0
    bytes_in: Bytes = 0
    reloads: int = 0
    recomputes: int = 0
    recalls: int = 0
    early: int = 0
    early_out: Bytes = 0
    early_in: Bytes = 0
    dropped_bytes: Bytes = 0
    drops: int = 0
    moves: int = 0
    questions: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    floor_bytes: Bytes = 0
    stalls: list[Stall] = field(default_factory=list)
    replays: list[Again] = field(default_factory=list)

    def stalled(self, storage: Storage, began: Seconds, ended: Seconds) -> None:
        """Compute waited for a copy of `storage`."""
        self.stall_seconds += ended - began
        self.stalls.append(Stall(began, ended, storage.number, storage.nbytes))

    def recomputed(self, recipe: Recipe, began: Seconds, ended: Seconds) -> None:
        self.recomputed_ops += 1
        self.recomputed_seconds += ended - began
        self.replays.append(Again(began, ended, recipe.name, recipe.nbytes))

    def refuse(self, reason: str) -> None:
        """Count a proposal that was not granted (rule 9)."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
