"""Figures reach Weights & Biases itself, offline, and are read back from the file that it writes."""

from __future__ import annotations

import contextlib
import json
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import WandbLogger

import spillway
from spillway.integrations import lightning, transformers
from spillway.integrations.automatic_steps import AutomaticSteps
from spillway.report.figures import scalars
from tests.cpu.test_integrations_accelerate import accelerator_of, batches, prepared, small, step
from tests.cpu.test_integrations_lightning import Parts, rows, trainer_of
from tests.cpu.test_integrations_lightning import pytestmark as lightnings
from tests.cpu.test_integrations_transformers import gpt2

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    wandb: Any = pytest.importorskip("wandb", reason="wandb is not installed: it is no part of what the tests need")

pytestmark = [*lightnings, pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:wandb")]
BLOCK, HEAD = 32 << 10, 7
"""Bytes: records stand in blocks of this many, each part of one behind a checksum, its size and its kind."""


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR", "ARTIFACT_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    wandb.teardown()


def logged(folder: Path) -> list[dict[str, Any]]:
    """What the one run has logged, in order."""
    from wandb.proto import wandb_internal_pb2

    wandb.finish()
    wandb.teardown()  # only then all of it is written
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    told = []
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = ((item.key or item.nested_key[0], json.loads(item.value_json)) for item in record.history.item)
            told.append(dict(items))
    return told


def _records(written: bytes) -> Iterator[bytes]:
    at, parts = HEAD, b""
    while at + HEAD <= len(written):
        if BLOCK - at % BLOCK < HEAD:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", written, at)
        parts += written[at + HEAD : at + HEAD + size]
        at += HEAD + size
        if kind in (1, 4):  # whole, or a last part
            yield parts
            parts = b""


def has(record: dict[str, Any], figures: dict[str, float], prefix: str = "") -> bool:
    return {f"{prefix}{name}": value for name, value in figures.items()}.items() <= record.items()


def test_of_transformers_trainer(tmp_path: Path) -> None:
    callback = transformers.SpillwayCallback("5MiB")
    gpt2(str(tmp_path), {"report_to": "wandb", "logging_steps": 2}, [callback]).train()
    assert callback.memory is not None
    steps = callback.memory.history
    first, second, whole = logged(tmp_path)
    assert has(first, scalars(steps[:2]), "train/")
    assert has(second, scalars(steps[2:]), "train/")
    assert {"train/loss", "train/global_step"} <= first.keys()
    assert whole["train/spillway_peak_bytes"] == max(step.peak_bytes for step in steps)


def test_of_lightnings_trainer(tmp_path: Path) -> None:
    callback = lightning.SpillwayCallback("3MiB", method="delta")
    trainer = trainer_of(tmp_path, [callback], logger=WandbLogger(save_dir=tmp_path), log_every_n_steps=1)
    trainer.fit(Parts("self"), rows())
    assert callback.memory is not None
    told = [record for record in logged(tmp_path) if "spillway_peak_bytes" in record]
    assert len(told) == len(callback.memory.history)
    for report, record in zip(callback.memory.history, told, strict=True):
        rounded = {name: float(torch.tensor(value)) for name, value in scalars([report]).items()}
        assert has(record, rounded)


def test_of_accelerate(tmp_path: Path) -> None:
    accelerator = accelerator_of(log_with="wandb")
    accelerator.init_trackers("budgets", init_kwargs={"wandb": {"dir": str(tmp_path)}})
    model, optimizer = prepared(accelerator, "lru", "1MiB", *small())
    for batch in batches(3):
        step(model, optimizer, batch)
        accelerator.log(accelerator.spillway.session.scalars())
    history = accelerator.spillway.session.history
    accelerator.end_training()
    assert all(has(record, scalars([one])) for record, one in zip(logged(tmp_path), history, strict=True))


@pytest.mark.parametrize(("method", "budget"), [("delta", "150KiB"), ("auto", "260KiB"), ("mimose", "320KiB")])
def test_a_model_that_wandb_watches_is_managed(method: str, budget: str) -> None:
    """Its hooks lead to the run, and from there to objects that answer for any attribute."""
    weights = []
    for watched in (False, True):
        model, optimizer = small()
        with contextlib.ExitStack() as stack:
            if watched:
                wandb.init(project="budgets").watch(model, log="all", log_freq=1)
                steps = stack.enter_context(AutomaticSteps(model, optimizer, budget=budget, method=method))
            for batch in batches(4):
                step(model, optimizer, batch)
        weights.append(list(model.parameters()))
    assert all(map(torch.equal, *weights))
    history = steps.session.history
    assert all(one.peak_bytes <= one.allowed for one in history)
    assert sum(one.moves + one.drops + one.recomputed_blocks for one in history) > 0
    assert all(one.blocks for one in history) == (method != "delta")


def test_of_a_loop_by_hand(tmp_path: Path) -> None:
    model, optimizer = small()
    wandb.init(project="budgets")
    with spillway.manage(model, optimizer, budget="1MiB", method="lru") as memory:
        for number, batch in enumerate(batches(3)):
            with memory.step(batch):
                step(model, optimizer, batch)
                memory.log(loss=number / 2)
            wandb.log(memory.scalars())
    told = logged(tmp_path)
    assert [record["loss"] for record in told] == [0.0, 0.5, 1.0]
    assert all(has(record, scalars([one])) for record, one in zip(told, memory.history, strict=True))
