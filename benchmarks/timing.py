"""Seconds on two clocks: the wall's, and those that the processor spent on this process.

On a shared machine the second is the steadier one. Where the two disagree, somebody else was running, or a disk was
waited for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

from spillway.units import Seconds


@final
@dataclass(slots=True)
class Clock:
    """Collects one measurement for every `with clock.running():`."""

    wall: list[Seconds] = field(default_factory=list)
    cpu: list[Seconds] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the block."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        # In the other order than above, so that neither clock times the other's call.
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)


def median_ratio(seconds: Sequence[Seconds], plain: Sequence[Seconds]) -> float:
    """Median over the rounds of a competitor's time as a multiple of the plain time of the same round."""
    return statistics.median(one / other for one, other in zip(seconds, plain, strict=True))
