"""PAPAYA's Fig. 4 on a simulated V100: the highest throughput of each method on its five models.

Each method's batch is the largest whose simulated peak is within 80 % of 16 GB, as in the published scripts. What the
paper measured stands beside it where the published measurements are there; the README beside this says why they
differ.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from papers.costs.left_out import ZIP, devices_of, of_logs, points_of
from papers.costs.log_ops import LOGS
from papers.papaya.models import BUILDS, HALF
from papers.papaya.published import DATA, MEMORY, NAMED, of_models
from papers.search import search_largest
from spillway.advisor.bench import AbstractBench, Trial
from spillway.advisor.measurements import Experiment, Samples, read_measurements
from spillway.advisor.model import Cost
from spillway.advisor.simulated import SimulatedBench, Steps
from spillway.advisor.verdict import LINEAR, advise
from spillway.advisor.verdict import Row as Advice
from spillway.advisor.ways import way_of
from spillway.calibration.named_device import device_of
from spillway.costs import Device, timed
from spillway.ir import Phase
from spillway.methods import DTR
from spillway.simulation.simulated_engine import simulate
from spillway.units import Bytes
from spillway.workloads.recorded import record

LINK: Final = 5.9e9
"""Bytes per second either way: what ResNet-50's published swap comes to, 23.0 ms an image for 68 MB out and in."""
V100: Final = replace(
    device_of("v100"), name="v100 16 GB", out_per_second=LINK, in_per_second=LINK,
    source=f"{device_of('v100').source}. Here {LINK / 1e9} GB/s",
)  # fmt: skip

PUBLISHED: Final[Mapping[str, str]] = {
    "plain": "exact", "checkpoint": "ckpt", "swap": "swap", "compress": "L1", "checkpoint-swap": "swap_ckpt",
    "compress-swap": "L4bit-swap", "checkpoint-compress": "L1_ckpt", "dtr": "dtr",
}  # fmt: skip
"""What the published files call each method."""
TAKEN_FROM: Final = ("plain", "compress")
"""Of the published measurements of these are the numbers that `Explained` puts in."""
HERITAGE: Final = "dtr-eqclass"
"""The heuristic of DTR's prototype."""
PROTOTYPE: Final = ZIP.parent / "prototype_measurements.csv"
"""Steps of DTR's prototype, published with it: eight networks, none of them PAPAYA's, on another GPU."""
BEYOND: Final = (1.0, 1.1, 1.3, 1.6, 2.0)
"""Batches of DTR, whose peak is the limit whatever the batch, as multiples of the largest plain one."""
SHARES: Final = (0.25, 0.5, 0.75, 1.0)
"""Of the largest batch: what the lines go through."""


@frozen
class Size:
    """How much is run."""

    options: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {name: {} for name in BUILDS})
    """Of the models, by the paper's names."""
    methods: Sequence[str] = (
        "plain", "compress", "checkpoint", "checkpoint-compress", "compress-swap", "checkpoint-swap", "swap",
    )  # fmt: skip
    limit: Bytes = MEMORY
    data: Path = DATA
    logs: Sequence[str] = tuple(LOGS)
    """Of DTR's, that the device's ops are fitted to."""


@final
class AsTimed(AbstractBench):
    """Simulated steps of one of the models, of which only that takes time which the published scripts timed."""

    def __init__(self, name: str, steps: Steps, device: Device) -> None:
        self._whole = SimulatedBench(name, steps, device)
        self.name, self.hardware, self.spread = name, self._whole.hardware, self._whole.spread
        self.device = device

    def measure(self, method: str, size: int) -> Trial:
        """One step. Raises UsageError for a name that is none, or a batch without a sample."""
        trial = self._whole.measure(method, size)
        if trial.seconds is None or NAMED[self.name].times_update:
            return trial
        plain = self._whole.step_of(way_of("plain"), size).step
        update = sum(op.seconds or 0.0 for op in plain.ops if op.phase is Phase.OPTIMIZER)
        return replace(trial, seconds=trial.seconds - update)


def steps_of(name: str, options: Mapping[str, Any]) -> Steps:
    """Those of one of the models."""
    build = partial(BUILDS[name], **options)
    return Steps(lambda batch: record(partial(build, batch), fake=True).step)


# ------------------------------------------------------------------ the largest batches


def sampled(bench: AbstractBench, methods: Sequence[str], limit: Bytes) -> dict[str, Samples]:
    """Trials of each method at shares of its largest batch; none for a method of which no batch fits."""
    found, guess = dict[str, Samples](), 16
    for method in methods:
        largest = largest_batch(bench, method, limit, guess)
        sizes = sorted({max(round(share * largest), 1) for share in SHARES}) if largest else []
        samples = found[method] = Samples()
        for trial in (bench.measure(method, size) for size in sizes):
            if trial.peak is not None and trial.seconds is not None:
                samples.add_peak(trial.size, trial.peak)
                samples.seconds[trial.size] = trial.seconds
        guess = largest or guess
    return found


def largest_batch(bench: AbstractBench, method: str, limit: Bytes, guess: int) -> int:
    """The largest batch whose peak is within the limit; 0 if no sample is."""
    return search_largest(lambda size: (bench.measure(method, size).peak or 0) <= limit, start=guess)


def experiment_of(name: str, methods: Mapping[str, Samples], *, layers: str = "", hidden: str = "") -> Experiment:
    """What was simulated, for the advisor."""
    return Experiment(
        hardware=V100.name, network=name, layers=layers, hidden=hidden, precision="", source="simulated",
        methods=methods,
    )  # fmt: skip


def dtr_samples(steps: Steps, device: Device, plain: int, limit: Bytes, own: float = 0.0) -> Samples:
    """DTR within the limit at batches from the largest plain one on: it evicts as much as each takes. `own` is what it
    takes for itself, as a share of the plain step."""
    samples = Samples()
    for size in sorted({max(round(times * plain), 1) for times in BEYOND}):
        step = timed(steps.at(size), device)
        ran = simulate(step, allowed=limit, method=DTR.named(HERITAGE)(), device=device, steps=1)
        if ran.status == "ok":
            samples.add_peak(size, ran.peak_bytes)
            samples.seconds[size] = ran.seconds + own * sum(op.seconds or 0.0 for op in step.ops)
    return samples


def own_share(measured: Path) -> float:
    """What DTR's prototype takes beside the step and second runs where it has most memory, as a share of the plain
    step: the median of the networks that it was published with. 0 where there is no such file."""
    if not measured.is_file():
        return 0.0
    with measured.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == "uwsampl" and row["status"] == "ok"]
    plain = {row["model"]: float(row["time_ms"]) for row in rows if row["type"] == "baseline"}
    most = dict[str, tuple[float, float]]()
    for row in rows:
        if row["type"] == "dtr":
            least = float(row["time_ms"]) - float(row["remat_compute_ms"])
            most[row["model"]] = max((float(row["memory_budget"]), least), most.get(row["model"], (0.0, 0.0)))
    return median(least / plain[model] - 1 for model, (_, least) in most.items())


# ------------------------------------------------------------------ the paper's, and the rows


def run(size: Size, tell: Tell) -> Result:
    """Every model under every method."""
    published = read_published(size.data)
    rows: list[Row] = []
    notes: list[str] = []
    linear: list[float] = []
    every, own = {name: steps_of(name, options) for name, options in size.options.items()}, own_share(PROTOTYPE)
    devices = dict.fromkeys(every, V100)
    if published and ZIP.is_file() and len(every) > 1:
        points = {name: points_of(NAMED[name], steps, published[name], size.data) for name, steps in every.items()}
        left = devices_of(points, of_logs(ZIP, size.logs))
        devices = {
            name: replace(V100, efficiency=device.efficiency, host_seconds=device.host_seconds)
            for name, device in left.items()
        }  # fmt: skip
        tell("tensor cores and host: for each model from the plain steps of the others")
    for name, steps in every.items():
        bench = AsTimed(name, steps, devices[name])
        methods = sampled(bench, size.methods, size.limit)
        if name not in HALF:
            largest = max(methods["plain"].seconds, default=1)
            methods["dtr"] = dtr_samples(steps, bench.device, largest, size.limit, own)
        tell(f"{name}: simulated")
        answers = advise(experiment_of(name, methods), size.limit)
        linear += [
            r for row in answers if row.fitted is not None and row.method != "dtr"
            for r in (row.fitted.memory.r, row.fitted.time.r) if r is not None
        ]  # fmt: skip
        theirs = published.get(name)
        mine = list(_rows(name, answers, theirs))
        rows += mine
        notes += _notes(name, mine, answers, _explained(answers, theirs))
    return Result(
        title=TITLE, columns=[column for column in COLUMNS if any(column.cell(row) for row in rows)], rows=rows,
        facts={"linear": linear},
        notes=(*NOTES, f"DTR takes {own:.1%} of a plain step for itself, as its prototype did.", *notes),
    )  # fmt: skip


def read_published(data: Path) -> dict[str, Experiment]:
    """What the paper measured of its five models, by their names; nothing where the file is not there."""
    return of_models(read_measurements(data)) if data.is_file() else {}


def _rows(name: str, answers: Sequence[Advice], theirs: Experiment | None) -> Iterator[Row]:
    plain = next(row for row in answers if row.method == "plain")
    best = {row.method: row.measured for row in answers if row.measured is not None}
    base = best["plain"].throughput
    known = {} if theirs is None else {
        method: fastest
        for method, called in PUBLISHED.items()
        if called in theirs.methods and (fastest := theirs.methods[called].fastest_below(inf)) is not None
    }  # fmt: skip
    explained = _explained(answers, theirs)
    order = sorted(best, key=lambda method: -best[method].throughput)
    for row in sorted(answers, key=lambda row: -best[row.method].throughput if row.method in best else 0.0):
        if row.fitted is None or row.method not in best:
            continue
        cost, mine, paper = row.fitted.cost, best[row.method], known.get(row.method)
        yield {
            "model": name, "method": row.method, "rank": order.index(row.method) + 1,
            "batch": mine.size, "throughput": mine.throughput, "ratio": mine.throughput / base,
            "paper_batch": paper and paper[0], "paper_throughput": paper and paper[1],
            "paper_ratio": paper[1] / known["plain"][1] if paper and "plain" in known else None,
            "fixed_ratio": _gain(explained.fixed, row, plain), "explained_ratio": _gain(explained.all, row, plain),
            "score_to_point": None if row.score in (None, inf) or not row.point else row.score / row.point,
            "verdict": row.verdict, "alpha": cost.alpha, "beta": cost.beta, "gamma": cost.gamma, "delta": cost.delta,
        }  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class Explained:
    """What the simulated methods cost with what is known to differ."""

    fixed: Mapping[str, Cost]
    """With the published time of a plain step without samples."""
    all: Mapping[str, Cost]
    """And with the published time of packing, and second runs that swap and pack what they save; without DTR."""
    packing: float | None
    """Published seconds a sample of packing and unpacking, as a multiple of the simulated ones."""


def _explained(answers: Sequence[Advice], theirs: Experiment | None) -> Explained:
    mine = {row.method: row.fitted.cost for row in answers if row.fitted is not None}
    paper = {} if theirs is None else {
        row.method: row.fitted.cost for row in advise(theirs, MEMORY) if row.fitted is not None
    }  # fmt: skip
    if not {"exact", "L1"} <= paper.keys() or not {"plain", "compress"} <= mine.keys():
        return Explained({}, {}, None)
    plain = mine["plain"]
    later = max(paper["exact"].delta - plain.delta, 0.0)
    fixed = {method: cost.with_communication(later) for method, cost in mine.items()}
    simulated, published = mine["compress"].gamma - plain.gamma, paper["L1"].gamma - paper["exact"].gamma
    slower = max(published - simulated, 0.0)
    extra = {"compress": slower, "compress-swap": slower}
    if "swap" in mine:
        extra["checkpoint-swap"] = mine["swap"].gamma - plain.gamma - _over(mine, "checkpoint-swap")
    extra["checkpoint-compress"] = published - _over(mine, "checkpoint-compress")
    every = {
        method: replace(cost, gamma=cost.gamma + extra.get(method, 0.0))
        for method, cost in fixed.items() if method != "dtr"
    }  # fmt: skip
    # Where the host is slower than the device, packing adds nothing to a small step.
    return Explained(fixed, every, published / simulated if simulated > 0 else None)


def _over(costs: Mapping[str, Cost], method: str) -> float:
    """Seconds a sample beyond checkpoints."""
    return costs[method].gamma - costs["checkpoint"].gamma if {method, "checkpoint"} <= costs.keys() else 0.0


def _gain(costs: Mapping[str, Cost], row: Advice, plain: Advice) -> float | None:
    """The method's throughput at its batch, as a multiple of the plain one's."""
    if row.method not in costs or row.measured is None or plain.measured is None:
        return None
    mine, base = costs[row.method], costs["plain"]
    return mine.throughput(row.measured.size) / base.throughput(plain.measured.size)


def kendall(rows: Sequence[Row], key: str) -> float | None:
    """Kendall's rank correlation of a figure with the published throughput; None for fewer than two methods."""
    both = [(row[key], row["paper_throughput"]) for row in rows if row["paper_throughput"] and row[key] is not None]
    pairs = list(combinations(both, 2))
    agree = [(one[0] - other[0]) * (one[1] - other[1]) for one, other in pairs]
    return sum((product > 0) - (product < 0) for product in agree) / len(pairs) if pairs else None


def _of(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row["model"] == name]


def _checks(result: Result) -> Iterator[Check]:
    rows, linear = result.rows, result.facts["linear"]
    names = list(dict.fromkeys(row["model"] for row in rows))
    taus = [tau for name in names if (tau := kendall(_of(rows, name), "throughput")) is not None]
    # What the published numbers were taken from that stand in these figures says nothing of them.
    others = {name: [row for row in _of(rows, name) if row["method"] not in TAKEN_FROM] for name in names}
    left = [tau for name in names if (tau := kendall(others[name], "explained_ratio")) is not None]
    if taus and left:
        for what, found in (("with", taus), ("with fixed time and packing put in, of the other methods, with", left)):
            yield Check(
                what=f"1 less Kendall's tau {what} the published ranking, mean of {len(found)} models",
                measured=round(1 - fmean(found), 4), at_most=0.3,
            )  # fmt: skip
            yield Check(
                what=f"1 less Kendall's tau {what} the published ranking, the model with the least agreement",
                measured=round(1 - min(found), 4), at_most=0.5,
            )  # fmt: skip
        fastest = [max(_of(rows, name), key=lambda row: row["throughput"])["method"] for name in names]
        theirs = [
            max((row for row in _of(rows, name) if row["paper_throughput"]), key=lambda row: row["paper_throughput"])
            for name in names
        ]
        wrong = sum(one != other["method"] for one, other in zip(fastest, theirs, strict=True))
        yield Check(what=f"of {len(names)} models: another method is the fastest", measured=wrong, at_most=1)
    yield Check(
        what=f"of {len(linear)} fits to simulated trials, without DTR: R below {LINEAR}",
        measured=sum(r < LINEAR for r in linear)
    )  # fmt: skip


def _notes(name: str, rows: Sequence[Row], answers: Sequence[Advice], explained: Explained) -> Iterator[str]:
    taus = [kendall(rows, key) for key in ("throughput", "fixed_ratio")]
    taus.append(kendall([row for row in rows if row["method"] not in TAKEN_FROM], "explained_ratio"))
    if explained.packing is not None and None not in taus:
        mine = " > ".join(row["method"] for row in rows if row["paper_throughput"])
        paper = sorted((row for row in rows if row["paper_throughput"]), key=lambda row: -row["paper_throughput"])
        told = ", ".join(f"{tau:.2f}" for tau in taus if tau is not None)
        yield (
            f"{name}: Kendall's tau as simulated, with the published fixed time, and with all that is known to differ, "
            f"this one without plain and compress: {told}. Published packing takes {explained.packing:.1f} times as "
            f"long a sample. Here {mine}; published {' > '.join(row['method'] for row in paper)}."
        )
    pays = [row.method for row in answers if row.verdict == "pays"]
    yield f"{name}: pays by the simulated model: {', '.join(pays) or 'nothing'}."


TITLE: Final = "PAPAYA's Fig. 4, simulated on a V100 with 16 GB: highest throughput of each method"

COLUMNS: Final = (
    *columns.text(model="model", method="method", rank="rank", batch="batch"),
    *columns.shown("{:.1f}".format, throughput="samples/s"),
    *columns.ratios(ratio="x plain"),
    *columns.text(paper_batch="published batch"),
    *columns.shown("{:.1f}".format, paper_throughput="published samples/s"),
    *columns.ratios(
        paper_ratio="published x plain", fixed_ratio="with published fixed time", explained_ratio="all explained",
        score_to_point="score/point",
    ),
    *columns.text(verdict="verdict"),
)  # fmt: skip

NOTES: Final = (
    "Steps may take 12.8 GB, 80 % of the device, and every method has its largest batch within that. Rates of the data "
    "sheet, ops as DTR's logs have them, tensor cores and the host's seconds for an op as the plain steps of the other "
    "models have them, Swin's aside. Where the published methods differ from these stands in papers/papaya/README.md.",
    "with published fixed time: x plain if delta of all methods were longer by what the published plain step takes "
    "without samples beyond the simulated one; the device of the paper also runs a framework. all explained: besides, "
    "packing takes as long as published compress over plain, and second runs of blocks swap and pack what they save.",
)

BENCHMARK: Final = Benchmark(
    name="papaya_simulated",
    run=run,
    judge=_checks,
    full=Size(),
    quick=Size(
        options={"ResNet-50": {"side": 32, "depths": (1, 1)}, "Bert-Large": {"layers": 2, "hidden": 64, "length": 16}},
        methods=("plain", "compress", "checkpoint", "swap"),
        limit=100_000_000,
        logs=("resnet32",),
    ),
)
