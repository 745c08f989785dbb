"""Trainings made of blocks, whose smallest budgets refusals have to name."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import spillway
from spillway.errors import BudgetInfeasible
from spillway.units import Bytes

METHODS: Final = ("auto", "checkpoint", "mimose", "mimose-published")
STEPS: Final = 3
TOO_MUCH: Final = 1.10
"""What a refusal may name, as a multiple of the smallest that works."""


class _Residual(nn.Module):
    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return out


class Training(NamedTuple):
    """One training, as a seed makes it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Tensor
    loss: Callable[[Tensor], Tensor]
    differentiate: Callable[[Training], Tensor] | None = None
    """Fills gradients in another way than the usual one; the loss."""

    def step(self) -> None:
        """One step of the training."""
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(self._closure)
            return
        self._differentiate()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _closure(self) -> Tensor:
        self.optimizer.zero_grad()
        return self._differentiate()

    def _differentiate(self) -> Tensor:
        if self.differentiate is not None:
            return self.differentiate(self)
        loss = self.loss(self.model(self.batch))
        loss.backward()
        return loss


OPTIMIZERS: Final[Sequence[Callable[[Any], torch.optim.Optimizer]]] = (
    lambda trained: torch.optim.SGD(trained, lr=0.01),
    lambda trained: torch.optim.SGD(trained, lr=0.01, momentum=0.9),
    lambda trained: torch.optim.AdamW(trained, lr=0.01),
    lambda trained: torch.optim.Adam(trained, lr=0.01, foreach=True),
    lambda trained: torch.optim.AdamW(trained, lr=0.01, fused=True),
    lambda trained: torch.optim.RMSprop(trained, lr=0.01),
    lambda trained: torch.optim.Adagrad(trained, lr=0.01),
)


@final
class Masked(nn.Module):
    """Blocks that all read something large, which lies in one of `PLACES`."""

    def __init__(self, place: str, width: int, blocks: int) -> None:
        super().__init__()
        self.place = place
        self.blocks = nn.ModuleList(_Masked(width) for _ in range(blocks))
        self.register_buffer("mask", torch.rand(64, 2048))
        for block in self.blocks if PLACES[place] is None else ():
            held = torch.rand(64, 2048)
            block.register_buffer("mask", held) if place == "a buffer" else setattr(block, "mask", [held])

    def forward(self, x: Tensor) -> Tensor:
        given = PLACES[self.place]
        for block in self.blocks:
            x = block(x, given(self.mask) if given is not None else None)
        return x


class _Masked(nn.Module):
    mask: Any

    def __init__(self, width: int) -> None:
        super().__init__()
        self.line = nn.Linear(width, width)

    def forward(self, x: Tensor, given: Any) -> Tensor:
        given = self.mask if given is None else given
        mask = given[0] if isinstance(given, list) else given
        return x + torch.tanh(self.line(x)) * mask[:, : x.shape[1]]


PLACES: Final[Mapping[str, Callable[[Tensor], Any] | None]] = MappingProxyType(
    {
        "an argument": lambda mask: mask,
        "an argument of its own": lambda mask: mask.clone(),
        "a view of an argument": lambda mask: mask[:, :64],
        "a list": lambda mask: [mask],
        "a buffer": None,
        "an attribute": None,
    }
)
"""Where blocks find something large, and what they are called with where that is an argument."""

LARGE: Final = 1000
"""The seeds of such trainings begin here."""


def _masked_of(seed: int) -> Training:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Masked([*PLACES][(seed - LARGE) % len(PLACES)], width := draw.choice([32, 64]), draw.randint(2, 5))
    optimizer = draw.choice(OPTIMIZERS)(model.parameters())
    return Training(model, optimizer, torch.randn(64, width), lambda out: out.square().mean())


class _Wrapped(nn.Module):
    def __init__(self, width: int, hidden: int, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.up, self.down = wrap(nn.Linear(width, hidden)), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def _forward_mode(training: Training) -> Tensor:
    """The derivative along a direction in the parameters, learned from as well."""
    parameters = dict(training.model.named_parameters())

    def lost(parameters: dict[str, Tensor]) -> Tensor:
        return training.loss(torch.func.functional_call(training.model, parameters, (training.batch,)))

    along = {name: torch.ones_like(one) for name, one in parameters.items()}
    loss, slope = torch.func.jvp(lost, (parameters,), (along,))
    (loss + slope).backward()
    return loss


def _called_with_parameters(training: Training) -> Tensor:
    parameters = dict(training.model.named_parameters())
    loss = training.loss(torch.func.functional_call(training.model, parameters, (training.batch,)))
    loss.backward()
    return loss


def _lbfgs(draw: random.Random, search: str | None = None) -> Callable[[Any], torch.optim.Optimizer]:
    size, iterations = draw.randint(1, 3), draw.randint(1, 4)
    return lambda trained: torch.optim.LBFGS(
        trained, lr=0.1, max_iter=iterations, history_size=size, line_search_fn=search
    )


def _any_of(draw: random.Random) -> Callable[[Any], torch.optim.Optimizer]:
    return draw.choice(OPTIMIZERS)


def _orthogonal(by: str) -> Callable[..., nn.Module]:
    return partial(parametrizations.orthogonal, orthogonal_map=by)


def _plain(line: nn.Module) -> nn.Module:
    return line


UNUSUAL: Final[Mapping[str, tuple[Callable[..., nn.Module], Callable[[random.Random], Any], Any]]] = MappingProxyType(
    {
        "orthogonal weights": (parametrizations.orthogonal, _any_of, None),
        "orthogonal weights, by reflections": (_orthogonal("householder"), _any_of, None),
        "orthogonal weights, by Cayley": (_orthogonal("cayley"), _any_of, None),
        "weights by spectral norms": (parametrizations.spectral_norm, _any_of, None),
        "weights by norms": (parametrizations.weight_norm, _any_of, None),
        "LBFGS": (_plain, _lbfgs, None),
        "LBFGS, searching": (_plain, partial(_lbfgs, search="strong_wolfe"), None),
        "forward mode": (_plain, _any_of, _forward_mode),
        "called with its parameters": (_plain, _any_of, _called_with_parameters),
    }
)
"""What stands around weights in blocks, the optimizer, and how a step fills gradients."""

OTHER: Final = 2000
"""The seeds of such trainings begin here."""


def _unusual_of(seed: int) -> Training:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kind = [*UNUSUAL][(seed - OTHER) % len(UNUSUAL)]
    wrap, optimized, differentiate = UNUSUAL[kind]
    width, hidden = draw.choice([(32, 32), (64, 64), (64, 32), (32, 128)])
    blocks = [_Wrapped(width, hidden, wrap) for _ in range(draw.randint(3, 6))]
    model = nn.Sequential(nn.Linear(width, width), *blocks)
    batch = torch.randn(draw.choice([512, 2048]), width)
    return Training(model, optimized(draw)(model.parameters()), batch, lambda out: out.square().mean(), differentiate)


def training_of(seed: int) -> Training:
    """The training of a seed."""
    if seed >= OTHER:
        return _unusual_of(seed)
    if seed >= LARGE:
        return _masked_of(seed)
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width, classes = draw.choice([32, 64, 128]), draw.choice([10, 256])
    rows = draw.choice([64, 128, 512])
    dropout = draw.choice([0.0, 0.1])
    if draw.random() < 0.3:
        blocks: list[nn.Module] = [
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True)
            for _ in range(draw.randint(2, 5))
        ]
        batch = torch.randn(8, rows // 8, width)
    else:
        blocks = [_Residual(width, draw.choice([1, 4]) * width, dropout) for _ in range(draw.randint(2, 6))]
        batch = torch.randn(rows, width)
    model = nn.Sequential(nn.Linear(width, width), *blocks, nn.Linear(width, classes))
    target = torch.zeros(batch.shape[:-1], dtype=torch.long).flatten()
    losses: list[Callable[[Tensor], Tensor]] = [
        lambda out: out.square().mean(), lambda out: F.cross_entropy(out.flatten(0, -2), target),
    ]  # fmt: skip
    return Training(model, draw.choice(OPTIMIZERS)(model.parameters()), batch, draw.choice(losses))


def trained(seed: int, method: str, budget: Bytes) -> Bytes | BudgetInfeasible:
    """The highest peak of its steps, or why one was refused."""
    training = training_of(seed)
    with spillway.manage(
        training.model, training.optimizer, budget=budget, method=method, report=spillway.ReportOptions(timeline=True)
    ) as memory:
        try:
            for _ in range(STEPS):
                with memory.step(training.batch):
                    training.step()
        except BudgetInfeasible as refusal:
            return refusal
        return max(report.peak_bytes for report in memory.history)


def smallest_of(seed: int, method: str, among: int) -> Bytes:
    low, high = 0, trained(seed, "checkpoint", 1 << 30)
    assert isinstance(high, int)
    while isinstance(trained(seed, method, high), BudgetInfeasible):
        low, high = high, high * 5 // 4
    while high - low > high // among:
        middle = (low + high) // 2
        low, high = (middle, high) if isinstance(trained(seed, method, middle), BudgetInfeasible) else (low, middle)
    return high
