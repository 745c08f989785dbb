"""What share of a machine each kind of op gets, from steps whose ops were measured on it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Final, TypeAlias, final

import numpy
from numpy.typing import NDArray

from spillway.costs.device import Device
from spillway.costs.roofline import SHARES, OpKind, Share, Shares, kind_of, modelled, work_of
from spillway.errors import UsageError
from spillway.ir.step import Step
from spillway.units import Seconds

ROUNDS: Final = 30
"""Of the iteration below at most; it mostly settles in ten."""
_LEAST: Final = 1e-9
"""No op is taken to last less than this share of all: errors count relative to the model."""
_UNBOUND: Final = 1e-30
"""Stands for a factor of 0, which would let its column bound no op ever again."""

_Floats: TypeAlias = NDArray[numpy.float64]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """What the model says about ops of one kind, beside what was measured."""

    ops: int
    """How many were measured."""
    measured: Seconds
    """All of them together."""
    modelled: Seconds
    """All of them together, with the shares that were found."""
    apart: Seconds
    """Sum of how far the model of each op is from its measurement: 0 for a perfect model, whatever the totals."""

    @property
    def error(self) -> float:
        """`apart` as a share of what was measured; 0 if nothing took any time."""
        return self.apart / self.measured if self.measured else 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Shares of a device, and how well they explain the steps they were found from."""

    shares: Shares
    """For every kind; a kind without a measured op has the share of `SHARES`."""
    residuals: Mapping[OpKind, Residual]
    """For every kind that was measured."""

    @property
    def error(self) -> float:
        """Of all ops together: the mean distance between model and measurement, weighted by time."""
        measured = math.fsum(residual.measured for residual in self.residuals.values())
        apart = math.fsum(residual.apart for residual in self.residuals.values())
        return apart / measured if measured else 0.0


def calibrate(steps: Sequence[Step], device: Device) -> Calibration:
    """Find shares with which the modelled seconds of each kind of op add up to the measured ones.

    Each kind has three unknowns, its shares of compute and of memory and its launch. They come from least squares, none
    of them below 0, with every square divided by the modelled time: long ops count more than short ones, and less than
    plain least squares would let them. Weights, and which of the two bounds an op, are decided anew in every round; in
    the end all three are scaled so that the sums agree.

    Raises:
        UsageError: No op of the steps has seconds.
    """
    samples: dict[OpKind, list[tuple[int, int, Seconds]]] = defaultdict(list)
    for step in steps:
        for op in step.ops:
            if op.seconds is not None:
                samples[kind_of(op)].append((*work_of(step, op), op.seconds))
    if not samples:
        raise UsageError("No op of these steps has seconds: calibrate with steps that were measured.")
    found = {kind: _share(numpy.array(rows, dtype=float).T, device, SHARES[kind]) for kind, rows in samples.items()}
    shares = MappingProxyType({**SHARES, **found})
    return Calibration(shares=shares, residuals=residuals(steps, device, shares))


def residuals(steps: Sequence[Step], device: Device, shares: Shares) -> Mapping[OpKind, Residual]:
    """The model beside the measurements, kind by kind; also for steps that the shares were not found from."""
    pairs: dict[OpKind, list[tuple[Seconds, Seconds]]] = defaultdict(list)
    for step in steps:
        for op in step.ops:
            if op.seconds is not None:
                pairs[kind_of(op)].append((op.seconds, modelled(step, op, device, shares)))
    return MappingProxyType(
        {
            kind: Residual(
                ops=len(rows),
                measured=math.fsum(measured for measured, _ in rows),
                modelled=math.fsum(model for _, model in rows),
                apart=math.fsum(abs(measured - model) for measured, model in rows),
            )
            for kind, rows in sorted(pairs.items())
        }
    )


def _share(rows: _Floats, device: Device, usual: Share) -> Share:
    """Rows: operations, bytes, seconds of every op of one kind."""
    computing, moving = rows[0] / device.flops_per_second, rows[1] / device.bytes_per_second
    launches, seconds = numpy.full_like(computing, device.op_seconds), rows[2]
    if not seconds.sum():
        return usual
    # How many seconds a second of each column becomes. They start where all three explain about as much.
    columns = (computing, moving, launches)
    factors = numpy.array([seconds.sum() / column.sum() / 2 if column.any() else 0.0 for column in columns])
    for _ in range(ROUNDS):
        bound = _parts(numpy.where(factors > 0, factors, _UNBOUND), columns)
        explained = numpy.maximum((bound * factors[:, None]).sum(axis=0), seconds.sum() * _LEAST)
        weighted = bound / explained
        before, factors = factors, _above_zero(weighted @ bound.T, weighted @ seconds)
        if numpy.allclose(before, factors, rtol=1e-6, atol=0):
            break
    total = float((_parts(factors, columns) * factors[:, None]).sum())
    factors *= seconds.sum() / total if total else 1.0
    compute = factors[0] or _slack(1 / usual.compute, computing, factors[1] * moving)
    memory = factors[1] or _slack(1 / usual.memory, moving, compute * computing)
    return Share(compute=float(1 / compute), memory=float(1 / memory), launch=float(factors[2]))


def _slack(usual: float, column: _Floats, other: _Floats) -> float:
    """A factor for a column that bounds no op: the usual one if it leaves that so, else the greatest that does."""
    counted = column > 0
    return max(min(usual, *(other[counted] / column[counted])), _UNBOUND) if counted.any() else usual


def _parts(factors: _Floats, columns: Sequence[_Floats]) -> _Floats:
    """What the factors are of [3, ops]: the greater of the first two and nothing of the other, and the launch."""
    computing, moving, launching = columns
    bound = factors[0] * computing > factors[1] * moving
    return numpy.array([numpy.where(bound, computing, 0.0), numpy.where(bound, 0.0, moving), launching])


def _above_zero(normal: _Floats, right: _Floats) -> _Floats:
    """The least squares with no unknown below 0, by trying which of the three are above it.

    Where several explain the same, as ops that are all alike, it is work that does and not launches.
    """
    best, least = numpy.zeros(len(right)), 0.0
    for backwards in product((False, True), repeat=len(right)):
        places = numpy.flatnonzero(backwards[::-1])
        found = numpy.zeros(len(right))
        found[places] = numpy.linalg.lstsq(normal[numpy.ix_(places, places)], right[places], rcond=None)[0]
        cost = float(found @ normal @ found - 2 * right @ found)
        if (found >= 0).all() and cost < least - 1e-9 * abs(least):
            best, least = found, cost
    return best
