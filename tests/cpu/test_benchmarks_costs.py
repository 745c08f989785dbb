"""What modelled seconds are worth: the targets that say so, and that each of their checks can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.record import Result
from papers.costs import costs_ops, method_extras, other_hardware, plain_steps
from papers.costs.log_ops import LOGS, Log
from spillway.advisor.bench import AbstractBench, Trial
from spillway.costs import PUBLISHED, OpKind
from spillway.costs.fitting import LeftOut
from tests.cpu.benchmarks_quick import quick
from tests.shared import shared

FORETOLD = LeftOut(name="log", by=PUBLISHED, seconds=1.0, foretold=1.02, error=0.1, ratios=(1.0, 1.0))


def result(rows: list[dict[str, object]]) -> Result:
    return Result(title="", columns=(), rows=rows)


def plain(model: str, ratio: float = 1.0, batch: int = 8, peak: float = 1.0) -> dict[str, object]:
    return {"model": model, "batch": batch, "ratio": ratio, "peak_ratio": peak}


def test_ops_of_logs_are_told_from_the_bytes_of_their_tensors() -> None:
    group = Log(shared("data/dtr/logs.zip"), "unet").timed()
    first = next(work for work in group.works if work.kind is OpKind.WINOGRAD)
    # The network's second convolution: 64 channels to 64, six pictures of 416 by 608.
    second = [work for work in group.works if work.kind is OpKind.WINOGRAD][1]
    assert (first.inner, first.columns) == (27, 64)
    assert (second.rows, second.columns, second.inner) == (6 * 416 * 608, 64, 576)
    assert second.flops == 2 * second.rows * second.columns * second.inner


@pytest.mark.parametrize("name", LOGS)
def test_most_convolutions_of_a_log_have_a_window(name: str) -> None:
    log = Log(shared("data/dtr/logs.zip"), name)
    works = [work for work in log.timed().works if "convolution" in work.kind or "winograd" in work.kind]
    rates = [work.flops for work in works]
    assert all(rates)
    assert len(works) == sum("cudnn_convolution" in entry.name for entry in log.entries)


def test_a_log_is_foretold_by_another() -> None:
    shared("data/dtr/logs.zip")
    found = quick("costs_ops")
    assert [row["log"] for row in found.rows] == ["unet", "resnet32"]
    assert all(row["error"] < 0.5 for row in found.rows)


@pytest.mark.parametrize(("planted", "missed"), [({}, 0), ({"error": 0.3}, 1), ({"foretold": 1.2}, 1)])
def test_a_bad_fit_to_logs_is_told(planted: dict[str, float], missed: int) -> None:
    found = costs_ops.result_of([replace(FORETOLD, **planted)])  # type: ignore[arg-type]
    assert sum(not check.met for check in costs_ops.judge(found)) == missed


@pytest.mark.parametrize(
    ("rows", "missed"),
    [
        ([plain("a", 1.1), plain("b", 0.95), plain("c", 1.04), plain("d", 0.8)], 0),
        ([plain("a", 1.4), plain("b"), plain("c")], 1 + 1),  # throughput; and it lies outside of the others' interval
        ([plain("a", 1.2), plain("b", 1.2), plain("c", 1.2)], 1 + 1),  # the median; and nothing lies outside
        ([plain("a", 1.1, peak=1.1), plain("b", 0.95), plain("c", 1.04), plain("d", 0.8)], 1),
    ],
)
def test_a_step_that_is_foretold_badly_is_told(rows: list[dict[str, object]], missed: int) -> None:
    checks = list(plain_steps.judge(result(rows)))
    assert sum(not check.met for check in checks) == missed, [check.sentence() for check in checks]


def test_extras_outside_of_their_interval_are_told() -> None:
    def row(model: str, ratio: float) -> dict[str, object]:
        return {"model": model, "method": "checkpoint", "ratio": ratio}

    wide = [row("a", 1.1), row("b", 0.9), row("c", 1.05), row("d", 5.0)]
    assert [check.met for check in method_extras.judge(result(wide))] == [True, True]
    narrow = [row("a", 3.0), row("a", 3.1), row("b", 1.01), row("c", 0.99), row("d", 1.0)]
    assert [check.met for check in method_extras.judge(result(narrow))] == [False, True]


@pytest.mark.parametrize("name", ["costs_plain", "costs_methods"])
def test_small_models_are_foretold_by_others(name: str) -> None:
    shared("data/dtr/logs.zip")
    shared("data/papaya/measurements_v100.csv")
    found = quick(name)
    assert {row["model"] for row in found.rows} == {"ResNet-50", "Bert-Large", "GPT-Small"}


def test_hardware_that_nothing_was_fitted_to() -> None:
    rows = quick("costs_hardware").rows
    assert [(row["device"], row["count"], row["method"]) for row in rows] == [
        ("t4", 1, "plain"), ("v100", 2, "plain"), ("t4", 1, "checkpoint"), ("v100", 2, "checkpoint")
    ]  # fmt: skip
    assert all(row["low"] < row["throughput"] < row["high"] for row in rows)


@pytest.mark.parametrize("limit", [50, 1000, 1019, 5000])
def test_the_largest_batch_is_found_from_a_line_that_bends(limit: int) -> None:
    class Bent(AbstractBench):
        def measure(self, method: str, size: int) -> Trial:
            return Trial(method=method, size=size, peak=max(100 + size // 9, 70 + 2 * size), seconds=1.0)

    fits = [size for size in range(1, 5000) if max(100 + size // 9, 70 + 2 * size) <= limit]
    assert other_hardware.largest_on_line(Bent(), "plain", limit) == max(fits, default=0)
