"""Which batch sizes of which method are measured.

NOTE [Sizes]. The peak of a step is the highest of several lines m = alpha x + beta, each of a moment of the step: the
update, where no activation is left, is flat; the end of the forward grows fastest. Every one has a beta of 0 or more.

 1. So m(y) is at most m(x) y / x for y > x, whatever the lines: no batch is measured that may be above the limit by
    that, until three sizes lie on one line that grows, which then says more. Where the highest account before the
    update is known it stands for m(x): the update does not grow. What is there all the time belongs to every beta, and
    is taken from both sides. Of time the same is taken to hold.
 2. Sizes are doubled until the limit or the longest step is reached, which may be longer until memory grows. What lies
    on one line with the largest sizes is what memory is fitted to (`steady`): smaller ones, whose peak another moment
    has, lie above it and are left out.
 3. Between these the widest gap is halved until there are enough points; where there is no line, that between the two
    largest until there is one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import floor, inf
from typing import Final, final

from spillway.advisor.bench import AbstractBench, Trial
from spillway.advisor.fits import FEWEST, Line, fit_line
from spillway.advisor.measurements import Experiment, Samples
from spillway.errors import SpillwayError, TrialError, WorkloadError
from spillway.units import Bytes, Seconds, format_bytes

POINTS: Final = 5
"""Batch sizes of a method on the line of its memory."""
TOGETHER: Final = 3
"""Sizes that make a line which others can be held against."""
OFF: Final = 0.003
"""How far, of its peak, a size may be off the line of larger ones; more by how far it is from them."""
GROWTH: Final = 0.01
"""The share of a peak by which it has to be above another one to have grown."""
PATIENCE: Final = 3.0
"""So many times as long a step may take as long as memory is not seen to grow on a line."""
GAIN: Final = 1.15
"""A larger batch is worth a trial if it is so many times as large."""
ALWAYS: Final = ("parameters", "optimizer state")
"""Kinds of bytes that are there all the time."""
TRIES: Final = 2
"""So many more trials of a method may run out of memory after the first that did; then no larger one is tried."""
SMALLEST: Final = (1, 2)
"""What chosen sizes begin with: the second where a step of the first fails, as where a batch is normalized."""
MOST: Final = 1 << 20
"""Samples in a batch: nothing is measured above."""

Clock = Callable[[], Seconds]


def on_line(peaks: Mapping[int, float]) -> list[int]:
    """The sizes whose peaks lie on one line with those of the largest ones, in order; empty if fewer than three do.

    Smaller sizes above that line have their peak at another moment. Where one lies below it nothing is on a line: no
    several moments explain that.
    """
    sizes = sorted(peaks)
    place = len(sizes) - 2
    while place > 0:
        size, line = sizes[place - 1], fit_line({one: peaks[one] for one in sizes[place:]})
        far = 1 + (sizes[place] - size) / (sizes[-1] - sizes[place])
        off = peaks[size] - line.at(size)
        if abs(off) > OFF * far * peaks[size]:
            return sizes[place:] if off > 0 and len(sizes) - place >= TOGETHER else []
        place -= 1
    return sizes if len(sizes) >= TOGETHER else []


def steady(peaks: Mapping[int, float]) -> list[int]:
    """The sizes that memory is fitted to: those on one line with the largest, if that grows.

    Where memory follows no line, all sizes from which on it grows, and R has to tell. Empty if growth is not seen: then
    nothing is known of larger batches.
    """
    sizes = on_line(peaks)
    if sizes:
        return sizes if _grown(peaks, sizes[0], sizes[-1]) else []
    sizes = sorted(peaks)
    while len(sizes) > 1 and not _grown(peaks, sizes[0], sizes[1]):
        sizes = sizes[1:]
    fewest = min(TOGETHER, max(len(peaks), FEWEST))
    return sizes if len(sizes) >= fewest else []


def _grown(peaks: Mapping[int, float], size: int, larger: int) -> bool:
    return peaks[larger] - peaks[size] > GROWTH * peaks[larger]


@final
class Campaign:
    """The trials of several methods of one workload, kept while they come.

    Arguments:
        methods: Names, in the order in which they are measured.
        limit: Bytes that a step may take; a trial that took more has run out of memory.
        batches: The sizes to measure; if left out they are chosen (NOTE [Sizes]).
        longest: No size is measured whose step is expected to take longer.
    """

    def __init__(
        self, bench: AbstractBench, methods: Sequence[str], limit: Bytes, *, batches: Sequence[int] = (),
        longest: Seconds = inf, clock: Clock = time.monotonic,
    ) -> None:  # fmt: skip
        self.bench = bench
        self.methods = tuple(methods)
        self.limit = limit
        self.trials: dict[str, dict[int, Trial]] = {method: {} for method in methods}
        """What was measured, by method and size; a trial above the limit without figures."""
        self.faults: dict[str, str] = {}
        """What cannot be measured, a method or a "method at batch 3", and why, a sentence."""
        self.left_out: dict[str, list[int]] = {}
        """Of the sizes that were asked for, those that would not fit by the sizes before."""
        self.refused: dict[str, dict[int, SpillwayError]] = {method: {} for method in methods}
        """Sizes at which a step failed, but not for want of memory."""
        self._batches = sorted(set(batches))
        self._longest = longest
        self._clock = clock
        self._began: dict[str, Seconds] = {}
        self._spent: dict[str, Seconds] = {}

    def run(self) -> Generator[Trial, None, None]:
        """Measure, one trial after the other. What cannot be measured is noted, and the others go on.

        Raises SpillwayError if the first method, which the others are compared with, cannot be measured at any size,
        and WorkloadError for a workload whose batches do not follow the batch size.
        """
        for method in self.methods:
            self._began[method] = self._clock()
            try:
                yield from self._given(method) if self._batches else self._chosen(method)
                refused = self.refused[method]
                if refused and not self.trials[method]:  # all failed: what the last one raised is of the method
                    for size in refused:
                        del self.faults[_at(method, size)]
                    raise list(refused.values())[-1]
            except SpillwayError as error:
                if method == self.methods[0]:
                    raise
                # Told once: of a further method with the same fault, whose it is.
                first = next((name for name, fault in self.faults.items() if fault == str(error)), None)
                self.faults[method] = str(error) if first is None else f"for the same reason as {first}."
            self._spent[method] = self._clock() - self._began[method]

    def measure(self, method: str, size: int, *, again: bool = False) -> Trial:
        """One more trial, also of a method that is none of the campaign's; `again` even if there was one, and then
        what took more than the limit is told too."""
        trial = self.bench.measure_again(method, size) if again else self.bench.measure(method, size)
        fits = trial.peak is None or trial.peak <= self.limit
        kept = trial if fits else replace(trial, peak=None, seconds=None, by_kind={})
        self.trials.setdefault(method, {})[size] = kept
        return trial if again else kept

    def _tried(self, method: str, size: int) -> Iterator[Trial]:
        """A trial; none of one that failed, which is noted if another size may do.

        Raises WorkloadError if a plain batch of another size has the same bytes, and so has the rest of its step.
        """
        try:
            trial = self.measure(method, size)
        except SpillwayError as error:
            if not isinstance(error, TrialError) and not self._peaks(method):
                raise
            self.refused[method][size] = error
            self.faults[_at(method, size)] = str(error)
            return
        drawn = _drawn(trial) if method == self.methods[0] else None
        for other in self.trials[method].values() if drawn is not None else ():
            if other.size != size and _drawn(other) == drawn:
                small, large = sorted((other.size, size))
                raise WorkloadError(
                    f"The workload {self.bench.name} takes batch= and does not follow it: its batches of {small} and "
                    f"of {large} samples have the same {format_bytes(trial.by_kind['input'])}; let its batches have as "
                    f"many samples as batch= says."
                )
        yield trial

    @property
    def unknown(self) -> Mapping[str, int]:
        """Methods whose memory was not seen to grow at sizes that were chosen, and the largest that ran.

        Longer steps may show more of them. Where sizes were asked for the length of steps decides nothing.
        """
        if self._batches:
            return {}
        peaks = {method: self._peaks(method) for method in self.methods}
        return {method: max(found) for method, found in peaks.items() if found and not steady(found)}

    @property
    def current(self) -> str | None:
        """The method that is being measured."""
        return next((name for name in self._began if name not in self._spent), None)

    @property
    def remaining(self) -> Seconds | None:
        """What the rest takes if every method takes what those before took on average; None before one is done."""
        if not self._spent:
            return None
        each = sum(self._spent.values()) / len(self._spent)
        now = self.current
        left = 0.0 if now is None else max(each - (self._clock() - self._began[now]), 0.0)
        return left + each * (len(self.methods) - len(self._began))

    def samples(self, method: str) -> Samples:
        """What is known of a method: all times, and the peaks that memory is fitted to."""
        samples, peaks = Samples(), self._peaks(method)
        for size in steady(peaks):
            samples.add_peak(size, peaks[size])
        samples.off_line = {size: peak for size, peak in peaks.items() if size not in samples.peaks}
        for size, trial in self.trials.get(method, {}).items():
            if trial.seconds is None:
                samples.failed.add(size)
            else:
                samples.seconds[size] = trial.seconds
        return samples

    def experiment(self, *, layers: str = "", hidden: str = "") -> Experiment:
        """What was measured so far, of every method of the campaign of which a trial is there."""
        methods = {method: self.samples(method) for method in self.methods if self.trials[method]}
        return Experiment(
            hardware=self.bench.hardware, network=self.bench.name, layers=layers, hidden=hidden, precision="",
            source="", methods=methods, spread=self.bench.spread,
        )  # fmt: skip

    # ------------------------------------------------------------------ sizes

    def _given(self, method: str) -> Iterator[Trial]:
        for size in self._batches:
            known = self.trials[method]
            if known and (any(trial.ran_out for trial in known.values()) or size > self._fits(method)):
                self.left_out.setdefault(method, []).append(size)
            else:
                yield from self._tried(method, size)

    def _chosen(self, method: str) -> Iterator[Trial]:
        plainly_refused = self.refused[self.methods[0]]
        size: int | None = next(size for size in SMALLEST if size == SMALLEST[-1] or size not in plainly_refused)
        while size is not None:
            yield from self._tried(method, size)
            size = self._next(method)
        while (between := self._between(method)) is not None:
            yield from self._tried(method, between)

    def _next(self, method: str) -> int | None:
        """Twice the largest, or what still fits; None if that is hardly more, or a larger one was refused.

        Where a size did not fit although the line said so, a steeper one has begun: the middle between.
        """
        largest = max(self._peaks(method), default=0)
        failed = [size for size, trial in self.trials[method].items() if trial.ran_out]
        refused = self.refused[method]
        if not self.trials[method]:
            return next((size for size in SMALLEST if size > max(refused)), None)
        if not largest or max(refused, default=0) > largest or len(failed) > TRIES:
            return None
        size = min(2 * largest, self._fits(method), self._quick(method), MOST)
        if failed:
            size = min(size, (largest + min(failed)) // 2)
        few = not self._settled(method)
        return size if size > largest and (few or size >= GAIN * largest) else None

    def _between(self, method: str) -> int | None:
        """The middle of the widest gap between sizes on the line; None if there are enough, or none is left."""
        peaks = self._peaks(method)
        # Where no three of the largest are on one line, the last line may have begun between the last two.
        sizes = steady(peaks) if on_line(peaks) else sorted(peaks)[-FEWEST:]
        if len(sizes) >= POINTS or len(sizes) < FEWEST:
            return None
        gaps = [
            (high - low, high, (low + high) // 2) for low, high in pairwise(sizes)
            if high - low > 1 and (low + high) // 2 not in self.refused[method]
        ]  # fmt: skip
        return max(gaps)[-1] if gaps else None

    def _fits(self, method: str) -> int:
        """The largest size that fits by what is known (rule 1)."""
        peaks = self._peaks(method)
        largest = max(peaks)
        if self._settled(method):
            return _largest(fit_line({size: peaks[size] for size in on_line(peaks)}), self.limit)
        trial = self.trials[method][largest]
        always = sum(trial.by_kind.get(kind, 0) for kind in ALWAYS)
        before = peaks[largest] if trial.before_update is None else trial.before_update
        return floor(largest * max(self.limit - always, 0) / max(before - always, 1))

    def _quick(self, method: str) -> int:
        """The largest size whose step is expected to be no longer than it may."""
        if self._longest == inf:
            return MOST
        seconds = {size: one.seconds for size, one in self.trials[method].items() if one.seconds is not None}
        largest, longest = max(seconds), self._longest * (1.0 if self._settled(method) else PATIENCE)
        if len(seconds) < TOGETHER:
            return floor(largest * longest / seconds[largest])
        return _largest(fit_line(seconds), longest)

    def _settled(self, method: str) -> bool:
        """Whether the largest sizes lie on one line that grows."""
        peaks = self._peaks(method)
        sizes = on_line(peaks)
        return bool(sizes) and _grown(peaks, sizes[0], sizes[-1])

    def _peaks(self, method: str) -> dict[int, float]:
        found = self.trials.get(method, {})
        return {size: float(trial.peak) for size, trial in sorted(found.items()) if trial.peak is not None}


def _at(method: str, size: int) -> str:
    return f"{method} at batch {size}"


def _drawn(trial: Trial) -> tuple[Bytes, Bytes | None] | None:
    """Bytes of the input and of the step until the update, alike where two batches are; None where not known."""
    drawn = trial.by_kind.get("input", 0)
    return (drawn, trial.peak if trial.before_update is None else trial.before_update) if drawn else None


def _largest(line: Line, most: float) -> int:
    if not line.slope:
        return MOST if line.intercept <= most else 0
    return max(floor(min((most - line.intercept) / line.slope, MOST)), 0)
