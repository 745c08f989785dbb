"""Recipes: which ops bring a value back at a given moment, from what is there then."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from spillway.ir.lives import Kept, Life
from spillway.ir.plan import Gap, Recompute
from spillway.ir.step import Step, ValueId
from spillway.units import Bytes

LONGEST: Final = 512
"""Ops of a recipe beyond which none is looked for."""


def recipe(
    value: ValueId,
    start: int,
    end: int,
    *,
    step: Step,
    lives: Sequence[Life],
    present: Callable[[ValueId], bool],
    inside: Collection[int] | None = None,
) -> Recompute | None:
    """The ops that create `value` again before op `end` in a gap that starts at `start`; None if there is no way.

    A recipe ends in values that can be read before op `end` and of which `present` says that no gap holds them then.
    What is dead by then is created again too. If that cannot be, because it is a source or its op is not replayable,
    the gap holds it, where it begins in time for that. With `inside`, ops that are not among these run again only where
    what they made cannot be held either: a block is recomputed from what it was called with.
    """
    found = way_back(value, start, end, step=step, lives=lives, present=present, inside=inside)
    return None if found is None else found.home([value], step)


@final
@dataclass(frozen=True, slots=True)
class WayBack:
    """How a value comes back."""

    ops: tuple[int, ...]
    """That run again, in order."""
    held: tuple[ValueId, ...]
    """What a gap has to hold for them beyond its death."""
    touched: frozenset[ValueId]
    """All that was asked for, and what the ops make."""

    def home(self, values: Sequence[ValueId], step: Step) -> Recompute:
        """The recipe, of a replay that brings these values back."""
        return Recompute(ops=self.ops, held=self.held, temporaries=temporaries(values, self.ops, step))


def way_back(
    value: ValueId, start: int, end: int, *, step: Step, lives: Sequence[Life], present: Callable[[ValueId], bool],
    inside: Collection[int] | None = None,
) -> WayBack | None:  # fmt: skip
    """As `recipe` says, without its bytes."""
    ops, held, touched, wanted = set[int](), set[ValueId](), {value}, [value]
    while wanted:
        number = wanted.pop()
        life = lives[number]
        if life.created in ops:
            continue
        touched.add(number)
        if number != value and life.readable(end) and present(number):
            continue
        outside = inside is not None and life.created not in inside
        if outside and number != value and _can_be_held(life, start, end):
            held.add(number)
        elif life.created >= 0 and step.ops[life.created].replayable:
            ops.add(life.created)
            touched.update(step.ops[life.created].creates)
            wanted += step.ops[life.created].reads
        elif number != value and _can_be_held(life, start, end):
            held.add(number)
        else:
            return None
        if len(ops) > LONGEST:
            return None
    created = {v for op in ops for v in step.ops[op].creates}
    return WayBack(tuple(sorted(ops)), tuple(sorted(held - created)), frozenset(touched))


def together(
    dropped: Mapping[ValueId, Kept], elsewhere: Collection[ValueId], *, step: Step, lives: Sequence[Life],
    inside: Collection[int] | None = None,
) -> list[Gap]:  # fmt: skip
    """Gaps of what one part of the forward leaves to the backward, which end together: when the backward needs the
    first of it. What has no way back stays.

    Args:
        dropped: The values that are to be gone.
        elsewhere: Values that other gaps hold at that moment.
        inside: The ops of that part of the forward, where what went into it is rather held than made again. The gaps
            are then to have one home (`as_one`): what one of them holds, all of them need.
    """
    # Without a value that stays, the others may come back in another way, or at another moment.
    while True:
        gaps = _ending_together(dropped, elsewhere, step, lives, inside)
        if len(gaps) == len(dropped):
            return gaps
        back = {gap.value for gap in gaps}
        dropped = {value: kept for value, kept in dropped.items() if value in back}


def _ending_together(
    dropped: Mapping[ValueId, Kept], elsewhere: Collection[ValueId], step: Step, lives: Sequence[Life],
    inside: Collection[int] | None,
) -> list[Gap]:  # fmt: skip
    moment = min((kept.needed for kept in dropped.values()), default=0)
    first = min((kept.last + 1 for kept in dropped.values()), default=0)
    gaps = []
    for value, kept in dropped.items():
        start = kept.last + 1
        if start >= moment:
            continue
        home = recipe(
            value, start if inside is None else first, moment, step=step, lives=lives,
            present=lambda leaf: leaf not in elsewhere, inside=inside,
        )  # fmt: skip
        if home is not None:
            gaps.append(Gap(value=value, start=start, end=moment, home=home))
    return gaps


def _can_be_held(life: Life, start: int, end: int) -> bool:
    """Whether it dies unchanged while a gap that starts at `start` and ends at `end` can keep it."""
    return life.overwritten is None and start <= life.dies <= end


def as_one(gaps: Sequence[Gap], step: Step) -> list[Gap]:
    """The same gaps, all of which are recomputed before one op, with the recipe of all of them: one replay, in which
    no op runs twice."""
    homes = [gap.home for gap in gaps if isinstance(gap.home, Recompute)]
    ops = tuple(sorted({op for home in homes for op in home.ops}))
    created = {value for op in ops for value in step.ops[op].creates}
    held = tuple(sorted({leaf for home in homes for leaf in home.held} - created))
    home = Recompute(ops=ops, held=held, temporaries=temporaries([gap.value for gap in gaps], ops, step))
    return [replace(gap, home=home) for gap in gaps]


def temporaries(values: Sequence[ValueId], ops: Sequence[int], step: Step) -> Bytes:
    """The most bytes that a replay of `ops` has created and still needs at once, beside the storages of `values`, which
    it brings back.

    Those storages count as resident all the time: until an op creates them, their bytes are room for others.
    """
    last: dict[ValueId, int] = {}
    for place, op in enumerate(ops):
        for read in (*step.ops[op].reads, *step.ops[op].creates):
            last[read] = place
    own = {step.values[value].storage for value in values}
    missing, most = set(own), 0
    there: set[ValueId] = set()
    for place, op in enumerate(ops):
        there.update(step.ops[op].creates)
        storages = {step.values[v].storage for v in there}
        missing -= storages
        made = sum(step.storages[storage].nbytes for storage in storages - own)
        most = max(most, made - sum(step.storages[storage].nbytes for storage in missing))
        there = {v for v in there if last[v] > place}
    return most


def replayed(gaps: Sequence[tuple[int, ValueId, Recompute]], step: Step) -> list[int]:
    """The ops that run again, with repetition, for gaps that come back: each the moment, the value and its home.

    Replays of one moment run one by one, those first that others wait for. What one has brought back on its way, as
    another output of the same op, needs no replay of its own.
    """
    ran: list[int] = []
    back: set[tuple[int, ValueId]] = set()
    waiting = {(moment, value) for moment, value, _ in gaps}
    for moment, value, home in sorted(gaps, key=lambda gap: (gap[0], gap[2].ops[-1:], len(gap[2].ops))):
        if (moment, value) in back:
            continue
        ran += home.ops
        made = {(moment, v) for op in home.ops for v in step.ops[op].creates}
        back |= made & waiting
    return ran
