"""Gates that decide on the host whether a part of a network runs, held open for a share of all samples.

A gate that is left to training closes, because the network does without what is not trained, and the network is no
longer dynamic. So a controller, which is no part of the graph, moves each gate's threshold towards a target rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RATE: Final = 0.02
"""How far the threshold moves for one sample that all agree on."""
SLOWER: Final = 10
"""How many times smaller a gate's learning rate is than the network's, so that a threshold keeps up with its score."""
SETTLING: Final = 64
"""Forwards before training in which thresholds find scores, with rates that fall from 1 to the gate's own."""


class Gate(nn.Module):
    """Compares a score of the mean hidden state with a threshold, which moves so far towards being open for a `target`
    share of samples. [..., width] -> the score, and whether it is open."""

    threshold: Tensor

    def __init__(self, width: int, target: float, rate: float = RATE) -> None:
        super().__init__()
        self.target, self.rate = target, rate
        self.score = nn.Linear(width, 1)
        nn.init.normal_(self.score.weight, std=2 * width**-0.5)
        self.register_buffer("threshold", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, bool]:
        """Asks the host: on an accelerator it waits here."""
        mean = x.reshape(-1, x.shape[-1]).mean(0)
        score = self.score(F.layer_norm(mean, mean.shape)).squeeze()
        is_open = bool((score > self.threshold).item())
        if self.training:
            with torch.no_grad():
                self.threshold.add_(self.rate * (is_open - self.target))
        return torch.sigmoid(score - self.threshold), is_open


def settle(model: nn.Module, forward: Callable[[], object]) -> None:
    """Has the thresholds of an untrained model's gates find the scores. `forward` is called `SETTLING` times, each time
    with another sample; what the model holds besides stays as it is."""
    rates = {module: module.rate for module in model.modules() if isinstance(module, Gate)}
    with torch.no_grad():
        for call in range(SETTLING):
            for gate, rate in rates.items():
                gate.rate = float(rate ** (call / (SETTLING - 1)))
            forward()


def groups(model: nn.Module, lr: float) -> list[dict[str, object]]:
    """The parameters of a model for its optimizer: those of gates with a smaller learning rate."""
    slow = [one for module in model.modules() if isinstance(module, Gate) for one in module.parameters()]
    others = [one for one in model.parameters() if all(one is not gate for gate in slow)]
    return [{"params": others, "lr": lr}, {"params": slow, "lr": lr / SLOWER}]
