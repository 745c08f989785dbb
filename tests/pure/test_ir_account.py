"""The planners' account of bytes is the verifier's; their recipes are such as it accepts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from spillway.ir import Gap, Host, Kind, Plan, Recompute, Rule, Step
from spillway.ir.account import account
from spillway.ir.lives import idle_intervals, lives_of
from spillway.ir.recipes import recipe, replayed
from tests.pure.test_ir_properties import idle_intervals as known_intervals
from tests.pure.test_ir_properties import plan_of, steps, steps_with_plans, verdict
from tests.pure.test_ir_verify import FILL, M1, STEP, TWINS, A, C, G, X, gap


@settings(max_examples=100)
@given(steps_with_plans())
def test_the_account_of_planners_is_that_of_the_verifier(case: tuple[Step, Plan]) -> None:
    step, plan = case
    if verdict(plan, step) is not None:
        return
    peak = account(step, plan.gaps, lives_of(step)).peak
    assert verdict(plan, step, peak) is None
    assert peak == 0 or verdict(plan, step, peak - 1) == Rule.OVER_BUDGET


@given(steps())
def test_idle_intervals_are_those_that_a_walk_through_the_ops_finds(step: Step) -> None:
    lives = lives_of(step)
    found = [
        (value.id, start, end) for value in step.values for start, end in idle_intervals(lives[value.id], len(step.ops))
    ]
    assert sorted(found) == sorted(known_intervals(step))


@settings(max_examples=100)
@given(steps(), st.data())
def test_a_recipe_that_is_found_is_accepted(step: Step, data: st.DataObject) -> None:
    lives = lives_of(step)
    intervals = known_intervals(step)
    if not intervals:
        return
    value, start, end = data.draw(st.sampled_from(intervals))
    # A second value waits elsewhere, and may be what the recipe wants.
    other = data.draw(st.sampled_from(intervals))
    gaps = [Gap(value=other[0], start=other[1], end=other[2], home=Host())] if other[0] != value else []

    def present(leaf: int) -> bool:
        return not any(gap.value == leaf and gap.start <= end < gap.end for gap in gaps)

    home = recipe(value, start, end, step=step, lives=lives, present=present)
    if home is None:
        return
    # What died in a gap cannot be held, and a gap that does not come back is no leaf: planners make neither.
    if any(gap.value in home.held for gap in gaps) or any(gap.end == end for gap in gaps):
        return
    assert verdict(plan_of(step, [Gap(value=value, start=start, end=end, home=home), *gaps]), step) is None


def test_a_recipe_ends_in_what_is_there_and_creates_again_what_is_not() -> None:
    lives = lives_of(STEP)

    def found(value: int, start: int, end: int, *gone: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        home = recipe(value, start, end, step=STEP, lives=lives, present=lambda leaf: leaf not in gone)
        return None if home is None else (home.ops, home.held)

    # X has died: it is held, where the gap begins in time. B has been written over: op 1 creates it again.
    assert found(A, 3, 6) == ((0,), (X,))
    assert found(A, 4, 6) is None
    assert found(C, 3, 6) == ((1, 2), (X,))
    assert found(C, 3, 6, A) == ((0, 1, 2), (X,))
    # Op 4 is never replayed, and what it made is dead.
    assert found(G, 6, 7) is None
    assert recipe(M1, 2, 3, step=FILL, lives=lives_of(FILL), present=lambda leaf: True) is not None


def test_temporaries_are_what_a_replay_needs_at_once() -> None:
    home = recipe(3, 3, 4, step=TWINS, lives=lives_of(TWINS), present=lambda leaf: leaf not in (1, 2))
    assert home is not None
    assert (home.ops, home.temporaries) == ((0, 1, 2), 6)


def test_ops_are_counted_as_often_as_they_run_again() -> None:
    one, two = (0, 1, 2), (0, 1)
    homes = [gap(value, 3, 4, home).home for value, home in ((3, Recompute(ops=one)), (2, Recompute(ops=two)))]
    assert replayed([(4, 3, homes[0]), (4, 2, homes[1])], TWINS) == [0, 1, 0, 1, 2]  # type: ignore[list-item]
    # What comes back on the way of another needs no replay of its own.
    assert replayed([(4, 1, homes[1]), (4, 2, homes[1])], TWINS) == [0, 1]  # type: ignore[list-item]
    assert {storage.kind for storage in TWINS.storages} == {Kind.PARAMETER, Kind.ACTIVATION}
