"""Models for the tests on a CUDA device, and what has to be the same of two trainings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

import spillway

DEVICE = torch.device("cuda", 0)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.inner(x))


def pictures() -> nn.Module:
    blocks = [Residual(32) for _ in range(6)]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks, *head)


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Linear(32, 128), nn.TransformerEncoder(layer, 6, enable_nested_tensor=False))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(32, 256, num_layers=3, dropout=0.2, batch_first=True)
        self.out = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x)[0][:, -1])


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "pictures": Case(pictures, (64, 3, 64, 64)),
        "transformer": Case(transformer, (32, 256, 32)),
        "recurrent": Case(Recurrent, (64, 128, 32)),
    }
)


class Trained(NamedTuple):
    losses: list[float]
    state: dict[str, Tensor]
    stream: Tensor
    peak: int
    """What the allocator had handed out at most, in the steps."""
    reports: list[spillway.StepReport]


def train(name: str, steps: int = 4, **session: object) -> Trained:
    """Train plainly, or under a session if something is said about one."""
    case = CASES[name]
    torch.manual_seed(5)
    model = case.build().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stream = torch.Generator(DEVICE).manual_seed(9)
    torch.cuda.manual_seed(7)
    memory = spillway.manage(model, optimizer, **session) if session else None  # type: ignore[arg-type]
    losses, peak = [], 0
    try:
        for _ in range(steps):
            batch = torch.randn(case.shape, device=DEVICE, generator=stream)
            torch.cuda.reset_peak_memory_stats()
            if memory is None:
                losses.append(_step(model, optimizer, batch))
            else:
                with memory.step(batch):
                    losses.append(_step(model, optimizer, batch))
            peak = max(peak, memory.history[-1].device_peak_bytes if memory else torch.cuda.max_memory_allocated())
    finally:
        if memory is not None:
            memory.close()
    state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    state |= {f"gradient of {name}": p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    reports = memory.history if memory else []
    return Trained(losses, state, torch.cuda.get_rng_state(DEVICE), peak, reports)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def difference(one: Trained, other: Trained) -> str | None:
    """The first thing that differs, bit by bit."""
    if one.losses != other.losses:
        return f"losses {one.losses} and {other.losses}"
    for name, value in one.state.items():
        if not torch.equal(value, other.state[name]):
            return name
    return None if torch.equal(one.stream, other.stream) else "random stream"
