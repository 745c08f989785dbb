"""PAPAYA's five models from their configurations, to be recorded on fake tensors; nothing is downloaded.

Assumed, after the published scripts: ResNets in fp32 with SGD; BERT on sentences of 128 tokens, Swin-Large and GPT-3
small (512 tokens) in mixed precision with Adam, attention scores in memory. The optimizer is one op, as Apex's fused
ones are, and leaves no temporaries.

Mixed precision is that of CUDA's autocast, which the CPU's is not: softmax and layer norm are float32 (`as_on_cuda`).
Dropout is CUDA's single op with a mask of a byte a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from benchmarks.models import bottleneck_resnet, built, encoder, pictures_of, repeated, swin_transformer
from papers.networks import CLASSES, SIDE, WIDTH, dropout_of_cuda, sentences_of, widen
from spillway.workloads import Workload

LENGTH: Final = 128
"""Tokens of a sentence for BERT."""
CONTEXT: Final = 512
"""Tokens of a sample for GPT."""


def resnet(batch: int, *, side: int = SIDE, depths: tuple[int, ...] = (3, 4, 6, 3), wide: bool = False) -> Workload:
    """ResNet-50 (He et al. 2016), or with twice the channels inside blocks (Zagoruyko and Komodakis 2016)."""
    model = bottleneck_resnet(depths, WIDTH, CLASSES)
    if wide:
        widen(model)
    return _workload("pictures", model, pictures_of(batch, side), batch, half=False)


def swin(batch: int, *, width: int = 192, depths: tuple[int, ...] = (2, 2, 18, 2), side: int = SIDE) -> Workload:
    """Swin-Large (Liu et al. 2021)."""
    settings = {"image_size": side, "drop_path_rate": 0.2, "num_labels": CLASSES, "attn_implementation": "eager"}
    model = swin_transformer(depths, width, **settings)
    return _workload("pictures", model, pictures_of(batch, side), batch, half=True)


def bert(batch: int, *, layers: int = 24, hidden: int = 1024, length: int = LENGTH) -> Workload:
    """BERT-large, which says which of two classes a sentence is of."""
    model = built("BertForSequenceClassification", vocab_size=28996, **encoder(layers, hidden))
    inputs = sentences_of(batch, length) | {"labels": torch.zeros(batch).long()}
    return _workload("bert", model, inputs, batch, half=True)


def gpt(batch: int, *, layers: int = 12, hidden: int = 768, length: int = CONTEXT) -> Workload:
    """GPT-3 small (Brown et al. 2020, table 2.1), a language model."""
    model = built(
        "GPT2LMHeadModel", n_layer=layers, n_embd=hidden, n_head=max(hidden // 64, 1), n_positions=length,
        use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    causal = torch.ones((1, 1, length, length), dtype=torch.bool).tril()
    words = torch.full((batch, length), 7)
    inputs = {"input_ids": words, "attention_mask": causal, "labels": words.clone()}
    return _workload("gpt", model, inputs, batch, half=True)


BUILDS: Final[Mapping[str, Callable[..., Workload]]] = {
    "ResNet-50": resnet, "Wide-ResNet-50": partial(resnet, wide=True), "Bert-Large": bert, "Swin-Large": swin,
    "GPT-Small": gpt,
}  # fmt: skip
"""By the paper's names; called with the batch size."""

HALF: Final = ("Bert-Large", "Swin-Large", "GPT-Small")
"""In mixed precision."""


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Within, autocast is on and softmax and layer norm are float32, as CUDA's has them."""
    functional: Any = nn.functional
    usual = functional.softmax, functional.layer_norm

    def softmax(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return cast(Tensor, usual[0](input.float(), *args, **kwargs))

    def layer_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return cast(Tensor, usual[1](input.float(), *args, **kwargs))

    functional.softmax, functional.layer_norm = softmax, layer_norm
    try:
        with torch.autocast("cpu", dtype=torch.float16):
            yield
    finally:
        functional.softmax, functional.layer_norm = usual


def _workload(name: str, model: nn.Module, batch: Mapping[str, Tensor], size: int, *, half: bool) -> Workload:
    @contextmanager
    def around() -> Iterator[None]:
        with dropout_of_cuda(), as_on_cuda() if half else nullcontext():
            yield

    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)
    if half:
        optimizer = torch.optim.AdamW(parameters, lr=5e-5, fused=True)
    return repeated(name, model, batch, optimizer, size=size, around=around)
