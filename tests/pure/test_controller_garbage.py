"""A collection of garbage may come at any moment, and take what the controller is working on."""

from __future__ import annotations

import pytest

from tests.pure.memory_machine import Program, audit
from tests.pure.small_programs import chain_of_ops


def test_rule_2_a_storage_that_dies_while_it_is_recomputed_is_let_go_of_afterwards() -> None:
    program = Program()
    chain_of_ops(program, 3)
    assert program.drop("a3")
    program.free("x")

    def collect_garbage(action: str) -> None:
        if action == "run" and "a3" in program.names:
            program.free("a3")
            program.controller.make_room(0, "anything")

    program.machine.before = collect_garbage
    program.end_step()
    program.machine.before = program.check_account
    audit(program)
    assert program.controller.budget.resident == 0


@pytest.mark.parametrize("action", ["page_out", "leave", "release"])
def test_rule_5_a_storage_that_dies_while_it_leaves_is_accounted_for_once(action: str) -> None:
    program = Program()
    chain_of_ops(program, 2, keep="a1")
    if action == "leave":
        assert program.move("a1")
        program.read("a1")

    def collect_garbage(about: str) -> None:
        if about == action and "a1" in program.names:
            program.free("a1")

    program.machine.before = collect_garbage
    assert program.drop("a1") if action == "release" else program.move("a1")
    program.machine.before = program.check_account
    audit(program)
    program.free("a2")
    program.free("x")
    audit(program)
    assert (program.controller.budget.resident, program.controller.away) == (0, 0)
