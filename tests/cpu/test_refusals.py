"""What a refusal names works at the first try, and a tenth less than that is refused; `benchmarks/refusals.py` and
`benchmarks/block_refusals.py` try many more."""

from __future__ import annotations

import pytest

from benchmarks import block_refusals, refusals
from benchmarks.refusal_cases import Case, cases
from spillway.errors import BudgetInfeasible
from spillway.units import Bytes

CASES = {case.network: case for case in cases(40) if case.network in ("autoencoder", "bridged", "recurrent", "tree")}


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_a_refusal_of_the_tensor_engine_names_what_works_and_hardly_more(case: Case) -> None:
    def trained(budget: Bytes) -> Bytes | BudgetInfeasible:
        return refusals.trained(case, "lru", budget)

    peak = trained(1 << 30)
    assert isinstance(peak, int)
    for budget in (40_000, peak // 6):
        refusal = trained(budget)
        assert isinstance(refusal, BudgetInfeasible)
        assert refusal.exact
        assert isinstance(trained(refusal.smallest_budget), int)
        assert isinstance(trained(int(refusal.smallest_budget / refusals.TOO_MUCH)), BudgetInfeasible)


@pytest.mark.parametrize("method", block_refusals.METHODS)
def test_a_refusal_of_the_block_engine_names_what_works_and_hardly_more(method: str) -> None:
    refusal = block_refusals.trained(3, method, 100_000)
    assert isinstance(refusal, BudgetInfeasible)
    assert isinstance(block_refusals.trained(3, method, refusal.smallest_budget), int)
    less = int(refusal.smallest_budget / block_refusals.TOO_MUCH)
    assert isinstance(block_refusals.trained(3, method, less), BudgetInfeasible)
