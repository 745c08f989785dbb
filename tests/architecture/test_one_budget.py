"""Only `memory.Budget` changes what is allowed, reserved, claimed and resident: everybody else tells it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import pytest

from tests.architecture.source import package_sources

NUMBERS = {"named", "allowed", "reserved", "claimed", "resident", "peak", "created"}


def assigned(sources: Mapping[str, str]) -> list[str]:
    """Places that give one of a budget's numbers another value, outside of its own file."""
    found = []
    for module, text in sources.items():
        if module != "spillway.memory.budget":
            found += [f"{module}, line {node.lineno}" for node in _targets(ast.parse(text)) if _is_of_a_budget(node)]
    return found


def _targets(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def _is_of_a_budget(target: ast.Attribute) -> bool:
    owner = target.value
    name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
    return target.attr in NUMBERS and name.strip("_") == "budget"


def test_nobody_but_the_budget_changes_its_numbers() -> None:
    assert assigned(package_sources()) == []


@pytest.mark.parametrize(
    "text",
    [
        "controller.budget.resident += 1", "self._budget.allowed = 0", "budget.peak, rest = 1, 2",
        "for budget.claimed in (): pass",
    ],
)  # fmt: skip
def test_who_changes_one_is_found(text: str) -> None:
    assert assigned({"spillway.session.block_session": text}) == ["spillway.session.block_session, line 1"]
    assert assigned({"spillway.memory.budget": text}) == []


def test_whoever_reads_one_or_has_numbers_of_these_names_is_not_meant() -> None:
    assert assigned({"spillway.session.block_session": "self.peak = self._budget.peak\nallocator.reserved += 1"}) == []
