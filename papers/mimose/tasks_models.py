"""The four tasks of Mimose's Table 1, from their configurations, to be recorded on fake tensors; nothing is downloaded.

What the paper does not tell is assumed here, after its software (PyTorch 1.11, transformers 4.18): fp32, attention with
its scores in memory, four answers to each question of SWAG, AdamW parameter by parameter, gradients that are set to
zero and stay. Dropout is CUDA's single op with a mask of a byte per number (`dropout_of_cuda`); on the CPU it is four.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.optim import AdamW

from benchmarks.models import built, encoder, repeated
from papers.networks import sentences_of, words_of
from spillway.workloads import Workload

CHOICES: Final = 4
"""Answers to each question of SWAG."""

KINDS: Final = {
    "MC-Roberta": "RobertaForMultipleChoice", "QA-XLNet": "XLNetForQuestionAnsweringSimple",
    "QA-Bert": "BertForQuestionAnswering", "TC-Bert": "BertForSequenceClassification",
}  # fmt: skip
"""The classes of transformers by the paper's names, in the order of its Table 1."""

SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "MC-Roberta": {
        "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
    },
    "QA-XLNet": {"vocab_size": 32000, "use_mems_train": False, "use_mems_eval": False},
}  # fmt: skip
"""Of the published models, where they are not the configuration's defaults."""


def network(task: str, *, layers: int, width: int, **settings: Any) -> nn.Module:
    """The model of a task, so deep and so wide."""
    shape = encoder(layers, width)
    if task == "QA-XLNet":
        shape = {"n_layer": layers, "d_model": width, "n_head": width // 64, "d_inner": 4 * width}
    model: nn.Module = built(KINDS[task], **shape, **settings)
    return model


def build(task: str, length: int, *, batch: int, layers: int = 12, width: int = 768) -> Workload:
    """A task with one batch of that length over and over, whose gradients stay between steps as before PyTorch 2.0."""
    inputs = words_of(batch, CHOICES, length) if task == "MC-Roberta" else sentences_of(batch, length)
    place = torch.zeros(batch).long()
    told = {"start_positions": place, "end_positions": place + 1} if task.startswith("QA") else {"labels": place}
    model = network(task, layers=layers, width=width, **SETTINGS.get(task, {}))
    # Parameter by parameter, as transformers' own AdamW of that time.
    optimizer: Any = AdamW(model.parameters(), lr=3e-5, foreach=False)
    optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=False)
    return repeated(task, model, inputs | told, optimizer, size=length)
