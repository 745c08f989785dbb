"""The benchmarks of Mimose run at their quick size and hand back what their tables promise. No time is looked at."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from benchmarks import drawing, machine, show
from benchmarks.record import Result, Skipped
from papers.mimose import detection, estimator, planning
from papers.mimose.estimator import OURS, PUBLISHED, of_scikit
from papers.mimose.lab import MARK, Trace, blocks_at, build, tracing
from papers.mimose.planning import COUNTED, WAYS
from spillway.methods.mimose import Options
from tests.cpu.benchmarks_quick import named, quick
from tests.shared import shared

TINY = {"layers": 2, "width": 64, "batch": 2}


# The estimator


@pytest.mark.long
def test_mimose_estimator_lets_every_regressor_learn_and_counts_what_is_not_exact() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    result = quick("mimose_estimator")
    rows = {
        (row["task"], row["regressor"], row["samples"]): row for row in result.rows if row["sizes"] == estimator.EVEN
    }
    coming = {(row["regressor"], row["samples"]): row for row in result.rows if row["sizes"] == estimator.COMING}
    boosted, more = "gradient-boosted trees", [(name, count) for name in of_scikit() for count in (10, 12)]
    text = [(OURS, 10), (PUBLISHED, 10), ("linear", 10), ("cubic", 10), *more]
    assert list(rows) == [("TC-Bert", *one) for one in text] + [("ResNet", OURS, 10), ("ResNet", PUBLISHED, 10)]
    ours, linear = rows["TC-Bert", OURS, 10], rows["TC-Bert", "linear", 10]
    assert (ours["inexact"], ours["worst"], ours["allocator"]) == (0, 0, 0)
    assert (linear["inexact"], linear["estimates"], linear["blocks"]) == (6, 6, 2)
    assert 0 < linear["error"] < linear["worst"] == pytest.approx(linear["allocator"])
    assert rows["TC-Bert", boosted, 10]["error"] > 0.01
    assert set(coming) == {(regressor, samples) for task, regressor, samples in rows if task == "TC-Bert"}
    assert coming[OURS, 10]["error"] == 0
    assert coming["linear", 10]["least"] <= coming["linear", 10]["error"] <= coming["linear", 10]["most"]
    assert coming["linear", 10]["error"] < linear["error"], "the ends are seldom met"
    told = [check for check in result.checks if check.at_most != estimator.WITHIN]
    assert [check.at_most for check in told] == [0, 0.005, 0, 0.2]


def test_an_error_that_is_twice_the_papers_or_half_of_it_is_a_miss() -> None:
    def met(error: float) -> list[bool]:
        row = {
            "task": "TC-Bert", "regressor": "linear", "samples": 10, "sizes": estimator.COMING, "error": error,
            "paper_error": 0.04,
        }  # fmt: skip
        return [one.met for one in estimator.BENCHMARK.judge(Result(title="", columns=[], rows=[row]))]

    assert [met(error) for error in (0.0, 0.019, 0.021, 0.079, 0.081)] == [[False], [False], [True], [True], [False]]


def test_without_scikit_learn_its_rows_are_left_out_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    size = dataclasses.replace(estimator.BENCHMARK.quick, tasks=())
    assert ("torch-spillway[bench]" in estimator.run(size, print).notes[-1]) == (not of_scikit())
    monkeypatch.setattr(estimator, "of_scikit", dict)
    assert "torch-spillway[bench]" in estimator.run(size, print).notes[-1]


def test_sizes_to_learn_from_are_none_of_those_that_are_estimated() -> None:
    size = estimator.BENCHMARK.full
    for task in size.tasks:
        learned, unseen = estimator.sizes_of(task, size)
        assert (unseen[0], unseen[-1], len(unseen)) == (task.smallest, task.largest, 8)
        assert len(set(learned) - set(unseen)) == (50 if task.all_regressors else 10)
        assert task.smallest <= min(learned) <= max(learned) <= task.largest


def test_every_number_of_the_papers_tables_stands_beside_a_row_of_ours() -> None:
    table3 = shared("papers/tables/mimose_table3_regressors_TC-Bert.csv").read_text("utf-8").splitlines()[1:]
    table4 = shared("papers/tables/mimose_table4_quadratic.csv").read_text("utf-8").splitlines()[1:]
    paper = [[float(cell) for cell in line.split(",")[2:]] for line in (*table3, *table4)]
    told = [[t.fit * 1e3, t.predict * 1e6, t.error * 100] for t in estimator.PAPER.values()]
    for numbers in paper:
        assert any(numbers == pytest.approx(one) for one in told)
    tasks = {task.name for task in estimator.BENCHMARK.full.tasks}
    assert {task for task, _, _ in estimator.PAPER} <= tasks


def test_what_a_block_gives_back_is_what_the_engine_counts() -> None:
    pytest.importorskip("transformers")
    for task in ("QA-Bert", "MC-Roberta", "QA-XLNet"):
        subject = build(task, TINY)
        with subject.engine(11) as engine:
            for size in (11, 14):
                taken = blocks_at(subject, engine, size)
                assert [one.freed for one in taken] == [one.nbytes for one in taken]
                assert len(taken) == 2
                assert min(one.nbytes for one in taken) > 10_000


def test_a_line_is_off_by_what_the_page_says_of_lengths_as_they_come() -> None:
    size = estimator.BENCHMARK.full
    task = size.tasks[0]
    # What each of the two encoders saves at a length, as the engine counts it: exact at 30, 64, 120, 200 and 290.
    saved = {length: [288 * length**2 + 104_480 * length] for length in range(task.smallest, task.largest + 1)}
    epochs = [estimator.as_they_come(task, size, random.Random(seed)) for seed in range(size.epochs)]
    row = estimator._drawn_row(task, "linear", estimator.OWN["linear"], estimator.Measured({}, {}, epochs, saved), 10)
    assert (row["error"], row["least"], row["most"]) == (
        pytest.approx(0.048, abs=5e-4), pytest.approx(0.02, abs=5e-4), pytest.approx(0.11, abs=5e-3),
    )  # fmt: skip


# Planning


@pytest.mark.long
def test_plans_of_an_epoch_are_as_many_as_the_page_says() -> None:
    counts = [
        (row["plans"], row["kept"])
        for options in (Options(), Options.as_published())
        for row in (planning._counted(task, options, 2000) for task in planning.TASKS)
    ]
    assert counts == [(124, 65), (171, 59), (171, 59), (190, 92), (23, 23), (71, 71), (71, 71), (61, 61)]


@pytest.mark.long
def test_mimose_planning_times_plans_and_counts_them() -> None:
    pytest.importorskip("transformers")
    result = quick("mimose_planning")
    planned, counted = result.rows[:4], result.rows[-8:]
    assert [row["kind"] for row in planned] == ["miss", "hit"] * 2
    ran = [row["kind"] for row in result.rows[4:-8] if "in a run" in row["kind"]]
    assert ran[0] == "miss, in a run"
    assert [row["kind"] for row in result.rows[4 + len(ran) : -8]] == list(WAYS)
    assert [row["paper_plans"] for row in counted] == [17, 17, 69, 69, 24, 24, 51, 51]
    for default, published in zip(counted[::2], counted[1::2], strict=True):
        assert 0 < published["plans"] < default["plans"] <= 20
        assert default["kept"] <= default["plans"]
    assert all(row["seconds"] > 0 for row in result.rows)
    assert [check.at_most for check in result.checks] == [5.0, 5.0, 1.02, 1.02, 0.63, 60, 60]


def test_the_full_size_has_a_target_for_24_and_for_96_blocks() -> None:
    rows = [
        {"what": f"miss, {blocks}", "kind": "miss", "of": blocks, "seconds": 2e-4}
        for blocks in planning.BENCHMARK.full.blocks
    ]
    rows += [
        {"kind": COUNTED, "ratio": 1.03},
        {"kind": planning.REHEARSED, "ratio": 3.0, "adds": 2 / 3},
        {"what": "QA-Bert, default", "kind": "default", "kept": 61, "detail": "297 lengths"},
    ]
    checks = planning.BENCHMARK.judge(Result(title="", columns=[], rows=rows))
    assert [(check.measured, check.at_most, check.met) for check in checks] == [
        (200.0, 100.0, False), (200.0, 500.0, True), (1.03, 1.02, False), (0.6667, 0.63, False), (61, 60, False),
    ]  # fmt: skip


# Blocks and peaks


def test_mimose_blocks_draws_what_it_measured(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    result = quick("mimose_blocks")
    assert [row["figure"] for row in result.rows] == ["10b"] * 2 + ["11"] * 4
    for row in result.rows[:2]:
        assert row["allocator"] == row["measured"]
        assert min(row["measured"]) > 10_000
    first, _, last, none = (row["measured"][-1] for row in result.rows[2:])
    assert first < last == none
    assert [check.measured for check in result.checks] == [0, 0]
    if drawing.can_draw():
        data = show.document("mimose_blocks", result, machine.describe(), [0.0], 1.0)
        show.write(tmp_path, data, result.pictures, "papers")
        page = (tmp_path / "summary.md").read_text("utf-8")
        for name in ("mimose_blocks_10.png", "mimose_blocks_11.png"):
            assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
            assert f"![mimose_blocks]({name})" in page


def test_a_trace_tells_the_peak_and_what_happened_in_a_mark() -> None:
    with tracing() as profiler:
        held = [torch.empty(1000, dtype=torch.uint8), torch.empty(500, dtype=torch.uint8)]
        held.pop(0)
        with record_function(f"{MARK}0"):
            held.append(torch.empty(70, dtype=torch.uint8))
            held.pop(0)
    trace = Trace(profiler)
    assert trace.peak() == 1500
    assert trace.changes(0) == [70, -500]


def test_a_trace_leaves_out_what_was_there_before_it_began() -> None:
    with tracing():
        before = [torch.empty(4000, dtype=torch.uint8)]
    with tracing() as profiler:
        held = torch.empty(100, dtype=torch.uint8)
        before.clear()
        more = torch.empty(30, dtype=torch.uint8)
    assert Trace(profiler).peak() == 130 == held.nbytes + more.nbytes


# The detection run


def test_mimose_detection_splits_the_published_run_by_what_could_have_held() -> None:
    shared("data/mimose/detection_r101_run1.csv")
    benchmark = named("mimose_detection")
    result = benchmark.measured(benchmark.full, lambda text: None)
    rows = [[row[key] for key in ("steps", "over", "told", "passed")] for row in result.rows]
    assert rows == [[29, 21, 21, 21], [133, 133, 133, 133], [24, 24, 0, 1], [19, 19, 19, 19]]
    assert all(check.met for check in result.checks)
    assert len(quick("mimose_detection").rows) > 1


def test_without_the_trace_there_is_nothing_to_show(tmp_path: Path) -> None:
    with pytest.raises(Skipped, match="there is no"):
        detection.run(detection.Size(data=tmp_path / "none.csv"), lambda text: None)


def test_a_result_without_pictures_is_written_without() -> None:
    data: dict[str, Any] = show.document("x", Result(title="t", columns=[], rows=[]), {}, [], 1.0)
    assert data["pictures"] == []
