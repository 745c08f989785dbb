"""What a block holds is looked at under `auto` and not touched, however much there is of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway


class Dies:
    """Counts how often one of these was given up."""

    died = 0

    def __del__(self) -> None:
        Dies.died += 1


class Holder(nn.Module):
    """A block of many small modules that holds something."""

    def __init__(self, held: Callable[[], Any], experts: int) -> None:
        super().__init__()
        parts = (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(experts))
        self.experts = nn.ModuleList(parts)
        self.held = held()

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = (x + expert(x)).tanh()
        return x


def numbers() -> Iterator[int]:
    yield from range(3)


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("held", "experts"), [(list, 64), (numbers, 2), (Dies, 2)], ids=["many", "generator", "dies"])
def test_what_a_block_holds_is_only_looked_at(held: Callable[[], Any], experts: int) -> None:
    def trained(budget: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Holder(held, experts) for _ in range(3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with spillway.manage(model, optimizer, budget=budget) as memory:
            for rows in (64, 96, 64):
                with memory.step(x := torch.randn(rows, 8)):
                    model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            assert Dies.died == 0
        return [one.detach() for one in model.parameters()]

    Dies.died = 0
    managed = trained("200MiB")
    gc.collect()  # the first model
    Dies.died = 0
    assert all(map(torch.equal, managed, trained(None)))
