"""The least bytes that have to come in under a budget, if values could be gone in part: a linear program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from spillway.ir import Gap, Step
from spillway.ir.lives import Life, idle_intervals, lives_of
from spillway.units import Bytes, KiB

SMALLEST: Final[Bytes] = 4 * KiB
"""Storages below this stay, as they do under Spillway's planners."""
UNIT: Final = 1e9
"""The program counts in GB, so that its numbers are of one size."""


def bytes_in(step: Step, gaps: Iterable[Gap]) -> Bytes:
    """What comes back as gaps end. What is gone when a step ends is counted where the next one begins without it."""
    lives = lives_of(step)
    return sum(
        step.storages[step.values[gap.value].storage].nbytes
        for gap in gaps
        if _read_again(lives[gap.value], gap.end, len(step.ops))
    )


def least_bytes_in(step: Step, allowed: Bytes) -> Bytes:
    """The optimum over shares of every longest idle interval of every value, each op within the budget.

    Raises ArithmeticError if the program has none: an op alone needs more.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    ops, costs = len(step.ops), list[float]()
    rows, columns, sizes = list[int](), list[int](), list[float]()
    level = [0.0] * (ops + 1)
    for storage in step.storages:
        level[storage.alive_from] += storage.nbytes / UNIT
        level[storage.alive_until] -= storage.nbytes / UNIT
    for op in range(ops):
        level[op + 1] += level[op]
    for life, value in zip(lives_of(step), step.values, strict=True):
        nbytes = step.storages[value.storage].nbytes
        for start, end in idle_intervals(life, ops) if nbytes >= SMALLEST else ():
            rows += range(start, end)
            columns += [len(costs)] * (end - start)
            sizes += [-nbytes / UNIT] * (end - start)
            costs.append(nbytes / UNIT if _read_again(life, end, ops) else 0.0)
    matrix = coo_matrix((sizes, (rows, columns)), shape=(ops, len(costs)))
    bounds = [allowed / UNIT - there for there in level[:ops]]
    found = linprog(costs, A_ub=matrix.tocsr(), b_ub=bounds, bounds=(0, 1), method="highs")
    if not found.success:
        raise ArithmeticError(f"The linear program has no optimum: {found.message}")
    return round(found.fun * UNIT)


def _read_again(life: Life, end: int, ops: int) -> bool:
    """Whether what is gone until then comes back."""
    return end in life.reads or end < min(life.ends, ops)
