"""An optimizer that steps outside of the session's steps is noticed, and said once; what is allowed is not."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, optimizer
from torch.utils.data import TensorDataset
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

import spillway
from spillway.session import updates
from tests.cpu.interrupted import BATCH, Training

METHODS = ("lru", "checkpoint")
OUTSIDE = r"SGD.step\(\) ran outside of the session's steps, .*memory.begin\(batch\) and memory.end\(\) around both"


def forward_and_backward(training: Training) -> None:
    training.model(BATCH).square().mean().backward()


@pytest.mark.parametrize("method", METHODS)
def test_an_update_outside_is_said_once(method: str) -> None:
    training = Training()
    training.optimizer.step()  # before there are steps it belongs to none
    with training.manage(method) as memory:
        training.optimizer.step()
        with memory.step(BATCH):
            forward_and_backward(training)
        with pytest.warns(UserWarning, match=OUTSIDE) as said:
            training.optimizer.step()
        assert said[0].filename == __file__
        for _ in range(2):
            with memory.step(BATCH):
                forward_and_backward(training)
            training.optimizer.step()
    training.optimizer.step()
    assert not optimizer._global_optimizer_pre_hooks


def test_updates_inside_and_those_of_others_are_not_said() -> None:
    training, other = Training(), Training()
    with training.manage("lru") as memory, other.manage("lru") as another:
        for _ in range(2):
            with memory.step(BATCH):
                training.train()
                other.optimizer.step()
            with another.step(BATCH):
                other.train()
                training.optimizer.step()
            SGD([nn.Parameter(torch.ones(3))], lr=0.1).step()


def test_an_optimizer_that_the_session_was_not_given_is_heard_too() -> None:
    training = Training()
    with spillway.manage(training.model, budget="230 KiB") as memory:
        with memory.step(BATCH):
            forward_and_backward(training)
        with pytest.warns(UserWarning, match=OUTSIDE):
            training.optimizer.step()


class Managed(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.inner = Training().model
        self.post_init()

    def forward(self, x: Any, labels: Any = None) -> Any:
        return {"loss": (self.inner(x) - labels).square().mean()}


class Begins(TrainerCallback):
    """From the first micro-batch until the optimizer has stepped."""

    def __init__(self, memory: spillway.Session) -> None:
        self.memory = memory

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.memory.begin()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.memory.end()


class Wraps(Trainer):
    """The natural override, whose step ends before the optimizer steps."""

    memory: spillway.Session

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with self.memory.step(inputs):
            return super().training_step(model, inputs, *args, **kwargs)


def collated(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([x for x, _ in rows]), "labels": torch.stack([label for _, label in rows])}


def trainer(kind: type[Trainer], directory: Path) -> Trainer:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(directory), max_steps=3, per_device_train_batch_size=32, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, gradient_accumulation_steps=2, logging_strategy="no", optim="sgd",
    )  # fmt: skip
    rows = TensorDataset(torch.randn(256, 64), torch.randn(256, 64))
    return kind(model=Managed(PretrainedConfig()), args=arguments, train_dataset=rows, data_collator=collated)


def test_a_trainer_trains_by_callbacks_as_it_does_plainly(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = trainer(Trainer, tmp_path)
        plain.train()
        one = trainer(Trainer, tmp_path)
        with spillway.manage(one.model, budget="190 KiB") as memory:
            one.add_callback(Begins(memory))
            one.train()
    pairs = zip(plain.model.parameters(), one.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert len(memory.history) == 3
    assert memory.history[-1].moves + memory.history[-1].drops > 0


@pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")
def test_a_trainer_whose_step_leaves_the_optimizer_out_is_told(tmp_path: Path) -> None:
    one = trainer(Wraps, tmp_path)
    with spillway.manage(one.model, budget="240 KiB") as one.memory:
        with pytest.warns(UserWarning, match=OUTSIDE):
            one.train()
        assert len(one.memory.history) == 6


def test_garbage_with_a_session_may_be_collected_while_another_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Collects(weakref.WeakSet[Any]):
        """In which looking through it ends another session's hook, as a collection of garbage does."""

        def __iter__(self) -> Iterator[Any]:
            if not begun:
                begun.append(self)
                updates._forget()
            return super().__iter__()

    begun: list[Any] = []
    monkeypatch.setattr(updates, "_open", Collects())
    monkeypatch.setattr(updates, "_handles", [optimizer.register_optimizer_step_pre_hook(lambda *given: None)])
    updates._forget()
    assert begun
    assert not updates._handles
