"""DTR's heuristics under the controller, and the neighbourhoods that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway.errors import UsageError
from spillway.memory.records import DROPPED, GONE, NEVER, Storage, Value
from spillway.methods import DTR, Drop, Evicted
from spillway.methods.dtr import HEURISTICS, Classes
from tests.pure.cells import ITEM, Op
from tests.pure.memory_machine import Plain, Program, audit, value_of
from tests.pure.small_programs import EMPTY, MAKE, MAKE_TWO, ONCE, WRITE, chain_of_ops

MAKE_FOUR = Op(name="make four", creates=(4,))


def take(program: Program, **seconds: float) -> None:
    """Say how long the ops that made these names took; to be said before anybody asks."""
    for name, duration in seconds.items():
        value = program[name]
        assert value.recipe is not None
        recipe = value.recipe._replace(seconds=duration)
        program.controller.recipes[program.controller.recipes.index(value.recipe)] = value.recipe = recipe


def order_of_drops(program: Program, heuristic: str) -> str:
    """Names, in the order in which the policy drops them when it is never enough."""
    names = {storage: name for name, storage in program.names.items()}
    asked, dropped = DTR(heuristic).relieve(program.controller.view, ITEM), list[str]()
    granted = None
    while True:
        try:
            proposal = next(asked) if granted is None else asked.send(granted)
        except StopIteration:
            return " ".join(dropped)
        assert isinstance(proposal, Drop)
        assert isinstance(proposal.storage, Storage)
        granted = program.controller.grant(proposal)
        if granted:
            dropped.append(names[proposal.storage])


def siblings(**costs: float) -> Program:
    """Storages made from one source, one after the other."""
    program = Program()
    program.source("x", [3])
    for name in costs:
        program.run(MAKE, "x", name)
    take(program, **costs)
    return program


# ---------------------------------------------------------------------- scores


def test_of_equal_size_and_cost_the_stalest_goes_first() -> None:
    assert order_of_drops(siblings(a=1.0, b=1.0, c=1.0), "dtr-local") == "a b c"


def test_of_equal_size_and_staleness_the_cheapest_goes_first() -> None:
    program = siblings(a=8.0, b=1.0)
    program.run(MAKE, "a b", "last")
    take(program, last=1.0)
    assert order_of_drops(program, "dtr-local") == "b a last"


def test_staleness_is_in_seconds_and_what_the_last_op_made_has_none() -> None:
    # c / (m s): a costs 4 and is 3 + 1 + 1 s old, b costs 3 and is 1 + 1 s old, c costs 1 and is 1 s old.
    program = siblings(a=4.0, b=3.0, c=1.0, d=1.0)
    view = program.controller.view
    assert [view.stale_seconds(program.names[name]) for name in "abcd"] == [5.0, 2.0, 1.0, 0.0]
    assert order_of_drops(program, "dtr-local") == "a c b d"


def test_what_an_op_reads_is_stale_from_when_the_op_began() -> None:
    program = Program()
    chain_of_ops(program, 2, keep="a1")
    take(program, a1=1.0, a2=4.0)
    view = program.controller.view
    assert view.stale_seconds(program.names["a1"]) == 4.0
    assert view.stale_seconds(program.names["a2"]) == 0.0


def test_twice_the_bytes_weigh_as_much_as_half_the_cost() -> None:
    program = siblings(small=1.0)
    program.run(MAKE_FOUR, "x", "large")
    program.run(MAKE, "small large", "last")
    take(program, large=3.9, last=1.0)
    assert order_of_drops(program, "dtr-local") == "large small last"
    program = siblings(small=1.0)
    program.run(MAKE_FOUR, "x", "large")
    program.run(MAKE, "small large", "last")
    take(program, large=4.1, last=1.0)
    assert order_of_drops(program, "dtr-local") == "small large last"


def test_the_largest_goes_first_whatever_it_costs_and_of_equals_the_one_used_last() -> None:
    program = siblings(a=1.0, b=2.0)
    program.run(MAKE_FOUR, "x", "large")
    take(program, large=100.0)
    assert order_of_drops(program, "largest") == "large b a"


def test_of_equal_scores_the_one_used_last_goes_first() -> None:
    assert order_of_drops(siblings(a=1.0, b=1.0, c=1.0), "msps") == "c b a"


def test_msps_counts_evicted_ancestors_and_not_descendants_and_forgets_staleness() -> None:
    program = Program()
    chain_of_ops(program, 3, keep="a1 a2")
    program.run(MAKE, "x", "other")
    take(program, a1=1.0, a2=1.0, a3=1.0, other=1.5)
    assert program.drop("a2")
    # a3 would take a2 along, at 2 s; a1 is needed by a2 and costs its own second.
    assert order_of_drops(program, "msps") == "a1 other a3"


@pytest.mark.parametrize("heuristic", ["dtr", "dtr-eqclass"])
def test_dtr_counts_what_was_evicted_on_both_sides(heuristic: str) -> None:
    program = Program()
    chain_of_ops(program, 3, keep="a1 a2 a3")
    program.run(MAKE, "x", "other")
    program.run(MAKE, "a1 a3 other", "last")
    take(program, a1=1.0, a2=1.0, a3=1.0, other=1.5, last=1.0)
    assert program.drop("a2")
    first = order_of_drops(program, heuristic).split()[0]
    assert first == "other", "a1 and a3 cost 2 s each, with a2"


def test_classes_keep_what_came_back_apart_and_what_it_joined_together() -> None:
    a, b, c, d = (Evicted(number, number) for number in range(4))
    classes = Classes()
    classes.join(a, 1.0, {})
    classes.join(c, 4.0, {})
    classes.join(b, 2.0, {a: 1.0, c: 4.0})
    classes.join(d, 8.0, {})
    assert classes.seconds({a: 1.0, c: 4.0}) == 7.0
    classes.leave(b)
    assert classes.seconds({a: 1.0}) == 5.0, "a and c stay one class: that is the error of union-find"
    assert classes.seconds({a: 1.0, c: 4.0, d: 8.0}) == 13.0
    assert classes.seconds({b: 2.0}) == 0.0
    classes.join(b, 2.0, {d: 8.0})
    assert classes.seconds({d: 8.0}) == 10.0
    assert list(classes) == [a, c, d, b]


def test_the_policy_learns_what_came_back_and_what_died_since_it_was_asked_last() -> None:
    program = Program()
    chain_of_ops(program, 4, keep="a2")
    take(program, a2=2.0, a4=8.0)
    view, policy = program.controller.view, DTR("dtr-eqclass")
    seconds = {place: view.own_seconds(program.names[place]) for place in ("a2", "a4")}
    assert seconds == {"a2": 2.0, "a4": 8.0}
    policy._catch_up(view)
    a1, a3 = view.evicted()
    assert list(policy._classes) == [a1, a3]
    assert program.drop("a2")
    policy._catch_up(view)
    assert policy._classes.seconds(view.evicted_neighbours(program.names["a4"])) == pytest.approx(2.0 + 2e-9)
    program.read("a2")
    policy._catch_up(view)
    assert list(policy._classes) == [a1, a3]
    program.end_step()
    policy._catch_up(view)
    assert list(policy._classes) == []


def test_dtr_has_no_other_heuristics() -> None:
    with pytest.raises(UsageError, match=r"^DTR has no heuristic 'best'; choose one of dtr, dtr-eqclass, .*\.$"):
        DTR("best")


def test_what_cannot_be_recomputed_is_never_proposed() -> None:
    program = Program()
    program.source("x", [3])
    program.run(ONCE, "x", "once")
    program.run(EMPTY, "", "empty")
    for heuristic in HEURISTICS:
        assert list(DTR(heuristic).relieve(program.controller.view, ITEM)) == []


# ---------------------------------------------------------------------- neighbourhoods


def evicted_now(value: Value) -> bool:
    return value.absent in (DROPPED, GONE) and value.recipe is not None and value.recipe.exactness != NEVER


def names_of(values: Sequence[Value]) -> dict[Evicted, float]:
    return {
        Evicted(value.storage.number, value.recipe.number): value.recipe.seconds
        for value in values
        if value.recipe is not None
    }


def brute_force(program: Program, start: Value, step: Callable[[Value, Value], bool]) -> dict[Evicted, float]:
    """All that is evicted and reached: grown until nothing is added, over all pairs of values."""
    every = [v for r in program.controller.recipes for v in (*r.creates, *(w for _, w in r.writes))]
    found: list[Value] = []
    while True:
        more = [v for v in every if v is not start and v not in found and evicted_now(v)]
        more = [v for v in more if any(step(from_, v) for from_ in (start, *found))]
        if not more:
            return names_of(found)
        found += more


def reads(reader: Value, read: Value) -> bool:
    return reader.recipe is not None and any(value is read for value in reader.recipe.reads)


@st.composite
def worlds(draw: st.DrawFn) -> Program:
    """A random graph of ops, some of whose values were dropped, moved, overwritten or freed."""
    program = Program(chain_cap=1 << 30)
    program.source("n0", [1])
    names = ["n0"]
    for number in range(1, draw(st.integers(2, 14))):
        operands = " ".join(draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)))
        kind = draw(st.sampled_from([MAKE, MAKE, MAKE, MAKE_TWO, WRITE, ONCE]))
        made = [f"n{number}" + suffix for suffix in ("", "b")[: len(kind.creates)]]
        program.run(replace(kind, name=f"op{number}"), operands, " ".join(made))
        names += made
        leaving = draw(st.sampled_from(names))
        act = draw(st.sampled_from([program.drop, program.drop, program.move, program.free, program.read]))
        if act != program.free:
            act(leaving)
        elif len(names) > 1:
            names.remove(leaving)
            program.free(leaving)
    return program


@settings(max_examples=80)
@given(worlds())
def test_neighbourhoods_are_what_a_search_over_all_pairs_finds(program: Program) -> None:
    view = program.controller.view
    for storage in program.names.values():
        value = value_of(storage)
        assert view.evicted_ancestors(storage) == brute_force(program, value, reads)
        assert view.evicted_descendants(storage) == brute_force(program, value, lambda a, b: reads(b, a))
        either = [v for r in program.controller.recipes for v in (*r.creates, *(w for _, w in r.writes))]
        near = [v for v in either if evicted_now(v) and (reads(v, value) or reads(value, v))]
        assert view.evicted_neighbours(storage) == names_of(near)
    assert view.evicted() == names_of(
        [v for r in program.controller.recipes for v in (*r.creates, *(w for _, w in r.writes)) if evicted_now(v)]
    )


@settings(max_examples=60)
@given(worlds(), st.sampled_from(sorted(HEURISTICS)))
def test_the_first_drop_has_the_smallest_score_of_all_that_can_be_recomputed(program: Program, heuristic: str) -> None:
    policy, view = DTR(heuristic), program.controller.view
    first = next(policy.relieve(view, ITEM), None)
    scores = [
        (policy._score(view, s, policy._seconds(view, s)), -place)
        for place, s in enumerate(view.candidates())
        if view.own_seconds(s) < inf
    ]
    if first is None:
        assert scores == []
    else:
        chosen = first.storage
        score = policy._score(view, chosen, policy._seconds(view, chosen))
        place = next(place for place, s in enumerate(view.candidates()) if s is chosen)
        assert (score, -place) == min(scores)
    audit(program)


def test_nothing_is_kept_of_a_step_that_is_over() -> None:
    program = Program(2 * ITEM, DTR("dtr"))
    chain_of_ops(program, 6, keep="a2 a4")
    assert program.controller.counters.drops > 0
    program.end_step()
    neighbours = program.controller.view._neighbours
    assert not neighbours._values
    assert not neighbours._readers
    assert neighbours._clock == [0.0]
    audit(program)


def test_under_dtr_nothing_is_moved_but_what_cannot_be_recomputed_and_the_results_are_right() -> None:
    program, plain = Program(3 * ITEM, DTR("dtr")), Plain()
    for target in (program, plain):
        chain_of_ops(target, 8, keep="a2 a4 a6")
    assert [program.read(name) for name in plain.names] == [plain.read(name) for name in plain.names]
    assert program.controller.counters.bytes_out == ITEM, "the source"
    assert program.controller.budget.peak <= 3 * ITEM
    assert program.machine.replayed
