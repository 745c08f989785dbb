"""Shared by all tests: patience, and data of others that stands beside the project and never in it."""

from __future__ import annotations

from pathlib import Path

import pytest

HANGS = 600
"""Seconds after which a test that waits for another thread or process gives up. Nothing is measured by it: only a test
that would hang for ever meets it, however busy the machine is."""
SHARED = Path(__file__).parents[1].parent / "shared"
"""`../shared`, seen from the root of the project; tests that need something of it are skipped where it is absent."""


def shared(path: str) -> Path:
    """A file below `../shared`; the test is skipped where there is none."""
    found = SHARED / path
    if not found.is_file():
        pytest.skip(f"there is no {found}")
    return found
