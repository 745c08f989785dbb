"""DTR's heuristics on real tensors: below the memory that a model asks for, with the bits of the plain run."""

from __future__ import annotations

import pytest

from spillway.methods import DTR
from spillway.methods.dtr import HEURISTICS
from tests.cpu.test_exactness import assert_the_same, managed, plain, plain_peak

FAMILY = {"dtr": "gpt2", "dtr-eqclass": "resnet", "dtr-local": "gpt2", "largest": "resnet", "msps": "gpt2"}


@pytest.mark.long(but=2)
@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_a_model_trains_as_plainly_within_its_budget_by_dropping(heuristic: str) -> None:
    name = FAMILY[heuristic]
    budget = plain_peak(name) * 70 // 100
    found = managed(name, budget, DTR(heuristic))
    assert_the_same(plain(name), found)
    assert max(report.peak_bytes for report in found.reports) <= budget
    assert sum(report.recomputed_ops for report in found.reports) > 0
