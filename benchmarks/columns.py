"""Columns of a table, by what their figures are: `columns.seconds(fit="fit")` has the figure `fit` under "fit"."""

from __future__ import annotations

from benchmarks.record import Column
from spillway.units import format_bytes, format_seconds


def text(**heads: str) -> tuple[Column, ...]:
    """Columns whose figures are shown as they are."""
    return tuple(Column(key=key, head=head) for key, head in heads.items())


def nbytes(**heads: str) -> tuple[Column, ...]:
    """Columns of bytes."""
    return tuple(Column(key=key, head=head, show=format_bytes) for key, head in heads.items())


def seconds(**heads: str) -> tuple[Column, ...]:
    """Columns of seconds."""
    return tuple(Column(key=key, head=head, show=format_seconds) for key, head in heads.items())


def ratios(**heads: str) -> tuple[Column, ...]:
    """Columns of multiples, with three digits after the point."""
    return tuple(Column(key=key, head=head, show="{:.3f}".format) for key, head in heads.items())


def shares(**heads: str) -> tuple[Column, ...]:
    """Columns of shares, in percent."""
    return tuple(Column(key=key, head=head, show="{:.1%}".format) for key, head in heads.items())
