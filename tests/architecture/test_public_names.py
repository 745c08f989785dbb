from __future__ import annotations

import re

import pytest

import spillway

# A name is added here, to `spillway.__all__` and to CHANGELOG.md in one commit. Taking one away breaks its users.
PUBLIC_NAMES = {
    "BlockOptions",
    "BudgetInfeasible",
    "ReportOptions",
    "SpillOptions",
    "Session",
    "SpillwayError",
    "StepReport",
    "__version__",
    "manage",
    "plan",
    "record",
    "simulate",
}


def test_the_public_names_are_these() -> None:
    assert sorted(spillway.__all__) == sorted(PUBLIC_NAMES)


def test_the_version_is_a_release_number() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", spillway.__version__)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        spillway.no_such_name  # noqa: B018
