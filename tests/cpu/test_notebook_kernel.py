"""Ctrl-C in a cell that trains, in a real kernel: nothing stays in the model's way, and the next cell trains on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.shared import HANGS

WANTED = "notebooks need ipykernel and jupyter_client, which are no part of what the tests need"
pytest.importorskip("ipykernel", reason=WANTED, exc_type=ImportError)
jupyter_client: Any = pytest.importorskip("jupyter_client", reason=WANTED, exc_type=ImportError)

BEGIN = """
import torch, spillway
from spillway.integrations.automatic_steps import AutomaticSteps
torch.manual_seed(0)
layers = (torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 128)) for _ in range(8))
model = torch.nn.Sequential(*layers)
optimizer, batch = torch.optim.AdamW(model.parameters()), torch.randn(512, 128)
options = {"budget": BUDGET, "method": METHOD, "report": spillway.ReportOptions(live=True)}
def train():
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
def step(memory):
    with memory.step(batch):
        train()
def told(memory, before):
    history = memory.history
    print(len(history) - before, max(one.peak_bytes for one in history) <= memory.allowed,
          all(torch.isfinite(one).all() for one in model.parameters()), history[-1].step)
"""
CELLS = {
    "a session of the cell": (
        "with spillway.manage(model, optimizer, **options) as memory:\n    while True: step(memory)",
        "assert not any('forward' in vars(one) for one in model.modules())\n"
        "with spillway.manage(model, optimizer, **options) as memory:\n    for _ in range(3): step(memory)\n"
        "told(memory, 0)",
    ),
    "a session of the notebook": (
        "memory = spillway.manage(model, optimizer, **options)\nwhile True: step(memory)",
        "before = len(memory.history)\nfor _ in range(3): step(memory)\nmemory.close()\ntold(memory, before)",
    ),
    "steps that are found": (
        "steps = AutomaticSteps(model, optimizer, **options)\nwhile True: train()",
        "before = len(steps.session.history)\nfor _ in range(3): train()\nsteps.close()\ntold(steps.session, before)",
    ),
}


class Kernel:
    """A kernel of this Python, and what its cells say."""

    def __init__(self, folder: Path) -> None:
        self._manager = jupyter_client.manager.KernelManager(connection_file=str(folder / "kernel.json"))
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self._manager._kernel_spec = jupyter_client.kernelspec.KernelSpec(argv=command)
        self._manager.start_kernel(
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "IPYTHONDIR": str(folder), "TMPDIR": str(folder)}
        )
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=HANGS)

    def run(self, cell: str, interrupted_after: int | None = None) -> tuple[list[str], list[str], list[str]]:
        """Texts, pictures with the displays that they are for, and names of errors. Raises queue.Empty if it hangs."""
        texts, pictures, errors = list[str](), list[str](), list[str]()
        asked = self._client.execute(cell, allow_stdin=False)
        while True:
            message = self._client.get_iopub_msg(timeout=HANGS)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != asked:
                continue
            if kind == "stream":
                texts.append(content["text"])
            elif kind in ("display_data", "update_display_data"):
                assert "<svg" in content["data"]["text/html"] or not pictures
                pictures.append(f"{content['transient']['display_id']} {content['data']['text/plain']}")
                if len(pictures) == interrupted_after:
                    time.sleep(0.02)  # within a step that follows
                    self._manager.interrupt_kernel()
            elif kind == "error":
                errors.append(content["ename"])
            elif kind == "status" and content["execution_state"] == "idle":
                return texts, pictures, errors

    def end(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    started = Kernel(tmp_path_factory.mktemp("kernel"))
    yield started
    started.end()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", ["delta", "auto", "mimose"])
@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_that_is_interrupted_and_the_next(kernel: Kernel, kind: str, method: str) -> None:
    budget = {"delta": "24MiB", "auto": "28MiB", "mimose": "32MiB"}[method]
    first, second = CELLS[kind]
    assert kernel.run(BEGIN.replace("BUDGET", repr(budget)).replace("METHOD", repr(method))) == ([], [], [])
    _, pictures, errors = kernel.run(first, interrupted_after=3)
    assert errors == ["KeyboardInterrupt"]
    texts, more, errors = kernel.run(second)
    assert (texts, errors) == ([texts[0]], [])
    steps, *holds, last = "".join(texts).split()
    assert (steps, holds) == ("3", ["True", "True"])
    assert more[-1].split()[2] == last, "what stays is a picture of the last step"
    places = {picture.split()[0] for picture in pictures}
    assert len(places) == 1, "the cell has one display, which is drawn anew"
    assert ({picture.split()[0] for picture in more} == places) == (kind != "a session of the cell")
