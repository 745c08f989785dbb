from __future__ import annotations

import pytest

from spillway.doctor.cuda_facts import CudaFacts, expandable_segments


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("", False),
        ("expandable_segments:True", True),
        ("max_split_size_mb:64, expandable_segments: true", True),
        ("expandable_segments:False,max_split_size_mb:64", False),
    ],
)
def test_expandable_segments_are_found_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, asked: str, found: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", asked)
    assert expandable_segments() == found


@pytest.mark.parametrize("on", [True, False])
def test_every_fact_that_matters_has_a_note(on: bool) -> None:
    facts = CudaFacts(
        name="a device", total=2, free=1, exchanges=on, allocator="native", expandable_segments=on, benchmarks=on,
        chunk=2 << 20, host_behind=on,
    )  # fmt: skip
    notes = " ".join(facts.notes())
    assert ("point at pinned host memory" in notes) == on
    assert ("expandable_segments is on" in notes) == on
    assert ("not recomputed" in notes) == on
    assert ("chunks of 2.00 MiB; host memory can stand" in notes) == on


def test_an_allocator_that_is_not_torchs_own_is_named() -> None:
    facts = CudaFacts(
        name="a device", total=2, free=1, exchanges=True, allocator="cudaMallocAsync", expandable_segments=True,
        benchmarks=False, chunk=0, host_behind=None,
    )  # fmt: skip
    notes = " ".join(facts.notes())
    assert "The allocator is cudaMallocAsync" in notes
    assert "odd pieces" not in notes
    assert "is not to be had here" in notes
