"""Lightning's Trainer under a callback: as without it, within the budget, and nothing stays."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples import lightning_module
from spillway.errors import BudgetInfeasible, UsageError
from spillway.integrations.lightning import SpillwayCallback
from spillway.report.figures import scalars
from tests.cpu import wandb_stand_in
from tests.cpu.integration_matrix import Row, Trained, cells, check

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.rank_zero.LightningDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]

SITUATIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 3},
    "clipping": {"gradient_clip_val": 0.05},
    "evaluation": {"val_check_interval": 2},
    "save and resume": {},
    "bf16 autocast": {"precision": "bf16-mixed"},
}


@functools.cache
def texts() -> list[Tensor]:
    return lightning_module.samples(24, longest=64)


def trainer_of(directory: str | Path, callbacks: list[Any], **options: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    given = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0} | options
    return pl.Trainer(callbacks=callbacks, default_root_dir=directory, **quiet, **given)


def trained(manual: bool, situation: str, method: str | None, budget: int | None) -> Trained:
    told: list[Any] = []
    peaks: list[int] = []
    options = {} if manual and situation in ("accumulation", "clipping") else SITUATIONS[situation]
    saves = situation == "save and resume"
    with tempfile.TemporaryDirectory() as directory:
        for part in range(1 + saves):
            callbacks = [SpillwayCallback(budget, method=method)] if method is not None else []
            torch.manual_seed(0)
            module = lightning_module.LanguageModel(3, 32, manual=manual)
            load = functools.partial(DataLoader, batch_size=4, collate_fn=lightning_module.collated)
            validates = [load(texts()[:8])] if situation == "evaluation" else []
            trainer = trainer_of(directory, callbacks, max_epochs=1 + part, **options)
            path = f"{directory}/saved.ckpt" if part else None
            trainer.fit(module, load(texts(), shuffle=True), *validates, ckpt_path=path, weights_only=False)
            if saves:
                trainer.save_checkpoint(f"{directory}/saved.ckpt")
            told += module.losses
            peaks += [step.peak_bytes for one in callbacks for step in one.memory.history]  # type: ignore[union-attr]
    return Trained(told, {name: value.clone() for name, value in module.state_dict().items()}, peaks)


MATRIX = {
    "Lightning": Row(functools.partial(trained, False)),
    "Lightning, manual optimization": Row(functools.partial(trained, True)),
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "situation"), cells(MATRIX))
def test_the_table_says_what_happens(name: str, situation: str) -> None:
    check(MATRIX, name, situation)


class Parts(pl.LightningModule):
    """Its `training_step` calls what `calls` names: itself, or its parts one by one."""

    def __init__(self, calls: str = "parts", *, fails_at: int = -1, functional: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        self.head = nn.Linear(32, 1)
        self.calls, self.fails_at, self.functional = calls, fails_at, functional
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.functional:
            loss = nn.functional.linear(batch, self.head.weight).square().mean()
        else:
            loss = (self(batch) if self.calls == "self" else self.head(self.body(batch))).square().mean()
        self.losses.append(loss.item())
        if batch_idx == self.fails_at:
            raise ZeroDivisionError
        return loss

    test_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Wide(pl.LightningModule):
    """Its optimizer updates all parameters at once, and its parameters are most of what it takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(12)))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.body(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), foreach=True)


def rows(count: int = 3) -> DataLoader[Any]:
    return DataLoader(torch.randn(512 * count, 32, generator=torch.Generator().manual_seed(0)), batch_size=512)  # type: ignore[arg-type]


@pytest.mark.long
def test_the_update_of_the_first_batch_comes_in_parts_too(tmp_path: Path) -> None:
    """Its session opens within the optimizer's closure."""
    data = DataLoader(torch.randn(12, 128, generator=torch.Generator().manual_seed(0)), batch_size=4)  # type: ignore[arg-type]
    plain, free, tight = (Wide() for _ in range(3))
    trainer_of(tmp_path, []).fit(plain, data)
    callback = SpillwayCallback("1GiB", method="checkpoint")
    trainer_of(tmp_path, [callback]).fit(free, data)
    budget = max(report.peak_bytes for report in callback.memory.history) - 8 * 4 * 128 * 128  # type: ignore[union-attr]
    callback = SpillwayCallback(budget, method="checkpoint")
    trainer_of(tmp_path, [callback]).fit(tight, data)
    assert plain.losses == free.losses == tight.losses
    assert max(report.peak_bytes for report in callback.memory.history) <= budget  # type: ignore[union-attr]


@pytest.mark.long(but=2)
@pytest.mark.parametrize(
    ("calls", "method"), [("self", "mimose"), ("self", "auto"), ("parts", "auto"), ("parts", "delta")]
)
def test_whatever_training_step_calls_is_managed(tmp_path: Path, calls: str, method: str) -> None:
    plain, managed = Parts(calls), Parts(calls)
    trainer_of(tmp_path, []).fit(plain, rows())
    callback = SpillwayCallback("2MiB", method=method)
    trainer_of(tmp_path, [callback]).fit(managed, rows())
    assert plain.losses == managed.losses
    assert all(map(torch.equal, plain.parameters(), managed.parameters()))
    assert callback.memory is not None
    assert len(callback.memory.history) == 3
    assert max(one.peak_bytes for one in callback.memory.history) <= 2 << 20
    assert sum(one.moves + one.drops for one in callback.memory.history) > 0
    assert not any("forward" in vars(one) for one in managed.modules())


def test_a_method_that_needs_blocks_says_what_to_call(tmp_path: Path) -> None:
    module = Parts("parts")
    with pytest.raises(UsageError, match=r"the training_step of Parts calls Sequential first"):
        trainer_of(tmp_path, [SpillwayCallback("3MiB", method="mimose")]).fit(module, rows())
    assert not any("forward" in vars(one) for one in module.modules())


def test_a_first_batch_that_calls_no_module_is_said(tmp_path: Path) -> None:
    callback = SpillwayCallback("3MiB")
    with pytest.warns(UserWarning, match="training_step has called no module"):
        trainer_of(tmp_path, [callback]).fit(Parts(functional=True), rows())
    assert callback.memory is not None
    assert len(callback.memory.history) == 2


@pytest.mark.parametrize("method", ["delta", "auto"])
def test_what_a_fit_raises_closes_the_session_and_the_next_fit_trains(tmp_path: Path, method: str) -> None:
    callback, plain = SpillwayCallback("2MiB", method=method), Parts("self")
    module = Parts("self", fails_at=1)
    trainer = trainer_of(tmp_path, [callback])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, rows())
    assert callback.memory is not None
    assert len(callback.memory.history) == 1
    module = Parts("self")
    trainer_of(tmp_path, [callback]).fit(module, rows())
    trainer_of(tmp_path, []).fit(plain, rows())
    assert all(map(torch.equal, plain.parameters(), module.parameters()))
    assert len(callback.memory.history) == 3
    trainer_of(tmp_path, [callback]).test(module, rows(1), verbose=False)
    assert len(callback.memory.history) == 3


def test_a_refusal_names_a_budget_that_works(tmp_path: Path) -> None:
    with pytest.raises(BudgetInfeasible) as refusal:
        trainer_of(tmp_path, [SpillwayCallback("300KiB", method="delta")]).fit(Parts("self"), rows())
    assert refusal.value.exact
    callback = SpillwayCallback(refusal.value.smallest_budget, method="delta")
    trainer_of(tmp_path, [callback]).fit(Parts("self"), rows())


def test_figures_of_every_step_are_logged(tmp_path: Path) -> None:
    callback = SpillwayCallback("3MiB", method="delta")
    logger = TensorBoardLogger(tmp_path, version=0)
    trainer_of(tmp_path, [callback], logger=logger, log_every_n_steps=1).fit(Parts("self"), rows())
    found = EventAccumulator(logger.log_dir)
    found.Reload()
    assert callback.memory is not None
    told = [event.value for event in found.Scalars("spillway_peak_bytes")]
    assert told == [one.peak_bytes for one in callback.memory.history]
    assert {event.value for event in found.Scalars("spillway_budget_bytes")} == {3 << 20}
    assert {"spillway_stall_seconds", "spillway_recompute_seconds"} <= set(found.Tags()["scalars"])


def test_figures_reach_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = wandb_stand_in.installed(monkeypatch)
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", True)
    callback = SpillwayCallback("3MiB")
    trainer = trainer_of(tmp_path, [callback], logger=WandbLogger(save_dir=tmp_path), log_every_n_steps=1)
    trainer.fit(Parts("self"), rows())
    assert callback.memory is not None
    told = [record for record in wandb.run.logged if "spillway_peak_bytes" in record]
    assert len(told) == len(callback.memory.history)
    for step, record in zip(callback.memory.history, told, strict=True):
        assert {name: pytest.approx(value) for name, value in scalars([step]).items()}.items() <= record.items()


def test_without_a_budget_none_is_logged(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, [SpillwayCallback(None, method="delta")])
    trainer.fit(Parts("self"), rows())
    assert trainer.logged_metrics["spillway_peak_bytes"] > 0
    assert "spillway_budget_bytes" not in trainer.logged_metrics
