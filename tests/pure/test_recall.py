"""A moved value may come back by recomputation: only where that gives the same, and with its copy to fall back on."""

from __future__ import annotations

from collections.abc import Generator
from typing import final

import pytest

from spillway.memory.records import AWAY, HERE
from spillway.methods.base import AbstractPolicy, Candidate, MemoryView, Proposal, Recall
from spillway.units import Bytes
from tests.pure.cells import ITEM, Op
from tests.pure.memory_machine import Plain, Program, audit, error_of
from tests.pure.small_programs import EMPTY, FILL, MAKE, NOISE, ONCE, WRITE, chain_of_ops, made_from


@final
class Recalls(AbstractPolicy):
    """Proposes nothing, and recomputes what it is asked about."""

    name = "recalls"
    recalls = True

    def __init__(self) -> None:
        self.asked = 0

    def relieve(self, view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        yield from ()

    def bring_back(self, view: MemoryView, storage: Candidate) -> Recall:
        self.asked += 1
        return Recall.RECOMPUTE


def program_with_a(allowed: Bytes = 1 << 62, *, chain_cap: int = 32) -> Program:
    program = Program(allowed, Recalls(), chain_cap=chain_cap)
    program.source("x", [3])
    program.run(MAKE, "x", "a")
    return program


def test_a_moved_value_is_recomputed_and_its_copy_stays_good() -> None:
    program = program_with_a()
    assert program.move("a")
    assert program.read("a") == made_from(3)
    counters = program.controller.counters
    assert (counters.recalls, counters.recomputes, counters.reloads, counters.bytes_in) == (1, 1, 0, 0)
    assert program.machine.replayed == ["make"]
    audit(program)
    copied = counters.bytes_out
    assert program.move("a")
    assert counters.bytes_out == copied, "it left again without a copy"
    assert program.read("a") == made_from(3)
    audit(program)


def test_what_an_op_writes_is_recomputed_first_and_its_copy_is_worth_nothing_afterwards() -> None:
    program, plain = program_with_a(), Plain()
    plain.source("x", [3])
    plain.run(MAKE, "x", "a")
    assert program.move("a")
    program.run(WRITE, "a")
    plain.run(WRITE, "a")
    assert program.read("a") == plain.read("a")
    audit(program)
    assert (program.controller.counters.recalls, program.machine.homes) == (1, set())


def test_random_numbers_are_drawn_again_as_they_were() -> None:
    program, plain = program_with_a(), Plain()
    plain.source("x", [3])
    plain.run(MAKE, "x", "a")
    for side in (program, plain):
        side.run(NOISE, "a", "n")
    assert program.move("n")
    for side in (program, plain):
        side.run(NOISE, "n", "m")
    assert program.controller.counters.recalls == 1
    assert [program.read(name) for name in "nm"] == [plain.read(name) for name in "nm"]


def reloaded(program: Program, name: str, expected: list[int]) -> dict[str, int]:
    """Read a moved value, which has to be copied back; what was refused."""
    assert program.move(name)
    assert program.read(name) == expected
    counters = program.controller.counters
    assert (counters.recalls, counters.reloads) == (0, 1)
    assert program.machine.replayed == []
    audit(program)
    return counters.refusals


def test_a_source_is_reloaded() -> None:
    assert reloaded(program_with_a(), "x", [3]) == {"no recipe within the cap": 1}


def test_what_was_made_from_something_that_is_gone_is_reloaded() -> None:
    program = program_with_a()
    program.free("x")
    assert reloaded(program, "a", made_from(3)) == {"no recipe within the cap": 1}


def test_what_was_made_from_something_that_was_written_since_is_reloaded() -> None:
    program = program_with_a()
    program.run(WRITE, "x")
    assert reloaded(program, "a", made_from(3)) == {"no recipe within the cap": 1}


def test_what_was_made_from_something_that_is_about_to_be_written_is_reloaded() -> None:
    program = program_with_a()
    assert program.move("a")
    program.run(Op(name="write", writes=(0,)), "x a")
    assert program.controller.counters.refusals == {"would depend on what is being written": 1}
    audit(program)


def test_what_cannot_be_made_again_is_reloaded() -> None:
    program, plain = program_with_a(), Plain()
    plain.source("x", [3])
    for side in (program, plain):
        side.run(ONCE, "x", "once")
    assert reloaded(program, "once", plain.read("once")) == {"no recipe within the cap": 1}


def test_what_is_made_of_nothing_has_no_content_to_make_again() -> None:
    program = program_with_a()
    program.run(EMPTY, "", "e")
    assert program.move("e")
    program.run(FILL, "e a")
    assert program.controller.counters.recalls == 0
    audit(program)


@pytest.mark.parametrize("by_address", [True, False])
def test_what_may_be_written_unseen_is_reloaded(by_address: bool) -> None:
    program = program_with_a()
    assert program.move("a")
    program.names["a"].exposed = True
    program.names["a"].escaped = by_address
    assert program.read("a") == made_from(3)
    assert program.controller.counters.refusals == {"reached from outside": 1}
    assert program.controller.counters.reloads == 1


def test_what_was_made_from_something_that_escaped_is_reloaded() -> None:
    program = program_with_a()
    program.reveal("x", by_address=True)
    assert reloaded(program, "a", made_from(3)) == {"would depend on what has escaped": 1}


def test_a_chain_beyond_the_cap_is_reloaded() -> None:
    program, plain = Program(1 << 62, Recalls(), chain_cap=3), Plain()
    for side in (program, plain):
        chain_of_ops(side, 4)
    assert reloaded(program, "a4", plain.read("a4")) == {"no recipe within the cap": 1}


def test_a_recall_that_would_push_a_dependent_beyond_the_cap_is_reloaded() -> None:
    program = Program(1 << 62, Recalls(), chain_cap=3)
    chain_of_ops(program, 4, keep="a2")
    assert program.move("a2")
    assert program.drop("a4")
    program.read("a2")
    assert program.controller.counters.refusals == {"chain too long": 1}
    audit(program)


def test_what_is_on_its_way_back_is_not_recomputed() -> None:
    program = program_with_a()
    assert program.move("a")
    storage = program.names["a"]
    value = program["a"]
    program.controller.arriving[value] = program.controller.machine.start_in(storage, value.home)
    program.controller.budget.take(storage.nbytes)
    assert program.read("a") == made_from(3)
    counters = program.controller.counters
    assert (counters.recalls, counters.reloads, program.controller.policy.asked) == (0, 1, 0)  # type: ignore[attr-defined]


def test_without_room_for_the_replay_the_copy_is_read() -> None:
    program, plain = Program(4 * ITEM, Recalls()), Plain()
    for side in (program, plain):
        side.source("x", [3])
        side.run(Op(name="wide", creates=(3,)), "x", "wide")
        side.run(MAKE, "wide", "a")
        side.free("wide")
    assert program.move("a")
    program.source("locked", [1, 1])
    program.names["locked"].locks = 1
    assert program.read("a") == plain.read("a")
    assert program.controller.counters.refusals["no room to recompute it"] == 1
    assert program.controller.counters.reloads >= 1
    program.names["locked"].locks = 0
    assert program.machine.peak <= 4 * ITEM
    audit(program)


def test_an_exception_during_the_replay_leaves_the_value_where_it_was() -> None:
    program = program_with_a()
    assert program.move("a")

    def interrupt(action: str) -> None:
        program.check_account(action)
        if action == "run":
            raise KeyboardInterrupt

    program.machine.before = interrupt
    error_of(KeyboardInterrupt, program.read, "a")
    program.machine.before = program.check_account
    assert program["a"].absent == AWAY
    audit(program)
    assert program.read("a") == made_from(3)
    assert program["a"].absent == HERE


def test_what_it_is_made_from_is_held_until_it_is_there() -> None:
    program = program_with_a()
    assert program.move("a")
    assert program.move("x")
    died = []

    def collect(action: str) -> None:
        program.check_account(action)
        if action == "page_in" and not died:
            died.append("x")
            program.free("x")  # as a collection of garbage may at any moment

    program.machine.before = collect
    assert program.read("a") == made_from(3)
    assert (died, program.controller.counters.recalls) == (["x"], 1)
    program.machine.before = program.check_account
    audit(program)


def test_nobody_is_asked_under_a_policy_that_never_recomputes() -> None:
    program = program_with_a()
    policy = program.controller.policy
    policy.recalls = False
    assert program.move("a")
    program.read("a")
    assert (policy.asked, program.controller.counters.reloads) == (0, 1)  # type: ignore[attr-defined]


def test_the_copy_of_what_was_recomputed_is_not_trusted_across_steps() -> None:
    program = program_with_a()
    assert program.move("a")
    program.read("a")
    assert program.controller.counters.recalls == 1
    program.end_step()
    audit(program)
    program.begin_step()
    program.poke("a", 77)
    assert program.move("a")
    assert program.read("a") == [77]
    audit(program)


def test_what_was_recomputed_is_expected_to_be_wanted_in_the_next_such_step() -> None:
    program = Program(1 << 62, Recalls())
    program.source("x", [3])
    for step in (1, 2):
        program.begin_step()
        program.run(MAKE, "x", "a")
        assert program.move("a")
        due = [storage.number for storage in program.controller.view.due()]
        assert due == ([] if step == 1 else [program.names["a"].number])
        program.read("a")
        program.free("a")
        program.end_step()
