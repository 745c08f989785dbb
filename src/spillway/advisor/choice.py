"""What follows from rows of an answer: which one is recommended, whether accumulating gradients gains the same, and how
predictions compare with what was seen afterwards.

NOTE [Accumulating]. A step of k micro-batches of x samples takes t = k (gamma x + d) + u: d is the fixed part of a
forward and backward, u the update, and delta = d + u. Two coefficients of a line do not tell d from u, so the
throughput of accumulating lies between that of one micro-batch (u = 0) and k x / (k gamma x + delta) (d = 0), until a
step is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from spillway.advisor.bench import Trial
from spillway.advisor.measurements import Seen
from spillway.advisor.model import whole
from spillway.advisor.verdict import Best, Fitted, Row
from spillway.units import Bytes, Seconds, format_bytes

SAME: Final = 0.98
"""The share of the method's throughput from which on accumulating gains the same."""


def recommended(rows: Sequence[Row]) -> Row | None:
    """The row with the highest throughput, each at the batch to take; None where nothing is predicted. Of two the
    first, plain training."""
    return max((row for row in rows if row.predicted is not None), key=lambda row: row.reaches, default=None)


def plain_row(rows: Sequence[Row]) -> Row | None:
    """Plain training; None where it was not measured."""
    return next((row for row in rows if row.verdict == "plain" or row.method == "plain"), None)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """Plain training with the gradients of several micro-batches, beside a method that wins by its batch alone."""

    method: str
    """Which wins."""
    best: Best
    """Its prediction."""
    plain: Best
    """That of plain training without accumulating."""
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
        if self.measured is not None:
            share = self.measured / gains
            reached = (
                f"plain training with {step} was {self.seen} at {self.measured:.4g} samples/s, {share:.2f} times that"
            )
            return f"{self._why()}; {reached}: {self._verdict(share)}."
        low, high = self.least / gains, self.most / gains
        reached = f"plain training with {step} reaches {low:.2f} to {high:.2f} times that, depending on what is shared"
        same = {low >= SAME: self._verdict(1.0), high < SAME: self._verdict(0.0)}.get(True, "try such a step")
        return f"{self._why()}; {reached}: {same}."

    def _why(self) -> str:
        return f"{self.method} is slower per sample and gains by its larger batch alone"

    def _verdict(self, share: float) -> str:
        if share >= SAME:
            return f"accumulating gradients gives the same gain without {self.method}"
        return f"accumulating gradients does not replace {self.method}"

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "method": self.method, "micro_batch": self.micro, "micro_batches": self.count,
            "least_throughput": self.least, "most_throughput": self.most, f"{self.seen}_throughput": self.measured,
            "sentence": self.sentence(),
        }  # fmt: skip


def accumulation_of(rows: Sequence[Row], gradient_bytes: Bytes) -> Accumulation | None:
    """What to offer beside the recommended method; None where it wins by more than its largest batch, or nothing
    accumulates.

    Arguments:
        gradient_bytes: Of all parameters: from the second micro-batch on they are there from the beginning.
    """
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
        method=best.method, best=best.predicted, plain=plain.predicted, micro=size, count=count,
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
        return f"{predicted}; {self.seen} {measured:.4g} ({off:+.1%}) in {there} ({more:+.1%})."

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it: samples per second, and bytes."""
        measured = None if self.measured_seconds is None else self.size / self.measured_seconds
        return {
            "method": self.method, "batch": self.size, "fitted": self.fitted,
            "predicted_throughput": self.size / self.predicted_seconds, f"{self.seen}_throughput": measured,
            "predicted_peak_bytes": round(self.predicted_peak), f"{self.seen}_peak_bytes": self.measured_peak,
        }  # fmt: skip
