"""PAPAYA's model on this machine: four small networks under an emulated memory limit, six methods.

For each of them `advise` measures what it measures for anybody. Then every method runs at the batch that is its largest
by the fit, and what was predicted is held against what was measured. `pays.py` has networks where a method pays.

NOTE: what the line of memory has to meet without a batch is what is there at the moment of the peak and does not grow:
parameters, optimizer state, buffers, the gradients that are there at that moment, and what ops work with (reordered
weights, a gradient that is not summed up yet). It is counted storage by storage at the peak of one step whose batch is
a prime number, of which the bytes of whatever grows with the batch are a multiple. No fit is in it.

A size may be left out of the line of memory for one reason alone, whatever its distance from it: its peak is at another
moment of the step than that of the largest size, whose line it is, by the gradients that are there then or because the
update has begun. Where two moments' lines cross, a size may be on both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from math import inf
from typing import Any, Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from spillway.advisor.bench import Trial
from spillway.advisor.campaign import Campaign
from spillway.advisor.fits import fit_line
from spillway.advisor.real import AROUND, STEPS, RealBench
from spillway.advisor.verdict import Row as Advice
from spillway.advisor.verdict import advise, recommended
from spillway.advisor.ways import DEFAULT, PLAIN
from spillway.units import Bytes, Seconds

MB: Final = 10**6
SECONDS: Final = 6.0
"""Of a trial, as `spillway advise` has it if nobody says."""
LINEAR: Final = 0.9999
INTERCEPT: Final = 0.02
THROUGHPUT: Final = 0.10
RECOMMENDED: Final = 0.01
"""Less than the 3 % by which a smaller batch has to be faster to be taken (`verdict.FASTER`): with the same figure here
the verdict could not miss it."""
PAYS: Final = 0.95
"""What plain training may reach of the fastest method's throughput where one is expected to pay."""
_GROWING: Final = ("activations", "input")


@frozen
class Network:
    """A workload and the memory that its steps may take."""

    workload: str
    limit: Bytes
    pays: bool = False
    """Whether it is there because a method is expected to pay."""
    options: Mapping[str, Any] = field(default_factory=dict)


@frozen
class Size:
    """How much is measured."""

    networks: Sequence[Network] = (
        Network(workload="resnet", limit=100 * MB),
        Network(workload="bert-small", limit=150 * MB),
        Network(workload="gpt-small", limit=180 * MB),
        Network(workload="vit-small", limit=100 * MB),
    )
    methods: Sequence[str] = DEFAULT
    batches: Sequence[int] = ()
    """Empty to let the campaign choose."""
    steps: int = STEPS
    rounds: int = 5
    """Trials of every method at its largest batch, once that is known."""
    longest: Seconds = SECONDS / (STEPS + AROUND)


@frozen
class LeftOut:
    """Sizes that ran and that memory was not fitted to."""

    count: int
    without_reason: int
    """Those whose peak is at the same moment as that of the largest size on the line."""
    r: float | None
    """Of a line through all sizes that ran; None where it says nothing."""


@frozen
class Tried:
    """A method's prediction and what became of it."""

    network: Network
    advice: Advice
    at_peak: Trial | None
    """Of a prime batch, for what is there without one; None if nothing was fitted."""
    there: Trial | None
    """At the batch that was predicted to be the largest, of the median time; None if there is none."""
    taken: Trial | None
    """At the batch that is recommended with it, which may be a smaller one that was seen to be faster."""
    fastest: float | None
    """Samples per second of its fastest trial, at whatever size; None if none ran."""
    left_out: LeftOut
    """Sizes that ran and that memory was not fitted to."""

    @property
    def constant(self) -> Bytes | None:
        """What is there without a batch."""
        if self.at_peak is None or self.at_peak.peak is None:
            return None
        return self.at_peak.peak - sum(self.at_peak.by_kind[kind] for kind in _GROWING)

    @property
    def intercept_off(self) -> float | None:
        """Of the line of memory, as a share of what is there."""
        if self.advice.fitted is None or self.constant is None:
            return None
        return self.advice.fitted.memory.intercept / self.constant - 1

    @property
    def throughput(self) -> float | None:
        """Samples per second at its largest batch, as measured."""
        return _throughput(self.there)

    @property
    def off(self) -> float | None:
        """Predicted throughput less what was measured, as a share of that."""
        predicted, measured = self.advice.predicted, self.throughput
        return None if predicted is None or measured is None else predicted.throughput / measured - 1


def run(size: Size, tell: Tell) -> Result:
    """Every network, method by method."""
    found = {network.workload: _measured(network, size, tell) for network in size.networks}
    rows = [_row(name, one, tried[0]) for name, tried in found.items() for one in tried]
    facts = {
        "behind": {name: behind_of(tried) for name, tried in found.items()},
        "pays": [network.workload for network in size.networks if network.pays],
    }
    return Result(title=TITLE, columns=COLUMNS, rows=rows, facts=facts, notes=_notes(size.rounds))


def _measured(network: Network, size: Size, tell: Tell) -> list[Tried]:
    def output(line: str) -> None:
        tell(f"{network.workload}: {line}")

    with RealBench(network.workload, options=network.options, seed=0, output=output, steps=size.steps) as bench:
        campaign = Campaign(bench, size.methods, network.limit, batches=size.batches, longest=size.longest)
        for trial in campaign.run():
            tell(f"{network.workload}, {trial.method} at {trial.size}: {trial.seconds} s, {trial.peak} bytes")
        for method, fault in campaign.faults.items():
            tell(f"{network.workload}, {method}: {fault}")
        rows = advise(campaign.experiment(), network.limit)
        before = [_before(campaign, row) for row in rows]
        _again(campaign, [pair for row in rows for pair in pairs(row)], size.rounds, tell)
        return [_tried(network, campaign, row, *known) for row, known in zip(rows, before, strict=True)]


def pairs(advice: Advice) -> list[tuple[str, int]]:
    """A method at its largest batch, if one is known, and at the batch to take if that is another."""
    sizes = [point.size for point in (advice.predicted, advice.taken) if point is not None]
    return [(advice.method, size) for size in dict.fromkeys(sizes)]


def left_out(trials: Mapping[int, Trial], on_line: Collection[int]) -> LeftOut:
    """Of the trials of a method, with the sizes that memory is fitted to."""
    peaks = {size: float(trial.peak) for size, trial in trials.items() if trial.peak is not None}
    off = [size for size in peaks if size not in on_line]
    same = [size for size in off if on_line and _moment(trials[size]) == _moment(trials[max(on_line)])]
    return LeftOut(count=len(off), without_reason=len(same), r=fit_line(peaks).r if len(peaks) > 1 else None)


def _moment(trial: Trial) -> tuple[Bytes, bool]:
    """Of its peak: bytes of gradients that are there, and whether the update has begun."""
    updates = trial.before_update is not None and trial.peak is not None and trial.before_update < trial.peak
    return trial.by_kind.get("gradients", 0), updates


def _before(campaign: Campaign, advice: Advice) -> tuple[Trial | None, LeftOut]:
    """What a method has at the peak of a prime batch, and the sizes left out of its line, before it runs again."""
    samples = campaign.samples(advice.method)
    others = left_out(campaign.trials[advice.method], samples.peaks)
    if advice.predicted is None:
        return None, others
    prime = prime_between(min(samples.peaks), max(samples.peaks))
    at_peak = campaign.trials[advice.method].get(prime) or campaign.measure(advice.method, prime)
    return at_peak, others


def _again(campaign: Campaign, pairs: Sequence[tuple[str, int]], rounds: int, tell: Tell) -> None:
    """Measure methods at batch sizes again, in turn, and what is then the fastest of all trials, until that has been
    measured again."""
    done = set(pairs)
    _in_turn(campaign, pairs, rounds, tell)
    while (fastest := _fastest(campaign)) is not None and fastest not in done:
        _in_turn(campaign, [fastest], rounds, tell)
        done.add(fastest)


def _fastest(campaign: Campaign) -> tuple[str, int] | None:
    """Method and batch size of the trial with the highest throughput; None if nothing ran."""
    ran = [(method, size, one) for method, of in campaign.trials.items() for size, one in of.items() if one.seconds]
    best = max(ran, key=lambda found: found[1] / _seconds(found[2]), default=None)
    return None if best is None else best[:2]


def _in_turn(campaign: Campaign, pairs: Sequence[tuple[str, int]], rounds: int, tell: Tell) -> None:
    """All pairs once in each round: their trials become those of the median time."""
    found: dict[tuple[str, int], list[Trial]] = {pair: [] for pair in pairs}
    for number in range(rounds):
        for (method, size), trials in found.items():
            trials.append(campaign.measure(method, size, again=True))
            tell(f"round {number + 1} of {rounds}, {method} at {size}: {trials[-1].seconds} s")
    for (method, size), trials in found.items():
        campaign.trials[method][size] = sorted(trials, key=_seconds)[len(trials) // 2]


def _seconds(trial: Trial) -> Seconds:
    return inf if trial.seconds is None else trial.seconds


def _tried(network: Network, campaign: Campaign, advice: Advice, at_peak: Trial | None, others: LeftOut) -> Tried:
    trials, fastest = campaign.trials[advice.method], campaign.samples(advice.method).fastest_below(inf)
    return Tried(
        network=network, advice=advice, at_peak=at_peak,
        there=None if advice.predicted is None else trials[advice.predicted.size],
        taken=None if advice.taken is None else trials[advice.taken.size],
        fastest=None if fastest is None else fastest[1], left_out=others,
    )  # fmt: skip


def prime_between(low: int, high: int) -> int:
    """The largest prime number from `low` to `high`, or `high` if there is none."""
    primes = (size for size in range(high, low - 1, -1) if size > 1 and all(size % other for other in range(2, size)))
    return next(primes, high)


def _checks(result: Result) -> Iterator[Check]:
    for name, behind in result.facts["behind"].items():
        rows = [row for row in result.rows if row["network"] == name]
        yield from _of_verdicts(name, rows, pays=name in result.facts.get("pays", ()))
        yield Check(
            what=f"{name}: of {len(rows)} methods those of which nothing was predicted, or that did not fit there",
            measured=sum(row["measured"] is None for row in rows)
        )  # fmt: skip
        worst = min((row["r_memory"] or 0.0 for row in rows if row["alpha"] is not None), default=0.0)
        yield Check(what=f"{name}: 1 - R of memory, the worst method", measured=1 - worst, at_most=round(1 - LINEAR, 6))
        for what, key, most in (
            ("intercept of memory off what is there without a batch", "intercept_off", INTERCEPT),
            ("highest throughput predicted off measured", "off", THROUGHPUT),
        ):
            known = [abs(row[key]) for row in rows if row[key] is not None]
            yield Check(what=f"{name}: {what}, the worst method", measured=max(known, default=1.0), at_most=most)
        for what, share in behind.items():
            yield Check(what=f"{name}: the recommended method, {what}", measured=share, at_most=RECOMMENDED)


def behind_of(tried: Sequence[Tried]) -> dict[str, float]:
    """By what share the recommended method is slower, at its largest batch and at the batch to take."""
    return {
        "at its largest batch, is slower than the best one at its largest batch":
            behind(tried, _largest, [_largest(one) for one in tried]),
        "at the batch to take, is slower than the fastest trial of any method at any batch":
            behind(tried, _taken, [one.fastest for one in tried]),
    }  # fmt: skip


def _of_verdicts(name: str, rows: Sequence[Row], *, pays: bool) -> Iterator[Check]:
    """Of what results that were kept longer ago do not tell there is no check."""
    if any("without_reason" in row for row in rows):
        yield Check(
            what=f"{name}: sizes left out of a line whose peak is at the same moment as that of the largest on it",
            measured=sum(row["without_reason"] for row in rows),
        )  # fmt: skip
    if any("taken" in row for row in rows):
        plain = next(row for row in rows if row["method"] == PLAIN)
        others = [row for row in rows if row is not plain and row["taken"] is not None]
        # Where plain training does not run at all, whatever runs pays.
        wrong = [one for one in others if one["said"] != (one["taken"] >= (plain["taken"] or 0.0))]
        yield Check(what=f"{name}: methods that pay and are not said to, or the other way round", measured=len(wrong))
        if pays:
            yield Check(
                what=f"{name}: plain training at its fastest over the fastest method at the batch to take",
                measured=(plain["fastest"] or 0.0) / max([1e-9, *(one["taken"] for one in others)]), at_most=PAYS,
            )  # fmt: skip


def _largest(tried: Tried) -> float | None:
    return tried.throughput


def _taken(tried: Tried) -> float | None:
    return _throughput(tried.taken)


def _throughput(trial: Trial | None) -> float | None:
    return None if trial is None or trial.seconds is None else trial.size / trial.seconds


def behind(tried: Sequence[Tried], speed: Callable[[Tried], float | None], speeds: Sequence[float | None]) -> float:
    """By what share of the highest of these speeds the recommended method is slower; 1 where nothing was recommended
    or measured."""
    best = recommended([one.advice for one in tried])
    mine = next((speed(one) for one in tried if best is not None and one.advice.method == best.method), None)
    return 1.0 if mine is None else 1 - mine / max(known for known in speeds if known is not None)


def _row(name: str, tried: Tried, plain: Tried) -> Row:
    advice, fitted = tried.advice, tried.advice.fitted
    best = recommended([advice])
    return {
        "network": name, "method": advice.method, "limit": tried.network.limit,
        "alpha": None if fitted is None else round(fitted.memory.slope),
        "beta": None if fitted is None else round(fitted.memory.intercept), "constant": tried.constant,
        "intercept_off": tried.intercept_off, "gamma": None if fitted is None else fitted.time.slope,
        "delta": None if fitted is None else fitted.time.intercept,
        "r_memory": None if fitted is None else fitted.memory.r, "left_out": tried.left_out.count,
        "without_reason": tried.left_out.without_reason, "r_all": tried.left_out.r,
        "r_time": None if fitted is None else fitted.time.r,
        "batch": None if best is None or best.predicted is None else best.predicted.size,
        "predicted": None if best is None or best.predicted is None else best.predicted.throughput,
        "measured": tried.throughput, "fastest": tried.fastest, "off": tried.off, "verdict": advice.verdict,
        "taken_batch": None if advice.taken is None else advice.taken.size, "taken": _taken(tried),
        "said": advice.reaches >= plain.advice.reaches,
    }  # fmt: skip


TITLE: Final = "PAPAYA's model here: four small networks under an emulated memory limit, one thread"

COLUMNS: Final = (
    *columns.text(network="network", method="method"),
    *columns.nbytes(limit="limit", alpha="alpha", beta="beta", constant="there without a batch"),
    *columns.shares(intercept_off="beta off that"),
    *columns.shown("{:.6f}".format, r_memory="R memory"),
    *columns.text(left_out="sizes left out of it", without_reason="without a reason"),
    *columns.shown("{:.4f}".format, r_all="R, all sizes"),
    *columns.seconds(gamma="gamma", delta="delta"),
    *columns.shown("{:.4f}".format, r_time="R time"),
    *columns.text(batch="largest batch"),
    *columns.shown("{:.4g}".format, predicted="samples/s, predicted", measured="measured", fastest="fastest trial"),
    *columns.shares(off="off"),
    *columns.text(taken_batch="batch to take"),
    *columns.shown("{:.4g}".format, taken="measured there"),
    *columns.text(verdict="verdict"),
)  # fmt: skip

NOTES: Final = (
    "There without a batch: parameters, optimizer state, buffers, the gradients that are there at the moment of the "
    "peak, and what ops work with, counted storage by storage at the peak of a step with a prime batch.",
    "R of memory is that of the sizes on the line of the largest. Sizes left out of it ran as well; that is allowed "
    "where their peak is at another moment than that of the largest, by the gradients that are there or because the "
    "update has begun, and otherwise counted as without a reason. R, all sizes: of a line through all that ran. The "
    "fastest trial is the one with the highest throughput, at any batch that was measured.",
    "swap waits for every copy, as PAPAYA's does; the other two that move let copies run beside compute.",
)


def _notes(rounds: int) -> Sequence[str]:
    return (
        "Every method was measured as `spillway advise` measures: a few batch sizes, each in a process of its own. "
        "Then it ran at the largest batch that fits by its line, and at the batch that `advise` says to take where "
        f"that is another, in turn with the other methods, and so did the fastest of all trials: medians of {rounds} "
        "count. The limit is emulated: a step whose peak by account is above it counts as out of memory.",
        *NOTES,
    )


BENCHMARK: Final = Benchmark(
    name="papaya_here",
    run=run,
    judge=_checks,
    full=Size(),
    quick=Size(
        networks=(Network(workload="resnet", limit=100 * MB, options={"width": 4, "blocks": [1, 1, 1, 1]}),),
        methods=("plain", "checkpoint"), batches=(5, 7, 9), steps=1, rounds=1,
    ),
)  # fmt: skip
