"""Networks in which no class of modules repeats: flat, dense, with skips, written by hand; and random ones.

Small in the versions that the tests train, and of any width for whoever measures their memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from tests.cpu.family import Build, Built, classified, pictures, seeded, training

CLASSES: Final = 10
SIDES: Final = (32, 24, 32)
"""Of the pictures, batch by batch."""


def _convolution(inner: int, outer: int, *, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inner, outer, 3, stride, 1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)]


class Vgg(nn.Module):
    """VGG-11 (Simonyan and Zisserman 2015, table 1) with batch norm, in a flat `Sequential` as torchvision has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inner = 3
        for wide in (1, 0, 2, 0, 4, 4, 0, 8, 8, 0):
            layers += _convolution(inner, wide * width) if wide else [nn.MaxPool2d(2)]
            inner = wide * width or inner
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(
            nn.Linear(inner * 4, 4 * width), nn.ReLU(True), nn.Dropout(), nn.Linear(4 * width, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.features(x)), 1))


class DenseLayer(nn.Module):
    """Takes all features so far, and adds `growth` channels (Huang et al. 2017)."""

    def __init__(self, inner: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inner), nn.Conv2d(inner, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, features: list[Tensor]) -> Tensor:
        y = self.conv1(self.relu(self.norm1(torch.cat(features, 1))))
        return F.dropout(self.conv2(self.relu(self.norm2(y))), 0.1, self.training)


class DenseBlock(nn.ModuleDict):
    def __init__(self, layers: int, inner: int, growth: int) -> None:
        super().__init__({f"layer{i}": DenseLayer(inner + i * growth, growth) for i in range(layers)})

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """Its layers repeat, its stem and its transitions do not."""

    def __init__(self, width: int, layers: tuple[int, ...]) -> None:
        super().__init__()
        parts: dict[str, nn.Module] = dict(zip(("conv0", "norm0", "relu0"), _convolution(3, 2 * width), strict=True))
        inner = 2 * width
        for number, count in enumerate(layers):
            parts[f"dense{number}"] = DenseBlock(count, inner, width)
            inner += count * width
            if number < len(layers) - 1:
                parts[f"transition{number}"] = nn.Sequential(
                    nn.BatchNorm2d(inner), nn.ReLU(inplace=True), nn.Conv2d(inner, inner // 2, 1), nn.AvgPool2d(2)
                )
                inner //= 2
        self.features = nn.Sequential()
        for name, part in parts.items():
            self.features.add_module(name, part)
        self.head = nn.Linear(inner, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.features(x), inplace=True)
        return self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))


class UNet(nn.Module):
    """Two convolutions in a `Sequential` at each level, of no class of their own, and skips (Ronneberger et al. 2015)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left0 = self._double(3, width)
        self.left1 = nn.Sequential(nn.MaxPool2d(2), *self._double(width, 2 * width))
        self.bottom = nn.Sequential(nn.MaxPool2d(2), *self._double(2 * width, 4 * width), nn.Dropout2d(0.2))
        self.up1, self.right1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), self._double(4 * width, 2 * width)
        self.up0, self.right0 = nn.ConvTranspose2d(2 * width, width, 2, 2), self._double(2 * width, width)
        self.leave = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _double(inner: int, outer: int) -> nn.Sequential:
        return nn.Sequential(*_convolution(inner, outer), *_convolution(outer, outer))

    def forward(self, x: Tensor) -> Tensor:
        fine = self.left0(x)
        coarse = self.left1(fine)
        y = torch.cat([coarse, self.up1(self.bottom(coarse))], 1)
        return self.leave(self.right0(torch.cat([fine, self.up0(self.right1(y))], 1)))


class Stem(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.conv(x)))


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Conv2d(width, width // 2, 1), nn.Conv2d(width // 2, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.wide(F.silu(self.narrow(x))))
        return F.relu(y + x, inplace=True)


class Pyramid(nn.Module):
    """Three scales, side by side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=2, dilation=2)
        self.down = nn.Conv2d(2 * width, 2 * width, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([torch.tanh(self.one(x)), F.silu(self.two(x))], 1)
        return F.leaky_relu(self.down(F.dropout(y, 0.1, self.training)), 0.1, inplace=True)


class Mixing(nn.Module):
    """Every place of a picture attends to places of one a quarter as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, 0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows, few = x.flatten(2).transpose(1, 2), F.avg_pool2d(x, 4).flatten(2).transpose(1, 2)
        rows = rows + self.attention(self.norm(rows), few, few, need_weights=False)[0]
        return rows.transpose(1, 2).reshape(x.shape)


class ByHand(nn.Module):
    """Each stage is of a class of its own, as in a first version of a network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.body, self.pyramid = Stem(width), Bottleneck(width), Pyramid(width)
        self.mixing = Mixing(2 * width)
        self.tail = nn.Sequential(*_convolution(2 * width, 2 * width, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tail(self.mixing(self.pyramid(self.body(self.stem(x))))))


def _classifier(make: Callable[[], nn.Module]) -> Build:
    def build(seed: int) -> Built:
        stream = seeded(seed)
        model = make()
        optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
        return Built(model, [optimizer], [pictures(stream, 4, side, CLASSES) for side in SIDES], training(classified))

    return build


def unet(seed: int) -> Built:
    stream = seeded(seed)
    model = UNet(8)
    batches = [torch.randn(2, 3, side, side, generator=stream) for side in SIDES]
    step = training(lambda model, batch: F.mse_loss(model(batch), batch))
    return Built(model, [Adam(model.parameters(), lr=1e-3)], batches, step)


def perceptron(seed: int) -> Built:
    """A `Sequential` that is the model itself, with one activation that stands in it many times."""
    stream = seeded(seed)
    relu = nn.ReLU()
    layers = [layer for _ in range(12) for layer in (nn.Linear(32, 32), relu)]
    model = nn.Sequential(*layers, nn.Linear(32, 8))
    batches = [torch.randn(rows, 32, generator=stream) for rows in (64, 40, 64)]
    step = training(lambda model, batch: model(batch).square().mean())
    return Built(model, [AdamW(model.parameters(), lr=1e-3)], batches, step)


UNREPEATED: Mapping[str, Build] = MappingProxyType(
    {
        "vgg": _classifier(lambda: Vgg(8)),
        "densenet": _classifier(lambda: DenseNet(8, (2, 3, 2))),
        "unet": unet,
        "by hand": _classifier(lambda: ByHand(16)),
        "perceptron": perceptron,
    }
)
