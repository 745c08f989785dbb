"""What the row "Lightning, DDP x2" of `test_integrations_distributed.py` trains, in ranks of `integration_processes`:
its model and batches, by Lightning's Trainer, in the process group that is there."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterable
from typing import Any, Final

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from spillway.errors import SpillwayError
from spillway.integrations.lightning import SpillwayCallback
from tests.cpu.integration_processes import STEPS, Predictor, all_have_raised, batches, loss_of

SITUATIONS: Final[dict[str, dict[str, Any]]] = {
    "accumulation": {"accumulate_grad_batches": 3},
    "clipping": {"gradient_clip_val": 0.5},
    "evaluation": {"val_check_interval": 2},
    "bf16 autocast": {"precision": "bf16-mixed"},
}


class Trained(pl.LightningModule):
    """Tells losses of training and evaluation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Predictor()
        self.told: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = loss_of(self.net, batch, "")
        self.told.append(loss.detach())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.told.append(loss_of(self.net, batch, ""))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer_of(callbacks: list[Any], **options: Any) -> pl.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # there are processes already
    return pl.Trainer(
        callbacks=callbacks, default_root_dir=tempfile.gettempdir(), accelerator="cpu", strategy="ddp",
        devices=dist.get_world_size(), use_distributed_sampler=False, enable_progress_bar=False, logger=False,
        enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0, **{"max_epochs": 1} | options,
    )  # fmt: skip


def loader(given: Iterable[Tensor]) -> DataLoader[Tensor]:
    """Of batches that are made already."""
    made: Any = list(given)
    return DataLoader(made, batch_size=None)


def train(situation: str, method: str | None, budget: int | None) -> dict[str, Any]:
    """As `integration_processes.train`."""
    told: list[Tensor] = []
    peaks: list[int] = []
    saves, saved = situation == "save and resume", f"{tempfile.gettempdir()}/saved.ckpt"
    several = 3 if situation == "accumulation" else 1
    for part in range(1 + saves):
        callbacks = [] if method is None else [SpillwayCallback(budget, method=method)]
        module = Trained()
        torch.manual_seed(10 + dist.get_rank())
        trainer = trainer_of(callbacks, max_epochs=1 + part, **SITUATIONS.get(situation, {}))
        loads = loader(micro for number in range(STEPS // (1 + saves)) for micro in batches(number, several))
        evaluates = loader(batches(50, 1)) if situation == "evaluation" else None
        trainer.fit(module, loads, evaluates, ckpt_path=saved if part else None, weights_only=False)
        if saves:
            trainer.save_checkpoint(saved)
        told += module.told
        for callback in callbacks:
            assert callback.memory is not None
            peaks += [report.peak_bytes for report in callback.memory.history]
    return {"told": told, "state": {name: one.clone() for name, one in module.state_dict().items()}, "peaks": peaks}


def refused(method: str, budgets: list[int]) -> dict[str, Any]:
    """As `integration_processes.refused`."""
    torch.manual_seed(10 + dist.get_rank())
    callback = SpillwayCallback(budgets[dist.get_rank()], method=method)
    told, raised = [], []
    for _ in range(2):
        try:
            trainer_of([callback]).fit(Trained(), loader(one for number in range(STEPS) for one in batches(number, 1)))
        except SpillwayError as error:
            raised.append(time.monotonic())
            told.append((type(error).__name__, str(error), error.rank))
    all_have_raised()
    return {"told": told, "raised": raised}
