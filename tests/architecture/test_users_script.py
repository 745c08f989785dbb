"""Who checks types strictly can: what is public is annotated, and a mistake in using it is found.

mypy keeps what it knows of torch beside the project, where `make check` puts it too; without that it takes a minute.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import spillway
from spillway.ir import StepReport
from tests.architecture.source import ROOT

SCRIPT = ROOT / "tests" / "architecture" / "users_script.py"
MISTAKES = """
import spillway
import torch
from spillway.integrations.automatic_steps import AutomaticSteps
from spillway.integrations.transformers import SpillwayCallback
model = torch.nn.Linear(1, 1)
spillway.mange(model, budget="6GiB")
spillway.manage(model)
spillway.manage(model, budget=0.5)
spillway.manage(model, budget=None, method=7)
spillway.manage(model, budget=None, report=spillway.SpillOptions())
spillway.ReportOptions(live="yes")
spillway.SpillOptions(io="fast")
SpillwayCallback(budget=[])
AutomaticSteps(model, None, budget="6GiB", live=True)
memory = spillway.manage(model, budget=None)
memory.budget = 1.5
memory.histroy
memory.history[0].peak = 7
"""


def test_a_users_script_passes_mypy_strict_and_mistakes_in_it_do_not(tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    (tmp_path / "mistakes.py").write_text(MISTAKES, "utf-8")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", SCRIPT, tmp_path / "mistakes.py"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = re.findall(r"^(.*?):(\d+): error: ", checked.stdout, re.MULTILINE)
    assert {Path(file).name for file, _ in found} == {"mistakes.py"}, checked.stdout + checked.stderr
    assert {int(line) for _, line in found} == set(range(7, 16)) | {17, 18, 19}, checked.stdout


def test_the_script_uses_all_that_is_public() -> None:
    text = SCRIPT.read_text("utf-8")
    documented = (ROOT / "docs" / "reference" / "api.md").read_text("utf-8")
    members = [name for listed in re.findall(r"members: \[(.*)\]", documented) for name in listed.split(", ")]
    paths = re.findall(r"^::: (spillway\.\S+)", documented, re.MULTILINE)
    names = {*spillway.__all__, *members, *(path.rpartition(".")[2] for path in paths)}
    assert {name for name in names if not re.search(rf"\b{name}\b", text)} == set()
    assert {"peak_bytes", "seconds", "logged"} <= {field.name for field in fields(StepReport)}
