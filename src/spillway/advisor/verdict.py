"""From measurements of one network on one kind of hardware to an answer: which method, which batch, how sure; whether
accumulating gradients gains the same; how predictions compare with what was seen afterwards.

The uncertainty is that of fits to scattered points (standard errors carried through 1/v to first order, Student's t).
That a line is the wrong law is not in it; `Row.warnings` tell where the points say so.

NOTE [Accumulating]. A step of k micro-batches of x samples takes t = k (gamma x + d) + u: d is the fixed part of a
forward and backward, u the update, and delta = d + u. Two coefficients of a line do not tell d from u, so the
throughput of accumulating lies between that of one micro-batch (u = 0) and k x / (k gamma x + delta) (d = 0), until a
step is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, sqrt
from typing import Any, Final, Literal, TypeAlias, cast, final

from spillway.advisor.bench import Trial
from spillway.advisor.fits import FEWEST, LEVEL, Line, fit_knee, fit_line
from spillway.advisor.measurements import MB, Experiment, Samples, Seen
from spillway.advisor.model import Cost, pays, pays_by_score, pays_with_fragments, point, score, whole
from spillway.costs.fitting import below
from spillway.units import Bytes, Seconds, format_bytes, format_seconds

PLAIN_NAMES: Final = ("exact", "plain", "keep-all")
"""What training without a method is called, in this order."""
LINEAR: Final = 0.97
"""R from which on a line is the law: the paper's of all methods but DTR."""
ENOUGH: Final = 4
"""Batch sizes: fewer leave one degree of freedom, and intervals without use."""
FAR: Final = 1.5
"""A batch of so many times the largest that ran is beyond what was measured."""
FASTER: Final = 1.03
"""A smaller batch that was measured to be more than so many times as fast as the largest is foretold to be goes against
the model, and is the one to take."""
APART: Final = 1.1
"""The ratio of two peaks of the same batch from which on something besides the batch decides."""

SAME: Final = 0.98
"""The share of the method's throughput from which on accumulating gains the same."""

LAWS: Final = (
    "alpha", "beta", "gamma", "delta", "r_memory", "r_time", "intervals", "small_batches", "own_limit_bytes"
)  # fmt: skip
"""What JSON says of a method's fits."""

Verdict: TypeAlias = Literal["plain", "pays", "does not pay", "does not fit", "unknown"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The batch at which a method is fastest, and how fast."""

    size: int
    throughput: float
    """Samples per second."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A method's two laws."""

    memory: Line
    time: Line
    knee: Line
    """Time with a flat part for small batches."""
    cost: Cost
    """By `time`, or by `knee` if that was asked for."""
    limit: float
    """Bytes that its steps may take: what ran where memory ran out earlier than the device says."""
    most: int
    """The largest batch that ran."""
    sizes: frozenset[int]
    """That a line goes through."""

    @property
    def law_of_time(self) -> Line:
        """That `cost` is by."""
        return self.knee if self.cost.knee else self.time

    @property
    def largest(self) -> float:
        """The batch whose peak is the limit; infinite if peaks do not grow."""
        return self.cost.largest(self.limit)

    def with_communication(self, seconds: Seconds) -> Fitted:
        """The same with so many seconds more in every step."""
        time, knee = (replace(line, intercept=line.intercept + seconds) for line in (self.time, self.knee))
        return replace(self, time=time, knee=knee, cost=self.cost.with_communication(seconds))

    def best(self, cost: Cost) -> Best | None:
        """At the largest whole batch, or where peaks do not grow the largest that ran; None if none fits."""
        size = whole(cost.largest(self.limit))
        size = self.most if size == inf else int(size)
        return Best(size=size, throughput=cost.throughput(size)) if size >= 1 else None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A method of an experiment. What cannot be told is None."""

    experiment: Experiment
    method: str
    verdict: Verdict
    limit: float
    """Bytes that steps may take."""
    fitted: Fitted | None
    """None if there are fewer than two batch sizes with a peak, or with a time."""
    predicted: Best | None
    measured: Best | None
    """The fastest of all that ran, be it on paper: `Experiment.seen`."""
    smaller: Best | None = None
    """The fastest of what ran at smaller batches than is predicted."""
    score: float | None = None
    """P, bytes per second; of methods whose plain training was fitted."""
    point: float | None = None
    by_score: bool | None = None
    """Whether it pays by Inequality 14."""
    by_ratio: bool | None = None
    """Whether it pays by Inequality 11."""
    by_fragments: bool | None = None
    """Whether it pays by Inequality 20 with the shares of memory that were found."""
    sure: float | None = None
    """Probability of the verdict, as far as scatter goes."""
    warnings: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether it is of training without a method."""
        return self.method == plain_name(self.experiment)

    @property
    def times_point(self) -> float | None:
        """The score as a multiple of the point, as the paper draws it: infinite where the score is."""
        if self.score is None or not self.point:
            return None
        return self.score / self.point if self.score < inf else inf

    @property
    def taken(self) -> Best | None:
        """What to train at with this method: as predicted, unless a smaller batch was seen to be faster."""
        return self.smaller if _goes_against(self.smaller, self.predicted) else self.predicted

    @property
    def reaches(self) -> float:
        """Samples per second at that; 0 where nothing is predicted."""
        return 0.0 if self.taken is None else self.taken.throughput

    def to_json(self) -> dict[str, Any]:
        """The row as JSON can hold it: bytes, seconds, samples per second; null for the unknown and the infinite."""
        there = self.experiment
        return {
            "network": there.network, "hardware": there.hardware, "method": self.method, "layers": there.layers or None,
            "hidden": there.hidden or None, "precision": there.precision or None, "source": there.source or None,
            "limit_bytes": _finite(self.limit), **_laws(self.fitted),
            "score": _finite(self.score), "point": _finite(self.point),
            "predicted_batch": self.predicted and self.predicted.size,
            "predicted_throughput": self.predicted and self.predicted.throughput,
            "predicted_throughput_range": throughput_range(self),
            "taken_batch": self.taken and self.taken.size,
            "taken_throughput": self.taken and self.taken.throughput,
            f"{there.seen}_batch": self.measured and self.measured.size,
            f"{there.seen}_throughput": self.measured and self.measured.throughput,
            "by_score": self.by_score, "by_ratio": self.by_ratio, "by_fragments": self.by_fragments,
            "sure": self.sure, "verdict": self.verdict, "warnings": list(self.warnings),
        }  # fmt: skip


def _laws(fitted: Fitted | None) -> dict[str, Any]:
    if fitted is None:
        return dict.fromkeys(LAWS)
    memory, time, knee = fitted.memory, fitted.time, fitted.knee
    best = fitted.best(_cost(memory, knee))
    return {
        "alpha": memory.slope, "beta": memory.intercept, "gamma": time.slope, "delta": time.intercept,
        "r_memory": memory.r, "r_time": time.r,
        "intervals": {
            "level": LEVEL, "alpha": memory.slope_interval, "beta": memory.intercept_interval,
            "gamma": time.slope_interval, "delta": time.intercept_interval,
        },
        "small_batches": {
            "a": knee.slope * knee.knee, "k": knee.slope, "b": knee.intercept, "r_time": knee.r,
            "predicted_batch": best and best.size, "predicted_throughput": best and best.throughput,
        },
        "own_limit_bytes": fitted.limit,
    }  # fmt: skip


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def default_limit(experiment: Experiment) -> float:
    """The largest peak that ran, with any method: what is known to fit. Infinite without any peak, and so any fit."""
    return max((peak for samples in experiment.methods.values() for peak in samples.peaks.values()), default=inf)


def advise(experiment: Experiment, limit: float, *, small_batches: bool = False) -> list[Row]:
    """A row for every method, the plain one first, where steps may take `limit` bytes; with `small_batches` by t =
    max(a, k x) + b instead of the line."""
    fits = {name: fit(samples, limit, small_batches=small_batches) for name, samples in experiment.methods.items()}
    return judge(experiment, fits, limit)


def judge(experiment: Experiment, fits: Mapping[str, Fitted | None], limit: float) -> list[Row]:
    """`advise` with fits that are there already, by method."""
    name = plain_name(experiment)
    plain = fits.get(name) if name else None
    return [
        _row(experiment, method, experiment.methods[method], fits[method], None if method == name else plain,
             limit, is_plain=method == name)
        for method in sorted(fits, key=lambda method: method != name)
    ]  # fmt: skip


def plain_name(experiment: Experiment) -> str | None:
    """The method that is none; None if it was not measured."""
    return next((name for name in PLAIN_NAMES if name in experiment.methods), None)


def fit(samples: Samples, limit: float, *, small_batches: bool = False) -> Fitted | None:
    """Both laws of a method; None without two batch sizes for each."""
    if min(len(samples.seconds), len(samples.peaks)) < FEWEST:
        return None
    memory, time, knee = fit_line(samples.peaks), fit_line(samples.seconds), fit_knee(samples.seconds)
    cost = _cost(memory, knee if small_batches else time)
    most = max(samples.ran)
    failed = min((size for size in samples.failed if size > most), default=None)
    # Fragments: where memory ran out before the device is full by the fit, what ran is what there is.
    if failed is not None and cost.largest(limit) >= failed:
        limit = min(limit, cost.nbytes(most))
    sizes = frozenset({*samples.peaks, *samples.seconds})
    return Fitted(memory=memory, time=time, knee=knee, cost=cost, limit=limit, most=most, sizes=sizes)


def _cost(memory: Line, time: Line) -> Cost:
    return Cost(alpha=memory.slope, beta=memory.intercept, gamma=time.slope, delta=time.intercept, knee=time.knee)


def _row(
    experiment: Experiment, method: str, samples: Samples, fitted: Fitted | None, plain: Fitted | None, limit: float, *,
    is_plain: bool,
) -> Row:  # fmt: skip
    best = None if fitted is None else fitted.best(fitted.cost)
    smaller = None if best is None else _best(samples.fastest_below(best.size))
    common: dict[str, Any] = {
        "experiment": experiment, "method": method, "limit": limit, "fitted": fitted, "predicted": best,
        "measured": _best(samples.fastest_below(inf)), "smaller": smaller,
        "warnings": tuple(_warnings(experiment, samples, fitted, smaller, limit)),
    }  # fmt: skip
    if is_plain:
        fits = fitted is None or best is not None
        there = None if fitted is None else point(fitted.cost, limit)
        return Row(verdict="plain" if fits else "does not fit", point=there, **common)
    if fitted is None or plain is None:
        seen, why = _as_ran(experiment, samples, plain)
        return Row(verdict=seen, **common | {"warnings": (*common["warnings"], *why)})
    # By whole batches, which is what can be trained.
    theirs, chance, verdict = plain.best(plain.cost), _chance(plain, fitted), "does not fit"
    if best is not None:
        verdict = "pays" if theirs is None or best.throughput >= theirs.throughput else "does not pay"
    shares = {"plain_share": plain.limit / limit, "method_share": fitted.limit / limit}
    return Row(
        verdict=cast(Verdict, verdict), score=score(plain.cost, fitted.cost), point=point(plain.cost, limit),
        by_score=pays_by_score(plain.cost, fitted.cost, limit),
        by_ratio=pays(plain.cost, fitted.cost, plain.limit, fitted.limit),
        by_fragments=pays_with_fragments(plain.cost, fitted.cost, limit, **shares),
        sure={"pays": chance, "does not pay": None if chance is None else 1 - chance}.get(verdict), **common,
    )  # fmt: skip


def _as_ran(experiment: Experiment, samples: Samples, plain: Fitted | None) -> tuple[Verdict, tuple[str, ...]]:
    """Where one has no lines: by the largest batches that ran, with a sentence that says so.

    What is faster there pays. What is slower does not if a larger batch of it found no memory, and is not known
    otherwise; nor is anything of one whose memory was looked at and not seen to grow: larger batches were not tried.
    """
    name = plain_name(experiment)
    theirs = experiment.methods[name] if name else Samples()
    if not samples.seconds or not theirs.seconds or _is_flat(samples) or _is_flat(theirs):
        return "unknown", ()
    size, other = max(samples.seconds), max(theirs.seconds)
    mine, base = size / samples.seconds[size], other / theirs.seconds[other]
    foretold = None if plain is None else plain.best(plain.cost)
    best = max(base, 0.0 if foretold is None else foretold.throughput)
    if mine < best and not any(failed > size for failed in samples.failed):
        return "unknown", ()
    why = (
        f"There are no lines to compare: the verdict is by the largest batches that ran, {mine:.4g} samples/s at "
        f"{size} and plain training's {base:.4g} at {other}"
    )
    if mine < best:
        fastest = max(number / seconds for number, seconds in samples.seconds.items())
        return ("does not pay", (f"{why}.",)) if fastest < best else ("unknown", ())
    tried = plain is not None or any(failed > other for failed in theirs.failed)
    return "pays", (f"{why}{'' if tried else ', of which no larger one was tried'}.",)


def _best(found: tuple[int, float] | None) -> Best | None:
    return None if found is None else Best(size=found[0], throughput=found[1])


def _chance(plain: Fitted, method: Fitted) -> float | None:
    """The probability that the method's best is the faster one; None where scatter is not known, or one cannot run."""
    fits = (plain.memory, plain.time, method.memory, method.time)
    if any(line.covariance is None for line in fits) or not plain.largest or not method.largest:
        return None
    (mine, my_variance), (theirs, their_variance) = _slowness(method), _slowness(plain)
    gain, error = theirs - mine, sqrt(my_variance + their_variance)
    if not error:
        return 1.0 if gain >= 0 else 0.0
    return below(gain / error, min(line.freedom for line in fits))


def _slowness(fitted: Fitted) -> tuple[float, float]:
    """1/v at the largest batch, seconds per sample, and its variance."""
    size, cost = fitted.largest, fitted.cost
    time = fitted.law_of_time
    if size == inf:
        return cost.gamma, (time.covariance or ((0.0, 0.0),))[0][0]
    falls = (cost.delta if size > cost.knee else cost.seconds(size)) / size**2
    off = fitted.memory.error_at(size) / cost.alpha
    return cost.seconds(size) / size, (time.error_at(size) / size) ** 2 + (falls * off) ** 2


def _warnings(
    experiment: Experiment, samples: Samples, fitted: Fitted | None, smaller: Best | None, limit: float
) -> Iterator[str]:
    if _is_flat(samples):
        yield (
            f"Its peak was not seen to grow with the batch up to batch {max(samples.off_line)}, so that no line is "
            f"fitted: it takes larger batches."
        )
        return
    if samples.spread > APART:
        yield (
            f"Peaks of the same batch size differ by up to {samples.spread:.2f} times: something besides the batch "
            f"decides them, as in DTR, and the last one of each was taken."
        )
    if fitted is None:
        yield (
            f"Not fitted: {len(samples.peaks)} batch sizes have a peak and {len(samples.seconds)} a time, and a line "
            f"takes {FEWEST} of each."
        )
        return
    for what, line in (("memory", fitted.memory), ("time", fitted.time)):
        coefficients = {"slope": "growth", "intercept": "fixed part"}
        if line.count < ENOUGH:
            yield f"The line of {what} goes through {line.count} batch sizes alone; take {ENOUGH} or more."
        if line.r is not None and line.r < LINEAR:
            yield f"The {what} is not linear in the batch: R is {line.r:.3f}, and {LINEAR} or more where the law holds."
        if line.held:
            yield f"The {coefficients[line.held]} of {what} came out below 0 and was held at 0."
    straight, bent = fitted.time.r, fitted.knee.r
    if straight is not None and straight < LINEAR and bent is not None and bent >= LINEAR:
        yield (
            f"Time is flat up to batch {fitted.knee.knee:.1f}: R of max(a, k x) + b is {bent:.4f}. Decide with "
            f"--small-batches."
        )
    best = fitted.best(fitted.cost)
    if smaller is not None and best is not None and _goes_against(smaller, best):
        yield (
            f"At batch {smaller.size} {smaller.throughput:.4g} samples/s were {experiment.seen}, "
            f"{smaller.throughput / best.throughput:.2f} times what is foretold of the largest: throughput does not "
            f"grow with the batch here, as the model has it. Take that one."
        )
    if fitted.largest == inf:
        yield "Its memory does not grow with the batch: no largest batch can be told, the largest that ran is taken."
    elif fitted.limit < limit:
        yield (
            f"Memory ran out above batch {fitted.most}, by the fit at {fitted.limit / limit:.0%} of what steps "
            f"may take: that much is taken as its own limit."
        )
    elif fitted.largest > FAR * fitted.most:
        yield (
            f"A batch of {fitted.largest:.0f} is {fitted.largest / fitted.most:.1f} times the largest that ran, "
            f"{fitted.most}."
        )


def _goes_against(smaller: Best | None, best: Best | None) -> bool:
    return smaller is not None and best is not None and smaller.throughput > FASTER * best.throughput


def _is_flat(samples: Samples) -> bool:
    """Whether peaks are there, and were not seen to grow."""
    return bool(samples.off_line) and not samples.peaks


COLUMNS: Final = (
    "alpha", "beta", "R of memory", "gamma", "delta", "R of time", "score/point", "batch", "samples/s", "x plain",
    "seen", "sure", "verdict",
)  # fmt: skip


def cells(row: Row, times: float | None, digits: int = 3) -> dict[str, str]:
    """What a table says of a row, by `COLUMNS`, empty where nothing is known. `times` is its predicted best as a
    multiple of the plain one's; R has so many `digits`."""
    told = dict.fromkeys(COLUMNS, "") | {"seen": as_measured(row), "verdict": row.verdict}
    if row.fitted is not None:
        memory, cost, time = row.fitted.memory, row.fitted.cost, row.fitted.law_of_time
        told |= {
            "alpha": f"{memory.slope / MB:.2f} MB", "beta": format_bytes(round(memory.intercept)),
            "gamma": format_seconds(cost.gamma), "delta": format_seconds(cost.delta),
            "R of memory": "" if memory.r is None else f"{memory.r:.{digits}f}",
            "R of time": "" if time.r is None else f"{time.r:.{digits}f}",
        }  # fmt: skip
    if row.times_point is not None:
        told["score/point"] = f"{row.times_point:.3f}"
    if row.predicted is not None:
        ends = throughput_range(row)
        between = "" if ends is None else f" ({ends[0]:.3g} to {ends[1]:.3g})"
        told |= {"batch": f"{row.predicted.size}", "samples/s": f"{row.predicted.throughput:.4g}{between}"}
    if times is not None:
        told["x plain"] = f"{times:.3f}"
    if row.sure is not None:
        told["sure"] = f"{row.sure:.0%}"
    return told


def throughput_range(row: Row) -> tuple[float, float] | None:
    """Samples per second of the predicted best, between which 80 % of simulated ones lie; None for measured ones."""
    spread = row.experiment.spread
    if spread is None or row.predicted is None:
        return None
    return row.predicted.throughput / spread[1], row.predicted.throughput / spread[0]


def as_measured(row: Row) -> str:
    """The highest throughput and its batch, and of another that is to be taken; for a table."""
    told = [] if row.measured is None else [f"{row.measured.throughput:.4g} at {row.measured.size}"]
    if row.taken is not row.predicted and row.taken is not None:
        taken = f"{row.taken.throughput:.4g} at {row.taken.size} (taken)"
        told = [taken] if row.taken == row.measured else [*told, taken]
    return ", ".join(told)


def ratios(rows: Sequence[Row]) -> Mapping[str, float]:
    """By method its predicted best as a multiple of the plain one's; none without that."""
    plain = plain_row(rows)
    if plain is None or plain.predicted is None:
        return {}
    base = plain.predicted.throughput
    return {row.method: row.predicted.throughput / base for row in rows if row.predicted is not None}


def sentence(rows: Sequence[Row]) -> str:
    """The answer about one experiment."""
    there = rows[0].experiment
    about = there.about
    plain = plain_row(rows)
    known = [row for row in rows if row is not plain and row.predicted is not None]
    if plain is None or plain.fitted is None:
        return f"{about}: nothing can be predicted, {_lack(plain, rows)}.{_fastest(rows)}"
    if not known:
        alone = f"reaches {_speed(plain)}" if plain.predicted else "does not fit in memory"
        return f"{about}: plain training {alone}; no other can be predicted, {_lack(plain, rows)}.{_fastest(rows)}"
    return f"{about}: {_answer(plain, max(known, key=lambda row: row.reaches))}"


def _answer(plain: Row, best: Row) -> str:
    if plain.predicted is None:
        return f"plain training does not fit in memory; take {best.method} for {_speed(best)}."
    ratio, pays = best.reaches / plain.reaches, best.reaches >= plain.reaches
    sure = "how sure cannot be told"
    if best.sure is not None:
        sure = f"{'over 99' if best.sure > 0.99 else f'{100 * best.sure:.0f}'} % sure"
    if plain.taken is not plain.predicted or best.taken is not best.predicted:
        sure = f"by what was {best.experiment.seen}" + ", and against the model" * (pays != (best.verdict == "pays"))
    if remarked := [row.method for row in (plain, best) if row.warnings]:
        sure += f" (see the remarks on {' and '.join(remarked)})"
    if pays:
        return f"{best.method} pays: {_speed(best)}, {ratio:.2f} times plain's {_speed(plain)}; {sure}."
    return (
        f"stay plain: {_speed(plain)}; the nearest method, {best.method}, reaches {ratio:.2f} times that: "
        f"{_speed(best)}; {sure}."
    )


def _speed(row: Row) -> str:
    """At which batch a method is how fast, as foretold and as seen; of methods of which something is foretold."""
    if row.taken is None or row.predicted is None:
        raise ValueError(f"nothing is foretold of {row.method}")
    there = f"{row.taken.throughput:.4g} samples/s at batch {row.taken.size}"
    if row.taken is row.predicted:
        return f"{there}{_measured(row)}"
    largest = f"{row.predicted.size}: {row.predicted.throughput:.4g}"
    return f"{there}, as {row.experiment.seen} (foretold of its largest, {largest})"


def _measured(row: Row) -> str:
    best = row.measured
    return "" if best is None else f" ({row.experiment.seen}: {best.throughput:.4g} at {best.size})"


def _lack(plain: Row | None, rows: Sequence[Row]) -> str:
    if plain is None:
        names = f"{', '.join(PLAIN_NAMES[:-1])} or {PLAIN_NAMES[-1]}"
        return f"because plain training ({names}) was not {rows[0].experiment.seen}"
    samples = plain.experiment.methods[plain.method]
    if not samples.ran:
        return f"because plain training ran out of memory wherever it was tried, from batch {min(samples.failed)} on"
    if plain.fitted is None and _is_flat(samples):
        return (
            f"because the peak of plain training was not seen to grow with the batch, up to batch "
            f"{max(samples.off_line)}"
        )
    if plain.fitted is None:
        return "because plain training has no peaks and times at two batch sizes each"
    if len(rows) == 1:
        return f"because no method was {plain.experiment.seen}"
    if all(_is_flat(row.experiment.methods[row.method]) for row in rows if row is not plain):
        return "because no method's peak was seen to grow with the batch"
    return "because no method has peaks and times at two batch sizes each that let it fit"


def _fastest(rows: Sequence[Row]) -> str:
    measured = [row for row in rows if row.measured is not None]
    if len(measured) < 2:
        return ""
    best = max(measured, key=lambda row: row.measured.throughput if row.measured else 0.0)
    return f" Fastest as {best.experiment.seen}: {best.method}{_measured(best)}."


# ---------------------------------------------------------------------- what follows


def recommended(rows: Sequence[Row]) -> Row | None:
    """The row with the highest throughput, each at the batch to take; None where nothing is predicted. Of two the
    first, plain training."""
    return max((row for row in rows if row.predicted is not None), key=lambda row: row.reaches, default=None)


def plain_row(rows: Sequence[Row]) -> Row | None:
    """Plain training; None where it was not measured."""
    return next((row for row in rows if row.is_plain), None)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """Plain training with the gradients of several micro-batches, beside a method that wins by its batch alone."""

    method: str
    """Which wins."""
    best: Best
    micro: int
    """Samples of a micro-batch."""
    count: int
    """Micro-batches of a step: with as many it has the samples of the method's batch, or nearly."""
    least: float
    """Samples per second if nothing of the fixed time is shared."""
    most: float
    """Samples per second if all of it is."""
    seen: Seen
    """Whether such a step is measured or simulated."""
    measured: float | None = None
    """Samples per second of such a step; None where it was not tried."""

    @property
    def size(self) -> int:
        """Samples of a step."""
        return self.micro * self.count

    def sentence(self) -> str:
        """Whether accumulating gives the same gain without the method."""
        gains, step = self.best.throughput, f"{self.count} accumulated batches of {self.micro}"
        why = f"{self.method} is slower per sample and gains by its larger batch alone"

        def verdict(share: float) -> str:
            does = "gives the same gain without" if share >= SAME else "does not replace"
            return f"accumulating gradients {does} {self.method}"

        if self.measured is not None:
            share = self.measured / gains
            reached = (
                f"plain training with {step} was {self.seen} at {self.measured:.4g} samples/s, {share:.2f} times that"
            )
            return f"{why}; {reached}: {verdict(share)}."
        low, high = self.least / gains, self.most / gains
        reached = f"plain training with {step} reaches {low:.2f} to {high:.2f} times that, depending on what is shared"
        same = verdict(1.0) if low >= SAME else verdict(0.0) if high < SAME else "try such a step"
        return f"{why}; {reached}: {same}."

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "method": self.method, "micro_batch": self.micro, "micro_batches": self.count,
            "least_throughput": self.least, "most_throughput": self.most, f"{self.seen}_throughput": self.measured,
            "sentence": self.sentence(),
        }  # fmt: skip


def accumulation_of(rows: Sequence[Row], gradient_bytes: Bytes) -> Accumulation | None:
    """What to offer beside the recommended method; None where it wins by more than its largest batch, or nothing
    accumulates. From the second micro-batch on `gradient_bytes`, those of all parameters, are there from the
    beginning."""
    best, plain = recommended(rows), plain_row(rows)
    if best is None or plain is None or best is plain or best.fitted is None or plain.fitted is None:
        return None
    if best.predicted is None or best.taken is not best.predicted or best.fitted.cost.gamma <= plain.fitted.cost.gamma:
        return None
    cost = plain.fitted.cost
    micro = whole(cost.largest(plain.fitted.limit - gradient_bytes))
    micro = min(micro, plain.fitted.most if cost.alpha == 0 else micro, best.predicted.size)
    if plain.taken is not None:
        micro = min(micro, plain.taken.size)  # a smaller one that was seen to be faster
    count = round(best.predicted.size / micro) if micro >= 1 else 0
    if count < 2 or plain.predicted is None:
        return None
    size = int(micro)
    shared = count * (cost.seconds(size) - cost.delta) + cost.delta
    return Accumulation(
        method=best.method, best=best.predicted, micro=size, count=count,
        least=cost.throughput(size), most=count * size / shared, seen=best.experiment.seen,
    )  # fmt: skip


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A prediction beside what was measured, or simulated, afterwards."""

    method: str
    size: int
    predicted_seconds: Seconds
    predicted_peak: float
    measured_seconds: Seconds | None
    """None where memory ran out."""
    measured_peak: Bytes | None
    seen: Seen
    fitted: bool
    """Whether the lines go through a trial at this batch, so that the prediction is none of something new."""

    @classmethod
    def of(cls, method: str, fitted: Fitted, trial: Trial, seen: Seen) -> Verified:
        """From a method's lines and a trial."""
        size, cost = trial.size, fitted.cost
        return cls(
            method=method, size=size, predicted_seconds=cost.seconds(size), predicted_peak=cost.nbytes(size),
            measured_seconds=trial.seconds, measured_peak=trial.peak, fitted=size in fitted.sizes, seen=seen,
        )  # fmt: skip

    def sentence(self, limit: Bytes) -> str:
        """Predicted beside seen."""
        speed, peak = self.size / self.predicted_seconds, format_bytes(round(self.predicted_peak))
        among = ", from trials of this batch among others" if self.fitted else ""
        predicted = f"{self.method} at batch {self.size}: predicted {speed:.4g} samples/s in {peak}{among}"
        if self.measured_seconds is None or self.measured_peak is None:
            return f"{predicted}; it took more than {format_bytes(limit)}."
        measured = self.size / self.measured_seconds
        off, more = measured / speed - 1, self.measured_peak / self.predicted_peak - 1
        there = format_bytes(self.measured_peak)
        above = "" if self.measured_peak <= limit else f", which is more than {format_bytes(limit)}"
        return f"{predicted}; {self.seen} {measured:.4g} ({off:+.1%}) in {there} ({more:+.1%}){above}."

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it: samples per second, and bytes."""
        measured = None if self.measured_seconds is None else self.size / self.measured_seconds
        return {
            "method": self.method, "batch": self.size, "fitted": self.fitted,
            "predicted_throughput": self.size / self.predicted_seconds, f"{self.seen}_throughput": measured,
            "predicted_peak_bytes": round(self.predicted_peak), f"{self.seen}_peak_bytes": self.measured_peak,
        }  # fmt: skip
