"""Networks whose paths differ from step to step under `dynn-offload`: a misprediction costs time and never a bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import spillway
from spillway import workloads

STEPS = 5
SIZES: dict[str, dict[str, Any]] = {
    "var-bert": {"width": 32, "layers": 4},
    "tree-lstm": {"width": 32},
    "tree-cnn": {"width": 32},
    "var-lstm": {"width": 32},
    "moe": {"width": 32, "layers": 2},
    "unrolled-gan": {"width": 64},
}


def trained(name: str, budget: int | None) -> tuple[list[float], dict[str, torch.Tensor], list[Any]]:
    workload = workloads.get(name, seed=0, **SIZES[name])
    if budget is None:
        losses = [float(workload.train_step(batch)) for batch in workload.batches(STEPS)]
        return losses, workload.model.state_dict(), []
    with (
        warnings.catch_warnings(),
        spillway.manage(workload.model, workload.optimizers, budget=budget, method="dynn-offload") as memory,
    ):
        # After some recordings of steps that are always others there is no plan, and a warning says so.
        warnings.simplefilter("ignore", UserWarning)
        losses = []
        for batch in workload.batches(STEPS):
            with memory.step(batch):
                losses.append(float(workload.train_step(batch)))
        reports = list(memory.history)
    return losses, workload.model.state_dict(), reports


@pytest.mark.parametrize("name", SIZES)
def test_paths_that_no_plan_expects_give_the_bits_of_plain_pytorch_within_the_budget(name: str) -> None:
    losses, state, _ = trained(name, None)
    _, _, reports = trained(name, 1 << 34)
    peak = max(report.peak_bytes for report in reports)
    budget = int(peak * 0.75)
    found, after, reports = trained(name, budget)
    assert found == losses
    assert all(torch.equal(after[key], value) for key, value in state.items())
    assert max(report.peak_bytes for report in reports) <= budget
    assert sum(report.bytes_out for report in reports) > 0
