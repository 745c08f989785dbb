"""First uses in a process that trains, and what else the process has only one of."""

from __future__ import annotations

import pytest

from tests.cpu.another_process import run_python
from tests.cpu.global_state import CASES


@pytest.mark.long
def test_no_first_use_draws_from_a_global_stream_or_changes_what_a_process_has_once() -> None:
    done = run_python("from tests.cpu.global_state import main; main()")
    assert done.stdout.splitlines() == [f"{name} ended" for name in CASES], done.stdout + done.stderr
