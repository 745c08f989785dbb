"""The largest batch that fits, found with few questions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MOST: Final = 2**40
"""No batch has so many samples."""


def search_largest(fits: Callable[[int], bool], *, start: int = 1) -> int:
    """The largest batch that fits; 0 if not even one sample does.

    Doubles from `start` until one does not fit, then halves what is between. `fits` is asked about each batch once, and
    has to stay False once it is.

    Arguments:
        start: The first batch that is tried; a prediction saves the doubling.

    Raises:
        ValueError: `start` is below 1, or everything fits.
    """
    if start < 1:
        raise ValueError(f"Batches are of 1 sample or more: start {start}.")
    good, bad, tried = 0, MOST, start
    while good < tried < bad:
        if fits(tried):
            good, tried = tried, (2 * tried if bad == MOST else (tried + bad) // 2)
        else:
            bad, tried = tried, (good + tried) // 2
    if bad == MOST:
        raise ValueError(f"A batch of {good} samples still fits.")
    return good
