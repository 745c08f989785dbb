"""The paper's Figure 6 in small: the losses of a residual network under DELTA beside the plain ones, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Final

from benchmarks.record import Benchmark, Tell
from benchmarks.training import account, longest_batch
from benchmarks.trainings import path_of
from papers.curves import Size, checks, compared
from spillway.units import Bytes
from spillway.workloads import get

METHODS: Final = ("delta", "delta-published")


def half_of_the_peak(size: Size, tell: Tell) -> Bytes:
    """Half of what plain steps of the longest batch take."""
    workload = get(path_of(size.workload))
    return account(workload, longest_batch(workload, size.steps), 2).peak // 2


NOTES: Final = ("The paper's runs end at 1.5947 and 1.6054, plain and under DELTA.",)

BENCHMARK: Final = Benchmark(
    name="convergence",
    run=partial(compared, "DELTA's Fig. 6", half_of_the_peak, NOTES),
    judge=checks,
    full=Size(workload="small_resnet", steps=500, methods=METHODS),
    quick=Size(workload="tiny_lm", steps=6, methods=METHODS),
)
