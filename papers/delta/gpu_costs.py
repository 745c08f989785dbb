"""DELTA's table V again: what swapping and recomputing the same tensor cost, with the device waited for and without.

The paper's costs of recomputing (4 to 69 us for tensors whose copies take 11 to 96 ms) are those of launching.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from spillway.tiers.cuda_streams import CudaStreams
from spillway.tiers.host import HostPool
from spillway.units import Seconds

REPEATS: Final = 20

PAPER: Final = (
    "Table V of the paper, in us (swap, recompute): BNForward 96318, 6; 22230, 4; 22237, 4; 11148, 4; ConvForward "
    "22805, 69; PoolingForward 11641, 25. It does not tell the batch size."
)


@frozen
class Size:
    """How much is measured."""

    batches: Sequence[int]
    side: int


def run(size: Size, tell: Tell) -> Result:
    """The first layers of a ResNet-50, and one further down."""
    if not torch.cuda.is_available():
        raise SystemExit("The benchmark gpu_costs needs a CUDA device, and torch sees none.")
    device = torch.device("cuda", torch.cuda.current_device())
    driver = CudaStreams(device)
    pool = HostPool(driver.pin, 8 << 30, slab=64 << 20)
    rows: list[Row] = []
    with torch.no_grad():
        for batch in size.batches:
            tell(f"batch {batch}")
            rows += [_row(driver, pool, batch, name, layer, x) for name, layer, x in _cases(batch, size.side, device)]
    driver.synchronize()
    pool.close()
    launched = [row for row in rows if row["launch"] < row["recompute"]]
    return Result(
        title="swapping and recomputing the same tensor",
        columns=(
            *columns.text(tensor="tensor", batch="batch"),
            *columns.nbytes(nbytes="bytes"),
            *columns.seconds(out="copy out", back="copy in", recompute="recompute", launch="launch alone"),
            *columns.ratios(paper="F as published", ratio="F synchronised"),
        ),
        rows=rows,
        checks=[
            Check(what="tensors whose launch takes as long as the op", measured=len(rows) - len(launched), at_most=0)
        ],
        notes=(PAPER, "F is the Director's c_r / c_s with both ways of a copy; as published c_r is the launch alone."),
    )


def _cases(batch: int, side: int, device: torch.device) -> list[tuple[str, Callable[[Tensor], Tensor], Tensor]]:
    picture = torch.randn(batch, 3, side, side, device=device)
    first = nn.Conv2d(3, 64, 7, 2, 3, bias=False).to(device)
    wide = first(picture)
    inner = nn.MaxPool2d(3, 2, 1)(wide)
    return [
        ("ConvForward, first", first, picture),
        ("BNForward, first", nn.BatchNorm2d(64).to(device), wide),
        ("PoolingForward", nn.MaxPool2d(3, 2, 1), wide),
        ("ConvForward, 3 x 3", nn.Conv2d(64, 64, 3, padding=1, bias=False).to(device), inner),
        ("BNForward, 3 x 3", nn.BatchNorm2d(64).to(device), inner),
    ]


def _row(
    driver: CudaStreams, pool: HostPool, batch: int, name: str, layer: Callable[[Tensor], Tensor], x: Tensor
) -> dict[str, Any]:
    made = layer(x).untyped_storage()
    block = pool.take(made.nbytes())
    launch, recompute = _costs(driver, lambda: layer(x))
    driver.lane_times()
    for _ in range(REPEATS):
        driver.copy_out(made, block, (driver.reached(),)).synchronize()
        driver.copy_in(block, made, (driver.reached(),)).synchronize()
    times = driver.lane_times()
    pool.free(block)
    out, back = (sum(copy.seconds for copy in copies) / REPEATS for copies in (times.out, times.back))
    return {
        "tensor": name, "batch": batch, "nbytes": made.nbytes(), "out": out, "back": back, "recompute": recompute,
        "launch": launch, "paper": launch / (out + back), "ratio": recompute / (out + back),
    }  # fmt: skip


def _costs(driver: CudaStreams, op: Callable[[], Any]) -> tuple[Seconds, Seconds]:
    """Median seconds of launching an op, and of running it to its end."""
    launches, wholes = [], []
    for _ in range(REPEATS):
        driver.synchronize()
        began = time.perf_counter()
        kept = op()
        launches.append(time.perf_counter() - began)
        driver.synchronize()
        wholes.append(time.perf_counter() - began)
        del kept
    return statistics.median(launches), statistics.median(wholes)


BENCHMARK: Final = Benchmark(
    name="gpu_costs",
    run=run,
    full=Size(batches=(128, 256), side=224),
    quick=Size(batches=(8,), side=64),
)
