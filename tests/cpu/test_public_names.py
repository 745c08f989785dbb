from __future__ import annotations

import pytest

import spillway


@pytest.mark.parametrize("name", spillway.__all__)
def test_every_public_name_leads_to_something(name: str) -> None:
    assert getattr(spillway, name) is not None


def test_a_session_has_these_names() -> None:
    """As `tests/architecture/test_public_names.py`: another one is a decision, and stands in CHANGELOG.md."""
    names = {
        "allowed",
        "begin",
        "budget",
        "close",
        "end",
        "explanation",
        "foresight",
        "log",
        "micro_batch",
        "report",
        "scalars",
        "step",
    }
    assert {name for name in dir(spillway.Session) if not name.startswith("_")} == names
