"""Mimose's Figure 15: the losses of a language model with dropout under Mimose beside the plain ones, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Final

from benchmarks.record import Benchmark, Tell
from benchmarks.trainings import trained
from papers.curves import Size, checks, compared
from spillway.report.figures import highest_peak
from spillway.units import Bytes

MIMOSE: Final = "mimose"
PUBLISHED: Final = "mimose-published"


def half_way(size: Size, tell: Tell) -> Bytes:
    """Half way between the peak with every block recomputed and that with none."""
    return sum(
        highest_peak(trained(size.workload, size.steps, method, None, tell).reports)
        for method in ("checkpoint", MIMOSE)
    ) // 2  # fmt: skip


NOTES: Final = (
    "The model learns the standard library's source text, a function a sample, with dropout on embeddings, attention "
    "and both halves of each block. Budget: half way between the peak with every block recomputed and that with none. "
    "The paper leaves out its first 100 steps and calls its curves nearly coincident.",
    "The published planner leaves half a gigabyte free, which is more than there is here, and so recomputes all.",
)

BENCHMARK: Final = Benchmark(
    name="mimose_convergence",
    run=partial(compared, "Mimose's Fig. 15", half_way, NOTES),
    judge=checks,
    full=Size(workload="small_lm", steps=300, methods=(MIMOSE, PUBLISHED), idle=(PUBLISHED,)),
    quick=Size(workload="tiny_lm", steps=14, methods=(MIMOSE,)),
)
