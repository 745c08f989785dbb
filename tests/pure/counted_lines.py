"""How much a call does, in lines of one file that it runs: no clock, the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from math import log2
from types import FrameType, ModuleType
from typing import Any


def lines_run(module: ModuleType, call: Callable[[], object]) -> int:
    """Lines of the module that the call runs, those that it runs again counted again."""
    count = 0

    def line(frame: FrameType, what: str, argument: Any) -> Any:
        nonlocal count
        count += what == "line"
        return line

    def entered(frame: FrameType, what: str, argument: Any) -> Any:
        return line if frame.f_code.co_filename == module.__file__ else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def grows_no_faster_than_n_log_n(counts: Mapping[int, int]) -> bool:
    """Whether counts, by size, over n log n stay within a twentieth of that of the smallest size."""
    rates = [count / (size * log2(size)) for size, count in sorted(counts.items())]
    return all(rate <= 1.05 * rates[0] for rate in rates)
