"""Hugging Face's Trainer and TRL's SFTTrainer under a callback: as without it, within the budget, and nothing stays."""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.optim.optimizer import _global_optimizer_pre_hooks
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer
from trl.trainer import utils as trl_utils

import spillway
from examples import transformers_trainer, trl_sft
from spillway.errors import BudgetInfeasible, ModelError, SessionError, UsageError
from spillway.integrations.transformers import SpillwayCallback
from spillway.report.figures import scalars
from tests.cpu import wandb_stand_in
from tests.cpu.integration_matrix import Row, Trained, cells, check

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft asks for it
]

ROOT = Path(__file__).parents[2]
SITUATIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipping": {"max_grad_norm": 0.05},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "save and resume": {"save_strategy": "steps", "save_steps": 2},
    "bf16 autocast": {"bf16": True},
}
SMALL: dict[str, Any] = {
    "max_steps": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "logging_steps": 1,
    "max_grad_norm": 0.0, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True,
    "dataloader_pin_memory": False, "learning_rate": 1e-2,
}  # fmt: skip
OFF: dict[str, Any] = {"bf16": False, "activation_checkpointing": False}
"""What SFTConfig turns on by itself."""
IN_FRONT = {"log", "get_batch_samples", "training_step", "_evaluate", "_run_epoch", "_finalize_training"}
"""Methods of a trainer that something stands in front of while it trains."""
Made = Callable[[str, dict[str, Any], list[TrainerCallback]], Trainer]


@functools.cache
def bytewise() -> list[dict[str, list[int]]]:
    return transformers_trainer.samples(48, longest=64)


@functools.cache
def text() -> tuple[Dataset, Any]:
    corpus = [text for text in trl_sft.texts(160) if len(text) < 240][:48]
    return Dataset.from_dict({"text": corpus}), trl_sft.tokenizer_of(corpus)


def gpt2(directory: str, options: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
    rows = bytewise()
    return Trainer(
        model=transformers_trainer.model_of(3, 32),
        args=TrainingArguments(output_dir=directory, **SMALL | options),
        train_dataset=rows[:40], eval_dataset=rows[40:], data_collator=transformers_trainer.collated,
        callbacks=callbacks,
    )  # fmt: skip


def llama_with_lora(directory: str, options: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
    rows, tokenizer = text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", Path(directory))
        return SFTTrainer(
            model=trl_sft.model_of(tokenizer, 4, 32),
            args=SFTConfig(output_dir=directory, max_length=64, **OFF | SMALL | options),
            train_dataset=rows.select(range(40)), eval_dataset=rows.select(range(40, 48)),
            processing_class=tokenizer, peft_config=trl_sft.lora(), callbacks=callbacks,
        )  # fmt: skip


def trained(made: Made, situation: str, method: str | None, budget: int | None) -> Trained:
    told: list[Any] = []
    peaks: list[int] = []
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 512)  # 32,768 columns are more than this model has
        for resume in [None, f"{directory}/checkpoint-2"] if situation == "save and resume" else [None]:
            callback = SpillwayCallback(budget, method=method) if method is not None else None
            trainer = made(directory, SITUATIONS[situation], [callback] if callback is not None else [])
            trainer.train(resume_from_checkpoint=resume)
            told += records(trainer)
            peaks += [step.peak_bytes for step in callback.memory.history] if callback is not None else []
            state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return Trained(told, state, peaks)


def records(trainer: Trainer) -> list[dict[str, Any]]:
    """What a trainer has logged, but for times and for what Spillway adds."""
    passing = (
        "spillway_",
        "train_runtime",
        "train_samples",
        "train_steps",
        "eval_runtime",
        "eval_samples",
        "eval_steps",
    )
    return [
        {name: value for name, value in record.items() if not name.startswith(passing)}
        for record in trainer.state.log_history
    ]


MATRIX = {
    "`Trainer`": Row(functools.partial(trained, gpt2)),
    "`SFTTrainer` with LoRA": Row(functools.partial(trained, llama_with_lora), share=0.85),
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "situation"), cells(MATRIX))
def test_the_table_says_what_happens(name: str, situation: str) -> None:
    check(MATRIX, name, situation)


class Rich(TrainerCallback):
    """Runs a function at an event."""

    def __init__(self, event: str, function: Callable[..., Any]) -> None:
        setattr(self, event, function)


def plain_and_managed(
    tmp_path: Path,
    options: dict[str, Any],
    *,
    budget: str = "5MiB",
    method: str = "auto",
    made: Any = gpt2,
    **more: Any,
) -> SpillwayCallback:
    """Trained twice, to the same records and weights; what managed the second."""
    callback, found = SpillwayCallback(budget, method=method), []
    for callbacks in ([], [callback]):
        trainer = made(str(tmp_path), options, callbacks)
        trainer.train()
        found.append((records(trainer), trainer.model.state_dict()))
    (plainly, weights), (told, managed) = found
    assert told == plainly
    assert all(torch.equal(weights[name], managed[name]) for name in weights)
    assert callback.memory is not None
    assert callback.memory.history
    assert max(step.peak_bytes for step in callback.memory.history) <= callback.memory.allowed
    return callback


@pytest.mark.long(but=2)
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "rmsprop"])
def test_optimizers_of_the_trainer(tmp_path: Path, optim: str) -> None:
    plain_and_managed(tmp_path, {"optim": optim}, method="delta")


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing_factor": 0.1},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"dataloader_num_workers": 1},
        {"eval_on_start": True, "eval_strategy": "epoch", "num_train_epochs": 2, "max_steps": -1,
         "save_strategy": "epoch", "load_best_model_at_end": True, "per_device_train_batch_size": 10},
        {"gradient_accumulation_steps": 3, "num_train_epochs": 1, "max_steps": -1, "per_device_train_batch_size": 8},
        {"neftune_noise_alpha": 5.0},
    ],
    ids=["label smoothing", "a schedule", "workers", "epochs", "micro-batches left over", "noise"],
)  # fmt: skip
def test_arguments_of_the_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    plain_and_managed(tmp_path, options, budget="8MiB")


@pytest.mark.long
def test_a_step_is_known_by_all_its_micro_batches(tmp_path: Path) -> None:
    callback = plain_and_managed(tmp_path, {"gradient_accumulation_steps": 2}, method="mimose")
    assert callback.memory is not None
    steps = callback.memory.history
    assert len(steps) == 4
    assert [step.signature.count("[4, ") for step in steps] == [6] * 4
    assert all(step.blocks == 6 for step in steps)


def test_a_model_that_checkpoints_its_layers_trains_under_auto_and_is_refused_by_mimose(tmp_path: Path) -> None:
    plain_and_managed(tmp_path, {"activation_checkpointing": True}, budget="3MiB")
    trainer = gpt2(str(tmp_path), {"activation_checkpointing": True}, [SpillwayCallback("1GiB", method="mimose")])
    with pytest.raises(ModelError, match="by Trainer's own gradient_checkpointing=False"):
        trainer.train()


def test_generation_and_prediction_beside_training(tmp_path: Path) -> None:
    def made(directory: str, options: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
        def generates(args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            model.eval()
            asked = torch.tensor([[100, 101]])
            told = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=5, do_sample=True)
            state.log_history.append({"generated": told.tolist()})
            model.train()

        one = gpt2(directory, options, [*callbacks, Rich("on_step_end", generates), Rich("on_substep_end", generates)])
        one.evaluate()
        return one

    callback = plain_and_managed(tmp_path, {"gradient_accumulation_steps": 2}, made=made)
    trainer = gpt2(str(tmp_path), {}, [callback])
    trainer.train()
    predicted = trainer.predict(trainer.eval_dataset)
    assert predicted.metrics is not None
    assert "test_loss" in predicted.metrics
    assert len(callback.memory.history) == 4  # type: ignore[union-attr]


def test_several_trainings_of_one_trainer(tmp_path: Path) -> None:
    weights = []
    for callbacks in ([], [SpillwayCallback("5MiB")]):
        trainer = gpt2(str(tmp_path), {"max_steps": 2}, callbacks)
        for _ in range(3):
            trainer.train()
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert len(callbacks[0].memory.history) == 2


@pytest.mark.long(but=1)
@pytest.mark.parametrize("method", ["auto", "delta"])
@pytest.mark.parametrize(
    ("event", "error"),
    [
        ("compute_loss", KeyboardInterrupt),
        ("compute_loss", ZeroDivisionError),
        ("on_substep_end", ZeroDivisionError),
        ("on_optimizer_step", KeyboardInterrupt),
        ("on_evaluate", KeyboardInterrupt),
        ("on_epoch_end", ZeroDivisionError),
    ],
)
def test_what_is_raised_in_a_training_comes_out_unharmed_and_nothing_stays(
    tmp_path: Path, event: str, error: type[BaseException], method: str
) -> None:
    raised = error("mine")

    def fails(*args: Any, **kwargs: Any) -> None:
        if trainer.state.global_step >= 1:
            raise raised

    options = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    callback = SpillwayCallback("5MiB", method=method)
    trainer = gpt2(str(tmp_path), options, [Rich(event, fails), callback])
    if event == "compute_loss":
        inner = trainer.compute_loss
        trainer.compute_loss = lambda *args, **kwargs: (fails(), inner(*args, **kwargs))[1]
    with pytest.raises(error) as caught:
        trainer.train()
    assert caught.value is raised
    assert not getattr(raised, "__notes__", [])
    assert not IN_FRONT & set(vars(trainer))
    assert not any("forward" in vars(part) for part in trainer.model.modules())
    assert callback.memory is not None
    with pytest.raises(SessionError, match="closed"):
        callback.memory.begin()
    raised.__traceback__ = None
    trainer.remove_callback(Rich)
    vars(trainer).pop("compute_loss", None)
    assert trainer.train().metrics["spillway_peak_bytes"] <= 5 * 2**20


@pytest.mark.long
def test_a_step_that_does_not_fit_is_refused_with_a_budget_that_works(tmp_path: Path) -> None:
    for method in ("delta", "auto", "mimose"):
        with pytest.raises(BudgetInfeasible) as refusal:
            gpt2(str(tmp_path), {}, [SpillwayCallback(2**19, method=method)]).train()
        assert refusal.value.smallest_budget > 2**19
    plain_and_managed(tmp_path, {"max_steps": 1}, budget=str(refusal.value.smallest_budget), method="mimose")


@pytest.mark.long(but=2)
@pytest.mark.parametrize("event", ["on_substep_end", "on_step_end", "on_step_begin"])
def test_a_training_that_a_callback_stops(tmp_path: Path, event: str) -> None:
    def stops(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= 1

    def made(directory: str, options: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
        return gpt2(directory, options, [*callbacks, Rich(event, stops)])

    plain_and_managed(tmp_path, {"gradient_accumulation_steps": 2}, made=made)


class Streamed(torch.utils.data.IterableDataset[Any]):
    """Ends in the middle of a step."""

    def __iter__(self) -> Any:
        return iter(bytewise()[:10])


def test_data_that_ends_in_the_middle_of_a_step(tmp_path: Path) -> None:
    def made(directory: str, options: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
        trainer = gpt2(directory, options, callbacks)
        trainer.train_dataset = Streamed()
        return trainer

    plain_and_managed(tmp_path, {"gradient_accumulation_steps": 2}, made=made)


def test_figures_reach_tensorboard_and_every_other_callback_that_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    heard: list[dict[str, Any]] = []
    callback = SpillwayCallback("5MiB", method="delta")
    first = Rich("on_log", lambda *args, logs, **kwargs: heard.append(dict(logs)))
    options = {"report_to": "tensorboard", "logging_steps": 2, "eval_strategy": "epoch"}
    trainer = gpt2(str(tmp_path), options, [first, callback])
    with caplog.at_level(logging.INFO, "spillway"):
        metrics = trainer.train().metrics
    memory = callback.memory
    assert memory is not None
    peaks = [step.peak_bytes for step in memory.history]
    assert [one["spillway_peak_bytes"] for one in heard if "loss" in one] == [max(peaks[:2]), max(peaks[2:])]
    assert metrics["spillway_peak_bytes"] == max(peaks)
    assert metrics["spillway_budget_bytes"] == 5 * 2**20
    assert metrics["spillway_recompute_seconds"] == sum(step.recomputed_seconds for step in memory.history)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("spillway")]
    assert line.startswith("4 steps took at most ")
    assert " of 5.00 MiB; " in line
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    for name in ("peak_bytes", "budget_bytes", "stall_seconds", "recompute_seconds"):
        assert len(board.Scalars(f"train/spillway_{name}")) == 3
    assert board.Scalars("train/spillway_peak_bytes")[0].value == pytest.approx(max(peaks[:2]))


def test_figures_reach_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = wandb_stand_in.installed(monkeypatch)
    callback = SpillwayCallback("5MiB")
    gpt2(str(tmp_path), {"report_to": "wandb", "logging_steps": 2}, [callback]).train()
    assert callback.memory is not None
    steps = callback.memory.history
    *told, whole = wandb.run.logged
    for two, record in zip((steps[:2], steps[2:]), told, strict=True):
        assert {f"train/{name}": value for name, value in scalars(two).items()}.items() <= record.items()
    assert whole["train/spillway_peak_bytes"] == max(step.peak_bytes for step in steps)
    assert {"train/loss", "train/global_step"} <= told[0].keys()


def test_a_session_without_a_budget_keeps_account(tmp_path: Path) -> None:
    trainer = gpt2(str(tmp_path), {}, [SpillwayCallback(None)])
    metrics = trainer.train().metrics
    assert metrics["spillway_peak_bytes"] > 0
    assert "spillway_budget_bytes" not in metrics


@pytest.mark.long(but=2)
@pytest.mark.parametrize(
    ("event", "opened"), [("on_train_begin", False), ("on_evaluate", False), ("on_epoch_begin", True)]
)
def test_what_another_callback_raises_before_the_first_step_leaves_no_session_open(
    tmp_path: Path, event: str, opened: bool
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError

    callback = SpillwayCallback("5MiB")
    options = {"eval_strategy": "steps", "eval_on_start": True}
    trainer = gpt2(str(tmp_path), options, [callback, Rich(event, fails)])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not any("forward" in vars(part) for part in trainer.model.modules())
    assert not _global_optimizer_pre_hooks
    assert not IN_FRONT & set(vars(trainer))
    assert (callback.memory is not None) == opened
    trainer.remove_callback(Rich)
    trainer.train()
    assert "on_epoch_begin" not in vars(trainer.callback_handler)
    assert len(callback.memory.history) == 4  # type: ignore[union-attr]


def test_what_makes_no_sense_is_refused_when_the_callback_is_made() -> None:
    with pytest.raises(TypeError, match="metod"):
        SpillwayCallback("5MiB", metod="lru")  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="There is no method 'best'"):
        SpillwayCallback("5MiB", method="best")
    with pytest.raises(UsageError, match=r"'0\.5' is a share of the plain peak"):
        SpillwayCallback("0.5")


def test_what_somebody_else_has_put_on_the_trainer_is_there_afterwards(tmp_path: Path) -> None:
    trainer = gpt2(str(tmp_path), {}, [SpillwayCallback("5MiB")])
    steps, inner = [], trainer.training_step
    trainer.training_step = mine = lambda *args, **kwargs: (steps.append(1), inner(*args, **kwargs))[1]
    trainer.train()
    assert steps
    assert vars(trainer)["training_step"] is mine


def test_a_callback_that_comes_later_and_its_page(tmp_path: Path) -> None:
    trainer = gpt2(str(tmp_path), {}, [])
    trainer.add_callback(SpillwayCallback("5MiB", report=spillway.ReportOptions(run_file=tmp_path / "run.jsonl")))
    trainer.train()
    callback = trainer.pop_callback(SpillwayCallback)
    callback.memory.report(tmp_path / "run.html")
    assert "5.00 MiB" in (tmp_path / "run.html").read_text()
    assert (tmp_path / "run.jsonl").is_file()


def test_what_is_no_trainer_of_this_callback_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"is for a Trainer, in its callbacks"):
        SpillwayCallback("5MiB").on_train_begin(*[None] * 3)  # type: ignore[arg-type]
    monkeypatch.delattr(Trainer, "_finalize_training")
    with pytest.raises(UsageError, match="_finalize_training this version does not have: upgrade transformers"):
        gpt2(str(tmp_path), {}, [SpillwayCallback("5MiB")]).train()
