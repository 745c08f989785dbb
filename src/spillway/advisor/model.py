"""PAPAYA: whether a method that saves memory trains faster (Liu et al., "What is the State of Memory Saving for Model
Training?").

A step on x samples takes m(x) = alpha x + beta bytes and t(x) = gamma x + delta seconds (Eqs. 4 and 5). Throughput
v = x / t(x) never falls with x (Eq. 6), so that each method is at its best at the largest batch that fits, and the
question is whether a method's best is above the plain one's.

Differs from the paper in:
    Eq. 7 is v' = delta / (gamma x + delta)^2; printed without the square around the sum.
    Eq. 11 divides by what may be 0 or less: then no batch of the method is as fast as the plain best.
    Eq. 14 divides by gamma_m - gamma_0: a method that is no slower per sample and saves memory always pays. `score` has
        no number where a method is no slower and saves nothing; the inequality is multiplied out and needs none.
    Eq. 15's text has numerator and denominator the wrong way round; the equation is right.
    Eq. 20's left side crosses the two methods' memory: it is (alpha_0 M_m - alpha_m M_0) / (gamma_m - gamma_0).
    t = max(a, k x) + b, flat while the device is not busy, stands beside the line (section 5.5 leaves that open).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor, inf
from typing import final

from spillway.units import Bytes, Seconds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a step on x samples takes with one method. No coefficient is below 0."""

    alpha: float
    """Bytes per sample."""
    beta: float
    """Bytes without any sample: parameters, optimizer state."""
    gamma: Seconds
    """Per sample."""
    delta: Seconds
    """Without any sample: the update, the framework."""
    knee: float = 0.0
    """Up to so many samples time does not grow: a = gamma * knee, k = gamma, b = delta. 0 for the paper's line."""

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma", "delta", "knee"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} is a number of at least 0, not {getattr(self, name)}.")

    def nbytes(self, size: float) -> float:
        """Peak of a step (Eq. 4)."""
        return self.alpha * size + self.beta

    def seconds(self, size: float) -> Seconds:
        """Of a step (Eq. 5)."""
        return self.gamma * max(size, self.knee) + self.delta

    def throughput(self, size: float) -> float:
        """Samples per second (Eq. 6); at an infinite batch what it comes near to, which may be infinite."""
        if size <= 0:
            return 0.0
        share = self.gamma * max(1.0, self.knee / size) + self.delta / size
        return 1 / share if share else inf

    def largest(self, limit: float) -> float:
        """The batch whose peak is the limit (Eq. 8), not a whole number; 0 if none fits, infinite if all do."""
        room = limit - self.beta
        if room < 0 or (room == 0 and self.alpha):
            return 0.0
        return room / self.alpha if self.alpha else inf

    def with_communication(self, seconds: Seconds) -> Cost:
        """The same on each of several devices that exchange gradients for so long every step: delta grows (6.2)."""
        return replace(self, delta=self.delta + seconds)


def whole(size: float) -> float:
    """The batch of whole samples, where the bytes of a last sample may be missing by rounding; infinite stays so."""
    return size if size == inf else float(floor(size * (1 + 1e-9)))


def score(plain: Cost, method: Cost) -> float | None:
    """P: bytes saved per second lost, both per sample (Eq. 15).

    Infinite for a method that saves memory and is no slower; None for one that is no slower and saves nothing.
    """
    saved, lost = plain.alpha - method.alpha, method.gamma - plain.gamma
    if lost > 0:
        return saved / lost
    return inf if saved > 0 else None


def point(plain: Cost, limit: float) -> float:
    """What the score has to reach, bytes per second (Eq. 16): infinite where no time is fixed and so none is shared."""
    return (limit - plain.beta) / plain.delta if plain.delta else inf


def pays_by_score(plain: Cost, method: Cost, limit: float) -> bool:
    """Inequality 14 multiplied out: as if beta and delta of the method were the plain ones."""
    return pays_with_fragments(plain, method, limit)


def pays(plain: Cost, method: Cost, limit: float, method_limit: float | None = None) -> bool:
    """Inequality 11: whether the method's best is at least the plain one's, each with its own beta and delta.

    It is of straight lines; a knee is not looked at.

    Arguments:
        limit: Bytes that steps may take; for the plain one if `method_limit` is given as well.
        method_limit: Bytes for the method, where fragments leave the two a different share of the device.
    """
    room, method_room = _room(plain, limit), _room(method, limit if method_limit is None else method_limit)
    if method_room <= 0:
        return False
    if room <= 0:
        return True  # nothing fits but with the method
    reachable = (plain.gamma - method.gamma) * room + plain.delta * plain.alpha
    if reachable <= 0:  # even 1/gamma_m, of an infinite batch, is at most the plain best
        return reachable == 0 and not method.delta * method.alpha
    return method.delta * method.alpha / reachable <= method_room / room


def _room(cost: Cost, limit: float) -> float:
    """Bytes for samples; of a line that is flat, and at the limit, any number above 0 is the same."""
    room = limit - cost.beta
    return 1.0 if room == 0 and not cost.alpha else room


def pays_with_fragments(
    plain: Cost, method: Cost, limit: float, *, plain_share: float = 1.0, method_share: float = 1.0
) -> bool:
    """Inequality 20, corrected and multiplied out: fragments leave each method a share of the device.

    It is Inequality 14 if the shares are the same.
    """
    room, method_room = limit * plain_share - plain.beta, limit * method_share - plain.beta
    if method_room <= 0:
        return False
    if room <= 0:
        return True
    saved, lost = plain.alpha * method_room - method.alpha * room, method.gamma - plain.gamma
    return saved * plain.delta >= lost * room * method_room


def ring_seconds(nbytes: Bytes, devices: int, *, bytes_per_second: float, latency: Seconds = 0.0) -> Seconds:
    """Of a ring all-reduce of gradients, which no compute hides: 2 (n - 1) messages of 1/n of them."""
    return 2 * (devices - 1) * (nbytes / devices / bytes_per_second + latency)
