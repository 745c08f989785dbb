"""Lightning's Trainer under a memory budget: a small GPT-2 learns the standard library's source text, byte by byte.

python examples/lightning_module.py --budget 96MiB

Without Spillway this is the same script less the two lines that are marked, with the same losses.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from spillway.integrations.lightning import SpillwayCallback  # the first line
from spillway.workloads.stdlib_text import VOCABULARY, collated, samples


class LanguageModel(pl.LightningModule):
    """A GPT-2 that reads bytes, with random weights. Losses of training and validation are kept in `losses`.

    Arguments:
        manual: Whether it steps its optimizer itself, every second batch.
    """

    def __init__(self, layers: int = 4, width: int = 128, *, manual: bool = False) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=512, n_embd=width, n_layer=layers, n_head=4, bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
        self.net = GPT2LMHeadModel(config)
        self.automatic_optimization = not manual
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(**batch).loss
        self.losses.append(loss.item())
        self.log("loss", loss)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            if batch_idx % 2:
                optimizer: Any = self.optimizers()
                self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.losses.append(self.net(**batch).loss.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train, and print the losses of all batches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="96MiB")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--samples", type=int, default=160)
    chosen = parser.parse_args()
    pl.seed_everything(0)
    module = LanguageModel()
    with tempfile.TemporaryDirectory() as directory:
        trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu", accumulate_grad_batches=2, gradient_clip_val=1.0, logger=False,
            default_root_dir=directory, enable_progress_bar=False,
            callbacks=[SpillwayCallback(chosen.budget, method=chosen.method)],  # the second line
        )  # fmt: skip
        loader = DataLoader(samples(chosen.samples), batch_size=8, shuffle=True, collate_fn=collated)
        trainer.fit(module, loader, DataLoader(samples(8), batch_size=8, collate_fn=collated))
    print(*(f"{loss:.4f}" for loss in module.losses))


if __name__ == "__main__":
    main()
