from __future__ import annotations

import pytest

import spillway


@pytest.mark.parametrize("name", spillway.__all__)
def test_every_public_name_leads_to_something(name: str) -> None:
    assert getattr(spillway, name) is not None
