"""Shared by all tests: patience, and data of others that stands beside the project and never in it."""

from __future__ import annotations

import itertools
import os
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

HANGS = 600
"""Seconds after which a test that waits for another thread or process gives up. Nothing is measured by it: only a test
that would hang for ever meets it, however busy the machine is."""
FULL_AUDIT = bool(os.environ.get("SPILLWAY_FULL_AUDIT"))
"""Every case of tests that have very many, instead of some: hours."""
SHARED = Path(__file__).parents[1].parent / "shared"
"""`../shared`, seen from the root of the project; tests that need something of it are skipped where it is absent."""


def shared(path: str) -> Path:
    """A file below `../shared`; the test is skipped where there is none."""
    found = SHARED / path
    if not found.is_file():
        pytest.skip(f"there is no {found}")
    return found


def without_page(said: str) -> list[str]:
    """The lines of standard error, without the last if that only names where the documents speak of an error."""
    *lines, last = said.splitlines() or [""]
    return lines if lines and re.match(r"spillway: what to do: \S+errors\.md#", last) else [*lines, last]


def notes_of(error: BaseException) -> list[str]:
    """Notes of an error, without the one that only names where the documents speak of it."""
    return [note for note in getattr(error, "__notes__", ()) if not re.match(r"What to do: \S+errors\.md#", note)]


def some_of(cases: Iterable[Any], share: float) -> list[Any]:
    """A share of the cases, the same ones in every run and process; in the full audit all of them."""
    every = list(cases)
    chosen = set(random.Random(len(every)).sample(range(len(every)), 1 + int(share * (len(every) - 1))))
    return [case for number, case in enumerate(every) if FULL_AUDIT or number in chosen]


def in_turn(first: Iterable[Any], *others: Iterable[Any], times: int = 1) -> list[tuple[Any, ...]]:
    """Every case of the first with so many combinations of the others; in the full audit with all. Values go round:
    the next case begins where one ended, and the slower the further behind, so that no two are tied to each other."""
    cases, factors = list(first), [list(values) for values in others]
    if FULL_AUDIT:
        return list(itertools.product(cases, *factors))
    found: list[tuple[Any, ...]] = []
    for number, case in enumerate(cases):
        for turn in range(times):
            begins, row = number * times, [case]
            for values in factors:
                row.append(values[(begins + turn) % len(values)])
                begins //= len(values)
            found.append(tuple(row))
    met = [[row[place] for row in found] for place in range(1, 1 + len(factors))]
    assert all(value in column for column, values in zip(met, factors, strict=True) for value in values)
    return found
