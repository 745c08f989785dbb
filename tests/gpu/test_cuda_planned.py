"""Planned sessions on a real CUDA device: the plan is followed, with the bits of plain training."""

from __future__ import annotations

import functools

import pytest

from tests.gpu.models import CASES, Trained, difference, train

pytestmark = pytest.mark.gpu

STEPS = 6
FOLLOWED = 2
"""The first step that follows a plan: one makes the optimizer's state, the next is recorded."""


@functools.cache
def plain(name: str) -> Trained:
    return train(name, STEPS)


@pytest.mark.parametrize("method", ["window", "window-published", "lms"])
@pytest.mark.parametrize("share", [75, 50, 34])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.* has no plan for steps such as this one")
def test_training_by_plan_gives_the_same_bits_within_the_budget(name: str, share: int, method: str) -> None:
    expected = plain(name)
    budget = expected.peak * share // 100
    found = train(name, STEPS, budget=budget, method=method)
    assert difference(expected, found) is None
    assert sum(report.moves for report in found.reports) > 0
    assert max(report.peak_bytes for report in found.reports) <= budget
    peaks = [report.device_peak_bytes for report in found.reports[FOLLOWED:]]
    assert max(peaks) <= budget, f"budget {budget}, peaks {peaks}"


@pytest.mark.parametrize("name", CASES)
def test_copies_of_a_plan_run_beside_the_ops(name: str) -> None:
    found = train(name, STEPS, budget=plain(name).peak // 2, method="window")
    for report in found.reports[FOLLOWED:]:
        assert report.bytes_out_beside > report.bytes_out / 2 > 0
        assert report.bytes_in_beside > report.bytes_in / 2 > 0
        assert report.hidden_seconds > 0
    assert len({(report.bytes_out, report.bytes_in) for report in found.reports[FOLLOWED + 1 :]}) == 1
