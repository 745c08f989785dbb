"""Data of others that stands beside the project and never in it; tests that need it are skipped where it is absent."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[1].parent / "shared"
"""`../shared`, seen from the root of the project."""


def shared(path: str) -> Path:
    """A file below `../shared`; the test is skipped where there is none."""
    found = SHARED / path
    if not found.is_file():
        pytest.skip(f"there is no {found}")
    return found
