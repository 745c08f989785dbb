"""What the documents show runs as it stands, and does what is said beside it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import spillway
from spillway.budgets import parse_bytes
from spillway.methods import AbstractPolicy
from spillway.workloads import get
from tests.architecture.documents import blocks, documents
from tests.architecture.source import ROOT
from tests.cpu.test_extending import example

DOCUMENTS = documents()


def run(document: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "example"}
    for text in blocks(DOCUMENTS[document], "python"):
        exec(compile(text, document, "exec"), names)
    return names


def test_the_example_of_the_readme_keeps_its_budget_and_writes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    memory = run("README.md")["memory"]
    assert len(capsys.readouterr().out.splitlines()) == len(memory.history) == 5
    assert all(step.peak_bytes <= memory.allowed == parse_bytes("48MiB") for step in memory.history)
    assert all(step.bytes_out + step.dropped_bytes > 0 for step in memory.history)
    assert "<svg" in (tmp_path / "run.html").read_text("utf-8")


@pytest.mark.long(but=4)
@pytest.mark.parametrize(
    "name", [name for name in DOCUMENTS if name != "README.md" and blocks(DOCUMENTS[name], "python")]
)
def test_every_python_block_of_a_document_runs_one_after_the_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    there: dict[str, Any] = {"__name__": "reader"}
    torch.manual_seed(0)
    for number, block in enumerate(blocks(DOCUMENTS[name], "python"), start=1):
        with warnings.catch_warnings():
            # Torch says of its own encoder that it will not take nested tensors.
            warnings.filterwarnings("ignore", message="enable_nested_tensor", category=UserWarning)
            exec(compile(block, f"{name}, block {number}", "exec"), there)


def test_the_example_of_the_readme_needs_as_much_without_a_budget_as_is_said_there() -> None:
    (example,) = blocks(DOCUMENTS["README.md"], "python")
    names: dict[str, Any] = {}
    for shown, instead in (('"48MiB"', "None"), ("range(5)", "range(2)"), ('memory.report("run.html")', "")):
        assert shown in example
        example = example.replace(shown, instead)
    exec(example, names)
    peak = max(step.peak_bytes for step in names["memory"].history)
    assert f"these steps need {peak / 2**20:.0f} MiB" in DOCUMENTS["README.md"]


def test_the_example_workload_gives_the_same_batches_every_time_in_changing_lengths() -> None:
    workload = get(f"{ROOT / 'examples' / 'sorting.py'}:build", seed=3)
    first, second = (list(workload.batches(4)) for _ in range(2))
    assert all(torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))
    assert len({batch[0].shape for batch in first}) > 1


def test_the_page_on_choosing_shows_a_budget_that_changes_and_a_session_that_can_be_made() -> None:
    names = run("docs/how-to-choose.md")
    assert [report.allowed for report in names["memory"].history] == [64 << 20] * 2 + [32 << 20] * 2
    with pytest.raises(spillway.SpillwayError, match="closed"):
        names["session"].step().__enter__()


def test_the_policy_on_the_page_on_extending_keeps_a_budget_and_the_bits() -> None:
    policy = example("LargestFirst")
    plain, managed = _losses("keep-all", None), _losses(policy(), "32MiB")
    assert issubclass(policy, AbstractPolicy)
    assert managed[0] == plain[0]
    assert managed[1].peak_bytes <= parse_bytes("32MiB") < plain[1].peak_bytes
    assert managed[1].moves > 0


def _losses(method: str | AbstractPolicy, budget: str | None) -> tuple[list[str], spillway.StepReport]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    with spillway.manage(
        model, optimizer, budget=budget, method=method, report=spillway.ReportOptions(timeline=True)
    ) as memory:
        for _ in range(2):
            batch = torch.randn(2048, 512)
            with memory.step(batch):
                loss = (model(batch) - batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item().hex())
    return losses, memory.history[-1]


@pytest.mark.long
def test_the_example_of_the_readme_trains_in_blocks_and_so_does_a_transformer(monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = blocks(DOCUMENTS["README.md"], "python")
    example = example.replace('budget="48MiB"', 'budget="48MiB", method="mimose"')
    with pytest.raises(spillway.BudgetInfeasible):  # parameters and their state take as much, and do not leave
        exec(example, {})
    flat: dict[str, Any] = {}
    exec(example.replace('"48MiB"', '"84MiB"').replace('memory.report("run.html")', ""), flat)
    assert all(step.recomputed_blocks > 0 == step.ops for step in flat["memory"].history)
    layers = "model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(512, 8, 512, batch_first=True), 4)"
    for shown, instead in (
        (example.splitlines()[3], layers),
        ("range(5)", "range(2)"),
        ("torch.randn(1024, 512)", "torch.randn(8, 32, 512)"),
        ('"48MiB"', '"160MiB"'),
        ('memory.report("run.html")', ""),
    ):  # fmt: skip
        assert shown in example
        example = example.replace(shown, instead)
    names: dict[str, Any] = {}
    exec(example, names)
    assert all(step.recomputed_blocks > 0 == step.ops for step in names["memory"].history)
