"""A plan: which values are gone during which ops, and where they come back from.

A plan says nothing of how bytes travel; it says when they are not there. Whether it can run at all is for `ir.verify`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias, final

from spillway.ir.step import ValueId
from spillway.ir.timeline import WindowAt
from spillway.units import Bytes, format_bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """The value is created again by running ops of the step once more, on temporaries."""

    ops: tuple[int, ...]
    """The recipe: numbers of the ops to replay, in the order of their replay."""
    held: tuple[ValueId, ...] = ()
    """Leaves of the recipe that the gap keeps alive beyond their death, until it ends."""
    temporaries: Bytes = 0
    """The most bytes that the replay needs at once beside its leaves and the value that comes back, whose bytes count
    from the replay's beginning."""

    def __post_init__(self) -> None:
        if self.temporaries < 0:
            raise ValueError(f"a replay cannot need {self.temporaries} bytes of temporaries")

    def __str__(self) -> str:
        held = f", holding values {' '.join(map(str, self.held))}" if self.held else ""
        return f"recompute by ops {' '.join(map(str, self.ops))}{held}, temporaries {format_bytes(self.temporaries)}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The bytes wait in the slower tier: in host memory, or on disk."""

    def __str__(self) -> str:
        return "host"


Home: TypeAlias = Recompute | Host
"""Where an absent value comes back from."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A half-open interval `[start, end)` of ops during which one value's bytes are gone.

    The bytes leave as op `start - 1` ends, before anything that dies with that op does, and are back before op `end`
    runs. A gap from op 0 begins before the step; one that ends at the number of ops lasts to the end of the step.
    """

    value: ValueId
    """The value that is gone."""
    start: int
    """First op during which its bytes are gone."""
    end: int
    """First op during which they are back, or can no longer be read because they died or were written over."""
    home: Home
    """Where the value comes back from."""

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"a gap of value {self.value} during [{self.start}, {self.end}) holds no op")

    def __str__(self) -> str:
        return f"value {self.value} during [{self.start}, {self.end}): {self.home}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a planner decided for one step. `str(plan)` lists it."""

    step: str
    """`Step.digest()` of the step that it was made for."""
    allowed: Bytes
    """The budget that it was made for."""
    projected: Bytes
    """The peak that it is expected to need."""
    gaps: tuple[Gap, ...]
    """What is gone when; in no particular order."""
    window: tuple[WindowAt, ...] = field(default=(), compare=False, repr=False)
    """What a window that made it did, op by op, for whoever draws it. Files of plans do not have it."""
    remark: str = field(default="", compare=False, repr=False)
    """What its planner has to say of it, a sentence. Files of plans do not have it either."""

    def __post_init__(self) -> None:
        if self.allowed < 0 or self.projected < 0:
            raise ValueError(f"a plan cannot have {self.allowed} bytes allowed and {self.projected} projected")

    def __str__(self) -> str:
        allowed, projected = format_bytes(self.allowed), format_bytes(self.projected)
        title = f"plan for step {self.step:.12}: {allowed} allowed, {projected} projected, {len(self.gaps)} gaps"
        return "\n".join([title, *(f"  {gap}" for gap in self.gaps)])
