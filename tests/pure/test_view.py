"""What policies are told is what is so, and reading it changes nothing."""

from __future__ import annotations

from math import inf

from spillway.memory.records import EXACT
from tests.pure.cells import ITEM, Op
from tests.pure.memory_machine import Program, audit
from tests.pure.small_programs import ONCE, chain_of_ops, started


def order(program: Program) -> str:
    """Names of the candidates, in the order in which a policy gets them."""
    names = {storage: name for name, storage in program.names.items()}
    return " ".join(names[storage] for storage in program.controller.view.candidates())


def take_seconds(program: Program, **seconds: float) -> None:
    """Say how long the ops that made these names took when they ran."""
    for name, duration in seconds.items():
        value = program[name]
        assert value.recipe is not None
        value.recipe = value.recipe._replace(seconds=duration)


def test_candidates_come_least_recently_used_first() -> None:
    program = Program()
    for name in "abcd":
        program.source(name, [1])
    program.read("c")
    program.read("a")
    assert order(program) == "b d c a"
    program.read("b")
    assert order(program) == "d c a b"


def test_candidates_are_those_that_are_present_alive_large_enough_and_free_to_leave() -> None:
    program = Program()
    for name in ("away", "dead", "locked", "escaped", "left"):
        program.source(name, [1])
    program.source("tiny", [1], nbytes=ITEM - 1)
    program.move("away")
    program.free("dead")
    program.names["locked"].locks = 1
    program.names["escaped"].handle.escaped = True
    assert order(program) == "left"


def test_a_storage_that_left_and_came_back_is_one_candidate_and_not_two() -> None:
    program = Program()
    program.source("a", [1])
    program.source("b", [1])
    assert order(program) == "a b"
    assert program.move("a")
    program.controller.restore(program["a"])
    assert order(program) == "a b"
    assert program.move("a")
    assert order(program) == "b"


def test_a_walk_that_was_left_unfinished_takes_nobody_away_from_the_next_one() -> None:
    program = Program()
    for name in "abc":
        program.source(name, [1])
    unfinished = program.controller.view.candidates()
    next(unfinished)
    assert order(program) == "a b c"
    del unfinished
    assert order(program) == "a b c"


def test_the_chain_counts_what_is_gone_and_what_is_dropped_and_not_what_is_present_or_away() -> None:
    program = Program()
    chain_of_ops(program, 6, keep="a2 a4")
    view, a6 = program.controller.view, program.names["a6"]
    assert view.chain(a6) == 2
    assert program.move("a4")
    assert view.chain(a6) == 2
    program.read("a4")
    assert program.drop("a4")
    assert view.chain(a6) == 4
    assert program.drop("a2")
    assert view.chain(a6) == 6


def test_what_may_not_be_dropped_has_no_chain_and_takes_for_ever() -> None:
    program = started()
    program.run(ONCE, "x", "once")
    view, a, x = program.controller.view, program.names["a"], program.names["x"]
    assert view.chain(a) == 1
    for legal in (x, program.names["once"]):
        assert (view.chain(legal), view.recompute_seconds(legal)) == (None, inf)
    program.controller.prepare("any", [], [x], 0)
    assert view.chain(a) is None, "x is about to be written"
    program.controller.finish([], [x])
    assert view.chain(a) == 1
    a.exposed = True
    assert view.chain(a) is None, "somebody may read it without asking"
    audit(program)


def test_a_chain_that_would_push_another_over_the_cap_is_none() -> None:
    program = Program(chain_cap=3)
    chain_of_ops(program, 4, keep="a2")
    view, a2 = program.controller.view, program.names["a2"]
    assert view.chain(a2) == 2
    assert program.drop("a4")
    assert view.chain(a2) is None, "a4 would be four ops away"


def test_the_seconds_of_a_chain_are_those_of_all_its_ops() -> None:
    program = Program()
    chain_of_ops(program, 3, keep="a1 a2")
    take_seconds(program, a1=1.0, a2=2.0, a3=4.0)
    view, a3 = program.controller.view, program.names["a3"]
    assert view.recompute_seconds(a3) == 4.0
    assert program.drop("a2")
    assert view.recompute_seconds(a3) == 6.0
    assert program.drop("a1")
    assert view.recompute_seconds(a3) == 7.0


def test_moving_costs_half_where_the_slower_tier_still_has_the_content() -> None:
    program = started()
    view, a = program.controller.view, program.names["a"]
    assert view.transfer_seconds(a) == 2 * ITEM / 1e9
    program.move("a")
    program.read("a")
    assert view.transfer_seconds(a) == ITEM / 1e9


def test_the_view_tells_budget_account_and_time() -> None:
    program = Program(5 * ITEM)
    program.source("x", [1, 2])
    program.run(Op(name="any", exactness=EXACT), "x")
    view = program.controller.view
    assert (view.allowed, view.resident, view.clock) == (5 * ITEM, 2 * ITEM, 1)


def test_what_is_available_is_what_is_present_and_free_to_leave() -> None:
    program = Program()
    for name in ("away", "dead", "locked", "escaped", "left"):
        program.source(name, [1])
    storages = dict(program.names)
    program.move("away")
    program.free("dead")
    storages["locked"].locks = 1
    storages["escaped"].handle.escaped = True
    view = program.controller.view
    assert [name for name, storage in storages.items() if view.available(storage)] == ["left"]


def test_the_seconds_of_an_op_alone_are_told_without_looking_further() -> None:
    program = Program()
    chain_of_ops(program, 3, keep="a2")
    take_seconds(program, a2=2.0, a3=4.0)
    view = program.controller.view
    assert program.drop("a2")
    assert view.own_seconds(program.names["a3"]) == 4.0
    assert view.own_seconds(program.names["x"]) == inf


def test_at_worst_what_is_present_of_the_leaves_comes_back_too_in_the_cheaper_way() -> None:
    program = Program()
    chain_of_ops(program, 3, keep="a1 a2")
    take_seconds(program, a1=1.0, a2=2.0, a3=4.0)
    view, a3, x = program.controller.view, program.names["a3"], program.names["x"]
    copied_in = ITEM / 1e9
    assert view.recompute_seconds_at_worst(a3) == 4.0 + copied_in
    take_seconds(program, a2=copied_in / 2)
    assert view.recompute_seconds_at_worst(a3) == 4.0 + copied_in / 2
    assert view.recompute_seconds_at_worst(x) == inf


def test_the_seconds_of_a_chain_include_copying_in_what_it_needs() -> None:
    program = started()
    take_seconds(program, a=1.0)
    view, a = program.controller.view, program.names["a"]
    assert view.recompute_seconds(a) == 1.0
    program.move("x")
    assert view.recompute_seconds(a) == 1.0 + ITEM / 1e9


def test_a_moved_storage_has_a_chain_as_long_as_it_could_be_recomputed() -> None:
    program = started()
    take_seconds(program, a=1.0)
    view, a = program.controller.view, program.names["a"]
    program.move("a")
    assert (view.chain(a), view.recompute_seconds(a)) == (1, 1.0)
    program.free("x")
    assert (view.chain(a), view.recompute_seconds(a)) == (None, inf)


def test_the_exposed_share_is_that_of_the_copies_for_which_ops_waited() -> None:
    program = started()
    controller = program.controller
    assert controller.view.exposed == 1.0, "nothing was copied"
    program.begin_step()
    program.move("a")
    controller.counters.stall_seconds = ITEM / 1e9 / 4
    program.end_step()
    assert controller.view.exposed == 0.25
    program.begin_step()
    controller.counters.stall_seconds = 1.0
    program.end_step()
    assert controller.view.exposed == 1.0, "never more than all of it"
