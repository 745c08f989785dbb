"""Steps of published models at sizes that nobody recorded, beside those steps recorded."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from spillway.costs import fit_scaling
from spillway.workloads import get
from spillway.workloads.recorded import record

SMALL = {"layers": 1, "width": 64, "batch": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options", "by"),
    [
        ("bert-small", SMALL, "length"), ("gpt-small", SMALL, "length"), ("t5", SMALL, "length"),
        ("resnet", {"width": 4, "blocks": (1, 1)}, "batch"),
    ],
)  # fmt: skip
def test_a_step_of_another_size_is_the_one_that_would_have_been_recorded(
    name: str, options: dict[str, Any], by: str
) -> None:
    if name != "resnet":
        pytest.importorskip("transformers")
    steps = {size: record(partial(get, name, **options, **{by: size}), fake=True).step for size in (9, 16, 21, 30, 25)}
    recorded = steps.pop(25)
    derived = fit_scaling(steps).step_at(25)
    assert [storage.nbytes for storage in derived.storages] == [storage.nbytes for storage in recorded.storages]
    assert [(op.flops, op.traffic) for op in derived.ops] == [(op.flops, op.traffic) for op in recorded.ops]
    assert derived.plain_peak() == recorded.plain_peak()
