"""What is shown while a model trains: one line in the terminal, in a notebook a picture."""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Iterable
from importlib import import_module
from typing import Any, Final, final

from spillway.ir import StepReport
from spillway.report import charts
from spillway.report.drawing import template
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
REDRAW: Seconds = 0.5
"""A picture takes some milliseconds here, and about as many in the browser."""
SHOWN: Final = 240
"""Latest steps that a picture shows, so that it takes as long after a million of them."""


def shown() -> LiveLine | LiveView:
    """What suits where this runs. A notebook is known by its kernel; IPython in a terminal is a terminal."""
    notebook = sys.modules.get("IPython")
    return LiveView() if notebook is not None and hasattr(notebook.get_ipython(), "kernel") else LiveLine()


@final
class LiveView:
    """Shows the latest steps in a notebook, below the cell that trains: the peak of each against the budget, and what
    was dropped and what was moved. Where a front end shows text alone, that is the line of the latest step."""

    def __init__(self, steps: Iterable[StepReport] = ()) -> None:
        self._steps = deque(steps, SHOWN)
        self._display: Any = None
        """What IPython gives to replace what it displays."""
        self._drawn = -REDRAW
        self._stale = False

    def update(self, report: StepReport) -> None:
        self._steps.append(report)
        self._stale = True
        if time.monotonic() - self._drawn >= REDRAW:
            self._draw()

    def close(self) -> None:
        """Leave a picture behind that has the last step. Closing twice is fine."""
        if self._stale:
            self._draw()

    def _draw(self) -> None:
        self._stale = False
        if self._display is None:
            self._display = import_module("IPython.display").display(self, display_id=True)
        else:
            self._display.update(self)
        self._drawn = time.monotonic()

    def _repr_html_(self) -> str:
        if not self._steps:
            return repr(self)
        steps, latest = list(self._steps), self._steps[-1]
        budget = latest.allowed if latest.allowed < NO_BUDGET else None
        budgets = list(dict.fromkeys(step.allowed for step in steps))
        over, (bars, bar_ticks) = charts.draw_steps(steps, budgets, 0, 0), charts.draw_left(steps)
        return template("live.html.jinja").render(
            latest=latest, budget=budget, curve=over and over.curves[0],
            ticks=over and over.ticks, bars=bars, bar_ticks=bar_ticks,
            chart={"width": charts.WIDTH, "bars_height": charts.BARS_HEIGHT}, how="measured",
        )  # fmt: skip

    def __repr__(self) -> str:
        return line(self._steps[-1]) if self._steps else "No step has ended."


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
    if share := recomputed_share([report]):
        parts.append(f"recomputed {format_share(share)}")
    return "  ".join(parts)
