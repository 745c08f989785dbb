"""PAPAYA's two implications on a simulated V100 (section 6): methods pay from some depth, width, number of devices on.

BERT by layers and by hidden size, under plain training, checkpoints and compression, each at its largest batches;
BERT-large on several devices that exchange gradients in a ring. What the paper measured stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from papers.papaya.published import DATA, MEMORY, SWEEPS
from papers.papaya.published import Sweep as Published
from papers.papaya.simulated import V100, AsTimed, experiment_of, read_published, sampled, steps_of
from spillway.advisor.gains import Crossover, Sweep, SweepPoint, crossing, over_devices
from spillway.advisor.gains import gains as gains_of
from spillway.advisor.measurements import Experiment, read_measurements
from spillway.advisor.verdict import Row as Advice
from spillway.advisor.verdict import advise
from spillway.calibration.named_device import device_of
from spillway.ir import Kind
from spillway.units import Bytes

MODEL: Final = "Bert-Large"
METHODS: Final = ("plain", "checkpoint", "compress")
CALLED: Final[Mapping[str, str]] = {"checkpoint": "ckpt", "compress": "L1"}
"""In the published files."""
RING: Final = 2.7e9
"""Bytes per second between devices: published plain training has 309.9 samples/s on 8 of them and 163.95 on one, at
batch 44, so that 0.87 s of a step are for exchanging 1.34 GB. Fitted on a run that it is then to foretell the gain in,
and so shown beside what the data sheet's link gives, and not held against the paper."""
COUNTS: Final = (1, 2, 4, 8)
PAPER_LAYERS, PAPER_HIDDEN, PAPER_GAIN = 34, 1344, 1.739
"""Where checkpoints pay first as published, and their gain on 8 devices."""
PAPER: Final[Mapping[str, int]] = {"layers": PAPER_LAYERS, "hidden size": PAPER_HIDDEN}
DEVICES: Final = "devices"
FITTED: Final = "devices, link fitted"
APART: Final = 0.15
"""How far, as a share, from the published."""


@frozen
class Size:
    """How much is run."""

    layers: Sequence[int] = (12, 24, 30, 36, 42, 48)
    hidden: Sequence[int] = (768, 1024, 1280, 1344, 1408, 1536)
    base: tuple[int, int] = (24, 1024)
    """Layers and hidden size where the other is swept, and on several devices."""
    length: int = 128
    limit: Bytes = MEMORY
    data: Path = DATA


def run(size: Size, tell: Tell) -> Result:
    """Both sweeps and the devices."""
    layers, hidden = size.base
    points: dict[tuple[int, int], Sequence[Advice]] = {}
    shapes = [*((depth, hidden) for depth in size.layers), *((layers, wide) for wide in size.hidden), size.base]
    for one in dict.fromkeys(shapes):
        tell(f"{one[0]} layers, hidden {one[1]}")
        points[one] = _answers(one, size)
    depth = _sweep("depth", {one: points[one, hidden] for one in size.layers})
    width = _sweep("width", {one: points[layers, one] for one in size.hidden})
    steps = steps_of(MODEL, {"layers": layers, "hidden": hidden, "length": size.length})
    gradients = sum(storage.nbytes for storage in steps.at(2).storages if storage.kind is Kind.PARAMETER)
    sheet = device_of("v100-pcie").out_per_second
    devices, fitted = (over_devices(points[size.base], COUNTS, gradients, link) for link in (sheet, RING))
    published = read_measurements(size.data) if size.data.is_file() else []
    times = _fixed_times(points[size.base], size)
    rows = [
        *_rows("layers", depth, _ratios(SWEEPS[0], published), times),
        *_rows("hidden size", width, _ratios(SWEEPS[1], published), times),
        *_rows(DEVICES, devices, {("checkpoint", 8): PAPER_GAIN} if published else {}, None),
        *_rows(FITTED, fitted, {("checkpoint", 8): PAPER_GAIN} if published else {}, None),
    ]
    return Result(
        title=TITLE, columns=[column for column in COLUMNS if any(column.cell(row) for row in rows)], rows=rows,
        notes=(*NOTES, *_notes(depth, width, devices, rows, times)),
    )  # fmt: skip


def _answers(shape: tuple[int, int], size: Size) -> Sequence[Advice]:
    layers, hidden = shape
    bench = AsTimed(MODEL, steps_of(MODEL, {"layers": layers, "hidden": hidden, "length": size.length}), V100)
    methods = sampled(bench, METHODS, size.limit)
    there = experiment_of(MODEL, methods, layers=str(layers), hidden=str(hidden))
    return advise(there, size.limit)


def _sweep(over: Any, points: Mapping[int, Sequence[Advice]]) -> Sweep:
    return Sweep(
        over=over,
        points=tuple(SweepPoint(value=float(value), rows=points[value]) for value in sorted(points)),
    )  # fmt: skip


def _ratios(sweep: Published, experiments: Sequence[Experiment]) -> dict[tuple[str, float], float | None]:
    """The published gain of a method at each size that was measured; None where plain training found no memory."""
    found: dict[tuple[str, float], float | None] = {}
    for there in experiments:
        value = sweep.size(there)
        if value is None:
            continue
        speeds = {
            name: fastest[1] for name, one in there.methods.items() if (fastest := one.fastest_below(inf)) is not None
        }
        for method, called in CALLED.items():
            if called in speeds:
                found[method, value] = speeds[called] / speeds["exact"] if "exact" in speeds else None
    return found


def _fixed_times(base: Sequence[Advice], size: Size) -> float | None:
    """The published time of a plain step without samples as a multiple of the simulated one; None without either."""
    theirs = read_published(size.data).get(MODEL)
    mine = next(row.fitted for row in base if row.method == "plain")
    paper = None if theirs is None else next(row.fitted for row in advise(theirs, MEMORY) if row.method == "exact")
    return paper.cost.delta / mine.cost.delta if paper and mine and mine.cost.delta else None


def _slow_gain(mine: Advice, plain: Advice, times: float | None) -> float | None:
    """The gain if that time were so many times as long for every method."""
    if times is None or mine.fitted is None or plain.fitted is None or not mine.predicted or not plain.predicted:
        return None
    more = (times - 1) * plain.fitted.cost.delta
    speeds = [
        row.fitted.cost.with_communication(max(more, 0.0)).throughput(row.predicted.size)
        for row in (mine, plain) if row.fitted is not None and row.predicted is not None
    ]  # fmt: skip
    return speeds[0] / speeds[1]


def _rows(
    what: str, sweep: Sweep, published: Mapping[tuple[str, float], float | None], times: float | None
) -> Iterator[Row]:
    for point in sweep.points:
        plain = next(row for row in point.rows if row.method == "plain")
        for method in point.methods:
            row = next(row for row in point.rows if row.method == method)
            gain = point.predicted(method)
            yield {
                "sweep": what, "value": point.value, "method": method,
                "plain_batch": plain.predicted and plain.predicted.size,
                "batch": row.predicted and row.predicted.size,
                "score_to_point": row.score / row.point if row.score and row.score < inf and row.point else None,
                "gain": gain if gain is not None and gain < inf else None,
                "only": "yes" if gain == inf else "", "slow_gain": _slow_gain(row, plain, times),
                "paper": published.get((method, point.value)), "verdict": row.verdict,
            }  # fmt: skip


def _checks(result: Result) -> Iterator[Check]:
    for over in dict.fromkeys(row["sweep"] for row in result.rows):
        gains = _gains(result.rows, over, "checkpoint")
        known = [gain for _, gain in gains]
        falls = sum(second < first for first, second in pairwise(known))
        yield Check(what=f"{over}: steps of the sweep at which the gain of checkpoints falls", measured=falls)
        yield Check(what=f"{over}: without a value from which on checkpoints pay", measured=crossing(gains) is None)
        if over in PAPER:
            every = {method: _gains(result.rows, over, method) for method in CALLED}
            yield from _beside_the_paper(over, every, [row for row in result.rows if row["sweep"] == over])
        if over == DEVICES:
            on_most = min(max(gains)[1], 2.0 * PAPER_GAIN)  # infinite where plain training does not fit
            yield Check(
                what=f"{over}: gain of checkpoints on {max(gains)[0]:g}, off the published {PAPER_GAIN}",
                measured=round(abs(on_most / PAPER_GAIN - 1), 4), at_most=APART,
            )  # fmt: skip


def _gains(rows: Sequence[Row], over: str, method: str) -> list[tuple[float, float]]:
    """By value; infinite where plain training does not fit at all."""
    pairs = [
        (row["value"], inf if row["only"] else row["gain"]) for row in rows
        if (row["sweep"], row["method"]) == (over, method)
    ]  # fmt: skip
    return [(value, gain) for value, gain in pairs if gain is not None]


def _beside_the_paper(
    over: str, gains: Mapping[str, Sequence[tuple[float, float]]], rows: Sequence[Row]
) -> Iterator[Check]:
    """Where checkpoints begin to pay, whether they do so before compression, and on which side of 1 each gain is."""
    starts = {method: _start(pairs) for method, pairs in gains.items()}
    paper = PAPER[over]
    yield Check(
        what=f"{over}: from where on checkpoints pay, off the published {paper}",
        measured=round(abs(min(starts["checkpoint"], 2.0 * paper) / paper - 1), 4), at_most=APART,
    )  # fmt: skip
    yield Check(
        what=f"{over}: compression pays earlier than checkpoints, published as the first, by a share of {paper}",
        measured=round(max(min(starts["checkpoint"], 2.0 * paper) - starts["compress"], 0.0) / paper, 4),
    )  # fmt: skip
    known = [row for row in rows if row["paper"] is not None and row["gain"] is not None]
    yield Check(
        what=f"{over}: gains on the other side of 1 than the published, of {len(known)}",
        measured=sum((row["gain"] >= 1) != (row["paper"] >= 1) for row in known),
    )  # fmt: skip


def _start(pairs: Sequence[tuple[float, float]]) -> float:
    """From which value on it pays, on the straight line between two; infinite if it does not."""
    found = crossing(pairs)
    return inf if found is None else found.first if found.at is None else found.at


def _crossover(sweep: Sweep, method: str) -> Crossover | None:
    """From where on the predicted gain is 1 or more up to the end of the sweep; None if it is not at its end."""
    return crossing(gains_of(sweep, method, SweepPoint.predicted))


def _notes(depth: Sweep, width: Sweep, devices: Sweep, rows: Sequence[Row], times: float | None) -> Iterator[str]:
    for sweep, paper in ((depth, f"{PAPER_LAYERS} layers"), (width, f"hidden size {PAPER_HIDDEN}")):
        for method in CALLED:
            found = _from(_crossover(sweep, method))
            yield f"{sweep.over}: {method} {found}; the paper has its first method from {paper}."
            if times is not None:
                slow = [
                    (row["value"], row["slow_gain"]) for row in rows
                    if (row["sweep"], row["method"]) == (sweep.unit, method) and row["slow_gain"] is not None
                ]  # fmt: skip
                found = _from(crossing(slow))
                yield f"{sweep.over}: {method} {found}, with the published fixed time, {times:.2f} times the simulated."
    gains = ", ".join(f"{point.value:.0f}: {point.predicted('checkpoint') or 0:.3f}" for point in devices.points)
    yield (
        f"devices: checkpoint {_from(_crossover(devices, 'checkpoint'))}; its gain by devices {gains}. The paper has "
        f"{PAPER_GAIN} on 8."
    )


def _from(one: Any) -> str:
    if one is None:
        return "pays nowhere in the sweep"
    if one.below is None:
        return f"pays everywhere, from {one.first:g} on"
    return f"pays from {one.first:g} on and not at {one.below:g}" + (
        f", by interpolation {one.at:.1f}" if one.at else ""
    )


TITLE: Final = "PAPAYA's implications, simulated on V100s with 16 GB: BERT by layers, hidden size and devices"

COLUMNS: Final = (
    *columns.text(sweep="over"),
    *columns.shown("{:g}".format, value="value"),
    *columns.text(method="method", plain_batch="plain batch", batch="batch"),
    *columns.ratios(
        score_to_point="score/point", gain="x plain", slow_gain="with published fixed time", paper="published x plain"
    ),
    *columns.text(only="plain does not fit", verdict="verdict"),
)

NOTES: Final = (
    "BERT in mixed precision on sentences of 128 tokens, 24 layers and hidden size 1024 where that is not swept, "
    "heads of 64. Steps may take 12.8 GB. x plain: highest throughput by the fits, each method at its largest batch.",
    "Devices: a ring all-reduce of float32 gradients that no compute hides, over a link as the data sheet of V100 on "
    f"PCIe has it; {FITTED}: at {RING / 1e9} GB/s, which the published plain run on 8 devices comes to, so that the "
    "gain there is no prediction. Batches are those of one device. The rest stands in papers/papaya/README.md.",
)

BENCHMARK: Final = Benchmark(
    name="papaya_implications",
    run=run,
    judge=_checks,
    full=Size(),
    quick=Size(layers=(1, 2), hidden=(64,), base=(1, 64), length=16, limit=100_000_000),
)
