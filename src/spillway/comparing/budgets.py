"""Several budgets from one text: shares of what the plain step needs, bytes, and ranges of either."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Final

from spillway.errors import BudgetError
from spillway.subject import is_share, quantity, whole
from spillway.units import Bytes

APART: Final = Fraction(1, 10)
"""How far the shares of a range are apart that does not say how many it has."""

MOST: Final = 1000
"""Budgets in one comparison."""


def parse_budgets(text: str, plain_peak: Bytes) -> list[Bytes]:
    """Read budgets, separated by commas; ascending, each once.

    A budget is a share of `plain_peak`, `0.5` or `50%`, or a number of bytes, `6GiB`. `0.3..1.0` is a range, every 0.1;
    `0.3..1.0:5` are five, evenly spaced. A fraction of a byte is cut off.

    Raises BudgetError for what cannot be read, for shares of 0 or above 1, and for more than `MOST` budgets.
    """
    budgets: set[Bytes] = set()
    for part in text.split(","):
        budgets.update(whole(found, part.strip()) for found in _range(part.strip(), plain_peak))
        if len(budgets) > MOST:
            raise BudgetError(f"{text!r} are more than {MOST} budgets.")
    return sorted(budgets)


def _range(text: str, plain_peak: Bytes) -> Iterator[Fraction]:
    """The exact budgets of one part of the text."""
    begin, dots, rest = text.partition("..")
    if not dots:
        yield quantity(begin, plain_peak)
        return
    end, colon, count = rest.partition(":")
    low, high = quantity(begin, plain_peak), quantity(end, plain_peak)
    if low > high:
        raise BudgetError(f"The range {text!r} ends below its begin.")
    yield from _spaced(low, high, _count(count, text)) if colon else _stepped(low, high, plain_peak, text)


def _count(text: str, whole: str) -> int:
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*", text) or not 2 <= int(text) <= MOST:
        raise BudgetError(
            f"The range {whole!r} has to have 2 to {MOST} budgets, and {text.strip()!r} is none of these."
        )
    return int(text)


def _spaced(low: Fraction, high: Fraction, count: int) -> Iterator[Fraction]:
    for index in range(count):
        yield low + (high - low) * index / (count - 1)


def _stepped(low: Fraction, high: Fraction, plain_peak: Bytes, text: str) -> Iterator[Fraction]:
    if not all(is_share(end) for end in text.split("..", 1)):
        raise BudgetError(f"The range {text!r} has to say how many budgets it has: '{text}:5' are five.")
    while low <= high:
        yield low
        low += APART * plain_peak
