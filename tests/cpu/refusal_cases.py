"""Trainings whose smallest budgets refusals have to name: networks, losses and optimizers of every kind."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spillway
from spillway.units import Bytes

OPTIMIZERS: Final[Mapping[str, tuple[Any, Mapping[str, Any]]]] = MappingProxyType(
    {
        "AdamW": (torch.optim.AdamW, {}),
        "AdamW, amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
        "Adam": (torch.optim.Adam, {"weight_decay": 0.01}),
        "SGD": (torch.optim.SGD, {"lr": 0.01}),
        "SGD, momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
        "Adagrad": (torch.optim.Adagrad, {}),
        "NAdam": (torch.optim.NAdam, {}),
        "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        "Adadelta": (torch.optim.Adadelta, {}),
        "Adamax": (torch.optim.Adamax, {}),
        "RAdam": (torch.optim.RAdam, {}),
        "ASGD": (torch.optim.ASGD, {}),
        "Rprop": (torch.optim.Rprop, {}),
        "Adafactor": (torch.optim.Adafactor, {}),
    }
)
FUSED: Final = frozenset({"AdamW", "AdamW, amsgrad", "Adam", "SGD", "SGD, momentum", "Adagrad"})
"""Those that torch has a fused form of."""


Loss = Callable[[nn.Module, Any], Tensor]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training."""

    network: str
    optimizer: str
    form: str
    seed: int

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer, Any, Loss]:
        """A fresh network, its optimizer, its batch and its loss."""
        torch.manual_seed(self.seed)
        model, batch, loss = NETWORKS[self.network](random.Random(self.seed))
        kind, options = OPTIMIZERS[self.optimizer]
        flags: dict[str, Any] = {"fused": True} if self.form == "fused" else {"foreach": self.form == "foreach"}
        return model, kind(model.parameters(), **options, **flags), batch, loss

    def __str__(self) -> str:
        return f"{self.network}, {self.optimizer}, {self.form}, {self.seed}"


def cases(count: int) -> Sequence[Case]:
    """Every network in turn, with optimizers drawn for it."""
    drawn = random.Random(0)
    found = []
    for seed in range(count):
        optimizer = drawn.choice([*OPTIMIZERS])
        form = drawn.choice(["single", "foreach", *["fused"] * (optimizer in FUSED)])
        found.append(Case(network=[*NETWORKS][seed % len(NETWORKS)], optimizer=optimizer, form=form, seed=seed))
    return found


def asked_for(numbers: Sequence[int]) -> Sequence[int]:
    """Of these trainings, those in `SPILLWAY_TRAININGS` (with commas), or all where it is not there."""
    named = [int(number) for number in os.environ.get("SPILLWAY_TRAININGS", "").split(",") if number]
    return [number for number in numbers if number in named] if named else numbers


def _squares(model: nn.Module, batch: Any) -> Tensor:
    out: Tensor = model(batch).square().mean()
    return out


def _perceptron(drawn: random.Random) -> Any:
    width, rows = drawn.choice([48, 96, 160]), drawn.choice([8, 64, 300])
    kinds = [nn.Tanh, nn.GELU, nn.ReLU, lambda: nn.Dropout(0.3), lambda: nn.LayerNorm(width)]
    kinds += [lambda: nn.BatchNorm1d(width)]
    layers = [layer for _ in range(drawn.randint(2, 8)) for layer in (nn.Linear(width, width), drawn.choice(kinds)())]
    return nn.Sequential(*layers), torch.randn(rows, width), _squares


def _classifier(drawn: random.Random) -> Any:
    width, classes = drawn.choice([32, 96]), drawn.choice([10, 500, 3000])
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(inplace=True), nn.Linear(2 * width, classes))
    batch = (torch.randn(drawn.choice([16, 128]), width),)
    batch += (torch.randint(classes, (len(batch[0]),)),)
    return model, batch, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])


def _pictures(drawn: random.Random) -> Any:
    channels = drawn.choice([8, 16, 24])
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.GroupNorm(4, 2 * channels), nn.SiLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * channels, 10),
    )  # fmt: skip
    return model, torch.randn(drawn.choice([2, 8]), 3, 32, 32), _squares


def _autoencoder(drawn: random.Random) -> Any:
    width = drawn.choice([200, 400])
    model = nn.Sequential(nn.Linear(width, 32), nn.ELU(), nn.Linear(32, width), nn.Sigmoid())
    loss = drawn.choice([F.mse_loss, F.l1_loss, F.smooth_l1_loss])
    return model, torch.rand(drawn.choice([20, 200]), width), lambda model, batch: loss(model(batch), batch)


@final
class Recurrent(nn.Module):
    """An LSTM or GRU over embedded tokens."""

    def __init__(self, kind: Any, tokens: int, width: int) -> None:
        super().__init__()
        self.table, self.cells = nn.Embedding(tokens, width), kind(width, width, batch_first=True, num_layers=2)
        self.head = nn.Linear(width, 7)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.cells(self.table(tokens))[0][:, -1])
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def _recurrent(drawn: random.Random) -> Any:
    tokens, width = drawn.choice([50, 4000]), drawn.choice([32, 64])
    model = Recurrent(drawn.choice([nn.LSTM, nn.GRU]), tokens, width)
    batch = {"tokens": torch.randint(tokens, (8, drawn.choice([6, 20]))), "labels": torch.randint(7, (8,))}
    return model, batch, lambda model, batch: model(**batch)["loss"]


@final
class LanguageModel(nn.Module):
    """A transformer with a causal mask; the loss is the caller's."""

    def __init__(self, tokens: int, width: int, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.1)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        out: Tensor = self.head(self.layers(self.table(tokens), mask=mask, is_causal=True))
        return out


def _language(drawn: random.Random) -> Any:
    tokens, width = drawn.choice([64, 1500]), drawn.choice([32, 64])
    model = LanguageModel(tokens, width, drawn.randint(1, 3))
    batch = torch.randint(tokens, (4, drawn.choice([12, 40])))
    return (
        model,
        batch,
        lambda model, batch: F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()),
    )


@final
class TreeLstm(nn.Module):
    """Recursion over a tree of whole numbers: the children of each node, -1 for none."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.table, self.gates = nn.Embedding(tokens, width), nn.Linear(2 * width, 3 * width)
        self.head = nn.Linear(width, 5)

    def forward(self, tokens: Tensor, children: Tensor) -> Tensor:
        out: Tensor = self.head(self._state(0, tokens, children))
        return out

    def _state(self, node: int, tokens: Tensor, children: Tensor) -> Tensor:
        below = [self._state(child, tokens, children) for child in children[node].tolist() if child >= 0]
        held = torch.stack(below).sum(0) if below else torch.zeros_like(self.table(tokens[:, node]))
        one, two, three = self.gates(torch.cat([self.table(tokens[:, node]), held], -1)).chunk(3, -1)
        return torch.sigmoid(one) * torch.tanh(two) + torch.sigmoid(three) * held


def _tree(drawn: random.Random) -> Any:
    tokens, nodes = drawn.choice([200, 5000]), drawn.choice([7, 15])
    children = torch.tensor([[2 * n + 1, 2 * n + 2] if 2 * n + 2 < nodes else [-1, -1] for n in range(nodes)])
    model, batch = TreeLstm(tokens, 48), (torch.randint(tokens, (16, nodes)), children)
    return model, batch, lambda model, batch: model(*batch).logsumexp(-1).mean()


@final
class Bridged(nn.Module):
    """Down and up again over pictures, with bridges between them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, channels, 3, padding=1, stride=2)
        self.middle = nn.Conv2d(channels, channels, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * channels, 3, 2, stride=2)

    def forward(self, pictures: Tensor) -> Tensor:
        down = torch.relu(self.down(pictures))
        out: Tensor = self.up(torch.cat([down, torch.relu(self.middle(down))], 1))
        return out


def _bridged(drawn: random.Random) -> Any:
    batch = torch.randn(drawn.choice([1, 4]), 3, 48, 48)
    return Bridged(drawn.choice([8, 32])), batch, lambda model, batch: F.mse_loss(model(batch), batch)


@final
class Attention(nn.Module):
    """Attention by hand, with all of its weights there at once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of = nn.Linear(width, 3 * width)

    def forward(self, rows: Tensor) -> Tensor:
        query, key, value = self.of(rows).chunk(3, -1)
        return torch.softmax(query @ key.transpose(-1, -2) / 8, -1) @ value


def _attention(drawn: random.Random) -> Any:
    rows = torch.randn(2, drawn.choice([40, 150, 400]), 32)
    return nn.Sequential(Attention(32), nn.LayerNorm(32), Attention(32)), rows, _squares


NETWORKS: Final[Mapping[str, Callable[[random.Random], Any]]] = MappingProxyType(
    {
        "perceptron": _perceptron,
        "classifier": _classifier,
        "pictures": _pictures,
        "autoencoder": _autoencoder,
        "recurrent": _recurrent,
        "language": _language,
        "tree": _tree,
        "bridged": _bridged,
        "attention": _attention,
    }
)


STEPS: Final = 2
"""The second updates with the state that the first has made."""


TOO_MUCH: Final = 1.10
"""What a refusal may name, as a multiple of the smallest that works."""


def trained(case: Case, method: str, budget: Bytes | None) -> Bytes | spillway.BudgetInfeasible:
    """The highest peak of its steps, or why one was refused."""
    model, optimizer, batch, loss = case.build()
    with spillway.manage(model, optimizer, budget=budget, method=method) as memory:
        try:
            for _ in range(STEPS):
                with memory.step(batch):
                    loss(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        except spillway.BudgetInfeasible as refusal:
            return refusal
        return max(report.peak_bytes for report in memory.history)


def works(case: Case, method: str, budget: Bytes) -> bool:
    return not isinstance(trained(case, method, budget), spillway.BudgetInfeasible)


def smallest_that_works(works: Callable[[Bytes], bool], most: Bytes, among: int) -> Bytes:
    """By bisection to one part in `among` of it; `most` is known to work."""
    low, high = 0, most
    while high - low > high // among:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high
