"""The examples of integrations: two lines of each are Spillway's, and without them the same script tells the same."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import spillway
from spillway.budgets import parse_bytes
from spillway.integrations import automatic_steps, lightning, transformers
from tests.architecture.source import ROOT
from tests.cpu.test_integrations_accelerate import accelerator_of
from tests.cpu.test_integrations_lightning import pytestmark as of_lightning
from tests.cpu.test_integrations_transformers import pytestmark as of_transformers

pytestmark = [
    *of_lightning,
    *of_transformers,
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]
EXAMPLES = {
    "transformers_trainer": ["--steps", "5"],
    "trl_sft": ["--steps", "10"],
    "accelerate_loop": ["--samples", "40"],
    "lightning_module": ["--samples", "40"],
}
"""With what makes them short. The one of DDP is run by `test_integrations_distributed.py`."""


def without(script: str) -> str:
    """The same script without the two lines; where Accelerate's own method stands for ours, with that."""
    first = re.findall(r"^from spillway.*  # the first line\n", script, re.MULTILINE)
    second = re.findall(r"^.*  # the second line\n", script, re.MULTILINE)
    assert (len(first), len(second)) == (1, 1)
    script = script.replace(first[0], "")
    if "= prepare(" in second[0]:
        call, arguments = r" = prepare\(  # the second line\n\s+accelerator, ", r"([\w, ]+), budget=[^)]*\)"
        script, count = re.subn(call + arguments, r" = accelerator.prepare(\1)", script)
        assert count == 1
    else:
        assert re.fullmatch(r"\s+callbacks=\[SpillwayCallback\([^()]*\)\],  # the second line\n", second[0])
        script = script.replace(second[0], "")
    assert "spillway.integrations" not in script
    return script


@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_tells_what_it_tells_without_its_two_lines_and_keeps_its_budget(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions: list[spillway.Session] = []

    def manage(*args: Any, **options: Any) -> spillway.Session:
        sessions.append(spillway.manage(*args, **options))
        return sessions[-1]

    for module in (automatic_steps, lightning, transformers):
        monkeypatch.setattr(module, "manage", manage)
    script = (ROOT / "examples" / f"{name}.py").read_text("utf-8")
    told = []
    for text in (without(script), script):
        accelerator_of()
        (tmp_path / f"{name}.py").write_text(text, "utf-8")
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *EXAMPLES[name]])
        runpy.run_path(str(tmp_path / f"{name}.py"), run_name="__main__")
        said = capsys.readouterr().out
        told.append(re.findall(r"(?:loss'?:? '?|grad_norm': '?|^|(?<= ))(\d+\.\d{3,})", said, re.MULTILINE))
    plain, managed = told
    assert len(plain) >= 2
    assert managed == plain
    (session,) = sessions
    (budget,) = re.findall(r'"--budget", default="(\w+)"', script)
    assert session.allowed == parse_bytes(budget)
    assert 0 < max(step.peak_bytes for step in session.history) <= session.allowed
    assert len({step.signature for step in session.history}) > 1, "batches of several lengths"
    assert sum(step.moves + step.drops + step.recomputed_blocks for step in session.history) > 0
