"""Execution blocks: where a step is cut, what that takes, and the planner that follows them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway.calibration.named_device import device_of
from spillway.costs import timed
from spillway.errors import BudgetInfeasible
from spillway.ir import Step, verify
from spillway.ir.account import account
from spillway.ir.lives import lives_of
from spillway.methods import Problem
from spillway.methods.absent_bytes import comes_in
from spillway.methods.dynn_offload import DynnOffloadPlanner
from spillway.pilots.execution_blocks import (
    Halves,
    Touches,
    largest_op,
    max_fill,
    quickest_fill,
    search_blocks,
)
from spillway.simulation.simulated_engine import simulate
from tests.pure.linear_graphs import linear_step
from tests.pure.planned_alone import random_problem

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
    _, *copied = Halves(touches).times([0, 1, 2, 3], DEVICE)
    assert copied == [0, 4 << 20]  # nothing was written, so host memory has all of it


def test_what_was_written_goes_out_before_the_next_comes_in() -> None:
    touches = touches_of((0,), (1,), (2,), writes=True)
    _, *copied = Halves(touches).times([0, 1, 2, 3], DEVICE)
    assert copied == [2 << 20, 3 << 20]  # the last stays


def test_copies_hide_beside_compute_that_is_longer() -> None:
    touches = touches_of(*[(one,) for one in range(8)], seconds=1.0)
    assert stall_seconds(touches, list(range(9))) == pytest.approx(DEVICE.in_seconds(1 << 20) - DEVICE.copy_seconds)


@st.composite
def any_touches(draw: st.DrawFn) -> Touches:
    """Ops that touch and write anything, storages that come and go."""
    count, ops = draw(st.integers(3, 10)), draw(st.integers(4, 24))
    touched = [sorted(draw(st.sets(st.integers(0, count - 1), max_size=3))) for _ in range(ops)]
    flat = [one for op in touched for one in op]
    last = [max((number for number, op in enumerate(touched) if one in op), default=-1) for one in range(count)]
    return Touches(
        starts=np.cumsum([0, *map(len, touched)]), storages=np.array(flat, np.int64),
        writes=np.array([draw(st.booleans()) for _ in flat], bool),
        seconds=np.full(ops, draw(st.sampled_from([1e-5, 1e-4, 1e-3]))),
        nbytes=np.array([draw(st.integers(0, 3)) << 20 for _ in range(count)]),
        there=np.array([draw(st.booleans()) for _ in range(count)]),
        until=np.array([draw(st.sampled_from([op + 1, ops, ops + 1])) for op in last]),
    )  # fmt: skip


def blocks_of(touches: Touches, cuts: list[int]) -> list[set[int]]:
    return [{*touches.storages[touches.starts[i] : touches.starts[j]].tolist()} for i, j in pairwise(cuts)]


def seconds_of(touches: Touches, cuts: list[int]) -> float:
    return Halves(touches).times(cuts, DEVICE)[0]


def stall_seconds(touches: Touches, cuts: list[int]) -> float:
    """In which compute waits for copies."""
    return seconds_of(touches, cuts) - float(touches.seconds.sum())


def block_by_block(touches: Touches, cuts: list[int]) -> tuple[float, int, int]:
    """What two buffers take, and the bytes out and in, as the paper says it."""
    blocks = blocks_of(touches, cuts)
    nbytes, until = touches.nbytes.tolist(), touches.until.tolist()
    hosted = {*np.flatnonzero(touches.there).tolist()}
    born, present, took, total_out = {*hosted}, {*blocks[0]}, 0.0, 0
    total_in = sum(nbytes[one] for one in present & born)
    clock = total_in / DEVICE.in_per_second
    for number, block in enumerate(blocks):
        first, end = cuts[number], cuts[number + 1]
        following = blocks[number + 1] if number + 1 < len(blocks) else set[int]()
        born |= block
        leaves, comes = present - block - following, following - present
        out, back = (sum(nbytes[one] for one in which) for which in (leaves - hosted, comes & born))
        hosted |= leaves
        present = (present - leaves) | comes
        part = slice(touches.starts[first], touches.starts[end])
        hosted -= {*touches.storages[part][touches.writes[part]].tolist()}
        present -= {one for one in present if until[one] <= end}
        took = out / DEVICE.out_per_second + back / DEVICE.in_per_second
        took += DEVICE.copy_seconds * ((out > 0) + (back > 0))
        clock += max(float(touches.seconds[first:end].sum()), took)
        total_out, total_in = total_out + out, total_in + back
    return clock, total_out, total_in


@settings(deadline=None, max_examples=200)
@given(any_touches(), st.data())
def test_two_buffers_take_what_they_take_block_by_block(touches: Touches, data: st.DataObject) -> None:
    inner = data.draw(st.sets(st.integers(1, touches.ops - 1)))
    cuts = [0, *sorted(inner), touches.ops]
    done = Halves(touches).times(cuts, DEVICE)
    seconds, out, back = block_by_block(touches, cuts)
    assert done == (pytest.approx(seconds, rel=1e-12), out, back)


def even_parts(touches: Touches, weights: list[float], most: int, least: int) -> list[int] | None:
    """The fewest that fit."""
    total = np.cumsum(weights)
    for count in range(least, touches.ops):
        ends = np.searchsorted(total, total[-1] * np.arange(1, count) / count) + 1
        cuts = [0, *sorted({int(end) for end in ends if end < touches.ops}), touches.ops]
        if all(touches.nbytes[[*block]].sum() <= most for block in blocks_of(touches, cuts)):
            return cuts
    return None


@settings(deadline=None, max_examples=100)
@given(any_touches(), st.integers(9, 15))
def test_the_quickest_fill_fits_and_is_no_slower_than_full_blocks_or_even_parts(touches: Touches, mib: int) -> None:
    most = mib << 20
    filled, quick, searched = (
        max_fill(touches, most), quickest_fill(touches, most, DEVICE), search_blocks(touches, most, DEVICE, 12)
    )  # fmt: skip
    for cuts in (filled, quick, searched):
        assert (cuts[0], cuts[-1]) == (0, touches.ops)
        assert all(first < end for first, end in pairwise(cuts))
        assert all(touches.nbytes[[*block]].sum() <= most for block in blocks_of(touches, cuts))
    even = (
        even_parts(touches, weights, most, len(filled) - 1) for weights in ([1.0] * touches.ops, [*touches.seconds])
    )
    slowest = min(seconds_of(touches, cuts) for cuts in (filled, *even) if cuts is not None)
    assert seconds_of(touches, searched) <= seconds_of(touches, quick) <= slowest * (1 + 1e-12)


def test_the_first_block_is_short_where_ops_hide_all_other_copies() -> None:
    touches = touches_of(*[(one,) for one in range(64)], seconds=1e-3)
    full, quick = max_fill(touches, 16 << 20), quickest_fill(touches, 16 << 20, DEVICE)
    assert (full[1], quick[1]) == (16, 1)
    assert stall_seconds(touches, full) > 1e-3
    assert stall_seconds(touches, quick) < 1e-4


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


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_copies_in_begin_as_soon_as_there_is_room(share: float) -> None:
    step = step_of(24)
    lives, allowed = lives_of(step), int(step.plain_peak() * share)
    plan = DynnOffloadPlanner().plan(Problem(step=step, allowed=allowed, device=DEVICE))
    levels, before = account(step, plan.gaps, lives).during, 0
    coming = [gap for gap in plan.gaps if comes_in(lives[gap.value], gap.end, len(step.ops))]
    assert coming
    for gap in sorted(coming, key=lambda one: one.end):
        nbytes = step.storages[step.values[gap.value].storage].nbytes
        assert gap.end in (before, gap.start + 1) or levels[gap.end - 1] + nbytes > allowed
        before = gap.end


@pytest.mark.parametrize("planner", [DynnOffloadPlanner(), DynnOffloadPlanner.as_published()])
def test_the_budget_that_a_refusal_names_is_enough(planner: DynnOffloadPlanner) -> None:
    refusals = 0
    for seed in range(30):
        given_problem = random_problem(seed, 0.5, trained=seed % 2 == 0)
        try:
            planner.plan(given_problem)
        except BudgetInfeasible as refused:
            refusals += 1
            assert refused.exact
            enough = refused.smallest_budget
            verify(planner.plan(replace(given_problem, allowed=enough)), given_problem.step, enough)
    assert refusals > 5


def test_halves_are_refused_where_an_op_needs_more_than_one() -> None:
    step = step_of()
    needed = largest_op(Touches.of_step(step))
    with pytest.raises(BudgetInfeasible) as refused:
        DynnOffloadPlanner.as_published().plan(Problem(step=step, allowed=needed, device=DEVICE))
    assert refused.value.smallest_budget >= 2 * needed
