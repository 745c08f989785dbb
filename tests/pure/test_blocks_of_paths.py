"""Execution blocks: where a step is cut, what that takes, and the planner that follows them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway.calibration.named_device import device_of
from spillway.costs import timed
from spillway.errors import BudgetInfeasible
from spillway.ir import Step, verify
from spillway.methods import Problem
from spillway.methods.dynn_offload import DynnOffloadPlanner
from spillway.pilots.execution_blocks import Touches, block_times, keeping_blocks, largest_op, max_fill, search_blocks
from spillway.simulation.simulated_engine import simulate
from tests.pure.linear_graphs import linear_step

DEVICE = device_of("rtx6000")


def touches_of(*ops: tuple[int, ...], nbytes: int = 1 << 20, seconds: float = 1e-4, writes: bool = False) -> Touches:
    """Each op touches these storages, which are there before and after."""
    flat = [one for op in ops for one in op]
    count = max(flat) + 1
    return Touches(
        starts=np.cumsum([0, *map(len, ops)]), storages=np.array(flat), writes=np.full(len(flat), writes),
        seconds=np.full(len(ops), seconds), nbytes=np.full(count, nbytes), there=np.ones(count, bool),
        until=np.full(count, len(ops) + 1),
    )  # fmt: skip


def step_of(layers: int = 8) -> Step:
    return timed(linear_step(layers), DEVICE)


def test_a_block_takes_ops_until_the_buffer_is_full() -> None:
    touches = touches_of((0, 1), (1, 2), (2, 3), (3,), (4,))
    assert max_fill(touches, 3 << 20) == [0, 2, 5]
    assert max_fill(touches, 2 << 20) == [0, 1, 2, 4, 5]
    assert max_fill(touches, 5 << 20) == [0, 5]


def test_an_op_that_no_buffer_holds_is_refused_with_the_memory_that_would_do() -> None:
    touches = touches_of((0,), (0, 1, 2), (3,))
    with pytest.raises(BudgetInfeasible) as refused:
        max_fill(touches, 2 << 20)
    assert (refused.value.op_index, refused.value.smallest_budget) == (1, 6 << 20)
    assert max_fill(touches, 3 << 20)[-1] == 3
    assert max_fill(touches, 1 << 20, alone=3 << 20) == [0, 1, 2, 3]


def test_what_the_next_block_touches_too_is_not_copied() -> None:
    touches = touches_of((0, 1), (1, 2), (2, 3))
    done = block_times(touches, [0, 1, 2, 3], 4 << 20, DEVICE, double_buffer=True)
    assert (done.bytes_in, done.bytes_out) == (4 << 20, 0)  # nothing was written, so host memory has all of it


def test_what_was_written_goes_out_before_the_next_comes_in() -> None:
    touches = touches_of((0,), (1,), (2,), writes=True)
    done = block_times(touches, [0, 1, 2, 3], 2 << 20, DEVICE, double_buffer=True)
    assert (done.bytes_in, done.bytes_out) == (3 << 20, 2 << 20)  # the last stays


def test_where_there_is_room_what_is_used_again_stays() -> None:
    touches = touches_of((0,), (1,), (2,), (0,), (1,), (2,), seconds=1e-5)
    halves = block_times(touches, range(7), 8 << 20, DEVICE, double_buffer=True)
    kept = block_times(touches, range(7), 8 << 20, DEVICE, double_buffer=False)
    assert (halves.bytes_in, kept.bytes_in) == (6 << 20, 3 << 20)
    assert kept.seconds < halves.seconds


def test_what_is_used_again_last_leaves_first() -> None:
    # Room for three: when 3 is to come in, 0 is wanted next and 1 last.
    touches = touches_of((0,), (1,), (2,), (3,), (0,), (2,), (1,))
    kept = block_times(touches, range(8), 3 << 20, DEVICE, double_buffer=False)
    assert kept.bytes_in == 5 << 20  # each once, and 1 again


def test_copies_hide_beside_compute_that_is_longer() -> None:
    touches = touches_of(*[(one,) for one in range(8)], seconds=1.0)
    done = block_times(touches, range(9), 2 << 20, DEVICE, double_buffer=True)
    assert done.stall_seconds == pytest.approx(DEVICE.in_seconds(1 << 20) - DEVICE.copy_seconds)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_searched_blocks_fit_and_are_no_slower_than_filled_ones(data: st.DataObject) -> None:
    storages = data.draw(st.integers(3, 12))
    ops = [
        tuple(sorted(data.draw(st.sets(st.integers(0, storages - 1), min_size=1, max_size=3))))
        for _ in range(data.draw(st.integers(4, 30)))
    ]
    touches = touches_of(*ops, seconds=data.draw(st.sampled_from([1e-5, 1e-4, 1e-3])), writes=data.draw(st.booleans()))
    most = data.draw(st.integers(3, 8)) << 20
    times = {}
    for cuts in (max_fill(touches, most), search_blocks(touches, most, DEVICE, 12)):
        assert (cuts[0], cuts[-1]) == (0, len(ops))
        for first, end in pairwise(cuts):
            assert first < end
            assert len({one for op in ops[first:end] for one in op}) << 20 <= most
        times[len(times)] = block_times(touches, cuts, 2 * most, DEVICE, double_buffer=True).seconds
    assert times[1] <= times[0]
    filled = block_times(touches, max_fill(touches, most), 2 * most, DEVICE, double_buffer=False)
    kept = block_times(touches, keeping_blocks(touches, 2 * most, DEVICE), 2 * most, DEVICE, double_buffer=False)
    assert kept.seconds <= filled.seconds


@pytest.mark.parametrize("planner", [DynnOffloadPlanner(), DynnOffloadPlanner.as_published()])
@pytest.mark.parametrize("share", [0.5, 0.7, 0.9, 1.0])
def test_plans_verify_run_and_keep_the_budget(planner: DynnOffloadPlanner, share: float) -> None:
    step = step_of()
    allowed = int(step.plain_peak() * share)
    try:
        plan = planner.plan(Problem(step=step, allowed=allowed, device=DEVICE))
    except BudgetInfeasible as refused:
        assert refused.needed > allowed or planner.double_buffer
        return
    verify(plan, step, allowed)
    ran = simulate(step, allowed=allowed, method=plan, device=DEVICE)
    assert ran.status == "ok"
    assert ran.peak_bytes <= allowed


def test_halves_are_refused_where_an_op_needs_more_than_one() -> None:
    step = step_of()
    needed = largest_op(Touches.of_step(step))
    with pytest.raises(BudgetInfeasible) as refused:
        DynnOffloadPlanner.as_published().plan(Problem(step=step, allowed=needed, device=DEVICE))
    assert refused.value.smallest_budget >= 2 * needed
