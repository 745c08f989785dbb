"""Sweeps over depth, width and devices, and where a method begins to pay."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf, isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.advisor.gains import (
    Crossover,
    Sweep,
    SweepPoint,
    crossing,
    gains,
    over_devices,
    sweeps_of,
)
from spillway.advisor.measurements import Experiment, Samples, read_measurements
from spillway.advisor.model import Cost, ring_seconds
from spillway.advisor.verdict import advise, default_limit
from tests.shared import shared

LIMIT = 16e9


def crossover(sweep: Sweep, method: str | None = None) -> Crossover | None:
    return crossing(gains(sweep, method, SweepPoint.predicted))


def measured_crossover(sweep: Sweep, method: str | None = None) -> Crossover | None:
    return crossing(gains(sweep, method, SweepPoint.measured))


costs = st.builds(
    Cost, alpha=st.floats(1e6, 1e9), beta=st.floats(0, 8e9), gamma=st.floats(1e-3, 1e-1), delta=st.floats(0, 1)
)


def samples(cost: Cost, sizes: Sequence[int] = (1, 2, 3, 4, 6, 8)) -> Samples:
    """Steps that go by the law."""
    return Samples(
        seconds={size: cost.seconds(size) for size in sizes}, peaks={size: cost.nbytes(size) for size in sizes}
    )


def experiment(layers: float = 24, hidden: float = 1024, *, source: str = "", **methods: Cost | Samples) -> Experiment:
    return Experiment(
        hardware="card", network="net", layers=f"{layers}", hidden=f"{hidden}", precision="", source=source,
        methods={
            name: samples(method) if isinstance(method, Cost) else method for name, method in methods.items()
        },
    )  # fmt: skip


def sweep(*pairs: tuple[float, dict[str, Cost]]) -> Sweep:
    return Sweep(
        over="depth",
        points=tuple(SweepPoint(value=value, rows=advise(experiment(value, **costs), LIMIT)) for value, costs in pairs),
    )  # fmt: skip


# Where a method begins to pay


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 5)), min_size=1, max_size=8))
def test_a_crossover_is_where_the_gain_passes_1_for_good(steps: list[tuple[float, float]]) -> None:
    value, pairs = 0.0, []
    for step, gain in steps:
        value += step
        pairs.append((value, gain))
    found = crossing(pairs)
    if found is None:
        assert pairs[-1][1] < 1
        return
    assert all(gain >= 1 for value, gain in pairs if value >= found.first)
    before = [pair for pair in pairs if pair[0] < found.first]
    if found.below is None:
        assert (found.at, before) == (None, [])
        return
    assert before[-1][0] == found.below
    assert before[-1][1] < 1
    assert found.at is not None
    assert found.below < found.at <= found.first or isclose(found.at, found.below)


@given(st.lists(st.tuples(costs, costs), min_size=1, max_size=4))
def test_a_method_is_said_to_pay_exactly_where_its_highest_throughput_is_the_higher_one(
    pairs: list[tuple[Cost, Cost]],
) -> None:
    swept = sweep(*((layers, {"plain": plain, "ckpt": method}) for layers, (plain, method) in enumerate(pairs, 1)))
    found = crossover(swept, "ckpt")
    pays = [next(row for row in point.rows if row.method == "ckpt").verdict == "pays" for point in swept.points]
    known = [
        (point.value, does) for point, does in zip(swept.points, pays, strict=True)
        if point.predicted("ckpt") is not None
    ]  # fmt: skip
    if found is None:
        assert not known or not known[-1][1]
    else:
        assert all(does for value, does in known if value >= found.first)
        assert (found.below is None) is all(does for _, does in known)
        assert all(not does for value, does in known if value == found.below)


def test_the_place_between_two_values_is_on_the_line_between_their_gains() -> None:
    assert crossing([(8, 0.5), (16, 0.75), (32, 1.25)]) == Crossover(first=32, below=16, at=24)
    assert crossing([(8, 0.5), (16, 2.0), (24, 0.9), (32, 1.0)]) == Crossover(first=32, below=24, at=32)
    assert crossing([(8, 0.5), (16, inf)]) == Crossover(first=16, below=8, at=None)
    assert crossing([(8, 1.5), (16, 1.2)]) == Crossover(first=8, below=None, at=None)
    assert crossing([(8, 1.5), (16, 0.2)]) is None
    assert crossing([]) is None


def test_what_found_no_memory_counts_and_what_nobody_tried_does_not() -> None:
    ran, out = Samples(seconds={4: 1.0}), Samples(failed={4})

    def gain(**methods: Samples) -> float | None:
        point = SweepPoint(value=1, rows=advise(experiment(**methods), LIMIT))
        assert point.predicted("ckpt") is None
        return point.measured("ckpt")

    assert gain(plain=ran, ckpt=Samples(seconds={8: 1.0})) == 2.0
    assert gain(plain=out, ckpt=ran) == inf
    assert gain(plain=ran, ckpt=out) == 0.0
    assert gain(plain=out, ckpt=out) is None
    assert gain(plain=ran) is None
    assert gain(ckpt=ran) is None
    assert SweepPoint(value=1, rows=()).methods == []


def test_without_a_method_the_best_one_of_each_point_counts() -> None:
    plain, slow = Cost(alpha=1e9, beta=0, gamma=0.1, delta=1), Cost(alpha=1e9, beta=0, gamma=0.2, delta=1)
    fast = Cost(alpha=1e8, beta=0, gamma=0.1, delta=1)
    swept = sweep((2, {"plain": plain, "a": slow, "b": slow}), (4, {"plain": plain, "a": slow, "b": fast}))
    assert crossover(swept, "a") is None
    assert crossover(swept) == crossover(swept, "b")
    assert (found := crossover(swept)) is not None
    assert (found.below, found.first) == (2, 4)
    assert measured_crossover(swept, "a") is None
    assert swept.methods == ["a", "b"]


# Sweeps in a file


def test_experiments_that_differ_in_one_thing_make_a_sweep() -> None:
    plain, method = Cost(alpha=1e9, beta=0, gamma=0.1, delta=1), Cost(alpha=1e8, beta=0, gamma=0.2, delta=1)
    shapes = [(24, 1024), (12, 1024), (24, 512), (48, 1024), (7, 7)]
    answers = [advise(experiment(*shape, plain=plain, ckpt=method), LIMIT) for shape in shapes]
    answers.append(advise(experiment(96, 1024, source="elsewhere", plain=plain, ckpt=method), LIMIT))
    answers.append(advise(experiment(96, 256, plain=plain), LIMIT))
    found = {(one.over, one.unit): [point.value for point in one.points] for one in sweeps_of(answers)}
    assert found == {("depth", "layers"): [12, 24, 48], ("width", "hidden size"): [512, 1024]}
    assert [one.name for one in sweeps_of(answers)] == ["net, hidden 1024 on card", "net, 24 layers on card"]
    assert sweeps_of([]) == sweeps_of([[], *answers[:1]]) == []


def test_the_papers_crossovers_stand_in_its_measurements() -> None:
    experiments = [
        there for there in read_measurements(shared("data/papaya/measurements_v100.csv"))
        if there.source.startswith("text_classification_fp16/v100/results/results_")
    ]  # fmt: skip
    found = sweeps_of([advise(there, default_limit(there)) for there in experiments])
    published = {
        one.over: (measured_crossover(one), gains(one, "ckpt", SweepPoint.measured))
        for one in found if one.name.endswith(("results_depth)", "results_hidden_size)"))
        and "model_size" not in one.name
    }  # fmt: skip
    starts = {over: start for over, (start, _) in published.items()}
    assert starts["depth"] == Crossover(first=34, below=30, at=pytest.approx(32.48, abs=0.01))
    assert starts["width"] == Crossover(first=1344, below=1280, at=pytest.approx(1322.2, abs=0.1))
    assert dict(published["depth"][1])[34] == pytest.approx(102.7 / 99.1, abs=1e-3)


# Devices


@given(st.dictionaries(st.sampled_from(("plain", "ckpt", "swap")), costs, min_size=1), st.integers(0, 10**10))
def test_one_device_is_as_it_was_and_with_more_every_delta_has_the_exchange_in_it(
    methods: dict[str, Cost], nbytes: int
) -> None:
    rows = advise(experiment(**methods), LIMIT)
    swept = over_devices(rows, [4, 1, 2, 4], nbytes, 25e9, 20e-6)
    assert [point.value for point in swept.points] == [1, 2, 4]
    assert list(swept.points[0].rows) == rows
    for point in swept.points[1:]:
        more = ring_seconds(nbytes, int(point.value), bytes_per_second=25e9, latency=20e-6)
        for before, after in zip(rows, point.rows, strict=True):
            assert before.fitted is not None
            assert after.fitted is not None
            assert after.fitted.cost == before.fitted.cost.with_communication(more)
            assert after.fitted.time.at(3) == pytest.approx(before.fitted.time.at(3) + more)
            assert after.to_json()["delta"] == after.fitted.cost.delta
            assert after.score == before.score
            assert after.measured is None
            if after.predicted is not None:
                assert after.predicted.throughput <= (before.predicted or after.predicted).throughput
            if before.point is not None:
                assert after.point is not None
                assert after.point <= before.point


@given(costs, costs, st.integers(0, 10**10))
def test_with_every_device_the_gain_comes_nearer_to_the_ratio_of_the_batches(
    plain: Cost, method: Cost, nbytes: int
) -> None:
    # Section 6.2: what is exchanged is shared by the samples of a batch, and the larger batch has the more of them.
    rows = advise(experiment(plain=plain, ckpt=method), LIMIT)
    theirs, mine = (row.predicted for row in rows)
    if theirs is None or mine is None:
        return
    batches = mine.size / theirs.size
    found = gains(over_devices(rows, [1, 2, 4, 8], nbytes, 25e9), "ckpt", SweepPoint.predicted)
    apart = [abs(gain - batches) for _, gain in found]
    assert len(apart) == 4
    assert all(later <= earlier + 1e-9 * batches for earlier, later in pairwise(apart))
