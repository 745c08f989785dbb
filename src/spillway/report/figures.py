"""Figures about several steps, counted in one way wherever they are shown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from spillway.ir import StepReport
from spillway.units import Bytes, Seconds

NO_BUDGET: Bytes = 1 << 62
"""What `allowed` says of a run that only keeps account."""


def recomputed_share(steps: Sequence[StepReport]) -> float:
    """Ops that were run again, as a share of the steps' own ops, or blocks, where there are any, of the steps' own
    blocks; 0.0 if nothing was watched."""
    own = sum(step.blocks or step.ops for step in steps)
    again = sum(step.recomputed_blocks if step.blocks else step.recomputed_ops for step in steps)
    return again / own if own else 0.0


def hidden_share(steps: Sequence[StepReport]) -> float:
    """Seconds of copying that were hidden behind compute, as a share of all; 0.0 without copies."""
    seconds = sum(step.transfer_seconds for step in steps)
    return sum(step.hidden_seconds for step in steps) / seconds if seconds else 0.0


def highest_peak(steps: Sequence[StepReport]) -> Bytes:
    """The most bytes that were resident at once, by our account."""
    return max((step.peak_bytes for step in steps), default=0)


def seconds_per_step(seconds: Sequence[Seconds]) -> Seconds:
    """The median without the first step, which pays for what is done once; 0.0 without steps."""
    return statistics.median(seconds[1:] or seconds) if seconds else 0.0


def later_seconds(seconds: Sequence[Seconds]) -> Seconds:
    """The mean of the second half, the one in the middle included; 0.0 without steps."""
    return statistics.fmean(seconds[len(seconds) // 2 :]) if seconds else 0.0


def scalars(steps: Sequence[StepReport]) -> dict[str, float]:
    """Figures of these steps together, by the names under which they are logged beside a loss: bytes and seconds."""
    budgeted = bool(steps) and steps[-1].allowed < NO_BUDGET
    return ({"spillway_budget_bytes": float(steps[-1].allowed)} if budgeted else {}) | {
        "spillway_peak_bytes": float(highest_peak(steps)),
        "spillway_stall_seconds": sum((step.stall_seconds for step in steps), 0.0),
        "spillway_recompute_seconds": sum((step.recomputed_seconds for step in steps), 0.0),
    }


def format_share(share: float) -> str:
    """Write a share for people: `"8 %"`, `"0.4 %"`, `"0 %"`."""
    percent = share * 100
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"
