"""The models of DELTA's tables, from their configurations, to be recorded on fake tensors; nothing is downloaded.

What the paper does not tell is assumed here: fp32, pictures of 224 x 224 with 1000 classes, questions of 384 tokens,
Adam over lists of parameters as PyTorch has it on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from benchmarks.models import bottleneck_resnet, built, pictures_of, repeated
from papers.networks import CLASSES, SIDE, WIDTH, widen
from spillway.workloads import Workload

LENGTH: Final = 384
"""Tokens of a question and its text, as BERT's authors cut them for SQuAD."""
GROUPS: Final = 32
"""Of ResNeXt-50 (32x4d): Xie et al. 2017, table 1."""
DEPTHS: Final = {"ResNet-50": (3, 4, 6, 3), "ResNet-101": (3, 4, 23, 3), "ResNeXt-50": (3, 4, 6, 3)}
"""Blocks of each stage: He et al. 2016, table 1."""


def resnet(name: str, batch: int, *, blocks: tuple[int, ...] | None = None, side: int = SIDE) -> Workload:
    """ResNet-50, ResNet-101 or ResNeXt-50."""
    model = bottleneck_resnet(blocks or DEPTHS[name], WIDTH, CLASSES)
    if name == "ResNeXt-50":
        widen(model, groups=GROUPS)
    return _workload(name, model, batch, pictures_of(batch, side))


def efficientnet(name: str, batch: int, *, side: int = SIDE) -> Workload:
    """EfficientNet-B0, whose multiples of width and depth are 1 (Tan and Le 2019, table 1)."""
    model = built(
        "EfficientNetForImageClassification", width_coefficient=1.0, depth_coefficient=1.0, image_size=SIDE,
        hidden_dim=1280, dropout_rate=0.2, num_labels=CLASSES,
    )  # fmt: skip
    return _workload(name, model, batch, pictures_of(batch, side))


def bert(name: str, batch: int, *, layers: int = 12, length: int = LENGTH, activation: str = "gelu") -> Workload:
    """BERT-base that finds answers, attention scores in memory as in 2022."""
    settings = {"num_hidden_layers": layers, "attn_implementation": "eager", "hidden_act": activation}
    words = torch.ones(batch, length, dtype=torch.int64)
    place = torch.zeros(batch, dtype=torch.int64)
    inputs = {"input_ids": words, "attention_mask": words.clone(), "token_type_ids": words.clone()}
    answers = {"start_positions": place, "end_positions": place + 1}
    return _workload(name, built("BertForQuestionAnswering", **settings), batch, inputs | answers)


BUILDS: Final[Mapping[str, Callable[..., Workload]]] = {
    "ResNet-50": resnet, "ResNet-101": resnet, "ResNeXt-50": resnet, "EfficientNet": efficientnet, "BERT": bert,
}  # fmt: skip
"""By the paper's names; called with the name and the batch size."""


def _workload(name: str, model: nn.Module, size: int, batch: Mapping[str, Tensor]) -> Workload:
    return repeated(name, model, batch, torch.optim.Adam(model.parameters(), foreach=True), size=size)
