"""The window paper's table, and models of which an eighth fits, at their quick sizes."""

from __future__ import annotations

import pytest

from benchmarks import foreseen
from benchmarks.out_of_core import COPIES, OTHERS, PART, PLAIN, WINDOW
from tests.cpu.benchmarks_quick import quick, rows_by
from tests.shared import shared


@pytest.mark.long
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


@pytest.mark.long
def test_out_of_core_trains_in_an_eighth_and_says_on_paper_what_is_moved() -> None:
    result = quick("out_of_core")
    rows = rows_by(result, "competitor")
    assert list(rows) == [PLAIN, WINDOW, *OTHERS, COPIES, "lstm"]
    for name in (WINDOW, *OTHERS):
        assert rows[name]["peak_bytes"] <= rows[name]["budget_bytes"]
        assert rows[name]["budget_bytes"] >= rows[PLAIN]["peak_bytes"] // PART
        assert rows[name]["losses"] == "as plain"
        assert rows[name]["of_bound"] <= rows[name]["ratio"]
    window = rows[WINDOW]
    assert window["simulated_in"] == window["bytes_in"] > 0
    assert window["simulated_out"] == window["bytes_out"]
    assert rows["lstm"]["losses"] == "identical"
    unmet = [check.what for check in result.checks if not check.met]
    assert [what for what in unmet if "time" not in what and "seconds" not in what] == []


@pytest.mark.long
def test_a_dynamic_network_of_which_an_eighth_fits_is_foreseen_to_the_bit() -> None:
    result = quick("foreseen")
    rows = rows_by(result, "competitor")
    assert list(rows) == [PLAIN, *foreseen.OTHERS, foreseen.LEARNING, foreseen.TRAINED]
    for name in rows.keys() - {PLAIN}:
        assert rows[name]["peak_bytes"] <= rows[name]["budget_bytes"]
        assert rows[name]["losses"] == "as plain"
    for name in (foreseen.LEARNING, foreseen.TRAINED):
        assert sum(one["steps"] for one in rows[name]["foresight"]["standings"]) == 3 * 5
        assert rows[name]["acted"]
    unmet = [check.what for check in result.checks if not check.met]
    assert [what for what in unmet if not any(word in what for word in ("multiple", "seconds", "without a task"))] == []
