"""Steps of blocks that take more than was planned: what has no room in the budget lies in the spill directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway.engines.blocks.trace import ArenaTrace
from spillway.errors import BudgetInfeasible
from spillway.native import library
from spillway.native.arena import Arena, OpMemory
from spillway.units import KiB, MiB

pytestmark = pytest.mark.skipif(not library.wanted(), reason="SPILLWAY_NATIVE=0")
WIDTH = 64
LIGHT = 0


class Routed(nn.Module):
    """A block that saves as much more as its model says, on inputs of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.more = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), LIGHT

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.wide(x))
        for _ in range(self.more):
            hidden = hidden.sin()
        return x + self.narrow(hidden)


Managed = Callable[[Any, Any], Any]


def trained(
    steps: list[int], manage: Managed | None, before_heavy: Callable[[], object] = lambda: None
) -> tuple[list[bytes], Any]:
    """Bits of the losses and the state after these steps, all of one size; and the session."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Routed() for _ in range(5)), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.Adam(model.parameters())
    memory = manage(model, optimizer) if manage is not None else None
    found = []
    for more in steps:
        for block in list(model)[:-1]:
            block.more = more
        if more:
            before_heavy()
        x = torch.randn(256, WIDTH)
        if memory is None:
            found.append(step(model, optimizer, x))
        else:
            with memory.step(x):
                found.append(step(model, optimizer, x))
    if memory is not None:
        memory.close()
    return [one.detach().numpy().tobytes() for one in (*found, *model.state_dict().values())], memory


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def under(budget: Any, **options: Any) -> Managed:
    return lambda model, optimizer: spillway.manage(model, optimizer, budget=budget, **options)


@pytest.fixture(scope="module")
def peak() -> int:
    """Of light steps that keep all that they save."""
    _, memory = trained([LIGHT] * 4, under("1GiB", method="lru"))
    return max(report.peak_bytes for report in memory.history)


def steps(heavy: int) -> list[int]:
    return [LIGHT] * 6 + [heavy, LIGHT, LIGHT] * 3


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("heavy", "share", "returns"), [(3, 1.6, True), (16, 1.05, False)])
def test_a_step_that_takes_more_than_its_plan_is_not_refused(
    heavy: int, share: float, returns: bool, peak: int
) -> None:
    """Later ones are planned with room for that, or watched op by op where no plan has it."""
    budget = int(share * peak)
    plain, _ = trained(steps(heavy), None)
    found, memory = trained(steps(heavy), under(budget))
    assert found == plain
    assert all(report.peak_bytes <= budget for report in memory.history)
    lent, *later = memory.history[6:]
    assert lent.beyond_bytes > lent.ops == 0
    assert not any(report.beyond_bytes for report in later if report.ops == 0)
    assert all((report.ops == 0) == returns for report in later)
    assert ("Steps of one input size are watched op by op" in " ".join(memory.explanation)) == (not returns)


def test_without_such_a_place_it_would_be_refused(peak: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault of the test above."""
    monkeypatch.setattr(ArenaTrace, "guard", lambda *_: False)
    with pytest.raises(BudgetInfeasible):
        trained(steps(16), under(int(1.05 * peak)))


def test_where_the_directory_has_no_room_either_the_step_is_refused(peak: int, tmp_path: Path) -> None:
    directory = tmp_path / "spill"
    directory.mkdir()
    managed = under(int(1.05 * peak), spill=spillway.SpillOptions(directory=directory))
    with pytest.raises(BudgetInfeasible):
        trained(steps(16), managed, before_heavy=directory.rmdir)


@pytest.fixture
def lender(tmp_path: Path) -> Iterator[OpMemory]:
    arena, memory = Arena(), OpMemory(tmp_path)
    yield memory
    memory.close()
    arena.release()


def test_a_guarded_trace_holds_what_it_is_allowed_and_the_rest_lies_in_the_file(lender: OpMemory) -> None:
    trace = ArenaTrace({})
    assert trace.guard(MiB, lender)
    trace.mark()
    first = torch.full((MiB // 2,), 1, dtype=torch.uint8)
    second = torch.full((MiB,), 2, dtype=torch.uint8)
    third = torch.full((MiB // 2,), 3, dtype=torch.uint8)
    small = torch.full((KiB,), 4, dtype=torch.uint8)
    beyond = [lender.is_beyond(one.data_ptr()) for one in (first, second, third, small)]
    assert beyond == [False, True, False, True]
    assert trace.level() == MiB
    numbers = [one.numpy() for one in (first, second, third, small)]
    assert [int(one.min()) for one in numbers] == [int(one.max()) for one in numbers] == [1, 2, 3, 4]
    del first, second, numbers
    assert trace.level() == MiB // 2
    assert not lender.is_beyond(torch.empty(MiB // 2, dtype=torch.uint8).data_ptr())
    assert trace.stop()[0].peak == MiB
    assert lender.lent() == MiB + KiB
    assert not lender.is_beyond(torch.empty(4 * MiB, dtype=torch.uint8).data_ptr())


def test_what_the_file_has_no_room_for_counts(tmp_path: Path, lender: OpMemory) -> None:
    trace = ArenaTrace({})
    assert trace.guard(MiB, OpMemory(tmp_path / "nowhere"))
    trace.mark()
    held = torch.ones(2 * MiB, dtype=torch.uint8)
    assert trace.level() == held.nbytes
    trace.stop()
