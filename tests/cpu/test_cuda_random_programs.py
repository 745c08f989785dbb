"""Random programs under the CUDA machine on the late device, judged as those of the CPU machine are."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spillway.engines.tensors import cuda_backend, reserve
from spillway.engines.tensors.cuda_machine import CudaMachine
from tests.cpu import program_runs
from tests.cpu.late_device import LateStreams, late_engine
from tests.cpu.program_judge import judge_all

PROGRAMS = int(os.environ.get("SPILLWAY_LATE_PROGRAMS", "3"))


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[LateStreams]:
    """Every engine of a program is one of a late device; nothing is set aside, as the judge knows of nothing."""
    made: list[LateStreams] = []

    def engine(policy: Any, allowed: int) -> Any:
        made.append(LateStreams(lag=len(made) % 4, behind=len(made) % 3))
        return late_engine(policy, allowed, made[-1], exchanges=True)

    monkeypatch.setattr(program_runs, "TensorEngine", engine)
    monkeypatch.setattr(reserve, "MARGIN", 0.0)
    monkeypatch.setattr(cuda_backend, "HUNGRY", frozenset())
    return made


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_random_programs_are_identical_within_their_budget_or_rightly_refused(devices: list[LateStreams]) -> None:
    rows = [{"seed": seed, **row} for seed in range(PROGRAMS) for row in judge_all(seed, 5)]
    assert {(row["seed"], row["policy"]): row["complaints"] for row in rows if row["complaints"]} == {}
    assert sum(row["moves"] for row in rows) > 20 * len(rows)
    assert sum(streams.copies_in for streams in devices) > 10 * len(rows)
    assert [streams.pinned for streams in devices if streams.pinned] == []


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_where_absent_storages_are_empty_programs_are_identical_or_end_too_large(
    devices: list[LateStreams], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        program_runs, "TensorEngine",
        lambda policy, allowed: late_engine(policy, allowed, LateStreams(behind=2), exchanges=False),
    )  # fmt: skip
    rows = [{"seed": seed, **row} for seed in range(PROGRAMS // 2) for row in judge_all(seed, 5)]
    complaints = [complaint for row in rows for complaint in row["complaints"]]
    assert [complaint for complaint in complaints if "(the end of the step)" not in complaint] == []
    assert sum(row["moves"] for row in rows) > 10 * len(rows)


def _bring_back_a_flipped_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = CudaMachine.finish_in

    def flipped(self: CudaMachine, storage: Any, arrival: Any) -> bool:
        unchanged = finish(self, storage, arrival)
        byte = ctypes.c_uint8.from_address(torch._C.StorageBase.data_ptr(storage.handle()))
        byte.value ^= 1
        return unchanged

    monkeypatch.setattr(CudaMachine, "finish_in", flipped)


def _use_what_has_not_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateStreams, "compute_waits", lambda self, event: None)


def _free_what_is_being_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaMachine, "_let_go", lambda self, wanted: None)


@pytest.mark.long(but=1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "break_something", [_bring_back_a_flipped_bit, _use_what_has_not_arrived, _free_what_is_being_copied]
)
def test_a_machine_that_is_wrong_is_found_out(
    devices: list[LateStreams],
    break_something: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_something(monkeypatch)

    def complains(seed: int) -> bool:
        try:
            return any(row["complaints"] for row in judge_all(seed, 5))
        except AssertionError:
            return True

    assert any(complains(seed) for seed in range(4))
