"""Tables and figures of papers, reproduced with the package: `python -m papers`, or one of them by name.

A folder a paper; its README has what was published, what comes out here, and why they differ. They run and are shown
as the benchmarks are. The papers' own numbers are read where they stand beside the project; where they are not, what
needs them is skipped.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Final

from benchmarks.record import Collection, Skipped

SHARED: Final = Path(__file__).parents[2] / "shared"
"""Beside the project: what papers published."""
TABLES: Final = SHARED / "papers" / "tables"
"""What their tables and texts say."""

# In the order in which they run: times first, while nothing has warmed the machine.
PAPERS: Final = Collection(
    package="papers",
    purpose="Reproduce tables and figures of papers.",
    modules={
        "mimose_planning": "papers.mimose.planning",
        "convergence": "papers.delta.convergence",
        "mimose_convergence": "papers.mimose.convergence",
        "window_table1": "papers.out_of_core_window.table1",
        "dtr_reference": "papers.dtr.reference",
        "delta_tables": "papers.delta.tables",
        "mimose_tasks": "papers.mimose.tasks",
        "mimose_estimator": "papers.mimose.estimator",
        "mimose_blocks": "papers.mimose.blocks",
        "mimose_detection": "papers.mimose.detection",
        "dynn_table1": "papers.dynn_offload.similarity",
        "dynn_accuracy": "papers.dynn_offload.accuracy",
        "dynn_prefetch": "papers.dynn_offload.prefetch",
        "dynn_partition": "papers.dynn_offload.partition",
        "dynn_training_time": "papers.dynn_offload.training_time",
        "papaya_paper": "papers.papaya.published",
        "papaya_here": "papers.papaya.here",
        "papaya_pays": "papers.papaya.pays",
        "costs_ops": "papers.costs.costs_ops",
        "costs_plain": "papers.costs.plain_steps",
        "costs_methods": "papers.costs.method_extras",
        "costs_hardware": "papers.costs.other_hardware",
        "papaya_simulated": "papers.papaya.simulated",
        "papaya_implications": "papers.papaya.implications",
    },
)


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file that stands beside the project. Raises Skipped where it does not."""
    if not path.is_file():
        raise Skipped(f"there is no {path}")
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))
