"""Plans of `auto` against bounds and optima, at the quick size."""

from __future__ import annotations

import pytest

from tests.cpu.benchmarks_quick import quick


@pytest.mark.long
def test_plans_are_beside_their_bounds_and_never_over_what_is_available() -> None:
    result = quick("auto_planner")
    counted = {check.what: check.measured for check in result.checks if check.at_most == 0}
    assert len(counted) == 7
    assert {what for what, measured in counted.items() if measured} <= {
        "plans slower by more than .5 points with 1, 3 or 10 % more available"
    }
    for row in result.rows:
        assert row["at_5"] >= row["at_40"] >= row["at_90"] >= -1e-9
        assert -0.02 <= row["mean_gap"] <= row["worst_gap"] < 20
        assert all(one["first"] <= (one["mimose"] or 99) + 1e-9 for one in row["instances"])


@pytest.mark.long
def test_on_paper_nothing_of_today_is_faster_in_the_same_memory() -> None:
    result = quick("auto_paper")
    assert all(check.met for check in result.checks)
    assert [row["memory_of"] for row in result.rows] == [
        "full recompute", "inputs offloaded", "selective", "offload all", "share 0.4"
    ]  # fmt: skip
    for row in result.rows:
        assert 1 - 1e-9 <= row["auto"] <= row["today"] * (1 + 1e-3)
