"""The window paper's table, at its quick size."""

from __future__ import annotations

import pytest

from tests.cpu.benchmarks_quick import quick
from tests.shared import shared


def test_links_are_fitted_at_one_batch_and_another_comes_out_near_the_paper() -> None:
    shared("papers/tables/ooc_table1_resnet50_ips.csv")
    result = quick("window_table1")
    assert [check.what for check in result.checks if not check.met and not check.what.startswith("seconds")] == []
    rows = {(row["method"], row.get("batch")): row for row in result.rows}
    assert rows["schedule + VA", 512]["off"] == pytest.approx(0.0, abs=1e-6)  # fitted
    assert rows["LMS", 512]["off"] == pytest.approx(0.0, abs=1e-6)
    for method in ("schedule + VA", "schedule alone", "LMS"):
        assert abs(rows[method, 64]["off"]) < 0.1
    assert rows["Spillway's window", 64]["gb_out"] == 0.0  # it fits
