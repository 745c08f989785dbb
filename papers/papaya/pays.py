"""Networks on this machine where a method pays (PAPAYA, section 6.1): of many small ops, under little memory.

A step of such a network takes nearly as long for one sample as for a few, since what takes time is the number of its
ops: the fixed time delta is most of it. Plain training has room for a few samples only, so that it pays to run forwards
twice and share the fixed time among many more. Both networks learn real text: a language model of 24 thin layers, and a
trunk of AlphaFold's kind. Networks and limits were chosen from processor times of single batches, plain and with
checkpoints, of these two and of six more where checkpoints gained less than a tenth or lost: `bert-small` and
`gpt-small` with 12 layers, `bert-small` and `vit-small` with 24 thin ones, a ViT half as wide, and an LSTM written step
by step. What is shown was measured afterwards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from benchmarks.record import Benchmark, Result, Tell
from papers.papaya import here
from papers.papaya.here import MB, Network, Size
from spillway.units import Seconds

LONGEST: Final[Seconds] = 20.0
"""Of a step. On a machine that others use as well the usual limit would end the sweep of batch sizes early."""


def run(size: Size, tell: Tell) -> Result:
    """As `papaya_here`, of these networks."""
    found = here.run(size, tell)
    return replace(found, title=TITLE)


TITLE: Final = "networks on this machine where a method pays: many small ops, little memory (PAPAYA, section 6)"

BENCHMARK: Final = Benchmark(
    name="papaya_pays",
    run=run,
    judge=here.BENCHMARK.judge,
    full=Size(
        networks=(
            Network(
                workload="stdlib-lm", limit=9_500_000, pays=True,
                options={"layers": 24, "width": 32, "heads": 1, "longest": 16},
            ),
            Network(
                workload="evoformer", limit=17 * MB, pays=True,
                options={"blocks": 8, "shortest": 12, "longest": 12, "recycles": 0},
            ),
        ),
        methods=("plain", "checkpoint"), rounds=3, longest=LONGEST,
    ),
    quick=Size(
        networks=(
            Network(
                workload="stdlib-lm", limit=9 * MB, pays=True,
                options={"layers": 2, "width": 16, "heads": 1, "longest": 8},
            ),
        ),
        methods=("plain", "checkpoint"), batches=(5, 7, 9), steps=1, rounds=1,
    ),
)  # fmt: skip
