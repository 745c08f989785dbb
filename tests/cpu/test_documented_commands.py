"""The commands that stand in blocks of the documents run one after the other, on a small workload."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import spillway
from spillway.cli import main
from spillway.ir import read_step
from spillway.methods import Planned
from spillway.native import library
from tests.architecture.documents import blocks, documents
from tests.architecture.source import ROOT
from tests.shared import HANGS

DOCUMENTS = documents()
SMALLER = {
    "resnet50": "train.py:build", "bert-base": "train.py:build", "bert-small": "train.py:build", "1440": "4",
    "bert-large": "train.py:build", "200MB": "4MB", "STEP": "bert.jsonl.gz", "bert.jsonl.gz": "bert.jsonl.gz",
    "0.6x": "1x", "examples/sorting.py:build": f"{ROOT}/examples/sorting.py:build",
}  # fmt: skip
"""What is put in place of the words of a command, so that it takes no time."""
MORE = {
    "advise": {"--methods": "checkpoint", "--batches": "1,2,3,4"},
    "compare": {"--methods": "lru,delta", "--processes": "1"},
}
"""Options that are given where the command does not have them."""
PRINTED = ("bert-base on a100, simulated: seconds", "transformer_lm_gpt3_medium on v100 (GPT/v100")
"""How blocks begin that show what a command prints."""
TRAIN = """
import sys
import torch
from spillway.workloads import Workload, seed_everything

def build(*, seed=0, batch=4, length=256):
    seed_everything(seed)
    layers = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)) for _ in range(6))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def batches(steps):
        return ((torch.ones(length * batch, 64),) for _ in range(steps))
    def loss(model, batch):
        return model(batch[0]).square().mean()
    return Workload(name="small", model=model, optimizers=(optimizer,), batches=batches, loss=loss, size=batch)

if __name__ == "__main__":
    workload = build()
    for batch in workload.batches(int(sys.argv[2])):
        workload.loss(workload.model, batch).backward()
        workload.optimizers[0].step()
"""


def lines(text: str) -> list[list[str]]:
    """Words of the commands that stand in blocks."""
    told = [line for language in ("", "sh") for block in blocks(text, language) for line in block.splitlines()]
    return [line.split("#")[0].split() for line in told if line.startswith("spillway ")]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what commands of a page find there, such as a step that another page records."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "spillway").mkdir()
    (folder / "spillway" / "native").symlink_to(library.library_path(library.PARTS[0]).parent)
    (folder / "train.py").write_text(TRAIN, "utf-8")
    ends("record", f"{folder}/train.py:build", "--fake", "-o", f"{folder}/bert.jsonl.gz")
    rows = [
        f"a card,net,{method},{size},{0.2 + gamma * size},{1000 + alpha * size}"
        for method, alpha, gamma in (("exact", 200, 0.010), ("ckpt", 40, 0.013))
        for size in (2, 4, 8, 16)
    ]
    head = "hardware,network,algorithm,batch_size,batch_time_s,peak_mb"
    (folder / "measurements.csv").write_text("\n".join([head, *rows]), "utf-8")
    return folder


def ends(*words: str) -> Any:
    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in DOCUMENTS if lines(DOCUMENTS[name])])
def test_every_command_of_a_document_runs(
    name: str, recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(recorded)
    monkeypatch.setenv("XDG_CACHE_HOME", str(recorded))  # so that nothing was measured before
    for _, verb, *words in lines(DOCUMENTS[name]):
        given = [SMALLER.get(word, word) for word in words]
        more = {} if "--from" in given else MORE.get(verb, {})
        given += [word for option, value in more.items() if option not in given for word in (option, value)]
        if verb == "fit":
            command = [sys.executable, "-m", "spillway", verb, *given]
            fit = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
            assert (fit.returncode, fit.stderr.count("steps of a loop took at most")) == (0, 1), fit.stderr
            continue
        code = ends(verb, *given)
        said = capsys.readouterr()
        if "cuda" in given and "There is no device 'cuda' here" in said.err:
            continue
        assert code == 0, f"{verb} {given}: {said.err}"
        assert "identical" in said.out or "--plain-check" not in given
        written = [given[at + 1] for at, word in enumerate(given) if word in ("-o", "--output", "--run-file", "--png")]
        assert [path for path in written if not (recorded / path).stat().st_size] == []


def test_the_commands_about_recorded_steps_leave_what_their_page_says(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recorded)
    simulated = ("simulate", "bert.jsonl.gz", "--budget", "0.6x", "--method", "delta", "-o", "some.run.jsonl")
    planned = ("plan", "bert.jsonl.gz", "--budget", "0.6", "--method", "sqrt-n", "-o", "some.plan.jsonl")
    assert (ends(*simulated), ends(*planned)) == (0, 0)
    assert ends("report", "some.run.jsonl", "--perfetto", "trace.json") == 0
    assert "simulated" in Path("some.run.html").read_text("utf-8")
    assert json.loads(Path("trace.json").read_text("utf-8"))["traceEvents"]
    step = read_step("bert.jsonl.gz").step
    method = Planned(spillway.plan(step, budget=0.6, method="sqrt-n"), step)
    assert spillway.simulate(step, budget=0.6, method=method).status == "ok"


def test_every_block_is_python_commands_a_tree_or_what_a_command_prints() -> None:
    others = [
        block
        for text in DOCUMENTS.values()
        for language in ("", "sh")
        for block in blocks(text, language)
        if not block.startswith(("spillway ", "make ", "src/spillway/\n", "torchrun ", *PRINTED))
    ]
    assert others == []
    assert sum(text.count("\n```") + text.startswith("```") for text in DOCUMENTS.values()) == 2 * sum(
        len(blocks(text, language)) for text in DOCUMENTS.values() for language in ("", "sh", "python")
    )
