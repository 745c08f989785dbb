"""Fig. 12: a step in two buffers, cut by what Spillway offers and into even parts of ops, bytes or seconds.

The paper cuts all into the same number of blocks and does not say what happens to a part that is larger than a buffer.
Here even parts are as many as it takes until each fits, and no fewer than the blocks of `max_fill`. They are judged
against the greedy that Spillway takes (`quickest_fill`) and dynamic programming; blocks that are as full as can be, as
`max_fill` makes them, stand beside, with what the first block of each brings in that nothing hides.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from papers.dynn_offload.steps import SIZES, step_of
from spillway.calibration.named_device import device_of
from spillway.costs import Device
from spillway.pilots.execution_blocks import (
    Halves,
    Touches,
    largest_op,
    max_fill,
    quickest_fill,
    search_blocks,
)

FULLEST, GREEDY, SEARCHED = "max-fill", "greedy", "dynamic programming"
EVEN: Final = ("ops", "bytes", "seconds")


@frozen
class Size:
    """How much is run."""

    networks: tuple[str, ...]
    shares: tuple[float, ...]
    loads: tuple[float, ...]
    """How many times as long ops take as the roofline says: a larger batch, without its bytes."""
    smaller: bool = False


def run(size: Size, tell: Tell) -> Result:
    """A row a network, budget, load and way to cut."""
    device, rows = device_of("rtx6000"), list[Row]()
    for network in size.networks:
        options: dict[str, Any] = {"width": 32, "batch": 4} if size.smaller else {}
        touches = Touches.of_step(step_of(network, device, **options))
        for share in size.shares:
            allowed = max(int(_most(touches) * share), 2 * largest_op(touches))
            for load in size.loads:
                loaded = replace(touches, seconds=touches.seconds * load)
                rows += _rows(network, loaded, allowed, share, load)
                tell(f"{network} at {share:.0%}, {load:g} times: {rows[-1]['over_plain']:.2f}")
    return Result(
        title="DyNN-Offload, Fig. 12: a step in blocks, by where it is cut", columns=COLUMNS,
        rows=[*rows, *_means(rows)], notes=NOTES,
    )  # fmt: skip


def _most(touches: Touches) -> int:
    """Bytes of what is alive, at the fullest op."""
    first, _ = touches.first_and_last()
    levels = np.zeros(touches.ops + 2, np.int64)
    np.add.at(levels, np.where(touches.there, 0, np.minimum(first, touches.ops)), touches.nbytes)
    np.add.at(levels, np.minimum(touches.until, touches.ops + 1), -touches.nbytes)
    return int(levels.cumsum().max())


def _rows(network: str, touches: Touches, allowed: int, share: float, load: float) -> Iterator[Row]:
    device, half, plain = device_of("rtx6000"), allowed // 2, float(touches.seconds.sum())
    cuts, seconds = dict[str, Sequence[int]](), dict[str, float]()
    for name, cut in (
        (FULLEST, max_fill), (GREEDY, partial(quickest_fill, device=device)),
        (SEARCHED, partial(search_blocks, device=device)),
    ):  # fmt: skip
        began = time.process_time()
        cuts[name] = cut(touches, half)
        seconds[name] = time.process_time() - began
    cuts |= {f"even {what}": even(touches, half, what, len(cuts[FULLEST]) - 1) for what in EVEN}
    head, halves = {"network": network, "share": share, "load": load}, Halves(touches)
    for name, chosen in cuts.items():
        took, _, brought = halves.times(chosen, device)
        yield {
            **head, "cut": name, "blocks": len(chosen) - 1, "over_plain": took / plain,
            "first": _first_load(touches, chosen, device) / plain, "gb_in": brought / 1e9,
            "cut_seconds": seconds.get(name),
        }  # fmt: skip


def _first_load(touches: Touches, cuts: Sequence[int], device: Device) -> float:
    """Seconds to bring in what the first block touches."""
    block = np.unique(touches.storages[: touches.starts[cuts[1]]])
    return int(touches.nbytes[block[touches.there[block]]].sum()) / device.in_per_second


def even(touches: Touches, most: int, what: str, least: int) -> list[int]:
    """Cuts into even parts, as few as fit a buffer and `least` or more."""
    each = np.repeat(np.arange(touches.ops), np.diff(touches.starts))
    weights = {
        "ops": np.ones(touches.ops), "seconds": touches.seconds,
        "bytes": np.bincount(each, touches.nbytes[touches.storages], touches.ops),
    }[what]  # fmt: skip
    total = np.cumsum(weights)
    count = least
    while count < touches.ops:
        inner = np.searchsorted(total, total[-1] * np.arange(1, count) / count) + 1
        cuts = [0, *sorted({int(one) for one in inner if one < touches.ops}), touches.ops]
        if all(_touched(touches, *ends) <= most for ends in pairwise(cuts)):
            return cuts
        count += 1
    return list(range(touches.ops + 1))


def _touched(touches: Touches, first: int, end: int) -> int:
    return int(touches.nbytes[np.unique(touches.storages[touches.starts[first] : touches.starts[end]])].sum())


def _means(rows: Sequence[Row]) -> Iterator[Row]:
    for one in (FULLEST, GREEDY, SEARCHED):
        for what in EVEN:
            less = _less(rows, one, f"even {what}")
            yield {"cut": f"{one}, time less than even {what}", "less": sum(less) / len(less), "worst": min(less)}


def _less(rows: Sequence[Row], one: str, other: str) -> list[float]:
    times = {(row["network"], row["share"], row["load"], row["cut"]): row["over_plain"] for row in rows}
    return [1 - time / times[(*cell, other)] for (*cell, cut), time in times.items() if cut == one]


def _checks(result: Result) -> Iterator[Check]:
    rows = [row for row in result.rows if "over_plain" in row]
    for one in (GREEDY, SEARCHED):
        worst = {what: min(_less(rows, one, f"even {what}")) for what in EVEN}
        for what, less in worst.items():
            yield Check(what=f"{one}: slower than even {what}, the worst cell", measured=-less, at_most=1e-9)
        less = _less(rows, one, "even ops")
        mean = sum(less) / len(less)
        yield Check(what=f"{one}: time over that of even ops, the mean", measured=1 - mean, at_most=0.95)
    took = {one: sum(row["cut_seconds"] for row in rows if row["cut"] == one) for one in (GREEDY, SEARCHED)}
    share = took[GREEDY] / took[SEARCHED]
    yield Check(what=f"{GREEDY}: processor time to cut over that of {SEARCHED}", measured=share, at_most=0.5)


COLUMNS: Final = (
    *columns.text(network="network"),
    *columns.shown("{:.0%}".format, share="budget"),
    *columns.shown("{:g}".format, load="load"),
    *columns.text(cut="cut", blocks="blocks"),
    *columns.shown("{:.3f}".format, over_plain="time / plain", first="first load / plain"),
    *columns.shown("{:.2f}".format, gb_in="GB in"),
    *columns.shares(less="less time"),
    *columns.seconds(cut_seconds="to cut"),
)  # fmt: skip
NOTES: Final = (
    "Out before in, on one lane, as published. Load: ops take so many times their seconds of the roofline, as with a "
    "larger batch whose bytes were as many. The budget is a share of the plain peak, or twice the largest op.",
)
BENCHMARK: Final = Benchmark(
    name="dynn_partition",
    run=run,
    judge=_checks,
    full=Size(networks=tuple(SIZES), shares=(0.4, 0.6), loads=(1.0, 4.0)),
    quick=Size(networks=("var-lstm",), shares=(0.5,), loads=(1.0,), smaller=True),
)
