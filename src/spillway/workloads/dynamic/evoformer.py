"""The folding trunk of ESMFold (Lin et al. 2023), as transformers has it, on letters of docstrings instead of residues.

A trunk of AlphaFold's kind (Jumper et al. 2021): what runs is decided by the length, and by how often the trunk is run
again on its own result, which is drawn for each step. All recycles but the last run without gradients.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spillway.pilots.paths import BaseType, Dynamism
from spillway.workloads import stdlib_trees
from spillway.workloads.workload import Batch, Workload, seed_everything, transformers_needed

NAME = "evoformer"
RESIDUES: Final = 20
"""Kinds of residues; letters are counted round."""


class Evoformer(nn.Module):
    """Residues [batch, length] and a number of recycles -> whether two of them are of one word [batch, length, length]

    Args:
        single: Elements of a residue, a multiple of 8.
        pair: Of a pair, a multiple of 8.
    """

    def __init__(self, *, single: int, pair: int, blocks: int) -> None:
        super().__init__()
        from transformers.models.esm.configuration_esm import StructureModuleConfig, TrunkConfig
        from transformers.models.esm.modeling_esmfold import EsmFoldingTrunk

        structure = StructureModuleConfig(
            sequence_dim=single, pairwise_dim=pair, ipa_dim=8, resnet_dim=single, num_heads_ipa=4, num_qk_points=2,
            num_v_points=2, num_blocks=2, num_transition_layers=1, num_resnet_blocks=1, num_angles=7, dropout_rate=0.0,
        )  # fmt: skip
        config = TrunkConfig(
            num_blocks=blocks, sequence_state_dim=single, pairwise_state_dim=pair, sequence_head_width=8,
            pairwise_head_width=8, position_bins=8, dropout=0.0, layer_drop=0.0, chunk_size=None,
            structure_module=cast(Any, structure),
        )  # fmt: skip
        self.embedding = nn.Embedding(RESIDUES, single)
        self.pair = pair
        self.trunk = cast(Any, EsmFoldingTrunk)(config)
        self.head = nn.Linear(pair, 1)

    def forward(self, residues: Tensor, recycles: int) -> Tensor:
        single = self.embedding(residues)
        batch, length = residues.shape
        pairs = single.new_zeros(batch, length, length, self.pair)
        places = torch.arange(length, device=residues.device).expand(batch, length)
        found = self.trunk(single, pairs, residues, places, torch.ones_like(residues), recycles)
        return cast(Tensor, self.head(found["s_z"]).squeeze(-1))


def batches(
    steps: int, *, seed: int, batch: int, shortest: int, longest: int, recycles: int
) -> Iterator[dict[str, Tensor]]:
    """`residues` and `words`, int64 [batch, length], which letters and of which word; `recycles`, int64 []."""
    order = random.Random(seed)
    texts = stdlib_trees.docstrings(seed=seed, shortest=2 * longest, longest=10_000)
    for _ in range(steps):
        length = order.randrange(shortest, longest + 1)
        rows = [next(texts)[:length] for _ in range(batch)]
        words = [[text[: place + 1].count(b" ") for place in range(length)] for text in rows]
        yield {
            "residues": torch.tensor([[letter % RESIDUES for letter in text] for text in rows]),
            "words": torch.tensor(words), "recycles": torch.tensor(order.randrange(recycles + 1)),
        }  # fmt: skip


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean binary cross entropy of whether two letters are of one word, in nats."""
    given = cast(dict[str, Tensor], batch)
    words = given["words"]
    same = (words.unsqueeze(1) == words.unsqueeze(2)).float()
    return F.binary_cross_entropy_with_logits(model(given["residues"], int(given["recycles"])), same)


def sizes(batch: Batch) -> tuple[float, ...]:
    """Letters of a sequence, and recycles."""
    given = cast(dict[str, Tensor], batch)
    return float(given["residues"].shape[1]), float(given["recycles"])


def build(
    seed: int = 0, *, single: int = 32, pair: int = 16, blocks: int = 2, batch: int = 1, shortest: int = 8,
    longest: int = 24, recycles: int = 2,
) -> Workload:  # fmt: skip
    """The folding trunk with AdamW.

    Args:
        single: Elements of a residue, a multiple of 8.
        pair: Elements of a pair of residues, a multiple of 8.
        batch: Sequences, all of one length, which is between `shortest` and `longest` letters.
        recycles: How often the trunk is run again at most.

    Raises WorkloadError where transformers is not installed.
    """
    seed_everything(seed)
    with transformers_needed(NAME):
        model = Evoformer(single=single, pair=pair, blocks=blocks)
    given = partial(batches, seed=seed, batch=batch, shortest=shortest, longest=longest, recycles=recycles)
    return Workload(
        name=NAME, model=model, optimizers=(torch.optim.AdamW(model.parameters(), lr=1e-3),), batches=given, loss=loss,
        dynamism=Dynamism(base=BaseType.TRANSFORMER, embedding="embedding", sizes=sizes),
    )  # fmt: skip
