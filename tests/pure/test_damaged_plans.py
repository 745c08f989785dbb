"""Valid plans of random steps, damaged in every way there is a rule against: each is rejected, by that rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from spillway.calibration.named_device import device_of
from spillway.errors import PlanRejected
from spillway.ir import Gap, Host, Plan, Recompute, Rule, Step, verify
from spillway.ir.account import account
from spillway.ir.lives import Life, lives_of
from spillway.methods import Problem, SqrtN, Swap, ZeroOffload
from tests.pure.training_steps import training_step

PLENTY = 10**12
WANTED = 20
"""Plans damaged in each way."""
SEEDS = 400
"""Steps that are looked through for them."""


@cache
def case(seed: int) -> tuple[Step, Plan]:
    """A random step and a plan for it: recomputation, swapping, offload, or the first together with the last."""
    step = training_step(seed, layers=4 + seed % 5)
    problem = Problem(step=step, allowed=PLENTY, device=device_of("a100"))
    recomputed = SqrtN.greedy().plan(problem).gaps
    offloaded = ZeroOffload().plan(problem).gaps
    swapped = Swap(smallest=0).plan(problem).gaps
    return step, plan_of(step, [(*recomputed, *offloaded), recomputed, swapped][seed % 3])


def plan_of(step: Step, gaps: tuple[Gap, ...]) -> Plan:
    peak = account(step, gaps, lives_of(step)).peak
    return Plan(step=step.digest(), allowed=peak, projected=peak, gaps=gaps)


class Damage:
    """One valid plan, and the ways to spoil it. Each gives a plan, or None where this one offers no occasion."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.step, self.plan = case(seed)
        self.lives = lives_of(self.step)
        self.ops = len(self.step.ops)

    def changed(self, gap: Gap | None, **fields: object) -> Plan | None:
        """The plan with one of its gaps changed."""
        if gap is None:
            return None
        gaps = tuple(replace(one, **fields) if one is gap else one for one in self.plan.gaps)  # type: ignore[arg-type]
        return replace(self.plan, gaps=gaps, allowed=PLENTY, projected=PLENTY)

    def added(self, *gaps: Gap) -> Plan | None:
        return replace(self.plan, gaps=(*self.plan.gaps, *gaps), projected=PLENTY) if gaps else None

    def some(self, wanted: Callable[[Gap, Life], object]) -> Gap | None:
        found = [gap for gap in self.plan.gaps if wanted(gap, self.lives[gap.value])]
        return self.random.choice(found) if found else None

    def value(self, wanted: Callable[[Life], object]) -> int | None:
        """A value without a gap."""
        taken = {gap.value for gap in self.plan.gaps}
        found = [number for number, life in enumerate(self.lives) if number not in taken and wanted(life)]
        return self.random.choice(found) if found else None

    def recomputed(self, wanted: Callable[[Gap, Recompute], object] = lambda gap, home: True) -> Gap | None:
        return self.some(lambda gap, life: isinstance(gap.home, Recompute) and wanted(gap, gap.home))

    def leaves(self, home: Recompute) -> set[int]:
        found: set[int] = set()
        created: set[int] = set()
        for op in home.ops:
            found |= set(self.step.ops[op].reads) - created
            created |= set(self.step.ops[op].creates)
        return found

    def comes_back_with_others(self, gap: Gap) -> bool:
        """Whether another gap ends by the same replay, whose value then is no temporary."""
        others = (one for one in self.plan.gaps if one is not gap and one.end == gap.end)
        return any(
            isinstance(one.home, Recompute) and isinstance(gap.home, Recompute) and one.home.ops == gap.home.ops
            for one in others
        )

    # The ways, in the order of the rules.

    def another_step(self) -> Plan | None:
        return replace(self.plan, step=training_step(10**6).digest())

    def an_unknown_value(self) -> Plan | None:
        return self.changed(self.some(lambda gap, life: True), value=len(self.step.values) + self.random.randrange(9))

    def an_unknown_op(self) -> Plan | None:
        gap = self.recomputed()
        return gap and self.changed(gap, home=replace(gap.home, ops=(self.ops, *gap.home.ops)))  # type: ignore[call-arg, union-attr]

    def a_gap_that_outlasts_the_step(self) -> Plan | None:
        return self.changed(self.some(lambda gap, life: True), end=self.ops + 1)

    def a_gap_before_its_value(self) -> Plan | None:
        gap = self.some(lambda gap, life: life.created >= 0)
        return gap and self.changed(gap, start=self.random.randint(0, self.lives[gap.value].created))

    def a_gap_over_a_write(self) -> Plan | None:
        value = self.value(lambda life: life.overwritten is not None and life.overwritten > life.created)
        written = self.lives[value].overwritten if value is not None else None
        return None if value is None or written is None else self.added(
            Gap(value=value, start=written, end=written + 1, home=Host())
        )  # fmt: skip

    def a_gap_after_death(self) -> Plan | None:
        gap = self.some(lambda gap, life: life.dies < self.ops and life.overwritten is None)
        return gap and self.changed(gap, end=self.lives[gap.value].dies + 1)

    def a_gap_over_the_read_that_ends_it(self) -> Plan | None:
        gap = self.some(lambda gap, life: gap.end in life.reads and gap.end + 1 <= min(life.ends, self.ops))
        return gap and self.changed(gap, end=gap.end + 1)

    def a_gap_over_an_earlier_read(self) -> Plan | None:
        gap = self.some(lambda gap, life: any(life.created < read < gap.start for read in life.reads))
        return gap and self.changed(
            gap, start=self.random.choice([read for read in self.lives[gap.value].reads if read < gap.start])
        )

    def a_gap_twice(self) -> Plan | None:
        gap = self.some(lambda gap, life: True)
        return gap and self.added(replace(gap, home=Host()))

    def a_recipe_for_something_else(self) -> Plan | None:
        gap = self.recomputed()
        if gap is None or not isinstance(gap.home, Recompute):
            return None
        others = tuple(op for op in gap.home.ops if gap.value not in self.step.ops[op].creates)
        return self.changed(gap, home=replace(gap.home, ops=others))

    def an_op_that_cannot_be_replayed(self) -> Plan | None:
        gap = self.recomputed()
        never = [op.number for op in self.step.ops if not op.replayable]
        if gap is None or not isinstance(gap.home, Recompute) or not never:
            return None
        ops = tuple(sorted({*gap.home.ops, self.random.choice(never)}))
        return self.changed(gap, home=replace(gap.home, ops=ops))

    def a_recipe_from_the_future(self) -> Plan | None:
        gap = self.recomputed(lambda gap, home: gap.end < self.ops)
        if gap is None or not isinstance(gap.home, Recompute):
            return None
        later = [op.number for op in self.step.ops[gap.end :] if op.replayable]
        return self.changed(gap, home=replace(gap.home, ops=(*gap.home.ops, self.random.choice(later))))

    def a_recipe_backwards(self) -> Plan | None:
        gap = self.recomputed(lambda gap, home: len(home.ops) > 1)
        if gap is None or not isinstance(gap.home, Recompute):
            return None
        return self.changed(gap, home=replace(gap.home, ops=gap.home.ops[::-1]))

    def two_replays_in_a_circle(self) -> Plan | None:
        """A value that a replay reads comes back with it: have its own recipe run the other one's op."""
        pairs = [
            (one, other)
            for one in self.plan.gaps
            for other in self.plan.gaps
            if isinstance(one.home, Recompute) and isinstance(other.home, Recompute) and one.end == other.end
            and one.value in self.leaves(other.home)
        ]  # fmt: skip
        for one, other in pairs:
            reader = self.reader(other.value, one.end)
            if reader is not None and isinstance(one.home, Recompute):
                return self.changed(one, home=replace(one.home, ops=(*one.home.ops, reader)))
        return None

    def reader(self, value: int, before: int) -> int | None:
        found = [read for read in self.lives[value].reads if read < before and self.step.ops[read].replayable]
        return found[0] if found else None

    def a_leaf_that_is_absent(self) -> Plan | None:
        """What a recipe reads leaves before the replay, and stays away."""
        for gap in self.random.sample(self.plan.gaps, len(self.plan.gaps)):
            if not isinstance(gap.home, Recompute):
                continue
            taken = {one.value for one in self.plan.gaps}
            for leaf in sorted(self.leaves(gap.home) - taken - set(gap.home.held)):
                life = self.lives[leaf]
                after = min([read for read in life.reads if read >= gap.end] + [life.ends, self.ops])
                before = max((use for use in life.uses if use < gap.end), default=-1)
                if before + 1 <= gap.end < after:
                    return self.added(Gap(value=leaf, start=gap.end, end=after, home=Host()))
        return None

    def a_leaf_that_is_dead(self) -> Plan | None:
        """The op that would make a dead leaf again is missing from the recipe, or nothing holds it."""
        for gap in self.random.sample(self.plan.gaps, len(self.plan.gaps)):
            if not isinstance(gap.home, Recompute):
                continue
            if gap.home.held:
                return self.changed(gap, home=replace(gap.home, held=()))
            for op in gap.home.ops[:-1]:
                made = [self.lives[value] for value in self.step.ops[op].creates]
                if all(life.overwritten is None and life.dies <= gap.end for life in made):
                    ops = tuple(other for other in gap.home.ops if other != op)
                    return self.changed(gap, home=replace(gap.home, ops=ops))
        return None

    def a_stale_version(self) -> Plan | None:
        """The op that makes the version which the next one writes over is missing: the leaf has the later content."""
        for gap in self.random.sample(self.plan.gaps, len(self.plan.gaps)):
            if not isinstance(gap.home, Recompute):
                continue
            for op in gap.home.ops[:-1]:
                made = [self.lives[value] for value in self.step.ops[op].creates]
                if len(made) == 1 and made[0].overwritten is not None and made[0].overwritten < gap.end:
                    ops = tuple(other for other in gap.home.ops if other != op)
                    return self.changed(gap, home=replace(gap.home, ops=ops))
        return None

    def an_understated_replay(self) -> Plan | None:
        gap = self.recomputed(lambda gap, home: home.temporaries > 0 and not self.comes_back_with_others(gap))
        if gap is None or not isinstance(gap.home, Recompute):
            return None
        return self.changed(gap, home=replace(gap.home, temporaries=self.random.randrange(gap.home.temporaries)))

    def a_smaller_budget(self) -> Plan | None:
        return replace(self.plan, allowed=self.random.randrange(self.plan.projected))

    def a_smaller_projection(self) -> Plan | None:
        return replace(self.plan, allowed=PLENTY, projected=self.random.randrange(self.plan.projected))


WAYS: dict[Callable[[Damage], Plan | None], tuple[Rule, str]] = {
    Damage.another_step: (Rule.OTHER_STEP, "and this is step"),
    Damage.an_unknown_value: (Rule.UNKNOWN_NAME, "not there"),
    Damage.an_unknown_op: (Rule.UNKNOWN_NAME, "not there"),
    Damage.a_gap_that_outlasts_the_step: (Rule.UNKNOWN_NAME, "not there"),
    Damage.a_gap_before_its_value: (Rule.GAP_BEFORE_CREATION, "has created"),
    Damage.a_gap_over_a_write: (Rule.GAP_AFTER_OVERWRITE, "writes over"),
    Damage.a_gap_after_death: (Rule.GAP_AFTER_DEATH, "died"),
    Damage.a_gap_over_the_read_that_ends_it: (Rule.GAP_OVER_READ, "reads the value"),
    Damage.a_gap_over_an_earlier_read: (Rule.GAP_OVER_READ, "reads the value"),
    Damage.a_gap_twice: (Rule.OVERLAPPING_GAPS, "both hold"),
    Damage.a_recipe_for_something_else: (Rule.RECIPE_WITHOUT_VALUE, "creates the value"),
    Damage.an_op_that_cannot_be_replayed: (Rule.NOT_REPLAYABLE, "cannot be replayed"),
    Damage.a_recipe_from_the_future: (Rule.CYCLIC_RECIPE, "has not run before"),
    Damage.a_recipe_backwards: (Rule.CYCLIC_RECIPE, "before it creates"),
    Damage.two_replays_in_a_circle: (Rule.CYCLIC_RECIPE, "every replay waits"),
    Damage.a_leaf_that_is_absent: (Rule.MISSING_LEAF, "absent"),
    Damage.a_leaf_that_is_dead: (Rule.MISSING_LEAF, "dead"),
    Damage.a_stale_version: (Rule.MISSING_LEAF, "stale"),
    Damage.an_understated_replay: (Rule.UNDERSTATED_REPLAY, "at least"),
    Damage.a_smaller_budget: (Rule.OVER_BUDGET, "are allowed"),
    Damage.a_smaller_projection: (Rule.UNDERSTATED_PEAK, "projects"),
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_damaged_plan_is_rejected_by_the_rule_that_was_broken(way: Callable[[Damage], Plan | None]) -> None:
    rule, words = WAYS[way]
    damaged = 0
    for seed in range(SEEDS):
        given = Damage(seed)
        verify(given.plan, given.step, given.plan.allowed)
        plan = way(given)
        if plan is None:
            continue
        with pytest.raises(PlanRejected, match=words) as caught:
            verify(plan, given.step, plan.allowed)
        assert caught.value.rule == rule
        damaged += 1
        if damaged == WANTED:
            return
    pytest.fail(f"only {damaged} of {SEEDS} plans could be damaged like this")


def test_every_rule_is_broken_by_some_damage() -> None:
    assert {rule for rule, _ in WAYS.values()} == set(Rule)
    assert len(WAYS) * WANTED >= 200
