"""Train PyTorch models under a memory budget.

with spillway.manage(model, optimizer, budget="6GiB") as memory:
    for batch in loader:
        with memory.step(batch):
            ...
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spillway.errors import BudgetInfeasible, SpillwayError
from spillway.ir.step_report import StepReport
from spillway.version import __version__

if TYPE_CHECKING:
    from spillway.session import BlockOptions, ReportOptions, Session, SpillOptions, manage
    from spillway.simulation.plan_and_simulate import plan, simulate
    from spillway.workloads.recorded import record

__all__ = [
    "BlockOptions",
    "BudgetInfeasible",
    "ReportOptions",
    "Session",
    "SpillOptions",
    "SpillwayError",
    "StepReport",
    "__version__",
    "manage",
    "plan",
    "record",
    "simulate",
]

_LATE = {
    "BlockOptions": "spillway.session",
    "ReportOptions": "spillway.session",
    "Session": "spillway.session",
    "SpillOptions": "spillway.session",
    "manage": "spillway.session",
    "plan": "spillway.simulation.plan_and_simulate",
    "record": "spillway.workloads.recorded",
    "simulate": "spillway.simulation.plan_and_simulate",
}
"""Where the names are that need torch, or take time to load."""


if not TYPE_CHECKING:  # to which every name would be one of the package's

    def __getattr__(name: str) -> Any:
        """Import what needs torch only when it is asked for; the rest of the package works without torch."""
        if name in _LATE:
            return getattr(import_module(_LATE[name]), name)
        raise AttributeError(f"module 'spillway' has no attribute {name!r}")
