"""The least bytes that have to come in under a budget, if values could be gone in part: a linear program."""

from __future__ import annotations

from collections.abc import Iterable

from spillway.ir import Gap, Step
from spillway.ir.lives import lives_of
from spillway.methods.absent_bytes import comes_in, fewest_bytes
from spillway.methods.window import SMALLEST
from spillway.units import Bytes


def bytes_in(step: Step, gaps: Iterable[Gap]) -> Bytes:
    """What comes back as gaps end. What is gone when a step ends is counted where the next one begins without it."""
    lives = lives_of(step)
    return sum(
        step.storages[step.values[gap.value].storage].nbytes
        for gap in gaps
        if comes_in(lives[gap.value], gap.end, len(step.ops))
    )


def least_bytes_in(step: Step, allowed: Bytes) -> Bytes:
    """The optimum over shares of every longest idle interval of every value, each op within the budget.

    Raises ArithmeticError if the program has none: an op alone needs more.
    """
    lives, sizes = lives_of(step), [storage.nbytes for storage in step.storages]
    _, nbytes = fewest_bytes(step, lives, allowed, sizes, SMALLEST, tie=0.0)
    return round(nbytes)
