"""A loop of Hugging Face Accelerate under a memory budget: a small GPT-2 learns the standard library's source text.

python examples/accelerate_loop.py --budget 96MiB

Without Spillway this is the same script less the import that is marked, with `accelerator.prepare(...)` for
`prepare(accelerator, ..., budget=...)`, and with the same losses.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from spillway.integrations.accelerate import prepare  # the first line
from spillway.workloads.stdlib_text import VOCABULARY, collated, samples


def model_of(layers: int = 4, width: int = 128) -> GPT2LMHeadModel:
    """A GPT-2 that reads bytes, with random weights."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=512, n_embd=width, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def main() -> None:
    """Train, and print a loss per update."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="96MiB")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--samples", type=int, default=160)
    chosen = parser.parse_args()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = model_of()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(samples(chosen.samples), batch_size=8, shuffle=True, collate_fn=collated)
    scheduler = LinearLR(optimizer, total_iters=10)
    model, optimizer, loader, scheduler = prepare(  # the second line
        accelerator, model, optimizer, loader, scheduler, budget=chosen.budget, method=chosen.method
    )
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            print(f"loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
