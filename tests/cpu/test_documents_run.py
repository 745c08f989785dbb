"""Every Python block of every document runs, those of one document one after the other as a reader types them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.architecture.documents import blocks, documents

EXAMPLES = {name: found for name, text in documents().items() if (found := blocks(text, "python"))}


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_a_document_shows_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    there: dict[str, Any] = {"__name__": "reader"}
    torch.manual_seed(0)
    for number, block in enumerate(EXAMPLES[name], start=1):
        with warnings.catch_warnings():
            # Torch says of its own encoder that it will not take nested tensors; that is the reader's to see.
            warnings.filterwarnings("ignore", message="enable_nested_tensor", category=UserWarning)
            exec(compile(block, f"{name}, block {number}", "exec"), there)


def test_there_is_something_to_run() -> None:
    assert {"README.md", "docs/index.md", "docs/tutorials/first-run.md"} <= EXAMPLES.keys()
