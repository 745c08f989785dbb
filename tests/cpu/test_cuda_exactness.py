"""The CUDA machine on the late device: families of models far below what they ask for, against the plain run."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.cpu.families import FAMILIES
from tests.cpu.late_device import LateDriver, late_session
from tests.cpu.pressure import ORDERS
from tests.cpu.test_exactness import A_FEW, Trained, assert_the_same, plain, plain_peak, train


def late(name: str, budget: int, order: str, ways: tuple[Any, ...] = (), **options: Any) -> tuple[Trained, LateDriver]:
    built = FAMILIES[name](0)
    driver = LateDriver(**options.pop("driver", {}))
    with late_session(
        built.model, built.optimizers, budget=budget, method=ORDERS[order](), driver=driver, **options
    ) as memory:
        run = train(built, memory, ways=ways)
        assert memory._engine.place.device.type == "cpu"
    return run, driver


@pytest.mark.parametrize(("name", "order", "exchanges"), [*product(A_FEW, ORDERS, [True, False])])
def test_a_family_trains_to_the_same_bits_with_late_copies_and_late_ops(name: str, order: str, exchanges: bool) -> None:
    budget = plain_peak(name) * 60 // 100
    run, driver = late(name, budget, order, exchanges=exchanges, driver={"behind": 1 << 30})
    if run.refused is not None:
        assert run.refused.allowed == budget
        budget = run.refused.smallest_budget
        run, driver = late(name, budget, order, exchanges=exchanges, driver={"behind": 1 << 30})
    assert_the_same(plain(name), run)
    assert [report.peak_bytes for report in run.reports if report.peak_bytes > budget] == []
    assert sum(report.drops + report.moves for report in run.reports) > 0
    assert driver.pinned == 0
