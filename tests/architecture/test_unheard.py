"""What the engines switch, the user's function modes do not hear of: they could raise half-way."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from tests.architecture.source import package_sources

LOUD = ("no_grad", "enable_grad", "set_grad_enabled", "inference_mode")
BEFORE_ANY_STEP = ("spillway.engines.tensors.cuda_backend",)


def loud(sources: Mapping[str, str]) -> list[str]:
    """Where an engine or a session switches gradients otherwise than by `internals.private.grad_mode`."""
    found = []
    for module, text in sources.items():
        if module.startswith(("spillway.engines", "spillway.session")) and module not in BEFORE_ANY_STEP:
            named = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute))
            found += [f"{module}, line {node.lineno}: {node.attr}" for node in named if node.attr in LOUD]
    return found


def test_nothing_that_runs_in_a_step_switches_gradients_aloud() -> None:
    assert loud(package_sources()) == []


def test_what_does_is_found() -> None:
    assert loud({"spillway.session.needs": "with torch.no_grad():\n    pass"}) == [
        "spillway.session.needs, line 1: no_grad"
    ]
