"""The user's warnings are shown as often under a session as without one."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

from spillway.engines.tensors.twins import nobody_warned
from spillway.internals import python_warnings
from spillway.internals.python_warnings import unshown, unwarned
from tests.shared import HANGS

ROOT = Path(__file__).parents[2]
METHODS = ("auto", "checkpoint", "mimose", "lru")
TRAINING = """
import sys, warnings
import torch
from torch import nn
import spillway

method, budget, shown = sys.argv[1:4]
warnings.simplefilter(shown)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.numbers = nn.Linear(128, 128), iter(range(10 ** 6))

    def forward(self, x):
        warnings.warn("in a block")
        rows, _ = torch.meshgrid(torch.arange(2), torch.arange(2))
        if shown == "always":
            with warnings.catch_warnings(record=True) as collected:
                warnings.simplefilter("always")
                warnings.warn("collected")
            assert len(collected) == 1
        return x + torch.tanh(self.one(x)) * rows.sum()

torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(6)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def step(x):
    warnings.warn("in a step")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

if method == "plain":
    for number in range(6):
        step(torch.randn(64 + number % 2, 128))
else:
    with spillway.manage(model, optimizer, budget=int(budget) or None, method=method) as session:
        for number in range(6):
            try:
                x = torch.randn(64 + number % 2, 128)
                with session.step(x):
                    step(x)
            except spillway.BudgetInfeasible:
                print("refused")
warnings.warn("at the end")
"""


def warned(method: str, budget: int, shown: str) -> tuple[Counter[str], int]:
    """How often what is said, and how many steps were refused."""
    ran = subprocess.run(
        [sys.executable, "-c", TRAINING, method, str(budget), shown],
        env={**os.environ}, cwd=ROOT, capture_output=True, text=True, timeout=HANGS,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    said = [line.partition("Warning: ")[2][:40] for line in ran.stderr.splitlines() if "Warning: " in line]
    return Counter(said), ran.stdout.count("refused")


@pytest.fixture(scope="module")
def plainly() -> dict[str, Counter[str]]:
    return {shown: warned("plain", 0, shown)[0] for shown in ("default", "always")}


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "budget", "shown", "refusals"),
    [
        *((method, 1_500_000, "default", 0) for method in METHODS), ("lru", 0, "default", 0),
        ("checkpoint", 1_500_000, "always", 0), ("auto", 60_000, "default", 6), ("lru", 60_000, "default", 6),
    ],
)  # fmt: skip
def test_warnings_of_a_training(
    method: str, budget: int, shown: str, refusals: int, plainly: dict[str, Counter[str]]
) -> None:
    said, refused = warned(method, budget, shown)
    assert refused == refusals
    assert said == plainly[shown] if not refusals else said <= plainly[shown]
    assert said["in a step"] == (6 if shown == "always" else 1)


def _place() -> None:
    warnings.warn("a place", stacklevel=1)


def _shown(within: object) -> int:
    with warnings.catch_warnings(record=True) as found:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        globals().pop("__warningregistry__", None)
        _place()
        with within:  # type: ignore[attr-defined]
            _place()
        _place()
    return len(found)


def test_what_is_used_here_forgets_nothing_and_pythons_own_does() -> None:
    assert _shown(unwarned()) == _shown(unshown(lambda: True)) == 1
    assert _shown(warnings.catch_warnings()) == 3


def test_what_was_not_shown_is_shown_afterwards() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        with unwarned(UserWarning, "a pl"):
            _place()
            with warnings.catch_warnings(record=True) as inner:
                warnings.simplefilter("always")
                _place()
        assert (len(found), len(inner)) == (0, 1)
        with unwarned(UserWarning, "another"):
            _place()
        assert len(found) == 1


def test_nothing_in_a_session_forgets_what_was_shown() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "src").rglob("*.py")
        if "catch_warnings(" in path.read_text() and "workloads" not in path.parts
    ]
    assert found == []


def test_whoever_leaves_first_nothing_stays() -> None:
    names = [*python_warnings._FORGETS, "_showwarnmsg"]
    before, always = [getattr(warnings, name) for name in names], torch.is_warn_always_enabled()
    around = [make() for make in (unwarned, nobody_warned, lambda: unshown(lambda: True)) for _ in range(2)]
    for one in around:
        one.__enter__()
    assert [getattr(warnings, name) for name in names] != before
    for one in around:
        one.__exit__(None, None, None)
    assert [getattr(warnings, name) for name in names] == before
    assert torch.is_warn_always_enabled() == always


def test_what_the_users_code_collects_inside_it_collects_as_plainly() -> None:
    def collected() -> int:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            warn()
        return len(found)

    def warn() -> None:
        warnings.warn("of this place", stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warn()
        assert collected() == 1
        with unwarned(DeprecationWarning):
            assert collected() == 1
        with unwarned():
            assert collected() == 1
