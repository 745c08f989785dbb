"""Architectures of the transformers library, tiny, from a configuration: nothing is downloaded. Dropout is on.

What each brings that its neighbours do not stands behind its name in `ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, cast

import torch
import transformers as library
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from tests.cpu.family import Build, Built, pictures, seeded, tokens, training

WORDS: Final = 96
LENGTHS: Final = (24, 18, 22)
"""Of the batches of a model of words."""
SIDES: Final = (32, 48, 40)
"""Of the batches of a model of pictures."""
CLASSES: Final = 5

BERT: Final = MappingProxyType(
    {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
)
"""What most configurations call their sizes."""
EAGER: Final = MappingProxyType({"attn_implementation": "eager"})
"""Attention with its scores in memory."""
Batches = Callable[[torch.Generator], list[dict[str, Any]]]


def _sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.02, momentum=0.9)


def _fused(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-3, fused=True)


def _foreach(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-3, foreach=True)


def _own_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return cast(Tensor, cast(Any, model)(**batch).loss)


def _same_words(stream: torch.Generator) -> list[dict[str, Any]]:
    """What goes in is what has to come out."""
    rows = (tokens(stream, WORDS - 3, 4, length) + 3 for length in LENGTHS)
    return [{"input_ids": row, "labels": row} for row in rows]


def _padded_words(stream: torch.Generator) -> list[dict[str, Any]]:
    batches = _same_words(stream)
    for batch in batches:
        length = batch["input_ids"].shape[1]
        lengths = torch.randint(length // 2, length + 1, (4, 1), generator=stream)
        batch["attention_mask"] = (torch.arange(length) < lengths).long()
    return batches


def _translated_words(stream: torch.Generator) -> list[dict[str, Any]]:
    return [batch | {"labels": tokens(stream, WORDS - 3, 4, 15) + 3} for batch in _padded_words(stream)]


def _longer_words(stream: torch.Generator) -> list[dict[str, Any]]:
    rows = (tokens(stream, WORDS - 3, 2, length) + 3 for length in (40, 32, 36))
    return [{"input_ids": row, "labels": row} for row in rows]


def _pictures(stream: torch.Generator, sides: tuple[int, ...] = SIDES) -> list[dict[str, Any]]:
    made = (pictures(stream, 4, side, CLASSES) for side in sides)
    return [{"pixel_values": pixels, "labels": labels} for pixels, labels in made]


def _maps(stream: torch.Generator) -> list[dict[str, Any]]:
    """Pictures with a class for each point."""
    batches = _pictures(stream)
    return [batch | {"labels": tokens(stream, CLASSES, 4, *batch["pixel_values"].shape[2:])} for batch in batches]


def _spectra(stream: torch.Generator) -> list[dict[str, Any]]:
    sounds = [torch.randn(4, 8, 48, generator=stream) for _ in LENGTHS]
    return [
        {"input_features": x, "labels": tokens(stream, WORDS - 3, 4, n) + 3}
        for x, n in zip(sounds, LENGTHS, strict=True)
    ]


def _waves(stream: torch.Generator) -> list[dict[str, Any]]:
    return [
        {"input_values": torch.randn(4, 320 * n, generator=stream), "labels": tokens(stream, CLASSES, 4)}
        for n in LENGTHS
    ]


def _captions(stream: torch.Generator) -> list[dict[str, Any]]:
    batches = _pictures(stream, (32,) * 3)
    texts = [tokens(stream, WORDS - 3, 4, length) + 3 for length in (16, 12, 14)]
    return [
        {"input_ids": text, "pixel_values": batch["pixel_values"], "return_loss": True}
        for text, batch in zip(texts, batches, strict=True)
    ]


def _build(
    config: str, model: str, batches: Batches, optimizer: Callable[[nn.Module], Optimizer], seed: int, **options: Any
) -> Built:
    stream = seeded(seed)
    made = getattr(library, model)(getattr(library, config)(**options)).train()
    return Built(made, [optimizer(made)], batches(stream), training(_own_loss))


def _of(
    name: str, head: str, batches: Batches, optimizer: Callable[[nn.Module], Optimizer], *sizes: Mapping[str, Any],
    **options: Any,
) -> Build:  # fmt: skip
    merged = {key: value for size in sizes for key, value in size.items()} | options
    return partial(_build, f"{name}Config", f"{name}{head}", batches, optimizer, **merged)


_VOCABULARY: Final = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DROPS: Final = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_GROUPED: Final = {"num_key_value_heads": 2, "attention_dropout": 0.1, "max_position_embeddings": 64}
_HALVES: Final = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 2,
    "attention_dropout": 0.1, "dropout": 0.1,
}  # fmt: skip
_T5: Final = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}

_ENCODERS: Final[Mapping[str, Build]] = {
    "BERT": _of("Bert", "ForMaskedLM", _padded_words, _fused, BERT, _VOCABULARY, EAGER),
    "RoBERTa": _of("Roberta", "ForMaskedLM", _padded_words, _sgd, BERT, _VOCABULARY),
    # Attention over two streams, dropout on positions.
    "XLNet": _of("XLNet", "LMHeadModel", _padded_words, _foreach, _VOCABULARY, d_model=32, n_layer=3, n_head=4,
                 d_inner=64),
    # One layer, called four times.
    "ALBERT": _of("Albert", "ForMaskedLM", _padded_words, _fused, BERT, _VOCABULARY, _DROPS, num_hidden_layers=4,
                  embedding_size=16),
    "DistilBERT": _of("DistilBert", "ForMaskedLM", _padded_words, _sgd, _VOCABULARY, dim=32, n_layers=3, n_heads=4,
                      hidden_dim=64),
    "ELECTRA": _of("Electra", "ForMaskedLM", _padded_words, _foreach, BERT, _VOCABULARY, embedding_size=16),
    # One table of relative positions that all layers read, a dropout of its own.
    "DeBERTa-v2": _of("DebertaV2", "ForMaskedLM", _padded_words, _fused, BERT, _VOCABULARY, relative_attention=True,
                      position_buckets=8, pos_att_type=["p2c", "c2p"], max_position_embeddings=64),
    "MPNet": _of("MPNet", "ForMaskedLM", _padded_words, _sgd, BERT, _VOCABULARY),
    # Sequences that become shorter from block to block; layers that are given positions in a tuple.
    "Funnel": _of("Funnel", "ForMaskedLM", _padded_words, _foreach, vocab_size=WORDS, block_sizes=[2, 2],
                  num_decoder_layers=2, d_model=32, n_head=4, d_head=8, d_inner=64),
    "Longformer": _of("Longformer", "ForMaskedLM", _padded_words, _fused, BERT, _VOCABULARY, attention_window=8),
    # Every layer seeds NumPy's global stream and draws from it.
    "BigBird": _of("BigBird", "ForMaskedLM", _longer_words, _sgd, BERT, _VOCABULARY, block_size=4,
                   num_random_blocks=1, max_position_embeddings=64, attention_type="block_sparse"),
}  # fmt: skip

_DECODERS: Final[Mapping[str, Build]] = {
    # From here on a cache that every layer writes to: `use_cache` is on in training too.
    "GPT-2": _of("GPT2", "LMHeadModel", _same_words, _fused, _VOCABULARY, EAGER, n_positions=64, n_embd=32, n_layer=3,
                 n_head=4),
    "GPT-NeoX": _of("GPTNeoX", "ForCausalLM", _same_words, _sgd, BERT, _VOCABULARY, hidden_dropout=0.1,
                    attention_dropout=0.1, max_position_embeddings=64),
    # Layers that are left out by chance.
    "OPT": _of("OPT", "ForCausalLM", _padded_words, _foreach, _VOCABULARY, hidden_size=32, num_hidden_layers=3,
               num_attention_heads=4, ffn_dim=64, max_position_embeddings=64, word_embed_proj_dim=32,
               attention_dropout=0.1, layerdrop=0.3),
    "BLOOM": _of("Bloom", "ForCausalLM", _padded_words, _fused, _VOCABULARY, hidden_size=32, n_layer=3, n_head=4,
                 hidden_dropout=0.1, attention_dropout=0.1),
    "Falcon": _of("Falcon", "ForCausalLM", _padded_words, _sgd, _VOCABULARY, hidden_size=32, num_hidden_layers=3,
                  num_attention_heads=4, hidden_dropout=0.1, attention_dropout=0.1, alibi=True),
    "Llama": _of("Llama", "ForCausalLM", _same_words, _fused, BERT, _VOCABULARY, _GROUPED),
    "Mistral": _of("Mistral", "ForCausalLM", _same_words, _sgd, BERT, _VOCABULARY, _GROUPED, EAGER, sliding_window=8),
    # Tokens go to the experts that they choose.
    "Mixtral": _of("Mixtral", "ForCausalLM", _same_words, _foreach, BERT, _VOCABULARY, _GROUPED, num_local_experts=4,
                   router_jitter_noise=0.1, output_router_logits=True),
    # A scan over the sequence in Python; no attention.
    "Mamba": _of("Mamba", "ForCausalLM", _same_words, _fused, _VOCABULARY, hidden_size=32, state_size=4,
                 num_hidden_layers=3),
}  # fmt: skip

_PAIRS: Final[Mapping[str, Build]] = {
    "T5": _of("T5", "ForConditionalGeneration", _translated_words, _sgd, _T5, vocab_size=WORDS),
    "BART": _of("Bart", "ForConditionalGeneration", _translated_words, _fused, _HALVES, _VOCABULARY,
                max_position_embeddings=64),
    # An expert has room for so many tokens, and drops the others.
    "Switch": _of("SwitchTransformers", "ForConditionalGeneration", _translated_words, _foreach, _T5,
                  vocab_size=WORDS, num_experts=3, expert_capacity=6, router_jitter_noise=0.1),
    "Whisper": _of("Whisper", "ForConditionalGeneration", _spectra, _sgd, _HALVES, _VOCABULARY, num_mel_bins=8,
                   max_source_positions=24, max_target_positions=32, suppress_tokens=[], begin_suppress_tokens=[]),
    "CLIP": _of("CLIP", "Model", _captions, _fused, projection_dim=16,
                text_config={**BERT, **_VOCABULARY, "max_position_embeddings": 32, "attention_dropout": 0.1},
                vision_config={**BERT, "image_size": 32, "patch_size": 8, "attention_dropout": 0.1}),
    # Masks of NumPy's, layers left out by chance, a convolution whose weight is normalised.
    "wav2vec 2": _of("Wav2Vec2", "ForSequenceClassification", _waves, _foreach, BERT, num_labels=CLASSES,
                     conv_dim=[16, 16], conv_kernel=[16, 8], conv_stride=[16, 8], num_feat_extract_layers=2,
                     num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, classifier_proj_size=16,
                     mask_time_length=2, mask_time_prob=0.3, layerdrop=0.3),
}  # fmt: skip

_OF_PICTURES: Final[Mapping[str, Build]] = {
    "ViT": _of("ViT", "ForImageClassification", partial(_pictures, sides=(32,) * 3), _fused, BERT, _DROPS,
               image_size=32, patch_size=4, num_labels=CLASSES),
    # Windows that do not divide the picture are padded; whole branches are left out by chance.
    "Swin": _of("Swin", "ForImageClassification", _pictures, _sgd, _DROPS, image_size=32, patch_size=2, embed_dim=16,
                depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=CLASSES, drop_path_rate=0.2),
    "ConvNeXt": _of("ConvNext", "ForImageClassification", _pictures, _foreach, hidden_sizes=[16, 24, 32, 48],
                    depths=[1, 2, 2, 1], num_labels=CLASSES, drop_path_rate=0.2),
    # BatchNorm.
    "ResNet": _of("ResNet", "ForImageClassification", _pictures, _sgd, embedding_size=8, hidden_sizes=[16, 24, 32],
                  depths=[2, 2, 2], num_labels=CLASSES),
    "SegFormer": _of("Segformer", "ForSemanticSegmentation", _maps, _fused, _DROPS, hidden_sizes=[8, 16, 24, 32],
                     num_attention_heads=[1, 2, 3, 4], depths=[2, 2, 1, 1], decoder_hidden_size=16,
                     num_labels=CLASSES, drop_path_rate=0.2),
}  # fmt: skip

ARCHITECTURES: Final[Mapping[str, Build]] = MappingProxyType({**_ENCODERS, **_DECODERS, **_PAIRS, **_OF_PICTURES})
"""By their names in the table: a seed makes a model with its optimizer and three batches of different sizes."""
