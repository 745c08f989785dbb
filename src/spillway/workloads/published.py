"""Models that papers measure, at their published sizes, built from transformers' configurations and never downloaded.

ResNet-50 (He et al. 2016), BERT (Devlin et al. 2019), GPT-2 (Radford et al. 2019), Swin-T (Liu et al. 2021) and
T5-small (Raffel et al. 2020), with random weights, on random pictures and tokens. They are there to be recorded at any
size, which fake tensors make possible without memory, and train like any other workload where there is enough of it.
Three of them also come with four layers of width 256, on short sequences, so that a step on a few samples takes one
thread of a processor less than a second: BERT, GPT-2, and ViT (Dosovitskiy et al. 2021) on pictures of 64 x 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from spillway.errors import WorkloadError
from spillway.workloads.workload import Batch, Workload, seed_everything, transformers_needed

SIDE: Final = 224
"""Pixels along a side of a picture."""
CLASSES: Final = 1000
"""What a picture may show."""
MASKED: Final = 0.15
"""The share of tokens that BERT has to guess (section 3.1)."""
IGNORED: Final = -100
"""The label of a token that nobody has to guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    """One of them."""

    config: str
    """The class of its configuration in transformers."""
    model: str
    settings: Mapping[str, Any]
    """What differs from the configuration's defaults."""
    depth: tuple[str, ...]
    """Where the configuration has the number of its layers."""
    width: Mapping[str, int]
    """What the configuration has of 64 elements of width: itself, one head, and what is wider or narrower with it."""
    draw: Callable[..., dict[str, Tensor]]
    """Makes a batch."""
    optimizer: Callable[[Any], Optimizer]
    """Of the model's parameters."""
    length: int = 128
    """Tokens of a sequence if nobody says; of models of text."""


def _pictures(
    random: torch.Generator, batch: int, length: int, vocabulary: int, *, side: int = SIDE, classes: int = CLASSES
) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn((batch, 3, side, side), generator=random),
        "labels": torch.randint(classes, (batch,), generator=random),
    }


def _masked_tokens(random: torch.Generator, batch: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    tokens = torch.randint(vocabulary, (batch, length), generator=random)
    hidden = torch.rand((batch, length), generator=random) < MASKED
    return {"input_ids": tokens, "labels": torch.where(hidden, tokens, IGNORED)}


def _tokens(random: torch.Generator, batch: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    # Without a mask, transformers looks into the positions for one, and does something else on fake tensors.
    causal = torch.ones((1, 1, length, length), dtype=torch.bool).tril()
    tokens = torch.randint(vocabulary, (batch, length), generator=random)
    return {"input_ids": tokens, "attention_mask": causal, "labels": tokens.clone()}


def _pairs(random: torch.Generator, batch: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    tokens = torch.randint(vocabulary, (2, batch, length), generator=random)
    return {"input_ids": tokens[0].clone(), "labels": tokens[1].clone()}


_HEAD: Final = 64
"""Elements of a head of attention, in all of them."""
_ADAMW: Final = partial(AdamW, lr=5e-5, weight_decay=0.01)
_SMALL: Final = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
_BERT: Final = _Published(
    config="BertConfig", model="BertForMaskedLM", settings={}, depth=("num_hidden_layers",), draw=_masked_tokens,
    width={"hidden_size": _HEAD, "num_attention_heads": 1, "intermediate_size": 4 * _HEAD}, optimizer=_ADAMW,
)  # fmt: skip
_GPT: Final = _Published(
    config="GPT2Config", model="GPT2LMHeadModel", settings={"use_cache": False}, depth=("n_layer",),
    width={"n_embd": _HEAD, "n_head": 1}, draw=_tokens, optimizer=_ADAMW,
)  # fmt: skip
_RESNET: Final = _Published(
    config="ResNetConfig", model="ResNetForImageClassification", settings={"num_labels": CLASSES}, depth=(),
    width={}, draw=_pictures, optimizer=partial(SGD, lr=0.1, momentum=0.9, weight_decay=1e-4),
)  # fmt: skip
_MODELS: Final[Mapping[str, _Published]] = {
    "resnet50": _RESNET,
    "bert-base": _BERT,
    "bert-large": replace(_BERT, settings={
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096
    }),
    "gpt2": _GPT,
    "swin": replace(_RESNET, config="SwinConfig", model="SwinForImageClassification", optimizer=_ADAMW),
    "t5": _Published(
        config="T5Config", model="T5ForConditionalGeneration",
        settings={"use_cache": False, "decoder_start_token_id": 0}, depth=("num_layers", "num_decoder_layers"),
        width={"d_model": _HEAD, "num_heads": 1, "d_ff": 4 * _HEAD}, draw=_pairs, optimizer=_ADAMW,
    ),
    "bert-small": replace(_BERT, settings={**_SMALL, "vocab_size": 4096}, length=64),
    "gpt-small": replace(_GPT, length=64, settings={
        "n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 4096, "use_cache": False, "bos_token_id": 0,
        "eos_token_id": 0,
    }),
    "vit-small": replace(
        _BERT, config="ViTConfig", model="ViTForImageClassification", draw=partial(_pictures, side=64, classes=16),
        settings={**_SMALL, "image_size": 64, "patch_size": 8, "num_labels": 16},
    ),
}  # fmt: skip


def build_pictures(
    seed: int = 0, *, name: str, batch: int = 32, layers: int | None = None, width: int | None = None
) -> Workload:
    """A model of pictures 3 x 224 x 224, the small one of 3 x 64 x 64; its size is the batch.

    Args:
        layers: Blocks of ViT; the others have stages of several.
        width: Elements of a token of ViT, a multiple of 64.

    Raises WorkloadError where transformers is not installed, or layers or width cannot be chosen so.
    """
    return _build(name, seed, batch=batch, length=0, layers=layers, width=width, size=batch)


def build_tokens(
    seed: int = 0, *, name: str, batch: int = 8, length: int | None = None, layers: int | None = None,
    width: int | None = None,
) -> Workload:  # fmt: skip
    """A model of text; its size is the length.

    Args:
        length: Tokens of every sequence, 128 if left out, for the small ones 64; T5 reads as many as it writes.
        layers: Blocks, where fewer or more than the published model has are wanted; T5 has as many on both sides.
        width: Elements of a token, a multiple of 64, which are those of a head.

    Raises WorkloadError where transformers is not installed, or length, layers or width cannot be chosen so.
    """
    length = _MODELS[name].length if length is None else length
    if length < 1:
        raise WorkloadError(f"The workload {name} takes one or more tokens in a sequence, not {length}.")
    return _build(name, seed, batch=batch, length=length, layers=layers, width=width, size=length)


BUILDERS: Final[Mapping[str, Callable[..., Workload]]] = {
    name: partial(build_tokens if "Image" not in published.model else build_pictures, name=name)
    for name, published in _MODELS.items()
}
"""What builds each of them, by its name."""


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy, in nats, as the model itself computes it."""
    return cast(Tensor, model(**cast(Mapping[str, Tensor], batch)).loss)


def _build(
    name: str, seed: int, *, batch: int, length: int, layers: int | None, width: int | None, size: int
) -> Workload:
    published = _MODELS[name]
    seed_everything(seed)
    if layers is not None and not published.depth:
        raise WorkloadError(f"The layers of the workload {name} are in stages, and cannot be chosen by their number.")
    if layers is not None and layers < 1:
        raise WorkloadError(f"The workload {name} has one or more layers, not {layers}.")
    if width is not None and not published.width:
        raise WorkloadError(f"The stages of the workload {name} are of several widths, and cannot be chosen by one.")
    if width is not None and (width < _HEAD or width % _HEAD):
        raise WorkloadError(f"The workload {name} has a width that is a multiple of {_HEAD}, not {width}.")
    with transformers_needed(name):
        import transformers
    settings = dict(published.settings)
    if width is not None:
        settings |= {key: width // _HEAD * part for key, part in published.width.items()}
    if layers is not None:
        settings |= dict.fromkeys(published.depth, layers)
    config = getattr(transformers, published.config)(**settings)
    longest = getattr(config, "max_position_embeddings", length)
    if length > longest:
        raise WorkloadError(f"The workload {name} takes up to {longest} tokens, not {length}.")
    if batch < 1:
        raise WorkloadError(f"The workload {name} takes one or more samples in a batch, not {batch}.")
    model = getattr(transformers, published.model)(config).train()
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # which transformers takes then, and warns in every process

    def batches(steps: int) -> Iterator[dict[str, Tensor]]:
        random = torch.Generator().manual_seed(seed)
        for _ in repeat(None, steps):
            yield published.draw(random, batch, length, getattr(config, "vocab_size", 0))

    optimizers = (published.optimizer(model.parameters()),)
    return Workload(name=name, model=model, optimizers=optimizers, batches=batches, loss=loss, size=size)
