"""Which batch sizes are measured, what memory is fitted to, and what is remembered; without torch."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from spillway.advisor.bench import Trial
from spillway.advisor.campaign import POINTS, Campaign, on_line, steady
from spillway.advisor.fits import fit_line
from spillway.advisor.measurements import Experiment, read_measurements, write_measurements
from spillway.advisor.model import Cost
from spillway.advisor.real import RememberedBench, cache_file
from spillway.advisor.verdict import Accumulation, Best, Verified, accumulation_of, advise, recommended, sentence
from spillway.advisor.ways import ACCUMULATED, DEFAULT, WAYS, accumulated, chosen, way_of
from spillway.errors import SpillwayError, UsageError
from tests.pure.advisor_made import LIMIT, MB, Made, bench, finished, flat_at_first, line


@pytest.mark.parametrize("limit", [500, 1000, 4000])
@pytest.mark.parametrize(("slope", "flat", "fixed"), [(30, 300, 120), (7, 450, 200), (100, 200, 200), (300, 100, 0)])
def test_the_line_is_found_behind_the_flat_part_and_nothing_above_the_limit_is_tried(
    slope: float, flat: float, fixed: float, limit: int
) -> None:
    made = bench(plain=flat_at_first(flat, slope, fixed))
    made.before["plain"] = flat_at_first(0, slope, fixed)
    campaign = finished(Campaign(made, ["plain"], limit * MB))
    assert not campaign.samples("plain").failed
    assert max(slope * size + fixed for size in made.sizes("plain")) <= limit
    peaks = campaign.samples("plain").peaks
    if not peaks:  # the limit is reached before memory is seen to grow
        assert campaign.unknown == {"plain": max(made.sizes("plain"))}
        largest = max(made.sizes("plain"))
        assert (slope * largest + fixed) * (largest + 1) / largest > limit, "one more might not fit"
        return
    found = fit_line(peaks)
    assert (found.slope / MB, found.intercept / MB) == (pytest.approx(slope, rel=0.01), pytest.approx(fixed, abs=3))
    assert len(made.sizes("plain")) == len(set(made.sizes("plain"))) <= 16


def test_sizes_are_doubled_then_gaps_are_halved_until_there_are_enough_points() -> None:
    made = bench(plain=flat_at_first(300, 30, 180))
    campaign = finished(Campaign(made, ["plain"], LIMIT))
    sizes = made.sizes("plain")
    assert sizes[:4] == [1, 2, 4, 8]
    assert max(sizes) == (1000 - 180) // 30
    assert len(campaign.samples("plain").peaks) == POINTS
    assert sorted(campaign.samples("plain").seconds) == sorted(sizes), "times of all sizes count"
    assert 1 not in campaign.samples("plain").peaks, "its peak is that of the update"


def test_what_is_there_all_the_time_does_not_count_for_what_may_not_fit() -> None:
    class Told(Made):
        def measure(self, method: str, size: int) -> Trial:
            return replace(super().measure(method, size), by_kind={"parameters": 100 * MB, "optimizer state": 80 * MB})

    laws = {"plain": line(100 * MB, 200 * MB)}
    blind, told = Made(laws, {"plain": line(1, 1)}), Told(laws, {"plain": line(1, 1)})
    for made in (blind, told):
        finished(Campaign(made, ["plain"], 500 * MB))
    assert (blind.sizes("plain"), told.sizes("plain")) == ([1], [1, 2])


@pytest.mark.parametrize("most", [26, 31, 40, 64])
def test_a_line_that_begins_below_the_largest_size_is_found_between_the_last_two(most: int) -> None:
    made = bench(plain=lambda size: max(300, 10 * size + 240, 20 * size + 40) * MB)  # the last one from 20 on
    made.before["plain"] = lambda size: max(10 * size + 240, 20 * size + 40) * MB
    campaign = finished(Campaign(made, ["plain"], (20 * most + 40) * MB))
    ran = {size for size, trial in campaign.trials["plain"].items() if not trial.ran_out}
    assert most - 2 <= max(ran) <= most
    assert len(made.sizes("plain")) - len(ran) <= (most == 26), "one was tried by a line that had ended"
    assert fit_line(campaign.samples("plain").peaks).slope == pytest.approx(20 * MB, rel=0.01)


def test_a_longest_step_ends_the_doubling_and_is_stretched_until_memory_grows() -> None:
    made = bench(plain=flat_at_first(0, 1, 1), checkpoint=flat_at_first(200, 5, 100))
    campaign = finished(Campaign(made, ["plain", "checkpoint"], LIMIT, longest=0.34))
    assert max(made.sizes("plain")) == 32
    assert max(made.sizes("checkpoint")) > 32, "up to 20 its memory is flat"
    assert fit_line(campaign.samples("checkpoint").peaks).slope == pytest.approx(5 * MB, rel=0.01)
    assert max(0.01 * size + 0.02 for _, size in made.asked) <= 3 * 0.34


def test_of_a_method_whose_memory_never_grows_nothing_is_foretold() -> None:
    made = bench(plain=line(30 * MB, 100 * MB), swap=flat_at_first(500, 0, 0))
    campaign = finished(Campaign(made, ["plain", "swap"], LIMIT, longest=0.5))
    assert campaign.unknown == {"swap": max(made.sizes("swap"))}
    rows = {row.method: row for row in advise(campaign.experiment(), LIMIT)}
    assert (rows["swap"].verdict, rows["swap"].predicted) == ("unknown", None)
    assert rows["swap"].measured is not None


def test_a_method_that_never_fits_is_tried_once() -> None:
    made = bench(plain=line(30 * MB, 100 * MB), swap=line(10 * MB, 995 * MB))
    campaign = finished(Campaign(made, ["plain", "swap"], LIMIT))
    assert made.sizes("swap") == [1]
    assert campaign.trials["swap"][1].ran_out
    assert campaign.samples("swap").failed == {1}
    assert {row.method: row.verdict for row in advise(campaign.experiment(), LIMIT)}["swap"] == "unknown"


def test_memory_that_follows_no_line_is_fitted_all_the_same_and_r_tells() -> None:
    noise = random.Random(3)
    made = bench(plain=line(30 * MB, 100 * MB), dtr=lambda size: (100 + 8 * size) * noise.uniform(0.7, 1.3) * MB)
    campaign = finished(Campaign(made, ["plain", "dtr"], LIMIT, longest=0.4))
    assert on_line(campaign._peaks("dtr")) == []
    row = next(row for row in advise(campaign.experiment(), LIMIT) if row.method == "dtr")
    assert row.fitted is not None
    assert row.fitted.memory.r is not None
    assert row.fitted.memory.r < 0.99
    assert any("not linear" in warning for warning in row.warnings) == (row.fitted.memory.r < 0.97)


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        ({1: 100, 2: 100, 4: 100}, []),
        ({1: 100, 2: 100, 4: 130}, []),
        ({1: 100, 2: 100, 4: 130, 8: 190}, [2, 4, 8]),  # no line yet, but it grows
        ({1: 100, 2: 110, 4: 130, 6: 170, 8: 210}, [4, 6, 8]),
        ({1: 110, 2: 120, 4: 140}, [1, 2, 4]),
        ({1: 110, 2: 120}, [1, 2]),
        ({1: 110}, []),
        ({1: 50, 2: 120, 4: 140, 8: 180}, [1, 2, 4, 8]),  # the first lies below: no several moments explain that
        ({}, []),
    ],
)
def test_memory_is_fitted_where_it_grows(peaks: dict[int, float], expected: list[int]) -> None:
    assert steady(peaks) == expected


def test_batches_that_were_asked_for_are_measured_unless_they_would_not_fit() -> None:
    made = bench(plain=line(100 * MB, 100 * MB))
    campaign = finished(Campaign(made, ["plain"], LIMIT, batches=[16, 2, 4, 6, 32]))
    assert made.sizes("plain") == [2, 4, 6]
    assert campaign.left_out == {"plain": [16, 32]}


def test_a_method_that_cannot_be_measured_is_noted_and_the_others_go_on() -> None:
    made = bench(plain=line(100 * MB, 100 * MB), swap=line(50 * MB, 100 * MB))
    campaign = finished(Campaign(made, ["plain", "checkpoint", "swap"], LIMIT))
    assert campaign.faults == {"checkpoint": "checkpoint cannot be measured."}
    assert set(campaign.experiment().methods) == {"plain", "swap"}
    with pytest.raises(SpillwayError, match="plain cannot be measured"):
        list(Campaign(bench(), ["plain"], LIMIT).run())


def test_what_remains_goes_by_what_methods_took_so_far() -> None:
    now = itertools.count()
    campaign = Campaign(
        bench(plain=line(MB, 1), swap=line(MB, 1), checkpoint=line(MB, 1)), ["plain", "swap", "checkpoint"], LIMIT,
        batches=[1, 2], clock=lambda: float(next(now)),
    )  # fmt: skip
    coming = campaign.run()
    seen = [(next(coming), campaign.current, campaign.remaining)[1:] for _ in range(6)]
    assert [current for current, _ in seen] == ["plain", "plain", "swap", "swap", "checkpoint", "checkpoint"]
    assert seen[0][1] is None
    known = [left for _, left in seen[2:] if left is not None]
    assert known == sorted(known, reverse=True)
    assert known[0] > known[-1] >= 0


# ------------------------------------------------------------------ what is remembered


KEY = {"workload": "made up", "torch": "9"}
FACTS = {"hardware": "paper", "gradient_bytes": 5, "device_bytes": None}


def remembering(made: Made, path: Path, key: Mapping[str, object] = KEY, *, fresh: bool = False) -> RememberedBench:
    return RememberedBench(made, lambda: FACTS, path, key, fresh=fresh)


def test_nothing_is_measured_twice_until_something_it_depends_on_differs(tmp_path: Path) -> None:
    made, path = bench(plain=line(MB, MB)), tmp_path / "folder" / "cache.jsonl"
    first = remembering(made, path).measure("plain", 3)
    again = remembering(made, path)
    assert again.measure("plain", 3) == first
    assert (again.remembered, made.asked) == (1, [("plain", 3)])
    remembering(made, path, fresh=True).measure("plain", 3)
    remembering(made, path, {"workload": "made up", "torch": "10"}).measure("plain", 3)
    assert len(made.asked) == 3


def test_facts_are_asked_for_once(tmp_path: Path) -> None:
    path, made = tmp_path / "cache.jsonl", bench(plain=line(MB, MB))
    assert remembering(made, path).hardware == "paper"
    known = RememberedBench(made, lambda: pytest.fail("they are known"), path, KEY)
    assert (known.facts, known.name) == (FACTS, "made up")


def test_what_is_free_of_a_device_is_asked_for_every_time(tmp_path: Path) -> None:
    path, made = tmp_path / "cache.jsonl", bench(plain=line(MB, MB))
    for free in (7, 5):
        facts = FACTS | {"device_bytes": free}
        assert RememberedBench(made, lambda facts=facts: facts, path, KEY).facts["device_bytes"] == free


def test_to_verify_another_step_is_measured(tmp_path: Path) -> None:
    made = bench(plain=line(MB, MB))
    campaign = Campaign(remembering(made, tmp_path / "cache.jsonl"), ["plain"], LIMIT)
    campaign.measure("plain", 3)
    campaign.measure("plain", 3)
    assert made.asked == [("plain", 3)]
    campaign.measure("plain", 3, again=True)
    assert made.asked == [("plain", 3)] * 2


@pytest.mark.parametrize(
    "damage", [b'{"trial": {"meth', b"\xff\xfe\n", b'{"trial": {"method": "plain", "size": -3}}\n', b"[]"]
)
def test_a_damaged_line_is_measured_again_and_the_others_are_not(tmp_path: Path, damage: bytes) -> None:
    made, path = bench(plain=line(MB, MB)), tmp_path / "cache.jsonl"
    remembering(made, path).measure("plain", 1)
    with path.open("ab") as file:
        file.write(damage)
    remembering(made, path).measure("plain", 2)
    last = remembering(made, path)
    last.measure("plain", 1)
    last.measure("plain", 2)
    assert made.asked == [("plain", 1), ("plain", 2)]


def test_a_foreign_file_is_begun_anew_and_one_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    made, path = bench(plain=line(MB, MB)), tmp_path / "cache.jsonl"
    path.write_text("something else\n")
    remembering(made, path).measure("plain", 1)
    assert json.loads(path.read_text().splitlines()[0]) == {"key": KEY}
    assert remembering(made, tmp_path).measure("plain", 1).peak == 2 * MB  # a directory


def test_running_out_of_memory_is_not_remembered(tmp_path: Path) -> None:
    class Full(Made):
        def measure(self, method: str, size: int) -> Trial:
            super().measure(method, size)
            return Trial(method=method, size=size, peak=None, seconds=None)

    made = Full({"plain": line(MB, MB)}, {"plain": line(1, 1)})
    for _ in range(2):
        assert remembering(made, tmp_path / "cache.jsonl").measure("plain", 1).ran_out
    assert len(made.asked) == 2


def test_the_cache_stands_where_the_standard_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file(KEY).parent == tmp_path / "spillway"
    assert cache_file(KEY) != cache_file(KEY | {"torch": "10"})
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_file(KEY).is_absolute()


def test_for_a_user_without_a_home_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where neither HOME nor the system says
    made = bench(plain=line(MB, MB))
    for _ in range(2):
        assert remembering(made, cache_file(KEY)).measure("plain", 1).peak == 2 * MB
    assert made.asked == 2 * [("plain", 1)]
    assert not [*tmp_path.iterdir()]


# ------------------------------------------------------------------ what follows


def compared(plain: Cost, method: Cost) -> Experiment:
    costs = {"plain": plain, "checkpoint": method}
    made = Made(
        {name: cost.nbytes for name, cost in costs.items()}, {name: cost.seconds for name, cost in costs.items()}
    )
    return finished(Campaign(made, list(costs), LIMIT)).experiment()


SLOWER = Cost(alpha=10 * MB, beta=100 * MB, gamma=0.02, delta=1.0)
PLAIN = Cost(alpha=90 * MB, beta=100 * MB, gamma=0.015, delta=1.0)


def test_accumulating_is_offered_where_a_larger_batch_is_the_only_gain() -> None:
    rows = advise(compared(PLAIN, SLOWER), LIMIT)
    best = recommended(rows)
    assert best is not None
    assert best.method == "checkpoint"
    offered = accumulation_of(rows, 40 * MB)
    assert offered is not None
    assert best.predicted is not None
    assert (offered.micro, offered.count) == (9, 10), "90 samples, 9 at a time beside the gradients"
    assert offered.least == pytest.approx(9 / (9 * 0.015 + 1.0))
    assert offered.most == pytest.approx(90 / (90 * 0.015 + 1.0))
    assert "reaches 0.25 to 1.19 times that" in offered.sentence()
    assert "try such a step" in offered.sentence()
    assert json.loads(json.dumps(offered.to_json()))["micro_batches"] == 10


def test_accumulating_leaves_room_for_the_gradients() -> None:
    offered = accumulation_of(advise(compared(PLAIN, SLOWER), LIMIT), 500 * MB)
    assert offered is not None
    assert offered.micro == 4
    assert accumulation_of(advise(compared(PLAIN, SLOWER), LIMIT), 950 * MB) is None


def test_accumulating_is_not_offered_for_a_method_that_is_faster_per_sample_or_does_not_pay() -> None:
    faster = Cost(alpha=10 * MB, beta=100 * MB, gamma=0.01, delta=1.0)
    worse = Cost(alpha=80 * MB, beta=100 * MB, gamma=0.9, delta=1.0)
    for method in (faster, worse):
        assert accumulation_of(advise(compared(PLAIN, method), LIMIT), 0) is None


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (10.0, "gives the same gain without checkpoint"),
        (9.9, "gives the same gain"),
        (7.0, "does not replace checkpoint"),
    ],
)
def test_a_measured_step_decides_whether_accumulating_gives_the_same(measured: float, says: str) -> None:
    best = Best(size=80, throughput=10.0)
    offered = Accumulation(
        method="checkpoint", best=best, micro=8, count=10, least=5.0, most=11.0,
        measured=measured, seen="measured",
    )  # fmt: skip
    assert says in offered.sentence()
    assert "10 accumulated batches of 8" in offered.sentence()


def test_a_prediction_stands_beside_what_was_measured() -> None:
    row = advise(compared(PLAIN, SLOWER), LIMIT)[0]
    assert row.fitted is not None
    good = Verified.of("plain", row.fitted, Trial(method="plain", size=10, peak=1010 * MB, seconds=1.2), "measured")
    assert good.sentence(LIMIT).endswith("measured 8.333 (-4.2%) in 963.21 MiB (+1.0%), which is more than 953.67 MiB.")
    assert good.sentence(2 * LIMIT).endswith("measured 8.333 (-4.2%) in 963.21 MiB (+1.0%).")
    full = Verified.of("plain", row.fitted, Trial(method="plain", size=10, peak=None, seconds=None), "simulated")
    assert full.sentence(LIMIT).endswith("it took more than 953.67 MiB.")
    assert full.to_json()["simulated_throughput"] is None


def test_what_is_written_gives_the_same_answer_when_it_is_read(tmp_path: Path) -> None:
    made = bench(plain=flat_at_first(300, 30, 180), checkpoint=flat_at_first(300, 10, 190), swap=line(MB, 999 * MB))
    campaign = finished(Campaign(made, ["plain", "checkpoint", "swap"], LIMIT))
    peaks = {name: campaign._peaks(name) for name in campaign.methods}
    write_measurements(
        tmp_path / "m.csv",
        [campaign.experiment()],
        [{k: {s: round(p) for s, p in v.items()} for k, v in peaks.items()}],
    )
    (read,) = read_measurements(tmp_path / "m.csv")
    direct, again = advise(campaign.experiment(), LIMIT), advise(read, LIMIT)
    assert sentence(direct) == sentence(again)
    assert [row.verdict for row in direct] == [row.verdict for row in again]
    assert "300.0," in (tmp_path / "m.csv").read_text(), "peaks off the line are there to be looked at"


# ------------------------------------------------------------------ names


def test_the_default_methods_are_papayas_and_plain_comes_first() -> None:
    assert [way.name for way in chosen()] == list(DEFAULT)
    assert [way.name for way in chosen(["swap", "swap", "plain"])] == ["plain", "swap"]
    assert [way.name for way in chosen(lossless=True)] == ["plain", "checkpoint", "swap", "checkpoint-swap"]
    assert {name for name, way in WAYS.items() if way.lossy} == {"compress", "compress-swap", "checkpoint-compress"}
    assert [name for name, way in WAYS.items() if way.waits] == ["swap"]


@pytest.mark.parametrize(
    ("names", "lossless", "says"),
    [
        (["fast"], False, "no method 'fast'"),
        ([], False, "nothing to compare"),
        (["compress"], True, "nothing to compare"),
    ],
)
def test_methods_that_make_no_comparison_are_refused(names: list[str], lossless: bool, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        chosen(names, lossless=lossless)


def test_a_way_that_accumulates_is_named_by_its_micro_batch() -> None:
    assert way_of(accumulated(8)).micro == 8
    for name in (ACCUMULATED, f"{ACCUMULATED}@0", f"{ACCUMULATED}@x", "swap@3"):
        with pytest.raises(UsageError, match="There is no method"):
            way_of(name)


def trials() -> Iterator[Trial]:
    yield Trial(method="plain", size=3, peak=5, seconds=0.5, by_kind={"input": 2})
    yield Trial(method="plain", size=3, peak=None, seconds=None)


@pytest.mark.parametrize("trial", list(trials()))
def test_a_trial_goes_to_json_and_back(trial: Trial) -> None:
    assert Trial.from_json(json.loads(json.dumps(trial.to_json()))) == trial
    for broken in ({}, trial.to_json() | {"size": 0}, trial.to_json() | {"peak": "much"}, inf):
        with pytest.raises(ValueError, match="trial"):
            Trial.from_json(broken)
