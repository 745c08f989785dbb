"""One line in the terminal while a model trains."""

from __future__ import annotations

import random
import sys
import time
from typing import final

from spillway.ir import StepReport
from spillway.report.figures import NO_BUDGET, format_share, recomputed_share
from spillway.units import Seconds, format_bytes

_stream = random.getstate()
try:  # rich draws from it when it is imported
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text
finally:
    random.setstate(_stream)

REFRESH: Seconds = 0.1
"""Drawing costs about a millisecond, so fast steps are not all drawn."""
BAR = 24
"""Columns of the bar."""


@final
class LiveLine:
    """Shows the latest step in one line of the terminal that standard error goes to.

    Where standard error is no terminal, nothing is drawn: the last step's line is printed once, at the end.
    """

    def __init__(self, *, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, soft_wrap=True)
        self._latest: StepReport | None = None
        self._live: Live | None = None
        self._drawn = -REFRESH

    def update(self, report: StepReport) -> None:
        """Show this step."""
        self._latest = report
        now = time.monotonic()
        if self._console.is_terminal and now - self._drawn >= REFRESH:
            self._drawn = now
            self._draw(report)

    def close(self) -> None:
        """Leave the last step's line behind and give the terminal back. Closing twice is fine."""
        latest, self._latest = self._latest, None
        if latest is None:
            return
        if not self._console.is_terminal:
            self._console.print(line(latest), markup=False, highlight=False)
            return
        self._draw(latest)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self, report: StepReport) -> None:
        text = Text(line(report), no_wrap=True, overflow="ellipsis")
        if self._live is None:
            # What the training loop prints appears above the line; but not if it goes to a file.
            to_terminal = sys.stdout.isatty()
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=to_terminal)
            self._live.start()
        self._live.update(text, refresh=True)


def line(report: StepReport) -> str:
    """The line of one step: its number, the loss if it was logged, memory, bytes moved, recomputed share."""
    parts = [f"step {report.step}"]
    if "loss" in report.logged:
        parts.append(f"loss {report.logged['loss']:.4g}")
    peak = f"{'peak' if report.peak_measured else 'expected peak'} {format_bytes(report.peak_bytes)}"
    allowed = report.allowed
    if allowed < NO_BUDGET:  # a bar: dark up to where the step ended, light up to its peak
        end, most = (min(-(-BAR * nbytes // allowed), BAR) for nbytes in (report.end_bytes, report.peak_bytes))
        bar = "█" * end + "▒" * (most - end) + "░" * (BAR - max(most, end))
        peak = f"{bar} {peak} of {format_bytes(allowed)}"
    parts.append(peak)
    if report.bytes_out or report.bytes_in:
        parts.append(f"moved {format_bytes(report.bytes_out)} out, {format_bytes(report.bytes_in)} in")
    if report.recomputed_ops:
        parts.append(f"recomputed {format_share(recomputed_share([report]))}")
    return "  ".join(parts)
