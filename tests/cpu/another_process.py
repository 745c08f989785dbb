"""Python in a process of its own, for what would end or change this one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.shared import HANGS


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run indented code with warnings as errors, from the root of the project."""
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "error", "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
