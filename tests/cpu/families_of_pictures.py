"""Convolutions, skips, two networks against each other, branches taken by chance."""

from __future__ import annotations

import random
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from spillway.workloads.resnet import ResNet
from tests.cpu.family import Batch, Build, Built, classified, pictures, seeded, training


def conv_bn_relu(seed: int) -> Built:
    stream = seeded(seed)
    widths = [3, 16, 16, 16, 16, 16, 16, 16, 24]
    layers = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
        for a, b in pairwise(widths)
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))
    return Built(
        model,
        [SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)],
        [pictures(stream, count, 20, 10) for count in (16, 9, 12, 16, 5)],
        training(classified),
    )


def resnet(seed: int) -> Built:
    stream = seeded(seed)
    model = ResNet(width=8, blocks=(3, 3, 2), classes=10)
    return Built(
        model,
        [SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=True)],
        [pictures(stream, 8, side, 10) for side in (32, 24, 32, 28, 20)],
        training(classified, set_to_none=False),
    )


class UNet(nn.Module):
    """Two ways down, two ways up; what was seen on the way down is put beside what comes up."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = self._convolution(3, 8)
        self.down = nn.ModuleList([self._convolution(8, 16), self._convolution(16, 32)])
        self.widen = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.up = nn.ModuleList([self._convolution(32, 16), self._convolution(16, 8)])
        self.leave = nn.Conv2d(8, 3, 1)

    @staticmethod
    def _convolution(inner: int, outer: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1),
            nn.GroupNorm(4, outer),
            nn.SiLU(inplace=True),
            nn.Conv2d(outer, outer, 3, padding=1),
            nn.GroupNorm(4, outer),
            nn.ELU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.enter(x)]
        for down in self.down:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        y = skips.pop()
        for widen, up in zip(self.widen, self.up, strict=True):
            y = up(torch.cat([skips.pop(), widen(y)], dim=1))
        return self.leave(F.dropout2d(y, 0.1, self.training))


def unet(seed: int) -> Built:
    stream = seeded(seed)
    model = UNet()
    return Built(
        model,
        [Adam(model.parameters(), lr=1e-3, foreach=True)],
        [torch.randn(4, 3, side, side, generator=stream) for side in (48, 32, 40, 48, 36)],
        training(lambda model, batch: F.mse_loss(model(batch), batch)),
    )


def _gan_step(model: nn.Module, optimizers: list[Optimizer], batch: Batch) -> Tensor:
    generator, critic = model["generator"], model["critic"]
    for_generator, for_critic = optimizers
    for_critic.zero_grad()
    made = generator(torch.randn(len(batch), 16))
    critic_loss = F.softplus(critic(made.detach())).mean() + F.softplus(-critic(batch)).mean()
    critic_loss.backward()
    for_critic.step()
    for_generator.zero_grad(set_to_none=False)
    # The critic's gradients of this pass pile up until its next turn, as they do in many training loops.
    generator_loss = F.softplus(-critic(made)).mean()
    generator_loss.backward()
    for_generator.step()
    return (critic_loss + generator_loss).detach()


def gan(seed: int) -> Built:
    stream = seeded(seed)
    generator = nn.Sequential(
        nn.Linear(16, 16 * 64),
        nn.Unflatten(1, (16, 8, 8)),
        nn.BatchNorm2d(16),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 3, 3, padding=1),
        nn.Tanh(),
    )
    critic = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, padding=1),
        nn.LeakyReLU(0.2),
        nn.Dropout2d(0.25),
        nn.Conv2d(16, 32, 3, 2, padding=1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(),
        nn.Linear(32 * 64, 1),
    )
    return Built(
        nn.ModuleDict({"generator": generator, "critic": critic}),
        [Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9), foreach=True), RMSprop(critic.parameters(), lr=1e-4)],
        [pictures(stream, count, 16, 2)[0] for count in (32, 24, 32, 16, 28)],
        _gan_step,
    )


def spectral(seed: int) -> Built:
    """Spectral norm, whose buffers every forward changes in place, and clipped gradients."""
    stream = seeded(seed)
    model = nn.Sequential(
        spectral_norm(nn.Conv2d(3, 16, 3, padding=1)),
        nn.LeakyReLU(0.1),
        *(layer for _ in range(3) for layer in (spectral_norm(nn.Conv2d(16, 16, 3, padding=1)), nn.LeakyReLU(0.1))),
        spectral_norm(nn.Conv2d(16, 24, 4, 4, padding=0)),
        nn.LeakyReLU(0.1),
        nn.Flatten(),
        spectral_norm(nn.Linear(24 * 36, 32)),
        nn.LeakyReLU(0.1),
        nn.Linear(32, 10),
    )
    return Built(
        model,
        [AdamW(model.parameters(), lr=1e-3, fused=True)],
        [pictures(stream, count, 24, 10) for count in (16, 12, 16, 8, 14)],
        training(classified, clip=0.5),
    )


class SometimesSkipped(nn.Module):
    """A residual branch that Python's random numbers switch off; both ways save tensors of the same shapes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        chance = random.random()
        if chance < 0.25:
            return x
        return x + torch.relu(self.first(x) if chance < 0.6 else self.second(x))


def stochastic_depth(seed: int) -> Built:
    stream = seeded(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        *(SometimesSkipped(12) for _ in range(6)),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(48, 10),
    )
    return Built(
        model,
        # Adam skips the layers without a gradient: their state appears when they first get one.
        [Adam(model.parameters(), lr=1e-3, foreach=False)],
        [pictures(stream, 12, side, 10) for side in (24, 20, 24, 16, 22)],
        training(classified),
    )


PICTURES: dict[str, Build] = {
    "conv-bn-relu": conv_bn_relu,
    "resnet": resnet,
    "unet": unet,
    "gan": gan,
    "spectral-norm": spectral,
    "stochastic-depth": stochastic_depth,
}
