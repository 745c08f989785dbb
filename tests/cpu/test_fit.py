"""`spillway fit`: scripts of others, as files, unchanged under a budget; and training that is found while it runs."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spillway
from spillway.cli import main
from spillway.errors import UsageError
from spillway.integrations.found_training import FoundTraining
from tests.shared import HANGS, without_page

LOOP = """
import importlib.util, os, sys
os.environ["OMP_NUM_THREADS"] = "1"
assert importlib.util.find_spec("torch") is not None  # as libraries ask before they import it
assert "torch" not in sys.modules  # so that this counts
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True) for _ in range(4)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def main():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(int(sys.argv[2])):
        x = torch.randn(8, 48 + 16 * (step % 3), 32)
        loss = (model(x) - x).square().mean()
        loss.backward()
        if step == 7:
            os.kill(os.getpid(), 2)
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item())
    print(sys.argv, os.path.basename(__file__), sys.path[0] == os.path.dirname(__file__))
    print(sum(one.double().sum().item() for one in model.state_dict().values()))
    if "--fail" in sys.argv:
        raise ValueError("mine")


if __name__ == "__main__":
    main()
    sys.exit(int(sys.argv[2]))
"""
TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
config = GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=128, n_positions=64)
model = GPT2LMHeadModel(config)
rows = [{"input_ids": (r := torch.randint(0, 128, (48,))), "labels": r} for _ in range(24)]
arguments = TrainingArguments(
    output_dir="out", max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[],
    save_strategy="no", disable_tqdm=True, use_cpu=True, logging_steps=1, seed=1,
)
trainer = Trainer(model=model, args=arguments, train_dataset=rows)
trainer.train()
print([row["loss"] for row in trainer.state.log_history if "loss" in row])
print(sum(one.double().sum().item() for one in model.state_dict().values()))
"""
ACCELERATE = """
import torch
from accelerate import Accelerator

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
for _ in range(8):
    x = torch.randn(256, 64)
    with accelerator.accumulate(model):
        loss = (model(x) - x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())
"""


LIGHTNING = """
import os
import lightning.pytorch as pl
import torch


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6))
        )
        self.told = []

    def training_step(self, batch, number):
        loss = (self.net(batch) - batch).square().mean()
        self.told.append(loss.item())
        return loss

    def validation_step(self, batch, number):
        self.net(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def batches(rank):
    return [*torch.randn(6, 1024, 64, generator=torch.Generator().manual_seed(rank))]


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank = int(os.environ.get("LOCAL_RANK", 0))  # as Lightning sets it
    trainer = pl.Trainer(
        strategy="ddp", devices=2, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )
    model = Model()
    trainer.fit(model, *(torch.utils.data.DataLoader(batches(one), batch_size=None) for one in (rank, 2)))
    everybody = [None, None]
    torch.distributed.all_gather_object(everybody, model.told)
    if rank == 0:
        print(everybody)
"""


def run(script: Path, *arguments: object, fit: tuple[str, ...] | None = None) -> subprocess.CompletedProcess[str]:
    before = [] if fit is None else ["-m", "spillway", "fit", *fit]
    command = [sys.executable, *before, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=script.parent, timeout=HANGS, check=False)


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripts") / "loop.py"
    path.write_text(LOOP)
    return path


@pytest.mark.long
def test_a_loop_prints_and_ends_as_it_does_plainly_and_keeps_the_budget(loop: Path) -> None:
    plain = run(loop, "--epochs", 6)
    fitted = run(loop, "--epochs", 6, fit=("--budget", "4MiB", "--json", "-o", str(loop.parent / "page.html")))
    assert (fitted.stdout, fitted.returncode) == (plain.stdout, 6)
    told = json.loads(fitted.stderr)
    assert told["steps"] == told["updates"] == 6
    assert 0 < told["peak_bytes"] <= told["budget_bytes"] == 4 << 20
    assert told["left_bytes"] > 0
    assert told["found"] == "a loop"
    assert told["lines"][0] == 'with spillway.manage(model, optimizer, budget="4MiB", method="auto") as memory:'
    assert "auto" in (loop.parent / "page.html").read_text()


@pytest.mark.long
def test_without_a_budget_the_peak_is_told_and_which_budgets_would_work(loop: Path) -> None:
    watched = run(loop, "--epochs", 6, fit=())
    assert watched.returncode == 6
    first, last, which = watched.stderr.splitlines()
    assert first.startswith("spillway: 5 steps of a loop took at most ")
    assert last.endswith("MiB, without a budget.")
    assert which.startswith("spillway: Budgets worth a try: ")
    assert " is refused. Run: spillway fit --budget " in which
    assert which.endswith(f"KiB {loop} --epochs 6")


@pytest.mark.long
def test_a_module_runs_as_python_runs_it(loop: Path, tmp_path: Path) -> None:
    package = tmp_path / "pack"
    (package / "age").mkdir(parents=True)
    (package / "age" / "__init__.py").write_text("import torch\n")
    (package / "age" / "loop.py").write_text(loop.read_text().replace('assert "torch" not in', '("torch") in'))
    source = "import sys\nfrom .loop import main\nmain()\nprint(__name__, __package__, __file__, __spec__.name)\n"
    (package / "age" / "__main__.py").write_text(source + "print(sys.argv)\nsys.exit(3)\n")
    told = []
    for before in ((), ("spillway", "fit", "--budget", "4MiB", "--json", "-m")):
        command = [sys.executable, "-m", *before, "age", "--epochs", "6"]
        told.append(subprocess.run(command, capture_output=True, text=True, cwd=package, timeout=HANGS, check=False))
    plain, fitted = told
    assert (fitted.stdout, fitted.returncode) == (plain.stdout, 3), fitted.stderr
    assert json.loads(fitted.stderr)["steps"] == 6


@pytest.mark.long
def test_exceptions_are_the_scripts_own(loop: Path) -> None:
    plain, fitted = run(loop, "--fail", 2), run(loop, "--fail", 2, fit=("--budget", "4MiB", "--method", "lru"))
    assert (fitted.stdout, fitted.returncode) == (plain.stdout, 1)
    assert fitted.stderr.startswith(plain.stderr), "the traceback, without a frame of Spillway's"
    assert "spillway: 2 steps of a loop took at most " in fitted.stderr
    assert fitted.stderr.endswith("        with memory.step(batch):\n")


@pytest.mark.long
def test_ctrl_c_within_a_step_is_the_scripts_own(loop: Path) -> None:
    fitted = run(loop, "--epochs", 12, fit=("--budget", "4MiB"))
    assert fitted.returncode == 130
    assert "KeyboardInterrupt\n" in fitted.stderr
    assert fitted.stdout.splitlines()[-1].startswith("6 ")
    assert "spillway: 7 steps of a loop took at most " in fitted.stderr


@pytest.mark.long
@pytest.mark.parametrize(("source", "found"), [(TRAINER, "transformers.Trainer"), (ACCELERATE, "Accelerate")])
def test_what_a_library_trains_is_found(source: str, found: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    plain = run(script)
    assert plain.returncode == 0, plain.stderr
    fitted = run(script, fit=("--budget", "3MiB", "--json"))
    assert fitted.stdout.splitlines()[-2:] == plain.stdout.splitlines()[-2:], "a trainer also prints how long it took"
    told = json.loads(fitted.stderr.splitlines()[-1])
    assert told["found"] == found
    assert told["steps"] == {"transformers.Trainer": 6, "Accelerate": 4}[found]
    assert told["peak_bytes"] <= 3 << 20
    assert told["lines"][0].startswith("from spillway.integrations.")


@pytest.mark.long
def test_processes_that_lightning_starts_are_under_the_budget_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LIGHTNING)
    fitted = run(script, fit=("--budget", "3400KiB", "--json"))
    assert fitted.returncode == 0, fitted.stderr
    told = [json.loads(line) for line in fitted.stderr.splitlines() if line.startswith("{")]
    assert [(one["found"], one["steps"], one["updates"]) for one in told] == [("lightning.Trainer", 6, 6)]
    assert told[0]["left_bytes"] > 0
    assert told[0]["peak_bytes"] <= 3400 << 10
    assert json.loads(fitted.stdout.splitlines()[-1]) == together_in_this_process()


def together_in_this_process() -> list[list[float]]:
    """The losses of the two ranks of LIGHTNING: each step takes the mean of their gradients."""
    made: dict[str, Any] = {"__name__": "made"}
    exec(LIGHTNING, made)
    model, threads = made["Model"](), torch.get_num_threads()
    torch.set_num_threads(1)
    optimizer, losses = model.configure_optimizers(), [[], []]
    for pair in zip(*map(made["batches"], range(2)), strict=True):
        for rank, batch in enumerate(pair):
            loss = model.training_step(batch, 0)
            losses[rank].append(loss.item())
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    return losses


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "sentence", "code"),
    [
        ("print(1)", "train.py ended, and nothing was trained under a budget: no optimizer has stepped in it.", 0),
        (
            "import torch\nparameter = torch.nn.Parameter(torch.ones(3))\noptimizer = torch.optim.SGD([parameter])\n"
            "parameter.sum().backward()\noptimizer.step()\n",
            "train.py ended, and nothing was trained under a budget: 1 updates of optimizers ran without a call of "
            "their module under gradients.",
            0,
        ),
        (
            "import torch, spillway\nspillway.manage(torch.nn.Linear(2, 2), budget='1GiB')",
            "This script opens a session of Spillway itself: run it with python, or take spillway out of it.",
            1,
        ),
        (
            "import torch\nmodel = torch.nn.Linear(999, 999)\noptimizer = torch.optim.SGD(model.parameters())\n"
            "model(torch.ones(9, 999)).sum().backward()\noptimizer.step()\n",
            "",
            1,
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_one_sentence(source: str, sentence: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    ended = run(script, fit=("--budget", "1MiB"))
    assert ended.returncode == code
    (last,) = without_page(ended.stderr)
    assert last.startswith("spillway: ")
    assert last.endswith(".")
    if sentence:
        assert last.endswith(sentence)
    else:
        assert "1.00 MiB are allowed: the smallest budget that should work is " in last


@pytest.mark.long
def test_a_refusal_is_in_the_json_and_has_a_page(tmp_path: Path) -> None:
    script, page = tmp_path / "train.py", tmp_path / "page.html"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(99, 99)\noptimizer = torch.optim.SGD(model.parameters())\n"
        "for size in (9, 9, 90000):\n    model(torch.ones(size, 99)).sum().backward()\n    optimizer.step()\n"
    )
    ended = run(script, fit=("--budget", "1MiB", "--json", "-o", str(page)))
    assert ended.returncode == 1
    told = json.loads(ended.stderr)
    assert told["steps"] == 2
    assert "1.00 MiB are allowed" in told["refused"]
    assert page.exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("nowhere.py",), "nowhere.py: No such file or directory."),
        (("-m", "nowhere.at.all"), "There is no module nowhere.at.all to run: -m takes what python -m takes, "),
        (("-m", ".nowhere"), "There is no module .nowhere to run: -m takes what python -m takes, "),
        (("--budget", "lots", "nowhere.py"), "'lots' is not a number of bytes"),
        (("--method", "best", "nowhere.py"), "There is no method 'best'; choose one of auto, "),
        (("-o", "no/page.html", "nowhere.py"), "no/page.html cannot be written: there is no directory no."),
    ],
)
def test_what_is_asked_wrongly_is_refused_before_the_script_begins(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main(["fit", *arguments])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(f"spillway: {sentence}")


# ---------------------------------------------------------------------- in this process


def found_training(**options: Any) -> FoundTraining:
    return FoundTraining(lambda _: None, **{"budget": "1GiB", "method": "auto"} | options)


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(64, 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_nothing_is_left_in_front_of_torch() -> None:
    before = nn.Module.__call__, torch.optim.Optimizer.__init__, spillway.Session.__init__
    with found_training():
        torch.optim.SGD(layers().parameters())
        assert nn.Module.__call__ is not before[0]
    assert (nn.Module.__call__, torch.optim.Optimizer.__init__, spillway.Session.__init__) == before


def test_calls_are_looked_at_until_something_that_trains_is_called_and_no_longer() -> None:
    call = nn.Module.__call__
    with found_training() as found:
        model = layers()
        optimizer = torch.optim.SGD(model.parameters())
        layers()(torch.ones(2, 32))
        with torch.no_grad():
            model(torch.ones(2, 32))
        assert found.session is None
        step(model, optimizer)
        assert nn.Module.__call__ is call
        assert [one.step for one in found.reports] == [0]


def test_what_the_optimizer_updates_besides_is_found_by_its_parameters() -> None:
    with found_training(method="lru") as found:
        encoder, decoder = layers(), layers()
        optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()])
        for _ in range(3):
            decoder(encoder(torch.ones(64, 32))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert found._models == [encoder, decoder]
        assert len(found.reports) == 3


def test_another_training_has_a_session_of_its_own() -> None:
    with found_training() as found:
        for _ in range(2):
            model = layers()
            optimizer = torch.optim.SGD(model.parameters())
            before = found.session
            for _ in range(3):
                step(model, optimizer)
            assert found.session is not before
        assert len(found.reports) == 6
        assert found.updates == 6


def test_sessions_of_others_are_refused_and_those_that_auto_opens_within_are_not() -> None:
    with found_training() as found:
        model = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 32))
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            step(model, optimizer)
        assert len(found.reports) == 3
        with pytest.raises(UsageError, match="opens a session of Spillway itself"):
            spillway.manage(layers(), budget=None)


def test_the_smallest_budget_is_told_by_what_the_model_needs_without_content() -> None:
    with found_training(budget=None, method="lru") as found:
        model = layers()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            step(model, optimizer)
        least = found.smallest_budget()
    assert least is not None
    assert 3 * 64 * 32 * 4 <= least < found.reports[-1].peak_bytes
    with spillway.manage(model, optimizer, budget=least) as memory, memory.step():
        step(model, optimizer)


def test_what_a_loop_has_in_its_hands_at_its_first_step_is_let_go_of_and_its_locals_stay_its_own() -> None:
    def train(*, asks: bool) -> bool:
        given = locals() if asks else {}
        model = layers()
        optimizer = torch.optim.SGD(model.parameters())
        batch = torch.randn(16, 32)
        first = weakref.ref(batch)
        model(batch).sum().backward()
        optimizer.step()
        del batch
        gc.collect()
        return given["asks"] if asks else first() is None

    for asks in (True, False):
        with found_training(method="lru"):
            assert train(asks=asks)
