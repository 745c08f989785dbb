"""Every kind of page that Spillway writes, written by what writes it for users."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway.cli import main
from spillway.ir import StepReport
from spillway.report.html import render
from spillway.report.live import LiveView
from spillway.workloads import Workload, seed_everything

STEPS = 400
MiB = 1 << 20


class Reader(nn.Module):
    """Small, and with enough layers for a picture."""

    def __init__(self, *, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(nn.functional.gelu(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.wide = nn.Linear(64, 256)
        self.narrow = nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


def train(page: Path, method: str, budget: str, lengths: tuple[int, ...]) -> StepReport:
    """Some steps of a small model in a session, and the session's report."""
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters())
    report = spillway.ReportOptions(timeline=True)
    with spillway.manage(model, optimizer, budget=budget, method=method, report=report) as memory:
        for length in lengths:
            batch = torch.randn(16, length, 64)
            with memory.step(batch):
                loss = (model(batch) - batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                memory.log(loss=loss)
        memory.report(page)
        return memory.history[-1]


def tensor_engine(folder: Path) -> None:
    """A run of the tensor engine, with a timeline."""
    train(folder / "run.html", "lru", "24MiB", (64,) * 6)


def block_engine(folder: Path) -> None:
    """A run of the block engine, at several input sizes."""
    train(folder / "blocks.html", "mimose", "32MiB", (16, 32, 48, 64, 24, 56, 40, 64, 32, 48))


def long_run(folder: Path) -> None:
    """Hundreds of steps of several shapes; a loss that is none, signatures that are long, a name that is longer."""
    step = train(folder / "one.html", "lru", "24MiB", (64, 64))
    steps = [
        dataclasses.replace(
            step, step=number, signature=", ".join(f"input_{i}: float32[{number % 3}, {i}]" for i in range(9)),
            peak_bytes=int((20 + 3 * math.sin(number / 20)) * MiB), seconds=0.05 + 0.001 * (number % 7),
            logged={"loss": math.nan if number == 50 else math.exp(-number / 100), "a_rather_long_name" * 3: number},
        )
        for number in range(STEPS + 50)
    ]  # fmt: skip
    header = {
        "budget_bytes": 24 * MiB, "method": "lru", "workload": "a/very/long/name/" * 6, "plain_peak_bytes": 30 * MiB,
        "start_rss_bytes": step.peak_rss_bytes - 26 * MiB,
    }  # fmt: skip
    (folder / "long.html").write_text(render(header, steps, []), "utf-8")


def empty_run(folder: Path) -> None:
    """A run that ended before its first step did."""
    (folder / "empty.html").write_text(render({"workload": "nothing", "budget_bytes": None}, [], []), "utf-8")


def foreseen(folder: Path) -> None:
    """What a referee of pilots tells."""
    told = {
        "winner": "nearest", "on_demand_seconds": 0.5, "known_seconds": 0.1, "mispredictions": 2, "stall_seconds": 0.2,
        "misprediction_seconds": 0.01, "last": [{"step": 3, "pilot": "nearest", "decisions": 2, "seconds": 0.001}],
        "standings": [{"pilot": "nearest", "hit_rate": 0.9, "spared_seconds": 0.3, "acted": 4}],
    }  # fmt: skip
    step = train(folder / "one.html", "lru", "24MiB", (64, 64))
    (folder / "foreseen.html").write_text(render({"budget_bytes": 24 * MiB}, [step], [], told), "utf-8")


def in_a_notebook(folder: Path) -> None:
    """What a notebook shows while a model trains, on paper as a notebook's."""
    step = train(folder / "one.html", "lru", "24MiB", (64, 64))
    steps = [
        dataclasses.replace(step, step=number, dropped_bytes=number * MiB, logged={"loss": 1 / (number + 1)})
        for number in range(30)
    ]
    dark = "@media (prefers-color-scheme: dark) { body { background: #111111; color: #dddddd; } }"
    page = f"<!DOCTYPE html><meta charset='utf-8'><style>{dark}</style><body>{LiveView(steps)._repr_html_()}</body>"
    (folder / "live.html").write_text(page, "utf-8")


def reader(seed: int) -> Workload:
    """The same model as a workload."""
    seed_everything(seed)
    model = Reader()
    return Workload(
        name="reader", model=model, optimizers=(torch.optim.AdamW(model.parameters()),),
        batches=lambda steps: ((torch.ones(16, 64, 64),) for _ in range(steps)),
        loss=lambda model, batch: (model(batch[0]) - batch[0]).square().mean(),
    )  # fmt: skip


def simulated(folder: Path) -> None:
    """A step on a device that is not here, from `spillway record`, `spillway simulate` and `spillway report`."""
    step, run = folder / "step.jsonl", folder / "simulated.jsonl"
    command("record", f"{__file__}:reader", "--fake", "-o", step)
    command("simulate", step, "--budget", "0.6x", "--method", "window", "--device", "v100-nvlink", "-o", run)
    command("report", run)


def compared(folder: Path) -> None:
    """Methods side by side, from `spillway compare`."""
    methods = ("--budgets", "0.4x,0.6x,0.8x", "--methods", "lru,dtr,swap", "--no-bounds", "--processes", "1")
    command("compare", folder / "step.jsonl", *methods, "-o", folder / "compared.html")


def advised(folder: Path) -> None:
    """What `spillway advise` answers, of measurements on a device and on a simulated one."""
    for hardware, name in (("a card", "advised"), ('"a100, simulated"', "advised-simulated")):
        lines = ["hardware,network,algorithm,batch_size,batch_time_s,peak_mb"]
        lines += [
            f"{hardware},net,{method},{size},{0.2 + gamma * size},{1000 + alpha * size}"
            for method, alpha, gamma in (("exact", 200, 0.010), ("ckpt", 40, 0.013), ("swap", 30, 0.050))
            for size in (2, 4, 8, 16)
        ]  # fmt: skip
        (folder / f"{name}.csv").write_text("\n".join(lines), "utf-8")
        devices = ("--devices", "1,2,4", "--gradients", "1GB", "--link", "2GB/s")
        command("advise", "--from", folder / f"{name}.csv", "--memory", "8GB", *devices, "-o", folder / f"{name}.html")


def command(*words: object) -> None:
    """One verb, in this process."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == 0


WRITERS: tuple[Callable[[Path], None], ...] = (
    tensor_engine, block_engine, long_run, empty_run, foreseen, in_a_notebook, simulated, compared, advised,
)  # fmt: skip
PAGES = (
    "run", "blocks", "long", "empty", "foreseen", "live", "simulated", "compared", "advised", "advised-simulated",
)  # fmt: skip
SIMULATED = ("simulated", "compared", "advised-simulated")


def write_all(folder: Path) -> None:
    """All of them."""
    for write in WRITERS:
        write(folder)


def write_papers(folder: Path) -> None:
    """The pages behind the pictures of `docs/explanation`, by the commands that stand there."""
    step = folder / "bert.jsonl.gz"
    command("record", "bert-base", "--fake", "--batch", "32", "--length", "256", "-o", step)
    for method in ("delta", "window", "mimose", "dynn-offload"):
        run = folder / f"{method}.jsonl"
        command("simulate", step, "--budget", "0.6x", "--method", method, "--device", "v100-pcie", "-o", run)
        command("report", run)
    page = folder / "papaya.html"
    methods = ("--methods", "checkpoint,swap")
    command("advise", "bert-base", "--simulate", "v100-pcie", "--memory", "12.8GB", *methods, "-o", page)
