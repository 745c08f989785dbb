"""Pictures of results, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from typing import Final

from benchmarks.record import frozen

INK: Final = "#1f2430"
FAINT: Final = "#c9ced6"
COLOURS: Final = ("#2b6cb0", "#c05621", "#2f855a", "#97266d", "#6b46c1", "#b7791f")


@frozen
class Line:
    """Points of one kind."""

    label: str
    y: Sequence[float]
    """By the places of the panel."""
    colour: int
    """Of `COLOURS`."""
    style: str = "-o"
    """As matplotlib has it."""
    x: Sequence[float] | None = None
    """Places of its own instead of the panel's."""


@frozen
class Panel:
    """One of the drawings that stand side by side."""

    title: str
    x: Sequence[float]
    across: str
    """What x is."""
    up: str
    """What y is, with its unit."""
    lines: Sequence[Line]
    from_zero: bool = True
    """Whether y begins at 0."""


def can_draw() -> bool:
    """Whether matplotlib is installed: the extra `pictures`."""
    return find_spec("matplotlib") is not None


def drawn(name: str, panels: Sequence[Panel]) -> dict[str, bytes]:
    """A PNG of panels side by side, each with its own legend, by the name of its file; none where none can be drawn."""
    if not can_draw():
        return {}
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * len(panels), 4.2), layout="constrained")
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        for line in panel.lines:
            axes.plot(
                panel.x if line.x is None else line.x, line.y, line.style,
                label=line.label or None, color=COLOURS[line.colour % len(COLOURS)],
                markersize=2 if line.style == "." else 3.5, linewidth=1.2,
            )  # fmt: skip
        axes.set_title(panel.title, loc="left", fontsize=10, color=INK)
        axes.set_xlabel(panel.across, color=INK)
        axes.set_ylabel(panel.up, color=INK)
        axes.set_ylim(bottom=0 if panel.from_zero else None)
        axes.grid(color=FAINT, linewidth=0.5)
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    written = BytesIO()
    figure.savefig(written, format="png", dpi=80, metadata={"Software": None})
    return {name: written.getvalue()}
