"""Paging on demand: block by block, least recently used first, moves alone, at most twice the budget."""

from __future__ import annotations

import pytest

from spillway.calibration.named_device import device_of
from spillway.errors import BudgetInfeasible, UsageError
from spillway.methods import UVM, Move, Proposal
from spillway.simulation.simulated_engine import simulate
from tests.pure.shelves import Shelf, Shelves
from tests.pure.training_steps import training_step


def proposals(policy: UVM, *storages: Shelf) -> list[Proposal]:
    return list(policy.relieve(Shelves(storages, allowed=10**6), 1))


def test_the_block_that_was_used_longest_ago_leaves_first() -> None:
    old, new = Shelf(number=2, nbytes=90, touched=3), Shelf(number=1, nbytes=90, touched=7)
    assert proposals(UVM(page=50), new, old) == [Move(old), Move(new)]


def test_small_neighbours_share_a_block_and_it_is_as_fresh_as_its_freshest() -> None:
    one, two, three = (Shelf(number=n, nbytes=20, touched=t) for n, t in ((1, 0), (2, 9), (3, 4)))
    # Blocks of 50: the first two share one, which was used at op 9.
    assert proposals(UVM(page=50), one, two, three) == [Move(three), Move(one), Move(two)]


def test_a_step_of_more_than_twice_the_budget_is_refused_with_the_half_of_it() -> None:
    away = (Shelf(number=3, nbytes=50),)
    view = Shelves((Shelf(number=1),), allowed=100, away=away)
    assert list(UVM().relieve(view, 50)) == [Move(view.storages[0])]
    with pytest.raises(BudgetInfeasible) as caught:
        list(UVM().relieve(view, 51))
    assert (caught.value.needed, caught.value.allowed, caught.value.smallest_budget) == (101, 100, 101)
    assert str(caught.value) == (
        "Op 9 (paging 201 B on demand, at most 2 times the budget) needs 101 B in memory at once and 100 B are "
        "allowed: it takes 101 bytes (101 B) or more."
    )


def test_a_fault_is_paid_for_with_every_block_that_comes_in() -> None:
    device = device_of("v100-pcie")
    paged = UVM(page=1 << 20, fault_seconds=1e-4).link(device)
    slower = paged.in_seconds(8 << 20) - device.in_seconds(8 << 20)
    assert slower == pytest.approx(8e-4 + paged.copy_seconds - device.copy_seconds)
    assert paged.out_per_second == device.out_per_second


def test_paging_takes_longer_than_copies_without_faults() -> None:
    step = training_step(5)
    allowed = step.plain_peak() * 7 // 10
    runs = [
        simulate(step, allowed=allowed, method=UVM(fault_seconds=seconds), device=device_of("v100-pcie"))
        for seconds in (0.0, 1e-3)
    ]
    assert [run.status for run in runs] == ["ok", "ok"]
    assert runs[0].bytes_in == runs[1].bytes_in > 0
    assert runs[0].recomputed_ops == 0
    assert runs[0].seconds < runs[1].seconds


def test_below_half_of_what_lives_paging_ends_as_out_of_memory() -> None:
    step = training_step(5)
    run = simulate(step, allowed=step.plain_peak() * 45 // 100, method=UVM(), device=device_of("v100-pcie"))
    assert run.status == "oom"


@pytest.mark.parametrize("arguments", [{"page": 0}, {"fault_seconds": -1.0}, {"most": 0.5}])
def test_paging_refuses_arguments_that_make_no_sense(arguments: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="UVM needs blocks"):
        UVM(**arguments)  # type: ignore[arg-type]
