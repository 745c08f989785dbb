"""Models of the transformers library, tiny, from a configuration: nothing is downloaded. Dropout is on."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from tests.cpu.family import Build, Built, pictures, seeded, tokens, training


def _own_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return model(**batch).loss


def bert(seed: int) -> Built:
    library = pytest.importorskip("transformers")
    stream = seeded(seed)
    config = library.BertConfig(
        vocab_size=128,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=64,
    )
    model = library.BertForMaskedLM(config).train()
    batches = []
    for length in (48, 32, 40, 24, 48):
        words = tokens(stream, 128, 8, length)
        lengths = torch.randint(length // 2, length + 1, (8, 1), generator=stream)
        batches.append({"input_ids": words, "labels": words, "attention_mask": (torch.arange(length) < lengths).long()})
    return Built(model, [AdamW(model.parameters(), lr=1e-3, fused=True)], batches, training(_own_loss))


def gpt2(seed: int) -> Built:
    library = pytest.importorskip("transformers")
    stream = seeded(seed)
    config = library.GPT2Config(
        vocab_size=128,
        n_positions=64,
        n_embd=48,
        n_layer=3,
        n_head=4,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    model = library.GPT2LMHeadModel(config).train()
    # The loss that the library falls back to, with a warning in the log, for a class without one in its name.
    model.loss_type = "ForCausalLM"
    words = [tokens(stream, 128, 6, length) for length in (48, 32, 40, 24, 48)]
    return Built(
        model,
        [AdamW(model.parameters(), lr=1e-3, foreach=False)],
        [{"input_ids": row, "labels": row} for row in words],
        training(_own_loss, clip=1.0),
    )


def t5(seed: int) -> Built:
    library = pytest.importorskip("transformers")
    stream = seeded(seed)
    config = library.T5Config(
        vocab_size=128,
        d_model=48,
        d_kv=12,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
    )
    model = library.T5ForConditionalGeneration(config).train()
    lengths = ((32, 24), (20, 30), (28, 16), (32, 24), (16, 16))
    return Built(
        model,
        [SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)],
        [{"input_ids": tokens(stream, 128, 6, a), "labels": tokens(stream, 128, 6, b)} for a, b in lengths],
        training(_own_loss, set_to_none=False),
    )


def _labelled(stream: torch.Generator, counts: tuple[int, ...], side: int) -> list[dict[str, Tensor]]:
    made = (pictures(stream, count, side, 10) for count in counts)
    return [{"pixel_values": pixels, "labels": labels} for pixels, labels in made]


def vit(seed: int) -> Built:
    library = pytest.importorskip("transformers")
    stream = seeded(seed)
    config = library.ViTConfig(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=32,
        patch_size=4,
        num_labels=10,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    model = library.ViTForImageClassification(config).train()
    return Built(
        model,
        [Adam(model.parameters(), lr=1e-3, amsgrad=True, foreach=True)],
        _labelled(stream, (6, 4, 5, 6, 3), 32),
        training(_own_loss),
    )


def swin(seed: int) -> Built:
    library = pytest.importorskip("transformers")
    stream = seeded(seed)
    config = library.SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=10,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        drop_path_rate=0.2,
    )
    model = library.SwinForImageClassification(config).train()
    return Built(
        model,
        [AdamW(model.parameters(), lr=1e-3, fused=True)],
        _labelled(stream, (6, 4, 5, 6, 3), 32),
        training(_own_loss),
    )


TRANSFORMERS: dict[str, Build] = {"bert": bert, "gpt2": gpt2, "t5": t5, "vit": vit, "swin": swin}
