"""The results of `mimose_tasks` as a picture like the paper's Fig. 13: `python -m papers.mimose.tasks_picture`.

Arguments: the results (default: `papers/mimose/results/mimose_tasks.json`) and the PNG (default: beside them). Needs
matplotlib.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from papers import PAPERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES: Final[Mapping[str, tuple[str, str, str]]] = {
    "mimose-published": ("#1f5fa8", "o-", "Mimose as published"),
    "mimose": ("#1f5fa8", "o--", "Mimose"),
    "static": ("#b0413e", "s-", "static, for the longest batch"),
    "dtr": ("#5b8c3e", "^--", "DTR, ideal memory"),
    "dtr as run": ("#5b8c3e", "^-", "DTR as run"),
}
"""Of each way: colour, marker and line, name."""


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Write the picture of the benchmark's results."""
    from matplotlib.figure import Figure

    rows: Sequence[Mapping[str, Any]] = data["rows"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(3.1 * len(tasks), 3.2), layout="constrained")
    for place, task in enumerate(tasks):
        axes = figure.add_subplot(1, len(tasks), place + 1)
        _panel(axes, [row for row in rows if row["task"] == task])
        axes.set_title(task, fontsize=10)
        axes.set_xlabel("budget, GB", fontsize=8)
        if not place:
            axes.set_ylabel("seconds of an epoch, plain = 1", fontsize=8)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.savefig(path, format="png", dpi=110)


def _panel(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    for way, (colour, style, label) in STYLES.items():
        there = [row for row in rows if row[way] is not None]
        axes.plot(
            [row["budget_bytes"] / 1e9 for row in there], [row[way] for row in there], style, color=colour, label=label,
            markersize=4, linewidth=1.2,
        )  # fmt: skip
    first = rows[0]
    stars = [(first["checkpoint, peak"], first["checkpoint"]), (first["plain_bytes"], 1.0)]
    axes.plot(
        [nbytes / 1e9 for nbytes, _ in stars], [seconds for _, seconds in stars], "k*", markersize=9,
        label="every block recomputed; none",
    )  # fmt: skip
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def main(arguments: Sequence[str]) -> None:
    """Draw what the arguments name."""
    results = Path(arguments[0]) if arguments else PAPERS.results("mimose_tasks") / "mimose_tasks.json"
    draw(json.loads(results.read_text("utf-8")), Path(arguments[1]) if arguments[1:] else results.with_suffix(".png"))


if __name__ == "__main__":
    main(sys.argv[1:])
