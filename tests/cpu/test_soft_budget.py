"""Budgets that a policy knows and nobody enforces, as the runs behind DELTA's tables had them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from papers.delta.lab import published
from papers.delta.soft_budget import run_softly
from spillway.methods import DTR, KeepAll
from tests.pure.recorded import DEVICE, LAYER, layers

DEEP = layers(16)
PEAK = DEEP.plain_peak()


def test_a_policy_that_proposes_nothing_passes_its_budget() -> None:
    ran = run_softly(DEEP, KeepAll(), PEAK // 2, DEVICE)
    assert ran.ok
    assert ran.simulation.peak_bytes == PEAK
    assert (ran.offloads, ran.reloads, ran.recalls) == (0, 0, 0)


def test_a_policy_that_does_not_look_ahead_releases_what_an_op_has_passed_the_budget_by() -> None:
    ran = run_softly(DEEP, DTR("dtr-local"), PEAK // 2, DEVICE)
    assert ran.ok
    assert ran.simulation.drops > 0
    assert PEAK // 2 < ran.simulation.peak_bytes < PEAK
    assert ran.offloads == 0


def test_delta_releases_in_the_forward_towards_three_quarters_of_a_budget_that_it_may_pass() -> None:
    ran = run_softly(DEEP, published(), PEAK // 2, DEVICE)
    assert ran.ok
    assert ran.offloads + ran.simulation.drops > 0
    assert ran.reloads + ran.recalls <= ran.offloads
    assert ran.simulation.peak_bytes < PEAK


def test_in_the_memory_of_the_device_and_no_more_a_step_that_is_too_large_ends() -> None:
    assert not run_softly(
        DEEP, KeepAll(), PEAK, replace(DEVICE, memory=3 * LAYER), allocator="caching", limited=True
    ).ok
    assert run_softly(DEEP, KeepAll(), PEAK, replace(DEVICE, memory=4 * PEAK), allocator="caching", limited=True).ok


def test_copies_in_turn_with_the_ops_take_longer_than_beside_them() -> None:
    beside, in_turn = (
        run_softly(DEEP, published(), PEAK // 2, DEVICE, overlapped=overlapped) for overlapped in (True, False)
    )
    assert in_turn.simulation.hidden_seconds == 0
    assert beside.offloads > 0
    assert beside.simulation.seconds < in_turn.simulation.seconds


def test_a_director_that_takes_an_op_for_its_launch_evicts_what_it_can() -> None:
    true, launched = (run_softly(DEEP, published(), PEAK // 2, DEVICE, launch=launch) for launch in (None, 1e-9))
    assert launched.simulation.drops > true.simulation.drops


@pytest.mark.parametrize("launch", [None, 1e-9])
def test_the_policy_sees_only_what_ops_made(launch: float | None) -> None:
    ran = run_softly(DEEP, published(), 1, DEVICE, launch=launch)
    sources = {line.storage for line in ran.simulation.timeline.storages if line.present_at_start}
    left = {event.storage for event in ran.simulation.timeline.events if event.change in ("move", "drop")}
    assert left
    assert not left & sources
