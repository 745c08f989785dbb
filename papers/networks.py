"""What models of several papers have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from spillway.ir import Step

SIDE: Final = 224
"""Pixels along a side of a picture."""
CLASSES: Final = 1000
WIDTH: Final = 64
"""Of the first stage of a ResNet of bottlenecks: He et al. 2016, table 1."""


def widen(model: nn.Module, *, groups: int = 1) -> None:
    """Twice the channels within each block of a ResNet, its convolution of 3 x 3 in so many groups."""
    from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer, ResNetConvLayer

    for block in [module for module in model.modules() if isinstance(module, ResNetBottleNeckLayer)]:
        first, middle, last = (cast(Any, layer).convolution for layer in cast(Any, block).layer)
        inner = 2 * middle.in_channels
        wide = ResNetConvLayer(inner, inner, stride=middle.stride[0])
        if groups > 1:
            wide.convolution = nn.Conv2d(inner, inner, 3, middle.stride, padding=1, groups=groups, bias=False)
        cast(Any, block).layer = nn.Sequential(
            ResNetConvLayer(first.in_channels, inner, kernel_size=1), wide,
            ResNetConvLayer(inner, last.out_channels, kernel_size=1, activation=None),
        )  # fmt: skip


def words_of(*shape: int) -> dict[str, Tensor]:
    """Words, all of them looked at."""
    words = torch.full(shape, 7)
    return {"input_ids": words, "attention_mask": torch.ones_like(words)}


def sentences_of(*shape: int) -> dict[str, Tensor]:
    """The same, all of one sentence."""
    words = words_of(*shape)
    return words | {"token_type_ids": torch.zeros_like(words["input_ids"])}


@contextmanager
def dropout_of_cuda() -> Iterator[None]:
    """Within, dropout is the op that it is on CUDA, wherever the tensors are."""
    usual = nn.functional.dropout

    def fused(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p > 0 else input

    nn.functional.dropout = fused  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.functional.dropout = usual


def differing(derived: Step, recorded: Step) -> int:
    """Storages and ops of which a derived step and a recorded one do not say the same."""
    pairs: list[tuple[object, object]] = list(zip(derived.storages, recorded.storages, strict=True))
    pairs += zip(derived.ops, recorded.ops, strict=True)
    return sum(one != other for one, other in pairs)
