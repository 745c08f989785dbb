"""A bench whose steps follow laws, for tests of campaigns."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from spillway.advisor.bench import AbstractBench, Trial
from spillway.advisor.campaign import Campaign
from spillway.errors import SpillwayError

MB = 10**6
LIMIT = 1000 * MB


class Made(AbstractBench):
    """A bench whose steps follow laws; it counts who asked for what."""

    name = "made up"
    hardware = "paper"

    def __init__(
        self, peaks: Mapping[str, Callable[[int], float]], seconds: Mapping[str, Callable[[int], float]]
    ) -> None:
        self.asked: list[tuple[str, int]] = []
        self.before: dict[str, Callable[[int], float]] = {}
        """The highest account before the update, of methods of which that is known."""
        self._peaks, self._seconds = peaks, seconds

    def measure(self, method: str, size: int) -> Trial:
        self.asked.append((method, size))
        if method not in self._peaks:
            raise SpillwayError(f"{method} cannot be measured.")
        before = self.before.get(method)
        return Trial(
            method=method,
            size=size,
            peak=round(self._peaks[method](size)),
            seconds=self._seconds[method](size),
            before_update=None if before is None else round(before(size)),
        )

    def sizes(self, method: str) -> list[int]:
        """In the order in which they were asked for."""
        return [size for name, size in self.asked if name == method]


def flat_at_first(flat: float, slope: float, fixed: float) -> Callable[[int], float]:
    """The update takes `flat` MB, and what grows with the batch takes over."""
    return lambda size: max(flat, slope * size + fixed) * MB


def line(slope: float, fixed: float) -> Callable[[int], float]:
    return lambda size: slope * size + fixed


def bench(**peaks: Callable[[int], float]) -> Made:
    return Made(peaks, {name: line(0.01, 0.02) for name in peaks})


def finished(campaign: Campaign) -> Campaign:
    assert list(campaign.run())
    return campaign
