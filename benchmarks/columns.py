"""Columns of a table, by what their figures are: `columns.seconds(fit="fit")` has the figure `fit` under "fit"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.record import Column
from spillway.units import format_bytes, format_seconds


def shown(show: Callable[[Any], str], /, **heads: str) -> tuple[Column, ...]:
    """Columns whose figures are shown in that way."""
    return tuple(Column(key=key, head=head, show=show) for key, head in heads.items())


def text(**heads: str) -> tuple[Column, ...]:
    """Figures as they are."""
    return shown(str, **heads)


def nbytes(**heads: str) -> tuple[Column, ...]:
    """Bytes."""
    return shown(format_bytes, **heads)


def seconds(**heads: str) -> tuple[Column, ...]:
    """Seconds."""
    return shown(format_seconds, **heads)


def ratios(**heads: str) -> tuple[Column, ...]:
    """Multiples, with three digits after the point."""
    return shown("{:.3f}".format, **heads)


def shares(**heads: str) -> tuple[Column, ...]:
    """Shares, in percent."""
    return shown("{:.1%}".format, **heads)
