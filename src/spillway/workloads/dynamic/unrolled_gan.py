"""An unrolled GAN on eight Gaussians in a circle (Metz et al. 2017, section 3.3 and appendix A).

The generator is trained against a discriminator that is some updates ahead. How many is decided as they run: no further
one where the last has made the discriminator's loss less than a little smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from spillway.pilots.paths import BaseType, Dynamism
from spillway.workloads.workload import Batch, Workload, seed_everything

NAME = "unrolled-gan"
NOISE: Final = 16
"""Numbers that a generator starts from."""
MODES: Final = 8
"""Gaussians in the circle."""
SPREAD: Final = 0.02
"""Their standard deviation; the circle has radius 2."""


class UnrolledGan(nn.Module):
    """Noise [batch, NOISE] and points [batch, 2] -> the sum of both losses

    Args:
        ahead: The most updates that the discriminator is ahead.
        rate: The learning rate of those updates.
        enough: Updates go on while each makes the loss smaller by that share of it.
    """

    def __init__(self, *, width: int, ahead: int, rate: float, enough: float) -> None:
        super().__init__()
        self.embedding = nn.Sequential(nn.Linear(NOISE, width), nn.Tanh())
        self.generator = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
                                           nn.Linear(width, 1))  # fmt: skip
        self.ahead, self.rate, self.enough = ahead, rate, enough

    def forward(self, noise: Tensor, points: Tensor) -> Tensor:
        made = self.generator(self.embedding(noise))
        own: dict[str, Tensor] = dict(self.discriminator.named_parameters())
        loss = self._told_apart(own, made.detach(), points)
        # What the discriminator becomes is no business of its own parameters' gradients.
        later = {name: parameter.detach().requires_grad_() for name, parameter in own.items()}
        before = math.inf
        for _ in range(self.ahead):
            apart = self._told_apart(later, made, points)
            gradients = torch.autograd.grad(apart, list(later.values()), create_graph=True)
            later = {
                name: value - self.rate * gradient
                for (name, value), gradient in zip(later.items(), gradients, strict=True)
            }
            now = apart.item()
            if before - now < self.enough * now:
                break
            before = now
        fooled = functional_call(self.discriminator, later, (made,))
        return loss + F.binary_cross_entropy_with_logits(fooled, torch.ones_like(fooled))

    def _told_apart(self, parameters: dict[str, Tensor], made: Tensor, points: Tensor) -> Tensor:
        scores = functional_call(self.discriminator, parameters, (torch.cat([points, made]),))
        right = torch.cat([torch.ones_like(points[:, :1]), torch.zeros_like(made[:, :1])])
        return F.binary_cross_entropy_with_logits(scores, right)


def batches(steps: int, *, seed: int, batch: int) -> Iterator[dict[str, Tensor]]:
    """`noise`, float32 [batch, NOISE], and `points`, float32 [batch, 2]."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        angles = torch.randint(MODES, (batch,), generator=random) * (2 * math.pi / MODES)
        centres = 2 * torch.stack([angles.cos(), angles.sin()], dim=1)
        points = centres + SPREAD * torch.randn((batch, 2), generator=random)
        yield {"noise": torch.randn((batch, NOISE), generator=random), "points": points}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Of the discriminator and of the generator, in nats."""
    given = cast(dict[str, Tensor], batch)
    return cast(Tensor, model(given["noise"], given["points"]))


def sizes(batch: Batch) -> tuple[float, ...]:
    """Points."""
    return (float(len(cast(dict[str, Tensor], batch)["points"])),)


def build(
    seed: int = 0, *, width: int = 32, batch: int = 64, ahead: int = 6, rate: float = 0.3, enough: float = 0.02
) -> Workload:
    """The unrolled GAN with an Adam for either side.

    Args:
        width: Elements of hidden layers.
        batch: Points of either kind.
        ahead: The most updates that the discriminator is ahead.
        rate: The learning rate of those updates.
        enough: Updates go on while each makes the discriminator's loss smaller by that share of it.
    """
    seed_everything(seed)
    model = UnrolledGan(width=width, ahead=ahead, rate=rate, enough=enough)
    sides = [*model.embedding.parameters(), *model.generator.parameters()], [*model.discriminator.parameters()]
    return Workload(
        name=NAME, model=model, batches=partial(batches, seed=seed, batch=batch), loss=loss,
        optimizers=tuple(torch.optim.Adam(side, lr=lr, betas=(0.5, 0.999))
                         for side, lr in zip(sides, (1e-3, 1e-4), strict=True)),
        dynamism=Dynamism(base=BaseType.LSTM, embedding="embedding", sizes=sizes),
    )  # fmt: skip
