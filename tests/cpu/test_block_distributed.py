"""DDP and FSDP2 on two processes under the block engine: to the bit what they do without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

from tests.cpu.block_processes import CASES
from tests.shared import HANGS

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="this torch has no gloo"
)


@pytest.mark.long
def test_two_processes_train_as_they_do_without_the_engine(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.cpu.block_processes"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=HANGS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    expected = [f"{name}: {action.value}" for name, case in CASES.items() for action in case.actions]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
        assert [line for line in output.splitlines() if line in expected] == expected
