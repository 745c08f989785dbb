"""Timelines know what made each storage; they cost nothing where nobody asks, and change nothing."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spillway
from spillway.cli.common import write_page
from spillway.engines.tensors.origins import Origins
from spillway.ir import Kind, Origin, Timeline, read_run
from spillway.methods import LRU


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.slope = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        z = y * self.slope
        return torch.relu(z)


LINES, FIRST = inspect.getsourcelines(Layer.forward)
WHERE = {text.strip(): f"test_origins.py:{FIRST + at}" for at, text in enumerate(LINES)}


def timeline_of(model: nn.Module, *, budget: str | None = None, run: Any = None) -> Timeline:
    """Of the third step."""
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters())
    report = spillway.ReportOptions(timeline=True, run_file=run)
    with spillway.manage(model, optimizer, budget=budget, method="lru", report=report) as memory:
        for _ in range(3):
            batch = torch.randn(32, 64)
            with memory.step(batch):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert memory.timeline is not None
    return memory.timeline


def made(timeline: Timeline, kind: Kind, op: str = "") -> list[Origin]:
    kinds = {line.storage: line.kind for line in timeline.storages}
    return [one for one in timeline.origins if kinds[one.storage] is kind and op in one.op]


def test_an_activation_stands_with_its_op_module_and_line() -> None:
    timeline = timeline_of(nn.Sequential(Layer(), Layer()))
    (first, second) = made(timeline, Kind.ACTIVATION, "addmm")
    assert (first.module, second.module) == ("0.inner", "1.inner")
    assert first.line.endswith(WHERE["y = self.inner(x)"])
    assert [
        (one.module, one.line.endswith(WHERE["z = y * self.slope"])) for one in made(timeline, Kind.ACTIVATION, "mul")
    ][:2] == [("0", True), ("1", True)]


def test_what_the_backward_makes_stands_with_the_forward_that_it_belongs_to() -> None:
    timeline = timeline_of(nn.Sequential(Layer(), Layer()))
    back = made(timeline, Kind.TEMPORARY, "threshold_backward")
    assert [one.module for one in back] == ["1", "0"]
    assert all(one.line.endswith(WHERE["return torch.relu(z)"]) for one in back)


def test_parameters_gradients_and_optimizer_state_have_the_names_of_the_model() -> None:
    timeline = timeline_of(nn.Sequential(Layer(), Layer()))
    names = {"0.slope", "0.inner.weight", "0.inner.bias", "1.slope", "1.inner.weight", "1.inner.bias"}
    for kind in (Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER_STATE):
        assert {one.name for one in made(timeline, kind)} == names


def test_a_forward_within_the_backward_stands_with_its_own_lines() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x, use_reentrant=False)

    timeline = timeline_of(Checkpointed())
    again = [one for one in timeline.origins if one.op.endswith("addmm") or "addmm" in one.op]
    assert [one.module for one in again] == ["layer.inner"] * 2
    assert all(one.line.endswith(WHERE["y = self.inner(x)"]) for one in again)


def test_the_optimizer_stands_with_the_line_that_stepped_it_and_outside_of_any_module() -> None:
    roots = [one for one in timeline_of(Layer()).origins if "sqrt" in one.op]
    assert roots
    assert {one.module for one in roots} == {""}
    assert all("test_origins.py:" in one.line for one in roots)


def test_the_bits_and_the_peak_are_those_of_a_run_without_a_timeline() -> None:
    found = []
    for timeline in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer() for _ in range(6)))
        optimizer = torch.optim.Adam(model.parameters())
        report = spillway.ReportOptions(timeline=timeline)
        # Nothing that it decides depends on the clock.
        method = LRU(short_chain=16, worth=float("inf"))
        with spillway.manage(model, optimizer, budget="420KiB", method=method, report=report) as memory:
            for _ in range(3):
                batch = torch.randn(128, 64)
                with memory.step(batch):
                    loss = model(batch).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    memory.log(loss=loss)
        found.append(([(one.peak_bytes, one.ops, one.drops, one.logged) for one in memory.history], model.state_dict()))
    (one, state), (other, other_state) = found
    assert one == other
    assert any(drops for _, _, drops, _ in one)
    assert all(torch.equal(state[name], other_state[name]) for name in state)


def test_the_plain_peak_of_a_step_under_a_budget_is_the_peak_of_one_without() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Layer() for _ in range(6)))

    free = timeline_of(model())
    pressed = timeline_of(model(), budget="360KiB")
    assert pressed.peak() < free.peak()
    assert pressed.plain_peak() == free.plain_peak() == free.peak()


def test_a_run_file_holds_what_is_known(tmp_path: Any) -> None:
    timeline = timeline_of(Layer(), run=tmp_path / "run.jsonl")
    (read,) = read_run(tmp_path / "run.jsonl").timelines
    assert read.origins == timeline.origins


def test_nobody_looks_at_the_stack_where_no_timeline_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(Origins, "op", lambda self, name: looks.append(name))
    monkeypatch.setattr(Origins, "created", lambda self, storage: looks.append(storage))
    for timeline, looked in ((False, False), (True, True)):
        model = Layer()
        report = spillway.ReportOptions(timeline=timeline)
        with spillway.manage(model, budget=None, method="lru", report=report) as memory, memory.step():
            model(torch.randn(32, 64)).sum().backward()
        assert bool(looks) is looked


@pytest.mark.long(but=1)
@pytest.mark.parametrize("method", ["mimose", "checkpoint", "auto"])
def test_a_page_of_the_block_engine_tells_what_each_block_held_at_the_highest_peak(method: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(6)))
    optimizer = torch.optim.Adam(model.parameters())
    report = spillway.ReportOptions(run_file=tmp_path / "run.jsonl")
    with spillway.manage(model, optimizer, budget="800KiB", method=method, report=report) as memory:
        for rows in (64, 128, 96, 160, 128, 64, 160):
            batch = torch.randn(rows, 64)
            with memory.step(batch):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        told = memory._held_by_blocks()
        memory.report(tmp_path / "page.html")
    assert told is not None
    # A step that does not fit block by block is watched op by op, and is another engine's.
    assert told.peak_bytes == max(step.peak_bytes for step in memory.history if not step.ops)
    assert [one.block for one in told.blocks] == [str(number) for number in range(6)]
    assert all(one.saved_bytes > 0 and one.kind == "Layer" for one in told.blocks)
    assert all(one.line.endswith(f"test_origins.py:{FIRST}") for one in told.blocks)
    assert all((one.held_bytes == 0) is ("recompute" in one.action) for one in told.blocks)
    assert told.start_bytes + sum(one.held_bytes for one in told.blocks) <= told.peak_bytes
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "What fills memory, by block" in page
    # What blocks held stands in the run file as well, and so on pages that are made of it.
    write_page(tmp_path / "other.html", tmp_path / "run.jsonl", {})
    table = re.compile(r"<h2>What fills memory, by block</h2>.*?</table>", re.DOTALL)
    assert table.findall(page) == table.findall((tmp_path / "other.html").read_text("utf-8")) != []
