"""A decoder-only language model that learns the standard library byte by byte: the workload of the demo.

The model is GPT-2's (Radford et al. 2019) at a small size: blocks normalised first, learned positions, the output
matrix tied to the embedding, dropout on embeddings, attention weights and the outputs of both halves of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spillway.workloads import stdlib_text
from spillway.workloads.workload import Batch, Workload, seed_everything

NAME = "stdlib-lm"


class Attention(nn.Module):
    """Causal self attention. [batch, length, width] -> [batch, length, width]"""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        # Padding stands at the end of a row, where no earlier token looks: the causal mask covers it.
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return cast(Tensor, self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


class Block(nn.Module):
    """Attention, then a multi-layer perceptron of four times the width, each added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        return cast(Tensor, x + self.dropout(self.mlp(self.norm_mlp(x))))


class LanguageModel(nn.Module):
    """Tokens [batch, length] -> scores of the next token [batch, length, vocabulary]."""

    def __init__(self, *, width: int, layers: int, heads: int, longest: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(stdlib_text.VOCABULARY, width)
        self.positions = nn.Embedding(longest, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of the next byte, in nats; padding does not count."""
    tokens = cast(Mapping[str, Tensor], batch)
    scores = model(tokens["inputs"])
    return F.cross_entropy(scores.flatten(0, 1), tokens["targets"].flatten(), ignore_index=stdlib_text.PAD)


def build(
    seed: int = 0,
    *,
    width: int = 256,
    layers: int = 6,
    heads: int = 4,
    batch: int = 4,
    longest: int = 384,
    grouped: int = 4,
    dropout: float = 0.1,
) -> Workload:
    """The language model with AdamW.

    Args:
        batch: Functions in a batch.
        longest: Tokens; longer functions are clipped.
        grouped: Batches whose functions are sorted by length together; see `stdlib_text.batches`.
    """
    seed_everything(seed)
    model = LanguageModel(width=width, layers=layers, heads=heads, longest=longest, dropout=dropout)
    return Workload(
        name=NAME, model=model, optimizers=(torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01),),
        batches=partial(stdlib_text.batches, seed=seed, batch=batch, longest=longest, grouped=grouped), loss=loss,
    )  # fmt: skip
