"""`spillway advise` measures: one tiny workload from end to end, and what cannot be measured."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import spillway
from spillway.advisor import measuring, real
from spillway.advisor.bench import AbstractBench, Trial
from spillway.advisor.campaign import Campaign
from spillway.advisor.real import RealBench
from spillway.advisor.ways import accumulated, way_of
from spillway.cli import advise as verb
from spillway.cli import main
from spillway.errors import SpillwayError, TrialError, WorkloadError
from spillway.methods import Action, Checkpoint
from spillway.workloads import get
from spillway.workloads.workload import moved

WORKLOAD = """
from dataclasses import replace
from functools import partial
import os, signal
import torch
from torch import nn
from spillway.workloads import Workload, seed_everything

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(x)))

def batches(steps, batch):
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield (torch.randn((batch, 16, 64), generator=random),)

def build(seed=0, *, batch=2, layers=3):
    seed_everything(seed)
    model = nn.Sequential(*(Block() for _ in range(layers)))
    return Workload(
        name="tiny", model=model, optimizers=(torch.optim.Adam(model.parameters()),),
        batches=partial(batches, batch=batch), loss=lambda model, batch: model(batch[0]).square().mean(),
    )

def without_batch(seed=0):
    return build(seed)

def dies(seed=0, *, batch=2):
    if batch == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    made = build(seed, batch=batch)
    return replace(made, batches={3: nothing_left, 5: partial(at_most, 5)}.get(batch, made.batches))

def nothing_left(steps):
    raise MemoryError

def picky(seed=0, *, batch=2):
    made = build(seed, batch=batch)
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.BatchNorm1d(8))
    model(torch.ones(2, 16, 64))
    optimizers = (torch.optim.SGD(model.parameters(), 0.1),)
    return replace(made, model=model, optimizers=optimizers, batches=partial(at_most, batch))

def at_most(batch, steps):
    if batch > 4:
        raise ValueError("no more than 4\\nsecond line")
    return batches(steps, batch)

def ignores(seed=0, *, batch=2):
    return build(seed, batch=3)

def from_two(seed=0, *, batch=2):
    if batch == 1:
        raise ValueError("one is not enough")
    return build(seed, batch=batch)
"""


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("advise") / "tiny.py"
    path.write_text(WORKLOAD)
    return str(path)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "spillway"


def measured(workload: str, method: str, size: int) -> Any:
    """In this process."""
    request = {
        "workload": f"{workload}:build",
        "options": {},
        "seed": 0,
        "steps": 1,
        "spill_directory": None,
        "device": None,
    }
    return measuring._measured(request, way_of(method), size)


def advise(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["advise", *map(str, arguments)])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.mark.long
def test_a_workload_is_measured_answered_remembered_and_written(
    workload: str, cached: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = [f"{workload}:build", "--methods", "checkpoint", "--memory", "30MB", "--batches", "16,32,48,999"]
    code, out, err = advise(capsys, *there, "--verify", "--json", "--write", tmp_path / "m.csv")
    assert code == 0
    found = json.loads(out)
    assert {row["method"] for row in found["rows"]} == {"plain", "checkpoint"}
    assert all(row["alpha"] > 0 and row["predicted_batch"] for row in found["rows"]), found["rows"]
    plain = next(row for row in found["rows"] if row["method"] == "plain")
    assert plain["alpha"] == pytest.approx(16 * (64 + 64 + 256 * 2) * 4 * 3, rel=0.25)
    assert {one["method"] for one in found["verified"]} >= {"plain"}
    for one in found["verified"]:
        # At ten times the largest batch that was measured.
        assert one["predicted_peak_bytes"] == pytest.approx(one["measured_peak_bytes"], rel=0.05), found["verified"]
    assert "plain was not measured at batch 999" not in out
    assert "plain at batch 16: " in err
    code, again, err = advise(capsys, "--from", tmp_path / "m.csv", "--memory", "30MB", "--json")
    assert code == 0
    read = {row["method"]: row["predicted_batch"] for row in json.loads(again)}
    assert read == {row["method"]: row["predicted_batch"] for row in found["rows"]}
    # What was measured is known: nothing is started.
    monkey = pytest.MonkeyPatch()
    monkey.setattr(RealBench, "_started", lambda self: pytest.fail("everything is known"))
    code, out, _ = advise(capsys, *there)
    monkey.undo()
    assert code == 0
    assert "on this CPU: " in out
    assert "plain was not measured at batch 999, which would not fit." in out


@pytest.mark.parametrize("method", ["plain", "checkpoint", "swap"])
def test_the_peak_is_the_one_that_a_session_measures_and_its_kinds_add_up(workload: str, method: str) -> None:
    trial = measured(workload, method, 7)
    made = get(f"{workload}:build", batch=7)
    first, second = made.batches(2)
    action = way_of(method).action
    if action is None:
        with spillway.manage(
            made.model, made.optimizers, budget=None, method="checkpoint", report=spillway.ReportOptions(timeline=True)
        ) as memory:
            for batch in (first, second):
                with memory.step(batch):
                    made.train_step(batch)
    else:
        decides = Checkpoint(action, waits=action is Action.OFFLOAD)
        with spillway.manage(
            made.model, made.optimizers, budget="100%", method=decides, report=spillway.ReportOptions(timeline=True)
        ) as memory:
            for batch in (first, second):
                with memory.step(batch):
                    made.train_step(batch)
    assert trial.peak == memory.history[-1].peak_bytes
    assert sum(trial.by_kind.values()) == trial.peak
    parameters = sum(one.numel() * 4 for one in made.model.parameters())
    assert trial.by_kind["parameters"] == parameters
    assert trial.by_kind["optimizer state"] == pytest.approx(2 * parameters, rel=0.01)
    assert trial.by_kind["input"] == 7 * 16 * 64 * 4
    assert trial.by_kind["gradients"] <= parameters
    assert trial.before_update <= trial.peak


def test_accumulating_sums_gradients_of_micro_batches_and_updates_once(workload: str) -> None:
    small, both = measured(workload, "plain", 7), measured(workload, accumulated(7), 14)
    gradients = small.by_kind["parameters"]
    more = both.peak - both.by_kind["input"] - (small.peak - small.by_kind["input"])
    assert 0 <= more <= gradients
    made = get(f"{workload}:build", batch=2)
    updates: list[int] = []
    made.optimizers[0].register_step_pre_hook(lambda *_: updates.append(1))
    steps = measuring._Steps(made, None, 2)
    micro = list(made.batches(3))
    steps.step(micro)
    whole = get(f"{workload}:build", batch=2)
    whole.train_step((torch.cat([one[0] for one in micro]),))
    assert updates == [1]
    for one, other in zip(made.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    with pytest.raises(WorkloadError, match="15 samples is no multiple of micro-batches of 7"):
        measured(workload, accumulated(7), 15)


def test_a_function_without_the_argument_is_told_so(workload: str) -> None:
    request = {"workload": f"{workload}:without_batch", "seed": 0, "options": {}, "device": None}
    with pytest.raises(WorkloadError, match=r"takes no batch=, and it is trained at several batch sizes: give"):
        measuring._built(request, 1)
    request = {"workload": f"{workload}:build", "seed": 0, "options": {"length": 3}, "device": None}
    with pytest.raises(WorkloadError, match="takes no length=, and --length was given"):
        measuring._built(request, 1)
    with pytest.raises(WorkloadError, match="There is no workload 'resnet51'"):
        measuring._built(request | {"workload": "resnet51"}, 1)


@pytest.mark.long
def test_a_trial_that_dies_or_finds_no_memory_takes_nobody_with_it(workload: str) -> None:
    with RealBench(f"{workload}:dies", options={}, seed=0, output=lambda line: None, steps=1) as dying:
        with pytest.raises(SpillwayError, match=r"measured plain at batch 2 ended: it was ended by SIGTERM"):
            dying.measure("plain", 2)
        assert dying.measure("plain", 3).ran_out
        with pytest.raises(TrialError, match=r"^A step of plain at batch 5 raised ValueError: no more than 4 \("):
            dying.measure("plain", 5)
        with pytest.raises(SpillwayError, match="9 samples is no multiple"):
            dying.measure(accumulated(4), 9)
        assert dying.measure("plain", 1).peak
        assert dying.hardware == "this CPU"


def test_what_a_step_raises_is_one_sentence(workload: str) -> None:
    def told(method: str, size: int) -> Any:
        request = {"workload": f"{workload}:picky", "options": {}, "seed": 0, "steps": 1, "spill_directory": None}
        return measuring._told("The step", lambda: measuring._measured(request, way_of(method), size))

    one, eight = told("plain", 1), told("plain", 8)
    assert isinstance(one, TrialError)
    assert str(one).startswith("The step raised ValueError: Expected more than 1 value per channel")
    assert told("plain", 2).peak
    assert isinstance(eight, TrialError)
    assert str(eight).startswith("The step raised ValueError: no more than 4")
    blockless = str(told("checkpoint", 2))
    assert blockless.startswith("No blocks were found in the workload's Sequential")
    assert "give the model layers that repeat" in blockless
    assert "blocks=" not in blockless


def test_a_workload_that_is_not_built_at_one_sample_is_looked_at_with_two(workload: str) -> None:
    request = {"workload": f"{workload}:from_two", "seed": 0, "options": {}}
    assert measuring._facts(request)["gradient_bytes"]


def test_batches_that_ignore_the_size_are_found_out(workload: str) -> None:
    class Here(AbstractBench):
        name, hardware = "ignores", "this CPU"

        def measure(self, method: str, size: int) -> Trial:
            request = {"workload": f"{workload}:ignores", "options": {}, "seed": 0, "steps": 1, "spill_directory": None}
            return measuring._measured(request, way_of(method), size)

    with pytest.raises(WorkloadError, match="does not follow it: its batches of 1 and of 2 samples"):
        list(Campaign(Here(), ["plain"], 10**9).run())


def test_a_process_that_is_gone_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(method="plain", size=1, peak=1, seconds=1.0)
    said = iter([[{}], [{}, trial]])
    count = 0

    def hearing(messages: list[object]) -> object:
        if not messages:
            raise EOFError
        return messages.pop(0)

    @contextmanager
    def talking(*arguments: object, **options: object) -> Iterator[SimpleNamespace]:
        nonlocal count
        hear = partial(hearing, next(said))
        yield SimpleNamespace(ask=lambda question: None, hear=hear, process=SimpleNamespace(wait=lambda: -15))
        count += 1

    monkeypatch.setattr(real, "talking", talking)
    with RealBench("resnet", options={}, seed=0, output=lambda line: None) as bench:
        with pytest.raises(SpillwayError, match="The process that measures resnet ended: it was ended by SIGTERM"):
            bench.measure("plain", 1)
        assert count == 1, "what is left of it is ended"
        assert bench.measure("plain", 1) == trial
    assert count == 2


def test_ctrl_c_answers_from_what_is_there(
    cached: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    count = 0

    def interrupted(self: RealBench, method: str, size: int) -> Trial:
        nonlocal count
        count += 1
        if count > last:
            signal.raise_signal(signal.SIGINT)
        return Trial(method=method, size=size, peak=(9 + size) * 10**6, seconds=size + 0.1)

    monkeypatch.setattr(RealBench, "measure", interrupted)
    monkeypatch.setattr(RealBench, "facts", {"hardware": "paper", "gradient_bytes": 1, "device_bytes": None})
    there = ["resnet", "--memory", "300MB", "--batches", "16,32,48"]
    last = 5
    code, out, err = advise(capsys, *there)
    assert code == 130
    assert "interrupted" in err
    assert "checkpoint" in out
    assert "swap" not in out
    assert len(list(cached.iterdir())) == 1
    last = count = 0
    code, _, err = advise(capsys, *there, "--fresh")
    assert (code, err.splitlines()[-1]) == (130, "spillway: interrupted before anything was measured.")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Name a workload to measure, or give measurements with --from"),
        (["resnet", "--from", "m.csv"], "WORKLOAD is for measuring, and --from looks at what was measured"),
        (["--from", "m.csv", "--verify"], "--verify is for measuring"),
        (["resnet", "--methods", "fast"], "There is no method 'fast' to compare; choose from plain, checkpoint"),
        (["resnet", "--methods", "compress", "--lossless"], "There is nothing to compare plain training with"),
        (["resnet", "--batches", "2,x"], "--batches takes whole numbers from 1 on with commas between them"),
        (["resnet", "--batches", "0"], "--batches takes whole numbers from 1 on"),
        (["resnet", "--memory", "0"], "0"),
        (["resnet", "--write", "/nowhere/m.csv"], "there is no directory /nowhere"),
    ],
)
def test_wrong_input_gets_one_sentence_before_anything_starts(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "find_out", lambda *_: pytest.fail("something was measured"))
    code, out, err = advise(capsys, *arguments)
    assert (code, out) == (1, "")
    assert says in err
    assert "Traceback" not in err


def test_a_method_that_wins_by_its_batch_is_held_against_accumulating_and_lossy_ones_are_named(
    cached: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    laws = {"plain": (90, 0.015), "checkpoint": (20, 0.02), "compress": (10, 0.019)}

    def by_law(self: RealBench, method: str, size: int) -> Trial:
        way = way_of(method)
        slope, gamma = laws[method.partition("-")[0]]
        micro = way.micro or size
        seconds = size * gamma + 0.6 * (size // micro) + 0.4
        return Trial(method=method, size=size, peak=(100 + slope * micro) * 10**6, seconds=seconds)

    monkeypatch.setattr(RealBench, "measure", by_law)
    monkeypatch.setattr(RealBench, "facts", {"hardware": "paper", "gradient_bytes": 10**7, "device_bytes": None})
    there = ["resnet", "--memory", "1GB", "--methods", "checkpoint,compress", "--seconds", "100", "--verify", "--json"]
    code, out, _ = advise(capsys, *there)
    found = json.loads(out)
    assert code == 0
    first, lossy, accumulating = found["answer"]
    assert "compress pays: " in first
    assert " samples/s at batch 90" in first
    assert lossy.startswith("compress is lossy: ")
    assert "the fastest that changes no bit is checkpoint, with" in lossy
    offered = found["accumulation"]
    assert (offered["micro_batch"], offered["micro_batches"]) == (9, 10)
    assert offered["measured_throughput"] == pytest.approx(90 / (90 * 0.015 + 0.6 * 10 + 0.4))
    assert offered["least_throughput"] < offered["measured_throughput"] < offered["most_throughput"]
    assert accumulating.endswith("accumulating gradients does not replace compress.")
    assert [one["method"] for one in found["verified"]] == ["compress", "plain"]
    for one in found["verified"]:
        assert one["predicted_throughput"] == pytest.approx(one["measured_throughput"])
    assert {row["method"]: row["lossy"] for row in found["rows"]} == {
        "plain": False, "checkpoint": False, "compress": True,
    }  # fmt: skip
    code, out, _ = advise(capsys, *there[:-1], "--lossless")
    assert code == 0
    assert "compress" not in out
    assert "checkpoint pays" in out


@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("mps", r"not on 'mps'"),
        ("cuda:99", r"There is no device 'cuda:99' here: torch sees \d"),
        ("gpu", r"no such name"),
    ],
)
def test_a_device_that_is_not_there_is_refused(device: str, sentence: str) -> None:
    with pytest.raises(WorkloadError, match=sentence):
        moved(get("bert-small", batch=1, layers=1), device)


def test_batches_go_where_the_model_goes() -> None:
    there = moved(get("resnet", batch=2), "cpu")
    pictures, _ = next(iter(there.batches(1)))
    assert isinstance(pictures, torch.Tensor)
    assert {pictures.device, next(there.model.parameters()).device} == {torch.device("cpu")}
    assert next(iter(get("bert-small", batch=2, layers=1).batches(1))).keys() >= {"input_ids"}
