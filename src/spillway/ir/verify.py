"""Whether a plan could run: an obvious check that shares nothing with the planners it judges.

NOTE: the rules, in the order in which they are checked; the first that is broken is named. "Before op k" is the moment
at which gaps that end at k come back; "during op k" is the op itself. With n ops, "before op n" is after the last one.

 1. other-step: the plan was made for this very step.
 2. unknown-name: every value and op that it names is one of the step's, and no gap outlasts the step.
 3. gap-before-creation: a gap starts after the op that creates its value. (A source exists before op 0.)
 4. gap-after-overwrite: a gap does not hold the op that writes over its value.
 5. gap-after-death: a gap ends when its value's storage dies, at the latest.
 6. gap-over-read: no op inside a gap reads its value.
 7. overlapping-gaps: no two gaps of one value hold the same op, as what is gone cannot leave.

Rules for recipes hold for gaps that come back. A gap does not come back if its value is dead, or written over without
being read, when the gap ends. One that lasts to the end of the step comes back only by `Recompute`, because recipes die
there; what waits elsewhere may wait on.

 8. recipe-without-value: the recipe creates the value.
 9. not-replayable: every op of a recipe may be replayed.
10. cyclic-recipe: no replay waits for itself. Every op of the recipe has run when the gap ends; none reads what a later
    one of the recipe creates; and of the replays before one op, no two wait for each other.
11. missing-leaf: what the recipe reads and does not create is there at the replay, in the version that is read. It has
    not been overwritten by then; it is not gone itself; and if it has died, this gap holds it, and this gap or others
    held it during every op since its death.
12. understated-replay: a recipe's temporaries are not stated lower than the outputs of its ops alone make them. Gaps
    with the same ops that end together are one replay, and what it brings back is not among its temporaries.

Bytes are counted op by op. During op k: every storage that exists and is not inside a gap (the op's inputs and outputs
are among them), and leaves that open gaps hold beyond their death. Before op k, if there is a replay: the same without
the outputs of op k, and the temporaries of the largest replay, as they run one by one.

13. over-budget: the bytes so counted never exceed what is allowed.
14. understated-peak: nor do they exceed the peak that the plan projects.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import final

from spillway.errors import PlanRejected
from spillway.ir.plan import Gap, Plan, Recompute
from spillway.ir.step import Step, StorageId, StorageInfo, ValueId
from spillway.units import Bytes


@final
class Rule(StrEnum):
    """The rules of the NOTE above, by name."""

    OTHER_STEP = "other-step"
    UNKNOWN_NAME = "unknown-name"
    GAP_BEFORE_CREATION = "gap-before-creation"
    GAP_AFTER_OVERWRITE = "gap-after-overwrite"
    GAP_AFTER_DEATH = "gap-after-death"
    GAP_OVER_READ = "gap-over-read"
    OVERLAPPING_GAPS = "overlapping-gaps"
    RECIPE_WITHOUT_VALUE = "recipe-without-value"
    NOT_REPLAYABLE = "not-replayable"
    CYCLIC_RECIPE = "cyclic-recipe"
    MISSING_LEAF = "missing-leaf"
    UNDERSTATED_REPLAY = "understated-replay"
    OVER_BUDGET = "over-budget"
    UNDERSTATED_PEAK = "understated-peak"


def verify(plan: Plan, step: Step, allowed: Bytes) -> None:
    """Return if the plan could run on the step within `allowed` bytes.

    Raises PlanRejected with the rule that the plan breaks: one of `Rule`.
    """
    _check_names(plan, step)
    life = _lives(step)
    for gap in plan.gaps:
        _check_life(gap, step, life[gap.value])
    _check_overlap(plan)
    replays = [
        _replay(gap, gap.home, step)
        for gap in plan.gaps
        if isinstance(gap.home, Recompute) and _comes_back(gap, step, life[gap.value])
    ]
    _check_replays(replays, plan, step, life)
    _check_bytes(plan, step, life, allowed)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Life:
    """When a value exists."""

    created: int
    """The op that creates it; -1 for a source."""
    overwritten: int | None
    """The op that writes the next version over it."""
    dies: int
    """First op at which its storage is dead; one more than the number of ops if it outlives the step."""
    reads: tuple[int, ...]

    @property
    def ends(self) -> int:
        """The op at which its content ends."""
        return self.dies if self.overwritten is None else min(self.overwritten, self.dies)


def _lives(step: Step) -> list[_Life]:
    created = {(step.values[v].storage, step.values[v].version): op.number for op in step.ops for v in op.creates}
    reads: dict[ValueId, list[int]] = {value.id: [] for value in step.values}
    for op in step.ops:
        for number in op.reads:
            reads[number].append(op.number)
    return [
        _Life(
            created=created.get((value.storage, value.version), -1),
            overwritten=created.get((value.storage, value.version + 1)),
            dies=_dies(step.storages[value.storage], step),
            reads=tuple(reads[value.id]),
        )
        for value in step.values
    ]


def _dies(storage: StorageInfo, step: Step) -> int:
    return len(step.ops) + 1 if storage.present_at_end else storage.alive_until


def _comes_back(gap: Gap, step: Step, life: _Life) -> bool:
    if gap.end in life.reads:
        return True
    return gap.end < life.ends and (gap.end < len(step.ops) or isinstance(gap.home, Recompute))


def _gone_before(op: int, gap: Gap, step: Step, life: _Life) -> bool:
    """Whether the gap's value is not there before the op, once all that comes back then has come back."""
    return gap.start <= op < gap.end or (op == gap.end and not _comes_back(gap, step, life))


# Rules 1 to 7: gaps.


def _check_names(plan: Plan, step: Step) -> None:
    if plan.step != step.digest():
        raise PlanRejected(
            f"the plan is for step {plan.step:.12}, and this is step {step.digest():.12}", rule=Rule.OTHER_STEP
        )
    values, ops = set(range(len(step.values))), set(range(len(step.ops)))
    for gap in plan.gaps:
        recipe = gap.home if isinstance(gap.home, Recompute) else Recompute(ops=())
        if not {gap.value, *recipe.held} <= values or not {gap.end - 1, *recipe.ops} <= ops:
            there = f"the step has {len(values)} values and {len(ops)} ops"
            raise PlanRejected(f"{gap} names a value or op that is not there: {there}", rule=Rule.UNKNOWN_NAME)


def _check_life(gap: Gap, step: Step, life: _Life) -> None:
    if gap.start <= life.created:
        reason = f"{gap} starts before {step.ops[life.created].label} has created the value"
        raise PlanRejected(reason, rule=Rule.GAP_BEFORE_CREATION)
    if life.overwritten is not None and gap.end > life.overwritten:
        reason = f"{gap} holds {step.ops[life.overwritten].label}, which writes over the value"
        raise PlanRejected(reason, rule=Rule.GAP_AFTER_OVERWRITE)
    if gap.end > life.dies:
        raise PlanRejected(f"{gap} goes on after the value died at op {life.dies}", rule=Rule.GAP_AFTER_DEATH)
    for read in life.reads[bisect_left(life.reads, gap.start) :][:1]:
        if read < gap.end:
            raise PlanRejected(f"{gap} holds {step.ops[read].label}, which reads the value", rule=Rule.GAP_OVER_READ)


def _check_overlap(plan: Plan) -> None:
    for before, after in pairwise(sorted(plan.gaps, key=lambda gap: (gap.value, gap.start))):
        if before.value == after.value and after.start < before.end:
            raise PlanRejected(f"{before} and {after} both hold op {after.start}", rule=Rule.OVERLAPPING_GAPS)


# Rules 8 to 12: recipes.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Replay:
    """A gap whose value comes back by running ops again."""

    gap: Gap
    recipe: Recompute
    leaves: frozenset[ValueId]
    """What the recipe reads before any op of it has created it."""
    created: frozenset[ValueId]


def _replay(gap: Gap, recipe: Recompute, step: Step) -> _Replay:
    leaves: set[ValueId] = set()
    created: set[ValueId] = set()
    for number in recipe.ops:
        leaves.update(set(step.ops[number].reads) - created)
        created.update(step.ops[number].creates)
    return _Replay(gap=gap, recipe=recipe, leaves=frozenset(leaves), created=frozenset(created))


def _check_replays(replays: list[_Replay], plan: Plan, step: Step, life: list[_Life]) -> None:
    for replay in replays:
        _check_recipe(replay, step)
    for replay in replays:
        _check_own_cycle(replay, step)
    _check_shared_cycles(replays)
    absent, holds = _by_value(plan, life)
    for replay in replays:
        for leaf in sorted(replay.leaves):
            if trouble := _trouble(leaf, replay, absent[leaf], holds[leaf], step, life[leaf]):
                reason = f"{replay.gap}: at the replay before op {replay.gap.end}, {step.values[leaf]} {trouble}"
                raise PlanRejected(reason, rule=Rule.MISSING_LEAF)
    together: dict[tuple[int, tuple[int, ...]], list[_Replay]] = defaultdict(list)
    for replay in replays:
        together[replay.gap.end, replay.recipe.ops].append(replay)
    for group in together.values():
        _check_temporaries(group, step)


def _check_recipe(replay: _Replay, step: Step) -> None:
    gap = replay.gap
    if gap.value not in replay.created:
        raise PlanRejected(f"{gap}: no op of the recipe creates the value", rule=Rule.RECIPE_WITHOUT_VALUE)
    for number in replay.recipe.ops:
        if not step.ops[number].replayable:
            raise PlanRejected(f"{gap}: {step.ops[number].label} cannot be replayed", rule=Rule.NOT_REPLAYABLE)


def _check_own_cycle(replay: _Replay, step: Step) -> None:
    gap = replay.gap
    for number in replay.recipe.ops:
        if number >= gap.end:
            reason = f"{gap}: {step.ops[number].label} has not run before op {gap.end}"
            raise PlanRejected(reason, rule=Rule.CYCLIC_RECIPE)
    if replay.leaves & replay.created:
        names = " ".join(str(step.values[value]) for value in sorted(replay.leaves & replay.created))
        reason = f"{gap}: the recipe reads {names} before it creates it"
        raise PlanRejected(reason, rule=Rule.CYCLIC_RECIPE)


def _check_shared_cycles(replays: list[_Replay]) -> None:
    """Take away replays that wait for no other until none is left; those that cannot be taken away wait in a circle."""
    waiting = {(replay.gap.value, replay.gap.end): replay for replay in replays}
    waits_for = {
        key: {(leaf, replay.gap.end) for leaf in replay.leaves} & waiting.keys() for key, replay in waiting.items()
    }
    waited_by: dict[tuple[ValueId, int], list[tuple[ValueId, int]]] = defaultdict(list)
    for key, others in waits_for.items():
        for other in others:
            waited_by[other].append(key)
    ready = [key for key, others in waits_for.items() if not others]
    while ready:
        gone = ready.pop()
        del waiting[gone]
        for key in waited_by[gone]:
            waits_for[key].remove(gone)
            if not waits_for[key]:
                ready.append(key)
    if waiting:
        circle = " and ".join(f"[{replay.gap}]" for replay in waiting.values())
        raise PlanRejected(f"among {circle} every replay waits for another", rule=Rule.CYCLIC_RECIPE)


def _by_value(plan: Plan, life: list[_Life]) -> tuple[dict[ValueId, list[Gap]], dict[ValueId, list[tuple[int, int]]]]:
    """The gaps of every value, and the ops, half-open, during which gaps hold it, one after the other."""
    absent: dict[ValueId, list[Gap]] = defaultdict(list)
    holds: dict[ValueId, list[tuple[int, int]]] = defaultdict(list)
    for gap in sorted(plan.gaps, key=lambda gap: gap.start):
        absent[gap.value].append(gap)
        for leaf in _held(gap):
            reached = holds[leaf][-1][1] if holds[leaf] else -1
            if gap.start <= reached:
                holds[leaf][-1] = (holds[leaf][-1][0], max(reached, gap.end))
            else:
                holds[leaf].append((gap.start, gap.end))
    return absent, holds


def _trouble(
    leaf: ValueId, replay: _Replay, absent: list[Gap], holds: list[tuple[int, int]], step: Step, life: _Life
) -> str | None:
    """Say why the leaf cannot be read at the replay, by its own gaps and by when gaps hold it."""
    moment = replay.gap.end
    if life.overwritten is not None and life.overwritten < moment:
        return f"has been overwritten by op {life.overwritten}: the version is stale"
    last_alive = min(moment, life.dies - 1)
    # Gaps of one value do not overlap, so that the last to have started is the last to end.
    last = bisect_right(absent, last_alive, key=lambda gap: gap.start) - 1
    if last >= 0 and _gone_before(last_alive, absent[last], step, life):
        return "is absent" if last_alive == moment else "was absent when it died"
    if life.dies > moment:
        return None
    if leaf not in replay.recipe.held:
        return "is dead and not held"
    place = bisect_right(holds, (life.dies, len(step.ops) + 1)) - 1
    reached = holds[place][1] if place >= 0 else -1
    if reached < moment:
        return f"is dead and nothing held it during op {max(reached, life.dies)}"
    return None


def _check_temporaries(group: list[_Replay], step: Step) -> None:
    own = {step.values[replay.gap.value].storage for replay in group}
    needed = max(_outputs(step, group[0], own, place) for place in range(len(group[0].recipe.ops)))
    for replay in group:
        if replay.recipe.temporaries < needed:
            raise PlanRejected(f"{replay.gap}: the replay needs {needed} B at least", rule=Rule.UNDERSTATED_REPLAY)


def _outputs(step: Step, replay: _Replay, own: set[StorageId], place: int) -> Bytes:
    """Bytes of what the recipe has created when it runs the op at `place`, if this op creates it or it is read still.

    The storages that come back, `own`, are left out, as they count as resident already; until an op of the recipe
    creates one, its bytes are room for others. An op that writes in place shares the storage of the version it reads,
    the cheapest way to replay it: this is a lower bound.
    """
    ops = [step.ops[number] for number in replay.recipe.ops]
    before = {value for op in ops[:place] for value in op.creates}
    read_still = {value for op in ops[place:] for value in op.reads}
    needed = set(ops[place].creates) | (before & read_still)
    there = {step.values[value].storage for value in before.union(ops[place].creates)}
    storages = {step.values[value].storage for value in needed} - own
    made, room = (sum(step.storages[storage].nbytes for storage in some) for some in (storages, own - there))
    return made - room


# Rules 13 and 14: bytes.


def _check_bytes(plan: Plan, step: Step, life: list[_Life], allowed: Bytes) -> None:
    peak = 0
    for when, nbytes in _moments(plan, step, life):
        if nbytes > allowed:
            raise PlanRejected(f"{when} {nbytes} B are resident, {allowed} B are allowed", rule=Rule.OVER_BUDGET)
        peak = max(peak, nbytes)
    if peak > plan.projected:
        reason = f"the plan projects a peak of {plan.projected} B and reaches {peak} B"
        raise PlanRejected(reason, rule=Rule.UNDERSTATED_PEAK)


def _moments(plan: Plan, step: Step, life: list[_Life]) -> Iterator[tuple[str, Bytes]]:
    temporaries = _temporaries(plan, step, life)
    for op, (before, during) in enumerate(zip(_before(plan, step, life), [*_during(plan, step), 0], strict=True)):
        last = op == len(step.ops)
        if op in temporaries:
            yield "after the last op" if last else f"before {step.ops[op].label}", before + temporaries[op]
        if not last:
            yield f"during {step.ops[op].label}", during


def _temporaries(plan: Plan, step: Step, life: list[_Life]) -> dict[int, Bytes]:
    """Temporaries of the largest replay before every op that has one."""
    most: dict[int, Bytes] = {}
    for gap in plan.gaps:
        if isinstance(gap.home, Recompute) and _comes_back(gap, step, life[gap.value]):
            most[gap.end] = max(most.get(gap.end, 0), gap.home.temporaries)
    return most


_Interval = tuple[int, int, StorageId]
"""Of the half-open interval of moments the first and the end, and a storage."""


def _before(plan: Plan, step: Step, life: list[_Life]) -> Iterator[Bytes]:
    """Bytes before every op, when all that comes back has come back, and nothing that the op creates is there; and
    after the last."""
    moments = len(step.ops) + 1
    exists = [
        (0 if one.present_at_start else one.alive_from + 1, min(_dies(one, step), moments), one.id)
        for one in step.storages
    ]
    absent = [
        (gap.start, gap.end + _gone_before(gap.end, gap, step, life[gap.value]), step.values[gap.value].storage)
        for gap in plan.gaps
    ]
    return _sums(plan, step, exists, absent, moments=moments, still=1)


def _during(plan: Plan, step: Step) -> Iterator[Bytes]:
    """Bytes during every op."""
    exists = [(one.alive_from, one.alive_until, one.id) for one in step.storages]
    absent = [(gap.start, gap.end, step.values[gap.value].storage) for gap in plan.gaps]
    return _sums(plan, step, exists, absent, moments=len(step.ops), still=0)


def _sums(
    plan: Plan, step: Step, exists: list[_Interval], absent: list[_Interval], *, moments: int, still: int
) -> Iterator[Bytes]:
    """At every moment the bytes of what exists and is not absent, and of what the open gaps hold beyond its death.

    A gap is open for `still` moments beyond its end.
    """
    held = [
        (max(gap.start, _dies(storage, step)), gap.end + still, storage.id)
        for gap in plan.gaps
        for storage in (step.storages[step.values[value].storage] for value in _held(gap))
    ]
    counts: tuple[dict[StorageId, int], ...] = ({}, {}, {})
    changes: list[list[tuple[dict[StorageId, int], StorageId, int]]] = [[] for _ in range(moments + 1)]
    for count, intervals in zip(counts, (exists, absent, held), strict=True):
        for start, end, storage in intervals:
            if start < end:
                changes[start].append((count, storage, 1))
                changes[end].append((count, storage, -1))

    def resident(storage: StorageId) -> Bytes:
        there, gone, kept = (bool(count.get(storage, 0)) for count in counts)
        return step.storages[storage].nbytes * ((there and not gone) or kept)

    total = 0
    for moment in range(moments):
        for count, storage, change in changes[moment]:
            total -= resident(storage)
            count[storage] = count.get(storage, 0) + change
            total += resident(storage)
        yield total


def _held(gap: Gap) -> tuple[ValueId, ...]:
    return gap.home.held if isinstance(gap.home, Recompute) else ()
