"""The models of DELTA's tables, from their configurations, to be recorded on fake tensors; nothing is downloaded.

What the paper does not tell is assumed here: fp32, pictures of 224 x 224 with 1000 classes, questions of 384 tokens,
Adam over lists of parameters as PyTorch has it on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from types import MappingProxyType
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    EfficientNetConfig,
    EfficientNetForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
)
from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer, ResNetConvLayer

from spillway.workloads import Batch, Workload, seed_everything

SIDE: Final = 224
"""Pixels along a side of a picture."""
CLASSES: Final = 1000
LENGTH: Final = 384
"""Tokens of a question and its text, as BERT's authors cut them for SQuAD."""
GROUPS: Final = 32
"""Of ResNeXt-50 (32x4d): Xie et al. 2017, table 1."""
DEPTHS: Final = MappingProxyType({"ResNet-50": (3, 4, 6, 3), "ResNet-101": (3, 4, 23, 3), "ResNeXt-50": (3, 4, 6, 3)})
"""Blocks of each stage: He et al. 2016, table 1."""
WIDTHS: Final = (256, 512, 1024, 2048)
"""Channels that come out of each stage."""


def resnet(name: str, batch: int, *, blocks: tuple[int, ...] | None = None, side: int = SIDE) -> Workload:
    """ResNet-50, ResNet-101 or ResNeXt-50."""
    depths = blocks or DEPTHS[name]
    config = ResNetConfig(depths=list(depths), hidden_sizes=list(WIDTHS[: len(depths)]), num_labels=CLASSES)
    model = ResNetForImageClassification(config)
    if name == "ResNeXt-50":
        for block in [module for module in model.modules() if isinstance(module, ResNetBottleNeckLayer)]:
            _group(block)
    return _of_pictures(name, model, batch, side)


def _group(block: nn.Module) -> None:
    """Twice the channels within the block, its convolution of 3 x 3 in groups."""
    first, middle, last = (cast(Any, layer).convolution for layer in cast(Any, block).layer)
    inner = 2 * middle.in_channels
    grouped = ResNetConvLayer(inner, inner, stride=middle.stride[0])
    grouped.convolution = nn.Conv2d(inner, inner, 3, middle.stride, padding=1, groups=GROUPS, bias=False)
    cast(Any, block).layer = nn.Sequential(
        ResNetConvLayer(first.in_channels, inner, kernel_size=1), grouped,
        ResNetConvLayer(inner, last.out_channels, kernel_size=1, activation=None),
    )  # fmt: skip


def efficientnet(name: str, batch: int, *, side: int = SIDE) -> Workload:
    """EfficientNet-B0, whose multiples of width and depth are 1 (Tan and Le 2019, table 1)."""
    config = EfficientNetConfig(
        width_coefficient=1.0, depth_coefficient=1.0, image_size=SIDE, hidden_dim=1280, dropout_rate=0.2,
        num_labels=CLASSES,
    )  # fmt: skip
    return _of_pictures(name, EfficientNetForImageClassification(config), batch, side)


def bert(name: str, batch: int, *, layers: int = 12, length: int = LENGTH, activation: str = "gelu") -> Workload:
    """BERT-base that finds answers, attention scores in memory as in 2022."""
    config = BertConfig(num_hidden_layers=layers, attn_implementation="eager", hidden_act=activation)
    words = torch.ones(batch, length, dtype=torch.int64)
    place = torch.zeros(batch, dtype=torch.int64)
    inputs = {"input_ids": words, "attention_mask": words.clone(), "token_type_ids": words.clone()}
    return _workload(
        name, BertForQuestionAnswering(config), batch, inputs | {"start_positions": place, "end_positions": place + 1}
    )


BUILDS: Final[Mapping[str, Callable[..., Workload]]] = MappingProxyType(
    {"ResNet-50": resnet, "ResNet-101": resnet, "ResNeXt-50": resnet, "EfficientNet": efficientnet, "BERT": bert}
)
"""By the paper's names; called with the name and the batch size."""


def _of_pictures(name: str, model: nn.Module, batch: int, side: int) -> Workload:
    pictures, labels = torch.ones(batch, 3, side, side), torch.ones(batch, dtype=torch.int64)
    return _workload(name, model, batch, {"pixel_values": pictures, "labels": labels})


def _workload(name: str, model: nn.Module, size: int, batch: Mapping[str, Tensor]) -> Workload:
    seed_everything(0)

    def batches(steps: int) -> Iterator[Batch]:
        return repeat(batch, steps)

    return Workload(
        name=name, model=model.train(), optimizers=(torch.optim.Adam(model.parameters(), foreach=True),),
        batches=batches, loss=_loss, size=size,
    )  # fmt: skip


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return cast(Tensor, cast(Any, model)(**cast(Mapping[str, Tensor], batch)).loss)
