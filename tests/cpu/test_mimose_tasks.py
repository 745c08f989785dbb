"""Mimose's tasks run at their quick size, and the lengths of an epoch are what they are said to be."""

from __future__ import annotations

import pytest

from papers.mimose import tasks
from papers.mimose.tasks_lab import Lab, Told
from spillway.costs import DEVICES
from tests.cpu.test_benchmarks import quick
from tests.shared import shared


@pytest.mark.long
def test_mimose_tasks_sets_every_way_to_run_an_epoch_beside_the_plain_one() -> None:
    shared("papers/tables/mimose_table1_tasks.csv")
    result = quick("mimose_tasks")
    assert [row["task"] for row in result.rows] == ["TC-Bert", "TC-Bert"]
    for row in result.rows:
        assert all(1 <= row[way] <= row["checkpoint"] + tasks.SHELTERED for way in tasks.WAYS)
        assert row["mimose, peak"] <= row["budget_bytes"]
        assert row["dtr, peak"] <= row["budget_bytes"]
        assert row["checkpoint, peak"] <= row["budget_bytes"] < row["plain_bytes"]
        # A planner that thinks it fits, from two lengths, has passed the budget at the third.
        assert (row["mimose-published, peak"] > row["budget_bytes"]) == (row["over_published"] > 0)
    exact = [check for check in result.checks if check.what.startswith(("numbers", "plans", "block-level", "share"))]
    assert [check.measured for check in exact] == [0, 0, 0, 0]
    pytest.importorskip("matplotlib")
    assert result.pictures["mimose_tasks.png"].startswith(b"\x89PNG")


def test_the_lengths_of_an_epoch_stand_for_all_of_them() -> None:
    told = Told(dataset="SWAG", batch=16, shortest=35, longest=141)
    lab = Lab(
        name="MC-Roberta", told=told, device=DEVICES["v100-pcie"], options={}, lengths=8, recorded=(), iterations=10,
        tell=lambda text: None,
    )  # fmt: skip
    assert (lab.grid[0], lab.grid[-1], lab.steps) == (35, 141, 4596)
    for weights in (lab.weights, lab.uniform):
        assert sum(weights) == pytest.approx(1)
        assert min(weights) > 0
    # The middle of the logarithms is the most frequent, and few batches are as short or as long as can be.
    assert lab.grid[lab.weights.index(max(lab.weights))] in (64, 78)
    assert lab.weights[0] + lab.weights[-1] < 0.01 < lab.uniform[-1]
    assert lab.sheltered == lab.sheltered
    assert len(lab.sheltered) == 10
