"""Networks that need more or less memory by what is in their input, under one signature."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, final

import torch
from torch import Tensor, nn

ROWS: Final = 48


class Varying(nn.Module, ABC):
    """Takes two tensors of fixed shapes, `levels` (about how much is to be done, from 0 to 1) and `rows`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, levels: Tensor, rows: Tensor) -> Tensor:
        """The loss."""
        out: Tensor = self.outer(self.run(levels, rows)).square().mean()
        return out

    @abstractmethod
    def run(self, levels: Tensor, rows: Tensor) -> Tensor:
        """What the loss is made of."""

    def once(self, rows: Tensor) -> Tensor:
        """One layer."""
        return torch.tanh(self.inner(rows))


@final
class AdaptiveComputation(Varying):
    """Turns until the halting probabilities add up."""

    def run(self, levels: Tensor, rows: Tensor) -> Tensor:
        halted, turn = 0.0, 0
        while halted < 1 and turn < 24:
            rows, turn = self.once(rows), turn + 1
            halted += 1 / (1 + 20 * levels[0].item())
        return rows


@final
class EarlyExit(Varying):
    """Layers until the exit is sure enough."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(16))

    def run(self, levels: Tensor, rows: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            rows = torch.relu(layer(rows))
            if number / 16 > levels[0]:
                break
        return rows


@final
class Experts(Varying):
    """Rows are routed to experts of different widths."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.small = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.large = nn.Sequential(nn.Linear(width, 16 * width), nn.GELU(), nn.Linear(16 * width, width))

    def run(self, levels: Tensor, rows: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        chosen = torch.linspace(0, 1, len(rows)) < levels[0]
        for expert, mine in ((self.large, chosen), (self.small, ~chosen)):
            places = mine.nonzero()[:, 0]
            if len(places):
                out = out.index_add(0, places, expert(rows[places]))
        return out


@final
class DifferentTokens(Varying):
    """An embedding and pairs of the tokens that occur."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.table = nn.Embedding(400, width)

    def run(self, levels: Tensor, rows: Tensor) -> Tensor:
        tokens = (torch.arange(256) * levels[0]).long().unique()
        found = self.table(tokens)
        return self.once(torch.softmax(found @ found.T, -1) @ found)


@final
class Masked(Varying):
    """Only rows above a threshold are worked on, several times each."""

    def run(self, levels: Tensor, rows: Tensor) -> Tensor:
        many = rows.repeat(10, 1)
        picked = many[torch.linspace(0, 1, len(many)) <= levels[0]]
        for _ in range(3):
            picked = self.once(picked)
        return picked


@final
class Tree(Varying):
    """Recursion over a tree that is given as whole numbers."""

    def run(self, levels: Tensor, rows: Tensor) -> Tensor:
        return self._node(int(1 + 24 * levels[0].item()), rows)

    def _node(self, size: int, rows: Tensor) -> Tensor:
        if size <= 1:
            return self.once(rows)
        left = self._node(size // 2, rows)
        return self.once(left + self._node(size - 1 - size // 2, rows))


@final
class Decoder(Varying):
    """A recurrent cell until the end of the sequence, keeping all of its states."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.cell = nn.GRUCell(width, width)

    def run(self, levels: Tensor, rows: Tensor) -> Tensor:
        state, states = torch.zeros_like(rows), []
        for _ in range(int(2 + 12 * levels[0].item())):
            state = self.cell(rows, state)
            states.append(state)
        return torch.stack(states)


@final
class Proposals(Varying):
    """Each place with something in it is cropped and looked at."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.look = nn.Conv2d(1, 8, 3, padding=1)

    def run(self, levels: Tensor, rows: Tensor) -> Tensor:
        places = (torch.linspace(0, 1, len(rows)) < levels[0]).nonzero()[:, 0]
        seen = [self.look(rows[None, place : place + 1].expand(1, 16, -1)) for place in places.tolist()]
        return self.once(torch.cat([rows, *(crop[:, 0] if crop.dim() == 3 else crop[0, 0] for crop in seen)]))


@final
class Durations(Varying):
    """Each row is repeated as long as it lasts."""

    def run(self, levels: Tensor, rows: Tensor) -> Tensor:
        lasting = (1 + 12 * levels[: len(rows)]).long()
        return self.once(self.once(rows.repeat_interleave(lasting, 0)))


@final
class FixedPoint(Varying):
    """Turns until nothing changes any more, all of them in the graph."""

    def run(self, levels: Tensor, rows: Tensor) -> Tensor:
        found, close = torch.zeros_like(rows), 0.3 * (1.02 - float(levels[0]))
        for _ in range(30):
            before, found = found, self.once(0.3 * found + rows)
            if (found - before).abs().max().item() < close:
                break
        return found


@final
class Neighbours(Varying):
    """Distances between all pairs of as many rows as are near."""

    def run(self, levels: Tensor, rows: Tensor) -> Tensor:
        near = rows.repeat(8, 1)[: int(16 + 300 * levels[0].item())]
        weights = torch.softmax(-torch.cdist(near, near), -1)
        return self.once(weights @ near)


VARYING: Final[Mapping[str, Any]] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (
            AdaptiveComputation, EarlyExit, Experts, DifferentTokens, Masked, Tree, Decoder, Proposals, Durations,
            FixedPoint, Neighbours,
        )
    }
)  # fmt: skip


def batch_of(number: int, width: int) -> tuple[Tensor, Tensor]:
    """The input of a step: usually little is to be done, and now and then much."""
    drawn = torch.Generator().manual_seed(number)
    level = 0.15 * torch.rand((), generator=drawn) if number % 7 else torch.rand((), generator=drawn)
    return torch.full((ROWS,), float(level)), torch.randn(ROWS, width, generator=drawn)
