"""A linear or mixed integer program as it is written down, by variables and rows, and solved by SciPy's HiGHS."""

from __future__ import annotations

from math import inf
from typing import Any, Final, final

from spillway.errors import UsageError

INFEASIBLE: Final = 2
"""What SciPy's `milp` says where there is no solution."""

GAP: Final = 1e-4
"""Share of the cost by which what counts as optimal may miss the optimum."""


@final
class LinearProgram:
    """Variables between bounds and rows of terms between bounds, all known by their numbers; the cost is minimized."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.lower: list[float] = []
        self._upper: list[float] = []
        self._whole: list[int] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._factors: list[float] = []
        self._least: list[float] = []
        self._most: list[float] = []

    def variable(self, *, cost: float = 0.0, lower: float = 0.0, upper: float = inf, whole: bool = False) -> int:
        """A new one, by its number."""
        self.cost.append(cost)
        self.lower.append(lower)
        self._upper.append(upper)
        self._whole.append(int(whole))
        return len(self.cost) - 1

    def row(self, *terms: tuple[int, float], least: float = -inf, most: float = inf) -> int:
        """A new one, by its number."""
        self._least.append(least)
        self._most.append(most)
        for variable, factor in terms:
            self.add(len(self._least) - 1, variable, factor)
        return len(self._least) - 1

    def add(self, row: int, variable: int, factor: float) -> None:
        """One more term of a row."""
        self._rows.append(row)
        self._columns.append(variable)
        self._factors.append(factor)

    def solve(self, what: str, *, relaxed: bool = False, **options: float) -> Any:
        """What SciPy's `milp` finds with these options of its own; `what` is said to need SciPy where that is not
        installed. Where it is `relaxed` no variable has to be a whole number."""
        optimize, sparse = load_solver(what)
        shape = (len(self._least), len(self.cost))
        matrix = sparse.csr_matrix((self._factors, (self._rows, self._columns)), shape=shape)
        return optimize.milp(
            self.cost, integrality=[0] * len(self.cost) if relaxed else self._whole,
            bounds=optimize.Bounds(self.lower, self._upper),
            constraints=optimize.LinearConstraint(matrix, self._least, self._most), options=options,
        )  # fmt: skip


def load_solver(what: str) -> tuple[Any, Any]:
    """SciPy's optimizers and sparse matrices. Raises UsageError with the command that installs them."""
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise UsageError(
            f"{what[:1].upper()}{what[1:]} needs SciPy, which is not installed: pip install 'torch-spillway[plan]' "
            "adds it."
        ) from error
    return optimize, sparse
