"""Models whose steps are recorded at many sizes of the input, from their configurations; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmarks.models import pictures_of, repeated
from spillway.workloads import Workload

Build = Callable[..., Workload]
_VOCABULARY: Final = 1000


def bert(size: int, *, layers: int = 12, width: int = 768, batch: int = 8) -> Workload:
    """BERT-base that guesses masked words, of `size` words; attention as the papers had it, scores in memory."""
    config = BertConfig(
        vocab_size=_VOCABULARY, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
        intermediate_size=4 * width, max_position_embeddings=4096, attn_implementation="eager",
    )  # fmt: skip
    return _of_words("BERT", BertForMaskedLM(config), size, batch)


def gpt2(size: int, *, layers: int = 12, width: int = 768, batch: int = 8) -> Workload:
    """GPT-2 small that guesses the next of `size` words."""
    config = GPT2Config(
        vocab_size=_VOCABULARY, n_embd=width, n_layer=layers, n_head=width // 64, n_positions=4096,
        attn_implementation="eager", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _of_words("GPT-2", GPT2LMHeadModel(config), size, batch)


def t5(size: int, *, layers: int = 12, width: int = 768, batch: int = 8) -> Workload:
    """T5-base that turns `size` words into a third as many, the odd ones cut off."""
    config = T5Config(
        vocab_size=_VOCABULARY, d_model=width, d_kv=64, d_ff=4 * width, num_layers=layers, num_heads=width // 64,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    words = torch.ones(batch, size, dtype=torch.int64)
    return _workload(
        "T5", T5ForConditionalGeneration(config), {"input_ids": words, "labels": words[:, : size // 3].contiguous()}
    )


def swin(size: int, *, depths: tuple[int, ...] = (2, 2, 6, 2), width: int = 96, batch: int = 8) -> Workload:
    """Swin-T on pictures of `size` x `size`, padded to whole patches of 4 and whole windows of 7."""
    config = SwinConfig(
        embed_dim=width, depths=list(depths), num_heads=[width // 32 * 2**i for i in range(len(depths))]
    )
    return _of_pictures("Swin", SwinForImageClassification(config), size, batch)


def resnet(size: int, *, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, batch: int = 8) -> Workload:
    """ResNet-50 on pictures of `size` x `size`, halved five times."""
    config = ResNetConfig(
        embedding_size=width, hidden_sizes=[4 * width * 2**i for i in range(len(depths))], depths=list(depths),
        num_labels=100,
    )  # fmt: skip
    return _of_pictures("ResNet", ResNetForImageClassification(config), size, batch)


BUILDS: Final[Mapping[str, Build]] = MappingProxyType(
    {"BERT": bert, "GPT-2": gpt2, "T5": t5, "Swin": swin, "ResNet": resnet}
)
"""By their names in the table."""


def _of_words(name: str, model: nn.Module, size: int, batch: int) -> Workload:
    words = torch.ones(batch, size, dtype=torch.int64)
    return _workload(name, model, {"input_ids": words, "labels": words.clone()})


def _of_pictures(name: str, model: nn.Module, size: int, batch: int) -> Workload:
    return _workload(name, model, pictures_of(batch, size))


def _workload(name: str, model: nn.Module, batch: Mapping[str, Tensor]) -> Workload:
    return repeated(name, model, batch, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True))
