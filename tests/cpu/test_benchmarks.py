"""Every benchmark runs at its quick size and hands back what its table promises. No time is looked at here."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    auto_race,
    bottlenecks,
    columns,
    command,
    exactness,
    machine,
    modelled,
    models,
    race,
    random_programs,
    show,
    simulated,
    training,
)
from benchmarks.command import BENCHMARKS
from benchmarks.half_memory import (
    CHECKPOINT,
    DEFAULT,
    DELTA,
    KEPT,
    LIMITED,
    MOVES,
    NEARLY_ALL,
    ON_ARENA,
    PLAIN,
    WITHOUT,
)
from benchmarks.host_cost import KNOWN, NOTHING, REAL, SMALL
from benchmarks.reach import LargestOp
from benchmarks.record import Benchmark, Check, Column, Result
from benchmarks.training import checkpoint_every_block, long_batches, longest_batch, size_of
from benchmarks.workers import Job, Worker, started
from papers import PAPERS
from papers.dtr import reference
from papers.dtr.runtime import Outcome
from papers.dynn_offload import samples
from spillway.costs import DEVICES
from spillway.errors import WorkloadError
from spillway.ir.spans import Lane, Span, Work
from spillway.workloads import WORKLOADS, get
from tests.cpu.benchmarks_quick import named, quick, rows_by
from tests.shared import shared

SMALL_LM = {"width": 32, "layers": 2, "heads": 2, "batch": 2, "longest": 64, "grouped": 1}


@pytest.mark.long
def test_host_cost_measures_every_competitor_on_the_same_ops() -> None:
    result = quick("host_cost")
    assert [row["competitor"] for row in result.rows] == [*SMALL, *KNOWN, *KNOWN, REAL]
    assert SMALL[:2] == ("plain", NOTHING)
    assert len({row["ops"] for row in result.rows[: len(SMALL)]}) == 1
    assert result.rows[0]["ops"] > 100
    assert all(row["seconds"] > 0 and row["cpu_seconds"] > 0 for row in result.rows)
    assert [check.at_most for check in result.checks] == [2.0] * 4 + [10.0, 12.0] + [1.01] * 6 + [4.0]


def test_half_memory_trains_all_competitors_to_the_same_losses_within_half_of_the_peak() -> None:
    rows = rows_by(quick("half_memory"), "competitor")
    limited = [*LIMITED, *(name + how for name in (DEFAULT, DELTA) for how in (WITHOUT, KEPT))]
    assert {*rows} == {PLAIN, ON_ARENA, MOVES, NEARLY_ALL, CHECKPOINT, *limited}
    assert all(row["identical"] for row in rows.values())
    for name in (*limited, MOVES):
        assert rows[name]["peak_bytes"] <= rows[name]["budget_bytes"] == rows[PLAIN]["peak_bytes"] // 2
        assert rows[name]["bytes_out"] > 0
        assert (rows[name]["arena_bytes"] is None) == (WITHOUT in name)
    assert rows[MOVES]["recomputed_share"] == 0
    assert rows[DEFAULT]["bytes_out"] > rows[NEARLY_ALL]["bytes_out"]
    assert rows[PLAIN]["peak_bytes"] * 97 // 100 == rows[NEARLY_ALL]["budget_bytes"] >= rows[NEARLY_ALL]["peak_bytes"]
    assert rows[CHECKPOINT]["peak_bytes"] < rows[PLAIN]["peak_bytes"]
    assert rows[PLAIN]["ratio"] == 1


@pytest.mark.long
def test_auto_races_the_usual_ways_within_its_budget() -> None:
    result = quick("auto_race")
    rows = rows_by(result, "competitor")
    ours = {*auto_race.OTHERS, auto_race.AUTO, auto_race.NO_DISK, f"{auto_race.AUTO}, fits"}
    assert {PLAIN, *auto_race.TORCHS, *ours, f"{auto_race.AUTO} as {CHECKPOINT}"} <= {*rows}
    differ = {race.STILL, race.TORCH_BUDGET}
    assert {row["losses"] for name, row in rows.items() if name not in differ} == {"as plain"}
    assert rows[auto_race.AUTO]["peak_bytes"] <= rows[auto_race.AUTO]["budget_bytes"] < rows[PLAIN]["peak_bytes"]
    assert {f"stdlib-lm, auto as {CHECKPOINT}, times {CHECKPOINT}"} <= {check.what for check in result.checks}
    other = {name: dict(row) for name, row in rows.items()}
    other[auto_race.AUTO] |= {"losses": "DIFFER", "peak_bytes": other[auto_race.AUTO]["budget_bytes"] + 1}
    missed = [check.what for check in auto_race._of_model(other, "m") if not check.met]
    assert {"m, competitors whose losses differ", "m, bytes over a budget"} <= {*missed}


@pytest.mark.long
def test_predictions_of_auto_stand_beside_what_steps_take() -> None:
    (row,) = quick("auto_predictions").rows
    assert 1 <= row["planned"] <= 3, "where nothing is moved links are tried again"
    assert row["losses"] == "as plain"
    assert row["least"] > 0.9, "copies are late on a busy machine, and the first time that is not foretold"
    assert row["expected"] > 0
    assert row["peak_bytes"] <= row["budget_bytes"]


@pytest.mark.long
def test_lengths_share_plans_of_auto_within_the_budget() -> None:
    plain, shared, anew = quick("auto_lengths").rows
    assert {row["losses"] for row in (plain, shared, anew)} == {"as plain"}
    assert shared["over"] == anew["over"] == 0
    assert 0 < shared["plans"] <= 20
    assert "plans" not in plain


@pytest.mark.long
def test_budget_counts_steps_over_budget_and_losses_that_differ() -> None:
    result = quick("budget")
    plain, *rows = result.rows
    assert [row["method"] for row in rows] == ["lru", "delta", "delta-published"]
    for under in rows:
        assert plain["steps"] == under["steps"] == 6
        assert under["over"] == under["differing_losses"] == 0
        assert under["peak_bytes"] <= under["budget_bytes"] == plain["peak_bytes"] // 2
        assert under["verdict"] == "identical"
        assert under["bytes_out"] > 0


@pytest.mark.long
def test_race_lets_every_way_train_the_same_batches() -> None:
    result = quick("race")
    rows = rows_by(result, "competitor")
    sessions = [f"{name}, 50 %{kept}" for kept in ("", ", kept") for name in ("lru", "delta-published", "delta")]
    assert list(rows) == ["plain", "checkpoint", "plain, no dropout", "activation budget 0.5", *sessions]
    for name in sessions:
        assert rows[name]["peak_bytes"] <= rows[name]["budget_bytes"] == rows["plain"]["peak_bytes"] // 2
        assert rows[name]["losses"] == "as plain"
    assert rows["activation budget 0.5"]["peak_bytes"] < rows["plain"]["peak_bytes"]
    assert [check.at_most for check in result.checks] == [1.25, 1.0, 1.0, 1.25, 1.0, 1.0, 0, 0]


@pytest.mark.long
def test_race_goes_on_without_a_competitor_that_is_refused() -> None:
    contest = race.Contest(model="stdlib-lm", options=SMALL_LM, dropout=True)
    size = dataclasses.replace(race.BENCHMARK.quick, contests=[contest], percents=(5,))
    result = race.BENCHMARK.measured(size, lambda text: None)
    refused = [row for row in result.rows if str(row["losses"]).startswith("refused, needs ")]
    assert [row["competitor"] for row in refused] == ["lru, 5 %", "delta-published, 5 %", "delta, 5 %"]
    assert rows_by(result, "competitor")["checkpoint"]["losses"] == "as plain"


@pytest.mark.long
def test_deltas_tables_have_every_number_of_the_paper_beside_one_of_ours() -> None:
    pytest.importorskip("transformers")
    shared("papers/tables/delta_table2_memory_MB.csv")
    result = quick("delta_tables")
    told = [row for row in result.rows if row["paper"] is not None]
    tables = {name: sum(row["table"] == name for row in told) for name in ("II", "III", "IV", "V", "text")}
    assert tables == {"II": 13, "III": 10, "IV": 10, "V": 12, "text": 14}
    assert all(row["ours"] is not None and row["physical"] is not None for row in result.rows)
    assert result.checks[0].measured == 0
    largest = [row["ours"] for row in result.rows if row["table"] == "III" and "largest batch" in row["what"]]
    assert all(batch > 1 for batch in largest)


def test_a_row_beyond_tolerance_needs_an_explanation() -> None:
    pytest.importorskip("transformers")
    from papers.delta.lab import UNEXPLAINED, figure, unexplained

    near, far = (figure("II", "a model", 100.0, (ours,)) for ours in (109.0, 89.0))
    assert (near["why"], far["why"]) == ("", UNEXPLAINED)
    assert unexplained([near, far]) == [far]


@pytest.mark.parametrize(
    ("letter", "ours", "beside", "other"),
    [
        ("a", (80.0, 110.0), {}, (80.0, 99.0)),
        ("b", (80.0,), {"composed": 101.0}, {"composed": 99.0}),
        ("c", (20.0,), {"other_budgets": [30.0, 95.0]}, {"other_budgets": [30.0, 89.0]}),
        ("d", (120.0,), {"in_the_papers_place": 101.0}, {"in_the_papers_place": 111.0}),
        ("e", (300.0,), {"least_possible": 150.0}, {"least_possible": 90.0}),
        ("f", (130.0,), {"plain": 90.0}, {"plain": 101.0}),
    ],
)
def test_an_explanation_holds_by_the_numbers_of_its_row_alone(
    letter: str, ours: tuple[float, ...], beside: dict[str, Any], other: Any
) -> None:
    pytest.importorskip("transformers")
    from papers.delta.lab import RULES, UNEXPLAINED, figure, unexplained

    assert letter in RULES
    explained = figure("II", "a model", 100.0, ours, **beside)
    assert explained["why"] == letter
    otherwise = figure("II", "a model", 100.0, other) if letter == "a" else figure("II", "m", 100.0, ours, **other)
    assert otherwise["why"] == UNEXPLAINED
    # What the row says of itself counts for nothing.
    assert unexplained([{**otherwise, "why": letter}, {**explained, "why": ""}]) == [{**otherwise, "why": letter}]


@pytest.mark.long
def test_convergence_compares_every_loss() -> None:
    result = quick("convergence")
    assert [row["method"] for row in result.rows] == ["plain", "delta", "delta-published"]
    assert all(row["moves"] + row["drops"] > 0 for row in result.rows[1:])
    assert [check.measured for check in result.checks] == [0] * 8


def test_a_step_that_is_profiled_takes_what_the_account_says() -> None:
    options = {"workload": "stdlib-lm", "options": SMALL_LM, "batches": 1, "budget": None, "checkpoints": False}
    profiled = training.profiled(**options, method=None, return_freed=True)
    measured = [profiled()["peak"] for _ in range(2)][1]
    account = training.account(get("stdlib-lm", **SMALL_LM), longest_batch(get("stdlib-lm", **SMALL_LM), 8), 2)
    assert abs(measured / account.peak - 1) < 0.05


@pytest.mark.long
def test_reach_finds_a_budget_that_works_and_tries_what_refusals_tell() -> None:
    rows = quick("reach").rows
    ways = itertools.product(("stdlib-lm", "deep-narrow"), ("lru", "delta", "delta-published"))
    assert [(row["workload"], row["method"]) for row in rows] == list(ways)
    for row in rows:
        assert row["largest_op_bytes"] <= row["smallest_bytes"] < row["peak_bytes"]
        assert row["refused"] > 0
        assert row["identical"]


@pytest.mark.long
def test_exactness_compares_a_family_under_every_policy() -> None:
    result = quick("exactness")
    (row,) = result.rows
    assert len(exactness.WAYS) == 5
    assert [row[f"50 {way}"] for way in exactness.WAYS] == ["identical"] * 5
    assert result.checks[0].measured == 0


def test_random_programs_counts_what_became_of_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # The programs themselves run in tests of their own.
    counts = dict.fromkeys(random_programs.SUMMED, 1)

    def row(policy: str, *, refused: bool = False, complaints: tuple[str, ...] = ()) -> dict[str, Any]:
        figures = {"policy": policy, "refused": refused, "complaints": complaints, "allowed": 3, "plain_peak": 4}
        return {**figures, **counts}

    first, *others = random_programs.POLICIES
    rows = [row(first), row(first, refused=True), row(first, complaints=("a bit is wrong",)), *map(row, others)]
    monkeypatch.setattr(random_programs, "many", lambda start, count, policies: iter([{"seed": 7, "rows": rows}]))
    result = quick("random_programs")
    counted = rows_by(result, "policy")[first]
    assert [counted[key] for key in ("runs", "identical", "refused", "wrong", "moves")] == [3, 1, 1, 1, 3]
    assert [check.measured for check in result.checks] == [1]
    assert f"Program 7, {first}: a bit is wrong" in result.notes


def test_modelled_seconds_stand_beside_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelled, "measure", lambda directory: DEVICES["a100"])
    result = quick("modelled")
    assert [row["workload"] for row in result.rows] == ["deep-narrow", "resnet"]
    for row in result.rows:
        assert row["measured"] > 0
        assert row["modelled"] > 0


# What the benchmarks stand on


def test_simulated_compares_a_step_on_paper_with_the_real_one() -> None:
    rows = quick("simulated").rows
    assert [(row["method"], row["status"]) for row in rows] == [("lru", "ok"), ("delta", "ok")]
    for row in rows:
        assert row["moves"] + row["drops"] > 0
        assert row["simulated_moves"] + row["simulated_drops"] > 0
        assert max(row["peak"], row["simulated_peak"]) <= row["allowed"]
        assert 0 <= row["same"] <= 1


def test_decisions_that_differ_are_said_to_differ_for_what_was_measured() -> None:
    alike = {
        "workload": "w", "method": "delta", "share": 0.5, "of_extra": 1.1, "peak": 100, "simulated_peak": 100,
        "moves": 40, "simulated_moves": 41, "drops": 20, "simulated_drops": 19, "returns": 50, "simulated_returns": 52,
        "same": 0.95, "link": 1.0, "plain_seconds": 1.0, "ops_seconds": 1.0,
    }  # fmt: skip
    assert simulated.cause(alike) == ""
    for planted, why in (
        ({"simulated_moves": 60}, "moves apart: few there are"), ({"drops": 2, "same": 0.3}, "drops apart: not by"),
        ({"simulated_returns": 9, "same": 0.3, "link": 3.0}, "returns apart: copies took 3.0 times as long"),
        ({"moves": 1, "same": 0.3, "plain_seconds": 2.0}, "moves apart: steps took 2.00 times"),
    ):  # fmt: skip
        assert simulated.cause({**alike, **planted}).startswith(why)


def test_copies_of_a_session_are_a_line_again() -> None:
    device = DEVICES["a100"]
    copies = [
        Span(lane=lane, work=Work.COPY, began=0.0, ended=1e-5 + nbytes * of, op=0, name="", storage=0, nbytes=nbytes,
             stalled=0.0)
        for lane, of in ((Lane.COPY_OUT, 1e-9), (Lane.COPY_IN, 5e-10)) for nbytes in (1 << 16, 1 << 18, 1 << 20)
    ]  # fmt: skip
    link = simulated.link_of(copies, device)
    figures = (link.copy_seconds, link.out_per_second, link.in_per_second)
    assert figures == (pytest.approx(1e-5), pytest.approx(1e9), pytest.approx(2e9))
    assert simulated.link_of(copies[:2], device) == device


def test_the_optimum_is_between_the_bound_and_the_others() -> None:
    fits, none = quick("optimum").rows
    assert 1 <= fits["bound"] <= fits["checkmate"] <= fits["best"]
    assert (none["infeasible"], none["bound"], none["checkmate"], none["best"]) == (True, None, None, None)


def test_the_largest_op_is_found_with_every_storage_counted_once() -> None:
    a, b = torch.ones(8, 16), torch.ones(16, 4)
    with LargestOp() as largest:
        _ = a @ b
        _ = a + a
    assert (largest.name, largest.nbytes) == ("aten.add.Tensor", 2 * 8 * 16 * 4)


def test_long_batches_are_within_a_tenth_of_the_longest() -> None:
    workload = get("stdlib-lm", **SMALL_LM)
    sizes = [size_of(batch) for batch in long_batches(workload, 3)]
    assert len(sizes) == 3
    assert min(sizes) >= 0.9 * size_of(longest_batch(workload, 24))


def test_checkpoints_stand_around_every_block_and_change_no_loss() -> None:
    plain, checkpointed = (get("stdlib-lm", dropout=0.0, **SMALL_LM) for _ in range(2))
    assert checkpoint_every_block(checkpointed.model) == 2
    batch = longest_batch(plain, 4)
    for _ in range(2):
        assert torch.equal(plain.train_step(batch), checkpointed.train_step(batch))


@pytest.fixture
def lost() -> Iterator[Worker]:
    options = {"batches": 1, "method": None, "budget": None, "checkpoints": False, "return_freed": True}
    job = Job(function="benchmarks.training:trainer", options={"workload": "no such", "options": {}, **options})
    with started(job) as worker:
        yield worker


def test_an_error_of_spillway_in_a_competitor_is_raised_here_as_it_was(lost: Worker) -> None:
    with pytest.raises(WorkloadError, match="There is no workload 'no such'"):
        lost.ask()
    with pytest.raises(RuntimeError, match="has ended"):
        lost.ask()


def test_any_other_error_in_a_competitor_comes_with_its_traceback() -> None:
    job = Job(function="benchmarks.host_cost:no_such_function", options={})
    with started(job) as worker, pytest.raises(RuntimeError, match="no_such_function"):
        worker.ask()


# The command line


def fake(measured: float) -> Benchmark:
    def run(size: int, tell: Any) -> Result:
        rows = [{"name": "one", "size": size}]
        facts = {"figure": measured}
        return Result(title="nothing", columns=columns.text(name="name", size="size"), rows=rows, facts=facts)

    def judge(result: Result) -> list[Check]:
        return [Check(what="a figure", measured=result.facts["figure"], at_most=1.0)]

    return Benchmark(name="reach", run=run, judge=judge, full=2, quick=1)


@pytest.mark.parametrize(("measured", "code"), [(1.0, 0), (1.5, 1)])
def test_a_missed_target_is_shown_and_is_the_exit_code(
    measured: float, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "load", lambda name, offered: fake(measured))
    assert command.run(["reach", "--results", str(tmp_path)], BENCHMARKS) == code
    assert ("MISSED: a figure: 1.5, target at most 1" in capsys.readouterr().out) == bool(code)


def test_results_are_written_as_json_and_on_one_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "load", lambda name, offered: fake(0.5))
    assert command.run(["reach", "--results", str(tmp_path)], BENCHMARKS) == 0
    data = json.loads((tmp_path / "reach.json").read_text("utf-8"))
    assert data["rows"] == [{"name": "one", "size": 2}]
    assert data["facts"] == {"figure": 0.5}
    assert [check["met"] for check in data["checks"]] == [True]
    assert "| one | 2 |" in (tmp_path / "summary.md").read_text("utf-8")


def test_the_quick_size_writes_nothing_and_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise AssertionError("figures that mean nothing were written")

    monkeypatch.setattr(command, "load", lambda name, offered: fake(2.0))
    monkeypatch.setattr(show, "write", write)
    assert command.run(["reach", "--quick"], BENCHMARKS) == 0


def test_an_unknown_benchmark_is_refused_with_the_names_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.run(["no-such"], BENCHMARKS)
    assert "there is no benchmark 'no-such'; choose from host_cost," in capsys.readouterr().err


@pytest.mark.parametrize("name", [*BENCHMARKS.modules, *PAPERS.modules])
def test_every_name_is_that_of_a_benchmark(name: str) -> None:
    assert named(name).name == name


def test_the_machine_is_described_without_its_name() -> None:
    described = machine.describe()
    assert {"cpu", "cores", "memory", "kernel", "python", "torch", "date", "threads"} <= set(described)
    assert platform.node() not in json.dumps(described)


def test_a_figure_that_is_not_there_shows_as_nothing() -> None:
    column = Column(key="figure", head="figure", show="{:.1f}".format)
    assert [column.cell(row) for row in ({"figure": 0.0}, {"figure": None}, {})] == ["0.0", "", ""]


def test_dtr_reference_is_the_same_run_for_run_and_stays_in_its_budgets_under_the_controller() -> None:
    shared("data/dtr/logs.zip")
    result = quick("dtr_reference")
    assert [row["heuristic"] for row in result.rows] == ["dtr-eqclass", "dtr-local", "msps", "lru", "largest", "dtr"]
    assert sum(row["runs"] for row in result.rows) == 43
    assert all(row["runs"] == row["identical"] for row in result.rows)
    assert all(check.met for check in result.checks)
    for row in result.rows:
        assert (row["at_0.5"] == "thrash/-") == (row["heuristic"] == "lru")
        assert row.get("peak_bytes_0.5", 0) <= 8415764640 // 2


def test_dtr_reference_counts_what_is_not_as_the_reference_has_it() -> None:
    told = reference.Reference("m", "dtr", 0.5, 100, "ok", 1.2, 20, 90, 7)
    ours = Outcome(status="ok", nanoseconds=120, recomputed_nanoseconds=20, overhead=1.2, peak=90, evictions=1, looks=7)
    runs = [reference.Ran(told, outcome, 0.5) for outcome in (
        ours, dataclasses.replace(ours, peak=91), dataclasses.replace(ours, overhead=1.23),
        dataclasses.replace(ours, status="oom", overhead=0.6),
    )]  # fmt: skip
    row = reference._row(runs)
    assert (row["runs"], row["identical"]) == (4, 1)
    result = Result(title="t", columns=(), rows=[row], facts={"fast": []})
    assert [check.measured for check in reference._checks(result)] == [3]


def test_recorded_samples_are_kept_in_a_folder_that_is_not_there_yet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(samples, "FOLDER", tmp_path / "of" / "samples")
    monkeypatch.setattr(samples, "record_samples", lambda network, **options: network)
    monkeypatch.setattr(samples, "write_samples", lambda path, recorded: path.write_text(recorded, "utf-8"))
    samples.samples_of("moe", seed=1, steps=2, frozen=True, tell=lambda text: None)
    assert (tmp_path / "of" / "samples" / "moe-frozen-1.jsonl.gz").read_text("utf-8") == "moe"


def test_a_benchmark_without_its_data_is_skipped_with_the_reason_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = named("dtr_reference")
    without = dataclasses.replace(benchmark, full=dataclasses.replace(benchmark.full, data=tmp_path))
    monkeypatch.setattr(command, "load", lambda name, offered: without)
    assert command.run(["dtr_reference", "--results", str(tmp_path / "results")], PAPERS) == 0
    assert f"dtr_reference: skipped: there is no {tmp_path}" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("name", BENCHMARKS.on_a_gpu)
def test_a_benchmark_for_a_gpu_says_that_it_needs_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    benchmark = named(name)
    with pytest.raises(SystemExit, match=f"{name} needs a CUDA device"):
        benchmark.run(benchmark.quick, lambda text: None)


def test_overlap_is_judged_by_runs_that_copy_for_a_third_of_a_step() -> None:
    from benchmarks.gpu import NOTHING_TO_COMPARE, _overlap

    def row(method: str, seconds: float, copying: float) -> dict[str, object]:
        return {"model": "a", "batch": 1, "budget": 2, "method": method, "seconds": seconds, "copying": copying}

    assert _overlap([row("delta", 3.0, 2.0), row("delta, copies in turn", 4.0, 2.0)]) == 0.75
    assert _overlap([row("delta", 3.0, 1.0), row("delta, copies in turn", 4.0, 1.0)]) == NOTHING_TO_COMPARE


@pytest.mark.parametrize(
    ("name", "parameters"), [("resnet50", 25_557_032), ("resnet101", 44_549_160), ("resnext50_32x4d", 25_028_904)]
)
def test_the_networks_of_the_benchmark_for_a_gpu_are_the_published_ones_and_need_torch_alone(
    name: str, parameters: int
) -> None:
    with torch.device("meta"):
        network = bottlenecks.build(name)
        scores = network(torch.empty(2, 3, 64, 64))
    scores.sum().backward()
    assert scores.shape == (2, 1000)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


def test_the_allocators_peak_is_measured_whoever_lets_it_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import AllocatorPeak

    peaks, resets = iter((30, 70, 50)), list[object]()
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: next(peaks))
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda device=None: resets.append(device))
    before = torch.cuda.reset_peak_memory_stats
    with AllocatorPeak() as peak:
        torch.cuda.reset_peak_memory_stats("cuda:0")
        torch.cuda.reset_peak_memory_stats()
    assert (peak.nbytes, resets) == (70, [None, "cuda:0", None])
    assert torch.cuda.reset_peak_memory_stats is before


def test_a_run_that_fails_on_a_gpu_is_a_row_and_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu

    def fails(*given: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(gpu, "train", fails)
    row = gpu._row("resnet50", 1, gpu.BENCHMARK.quick, "lru", 1, gpu.Trained())
    assert (row["outcome"], row["why"]) == ("FAILED", "no memory")


def test_what_the_full_benchmarks_are_run_with_exists() -> None:
    asked = [(one.model, one.options) for one in race.BENCHMARK.full.contests]
    for name, options in asked:
        inspect.signature(models.MODELS.get(name) or WORKLOADS[name]).bind(**options)
