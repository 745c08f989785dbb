"""Networks in which no class of modules repeats: flat, dense, with skips, written by hand; and random ones.

Small in the versions that the tests train, and of any width for whoever measures their memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import pairwise
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
    """Two convolutions in a `Sequential` at each level, and skips (Ronneberger et al. 2015)."""

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


# -------------------------------------------------------------------------------------------------------- random ones


class Scaled(nn.Module):
    """Writes to what it is given, and gives it on."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.9).add_(0.01)


class Swapped(nn.Module):
    """Gives a view of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(2, 3)


class Averaged(nn.Module):
    """Adds an average that it writes to, and counts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(width, 1, 1))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.training:
            self.average.mul_(0.9).add_(0.1 * x.detach().mean((0, 2, 3))[:, None, None])
        return x + self.average / self.count


class Halves(nn.Module):
    """One half gates the other, in place; half of the channels come out."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, 1)
        return torch.sigmoid(one).mul(other).tanh_()


class Around(nn.Module):
    """A sum of what goes in and what comes out of any part."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x * 1.0)


class Named(nn.Sequential):
    """A `Sequential` of another name."""


class Joined(nn.Module):
    """Parts of which each is given what two before it gave, by hand."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        for number, part in enumerate(parts):
            self.add_module(f"part{number}", part)
        self.writes = random.random() < 0.3

    def forward(self, x: Tensor) -> Tensor:
        before = x
        for part in self.children():
            y = part(x)
            if y.shape == before.shape:
                y = y.mul(1.0).add_(before) if self.writes else before + y
            before, x = x, y
        return x


def _layer(width: int, made: list[nn.Module]) -> nn.Module:
    """Something that gives as many channels as it is given."""
    again = [layer for layer in made if layer.width == width]
    if again and random.random() < 0.15:
        return random.choice(again)
    in_place = random.random() < 0.5
    layer: nn.Module = random.choice(
        [
            lambda: nn.Conv2d(width, width, 3, padding=1), lambda: nn.Conv2d(width, width, 1, bias=False),
            lambda: nn.BatchNorm2d(width), lambda: nn.BatchNorm2d(width, momentum=None),
            lambda: nn.GroupNorm(2, width), lambda: nn.InstanceNorm2d(width, track_running_stats=True),
            lambda: nn.ReLU(in_place), lambda: nn.SiLU(in_place), lambda: nn.LeakyReLU(0.1, in_place),
            lambda: nn.ELU(inplace=in_place), lambda: nn.Hardswish(in_place), lambda: nn.RReLU(inplace=in_place),
            nn.GELU, nn.Tanh, nn.PReLU, nn.Identity, Scaled, Swapped, lambda: Averaged(width),
            lambda: nn.Dropout(0.2, in_place), lambda: nn.Dropout2d(0.2), lambda: nn.AlphaDropout(0.1),
            lambda: nn.MaxPool2d(3, 1, 1), lambda: nn.ZeroPad2d((1, 0, 0, 1)),
            lambda: Around(nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(True))),
            lambda: nn.Sequential(nn.Conv2d(width, 2 * width, 1), Halves()),
        ]
    )()  # fmt: skip
    layer.width = width
    made.append(layer)
    return layer


def _part(depth: int, inner: int, outer: int, made: list[nn.Module]) -> nn.Module:
    """A flat or nested one from so many channels to so many."""
    kind: Callable[..., nn.Module] = random.choice([nn.Sequential, nn.Sequential, Named])
    parts: list[nn.Module] = []
    for _ in range(random.randint(1, 3)):
        parts += [_layer(inner, made) for _ in range(random.randint(0, 3))]
        if depth and random.random() < 0.5:
            parts.append(_part(depth - 1, inner, inner, made))
    parts.append(nn.Conv2d(inner, outer, 3, random.choice([1, 1, 2]), 1))
    parts += [_layer(outer, made) for _ in range(random.randint(0, 4))]
    return kind(*parts)


def random_network(seed: int) -> Built:
    """Layers in `Sequential`s within each other or beside each other, some of them used twice."""
    stream = seeded(seed)
    widths = [4, *(random.choice([4, 8]) for _ in range(random.randint(2, 5)))]
    made: list[nn.Module] = []
    parts = [_part(2, inner, outer, made) for inner, outer in pairwise(widths)]
    flat = [layer for part in parts for layer in part.children()]
    body = [flat, parts, [Joined(parts)]][seed % 3]
    ends = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Unflatten(1, (4, -1)), nn.Flatten(), nn.Linear(4 * widths[-1], 5)]
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *body, *ends)
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = [torch.randn(3, 3, side, side, generator=stream) for side in (24, 16, 24)]
    return Built(model, [optimizer], batches, training(lambda model, batch: model(batch).square().mean()))
