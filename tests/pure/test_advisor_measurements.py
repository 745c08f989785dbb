"""Measurements from a CSV file, and the answers to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from spillway.advisor.measurements import MB, Experiment, Samples, read_measurements
from spillway.advisor.model import Cost
from spillway.advisor.verdict import Row, advise, as_measured, default_limit, fit, judge, recommended, sentence
from spillway.cli import main
from spillway.errors import FileFormatError, SpillwayError
from tests.shared import shared, without_page

COLUMNS = "source,hardware,network,algorithm,batch_size,layer_num,hidden_size,ips,batch_time_s,peak_mb,tstamp"

PLAIN = Cost(alpha=100 * MB, beta=1000 * MB, gamma=0.010, delta=0.200)
SMALL = Cost(alpha=20 * MB, beta=1000 * MB, gamma=0.012, delta=0.200)
"""At 2.2 GB: 12 samples plain, 37.5 a second; 60 so, 65.2 a second."""
SLOW = Cost(alpha=20 * MB, beta=1000 * MB, gamma=0.050, delta=0.200)
SIZES = (2, 4, 6, 8, 12)


def step(method: str, size: int, cost: Cost, *, network: str = "net", hardware: str = "gpu", source: str = "") -> str:
    seconds = cost.seconds(size)
    return f"{source},{hardware},{network},{method},{size},,,{size / seconds},,{cost.nbytes(size) / MB},"


def steps(method: str, cost: Cost, sizes: Iterable[int] = SIZES, **names: str) -> list[str]:
    return [step(method, size, cost, **names) for size in sizes]


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., list[Experiment]]:
    def write(*lines: str, columns: str = COLUMNS) -> list[Experiment]:
        path = tmp_path / "measured.csv"
        path.write_text("\n".join([columns, *lines]) + "\n", "utf-8")
        return read_measurements(path)

    return write


Read = Callable[..., list[Experiment]]


def by_method(rows: Iterable[Row]) -> dict[str, Row]:
    return {row.method: row for row in rows}


# Reading


def test_networks_hardware_and_shapes_are_told_apart(read: Read) -> None:
    found = read(
        "a/mem_results_9.json,v100,bert,exact,2,24,1024,,,100.5,",
        "a/speed_results_9.json,v100,bert,exact,2,24,1024,8,0.3,,",
        "a/speed_results_9.json,v100,bert,exact,2,36,1024,4,,,",
        "a/speed_results_9.json,a100,bert,exact,2,24,1024,16,,,",
    )
    assert [(one.hardware, one.title, one.source) for one in found] == [
        ("v100", "bert, 24 layers, hidden 1024", "a/results_9"),
        ("v100", "bert, 36 layers, hidden 1024", "a/results_9"),
        ("a100", "bert, 24 layers, hidden 1024", "a/results_9"),
    ]
    samples = found[0].methods["exact"]
    assert (samples.peaks, samples.seconds) == ({2: 100.5 * MB}, {2: 0.25})  # `ips` counts, not the time beside it


def test_the_last_row_of_a_step_counts_and_peaks_apart_are_remembered(read: Read) -> None:
    (found,) = read(",gpu,net,dtr,4,,,10,,100,", ",gpu,net,dtr,4,,,20,,50,", ",gpu,net,dtr,4,,,-1,,,")
    samples = found.methods["dtr"]
    assert (samples.seconds, samples.peaks, samples.spread, samples.failed) == ({4: 0.2}, {4: 50 * MB}, 2.0, set())


def test_a_failure_without_its_shape_belongs_to_the_only_shape_it_may_be(read: Read) -> None:
    (found,) = read(",gpu,net,exact,4,24,1024,10,,,", ",gpu,net,exact,8,24,,-1,,,", ",gpu,net,ckpt,8,,,-1,,,")
    assert {name: samples.failed for name, samples in found.methods.items()} == {"exact": {8}, "ckpt": {8}}
    two = read(",gpu,net,exact,4,24,1024,10,,,", ",gpu,net,exact,4,24,512,10,,,", ",gpu,net,exact,8,24,,-1,,,")
    assert [one.methods["exact"].failed for one in two] == [set(), set()]


def test_rows_that_say_nothing_of_a_step_are_passed_by(read: Read) -> None:
    (found,) = read(
        ",gpu,net,exact,,,,10,,,", ",gpu,net,exact,0,,,-1,,,", ",gpu,net,exact,4,,,,,,", *steps("exact", PLAIN)
    )
    assert sorted(found.methods["exact"].seconds) == list(SIZES)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([",gpu,net,exact,four,,,10,,,"], "line 2: batch_size is 'four', not a number."),
        ([",gpu,net,exact,2.5,,,10,,,"], "line 2: batch_size is 2.5, not a whole number above 0."),
        ([",gpu,net,exact,-2,,,10,,,"], "line 2: batch_size is -2, not a whole number above 0."),
        ([",gpu,net,exact,2,,,0,,,"], "line 2: ips is 0, not a number above 0, or -1 where memory ran out."),
        ([",gpu,net,exact,2,,,nan,,,"], "line 2: ips is 'nan', not a number."),
        ([",gpu,net,exact,2,,,,-3,,"], "line 2: batch_time_s is -3, not a number above 0."),
        ([",gpu,net,exact,2,,,,,inf,"], "line 2: peak_mb is 'inf', not a number."),
        ([*steps("exact", PLAIN), ",gpu,net,exact,2,,"], "line 7: it has not as many cells as the header has."),
        ([",gpu,net,exact,2,,,10,,1e305,"], "line 2: peak_mb is 1e305, which nothing takes or makes."),
        ([",gpu,net,exact,2,,,1e-320,,,"], "line 2: ips is 1e-320, which nothing takes or makes."),
        ([",gpu,net,exact,2,,,10,,,,,"], "line 2: it has not as many cells as the header has."),
        ([",,net,exact,2,,,10,,,"], "line 2: hardware is empty."),
        ([], "line 1: no row says how a step of some batch size went."),
    ],
)
def test_a_damaged_file_is_refused_in_a_sentence_with_the_line(read: Read, lines: list[str], said: str) -> None:
    with pytest.raises(FileFormatError) as refused:
        read(*lines)
    assert str(refused.value).endswith(f"measured.csv, {said}")


def test_a_foreign_file_is_told_which_columns_it_lacks(read: Read) -> None:
    with pytest.raises(FileFormatError, match="there is no network, no algorithm, no ips or batch_time_s"):
        read(columns="hardware,batch_size,peak_mb")


def test_what_is_no_text_is_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "measured.csv"
    path.write_bytes(f"{COLUMNS}\n".encode() + b",gpu,n\xff\xfet,exact,2,,,10,,,\n")
    with pytest.raises(FileFormatError, match="line 2: it is not text in UTF-8"):
        read_measurements(path)
    path.write_text(f"{COLUMNS}\n{'x' * 200_000},gpu,net,exact,2,,,10,,,\n", "utf-8")
    with pytest.raises(FileFormatError, match="it is not CSV: field larger"):
        read_measurements(path)


# Answers


def test_a_method_that_pays_is_named_with_its_batch_and_what_it_gains(read: Read) -> None:
    (there,) = read(*steps("exact", PLAIN), *steps("ckpt", SMALL), *steps("swap", SLOW))
    rows = by_method(advise(there, 2200 * MB))
    assert [row.verdict for row in rows.values()] == ["plain", "pays", "does not pay"]
    plain, ckpt = rows["exact"], rows["ckpt"]
    assert plain.predicted is not None
    assert ckpt.predicted is not None
    assert (plain.predicted.size, ckpt.predicted.size) == (12, 60)
    assert plain.predicted.throughput == pytest.approx(PLAIN.throughput(12))
    assert ckpt.predicted.throughput == pytest.approx(SMALL.throughput(60))
    assert ckpt.score == pytest.approx(80 * MB / 0.002)
    assert ckpt.point == pytest.approx(1200 * MB / 0.2)
    assert (ckpt.by_score, ckpt.by_ratio, ckpt.by_fragments) == (True, True, True)
    assert ckpt.sure == pytest.approx(1)
    assert sentence(list(rows.values())) == (
        "net on gpu: ckpt pays: 65.22 samples/s at batch 60 (measured: 34.88 at 12), 1.74 times plain's 37.5 samples/s "
        "at batch 12 (measured: 37.5 at 12); over 99 % sure (see the remarks on ckpt)."
    )


def test_where_nothing_pays_the_answer_is_to_stay_plain(read: Read) -> None:
    (there,) = read(*steps("exact", PLAIN), *steps("swap", SLOW))
    rows = advise(there, 2200 * MB)
    assert "stay plain: 37.5 samples/s at batch 12" in sentence(rows)
    assert "the nearest method, swap, reaches 0.50 times that: 18.75 samples/s at batch 60" in sentence(rows)


SMALLER = ",gpu,net,exact,4,,,{:.2f},,1400,"
"""A row of the batch of 4, at so many samples per second: 37.5 are foretold of the largest, 12."""


@pytest.mark.parametrize(("speed", "taken"), [(1.02 * 37.5, 12), (1.04 * 37.5, 4)])
def test_a_smaller_batch_that_was_seen_to_be_faster_is_the_one_to_take(read: Read, speed: float, taken: int) -> None:
    (there,) = read(*steps("exact", PLAIN), *steps("swap", SLOW))
    fits = {name: fit(samples, 2200 * MB) for name, samples in there.methods.items()}
    (seen,) = read(*steps("exact", PLAIN), *steps("swap", SLOW), SMALLER.format(speed))
    plain, swap = judge(seen, fits, 2200 * MB)
    assert plain.taken is not None
    assert (plain.taken.size, plain.to_json()["taken_batch"]) == (taken, taken)
    assert recommended([plain, swap]) is plain
    assert any("Take that one" in one for one in plain.warnings) == (taken == 4)
    said = "39 samples/s at batch 4, as measured (foretold of its largest, 12: 37.5)" if taken == 4 else (
        "37.5 samples/s at batch 12 (measured: 38.25 at 4)"
    )  # fmt: skip
    assert f"stay plain: {said}; the nearest method, swap, reaches" in sentence([plain, swap])


def test_what_was_measured_is_believed_before_the_model(read: Read) -> None:
    (there,) = read(*steps("exact", PLAIN), *steps("ckpt", SMALL))
    fits = {name: fit(samples, 2200 * MB) for name, samples in there.methods.items()}
    (seen,) = read(*steps("exact", PLAIN), *steps("ckpt", SMALL), SMALLER.format(70))
    plain, ckpt = judge(seen, fits, 2200 * MB)
    assert ckpt.verdict == "pays"
    assert recommended([plain, ckpt]) is plain
    said = sentence([plain, ckpt])
    assert "stay plain: 70 samples/s at batch 4" in said
    assert "; by what was measured, and against the model (see" in said


@pytest.mark.parametrize(("smaller", "taken"), [((), 12), ((SMALLER.format(50),), 4)])
def test_a_batch_beyond_the_largest_is_never_the_one_to_take(read: Read, smaller: tuple[str, ...], taken: int) -> None:
    """What did not fit was the fastest: a smaller one that was faster than foretold is found all the same."""
    (there,) = read(*steps("exact", PLAIN))
    fits = {"exact": fit(there.methods["exact"], 2200 * MB)}
    (seen,) = read(*steps("exact", PLAIN), ",gpu,net,exact,16,,,60,,2600,", *smaller)
    (plain,) = judge(seen, fits, 2200 * MB)
    assert plain.taken is not None
    assert plain.measured is not None
    assert (plain.taken.size, plain.measured.size) == (taken, 16)
    assert as_measured(plain) == ("60 at 16, 50 at 4 (taken)" if taken == 4 else "60 at 16")


def test_scattered_points_make_it_less_sure(read: Read) -> None:
    def scattered(method: str, cost: Cost, sign: int) -> list[str]:
        apart = (1, -1, -1, 1, 1)
        return [
            f",gpu,net,{method},{size},,,,{cost.seconds(size) * (1 + 0.1 * sign * off)},{cost.nbytes(size) / MB},"
            for size, off in zip(SIZES, apart, strict=True)
        ]

    near = Cost(alpha=50 * MB, beta=1000 * MB, gamma=0.020, delta=0.200)
    (there,) = read(*scattered("exact", PLAIN, 1), *scattered("ckpt", near, -1))
    row = by_method(advise(there, 2200 * MB))["ckpt"]
    assert row.sure is not None
    assert 0.5 < row.sure < 0.95
    assert "% sure" in sentence(advise(there, 2200 * MB))


def test_memory_that_ran_out_early_is_a_methods_own_limit(read: Read) -> None:
    (there,) = read(*steps("exact", PLAIN), *steps("ckpt", SMALL), ",gpu,net,ckpt,16,,,-1,,,")
    row = by_method(advise(there, 2200 * MB))["ckpt"]
    assert row.fitted is not None
    assert row.predicted is not None
    assert (row.predicted.size, row.fitted.limit) == (12, pytest.approx(SMALL.nbytes(12)))
    assert (row.by_score, row.by_fragments, row.verdict) == (True, False, "does not pay")
    assert any("Memory ran out above batch 12, by the fit at 56%" in warning for warning in row.warnings)


def test_what_is_not_linear_few_or_far_is_told(read: Read) -> None:
    bent = [
        f",gpu,net,dtr,{size},,,{size / 0.3},,{peak},"
        for size, peak in zip(SIZES, (2000, 900, 2100, 900, 2000), strict=True)
    ]
    (there,) = read(*steps("exact", PLAIN), *steps("ckpt", SMALL, (2, 4)), *bent, ",gpu,net,dtr,2,,,5,,1000,")
    rows = by_method(advise(there, 2200 * MB))
    said = {name: " ".join(row.warnings) for name, row in rows.items()}
    assert "goes through 2 batch sizes alone" in said["ckpt"]
    assert "A batch of 60 is 15.0 times the largest that ran, 4." in said["ckpt"]
    assert rows["ckpt"].sure is None
    assert "how sure cannot be told" in sentence(list(rows.values()))
    assert "The memory is not linear in the batch: R is" in said["dtr"]
    assert "differ by up to 2.00 times" in said["dtr"]
    assert said["exact"] == ""


def test_a_flat_beginning_decides_where_that_is_asked_for(read: Read) -> None:
    flat = Cost(alpha=100 * MB, beta=1000 * MB, gamma=0.05, delta=0.0, knee=9)
    (there,) = read(*steps("exact", flat, range(2, 13)), *steps("ckpt", SMALL, range(2, 13)))
    line, knee = (by_method(advise(there, 2200 * MB, small_batches=asked))["exact"] for asked in (False, True))
    assert any("Decide with --small-batches" in warning for warning in line.warnings)
    assert knee.predicted is not None
    assert line.predicted is not None
    assert knee.predicted.throughput == pytest.approx(flat.throughput(12))
    assert line.predicted.throughput != pytest.approx(flat.throughput(12), rel=0.01)
    for row in (line, knee):
        assert row.to_json()["small_batches"]["predicted_throughput"] == pytest.approx(flat.throughput(12))


def test_plain_training_that_does_not_fit_leaves_what_fits(read: Read) -> None:
    large = Cost(alpha=100 * MB, beta=3000 * MB, gamma=0.010, delta=0.200)
    (there,) = read(*steps("exact", large), *steps("ckpt", SMALL))
    rows = advise(there, 2200 * MB)
    assert [row.verdict for row in rows] == ["does not fit", "pays"]
    assert "plain training does not fit in memory; take ckpt for 65.22 samples/s at batch 60 (" in sentence(rows)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (steps("ckpt", SMALL), "because plain training (exact, plain or keep-all) was not measured"),
        (
            [",gpu,net,exact,4,,,-1,,,", *steps("ckpt", SMALL)],
            "ran out of memory wherever it was tried, from batch 4 on",
        ),
        ([step("exact", 2, PLAIN), *steps("ckpt", SMALL)], "no peaks and times at two batch sizes each"),
    ],
)
def test_what_cannot_be_predicted_is_said_with_the_reason(read: Read, lines: list[str], why: str) -> None:
    (there,) = read(*lines)
    answer = sentence(advise(there, 2200 * MB))
    assert "nothing can be predicted" in answer
    assert why in answer


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (steps("exact", PLAIN), "because no method was measured"),
        ([*steps("exact", PLAIN), step("ckpt", 2, SMALL)], "because no method has peaks and times"),
    ],
)
def test_where_no_method_can_be_predicted_plain_trainings_best_is_given(read: Read, lines: list[str], why: str) -> None:
    (there,) = read(*lines)
    rows = advise(there, 2200 * MB)
    assert rows[0].predicted is not None
    best = f"net on gpu: plain training reaches {rows[0].predicted.throughput:.4g} samples/s at batch"
    assert sentence(rows).startswith(best)
    assert why in sentence(rows)
    assert "plain training does not fit in memory; no other" in sentence(advise(there, 10 * MB))


def test_where_memory_does_not_grow_the_largest_batch_that_ran_is_taken(read: Read) -> None:
    flat = Cost(alpha=0, beta=1000 * MB, gamma=0.012, delta=0.200)
    (there,) = read(*steps("exact", PLAIN), *steps("swap", flat))
    rows = advise(there, 2200 * MB)
    swap = by_method(rows)["swap"]
    assert swap.predicted is not None
    assert (swap.predicted.size, swap.verdict, swap.by_ratio) == (12, "does not pay", True)
    assert any("Its memory does not grow" in warning for warning in swap.warnings)
    assert "see the remarks on swap" in sentence(rows)
    json.dumps([row.to_json() for row in rows], allow_nan=False)


def test_peaks_apart_are_those_of_all_rows_of_a_batch_size(read: Read) -> None:
    (found,) = read(*(f",gpu,net,dtr,4,,,10,,{peak}," for peak in (100, 60, 50, 90)))
    assert (found.methods["dtr"].spread, found.methods["dtr"].peaks) == (2.0, {4: 90 * MB})


def test_without_a_limit_what_ran_is_what_fits(read: Read) -> None:
    (there,) = read(*steps("exact", PLAIN), *steps("ckpt", SMALL, (2, 40)))
    assert default_limit(there) == pytest.approx(PLAIN.nbytes(12))


# The command line


KEYS = [
    "network", "hardware", "method", "layers", "hidden", "precision", "source", "limit_bytes", "alpha", "beta", "gamma",
    "delta", "r_memory", "r_time", "intervals", "small_batches", "own_limit_bytes", "score", "point", "predicted_batch",
    "predicted_throughput", "predicted_throughput_range", "taken_batch", "taken_throughput", "measured_batch",
    "measured_throughput", "by_score", "by_ratio", "by_fragments", "sure", "verdict", "warnings",
]  # fmt: skip


@pytest.fixture
def spillway(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[object, str, str]]:
    """Runs `spillway advise` in a folder with measurements of two networks on two kinds of hardware."""
    lines = [
        line
        for network, hardware in (("net", "gpu"), ("wide", "gpu"), ("net", "other"))
        for method, cost in (("exact", PLAIN), ("ckpt", SMALL), ("swap", SLOW))
        for line in steps(method, cost, network=network, hardware=hardware)
    ]
    lines.append(",gpu,alone,exact,4,,,10,,,")
    (tmp_path / "m.csv").write_text("\n".join([COLUMNS, *lines]), "utf-8")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["advise", *map(str, arguments)])
        written = capsys.readouterr()
        return ended.value.code, written.out, written.err

    return run


Command = Callable[..., tuple[object, str, str]]


def test_the_seed_is_that_of_simulated_steps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[dict[str, Any]]()

    def record(workload: str, **options: Any) -> None:
        given.append(options)
        raise SpillwayError("Enough is known.")

    monkeypatch.setattr("spillway.cli.advise.record_workload", record)
    with pytest.raises(SystemExit):
        main(["advise", "stdlib-lm", "--simulate", "a100", "--seed", "7", "--length", "16"])
    assert given == [{"fake": True, "seed": 7, "batch": 2, "length": 16}]


def test_json_is_one_list_of_rows(spillway: Command) -> None:
    code, out, err = spillway("--from", "m.csv", "--memory", "2200MB", "--json")
    assert code == 0, err
    rows: list[dict[str, Any]] = json.loads(out, parse_constant=pytest.fail)
    assert [list(row) for row in rows] == [KEYS] * 10
    assert [(row["network"], row["hardware"]) for row in rows[::3]] == [
        ("net", "gpu"), ("wide", "gpu"), ("net", "other"), ("alone", "gpu"),
    ]  # fmt: skip
    assert [row["verdict"] for row in rows] == ["plain", "pays", "does not pay"] * 3 + ["plain"]
    ckpt = rows[1]
    assert [ckpt[key] for key in ("alpha", "beta", "gamma", "delta")] == pytest.approx(
        [SMALL.alpha, SMALL.beta, SMALL.gamma, SMALL.delta]
    )
    assert [ckpt[key] for key in ("r_memory", "r_time")] == pytest.approx([1, 1])
    assert (ckpt["predicted_batch"], ckpt["measured_batch"]) == (60, 12)


def test_every_network_and_hardware_has_a_sentence_and_a_table(spillway: Command) -> None:
    code, out, err = spillway("--from", "m.csv", "--memory", "2200MB")
    assert code == 0, err
    lines = out.splitlines()
    for about in ("net on gpu", "wide on gpu", "net on other"):
        assert sum(line.startswith(f"{about}: ckpt pays") for line in lines) == 1
    assert sum(line.startswith("alone on gpu: nothing can be predicted") for line in lines) == 1
    assert sum("does not pay" in line for line in lines) == 3
    assert sum(line.startswith("steps may take 2.05 GiB") for line in lines) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Name a workload to measure, or give measurements with --from"),
        (["resnet50", "--from", "m.csv"], "WORKLOAD is for measuring"),
        (["--from", "none.csv"], "none.csv: No such file or directory."),
        (["--from", "."], ".: Is a directory."),
        (["--from", "m.csv", "--memory", "much"], "'much' is not a number of bytes"),
        (["--from", "m.csv", "--memory", "0"], "Steps take more than 0 bytes"),
    ],
)
def test_what_cannot_be_answered_is_one_sentence_and_exit_code_1(
    spillway: Command, arguments: list[str], said: str
) -> None:
    code, out, err = spillway(*arguments)
    assert (code, out) == (1, "")
    assert said in err
    assert len(without_page(err)) == 1


# PAPAYA's own measurements


@pytest.fixture(scope="module")
def published() -> list[Experiment]:
    return read_measurements(shared("data/papaya/measurements_v100.csv"))


def test_of_the_published_methods_score_and_point_have_the_right_sign(published: list[Experiment]) -> None:
    judged = {}
    for there in published:
        rows = advise(there, 12_800 * MB)
        plain = rows[0].measured
        for row in rows:
            if row.by_score is not None and row.measured is not None and plain is not None:
                gains = row.measured.throughput >= plain.throughput
                judged[there.title, there.source, row.method] = (
                    gains,
                    row.by_score,
                    row.by_ratio,
                    row.verdict == "pays",
                )
    assert len(judged) == 26
    assert [name for name, (gains, *said) in judged.items() if said != [gains] * 3] == []
    assert sorted((title.split(",")[0], method) for (title, _, method), said in judged.items() if all(said)) == [
        ("bert-large-cased", "ckpt"), ("bert-large-cased", "ckpt"), ("swin_large", "L1"), ("swin_large", "ckpt"),
        ("transformer_lm_gpt3_medium", "ckpt"),
    ]  # fmt: skip


def test_the_memory_of_dtr_is_warned_of(published: list[Experiment]) -> None:
    (there,) = (one for one in published if one.network == "wide_resnet50_2" and "dtr" in one.methods)
    warned = " ".join(by_method(advise(there, 12_800 * MB))["dtr"].warnings)
    assert "The memory is not linear in the batch: R is 0.847" in warned
    assert "differ by up to 2.02 times" in warned


# Without lines


def without_lines(
    plain: dict[int, float], other: dict[int, float], *, failed: int | None = None, plain_failed: int | None = None
) -> Row:
    """The row of a method, with times alone, seconds by batch; the batch that found no memory."""
    samples = Samples(seconds=other, failed=set() if failed is None else {failed})
    base = Samples(seconds=plain, failed=set() if plain_failed is None else {plain_failed})
    there = Experiment(
        hardware="gpu", network="net", layers="", hidden="", precision="", source="",
        methods={"exact": base, "ckpt": samples},
    )  # fmt: skip
    return by_method(advise(there, 10**9))["ckpt"]


def test_of_methods_without_lines_the_one_that_is_faster_at_its_largest_batch_pays() -> None:
    row = without_lines({4: 1.0}, {4: 1.2, 16: 3.0}, plain_failed=8)
    assert (row.verdict, row.sure, row.predicted) == ("pays", None, None)
    assert row.warnings[-1] == (
        "There are no lines to compare: the verdict is by the largest batches that ran, 5.333 samples/s at 16 and "
        "plain training's 4 at 4."
    )
    assert without_lines({4: 1.0}, {16: 3.0}).warnings[-1].endswith("at 4, of which no larger one was tried.")


@pytest.mark.parametrize(
    ("other", "failed", "verdict"),
    [
        ({16: 5.0}, None, "unknown"),  # a larger batch might be faster
        ({16: 5.0}, 32, "does not pay"),
        ({8: 1.9, 16: 5.0}, 32, "unknown"),  # a smaller one is
        ({16: 4.0}, 32, "pays"),
    ],
)
def test_what_is_slower_without_lines_does_not_pay_only_where_its_largest_batch_is_known(
    other: dict[int, float], failed: int | None, verdict: str
) -> None:
    assert without_lines({4: 1.0}, other, failed=failed).verdict == verdict


def test_a_method_without_a_line_is_held_against_what_is_foretold_of_plain_training(read: Read) -> None:
    (there,) = read(*steps("exact", PLAIN))
    plain = by_method(advise(there, 2200 * MB))["exact"]
    assert plain.predicted is not None
    assert plain.predicted.throughput == pytest.approx(37.5)
    for speed, verdict in ((41, "pays"), (36, "unknown")):
        (there,) = read(*steps("exact", PLAIN), f",gpu,net,ckpt,60,,,{speed},,,")
        assert by_method(advise(there, 2200 * MB))["ckpt"].verdict == verdict


def test_every_published_method_that_is_faster_at_both_largest_batches_has_that_answer() -> None:
    verdicts: dict[str, int] = {}
    for there in read_measurements(shared("data/papaya/measurements_v100.csv")):
        for row in advise(there, 12_800 * MB):
            verdicts[row.verdict] = verdicts.get(row.verdict, 0) + 1
            if row.verdict in ("unknown", "does not pay") and row.fitted is None and "exact" in there.methods:
                times, base = there.methods[row.method].seconds, there.methods["exact"].seconds
                if times and base:
                    assert max(times) / times[max(times)] < max(base) / base[max(base)]
    assert verdicts == {"plain": 174, "pays": 51, "does not pay": 93, "unknown": 260}
