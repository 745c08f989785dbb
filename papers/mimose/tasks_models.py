"""The four tasks of Mimose's Table 1, from their configurations, to be recorded on fake tensors; nothing is downloaded.

What the paper does not tell is assumed here, after its software (PyTorch 1.11, transformers 4.18): fp32, attention with
its scores in memory, four answers to each question of SWAG, AdamW parameter by parameter, gradients that are set to
zero and stay. Dropout is CUDA's single op with a mask of a byte per number (`dropout_of_cuda`); on the CPU it is four.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from types import MappingProxyType
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    RobertaConfig,
    RobertaForMultipleChoice,
    XLNetConfig,
    XLNetForQuestionAnsweringSimple,
)

from papers.networks import words_of
from spillway.workloads import Batch, seed_everything

CHOICES: Final = 4
"""Answers to each question of SWAG."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A workload whose gradients stay between steps, as `zero_grad` left them before PyTorch 2.0."""

    name: str
    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    batches: Callable[[int], Iterator[Batch]]
    size: int | None

    def train_step(self, batch: Batch) -> Tensor:
        """Forward, backward, optimizer; the gradients are zeros afterwards."""
        loss: Tensor = cast(Any, self.model)(**cast(Mapping[str, Tensor], batch)).loss
        cast(Any, loss).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return loss.detach()


def multiple_choice(length: int, *, batch: int, layers: int = 12, width: int = 768) -> Task:
    """MC-Roberta: RoBERTa-base chooses one of four endings."""
    config = RobertaConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=width // 64, intermediate_size=4 * width,
        vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5,
        attn_implementation="eager",
    )  # fmt: skip
    inputs = words_of(batch, CHOICES, length) | {"labels": torch.zeros(batch).long()}
    return _task("MC-Roberta", RobertaForMultipleChoice(config), inputs, length)


def xlnet_answers(length: int, *, batch: int, layers: int = 12, width: int = 768) -> Task:
    """QA-XLNet: XLNet-base finds an answer in a text."""
    config = XLNetConfig(
        n_layer=layers, d_model=width, n_head=width // 64, d_inner=4 * width, vocab_size=32000, use_mems_train=False,
        use_mems_eval=False,
    )  # fmt: skip
    return _task("QA-XLNet", XLNetForQuestionAnsweringSimple(config), _question(batch, length), length)


def bert_answers(length: int, *, batch: int, layers: int = 12, width: int = 768) -> Task:
    """QA-Bert: BERT-base finds an answer in a text."""
    return _task("QA-Bert", BertForQuestionAnswering(_bert(layers, width)), _question(batch, length), length)


def classification(length: int, *, batch: int, layers: int = 12, width: int = 768) -> Task:
    """TC-Bert: BERT-base says whether two questions are the same."""
    words = words_of(batch, length)
    inputs = words | {"token_type_ids": torch.zeros_like(words["input_ids"]), "labels": torch.zeros(batch).long()}
    return _task("TC-Bert", BertForSequenceClassification(_bert(layers, width)), inputs, length)


BUILDS: Final[Mapping[str, Callable[..., Task]]] = MappingProxyType(
    {
        "MC-Roberta": multiple_choice,
        "QA-XLNet": xlnet_answers,
        "QA-Bert": bert_answers,
        "TC-Bert": classification,
    }
)
"""By the paper's names, in the order of its Table 1; called with the length and the batch size."""


def _bert(layers: int, width: int) -> BertConfig:
    return BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=width // 64, intermediate_size=4 * width,
        attn_implementation="eager",
    )  # fmt: skip


def _question(batch: int, length: int) -> dict[str, Tensor]:
    words, place = words_of(batch, length), torch.zeros(batch).long()
    types = {"token_type_ids": torch.zeros_like(words["input_ids"])}
    return words | types | {"start_positions": place, "end_positions": place + 1}


def _task(name: str, model: nn.Module, batch: Mapping[str, Tensor], length: int) -> Task:
    seed_everything(0)

    def batches(steps: int) -> Iterator[Batch]:
        return repeat(batch, steps)

    # Parameter by parameter, as transformers' own AdamW of that time.
    optimizer = AdamW(model.parameters(), lr=3e-5, foreach=False)
    return Task(name=name, model=model.train(), optimizers=(optimizer,), batches=batches, size=length)
