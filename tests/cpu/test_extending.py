"""The examples of the page on extending: each is short, runs as it stands there, and ends in plain PyTorch's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import spillway
from spillway import workloads
from spillway.methods import Planned
from tests.architecture.documents import blocks
from tests.architecture.source import ROOT
from tests.cpu.block_cases import WIDTH, Chain, Residual

EXAMPLES = blocks((ROOT / "docs" / "how-to-extend.md").read_text("utf-8"), "python")
NAMES = ("LargestFirst", "LargestAway", "KeepTheFirst")
SHORT = 40


def example(name: str) -> Any:
    """The class that the page shows under this name."""
    (text,) = [text for text in EXAMPLES if f"class {name}(" in text]
    there: dict[str, Any] = {"__name__": "example"}
    exec(compile(text, name, "exec"), there)
    return there[name]


def trained(budget: int | None, method: Any) -> tuple[list[bytes], list[spillway.StepReport]]:
    torch.manual_seed(0)
    model = Chain(*(Residual() for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with spillway.manage(model, optimizer, budget=budget, method=method) as memory:
        for _ in range(6):
            x = torch.randn(256, WIDTH)
            with memory.step(x):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [one.detach().numpy().tobytes() for one in model.parameters()], list(memory.history)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_fewer_than_forty_lines(name: str) -> None:
    (text,) = [text for text in EXAMPLES if f"class {name}(" in text]
    assert len([line for line in text.splitlines() if line]) < SHORT


@pytest.mark.parametrize(("name", "share"), [("LargestFirst", 0.6), ("KeepTheFirst", 0.8)])
def test_a_method_of_the_page_trains_to_the_same_bits_within_its_budget(name: str, share: float) -> None:
    plain, reports = trained(None, "keep-all")
    budget = int(share * max(report.peak_bytes for report in reports))
    found, under = trained(budget, example(name)())
    assert found == plain
    assert all(report.peak_bytes <= budget for report in under)
    assert sum(report.moves + report.drops + report.recomputed_blocks for report in under) > 0


def test_the_planner_of_the_page_makes_a_plan_that_runs() -> None:
    step = spillway.record(lambda: workloads.get("stdlib-lm"), fake=True).step
    plan = spillway.plan(step, budget=0.8, method=example("LargestAway")())
    assert plan.gaps
    drawn = spillway.simulate(step, budget=0.8, method=Planned(plan, step), device="a100")
    assert drawn.peak_bytes <= plan.allowed


def test_the_planner_of_the_page_trains_to_the_same_bits_by_its_own_plans() -> None:
    plain, reports = trained(None, "keep-all")
    budget = int(0.8 * max(report.peak_bytes for report in reports))
    found, under = trained(budget, example("LargestAway")())  # a warning, which is an error here, would say: no plan
    assert found == plain
    assert all(report.peak_bytes <= budget for report in under)
    assert all(report.moves > 0 for report in under[2:])
