"""The controller's account, and its rules 1 to 4: absent inputs, cuts, locks, room.

The numbers are those of NOTE [Safety rules] in `memory.controller`.
"""

from __future__ import annotations

import pytest

from spillway.errors import BudgetInfeasible, EngineError
from spillway.ir.timeline import Change
from spillway.memory.ledger import FIRST_TEMPORARY
from spillway.memory.records import AWAY, DROPPED, GONE, HERE
from spillway.methods.base import Drop
from tests.pure.cells import ITEM, Op
from tests.pure.memory_machine import Plain, Program, audit
from tests.pure.small_programs import EMPTY, FILL, MAKE, MAKE_TWO, WRITE, Eager, chain_of_ops, made_from, started

# ---------------------------------------------------------------------- the account


def test_a_storage_may_be_buried_twice_and_counts_once() -> None:
    program = started()
    storage = program.names["a"]
    program.free("a")
    program.controller.forget(storage)
    assert program.controller.budget.resident == ITEM
    assert storage.value is None


def test_a_storage_that_dies_while_it_is_away_gives_its_home_back() -> None:
    program = started()
    assert program.move("a")
    program.free("a")
    audit(program)
    assert (program.controller.away, program.machine.homes) == (0, set())


def test_a_resized_storage_counts_with_its_new_size() -> None:
    program = started()
    cell = program.names["a"].handle
    cell.nbytes = 3 * ITEM
    program.controller.resize(program.names["a"], 3 * ITEM)
    assert (program.controller.budget.resident, program.controller.budget.peak) == (4 * ITEM, 4 * ITEM)
    audit(program)


def test_what_happens_is_written_down_as_it_happens() -> None:
    program = Program()
    program.controller.events = []
    program.source("x", [3])
    program.run(MAKE, "x", "a")
    program.drop("a")
    program.read("a")
    program.move("a")
    program.read("a")
    program.free("a")
    x, a, temporary = 1, 2, FIRST_TEMPORARY + 1
    assert [(clock, storage.number, change) for clock, storage, change in program.controller.events] == [
        (0, x, Change.CREATE),
        (1, a, Change.CREATE),
        (1, a, Change.DROP),
        (2, temporary, Change.CREATE),
        (2, temporary, Change.DIE),
        (2, a, Change.RECOMPUTE),
        (2, a, Change.MOVE),
        (3, a, Change.PAGE_IN),
        (3, a, Change.DIE),
    ]


def test_a_version_that_was_overwritten_is_gone() -> None:
    program = started()
    old = program["a"]
    program.run(WRITE, "a")
    assert (old.absent, program["a"].absent) == (GONE, HERE)
    assert "gone" in repr(old)


# ---------------------------------------------------------------------- rule 1


def test_rule_1_a_dropped_storage_is_recomputed_before_the_op_that_reads_it() -> None:
    program = started()
    assert program.drop("a")
    program.run(MAKE, "a", "b")
    assert (program.machine.replayed, program.controller.counters.recomputed_ops) == (["make"], 1)
    assert program.look("b") == made_from(*made_from(3))
    audit(program)


def test_rule_1_a_moved_storage_is_paged_in_before_the_op_that_reads_it() -> None:
    program = started()
    assert program.move("a")
    assert program.controller.budget.resident == ITEM
    program.run(MAKE, "a", "b")
    assert (program.machine.replayed, program.controller.counters.bytes_in) == ([], ITEM)
    assert program.look("b") == made_from(*made_from(3))
    audit(program)


def test_rule_1_a_storage_that_is_only_written_comes_back_too() -> None:
    for leave in (Program.drop, Program.move):
        program = started()
        assert leave(program, "a")
        program.run(Op(name="norm", creates=(1,)), "x", "b", statistics="a")
        program.run(Op(name="norm", creates=(1,)), "x", "b", statistics="a")
        plain = Plain()
        plain.source("a", made_from(3))
        plain.source("x", [3])
        plain.run(Op(name="norm", creates=(1,)), "x", "b", statistics="a")
        plain.run(Op(name="norm", creates=(1,)), "x", "b", statistics="a")
        assert (program.look("a"), program.look("b")) == (plain.read("a"), plain.read("b"))
        audit(program)


def test_rule_1_storages_that_are_only_written_are_not_dropped_for_each_other() -> None:
    # Only three of four fit: bringing b back has to push something out, and a must not be what is dropped for it.
    program = Program(4 * ITEM, Eager())
    program.source("x", [3])
    for name in "ab":
        program.run(MAKE, "x", name)
        assert program.drop(name)
    program.source("y", [4, 5])
    program.run(Op(name="norm"), "x", statistics="a b")
    assert program.machine.replayed == ["make", "make"]
    audit(program)


def test_rule_1_inputs_that_left_while_others_came_back_are_fetched_again() -> None:
    program = Program(3 * ITEM)
    program.source("x", [3])
    for name in "abc":
        program.run(MAKE, "x", name)
        assert program.drop(name)
    program.run(Op(name="join"), "a b c")
    assert program.machine.peak <= 3 * ITEM
    audit(program)


def test_rule_1_a_value_that_is_gone_is_never_given_out() -> None:
    program = started()
    gone = program["a"]
    program.free("a")
    with pytest.raises(EngineError, match="is gone and cannot come back"):
        program.controller.restore(gone)


# ---------------------------------------------------------------------- rule 2


def test_rule_2_write_hazard_dependents_come_back_before_their_leaf_is_written() -> None:
    program = started()
    assert program.drop("a")
    program.run(WRITE, "x")
    assert (program["a"].absent, program.look("a")) == (HERE, made_from(3))
    audit(program)


def test_rule_2_write_hazard_reaches_through_ancestors_that_are_gone() -> None:
    program, plain = Program(), Plain()
    for each in (program, plain):
        chain_of_ops(each, 4)
    assert program.drop("a4")
    program.run(WRITE, "x")
    assert (program.look("a4"), program.machine.replayed) == (plain.read("a4"), ["make"] * 4)
    audit(program)


def test_rule_2_a_present_ancestor_shields_what_hangs_on_it_from_a_write() -> None:
    program = started()
    program.run(MAKE, "a", "b")
    assert program.drop("b")
    program.run(WRITE, "x")
    assert program["b"].absent == DROPPED
    assert program.read("b") == made_from(*made_from(3))
    audit(program)


def test_rule_2_a_dependent_that_died_is_no_reason_to_recompute_anything() -> None:
    program = started()
    assert program.drop("a")
    program.free("a")
    program.run(WRITE, "x")
    assert program.machine.replayed == []
    audit(program)


def test_rule_2_death_hazard_a_drop_keeps_the_leaves_of_its_cut_alive() -> None:
    program = started()
    assert program.drop("a")
    program.free("x")
    assert program.controller.budget.resident == ITEM
    assert program.read("a") == made_from(3)
    assert program.controller.budget.resident == ITEM, "the leaf died when nothing hung on it any more"
    audit(program)


def test_rule_2_a_leaf_that_only_a_drop_keeps_alive_may_leave_like_any_other() -> None:
    program = started()
    program.run(MAKE, "a", "b")
    leaf = program.names["a"]
    assert program.drop("b")
    program.free("a")
    assert program.controller.grant(Drop(leaf))
    assert program.controller.budget.resident == ITEM
    assert program.read("b") == made_from(*made_from(3))
    audit(program)


def test_rule_2_the_death_of_a_dropped_storage_lets_go_of_its_leaves() -> None:
    program = started()
    assert program.drop("a")
    program.free("x")
    program.free("a")
    audit(program)
    assert (program.controller.budget.resident, program.controller.dropped) == (0, {})


def test_rule_2_several_versions_of_one_storage_are_replayed_on_a_copy() -> None:
    program, plain = Program(), Plain()
    for each in (program, plain):
        each.source("x", [3])
        each.run(EMPTY, "", "a")
        each.run(FILL, "a x")
        each.run(WRITE, "a x")
        each.run(MAKE, "a", "b")
        each.run(WRITE, "a")
    assert program.drop("b")
    assert program.drop("a")
    assert program.read("b") == plain.read("b")
    assert program["a"].absent == DROPPED
    assert program.read("a") == plain.read("a")
    audit(program)


def test_rule_2_a_storage_that_was_never_filled_is_moved_and_not_dropped() -> None:
    program = Program()
    program.run(EMPTY, "", "a")
    before = program.look("a")
    assert not program.drop("a")
    assert program.move("a")
    assert program.read("a") == before
    program.source("x", [3])
    program.run(FILL, "a x")
    assert program.drop("a")


def test_rule_2_siblings_that_are_dropped_together_come_back_in_one_replay() -> None:
    program = Program()
    program.source("x", [3])
    program.run(MAKE_TWO, "x", "a b")
    assert program.drop("a")
    assert program.drop("b")
    program.read("a")
    assert (program["a"].absent, program["b"].absent, program.machine.replayed) == (HERE, HERE, ["make two"])
    audit(program)


def test_rule_2_a_sibling_that_never_left_is_not_replaced() -> None:
    program = Program()
    program.source("x", [3])
    program.run(MAKE_TWO, "x", "a b")
    program.run(MAKE, "b", "c")
    cell = program.names["b"].handle
    assert program.drop("a")
    program.read("a")
    assert program.names["b"].handle is cell
    assert program.controller.budget.resident == 4 * ITEM
    audit(program)


# ---------------------------------------------------------------------- rule 3


def test_rule_3_what_an_op_uses_stays_until_the_op_is_done() -> None:
    program = started()
    storages = [program.names["x"], program.names["a"]]
    program.controller.prepare("any", [program["x"]], [storages[1]], 0)
    assert [program.move(name) or program.drop(name) for name in "xa"] == [False, False]
    program.controller.finish([program["x"]], [storages[1]])
    audit(program)
    assert [program.move(name) for name in "xa"] == [True, True]


def test_rule_3_nothing_comes_to_depend_on_what_is_about_to_be_written() -> None:
    program = started()
    program.controller.prepare("any", [], [program.names["x"]], 0)
    assert not program.drop("a")
    assert program.controller.counters.refusals == {"would depend on what is being written": 1}
    program.controller.finish([], [program.names["x"]])
    assert program.drop("a")


def test_rule_3_all_that_an_op_writes_is_doomed_while_any_dependent_comes_back() -> None:
    program = Program(4 * ITEM, Eager())
    program.source("x", [3])
    program.source("y", [4])
    program.run(MAKE, "x", "a")
    program.run(MAKE, "y", "b")
    assert program.drop("a")
    assert program.drop("b")
    program.run(Op(name="foreach", writes=(0, 1)), "x y")
    assert (program.read("a"), program.read("b")) == (made_from(3), made_from(4))
    audit(program)


def test_rule_3_wanted_values_are_moved_and_not_dropped() -> None:
    program = started()
    program["a"].wanted += 1
    assert not program.drop("a")
    assert program.controller.counters.refusals == {"wanted by an op or a replay": 1}
    assert program.move("a")
    program["a"].wanted -= 1


def test_rule_3_inputs_of_pending_replays_survive_a_policy_that_drops_all_it_can() -> None:
    program, plain = Program(4 * ITEM, Eager()), Plain()
    for each in (program, plain):
        each.source("x", [3])
        for name in "abcd":
            each.run(MAKE, "x", name)
        each.run(Op(name="join", creates=(1,)), "a b", "ab")
        each.run(Op(name="join", creates=(1,)), "c d", "cd")
        each.run(Op(name="join", creates=(1,)), "ab cd", "abcd")
    assert program.read("abcd") == plain.read("abcd")
    assert program.machine.peak <= 4 * ITEM
    audit(program)


# ---------------------------------------------------------------------- rule 4


def test_rule_4_room_is_made_before_an_op_runs() -> None:
    program = Program(4 * ITEM)
    program.source("x", [1, 2])
    program.run(Op(name="big", creates=(2,)), "x", "a")
    program.run(Op(name="big", creates=(2,)), "x", "b")
    assert (program["a"].absent, program.machine.peak, program.controller.budget.peak) == (AWAY, 4 * ITEM, 4 * ITEM)
    audit(program)


def test_rule_4_the_temporaries_of_a_replay_are_spilled_when_they_are_in_the_way() -> None:
    # b and c are made from x; d joins them. Replaying d holds the temporaries of b and c beside x: three items and the
    # result are one more than is allowed, so that something has to wait in the slower tier.
    program, plain = Program(), Plain()
    for each in (program, plain):
        each.source("x", [3])
        each.run(MAKE, "x", "b")
        each.run(Op(name="other", creates=(1,)), "x", "c")
        each.run(MAKE, "b c", "d")
        each.free("b")
        each.free("c")
    assert program.drop("d")
    program.controller.budget.allowed, program.machine.peak = 3 * ITEM, 0
    x = program.names["x"]
    x.escaped = True
    with pytest.raises(BudgetInfeasible):
        program.read("d")
    x.escaped = False
    program.machine.peak = 0
    assert program.read("d") == plain.read("d")
    assert program.machine.peak <= 3 * ITEM
    audit(program)


def test_rule_4_a_temporary_is_freed_as_soon_as_no_later_op_of_the_replay_reads_it() -> None:
    program = Program()
    chain_of_ops(program, 5)
    assert program.drop("a5")
    program.controller.budget.allowed, program.machine.peak = 3 * ITEM, 0
    program.read("a5")
    assert (program.controller.counters.bytes_out, program.machine.peak) == (0, 3 * ITEM)


def test_rule_4_a_temporary_that_was_spilled_leaves_no_home_behind() -> None:
    program, plain = Program(), Plain()
    for each in (program, plain):
        each.source("x", [3])
        each.run(MAKE, "x", "b")
        each.run(Op(name="large", creates=(2,)), "x", "c")
        each.run(Op(name="small", creates=(1,)), "c", "d")
        each.run(MAKE, "b d", "e")
        for name in "bcd":
            each.free(name)
    assert program.drop("e")
    program.free("x")
    program.controller.budget.allowed, program.machine.peak = 3 * ITEM, 0
    assert program.read("e") == plain.read("e")
    assert program.controller.counters.bytes_out > ITEM, "x and a temporary were spilled"
    assert (program.machine.peak, program.machine.homes) == (3 * ITEM, set())
    audit(program)


def test_rule_4_chains_are_capped() -> None:
    program = Program(chain_cap=4)
    chain_of_ops(program, 5)
    assert not program.drop("a5")
    assert program.controller.counters.refusals == {"no recipe within the cap": 1}
    assert program.move("a5")


def test_rule_4_chains_of_dropped_values_count_together() -> None:
    program = Program(chain_cap=4)
    chain_of_ops(program, 5, keep="a2")
    assert program.drop("a2")
    assert not program.drop("a5")
    assert program.controller.counters.refusals == {"chain too long": 1}
    program.read("a2")
    assert program.drop("a5")
    assert not program.drop("a2"), "then a5 would be five ops away"
    audit(program)


def test_rule_4_a_chain_that_would_grow_along_two_paths_counts_both() -> None:
    # d hangs on b and c, and both hang on a: dropping a puts one op more into each of the two paths.
    program = Program(chain_cap=4)
    program.source("x", [3])
    program.run(MAKE, "x", "a")
    program.run(MAKE, "a", "b")
    program.run(MAKE, "a", "c")
    program.run(MAKE, "b c", "d")
    assert [program.drop(name) for name in "dbca"] == [True, True, True, False]
    assert program["d"].chain == 3
    audit(program)


def test_rule_4_chains_grow_and_shrink_symmetrically() -> None:
    program = Program(chain_cap=100)
    chain_of_ops(program, 6, keep="a2 a4")
    program.run(MAKE, "a2 a6", "b")
    assert [program.drop(name) for name in ("b", "a6", "a4", "a2")] == [True] * 4
    # b is one op over a6 and a2; a6 two over a4, a4 two over a2, a2 two over x.
    assert [program[name].chain for name in ("a2", "a4", "a6", "b")] == [2, 4, 6, 9]
    audit(program)
    program.read("a4")
    assert [program[name].chain for name in ("a2", "a4", "a6", "b")] == [0, 0, 2, 3]
    audit(program)
    assert program.drop("a4")
    assert [program[name].chain for name in ("a2", "a4", "a6", "b")] == [0, 2, 4, 5]
    program.read("b")
    assert [program[name].chain for name in ("a2", "a4", "a6", "b")] == [0, 0, 0, 0]
    audit(program)


def test_rule_4_a_value_that_was_not_dropped_counts_for_nothing_in_the_chains_of_others() -> None:
    program = Program(chain_cap=3)
    chain_of_ops(program, 4, keep="a3")
    assert not program.drop("a4") or program["a4"].chain == 1
    assert program.drop("a3") is False, "a4 would be four ops away"
    program.read("a4")
    audit(program)


def test_rule_4_livelock_a_deep_chain_is_read_backwards_with_few_replays() -> None:
    depth = 60
    program, plain = Program(8 * ITEM, Eager(), chain_cap=6), Plain()
    names = " ".join(f"a{number}" for number in range(1, depth + 1))
    for each in (program, plain):
        chain_of_ops(each, depth, keep=names)
        each.run(Op(name="loss", creates=(1,)), f"a{depth}", "g")
        for number in range(depth, 0, -1):
            each.run(Op(name="back", creates=(1,)), f"g a{number}", "g")
            each.free(f"a{number}")
    assert program.read("g") == plain.read("g")
    assert program.machine.peak <= 8 * ITEM
    assert program.controller.counters.recomputed_ops < 6 * depth
    audit(program)
