"""PAPAYA's figures, from its published measurements."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.record import Result, Skipped
from papers.papaya import here, implications, published
from papers.papaya.published import MEMORY, SWEEPS, start
from papers.papaya.simulated import kendall, largest_batch
from spillway.advisor.bench import AbstractBench, Trial
from spillway.advisor.campaign import Campaign
from spillway.advisor.measurements import Experiment, Samples
from spillway.advisor.model import Cost
from spillway.advisor.verdict import advise
from tests.cpu.benchmarks_quick import named, quick, rows_by
from tests.shared import shared


def samples(speed: float | None) -> Samples:
    """Four samples at so many a second; None found no memory."""
    return Samples(failed={4}) if speed is None else Samples(seconds={4: 4 / speed})


def layered(speeds: dict[int, dict[str, float | None]]) -> list[Experiment]:
    """Experiments of the first sweep, with the samples per second of each method by the number of layers."""
    return [
        Experiment(
            hardware="v100", network="bert-large-cased", layers=str(layers), hidden="1024", precision="",
            source=SWEEPS[0].source, methods={name: samples(speed) for name, speed in methods.items()},
        )
        for layers, methods in speeds.items()
    ]  # fmt: skip


def test_the_published_figures_are_found_again_but_for_three_averages() -> None:
    shared("data/papaya/measurements_v100.csv")
    result = quick("papaya_paper")
    missed = [check.what.partition(":")[0] for check in result.checks if not check.met]
    assert missed == ["ResNet-50", "Wide-ResNet-50", "GPT-Small"], "of maxima, as the text has it"
    rows = rows_by(result, "what")
    assert rows["ResNet-50: largest batch, x plain"]["here"] == "2.63"
    assert rows["Wide-ResNet-50: throughput, of plain"]["here"] == "48.8% highest, 46.1% at the largest batch"
    assert [rows[f"{sweep.name}: a method is faster from"]["here"] for sweep in SWEEPS] == ["34", "1344", "280", "256"]
    ratios = {what: row["ratio"] for what, row in rows.items() if row.get("ratio") is not None and row["ratio"] > 1}
    assert ratios == {
        "transformer_lm_gpt3_medium, ckpt": pytest.approx(1.303, abs=1e-3),
        "swin_large, O1, ckpt": pytest.approx(1.370, abs=1e-3),
        "swin_large, O1, L1": pytest.approx(2.110, abs=1e-3),
        "bert-large-cased, 36 layers, hidden 1024, ckpt": pytest.approx(1.309, abs=1e-3),
        "bert-large-cased, 48 layers, hidden 1024, ckpt": pytest.approx(2.941, abs=1e-3),
    }


def test_gpt_trains_faster_with_recomputing_from_eighteen_layers_on(tmp_path: Path) -> None:
    path = shared("data/papaya/gpt_depth.csv")
    found = published.gpt_depth(path)
    assert found is not None
    assert (found.start, found.foretold) == (18, 24)
    assert found.gains[16] == pytest.approx(0.918, abs=1e-3)
    assert found.gains[18] == pytest.approx(1.206, abs=1e-3)
    assert found.held_out < 0.05
    assert published.gpt_depth(tmp_path / "none.csv") is None
    slower = tmp_path / "slower.csv"  # a planted fault: every step of recomputing takes a third longer
    lines = path.read_text("utf-8").splitlines()
    slow = [line.split(",") for line in lines[1:]]
    for cells in slow:
        cells[11] = f"{float(cells[11]) * (4 / 3 if cells[7] == 'True' else 1):.4f}"
    slower.write_text("\n".join([lines[0], *(",".join(cells) for cells in slow)]), "utf-8")
    wrong = published.gpt_depth(slower)
    assert wrong is not None
    assert wrong.start == 31


def test_without_the_measurements_there_is_nothing_to_show(tmp_path: Path) -> None:
    with pytest.raises(Skipped, match="there is no"):
        published.run(published.Size(data=tmp_path / "none.csv"), lambda text: None)


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ({8: (9, 5), 16: (8, 5), 24: (4, 5)}, 24),
        ({8: (9, 5), 16: (4, 5), 24: (8, 5), 32: (4, 5)}, 32),  # from there on, and not once
        ({8: (9, 5), 16: (8, 5)}, None),
        ({8: (9, 5), 16: (None, 5)}, 16),  # plain ran nowhere
    ],
)
def test_a_sweep_starts_where_a_method_is_faster_from_then_on(
    speeds: dict[int, Sequence[float | None]], expected: int | None
) -> None:
    named = {layers: dict(zip(("exact", "ckpt"), pair, strict=True)) for layers, pair in speeds.items()}
    assert start(SWEEPS[0], layered(named)) == expected


def test_networks_of_another_sweep_do_not_count() -> None:
    experiments = layered({8: {"exact": 9.0}})
    assert [sweep.size(experiments[0]) for sweep in SWEEPS] == [8, None, None, None]


def test_of_exact_lines_a_quarter_of_the_sizes_foretells_the_rest() -> None:
    cost = Cost(alpha=100e6, beta=800e6, gamma=0.01, delta=0.2)
    sizes = range(1, 121)
    samples = Samples(
        seconds={size: cost.seconds(size) for size in sizes}, peaks={size: cost.nbytes(size) for size in sizes}
    )
    assert cost.largest(MEMORY) == pytest.approx(120)
    errors = [published._error(samples, random.Random(seed)) for seed in range(5)]
    for error in errors:
        # A draw with the largest batch in it is compared with the largest that is left.
        assert error == pytest.approx(0, abs=0.01)
    drawn = published._quarter(samples.seconds, random.Random(0))
    assert len(drawn) == 29
    assert min(drawn) > 3
    assert len(published._quarter({1: 1.0, 2: 2.0, 3: 3.0}, random.Random(0))) == 2


@pytest.mark.long
def test_the_model_holds_here_on_a_tiny_network() -> None:
    result = quick("papaya_here")
    rows = rows_by(result, "method")
    assert set(rows) == {"plain", "checkpoint"}
    by_name = {check.what.partition(": ")[2]: check for check in result.checks}
    assert by_name["1 - R of memory, the worst method"].met
    assert by_name["intercept of memory off what is there without a batch, the worst method"].met
    assert 0 < rows["checkpoint"]["alpha"] < rows["plain"]["alpha"]
    for row in rows.values():
        assert row["fastest"] >= row["measured"], "the trial at the largest batch is one of them"
        assert 0 <= row["left_out"] <= 3
        assert row["without_reason"] == 0


def test_the_recommended_method_is_held_against_every_trial_at_any_batch() -> None:
    class Bent(AbstractBench):
        name, hardware = "bent", "paper"

        def measure(self, method: str, size: int) -> Trial:
            by_kind = {"activations": 8 * size, "input": size}
            seconds = size / 4 if size < 6 else size  # at larger batches four times as long
            return Trial(method=method, size=size, peak=max(30, 10 * size), seconds=seconds, by_kind=by_kind)

    campaign = Campaign(Bent(), ["plain"], 100, batches=[1, 2, 4, 6, 8])
    list(campaign.run())
    network = here.Network(workload="bent", limit=100)
    (row,) = advise(campaign.experiment(), 100)
    before = here._before(campaign, row)
    campaign.trials["plain"][10] = Trial(method="plain", size=10, peak=100, seconds=10.0)
    tried = here._tried(network, campaign, row, *before)
    assert (tried.throughput, tried.fastest) == (1, 4)
    assert tried.advice.taken is not None
    assert (tried.advice.taken.size, here.pairs(row)) == (1, [("plain", 10), ("plain", 1)]), (
        "measured to be the faster one"
    )
    assert here.behind([tried], here._largest, [tried.throughput]) == 0
    assert here.behind([tried], here._largest, [tried.fastest]) == pytest.approx(0.75)
    assert here.behind([tried], here._taken, [tried.fastest]) == 0
    assert max(here.behind_of([tried]).values()) <= here.RECOMMENDED
    *_, held = here.behind_of([replace(tried, taken=tried.there)]).values()
    assert held > here.RECOMMENDED, "at its largest batch"
    assert tried.left_out.count == len(campaign.samples("plain").off_line) > 0


def test_where_plain_training_does_not_run_what_runs_pays() -> None:
    rows: list[dict[str, object]] = [
        {"method": "plain", "taken": None, "fastest": None, "said": True},
        {"method": "checkpoint", "taken": 5.0, "fastest": 5.0, "said": True},
        {"method": "swap", "taken": 4.0, "fastest": 4.0, "said": False},
    ]
    wrong, _ = here._of_verdicts("net", rows, pays=True)
    assert wrong.measured == 1, "swap runs, and was not said to pay"
    rows[0] |= {"taken": 4.5, "fastest": 4.5}
    wrong, beside = here._of_verdicts("net", rows, pays=True)
    assert (wrong.measured, beside.measured) == (0, 0.9)


def test_a_size_is_left_out_of_the_line_for_another_moment_of_its_peak_and_for_nothing_else() -> None:
    def trial(size: int, peak: int, gradients: int = 0, before: int | None = None) -> Trial:
        by_kind = {"gradients": gradients}
        return Trial(method="plain", size=size, peak=peak, seconds=1.0, by_kind=by_kind, before_update=before)

    line = {size: trial(size, 10 * size) for size in (4, 6, 8)}
    updating, later, wrong = trial(1, 30, 0, 25), trial(2, 31, 5), trial(3, 50)
    assert here.left_out(line, {4, 6, 8}) == here.LeftOut(count=0, without_reason=0, r=pytest.approx(1))
    found = here.left_out({1: updating, 2: later, **line}, {4, 6, 8})
    assert (found.count, found.without_reason) == (2, 0)
    found = here.left_out({1: updating, 3: wrong, **line}, {4, 6, 8})
    assert (found.count, found.without_reason) == (2, 1)
    assert found.r is not None
    assert found.r < 0.95
    crossing = {**line, 4: trial(4, 40, gradients=5)}
    assert here.left_out({2: later, **crossing}, {4, 6, 8}).without_reason == 0, "one of both lines"


def test_a_method_that_does_not_do_what_is_said_of_it_is_counted() -> None:
    def judged(*rows: tuple[float | None, bool]) -> list[bool]:
        told = [
            {"method": method, "taken": taken, "fastest": taken, "said": said, "without_reason": 0}
            for method, (taken, said) in zip(("plain", "checkpoint", "swap"), rows, strict=False)
        ]
        return [check.met for check in here._of_verdicts("x", told, pays=True)]

    assert judged((10.0, True), (12.0, True)) == [True, True, True]
    assert judged((10.0, True), (12.0, False)) == [True, False, True], "it pays, and is not said to"
    assert judged((10.0, True), (9.0, True)) == [True, False, False]
    assert judged((10.0, True), (10.2, True), (None, False)) == [True, True, False], "by too little"
    left = [{"method": "plain", "taken": 1.0, "said": True, "without_reason": 2}]
    assert next(here._of_verdicts("x", left, pays=False)).met is False


@pytest.mark.long
def test_networks_where_a_method_pays_are_measured_as_the_others_are() -> None:
    benchmark = named("papaya_pays")
    result = benchmark.measured(benchmark.quick, lambda text: None)
    assert result.facts["pays"] == ["stdlib-lm"]
    assert "medians of 1 count" in result.notes[0]
    assert [row["method"] for row in result.rows] == ["plain", "checkpoint"]
    (share,) = (check for check in result.checks if "over the fastest method" in check.what)
    plain, other = result.rows
    if other["taken"] is not None:  # on a busy machine its seconds may lie on no line, and nothing is to be taken
        assert share.measured == pytest.approx(plain["fastest"] / other["taken"])


def test_trials_at_the_largest_batch_take_turns_and_the_median_counts() -> None:
    asked: list[tuple[str, int]] = []
    seconds = iter([5.0, 1.0, 3.0, 2.0, 4.0, 9.0])

    class Uneven(AbstractBench):
        name, hardware = "uneven", "paper"

        def measure(self, method: str, size: int) -> Trial:
            asked.append((method, size))
            return Trial(method=method, size=size, peak=size, seconds=next(seconds))

    campaign = Campaign(Uneven(), ["plain", "swap"], 100, batches=[1])
    pairs = [("plain", 8), ("swap", 9)]
    here._in_turn(campaign, pairs, 3, lambda text: None)
    assert asked == pairs * 3
    assert (campaign.trials["plain"][8].seconds, campaign.trials["swap"][9].seconds) == (4.0, 2.0)
    assert here._fastest(campaign) == ("swap", 9)


def test_the_fastest_trial_is_measured_again_until_it_was() -> None:
    lucky = {1: [0.1, 1.0, 1.0, 1.0], 2: [0.5, 2.0, 2.0, 2.0], 4: [4.0] * 4}

    class Lucky(AbstractBench):
        name, hardware = "lucky", "paper"

        def measure(self, method: str, size: int) -> Trial:
            return Trial(method=method, size=size, peak=size, seconds=lucky[size].pop(0))

    campaign = Campaign(Lucky(), ["plain"], 100, batches=[1])
    for size in lucky:
        campaign.measure("plain", size)
    here._again(campaign, [("plain", 4)], 3, lambda text: None)
    assert {size: trial.seconds for size, trial in campaign.trials["plain"].items()} == {1: 1.0, 2: 2.0, 4: 4.0}


@pytest.mark.parametrize(("low", "high", "expected"), [(4, 16, 13), (5, 5, 5), (8, 10, 10), (1, 2, 2)])
def test_a_prime_batch_is_chosen_among_those_that_were_fitted(low: int, high: int, expected: int) -> None:
    assert here.prime_between(low, high) == expected


@pytest.mark.long
def test_the_five_models_are_simulated() -> None:
    result = quick("papaya_simulated")
    assert {row["model"] for row in result.rows} == {"ResNet-50", "Bert-Large"}
    for name in ("ResNet-50", "Bert-Large"):
        rows = rows_by(replace(result, rows=[row for row in result.rows if row["model"] == name]), "method")
        assert rows["plain"]["batch"] < rows["compress"]["batch"]
    assert result.checks[-1].what.endswith("R below 0.97")
    assert result.checks[-1].met


def test_ranks_agree_by_pairs() -> None:
    def row(mine: float, paper: float | None) -> dict[str, float | None]:
        return {"throughput": mine, "paper_throughput": paper}

    assert kendall([row(3, 30), row(2, 20), row(1, 10)], "throughput") == 1
    assert kendall([row(3, 10), row(2, 20), row(1, 30)], "throughput") == -1
    assert kendall([row(3, 30), row(2, 10), row(1, 20), row(9, None)], "throughput") == pytest.approx(1 / 3)
    assert kendall([row(1, 2)], "throughput") is None


@pytest.mark.parametrize("limit", [999, 1000, 1005, 1019, 5000])
@pytest.mark.parametrize("guess", [1, 7, 400])
def test_the_largest_batch_is_found_where_peaks_bend(limit: int, guess: int) -> None:
    class Bent(AbstractBench):
        asked = 0

        def measure(self, method: str, size: int) -> Trial:
            self.asked += 1
            return Trial(method=method, size=size, peak=max(1000 + size // 9, 700 + 20 * size), seconds=1.0)

    bench = Bent()
    largest = largest_batch(bench, "plain", limit, guess)
    fits = [size for size in range(1, 500) if max(1000 + size // 9, 700 + 20 * size) <= limit]
    assert largest == max(fits, default=0)
    assert bench.asked < 40


@pytest.mark.long
def test_the_implications_are_swept() -> None:
    result = quick("papaya_implications")
    devices = [name for name in (implications.DEVICES, implications.FITTED) for _ in range(8)]
    assert [row["sweep"] for row in result.rows] == ["layers"] * 4 + ["hidden size"] * 2 + devices
    for name in (implications.DEVICES, implications.FITTED):
        gains = [row["gain"] for row in result.rows if row["sweep"] == name and row["method"] == "checkpoint"]
        assert gains == sorted(gains)


def test_implications_are_held_against_where_and_in_which_order_methods_pay() -> None:
    def missed(checkpoint: list[float], compress: list[float], on_eight: float = 1.8) -> list[str]:
        rows = [
            {"sweep": over, "value": value * times, "method": method, "gain": gain, "only": "", "paper": paper}
            for over, times in (("layers", 1), ("hidden size", 40))
            for method, gains in (("checkpoint", checkpoint), ("compress", compress))
            for value, gain, paper in zip((24, 30, 36, 42), gains, (0.8, 0.9, 1.1, 1.3), strict=True)
        ]
        devices = [
            {"sweep": "devices", "value": count, "method": "checkpoint", "gain": gain, "only": "", "paper": None}
            for count, gain in ((1, 0.9), (8, on_eight))
        ]
        result = Result(title="", columns=[], rows=[*rows, *devices])
        return [check.what for check in implications.BENCHMARK.judge(result) if not check.met]

    right, later = [0.8, 0.9, 1.1, 1.3], [0.7, 0.8, 0.95, 1.1]
    of_compress = [
        f"{over}: gains on the other side of 1 than the published, of 8" for over in ("layers", "hidden size")
    ]
    assert missed(right, later) == of_compress, "compression has the gains of checkpoints as published ones here"
    assert missed(right, right) == []
    for wrong in ("compression pays earlier", "gains on the other side"):
        assert any(wrong in what for what in missed([0.6, 0.7, 0.9, 1.02], right))
    assert any("off the published 34" in what for what in missed([1.05, 1.1, 1.2, 1.3], [1.0, 1.1, 1.2, 1.3]))
    assert missed(right, right, 2.59) == ["devices: gain of checkpoints on 8, off the published 1.739"]
    assert any("falls" in what for what in missed([0.8, 1.2, 1.1, 1.3], right))
