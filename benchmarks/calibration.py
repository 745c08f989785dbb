"""What share of a machine each kind of op gets, from steps whose ops were measured on it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy
from numpy.typing import NDArray

from spillway.costs.device import Device
from spillway.costs.efficiency import Efficiency, OpKind, Share, Shares
from spillway.costs.roofline import PUBLISHED, seconds_of, work_of
from spillway.errors import UsageError
from spillway.ir.step import Step
from spillway.units import Seconds

ROUNDS: Final = 30
"""Of the iteration below at most; it mostly settles in ten."""
SHARES: Final = PUBLISHED.shares
"""The usual ones."""
_LEAST: Final = 1e-9
"""No op is taken to last less than this share of all: errors count relative to the model."""
_UNBOUND: Final = 1e-30
"""Stands for a factor of 0, which would let its column bound no op ever again."""

_Floats: TypeAlias = NDArray[numpy.float64]


def calibrate(steps: Sequence[Step], device: Device) -> Shares:
    """Find shares with which the modelled seconds of each kind of op add up to the measured ones.

    Each kind has three unknowns, its shares of compute and of memory and its launch. They come from least squares, none
    of them below 0, with every square divided by the modelled time: long ops count more than short ones, and less than
    plain least squares would let them. The usual shares of the kind, and the launch that ops of all kinds have, count
    as one more op: they decide what the measured ones leave open. Weights, and which of the two bounds an op, are
    decided anew in every round; in the end all three are scaled so that the sums agree.

    Raises:
        UsageError: No op of the steps has seconds.
    """
    samples: dict[OpKind, list[tuple[int, int, Seconds]]] = defaultdict(list)
    for step in steps:
        for op in step.ops:
            if op.seconds is not None:
                work = work_of(step, op)
                samples[work.kind].append((work.flops, work.traffic, op.seconds))
    if not samples:
        raise UsageError("No op of these steps has seconds: calibrate with steps that were measured.")
    columns = {kind: _columns(rows, device) for kind, rows in samples.items()}
    launch = _usual_launch(list(columns.values()))
    found = {kind: _share(columns[kind], replace(SHARES[kind], launch=launch)) for kind in columns}
    return MappingProxyType({**SHARES, **found})


def by(device: Device, shares: Shares) -> Device:
    """The device as it gives these shares to ops, whatever their shape."""
    return replace(device, efficiency=Efficiency(shares=shares))


def apart(step: Step, device: Device, shares: Shares) -> float:
    """How far the model of single ops is from their measurements, as a share of all of these, whatever the totals."""
    ops = [op for op in step.ops if op.seconds is not None]
    modelled = seconds_of([work_of(step, op) for op in ops], by(device, shares)).tolist()
    pairs = [(op.seconds or 0.0, seconds) for op, seconds in zip(ops, modelled, strict=True)]
    measured = math.fsum(seconds for seconds, _ in pairs)
    return math.fsum(abs(seconds - model) for seconds, model in pairs) / measured if measured else 0.0


def _columns(rows: Sequence[tuple[int, int, Seconds]], device: Device) -> _Floats:
    """Of every op [4, ops]: seconds to compute, to move and to launch at the device's full rates, and as measured."""
    flops, traffic, seconds = numpy.array(rows, dtype=float).T
    launches = numpy.full_like(seconds, device.op_seconds)
    return numpy.array([flops / device.flops_per_second, traffic / device.bytes_per_second, launches, seconds])


def _usual_launch(columns: Sequence[_Floats]) -> float:
    """Launches of ops of any kind: what a kind has of which too few were measured, or only alike ones, to tell."""
    everything = numpy.concatenate(columns, axis=1)
    return float(_factors(everything, numpy.ones(3), weight=0.0)[2]) if everything[3].any() else 1.0


def _share(columns: _Floats, usual: Share) -> Share:
    """The share of one kind."""
    if not columns[3].any():
        return usual
    factors = _factors(columns, numpy.array([1 / usual.compute, 1 / usual.memory, usual.launch]))
    compute = factors[0] or _slack(1 / usual.compute, columns[0], factors[1] * columns[1])
    memory = factors[1] or _slack(1 / usual.memory, columns[1], compute * columns[0])
    return Share(compute=float(1 / compute), memory=float(1 / memory), launch=float(factors[2]))


def _factors(columns: _Floats, usual: _Floats, weight: float = 1.0) -> _Floats:
    """How many seconds a second of the first three columns becomes. The fourth is what was measured.

    `usual` counts as much as `weight` ops of average work do, for each of the three: where the ops leave open what
    their time was spent on, it decides.
    """
    work, seconds = columns[:3], columns[3]
    doubt = weight * work.mean(axis=1) / numpy.maximum(usual, _UNBOUND)
    factors = usual
    for _ in range(ROUNDS):
        bound = _parts(numpy.where(factors > 0, factors, _UNBOUND), work)
        explained = numpy.maximum((bound * factors[:, None]).sum(axis=0), seconds.sum() * _LEAST)
        weighted = bound / explained
        normal, right = weighted @ bound.T + numpy.diag(doubt), weighted @ seconds + doubt * usual
        before, factors = factors, _above_zero(normal, right)
        if numpy.allclose(before, factors, rtol=1e-6, atol=0):
            break
    total = float((_parts(factors, work) * factors[:, None]).sum())
    return factors * (seconds.sum() / total if total else 1.0)


def _slack(usual: float, column: _Floats, other: _Floats) -> float:
    """A factor for a column that bounds no op: the usual one if it leaves that so, else the greatest that does."""
    counted = column > 0
    return max(min(usual, *(other[counted] / column[counted])), _UNBOUND) if counted.any() else usual


def _parts(factors: _Floats, columns: _Floats) -> _Floats:
    """What the factors are of [3, ops]: the greater of the first two and nothing of the other, and the launch."""
    computing, moving, launching = columns
    bound = factors[0] * computing > factors[1] * moving
    return numpy.array([numpy.where(bound, computing, 0.0), numpy.where(bound, 0.0, moving), launching])


def _above_zero(normal: _Floats, right: _Floats) -> _Floats:
    """The least squares with no unknown below 0, by trying which of the three are above it."""
    best, least = numpy.zeros(len(right)), 0.0
    for taken in product((False, True), repeat=len(right)):
        places = numpy.flatnonzero(taken)
        found = numpy.zeros(len(right))
        found[places] = numpy.linalg.lstsq(normal[numpy.ix_(places, places)], right[places], rcond=None)[0]
        cost = float(found @ normal @ found - 2 * right @ found)
        if (found >= 0).all() and cost < least:
            best, least = found, cost
    return best
