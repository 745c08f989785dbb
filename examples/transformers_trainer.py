"""Hugging Face's Trainer under a memory budget: a small GPT-2 learns the standard library's source text, byte by byte.

python examples/transformers_trainer.py --budget 96MiB

Without Spillway this is the same script less the two lines that are marked, with the same losses.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from spillway.integrations.transformers import SpillwayCallback  # the first line
from spillway.workloads import stdlib_text


def model_of(layers: int = 4, width: int = 128) -> GPT2LMHeadModel:
    """A GPT-2 that reads bytes, with random weights."""
    set_seed(0)
    config = GPT2Config(
        vocab_size=stdlib_text.VOCABULARY,
        n_positions=512,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def samples(count: int, *, longest: int = 256) -> list[dict[str, list[int]]]:
    """So many functions of the standard library, each at its natural length."""
    return [{"input_ids": text.tolist()} for text in stdlib_text.samples(count, longest=longest)]


def collated(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """A batch is as long as the longest of its functions, so that sizes change from step to step."""
    return stdlib_text.collated([torch.tensor(row["input_ids"]) for row in rows])


def main() -> None:
    """Train, and print what every record of the trainer says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="96MiB")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--steps", type=int, default=20)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            model=model_of(),
            args=TrainingArguments(
                output_dir=directory, max_steps=chosen.steps, per_device_train_batch_size=8, logging_steps=5,
                gradient_accumulation_steps=2, report_to="none", disable_tqdm=True,
            ),
            train_dataset=samples(640),
            data_collator=collated,
            callbacks=[SpillwayCallback(chosen.budget, method=chosen.method)],  # the second line
        )  # fmt: skip
        trainer.train()


if __name__ == "__main__":
    main()
