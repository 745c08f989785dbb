"""ResNet-50 and ResNet-101 (He et al. 2016, table 1) and ResNeXt-50 32x4d (Xie et al. 2017, table 1), from torch alone.

Laid out as torchvision has them, in-place ops included, because what is measured of them is memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from torch import Tensor, nn

CLASSES: Final = 1000
EXPANSION: Final = 4
"""Channels that leave a block, in those of its stage."""


class _Layout(NamedTuple):
    blocks: tuple[int, ...]
    groups: int = 1
    width: int = 1
    """Channels within a block, in those of its stage."""


LAYOUTS: Final[Mapping[str, _Layout]] = MappingProxyType(
    {
        "resnet50": _Layout((3, 4, 6, 3)),
        "resnet101": _Layout((3, 4, 23, 3)),
        "resnext50_32x4d": _Layout((3, 4, 6, 3), groups=32, width=2),
    }
)


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3, 1 x 1, added to what came in. [batch, entering, h, w] -> [batch, leaving, ...]"""

    def __init__(self, entering: int, inner: int, leaving: int, stride: int, groups: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(entering, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False), nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True), nn.Conv2d(inner, leaving, 1, bias=False), nn.BatchNorm2d(leaving),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if entering != leaving or stride != 1:
            self.shortcut.extend([nn.Conv2d(entering, leaving, 1, stride, bias=False), nn.BatchNorm2d(leaving)])
        self.end = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        out += self.shortcut(x)
        ended: Tensor = self.end(out)
        return ended


def build(name: str) -> nn.Module:
    """One of them, with random weights. Pictures [batch, 3, side, side] -> scores [batch, CLASSES]"""
    layout, entering = LAYOUTS[name], 64
    network = nn.Sequential(
        nn.Conv2d(3, entering, 7, 2, 3, bias=False), nn.BatchNorm2d(entering), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    )  # fmt: skip
    for stage, count in enumerate(layout.blocks):
        channels = 64 << stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            leaving = EXPANSION * channels
            network.append(Bottleneck(entering, layout.width * channels, leaving, stride, layout.groups))
            entering = leaving
    return network.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(entering, CLASSES)])
