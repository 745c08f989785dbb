"""A step under a choice, by the clock, against a machine that looks at every byte anew."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway.methods.auto.block_problem import BlockProblem
from spillway.methods.auto.simulate import Clock, simulate
from tests.pure.auto_machine import KEEP, OFFLOAD, RECOMPUTE, Machine, problems, uniform


def test_what_is_kept_adds_up_and_nobody_waits() -> None:
    outcome = simulate(uniform(3, available=400), (KEEP,) * 4)
    assert outcome.fits
    assert (outcome.seconds, outcome.peak, outcome.room_stall, outcome.data_stall) == (12.0, 300, 0.0, 0.0)
    assert outcome.comes_in == (0, 1, 2, 3)


def test_recomputing_takes_a_second_a_block_and_leaves_its_input() -> None:
    outcome = simulate(uniform(3, available=400), (RECOMPUTE, RECOMPUTE, KEEP, 0))
    assert (outcome.seconds, outcome.peak) == (14.0, 120)


def test_what_does_not_fit_takes_for_ever_and_says_what_it_needs() -> None:
    outcome = simulate(uniform(3, available=299), (KEEP,) * 4)
    assert (outcome.fits, outcome.seconds, outcome.peak) == (False, inf, 300)


def test_copies_that_have_time_are_hidden() -> None:
    outcome = simulate(uniform(3, available=300, rate=100.0), (OFFLOAD, KEEP, KEEP, 0))
    assert outcome.seconds == 12.0
    # Of 1.25 seconds before the block, the beginning of the backward before it leaves 2.
    assert outcome.comes_in == (1, 1, 2, 3)


def test_compute_waits_until_enough_is_out() -> None:
    # Block 1 wants 100 of 120 bytes while the 100 of block 0 are on their way, at 100 a second.
    outcome = simulate(uniform(2, available=120, rate=100.0, head=False), (OFFLOAD, KEEP))
    assert outcome.room_stall == pytest.approx(0.8)
    assert outcome.peak == 120


def test_a_block_waits_for_its_own_copy_in_where_there_was_no_room_before() -> None:
    outcome = simulate(uniform(2, available=199, rate=1000.0), (OFFLOAD, KEEP, 0))
    assert outcome.comes_in[0] == 1
    assert outcome.data_stall == pytest.approx(0.1)
    roomy = simulate(uniform(2, available=200, rate=1000.0), (OFFLOAD, KEEP, 0))
    assert (roomy.data_stall, roomy.peak) == (0.0, 200)


def test_a_host_without_room_takes_nothing() -> None:
    assert simulate(uniform(2, available=300, host=100), (OFFLOAD, KEEP, 0)).fits
    assert not simulate(uniform(2, available=300, host=99), (OFFLOAD, KEEP, 0)).fits


@settings(max_examples=300, deadline=None)
@given(problem=problems(), drawn=st.data())
def test_the_clock_is_the_machines(problem: BlockProblem, drawn: st.DataObject) -> None:
    choice = [drawn.draw(st.integers(0, len(block.options) - 1)) for block in problem.blocks]
    outcome = simulate(problem, choice)
    machine = Machine(problem, choice)
    if outcome.fits:
        ran = machine.run()
        assert ran.seconds == pytest.approx(outcome.seconds, abs=1e-6)
        assert ran.most == pytest.approx(outcome.peak, abs=1.0001)
        assert ran.most <= problem.available + 1e-6
        assert outcome.comes_in == tuple(
            machine.planned(number) if option.moved else number for number, option in enumerate(machine.options)
        )
    else:
        over = outcome.peak > problem.available
        assert over or sum(option.moved for option in machine.options) > (problem.host or 0)


def test_the_machine_sees_copies_that_begin_without_room() -> None:
    problem = uniform(2, available=199, rate=1000.0)
    assert Machine(problem, (OFFLOAD, KEEP, 0)).run().most <= 199
    assert Machine(problem, (OFFLOAD, KEEP, 0), minds_room=False).run().most == 200


def test_a_choice_that_takes_too_long_is_given_up() -> None:
    clock = Clock(uniform(3, available=400))
    rows = clock.picked((RECOMPUTE, KEEP, KEEP, 0))
    assert clock.seconds(rows, 13.5) == 13.0
    assert clock.seconds(rows, 13.0) == inf
