from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest

from spillway.calibration.named_device import device_of
from spillway.costs import Efficiency
from spillway.costs.device import HERE
from spillway.costs.roofline import PUBLISHED, timed
from spillway.errors import UnknownMethodError, UsageError
from spillway.ir import Recorded
from spillway.methods import METHODS, Method
from spillway.methods.checkmate import Checkmate
from spillway.simulation.simulated_engine import simulate
from spillway.simulation.sweep import (
    Bound,
    Comparison,
    Failure,
    Row,
    SweepProblem,
    cells_of,
    compare,
    made,
    parse_methods,
    searches,
    sweep_problem_of,
)
from spillway.units import MiB
from tests.pure.recorded import DEVICE, layers
from tests.pure.small_steps import Line, row

QUICK = [name for name in METHODS if not searches(name)]


def problem(depth: int = 12, efficiency: Efficiency | None = None) -> SweepProblem:
    step = layers(depth)
    return SweepProblem(step=step, workload="layers", device=DEVICE, costs="As given.", efficiency=efficiency)


def rows(
    methods: Sequence[str], budgets: Sequence[int], efficiency: Efficiency | None = None, **options: object
) -> list[Row]:
    asked = problem(efficiency=efficiency)
    found = list(compare(asked, methods, budgets, bounds=False, **options))  # type: ignore[arg-type]
    assert [one for one in found if not isinstance(one, Row)] == []
    return list(Comparison.of(asked, methods, budgets, found).rows)


@pytest.mark.parametrize("name", QUICK)
def test_a_row_is_what_simulating_the_method_directly_gives(name: str) -> None:
    found = rows([name], [6 * MiB, 9 * MiB, 14 * MiB], processes=1)
    assert [one.budget_bytes for one in found] == [6 * MiB, 9 * MiB, 14 * MiB]
    for one in (one for one in found if one.status == "ok"):
        alone = simulate(layers(12), allowed=one.budget_bytes, method=METHODS[name].on_paper(), device=DEVICE)
        assert one == Row(
            method=name, budget_bytes=one.budget_bytes, status="ok", overhead=alone.seconds / alone.plain_seconds,
            seconds=alone.seconds, peak_bytes=alone.peak_bytes, bytes_out=alone.bytes_out, bytes_in=alone.bytes_in,
            recomputed_seconds=alone.recomputed_seconds, remark=alone.remark,
        )  # fmt: skip
        assert one.peak_bytes is not None
        assert one.peak_bytes <= one.budget_bytes


def test_the_rows_are_known_by_hand_where_everything_fits_and_where_nothing_does() -> None:
    fits, does_not = rows(["lru"], [14 * MiB, 2 * MiB], processes=1)[::-1]
    assert fits == Row(
        method="lru", budget_bytes=14 * MiB, status="ok", overhead=pytest.approx(1.0), seconds=pytest.approx(0.024),
        peak_bytes=14 * MiB, bytes_out=0, bytes_in=0, recomputed_seconds=0.0,
    )  # fmt: skip
    assert (does_not.status, does_not.seconds, does_not.overhead, does_not.peak_bytes) == ("oom", None, None, None)
    assert "it takes 3145728 bytes (3.00 MiB) or more" in does_not.why


def test_a_planner_that_has_no_plan_is_oom_with_the_smallest_budget() -> None:
    (found,) = rows(["sqrt-n"], [MiB], processes=1)
    assert (found.status, found.seconds) == ("oom", None)
    assert "bytes (" in found.why


def test_recomputing_over_and_over_is_thrashing() -> None:
    slow = SweepProblem(step=layers(60), workload="layers", device=DEVICE, costs="As given.")
    found = list(compare(slow, ["largest"], [4 * MiB], bounds=False, processes=1))
    assert [(one.status, one.seconds) for one in found if isinstance(one, Row)] == [("thrash", None)]


@pytest.mark.parametrize("efficiency", [None, PUBLISHED])
def test_rows_do_not_depend_on_the_number_of_processes(efficiency: Efficiency | None) -> None:
    budgets = [5 * MiB, 8 * MiB, 14 * MiB]
    alone = rows(QUICK, budgets, efficiency, processes=1)
    assert rows(QUICK, budgets, efficiency, processes=3) == alone
    assert [(one.method, one.budget_bytes) for one in alone] == [(name, nbytes) for name in QUICK for nbytes in budgets]


def test_what_is_quick_comes_first_and_what_searches_last() -> None:
    cells = cells_of(["checkmate", "lru", "delta"], [1, 2], bounds=True)
    assert [(cell.method, cell.budget_bytes) for cell in cells] == [
        ("lru", 2), ("delta", 2), ("lru", 1), ("delta", 1), (None, 2), (None, 1), ("checkmate", 2), ("checkmate", 1)
    ]  # fmt: skip


def test_a_method_that_searches_does_so_for_as_long_as_it_is_given() -> None:
    assert [name for name in METHODS if searches(name)] == ["checkmate"]
    found = made("checkmate", 7.0)
    assert isinstance(found, Checkmate)
    assert found.time_limit == 7.0


@pytest.mark.parametrize("layers", [6, 60])
def test_the_bound_says_more_than_the_plain_step_however_many_ops_there_are(layers: int) -> None:
    pytest.importorskip("scipy", reason="the bound takes SciPy")
    swept = problem(layers)
    peak = swept.plain_peak
    found = {one.budget_bytes: one for one in compare(swept, [], [peak * 2 // 3, peak], processes=1)}
    fits, tight = found[peak], found[peak * 2 // 3]
    assert isinstance(fits, Bound)
    assert isinstance(tight, Bound)
    assert (fits.kind, fits.seconds, fits.why) == ("plain", pytest.approx(swept.plain_seconds), "")
    assert (tight.kind, tight.why) == ("cut", "")
    recomputes = simulate(swept.step, allowed=peak * 2 // 3, method=METHODS["dtr"].on_paper(), device=DEVICE)
    assert recomputes.bytes_out == 0
    assert fits.seconds * 1.05 < tight.seconds <= recomputes.seconds


def test_a_budget_within_which_nothing_fits_that_only_recomputes_is_said_to_be_one() -> None:
    pytest.importorskip("scipy", reason="the bound takes SciPy")
    (found,) = compare(problem(6), [], [2 * MiB], processes=1)
    assert isinstance(found, Bound)
    assert (found.kind, found.why) == ("plain", "Nothing fits that only recomputes.")


def test_what_raises_is_a_failure_with_its_method_and_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise UsageError("Something is not installed.")

    monkeypatch.setattr("spillway.simulation.sweep.METHODS", {**METHODS, "lru": Method(refused)})
    found = list(compare(problem(), ["lru", "keep-all"], [14 * MiB], bounds=False, processes=1))
    failure, kept = found
    assert failure == Failure(method="lru", budget_bytes=14 * MiB, why="Something is not installed.")
    assert str(failure) == "lru under 14.00 MiB: Something is not installed."
    assert isinstance(kept, Row)
    whole = Comparison.of(problem(), ["lru", "keep-all"], [14 * MiB], found)
    assert (whole.complete, len(whole.rows), whole.failures) == (False, 1, [failure])


def test_methods_are_read_from_one_text() -> None:
    assert parse_methods("all") == list(METHODS)
    assert parse_methods("lru, delta,lru") == ["lru", "delta"]
    with pytest.raises(UnknownMethodError, match="no method 'fastest'; choose 'all' or some of auto, keep-all, lru"):
        parse_methods("all,fastest")
    with pytest.raises(UsageError, match="No method is named"):
        parse_methods(" , ")


def test_measured_seconds_stay_where_nobody_counted_and_on_this_machine_alone() -> None:
    a100 = device_of("a100")
    measured = row(Line(nbytes=8, flops=10, traffic=100, seconds=5.0), Line(nbytes=8, flops=10, traffic=100))
    recorded = Recorded(step=measured, workload="row", facts={})
    assert sweep_problem_of(recorded, a100).step == timed(measured, a100)
    assert sweep_problem_of(recorded, a100).costs == (
        "Seconds of ops are modelled for a100 by roofline; copies take what a100 takes."
    )
    here = sweep_problem_of(recorded, replace(a100, name=HERE))
    assert [op.seconds == 5.0 for op in here.step.ops] == [True, False]
    assert here.costs.startswith("Seconds of ops are those measured when it was recorded; of 1 ops without, modelled")
    log = Recorded(step=row(Line(nbytes=8, seconds=5.0)), workload="log", facts={})
    kept = sweep_problem_of(log, a100)
    assert (kept.plain_seconds, kept.step) == (5.0, log.step)
    assert kept.costs == "Seconds of ops are those measured when it was recorded; copies take what a100 takes."


def test_this_process_works_alone_where_it_is_asked_to() -> None:
    assert rows(["lru"], [14 * MiB], processes=1) == rows(["lru"], [14 * MiB], processes=os.cpu_count())
