"""Every method under every budget, simulated on one recorded step, by several processes; no torch."""

from __future__ import annotations

from spillway.comparing.budgets import parse_budgets
from spillway.comparing.cells import Bound, Failure, Row
from spillway.comparing.comparison import Comparison, Subject, compare, parse_methods, subject_of

__all__ = [
    "Bound",
    "Comparison",
    "Failure",
    "Row",
    "Subject",
    "compare",
    "parse_budgets",
    "parse_methods",
    "subject_of",
]
