"""What tensors really take, counted by the allocator and not by the account, in training steps under a budget."""

from __future__ import annotations

import gc
import threading
import warnings

import pytest
import torch

import spillway
from spillway.errors import BudgetInfeasible
from spillway.native import arena, library
from spillway.native.arena import Arena
from spillway.session.inputs import leaves
from tests.cpu.families import FAMILIES

pytestmark = pytest.mark.skipif(not library.wanted(), reason="SPILLWAY_NATIVE=0")

KiB, MiB = 1 << 10, 1 << 20
ROUNDED = 64 * KiB
"""By which blocks in whole pages may be more than their bytes."""


def bytes_of(batch: object) -> int:
    return sum(leaf.untyped_storage().nbytes() for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))


def most_above(name: str, method: str, budget: int | None, *, hidden: int = 0) -> tuple[int, int]:
    """By how much the arena held more in a step than the budget and batches that no step has met yet; and the peak that
    was reported. Another thread takes what is `hidden`, of which the account knows nothing."""
    gc.collect()
    there = arena.counts().live
    built = FAMILIES[name](0)
    above: list[int] = []
    kept: list[torch.UntypedStorage] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with spillway.manage(built.model, built.optimizers, budget=budget, method=method) as memory:
            for number, batch in enumerate(built.batches):
                arena.reset_peaks()
                with memory.step(batch):
                    elsewhere = threading.Thread(target=lambda: kept.append(torch.UntypedStorage(hidden)))
                    elsewhere.start()
                    elsewhere.join()
                    built.step(built.model, built.optimizers, batch)
                beside = sum(map(bytes_of, built.batches[number + 1 :]))
                above.append(arena.counts().peak_live - there - beside - (budget or 0))
            return max(above), max(report.peak_bytes for report in memory.history)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", FAMILIES)
def test_no_step_holds_more_than_its_budget_by_the_allocators_own_count(name: str) -> None:
    serving = Arena()
    try:
        _, peak = most_above(name, "lru", None)
        for method, share in (("lru", 0.5), ("delta", 0.7), ("auto", 0.6)):
            try:
                above, _ = most_above(name, method, int(share * peak))
            except BudgetInfeasible as refusal:
                above, _ = most_above(name, method, refusal.smallest_budget)
            assert above <= ROUNDED
    finally:
        serving.release()


def test_what_the_account_does_not_know_is_seen() -> None:
    serving = Arena()
    try:
        _, peak = most_above("resnet", "lru", None)
        assert most_above("resnet", "lru", peak // 2, hidden=MiB)[0] > ROUNDED
    finally:
        serving.release()
