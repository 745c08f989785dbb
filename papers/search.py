"""The largest batch that fits, found with few questions."""

from __future__ import annotations

from collections.abc import Callable


def search_largest(fits: Callable[[int], bool], *, start: int = 1, step: int = 1, most: int | None = None) -> int:
    """The largest batch that fits, in multiples of `step`; 0 if not even one step does.

    Doubles from `start` until one does not fit, then halves what is between. `fits` is asked about each batch once, and
    has to stay False once it is.

    Arguments:
        start: The first batch that is tried; a prediction saves the doubling.
        most: None above this is tried.

    Raises:
        ValueError: A number is below 1, or everything fits and `most` is not given within 2**40 steps.
    """
    if min(start, step, step if most is None else most) < 1:
        raise ValueError(f"Batches are of 1 sample or more: start {start}, step {step}, most {most}.")
    top = 2**40 if most is None else most // step
    good, bad, tried = 0, top + 1, min(max(start // step, 1), top)
    while good < tried < bad:
        if fits(tried * step):
            good, tried = tried, (min(2 * tried, top) if bad > top else (tried + bad) // 2)
        else:
            bad, tried = tried, (good + tried) // 2
    if good == 2**40 and most is None:
        raise ValueError(f"A batch of {good * step} samples still fits; say with `most` where to stop.")
    return good * step
