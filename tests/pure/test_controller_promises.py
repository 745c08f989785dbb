"""Rules 5 to 12 of the controller: copies, homes, refusals, ends and errors. Numbers are those of NOTE [Safety rules].

Rule 8 has nothing to keep yet: no method makes a lossy home.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from typing import final

import pytest

from spillway.errors import BudgetInfeasible, SpillCorruptedError, SpillError, SpillFullError
from spillway.memory.controller import PATIENCE
from spillway.memory.records import AWAY, DROPPED, HERE, Recipe
from spillway.methods.base import AbstractPolicy, Drop, Fetch, MemoryView, Move, Proposal
from spillway.methods.keep_all import KeepAll
from spillway.methods.lru import LRU
from spillway.units import Bytes
from tests.pure.cells import ITEM, Op, OpFailed
from tests.pure.memory_machine import Plain, Program, audit, error_of
from tests.pure.small_programs import (
    FAIL,
    MAKE,
    NOISE,
    ONCE,
    SHAKE,
    WRITE,
    Eager,
    Stubborn,
    chain_of_ops,
    made_from,
    started,
)

# ---------------------------------------------------------------------- rule 5


def test_rule_5_bytes_on_their_way_count_as_resident_until_the_copy_is_done() -> None:
    program = Program(2 * ITEM)
    program.source("x", [3])
    program.source("y", [4])
    seen: dict[str, Bytes] = {}

    def note(action: str) -> None:
        seen[action] = program.controller.budget.resident

    program.machine.before = note
    assert program.move("x")
    program.read("x")
    assert seen["page_out"] == 2 * ITEM, "x is still here while it is copied out"
    assert seen["page_in"] == ITEM, "and not yet here while it is copied in"
    assert program.controller.budget.resident == program.machine.present() == 2 * ITEM


# ---------------------------------------------------------------------- rule 6


def test_rule_6_a_replay_sees_the_random_stream_of_the_original_and_leaves_it_where_it_was() -> None:
    program, plain = Program(), Plain()
    for each in (program, plain):
        each.run(NOISE, "", "a")
        each.run(NOISE, "", "b")
        each.run(SHAKE, "b")
    assert program.drop("a")
    assert program.drop("b")
    assert (program.read("a"), program.read("b")) == (plain.read("a"), plain.read("b"))
    assert program.world.random == plain.world.random
    for each in (program, plain):
        each.run(NOISE, "", "c")
    assert program.read("c") == plain.read("c")


def test_rule_6_a_replay_counts_nothing_twice_in_running_statistics() -> None:
    program, plain = Program(), Plain()
    for each in (program, plain):
        each.source("x", [3])
        each.source("mean", [0])
        each.run(MAKE, "x", "a", "mean")
    assert program.drop("a")
    assert (program.read("a"), program.read("mean")) == (plain.read("a"), plain.read("mean"))


# ---------------------------------------------------------------------- rule 7


def test_rule_7_a_home_stays_valid_until_the_next_write() -> None:
    program = started()
    for _ in range(3):
        assert program.move("a")
        program.read("a")
    assert (program.controller.counters.moves, program.controller.counters.bytes_out) == (3, ITEM)
    program.run(WRITE, "a")
    assert program.move("a")
    assert program.controller.counters.bytes_out == 2 * ITEM
    audit(program)
    assert program.machine.homes == {program["a"].home}


def test_rule_7_what_was_written_while_a_storage_was_away_is_what_comes_back() -> None:
    program = started()
    assert program.move("a")
    program.poke("a", 99)
    assert program.read("a") == [99]
    assert program.machine.homes == set()
    assert program.move("a")
    assert program.read("a") == [99]


def test_rule_7_what_is_written_between_steps_without_a_word_is_not_lost_to_an_old_home() -> None:
    program = Program()
    program.source("batch", [1])
    for number in range(3):
        program.poke("batch", number)
        program.begin_step()
        assert program.move("batch")
        assert program.read("batch") == [number]
        assert program.move("batch")
        assert program.read("batch") == [number]
        program.end_step()
    assert program.machine.homes == set()


def test_rule_7_what_comes_back_between_steps_has_no_home_in_the_next_step() -> None:
    program = started()
    program.begin_step()
    assert program.move("a")
    program.end_step()
    program.controller.restore(program["a"])
    program.poke("a", 99)
    program.begin_step()
    assert program.move("a")
    assert program.read("a") == [99]


def test_rule_7_an_op_that_fails_half_way_invalidates_what_it_was_writing() -> None:
    program, plain = started(), Plain()
    plain.source("a", made_from(3))
    assert program.move("a")
    for each in (program, plain):
        error_of(OpFailed, each.run, FAIL, "a")
    assert program.read("a") == plain.read("a") != made_from(3)
    assert not program.drop("a"), "its content is what the failure left, which nothing can recompute"
    assert program.move("a")
    assert program.read("a") == plain.read("a")
    audit(program)


# ---------------------------------------------------------------------- rule 9


@final
class Note(AbstractPolicy):
    """Proposes what it was told to and writes down the answers."""

    name = "note"

    def __init__(self) -> None:
        self.proposals: list[Proposal] = []
        self.answers: list[bool] = []

    def relieve(self, view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        for proposal in self.proposals:
            self.answers.append((yield proposal))


def test_rule_9_a_refusal_is_counted_with_its_reason_and_told_to_the_policy() -> None:
    policy = Note()
    program = Program(4 * ITEM, policy)
    program.source("x", [3])
    program.run(ONCE, "x", "a")
    program.run(MAKE, "x", "b")
    program.run(MAKE, "x", "c")
    a, b, c, x = (program.names[name] for name in "abcx")
    b.exposed = True
    policy.proposals = [Drop(x), Drop(a), Drop(b), Move(c), Move(b)]
    program.controller.prepare("two", [program["c"]], [], 2 * ITEM)
    program.controller.finish([program["c"]], [])
    assert policy.answers == [False, False, False, False, True]
    assert program.controller.counters.refusals == {
        "no recipe within the cap": 2,
        "reached from outside": 1,
        "not free to leave": 1,
    }
    audit(program)


def test_rule_9_when_a_policy_has_nothing_to_say_the_controller_moves_by_itself() -> None:
    program = Program(2 * ITEM, KeepAll())
    program.source("x", [3])
    program.run(MAKE, "x", "a")
    program.run(MAKE, "x", "b")
    assert (program.controller.counters.moves, program.controller.counters.drops) == (1, 0)
    assert program["a"].absent == AWAY


def test_rule_9_a_policy_that_never_stops_is_not_asked_for_ever() -> None:
    policy = Stubborn()
    program = Program(2 * ITEM, policy)
    program.source("x", [3])
    program.run(MAKE, "x", "a")
    policy.proposal = Drop(program.names["x"])
    program.run(MAKE, "x", "b")
    assert (program["a"].absent, program.machine.peak) == (AWAY, 2 * ITEM)


def test_rule_9_an_interrupted_policy_does_not_forget_who_may_leave() -> None:
    program = Program(2 * ITEM)
    program.source("x", [3])
    program.source("y", [4])

    def broken(action: str) -> None:
        if action == "page_out":
            raise SpillError("The disk is on fire.")

    program.machine.before = broken
    with pytest.raises(SpillError) as caught:
        program.run(MAKE, "", "a")
    program.machine.before = program.check_account
    assert list(program.controller.view.candidates()) == [program.names["x"], program.names["y"]]
    assert caught.value.__traceback__ is not None, "and that although the frames are still there"
    audit(program)


def test_rule_9_a_policy_that_never_ends_to_look_ahead_is_not_asked_any_further() -> None:
    policy = Stubborn()
    program = Program(policy=policy)
    program.source("x", [3])
    policy.proposal = Fetch(program.names["x"])
    program.run(MAKE, "x", "a")
    assert program.controller.counters.refusals == {"not away": PATIENCE}
    audit(program)


# ---------------------------------------------------------------------- rule 10


def test_rule_10_what_has_escaped_is_left_alone_from_the_moment_somebody_tries_to_evict_it() -> None:
    program = started()
    program.names["a"].handle.escaped = True
    assert not program.names["a"].escaped
    assert not program.move("a")
    assert not program.drop("a")
    assert program.names["a"].escaped
    assert program.names["a"] not in list(program.controller.view.candidates())


def test_rule_10_what_hangs_on_a_storage_comes_back_before_that_escapes_and_nothing_hangs_on_it_afterwards() -> None:
    program = Program(3 * ITEM, Eager())
    program.source("x", [3])
    for name in "abc":
        program.run(MAKE, "x", name)
    program.reveal("x", by_address=True)
    program.poke("x", 99)
    assert [program[name].absent == DROPPED for name in "abc"] == [False] * 3
    assert [program.read(name) for name in "abc"] == [made_from(3)] * 3
    assert not program.drop("c")
    assert program.controller.counters.refusals["would depend on what has escaped"] > 0
    audit(program)


@pytest.mark.parametrize("end", ["free", "write"])
def test_rule_10_what_an_escaped_storage_held_is_never_recomputed(end: str) -> None:
    program = started()
    program.reveal("a", by_address=True)
    program.poke("a", 99)
    program.run(MAKE, "a", "b")
    if end == "free":
        program.free("a")
    else:
        program.run(WRITE, "a")
    assert not program.drop("b"), "its recipe begins with a 99 that no op has made"
    assert program.look("b") == made_from(99)


def test_rule_10_an_exposed_storage_is_moved_and_never_dropped() -> None:
    program = started()
    program.names["a"].exposed = True
    assert not program.drop("a")
    assert program.move("a")
    assert program.look("a") == made_from(3)


# ---------------------------------------------------------------------- rule 11


def test_rule_11_the_end_of_a_step_restores_what_was_dropped_and_leaves_what_was_moved_readable() -> None:
    program = Program()
    chain_of_ops(program, 3, keep="a1 a2")
    assert program.drop("a3")
    assert program.drop("a2")
    assert program.move("a1")
    program.end_step()
    assert [program[name].absent for name in ("a1", "a2", "a3")] == [HERE, HERE, HERE]
    assert program.move("a1")
    plain = Plain()
    chain_of_ops(plain, 3, keep="a1 a2")
    assert [program.look(f"a{number}") for number in (1, 2, 3)] == [plain.read(f"a{number}") for number in (1, 2, 3)]
    audit(program)


def test_rule_11_the_end_of_a_step_keeps_the_budget_by_moving() -> None:
    program = Program(3 * ITEM, Eager())
    program.source("x", [3])
    for number in range(6):
        program.run(MAKE, "x", f"a{number}")
    program.end_step()
    assert (program.controller.dropped, program.machine.peak) == ({}, 3 * ITEM)
    assert [program.look(f"a{number}") for number in range(6)] == [made_from(3)] * 6
    audit(program)


def test_rule_11_recipes_die_at_the_end_of_a_step() -> None:
    gc.collect()
    before = recipes_alive()
    program = started()
    assert program["a"].recipe is not None
    assert recipes_alive() > before
    gc.disable()
    try:
        program.end_step()
        assert recipes_alive() == before, "they die at once, whether garbage is collected or not"
    finally:
        gc.enable()
    assert (program["a"].recipe, program.controller.recipes) == (None, [])
    assert not program.drop("a"), "what is alive has become a source"


def recipes_alive() -> int:
    return sum(type(thing) is Recipe for thing in gc.get_objects())


def test_rule_11_a_write_to_a_source_makes_a_source_so_that_chains_never_grow_from_step_to_step() -> None:
    program = Program()
    program.source("weight", [1])
    for _ in range(3):
        program.run(WRITE, "weight")
    assert program["weight"].recipe is None
    program.run(MAKE, "weight", "a")
    assert program.drop("a")
    assert program["a"].chain == 1


def test_rule_11_a_step_begins_with_its_own_counters_and_peak() -> None:
    program = started()
    program.move("a")
    program.begin_step()
    assert (program.controller.counters.moves, program.controller.budget.peak) == (0, ITEM)


# ---------------------------------------------------------------------- rule 12


def test_rule_12_a_refused_op_leaves_nothing_locked_and_nothing_lost() -> None:
    program = started(3 * ITEM)
    assert program.drop("a")
    error = error_of(BudgetInfeasible, program.run, Op(name="huge", creates=(3,)), "a", "b")
    assert (error.needed, error.allowed, error.smallest_budget) == (4 * ITEM, 3 * ITEM, 4 * ITEM)
    assert (error.op, error.op_index, error.exact) == ("huge", 1, False)
    audit(program)
    assert (program.read("x"), program.read("a")) == ([3], made_from(3))


def test_rule_12_the_smallest_budget_of_a_refusal_counts_what_can_never_leave() -> None:
    program = Program(4 * ITEM)
    program.source("escaped", [1, 2])
    program.source("tiny", [1], nbytes=100)
    program.source("x", [3])
    program.names["escaped"].escaped = True
    error = error_of(BudgetInfeasible, program.run, Op(name="wide", creates=(2,)), "x", "a")
    assert error.needed == error.smallest_budget == 5 * ITEM + 100
    audit(program)


def test_rule_12_the_smallest_budget_of_a_refusal_knows_larger_ops_that_ran_before() -> None:
    program = Program(5 * ITEM)
    program.source("x", [3])
    program.run(Op(name="wide", creates=(4,)), "x", "a")
    program.move("a")
    program.read("a")
    program.run(Op(name="wide", creates=(4,)), "x", "b")
    program.controller.budget.allow(2 * ITEM)
    error = error_of(BudgetInfeasible, program.run, MAKE, "a", "c")
    assert (error.needed, error.smallest_budget) == (5 * ITEM, 5 * ITEM)


def test_rule_12_a_replay_that_does_not_fit_leaves_no_temporary_behind() -> None:
    program = Program()
    program.source("x", [3])
    program.run(Op(name="wide", creates=(4,)), "x", "a")
    program.run(MAKE, "a", "b")
    program.free("a")
    assert program.drop("b")
    program.controller.budget.allow(4 * ITEM)
    error = error_of(BudgetInfeasible, program.read, "b")
    assert (error.op, error.needed) == ("wide", 5 * ITEM)
    audit(program)
    program.controller.budget.allow(5 * ITEM)
    assert program.read("b") == made_through_a_wide_one()
    audit(program)


def made_through_a_wide_one() -> list[int]:
    plain = Plain()
    plain.source("x", [3])
    plain.run(Op(name="wide", creates=(4,)), "x", "a")
    plain.run(MAKE, "a", "b")
    return plain.read("b")


def test_rule_12_where_the_slower_tier_is_full_what_can_be_dropped_is_dropped() -> None:
    program = Program(2 * ITEM, tier_bytes=0)
    program.source("x", [3])
    program.run(MAKE, "x", "a")
    program.run(MAKE, "x", "b")
    assert (program["a"].absent, program.machine.peak) == (DROPPED, 2 * ITEM)
    audit(program)


@pytest.mark.parametrize("policy", [LRU(short_chain=0), KeepAll()], ids=["lru", "keep-all"])
def test_rule_12_where_the_slower_tier_is_full_and_nothing_can_be_dropped_the_error_says_so(
    policy: AbstractPolicy,
) -> None:
    program = Program(2 * ITEM, policy, tier_bytes=0)
    program.source("x", [3])
    program.source("y", [4])
    error = error_of(SpillFullError, program.run, MAKE, "x", "a")
    assert str(error) == "The tier of 0 bytes is full."
    assert (program.read("x"), program.read("y")) == ([3], [4])
    audit(program)


def test_rule_12_the_end_of_a_step_that_finds_the_slower_tier_full_restores_beyond_the_budget_and_says_so() -> None:
    program = Program(2 * ITEM, Eager(), tier_bytes=0)
    program.source("x", [3])
    for name in "abc":
        program.run(MAKE, "x", name)
    error_of(SpillFullError, program.end_step)
    assert not program.controller.dropped
    assert [program.look(name) for name in "abc"] == [made_from(3)] * 3
    assert program.controller.recipes == []
    audit(program)


def test_rule_12_a_replay_that_is_interrupted_can_be_made_again() -> None:
    program = Program()
    chain_of_ops(program, 3)
    assert program.drop("a3")
    runs = 0

    def interrupt(action: str) -> None:
        nonlocal runs
        runs += action == "run"
        if runs == 2:
            raise KeyboardInterrupt

    program.machine.before = interrupt
    error_of(KeyboardInterrupt, program.read, "a3")
    program.machine.before = program.check_account
    audit(program)
    plain = Plain()
    chain_of_ops(plain, 3)
    assert program.read("a3") == plain.read("a3")


def test_rule_12_one_storage_that_cannot_come_back_does_not_keep_the_others_away() -> None:
    program = Program()
    for name in ("x1", "x2", "x3"):
        program.source(name, [3])
        program.run(MAKE, name, name.replace("x", "a"))
    for name in ("a1", "a2", "a3"):
        assert program.drop(name)
    assert program.move("x2")
    lost = program.names["x2"]

    def corrupted(action: str) -> None:
        if action == "page_in" and lost.locks:
            raise SpillCorruptedError("The file's bytes are not those that were written.")

    program.machine.before = corrupted
    error_of(SpillCorruptedError, program.end_step)
    assert [program[name].absent for name in ("a1", "a2", "a3")] == [HERE, DROPPED, HERE]
    program.machine.before = program.check_account
    audit(program)
    program.end_step()
    assert program.look("a2") == made_from(3)


def test_rule_12_closing_brings_everything_back_even_beyond_the_budget() -> None:
    program = Program(2 * ITEM, Eager())
    program.source("x", [3])
    program.source("y", [4])
    for name in "abc":
        program.run(MAKE, "x", name)
    program.controller.restore_all(program.names.values())
    assert {program[name].absent for name in program.names} == {HERE}
    budget = program.controller.budget
    assert (budget.resident, program.controller.away, budget.allowed) == (5 * ITEM, 0, 2 * ITEM)
    assert [program.look(name) for name in "xyabc"] == [[3], [4], *[made_from(3)] * 3]
    audit(program)
