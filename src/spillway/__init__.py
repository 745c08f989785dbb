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

if TYPE_CHECKING:
    from spillway.planning import plan
    from spillway.session import Session, manage

__version__ = "0.1.0"

__all__ = ["BudgetInfeasible", "Session", "SpillwayError", "StepReport", "__version__", "manage", "plan"]

_NEED_TORCH = ("Session", "manage")


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for; the rest of the package works without torch."""
    if name == "plan":
        return import_module("spillway.planning").plan
    if name in _NEED_TORCH:
        return getattr(import_module("spillway.session"), name)
    raise AttributeError(f"module 'spillway' has no attribute {name!r}")
