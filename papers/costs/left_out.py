"""What plain steps of PAPAYA's models say of a V100 that logs of single ops in float32 cannot: the share of tensor
cores, and the host's seconds for an op. Fitted to some of the models, to foretell the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, final

import numpy

from papers import SHARED
from papers.costs.cuda_cache import asked_of_cuda
from papers.costs.log_ops import ASSUMED, LOGS, TITAN_V, Log
from papers.papaya.published import NAMED, Model
from spillway.advisor.measurements import Experiment
from spillway.advisor.simulated import Steps
from spillway.costs import DEVICES, Device, Efficiency, OpKind
from spillway.costs.fitting import fit, least_squares
from spillway.costs.roofline import Floats, Reckoned, launches_of, paced, work_of
from spillway.ir.step import Phase
from spillway.units import Bytes, Seconds

ZIP: Final = SHARED / "data" / "dtr" / "logs.zip"
V100: Final = DEVICES["v100"]
HOST: Final[Seconds] = 25e-6
"""Of an op, before anything is fitted."""
HALF: Final = 0.5
"""Of tensor cores, likewise."""
DOUBTS: Final = numpy.array([0.25, 0.25, 1.0])
"""Standard deviations of logarithms: shares of tensor cores, and the host's seconds."""
ERROR: Final = 0.15
"""Standard deviation of the logarithm of a step's seconds, about what single ops of DTR's logs leave of a step's."""
SIZES: Final = 8
"""Batch sizes of a model that are compared, from the smallest to the largest."""
PRODUCTS: Final = (OpKind.MATMUL, OpKind.CONVOLUTION, OpKind.CONVOLUTION_BACKWARD, OpKind.STRIDED)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A plain step of one batch size."""

    batch: int
    reckoned: Reckoned
    launches: Floats
    measured: Seconds
    peak: Bytes
    published_peak: float | None
    asked: Floats | float = 0.0
    """[ops] How often CUDA is asked for memory, where every step begins with an empty cache."""

    def seconds(self, by: Efficiency, host: Seconds, asking: Seconds = 0.0) -> Seconds:
        """As foretold, if CUDA takes so long to answer."""
        return float(paced(self.reckoned.seconds(by), self.launches * host + self.asked * asking).sum())

    def seconds_on(self, device: Device) -> Seconds:
        """The same, on a device with an efficiency."""
        return self.seconds(device.efficiency or ASSUMED, device.host_seconds)


def points_of(model: Model, steps: Steps, there: Experiment, data: Path) -> list[Point]:
    """Plain steps at some of the batch sizes that were measured, the largest among them; of each what was timed."""
    plain, peaks = there.methods["exact"], model.peaks(data)
    sizes = sorted(plain.seconds)
    chosen = sorted({sizes[round(place)] for place in numpy.linspace(0, len(sizes) - 1, SIZES)})
    found = []
    for batch in chosen:
        step = steps.at(batch)
        works = [work_of(step, op) for op in step.ops]
        timed = [place for place, op in enumerate(step.ops) if model.times_update or op.phase is not Phase.OPTIMIZER]
        found.append(
            Point(
                batch=batch, reckoned=Reckoned([works[place] for place in timed], V100),
                launches=launches_of(step, works)[timed], measured=plain.seconds[batch], peak=step.plain_peak(),
                published_peak=peaks.get(batch), asked=numpy.array(asked_of_cuda(step)) if model.gives_back else 0.0,
            )
        )  # fmt: skip
    return found


def with_half(by: Efficiency, product: float, batched: float) -> Efficiency:
    """The same, with those shares of tensor cores."""
    half = dict.fromkeys(PRODUCTS, product) | {OpKind.BATCHED: batched, OpKind.ATTENTION: batched}
    shares = {kind: replace(share, half=half.get(kind, share.half)) for kind, share in by.shares.items()}
    return replace(by, shares=MappingProxyType(shares))


def fit_steps(models: Sequence[Sequence[Point]], by: Efficiency) -> tuple[Efficiency, Seconds]:
    """What the steps of these models, each as much as another, say of tensor cores and of the host."""
    start = numpy.log([HALF, HALF, HOST])

    def residuals(numbers: Floats) -> tuple[Floats, Floats]:
        product, batched, host = numpy.exp(numbers).tolist()
        tried = with_half(by, product, batched)
        apart = [
            math.log(point.seconds(tried, host) / point.measured) / ERROR * math.sqrt(SIZES / len(points))
            for points in models for point in points
        ]  # fmt: skip
        return numpy.array(apart), (numbers - start) / DOUBTS

    product, batched, host = numpy.exp(least_squares(residuals, start)).tolist()
    return with_half(by, product, batched), host


def of_logs(zip_: Path = ZIP, logs: Sequence[str] = tuple(LOGS)) -> Efficiency:
    """What single ops of DTR's logs say; a launch is the device's own, since the logs' includes waiting for the op."""
    found = fit([Log(zip_, name).timed() for name in logs], TITAN_V, ASSUMED)
    shares = {kind: replace(share, launch=float(share.launch > 0)) for kind, share in found.shares.items()}
    return replace(found, shares=MappingProxyType(shares))


def devices_of(points: Mapping[str, Sequence[Point]], single: Efficiency) -> dict[str, Device]:
    """For each model the V100 as the other models have it."""
    found = {}
    for name in points:
        by, host = fit_steps(list(without(points, name).values()), single)
        found[name] = replace(V100, efficiency=by, host_seconds=host)
    return found


def without(points: Mapping[str, Sequence[Point]], left: str = "") -> dict[str, Sequence[Point]]:
    """What is fitted to: not the model that is left out, and none whose steps `cudaMalloc` has a part in."""
    return {name: one for name, one in points.items() if name != left and not NAMED[name].gives_back}
